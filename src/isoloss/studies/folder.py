"""A study in a folder: the files of its plan, its units of work, its results and its summary."""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError, naming_extras, require_package
from isoloss.lab.evaluation.evaluator import pending
from isoloss.lab.evaluation.external import RECORD, ExternalCheckpoint, ExternalRun
from isoloss.lab.evaluation.measures.base import settings_of
from isoloss.report.html import Card
from isoloss.run_config import LATER_DECAY, StageConfig, TrainConfig
from isoloss.runs import Run
from isoloss.studies.answer import Comparison, below_majority, claim_cards
from isoloss.studies.claims import ClaimResult, check_claims, claims_sha256, judge_claims, planned_tests
from isoloss.studies.plan import Experiment, Measurement, Resources, Unit, call_study_hook
from isoloss.studies.results import Results, run_of
from isoloss.studies.study import Study
from isoloss.studies.summary import Family, MissedTargets, Summary, checkpoint_tables, control_tables, of_the_highest

CONFIGS = "configs"  # the folder of the runs' configs, written before study.json
CLAIMS = "claims"  # the key in study.json of each claim's hash at the start
# seconds on one core of a recent server, of the models that studies on a laptop have; only the order matters before
# anything is measured, and `isoloss.studies.status` corrects them by what has been
MEASURING_SECONDS = 0.4  # of one measure of one checkpoint
STARTING_SECONDS = 4.0  # of a unit, which is a process: mostly imports
STEP_SECONDS = 0.0005  # of a step with a batch of one sentence; it grows with the square root of the batch
COMPILED = 3.0  # how many times as fast compiled runs train
TO_TARGET = 1 / 8  # of its steps, that a stage with a target makes: they are the most that it may make
_NOT_THE_PLAN = ("needs", "expected")  # fields of a measurement that do not decide its results
_MAX_NAMED = 4  # of the arms with runs that missed a target


def usual_folder(study: Study, scale: str, seed_offset: int) -> Path:
    """Return where a study is carried out if no folder is named."""
    return Path("runs") / f"{study.name}-{scale}{f'-seeds-{seed_offset}' if seed_offset else ''}"


