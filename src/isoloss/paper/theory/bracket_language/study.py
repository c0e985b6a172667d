"""All solutions side by side: their traces, their heads downstream, and the width that random features need."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.paper.theory.bracket_language import descent, heads, solutions
from isoloss.paper.theory.bracket_language.attention import BracketAttention
from isoloss.paper.theory.bracket_language.inputs import (
    LENGTHS,
    Inputs,
    downstream_inputs,
    num_inputs,
    pretraining_inputs,
)
from isoloss.paper.theory.bracket_language.trace import Flatness, flatness, hessian_trace

TWO, KINKS, FEATURES, BALANCED = "two neurons", "four on kinks", "random features", "features, balanced"
DESCENT, FROM_FEATURES = "descent", "features, descent"
LOSSES = (0.1, 0.01, 1e-9)  # that random features are to reach
EXTRA_FEATURES = 2  # random features, as a multiple of those that fit every input
WIDTHS = (2, 4, 8, 16)  # of the models with the two neurons
MAX_K = 50  # up to which Lemma G.5 is checked
_MAX_TABLE = 1 << 26  # numbers of the training sets of one size


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `study` runs.

    Attributes:
        lengths: T, increasing.
        width: Neurons of the descent from random weights.
        steps: Steps of each descent.
        samples: n, sizes of downstream training sets, increasing.
        trials: Training sets of each size.
        draws: Draws of random features for the width that they need.
        seed: Decides features, initial weights and training sets.
    """

    lengths: tuple[int, ...] = (6, 8, 10)
    width: int = 16
    steps: int = 1500
    samples: tuple[int, ...] = (2, 4, 8, 16)
    trials: int = 4096
    draws: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths) & set(LENGTHS)):
            raise IsolossError(
                f"the lengths are {_list(self.lengths)}; choose from {_list(LENGTHS)}, increasing, to visit every input"
            )
        if not 2 <= self.width <= 1024:
            raise IsolossError(f"the width is {self.width}; it must be from 2 to 1024 neurons")
        if self.steps < 1:
            raise IsolossError(f"the number of steps is {self.steps}; it must be at least 1")
        if not self.samples or list(self.samples) != sorted(set(self.samples)) or self.samples[0] < 1:
            raise IsolossError(
                f"the sizes of training sets are {_list(self.samples)}; they must be positive, increasing"
            )
        if self.trials < 2:
            raise IsolossError(f"the number of trials is {self.trials}; a standard error needs at least 2")
        if self.trials * self.samples[-1] > _MAX_TABLE:
            raise IsolossError(
                f"{self.trials} training sets of {self.samples[-1]} strings are too many: at most {_MAX_TABLE} strings"
            )
        if self.draws < 2:
            raise IsolossError(f"the number of draws is {self.draws}; a standard error needs at least 2")

    @property
    def num_steps(self) -> int:
        """Steps of all descents: one for each length, and one from the random features of the shortest."""
        return self.steps * (len(self.lengths) + 1)


@dataclass(frozen=True, kw_only=True)
class SolutionRow:
    """A solution of the pre-training task.

    Attributes:
        solution: Its name.
        length: T.
        width: m.
        flatness: Loss, trace and factors; a neuron counts as active where V_i h > 0.
        closed_trace: The trace where a neuron with V_i h = 0 counts too.
        hessian: Trace of the Hessian by differentiating the loss twice; None where that was not done.
        off_axis: Fraction of the neurons' weight, `|u_i| |V_i|`, that is not along [1; 0].
        uneven: The same among the first T coordinates alone, which are all that a string without a hidden token has.
    """

    solution: str
    length: int
    width: int
    flatness: Flatness
    closed_trace: float
    hessian: float | None
    off_axis: float
    uneven: float


