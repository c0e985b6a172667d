"""A table of checkpoints such as a study makes, for the tests of the report."""

import polars as pl
import pytest


def checkpoints(run="adamw-d64", group="AdamW", size="d64", parameters=182_944, steps=(500, 2000, 8000), **ends):
    """Rows of one run whose measures go from first to last value in equal steps, with a standard error."""
    rows = []
    for i, step in enumerate(steps):
        row = {"run": run, "group": group, "size": size, "parameters": parameters, "step": step}
        for name, (first, last, stderr) in ends.items():
            row[name] = first + (last - first) * i / max(1, len(steps) - 1)
            row[f"{name}_stderr"] = stderr
        rows.append(row)
    return rows


@pytest.fixture(scope="session")
def table():
    adamw = {"kl": (0.11, 0.045, 0.0012), "trace": (300.0, 50.0, 4.0), "probe-root": (0.55, 0.62, 0.006)}
    small = {"kl": (0.14, 0.075, 0.0012), "trace": (420.0, 70.0, 4.0), "probe-root": (0.50, 0.568, 0.006)}
    sgd = {"kl": (0.053, 0.048, 0.0012), "trace": (22.0, 10.0, 0.6), "probe-root": (0.64, 0.644, 0.006)}
    prefix = {"probe-prefix-4": (0.5, 0.61, 0.007)}
    return pl.DataFrame(
        [
            *checkpoints("adamw-d16", "AdamW", "d16", 21_344, **small, **prefix),
            *checkpoints(**adamw, **prefix),
            *checkpoints("sgd-d64", "SGD continuation", steps=(1500, 12_000), **sgd, **prefix),
        ]
    )
