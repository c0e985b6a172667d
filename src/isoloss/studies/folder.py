"""A study in a folder: the files of its plan, its units of work, its results and its page."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError, naming_extras, require_package
from isoloss.lab.evaluation.evaluator import pending
from isoloss.lab.evaluation.external import RECORD, ExternalCheckpoint, ExternalRun
from isoloss.lab.evaluation.measures.base import settings_of
from isoloss.registry import STUDIES
from isoloss.report.html import Card
from isoloss.run_config import StageConfig, TrainConfig
from isoloss.runs import Run
from isoloss.studies.answer import Comparison, claim_cards
from isoloss.studies.claims import ClaimResult, check_claims, claims_sha256, judge_claims, planned_tests
from isoloss.studies.plan import Resources, Unit
from isoloss.studies.results import Results, run_of
from isoloss.studies.spec import Experiment, Measurement, Study, call_study_hook
from isoloss.studies.summary import Family, Summary, checkpoint_tables, control_tables

CONFIGS = "configs"  # the folder of the runs' configs, written before study.json
# seconds on one core of a recent server, of the models that studies on a laptop have; only the order matters before
# anything is measured, and `isoloss.studies.status` corrects them by what has been
MEASURING_SECONDS = 0.4  # of one measure of one checkpoint
STARTING_SECONDS = 1.0  # of a run
STEP_SECONDS = 0.0005  # of a step with a batch of one sentence; it grows with the square root of the batch
COMPILED = 3.0  # how many times as fast compiled runs train
TO_TARGET = 1 / 8  # of its steps, that a stage with a target makes: they are the most that it may make
_NOT_THE_PLAN = ("needs", "expected")  # fields of a measurement that do not decide its results
_MAX_NAMED = 3  # of the runs that missed a target
CLAIMS = "claims"  # the key in study.json of each claim's hash at the start


class StudyFolder:
    """A study at one scale, in a folder.

    Args:
        study: The study.
        path: The folder, which need not exist.
        scale: The name of the scale; None: the study's first.
        seed_offset: Not 0: the study with other seeds.

    Raises:
        IsolossError: There is no such scale, or it has no repetitions.
    """

    def __init__(self, study: Study, path: Path, scale: str | None = None, seed_offset: int = 0) -> None:
        self.study, self.path, self.seed_offset = study, path, seed_offset
        self.scale_name = next(iter(study.scales)) if scale is None else scale
        self.scale = study.scale(self.scale_name, seed_offset=seed_offset)

    @property
    def page(self) -> Path:
        """The path of the page, which need not exist."""
        return self.path / "report" / "index.html"

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options of its scale and seed offset."""
        offset = ("--seed-offset", str(self.seed_offset)) if self.seed_offset else ()
        return "--scale", self.scale_name, *offset

    def document(self) -> dict[str, Any]:
        """Return the content of study.json: enough to see whether a folder was made by this plan."""
        experiments = self.scale.experiments
        return {
            "study": self.study.name,
            "scale": self.scale_name,
            "seed_offset": self.seed_offset,
            "runs": {name: experiment.fingerprint for name, experiment in experiments.items()},
            "measured": {
                name: [
                    {
                        **{key: value for key, value in configs.to_dict(part).items() if key not in _NOT_THE_PLAN},
                        # resolved: an empty tuple, which stands for all kept steps, would not show that these have
                        # changed
                        "steps": list(part.steps or experiment.kept_steps),
                    }
                    for part in experiment.measurements
                ]
                for name, experiment in experiments.items()
            },
        }

    def exists(self) -> bool:
        """Return whether the folder holds this study; if not, it is new or empty. Reads files only.

        Raises:
            IsolossError: It holds something else: another study, another scale or another version of this plan; a run,
                or other files.
        """
        folder, path = self.path, self.path / "study.json"
        planned = self.document()
        if path.is_file():
            # folders made before there were seed offsets do not say theirs
            document = {"seed_offset": 0, **files.read_json(path)}
            keys = [key for key in planned if document.get(key) != planned[key]]
            if keys:
                raise IsolossError(
                    f"{folder} was made by another plan (they differ in {', '.join(keys)}); choose another --folder"
                )
            return True
        around = next((parent for parent in (folder, *folder.absolute().parents) if Run(parent).exists), None)
        if around is not None:
            what = "is a run" if around == folder else f"is inside the run {around}"
            raise IsolossError(f"{folder} {what} and cannot hold a study: choose another --folder")
        if folder.exists() and not folder.is_dir():
            raise IsolossError(f"{folder} is a file: choose another --folder")
        if folder.is_dir() and any(not p.name.startswith(".") and p.name != CONFIGS for p in folder.iterdir()):
            raise IsolossError(f"{folder} is not empty and holds no study: choose another --folder")
        return False

    @naming_extras()
    def check(self) -> None:
        """Refuse a study that could not be run to its end; the folder is not looked at.

        Raises:
            IsolossError: As for `plan`; a config that cannot be trained, an unknown measure or setting, a checkpoint
                that does not exist, or a claim that cannot be judged.
        """
        require_package("polars")  # of its tables; units would only find out one by one
        self._check_runs()
        for name, experiment in self.scale.experiments.items():
            configs.check(experiment.config)
            if isinstance(experiment.config, ExternalCheckpoint):
                experiment.config.check()
            else:
                _check_targets(name, experiment, experiment.config)
            for part in experiment.measurements:
                for measure in part.measures:
                    settings_of(measure, part.settings)
        check_claims(self.study.claims, self.scale, has_verdicts=self.has_verdicts)
        self._claims_hashes()  # refuses a function whose source is not known

    def prepare(self) -> None:
        """Check the study, and write the plan's files into the folder.

        Raises:
            IsolossError: As for `check` and `exists`.
        """
        self.check()
        self.write_plan()

    def write_plan(self) -> None:
        """Write the files of a plan that was checked, or see that the folder was made by the same plan.

        Raises:
            IsolossError: As for `exists`.
        """
        is_new = not self.exists()
        for name, experiment in self.scale.experiments.items():
            # written again each time, as the checkpoint's folder may have moved
            if isinstance(experiment.config, ExternalCheckpoint):
                external = configs.to_dict(experiment.config.absolute())
                files.write_json(self.path / "runs" / name / RECORD, external)
        if not is_new:
            return
        for name, experiment in self.scale.experiments.items():
            files.write_text(self._config(name), configs.to_toml(experiment.config))
        # last: until it is there, `exists` takes the folder for a new one, and the same command writes all of it again
        files.write_json(self.path / "study.json", self.document() | {CLAIMS: self._claims_hashes()})

    def plan(self) -> list[Unit]:
        """Return the study's units: the training of each run, and the measuring of checkpoints.

        Raises:
            IsolossError: There are no runs; a run's name cannot name a folder of the study, or it waits for one
                that is not in the study; or a measured step has no checkpoint.
        """
        self._check_runs()
        units: list[Unit] = []
        for name, experiment in self.scale.experiments.items():
            run, is_external = run_of(self.path, name, experiment), isinstance(experiment.config, ExternalCheckpoint)
            if not is_external:
                units.append(self._training(name, experiment, run))
            units += [
                Unit(
                    name=f"{part.name} {name}",
                    arguments=_eval_arguments(run, experiment, part),
                    # partial, not lambda: a lambda would see the last run of this loop
                    done=functools.partial(_is_measured, run, experiment, part),
                    has_files=functools.partial(_has_evaluations, run, experiment, part),
                    progress=functools.partial(_measuring_progress, run, experiment, part),
                    after=() if is_external else (f"train {name}",),
                    seconds=part.expected.seconds
                    if part.expected
                    else MEASURING_SECONDS * len(part.measures) * len(part.steps or experiment.kept_steps),
                    expected=part.expected,
                    needs=part.needs,
                    block=experiment.block,
                    group=f"{part.name} {experiment.group or name}",
                    shown_in=experiment.shown_in,
                )
                for part in experiment.measurements
            ]
        return units

    def _check_runs(self) -> None:
        experiments = self.scale.experiments
        if not experiments:
            raise IsolossError(f"the scale {self.scale_name} of the study {self.study.name} has no experiments")
        for name, experiment in experiments.items():
            parts = PurePath(name).parts
            if not parts or any(part.startswith((".", "/")) for part in parts):
                raise IsolossError(
                    f"a run of the study {self.study.name} is called {name!r}: a name must be that of a folder inside "
                    "the study's and not begin with a dot"
                )
            for other in experiment.after:
                if other not in experiments:
                    raise IsolossError(f"the run {name} comes after {other!r}, which is not in the study")
            measured = {step for part in experiment.measurements for step in part.steps if step != "last"}
            if unkept := sorted(measured.difference(experiment.kept_steps)):
                raise IsolossError(
                    f"the run {name} is measured at step {unkept[0]}, of which it keeps no checkpoint; it keeps "
                    f"{', '.join(map(str, experiment.kept_steps))}"
                )
            if isinstance(experiment.config, ExternalCheckpoint) and experiment.after:
                raise IsolossError(f"the checkpoint {name} is external and not trained: leave out after")

    def _training(self, name: str, experiment: Experiment, run: Run) -> Unit:
        """Return the unit that trains a run."""
        return Unit(
            name=f"train {name}",
            arguments=("train", str(run.path), "--config", str(self._config(name)), *_device(experiment.needs)),
            outputs=(run.path,),
            done=functools.partial(_is_trained, run, experiment),
            has_files=lambda: run.complete,
            progress=functools.partial(_training_progress, run, experiment),
            after=tuple(f"train {other}" for other in experiment.after),
            seconds=_training_seconds(experiment),
            expected=experiment.expected,
            needs=experiment.needs,
            block=experiment.block,
            group=experiment.group or name,
            shown_in=experiment.shown_in,
        )

    def results(self, complete: Collection[int] | None = None) -> Results:
        """Return the results of the finished study, or of its complete blocks.

        Raises:
            IsolossError: An evaluation is missing; it is named.
        """
        return Results.read(self.path, self.scale, complete)

    @property
    def has_verdicts(self) -> bool:
        """Whether claims are judged at its scale."""
        return self.study.has_verdicts(self.scale_name)

    def claims(self, results: Results) -> tuple[ClaimResult, ...]:
        """Return the result of every claim of the study; none before the study is finished.

        Looking at verdicts while results come in would inflate their error rates.
        """
        if results.blocks_done < results.blocks:
            return ()
        study = self.study
        return judge_claims(study.claims, results, loss_margin=study.loss_margin, has_verdicts=self.has_verdicts)

    @property
    def secondary_tests(self) -> int | None:
        """How many secondary tests the study plans; None: it tests no claims."""
        return planned_tests(self.study.claims, self.scale) if self.study.claims else None

    def summary(self, results: Results | None = None) -> Summary:
        """Return the summary of these results, by default of the finished study; only verdicts come with an answer."""
        study, results = self.study, results or self.results()
        tables = checkpoint_tables(results) if study.tables is None else self._own("tables", results)
        claims, unjudged = self.claims(results), "" if self.has_verdicts else self._unjudged()
        warning = " ".join(
            filter(None, (unjudged, self._changed_claims(), self._missed_targets(results), results.identical))
        )
        answer = () if unjudged or results.blocks_done < results.blocks else self._answer(claims, results)
        # a study may make more contrasts than it says beforehand
        made = max((one.tests or 0 for each in claims for one in each.answers), default=0)
        family = None
        if study.claims:
            family = Family(
                claims_sha256=claims_sha256(study.claims, self.scale),
                loss_margin=study.loss_margin,
                secondary_tests=max(made, self.secondary_tests or 0),
            )
        return Summary((*tables, *control_tables(results)), claims, family, warning, answer)

    def _answer(self, claims: Sequence[ClaimResult], results: Results) -> tuple[Card, ...]:
        """Return the cards of a finished study: its own, or of its first claims, or of its runs compared."""
        if self.study.answer is None:
            return tuple(claim_cards(claims) if claims else Comparison(results).cards())
        cards = tuple(self._own("answer", claims, results))
        if wrong := [card for card in cards if not isinstance(card, Card)]:
            raise IsolossError(
                f"answer of the study {self.study.name} returns a {type(wrong[0]).__name__}; it must return "
                "isoloss.studies.Card objects, a question with its answer each"
            )
        return cards

    @naming_extras()
    def report(self, complete: Collection[int] | None = None) -> Path:
        """Write report/index.html and its figures, for the finished study or its complete blocks; return the page.

        Call it only while holding the folder's lock.
        """
        from isoloss.studies import page

        files.remove_unfinished(self.page.parent)
        return page.write(self, self.results(complete), self.page)

    def verify(self) -> Iterator[tuple[str, str | None]]:
        """Check every run of the study; see `isoloss.studies.verify.verify_run`.

        Raises:
            IsolossError: The folder holds no study.
        """
        if not (self.path / "study.json").is_file():
            raise IsolossError(f"{self.path} holds no study: it has no study.json")
        # only now: a folder without a study is refused at once, before the seconds that torch takes
        from isoloss.studies.verify import verify_run

        said = set()
        for name, experiment in self.scale.experiments.items():
            for part in experiment.measurements:
                run = run_of(self.path, name, experiment)
                steps = list(experiment.steps(part, run))
                # as the unit that measured: with other threads or another device, sums differ in their last digits
                with _threads(part.needs.cores):
                    device = _device_name(part.needs)
                    for check in verify_run(run, experiment, part.measures, steps, part.settings, device):
                        # several measurements of one run look at the same files
                        if check not in said:
                            said.add(check)
                            yield check

    def _own(self, part: str, *arguments: Any) -> Any:
        return call_study_hook(f"{part} of the study {self.study.name}", getattr(self.study, part), *arguments)

    def _unjudged(self) -> str:
        scales = " and ".join(self.study.verdicts_at)
        return (
            f"Scale {self.scale_name} is too small to say anything, and no verdict is given. "
            f"Verdicts are given at scale {scales}."
        )

    def _claims_hashes(self) -> dict[str, str]:
        return {claim.id: claim.sha256(self.scale) for claim in self.study.claims}

    def _changed_claims(self) -> str:
        """The warning that claims are not those that the study was started with; empty if they are."""
        path = self.path / "study.json"
        started = files.read_json(path).get(CLAIMS) if path.is_file() else None
        now = self._claims_hashes()
        if started is None or [*started.items()] == [*now.items()]:
            return ""
        changed = [name for name in {**started, **now} if started.get(name) != now.get(name)]
        named = f"These claims were changed after this study was started: {', '.join(changed)}."
        return named if changed else "The order of the claims was changed after this study was started."

    def _missed_targets(self, results: Results) -> str:
        """A warning about runs that missed their target loss, with the next step; empty if none did."""
        missed = {
            name: missed
            for name, experiment in results.experiments.items()
            if isinstance(experiment.config, TrainConfig)
            and (missed := results.run(name).missed_targets(experiment.config))
        }
        if not missed:
            return ""
        named = "; ".join(f"{name}: {', '.join(each)}" for name, each in itertools.islice(missed.items(), _MAX_NAMED))
        more = f"; and {len(missed) - _MAX_NAMED} more" if len(missed) > _MAX_NAMED else ""
        return (
            f"{len(missed)} of {len(results.experiments)} runs missed a target ({named}{more}). To go on "
            "until it is reached, raise the steps of these stages in the study, and run "
            f"{self.command} --folder {self.path.name}-longer"
        )

    @property
    def command(self) -> str:
        """The command that runs the study in its usual folder."""
        name = self.study.name if self.study.name in STUDIES else f"{self.study.name}.py"
        return shlex.join(["isoloss", "study", "run", name, *self.options])

    def _config(self, name: str) -> Path:
        """The TOML file that a run is made from."""
        return self.path / CONFIGS / f"{name}.toml"


