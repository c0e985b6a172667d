"""Exact inference in hidden Markov models."""