@dataclass(frozen=True, kw_only=True)
class WidthRow:
    """How many random features a length needs.

    Attributes:
        length: T.
        inputs: Inputs of the pre-training task.
        predicted: The width at which they fit every input, by counting equations.
        rank: Rank of the inputs whose answer is 1; 2 T if conditions (3) and (4) leave one direction only.
        widths: Mean least width at which the loss is at most each of `LOSSES`.
        widths_stderr: Their standard errors over the draws.
        norm: `|u|^2 / T^2` of the solution, which Theorem G.6 bounds by a constant.
        features: The width of that solution.
    """

    length: int
    inputs: int
    predicted: int
    rank: int
    widths: tuple[float, ...]
    widths_stderr: tuple[float, ...]
    norm: float
    features: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `study`.

    Attributes:
        solutions: One row for each solution and length.
        heads: One for each solution, length and size of training set.
        widths: One for each length.
        paths: By length: the descent from random weights.
        ranks: By k: the rank of Lemma G.5's matrix of 2k + 1 shifted rows.
    """

    solutions: tuple[SolutionRow, ...]
    heads: tuple[heads.HeadRow, ...]
    widths: tuple[WidthRow, ...]
    paths: dict[int, tuple[descent.PathPoint, ...]]
    ranks: dict[int, int]


def study(settings: Settings, *, progress: Callable[[int], None] | None = None) -> Result:
    """Make every solution, measure it, descend on the trace, and fit heads downstream.

    Args:
        settings: What to run.
        progress: Called with the number of descents' steps that are done, of `settings.num_steps`.
    """
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done)

    rows: list[SolutionRow] = []
    tried: list[heads.HeadRow] = []
    widths: list[WidthRow] = []
    paths: dict[int, tuple[descent.PathPoint, ...]] = {}
    for length in settings.lengths:
        inputs = pretraining_inputs(length)
        features = solutions.random_features(inputs, EXTRA_FEATURES * solutions.full_width(length), seed=settings.seed)
        rescaled = solutions.balanced(features, inputs)
        widths.append(_width_row(settings, inputs, features))
        rows += [_row(TWO, solutions.two_neurons(length, width), inputs, differentiate=width == 2) for width in WIDTHS]
        rows += [_row(KINKS, solutions.on_the_kink(length), inputs)]
        rows += [_row(FEATURES, features, inputs), _row(BALANCED, rescaled, inputs)]
        end = descent.initial(length, settings.width, seed=settings.seed)
        paths[length] = tuple(descent.descend(end, inputs, steps=settings.steps, progress=count))
        rows.append(_row(DESCENT, end, inputs))
        models = {
            TWO: solutions.two_neurons(length, 2),
            DESCENT: end,
            KINKS: solutions.on_the_kink(length),
            BALANCED: rescaled,
        }
        tried += _heads(settings, length, models)
        if length == settings.lengths[0]:
            descent.descend(rescaled, inputs, steps=settings.steps, progress=count)
            rows.append(_row(FROM_FEATURES, rescaled, inputs))
    ranks = {k: int(torch.linalg.matrix_rank(solutions.shifted_signs(k))) for k in range(1, MAX_K + 1)}
    return Result(solutions=tuple(rows), heads=tuple(tried), widths=tuple(widths), paths=paths, ranks=ranks)


def _row(name: str, model: BracketAttention, inputs: Inputs, *, differentiate: bool = False) -> SolutionRow:
    return SolutionRow(
        solution=name,
        length=inputs.length,
        width=len(model.output),
        flatness=flatness(model, inputs),
        closed_trace=flatness(model, inputs, count_kink=True).trace,
        hessian=hessian_trace(model, inputs) if differentiate else None,
        off_axis=_off_axis(model, 2 * inputs.length),
        uneven=_off_axis(model, inputs.length),
    )


@torch.no_grad()
def _off_axis(model: BracketAttention, coordinates: int) -> float:
    """Return the fraction of |u_i| |V_i|, V_i cut to its first coordinates, that is not along [1; 0]."""
    value, length = model.value[:, :coordinates], model.value.shape[1] // 2
    rest = value.clone()
    rest[:, :length] -= rest[:, :length].mean(dim=1, keepdim=True)
    weight = model.output.abs()
    return float(weight @ rest.norm(dim=1) / (weight @ value.norm(dim=1)))


def _width_row(settings: Settings, inputs: Inputs, features: BracketAttention) -> WidthRow:
    length = inputs.length
    needed: list[list[int]] = []
    for draw in range(settings.draws):
        losses = solutions.losses_by_width(inputs, seed=seeds.derive(settings.seed, "brackets", "widths", draw))
        needed.append([int((losses <= least).nonzero()[0]) for least in LOSSES])
    columns = list(zip(*needed, strict=True))
    return WidthRow(
        length=length,
        inputs=num_inputs(length),
        predicted=solutions.full_width(length),
        rank=int(torch.linalg.matrix_rank(inputs.z[inputs.y > 0])),
        widths=tuple(statistics.fmean(column) for column in columns),
        widths_stderr=tuple(statistics.stdev(column) / math.sqrt(settings.draws) for column in columns),
        norm=float(features.output.detach().square().sum()) / length**2,
        features=len(features.output),
    )


def _heads(settings: Settings, length: int, models: Mapping[str, BracketAttention]) -> list[heads.HeadRow]:
    inputs = downstream_inputs(length)
    given = {"trials": settings.trials, "seed": settings.seed}
    rows = [row for n in settings.samples for row in heads.try_heads(models, inputs, samples=n, **given)]
    return sorted(rows, key=lambda row: list(models).index(row.solution))  # by solution, then by n


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"
