"""The study dose-response: flatter and sharper models with the same loss, by a lasting penalty of either sign.

Other arms raise or lower the effective rank of the features, which changes together with flatness.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, FeatureEntropyConfig, FisherPenaltyConfig
from isoloss.paper.design import (
    AtOneLoss,
    Unit,
    adamw,
    against,
    clusters_of,
    continued,
    exact_labels,
    small_bert,
    trend,
    units_with,
)
from isoloss.paper.tables import (
    OVER,
    TRACES,
    changes,
    factor,
    factor_ends,
    has_several_languages,
    means,
    num_above_target,
    num_languages,
)
from isoloss.report import charts, data
from isoloss.report.charts import Spec, layer, nominal
from isoloss.report.html import Card
from isoloss.report.study_page import Figure
from isoloss.run_config import StageConfig, TrainConfig
from isoloss.studies import Experiment, PageParts, Study
from isoloss.studies.answer import card_of
from isoloss.studies.claims import Claim, ClaimResult, at_same_loss
from isoloss.studies.results import Checkpoint, Pair, Results, change, difference
from isoloss.studies.summary import SummaryTable

BASE, CONTROL, SHAM, HELPER = "base", "control", "sham", "helper"
# the arms with a penalty, from the sharpest to the flattest; the sham, whose weight is 0, stands between
SHARPER = ("sharp-3", "sharp-2", "sharp-1")
FLATTER = ("flat-1", "flat-2", "flat-3")
DOSES = (*SHARPER, SHAM, *FLATTER)
NARROWER, WIDER = "narrower", "wider"  # features of a lower and of a higher effective rank
RANKED = (*DOSES, NARROWER, WIDER)
TREATED = (*RANKED, HELPER)
ARMS = (CONTROL, *TREATED)
OTHER_SENTENCES = 15  # added to the seed of the control, whose sentences are others than those of the other arms
FEATURES = ("effective-rank", "effective-dimension", "cka-truth")
# made from the probes of a checkpoint
TRANSFER, INVARIANT, NEEDED_MORE = "prefix-mean", "invariant-prefix-mean", "needed-minus-spare"
FACTORS = (*TRACES, *AtOneLoss.parts)  # what is compared by factors


# --- the design ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DoseResponse(AtOneLoss):
    """A scale of the study."""

    size: str = "d32"  # of the model
    layers: int = 2
    batch_size: int = 64
    base_kl: float  # nats per masked token: where the base ends
    base_steps: int  # of the base: AdamW with exact labels, at most
    steps: int  # of the stage that differs between arms
    weights: tuple[float, float, float]  # of the penalty on the trace's logarithm for a flatter model, ascending
    sharp_weights: tuple[float, float, float]  # of the penalty for a sharper one, ascending in size
    sentences: int = 8  # that the penalty's trace is estimated on
    entropy_weights: tuple[float, float]  # of the features' spectral entropy: for a lower rank, below 0, and a higher
    helper_steps: int
    cooldown_steps: int  # of the cooldown that ends every arm, at most
    learning_rate: float = 3e-3  # AdamW's highest, in the base and in the stage that differs between arms
    cooldown_rate: float = 1e-3  # in the cooldown
    validate_every: tuple[int, int] = (100, 20)  # steps after which base and cooldown compare the KL with the target
    tasks: tuple[str, ...] = ("prefix-2", "prefix-4")  # downstream tasks; the helper trains with the first
    shots: tuple[int, ...] = (30, 100)  # training examples of their few-shot probes
    pair: tuple[str, str] = ("needed-2", "spare-2")  # what later tokens need of the first two, and what they do not
    pair_shots: int = 50  # training examples of these

    needed: ClassVar[tuple[str, ...]] = (BASE, *ARMS)
    falling: ClassVar[tuple[str, str]] = (BASE, SHAM)

    @property
    def adjusted(self) -> tuple[str, ...]:
        """The estimates that claims are about."""
        return (*TRACES, "effective-rank", TRANSFER, INVARIANT, NEEDED_MORE, *self.probes.values())

    def sums(self, end: Checkpoint) -> dict[str, Mapping[str, float]]:
        """Return the means of probes, what is needed minus what is not, and parts of the minimal trace."""
        needed, spare = (f"few-shot-{task}-{self.pair_shots}" for task in self.pair)
        return {
            TRANSFER: dict.fromkeys(self.transfer, 1 / len(self.transfer)),
            INVARIANT: dict.fromkeys((f"invariant-{key}" for key in self.transfer), 1 / len(self.transfer)),
            NEEDED_MORE: {needed: 1.0, spare: -1.0},
            **super().sums(end),
        }

    def title(self, arm: str) -> str:
        """Return what an arm is called in figures and tables."""
        return self.titles[arm]

    @property
    def probes(self) -> dict[str, str]:
        """By task and number of training examples: the measure of the few-shot probe, those of the prefixes first."""
        asked = [(task, n) for n in self.shots for task in self.tasks] + [(task, self.pair_shots) for task in self.pair]
        return {f"{task} ({n:,} examples)": f"few-shot-{task}-{n}" for task, n in asked}

    @property
    def transfer(self) -> list[str]:
        """The measures of the tasks about prefixes."""
        return [key for name, key in self.probes.items() if not name.startswith(self.pair)]

    @property
    def titles(self) -> Mapping[str, str]:
        """What the runs of the arms are called in figures and tables, by arm."""
        penalties = zip((*FLATTER, *SHARPER[::-1]), (*self.weights, *(-w for w in self.sharp_weights)), strict=True)
        return MappingProxyType(
            {
                BASE: "Base",
                CONTROL: "AdamW, other sentences",
                SHAM: "Sham",
                **{arm: f"Penalty {weight:+g}" for arm, weight in penalties},
                **dict(zip((NARROWER, WIDER), (f"Entropy {w:+g}" for w in self.entropy_weights), strict=True)),
                HELPER: "Helper",
            }
        )

    def arms(self, unit: Unit) -> dict[str, Experiment]:
        """Return the runs of a unit by the names of their arms, and what is measured of each."""
        probes = [*self.probes.values(), *(f"invariant-{key}" for key in self.transfer)]
        flatness = [*TRACES, "minimal-trace-by-kind"]
        measured = self.measurement(unit, ["loss", *flatness, "features", *probes], "last")
        untrained = self.measurement(unit, probes, 0, name="measure before training of")
        base = self._to_target(self.base_kl, self.base_steps, self.learning_rate, self.validate_every[0])
        config = dataclasses.replace(self._config(unit, base), checkpoints=(0,))
        made = {BASE: Experiment(config=config, measurements=(measured, untrained), group=self.titles[BASE])}
        cooldown = self._to_target(self.target_kl, self.cooldown_steps, self.cooldown_rate, self.validate_every[1])
        for arm, (algorithm, steps) in self._treatments().items():
            stage = StageConfig(steps=steps, optimizer=adamw(self.learning_rate), algorithm=algorithm)
            # a treatment goes on through the cooldown, which would take back most of what it did; but the helper's task
            last = cooldown if arm == HELPER else dataclasses.replace(cooldown, algorithm=algorithm)
            config = continued(unit, self._config(unit, stage, last), BASE)
            if arm == CONTROL:
                config = dataclasses.replace(config, seed=config.seed + OTHER_SENTENCES)
            made[arm] = Experiment(config=config, measurements=(measured,), group=self.titles[arm])
        return made

    def _config(self, unit: Unit, *stages: StageConfig) -> TrainConfig:
        model, every = small_bert(self.size, self.layers), math.gcd(*self.validate_every)
        return exact_labels(unit, model, batch_size=self.batch_size, stages=stages, log_every=every)

    def _to_target(self, target_kl: float, steps: int, rate: float, every: int) -> StageConfig:
        return StageConfig(steps=steps, optimizer=adamw(rate), target_kl=target_kl, validate_every=every)

    def _treatments(self) -> dict[str, tuple[Any, int]]:
        """Return the algorithm and the steps of the stage between base and cooldown, by arm."""
        weights = (*(-weight for weight in self.sharp_weights[::-1]), 0.0, *self.weights)
        penalties = {
            arm: FisherPenaltyConfig(weight=weight, logarithm=True, sentences=self.sentences)
            for arm, weight in zip(DOSES, weights, strict=True)
        }
        entropies = {
            arm: FeatureEntropyConfig(weight=weight)
            for arm, weight in zip((NARROWER, WIDER), self.entropy_weights, strict=True)
        }
        helper = AdversarialConfig(task=self.tasks[0], weight=-AdversarialConfig.weight)
        treatments = {CONTROL: None, **penalties, **entropies}
        return {**{arm: (each, self.steps) for arm, each in treatments.items()}, HELPER: (helper, self.helper_steps)}


LANGUAGE = PCFGConfig(levels=2, symbols_per_level=4, rules_per_symbol=4, vocab_size=8)
SETTINGS: Mapping[str, Any] = {
    **{"loss_sentences": "all", "feature_sentences": "all", "num_test": "all"},
    # this strength, because with few examples it is as accurate as weaker ones and several times as fast
    **{"num_sequences": 512, "probe_draws": 16, "probe_regularization": (0.1,)},
}
LAPTOP = DoseResponse(
    description="about 50 minutes on two cores",
    seconds=(14.0, 7.0),
    language=LANGUAGE,
    grammars=tuple(range(850, 874)),
    base_kl=5e-4,
    target_kl=3e-4,
    largest_kl=8e-4,
    base_steps=8_000,
    steps=600,
    weights=(5e-4, 1.5e-3, 4e-3),
    sharp_weights=(2e-4, 5e-4, 1e-3),
    entropy_weights=(-2e-4, 2e-4),
    helper_steps=100,
    cooldown_steps=600,
    settings=SETTINGS,
)
SCALES: Mapping[str, DoseResponse] = {
    "laptop": LAPTOP,
    "pilot": dataclasses.replace(
        LAPTOP,
        description="six minutes on two cores: what the claims are planned with, no verdict is given",
        grammars=tuple(range(9010, 9014)),
    ),
    "demo": dataclasses.replace(
        LAPTOP,
        description="two minutes on two cores: two grammars, at a higher loss; too few for a verdict",
        seconds=None,
        grammars=(840, 841),
        base_kl=6e-3,
        target_kl=3e-3,
        largest_kl=math.inf,
        base_steps=4_000,
        steps=120,
        helper_steps=60,
        cooldown_steps=400,
        settings={**SETTINGS, "probe_draws": 6},
    ),
    "smoke": dataclasses.replace(
        LAPTOP,
        description="a minute on two cores: every part runs, no verdict is given",
        seconds=None,
        language=dataclasses.replace(LANGUAGE, symbols_per_level=3, rules_per_symbol=3, vocab_size=6),
        grammars=(890, 891),
        layers=1,
        base_kl=0.1,
        target_kl=0.05,
        largest_kl=math.inf,
        base_steps=200,
        steps=20,
        sentences=4,
        helper_steps=20,
        cooldown_steps=100,
        shots=(10, 20),
        settings={**SETTINGS, "num_sequences": 64, "probe_draws": 3},
    ),
}


# --- what is claimed --------------------------------------------------------------------------------------------------


def helped_task(scale: DoseResponse) -> Mapping[str, str]:
    """Return the probe of the helper's task on the fewest examples."""
    return dict(itertools.islice(scale.probes.items(), 1))


