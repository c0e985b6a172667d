"""How often a file of claims has a wrong verdict: as in the tests, with many more simulated studies."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "studies"), str(ROOT / "tests")]

import test_verdict_rates as rates  # noqa: E402

RESULT = Path(__file__).with_name("results") / "verdict_rates.md"


def table(number: int) -> str:
    """Return a row for each case: the share of studies with any wrong verdict, and with a decided primary claim."""
    lines = ["| true effects | any wrong verdict (%) | primary claim decided (%) |", "|---|--:|--:|"]
    for case, (check, control, primary, secondary) in rates.CASES.items():
        claims = [rates.CHECK, rates.CONTROL, rates.PRIMARY, *rates.SECONDARY]
        shares = rates.wrong_and_decided(claims, [check, control, primary, *secondary], number, seed=1)
        cells = (f"{100 * p:.2f} ± {100 * math.sqrt(p * (1 - p) / number):.2f}" for p in shares)
        lines.append(f"| {case} | {' | '.join(cells)} |")
    for together in (0.0, 0.9):
        effects = [rates.NONE] * len(rates.SECONDARY)
        wrong, _ = rates.wrong_and_decided(rates.SECONDARY, effects, number, seed=2, together=together)
        error = math.sqrt(wrong * (1 - wrong) / number)
        name = f"no effects, no gates, correlation of estimates {together**2:.2g}"
        lines.append(f"| {name} | {100 * wrong:.2f} ± {100 * error:.2f} | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write benchmarks/results/verdict_rates.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=10_000, help="number of simulated studies of each case")
    number = parser.parse_args().studies
    RESULT.write_text(
        f"{number:,} simulated studies of each case (`python benchmarks/verdict_rates.py`); ± is one standard error. "
        f"Effects are in standard errors: none is {rates.NONE:g}, large {rates.LARGE:g}, the smallest effect of "
        f"interest {rates.MARGIN:g}.\n\n{table(number)}"
    )


if __name__ == "__main__":
    main()
