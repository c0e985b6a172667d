"""The study same-loss: its scales, the checkpoints that its claims compare, and its tables."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from isoloss.paper.same_loss import pilot
from isoloss.paper.same_loss.design import (
    BASE,
    BASELINES,
    CONTRASTS,
    GROUPS,
    SCALES,
    UNTOUCHED,
    Replicate,
    StudySize,
    cooldown_run,
    grammars_of,
)
from isoloss.report.html import Card
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.estimate import Estimate
from isoloss.studies.answer import ANSWERS, card_of, title_of
from isoloss.studies.claims import Claim, ClaimResult, Contrast, Verdict
from isoloss.studies.results import RESCALED, Checkpoint, Measured, Pair, Results, change
from isoloss.studies.spec import Study
from isoloss.studies.summary import SummaryTable

OVER = "mean ± standard error over grammars"


# --- what is compared ------------------------------------------------------------------------------------------------


def arms_compared(results: Results, *, name: str) -> Contrast:
    """Return two arms; the pair of a grammar and seed has the same initial weights and sentences up to the base."""
    scale: StudySize = results.scale
    arms = CONTRASTS[name]
    units = replicates_with(results, *arms)
    task = f" The task used in training is {scale.tasks[0]}." if name in ("adversary", "helper") else ""
    return Contrast(
        names=(GROUPS[arms[0]], GROUPS[arms[1]]),
        pairs=pairs_of(results, units, arms),
        clusters=grammars_of(units),
        where=f"Both after the same cooldown of {scale.cooldown_steps:,} steps.{task}",
        slopes=pilot.slopes(scale.main_size),
    )


def larger(results: Results) -> list[Contrast]:
    """Return each size against the next larger one."""
    return [_sizes_contrast(results, *sizes) for sizes in itertools.pairwise(results.scale.sizes)]


LOOK_UP = {"lookup": "probabilities", "log-lookup": "logarithms"}


def look_up_table(results: Results) -> list[Contrast]:
    """Return the look-up table, whose features are the true conditionals, against the untouched model."""
    units = replicates_with(results, BASE, UNTOUCHED)
    return [
        Contrast(
            names=("Look-up table", GROUPS[UNTOUCHED]),
            pairs=_against_tables(results, units, kind),
            clusters=grammars_of(units),
            where=f"The features of the look-up table are the true conditionals, as {words}; its KL is 0.",
            case=words,
            needs_same_loss=False,
        )
        for kind, words in LOOK_UP.items()
    ]


def random_rescaling(results: Results) -> Contrast:
    """Return the untouched model against itself after a random rescaling."""
    units = replicates_with(results, BASE, UNTOUCHED)
    return Contrast(
        names=(GROUPS[UNTOUCHED], "rescaled at random"),
        pairs=_rescaled(results, units),
        clusters=grammars_of(units),
        where="The same models, their weights rescaled by factors of 2 to 3; every prediction is unchanged.",
        needs_same_loss=False,
    )


def replicates_with(results: Results, *arms: str) -> list[Replicate]:
    """Return the units that have results for all of these arms."""
    scale: StudySize = results.scale
    return [unit for unit in scale.units if all(unit.run(arm) in results.experiments for arm in arms)]


def last(results: Results, unit: Replicate, arm: str) -> Checkpoint:
    """Return the last checkpoint of an arm, which is after the cooldown, except for the base."""
    return results.at(unit.run(arm))


def before_cooldown(results: Results, unit: Replicate, arm: str) -> Checkpoint:
    """Return the checkpoint from which an arm's cooldown starts; for the untouched arm, the last of the base."""
    if arm == UNTOUCHED:
        return results.at(unit.run(BASE))
    run = unit.run(arm)
    return results.at(run, results.experiments[run].last_step - results.scale.cooldown_steps)


def pairs_of(
    results: Results,
    units: Sequence[Replicate],
    arms: tuple[str, str],
    at: Callable[[Results, Replicate, str], Checkpoint] = last,
) -> list[Pair]:
    """Return a checkpoint of a control and of an arm, by default their last, by unit."""
    control, arm = arms
    return [(at(results, unit, control), at(results, unit, arm)) for unit in units]