def each_probe(scale: DoseResponse) -> Mapping[str, str]:
    """Return the probes of the tasks about prefixes."""
    return {name: key for name, key in scale.probes.items() if key in scale.transfer}


# What the study is asked, stated before it is run. A direction is that of the second model of the comparison minus the
# first, or of the slope along a trend.
#
# The primary claim is the paper's, as a slope over all doses. It is new here: in two earlier draws of 12 grammars,
# whose penalty ended before the cooldown, the slope was found after the results were known, +0.66 ± 0.16 points with
# each halving of the minimal trace (docs/method/studies.md). 24 grammars find such a slope with 95 % power at the level
# of 2.5 % that the primary test has, as the absence of an effect is tested too; the smallest effect of interest is 0.3
# points.
#
# The weights are from trials on the grammars 9010 to 9029 (docs/method/studies.md): a larger reward, or one that is not
# on the trace's logarithm, raises trace and KL without end. A base is left out if an arm ends above 2.7 times the
# target all the same.
#
# Everything is judged at the same loss: less what the difference in KL explains, by the slope on the KL from the bases
# to the shams of the same grammars, whose error counts.
#
# Flatness and the features' effective rank change together, so the slope on each is asked also with the other given,
# over the doses and the two arms that change the rank itself.
_halving = functools.partial(trend, along="minimal-trace", per="halving")
_doubling = functools.partial(trend, along="effective-rank", per="doubling")
_DOSES, _FLAT, _RANK = (
    functools.partial(_halving, arms=DOSES),
    functools.partial(_halving, arms=RANKED, given="effective-rank"),
    functools.partial(_doubling, arms=RANKED),
)
MEAN = {"mean of the prefix probes": TRANSFER}
_better = functools.partial(Claim, direction="increase", loss_rule="adjusted")
_interesting = functools.partial(_better, no_effect_within=0.3)
CLAIMS = (
    Claim(
        id="flatter",
        statement="At the same loss, the strongest penalty makes a flatter model than the strongest reward",
        role="manipulation check",
        of=functools.partial(against, arm="flat-3", control="sharp-3"),
        measures="flatness",
        direction="decrease",
        loss_rule="adjusted",
    ),
    _better(
        id="helper",
        statement="At the same loss, a model that was trained with the task transfers better from few examples",
        role="positive control",
        of=functools.partial(against, arm=HELPER, control=SHAM),
        measures=helped_task,
    ),
    _interesting(
        id="trend",
        statement="At the same loss, few-shot accuracy rises as penalties make the model flatter",
        role="primary",
        of=_DOSES,
        measures=MEAN,
    ),
    _interesting(
        id="trend-of-each",
        statement="At the same loss, the accuracy of each probe rises as penalties make the model flatter",
        of=_DOSES,
        measures=each_probe,
    ),
    _interesting(
        id="trend-invariant",
        statement="So does the accuracy of probes that no exact rescaling can change",
        of=_DOSES,
        measures={"mean of the prefix probes, features of one variance": INVARIANT},
    ),
    _interesting(
        id="trend-of-needed",
        statement="At the same loss, flatter models gain more on what later tokens need than on what they do not",
        of=_DOSES,
        measures={"needed-2 minus spare-2": NEEDED_MORE},
    ),
    _better(
        id="trend-of-rank",
        statement="At the same loss, the effective rank of the features rises as penalties make the model flatter",
        of=_DOSES,
        measures={"": "effective-rank"},
    ),
    _better(
        id="wider",
        statement="At the same loss, the bonus on the entropy of the features raises their effective rank",
        of=functools.partial(against, arm=WIDER, control=NARROWER),
        measures={"": "effective-rank"},
    ),
    _better(
        id="wider-transfer",
        statement="At the same loss, it also raises few-shot accuracy",
        of=functools.partial(against, arm=WIDER, control=NARROWER),
        measures=MEAN,
    ),
    _better(
        id="rank",
        statement="At the same loss, few-shot accuracy rises with the effective rank",
        of=_RANK,
        measures=MEAN,
    ),
    _better(
        id="rank-given-flatness",
        statement="It also does so at one minimal trace",
        of=functools.partial(_RANK, given="minimal-trace"),
        measures=MEAN,
    ),
    _better(
        id="flatness-given-rank",
        statement="At one effective rank and one loss, few-shot accuracy rises with flatness",
        of=_FLAT,
        measures=MEAN,
    ),
    Claim(
        id="sham",
        statement="The sham transfers as AdamW on other sentences does: the negative control",
        of=functools.partial(against, arm=SHAM, control=CONTROL),
        measures=MEAN,
        direction="no change within",
        margin=0.5,
        loss_rule="adjusted",
    ),
)


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return the tables: all arms, their differences from the sham, the trends, and what is adjusted."""
    scale: DoseResponse = results.scale
    units = scale.complete(results)
    if not has_several_languages(units):
        return ()
    made = (TRANSFER, INVARIANT, NEEDED_MORE)
    keys = ("kl", *FACTORS, *FEATURES, *made, *scale.probes.values())
    arms = []
    for arm in ARMS:
        some, taken = scale.at_end(results, arm), [results.last_step(unit.run(arm)) for unit in units]
        steps = f"{statistics.fmean(taken):,.0f} ({min(taken):,} to {max(taken):,})"
        label = (scale.titles[arm], steps, num_above_target(some, scale.target_kl))
        arms.append((label, means(some, units, keys)))
    differences = [
        ((scale.titles[arm],), changes(scale.pairs(results, SHAM, arm), units, keys, as_factors=FACTORS))
        for arm in ARMS
        if arm != SHAM
    ]
    trends = {
        "halving of the minimal trace": functools.partial(_halving, arms=DOSES),
        "the same, flatter side": functools.partial(_halving, arms=(SHAM, *FLATTER)),
        "the same, sharper side": functools.partial(_halving, arms=(*SHARPER, SHAM)),
        "the same, without the strongest penalty": functools.partial(_halving, arms=DOSES[:-1]),
        "halving of attention's part": functools.partial(
            trend, along="minimal-trace-of-attention", per="halving", arms=DOSES
        ),
        "halving of the MLPs' part": functools.partial(trend, along="minimal-trace-of-mlps", per="halving", arms=DOSES),
        "doubling of the effective rank": functools.partial(_doubling, arms=RANKED),
        "doubling of the rank, given the minimal trace": functools.partial(
            _doubling, arms=RANKED, given="minimal-trace"
        ),
        "halving of the minimal trace, given the rank": functools.partial(
            _halving, arms=RANKED, given="effective-rank"
        ),
    }
    slopes = scale.loss_slopes(results)
    untrained = means([results.at(unit.run(BASE), 0) for unit in units], units, scale.probes.values())
    return (
        SummaryTable(
            "trends",
            f"slopes at the same loss, {OVER}",
            ("with each",),
            [
                (
                    (name,),
                    {
                        key: found
                        for key in (*made, "effective-rank")
                        # the slope of the rank on its own logarithm says nothing
                        if key not in (one.along, *one.given) and (found := at_same_loss(one, key))
                    },
                )
                for name, of in trends.items()
                for one in [of(results)]
            ],
            "Change with each halving or doubling, fitted within the seeds of each grammar: over the doses or, in rows "
            "with the effective rank, also over the two arms that change it. Claims are about the first row and those "
            "with the rank; the others show how much of the first hangs on one side, or on the strongest penalty.",
        ),
        SummaryTable(
            "arms",
            f"all arms, {OVER}",
            ("arm", "steps after the base: mean (range)", "above the target"),
            arms,
            f"Every arm ends where its cooldown reaches a KL of {scale.target_kl:g} on validation sentences, or after "
            f"{scale.cooldown_steps:,} steps. “Above the target” counts runs whose exact KL is more than 10 % higher. "
            "Values are as measured, not adjusted to the same loss. "
            f"{_left_out(results)}"
            "Probes are tested on every sentence of the language; prefix-mean is the mean of the probes of prefix-2 "
            "and prefix-4, invariant-prefix-mean the same with all features scaled to one variance.",
        ),
        SummaryTable(
            "differences",
            f"arms vs. sham, {OVER}",
            ("arm",),
            differences,
            "Paired by grammar and seed: arm minus sham; traces: arm over sham, as geometric means. Not adjusted to "
            "the same loss: the first column has the difference in KL.",
        ),
        SummaryTable(
            "slopes",
            "slopes on the KL, mean ± standard error over grammars",
            ("outcome",),
            [((key,), {"slope": one}) for key, one in slopes.items()],
            f"Change per nat of KL, from the base, whose target is a KL of {scale.base_kl:g}, to the sham. Claims and "
            "the slopes of the first table are adjusted to the same loss by these slopes; for an arm that ends "
            "above the base this is an extrapolation.",
        ),
        SummaryTable(
            "untrained",
            f"the untrained model, {OVER}",
            ("model",),
            [(("Untrained",), untrained)],
            "What the same probes find in the base before its training.",
        ),
    )


def _left_out(results: Results) -> str:
    scale: DoseResponse = results.scale
    whole, kept = len(units_with(results, *scale.needed)), len(scale.complete(results))
    left = f"Of {whole} bases, {whole - kept} left out: an arm of these ended above {scale.largest_kl:g}. "
    return left if kept < whole else ""


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether accuracy rises with flatness, whether also at one rank, and whether raising the rank helps."""
    by_id = {result.claim.id: result for result in claims}
    return [
        card_of("Do flatter models transfer better?", by_id["trend"]),
        card_of("Also at the same effective rank?", by_id["flatness-given-rank"]),
        card_of("Does raising the effective rank help transfer?", by_id["wider-transfer"]),
    ]


