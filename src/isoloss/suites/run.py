"""Measuring a suite: a unit of work for each checkpoint, which writes each number's file as soon as it is known.

suite.json                     the suite, its checkpoints and the content of its texts
checkpoints/NAME/*.json        a cell each: an `Evaluation`, or the problem that left it empty
checkpoints/NAME/*.safetensors what each example adds to it, for the errors of differences
checkpoints/NAME/problem.json  why the checkpoint could not be loaded; it is tried again
outcomes.json                  outcomes that were measured elsewhere
units/                         leases and logs, as of a study
suite.parquet, index.html      the table and the page, made of the other files
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError, warn
from isoloss.lab.evaluation.measures.base import make_measure, settings_of
from isoloss.runs import Evaluation
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.tables import label
from isoloss.studies.plan import Expected, Resources, Unit
from isoloss.studies.run.local import visible_gpus
from isoloss.suites.config import Member, SuiteConfig, is_measure
from isoloss.suites.table import RECORD, SuiteTable, empty, number

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext, ModelInfo
    from isoloss.suites.outcomes import Outcome

WAITING = "not measured yet"


@dataclass(frozen=True)
class SuiteFolder:
    """The folder of a suite.

    Attributes:
        path: The folder.
        config: The suite.
        members: Its checkpoints.
        sources: What identifies the content of each text, by name.
        directory: The folder that relative paths of the suite start from.
    """

    path: Path
    config: SuiteConfig
    members: tuple[Member, ...]
    sources: Mapping[str, str]
    directory: str

    @classmethod
    def open(cls, path: Path) -> SuiteFolder:
        """Return the suite in a folder."""
        record = files.read_json(path / RECORD)
        found = tuple(Member(each["name"], each["labels"]) for each in record["checkpoints"])
        config = configs.from_dict(SuiteConfig, record["config"])
        return cls(path.absolute(), config, found, record["sources"], record["directory"])

    def write(self) -> None:
        """Write what the suite is, for the processes that measure it."""
        checkpoints = [{"name": member.name, "labels": dict(member.labels)} for member in self.members]
        record = {"config": configs.to_dict(self.config), "directory": self.directory, "checkpoints": checkpoints}
        files.write_json(self.path / RECORD, {**record, "sources": dict(self.sources)})

    @functools.cached_property
    def cells(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The text and the measure of each cell of a checkpoint, and what a file must say to be of this cell."""
        settings = {name: settings_of(name, self.config.settings) for name in self.config.measured}
        return [
            (text, name, {"text": text, "measure": name, "settings": settings[name], "source": source})
            for text, source in self.sources.items()
            for name in settings
        ]

    def cell(self, member: Member, text: str, measure: str) -> Path:
        """Return the file of a cell."""
        name = f"{measure}@{text}"
        plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:80]
        file = f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"
        return self.path / "checkpoints" / member.folder / file

    def known(self, member: Member) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the cells of a checkpoint that are done, by text and measure."""
        found, weights = {}, _weights(member.name)
        for text, measure, wanted in self.cells:
            path = self.cell(member, text, measure)
            if not path.exists():
                continue
            try:
                document = files.read_sealed(path, "it is made again")
            except IsolossError as error:
                warn(str(error))
                continue
            is_whole = document.get("evaluation") is None or path.with_suffix(".safetensors").exists()
            is_of_weights = weights is None or document.get("files") == weights
            is_of_cell = all(document.get(key) == value for key, value in wanted.items())
            if is_whole and is_of_weights and is_of_cell and self._is_alike(document, member):
                found[text, measure] = document
        return found

    def _is_alike(self, document: Mapping[str, Any], member: Member) -> bool:
        """Whether a cell is on the inputs of the first checkpoint; when it was made, another one may have been."""
        first = self.members[0]
        if document.get("first") == first.name or member == first or document.get("evaluation") is None:
            return document.get("first") == first.name
        of_first = self.known(first).get((document["text"], document["measure"]))
        inputs = document["evaluation"]["inputs"]
        return of_first is None or of_first["evaluation"] is None or of_first["evaluation"]["inputs"] == inputs

    def units(self, sizes: Mapping[str, int | None] | None = None) -> list[Unit]:
        """Return a unit of work for each checkpoint; `sizes`: their numbers of parameters, where these are known."""
        device = self.config.device
        needs = Resources(gpus=1 if device.startswith("cuda") or (device == "auto" and visible_gpus()) else 0)
        return [self._unit(member, needs, (sizes or {}).get(member.name)) for member in self.members]

    def _unit(self, member: Member, needs: Resources, size: int | None) -> Unit:
        expected = self._expected(size, on_gpu=needs.gpus > 0)
        return Unit(
            name=member.folder,
            arguments=("suite", str(self.path), "--member", member.folder),
            done=lambda: len(self.known(member)) == len(self.cells),
            seconds=expected.seconds,
            expected=expected,
            needs=needs,
            group="size unknown" if size is None else f"{size:,} parameters",
        )

    def _expected(self, size: int | None, *, on_gpu: bool) -> Expected:
        """Return what a checkpoint of so many parameters takes, by a guess from one model of 135 million."""
        tokens = self.config.settings.get("num_sequences", 512) * (self.config.inputs.length or 128)
        operations = 6 * (size or 0) * tokens * len(self.cells)
        memory = None if size is None else 2**29 + 24 * size
        return Expected(seconds=2 + operations / (4e13 if on_gpu else 4e10), memory=memory)

    def rows(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """Yield the rows of the table: the estimates of each cell, or the reason why it is empty."""
        for member in self.members:
            known = self.known(member)
            failed = self.cell(member, "", "").with_name("problem.json")
            reason = files.read_json(failed)["problem"] if failed.exists() else WAITING
            for text, measure, _ in self.cells:
                cell = known.get((text, measure), {"problem": reason})
                if cell.get("evaluation") is None:
                    yield member, empty(text, measure, cell["problem"], cell.get("weights"))
                    continue
                evaluation = Evaluation.from_dict(cell["evaluation"])
                for name, estimate in evaluation.estimates.items():
                    # the parts of a language's loss, ranks, and the metrics of a task have names of their own
                    has_own = measure in ("loss", "features") or measure.startswith("lm-eval-")
                    title = name if has_own else label(measure, name, tuple(evaluation.estimates))
                    yield member, number(text, title, estimate, evaluation.weights)
        imported = self.imported()
        missing = dict.fromkeys((name for _, name in imported), "this outcome was not imported for the checkpoint")
        for name in self.config.outcomes:
            if not is_measure(name):
                missing.setdefault(name, "no outcome with this name was imported")
        for name, problem in missing.items():
            for member in self.members:
                found = imported.get((member.name, name))
                yield member, empty("", name, problem) if found is None else number("", name, found)

    def imported(self) -> dict[tuple[str, str], Estimate]:
        """Return the outcomes that were measured elsewhere, by checkpoint and name."""
        path = self.path / "outcomes.json"
        documents = files.read_json(path) if path.exists() else []
        return {(each["checkpoint"], each["name"]): Estimate.from_dict(each["estimate"]) for each in documents}

    def refuse_measured(self, outcomes: Sequence[Outcome]) -> None:
        """Refuse outcomes that have the name of what the suite measures: they would take its place."""
        measured = {row["measure"] for _, row in self.rows() if row["text"] or row.get("sha256")}
        if each := next((each for each in outcomes if each.name in measured.union(self.config.measured)), None):
            raise IsolossError(
                f"the column {each.name!r} of what is imported has the name of what the suite measures: give it "
                "another name, or leave it out"
            )

    def keep(self, outcomes: Sequence[Outcome]) -> None:
        """Keep outcomes; an earlier one of the same name is replaced."""
        known = self.imported() | {(each.checkpoint, each.name): each.estimate for each in outcomes}
        documents = [
            {"checkpoint": checkpoint, "name": name, "estimate": estimate.to_dict()}
            for (checkpoint, name), estimate in known.items()
        ]
        files.write_json(self.path / "outcomes.json", documents)

    def table(self) -> SuiteTable:
        """Return the table of what is known now."""
        return SuiteTable.of(self.config, self.members, self.rows())

    def measure(self, member: Member) -> None:
        """Measure what is not known yet of a checkpoint, which is loaded once.

        What cannot be measured leaves a file with the reason.

        Raises:
            IsolossError: The checkpoint cannot be loaded.
        """
        from isoloss.lab.evaluation.compare import shared_context

        known = self.known(member)
        todo = [cell for cell in self.cells if cell[:2] not in known]
        if not todo:
            return
        failed = self.cell(member, "", "").with_name("problem.json")
        try:
            model, infos = self._loaded(member)
        except IsolossError as error:
            files.write_json(failed, {"problem": str(error)})
            raise
        failed.unlink(missing_ok=True)
        about = {
            "checkpoint": member.name,
            "first": self.members[0].name,
            "files": _weights(member.name),
            "weights": files.tensors_sha256(sorted(model.state_dict().items())),
        }
        for text in dict.fromkeys(text for text, *_ in todo):
            # what the measures of a text share is kept only while they are taken
            context: MeasureContext | IsolossError
            try:
                place, named = self.config.texts.get(text), {info.name: info.name for info in infos}
                context = shared_context(named, infos, place, None, self.config.inputs, shuffled=False)
            except IsolossError as error:
                context = error
            for _, name, wanted in (cell for cell in todo if cell[0] == text):
                self._write_cell(self.cell(member, text, name), {**about, **wanted}, model, context)

    def _loaded(self, member: Member) -> tuple[Any, list[ModelInfo]]:
        """Return a model, and what is known of the one that texts are read for, the suite's first, and of itself."""
        from isoloss.checkpoints.loading import header_of, load_model
        from isoloss.lab.evaluation.context import ModelInfo

        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        own = header_of(member.name, **options)
        first: ModelInfo | str | None = None
        for other in self.members[: self.members.index(member)]:
            # one that cannot be loaded is told of by its own unit
            with contextlib.suppress(IsolossError):
                is_alike = own is not None and header_of(other.name, **options) == own
                options_of_other = {**options, "device": "cpu"}
                first = other.name if is_alike else ModelInfo.of(load_model(other.name, **options_of_other))
                break
        loaded = load_model(member.name, device=self.config.device, **options)
        info = ModelInfo.of(loaded)
        if isinstance(first, str):
            first = info.named(str(Path(first).expanduser()))
        return loaded.model, [first, info] if first is not None else [info]

    def _write_cell(
        self, path: Path, about: dict[str, Any], model: Any, context: MeasureContext | IsolossError
    ) -> None:
        from isoloss.lab.evaluation.evaluator import measured

        name, settings = about["measure"], self.config.settings
        try:
            if isinstance(context, IsolossError):
                raise context
            if reason := make_measure(name, settings).why_not_applicable(context):
                raise IsolossError(reason)
            evaluation, examples = measured(name, settings, model, context, step=None, weights=about["weights"])
        except (OSError, MemoryError):
            raise  # another try may find room
        except Exception as error:  # whatever a measure, perhaps of another package, does on a model
            if type(error).__name__ == "OutOfMemoryError":
                raise
            problem = str(error) if isinstance(error, IsolossError) else f"{type(error).__name__}: {error}"
            files.write_sealed(path, {**about, "problem": problem, "evaluation": None})
            return
        files.write_bytes(path.with_suffix(".safetensors"), examples)
        files.write_sealed(path, {**about, "problem": None, "evaluation": evaluation.to_dict()})


def _weights(name: str) -> list[list[Any]] | None:
    """Return the names, sizes and times of the weight files in a folder, by which others in their place are noticed."""
    folder = Path(name).expanduser()
    stats = {file.name: file.stat() for file in sorted(folder.glob("*.safetensors"))} if folder.is_dir() else {}
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()] or None
