"""A run directory, whose files are the only truth about a pre-training run, and how to read it.

run.json                              resolved config, fingerprint, seed, versions, commit
metrics.jsonl                         one line every `log_every` steps
checkpoints/step-N/                   a Hugging Face folder, plus trainer.json and trainer.safetensors
evaluations/<measure>@step-N.json     an `Evaluation`
evaluations/<measure>@step-N.safetensors   what each example adds to it, for the errors of differences
log.jsonl                             timing and resumes; no result depends on it
result.json                           written last: the run is complete
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import html
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.checkpoints.places import TRAINER, checkpoint_damage
from isoloss.errors import IsolossError, warn
from isoloss.registry import ALGORITHMS, LANGUAGES, MODELS, OPTIMIZERS
from isoloss.run_config import TrainConfig
from isoloss.statistics.estimate import Estimate, rounded

_METRICS = "metrics.jsonl"
# the files that, besides the weights, decide a checkpoint's model and how it reads text
_MODEL_FILES = ("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
                "*.model")  # fmt: skip
_STEP = re.compile(r"step-(\d+)$")
_TEACHER = "teacher_sha256"  # in run.json, of the weights of a teacher whose folder is relative to the run's
_CODE = "code_sha256"  # in run.json, by component, of those that are from other packages
_OLD_SETTINGS = {"flatness_sentences": "num_sequences"}  # what evaluations that were written before call a setting
_EVALUATION = re.compile(r"(?P<measure>.+)@step-(?P<step>\d+)\.json$")


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """The result of one measure on one checkpoint.

    Attributes:
        measure: Its name, e.g. `probe-root`.
        step: The checkpoint's step; None: the checkpoint is not a run's.
        settings: Numbers of inputs, seeds and the like; two evaluations compare only where these agree.
        weights: SHA-256 of the checkpoint's weights file; where it is not a run's, of the weights themselves.
        estimates: The numbers by name, written without `seconds`: the file is a function of checkpoint and settings.
        inputs: SHA-256 of the inputs that were measured on and of what is predicted in them. Two evaluations with the
            same inputs and settings are paired, example by example.
        examples: SHA-256 of the file with what each example adds to the estimates (`Run.examples`); empty for a
            measure that has none.
        model_files: SHA-256 of the config and tokenizer (`model_files_sha256`).
            Empty: the checkpoint is not a run's, or was measured before this was recorded.
    """

    measure: str
    step: int | None
    weights: str
    settings: Mapping[str, Any]
    estimates: Mapping[str, Estimate]
    inputs: str = ""
    examples: str = ""
    model_files: str = ""

    def __repr__(self) -> str:
        estimates = ", ".join(f"{name} {estimate}" for name, estimate in self.estimates.items())
        return f"Evaluation({self.measure}{'' if self.step is None else f' at step {self.step:,}'}: {estimates})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, without the seconds."""
        estimates = {name: {**e.to_dict(), "seconds": None} for name, e in self.estimates.items()}
        return {**vars(self), "settings": dict(self.settings), "estimates": estimates}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `to_dict` wrote."""
        estimates = {name: Estimate.from_dict(e) for name, e in document["estimates"].items()}
        settings = {_OLD_SETTINGS.get(name, name): value for name, value in document["settings"].items()}
        return cls(**{**document, "estimates": estimates, "settings": settings})


@dataclass(frozen=True, repr=False)
class Run:
    """A run directory. Nothing is cached: every property reads the files.

    Attributes:
        path: The folder.

    Example:
        >>> from pathlib import Path
        >>> from isoloss.runs import Run
        >>> Run(Path("runs/no-such-run"))
        Run('runs/no-such-run', not begun)
    """

    path: Path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self._progress})"

    def _repr_html_(self) -> str:
        rows = {"run": str(self.path), "progress": self._progress}
        if self.exists:
            config = self.config
            rows |= {"model": str(config.model), "language": config.language.kind, "algorithm": config.algorithm.kind}
        if lines := self.metrics():
            rows["training loss"] = f"{lines[-1]['loss_nats']:.4f} nats at step {lines[-1]['step']}"
        cells = (f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items())
        return f"<table>{''.join(cells)}</table>"

    @property
    def _progress(self) -> str:
        if not self.exists:
            return "not begun"
        return f"{'complete' if self.complete else 'not complete'}, checkpoints at steps {self.steps()}"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / "run.json").is_file()

    @property
    def complete(self) -> bool:
        """Whether training reached its last step."""
        return (self.path / "result.json").is_file()

    @property
    def record(self) -> dict[str, Any]:
        """The content of run.json."""
        if not self.exists:
            refuse_study(self.path)
            if checkpoint := checkpoint_of(self.path):
                raise IsolossError(f"{self.path} is a checkpoint of a run: name the run, {checkpoint[0].path}")
            raise IsolossError(f"{self.path} is not a run directory: it has no run.json{files.nearest(self.path)}")
        remedy = "restore the file, or delete the run's folder and begin it again"
        return files.read_sealed(self.path / "run.json", remedy)

    @property
    def config(self) -> TrainConfig:
        """The resolved config."""
        record, path = self.record, self.path / "run.json"
        if "config" not in record:
            raise IsolossError(f"{path} is not the record of a run: it has no config")
        try:
            return configs.from_dict(TrainConfig, record["config"])
        except IsolossError as error:
            why = "it is of another version of isoloss, or needs a package that is missing"
            raise IsolossError(f"{path} cannot be read here: {error}; {why}") from error

    @property
    def absolute_config(self) -> TrainConfig:
        """The config, with the path of a teacher made absolute; an error if the teacher's weights have changed."""
        self._check_teacher()
        return dataclasses.replace(self.config, language=self.config.language.within(self.path))

    @property
    def has_its_teacher(self) -> bool:
        """Whether the checkpoint that writes its sentences, if one beside it does, is the one that it began with."""
        began = self.record.get(_TEACHER)
        return began is None or began == self.config.language.teacher_sha256(self.path)

    def _check_teacher(self) -> None:
        if not self.has_its_teacher:
            raise IsolossError(
                f"the teacher of {self.path} has changed since the run began, or is gone: bring the former one back, "
                "or delete the run's folder and begin it again"
            )

    def changed_code(self) -> list[str]:
        """Return the components of other packages whose code has changed since the run began, such as `optimizer x`."""
        now = _code(self.config)
        return [name for name, began in self.record.get(_CODE, {}).items() if now.get(name) != began]

    def check_folder(self) -> None:
        """Refuse a folder that holds a study, or anything else that is not a run."""
        if self.exists:
            return
        if (self.path / "study.json").is_file():
            raise IsolossError(f"{self.path} holds a study and cannot hold a run: choose another directory")
        # names with a dot are our own: the lock, and what is unfinished
        if self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise IsolossError(f"{self.path} is not empty and holds no run: choose another directory")

    def create(self, config: TrainConfig) -> None:
        """Write run.json, or refuse a folder with a run of another config, whose differing fields are named."""
        if self.exists:
            # not by fingerprint, which could not say what differs
            differing = configs.differences(config, self.config)
            if differing:
                raise IsolossError(
                    f"{self.path} holds a run of another config ({'; '.join(differing)}): "
                    "choose another directory, or the config it was made with"
                )
            self._check_teacher()
            if changed := self.changed_code():
                raise IsolossError(
                    f"the code of the {' and the '.join(changed)} has changed since {self.path} began: choose another "
                    "folder, delete this one to begin the run again, or bring the former code back"
                )
            return
        self.check_folder()
        teacher, code = config.language.teacher_sha256(self.path), _code(config)
        files.write_sealed(
            self.path / "run.json",
            {
                "config": configs.to_dict(config),
                "fingerprint": configs.fingerprint(config),
                "seed": config.seed,
                "versions": versions(),
                "commit": commit(),
                **({_TEACHER: teacher} if teacher else {}),
                **({_CODE: code} if code else {}),
            },
        )

    def note_resume(self, step: int, *, threads: int) -> None:
        """Warn of a resume under other versions or threads, on which sums depend, and add these to run.json."""
        record = self.record
        resumed = record.get("resumed_with", [])
        started = self.log_lines("start")
        # run.json has the threads that were asked for, and 0 stands for all cores: how many those were is in the log
        before = (resumed[-1] if resumed else record)["versions"], started[-1]["threads"] if started else threads
        now = versions(), threads
        if before == now:
            return
        names = sorted({*before[0], *now[0]})
        changes = [
            f"{name} {before[0].get(name)}, now {now[0].get(name)}"
            for name in names
            if before[0].get(name) != now[0].get(name)
        ]
        changes += [f"{before[1]} threads, now {threads}"] if before[1] != threads else []
        warn(f"{self.path} was made with {'; '.join(changes)}: its numbers may differ in rounding from here on")
        resumed = [*resumed, {"step": step, "versions": now[0], "threads": threads}]
        files.write_sealed(self.path / "run.json", {**record, "resumed_with": resumed})

    def result(self) -> dict[str, Any]:
        """Return the content of result.json; an error if training has not ended."""
        if not self.complete:
            raise IsolossError(f"{self.path} is not complete: isoloss train {self.path} goes on with it")
        remedy = f"delete it, and isoloss train {self.path} writes it again"
        return files.read_sealed(self.path / "result.json", remedy)

    def stages(self) -> list[dict[str, Any]]:
        """Return each ended stage: number, last step and learning rate, why it ended and, with a target, the loss."""
        return [
            {
                "stage": line["stage"],
                "step": line["step"],
                "learning_rate": line["learning_rate"],
                "ended": line["stage_ended"],
                **{name: value for name, value in line.items() if name.startswith("validation_")},
            }
            for line in self.metrics()
            if "stage_ended" in line
        ]

    def missed_targets(self, config: TrainConfig | None = None) -> list[str]:
        """Return a sentence for each stage that missed its target; `config`: the run's, if it is known."""
        stages, missed = (config or self.config).stages, []
        for stage in self.stages() if stages else ():
            target = stages[stage["stage"] - 1].target
            if stage["ended"] == "target not reached" and target is not None:
                what, nats = target
                name = "KL" if what == "kl" else what
                reached = rounded(stage[f"validation_{what}_nats"], stage[f"validation_{what}_stderr"])
                missed.append(
                    f"stage {stage['stage']} ended after step {stage['step']:,} with a {name} of {reached} nats per "
                    f"predicted token, above its target of {nats:g}"
                )
        return missed

    def unfinished_decays(self, config: TrainConfig | None = None) -> dict[int, float]:
        """Return the stages that met their target before the decay of the learning rate ended, by number.

        With each, its last learning rate as a fraction of the highest; `config`: the run's, if it is known.
        """
        config, found, begin = config or self.config, {}, 0
        for stage in self.stages() if config.stages and config.decays else ():
            settings = config.stages[stage["stage"] - 1]
            optimizer = settings.optimizer or config.optimizer
            if optimizer.schedule != "constant" and stage["step"] < begin + settings.steps:
                found[stage["stage"]] = stage["learning_rate"] / optimizer.learning_rate
            begin = stage["step"]
        return found

    def rise(self) -> tuple[float, str] | None:
        """Return how far a loss with a target rose from its lowest value to its last, in nats and in words.

        Of several stages, the largest rise. None: no rise is more than twice its standard error.
        """
        found, lines = [], self.metrics()
        for number, stage in enumerate(self.config.stages, start=1):
            what = stage.target and stage.target[0]
            value, error = f"validation_{what}_nats", f"validation_{what}_stderr"
            if own := [line for line in lines if line.get("stage") == number and value in line]:
                lowest, last = min(own, key=lambda line: line[value]), own[-1]
                rise, bound = last[value] - lowest[value], 2 * math.hypot(lowest[error], last[error])
                low, high = (rounded(line[value], line[error]) for line in (lowest, last))
                words = f"was at {low} nats at step {lowest['step']:,} and at {high} at the end"
                found += [(rise, words)] if rise > bound else []
        return max(found, default=None)

    # --- checkpoints

    def last_checkpoint(self) -> Path:
        """Return the folder of the last checkpoint of a complete run; an error if training has not ended."""
        return self.checkpoint(self.result()["steps"])

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint at `step`, there or not."""
        return self.path / "checkpoints" / f"step-{step}"

    def weights(self, step: int) -> str:
        """The SHA-256 of the weights at `step`; the checkpoint must be there."""
        path = self.checkpoint(step) / "model.safetensors"
        if not path.is_file():
            have = ", ".join(map(str, self.steps())) or "none"
            raise IsolossError(f"{self.path} has no checkpoint at step {step}; it has {have}")
        return files.sha256(path)

    def model_files(self, step: int) -> str:
        """The SHA-256 over the config and tokenizer at `step`."""
        return model_files_sha256(self.checkpoint(step))

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        folder = self.path / "checkpoints"
        matches = (_STEP.fullmatch(p.name) for p in folder.iterdir()) if folder.is_dir() else ()
        return sorted(int(match[1]) for match in matches if match)

    def last_step(self) -> int:
        """The step of the last checkpoint; an error if there is none yet."""
        if not (steps := self.steps()):
            raise IsolossError(f"{self.path} has no checkpoint yet: isoloss train {self.path} goes on with it")
        return steps[-1]

    # --- evaluations

    def evaluation_path(self, measure: str, step: int | None) -> Path:
        """The file of a measure at a step, there or not."""
        return self.path / "evaluations" / f"{measure}@step-{step}.json"

    def evaluation(self, measure: str, step: int) -> Evaluation | None:
        """The evaluation, or None if it has not been made; an `IsolossError` if its file is damaged."""
        path = self.evaluation_path(measure, step)
        if not path.is_file():
            return None
        document = files.read_sealed(path, f"delete it, and isoloss measure {self.path} measures again")
        try:
            return Evaluation.from_dict(document)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise IsolossError(f"{path} is damaged or of another version of isoloss: {error!r}") from error

    def evaluations(self) -> list[Evaluation]:
        """All evaluations, by measure and step."""
        return [one for key in self._evaluated() if (one := self.evaluation(*key)) is not None]

    def _evaluated(self) -> list[tuple[str, int]]:
        folder = self.path / "evaluations"
        matches = (_EVALUATION.fullmatch(p.name) for p in folder.iterdir()) if folder.is_dir() else ()
        return sorted((match["measure"], int(match["step"])) for match in matches if match)

    def save(self, evaluation: Evaluation, examples: bytes = b"") -> None:
        """Write an evaluation to its file, after the file of its examples, if it has any."""
        path = self.evaluation_path(evaluation.measure, evaluation.step)
        # the JSON holds the SHA-256 of the other file and comes last. If a kill leaves the new file beside the old
        # JSON, the two do not match, which counts as missing
        if examples:
            files.write_bytes(path.with_suffix(".safetensors"), examples)
        files.write_sealed(path, evaluation.to_dict())

    def has_examples(self, evaluation: Evaluation) -> bool:
        """Whether the file of an evaluation's examples is there, and is the one that was written with it."""
        path = self.evaluation_path(evaluation.measure, evaluation.step).with_suffix(".safetensors")
        return path.is_file() and files.sha256(path) == evaluation.examples

    def examples(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return what each example adds to an evaluation, as numpy arrays by name.

        `<estimate>.influence`, (n + r,): for each of n independent examples, the `samples` of the estimate, its part of
        the error, such that the squared standard error is the sum of the squares over n (n - 1); a trace has r more
        parts, for the sample of its control variates. For an accuracy instead `<estimate>.predictions`,
        (S, n), the class that each of S probes gives to each of n test examples, and `<estimate>.labels`, (n,). For the
        participation ratio also `<estimate>.gram`, the upper triangle of the Gram matrix of the features.

        Raises:
            IsolossError: The file is not there, or is not the one that was written with the evaluation.
        """
        path = self.evaluation_path(evaluation.measure, evaluation.step).with_suffix(".safetensors")
        if not self.has_examples(evaluation):
            what = "is not the file that was written with" if path.is_file() else "is missing beside"
            raise IsolossError(f"{path} {what} {path.stem}.json: measure the checkpoint again")
        from safetensors.numpy import load

        return dict(load(path.read_bytes()))

    # --- damage

    def damage(self, *, tensors: bool = False, evaluations: bool = True) -> Iterator[str]:
        """Yield a sentence for each file of the run that is not as isoloss wrote it.

        result.json has the SHA-256 of metrics.jsonl and of each checkpoint's trainer.json. trainer.json has the SHA-256
        of each file of the checkpoint and, while the run is not complete, of metrics.jsonl so far. Each JSON file has
        the SHA-256 of its own content. Other files in the folder are not checked, nor are files that an
        earlier version wrote without a hash.

        Args:
            tensors: Whether tensor files are read too, at a few gigabytes per second.
            evaluations: Whether evaluations are checked.
        """
        read: dict[str, dict[str, Any]] = {"run.json": {}, "result.json": {}}
        for name in read if self.complete else ("run.json",):
            try:
                read[name] = self.record if name == "run.json" else self.result()
            except IsolossError as error:
                yield str(error)
        record, result = read.values()
        if record and result.get("fingerprint") not in (None, record.get("fingerprint")):
            yield f"{self.path / 'run.json'} and {self.path / 'result.json'} are from different runs"
        recorded = result.get("sha256", {})
        for folder in self._checkpoints():
            try:
                yield from checkpoint_damage(folder, lambda name: tensors or not name.endswith(".safetensors"))
                trainer = folder / TRAINER
                if recorded.get(trainer.relative_to(self.path).as_posix()) not in (None, _sha256(trainer)):
                    yield f"{trainer} and {self.path / 'result.json'} are from different runs"
            except IsolossError as error:
                # checkpoints of a run that is still training may vanish
                if folder.exists():
                    yield str(error)
        metrics = self.path / _METRICS
        if _sha256(metrics) != recorded[_METRICS] if _METRICS in recorded else not self._metrics_match():
            yield f"{metrics} is damaged: its lines are not those of the run's last checkpoint; restore the file"
        for key in self._evaluated() if evaluations else ():
            try:
                one = self.evaluation(*key)
                if tensors and one is not None and one.examples:
                    self.examples(one)
            except IsolossError as error:
                yield str(error)

    def _checkpoints(self) -> list[Path]:
        return [self.path / "checkpoints" / f"step-{step}" for step in self.steps()]

    def _metrics_match(self) -> bool:
        """Whether the lines of metrics.jsonl up to the last checkpoint are those that it was saved with."""
        if not (folders := self._checkpoints()):
            return True
        try:
            state = files.read_sealed(folders[-1] / TRAINER, "")
            step, sha256 = state["step"], state["metrics_sha256"]
        # reported where the checkpoint is checked, or written before it was recorded
        except (IsolossError, KeyError, TypeError):
            return True
        digest, path = hashlib.sha256(), self.path / _METRICS
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
                if json.loads(line)["step"] <= step:
                    digest.update(line)
        return not sha256 or digest.hexdigest() == sha256

    # --- metrics and log

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, up to the first that is damaged, which is warned of."""
        path = self.path / "metrics.jsonl"
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(path.read_bytes().splitlines() if path.is_file() else (), start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict) or not {"step", "loss_nats"} <= line.keys():
                warn(f"line {number} of {path} is damaged: it and the lines after it are left out")
                break
            lines.append(line)
        return lines

    def log_lines(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines of log.jsonl, of one event or all, without those cut short by a full disk or a power failure."""
        path = self.path / "log.jsonl"
        lines: list[dict[str, Any]] = []
        for text in path.read_bytes().splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
        return [line for line in lines if event in (None, line.get("event"))]

    def log(self, event: str, **values: Any) -> None:
        """Append a line to log.jsonl: for what depends on time, and so must stay out of the results."""
        files.append_json(self.path / "log.jsonl", {"event": event, **values})


def refuse_twice(names: Sequence[str]) -> None:
    """Refuse a model that is named twice, in one spelling or in two."""
    known: dict[str, str] = {}
    for name in names:
        # a name on the hub is no path
        place = os.path.realpath(name) if os.path.exists(name) else name
        if place in known:
            also = "" if known[place] == name else f", the other time as {known[place]}"
            raise IsolossError(f"{name} is named twice{also}: leave one out")
        known[place] = name


def refuse_run(path: Path, wanted: str) -> None:
    """Refuse the folder of a run where one of its checkpoints is meant; `wanted` says what that is for."""
    if (run := Run(path)).exists:
        steps = run.steps()
        last = f"such as {run.checkpoint(steps[-1])}" if steps else "but it has none yet"
        raise IsolossError(f"{path} is a run, {wanted}: name one of its checkpoints, {last}")


def refuse_study(path: Path) -> None:
    """Refuse the folder of a study where a run is meant."""
    if (path / "study.json").is_file():
        study = files.read_json(path / "study.json")
        offset = f" --seed-offset {study['seed_offset']}" if study.get("seed_offset") else ""
        command = f"isoloss study status {study.get('study')} --scale {study.get('scale')}{offset} --folder {path}"
        raise IsolossError(f"{path} holds a study, not a run: {command} says how far it is")


def last_checkpoint(name: str | Path) -> str:
    """Return the folder of the last checkpoint of a run; any other name stands for itself."""
    run = Run(Path(name))
    return str(run.checkpoint(run.last_step())) if run.exists else str(name)


def checkpoint_of(path: Path) -> tuple[Run, int] | None:
    """Return the run and the step of a checkpoint folder, or None if it does not lie in a run."""
    folder = path.resolve()
    run = Run(folder.parent.parent)
    step = folder.name.removeprefix("step-")
    if run.exists and step.isdecimal() and int(step) in run.steps() and run.checkpoint(int(step)) == folder:
        return run, int(step)
    return None


def _code(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of the code of each component of a run that is from another package, by what it is."""
    stages = config.stage_configs()
    named = [(LANGUAGES, config.language.kind), (MODELS, config.model.architecture)]
    named += [(ALGORITHMS, stage.algorithm.kind) for stage in stages]
    named += [(OPTIMIZERS, stage.optimizer.name) for stage in stages]
    found = {f"{registry.kind} {name}": registry.code_sha256(name) for registry, name in named}
    return {what: code for what, code in found.items() if code}


def _sha256(path: Path) -> str:
    return files.sha256(path) if path.is_file() else ""


def model_files_sha256(folder: Path) -> str:
    """Return the SHA-256 over the files of a checkpoint that, besides the weights, decide the model."""
    paths = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern) if path.is_file()})
    return hashlib.sha256("".join(f"{path.name} {files.sha256(path)}\n" for path in paths).encode()).hexdigest()


def find_runs(folder: Path) -> list[Run]:
    """Return the runs at or below `folder`, by path."""
    return [Run(path.parent) for path in sorted(folder.rglob("run.json"))]


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    packages = ("isoloss", "torch", "transformers", "tokenizers", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def commit() -> str | None:
    """Return the git commit of an isoloss that runs from its checkout (with `+` if changed), or None."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # an installed isoloss may lie inside another project's checkout, whose commit says nothing about it
    if git("ls-files", "runs.py") != "runs.py":
        return None
    # `-- .`: of changes, only those inside the package count
    head = git("rev-parse", "HEAD")
    return head + "+" if head and git("status", "--porcelain", "--", ".") else head
