"""Results of a study: every estimate of every checkpoint, read from its files; long and wide tables; differences."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isoloss.errors import IsolossError, did_you_mean, naming_extras
from isoloss.lab.evaluation.external import ExternalCheckpoint, ExternalRun
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.statistics.comparison import paired_difference, times
from isoloss.statistics.estimate import Estimate
from isoloss.studies.plan import AnyScale, Experiment

if TYPE_CHECKING:
    import polars as pl
    import torch

RESCALED = {key: f"{key}-rescaled-at-random" for key in ("trace", "minimal-trace")}  # what rescaling-control measures
UNITS = {"nats per predicted token": "nats/token", "accuracy": "accuracy, %", "percentage points": "points"}

COLUMNS: dict[str, Any] = {"run": str, "group": str, "block": int, "size": str, "step": int, "estimate": str,
                           "value": float, "standard error": float, "unit": str}  # of `Results.values`  # fmt: skip
ESTIMATE = {key: COLUMNS[key] for key in ("estimate", "value", "standard error", "unit")}  # those of an estimate


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointEstimate(Estimate):
    """An estimate of one checkpoint, with what decides which other estimates it has a paired difference to."""

    inputs: str  # the SHA-256 of what it was measured on
    settings: Mapping[str, Any]  # the measure's; estimates with the same inputs and settings can be paired
    # `influence`, or `predictions` and `labels`, and `gram` of features; see `isoloss.runs.Run.examples`. Not compared:
    # `==` of two arrays is an array, which has no truth value
    examples: Mapping[str, np.ndarray[Any, Any]] = field(compare=False)
    weights: str = ""  # the SHA-256 of the checkpoint's weights; empty: not known

    @classmethod
    def of(cls, estimate: Estimate, **more: Any) -> CheckpointEstimate:
        """Add to an estimate what this class has beside its fields."""
        return cls(**vars(estimate) | more)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of `Estimate` as JSON types."""
        return Estimate(**{each.name: getattr(self, each.name) for each in dataclasses.fields(Estimate)}).to_dict()

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the accuracy of probes on sampled examples, with a predicted class for each."""
        return "predictions" in self.examples

    @property
    def correct(self) -> torch.Tensor:
        """(S, n) bool: whether each probe classifies each test example correctly."""
        import torch

        return torch.from_numpy(self.examples["predictions"] == self.examples["labels"])

    @property
    def votes(self) -> torch.Tensor:
        """(n,) bool: whether the class that most probes predict for an example is correct."""
        import torch

        predictions = torch.from_numpy(self.examples["predictions"].astype(np.int64))
        return predictions.mode(dim=0).values == torch.from_numpy(self.examples["labels"].astype(np.int64))


PROBES = {  # of a model's states, and what the number at the end of their names is
    "probe-": "",
    "few-shot-": "examples",
    "invariant-few-shot-": "examples, invariant",
    "projected-": "columns",
}
SHARED = "stderr_of_shared_examples"  # in the details of a mean over runs
OVER_SEEDS = "mean over pre-training seeds"  # the method of an estimate whose error is over seeds

Checkpoint = Mapping[str, CheckpointEstimate]  # what was measured of one checkpoint: kl, trace, probe-root, ...
Pair = tuple[Checkpoint, Checkpoint]  # what is compared: control and treated, or earlier and later


@dataclass(frozen=True, eq=False)
class Results:
    """All evaluations of a finished study, or of the complete blocks of one that is not finished.

    An estimate has the name of its measure as its key, e.g. `trace` or `probe-root`. Where a measure has several, each
    has its own name: `loss` gives `entropy`, `kl` and `loss`.

    Attributes:
        scale: The scale of the study.
        checkpoints: The estimates of each checkpoint by key, by run and step.
        folder: The study's folder.
        complete: The blocks that these results cover; None: all.
    """

    scale: Any  # an `AnyScale`; a study knows its own class
    checkpoints: Mapping[tuple[str, int], Checkpoint]
    folder: Path
    complete: Collection[int] | None = None

    @classmethod
    def read(cls, folder: Path, scale: AnyScale, complete: Collection[int] | None = None) -> Results:
        """Return the results in `folder`, of the blocks that are named; an evaluation that is missing is an error."""
        checkpoints: dict[tuple[str, int], dict[str, CheckpointEstimate]] = {}
        for name, experiment in _of_blocks(scale, complete).items():
            run = run_of(folder, name, experiment)
            parts = [(part.measures, experiment.steps(part, run)) for part in experiment.measurements]
            for step in sorted({step for _, steps in parts for step in steps}):
                checkpoint: dict[str, CheckpointEstimate] = {}
                for measures, steps in parts:
                    for measure in measures if step in steps else ():
                        _add(checkpoint, measure, measured(run, measure, step))
                checkpoints[name, step] = checkpoint
        return cls(scale, checkpoints, folder, complete)

    @functools.cached_property
    def experiments(self) -> Mapping[str, Experiment]:
        """The runs by name, of the complete blocks."""
        return _of_blocks(self.scale, self.complete)

    @property
    def blocks(self) -> int:
        """How many blocks the study has."""
        return len({experiment.block for experiment in self.scale.experiments.values()})

    @property
    def blocks_done(self) -> int:
        """How many of them these results cover: fewer than all if the study is not finished."""
        return len({experiment.block for experiment in self.experiments.values()})

    @property
    def keys(self) -> tuple[str, ...]:
        """The estimates that every checkpoint has; entropy and loss are left out if there is a KL."""
        first, *rest = self.checkpoints.values()
        # the loss is the sum of the KL and the entropy, which is the language's: neither says more about a model than
        # the KL
        common = [key for key in first if all(key in other for other in rest)]
        return tuple(key for key in common if "kl" not in common or key not in ("entropy", "loss"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The estimates that three quarters of the checkpoints of some block have; a study's page shows them.

        Blocks may be of different languages. Entropy and loss are left out of blocks in which there is a KL.
        """
        found: dict[str, None] = {}
        blocks: dict[int, list[Checkpoint]] = {}
        for (run, _), checkpoint in self.checkpoints.items():
            blocks.setdefault(self.experiments[run].block, []).append(checkpoint)
        for checkpoints in blocks.values():
            counts = Counter(key for checkpoint in checkpoints for key in checkpoint)
            common = [key for key, count in counts.items() if 4 * count >= 3 * len(checkpoints)]
            found |= dict.fromkeys(key for key in common if "kl" not in common or key not in ("entropy", "loss"))
        return tuple(found)

    @property
    def identical(self) -> str:
        """Which runs end with identical weights, in a sentence; empty if none do."""
        having: dict[str, dict[str, None]] = {}  # the runs, by weights
        for (run, step), checkpoint in self.checkpoints.items():
            # only at the end: at step 0, all runs of one seed and size are identical
            for one in checkpoint.values() if step == self.last_step(run) else ():
                having.setdefault(one.weights, {})[run] = None
        groups = [" and ".join(runs) for weights, runs in having.items() if weights and len(runs) > 1]
        return f"Identical weights: {'; '.join(groups)}." if groups else ""

    @property
    def loss_key(self) -> str:
        """Which estimate is the loss: `kl`, or `loss` if the truth is not known."""
        first = next(iter(self.checkpoints.values()))
        return loss_key([(first, first)])

    def run(self, name: str) -> Run:
        """Return a run of the study."""
        return run_of(self.folder, name, self.scale.experiments[name])

    def at(self, run: str, step: int | None = None) -> Checkpoint:
        """Return the estimates of a run's checkpoint, by default its last; an unknown run or step is named."""
        if run not in self.experiments:
            raise IsolossError(f"the study has no run {run!r}{did_you_mean(run, self.experiments)}")
        chosen = self.last_step(run) if step is None else step
        if (run, chosen) not in self.checkpoints:
            steps = ", ".join(map(str, self.of_run(run)))
            raise IsolossError(f"nothing was measured of the run {run} at step {chosen}; its steps are {steps}")
        return self.checkpoints[run, chosen]

    def last_step(self, run: str) -> int:
        """Return the last step of a run: where its last target ended it, or the planned one."""
        experiment = self.experiments[run]
        if any("last" in part.steps for part in experiment.measurements):
            return max(self.of_run(run))
        return experiment.last_step

    def of_run(self, name: str) -> Mapping[int, Checkpoint]:
        """Return the checkpoints of a run by step."""
        return self._by_run.get(name, {})

    @functools.cached_property
    def _by_run(self) -> dict[str, dict[int, Checkpoint]]:
        found: dict[str, dict[int, Checkpoint]] = {}
        for (run, step), checkpoint in self.checkpoints.items():
            found.setdefault(run, {})[step] = checkpoint
        return found

    @functools.cached_property
    def replicates(self) -> Mapping[int, tuple[str, int | str]]:
        """What `replicate` returns for the run of each estimate, by the estimate's id."""
        by_run = {name: replicate(name, experiment) for name, experiment in self.experiments.items()}
        found = ((by_run[run], checkpoint) for (run, _), checkpoint in self.checkpoints.items() if run in by_run)
        return {id(estimate): each for each, checkpoint in found for estimate in checkpoint.values()}

    @naming_extras()
    def table(self, keys: Sequence[str] | None = None) -> pl.DataFrame:
        """Return a row per checkpoint, as `isoloss.report.data` takes it; by default of `columns`."""
        import polars as pl

        rows = [self.row(*key, each, keys or self.columns) for key, each in self.checkpoints.items()]
        # by all rows: polars would guess a column's type from the first 100, where a measure may be null throughout
        return pl.DataFrame(rows, infer_schema_length=None)

    @naming_extras()
    def values(self) -> pl.DataFrame:
        """Return a row for each checkpoint and estimate; an accuracy is a fraction from 0 to 1."""
        import polars as pl

        rows = [
            (
                *(run, experiment.group or run, experiment.block, experiment.size, step),
                *(key, one.value, one.stderr, one.unit),
            )
            for (run, step), checkpoint in self.checkpoints.items()
            for experiment in [self.experiments[run]]
            for key, one in checkpoint.items()
        ]
        return pl.DataFrame(rows, schema=COLUMNS, orient="row")

    def row(self, run: str, step: int, checkpoint: Checkpoint, keys: Sequence[str]) -> dict[str, Any]:
        """Return the row of one checkpoint: of these estimates of it, at this step; null where it has none."""
        experiment = self.experiments[run]
        cells: dict[str, Any] = {
            "run": run,
            "group": experiment.group or run,
            "size": experiment.size,
            "parameters": self.run(run).result()["num_parameters"],
            "step": step,
        }
        for key in keys:
            own = checkpoint.get(key)
            cells |= {key: own and own.value, f"{key}_stderr": own and own.stderr}
        return cells


