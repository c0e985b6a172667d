"""The study optimizers: eight optimizers bring causal models to one loss; which measure predicts which outcome?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, SAMConfig
from isoloss.paper.design import OverGrammars, Unit, clusters_of, continued, ends_of, pairs_of, units_with
from isoloss.paper.tables import OVER, changes, checkpoint_frame, forest, has_several_languages, means, num_above_target
from isoloss.report import charts
from isoloss.report.data import MINIMAL_TRACE, Column, Style
from isoloss.report.html import Card
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.study_page import Figure
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.statistics.correlation import Correlation, correlation
from isoloss.statistics.estimate import Estimate, number
from isoloss.statistics.significance import holm
from isoloss.studies import Experiment, PageParts, Study
from isoloss.studies.claims import Claim, ClaimResult, Contrast
from isoloss.studies.results import Results
from isoloss.studies.summary import SummaryTable

STABLE, ADAMW, HELPER, ADVERSARY = "stable", "adamw", "helper", "adversary"
# what the arms are called in figures and tables; AdamW is what the others are compared with
OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        ADAMW: "AdamW",
        "sgd": "SGD after AdamW",
        "muon": "Muon",
        "soap": "SOAP",
        "schedule-free": "Schedule-free AdamW",
        "sam": "SAM",
        "wsd": "AdamW, decaying rate (WSD)",
        "lawa": "AdamW, averaged weights (LAWA)",
    }
)
# trained with a downstream task: its probe must see a difference
CONTROLS: Mapping[str, str] = MappingProxyType({HELPER: "Helper", ADVERSARY: "Adversary"})
ARMS = {**OPTIMIZERS, **CONTROLS}
BRANCHES = (ADAMW, "sgd", "wsd")  # go on from one run of AdamW
# what may predict, as logarithms, and what it may predict
FLATNESS: Mapping[str, str] = {
    "trace": "trace",
    "minimal-trace": "minimal trace",
    "directional-sharpness": "directional sharpness",
}
MATRIX_OPTIMIZERS = ("muon", "soap")  # which the correlations may rest on


# --- the design ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Optimizers(OverGrammars):
    """A scale of the study."""

    size: str = "d32"  # of the model, a Llama
    layers: int = 2
    batch_size: int = 64
    stable_kl: float  # nats per token: where SGD and the decaying rate take over from AdamW
    target_kl: float  # where every arm ends
    max_steps: int  # of an arm
    wsd_steps: int  # the length of the decay; the target ends most runs sooner
    learning_rate: float = 1e-3  # of all but SGD and schedule-free, constant after a warm-up
    sgd_learning_rate: float = 0.3
    schedule_free_learning_rate: float = 3e-3  # its authors recommend a larger rate than for a decaying schedule
    rho: float = 0.02  # of SAM
    validate_every: int = 10  # steps after which the KL is compared with the target
    tasks: tuple[str, ...] = ("prefix-4", "root")  # of the few-shot probes; helper and adversary train with the first
    shots: int = 30  # training examples of a few-shot probe
    span_level: int = 1  # whose symbols are probed at their spans

    @property
    def probes(self) -> dict[str, str]:
        """By task: the measure of its few-shot probe."""
        return {f"{task} ({self.shots} examples)": f"few-shot-{task}-{self.shots}" for task in self.tasks}

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
        adamw = self._optimizer("adamw")
        stable = self._config(unit, adamw, target_kl=self.stable_kl)
        going_on = dataclasses.replace(adamw, warmup_steps=0)
        decaying = dataclasses.replace(going_on, schedule="1-sqrt")
        sgd = dataclasses.replace(self._optimizer("sgd"), learning_rate=self.sgd_learning_rate)
        free = dataclasses.replace(self._optimizer("schedule-free"), learning_rate=self.schedule_free_learning_rate)
        task = self.tasks[0]
        configs = {
            ADAMW: self._config(unit, going_on, init_optimizer=True),
            "sgd": self._config(unit, sgd),
            **{name: self._config(unit, self._optimizer(name)) for name in ("muon", "soap", "lawa")},
            "schedule-free": self._config(unit, free),
            "sam": self._config(unit, adamw, algorithm=SAMConfig(rho=self.rho)),
            "wsd": self._config(unit, decaying, init_optimizer=True, max_steps=self.wsd_steps),
            HELPER: self._config(unit, adamw, algorithm=AdversarialConfig(task=task, weight=-AdversarialConfig.weight)),
            ADVERSARY: self._config(unit, adamw, algorithm=AdversarialConfig(task=task)),
        }
        flatness = ("trace", "minimal-trace", "directional-sharpness", "noise-sharpness", "int4-rise")
        probes = (f"span-{self.span_level}", *self.probes.values())
        measured = (self.measurement(unit, ("loss", *flatness, "features", *probes), "last"),)
        return {
            STABLE: Experiment(
                config=stable,
                measurements=(self.measurement(unit, ["loss"], "last"),),
                group="AdamW, before the branches",
            ),
            **{
                arm: Experiment(
                    config=continued(unit, configs[arm], STABLE) if arm in BRANCHES else configs[arm],
                    measurements=measured,
                    group=title,
                )
                for arm, title in ARMS.items()
            },
        }

    def _optimizer(self, name: str) -> OptimizerConfig:
        return OptimizerConfig(name=name, learning_rate=self.learning_rate, warmup_steps=50, weight_decay=0.0)

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
    description="half an hour on two cores",
    language=PCFGConfig(levels=3, symbols_per_level=4, rules_per_symbol=4, vocab_size=16, zipf=1.0),
    grammars=tuple(range(1410, 1418)),
    stable_kl=0.04,
    target_kl=0.02,
    max_steps=8_000,
    wsd_steps=3_000,
    settings={
        # at 1 % the rise under noise is lost in its error
        **{"loss_sentences": 4096, "num_sequences": 4096, "feature_sentences": 2048, "noise_relative_std": 0.03},
        # this strength, because with few examples it is as accurate as weaker ones and several times as fast
        **{"num_train": 2048, "num_test": 4096, "probe_draws": 64, "probe_regularization": (0.1,)},
    },
)
SCALES: Mapping[str, Optimizers] = {
    "laptop": LAPTOP,
    "smoke": dataclasses.replace(
        LAPTOP,
        description="two minutes on two cores: every part runs, no verdict is given",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8, zipf=1.0),
        grammars=(1490, 1491, 1492),
        size="d16",
        layers=1,
        batch_size=32,
        stable_kl=0.25,
        target_kl=0.2,
        max_steps=200,
        wsd_steps=40,
        tasks=("prefix-2", "root"),
        shots=20,
        settings={
            **{"loss_sentences": 256, "num_sequences": 64, "feature_sentences": 128},
            **{"num_train": 128, "num_test": 256, "probe_draws": 3, "probe_regularization": (0.1,)},
        },
    ),
}


# --- what is compared and claimed -------------------------------------------------------------------------------------


def outcomes(scale: Optimizers) -> Mapping[str, str]:
    """Return what the measures of flatness may predict: what each outcome is called, by its key."""
    return {
        **{key: f"accuracy on {task}" for task, key in zip(scale.tasks, scale.probes.values(), strict=True)},
        scale.last_layer: "accuracy at spans",
        "int4-rise": "rise at 4 bits",
        "noise-sharpness": "rise under noise",
        "effective-rank": "effective rank",
    }


def against_adamw(results: Results, *, arm: str) -> Contrast:
    """Return an arm against AdamW."""
    scale: Optimizers = results.scale
    units = complete(results)
    return Contrast(
        names=(ARMS[ADAMW], ARMS[arm]),
        pairs=pairs_of(results, units, ADAMW, arm),
        clusters=clusters_of(units),
        where=f"Both where the KL has come down to {scale.target_kl:g}.",
    )


def complete(results: Results) -> list[Unit]:
    """Return the grammars that have results for all arms."""
    return units_with(results, *ARMS)


def trained_task(scale: Optimizers) -> Mapping[str, str]:
    """Return the probe of the task that helper and adversary are trained with."""
    return dict(itertools.islice(scale.probes.items(), 1))


# What the study asks of each optimizer, stated before it runs. Directions are of the difference arm - AdamW. Which
# measure predicts which outcome is asked in `associations`, of every pair in the same way; its rule is stated there.
#
# The paper says that of models of one loss the flatter one transfers better, and that SGD and regularizers such as SAM
# find flatter ones. So each optimizer is asked both, in the same words, and the absence of an effect is tested too. The
# smallest effect of interest is 1 percentage point.
#
# Whether the target is reached is checked on a sample of sentences, every ten steps; losses count as the same within
# 0.002 nats, a tenth of the target. In a pilot on grammar 9001, few-shot accuracy changed by 1.9 points while AdamW's
# KL came down by 0.009 nats: so by 0.4 points within the margin. Helper and adversary move the accuracy by 5 points and
# more, and have a margin of 0.006 nats.
#
# A first draw was abandoned before any outcome was looked at (docs/method/studies.md): it had half as many steps, a
# decay of 600 and schedule-free AdamW at the others' learning rate.
_WORDS = {  # what is flatter than AdamW's model, and what transfers better
    "sgd": ("SGD after AdamW makes a flatter model than AdamW", "SGD's model transfers better than AdamW's"),
    "muon": ("Muon makes a flatter model than AdamW", "Muon's model transfers better than AdamW's"),
    "soap": ("SOAP makes a flatter model than AdamW", "SOAP's model transfers better than AdamW's"),
    "schedule-free": (
        "schedule-free AdamW makes a flatter model than AdamW",
        "the model of schedule-free AdamW transfers better than AdamW's",
    ),
    "sam": ("SAM makes a flatter model than AdamW", "SAM's model transfers better than AdamW's"),
    "wsd": (
        "AdamW with a decaying rate makes a flatter model than AdamW at a constant rate",
        "the model of a decaying rate transfers better than that of a constant rate",
    ),
    "lawa": (
        "averaging weights (LAWA) makes a flatter model than AdamW",
        "the model of averaged weights (LAWA) transfers better than AdamW's",
    ),
}
CLAIMS = (
    Claim(
        id="helper",
        statement="At the same loss, a model that was trained with the task transfers better to it",
        role="positive control",
        of=functools.partial(against_adamw, arm="helper"),
        measures=trained_task,
        direction="increase",
        loss_margin=0.006,
    ),
    Claim(
        id="adversary",
        statement="At the same loss, a model that was trained against the task transfers worse to it",
        of=functools.partial(against_adamw, arm="adversary"),
        measures=trained_task,
        direction="decrease",
        loss_margin=0.006,
    ),
    *(
        claim
        for arm, (flatter, better) in _WORDS.items()
        for of in [functools.partial(against_adamw, arm=arm)]
        for claim in (
            Claim(
                id=f"{arm}-flatter",
                statement=f"At the same loss, {flatter}",
                of=of,
                measures="flatness",
                direction="decrease",
            ),
            Claim(
                id=f"{arm}-transfer",
                statement=f"At the same loss, {better}",
                of=of,
                measures=operator.attrgetter("probes"),
                direction="increase",
                no_effect_within=1.0,
            ),
        )
    ),
)


# --- what predicts what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Association:
    """The correlation of a measure of flatness with an outcome, over optimizers."""

    measure: str  # its key
    outcome: str  # its key
    correlation: Correlation
    p_adjusted: float  # for the number of pairs of measure and outcome

    @property
    def verdict(self) -> str:
        """Whether it is shown."""
        return "shown" if self.p_adjusted < 0.05 else "not shown"


def associations(results: Results, without: Collection[str] = ()) -> list[Association]:
    """Return the partial correlations of all measures with all outcomes given the KL, within grammars.

    The models are those of all optimizers but `without`; helper and adversary are left out. An undefined correlation is
    left out, but still counts as a test in Holm's method.
    """
    scale: Optimizers = results.scale
    units = complete(results)
    ends = [(unit, results.at(unit.run(arm))) for unit in units for arm in OPTIMIZERS if arm not in without]
    clusters = clusters_of(unit for unit, _ in ends)
    kl = [end["kl"].value for _, end in ends]
    found: dict[tuple[str, str], Correlation] = {}
    for measure, outcome in (pairs := list(itertools.product(FLATNESS, outcomes(scale)))):
        # too few grammars, or a value that is not above 0
        try:
            x, y = [math.log(end[measure].value) for _, end in ends], [end[outcome].value for _, end in ends]
            found[measure, outcome] = correlation(x, y, clusters, given={"KL": kl}, within=clusters, resamples=100)
        except (IsolossError, ValueError):
            continue
    if not found:
        return []
    by_name = {f"{measure}/{outcome}": each.p_value for (measure, outcome), each in found.items()}
    adjusted = holm(by_name, tests=len(pairs))
    return [Association(*pair, each, adjusted["/".join(pair)]) for pair, each in found.items()]


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return the tables: what predicts what, all arms, their differences from AdamW, and the layers."""
    scale: Optimizers = results.scale
    units = complete(results)
    if not has_several_languages(units):
        return ()
    keys = ("kl", *FLATNESS, *outcomes(scale))
    ends = {arm: ends_of(results, units, arm) for arm in ARMS}
    layers = [f"layer-{layer}" for layer in range(scale.layers + 1)]

    def steps(unit: Unit, arm: str) -> int:
        # a branch has the steps of the run that it begins from, too
        return sum(max(results.of_run(unit.run(each))) for each in ((STABLE, arm) if arm in BRANCHES else (arm,)))

    arms = []
    for arm, title in ARMS.items():
        taken = [steps(unit, arm) for unit in units]
        label = (title, f"{min(taken):,} to {max(taken):,}", num_above_target(ends[arm], scale.target_kl))
        arms.append((label, means(ends[arm], units, keys)))
    differences = [((title,), against(results, units, arm, keys)) for arm, title in ARMS.items() if arm != ADAMW]
    spans = [((title,), means(ends[arm], units, [*layers, "bayes", "majority"])) for arm, title in ARMS.items()]
    return (
        *_association_tables(results),
        SummaryTable(
            "arms",
            f"all arms, {OVER}",
            ("arm", "steps", "above the target"),
            arms,
            f"Every arm ends where its KL on validation sentences is at most {scale.target_kl:g}, or after "
            f"{scale.max_steps:,} steps ({scale.wsd_steps:,} of the decaying rate). The last label counts runs whose "
            "KL on the evaluation's sentences is more than 10 % above the target.",
        ),
        SummaryTable(
            "differences",
            f"arms vs. AdamW, {OVER}",
            ("arm",),
            differences,
            "Paired by grammar: arm minus AdamW; for traces and sharpness the geometric mean of arm / AdamW.",
        ),
        SummaryTable(
            "spans",
            f"probes of the symbols of level {scale.span_level} at their spans, {OVER}",
            ("arm",),
            spans,
            "From the state of the span's last token; layer-0 are the embeddings. bayes is the Bayes-optimal "
            "accuracy given the sentence up to there, majority that of the most common symbol.",
        ),
    )


