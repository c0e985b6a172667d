"""The study same-loss: does SGD's label noise flatten a model, and does the flatter model transfer better?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
from markupsafe import Markup

from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.models.architectures import shape
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.design import (
    OverGrammars,
    Unit,
    adamw,
    clusters_of,
    continued,
    ends_of,
    exact_labels,
    pairs_of,
    pilot_slopes,
    sgd,
    small_bert,
    units_with,
)
from isoloss.paper.tables import (
    OVER,
    changes,
    checkpoint_frame,
    flatter_card,
    forest,
    has_several_languages,
    means,
    num_languages,
)
from isoloss.report import charts
from isoloss.report.data import KL, MINIMAL_TRACE, TRACE, Column, Style, accuracy
from isoloss.report.html import Card, IntervalRow, Section, interval_rows
from isoloss.report.study_page import Figure
from isoloss.run_config import ModelConfig, StageConfig, TrainConfig
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.correlation import correlation
from isoloss.statistics.estimate import Estimate
from isoloss.studies import Experiment, Measurement, PageParts, Study
from isoloss.studies.answer import card_of
from isoloss.studies.claims import Claim, ClaimResult, Contrast
from isoloss.studies.results import RESCALED, Checkpoint, Pair, Results
from isoloss.studies.summary import SummaryTable

PILOT = Path(__file__).with_name("same_loss_pilot.toml")
EMBEDDING_SCALES = ("paper", "balanced", "exact")  # all values of isoloss expand --embedding-scale
BASE, UNTOUCHED = "base", "untouched"
# what the runs are called in figures and tables
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        UNTOUCHED: "Untouched",
        "no-noise": "SGD (exact labels)",
        "label-noise": "SGD (sampled labels)",
        "longer": "AdamW for longer",
        "adversary": "Adversary",
        "helper": "Helper",
        "weight-decay": "Weight decay",
    }
)
# the arms that are compared, the control first. Adversary and helper lower the KL as more AdamW does, so their
# control is AdamW for longer
CONTRASTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "label noise": ("no-noise", "label-noise"),
        "sgd": (UNTOUCHED, "label-noise"),
        "longer": (UNTOUCHED, "longer"),
        "adversary": ("longer", "adversary"),
        "helper": ("longer", "helper"),
        "weight decay": (UNTOUCHED, "weight-decay"),
    }
)
WEIGHT_DECAY = 0.1
# what is probed beside models, functions of the language alone
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "one-hot": "Tokens, one-hot",
        "lookup": "Look-up table: true conditionals",
        "log-lookup": "Look-up table: their logarithms",
    }
)
# nats: in correlations, models this close in KL to the untouched arm count as having the same loss. At the steeper end
# of the pilot's slope, this much KL changes the accuracy by 0.5 percentage points
BAND = 2.8e-4
TRAINED_WITH_TASK = ("adversary", "helper")


# --- the design ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SameLoss(OverGrammars):
    """A scale of the study."""

    sizes: tuple[str, ...]  # model sizes, ascending
    main_size: str  # the size of all arms but the arms that differ in size
    layers: int = 2
    batch_size: int = 64
    steps: int  # of the base: AdamW with exact labels
    learning_rate: float = 3e-3  # AdamW's highest, in base and cooldown
    sgd_steps: int
    sgd_learning_rate: float = 0.2
    longer_steps: int  # of AdamW alone after the base
    # of AdamW with adversary or helper after the base; in the pilot, these give the same KL as AdamW for longer
    adversary_steps: int
    helper_steps: int
    cooldown_steps: int  # of the cooldown that ends every arm
    other_cooldowns: tuple[int, ...]  # its other lengths
    tasks: tuple[str, ...]  # downstream tasks; the first is the primary one, which adversary and helper train with
    shots: tuple[int, ...]  # training examples of few-shot probes

    @property
    def probes(self) -> dict[str, str]:
        """By task: the measure of its probe on all training examples."""
        return {task: f"probe-{task}" for task in self.tasks}

    @property
    def few_shot_probes(self) -> dict[str, str]:
        """By number of training examples and task: the measure of the probe on so few."""
        return {f"{task} ({n:,} examples)": f"few-shot-{task}-{n}" for n in self.shots for task in self.tasks}

    @property
    def projected_probes(self) -> dict[str, str]:
        """By task: the measure of the probe on features projected to as many as the smallest size has."""
        features = 2**self.language.levels * shape(self.sizes[0]).d_model
        return {task: f"projected-{task}-{features}" for task in self.tasks}

    @property
    def expanded_traces(self) -> dict[str, str]:
        """By each of `EMBEDDING_SCALES`: the measure of a trace after expanding a model into the largest size."""
        return {scale: f"trace-in-{self.sizes[-1]}-{scale}" for scale in EMBEDDING_SCALES}

    @property
    def expanded_minimum(self) -> str:
        """The measure of the minimal trace after expanding a model into the largest size."""
        return f"minimal-trace-in-{self.sizes[-1]}"

    def model(self, size: str) -> ModelConfig:
        """Return the model of a size: heads are of one width in all sizes, so that one can be expanded into another."""
        return small_bert(size, self.layers)

    def arm_of_size(self, size: str) -> str:
        """Return the arm whose model has that size and is otherwise untouched."""
        return UNTOUCHED if size == self.main_size else size

    # --- what is trained ---------------------------------------------------------------------------------------------

    def arms(self, unit: Unit) -> dict[str, Experiment]:
        """Return the runs of a unit by the names of their arms, and what is measured of each."""
        tables = [f"{kind}-{task}" for kind in BASELINES for task in self.tasks]
        parts = (
            self.measured(unit, self.common),
            self.measured(unit, tables, 0, name="measure the baselines of"),
        )
        base = self._config(unit, self.main_size, steps=self.steps, checkpoints=(0,))
        arms = {BASE: Experiment(config=base, measurements=parts, group=GROUPS[UNTOUCHED])}

        def from_base(arm: str, *stages: StageConfig) -> None:
            arms[arm] = self._ends(unit, arm, self.continued(unit, BASE, *stages))

        from_base(UNTOUCHED)
        for arm, labels in (("label-noise", "sampled"), ("no-noise", "exact")):
            from_base(arm, self.sgd_stage(labels))
            # with cooldowns of other lengths, which branch off before the cooldown
            before = f"{arm}/checkpoints/step-{self.sgd_steps}"
            for steps in self.other_cooldowns:
                arms[cooldown_run(arm, steps)] = Experiment(
                    config=self.continued(unit, before, cooldown_steps=steps),
                    measurements=(self.measured(unit, self.common),),
                    group=GROUPS[arm],
                )
        for arm, stage in self.more_stages().items():
            from_base(arm, stage)
        decayed = self.from_scratch(unit, self.main_size, weight_decay=WEIGHT_DECAY)
        arms["weight-decay"] = self._ends(unit, "weight-decay", decayed)
        for size in self.sizes:
            if size != self.main_size:
                arms[size] = self._ends(unit, size, self.from_scratch(unit, size))
        return arms

    def _config(self, unit: Unit, size: str, **more: Any) -> TrainConfig:
        fields = {"optimizer": adamw(self.learning_rate), "batch_size": self.batch_size, **more}
        return exact_labels(unit, self.model(size), **fields)

    def continued(self, unit: Unit, start: str, *stages: StageConfig, cooldown_steps: int | None = None) -> TrainConfig:
        """Return the config that goes on from a run or checkpoint of the unit; its last stage is the cooldown."""
        cooldown = StageConfig(steps=cooldown_steps or self.cooldown_steps)
        return continued(unit, self._config(unit, self.main_size, stages=(*stages, cooldown)), start)

    def from_scratch(
        self, unit: Unit, size: str, *, steps: int | None = None, weight_decay: float = 0.0
    ) -> TrainConfig:
        """Return the config of training from scratch; its last stage is the cooldown, which has no weight decay."""
        # None stands for the run's own optimizer, which the cooldown has too
        decaying = adamw(self.learning_rate, weight_decay=weight_decay) if weight_decay else None
        base = StageConfig(steps=steps or self.steps, optimizer=decaying)
        return self._config(unit, size, stages=(base, StageConfig(steps=self.cooldown_steps)))

    def sgd_stage(self, labels: Any) -> StageConfig:
        """Return the stage of SGD on sampled or exact labels."""
        optimizer = sgd(self.sgd_steps, self.sgd_learning_rate)
        return StageConfig(steps=self.sgd_steps, labels=labels, optimizer=optimizer)

    def more_stages(self) -> dict[str, StageConfig]:
        """Return what follows the base in the arms of more AdamW: alone, with the adversary, or with the helper."""
        adversary, helper = (
            AdversarialConfig(task=self.tasks[0], weight=sign * AdversarialConfig.weight) for sign in (1, -1)
        )
        return {
            "longer": StageConfig(steps=self.longer_steps),
            "adversary": StageConfig(steps=self.adversary_steps, algorithm=adversary),
            "helper": StageConfig(steps=self.helper_steps, algorithm=helper),
        }

    # --- what is measured --------------------------------------------------------------------------------------------

    @property
    def common(self) -> list[str]:
        """What is measured of every checkpoint but the untrained one."""
        return ["loss", "trace", "minimal-trace", *self.probes.values()]

    def _ends(self, unit: Unit, arm: str, config: TrainConfig) -> Experiment:
        measures = [*self.common, *self.few_shot_probes.values()]
        sizes = {self.arm_of_size(size): size for size in self.sizes}
        if arm in sizes:
            measures += self.projected_probes.values()
            # the largest is what others are expanded into
            if sizes[arm] != self.sizes[-1]:
                measures += [*self.expanded_traces.values(), self.expanded_minimum]
        if arm in (UNTOUCHED, "label-noise"):
            measures.append("rescaling-control")
        parts = [self.measured(unit, measures, config.steps)]
        # tables before the cooldown are of the main size only
        if len(config.stages) > 1 and arm not in self.sizes:
            before = config.steps - self.cooldown_steps
            parts.append(self.measured(unit, self.common, before, name="measure before the cooldown of"))
        group = GROUPS.get(arm, GROUPS[UNTOUCHED])
        return Experiment(config=config, measurements=tuple(parts), group=group)

    def measured(self, unit: Unit, measures: Iterable[str], *steps: int, **more: Any) -> Measurement:
        """Return what is measured of a run, with the shape of the model that others are expanded into."""
        largest = self.model(self.sizes[-1])
        shape = {"expanded_layers": largest.layers, "expanded_heads": largest.heads}
        return self.measurement(unit, measures, *steps, settings=shape, **more)


def cooldown_run(arm: str, steps: int) -> str:
    """Return the name of an arm with a cooldown of another length."""
    return f"{arm}-cooldown-{steps}"


SCALES = {
    "laptop": SameLoss(
        description="about twenty minutes on two cores",
        language=PCFGConfig(levels=2, symbols_per_level=8, rules_per_symbol=8, vocab_size=16),
        grammars=tuple(range(800, 812)),
        sizes=("d16", "d32", "d64"),
        main_size="d32",
        steps=3_000,
        sgd_steps=2_000,
        longer_steps=800,
        adversary_steps=500,
        helper_steps=300,
        cooldown_steps=2_000,
        other_cooldowns=(1_000,),
        tasks=("prefix-4", "prefix-2"),
        shots=(100, 1_000),
        settings={
            **{"loss_sentences": "all", "num_sequences": 1_024},
            **{"num_train": 8_192, "num_test": "all", "probe_solver": "convex"},
        },
    ),
    "smoke": SameLoss(
        description="two minutes on two cores: every part runs, no verdict is given",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        grammars=(300, 301),
        sizes=("d16", "d32"),
        main_size="d32",
        layers=1,
        steps=60,
        sgd_steps=40,
        longer_steps=20,
        adversary_steps=15,
        helper_steps=10,
        cooldown_steps=40,
        other_cooldowns=(20,),
        tasks=("prefix-4", "prefix-2"),
        shots=(20, 50),
        settings={
            **{"loss_sentences": "all", "num_sequences": 64},
            **{"num_train": 256, "num_test": "all", "probe_solver": "convex"},
        },
    ),
}


# --- what is compared ------------------------------------------------------------------------------------------------


def arms_compared(results: Results, *, name: str) -> Contrast:
    """Return two arms; the pair of a grammar and seed has the same initial weights and sentences up to the base."""
    scale: SameLoss = results.scale
    arms = CONTRASTS[name]
    units = units_with(results, *arms)
    task = f" The task used in training is {scale.tasks[0]}." if name in ("adversary", "helper") else ""
    return Contrast(
        names=(GROUPS[arms[0]], GROUPS[arms[1]]),
        pairs=pairs_of(results, units, *arms),
        clusters=clusters_of(units),
        clusters_are="grammars",
        where=f"Both after the same cooldown of {scale.cooldown_steps:,} steps.{task}",
        slopes=pilot_slopes(PILOT, scale.main_size),
    )


def larger(results: Results) -> list[Contrast]:
    """Return each size against the next larger one."""
    return [_sizes_contrast(results, *sizes) for sizes in itertools.pairwise(results.scale.sizes)]


LOOK_UP = {"lookup": "probabilities", "log-lookup": "logarithms"}


def look_up_table(results: Results) -> list[Contrast]:
    """Return the look-up table, whose features are the true conditionals, against the untouched model."""
    units = units_with(results, BASE, UNTOUCHED)
    return [
        Contrast(
            names=("Look-up table", GROUPS[UNTOUCHED]),
            pairs=_against_tables(results, units, kind),
            clusters=clusters_of(units),
            clusters_are="grammars",
            where=f"The features of the look-up table are the true conditionals, as {words}; its KL is 0.",
            case=words,
            needs_same_loss=False,
        )
        for kind, words in LOOK_UP.items()
    ]


def random_rescaling(results: Results) -> Contrast:
    """Return the untouched model against itself after a random rescaling."""
    units = units_with(results, BASE, UNTOUCHED)
    return Contrast(
        names=(GROUPS[UNTOUCHED], "rescaled at random"),
        pairs=_rescaled(results, units),
        clusters=clusters_of(units),
        clusters_are="grammars",
        where="The same models, their weights rescaled by factors of 2 to 3; every prediction is unchanged.",
        needs_same_loss=False,
    )


def _sizes_contrast(results: Results, smaller: str, larger: str) -> Contrast:
    scale: SameLoss = results.scale
    arms = {size: scale.arm_of_size(size) for size in (smaller, larger)}
    units = units_with(results, *arms.values())
    first, second = (
        [sizes_expanded(scale, size, end) for end in ends_of(results, units, arm)] for size, arm in arms.items()
    )
    return Contrast(
        names=(smaller, larger),
        pairs=list(zip(first, second, strict=True)),
        clusters=clusters_of(units),
        clusters_are="grammars",
        where=f"Both after the same cooldown of {scale.cooldown_steps:,} steps. The slope on the loss is the mean "
        "of the two sizes' slopes, and its error includes half their difference.",
        case=f"{smaller} to {larger}",
        slopes=pilot_slopes(PILOT, smaller, larger),
    )


def _against_tables(results: Results, units: Sequence[Unit], kind: str) -> list[Pair]:
    pairs: list[Pair] = []
    for unit in units:
        tables = results.at(unit.run(BASE), 0)
        features = {key: tables[f"{kind}-{task}"] for task, key in results.scale.probes.items()}
        pairs.append((features, results.at(unit.run(UNTOUCHED))))
    return pairs


def _rescaled(results: Results, units: Sequence[Unit]) -> list[Pair]:
    pairs: list[Pair] = []
    for model in ends_of(results, units, UNTOUCHED):
        # pairing requires equal settings; these differ only in the one that describes the rescaling
        alike = {key: dataclasses.replace(model[to], settings=model[key].settings) for key, to in RESCALED.items()}
        pairs.append((model, {**model, **alike}))
    return pairs


# --- what is claimed --------------------------------------------------------------------------------------------------


def sizes_compared(scale: SameLoss) -> list[str]:
    """Return the cases of the contrasts of two sizes."""
    return [f"{smaller} to {larger}" for smaller, larger in itertools.pairwise(scale.sizes)]


def transfer(scale: SameLoss) -> Mapping[str, str]:
    """Return the probes on all examples and those on the fewest."""
    # few-shot probes are in the order of the number of examples, then of the tasks
    return scale.probes | dict(itertools.islice(scale.few_shot_probes.items(), len(scale.tasks)))


def flatness_in_one_architecture(scale: SameLoss) -> Mapping[str, str]:
    """Return the traces after expansion, one for each scale of the embedding, and the minimal trace."""
    traces = {f"trace, scale {name}": key for name, key in scale.expanded_traces.items()}
    return {**traces, "minimal-trace": scale.expanded_minimum}


# What the study is asked, stated before it is run. A direction is that of the second model of the comparison minus the
# first. Claims about transfer are tested on every task of the study, by probes on all training examples and on the
# fewest (those about sizes and the look-up table on all), claims about flatness with the trace and with the minimal
# trace.
#
# Order of the tests: label noise flattens by both traces (manipulation check); the helper, trained to do well on
# prefix-4, does better on it (positive control); label noise improves prefix-4 (primary). Only then the others.
#
# The smallest effect of interest is 0.5 percentage points. The primary claim and the positive control are judged by the
# difference adjusted to the same loss, with the pilot's slopes (PILOT, d32), so neither needs a test of the loss:
# for that test alone, 27 grammars were needed. Number of grammars, by isoloss.statistics.power and the standard
# deviations of the four earlier draws: over 78 grammars the primary difference has one of 0.39 points, below
# 0.42 with 80 % confidence. At 2.5 %, the level of a claim that is tested both ways, 10 grammars then show with 80 %
# power that there is no effect of 0.5 points if there is none (12 if it is 0.1 points), and 10 find one of 0.5 points.
# Over 20 grammars the helper's difference, 1.37 points, has one of 1.18, below 1.42: 8 to 11 grammars show it. So there
# are 12 grammars, with all arms each.
#
# Other claims are tested once the losses are shown to be the same. The margin is the KL that is worth at most a fifth
# of 0.5 points of prefix-4, by the end of the 95 % interval of the pilot's slope that is farther from 0. Of the
# adversary and the helper, whose effect in the paper is 5.5 points, 2.5 points are the smallest effect of interest, and
# the margin is five times as large. So it is for the manipulation check: by the traces of the longer arm in
# the two draws of 27 grammars, which differ by 6 nats for a KL of 0.0005, it is worth 4 nats, of a flattening of
# 51.
_NOISE, _SGD, _LONGER, _ADVERSARY, _HELPER, _DECAY = (
    functools.partial(arms_compared, name=name)
    for name in ("label noise", "sgd", "longer", "adversary", "helper", "weight decay")
)
_transfer = functools.partial(Claim, measures=transfer, direction="increase")
_flatness = functools.partial(Claim, measures="flatness", direction="decrease")
CLAIMS = (
    _transfer(
        id="noise-transfer",
        statement="At the same loss, SGD with sampled labels transfers better than SGD with exact labels",
        paper="follows from sections 3 and 4 together: label noise is what flattens; not tried",
        role="primary",
        case="prefix-4",
        of=_NOISE,
        no_effect_within=0.5,
        loss_rule="adjusted",
    ),
    _flatness(
        id="noise-flatter",
        statement="At the same loss, SGD with sampled labels is flatter than SGD with exact labels",
        paper="theorem 3.3: label noise is what drives the trace down; not tried",
        role="manipulation check",
        of=_NOISE,
        loss_margin=0.00028,
    ),
    _transfer(
        id="sgd-transfer",
        statement="At the same loss, a model trained on with SGD and sampled labels transfers better",
        paper="figure 4 and section 2.3 (PCFG, 235M, task C): +1.6 points; tasks A and B (figure 10): increasing, no "
        "number given",
        of=_SGD,
    ),
    _flatness(
        id="sgd-flatter",
        statement="At the same loss, a model trained on with SGD and sampled labels is flatter",
        paper="theorem 3.3; figure 4 (PCFG, 235M, SGD): the trace falls steadily, by no stated factor",
        of=_SGD,
    ),
    _transfer(
        id="longer-transfer",
        statement="At the same loss, a model that AdamW trained for longer transfers better",
        paper="figure 2 (PCFG, 41M, task C): accuracy rises at constant loss",
        of=_LONGER,
    ),
    _flatness(
        id="longer-flatter",
        statement="At the same loss, a model that AdamW trained for longer is flatter",
        paper="OpenWebText, 400,000 to 1,400,000 steps: the trace falls by 0.67 (absolute; no levels given)",
        of=_LONGER,
    ),
    Claim(
        id="larger-transfer",
        statement="Of two models of the same loss, the larger transfers better, by probes of as many features",
        paper="figure 5 (PCFG, above 9M parameters): probe accuracy from 40.4 to 50.5 %",
        of=larger,
        cases=sizes_compared,
        measures=operator.attrgetter("projected_probes"),
        direction="increase",
    ),
    Claim(
        id="larger-flatter",
        statement="Of two models of the same loss, the larger is flatter when both are expanded into one architecture",
        paper="figure 5 (PCFG, above 9M parameters): trace from 19.8 to 12.6; section 4: sizes are compared in one "
        "parameter space",
        of=larger,
        cases=sizes_compared,
        measures=flatness_in_one_architecture,
        direction="decrease",
    ),
    _transfer(
        id="adversary-transfer",
        statement="At the same loss, the adversary's model transfers worse than one trained for longer without it",
        paper="table 2 (PCFG, 235M, task C): 50.2 ± 1.0 against 55.7 ± 0.6 %",
        of=_ADVERSARY,
        loss_margin=0.00028,
        direction="decrease",
    ),
    _flatness(
        id="adversary-sharper",
        statement="At the same loss, the adversary's model is sharper than one trained for longer without it",
        paper="table 2 (PCFG, 235M): trace 19.34 ± 0.92 against 8.01 ± 0.73",
        of=_ADVERSARY,
        loss_margin=0.00028,
        direction="increase",
    ),
    _transfer(
        id="helper-transfer",
        statement="At the same loss, the helper's model transfers better than one trained for longer without it",
        paper="not tried: the adversary's term with its sign turned",
        role="positive control",
        case="prefix-4",
        of=_HELPER,
        loss_rule="adjusted",
    ),
    _flatness(
        id="helper-flatter",
        statement="At the same loss, the helper's model is flatter, as it is if flatness is what tells transfer apart",
        paper="follows from section 2; not tried",
        of=_HELPER,
        loss_margin=0.00028,
    ),
    _transfer(
        id="decay-transfer",
        statement="At the same loss, a model trained with weight decay transfers better",
        paper="table 1 (BookCorpus, 330M, with dropout, QNLI): 84.4 against 83.0 %",
        of=_DECAY,
    ),
    _flatness(
        id="decay-flatter",
        statement="At the same loss, a model trained with weight decay is flatter",
        paper="table 2 (BookCorpus, 330M, with dropout): trace 24.55 ± 0.18 against 34.91 ± 0.40",
        of=_DECAY,
    ),
    Claim(
        id="lookup-transfer",
        statement="A pre-trained model transfers better than the look-up table, whose loss is perfect",
        paper="table 1 (PCFG, 235M): task A 89.9 ± 0.3 % against 71.2 %, task B 49.2 ± 0.8 % against 39.7 %",
        of=look_up_table,
        cases=tuple(LOOK_UP.values()),
        measures=operator.attrgetter("probes"),
        direction="increase",
    ),
    Claim(
        id="rescaling",
        statement="A random rescaling, which changes no prediction, leaves the measure of flatness unchanged: the "
        "negative control",
        paper="not tried",
        of=random_rescaling,
        measures="flatness",
        direction="no change within",
        margin=0.1,
    ),
)


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the tables: arms, differences from the untouched arm, lengths of the cooldown, sizes and baselines."""
    made = (
        _arms(results),
        _differences(results, "after", results.scale.cooldown_steps),
        _differences(results, "before", 0),
        _cooldowns(results),
        _sizes(results),
        _baselines(results),
    )
    return tuple(table for table in made if table.rows)


