"""The study brackets: the paper's own model (section 5) and a transformer, flattened by label noise, penalty or SAM."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self

from isoloss.lab.languages.config import HiddenBracketConfig
from isoloss.lab.training.algorithms.config import FisherPenaltyConfig, SAMConfig
from isoloss.paper.design import OFFSET, Design, Unit, adamw, clusters_of, continued, exact_labels, sgd
from isoloss.paper.tables import forest, interval, means
from isoloss.report.data import COLORS
from isoloss.report.html import Card
from isoloss.report.intervals import IntervalPanel, intervals
from isoloss.report.panels import Axis, Panel, Series, draw
from isoloss.report.study_page import Figure
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.statistics.estimate import Estimate
from isoloss.studies import Experiment, Measurement, PageParts, Study
from isoloss.studies.answer import card_of
from isoloss.studies.claims import Claim, ClaimResult, Contrast
from isoloss.studies.results import Checkpoint, Results, change
from isoloss.studies.summary import SummaryTable

Model = Literal["attention", "transformer"]
MODELS: Mapping[Model, ModelConfig] = MappingProxyType(
    {
        "attention": ModelConfig(architecture="bracket-attention", size="m64", dropout=0.0),
        "transformer": ModelConfig(architecture="bert", size="d16", dropout=0.0),
    }
)
BASE, SHAM = "base", "sham"
# what the runs are called in figures and tables
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        BASE: "Base",
        "no-noise": "SGD (exact labels)",
        "label-noise": "SGD (sampled labels)",
        "adamw": "AdamW (sampled labels)",
        "sam": "SAM",
        SHAM: "Sham penalty",
        "penalty": "Flatness penalty",
        "reward": "Sharpness reward",
    }
)
TARGET_KL = 1e-5  # nats: every base and every cooldown ends here
MISSED_KL = 2 * TARGET_KL  # nats: a run that ends above it has missed the target, which is met on a sample
MOST_STEPS = 3000  # of a base or cooldown, by when the target is long reached
ADAMW_STEPS = 3000  # of AdamW on sampled labels
RATE = 3e-3  # AdamW's, but in the base
BATCH, SGD_BATCH, PENALTY_BATCH = 64, 8, 16  # sentences in a step: of base and cooldown, of noise, of the penalty
# SGD's, by T: label noise makes larger ones diverge
RATES: Mapping[Model, Mapping[int, float]] = MappingProxyType({"attention": {6: 1.0, 8: 0.7}, "transformer": {6: 0.3}})
PENALIZED: Mapping[Model, tuple[str, ...]] = MappingProxyType(
    # u and V, the neurons
    {"attention": ("*.value.*", "answers.*"), "transformer": ("*",)}
)
TASKS = {"r2-g": "g", "r2-abs-g": "|g|", "r2-zero": "g = 0", "r2-parity": "parity"}
OVER = "mean ± standard error over seeds"
FLATNESS: Mapping[Model, Mapping[str, str]] = {
    "attention": {"trace": "parts-trace", "minimal-trace": "parts-minimal-trace"},
    "transformer": {"trace": "trace", "minimal-trace": "minimal-trace"},
}
PARTS = ("attention-trace", "neurons-trace", "neurons-minimal-trace", "cancellation", "bound-ratio")
COUNT, IMBALANCE_8 = "r2-g-16", "r2-abs-g-8"
ATTENTION, NEURONS, OTHER = COLORS[:3]


# --- the design ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BracketUnit(Unit):
    """A model of a language with a seed."""

    model: Model
    length: int  # T


@dataclass(frozen=True, kw_only=True)
class BracketStudy(Design):
    """A scale of the study; a seed is a block of it."""

    seeds: tuple[int, ...]
    lengths: Mapping[Model, tuple[int, ...]]  # T, by model
    sgd_steps: int
    doses: tuple[int, ...]  # steps of label noise after which a model is cooled down too, all below `sgd_steps`
    penalties: tuple[float, ...]  # weights; the sham, a weight of 0, is added. The last one is what claims are about
    penalty_steps: int
    has_others: bool  # whether there are AdamW on sampled labels and SAM

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study with other seeds."""
        return dataclasses.replace(self, seeds=tuple(OFFSET * offset + seed for seed in self.seeds))

    @property
    def units(self) -> tuple[BracketUnit, ...]:
        """Every model of every length with every seed."""
        return tuple(
            unit
            for model, lengths in self.lengths.items()
            for length in lengths
            for unit in self.units_of(model, length)
        )

    def units_of(self, model: Model, length: int) -> tuple[BracketUnit, ...]:
        """Return every seed of a model."""
        return tuple(
            BracketUnit(
                prefix=f"{model}-{length}-s{seed}",
                cluster=f"seed {seed}",
                language=HiddenBracketConfig(length=length),
                seed=1000 * seed + 100 * (model == "transformer") + length,
                block=block,
                model=model,
                length=length,
            )
            for block, seed in enumerate(self.seeds)
        )

    def dosed(self, model: Model) -> dict[int, str]:
        """Return the arms of label noise by their steps, from the base, which has none."""
        doses = self.doses if model == "attention" else ()
        return {0: BASE, **{steps: f"label-noise-{steps}" for steps in doses}, self.sgd_steps: "label-noise"}

    def weighted(self, model: Model) -> dict[float, str]:
        """Return the arms of the penalty by its weight, ascending."""
        strengths = self.penalties if model == "attention" else self.penalties[-1:]
        arms = {
            sign * each: f"{name}-{each:g}" for name, sign in (("penalty", 1), ("reward", -1)) for each in strengths
        }
        return dict(sorted({**arms, 0.0: SHAM}.items()))

    def arms(self, unit: BracketUnit) -> dict[str, Experiment]:
        """Return the runs of a unit by the names of their arms, and what is measured of each."""
        model, rate, half = unit.model, RATES[unit.model][unit.length], self.sgd_steps // 2

        def on_sampled(steps: int, optimizer: OptimizerConfig, **more: Any) -> StageConfig:
            return StageConfig(steps=steps, optimizer=optimizer, batch_size=SGD_BATCH, **{"labels": "sampled", **more})

        noise = on_sampled(self.sgd_steps, sgd(self.sgd_steps, rate))
        dosed = self.dosed(model)
        kept = tuple(steps for steps in dosed if 0 < steps < self.sgd_steps)
        untrained = self.measurement(unit, ("bracket-probes", "bracket-tokens"), 0, name="measure the untrained")
        config = dataclasses.replace(_config(unit, adamw(1e-2)), checkpoints=(0,))
        arms = {
            BASE: Experiment(config=config, measurements=(self._ends(unit), untrained), group=GROUPS[BASE]),
            "no-noise": self._from(unit, BASE, "no-noise", dataclasses.replace(noise, labels="exact")),
            "label-noise": self._from(unit, BASE, "label-noise", noise, checkpoints=kept),
            # the cooldown of a model after part of the label noise
            **{dosed[steps]: self._from(unit, "label-noise", "label-noise", checkpoint=steps) for steps in kept},
        }
        if self.has_others and model == "attention":
            arms["adamw"] = self._from(unit, BASE, "adamw", on_sampled(ADAMW_STEPS, adamw(RATE, "constant")))
            # a step takes two gradients
            sam = on_sampled(half, sgd(half, rate), labels="exact", algorithm=SAMConfig(batch="same"))
            arms["sam"] = self._from(unit, BASE, "sam", sam)
        for weight, arm in self.weighted(model).items():
            penalty = FisherPenaltyConfig(weight=weight, sentences=PENALTY_BATCH, parameters=PENALIZED[model])
            stage = StageConfig(
                steps=self.penalty_steps, batch_size=PENALTY_BATCH, optimizer=adamw(RATE, "constant"), algorithm=penalty
            )
            arms[arm] = self._from(unit, BASE, arm, stage)
        return arms

    def _from(
        self,
        unit: BracketUnit,
        start: str,
        arm: str,
        *stages: StageConfig,
        checkpoint: int = 0,
        checkpoints: tuple[int, ...] = (),
    ) -> Experiment:
        """Return an arm that goes on from another one, or from a checkpoint of it, and ends at the target."""
        where = f"{start}/checkpoints/step-{checkpoint}" if checkpoint else start
        config = dataclasses.replace(_config(unit, adamw(RATE), *stages), checkpoints=checkpoints)
        return Experiment(
            config=continued(unit, config, where),
            measurements=(self._ends(unit),),
            group=GROUPS.get(arm) or GROUPS[arm.partition("-")[0]],
        )

    def _ends(self, unit: BracketUnit) -> Measurement:
        flatness = ("bracket-parts",) if unit.model == "attention" else ("trace", "minimal-trace")
        return self.measurement(unit, ("loss", *flatness, "bracket-probes", "features"), "last")