def _of_blocks(scale: AnyScale, blocks: Collection[int] | None) -> Mapping[str, Experiment]:
    return {name: one for name, one in scale.experiments.items() if blocks is None or one.block in blocks}


def replicate(name: str, experiment: Experiment) -> tuple[str, int | str]:
    """Return what a run shares with those that it is not independent of: its language and seed; without a seed, itself.

    Runs of one language and seed begin with the same weights and train on the same sentences. What an external
    checkpoint was trained on is not known, so its seed alone counts.
    """
    config = experiment.config
    language = repr(config.language) if isinstance(config, TrainConfig) else ""
    return language, name if config.seed is None else config.seed


def run_of(folder: Path, name: str, experiment: Experiment) -> Run:
    """Return the run called `name` of the study in `folder`."""
    path = folder / "runs" / name
    return ExternalRun(path) if isinstance(experiment.config, ExternalCheckpoint) else Run(path)


def _add(checkpoint: dict[str, CheckpointEstimate], measure: str, estimates: Mapping[str, CheckpointEstimate]) -> None:
    """Add what a measure found to a checkpoint: one estimate under the measure's name, several under their own."""
    for name, each in estimates.items():
        key = measure if len(estimates) == 1 else name
        checkpoint[f"{measure}.{name}" if key in checkpoint else key] = each


