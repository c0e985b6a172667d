"""What this study says to each claim: which two checkpoints are compared, and when a comparison would mean nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from isoloss.paper.same_loss.design import EXPANSIONS, Scale, expanded_trace, main_run, sgd_run
from isoloss.paper.same_loss.results import Results
from isoloss.report.claims import ClaimResult
from isoloss.studies.comparison import Contrast, answer_all, common_measures


def judge_all(results: Results) -> tuple[ClaimResult, ...]:
    """Return the result of every claim in claims.toml, in its order."""
    return answer_all(Path(__file__).with_name("claims.toml"), contrasts(results), measures(results.scale))


def measures(scale: Scale) -> Mapping[str, Mapping[str, str]]:
    """Return what can be measured of two models, by what claims.toml calls it."""
    expanded = {f"scale {way}": expanded_trace(scale, way) for way in EXPANSIONS}
    return {**common_measures(scale.tasks), "trace in one architecture": expanded}


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them."""
    scale = results.scale
    main = main_run(scale)
    last, earlier = results.at(main), scale.watched[-1]
    table = Contrast(
        names=("look-up table", "AdamW's last"),
        pairs=[(results.lookups, last)],
        where=f"The model's KL is {last['kl'].estimate}, the table's is 0.",
        at_same_loss=False,
    )
    return {
        "sgd": [Contrast(names=("AdamW's last", "SGD's last"), pairs=[(last, results.at(sgd_run(scale)))])],
        "longer": [
            Contrast(names=(f"step {earlier:,}", f"step {scale.steps:,}"), pairs=[(results.at(main, earlier), last)])
        ],
        "larger": [
            Contrast(
                names=(small, large),
                pairs=[(results.at(f"adamw-{small}"), results.at(f"adamw-{large}"))],
                case=f"{small} to {large}",
            )
            for small, large in itertools.pairwise(scale.sizes)
        ],
        "look-up table": [table],
    }