def _sizes_contrast(results: Results, smaller: str, larger: str) -> Contrast:
    scale: StudySize = results.scale
    arms = {size: scale.arm_of_size(size) for size in (smaller, larger)}
    units = replicates_with(results, *arms.values())
    first, second = (
        [sizes_expanded(scale, size, last(results, unit, arm)) for unit in units] for size, arm in arms.items()
    )
    return Contrast(
        names=(smaller, larger),
        pairs=list(zip(first, second, strict=True)),
        clusters=grammars_of(units),
        where=f"Both after the same cooldown of {scale.cooldown_steps:,} steps. The slope on the loss is the mean "
        "of the two sizes' slopes, and its error includes half their difference.",
        case=f"{smaller} to {larger}",
        slopes=pilot.slopes(smaller, larger),
    )


def _against_tables(results: Results, units: Sequence[Replicate], kind: str) -> list[Pair]:
    probes: dict[str, str] = results.scale.probes
    pairs: list[Pair] = []
    for unit in units:
        tables = results.at(unit.run(BASE), 0)
        pairs.append(({key: tables[f"{kind}-{task}"] for task, key in probes.items()}, last(results, unit, UNTOUCHED)))
    return pairs


def _rescaled(results: Results, units: Sequence[Replicate]) -> list[Pair]:
    pairs: list[Pair] = []
    for unit in units:
        model = last(results, unit, UNTOUCHED)
        # pairing requires equal settings; these differ only in the one that describes the rescaling
        alike = {
            key: dataclasses.replace(model[other], settings=model[key].settings) for key, other in RESCALED.items()
        }
        pairs.append((model, {**model, **alike}))
    return pairs


# --- what is claimed --------------------------------------------------------------------------------------------------


def sizes_compared(scale: StudySize) -> list[str]:
    """Return the cases of the contrasts of two sizes."""
    return [f"{smaller} to {larger}" for smaller, larger in itertools.pairwise(scale.sizes)]


def transfer(scale: StudySize) -> Mapping[str, str]:
    """Return the probes on all examples and those on the fewest."""
    # few-shot probes are in the order of the number of examples, then of the tasks
    return scale.probes | dict(itertools.islice(scale.few_shot_probes.items(), len(scale.tasks)))


def probes(scale: StudySize) -> Mapping[str, str]:
    """Return the probes on all examples."""
    return scale.probes


def projected(scale: StudySize) -> Mapping[str, str]:
    """Return the probes of as many features for every size."""
    return scale.projected_probes


def flatness_in_one_architecture(scale: StudySize) -> Mapping[str, str]:
    """Return the traces after expansion, one for each scale of the embedding, and the minimal trace."""
    return {
        **{f"trace, scale {name}": key for name, key in scale.expanded_traces.items()},
        "minimal-trace": scale.expanded_minimum,
    }