def common_measures(scale: AnyScale) -> dict[str, dict[str, str]]:
    """Return what any study's claims can measure, by case.

    Each measure, `flatness` (both traces) and `transfer` (all probes, also few-shot and projected ones).
    """
    measures = [measure for one in scale.experiments.values() for part in one.measurements for measure in part.measures]
    by_name = {m: {"": m} for m in dict.fromkeys(measures)}
    flatness = {trace: trace for trace in RESCALED if trace in by_name}
    probes = {}
    for measure, (kind, words) in itertools.product(by_name, PROBES.items()):
        if measure.startswith(kind):
            case = measure.removeprefix(kind)
            if words:
                task, _, number = case.rpartition("-")
                case = f"{task} ({number} {words})"
            probes[case] = measure
    return {"kl": {"": "kl"}, **by_name, "flatness": flatness, "transfer": probes}


# --- differences between checkpoints: over the examples of one pair, or over seeds or clusters


def measured(run: Run, measure: str, step: int) -> dict[str, CheckpointEstimate]:
    """Return the estimates of an evaluation by name; a missing evaluation is an error that names it."""
    evaluation = run.evaluation(measure, step)
    if evaluation is None:
        raise IsolossError(f"{run.path} has no evaluation {measure} at step {step}: run the study first")
    arrays = run.examples(evaluation)
    return {
        name: CheckpointEstimate.of(
            estimate,
            inputs=evaluation.inputs,
            settings=evaluation.settings,
            examples={k.removeprefix(f"{name}."): v for k, v in arrays.items() if k.startswith(f"{name}.")},
            weights=evaluation.weights,
        )
        for name, estimate in evaluation.estimates.items()
    }