def _arms(results: Results) -> SummaryTable:
    scale: SameLoss = results.scale
    keys = ("kl", *RESCALED, *scale.probes.values(), *scale.few_shot_probes.values())
    of_arms = {title: (arm, units_with(results, arm)) for arm, title in GROUPS.items()}
    rows = [
        ((title, num_languages(units)), means(ends_of(results, units, arm), units, keys))
        for title, (arm, units) in of_arms.items()
        if has_several_languages(units)
    ]
    caption = (
        f"Every arm ends in the same cooldown: {scale.cooldown_steps:,} steps of AdamW on exact labels, with a "
        f"learning rate that decays to 0. Probes are fitted on {scale.settings['num_train']:,} sentences, few-shot "
        "probes on the number in their name. All are tested on every sentence of the language. Arms with fewer "
        "grammars are means over other languages: compare them in the tables of pairs."
    )
    return SummaryTable("arms", f"all arms after the cooldown, {OVER}", ("arm", "grammars"), rows, caption)


def _differences(results: Results, name: str, steps: int) -> SummaryTable:
    """Return the table of pairs after a cooldown of this length; 0: before it."""
    scale: SameLoss = results.scale
    # the base, which is the untouched arm before its cooldown, has no few-shot probes
    few_shot = scale.few_shot_probes.values() if steps else ()
    keys = ("kl", *RESCALED, *scale.probes.values(), *few_shot)
    rows = [
        (
            (GROUPS[arms[1]], GROUPS[arms[0]], num_languages(units)),
            changes(_after_cooldown(results, units, arms, steps), units, keys),
        )
        for arms in CONTRASTS.values()
        if has_several_languages(units := units_with(results, *arms))
    ]
    caption = (
        "Paired by grammar and seed. KL and probe accuracies: arm minus control. Traces: arm over control, as "
        "geometric means."
    )
    if not steps:
        caption += " Before the cooldown the untouched arm is the base."
    title = f"arms vs. controls, {name} the cooldown, {OVER}"
    return SummaryTable(name, title, ("arm", "control", "grammars"), rows, caption)


