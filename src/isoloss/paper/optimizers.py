"""The study optimizers: eight optimizers, three rates each, at the same loss: which measure predicts which outcome?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, SAMConfig
from isoloss.paper.design import AtOneLoss, Unit, against, clusters_of, continued, ends_of, trend
from isoloss.paper.tables import OVER, changes, forest, has_several_languages, means, num_above_target
from isoloss.report.html import Card
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.study_page import Figure
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.correlation import Correlation, correlation
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.significance import holm
from isoloss.studies import Experiment, PageParts, Study
from isoloss.studies.answer import card_of
from isoloss.studies.claims import Claim, ClaimResult
from isoloss.studies.results import Checkpoint, Results
from isoloss.studies.summary import SummaryTable

STABLE, STABLE_MUON = "stable", "stable-muon"  # AdamW and Muon on their way
# what the optimizers are called in figures and tables; AdamW is what the others are compared with
OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "adamw": "AdamW",
        "sgd": "SGD after AdamW",
        "muon": "Muon",
        "soap": "SOAP",
        "schedule-free": "Schedule-free AdamW",
        "sam": "SAM",
        "wsd": "AdamW, decaying rate (WSD)",
        "lawa": "AdamW, averaged weights (LAWA)",
    }
)
RATES: Mapping[str, float] = {"-half": 0.5, "": 1.0, "-double": 2.0}  # times the optimizer's rate, by the arms' ending
ARMS: Mapping[str, str] = {f"{name}{ending}": name for name in OPTIMIZERS for ending in RATES}  # optimizers, by arm
MUON_SGD = "muon-sgd"  # is flattened by SGD after Muon
# trained with a downstream task: its probe must see a difference
HELPER, ADVERSARY = "helper", "adversary"
OTHERS: Mapping[str, str] = {MUON_SGD: "SGD after Muon", HELPER: "Helper", ADVERSARY: "Adversary"}
# go on from a run of AdamW or of Muon
BRANCHES = {**{arm: STABLE for arm, name in ARMS.items() if name in ("sgd", "wsd")}, MUON_SGD: STABLE_MUON}
# what may predict, as logarithms, and what it may predict
PREDICTORS: Mapping[str, str] = {
    "trace": "trace",
    "minimal-trace": "minimal trace",
    "minimal-trace-of-attention": "attention's minimal trace",
    "minimal-trace-of-mlps": "the MLPs' minimal trace",
    "directional-sharpness": "directional sharpness",
    "effective-rank": "effective rank",
}
FORGETTING = "frontier"  # the rise of the loss when a short fine-tuning lowers the loss on a changed grammar
RISES = ("int4-rise", "int3-rise", "int2-rise")
FACTORS = tuple(PREDICTORS)[:-1]  # what is compared by factors


# --- the design ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Optimizers(AtOneLoss):
    """A scale of the study."""

    size: str = "d32"  # of the model, a Llama
    layers: int = 2
    batch_size: int = 64
    stable_kl: float  # nats per token: where SGD and the decaying rate take over from AdamW
    max_steps: int  # of an arm
    wsd_steps: int  # the length of the decay; the target ends most runs sooner
    learning_rate: float = 1e-3  # the usual one of all but SGD and schedule-free, constant after a warm-up
    sgd_learning_rate: float = 0.3
    schedule_free_learning_rate: float = 3e-3  # its authors recommend a larger rate than for a decaying schedule
    rho: float = 0.02  # of SAM
    validate_every: int = 10  # steps after which the KL is compared with the target
    probed: Mapping[str, int]  # training examples of the few-shot probes, by task; the controls train with the first
    span_level: int = 1  # whose symbols are probed at their spans

    needed: ClassVar[tuple[str, ...]] = (STABLE, *ARMS, *OTHERS)
    falling: ClassVar[tuple[str, str]] = (STABLE, "adamw")

    @property
    def adjusted(self) -> tuple[str, ...]:
        """The estimates that claims are about."""
        return ("trace", "minimal-trace", "effective-rank", *outcomes(self))

    def title(self, arm: str) -> str:
        """Return what an arm is called: the optimizer, and how its rate compares with the usual one."""
        if arm in OTHERS:
            return OTHERS[arm]
        rate = RATES[arm.removeprefix(ARMS[arm])]
        return OPTIMIZERS[ARMS[arm]] + ("" if rate == 1 else f", rate x {rate:g}")

    @property
    def probes(self) -> dict[str, str]:
        """By task and number of training examples: the measure of the few-shot probe."""
        return {f"{task} ({shots} examples)": f"few-shot-{task}-{shots}" for task, shots in self.probed.items()}

    @property
    def last_layer(self) -> str:
        """The estimate of the probe of spans in the last layer."""
        return f"layer-{self.layers}"

    @property
    def accuracies(self) -> tuple[str, ...]:
        """The outcomes that are accuracies."""
        return (*self.probes.values(), self.last_layer)

    def arms(self, unit: Unit) -> dict[str, Experiment]:
        """Return the runs of a grammar by the names of their arms, and what is measured of each."""
        configs = {
            **{arm: self._of_arm(unit, name, RATES[arm.removeprefix(name)]) for arm, name in ARMS.items()},
            MUON_SGD: self._config(unit, self._optimizer("sgd")),
        }
        adamw, task = self._optimizer("adamw"), next(iter(self.probed))
        for arm, weight in ((HELPER, -AdversarialConfig.weight), (ADVERSARY, AdversarialConfig.weight)):
            configs[arm] = self._config(unit, adamw, algorithm=AdversarialConfig(task=task, weight=weight))
        flatness = ("trace", "minimal-trace", "minimal-trace-by-kind", "directional-sharpness", *RISES)
        probes = [*self.probes.values()]
        measures = ("loss", *flatness, "features", f"span-{self.span_level}", *probes, "frontier")
        measured = self.measurement(unit, measures, "last")
        untrained = self.measurement(unit, probes, 0, name="measure before training of")
        tokens = [
            self.measurement(
                unit,
                [f"one-hot-{task}"],
                0,
                name=f"measure {task} from the tokens of",
                settings={"num_train": shots, "probe_solver": "convex"},
            )
            for task, shots in self.probed.items()
        ]
        stable = dataclasses.replace(self._config(unit, adamw, target_kl=self.stable_kl), checkpoints=(0,))
        of_muon = self._config(unit, self._optimizer("muon"), target_kl=self.stable_kl)
        loss = self.measurement(unit, ["loss"], "last")
        return {
            STABLE: Experiment(config=stable, measurements=(measured, untrained, *tokens), group="AdamW on its way"),
            STABLE_MUON: Experiment(config=of_muon, measurements=(loss,), group="Muon on its way"),
            **{
                arm: Experiment(
                    config=continued(unit, config, BRANCHES[arm]) if arm in BRANCHES else config,
                    measurements=(measured,),
                    group=self.title(arm),
                )
                for arm, config in configs.items()
            },
        }

    def _of_arm(self, unit: Unit, name: str, factor: float) -> TrainConfig:
        """Return the config of an optimizer whose rate is the usual one times a factor."""
        usual = self._optimizer("adamw" if name in ("sam", "wsd") else name)
        optimizer = dataclasses.replace(usual, learning_rate=factor * usual.learning_rate)
        if name == "wsd":
            decaying = dataclasses.replace(optimizer, warmup_steps=0, schedule="1-sqrt")
            return self._config(unit, decaying, init_optimizer=True, max_steps=self.wsd_steps)
        config = self._config(unit, optimizer)
        return dataclasses.replace(config, algorithm=SAMConfig(rho=self.rho)) if name == "sam" else config

    def _optimizer(self, name: str) -> OptimizerConfig:
        own = {"sgd": self.sgd_learning_rate, "schedule-free": self.schedule_free_learning_rate}
        rate = own.get(name, self.learning_rate)
        return OptimizerConfig(name=name, learning_rate=rate, warmup_steps=50, weight_decay=0.0)

    def _config(
        self,
        unit: Unit,
        optimizer: OptimizerConfig,
        *,
        target_kl: float | None = None,
        max_steps: int | None = None,
        **more: Any,
    ) -> TrainConfig:
        stage = StageConfig(
            steps=max_steps or self.max_steps,
            optimizer=optimizer,
            target_kl=target_kl or self.target_kl,
            validate_every=self.validate_every,
        )
        return TrainConfig(
            seed=unit.seed,
            language=unit.language,
            model=ModelConfig(architecture="llama", size=self.size, layers=self.layers, dropout=0.0),
            objective=ObjectiveConfig(kind="causal"),
            batch_size=self.batch_size,
            stages=(stage,),
            log_every=self.validate_every,
            device="cpu",
            threads=1,
            **more,
        )


LAPTOP = Optimizers(
    description="about 80 minutes on two cores",
    seconds=(34.0, 18.0),
    # of whose predictions about 0.4 nats a token depend on the other tokens. In the first design it was about 0.08, and
    # probes of most models found no more than probes of one-hot tokens
    language=PCFGConfig(levels=3, symbols_per_level=8, rules_per_symbol=3, vocab_size=32, zipf=1.0),
    grammars=tuple(range(1430, 1436)),
    stable_kl=0.2,
    target_kl=0.15,
    max_steps=8_000,
    wsd_steps=3_000,
    probed={"prefix-4": 100, "level-1": 100},
    settings={
        **{"loss_sentences": 4096, "num_sequences": 2048, "feature_sentences": 2048},
        # this strength, because with few examples it is as accurate as weaker ones and several times as fast
        **{"num_train": 2048, "num_test": 4096, "probe_draws": 24, "probe_regularization": (0.1,)},
        **{"frontier_level": 2, "frontier_gain": 0.3, "frontier_steps": 64},
    },
)
SCALES: Mapping[str, Optimizers] = {
    "laptop": LAPTOP,
    "pilot": dataclasses.replace(
        LAPTOP,
        description="twelve minutes on two cores: what the claims are planned with, no verdict is given",
        grammars=(9050,),
        probed={"prefix-4": 100, "level-1": 100, "root": 100},
    ),
    "smoke": dataclasses.replace(
        LAPTOP,
        description="two minutes on two cores: every part runs, no verdict is given",
        seconds=None,
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8, zipf=1.0),
        grammars=(1490, 1491, 1492),
        size="d16",
        layers=1,
        batch_size=32,
        stable_kl=0.25,
        target_kl=0.2,
        max_steps=200,
        wsd_steps=40,
        probed={"prefix-2": 20, "root": 20},
        settings={
            **{"loss_sentences": 256, "num_sequences": 64, "feature_sentences": 128},
            **{"num_train": 128, "num_test": 256, "probe_draws": 3, "probe_regularization": (0.1,)},
            **{"frontier_level": 1, "frontier_gain": 0.01, "frontier_steps": 8},
        },
    ),
}


# --- what is compared and claimed -------------------------------------------------------------------------------------


def outcomes(scale: Optimizers) -> Mapping[str, str]:
    """Return what the measures may predict: what each outcome is called, by its key."""
    accuracies = {key: f"accuracy on {task}" for task, key in zip(scale.probed, scale.probes.values(), strict=True)}
    rises = {key: f"rise at {key.removeprefix('int').removesuffix('-rise')} bits" for key in RISES}
    return {**accuracies, scale.last_layer: "accuracy at spans", **rises, FORGETTING: "forgetting"}


def trained_task(scale: Optimizers) -> Mapping[str, str]:
    """Return the probe of the task that helper and adversary are trained with."""
    return dict(itertools.islice(scale.probes.items(), 1))


def accuracies(scale: Optimizers) -> Mapping[str, str]:
    """Return the outcomes that are accuracies, by what they are called."""
    return {name: key for key, name in outcomes(scale).items() if key in scale.accuracies}


# What the study asks, stated before it runs. A slope is over all optimizers and rates, within grammars; its error is
# over grammars. Which measure predicts which outcome, with errors over grammars and over optimizers, is asked in
# `associations`, of every pair in the same way.
#
# The paper says that of models of one loss the flatter one transfers better: the primary claim. Two earlier draws, with
# one rate for each optimizer, found the opposite on average, and that effective rank explains it (post hoc). So the
# same is asked of the effective rank, and of each with the other given. In brackets only the neurons' part of the
# minimal trace orders models by their transfer. So each accuracy is also asked to rise as the MLPs' part falls.
#
# Whether the target is reached is checked on a sample of sentences, every ten steps. Everything is judged at the same
# loss: less what the difference in KL explains, by the slope of AdamW on its way.
_FLAT, _RANK = (
    functools.partial(trend, along="minimal-trace", per="halving", arms=tuple(ARMS)),
    functools.partial(trend, along="effective-rank", per="doubling", arms=tuple(ARMS)),
)
_MUON_SGD = functools.partial(against, arm=MUON_SGD, control="muon")
_at_one_loss = functools.partial(Claim, loss_rule="adjusted")
_better = functools.partial(_at_one_loss, direction="increase", measures=accuracies)
CLAIMS = (
    _better(
        id="helper",
        statement="At the same loss, a model that was trained with the task transfers better to it",
        role="positive control",
        of=functools.partial(against, arm=HELPER, control="adamw"),
        measures=trained_task,
    ),
    _better(
        id="flatness",
        statement="At the same loss, few-shot accuracy rises with flatness, over optimizers and rates",
        role="primary",
        of=_FLAT,
        measures=trained_task,
        no_effect_within=0.3,
    ),
    _at_one_loss(
        id="adversary",
        statement="At the same loss, a model that was trained against the task transfers worse to it",
        of=functools.partial(against, arm=ADVERSARY, control="adamw"),
        measures=trained_task,
        direction="decrease",
    ),
    _better(id="flatness-of-each", statement="At the same loss, each accuracy rises with flatness", of=_FLAT),
    _better(id="rank", statement="At the same loss, each accuracy rises with the features' effective rank", of=_RANK),
    _better(
        id="rank-given-flatness",
        statement="It also does so at one minimal trace",
        of=functools.partial(_RANK, given="minimal-trace"),
    ),
    _better(
        id="flatness-given-rank",
        statement="At one effective rank and one loss, each accuracy rises with flatness",
        of=functools.partial(_FLAT, given="effective-rank"),
    ),
    _at_one_loss(
        id="low-bits",
        statement="At the same loss, rounding the weights raises the loss of flatter models less",
        of=_FLAT,
        measures=dict(zip(("4 bits", "3 bits", "2 bits"), RISES, strict=True)),
        direction="decrease",
    ),
    _better(
        id="flatness-of-mlps",
        statement="At one loss and one minimal trace of attention, each accuracy rises with the MLPs' flatness",
        of=functools.partial(_FLAT, along="minimal-trace-of-mlps", given="minimal-trace-of-attention"),
    ),
    _better(
        id="flatness-of-attention",
        statement="At one loss and one minimal trace of the MLPs, each accuracy rises with attention's flatness",
        of=functools.partial(_FLAT, along="minimal-trace-of-attention", given="minimal-trace-of-mlps"),
    ),
    _at_one_loss(
        id="forgetting",
        statement="At the same loss, flatter models forget less when they learn as much of a partly changed grammar",
        of=_FLAT,
        measures={"rise of the loss": FORGETTING},
        direction="decrease",
    ),
    _at_one_loss(
        id="muon-sgd-flatter",
        statement="At the same loss, SGD after Muon makes a flatter model than Muon",
        of=_MUON_SGD,
        measures="flatness",
        direction="decrease",
    ),
    _better(
        id="muon-sgd-transfer",
        statement="At the same loss, the model of SGD after Muon transfers better than Muon's",
        of=_MUON_SGD,
        no_effect_within=1.0,
    ),
)


# --- what predicts what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Association:
    """The partial correlation of a measure with an outcome within grammars, given the KL."""

    measure: str  # its key
    outcome: str  # its key
    over_grammars: Correlation
    over_optimizers: Correlation
    given_other: Correlation  # given the effective rank as well or, of the effective rank, given the minimal trace
    p_adjusted: float  # of the first, for the number of pairs of measure and outcome

    @property
    def verdict(self) -> str:
        """Whether it is shown, over grammars and over optimizers."""
        low, high = self.over_optimizers.interval95
        return "shown" if self.p_adjusted < 0.05 and (low > 0 or high < 0) else "not shown"


def associations(results: Results) -> list[Association]:
    """Return the correlations of all measures with all outcomes, over all optimizers and rates.

    An undefined correlation is left out, but still counts as a test in Holm's method.
    """
    scale: Optimizers = results.scale
    clusters = clusters_of(scale.complete(results))
    rows = [
        (cluster, name, end)
        for arm, name in ARMS.items()
        for cluster, end in zip(clusters, scale.at_end(results, arm), strict=True)
    ]
    grammars, optimizers = [row[0] for row in rows], [row[1] for row in rows]
    kl = [end["kl"].value for *_, end in rows]
    indicators = {name: [float(name == own) for own in grammars] for name in dict.fromkeys(grammars)}

    def logs(key: str) -> list[float]:
        return [math.log(end[key].value) for *_, end in rows]

    found: dict[tuple[str, str], tuple[Correlation, Correlation, Correlation]] = {}
    for measure, outcome in (pairs := list(itertools.product(PREDICTORS, outcomes(scale)))):
        other = "minimal-trace" if measure == "effective-rank" else "effective-rank"
        # too few grammars, a value that is not above 0, or a fine-tuning that did not reach the common gain
        try:
            x, y = logs(measure), [end[outcome].value for *_, end in rows]
            over_grammars = functools.partial(correlation, x, y, grammars, within=grammars, resamples=100)
            found[measure, outcome] = (
                over_grammars(given={"KL": kl}),
                # an optimizer is on all grammars, so that what is within a grammar is what its indicators leave
                correlation(x, y, optimizers, given={"KL": kl, **indicators}, resamples=100),
                over_grammars(given={"KL": kl, other: logs(other)}),
            )
        except (IsolossError, KeyError, ValueError):
            continue
    if not found:
        return []
    by_name = {f"{measure}/{outcome}": first.p_value for (measure, outcome), (first, *_) in found.items()}
    adjusted = holm(by_name, tests=len(pairs))
    return [Association(*pair, *each, adjusted["/".join(pair)]) for pair, each in found.items()]


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return the tables: what predicts what, all arms, their differences from AdamW, rises, probes and layers."""
    scale: Optimizers = results.scale
    units = scale.complete(results)
    if not has_several_languages(units):
        return ()
    shown = (*ARMS, *OTHERS)
    ends = {arm: scale.at_end(results, arm) for arm in (STABLE, *shown)}
    # a fine-tuning that does not reach the common gain has no forgetting
    whole = [*itertools.chain.from_iterable(ends.values())]
    keys = [key for key in ("kl", *PREDICTORS, *outcomes(scale)) if all(key in end for end in whole)]
    layers = [f"layer-{layer}" for layer in range(scale.layers + 1)]

    def steps(unit: Unit, arm: str) -> int:
        # a branch has the steps of the run that it begins from, too
        before = [BRANCHES[arm]] if arm in BRANCHES else []
        return sum(max(results.of_run(unit.run(each))) for each in (*before, arm))

    arms = []
    for arm in shown:
        taken = [steps(unit, arm) for unit in units]
        label = (scale.title(arm), f"{min(taken):,} to {max(taken):,}", num_above_target(ends[arm], scale.target_kl))
        arms.append((label, means(ends[arm], units, keys)))
    differences = {arm: from_adamw(results, arm, keys) for arm in shown if arm != "adamw"}
    clusters = clusters_of(units)

    def share(end: Checkpoint, key: str) -> float:
        return 100 * end[key].value / end["loss"].value

    shares = {
        arm: {key: cluster_mean([share(end, key) for end in ends[arm]], clusters, unit="%") for key in RISES}
        for arm in shown
    }
    spans = [((scale.title(arm),), means(ends[arm], units, [*layers, "bayes", "majority"])) for arm in shown]
    return (
        *_association_tables(results),
        SummaryTable(
            "room",
            f"accuracy of probes with and without training, {OVER}",
            ("probe of",),
            _room(results, units),
            "The same sentences, draws and seeds for all. Columns with “above”: points above one-hot tokens.",
        ),
        SummaryTable(
            "arms",
            f"all arms, {OVER}",
            ("arm", "steps", "above the target"),
            arms,
            f"Every arm ends where its KL on validation sentences is at most {scale.target_kl:g}, or after "
            f"{scale.max_steps:,} steps ({scale.wsd_steps:,} with the decaying rate). “Above the target” counts runs "
            "whose KL on the evaluation's sentences is more than 10 % above the target.",
        ),
        SummaryTable(
            "differences",
            f"arms vs. AdamW, {OVER}",
            ("arm",),
            [((scale.title(arm),), each) for arm, each in differences.items()],
            "Paired by grammar: arm minus AdamW at the usual rate; for traces and sharpness the geometric mean of "
            "arm over AdamW.",
        ),
        SummaryTable(
            "rises",
            f"rises as a share of the loss, {OVER}",
            ("arm",),
            [((scale.title(arm),), each) for arm, each in shares.items()],
            "The rise of the loss when the weights are rounded, in percent of the arm's own loss.",
        ),
        SummaryTable(
            "spans",
            f"probes of the symbols of level {scale.span_level} at their spans, {OVER}",
            ("arm",),
            spans,
            "Accuracy from the state of the span's last token; layer-0 is the embeddings. bayes is the Bayes-optimal "
            "accuracy given the sentence up to there, majority the share of the most common symbol.",
        ),
    )