def difference(later: CheckpointEstimate, earlier: CheckpointEstimate, *, factor: float = 1.0) -> Estimate:
    """Return later - factor * earlier, with the error of the difference on the same examples.

    Differences of accuracies are in percentage points; on sampled test examples, with the error of
    `isoloss.transfer.compare.accuracy_difference` over examples and probes. Otherwise the squared error is the sum
    of (psi_i - factor psi'_i)^2 over n (n - 1), with n the `samples`, where psi_i and psi'_i are the influences of
    example i (or, for an accuracy over all sentences, of draw i) on later and earlier. The difference of exact values
    is exact.

    Raises:
        IsolossError: The two were not measured on the same examples with the same settings.

    Example:
        >>> import numpy as np
        >>> from isoloss.studies.results import CheckpointEstimate, difference
        >>> def measured_of(*losses):  # the mean over sentences, and what each sentence adds to it
        ...     known = {"stderr": 0.0, "samples": len(losses), "unit": "nats", "num_predictions": 9, "method": "loss"}
        ...     influence = np.array(losses, np.float32) - np.mean(losses)
        ...     same = {"inputs": "same sentences", "settings": {}, "examples": {"influence": influence}}
        ...     return CheckpointEstimate(value=float(np.mean(losses)), **known, **same)
        >>> easy_and_hard = measured_of(1, 5, 9), measured_of(2, 6, 11)
        >>> print(difference(easy_and_hard[1], easy_and_hard[0]))  # each sentence differs by 1, 1 and 2
        1.33 ± 0.33 nats
    """
    check_same_examples(later, earlier)
    of_accuracy = later.unit == "accuracy"
    if of_accuracy and factor != 1:
        raise IsolossError(f"an accuracy is compared as it is, not with a factor of {factor:g}")
    if later.is_accuracy:
        from isoloss.transfer.compare import accuracy_difference

        return _in_points(accuracy_difference(later.correct, earlier.correct))
    found = paired_difference(_by_example(later), times(_by_example(earlier), factor))
    return _in_points(found) if of_accuracy else found