# --- the page --------------------------------------------------------------------------------------------------------

SERIES: Mapping[str, Sequence[str]] = {
    "Penalty": DOSES,
    "Less entropy of the features": (NARROWER, SHAM),
    "More entropy of the features": (SHAM, WIDER),
}
MARKERS = ("circle", "triangle-down", "triangle-up")  # the two of entropy lie at about one trace
Row = dict[str, Any]


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    scale: DoseResponse = results.scale
    if not (units := scale.complete(results)):
        return []
    counts = {arm: num_above_target(scale.at_end(results, arm), scale.target_kl) for arm in ARMS}
    above = [f"{count} of {scale.titles[arm]}" for arm, count in counts.items() if count]
    first = [("Accuracy, mean of the prefix probes", TRANSFER), ("Effective rank", "effective-rank")]
    others = {**scale.probes, "prefix probes, one variance": INVARIANT}
    return [
        Figure(
            name="dose-response",
            title="Few-shot accuracy and effective rank by flatness",
            chart=dose_response(results, first),
            caption="Differences from the sham, whose penalty has weight 0, not adjusted to the same loss"
            + (f"; of {len(units)} runs of each arm, a KL more than 10 % above the target have " if above else "")
            + f"{', '.join(above)}. Thin: the penalty's arms of each of {num_languages(units)} grammars. Thick: means "
            "over grammars.",
        ),
        Figure(
            name="dose-response-others",
            title="Each probe",
            chart=dose_response(results, [(f"Accuracy, {title}", key) for title, key in others.items()]),
            caption="As above; in the last panel, all features are scaled to one variance. needed-2 asks for what "
            "later tokens need of the first two tokens, spare-2 for what they do not need.",
        ),
    ]


