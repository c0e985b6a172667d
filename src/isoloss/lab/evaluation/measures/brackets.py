"""Measures of the bracket laboratory: the parts of the trace in the paper's model, and what few strings teach a probe.

Shapes: n contexts of T brackets, m neurons, k the width of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isoloss.config import setting
from isoloss.lab.evaluation.measures.base import Measure, MeasureResult, SeededMeasure, digest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from isoloss.lab.evaluation.context import MeasureContext
    from isoloss.lab.languages.hidden_bracket import HiddenBracket
    from isoloss.statistics.estimate import Estimate

TASKS = ("g", "abs-g", "zero", "parity")
SHOTS = (4, 8, 16, 32, 64)
_UNIT = "nats per predicted token"


def _why_not(context: MeasureContext) -> str | None:
    from isoloss.lab.languages.hidden_bracket import HiddenBracket

    if isinstance(context.language, HiddenBracket):
        return None
    return "it is of the language hidden-bracket (isoloss ls languages)"


@dataclass(frozen=True, kw_only=True)
class BracketParts(Measure):
    r"""Trace and minimal trace of bracket-attention by part, cancellation, distance to the bound of Theorem 5.1: exact.

    Everything is an average over all 2 T C(T, T/2) contexts. With p = sigmoid(f) the trace is `E p (1 - p) |grad f|^2`,
    the part of Q and K (`attention`) and the part of u and V (`neurons`). The minimal trace is over rescalings of each
    neuron, (s V_i, u_i / s), and of each row of queries and keys, (s Q_d, K_d / s): two parts A and B of the trace
    become B s^2 + A / s^2, whose minimum is 2 sqrt(A B). `cancellation` is `E sum_i |u_i relu(V_i h)|` over E|f|, 1
    where no two active neurons disagree (the paper's equation 4). `bound-ratio` is the trace over `E p (1 - p) 2 |f| /
    sqrt(T)`, which the proof of Theorem 5.1 shows to be at most the trace.
    """

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return that the language is another one."""
        return _why_not(context)

    def run(self, model: Any, context: MeasureContext) -> Mapping[str, Estimate]:
        """Return the trace, the minimal trace, their parts, `cancellation` and `bound-ratio`.

        Raises:
            IsolossError: The model is no bracket-attention, or its f is 0 in every context.
        """
        from isoloss.errors import IsolossError
        from isoloss.statistics.estimate import Estimate

        if model.config.model_type != "isoloss-bracket-attention":
            raise IsolossError(f"bracket-parts is of the model bracket-attention, not of a {type(model).__name__}")
        contexts = context.language.contexts()
        values = parts(model, contexts)
        return {
            name: Estimate(
                value=value,
                stderr=0.0,
                samples=0,
                unit=_UNIT if name.endswith("trace") else "times",
                num_predictions=len(contexts),
                method="closed form, all contexts",
            )
            for name, value in values.items()
        }


def parts(model: Any, contexts: torch.Tensor) -> dict[str, float]:
    """Return what `BracketParts` finds on contexts (n, T + 1), by name, in float64; a model of zeros is refused."""
    import torch

    from isoloss.errors import IsolossError
    from isoloss.lab.models.bracket_attention import Weights, squares

    base, dtype = model.base_model, torch.float64
    modules = (base.query, base.key, base.value, model.answers.read)
    query, key, value, output = (module.weight.detach().to("cpu", dtype) for module in modules)
    # the sum of the encodings: coordinates j and j + T are of token j alone
    z = base.signs(contexts[:, :-1], dtype).sum(dim=1)
    found = squares(Weights(query, key, value, output[0]), z)
    variance = found.outputs.sigmoid() * (-found.outputs).sigmoid()

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (variance[:, None] * values).mean(dim=0)

    by_row = {"attention": (mean(found.query), mean(found.key)), "neurons": (mean(found.value), mean(found.output))}
    traces = {name: float((a + b).sum()) for name, (a, b) in by_row.items()}
    minimal = {name: 2 * float((a * b).sqrt().sum()) for name, (a, b) in by_row.items()}
    size = found.outputs.abs()
    if not size.any():
        raise IsolossError("the model's f is 0 in every context, so it has no cancellation and no bound on its trace")
    bound = float((variance * size).mean()) * 2 / math.sqrt(z.shape[1] // 2)
    return {
        "parts-trace": sum(traces.values()),
        **{f"{name}-trace": value for name, value in traces.items()},
        "parts-minimal-trace": sum(minimal.values()),
        **{f"{name}-minimal-trace": value for name, value in minimal.items()},
        "cancellation": float(found.terms.sum(dim=1).mean() / size.mean()),
        "bound-ratio": sum(traces.values()) / bound,
    }


@dataclass(frozen=True, kw_only=True)
class BracketProbes(SeededMeasure):
    r"""R^2 of ridge regressions on the last token's state, from few strings of brackets of which none is hidden.

    The tasks are functions of g, the number of `>` minus the number of `<`: g itself, its absolute value, whether it is
    0, and the parity of the number of `>`. A model that has g has them all, so that the Bayes-optimal R^2 is 1. Of all
    2^T strings 4, 8, 16, 32 or 64 are drawn without replacement to fit on, wherever others are left, which are
    predicted.
    """

    bracket_draws: int = setting(16, minimum=2)
    """Draws of the strings that a regression is fitted on; the same for all models."""

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return that the language is another one."""
        return _why_not(context)

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `r2-TASK-NUMBER`, the mean over draws, with its standard error over draws."""
        from isoloss.transfer.features import extract

        language: HiddenBracket = context.language
        return self._found(language, extract(model, language.strings(), pooling="last").cpu().double().numpy())

    def _found(self, language: HiddenBracket, features: NDArray[np.float64], prefix: str = "") -> MeasureResult:
        strings = language.strings()
        found = {}
        for shots in SHOTS:
            if shots < len(features):
                scores = scores_of(features, targets(language), shots, draws=self.bracket_draws, seed=self.seed)
                for task, column in zip(TASKS, scores.T, strict=True):
                    name = f"{prefix}r2-{task}-{shots}"
                    found[name] = _over_draws(column, num_predictions=len(features) - shots)
        return MeasureResult(estimates=found, inputs=digest(strings.tokens, more=[self.seed, self.bracket_draws]))


@dataclass(frozen=True, kw_only=True)
class BracketTokens(BracketProbes):
    """R^2 of the same regressions on the tokens themselves, 1 for `<` and -1 for `>`: what no model is needed for."""

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `tokens-r2-TASK-NUMBER`; see `BracketProbes.run`."""
        language: HiddenBracket = context.language
        return self._found(language, language.signs().numpy(), prefix="tokens-")


def targets(language: HiddenBracket) -> NDArray[np.float64]:
    """Return (2^T, 4): the value of each of `TASKS` of each string."""
    import numpy as np

    g = -language.signs().numpy().sum(axis=1)
    closed = (language.length + g) / 2
    return np.stack([g, np.abs(g), g == 0, 1 - 2 * (closed % 2)], axis=1).astype(float)


def scores_of(
    features: NDArray[np.float64], targets: NDArray[np.float64], shots: int, *, draws: int, seed: int
) -> NDArray[np.float64]:
    """Return (draws, t): R^2 of each target at the rows that are not drawn, from `shots` rows that are."""
    import numpy as np
    import torch

    from isoloss import seeds
    from isoloss.transfer.ridge import r_squared

    rows = (
        torch.randperm(len(features), generator=seeds.generator(seed, "bracket strings", shots, draw))[:shots].numpy()
        for draw in range(draws)
    )
    return np.stack([r_squared(features, targets, chosen) for chosen in rows])


def _over_draws(values: NDArray[np.float64], *, num_predictions: int) -> Estimate:
    from isoloss.statistics.estimate import Estimate

    deviations = values - values.mean()
    return Estimate(
        value=float(values.mean()),
        stderr=float(values.std(ddof=1)) / math.sqrt(len(values)),
        samples=len(values),
        unit="R²",
        num_predictions=num_predictions,
        method="ridge regression, strength by leave-one-out, mean over draws",
        influence=deviations,
    )
