"""The folder of a suite, and the measurement of one checkpoint, which writes each number as soon as it is known.

suite.json                     the settings, the checkpoints and the fingerprints of the texts
checkpoints/NAME/*.json        one cell each: an `Evaluation`, or the reason why it is empty
checkpoints/NAME/*.safetensors the contribution of each example to the cell, for the errors of differences
checkpoints/NAME/problem.json  why the checkpoint could not be loaded; the next run tries again
outcomes.json                  imported outcomes
units/                         leases and logs, as in a study
suite.parquet, index.html      the table and the page, which are made from the other files
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError, did_you_mean, most_like, warn
from isoloss.lab.evaluation.measures.base import make_measure, settings_of
from isoloss.registry import MEASURES
from isoloss.runs import Evaluation
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.tables import label
from isoloss.studies.plan import Expected, Resources, Unit
from isoloss.studies.run.local import visible_gpus
from isoloss.suites.config import Member, SuiteConfig, file_name, is_measure, label_names
from isoloss.suites.table import RECORD, SuiteTable, clusters, column_name, empty, number, parts_of

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext, ModelInfo
    from isoloss.suites.outcomes import Outcome

WAITING = "not measured yet"
# measures with several numbers, which are columns under their own names
_PARTS = {"loss": ("loss", "kl", "entropy"), "features": ("effective-rank", "effective-dimension", "cka-truth")}
_TASKS = "lm-eval-"  # the metrics of a task are such columns, too


@dataclass(frozen=True)
class SuiteFolder:
    """The folder of a suite."""

    path: Path
    config: SuiteConfig
    members: tuple[Member, ...]
    sources: Mapping[str, str]  # a fingerprint of each text, by name
    directory: str  # the start of relative paths

    @classmethod
    def open(cls, path: Path) -> SuiteFolder:
        """Return the suite in a folder."""
        record = files.read_json(path / RECORD)
        found = tuple(Member(each["name"], each["labels"]) for each in record["checkpoints"])
        config = configs.from_dict(SuiteConfig, record["config"])
        return cls(path.absolute(), config, found, record["sources"], record["directory"])

    def write(self) -> None:
        """Write the settings and checkpoints, for the processes that measure them."""
        checkpoints = [{"name": member.name, "labels": dict(member.labels)} for member in self.members]
        record = {"config": configs.to_dict(self.config), "directory": self.directory, "checkpoints": checkpoints}
        files.write_json(self.path / RECORD, {**record, "sources": dict(self.sources)})

    @functools.cached_property
    def cells(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The text and the measure of each cell of a checkpoint, with the entries that identify its file."""
        settings = {name: settings_of(name, self.config.settings) for name in self.config.measured}
        return [
            (text, name, {"text": text, "measure": name, "settings": settings[name], "source": source})
            for text, source in self.sources.items()
            for name in settings
        ]

    def num_clusters(self) -> int:
        """Return how many independent units the checkpoints are of, if none of them are copies."""
        labels = label_names(member.labels for member in self.members)
        rows = ({"checkpoint": each.name, **dict.fromkeys(labels), **each.labels} for each in self.members)
        return len({*clusters(self.config, labels, rows)})

    def cell(self, member: Member, text: str, measure: str) -> Path:
        """Return the file of a cell."""
        return self.path / "checkpoints" / member.folder / f"{file_name(f'{measure}@{text}')}.json"

    def problem(self, member: Member) -> Path:
        """Return the file that says why a checkpoint could not be loaded."""
        return self.path / "checkpoints" / member.folder / "problem.json"

    def known(self, member: Member) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the documents of the cells that are done, by text and measure."""
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
        """Whether a cell has the inputs of the suite's first checkpoint, which may have changed since."""
        first = self.members[0]
        if document["first"] == first.name or member == first or document["evaluation"] is None:
            return bool(document["first"] == first.name)
        of_first = self.known(first).get((document["text"], document["measure"]), {}).get("evaluation")
        return of_first is None or bool(of_first["inputs"] == document["evaluation"]["inputs"])

    def units(self, sizes: Mapping[str, int | None] | None = None) -> list[Unit]:
        """Return a unit of work for each checkpoint; `sizes`: their numbers of parameters, if known."""
        device = self.config.device
        needs = Resources(gpus=1 if device.startswith("cuda") or (device == "auto" and visible_gpus()) else 0)
        tokens = self.config.settings.get("num_sequences", 512) * (self.config.inputs.length or 128)

        def unit(member: Member) -> Unit:
            size = (sizes or {}).get(member.name)
            # a guess from one model of 135 million parameters
            seconds = 2 + 6 * (size or 0) * tokens * len(self.cells) / (4e13 if needs.gpus else 4e10)
            return Unit(
                name=member.folder,
                arguments=("suite", str(self.path), "--member", member.folder),
                done=lambda: len(self.known(member)) == len(self.cells),
                seconds=seconds,
                expected=Expected(seconds=seconds, memory=None if size is None else 2**29 + 24 * size),
                needs=needs,
                group="size unknown" if size is None else f"{size:,} parameters",
            )

        return [unit(member) for member in self.members]

    def rows(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """Yield the rows of the table: the estimates of each cell, or the reason why it is empty."""
        for member in self.members:
            known, failed = self.known(member), self.problem(member)
            reason = files.read_json(failed)["problem"] if failed.exists() else WAITING
            for text, measure, _ in self.cells:
                cell = known.get((text, measure), {"problem": reason})
                if cell.get("evaluation") is None:
                    yield member, empty(text, measure, cell["problem"], cell.get("weights"))
                    continue
                evaluation = Evaluation.from_dict(cell["evaluation"])
                for name, estimate in evaluation.estimates.items():
                    is_title = measure in _PARTS or measure.startswith(_TASKS)
                    title = name if is_title else label(measure, name, tuple(evaluation.estimates))
                    yield member, number(text, title, estimate, evaluation.weights)
        imported = self.imported()
        missing = dict.fromkeys((name for _, name in imported), "this outcome was not imported for the checkpoint")
        for name in itertools.filterfalse(is_measure, self.config.outcomes):
            missing.setdefault(name, "no outcome with this name was imported")
        for (name, problem), member in itertools.product(missing.items(), self.members):
            found = imported.get((member.name, name))
            yield member, empty("", name, problem) if found is None else number("", name, found)

    def imported(self) -> dict[tuple[str, str], Estimate]:
        """Return the imported outcomes, by checkpoint and name."""
        path = self.path / "outcomes.json"
        documents = files.read_json(path) if path.exists() else []
        return {(each["checkpoint"], each["name"]): Estimate.from_dict(each["estimate"]) for each in documents}

    def check_outcomes(self, imported: Sequence[Outcome], predict: Sequence[str]) -> None:
        """Refuse wrong names of imported columns and of outcomes, before hours of measuring."""
        config = self.config
        own = {row["measure"] for _, row in self.rows() if row["text"] or row.get("sha256")}
        own |= {*config.measured}.union(*(_PARTS.get(name, ()) for name in config.measured))
        if each := next((each for each in imported if each.name in own), None):
            raise IsolossError(
                f"the imported column {each.name!r} has the name of a measure of the suite: give it another name, or "
                "leave it out"
            )
        known = [*own, *(each.name for each in imported), *(name for _, name in self.imported())]
        known += [column_name(name, text) for name in own for text in config.texts if len(config.texts) > 1]
        known += [name.removeprefix(_TASKS) for name in config.measured]
        # the parts of a measure and the metrics of a task are not known before it has run
        parts = tuple(f"{name}, " for name in config.measured)
        has_tasks = any(name.startswith(_TASKS) for name in config.measured)
        for name in dict.fromkeys((*predict, *config.outcomes)):
            is_open = name.startswith(parts) or (has_tasks and "." in name)
            if is_open or name in known or any(each.startswith(parts_of(name)) for each in known):
                continue
            told = f"{name!r} is neither a measure of the suite nor an imported outcome"
            if name in predict:
                guess = did_you_mean(name, known) or f"; choose from {', '.join(dict.fromkeys(known))}"
                raise IsolossError(f"{told}{guess}")
            # it may be imported later
            if meant := most_like(name, [*known, *MEASURES], least=0.8):
                raise IsolossError(f"{told}; did you mean {meant}?")
            warn(f"{told}: its cells stay empty until you import it")

    def keep(self, outcomes: Sequence[Outcome]) -> None:
        """Keep imported outcomes; earlier ones of the same name are replaced."""
        known = self.imported() | {(each.checkpoint, each.name): each.estimate for each in outcomes}
        documents = [
            {"checkpoint": checkpoint, "name": name, "estimate": estimate.to_dict()}
            for (checkpoint, name), estimate in known.items()
        ]
        files.write_json(self.path / "outcomes.json", documents)

    def table(self) -> SuiteTable:
        """Return the table of all numbers so far."""
        return SuiteTable.of(self.config, self.members, self.rows())

    def measure(self, member: Member) -> None:
        """Load a checkpoint once and measure its missing cells; a measure that fails leaves the reason in its cell.

        Raises:
            IsolossError: The checkpoint cannot be loaded.
        """
        from isoloss.lab.evaluation.compare import shared_context

        known = self.known(member)
        todo = [cell for cell in self.cells if cell[:2] not in known]
        if not todo:
            return
        try:
            model, infos = self._loaded(member)
        except IsolossError as error:
            files.write_json(self.problem(member), {"problem": str(error)})
            raise
        self.problem(member).unlink(missing_ok=True)
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
        """Return a model, with the infos of the first checkpoint, which decides how texts are read, and of its own."""
        from isoloss.checkpoints.loading import header_of, load_model
        from isoloss.lab.evaluation.context import ModelInfo

        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        own = header_of(member.name, **options)
        loaded = load_model(member.name, device=self.config.device, **options)
        info = ModelInfo.of(loaded)
        for other in self.members[: self.members.index(member)]:
            # one that cannot be loaded has a unit of its own, which says why
            with contextlib.suppress(IsolossError):
                if own is not None and header_of(other.name, **options) == own:
                    return loaded.model, [info.named(str(Path(other.name).expanduser())), info]
                return loaded.model, [ModelInfo.of(load_model(other.name, device="cpu", **options)), info]
        return loaded.model, [info]

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
        except Exception as error:  # a measure may be of another package
            if type(error).__name__ == "OutOfMemoryError":
                raise
            problem = str(error) if isinstance(error, IsolossError) else f"{type(error).__name__}: {error}"
            files.write_sealed(path, {**about, "problem": problem, "evaluation": None})
            return
        files.write_bytes(path.with_suffix(".safetensors"), examples)
        files.write_sealed(path, {**about, "problem": None, "evaluation": evaluation.to_dict()})


def _weights(name: str) -> list[list[Any]] | None:
    """Return the names, sizes and times of the weight files in a folder, to notice when they are replaced."""
    folder = Path(name).expanduser()
    stats = {file.name: file.stat() for file in sorted(folder.glob("*.safetensors"))} if folder.is_dir() else {}
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()] or None
