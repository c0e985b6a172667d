"""Flatness of a model at its weights: how fast the loss rises around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.flatness._measurement import InterruptedEstimate, MeasureOptions
    from isoloss.flatness._rescaling.apply import check_rescaling, rescaled, rescaled_at_random
    from isoloss.flatness._rescaling.symmetries import Rescalings, Signals, rescalings_of
    from isoloss.flatness.barrier import interpolation_barrier
    from isoloss.flatness.directional import critical_sharpness, directional_sharpness
    from isoloss.flatness.fisher import empirical_fisher_trace, fisher_trace
    from isoloss.flatness.formats import Rounding
    from isoloss.flatness.frontier import forgetting_frontier
    from isoloss.flatness.gradient_noise import gradient_agreement, gradient_noise_scale
    from isoloss.flatness.gradients import diagonal_fisher, per_sequence_grad_norms
    from isoloss.flatness.hessian import hessian_trace
    from isoloss.flatness.learning_coefficient import local_learning_coefficient
    from isoloss.flatness.norms import (
        fisher_rao_norm,
        relative_flatness,
        squared_parameter_norm,
        weighted_fisher_trace,
    )
    from isoloss.flatness.robustness import Noise, loss_rises
    from isoloss.flatness.sharpness import noise_sharpness, sam_sharpness
    from isoloss.flatness.spectrum import SpectralDensity, largest_eigenvalues, spectral_density
    from isoloss.flatness.trainer_callback import FlatnessCallback, evaluating

__all__ = [
    "FlatnessCallback",
    "InterruptedEstimate",
    "MeasureOptions",
    "Noise",
    "Rescalings",
    "Rounding",
    "Signals",
    "SpectralDensity",
    "check_rescaling",
    "critical_sharpness",
    "diagonal_fisher",
    "directional_sharpness",
    "empirical_fisher_trace",
    "evaluating",
    "fisher_rao_norm",
    "fisher_trace",
    "forgetting_frontier",
    "gradient_agreement",
    "gradient_noise_scale",
    "hessian_trace",
    "interpolation_barrier",
    "largest_eigenvalues",
    "local_learning_coefficient",
    "loss_rises",
    "noise_sharpness",
    "per_sequence_grad_norms",
    "relative_flatness",
    "rescaled",
    "rescaled_at_random",
    "rescalings_of",
    "sam_sharpness",
    "spectral_density",
    "squared_parameter_norm",
    "weighted_fisher_trace",
]

_MODULES = {
    "barrier": ("interpolation_barrier",),
    "_measurement": ("InterruptedEstimate", "MeasureOptions"),
    "_rescaling.apply": ("check_rescaling", "rescaled", "rescaled_at_random"),
    "_rescaling.symmetries": ("Rescalings", "Signals", "rescalings_of"),
    "directional": ("critical_sharpness", "directional_sharpness"),
    "fisher": ("empirical_fisher_trace", "fisher_trace"),
    "formats": ("Rounding",),
    "frontier": ("forgetting_frontier",),
    "gradient_noise": ("gradient_agreement", "gradient_noise_scale"),
    "gradients": ("diagonal_fisher", "per_sequence_grad_norms"),
    "hessian": ("hessian_trace",),
    "learning_coefficient": ("local_learning_coefficient",),
    "norms": ("fisher_rao_norm", "relative_flatness", "squared_parameter_norm", "weighted_fisher_trace"),
    "robustness": ("Noise", "loss_rises"),
    "sharpness": ("noise_sharpness", "sam_sharpness"),
    "spectrum": ("SpectralDensity", "largest_eigenvalues", "spectral_density"),
    "trainer_callback": ("FlatnessCallback", "evaluating"),
}
__getattr__, __dir__ = lazy.exports(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