def _config(unit: BracketUnit, optimizer: OptimizerConfig, *stages: StageConfig) -> TrainConfig:
    """Return the config of a run that ends at the target."""
    # the penalty takes second derivatives, which the compiled step does not have
    compiled = unit.model == "transformer" and all(stage.algorithm is None for stage in stages)
    to_target = StageConfig(steps=MOST_STEPS, target_kl=TARGET_KL)
    return exact_labels(
        unit,
        MODELS[unit.model],
        optimizer=optimizer,
        stages=(*stages, to_target),
        batch_size=BATCH,
        compiled=compiled,
    )


STRENGTHS = (0.0003, 0.001, 0.003)
# over all contexts and strings
EXACT = {"loss_sentences": "all", "feature_sentences": "all"}
SCALES = {
    "laptop": BracketStudy(
        description="about 45 minutes on two cores",
        seeds=tuple(range(1100, 1120)),
        lengths={"attention": (6, 8), "transformer": (6,)},
        sgd_steps=6000,
        doses=(1000, 2000, 4000),
        penalties=STRENGTHS,
        penalty_steps=1500,
        settings=EXACT,
        has_others=True,
    ),
    "demo": BracketStudy(
        description="about two minutes on two cores: the paper's model at T = 6 with eight seeds",
        seeds=tuple(range(8)),
        lengths={"attention": (6,)},
        sgd_steps=3000,
        doses=(1000,),
        penalties=STRENGTHS[-1:],
        penalty_steps=600,
        settings=EXACT,
        has_others=False,
    ),
    "smoke": BracketStudy(
        description="half a minute on two cores: every part runs, no result means anything",
        seeds=(0, 1),
        lengths={"attention": (6,), "transformer": (6,)},
        sgd_steps=100,
        doses=(50,),
        penalties=STRENGTHS[-1:],
        penalty_steps=50,
        settings=EXACT,
        has_others=True,
    ),
}