def _room(results: Results, units: Sequence[Unit]) -> list[tuple[tuple[str], dict[str, Estimate]]]:
    """Return the accuracies of few-shot probes by what they read, and how far they are above one-hot tokens."""
    scale: Optimizers = results.scale
    tokens = dict(zip(scale.probes.values(), (f"one-hot-{task}" for task in scale.probed), strict=True))
    before = [results.at(unit.run(STABLE), 0) for unit in units]
    accuracies_of: dict[str, dict[str, list[float]]] = {
        "Majority class": {key: [one[own].details["majority_rate"] for one in before] for key, own in tokens.items()},
        "Tokens, one-hot": {key: [one[own].value for one in before] for key, own in tokens.items()},
        "Untrained model": {key: [one[key].value for one in before] for key in tokens},
    }
    for arm in (*ARMS, *OTHERS):
        accuracies_of[scale.title(arm)] = {
            key: [end[key].value for end in ends_of(results, units, arm)] for key in tokens
        }
    clusters, least = clusters_of(units), accuracies_of["Tokens, one-hot"]
    rows = []
    for name, found in accuracies_of.items():
        above = {key: [100 * (a - b) for a, b in zip(found[key], least[key], strict=True)] for key in tokens}
        row = {key: cluster_mean(found[key], clusters, unit="accuracy") for key in tokens}
        more = {f"{key}, above": cluster_mean(above[key], clusters, unit="percentage points") for key in tokens}
        rows.append(((name,), {**row, **more}))
    return rows