def _cooldowns(results: Results) -> SummaryTable:
    scale: SameLoss = results.scale
    keys, arms = ("kl", *RESCALED, *scale.probes.values()), CONTRASTS["label noise"]
    units = units_with(results, *arms)
    rows = [
        ((steps, num_languages(units)), changes(_after_cooldown(results, units, arms, steps), units, keys))
        for steps in (0, *scale.other_cooldowns, scale.cooldown_steps)
        if has_several_languages(units)
    ]
    caption = (
        "KL and probe accuracies as differences, traces as factors. Both arms had a cooldown of this many steps; 0 is "
        "no cooldown."
    )
    title = f"SGD with sampled vs. exact labels, by length of the cooldown, {OVER}"
    return SummaryTable("cooldowns", title, ("cooldown", "grammars"), rows, caption)


def _after_cooldown(results: Results, units: Sequence[Unit], arms: tuple[str, str], steps: int) -> list[Pair]:
    """Return the pairs of two arms after a cooldown of this length; 0: before it."""
    if steps == 0:
        control, arm = arms
        return [(_before(results, unit, control), _before(results, unit, arm)) for unit in units]
    if steps == results.scale.cooldown_steps:
        return pairs_of(results, units, *arms)
    return pairs_of(results, units, *(cooldown_run(arm, steps) for arm in arms))