# --- what is compared ------------------------------------------------------------------------------------------------


def arms_of(scale: BracketStudy, model: Model) -> Mapping[str, tuple[str, str]]:
    """Return the arms that claims compare, the control first, by name."""
    strongest = f"{scale.penalties[-1]:g}"
    first = scale.dosed(model).get(scale.doses[0], "") if scale.doses else ""
    return {
        "label noise": ("no-noise", "label-noise"),
        "first phase": ("no-noise", first),
        "penalty": (SHAM, f"penalty-{strongest}"),
        "reward": (SHAM, f"reward-{strongest}"),
        "sham": (BASE, SHAM),
        "adamw": ("no-noise", "adamw"),
        "sam": ("no-noise", "sam"),
    }


def compared(results: Results, *, name: str, model: Model = "attention") -> list[Contrast]:
    """Return a contrast of two arms for each T at which both were run."""
    scale: BracketStudy = results.scale
    arms, made = arms_of(scale, model)[name], []
    for length in scale.lengths.get(model, ()):
        units = [u for u in scale.units_of(model, length) if all(u.run(arm) in results.experiments for arm in arms)]
        if units:
            made.append(_contrast(results, units, arms, f"T = {length}"))
    return made


def _contrast(results: Results, units: Sequence[BracketUnit], arms: tuple[str, str], case: str) -> Contrast:
    """Return the pairs of two arms, without those of which one missed the target: they are not at the same loss."""
    pairs = {unit: (results.at(unit.run(arms[0])), results.at(unit.run(arms[1]))) for unit in units}
    kept = {unit: pair for unit, pair in pairs.items() if not any(missed(one) for one in pair)}
    left_out = f"Left out at {case}: {len(pairs) - len(kept)} of {len(pairs)} pairs, as a run missed the target."
    return Contrast(
        names=(title_of(arms[0]), title_of(arms[1])),
        pairs=list(kept.values()),
        clusters=clusters_of(list(kept)),
        clusters_are="seeds",
        case=case,
        where=left_out if len(kept) < len(pairs) else "",
        not_tested=left_out if 2 * len(kept) < len(pairs) or len(kept) < 2 else "",
    )


def missed(end: Checkpoint) -> bool:
    """Return whether the run of a last checkpoint missed the target."""
    return end["kl"].value > MISSED_KL


