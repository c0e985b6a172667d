"""All solutions side by side: their traces, their heads downstream, and the width that random features need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from isoloss import seeds
from isoloss.paper.theory.bracket_language import attention, heads, solutions
from isoloss.paper.theory.bracket_language.attention import BracketAttention, Inputs
from isoloss.paper.theory.bracket_language.settings import Settings
from isoloss.paper.theory.bracket_language.solutions import PathPoint
from isoloss.paper.theory.bracket_language.trace import Flatness, flatness, hessian_trace
from isoloss.paper.theory.statements import counter, mean_and_stderr

TWO, KINKS, FEATURES, BALANCED = "two neurons", "four on kinks", "random features", "features, balanced"
DESCENT, FROM_FEATURES = "descent", "features, descent"
LOSSES = (0.1, 0.01, 1e-9)  # that random features are to reach
EXTRA_FEATURES = 2  # random features, as a multiple of those that fit every input
WIDTHS = (2, 4, 8, 16)  # of the models with the two neurons
MAX_K = 50  # up to which Lemma G.5 is checked


@dataclass(frozen=True, kw_only=True)
class SolutionRow:
    """A solution of the pre-training task."""

    solution: str  # its name
    length: int  # T
    width: int  # m
    flatness: Flatness  # loss, trace and factors; a neuron counts as active where V_i h > 0
    closed_trace: float  # the trace where a neuron with V_i h = 0 counts too
    hessian: float | None  # trace of the Hessian by differentiating the loss twice; None where that was not done
    off_axis: float  # fraction of the neurons' weight, `|u_i| |V_i|`, that is not along [1; 0]
    # the same among the first T coordinates alone, which are all that a string without a hidden token has
    uneven: float


@dataclass(frozen=True, kw_only=True)
class WidthRow:
    """How many random features a length needs."""

    length: int  # T
    inputs: int  # inputs of the pre-training task
    predicted: int  # the width at which they fit every input, by counting equations
    rank: int  # rank of the inputs whose answer is 1; 2 T if conditions (3) and (4) leave one direction only
    widths: tuple[float, ...]  # mean least width at which the loss is at most each of `LOSSES`
    widths_stderr: tuple[float, ...]  # their standard errors over the draws
    norm: float  # `|u|^2 / T^2` of the solution, which Theorem G.6 bounds by a constant
    features: int  # the width of that solution


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `study`."""

    solutions: tuple[SolutionRow, ...]  # one row for each solution and length
    heads: tuple[heads.HeadRow, ...]  # one for each solution, length and size of training set
    widths: tuple[WidthRow, ...]  # one for each length
    paths: dict[int, tuple[PathPoint, ...]]  # by length: the descent from random weights
    ranks: dict[int, int]  # by k: the rank of Lemma G.5's matrix of 2k + 1 shifted rows


def study(settings: Settings, *, progress: Callable[[int], None] | None = None) -> Result:
    """Make every solution, measure it, descend on the trace, and fit heads downstream.

    `progress` is called with the number of descents' steps that are done, of `settings.num_steps`.
    """
    steps, seed, count = settings.steps, settings.seed, counter(progress)
    rows: list[SolutionRow] = []
    tried: list[heads.HeadRow] = []
    widths: list[WidthRow] = []
    paths: dict[int, tuple[PathPoint, ...]] = {}
    for length in settings.lengths:
        inputs = attention.pretraining_inputs(length)
        features = solutions.random_features(inputs, EXTRA_FEATURES * solutions.full_width(length), seed=seed)
        rescaled = solutions.balanced(features, inputs)
        widths.append(_width_row(settings, inputs, features))
        rows += [_row(TWO, solutions.two_neurons(length, width), inputs, differentiate=width == 2) for width in WIDTHS]
        kinks = solutions.on_the_kink(length)
        rows += [_row(KINKS, kinks, inputs), _row(FEATURES, features, inputs), _row(BALANCED, rescaled, inputs)]
        end = solutions.initial(length, settings.width, seed=seed)
        paths[length] = tuple(solutions.descend(end, inputs, steps=steps, progress=count))
        rows.append(_row(DESCENT, end, inputs))
        models = {TWO: solutions.two_neurons(length, 2), DESCENT: end, KINKS: kinks, BALANCED: rescaled}
        tried += _heads(settings, length, models)
        if length == settings.lengths[0]:
            solutions.descend(rescaled, inputs, steps=steps, progress=count)
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
    means, errors = zip(*map(mean_and_stderr, zip(*needed, strict=True)), strict=True)
    return WidthRow(
        length=length,
        inputs=attention.num_inputs(length),
        predicted=solutions.full_width(length),
        rank=int(torch.linalg.matrix_rank(inputs.z[inputs.y > 0])),
        widths=means,
        widths_stderr=errors,
        norm=float(features.output.detach().square().sum()) / length**2,
        features=len(features.output),
    )


def _heads(settings: Settings, length: int, models: Mapping[str, BracketAttention]) -> list[heads.HeadRow]:
    inputs = attention.downstream_inputs(length)
    given = {"trials": settings.trials, "seed": settings.seed}
    rows = [row for n in settings.samples for row in heads.try_heads(models, inputs, samples=n, **given)]
    return sorted(rows, key=lambda row: list(models).index(row.solution))  # by solution, then by n
