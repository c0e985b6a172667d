"""Evaluation: which measures a model has, and making those it lacks."""