def title_of(arm: str) -> str:
    """Return what an arm is called, with its dose.

    Example:
        >>> from isoloss.paper.brackets import title_of
        >>> title_of("label-noise-500"), title_of("penalty-0.003"), title_of("sham")
        ('SGD (sampled labels), 500 steps', 'Flatness penalty, 0.003', 'Sham penalty')
    """
    if arm in GROUPS:
        return GROUPS[arm]
    group, _, dose = arm.rpartition("-")
    return f"{GROUPS[group]}, {dose}{' steps' if group == 'label-noise' else ''}"


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return a table of all arms and one of the baselines for each model and T."""
    scale: BracketStudy = results.scale
    return tuple(
        table
        for model, lengths in scale.lengths.items()
        for length in lengths
        for table in (_arms(results, model, length), _baselines(results, model, length))
    )


def _arms(results: Results, model: Model, length: int) -> SummaryTable:
    flatness = (*FLATNESS[model].values(), *(PARTS if model == "attention" else ()))
    keys = ("kl", *flatness, "effective-rank", *(f"r2-{task}-{shots}" for task in ("g", "abs-g") for shots in (8, 16)))
    rows = [
        (
            (title_of(arm), len(_all_ends(results, model, length, arm)) - len(ends)),
            {key: mean(ends, key) for key in keys},
        )
        for arm in _names(results.scale, model)
        if len(ends := ends_of(results, model, length, arm)) > 1
    ]
    caption = (
        "Every arm ends in the same cooldown, AdamW on exact labels until the KL is at most 1e-5 nats. Runs that "
        f"missed this target, with a KL above {MISSED_KL:g}, are left out. r2-g-8 is R² of a ridge "
        "regression for g, fitted on the features of 8 strings; r2-abs-g-8 is of |g|. "
    )
    if model == "attention":
        caption += (
            "The attention's part of the trace is of Q and K, the neurons' of u and V. The cancellation ratio "
            "is 1 where no two active neurons disagree; the bound ratio is the trace over the lower bound in the proof "
            "of Theorem 5.1."
        )
    title = f"{_called(model, length)}, all arms after the cooldown, {OVER}"
    return SummaryTable(f"arms-{model}-{length}", title, ("arm", "left out"), rows, caption)


def _baselines(results: Results, model: Model, length: int) -> SummaryTable:
    scale: BracketStudy = results.scale
    units = scale.units_of(model, length)
    untrained = {unit: results.at(unit.run(BASE), 0) for unit in units if unit.run(BASE) in results.experiments}
    of_arms = {title_of(arm): ends_of(results, model, length, arm) for arm in (BASE, "no-noise", "label-noise")}
    kinds = {"Tokens": ("tokens-", untrained), "Untrained model": ("", untrained)}
    kinds |= {title: ("", ends) for title, ends in of_arms.items()}
    shots = [n for n in (4, 8, 16, 32, 64) if n < 2**length]
    rows = [
        ((task, title), {f"{n} strings": mean(ends, f"{prefix}{kind}-{n}") for n in shots})
        for kind, task in TASKS.items()
        for title, (prefix, ends) in kinds.items()
        if len(ends) > 1
    ]
    caption = (
        f"R² of ridge regressions on few of all {2**length} strings of {length} brackets, tested on the others. The "
        "Bayes-optimal R² is 1, as every task is a function of g."
    )
    title = f"{_called(model, length)}, probes beside the tokens and the untrained model, {OVER}"
    return SummaryTable(f"probes-{model}-{length}", title, ("task", "features"), rows, caption)


def _names(scale: BracketStudy, model: Model) -> list[str]:
    """Return the arms that a model has, in the order of the table."""
    unit = scale.units_of(model, scale.lengths[model][0])[0]
    names = [BASE, "no-noise", *list(scale.dosed(model).values())[1:], "adamw", "sam", *scale.weighted(model).values()]
    return [name for name in names if unit.run(name) in scale.experiments]


def _called(model: Model, length: int) -> str:
    return f"{'the model of section 5' if model == 'attention' else 'a transformer'}, T = {length}"


def ends_of(results: Results, model: Model, length: int, arm: str) -> dict[BracketUnit, Checkpoint]:
    """Return the last checkpoint of an arm where it reached the target, by unit."""
    return {unit: end for unit, end in _all_ends(results, model, length, arm).items() if not missed(end)}


def _all_ends(results: Results, model: Model, length: int, arm: str) -> dict[BracketUnit, Checkpoint]:
    scale: BracketStudy = results.scale
    units = scale.units_of(model, length)
    return {unit: results.at(unit.run(arm)) for unit in units if unit.run(arm) in results.experiments}


def mean(ends: Mapping[BracketUnit, Checkpoint], key: str) -> Estimate:
    """Return the mean of an estimate over seeds."""
    return means(list(ends.values()), list(ends), [key])[key]


# --- what is claimed --------------------------------------------------------------------------------------------------


def lengths(scale: BracketStudy, *, model: Model = "attention") -> list[str]:
    """Return the cases of the contrasts of a model."""
    return [f"T = {length}" for length in scale.lengths.get(model, ())]


# What the study is asked, stated before it is run. A direction is that of the second model of the comparison minus the
# first. R² of a perfect model is 1, of a probe that knows the mean alone 0; the smallest difference of interest is
# 0.05.
#
# The claims follow from a pilot on other seeds (900 to 903), T = 6: after 6,000 steps of label noise the minimal trace
# had fallen from 1.3 to 0.3, R² of |g| from 8 strings had risen from 0.2 to 0.6. Tried there, in this order: standard
# deviations of the initial V of 0.3 to 4 (0.7 gives a cancellation of 1.7); SGD with rates 0.25 to 4 and 2 to 32
# sentences (from rate 2 with 16 sentences on it diverged; at T = 8 one of three seeds did at rate 1, none of five at
# 0.7, the rate there); penalties of AdamW with three strengths of each sign. Of the transformer one seed was looked at;
# its R² from 8 strings varied by more than 1.
#
# The demo has seeds of its own. It was run once before the probes' strengths were made for features of mean squared
# norm 1 over all strings, as they are now; the transformer of the pilot, with R² of -600 from strings that were nearly
# alike, led to that.
#
# A first draw (seeds 100 to 119) led to two changes, which were committed before any other seeds were run. One of its
# 20 runs with label noise at T = 6 collapsed, to a KL of 0.33, so the losses were not shown to be the same and nothing
# was tested: now a pair is left out if one of its runs missed the target, with a KL above 2e-5. And R² of the
# transformer went from -782 to 0.9, as the weakest ridge, 1e-6, magnified what the strings hardly differ in: now the
# weakest is 0.01. On five of those seeds, this changes R² of the paper's model by at most 0.02, and the mean R² of the
# transformer after label noise from 0.60 to 0.78.
#
# Every base and every arm ends at a KL of at most 1e-5 nats on validation sentences; the margin of the loss is twice
# that.
IMBALANCE = {f"|g|, {shots} strings": f"r2-abs-g-{shots}" for shots in (8, 16)}
_claim = functools.partial(Claim, cases=lengths)
_of_transformer = functools.partial(Claim, cases=functools.partial(lengths, model="transformer"))
_flatter = functools.partial(_claim, measures=FLATNESS["attention"], direction="decrease")
_flatter_transformer = functools.partial(_of_transformer, measures=FLATNESS["transformer"], direction="decrease")
_of_imbalance, _of_imbalance_transformer = (
    functools.partial(claim, measures=IMBALANCE, direction="increase") for claim in (_claim, _of_transformer)
)
_unchanged, _unchanged_transformer = (
    functools.partial(claim, measures=IMBALANCE, direction="no change within", margin=0.1)
    for claim in (_claim, _of_transformer)
)
_NOISE, _FIRST_PHASE, _PENALTY, _REWARD, _SHAM, _ADAMW, _SAM = (
    functools.partial(compared, name=name)
    for name in ("label noise", "first phase", "penalty", "reward", "sham", "adamw", "sam")
)
_T_NOISE, _T_PENALTY, _T_REWARD, _T_SHAM = (
    functools.partial(compared, name=name, model="transformer") for name in ("label noise", "penalty", "reward", "sham")
)
CLAIMS = (
    _flatter(
        id="noise-flatter",
        statement="At the same loss, SGD with sampled labels is flatter than SGD with exact labels",
        paper="theorem 3.3: label noise is what drives the trace down; not tried in this model",
        role="manipulation check",
        case="minimal-trace (T = 6)",
        of=_NOISE,
    ),
    _of_imbalance(
        id="penalty-imbalance",
        statement="At the same loss, a penalty on the trace of the neurons makes |g| easier to learn from few strings",
        paper="theorem 5.1: the flattest solution is the transferable one; not tried",
        role="positive control",
        case="|g|, 8 strings (T = 6)",
        of=_PENALTY,
    ),
    _of_imbalance(
        id="noise-imbalance",
        statement="At the same loss, label noise makes |g| easier to learn from few strings",
        paper="theorems 3.3 and 5.1 together; not tried",
        role="primary",
        case="|g|, 8 strings (T = 6)",
        of=_NOISE,
        no_effect_within=0.05,
    ),
    _claim(
        id="noise-count",
        statement="At the same loss, label noise makes g easier to learn from few strings",
        paper="theorem 5.1 is about g",
        of=_NOISE,
        measures={"g, 16 strings": "r2-g-16"},
        direction="increase",
    ),
    _flatter(
        id="first-phase-flatter",
        statement="Little label noise already flattens",
        of=_FIRST_PHASE,
    ),
    _unchanged(
        id="first-phase-imbalance",
        statement="Little label noise, which evens out the attention, does not change how easy |g| is",
        of=_FIRST_PHASE,
    ),
    _of_imbalance(
        id="reward-imbalance",
        statement="At the same loss, a reward for the trace of the neurons makes |g| harder to learn from few strings",
        of=_REWARD,
        direction="decrease",
    ),
    _unchanged(
        id="sham-imbalance",
        statement="The same steps with a penalty of weight 0 change nothing",
        of=_SHAM,
    ),
    _flatter(
        id="adamw-flatter",
        statement="At the same loss, AdamW on sampled labels is flatter than SGD on exact labels",
        of=_ADAMW,
    ),
    _of_imbalance(
        id="adamw-imbalance",
        statement="At the same loss, AdamW on sampled labels makes |g| easier to learn from few strings",
        of=_ADAMW,
    ),
    _flatter(
        id="sam-flatter",
        statement="At the same loss, SAM is flatter than SGD",
        of=_SAM,
    ),
    _of_imbalance(
        id="sam-imbalance",
        statement="At the same loss, SAM makes |g| easier to learn from few strings",
        of=_SAM,
    ),
    _flatter_transformer(
        id="transformer-noise-flatter",
        statement="Transformer: at the same loss, SGD with sampled labels is flatter than SGD with exact labels",
        of=_T_NOISE,
    ),
    _of_imbalance_transformer(
        id="transformer-noise-imbalance",
        statement="Transformer: at the same loss, label noise makes |g| easier to learn from few strings",
        of=_T_NOISE,
    ),
    _of_imbalance_transformer(
        id="transformer-penalty-imbalance",
        statement="Transformer: at the same loss, a penalty on the trace makes |g| easier to learn from few strings",
        of=_T_PENALTY,
    ),
    _of_imbalance_transformer(
        id="transformer-reward-imbalance",
        statement="Transformer: at the same loss, a reward for the trace makes |g| harder to learn from few strings",
        of=_T_REWARD,
        direction="decrease",
    ),
    _unchanged_transformer(
        id="transformer-sham-imbalance",
        statement="Transformer: the same steps with a penalty of weight 0 change nothing",
        of=_T_SHAM,
    ),
)


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether flattening helps transfer: by label noise, by a penalty, by SAM, which the demo does not have."""
    by_id = {result.claim.id: result for result in claims}

    def card(label: str, result: ClaimResult) -> Card:
        found = card_of(label, result)
        left_out = [each.where for each in _contrasts_of(result, results) if each.where]
        return dataclasses.replace(found, detail=". ".join([found.detail, *left_out]))

    return [
        card("Does label noise help transfer?", by_id["noise-imbalance"]),
        card("Does a penalty on the trace help?", by_id["penalty-imbalance"]),
        card("Does SAM, which flattens too?", by_id["sam-imbalance"])
        if _contrasts_of(by_id["sam-imbalance"], results)
        else card("Does label noise flatten?", by_id["noise-flatter"]),
    ]


