"""Languages: where text comes from, and the truth about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.lab.languages.base import ExactLanguage, Language, Sentences
    from isoloss.lab.languages.config import load_language, resolve
    from isoloss.lab.languages.exact import Entropy, entropy
    from isoloss.lab.languages.serialization import load, save

__all__ = ["Entropy", "ExactLanguage", "Language", "Sentences", "entropy", "load", "load_language", "resolve", "save"]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        **dict.fromkeys(("ExactLanguage", "Language", "Sentences"), "isoloss.lab.languages.base"),
        **dict.fromkeys(("Entropy", "entropy"), "isoloss.lab.languages.exact"),
        **dict.fromkeys(("load_language", "resolve"), "isoloss.lab.languages.config"),
        **dict.fromkeys(("load", "save"), "isoloss.lab.languages.serialization"),
    },
)
