"""Grammars: their rules, charts, exact inference and sampling."""
