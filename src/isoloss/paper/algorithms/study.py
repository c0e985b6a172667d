"""The study: one model, seven algorithms, several grammars, compared where their losses are nearest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.lab.languages.config import LAPTOP_PCFG, PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig
from isoloss.paper.reproduction.compare import DatasetResults
from isoloss.paper.reproduction.cpu_scales import sgd
from isoloss.paper.reproduction.spec import Arm, Dataset, Replicate, StudySize
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig
from isoloss.statistics.estimate import Estimate, student95
from isoloss.studies.claims import Claim, Contrast, same_loss
from isoloss.studies.results import Checkpoint, Pair, Results, change, mean
from isoloss.studies.spec import Study
from isoloss.studies.summary import SummaryTable

BASELINE = "adamw"
SGD_RATE = 0.4
SMOKE_LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
SMOKE_SETTINGS = {
    **{"loss_sentences": 256, "num_sequences": 64},
    **{"num_train": 256, "num_test": 256, "probe_epochs": 10},
}

# what each is called in figures and tables; all but SGD use AdamW
ALGORITHMS: Mapping[str, str] = {
    BASELINE: "AdamW",
    "regularized": "Dropout and weight decay",
    "sam": "SAM",
    "adversarial": "Adversary",
    "exact": "Exact labels",
    "fisher-penalty": "Fisher penalty",
    "sgd": "SGD",
}


def _study_size(
    description: str,
    *,
    language: PCFGConfig,
    grammars: Sequence[int],
    size: str,
    watched: tuple[int, ...],
    early: tuple[int, ...],
    batch_size: int,
    warmup_steps: int,
    tasks: tuple[str, ...],
    settings: Mapping[str, Any],
) -> StudySize:
    """Return the study with AdamW, which has no dropout and no weight decay, and what each algorithm changes.

    The adversary trains against the first task. Runs with exact labels are measured at `early` steps too: they reach
    AdamW's final loss this early.
    """
    adamw = OptimizerConfig(learning_rate=1e-3, warmup_steps=warmup_steps, weight_decay=0.0)
    changes: dict[str, dict[str, Any]] = {
        "regularized": {
            "model": ModelConfig(size=size, dropout=0.1),
            "optimizer": dataclasses.replace(adamw, weight_decay=0.01),
        },
        "sam": {"algorithm": SAMConfig()},
        "adversarial": {"algorithm": AdversarialConfig(task=tasks[0])},
        "exact": {"objective": ObjectiveConfig(labels="exact")},
        "fisher-penalty": {"algorithm": FisherPenaltyConfig()},
        "sgd": {"optimizer": sgd(watched[-1], SGD_RATE)},
    }
    probes = {task: f"probe-{task}" for task in tasks}
    dataset = Dataset(
        name="pcfg",
        title="PCFG",
        languages=tuple(dataclasses.replace(language, seed=seed) for seed in grammars),
        tasks=probes,
        common={"optimizer": adamw, "batch_size": batch_size, "device": "cpu", "threads": 1},
        sizes={BASELINE: ModelConfig(size=size, dropout=0.0)},
        main=BASELINE,
        main_title=ALGORITHMS[BASELINE],
        watched=watched,
        arms={
            name: Arm(title=ALGORITHMS[name], changes=each, watched=early if name == "exact" else ())
            for name, each in changes.items()
        },
        measures=("loss", "trace", "minimal-trace", *probes.values()),
        first_measures=("rescaling-control",),
        settings=settings,
    )
    return StudySize(description=description, datasets=(dataset,))


SCALES = {
    "laptop": _study_size(
        "about seventy minutes of one core",
        language=LAPTOP_PCFG,
        grammars=(200, 201, 202, 203, 204),
        size="d64",
        watched=(700, 1_000, 1_400, 1_900, 2_400, 3_000),
        early=(200, 300, 400, 500),
        batch_size=128,
        warmup_steps=200,
        tasks=("prefix-4", "root", "prefix-2"),
        settings={"probe_seeds": 3},
    ),
    "smoke": _study_size(
        "two minutes on two cores: every part runs, no result means anything",
        language=SMOKE_LANGUAGE,
        grammars=(200, 201),
        size="d16",
        watched=(50, 100),
        early=(25,),
        batch_size=32,
        warmup_steps=10,
        tasks=("prefix-2", "root", "prefix-1"),
        settings={**SMOKE_SETTINGS, "probe_seeds": 2},
    ),
}


# --- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matched:
    """Checkpoints of an algorithm beside AdamW's, a pair for each grammar."""

    pairs: tuple[Pair, ...]  # AdamW's, the algorithm's
    steps: tuple[tuple[int, int], ...]  # their steps, in the same order

    def ranges(self) -> tuple[str, str]:
        """The algorithm's and AdamW's steps, each from first to last."""
        control, treated = ([pair[i] for pair in self.steps] for i in (0, 1))
        return _range(treated), _range(control)