def check_same_examples(first: CheckpointEstimate, *others: CheckpointEstimate) -> None:
    """Refuse estimates that were not made on the same examples under the same settings."""
    for other in others:
        same_inputs = (first.inputs, first.settings) == (other.inputs, other.settings)
        is_exact = first.is_exact and other.is_exact
        if not same_inputs or first.examples.keys() != other.examples.keys() or not (first.examples or is_exact):
            raise IsolossError(
                "two evaluations were not made on the same examples under the same settings, so their difference has "
                "no paired error: measure both checkpoints again with one version of isoloss"
            )


def averaged(of_one_run: Sequence[CheckpointEstimate]) -> CheckpointEstimate:
    """Return the mean of an estimate over checkpoints of one run, which are not independent of each other.

    What an example adds to the mean is the mean of what it adds to each; the probes of all count as probes of one.
    """
    first, *others = of_one_run
    if not others:
        return first
    check_same_examples(first, *others)
    examples = dict(first.examples)
    if "influence" in examples:
        examples["influence"] = np.mean([one.examples["influence"] for one in of_one_run], axis=0)
    if "predictions" in examples:
        examples["predictions"] = np.concatenate([one.examples["predictions"] for one in of_one_run])
    return dataclasses.replace(first, value=statistics.fmean(one.value for one in of_one_run), examples=examples)


def combined(checkpoint: Checkpoint, weights: Mapping[str, float]) -> CheckpointEstimate:
    """Return the sum of some estimates of a checkpoint times weights, such as the mean of probes, by their keys.

    They are of one unit, and of the same examples or draws, whose influences add up.
    """
    first, *others = (checkpoint[key] for key in weights)
    if any((one.unit, one.samples) != (first.unit, first.samples) for one in others):
        raise IsolossError(f"{', '.join(weights)} are not of one unit and the same examples, so they have no sum")
    value = sum(weight * checkpoint[key].value for key, weight in weights.items())
    if first.is_exact:
        return dataclasses.replace(first, value=value)
    influence = np.sum([weight * checkpoint[key].examples["influence"] for key, weight in weights.items()], axis=0)
    error = math.sqrt(float(np.square(influence).sum()) / (first.samples * (first.samples - 1)))
    return dataclasses.replace(first, value=value, stderr=error, examples={"influence": influence})


def _by_example(one: CheckpointEstimate) -> Estimate:
    """Return an estimate with what each example adds to it, and the error that follows from that alone."""
    if "influence" not in one.examples:
        return one
    influence = one.examples["influence"].astype(np.float64)
    # not its length: that of a trace also has rows for the control variates' sample
    n = one.samples
    stderr = math.sqrt(float(np.square(influence).sum()) / (n * (n - 1)))
    return dataclasses.replace(one, stderr=stderr, influence=influence)


def _in_points(found: Estimate) -> Estimate:
    """Return a difference of accuracies in percentage points."""
    return dataclasses.replace(times(found, 100), unit="percentage points")


