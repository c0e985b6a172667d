"""What the study compares: models of one loss that differ in size, training time, algorithm or label noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isoloss.paper.reproduction.dataset import SGD_EXACT, SGD_SAMPLED, Dataset, Replicate
from isoloss.paper.reproduction.reading import at_kl, at_step, by_polish, end, replicates
from isoloss.paper.reproduction.scales import Scale
from isoloss.studies.claims import Contrast
from isoloss.studies.comparison import Checkpoint, Pair
from isoloss.studies.results import Results

TRAJECTORY = "AdamW at the same loss"
PAIR = Callable[[Replicate], Pair | None]
INTERPOLATED = (
    "The first is interpolated, linearly in the logarithm of the KL, between two checkpoints {between}, whose KL are "
    "above and below the second's."
)


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them; none without a polish."""
    scale: Scale = results.scale
    found: dict[str, Sequence[Contrast]] = {}
    for dataset in scale.datasets:
        if dataset.polish_steps and replicates(results, dataset):
            found |= {f"{dataset.name} {name}": each for name, each in _of_dataset(results, dataset).items()}
    return found


def _of_dataset(results: Results, dataset: Dataset) -> dict[str, list[Contrast]]:
    main = dataset.main

    def contrast(names: tuple[str, str], pair: PAIR, where: str, **more: object) -> list[Contrast]:
        pairs = [(one, each) for one in replicates(results, dataset) if (each := pair(one)) is not None]
        if not pairs:
            return []
        clusters = [one.cluster for one, _ in pairs]
        left_out = len(replicates(results, dataset)) - len(pairs)
        if left_out:
            where += (
                f" {left_out} of {left_out + len(pairs)} models are left out, because no two checkpoints enclose them."
            )
        clusters_are = "grammars" if dataset.name == "pcfg" else "languages"
        if len(set(clusters)) < 2:
            clusters, clusters_are = [one.prefix for one, _ in pairs], "seeds"
        about: dict[str, Any] = {"where": where, "clusters": clusters, "clusters_are": clusters_are, **more}
        return [Contrast(names=names, pairs=[each for _, each in pairs], **about)]

    def against_adamw(arm: str) -> PAIR:
        return lambda one: _at_same_kl(by_polish(results, dataset, one, main), end(results, dataset, one, arm))

    between = f"of {main} after {dataset.start:,} steps and polishes of different lengths"
    made = {
        "sgd": contrast((TRAJECTORY, "SGD"), against_adamw(SGD_SAMPLED), INTERPOLATED.format(between=between)),
        "label noise": contrast(
            ("SGD (exact labels)", "SGD (sampled labels)"),
            lambda one: (end(results, dataset, one, SGD_EXACT), end(results, dataset, one, SGD_SAMPLED)),
            "Both after the same polish.",
        ),
        "longer": contrast(
            (f"{dataset.start:,} steps", f"{dataset.last:,} steps"),
            against_adamw(main),
            INTERPOLATED.format(between=between),
        ),
        "larger": [
            each
            for smaller, larger in itertools.pairwise(dataset.sizes)
            for each in contrast(
                (smaller, larger),
                lambda one, smaller=smaller, larger=larger: _larger(results, dataset, one, smaller, larger),  # type: ignore[misc]
                "The second is interpolated, linearly in the logarithm of the KL, between polishes of different "
                "lengths; the first has had the longest polish that leaves its KL between the second's.",
                case=f"{smaller} to {larger}",
            )
        ],
    }
    if "adversary" in dataset.arms:
        for arm in ("adversary", "helper"):
            made[arm] = contrast(
                (TRAJECTORY, dataset.arms[arm].title),
                against_adamw(arm),
                INTERPOLATED.format(between=between),
            )
        made["look-up table"] = [
            each
            for kind, words in (("lookup", "probabilities"), ("log-lookup", "logarithms"))
            for each in contrast(
                ("Look-up table", main),
                lambda one, kind=kind: _against_table(results, dataset, one, kind),  # type: ignore[misc]
                f"The features of the look-up table are the true conditionals, as {words}; its KL is 0.",
                case=words,
                at_same_loss=False,
            )
        ]
    if "pre-ln" in dataset.arms:
        made["pre-ln"] = contrast(
            ("Post-layer-norm", "Pre-layer-norm"), against_adamw("pre-ln"), INTERPOLATED.format(between=between)
        )
    return made


def _at_same_kl(controls: Sequence[Checkpoint], treated: Checkpoint) -> Pair | None:
    control = at_kl(controls, treated["kl"].estimate.value)
    return None if control is None else (control, treated)


def _larger(results: Results, dataset: Dataset, one: Replicate, smaller: str, larger: str) -> Pair | None:
    """Return the smaller model and the larger one at the same KL, with traces in one architecture."""
    firsts, seconds = (by_polish(results, dataset, one, size) for size in (smaller, larger))
    for first in reversed(firsts):
        if (pair := _at_same_kl(seconds, first)) is not None:
            return pair[1], pair[0]
    return None


def _against_table(results: Results, dataset: Dataset, one: Replicate, kind: str) -> Pair | None:
    tables = at_step(results, one, dataset.main, 0)
    probes = {key: tables[f"{kind}-{key.removeprefix('probe-')}"] for key in dataset.tasks.values()}
    return probes, end(results, dataset, one, dataset.main)


def measures(scale: Scale) -> Mapping[str, Mapping[str, str]]:
    """Return what can be measured of two models, by what claims.toml calls it."""
    found: dict[str, Mapping[str, str]] = {}
    for name in ("pcfg", "hmm"):
        dataset = scale.dataset(name)
        if dataset is None:
            continue
        probes = {_case(key): key for key in dataset.tasks.values()}
        few_shot = [key for key in dataset.end_measures if key.startswith("few-shot-")]
        projected = [key for key in dataset.end_measures if key.startswith("projected-")]
        inside = [key for key in dataset.end_measures if key.startswith(("trace-in-", "minimal-trace-in-"))]
        found |= {
            f"{name} transfer": {**probes, **{_case(key): key for key in few_shot}},
            f"{name} probes": probes,
            f"{name} projected probes": {_case(key): key for key in projected} or probes,
            f"{name} flatness": {key: key for key in ("trace", "minimal-trace") if key in dataset.measures},
            f"{name} flatness in one architecture": {key: key for key in inside},
        }
    return found


def _case(key: str) -> str:
    """Return a measure of accuracy in words.

    Example:
        >>> _case("few-shot-prefix-4-100"), _case("probe-prefix-4")
        ('prefix-4 (100 examples)', 'prefix-4')
    """
    if key.startswith("few-shot-"):
        task, _, number = key.removeprefix("few-shot-").rpartition("-")
        return f"{task} ({int(number):,} examples)"
    if key.startswith("projected-"):
        return key.removeprefix("projected-").rpartition("-")[0]
    return key.removeprefix("probe-")