def dose_response(results: Results, shown: Sequence[tuple[str, str]]) -> Spec:
    """Return a panel for each measure, given by its title and its key.

    It has the difference from the sham against the minimal trace over the sham's.
    """
    scale: DoseResponse = results.scale
    clusters = clusters_of(scale.complete(results))
    pairs = {arm: scale.pairs(results, SHAM, arm) for arm in RANKED}
    of_grammar = {
        name: {
            arm: [pair for pair, own in zip(some, clusters, strict=True) if own == name] for arm, some in pairs.items()
        }
        for name in clusters
    }
    colors = {"domain": list(SERIES), "range": list(data.COLORS[: len(SERIES)])}
    color = nominal("series", title=None, scale=colors)
    shape = nominal("series", title=None, scale={"domain": list(SERIES), "range": list(MARKERS)})
    panels = []
    for title, key in shown:
        thin = [row for name, some in of_grammar.items() for row in _curve(scale, some, [name], "Penalty", key)]
        # the penalty last: at the sham, where all begin, its marker is on top
        means = [row for series in reversed([*SERIES]) for row in _curve(scale, pairs, clusters, series, key)]
        across = [row[name] for row in (*thin, *means) for name in ("trace", "trace_low", "trace_high") if name in row]
        up = [row[name] for row in (*thin, *means) for name in ("value", "low", "high") if name in row]
        x = charts.axis("trace", "Minimal trace over the sham's (left: flatter)", data.ends(across, log=True), log=True)
        unit = " (points)" if key != "effective-rank" else ""
        y = charts.axis("value", f"Change from the sham{unit}", data.ends([0.0, *up], log=False))
        order = {"field": "dose", "type": "quantitative"}
        line = {"x": x, "y": y, "color": color, "order": order}
        rule = {"type": "rule", "strokeWidth": charts.RULE}
        zero = {"type": "rule", "color": charts.INK, "strokeDash": [4, 4], "opacity": 0.5}
        layers = [
            layer([{"value": 0.0}], zero, y=y),
            layer(thin, {"type": "line", "strokeWidth": 1, "opacity": 0.35}, **line, detail=nominal("of")),
            layer(means, {"type": "line", "strokeWidth": charts.LINE}, **line),
            layer(means, rule, x=x, y={**y, "field": "low"}, y2={"field": "high"}, color=color),
            layer(means, rule, y=y, x={**x, "field": "trace_low"}, x2={"field": "trace_high"}, color=color),
            layer(
                means,
                {"type": "point", "filled": True, "size": charts.POINT, "opacity": 1},
                **{"x": x, "y": y, "color": color, "shape": shape},
                tooltip=[nominal(name) for name in ("arm", "minimal trace", "difference")],
            ),
        ]
        panels.append({"layer": layers, "title": title})
    return charts.concat(panels, "Bars: 95 % confidence intervals over grammars")


