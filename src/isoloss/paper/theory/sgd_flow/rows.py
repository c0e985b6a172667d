"""One line of the table of SGD against the flow."""

from __future__ import annotations

from dataclasses import dataclass

from isoloss.statistics.estimate import Estimate, rounded

COEFFICIENT = 0.25  # of the theorem, for one example a step


@dataclass(frozen=True, kw_only=True)
class Row:
    """SGD with one step size and batch size at one time, against the flow."""

    batch_size: int  # B
    step_size: float  # eta; 0: the limit of small steps, extrapolated
    time: float  # K, the number of steps times eta^2
    trace: Estimate  # mean trace of the Hessian where SGD is, over the trajectories
    flow_trace: float  # the flow's, with the coefficient that is checked
    coefficient: Estimate  # of the flow that is where SGD is, times B
    # mean squared distance of SGD's parameters from the flow's, as a fraction of the squared distance that the flow is
    # from the start
    distance: Estimate

    @property
    def error(self) -> float:
        """Mean trace of SGD less the flow's, as a fraction of the flow's."""
        return self.trace.value / self.flow_trace - 1

    @property
    def error_percent(self) -> str:
        """The same in percent, with its standard error."""
        return f"{rounded(100 * self.error, 100 * self.trace.stderr / self.flow_trace)} %"
