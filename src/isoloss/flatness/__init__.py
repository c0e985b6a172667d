"""Flatness of a model at its weights: how fast the loss rises around them."""

from isoloss.flatness.engine.run import InterruptedEstimate
from isoloss.flatness.fisher import empirical_fisher_trace, fisher_trace
from isoloss.flatness.hessian import hessian_trace
from isoloss.flatness.norms import fisher_rao_norm, squared_parameter_norm, weighted_fisher_trace
from isoloss.flatness.sharpness import noise_sharpness, sam_sharpness
from isoloss.flatness.spectrum import SpectralDensity, largest_eigenvalues, spectral_density

__all__ = [
    "InterruptedEstimate",
    "SpectralDensity",
    "empirical_fisher_trace",
    "fisher_rao_norm",
    "fisher_trace",
    "hessian_trace",
    "largest_eigenvalues",
    "noise_sharpness",
    "sam_sharpness",
    "spectral_density",
    "squared_parameter_norm",
    "weighted_fisher_trace",
]
