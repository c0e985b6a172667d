"""Languages: where text comes from, and the truth about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.languages.api import ExactLanguage, Language, Sentences
    from isoloss.languages.entropies import Entropy, entropy
    from isoloss.languages.resolving import load_language, resolve
    from isoloss.languages.serialization import load, save

__all__ = ["Entropy", "ExactLanguage", "Language", "Sentences", "entropy", "load", "load_language", "resolve", "save"]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        **dict.fromkeys(("ExactLanguage", "Language", "Sentences"), "isoloss.languages.api"),
        **dict.fromkeys(("Entropy", "entropy"), "isoloss.languages.entropies"),
        **dict.fromkeys(("load_language", "resolve"), "isoloss.languages.resolving"),
        **dict.fromkeys(("load", "save"), "isoloss.languages.serialization"),
    },
)