def _association_tables(results: Results) -> list[SummaryTable]:
    """Return the table of what predicts what; none where there are too few grammars."""
    scale: Optimizers = results.scale
    rows = [
        (
            (PREDICTORS[each.measure], outcomes(scale)[each.outcome], f"{each.p_adjusted:.2g}", each.verdict),
            {
                "over grammars": each.over_grammars.estimate(),
                "over optimizers": each.over_optimizers.estimate(),
                "given the other": each.given_other.estimate(),
            },
        )
        for each in associations(results)
    ]
    caption = (
        f"Partial correlation of the logarithm of each measure with each outcome given the KL, within grammars, across "
        f"{len(OPTIMIZERS)} optimizers with {len(RATES)} rates each (without helper, adversary and SGD after Muon). "
        "Errors by the jackknife: over grammars for these optimizers, and over optimizers for these grammars. p, over "
        "grammars, is adjusted by Holm's method for all pairs; shown: p is below 0.05 and the 95 % interval over "
        "optimizers excludes 0. “Given the other”, over grammars: given the effective rank as well or, in its rows, "
        "given the minimal trace."
    )
    labels = ("measure", "outcome", "p", "verdict")
    return [SummaryTable("associations", "which measure predicts which outcome", labels, rows, caption)] if rows else []