def _check_targets(name: str, experiment: Experiment, config: TrainConfig) -> None:
    """Refuse steps that are measured and may not be reached, or not be where a stage ends."""
    lengths = [stage.steps for stage in itertools.takewhile(lambda stage: stage.target is None, config.stages)]
    if len(lengths) == len(config.stages):
        return
    for part in experiment.measurements:
        if not part.steps or any(step != "last" and step > sum(lengths) for step in part.steps):
            raise IsolossError(
                f"the run {name} has a stage with a target, and where that ends is not known in advance: give its "
                f'measurements steps up to {sum(lengths)}, or "last"'
            )


def _eval_arguments(run: Run, experiment: Experiment, part: Measurement) -> tuple[str, ...]:
    settings = [
        word
        for name, value in part.settings.items()
        for word in (f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value]))
    ]
    steps = map(str, part.steps or experiment.kept_steps)
    return ("eval", str(run.path), "--measures", *part.measures, "--steps", *steps, *settings, *_device(part.needs))


def _device_name(needs: Resources) -> str:
    return "cuda" if needs.gpus else "cpu"


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with this many threads, whatever OMP_NUM_THREADS was when torch, numpy and scipy were loaded."""
    import scipy.linalg  # noqa: F401  (what is not loaded is not limited)
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with threadpool_limits(number):
            yield
    finally:
        torch.set_num_threads(before)


def _device(needs: Resources) -> tuple[str, ...]:
    """Return the options that say what a command computes on."""
    return "--device", _device_name(needs), "--threads", str(needs.cores)


def _training_seconds(experiment: Experiment) -> float:
    """Return about how long a run takes; if the study does not say, how long a narrow BERT takes on one core."""
    if experiment.expected is not None:
        return experiment.expected.seconds
    config = experiment.config
    if isinstance(config, ExternalCheckpoint):
        return 0.0
    seconds = sum(
        STEP_SECONDS
        * stage.steps
        * (TO_TARGET if stage.target else 1)
        * math.sqrt(stage.batch_size or config.batch_size)
        for stage in config.stages or (StageConfig(steps=config.steps),)
    )
    return STARTING_SECONDS + (seconds / COMPILED if config.compiled else seconds)


def _is_trained(run: Run, experiment: Experiment) -> bool:
    if isinstance(run, ExternalRun):
        return run.exists and run.complete
    return run.complete and run.record["fingerprint"] == experiment.fingerprint and run.has_its_teacher


def _training_progress(run: Run, experiment: Experiment, where: Callable[[Path], Path]) -> str:
    attempt = Run(where(run.path))
    return f"step {max(attempt.steps(), default=0):,} of {experiment.last_step:,}" if attempt.exists else ""


def _is_measured(run: Run, experiment: Experiment, part: Measurement) -> bool:
    if not _is_trained(run, experiment):
        return False
    steps = experiment.steps(part, run)
    if missing := sorted(set(steps).difference(run.steps())):
        raise IsolossError(
            f"{run.path} is complete but has no checkpoint at step {missing[0]}: delete the folder to train it again"
        )
    return not pending(run, part.measures, steps, part.settings)


def _has_evaluations(run: Run, experiment: Experiment, part: Measurement) -> bool:
    paths = (run.evaluation_path(measure, step) for step in experiment.steps(part, run) for measure in part.measures)
    return all(path.is_file() and path.with_suffix(".safetensors").is_file() for path in paths)


def _measuring_progress(run: Run, experiment: Experiment, part: Measurement, _: Callable[[Path], Path]) -> str:
    # an external checkpoint too counts as trained only once it was loaded
    if not _is_trained(run, experiment):
        return ""
    steps = experiment.steps(part, run)
    present = [step for step in steps if step in run.steps()]
    total = len(steps) * len(part.measures)
    made = len(present) * len(part.measures) - len(pending(run, part.measures, present, part.settings))
    return f"{made} of {total} evaluations" if made else ""