def _association_tables(results: Results) -> list[SummaryTable]:
    """Return the table of what predicts what; none where there are too few grammars."""
    scale: Optimizers = results.scale
    others = {(each.measure, each.outcome): each.correlation for each in associations(results, MATRIX_OPTIMIZERS)}
    rows = [
        (
            (FLATNESS[each.measure], outcomes(scale)[each.outcome], f"{each.p_adjusted:.2g}", each.verdict),
            {
                "correlation": each.correlation.estimate(),
                "found with 80 % power": Estimate(
                    value=each.correlation.detectable(),
                    stderr=0.0,
                    samples=1,
                    unit="correlation",
                    num_predictions=0,
                    method="power",
                ),
                "without Muon and SOAP": others[each.measure, each.outcome].estimate(),
            },
        )
        for each in associations(results)
        if (each.measure, each.outcome) in others
    ]
    caption = (
        f"Partial correlation of the logarithm of each measure with each outcome given the KL, within grammars, across "
        f"{len(OPTIMIZERS)} optimizers (without helper and adversary). Errors by the jackknife over grammars. p is "
        "adjusted by Holm's method for all pairs. Found with 80 % power: the smallest true correlation at p < 0.05, "
        "unadjusted. Without Muon and SOAP, whose traces and ranks are the largest: asked after the first draw was "
        "seen, and not judged."
    )
    labels = ("measure", "outcome", "p", "verdict")
    return [SummaryTable("associations", "which measure predicts which outcome", labels, rows, caption)] if rows else []