def _before(results: Results, unit: Unit, arm: str) -> Checkpoint:
    """Return the checkpoint from which an arm's cooldown starts; for the untouched arm, the last of the base."""
    if arm == UNTOUCHED:
        return results.at(unit.run(BASE))
    run = unit.run(arm)
    return results.at(run, results.experiments[run].last_step - results.scale.cooldown_steps)


def _sizes(results: Results) -> SummaryTable:
    scale: SameLoss = results.scale
    keys = ["kl", "trace", *scale.expanded_traces.values(), scale.expanded_minimum]
    keys += [*scale.probes.values(), *scale.projected_probes.values()]
    rows = []
    for size in scale.sizes:
        units = units_with(results, arm := scale.arm_of_size(size))
        if has_several_languages(units):
            ends = [sizes_expanded(scale, size, end) for end in ends_of(results, units, arm)]
            label = (size, results.run(units[0].run(arm)).result()["num_parameters"], num_languages(units))
            rows.append((label, means(ends, units, keys)))
    caption = (
        "Raw traces (column trace) of different widths are not comparable: they are sums over different parameters. "
        f"The other traces are measured after expanding each model into the architecture of {scale.sizes[-1]}, which "
        "leaves its function unchanged (isoloss expand --embedding-scale). The minimal trace is the same for all three "
        "embedding scales. Projected probes use the same number of features for every size."
    )
    return SummaryTable("sizes", f"model sizes, {OVER}", ("size", "parameters", "grammars"), rows, caption)


