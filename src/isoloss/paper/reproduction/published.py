"""What the paper reports of PCFG, at its own scale: the one place from which figures, captions and tests take it.

Numbers are text, as they are printed, so that they keep their digits.
"""

from __future__ import annotations

from collections.abc import Mapping

ENTROPY = "3.196"  # nats per predicted token, of the true conditionals
LOSSES = ("3.204", "3.208")  # of all models of figure 1, lowest and highest, nats per predicted token
PARAMETERS = "235M"  # of the model in tables 1 and 2
# tables 1 and 2: by what is measured, each model's value, with its standard deviation over seeds
BY_ALGORITHM: Mapping[str, Mapping[str, str]] = {
    "loss (nats)": {"AdamW": "3.204", "adversary": "3.206", "look-up table": "3.196"},
    "task A (%)": {"AdamW": "89.9 ± 0.3", "adversary": "83.1 ± 0.6", "look-up table": "71.2"},
    "task B (%)": {"AdamW": "49.2 ± 0.8", "adversary": "42.3 ± 1.5", "look-up table": "39.7"},
    "task C (%)": {"AdamW": "55.7 ± 0.6", "adversary": "50.2 ± 1.0"},
    "trace": {"AdamW": "8.01 ± 0.73", "adversary": "19.34 ± 0.92"},
}
TABLES = {"table 1": ("loss (nats)", "task A (%)", "task B (%)"), "table 2": ("task C (%)", "trace")}  # their rows
# figure 5: the smallest model above 9M parameters and the largest, at about one loss
BY_SIZE: Mapping[str, tuple[str, str]] = {"trace": ("19.8", "12.6"), "probe accuracy (%)": ("40.4", "50.5")}
# every figure and table of the paper that shows results: the datasets, and on the page the figure or table of each
SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "figure 1": ("pcfg same-loss",),
    "figure 2a": ("pcfg longer",),
    "figure 2b": ("generated longer",),
    "figure 2c": ("web longer",),
    "figure 3a": ("pcfg sizes",),
    "figure 3b": ("hmm sizes",),
    "figure 3c": ("generated sizes",),
    "figure 4 left": ("pcfg sgd",),
    "figure 4 middle": ("hmm sgd",),
    "figure 4 right": ("web longer",),
    "figure 5 left": ("pcfg expanded",),
    "figure 5 right": ("generated expanded",),
    "figure 8": ("pcfg sizes", "hmm sizes", "generated sizes"),
    "figure 9": ("pcfg sizes", "pcfg longer", "generated longer"),
    "figure 10": ("pcfg sgd", "hmm sgd"),
    "table 1": ("pcfg algorithms", "text algorithms"),
    "table 2": ("pcfg flatness", "text flatness"),
}


def corresponds(*shown_in: str) -> str:
    """Return, as the beginning of a caption, which of the paper's figures and tables it is about; of none, nothing.

    Example:
        >>> from isoloss.paper.reproduction.published import corresponds
        >>> corresponds("figure 3a", "figure 8")
        "Corresponds to the paper's figure 3a, figure 8. "
    """
    return f"Corresponds to the paper's {', '.join(shown_in)}. " if shown_in else ""


def by_algorithm(*measured: str) -> str:
    """Return these rows of the paper's tables 1 and 2 in words.

    Example:
        >>> from isoloss.paper.reproduction.published import by_algorithm
        >>> by_algorithm("task C (%)", "trace")
        'task C (%): AdamW 55.7 ± 0.6, adversary 50.2 ± 1.0; trace: AdamW 8.01 ± 0.73, adversary 19.34 ± 0.92'
    """
    rows = ((name, ", ".join(f"{model} {value}" for model, value in BY_ALGORITHM[name].items())) for name in measured)
    return "; ".join(f"{name}: {values}" for name, values in rows)
