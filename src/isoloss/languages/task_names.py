"""The names of the tasks of the languages here. Nothing needs torch."""

from __future__ import annotations

LATENT = "-latent"
_ALIASES = {"A": "prefix-32", "B": "prefix-16", "C": "prefix-8"}  # the paper's names, appendix A.1
_LATENT_TASKS = {f"...{LATENT}": "of each of these, the symbol or state that did produce the sentence"}

GRAMMAR_TASKS = {
    "root": "the most likely symbol below the start symbol (grammars)",
    "level-D": "the most likely first symbol on level D of the tree, the root's being 0 (grammars with levels)",
    "prefix-L": "the most likely symbol over the first L tokens (grammars); A, B, C: the paper's L = 32, 16, 8",
    **_LATENT_TASKS,
}
STATE_TASKS = {
    "state-k": "the most likely k-th state (hidden Markov models); task-k: the paper's name",
    **_LATENT_TASKS,
}
BRACKET_TASKS = {"mismatch": "number of > less number of <, in strings of random brackets (brackets)"}


def canonical(name: str) -> str:
    """Return the one name of a task that has several.

    Example:
        >>> canonical("B"), canonical("C-latent"), canonical("task-6"), canonical("root")
        ('prefix-16', 'prefix-8-latent', 'state-6', 'root')
    """
    base = name.removesuffix(LATENT)
    suffix = name[len(base) :]
    base = _ALIASES.get(base, base)
    return ("state-" + base.removeprefix("task-") if base.startswith("task-") else base) + suffix