class StudyFolder:
    """A study at one scale, in a folder.

    Args:
        study: The study.
        path: The folder, which need not exist.
        scale: The name of the scale; None: the study's first.
        seed_offset: Not 0: the study with other seeds.

    Raises:
        IsolossError: There is no such scale, or it has no replications.
    """

    def __init__(self, study: Study, path: Path, scale: str | None = None, seed_offset: int = 0) -> None:
        self.study, self.path, self.seed_offset = study, path, seed_offset
        self.scale_name = next(iter(study.scales)) if scale is None else scale
        self.scale = study.scale(self.scale_name, seed_offset=seed_offset)

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options of its scale and seed offset."""
        offset = ("--seed-offset", str(self.seed_offset)) if self.seed_offset else ()
        return "--scale", self.scale_name, *offset

    def command(self, suffix: str = "") -> str:
        """Return the command that runs the study in this folder, or in one whose name ends in a suffix."""
        # no file names a path of this machine
        path = f"{self.path.name if self.path.is_absolute() else self.path}{suffix}"
        is_usual = Path(path).name == usual_folder(self.study, self.scale_name, self.seed_offset).name
        folder = () if is_usual else ("--folder", path)
        return shlex.join(["isoloss", "study", "run", self.study.file or self.study.name, *self.options, *folder])

    # --- the files of the plan

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
        """Check the study, and write the plan's files into the folder; errors are those of `check` and `exists`."""
        self.check()
        self.write_plan()

    def write_plan(self) -> None:
        """Write the files of a plan that was checked, or see that the folder was made by the same plan."""
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

    def _config(self, name: str) -> Path:
        """The TOML file that a run is made from."""
        return self.path / CONFIGS / f"{name}.toml"

    def check_code(self) -> None:
        """Refuse to go on with runs that were begun with other code of another package, all of them at once."""
        runs = [
            run
            for name, experiment in self.scale.experiments.items()
            if isinstance(experiment.config, TrainConfig)
            and (run := run_of(self.path, name, experiment)).exists
            and run.changed_code()
        ]
        if runs:
            changed = dict.fromkeys(itertools.chain(*(run.changed_code() for run in runs)))
            raise IsolossError(
                f"the code of the {' and the '.join(changed)} has changed since {len(runs)} runs began (first: "
                f"{runs[0].path}): delete their folders to train them again, which keeps the other runs, choose "
                "another --folder, or bring the former code back"
            )

    # --- units of work

    def plan(self) -> list[Unit]:
        """Return the study's units: the training of each run, and the measuring of checkpoints.

        Raises:
            IsolossError: There are no runs; a run's name cannot name a folder of the study, or it waits for one
                that is not in the study; or a measured step has no checkpoint.
        """
        self._check_runs()
        units: list[Unit] = []
        for name, experiment in self.scale.experiments.items():
            if isinstance(experiment.config, TrainConfig):
                units.append(self._training(name, experiment, experiment.config))
            units += [self._measuring(name, experiment, part) for part in experiment.measurements]
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

    def _training(self, name: str, experiment: Experiment, config: TrainConfig) -> Unit:
        """Return the unit that trains a run."""
        run = run_of(self.path, name, experiment)

        def progress(where: Callable[[Path], Path]) -> str:
            attempt = Run(where(run.path))
            return f"step {max(attempt.steps(), default=0):,} of {config.steps:,}" if attempt.exists else ""

        return Unit(
            name=f"train {name}",
            arguments=("train", str(run.path), "--config", str(self._config(name)), *_device(experiment.needs)),
            outputs=(run.path,),
            done=lambda: _is_trained(run, experiment),
            has_files=lambda: run.complete,
            progress=progress,
            after=tuple(f"train {other}" for other in experiment.after),
            seconds=experiment.expected.seconds if experiment.expected else _training_seconds(config),
            expected=experiment.expected,
            needs=experiment.needs,
            block=experiment.block,
            group=experiment.group or name,
            shown_in=experiment.shown_in,
        )

    def _measuring(self, name: str, experiment: Experiment, part: Measurement) -> Unit:
        """Return the unit that makes a measurement of a run."""
        run, planned = run_of(self.path, name, experiment), part.steps or experiment.kept_steps

        def is_done() -> bool:
            if not _is_trained(run, experiment):
                return False
            steps = experiment.steps(part, run)
            if missing := sorted(set(steps).difference(run.steps())):
                raise IsolossError(
                    f"{run.path} is complete but has no checkpoint at step {missing[0]}: delete the folder to train it "
                    "again"
                )
            return not pending(run, part.measures, steps, part.settings)

        def has_files() -> bool:
            steps = experiment.steps(part, run)
            paths = (run.evaluation_path(measure, step) for step in steps for measure in part.measures)
            return all(path.is_file() and path.with_suffix(".safetensors").is_file() for path in paths)

        def progress(_: Callable[[Path], Path]) -> str:
            # an external checkpoint too counts as trained only once it was loaded
            if not _is_trained(run, experiment):
                return ""
            steps = experiment.steps(part, run)
            present = [step for step in steps if step in run.steps()]
            made = len(present) * len(part.measures) - len(pending(run, part.measures, present, part.settings))
            return f"{made} of {len(steps) * len(part.measures)} evaluations" if made else ""

        settings = [
            word
            for key, value in part.settings.items()
            for word in (f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value]))
        ]
        what = ("--measures", *part.measures, "--steps", *map(str, planned), *settings, *_device(part.needs))
        guess = STARTING_SECONDS + MEASURING_SECONDS * len(part.measures) * len(planned)
        return Unit(
            name=f"{part.name} {name}",
            arguments=("measure", str(run.path), *what),
            done=is_done,
            has_files=has_files,
            progress=progress,
            after=(f"train {name}",) if isinstance(experiment.config, TrainConfig) else (),
            seconds=part.expected.seconds if part.expected else guess,
            expected=part.expected,
            needs=part.needs,
            block=experiment.block,
            group=f"{part.name} {experiment.group or name}",
            shown_in=experiment.shown_in,
        )

    def progress(self) -> tuple[list[str], tuple[int, ...]]:
        """Return the names of the units that are not done, and the numbers of the blocks of which all units are."""
        units = self.plan()
        missing = {unit.name: unit.block for unit in units if not unit.done()}
        return list(missing), tuple(sorted({unit.block for unit in units}.difference(missing.values())))

    # --- its results

    def results(self, complete: Collection[int] | None = None) -> Results:
        """Return the results of the finished study, or of its complete blocks; a missing evaluation is named."""
        return Results.read(self.path, self.scale, complete)

    @property
    def has_verdicts(self) -> bool:
        """Whether claims are judged at its scale."""
        return self.study.has_verdicts(self.scale_name)

    @property
    def follows(self) -> str:
        """What a page of some of its blocks says is still to come; empty if there will be no verdicts."""
        return "Verdicts follow when all are done." if self.study.claims and self.has_verdicts else ""

    @property
    def secondary_tests(self) -> int | None:
        """How many secondary tests the study plans; None: it tests no claims."""
        return planned_tests(self.study.claims, self.scale) if self.study.claims else None

    def claims(self, results: Results) -> tuple[ClaimResult, ...]:
        """Return the result of every claim of the study; none before the study is finished.

        Looking at verdicts while results come in would inflate their error rates.
        """
        if results.blocks_done < results.blocks:
            return ()
        study = self.study
        return judge_claims(study.claims, results, loss_margin=study.loss_margin, has_verdicts=self.has_verdicts)

    def summary(self, results: Results | None = None) -> Summary:
        """Return the summary of these results, by default of the finished study; only verdicts come with an answer."""
        study, results = self.study, results or self.results()
        tables = checkpoint_tables(results) if study.tables is None else self._call_hook("tables", results)
        claims = self.claims(results)
        warnings = [self._changed_claims(), results.identical, _unfinished_decays(results), *below_majority(results)]
        if not self.has_verdicts:
            warnings.insert(
                0,
                f"Scale {self.scale_name} is too small to say anything, and no verdict is given. Verdicts are given at "
                f"scale {' and '.join(study.verdicts_at)}.",
            )
        is_answered = self.has_verdicts and results.blocks_done == results.blocks
        # a study may make more contrasts than it says beforehand
        made = max((one.tests or 0 for each in claims for one in each.answers), default=0)
        return Summary(
            tables=(*tables, *control_tables(results)),
            claims=claims,
            family=Family(
                claims_sha256=claims_sha256(study.claims, self.scale),
                loss_margin=study.loss_margin,
                secondary_tests=max(made, self.secondary_tests or 0),
            )
            if study.claims
            else None,
            warning=" ".join(filter(None, warnings)),
            answer=self._answer(claims, results) if is_answered else (),
            missed=self._missed_targets(results),
        )

    def _answer(self, claims: Sequence[ClaimResult], results: Results) -> tuple[Card, ...]:
        """Return the cards of a finished study: its own, or of its first claims, or of its runs compared."""
        if self.study.answer is None:
            return tuple(claim_cards(claims) if claims else Comparison(results).cards())
        cards = tuple(self._call_hook("answer", claims, results))
        if wrong := [card for card in cards if not isinstance(card, Card)]:
            raise IsolossError(
                f"answer of the study {self.study.name} returns an object of type {type(wrong[0]).__name__}; it must "
                "return isoloss.studies.Card objects, a question with its answer each"
            )
        return cards

    def _call_hook(self, part: str, *arguments: Any) -> Any:
        return call_study_hook(f"{part} of the study {self.study.name}", getattr(self.study, part), *arguments)

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
        so = "changed after this study was started, so that they are exploratory"
        return f"These claims were {so}: {', '.join(changed)}." if changed else f"The order of the claims was {so}."

    def _missed_targets(self, results: Results) -> MissedTargets | None:
        """Return the runs that missed their target loss, with the next step; None if none did."""
        missed = {
            name: missed
            for name, experiment in results.experiments.items()
            if isinstance(experiment.config, TrainConfig)
            and (missed := results.run(name).missed_targets(experiment.config))
        }
        if not missed:
            return None
        rises = [(*rise, name) for name in missed if (rise := results.run(name).rise()) is not None]
        return MissedTargets(
            line=f"{len(missed)} of {len(results.experiments)} runs missed a target: {_by_arm(missed, results)}",
            runs=missed,
            next_step=_risen(rises)
            + f"{LATER_DECAY}. " * any(results.run(name).config.decays for name in missed)
            + "To train all runs again, for longer, raise the steps of these stages in the study (the default "
            f"warm-up grows with steps; warmup_steps sets it), and run {self.command('-longer')}"
            if self.has_verdicts
            else "",
        )


