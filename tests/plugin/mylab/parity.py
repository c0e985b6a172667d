"""A task: a labeling of the sentences of any language, by its name."""

from typing import Any


def parity(language: Any, *, token: str) -> Any:
    """Whether a token occurs an even or an odd number of times; `parity-a` asks about the token `a`."""
    from isoloss.errors import IsolossError
    from isoloss.lab.languages.base import Labeling

    if token not in language.vocabulary:
        raise IsolossError(f"the language has no token {token!r}; it has {', '.join(language.vocabulary)}")
    index = language.vocabulary.index(token)
    return Labeling(classes=("even", "odd"), label=lambda sentences: (sentences.tokens == index).sum(1) % 2)