def _curve(
    scale: DoseResponse, by_arm: Mapping[str, Sequence[Pair]], clusters: Sequence[str], series: str, key: str
) -> list[Row]:
    """Return the points of a series: differences from the sham, with intervals where there are several grammars."""
    rows = []
    for dose, arm in enumerate(SERIES[series]):
        row: Row = {"series": series, "of": clusters[0], "dose": dose, "arm": scale.titles[arm]}
        pairs = by_arm[arm]
        if arm == SHAM:
            row |= {"trace": 1.0, "value": 0.0}
        elif len(set(clusters)) > 2:  # the intervals of two would leave no room for the points
            trace, value = factor(pairs, "minimal-trace", clusters), change(pairs, key, clusters=clusters)
            row |= {"trace": trace.value, "value": value.value, "minimal trace": f"x {trace}", "difference": str(value)}
            row |= dict(
                zip(("trace_low", "trace_high", "low", "high"), (*factor_ends(trace), *value.ci95), strict=True)
            )
        else:
            logs = [math.log(second["minimal-trace"].value / first["minimal-trace"].value) for first, second in pairs]
            values = [difference(second[key], first[key]).value for first, second in pairs]
            row |= {"trace": math.exp(statistics.fmean(logs)), "value": statistics.fmean(values)}
        rows.append(row)
    return rows