def matched(results: Results, algorithm: str) -> Matched:
    """Return for each grammar the pair of checkpoints at which an algorithm is compared with AdamW.

    Of the two runs the one whose last KL is higher is taken at its last checkpoint, the other at the checkpoint whose
    KL is nearest to that.
    """
    pairs, steps, last = [], [], dataset_of(results).last
    for one in compared(results):
        control, treated = (results.of_run(one.run(name)) for name in (BASELINE, algorithm))
        # the other way round, the lower last KL may be one that the other run never reaches
        if treated[last]["kl"].value >= control[last]["kl"].value:
            pair = _nearest(control, treated[last]), last
        else:
            pair = last, _nearest(treated, control[last])
        pairs.append((control[pair[0]], treated[pair[1]]))
        steps.append(pair)
    return Matched(tuple(pairs), tuple(steps))


def dataset_of(results: Results) -> Dataset:
    """Return the one dataset of the study."""
    size: StudySize = results.scale
    return size.datasets[0]


def compared(results: Results) -> list[Replicate]:
    """Return the grammars whose runs are all there."""
    return DatasetResults(results, dataset_of(results)).replicates


def clusters_of(results: Results) -> list[str]:
    """Return what errors are over: the grammar of each pair."""
    return [one.cluster for one in compared(results)]


def last_checkpoints(results: Results, algorithm: str) -> list[Checkpoint]:
    """Return the last checkpoints of an algorithm, by grammar."""
    return [results.at(one.run(algorithm)) for one in compared(results)]


def means(results: Results, algorithm: str) -> dict[str, Estimate]:
    """Return means over grammars of the estimates at the last checkpoints."""
    last, clusters = last_checkpoints(results, algorithm), clusters_of(results)
    return {key: mean([checkpoint[key] for checkpoint in last], clusters=clusters) for key in results.keys}


def differences(results: Results, algorithm: str) -> dict[str, Estimate]:
    """Return means over grammars of the differences from AdamW at the matched checkpoints, which are paired by seed."""
    pairs, clusters = matched(results, algorithm).pairs, clusters_of(results)
    return {key: change(pairs, key, clusters=clusters) for key in results.keys}


def nearest_to_adamw(results: Results, *, algorithm: str) -> Contrast:
    """Return an algorithm against AdamW where their losses are nearest."""
    nearest = matched(results, algorithm)
    treated, control = nearest.ranges()
    where = f"Where the KL is nearest: {ALGORITHMS[algorithm]} at step {treated}, AdamW at step {control}."
    if algorithm == "adversarial":
        where += f" The adversary's own task is {next(iter(dataset_of(results).tasks))}."
    return _against_adamw(results, algorithm, nearest.pairs, where)


def at_last_step(results: Results, *, algorithm: str) -> Contrast:
    """Return an algorithm against AdamW after the same number of steps."""
    last = zip(last_checkpoints(results, BASELINE), last_checkpoints(results, algorithm), strict=True)
    return _against_adamw(results, algorithm, list(last), "Both after the same number of steps.")


def _against_adamw(results: Results, algorithm: str, pairs: Sequence[Pair], where: str) -> Contrast:
    names = ALGORITHMS[BASELINE], ALGORITHMS[algorithm]
    return Contrast(names=names, pairs=pairs, where=where, clusters=clusters_of(results))


def tables(results: Results) -> tuple[SummaryTable, SummaryTable]:
    """Return the means at the last checkpoints, and the differences from AdamW at the same loss."""
    clusters = clusters_of(results)
    over = f"over {len(set(clusters))} grammars"
    last = SummaryTable(
        "last",
        f"last checkpoints, mean ± standard error {over}",
        ("algorithm", "step"),
        [((title, dataset_of(results).last), means(results, name)) for name, title in ALGORITHMS.items()],
        "All after the same number of steps, whatever their loss. Accuracies are in percent.",
    )
    rows = []
    for name, title in ALGORITHMS.items():
        if name != BASELINE:
            nearest = matched(results, name)
            labels = (title, *nearest.ranges(), "yes" if same_loss(nearest.pairs, clusters=clusters).shown else "no")
            rows.append((labels, differences(results, name)))
    by_loss = SummaryTable(
        "matched",
        f"minus AdamW at the nearest KL, mean ± standard error of the paired differences {over}",
        ("algorithm", "steps", "AdamW's steps", "same loss"),
        rows,
        "For each grammar and seed the run whose last KL is higher is taken at its last checkpoint, the other at the "
        "checkpoint whose KL is nearest; only where that makes the loss the same do the other columns compare like "
        "with like. Accuracies are in percentage points. A 95 % interval is "
        f"{student95(len(set(clusters)) - 1):.1f} standard errors on either side (Student's t).",
    )
    return last, by_loss


def _range(steps: list[int]) -> str:
    low, high = min(steps), max(steps)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _nearest(checkpoints: Mapping[int, Checkpoint], target: Checkpoint) -> int:
    """Return the step whose KL is nearest to the target's; of two as near, the later."""
    kl = target["kl"].value
    return min(checkpoints, key=lambda step: (abs(checkpoints[step]["kl"].value - kl), -step))