def _contrasts_of(result: ClaimResult, results: Results) -> list[Contrast]:
    made: list[Contrast] = result.claim.of(results)  # type: ignore[assignment]
    return made


# --- the page --------------------------------------------------------------------------------------------------------


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    scale: BracketStudy = results.scale
    # a base that missed the target has nothing beside it at its loss
    drawn = [
        (model, length)
        for model, lengths in scale.lengths.items()
        for length in lengths
        if len(ends_of(results, model, length, BASE)) > 1
    ]
    phases = [_phases(results, length) for model, length in drawn if model == "attention"]
    doses = [_doses(results, model, length) for model, length in drawn]
    return [*phases, *doses, *([_all_arms(results)] if drawn else [])]


def _phases(results: Results, length: int) -> Figure:
    scale: BracketStudy = results.scale
    noise = {
        steps: ends
        for steps, arm in scale.dosed("attention").items()
        if len(ends := ends_of(results, "attention", length, arm)) > 1
    }
    weighted = [ends_of(results, "attention", length, arm) for arm in scale.weighted("attention").values()]
    penalties = [ends for ends in weighted if len(ends) > 1]

    def against_steps(name: str, key: str, color: str) -> Series:
        return _series(name, color, [(float(steps), mean(ends, key)) for steps, ends in noise.items()])

    def against_trace(
        name: str, all_ends: Sequence[Mapping[BracketUnit, Checkpoint]], color: str, marker: str
    ) -> Series:
        points = [(mean(ends, "neurons-minimal-trace").value, mean(ends, IMBALANCE_8)) for ends in all_ends]
        return _series(name, color, sorted(points, key=lambda point: point[0]), marker)

    steps = Axis(title="steps of label noise")
    followed = [
        against_trace("label noise", list(noise.values()), NEURONS, "circle"),
        against_trace("penalty and reward", penalties, ATTENTION, "square"),
    ]
    panels = [
        Panel(
            title="Trace by part",
            x=steps,
            y=Axis(title="trace (nats/token), cancellation ratio"),
            series=[
                against_steps("Q, K", "attention-trace", ATTENTION),
                against_steps("u, V", "neurons-trace", NEURONS),
                against_steps("cancellation", "cancellation", OTHER),
            ],
        ),
        Panel(
            title="Transfer",
            x=steps,
            y=Axis(title="R²"),
            series=[
                against_steps("g, 16 strings", COUNT, ATTENTION),
                against_steps("|g|, 8 strings", IMBALANCE_8, NEURONS),
            ],
        ),
        Panel(
            title="Transfer against its part",
            x=Axis(title="minimal trace of u and V (nats/token)", log=True),
            y=Axis(title="R² of |g|, 8 strings"),
            series=followed,
        ),
    ]
    return Figure(
        name=f"phases-{length}",
        title=f"Does transfer follow the parts of the trace? (T = {length})",
        chart=draw(panels, note="Bars: 95 % intervals over seeds whose run ended at the same loss"),
        caption="Left: the trace of queries and keys, the trace of the neurons, and the cancellation ratio of equation "
        "4, 1 where no two active neurons disagree. Middle: R² of g, for which uniform attention is enough, and of "
        "|g|, which needs neurons that do not cancel. Right: label noise after each number of steps, and every weight "
        "of the penalty, both signs. If only the trace of u and V matters, all points lie on one falling curve.",
    )