def from_adamw(results: Results, arm: str, keys: Sequence[str]) -> dict[str, Estimate]:
    """Return how an arm differs from AdamW: measures of flatness as factors."""
    scale: Optimizers = results.scale
    pairs = scale.pairs(results, "adamw", arm)
    return changes(pairs, scale.complete(results), keys, as_factors=FACTORS)


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether flatness goes with transfer, whether effective rank does, and whether rounding costs less."""
    by_id = {result.claim.id: result for result in claims}
    return [
        card_of("Do flatter models transfer better, across optimizers?", by_id["flatness"]),
        card_of("Do models with a higher effective rank transfer better?", by_id["rank"]),
        card_of("Do flatter models lose less at 4 bits or fewer?", by_id["low-bits"]),
    ]


# --- the page --------------------------------------------------------------------------------------------------------


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    if not (found := associations(results)):
        return []
    scale: Optimizers = results.scale
    names = outcomes(scale)
    usual = [arm for arm in (*OPTIMIZERS, MUON_SGD) if arm != "adamw"]
    by_optimizer = {scale.title(arm): from_adamw(results, arm, (*FACTORS, *scale.accuracies)) for arm in usual}

    def panel(title: str, of: Callable[[Association], Correlation]) -> IntervalPanel:
        return IntervalPanel(
            title=title,
            intervals=[
                Interval(
                    row=names[each.outcome],
                    series=PREDICTORS[each.measure],
                    value=of(each).value,
                    low=of(each).interval95[0],
                    high=of(each).interval95[1],
                    text=f"{of(each).value:+.2f}, {each.verdict}",
                )
                for each in found
                if each.measure in ("trace", "minimal-trace", "effective-rank")
            ],
        )

    return [
        Figure(
            name="associations",
            title="Which measure predicts which outcome",
            chart=intervals(
                [
                    panel("Correlation, interval over grammars", lambda each: each.over_grammars),
                    panel("The same, interval over optimizers", lambda each: each.over_optimizers),
                    panel("Given the other", lambda each: each.given_other),
                ],
                list(names.values()),
                note="Lines: 95 % confidence intervals, not adjusted for the number of pairs",
            ),
            caption="Partial correlations across optimizers and rates, within grammars and given the KL. Right of 0: "
            "sharper models, or models with a higher rank, have higher accuracy, larger rises or more forgetting. "
            "“Given the other”: traces given the effective rank, the effective rank given the minimal trace. The table "
            "has all measures and the verdicts.",
        ),
        Figure(
            name="arms",
            title="Every optimizer vs. AdamW, at the same loss",
            chart=forest(
                by_optimizer,
                {
                    "Flatness, factor (left: flatter)": {
                        PREDICTORS[key]: key for key in FACTORS if key not in AtOneLoss.parts
                    },
                    "Accuracy, difference (points)": {names[key]: key for key in scale.accuracies},
                },
                note="confidence intervals over grammars, not adjusted for the number of optimizers",
            ),
            caption="Paired by grammar, each at its usual rate: the factors by which the measures of flatness differ "
            "from AdamW's, and the differences of accuracies. Other rates, helper and adversary are in the tables.",
        ),
    ]


def _settings(scale: Optimizers) -> dict[str, str]:
    weight = AdversarialConfig.weight
    return {
        "Grammars": f"{len(scale.grammars)}, one pre-training seed each; roughly Zipfian token frequencies",
        "Model": f"Llama {scale.size} with {scale.layers} layers, causal; {scale.batch_size} sentences a step",
        "Optimizers": ", ".join(OPTIMIZERS.values()),
        "Learning rate": f"the usual one is {scale.learning_rate:g}, constant after 50 steps of warm-up, no weight "
        f"decay; {scale.sgd_learning_rate:g} for SGD and {scale.schedule_free_learning_rate:g} for schedule-free "
        "AdamW. Each optimizer also has half and twice its usual rate",
        "Branches": f"AdamW runs to a KL of {scale.stable_kl:g} nats. From there the decaying rate goes on with its "
        f"optimizer's state, SGD with a fresh one. Decay: 1-sqrt planned over {scale.wsd_steps:,} steps. SGD "
        "after Muon branches from Muon in the same way",
        "SAM": f"rho {scale.rho:g}; the perturbation is computed on one half of the batch, the gradient on the other",
        "LAWA": "a copy of the weights is kept every 20 steps; the mean of the latest 6 is compared with the target "
        "and measured",
        "Helper, adversary": f"the loss minus λ times the loss of a head for {next(iter(scale.probed))}, λ = "
        f"{-weight:g} and {weight:g}",
        "End": f"at the first multiple of {scale.validate_every} steps with a KL of at most {scale.target_kl:g} nats "
        f"on 1,024 validation sentences, or after {scale.max_steps:,} steps",
        "Forgetting": f"in the changed grammar, the symbols of level {scale.settings['frontier_level']} have other "
        f"rules; {scale.settings['frontier_steps']} steps of AdamW on 8 sentences each, at the rate with which the "
        f"loss there falls by {scale.settings['frontier_gain']:g} nats",
        "Errors": "over grammars, with Student's t",
    }


STUDY = Study(
    name="optimizers",
    scales=SCALES,
    title="At the same loss and across optimizers, does transfer go with flatness or with effective rank?",
    lead=(
        "Small causal language models (Llama) on grammars with roughly Zipfian token frequencies are trained by eight "
        "optimizers with three learning rates each, all to the same KL to the true conditionals. Measures: the "
        "trace of the Fisher information, its minimum over rescalings of the weights that change no prediction, parts "
        "of this minimal trace, the curvature along the optimizer's own next update (directional sharpness), and the "
        "effective rank of the features (RankMe).",
        "Outcomes: few-shot probes, probes of the grammar's symbols at their spans, the rise of the loss when weights "
        "are rounded to 4, 3 and 2 bits, and forgetting: the rise of the loss when a short fine-tuning on a partly "
        "changed grammar lowers the loss there by a fixed amount. The helper is trained with the first task and the "
        "adversary against it: they show that its probe can see a difference.",
    ),
    claims=CLAIMS,
    loss_margin=0.002,
    verdicts_at=("laptop",),
    tables=tables,
    answer=answer,
    page=parts,
    block_name="grammars",
)
