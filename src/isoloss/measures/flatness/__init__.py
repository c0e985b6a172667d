"""How flat a minimum is: traces of the second-derivative matrices of a language model's loss."""

from isoloss.measures.flatness.trace import InterruptedEstimate, fisher_trace

__all__ = ["InterruptedEstimate", "fisher_trace"]