def _by_arm(runs: Iterable[str], results: Results) -> str:
    """Return how many runs of each arm these are, in words."""
    by_arm = Counter(results.experiments[name].group or name for name in runs).most_common()
    more = sum(count for _, count in by_arm[_MAX_NAMED:])
    named = ", ".join(f"{count} of {arm}" for arm, count in by_arm[:_MAX_NAMED])
    return named + (f", {more} of other arms" if more else "")


def _unfinished_decays(results: Results) -> str:
    """Return the warning that decays had not ended where the loss met its target, in a study of several schedules."""
    configs = {name: each.config for name, each in results.experiments.items() if isinstance(each.config, TrainConfig)}
    if len({(one.schedule, one.decay_steps) for config in configs.values() for one in config.optimizers}) < 2:
        return ""
    found = {name: [*results.run(name).unfinished_decays(config).values()] for name, config in configs.items()}
    fractions = [fraction for each in found.values() for fraction in each]
    if not fractions:
        return ""
    early = [name for name, each in found.items() if each]
    return (
        "The schedules of the learning rate differ, and these runs met their target before the decay had ended, "
        f"{of_the_highest(fractions)}: {_by_arm(early, results)}. They are no models at the end of a decay."
    )


def _risen(rises: Sequence[tuple[float, str, str]]) -> str:
    """Return the advice where losses rose before the end; each rise is in nats and in words, with its run."""
    if not rises:
        return ""
    _, words, worst = max(rises)
    return (
        f"More steps at the same learning rate look useless for {len(rises)} of these runs, which ended above their "
        f"lowest loss ({worst} {words}): take a lower rate, or a schedule that decays. "
    )


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


def _device(needs: Resources) -> tuple[str, ...]:
    """Return the options that say what a command computes on."""
    return "--device", needs.device, "--threads", str(needs.cores)


def _training_seconds(config: TrainConfig) -> float:
    """Return about how long a narrow BERT trains on one core."""
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
    return (
        run.complete
        and run.record["fingerprint"] == experiment.fingerprint
        and run.has_its_teacher
        and not run.changed_code()
    )
