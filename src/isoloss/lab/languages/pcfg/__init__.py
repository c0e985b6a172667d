"""Probabilistic context-free grammars with exact inference."""
