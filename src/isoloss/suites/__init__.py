"""Suites: many checkpoints measured alike, in one table, and which measure predicts which outcome at the same loss."""
