"""The names of the tasks. Nothing here needs torch."""

from __future__ import annotations

LATENT = "-latent"
ALIASES = {"A": "prefix-32", "B": "prefix-16", "C": "prefix-8"}  # the paper's names, appendix A.1

TASKS = {
    "root": "the most likely symbol below the start symbol (grammars)",
    "level-D": "the most likely first symbol on level D of the tree, the root's being 0 (grammars with levels)",
    "prefix-L": "the most likely symbol over the first L tokens (grammars); A, B, C: the paper's L = 32, 16, 8",
    "state-k": "the most likely k-th state (hidden Markov models); task-k: the paper's name",
    f"...{LATENT}": "of each of these, the symbol or state that did produce the sentence",
    "mismatch": "number of > less number of <, in strings of random brackets (brackets)",
}

# the columns of text and second text in nyu-mll/glue
GLUE = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "wnli": ("sentence1", "sentence2"),
}
REGRESSION = "stsb"  # the task of GLUE that has no classes


def canonical(name: str) -> str:
    """Return the one name of a task that has several.

    Example:
        >>> canonical("B"), canonical("C-latent"), canonical("task-6"), canonical("root")
        ('prefix-16', 'prefix-8-latent', 'state-6', 'root')
    """
    base = name.removesuffix(LATENT)
    suffix = name[len(base) :]
    base = ALIASES.get(base, base)
    return ("state-" + base.removeprefix("task-") if base.startswith("task-") else base) + suffix