def _baselines(results: Results) -> SummaryTable:
    scale: SameLoss = results.scale
    units = units_with(results, BASE, UNTOUCHED)
    starts = [results.at(unit.run(BASE), 0) for unit in units]
    models = ends_of(results, units, UNTOUCHED)

    def rate(name: str, probe: str) -> list[float]:
        # sums of probabilities, which rounding takes a little off 1
        return [round(one[probe].details[name], 12) for one in starts]

    # by probe: a number for each unit
    values: dict[str, dict[str, list[float]]] = {
        "Majority class": {probe: rate("majority_rate", probe) for probe in scale.probes.values()},
        **{
            title: {probe: [one[f"{kind}-{task}"].value for one in starts] for task, probe in scale.probes.items()}
            for kind, title in BASELINES.items()
        },
        "Untrained model": {probe: [one[probe].value for one in starts] for probe in scale.probes.values()},
        "Trained model (untouched)": {probe: [one[probe].value for one in models] for probe in scale.probes.values()},
        "Bayes-optimal classifier": {probe: rate("bayes_accuracy", probe) for probe in scale.probes.values()},
    }
    clusters = clusters_of(units)
    rows = [
        ((title,), {probe: cluster_mean(some, clusters, unit="accuracy") for probe, some in by_probe.items()})
        for title, by_probe in values.items()
        if has_several_languages(units)
    ]
    caption = (
        "The same probe on other features of the same sentences, with the majority class and the Bayes-optimal "
        "classifier for reference."
    )
    return SummaryTable("baselines", f"baselines of the probes, {OVER}", ("features",), rows, caption)


