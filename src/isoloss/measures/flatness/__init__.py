"""Flatness of a model at its weights: how fast the loss rises around them."""

from isoloss.measures.flatness.fisher import empirical_fisher_trace, fisher_trace
from isoloss.measures.flatness.measurement import InterruptedEstimate

__all__ = ["InterruptedEstimate", "empirical_fisher_trace", "fisher_trace"]
