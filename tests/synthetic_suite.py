"""A suite of made-up checkpoints, and the answers of its statistics."""

import math

import numpy as np
import polars as pl

from isoloss.statistics.association import associate
from isoloss.statistics.estimate import Estimate
from isoloss.suites.config import Member, SuiteConfig
from isoloss.suites.table import SuiteTable, empty, number

NO_TRACE = "no rescaling of this architecture is known"


def suite(seeds, steps, measures):
    """Seeds with steps: `flat` predicts the outcome at the same loss, the other measures follow the loss alone."""
    rng = np.random.default_rng(0)
    config = SuiteConfig(
        checkpoints=("lab/m-{seed}@{step}",), cluster="seed", along="step", outcomes=("int4-rise", "probe-a")
    )
    members, rows = [], []
    for seed in range(seeds):
        for step in range(steps):
            member = Member(f"lab/m-{seed}@{step}", {"seed": seed, "step": step})
            members.append(member)
            loss, flat = 2 + 3 * math.exp(-step / 3) + 0.02 * rng.normal(), rng.normal()
            loss += 1.5 * ((seed, step) == (1, 8))
            values = {"loss": (loss, 0.01), "minimal-trace": (math.exp(3 + flat), 2.5)}
            values |= {f"m{place}": (loss + 0.05 * rng.normal(), 0.03) for place in range(measures)}
            values |= {"int4-rise": (0.3 + 0.1 * flat + 0.02 * rng.normal(), 0.01)}
            for name, (value, stderr) in values.items():
                estimate = of(value, stderr, "nats per predicted token")
                sha = "same" if seed == 2 and step in (3, 4) else f"{seed}-{step}"
                is_empty = name == "minimal-trace" and (seed, step) == (0, 2)
                rows.append((member, empty("", name, NO_TRACE, sha) if is_empty else number("", name, estimate, sha)))
            rows.append((member, number("", "probe-a", of(0.9 - 0.05 * rng.random(), 0.01, "accuracy"), "")))
    return SuiteTable.of(config, members, rows)


def of(value, stderr, unit):
    return Estimate(value=value, stderr=stderr, samples=50, unit=unit, num_predictions=500, method="synthetic")


def answers(table):
    wide = table.wide()
    columns = {name: wide[name].cast(pl.Float64).fill_null(math.nan).to_list() for name in wide.columns[1:]}
    loss, measures, outcomes = table.roles()
    return associate(columns, measures=measures, outcomes=outcomes, loss=loss, clusters="seed", along="step")