def _doses(results: Results, model: Model, length: int) -> Figure:
    scale: BracketStudy = results.scale
    arms = {f"{weight:+g}" if weight else "0 (sham)": arm for weight, arm in scale.weighted(model).items()}
    made = {
        title: {key: mean(ends, key) for key in IMBALANCE.values()}
        for title, arm in {"base": BASE, **arms}.items()
        if len(ends := ends_of(results, model, length, arm)) > 1
    }
    what = "the trace of u and V" if model == "attention" else "the trace"
    return Figure(
        name=f"doses-{model}-{length}",
        title=f"Weight of a penalty on {what}: {_called(model, length)}",
        chart=forest(made, {"R²": IMBALANCE}, note="intervals over seeds"),
        caption="R² of |g| after the same number of steps with a penalty of each weight, then the cooldown. Below 0 it "
        "is a reward: the model gets sharper. The sham computes the penalty and weighs it by 0. The base had neither.",
    )


def _all_arms(results: Results) -> Figure:
    scale: BracketStudy = results.scale
    models: tuple[Model, ...] = ("attention", "transformer")
    made = [
        (model, each)
        for model in models
        for name in arms_of(scale, model)
        for each in compared(results, name=name, model=model)
        if not each.not_tested
    ]
    kinds = {"attention": "section 5's model", "transformer": "transformer"}
    rows = [f"{each.names[1]} − {each.names[0]}" for _, each in made]
    differences = [
        interval(row, f"{kinds[model]}, {each.case}", change(each.pairs, IMBALANCE_8, clusters=each.clusters))
        for row, (model, each) in zip(rows, made, strict=True)
    ]
    panel = IntervalPanel(title="R² of |g|, 8 strings: difference", intervals=differences)
    return Figure(
        name="arms",
        title="Every arm vs. its control",
        chart=intervals([panel], list(dict.fromkeys(rows)), note="Lines: 95 % intervals over seeds, not adjusted"),
        caption="After the cooldown to the same loss, paired by seed. AdamW and SAM have other steps than their "
        "control, and AdamW sampled labels where the control has exact ones; the sham's control is the base.",
    )