# What the study is asked, stated before it is run. A direction is that of the second model of the comparison minus the
# first. Claims about transfer are tested on every task of the study, by probes on all training examples and on the
# fewest (those about sizes and the look-up table on all), claims about flatness with the trace and with the minimal
# trace.
#
# Order of the tests: label noise flattens by both traces (manipulation check); the helper, trained to do well on
# prefix-4, does better on it (positive control); label noise improves prefix-4 (primary). Only then the others.
#
# The smallest effect of interest is 0.5 percentage points. The primary claim and the positive control are judged by the
# difference adjusted to the same loss, with the pilot's slopes (pilot.toml, d32), so neither needs a test of the loss:
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
CLAIMS = (
    Claim(
        id="noise-transfer",
        statement="At the same loss, SGD with sampled labels transfers better than SGD with exact labels",
        paper="follows from sections 3 and 4 together: label noise is what flattens; not tried",
        role="primary",
        case="prefix-4",
        of=_NOISE,
        measures=transfer,
        direction="increase",
        no_effect_within=0.5,
        loss_rule="adjusted",
    ),
    Claim(
        id="noise-flatter",
        statement="At the same loss, SGD with sampled labels is flatter than SGD with exact labels",
        paper="theorem 3.3: label noise is what drives the trace down; not tried",
        role="manipulation check",
        of=_NOISE,
        loss_margin=0.00028,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="sgd-transfer",
        statement="At the same loss, a model trained on with SGD and sampled labels transfers better",
        paper="figure 4 and section 2.3 (PCFG, 235M, task C): +1.6 points; tasks A and B (figure 10): increasing, no "
        "number given",
        of=_SGD,
        measures=transfer,
        direction="increase",
    ),
    Claim(
        id="sgd-flatter",
        statement="At the same loss, a model trained on with SGD and sampled labels is flatter",
        paper="theorem 3.3; figure 4 (PCFG, 235M, SGD): the trace falls steadily, by no stated factor",
        of=_SGD,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="longer-transfer",
        statement="At the same loss, a model that AdamW trained for longer transfers better",
        paper="figure 2 (PCFG, 41M, task C): accuracy rises at constant loss",
        of=_LONGER,
        measures=transfer,
        direction="increase",
    ),
    Claim(
        id="longer-flatter",
        statement="At the same loss, a model that AdamW trained for longer is flatter",
        paper="OpenWebText, 400,000 to 1,400,000 steps: the trace falls by 0.67 (absolute; no levels given)",
        of=_LONGER,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="larger-transfer",
        statement="Of two models of the same loss, the larger transfers better, by probes of as many features",
        paper="figure 5 (PCFG, above 9M parameters): probe accuracy from 40.4 to 50.5 %",
        of=larger,
        cases=sizes_compared,
        measures=projected,
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
    Claim(
        id="adversary-transfer",
        statement="At the same loss, the adversary's model transfers worse than one trained for longer without it",
        paper="table 2 (PCFG, 235M, task C): 50.2 ± 1.0 against 55.7 ± 0.6 %",
        of=_ADVERSARY,
        loss_margin=0.00028,
        measures=transfer,
        direction="decrease",
    ),
    Claim(
        id="adversary-sharper",
        statement="At the same loss, the adversary's model is sharper than one trained for longer without it",
        paper="table 2 (PCFG, 235M): trace 19.34 ± 0.92 against 8.01 ± 0.73",
        of=_ADVERSARY,
        loss_margin=0.00028,
        measures="flatness",
        direction="increase",
    ),
    Claim(
        id="helper-transfer",
        statement="At the same loss, the helper's model transfers better than one trained for longer without it",
        paper="not tried: the adversary's term with its sign turned",
        role="positive control",
        case="prefix-4",
        of=_HELPER,
        measures=transfer,
        direction="increase",
        loss_rule="adjusted",
    ),
    Claim(
        id="helper-flatter",
        statement="At the same loss, the helper's model is flatter, as it is if flatness is what tells transfer apart",
        paper="follows from section 2; not tried",
        of=_HELPER,
        loss_margin=0.00028,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="decay-transfer",
        statement="At the same loss, a model trained with weight decay transfers better",
        paper="table 1 (BookCorpus, 330M, with dropout, QNLI): 84.4 against 83.0 %",
        of=_DECAY,
        measures=transfer,
        direction="increase",
    ),
    Claim(
        id="decay-flatter",
        statement="At the same loss, a model trained with weight decay is flatter",
        paper="table 2 (BookCorpus, 330M, with dropout): trace 24.55 ± 0.18 against 34.91 ± 0.40",
        of=_DECAY,
        measures="flatness",
        direction="decrease",
    ),
    Claim(
        id="lookup-transfer",
        statement="A pre-trained model transfers better than the look-up table, whose loss is perfect",
        paper="table 1 (PCFG, 235M): task A 89.9 ± 0.3 % against 71.2 %, task B 49.2 ± 0.8 % against 39.7 %",
        of=look_up_table,
        cases=tuple(LOOK_UP.values()),
        measures=probes,
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
        _differences(results, "after", "after the cooldown", last),
        _differences(results, "before", "before the cooldown", before_cooldown),
        _cooldowns(results),
        _sizes(results),
        _baselines(results),
    )
    return tuple(table for table in made if table.rows)


def _arms(results: Results) -> SummaryTable:
    scale: StudySize = results.scale
    keys = ("kl", *RESCALED, *scale.probes.values(), *scale.few_shot_probes.values())
    rows = []
    for arm, title in GROUPS.items():
        if _number(units := replicates_with(results, arm)) > 1:
            ends = [last(results, unit, arm) for unit in units]
            rows.append(((title, _number(units)), {key: _mean(units, [end[key] for end in ends]) for key in keys}))
    caption = (
        f"Every arm ends in the same cooldown: {scale.cooldown_steps:,} steps of AdamW on exact labels, with a "
        f"learning rate that decays to 0. Probes are fitted on {scale.settings['num_train']:,} sentences, few-shot "
        "probes on the number in their name. All are tested on every sentence of the language. Arms with fewer "
        "grammars are means over other languages: compare them in the tables of pairs."
    )
    return SummaryTable("arms", f"all arms after the cooldown, {OVER}", ("arm", "grammars"), rows, caption)


def _differences(
    results: Results, name: str, when: str, at: Callable[[Results, Replicate, str], Checkpoint]
) -> SummaryTable:
    scale: StudySize = results.scale
    keys = ["kl", *RESCALED, *scale.probes.values()]
    # the base, which is the untouched arm before its cooldown, has no few-shot probes
    if at is last:
        keys += scale.few_shot_probes.values()
    rows = []
    for control, arm in CONTRASTS.values():
        units = replicates_with(results, control, arm)
        if _number(units) > 1:
            pairs = pairs_of(results, units, (control, arm), at)
            rows.append(((GROUPS[arm], GROUPS[control], _number(units)), _changes(units, pairs, keys)))
    caption = (
        "Paired by grammar and seed. KL and probe accuracies: arm minus control. Traces: arm over control, as "
        "geometric means."
    )
    if at is before_cooldown:
        caption += " Before the cooldown the untouched arm is the base."
    return SummaryTable(name, f"arms vs. controls, {when}, {OVER}", ("arm", "control", "grammars"), rows, caption)


def _cooldowns(results: Results) -> SummaryTable:
    scale: StudySize = results.scale
    keys, rows, arms = ["kl", *RESCALED, *scale.probes.values()], [], CONTRASTS["label noise"]
    units = replicates_with(results, *arms)
    for steps in (0, *scale.other_cooldowns, scale.cooldown_steps):
        if _number(units) > 1:
            pairs = pairs_of(results, units, arms, functools.partial(_after_cooldown, steps=steps))
            rows.append(((steps, _number(units)), _changes(units, pairs, keys)))
    caption = (
        "KL and probe accuracies as differences, traces as factors. Both arms had a cooldown of this many steps; 0 is "
        "no cooldown."
    )
    title = f"SGD with sampled vs. exact labels, by length of the cooldown, {OVER}"
    return SummaryTable("cooldowns", title, ("cooldown", "grammars"), rows, caption)


def _after_cooldown(results: Results, unit: Replicate, arm: str, steps: int) -> Checkpoint:
    """Return an arm's checkpoint after a cooldown of this length; 0: before it."""
    if steps == 0:
        return before_cooldown(results, unit, arm)
    return last(results, unit, arm if steps == results.scale.cooldown_steps else cooldown_run(arm, steps))


def _sizes(results: Results) -> SummaryTable:
    scale: StudySize = results.scale
    keys = ["kl", "trace", *scale.expanded_traces.values(), scale.expanded_minimum]
    keys += [*scale.probes.values(), *scale.projected_probes.values()]
    rows = []
    for size in scale.sizes:
        arm = scale.arm_of_size(size)
        units = replicates_with(results, arm)
        if _number(units) > 1:
            ends = [sizes_expanded(scale, size, last(results, unit, arm)) for unit in units]
            label = (size, results.run(units[0].run(arm)).result()["num_parameters"], _number(units))
            rows.append((label, {key: _mean(units, [end[key] for end in ends]) for key in keys}))
    caption = (
        "Raw traces (column trace) of different widths are not comparable: they are sums over different parameters. "
        f"The other traces are measured after expanding each model into the architecture of {scale.sizes[-1]}, which "
        "leaves its function unchanged (isoloss expand --embedding-scale). The minimal trace is the same for all three "
        "embedding scales. Projected probes use the same number of features for every size."
    )
    return SummaryTable("sizes", f"model sizes, {OVER}", ("size", "parameters", "grammars"), rows, caption)


def _baselines(results: Results) -> SummaryTable:
    scale: StudySize = results.scale
    units = replicates_with(results, BASE, UNTOUCHED)
    starts = [results.at(unit.run(BASE), 0) for unit in units]
    models = [last(results, unit, UNTOUCHED) for unit in units]

    def row(title: str, estimates: Mapping[str, Sequence[Measured | float]]) -> tuple[tuple[str], dict[str, Estimate]]:
        return (title,), {probe: _mean(units, estimates[task]) for task, probe in scale.probes.items()}

    def detail(name: str) -> dict[str, list[float]]:
        # sums of probabilities, which rounding takes a little off 1
        return {t: [round(one[key].details[name], 12) for one in starts] for t, key in scale.probes.items()}

    rows = []
    if _number(units) > 1:
        rows = [
            row("Majority class", detail("majority_rate")),
            *(
                row(title, {task: [one[f"{kind}-{task}"] for one in starts] for task in scale.tasks})
                for kind, title in BASELINES.items()
            ),
            row("Untrained model", {task: [one[key] for one in starts] for task, key in scale.probes.items()}),
            row("Trained model (untouched)", {t: [one[key] for one in models] for t, key in scale.probes.items()}),
            row("Bayes-optimal classifier", detail("bayes_accuracy")),
        ]
    caption = (
        "The same probe on other features of the same sentences, with the majority class and the Bayes-optimal "
        "classifier for reference."
    )
    return SummaryTable("baselines", f"baselines of the probes, {OVER}", ("features",), rows, caption)


def sizes_expanded(scale: StudySize, size: str, checkpoint: Checkpoint) -> Checkpoint:
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


def _number(units: Sequence[Replicate]) -> int:
    # of grammars, not of seeds: an error is over grammars, and needs two
    return len({unit.grammar for unit in units})


def _mean(units: Sequence[Replicate], values: Sequence[Measured | float]) -> Estimate:
    numbers = [value.value if isinstance(value, Measured) else value for value in values]
    unit = values[0].unit if isinstance(values[0], Measured) else "accuracy"
    return cluster_mean(numbers, grammars_of(units), unit=unit)


def _changes(units: Sequence[Replicate], pairs: Sequence[Pair], keys: Sequence[str]) -> dict[str, Estimate]:
    """Return the mean difference over pairs by key; of traces, the mean factor."""
    clusters = grammars_of(units)
    return {
        key: factor(pairs, key, clusters) if key in RESCALED else change(pairs, key, clusters=clusters) for key in keys
    }


def factor(pairs: Sequence[Pair], key: str, clusters: Sequence[str]) -> Estimate:
    """Return the geometric mean of second over first; its error is the mean logarithm's, times the value."""
    logs = [math.log(second[key].value / first[key].value) for first, second in pairs]
    mean = cluster_mean(logs, clusters, unit="times")
    value = math.exp(mean.value)
    return dataclasses.replace(mean, value=value, stderr=value * mean.stderr, influence=None)


def factor_ends(estimate: Estimate) -> tuple[float, float]:
    """Return the 95 % interval of a geometric mean, which is symmetric in its logarithm."""
    low, high = estimate.ci95
    # `factor` gives the logarithm's error times the value: divided by it, the half width is the logarithm's again
    reach = (high - low) / 2 / estimate.value
    return estimate.value * math.exp(-reach), estimate.value * math.exp(reach)


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether label noise flattens, whether that helps transfer, and whether models of one loss can differ."""
    by_id = {result.claim.id: result for result in claims}
    differ = card_of("Can models of one loss transfer differently?", by_id["adversary-transfer"])
    arms = CONTRASTS["label noise"]
    units = replicates_with(results, *arms)
    return [
        flatter_card("Is it flatter?", by_id["noise-flatter"], pairs_of(results, units, arms), grammars_of(units)),
        card_of("Does it transfer better?", by_id["noise-transfer"]),
        dataclasses.replace(differ, detail=f"a model trained against the task; {differ.detail}"),
    ]


def flatter_card(label: str, result: ClaimResult, pairs: Sequence[Pair], clusters: Sequence[str]) -> Card:
    """Return the card of a claim about both traces, with the factors that they differ by; arguments as for `factor`."""
    card = card_of(label, result)
    verdicts = {one.verdict for one in result.answers}
    if len(verdicts) > 1 or Verdict.NOT_TESTED in verdicts:
        return card
    factors = {key: factor(pairs, key, clusters) for key in RESCALED}
    ends = {key: factor_ends(each) for key, each in factors.items()}
    trace, minimal = (f"{each.value:.2f} times the {title_of(key)}" for key, each in factors.items())
    intervals = ", ".join(f"{title_of(key)} {low:.2f} to {high:.2f}" for key, (low, high) in ends.items())
    return dataclasses.replace(
        card,
        value=f"{ANSWERS[verdicts.pop()]}: {trace}, {minimal}",
        detail=f"95 % intervals: {intervals}, over {len(set(clusters))} grammars",
    )


STUDY = Study(
    name="same-loss",
    scales=SCALES,
    title="Does a flatter model transfer better at the same loss?",
    lead=(
        "SGD with sampled labels, whose noise should flatten a model, against SGD with exact labels, on small masked "
        "language models. Loss: KL to the true conditionals. Flatness: trace of the Fisher information, smaller is "
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
    page="isoloss.paper.same_loss.page:parts",
    first_page_blocks=2,
    block_name="grammars",
)