def against(results: Results, units: Sequence[Unit], arm: str, keys: Sequence[str]) -> dict[str, Estimate]:
    """Return how an arm differs from AdamW: measures of flatness as factors."""
    return changes(pairs_of(results, units, ADAMW, arm), units, keys, as_factors=FLATNESS)


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return what predicts transfer, what predicts robustness, and what the effective rank."""
    questions = {
        "What predicts transfer?": results.scale.accuracies,
        "What predicts robustness?": ("int4-rise", "noise-sharpness"),
        "What predicts the effective rank?": ("effective-rank",),
    }
    found, others = associations(results), associations(results, MATRIX_OPTIMIZERS)
    names = outcomes(results.scale)
    return [
        _card(question, [one for one in found if one.outcome in keys], others, names)
        for question, keys in questions.items()
    ]


def _card(question: str, found: Sequence[Association], others: Sequence[Association], names: Mapping[str, str]) -> Card:
    """Return the answer to what predicts some outcomes, with the largest correlation beside that of `others`."""
    if not found:
        return Card(label=question, value="Not tested", detail="too few grammars")
    shown = [one for one in found if one.verdict == "shown"]
    if not shown:
        return Card(label=question, value=f"Nothing is shown, of {len(found)} pairs", tone="unclear")
    best = max(shown, key=lambda one: abs(one.correlation.value))
    way = "higher" if best.correlation.value > 0 else "lower"
    estimates = "; ".join(
        f"{FLATNESS[one.measure]} and {names[one.outcome]} {number(one.correlation.estimate())}" for one in shown
    )
    without = [
        f". Without Muon and SOAP the largest is {number(one.correlation.estimate())}"
        for one in others
        if (one.measure, one.outcome) == (best.measure, best.outcome)
    ]
    return Card(
        label=question,
        value=f"{FLATNESS[best.measure].capitalize()}: the sharper, the {way} the {names[best.outcome]}",
        detail=f"correlations shown, {len(shown)} of {len(found)}: {estimates}{''.join(without)}",
        tone="good",
    )


# --- the page --------------------------------------------------------------------------------------------------------


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    if not (found := associations(results)):
        return []
    scale: Optimizers = results.scale
    names, units = outcomes(scale), complete(results)
    by_optimizer = {
        title: against(results, units, arm, (*FLATNESS, *scale.accuracies))
        for arm, title in OPTIMIZERS.items()
        if arm != ADAMW
    }
    correlations = [
        Interval(
            row=names[each.outcome],
            series=FLATNESS[each.measure],
            value=each.correlation.value,
            low=each.correlation.interval95[0],
            high=each.correlation.interval95[1],
            text=f"{each.correlation.value:+.2f}, {each.verdict}",
        )
        for each in found
    ]
    ends = checkpoint_frame(results, [unit.run(arm) for unit in units for arm in ARMS], ["kl", *FLATNESS, *names])
    return [
        Figure(
            name="associations",
            title="Which measure predicts which outcome",
            chart=intervals(
                [IntervalPanel(title="Correlation across optimizers, given the KL", intervals=correlations)],
                list(names.values()),
                note="Lines: 95 % confidence intervals over grammars, not adjusted for the number of pairs",
            ),
            caption="Within grammars, without helper and adversary. Right of 0: the sharper, the higher the outcome; "
            "for accuracies, that is against what the paper finds. The table has the verdicts, and the correlations "
            "without Muon and SOAP.",
        ),
        Figure(
            name="arms",
            title="Every optimizer vs. AdamW, at one loss",
            chart=forest(
                by_optimizer,
                {
                    "Flatness, factor (left: flatter)": {name: key for key, name in FLATNESS.items()},
                    "Accuracy, difference (points)": {names[key]: key for key in scale.accuracies},
                },
                note="confidence intervals over grammars, not adjusted for the number of optimizers",
            ),
            caption="Paired by grammar: the factors by which the measures of flatness differ from AdamW's, and the "
            "differences of accuracies. Helper and adversary are in the tables.",
        ),
        Figure(
            name="outcomes",
            title="Outcomes by minimal trace",
            chart=charts.scatter(ends, [(MINIMAL_TRACE, _column(scale, key)) for key in names], style=Style.of(ends)),
            caption="The last checkpoint of every arm and grammar. Grammars differ more than optimizers do, so the "
            "correlations are taken within grammars.",
        ),
    ]


def _column(scale: Optimizers, key: str) -> Column:
    name = outcomes(scale)[key]
    title = name[0].upper() + name[1:]
    if key in scale.accuracies:
        return Column(key, title, "%", percent=True)
    return Column(key, title, "directions" if key == "effective-rank" else "nats per token")


def _settings(scale: Optimizers) -> dict[str, str]:
    weight = AdversarialConfig.weight
    return {
        "Grammars": f"{len(scale.grammars)}, one pre-training seed each; roughly Zipfian token frequencies",
        "Model": f"Llama {scale.size} with {scale.layers} layers, causal; {scale.batch_size} sentences a step",
        "Optimizers": ", ".join(OPTIMIZERS.values()),
        "Learning rate": f"{scale.learning_rate:g}, constant after 50 steps of warm-up, no weight decay; "
        f"{scale.sgd_learning_rate:g} for SGD and {scale.schedule_free_learning_rate:g} for schedule-free AdamW",
        "Branches": f"AdamW runs to a KL of {scale.stable_kl:g} nats. From there AdamW and the decaying rate go on "
        f"with its optimizer's state, SGD with a fresh one. Decay: 1-sqrt planned over {scale.wsd_steps:,} steps",
        "SAM": f"rho {scale.rho:g}; the perturbation is computed on one half of the batch, the gradient on the other",
        "LAWA": "a copy of the weights is kept every 20 steps; the mean of the latest 6 is compared with the target "
        "and measured",
        "Helper, adversary": f"the loss minus λ times the loss of a head for {scale.tasks[0]}, λ = {-weight:g} and "
        f"{weight:g}",
        "End": f"at the first multiple of {scale.validate_every} steps with a KL of at most {scale.target_kl:g} nats "
        f"on 1,024 validation sentences, or after {scale.max_steps:,} steps",
        "Errors": "over grammars, with Student's t",
    }


STUDY = Study(
    name="optimizers",
    scales=SCALES,
    title="At one loss, which measure of flatness predicts which outcome?",
    lead=(
        "Small causal language models (Llama) on grammars with roughly Zipfian token frequencies, trained by eight "
        "optimizers until the KL to the true conditionals is the same. Measures: the trace of the Fisher information, "
        "its minimum over rescalings of the weights that change no prediction, and the curvature along the optimizer's "
        "own next update (directional sharpness).",
        "Outcomes: few-shot probes of two tasks, probes of the grammar's symbols at their spans, the rise of the loss "
        "when weights are rounded to 4 bits or get Gaussian noise, and the effective rank of the features. Helper and "
        "adversary are trained with the first task and show that its probe can see a difference.",
        "The question is asked of every pair of measure and outcome in the same way: does their correlation across "
        "optimizers, adjusted for the remaining differences in KL, differ from 0?",
    ),
    claims=CLAIMS,
    loss_margin=0.002,
    verdicts_at=("laptop",),
    tables=tables,
    answer=answer,
    page=parts,
    block_name="grammars",
)
