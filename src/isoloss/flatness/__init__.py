"""Flatness of a model at its weights: how fast the loss rises around them."""

from typing import TYPE_CHECKING

from isoloss.lazy import exports

if TYPE_CHECKING:
    from isoloss.flatness.engine.run import InterruptedEstimate as InterruptedEstimate
    from isoloss.flatness.engine.run import Options as Options
    from isoloss.flatness.fisher import empirical_fisher_trace as empirical_fisher_trace
    from isoloss.flatness.fisher import fisher_trace as fisher_trace
    from isoloss.flatness.hessian import hessian_trace as hessian_trace
    from isoloss.flatness.norms import fisher_rao_norm as fisher_rao_norm
    from isoloss.flatness.norms import squared_parameter_norm as squared_parameter_norm
    from isoloss.flatness.norms import weighted_fisher_trace as weighted_fisher_trace
    from isoloss.flatness.sharpness import noise_sharpness as noise_sharpness
    from isoloss.flatness.sharpness import sam_sharpness as sam_sharpness
    from isoloss.flatness.spectrum import SpectralDensity as SpectralDensity
    from isoloss.flatness.spectrum import largest_eigenvalues as largest_eigenvalues
    from isoloss.flatness.spectrum import spectral_density as spectral_density

_MODULES = {
    "engine.run": ("InterruptedEstimate", "Options"),
    "fisher": ("empirical_fisher_trace", "fisher_trace"),
    "hessian": ("hessian_trace",),
    "norms": ("fisher_rao_norm", "squared_parameter_norm", "weighted_fisher_trace"),
    "sharpness": ("noise_sharpness", "sam_sharpness"),
    "spectrum": ("SpectralDensity", "largest_eigenvalues", "spectral_density"),
}
__getattr__, __dir__ = exports(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