def cka(first: CheckpointEstimate, second: CheckpointEstimate) -> Estimate:
    """Return the linear CKA of the features of two checkpoints, by the `effective-dimension` of the measure `features`.

    See `isoloss.transfer.similarity.linear_cka`: 1 where the features are the same up to rotation and scale, 0
    where they are uncorrelated. The error is over the draw of the sentences, which are the same for both.
    """
    from isoloss.transfer.similarity import from_upper_triangle, linear_cka

    if not all("gram" in one.examples for one in (first, second)):
        raise IsolossError(
            "CKA takes two evaluations by the measure features of a sample: effective-dimension keeps a Gram matrix"
        )
    if first.inputs != second.inputs:
        raise IsolossError(
            "the features of two checkpoints are not of the same sentences, so they have no CKA: measure both with the "
            "same feature_sentences and seed, on the same language or text"
        )
    return linear_cka(*(from_upper_triangle(one.examples["gram"]) for one in (first, second)))


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over runs of different seeds, with the standard error of their mean.

    It includes each run's own error of measurement where each is measured on sentences of its own; `mean` and `change`
    add that of sentences which all runs share.
    """
    if len(estimates) < 2:
        raise IsolossError("a mean over seeds needs at least two runs")
    values = [estimate.value for estimate in estimates]
    return Estimate(
        value=statistics.fmean(values),
        stderr=statistics.stdev(values) / math.sqrt(len(values)),
        samples=len(values),
        unit=estimates[0].unit,
        num_predictions=sum(estimate.num_predictions for estimate in estimates),
        num_probes=estimates[0].num_probes,
        method=OVER_SEEDS,
    )


def mean(estimates: Sequence[Estimate], *, clusters: Sequence[str] = ()) -> Estimate:
    """Return the mean over clusters or, without clusters, over seeds; of a single one, the estimate itself.

    The error of estimates of checkpoints includes that of the examples, where these are the same for all.
    """
    if not clusters:
        found = estimates[0] if len(estimates) == 1 else over_seeds(estimates)
    else:
        from isoloss.statistics.clusters import cluster_mean

        found = cluster_mean([estimate.value for estimate in estimates], clusters, unit=estimates[0].unit)
    checkpoints = [one for one in estimates if isinstance(one, CheckpointEstimate)]
    if len(checkpoints) < len(estimates):
        return found
    return _with_shared_examples(found, [_influence_of(one) for one in checkpoints], checkpoints)


def change(pairs: Sequence[Pair], key: str, *, factor: float = 1.0, clusters: Sequence[str] = ()) -> Estimate:
    """Return second - factor * first of the estimate `key`: of one pair, or the mean over pairs.

    One pair has the error of the difference on the same examples; several seeds have the error of the mean of the
    differences, which are paired by seed; clusters, such as the grammar of each pair, have the error of the mean of the
    clusters' mean differences (`isoloss.statistics.clusters.cluster_mean`). Where all were measured on the same
    examples, the seeds or clusters do not show how far these move the mean: their part of the error is added.
    """
    found = mean([difference(second[key], first[key], factor=factor) for first, second in pairs], clusters=clusters)
    scale = 100 if pairs[0][0][key].unit == "accuracy" else 1
    moves = [scale * (_influence_of(b[key]) - factor * _influence_of(a[key])) for a, b in pairs]
    return _with_shared_examples(found, moves, [one[key] for pair in pairs for one in pair])


def _influence_of(one: CheckpointEstimate) -> np.ndarray[Any, Any]:
    """Return what each example adds to an estimate, as an influence; empty: it is exact, or that is not known."""
    if "influence" in one.examples:
        return one.examples["influence"].astype(np.float64)
    if one.is_accuracy:
        by_example = (one.examples["predictions"] == one.examples["labels"]).mean(axis=0)
        centered: np.ndarray[Any, Any] = by_example - by_example.mean()
        return centered
    return np.zeros(0)


def _with_shared_examples(
    found: Estimate, influences: Sequence[np.ndarray[Any, Any]], measured: Sequence[CheckpointEstimate]
) -> Estimate:
    """Add to the error of a mean over runs that of the examples, where all `measured` have the same.

    The two are independent. The part of an example's influence that differs between runs counts twice, so the error is
    a little too large rather than too small. The degrees of freedom are those of such a sum (Satterthwaite 1946).
    """
    n = measured[0].samples if "influence" in measured[0].examples else len(influences[0])
    are_same = len({one.inputs for one in measured}) == len({len(each) for each in influences}) == 1
    # the difference of a single pair is over its examples already
    if len(influences) < 2 or not are_same or n < 2:
        return found
    shared = math.sqrt(float(np.square(np.mean(influences, axis=0)).sum()) / (n * (n - 1)))
    if shared == 0:
        return found
    # Welch and Satterthwaite
    squares = found.stderr**2, shared**2
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / found.freedom + squares[1] ** 2 / (n - 1))
    return dataclasses.replace(
        found,
        stderr=math.sqrt(sum(squares)),
        effective_samples=freedom + 1,
        details={**found.details, SHARED: shared},
    )


def loss_key(pairs: Sequence[Pair]) -> str:
    """Return which estimate is the loss: the KL to the truth, or, if that is not known, the loss itself."""
    return "kl" if "kl" in pairs[0][0] else "loss"