# What the paper says of the algorithms. The direction is that of the algorithm minus AdamW without dropout and weight
# decay. A claim about transfer is tested on every task of the study. The positive control is the adversary on its own
# task: a study that does not see that sees nothing.
_ADVERSARY, _REGULARIZED, _SAM, _EXACT, _PENALTY = (
    functools.partial(nearest_to_adamw, algorithm=name)
    for name in ("adversarial", "regularized", "sam", "exact", "fisher-penalty")
)
CLAIMS = (
    Claim(
        id="adversarial-same-loss",
        statement="The adversary leaves the pre-training loss where it is",
        paper="table 1 (PCFG, 235M): 3.206 against 3.204 nats",
        of=functools.partial(at_last_step, algorithm="adversarial"),
        measures="kl",
        direction="no change within",
        margin=0.01,
    ),
    Claim(
        id="adversarial-transfer",
        statement="At the same loss, the adversary's model transfers worse",
        paper="table 2 (PCFG, 235M, task C): 50.2 ± 1.0 against 55.7 ± 0.6 %; tables 1 and 2 do not say which of the "
        "tasks A, B and C the adversary was given",
        role="positive control",
        case="prefix-4",
        of=_ADVERSARY,
        measures="transfer",
        direction="decrease",
    ),
    Claim(
        id="adversarial-sharper",
        statement="At the same loss, the adversary's model is sharper",
        paper="table 2 (PCFG, 235M): trace 19.34 ± 0.92 against 8.01 ± 0.73",
        of=_ADVERSARY,
        measures="flatness",
        direction="increase",
    ),
    Claim(
        id="regularized-same-loss",
        statement="Dropout and weight decay leave the pre-training loss where it is",
        paper="table 1 (BookCorpus, 330M): 1.85 nats with and without",
        of=functools.partial(at_last_step, algorithm="regularized"),
        measures="kl",
        direction="no change within",
        margin=0.01,
    ),
    Claim(
        id="regularized-flatter",
        statement="At the same loss, a model trained with dropout and weight decay is flatter",
        paper="table 2 (BookCorpus, 330M): trace 24.55 ± 0.18 against 34.91 ± 0.40",
        of=_REGULARIZED,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="regularized-transfer",
        statement="At the same loss, a model trained with dropout and weight decay transfers better",
        paper="table 1 (BookCorpus, 330M, QNLI): 84.4 against 83.0 %",
        of=_REGULARIZED,
        measures="transfer",
        direction="increase",
    ),
    Claim(
        id="sam-flatter",
        statement="At the same loss, a model trained with SAM is flatter",
        paper="table 2 (BookCorpus, 330M): trace 22.15 ± 0.26 against 34.91 ± 0.40",
        of=_SAM,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="sam-transfer",
        statement="At the same loss, a model trained with SAM transfers better",
        paper="table 1 (BookCorpus, 330M, QNLI): 84.4 against 83.0 %",
        of=_SAM,
        measures="transfer",
        direction="increase",
    ),
    Claim(
        id="exact-sharper",
        statement="At the same loss, a model trained without label noise is sharper",
        paper="theorem 3.3, for SGD: label noise is what drives the trace down; not tried",
        of=_EXACT,
        measures="flatness",
        direction="increase",
    ),
    Claim(
        id="exact-transfer",
        statement="At the same loss, a model trained without label noise transfers worse",
        paper="follows from sections 3 and 4 together; not tried",
        of=_EXACT,
        measures="transfer",
        direction="decrease",
    ),
    Claim(
        id="penalty-flatter",
        statement="At the same loss, a model trained with a penalty on the trace is flatter",
        paper="appendix D proposes explicit regularization; not tried",
        of=_PENALTY,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="penalty-transfer",
        statement="At the same loss, a model trained with a penalty on the trace transfers better",
        paper="appendix D proposes explicit regularization; not tried",
        of=_PENALTY,
        measures="transfer",
        direction="increase",
    ),
)

STUDY = Study(
    name="algorithms",
    scales=SCALES,
    title="At the same loss, does the training algorithm change flatness and transfer?",
    lead=(
        "Small masked language models of random grammars, trained with seven algorithms. The loss is the KL to the "
        "true conditionals, flatness the trace of the Fisher information (a smaller trace is flatter; the minimal "
        "trace is its minimum over the rescalings of the weights that leave every prediction unchanged), and transfer "
        "the accuracy of a linear probe on a downstream task. The adversary is trained to spoil the probe of one task.",
        "Models are compared at the same loss: for each grammar and seed, the checkpoint of an algorithm and that of "
        "plain AdamW whose KL to the truth is nearest. Standard errors are over grammars, so they include the "
        "randomness of initial weights, data and probes.",
    ),
    claims=CLAIMS,
    verdicts_at=("laptop",),
    tables=tables,
    page="isoloss.paper.algorithms.page:parts",
    first_page_blocks=2,
    block_name="grammars",
)
