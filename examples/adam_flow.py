"""Does Adam keep the trace term of Theorem 3.3? Adam on label noise, against two flows along the minimizers.

Adam divides each gradient by the root of its mean square. At a minimizer this is the root of the Hessian's diagonal
over B (Lemma 3.2). So in the coordinates theta / D^(1/2), D = diag(H)^(-1/2), Adam is SGD. There the trace of the
Hessian is R = sum_i sqrt(H_ii). At constant D its gradient is 2 grad R. The projection along the minimizers is
M = D^(1/2) P D^(1/2): Adam should follow -(1/2) M grad R, whatever B is. If it kept the trace term, it would follow
-(1 / (4 sqrt(B))) M grad Tr. Run: `python examples/adam_flow.py`, or `python examples/adam_flow.py masked`.
"""

import sys

import numpy as np
import torch

from isoloss.paper.theory.sgd_flow import (
    ERRORS,
    PRECISION,
    Flow,
    MaskedLM,
    Minimizers,
    TwoParameters,
    extrapolated,
    is_far,
    mean,
    simulate,
)
from isoloss.paper.theory.statements import Statement
from isoloss.statistics.comparison import times
from isoloss.statistics.estimate import rounded


class OnRoots(Minimizers):
    """The minimizers in Adam's coordinates, where the trace of the Hessian is R."""

    def roots(self, theta):
        return (self.root(theta).square().sum(dim=0) + 1e-16).sqrt()

    def scale(self, theta):  # D^(1/2) for B = 1
        return self.roots(theta).rsqrt()

    def trace(self, theta):
        return self.roots(theta).sum()


class OnTrace(OnRoots):
    """The same coordinates, with the trace that SGD descends on."""

    trace = Minimizers.trace


class Adam:
    """Adam's steps on a model's examples, with beta_1 = 0.9 and 1 - beta_2 = eta^(3/2)."""

    def __init__(self, model):
        self.model, self.moments = model, None
        self.squares = model.minimizers.root(torch.tensor(model.minimizer)).square().sum(dim=0).numpy()

    def move(self, theta, step_size, *, batch_size, **noise):
        if self.moments is None:  # the mean squares begin at their average at the minimizer
            self.moments = np.zeros_like(theta), np.tile(self.squares / batch_size, (len(theta), 1))
        stepped, (means, squares) = theta.copy(), self.moments
        self.model.move(stepped, 1.0, batch_size=batch_size, **noise)
        gradient = theta - stepped  # what a step of SGD of size 1 takes off
        means += 0.1 * (gradient - means)
        squares += step_size**1.5 * (gradient**2 - squares)
        theta -= step_size * means / (np.sqrt(squares) + 1e-8)


def verdict(text, estimates, wanted):
    """Judge coefficients by batch size as `isoloss theory sgd-flow` does."""
    figures = ", ".join(f"{rounded(-each.value, each.stderr)} (B = {size})" for size, each in estimates.items())
    needed = max(each.stderr / (PRECISION * wanted) for each in estimates.values())
    near = all(abs(each.value - wanted) <= ERRORS * each.stderr for each in estimates.values())
    off = any(is_far(each, wanted) for each in estimates.values())  # neither, if not finite
    if near and needed > 1:
        figures += f"; too imprecise to tell: it takes about {needed**2:.2f} times as many trajectories, or more"
    return Statement(text=text, evidence=figures, shown=near and needed <= 1, contradicted=off)


def study(model, *, step_sizes, time, trajectories, batch_sizes=(1, 4), seed=0):
    """Run Adam, extrapolate to step size 0, and judge both flows; errors are series in the root of the step size."""
    found, start = model.minimizers, torch.tensor(model.minimizer)
    starts, roots = np.tile(model.minimizer, (trajectories, 1)), np.sqrt(step_sizes)
    flows = {kind: Flow(kind(found.model, found.conditionals), start) for kind in (OnRoots, OnTrace)}
    point, limits, by_kind = flows[OnRoots].at(time / 2), {}, {kind: {} for kind in flows}
    for size in batch_sizes:
        reached, distances = {kind: [] for kind in flows}, []
        for eta in step_sizes:
            generator = np.random.default_rng([seed, size, round(1 / eta)])
            adam = {"step_size": eta, "times": [time], "batch_size": size, "generator": generator}
            (theta,) = simulate(Adam(model), starts, **adam)
            squares = ((theta - point) ** 2).sum(axis=1) / ((point - model.minimizer) ** 2).sum()
            distances.append(mean(squares, "", "squared distance from the flow over the flow's from the start"))
            for kind, flow in flows.items():
                traces = torch.vmap(flow.minimizers.trace, chunk_size=256)(torch.tensor(theta)).numpy()
                value = mean(traces, "", "when the flow has the mean trace")
                until, fall = flow.time_of(value.value)
                slower = size**0.5 if kind is OnTrace else 1.0
                reached[kind].append(times(mean(until + (traces - value.value) / fall, "", ""), slower / time))
        limits[size] = extrapolated(roots, distances)
        for kind, each in reached.items():
            by_kind[kind][size] = extrapolated(roots, each)
    off = [f"{rounded(each.value, each.stderr)} (B = {size})" for size, each in limits.items()]
    return [
        verdict("Adam follows -(1/2) M grad R, whatever B is.", by_kind[OnRoots], 0.5),
        Statement(
            text="Not only R: Adam's parameters themselves follow this flow.",
            evidence=f"mean squared distance over the squared distance of the flow from the start: {', '.join(off)}",
            shown=all(abs(each.value) <= ERRORS * each.stderr <= 0.3 for each in limits.values()),
        ),
        verdict("Adam keeps the trace term, -(1 / (4 sqrt(B))) M grad Tr: coefficient times sqrt(B).",
                by_kind[OnTrace], 0.25),
    ]  # fmt: skip


if __name__ == "__main__":
    if "masked" in sys.argv:
        statements = study(MaskedLM(seed=0), step_sizes=(0.01, 0.005, 0.0025), time=0.04, trajectories=128)
    else:
        statements = study(TwoParameters(0.7, 2.0), step_sizes=(0.03, 0.01, 0.003), time=1.0, trajectories=1024)
    for statement in statements:
        print(f"{statement.verdict}: {statement.text}\n    {statement.evidence}")
