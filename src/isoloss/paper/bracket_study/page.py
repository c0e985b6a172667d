"""The page of the study brackets: its figures, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isoloss.paper.bracket_study.design import (
    ADAMW_STEPS,
    BASE,
    BATCH,
    PENALTY_BATCH,
    RATES,
    SGD_BATCH,
    TARGET_KL,
    Model,
    Replicate,
    StudySize,
)
from isoloss.paper.bracket_study.study import arms_of, compared, ends_of, mean
from isoloss.report.data import COLORS
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.panels import Axis, Panel, Series, draw
from isoloss.report.study_page import Figure
from isoloss.statistics.estimate import Estimate
from isoloss.studies.page import PageParts
from isoloss.studies.results import Checkpoint, Results, change

COUNT, IMBALANCE = "r2-g-16", "r2-abs-g-8"
ATTENTION, NEURONS, OTHER = COLORS[:3]


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


# --- figures ---------------------------------------------------------------------------------------------------------


def _figures(results: Results) -> list[Figure]:
    scale: StudySize = results.scale
    # a base that missed the target has nothing beside it at its loss
    drawn = [
        (model, length)
        for model, lengths in scale.lengths.items()
        for length in lengths
        if len(ends_of(results, model, length, BASE)) > 1
    ]
    phases = [_phases(results, length) for model, length in drawn if model == "attention"]
    doses = [_doses(results, model, length) for model, length in drawn]
    return [*phases, *doses, *([_arms(results)] if drawn else [])]


def _phases(results: Results, length: int) -> Figure:
    scale: StudySize = results.scale
    noise = {
        steps: ends
        for steps, arm in scale.dosed("attention").items()
        if len(ends := ends_of(results, "attention", length, arm)) > 1
    }
    weighted = [ends_of(results, "attention", length, arm) for arm in scale.weighted("attention").values()]
    penalties = [ends for ends in weighted if len(ends) > 1]

    def against_steps(name: str, key: str, color: str) -> Series:
        means = {steps: mean(ends, key) for steps, ends in noise.items()}
        return _series(name, color, [(float(steps), each) for steps, each in means.items()])

    def against_trace(name: str, all_ends: Sequence[Mapping[Replicate, Checkpoint]], color: str, marker: str) -> Series:
        points = [(mean(ends, "neurons-minimal-trace").value, mean(ends, IMBALANCE)) for ends in all_ends]
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
                against_steps("|g|, 8 strings", IMBALANCE, NEURONS),
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
        chart=draw(panels, note="Bars: 95 % intervals over seeds whose run ended at the one loss"),
        caption="Left: the trace of queries and keys, the trace of the neurons, and the cancellation ratio of equation "
        "4, 1 where no two active neurons disagree. Middle: R² of g, for which uniform attention is enough, and of "
        "|g|, which needs neurons that do not cancel. Right: label noise after each number of steps, and every weight "
        "of the penalty, both signs. If only the trace of u and V matters, all points lie on one falling curve.",
    )


def _doses(results: Results, model: Model, length: int) -> Figure:
    scale: StudySize = results.scale
    arms = {f"{weight:+g}" if weight else "0 (sham)": arm for weight, arm in scale.weighted(model).items()}
    made = {
        title: {f"|g|, {shots} strings": mean(ends, f"r2-abs-g-{shots}") for shots in (8, 16)}
        for title, arm in {"base": BASE, **arms}.items()
        if len(ends := ends_of(results, model, length, arm)) > 1
    }
    panel = IntervalPanel(
        title="R²",
        intervals=[_interval(row, name, each) for row, values in made.items() for name, each in values.items()],
    )
    what = "the trace of u and V" if model == "attention" else "the trace"
    called = "the model of section 5" if model == "attention" else "a transformer"
    return Figure(
        name=f"doses-{model}-{length}",
        title=f"Weight of a penalty on {what}: {called}, T = {length}",
        chart=intervals([panel], list(made), note="Lines: 95 % intervals over seeds"),
        caption="R² of |g| after the same number of steps with a penalty of each weight, then the cooldown. Below 0 it "
        "is a reward: the model gets sharper. The base had neither.",
    )


def _arms(results: Results) -> Figure:
    scale: StudySize = results.scale
    models: tuple[Model, ...] = ("attention", "transformer")
    made = [
        each for model in models for name in arms_of(scale, model) for each in compared(results, name=name, model=model)
    ]
    rows, differences = [], []
    for each in (contrast for contrast in made if not contrast.not_tested):
        kind = "transformer" if any(name == "trace" for name in each.pairs[0][0]) else "section 5's model"
        row = f"{each.names[1]} − {each.names[0]}"
        rows.append(row)
        difference = change(each.pairs, IMBALANCE, clusters=each.clusters)
        differences.append(_interval(row, f"{kind}, {each.case}", difference))
    panel = IntervalPanel(title="R² of |g|, 8 strings: difference", intervals=differences)
    return Figure(
        name="arms",
        title="Every arm vs. its control",
        chart=intervals([panel], list(dict.fromkeys(rows)), note="Lines: 95 % intervals over seeds, not adjusted"),
        caption="After the cooldown to one loss, paired by seed. AdamW and SAM have other steps than their control, "
        "and AdamW sampled labels where the control has exact ones; the sham's control is the base.",
    )


def _series(name: str, color: str, points: Sequence[tuple[float, Estimate]], marker: str = "circle") -> Series:
    at = [(x, each.value) for x, each in points]
    halves = [(each.ci95[1] - each.ci95[0]) / 2 for _, each in points]
    return Series(name=name, color=color, points=at, errors=halves, curve=at, marker=marker)


def _interval(row: str, series: str, estimate: Estimate) -> Interval:
    low, high = estimate.ci95
    return Interval(row=row, series=series, value=estimate.value, low=low, high=high, text=str(estimate))


# --- how it was made -------------------------------------------------------------------------------------------------


def _settings(scale: StudySize) -> dict[str, str]:
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