def _settings(scale: DoseResponse) -> dict[str, str]:
    def listed(weights: Sequence[float]) -> str:
        return ", ".join(f"{weight:g}" for weight in weights)

    return {
        "Grammars": f"{len(scale.grammars)}; pre-training seeds per grammar: {scale.seeds_per_grammar}",
        "Model": f"BERT {scale.size} with {scale.layers} layers, no dropout; {scale.batch_size} sentences a step, one "
        "masked token each",
        "Base": f"AdamW on exact labels, learning rate {scale.learning_rate:g} with cosine decay to 0, until the KL is "
        f"{scale.base_kl:g} nats or {scale.base_steps:,} steps are done",
        "Cooldown": f"the same with learning rate {scale.cooldown_rate:g}, until the KL is {scale.target_kl:g} nats or "
        f"{scale.cooldown_steps:,} steps are done",
        "Penalty": f"in the cooldown and in {scale.steps:,} steps before it, AdamW on exact labels, learning rate "
        f"{scale.learning_rate:g}; weights {listed(scale.weights)}, and minus {listed(scale.sharp_weights)}; the "
        f"trace is estimated on {scale.sentences} sentences a step. Sham and AdamW alone: as many steps",
        "Entropy of the features": f"likewise, the spectrum's entropy with weights {listed(scale.entropy_weights)}",
        "Helper": f"{scale.helper_steps:,} steps with the loss of a head for {scale.tasks[0]}",
        "Errors": "over grammars, with Student's t; losses and accuracies are sums over all sentences",
    }