def _series(name: str, color: str, points: Sequence[tuple[float, Estimate]], marker: str = "circle") -> Series:
    at = [(x, each.value) for x, each in points]
    halves = [(each.ci95[1] - each.ci95[0]) / 2 for _, each in points]
    return Series(name=name, color=color, points=at, errors=halves, curve=at, marker=marker)


def _settings(scale: BracketStudy) -> dict[str, str]:
    lengths = "; ".join(f"{model}: T = {', '.join(map(str, each))}" for model, each in scale.lengths.items())
    rates = ", ".join(
        f"{RATES[model][length]:g} ({model}, T = {length})" for model, each in scale.lengths.items() for length in each
    )
    settings = {
        "Language": "hidden-bracket, flip probability 0.1",
        "Models": f"bracket-attention m64 and, at the larger scales, BERT d16 with one layer; {lengths}",
        "Seeds": f"{len(scale.seeds)}",
        "Base and cooldown": f"AdamW on exact labels, {BATCH} sentences, until the KL is at most {TARGET_KL:g} nats",
        "SGD": f"{scale.sgd_steps:,} steps of {SGD_BATCH} sentences after a warm-up of 12 %, learning rate {rates}",
        "Penalty, reward, sham": f"{scale.penalty_steps:,} steps of AdamW on exact labels, {PENALTY_BATCH} sentences, "
        f"weights {', '.join(f'{weight:g}' for weight in scale.weighted('attention'))}, on the trace of u and V "
        "(transformer: of all)",
    }
    if scale.has_others:
        settings["AdamW, SAM"] = (
            f"{ADAMW_STEPS:,} steps of AdamW on sampled labels; {scale.sgd_steps // 2:,} steps of SAM with SGD on "
            f"exact labels; {SGD_BATCH} sentences each"
        )
    return settings