def sizes_expanded(scale: SameLoss, size: str, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its traces in the largest size's architecture; the largest is there as it is."""
    if size != scale.sizes[-1]:
        return checkpoint
    into = scale.model(size)
    # with the settings of the expanded ones, as only estimates with equal settings are paired
    shape = {"expanded_layers": into.layers, "expanded_heads": into.heads}
    plain, minimum = (
        dataclasses.replace(checkpoint[key], settings={**checkpoint[key].settings, **shape}) for key in RESCALED
    )
    return {**checkpoint, **dict.fromkeys(scale.expanded_traces.values(), plain), scale.expanded_minimum: minimum}


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether label noise flattens, whether that helps transfer, and whether models of one loss can differ."""
    by_id = {result.claim.id: result for result in claims}
    differ = card_of("Can models with the same loss transfer differently?", by_id["adversary-transfer"])
    arms = CONTRASTS["label noise"]
    units = units_with(results, *arms)
    return [
        flatter_card("Is it flatter?", by_id["noise-flatter"], pairs_of(results, units, *arms), units),
        card_of("Does it transfer better?", by_id["noise-transfer"]),
        dataclasses.replace(differ, detail=f"a model trained against the task; {differ.detail}"),
    ]


# --- the page --------------------------------------------------------------------------------------------------------


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), sections=[_correlations(results)], settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    scale: SameLoss = results.scale
    tasks = [accuracy(task) for task in scale.tasks]
    arms = [*GROUPS, *(size for size in scale.sizes if size != scale.main_size)]
    runs = [unit.run(arm) for arm in arms for unit in units_with(results, arm)]
    ends = checkpoint_frame(results, runs, ["kl", *RESCALED, *scale.probes.values()])
    figures = []
    if found := _compared(results):
        panels = {
            "KL, difference (nats per token)": {"KL": "kl"},
            "Trace, factor": {column.title: column.name for column in (TRACE, MINIMAL_TRACE)},
            "Probe accuracy, difference (points)": scale.probes,
        }
        figures.append(
            Figure(
                name="arms",
                title="Every arm vs. its control",
                chart=forest(
                    found, panels, note="confidence intervals over grammars, not adjusted for the number of arms"
                ),
                caption="After the same cooldown, paired by grammar and seed: the difference in KL, the factor by "
                "which each trace changes, and the difference in probe accuracy. If flatness predicted transfer at the "
                "same loss, arms with a smaller trace would transfer better.",
            )
        )
    style = Style.of(ends)
    figures += [
        Figure(
            name=f"flatness-{task.name}",
            title=f"Loss, flatness and transfer: {task.title.split(', ')[-1]}",
            chart=charts.scatter(ends, [(across, task) for across in (KL, TRACE, MINIMAL_TRACE)], style=style),
            caption="The last checkpoint of every arm and grammar: probe accuracy against the KL to the truth, the "
            "trace of the Fisher information and the minimal trace. Compare models of one size only. "
            "Corresponds to the paper's figure 1.",
        )
        for task in tasks
    ]
    by_size = _by_size(results)
    figures.append(
        Figure(
            name="sizes",
            title="Model sizes",
            chart=charts.sizes(by_size, _size_columns(scale), style=Style.of(by_size)),
            caption="Untouched models of every grammar by number of parameters. Raw traces of different widths are not "
            f"comparable; the minimal trace is measured in the architecture of {scale.sizes[-1]}, and projected probes "
            "use the same number of features for every size. Corresponds to the paper's figures 3 and 5.",
        )
    )
    return figures


def _compared(results: Results) -> dict[str, dict[str, Estimate]]:
    """Return the differences between arms and their controls; of one grammar there is no error, and so no interval."""
    keys = ("kl", *RESCALED, *results.scale.probes.values())
    return {
        f"{GROUPS[arm]} − {GROUPS[control]}": changes(pairs_of(results, units, control, arm), units, keys)
        for control, arm in CONTRASTS.values()
        if has_several_languages(units := units_with(results, control, arm))
    }


def _size_columns(scale: SameLoss) -> list[Column]:
    raw = Column("trace-own", "Raw trace, not comparable", "nats/token", log=True)
    minimum = Column(scale.expanded_minimum, f"Minimal trace in {scale.sizes[-1]}", "nats/token", log=True)
    task, projected = next(iter(scale.projected_probes.items()))
    return [KL, raw, minimum, Column(projected, f"Projected probe, {task}", "%", percent=True)]


def _by_size(results: Results) -> pl.DataFrame:
    scale: SameLoss = results.scale
    keys = [column.name for column in _size_columns(scale)]
    rows = []
    for size in scale.sizes:
        arm = scale.arm_of_size(size)
        for unit in units_with(results, arm):
            run, checkpoint = unit.run(arm), sizes_expanded(scale, size, results.at(unit.run(arm)))
            checkpoint = {**checkpoint, "trace-own": checkpoint["trace"]}
            rows.append(results.row(run, results.experiments[run].last_step, checkpoint, keys))
    return pl.DataFrame(rows)


def _correlations(results: Results) -> Section:
    rows = [
        _correlation(results, column, task, which, left_out)
        for which, left_out in (("all arms", ()), ("without adversary and helper", TRAINED_WITH_TASK))
        for column in (TRACE, MINIMAL_TRACE)
        for task in results.scale.probes
    ]
    note = Markup("<p class=note>{}</p>").format(
        "If flatter models transferred better, it would be negative. Partial correlation of the log trace with probe "
        "accuracy, given the KL, within grammars; intervals by the jackknife over grammars. Models: the last "
        f"checkpoints of the main size whose KL is within {BAND:g} nats of the untouched arm's."
    )
    body = interval_rows(rows, effect="correlation") + note
    return Section(title="Correlation of flatness with transfer", body=body, folded=True)


def _correlation(results: Results, trace: Column, task: str, which: str, left_out: Collection[str]) -> IntervalRow:
    models = [
        (unit, end)
        for unit in results.scale.units
        for arm in GROUPS
        if arm not in left_out and unit.run(arm) in results.experiments
        for end in [results.at(unit.run(arm))]
        if abs(end["kl"].value - results.at(unit.run(UNTOUCHED))["kl"].value) <= BAND
    ]
    label = f"{trace.title} and {task}"
    try:
        found = correlation(
            [math.log(end[trace.name].value) for _, end in models],
            [end[results.scale.probes[task]].value for _, end in models],
            clusters_of(unit for unit, _ in models),
            given={"KL": [end["kl"].value for _, end in models]},
            # grammars differ more than arms do: without this, the correlation would be between grammars
            within=[unit.prefix for unit, _ in models],
        )
    except IsolossError as error:
        return IntervalRow(label=label, effect=f"not known ({error})", group=which)
    low, high = found.interval95
    return IntervalRow(
        label=f"{label}, {found.observations} models",
        effect=f"{found.value:+.2f}",
        interval=f"{low:+.2f} to {high:+.2f}",
        value=found.value,
        low=low,
        high=high,
        scale="correlation",
        group=which,
    )


def _settings(scale: SameLoss) -> dict[str, str]:
    weight = AdversarialConfig.weight
    return {
        "Grammars": f"{len(scale.grammars)}; pre-training seeds per grammar: {scale.seeds_per_grammar}",
        "Model": f"BERT {scale.main_size} with {scale.layers} layers, no dropout; {scale.batch_size} sentences "
        "per step, one masked token each",
        "Base": f"{scale.steps:,} steps of AdamW on exact labels, learning rate {scale.learning_rate:g} with cosine "
        "decay to 0, no weight decay",
        "Cooldown": f"{scale.cooldown_steps:,} steps, settings as for the base",
        "SGD": f"{scale.sgd_steps:,} steps, learning rate {scale.sgd_learning_rate:g} after a warm-up of 12 %, on "
        "sampled or exact labels",
        "AdamW for longer": f"{scale.longer_steps:,} more steps, settings as for the base",
        "Adversary, helper": f"{scale.adversary_steps:,} and {scale.helper_steps:,} more steps with the loss of a head "
        f"for {scale.tasks[0]}, weighted {weight:g} and {-weight:g}",
        "Weight decay": f"{WEIGHT_DECAY:g} in the base, none in the cooldown",
        "Errors": "over grammars, with Student's t; losses and accuracies have no measurement error",
    }


STUDY = Study(
    name="same-loss",
    scales=SCALES,
    title="Does a flatter model transfer better at the same loss?",
    lead=(
        "Small masked language models are trained by SGD with sampled labels, whose noise should flatten a model, or "
        "with exact labels. Loss: KL to the true conditionals. Flatness: trace of the Fisher information, smaller is "
        "flatter; the minimal trace is its minimum over rescalings of the weights that change no prediction. "
        "Transfer: accuracy of a linear probe on a downstream task.",
        "The paper claims that models with the same pre-training loss can transfer differently, and that the flatter "
        "ones transfer better. This study tests both claims on random grammars. They have so few sentences that the "
        "loss and the accuracy of every probe are exact sums over all of them, without sampling error.",
        "Each arm treats the model differently: SGD with sampled or exact labels, more AdamW, an adversary or a helper "
        "that makes a downstream task harder or easier to decode, weight decay, or another size. The untouched arm has "
        "none of these; the tables name the control of each arm. Every arm ends in the same cooldown, which is meant "
        "to bring all to the same loss; whether the losses are the same is tested. Differences are paired by grammar "
        "and seed, and standard errors are over grammars.",
    ),
    claims=CLAIMS,
    loss_margin=0.000056,
    verdicts_at=("laptop",),
    tables=tables,
    answer=answer,
    page=parts,
    block_name="grammars",
)
