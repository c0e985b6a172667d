"""A causal language model as a language."""