STUDY = Study(
    name="brackets",
    scales=SCALES,
    title="In the paper's bracket model, does a flatter model transfer better?",
    lead=(
        "The attention model of the paper's section 5 is trained to tell a hidden bracket: with SGD on sampled labels, "
        "whose noise should flatten it, with SGD on exact labels, or with a penalty on the trace. Flatness: trace of "
        "the Fisher information, smaller is flatter; the minimal trace is its minimum over rescalings that change no "
        "prediction. Transfer: R² of a ridge regression on the model's features for |g|, the imbalance of a string, "
        "fitted on eight strings.",
        "The hidden bracket is flipped with probability 0.1, so that the smallest possible loss is above 0 and the "
        "noise of sampled labels lasts. Exact labels are the true conditional distribution. g is the number of > minus "
        "the number of <: a probe on the raw tokens learns g, but not |g|. Features are the activations of the 64 "
        "neurons; a transformer's are the last hidden state of the last token. All inputs are enumerated: loss and "
        "traces have no sampling error.",
        "Every arm goes on from one base and ends in the same cooldown, on exact labels, until its KL to the truth "
        "is at most 1e-5 nats on drawn sentences. A pair is left out if one of its runs ends above "
        f"{MISSED_KL:g} nats, as after a collapse under label noise: what is found holds for runs that come back to "
        "the loss. A penalty on the trace of the neurons flattens directly; with a negative weight it is a reward that "
        "sharpens; the sham has weight 0. A one-layer transformer goes through the main arms too. Standard errors are "
        "over seeds, which decide initial weights, sentences, labels and the strings of the probes.",
    ),
    claims=CLAIMS,
    loss_margin=0.00002,
    verdicts_at=("laptop", "demo"),
    tables=tables,
    answer=answer,
    page=parts,
    block_name="seeds",
)
