"""Measures of the bracket laboratory: the parts of the trace in the paper's model, and what few strings teach a probe.

Shapes: n contexts of T brackets, m neurons, k the width of queries and keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.measures.base import FunctionMeasure, MeasureResult, digest, requires

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
Draws = Annotated[
    int, setting(minimum=2), "Draws of the strings that a regression is fitted on; the same for all models."
]


def _why_not(measure: FunctionMeasure, context: MeasureContext) -> str | None:
    from isoloss.lab.languages.hidden_bracket import HiddenBracket

    if isinstance(context.language, HiddenBracket):
        return None
    return "it is of the language hidden-bracket (isoloss ls languages)"


@requires(_why_not)
def bracket_parts(model: Any, *, language: Any) -> dict[str, Estimate]:
    r"""Trace and minimal trace of bracket-attention by part, cancellation, distance to the bound of Theorem 5.1: exact.

    Everything is an average over all 2 T C(T, T/2) contexts. With p = sigmoid(f) the trace is `E p (1 - p) |grad f|^2`,
    the part of Q and K (`attention`) and the part of u and V (`neurons`). The minimal trace is over rescalings of each
    neuron, (s V_i, u_i / s), and of each row of queries and keys, (s Q_d, K_d / s): two parts A and B of the trace
    become B s^2 + A / s^2, whose minimum is 2 sqrt(A B). `cancellation` is `E sum_i |u_i relu(V_i h)|` over E|f|, 1
    where no two active neurons disagree (the paper's equation 4). `bound-ratio` is the trace over `E p (1 - p) 2 |f| /
    sqrt(T)`, which the proof of Theorem 5.1 shows to be at most the trace.

    Raises:
        IsolossError: The model is no bracket-attention, or its f is 0 in every context.
    """
    from isoloss.statistics.estimate import Estimate

    if model.config.model_type != "isoloss-bracket-attention":
        raise IsolossError(f"bracket-parts is of the model bracket-attention, not of a {type(model).__name__}")
    contexts = language.contexts()
    return {
        name: Estimate(
            value=value,
            stderr=0.0,
            samples=0,
            unit=_UNIT if name.endswith("trace") else "times",
            num_predictions=len(contexts),
            method="closed form, all contexts",
        )
        for name, value in parts(model, contexts).items()
    }


def parts(model: Any, contexts: torch.Tensor) -> dict[str, float]:
    """Return what `bracket_parts` finds on contexts (n, T + 1), by name, in float64; a model of zeros is refused."""
    import torch

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


@requires(_why_not)
def bracket_probes(model: Any, *, language: Any, bracket_draws: Draws = 16, seed: int = 0) -> MeasureResult:
    r"""R^2 of ridge regressions on the last token's state, from few strings of brackets of which none is hidden.

    The tasks are functions of g, the number of `>` minus the number of `<`: g itself, its absolute value, whether it is
    0, and the parity of the number of `>`. A model that has g has them all, so that the Bayes-optimal R^2 is 1. Of all
    2^T strings 4, 8, 16, 32 or 64 are drawn without replacement to fit on, wherever others are left, which are
    predicted. `r2-TASK-NUMBER` is the mean over draws.
    """
    from isoloss.transfer.features import extract

    features = extract(model, language.strings(), pooling="last").cpu().double().numpy()
    return _fitted(language, features, "r2", bracket_draws, seed)


@requires(_why_not)
def bracket_tokens(model: Any, *, language: Any, bracket_draws: Draws = 16, seed: int = 0) -> MeasureResult:
    """R^2 of the same regressions on the tokens themselves, 1 for `<` and -1 for `>`: the baseline without a model."""
    return _fitted(language, language.signs().numpy(), "tokens-r2", bracket_draws, seed)


def _fitted(
    language: HiddenBracket, features: NDArray[np.float64], prefix: str, draws: int, seed: int
) -> MeasureResult:
    found = {}
    for shots in SHOTS:
        if shots < len(features):
            scores = scores_of(features, targets(language), shots, draws=draws, seed=seed)
            for task, column in zip(TASKS, scores.T, strict=True):
                found[f"{prefix}-{task}-{shots}"] = _over_draws(column, num_predictions=len(features) - shots)
    return MeasureResult(estimates=found, inputs=digest(language.strings().tokens, more=[seed, draws]))


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
