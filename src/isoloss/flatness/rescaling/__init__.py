"""Exact rescalings: what may be multiplied and divided in a model without changing what it computes."""

from typing import TYPE_CHECKING

from isoloss.lazy import exports

if TYPE_CHECKING:
    from isoloss.flatness.rescaling.application import check as check
    from isoloss.flatness.rescaling.application import part_sizes as part_sizes
    from isoloss.flatness.rescaling.application import rescaled as rescaled
    from isoloss.flatness.rescaling.application import rescaled_at_random as rescaled_at_random
    from isoloss.flatness.rescaling.generators import Rescalings as Rescalings
    from isoloss.flatness.rescaling.generators import rescalings_of as rescalings_of
    from isoloss.flatness.rescaling.signals import Signals as Signals

_MODULES = {
    "application": ("check", "part_sizes", "rescaled", "rescaled_at_random"),
    "generators": ("Rescalings", "rescalings_of"),
    "signals": ("Signals",),
}
__getattr__, __dir__ = exports(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