STUDY = Study(
    name="dose-response",
    scales=SCALES,
    title="At the same loss, does a flatter model transfer better, and a sharper one worse?",
    lead=(
        "Small masked language models predict almost as well as the true probabilities of their grammar. A penalty on "
        "the logarithm of the trace of the Fisher information, which stays on until the end, makes them flatter or "
        "sharper. All are trained to the same KL to the truth; runs that missed it are counted. Transfer: accuracy of "
        "a linear probe on 30 or 100 examples, tested on every sentence. The task prefix-2 asks for the grammar's most "
        "likely symbol above the first two tokens, prefix-4 for the one above all four.",
        "Every arm starts from one base. The sham has a penalty of weight 0; two arms raise or lower the entropy of "
        "the features' spectrum, and so their effective rank; the helper is trained with a downstream task and shows "
        "that the probe can see a difference. The minimal trace is the trace's minimum over rescalings of the weights "
        "that change no prediction. Effective rank (RankMe) and participation ratio count the directions "
        "of the features; CKA compares them with the true conditionals.",
        "Two tasks have a known relation to pre-training. What follows the first two tokens depends on them only "
        "through its distribution. The label of needed-2 depends on this distribution; spare-2 tells apart "
        "beginnings whose distributions are nearly equal.",
    ),
    claims=CLAIMS,
    verdicts_at=("laptop",),
    tables=tables,
    answer=answer,
    page=parts,
    block_name="grammars",
)
