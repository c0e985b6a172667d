"""What the study `paper` makes of its results: models at one loss, figure 1, and its answer."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from scipy import stats

from isoloss.paper.reproduction import page
from isoloss.paper.reproduction import tables as published
from isoloss.paper.reproduction.compare import Model, by_dataset, comparisons, contrasts, interpolated_control
from isoloss.paper.reproduction.design import SGD_SHOWN, SHOWN, Reproduction
from isoloss.paper.reproduction.scales import EVENING, SMOKE
from isoloss.paper.reproduction.study import STUDY, answer
from isoloss.paper.reproduction.tables import _expansions, _interpolation, _ranking, _same_loss, compared, tables
from isoloss.paper.tables import factor
from isoloss.statistics.estimate import Estimate
from isoloss.studies.claims import Answer, ClaimResult, Verdict, judge_claims
from isoloss.studies.claims import answer as studies_answer
from isoloss.studies.page import _beside_the_paper
from isoloss.studies.results import CheckpointEstimate, Results, change, difference

STUDIES = (Path(__file__).parents[2] / "docs" / "method" / "studies.md").read_text()
# what the documentation says of the page: what shows each of the paper's figures, tables and claims
LISTED = dict(re.findall(r"^\| ((?:figure|table|claim) [^|]*) \| ([^|]*) \|$", STUDIES, flags=re.MULTILINE))


def measured(value, influence=(), unit="nats per predicted token"):
    """An estimate whose error comes from the influence of its examples; without them, an exact one."""
    influence = np.array(influence, dtype=np.float64)
    n = len(influence)
    stderr = math.sqrt(float(np.square(influence).sum()) / (n * (n - 1))) if n else 0.0
    about = {"unit": unit, "num_predictions": max(n, 1), "method": "known"}
    estimate = Estimate(value=value, stderr=stderr, samples=n, **about)
    return CheckpointEstimate.of(estimate, inputs="same", settings={}, examples={"influence": influence} if n else {})


def checkpoint(loss, trace, influence=(), key="kl"):
    return {key: measured(loss), "trace": measured(trace, influence)}


@pytest.mark.parametrize(
    ("path", "loss", "trace"),
    [
        (((0.16, 100), (0.04, 60), (0.01, 50)), 0.02, 55),  # half way in the logarithm
        (((0.16, 100), (0.04, 60), (0.01, 50)), 0.04, 60),
        (((0.04, 60), (0.16, 100)), 0.08, 80),
        (((0.16, 100), (0.04, 60)), 0.03, None),
        (((0.16, 100), (0.04, 60)), 0.17, None),
        (((0.16, 100),), 0.16, None),
        # a trajectory with itself: its loss falls and rises again, and the last two enclose that of the end
        (((4, 0), (2, 10), (3, 20), (3.5, 30)), 3.5, 30),
    ],
)
def test_a_model_at_another_loss_is_on_the_line_between_the_last_neighbors_that_enclose_it(path, loss, trace):
    pair = interpolated_control([checkpoint(*each) for each in path], checkpoint(loss, 70.0))
    assert (pair is None) == (trace is None)
    if pair is not None:
        control, treated = pair
        assert control["trace"].value == pytest.approx(trace)
        assert (control["kl"].value, treated["trace"].value) == (loss, 70.0)


def test_the_error_of_a_difference_at_one_loss_is_by_example():
    path = [checkpoint(0.16, 100.0, [1.0, -1.0, 3.0, -3.0]), checkpoint(0.04, 60.0, [2.0, -2.0, 1.0, -1.0])]
    control, treated = interpolated_control(path, checkpoint(0.08, 70.0, [1.0, -1.0, 1.0, -1.0]))
    assert control["trace"].examples["influence"].tolist() == pytest.approx([1.5, -1.5, 2.0, -2.0])
    paired = difference(treated["trace"], control["trace"])
    by_hand = np.array([1.0, -1.0, 1.0, -1.0]) - np.array([1.5, -1.5, 2.0, -2.0])
    assert paired.value == pytest.approx(-10.0)
    assert paired.stderr == pytest.approx(math.sqrt(np.square(by_hand).sum() / 12))


def test_accuracies_on_sampled_examples_are_interpolated_by_example():
    """Two probes on four examples; the error is that of the mean of the differences, example by example."""
    labels = np.array([0, 1, 1, 0])

    def model(kl, predictions):
        examples = {"predictions": np.array(predictions), "labels": labels}
        accuracy = (examples["predictions"] == labels).mean()
        about = {"unit": "accuracy", "num_predictions": 4, "method": "known", "samples": 4, "stderr": 0.1}
        one = CheckpointEstimate.of(Estimate(value=accuracy, **about), inputs="same", settings={}, examples=examples)
        return {"loss": measured(kl), "probe": one}

    first = model(4.0, [[0, 1, 0, 1], [0, 1, 1, 1]])  # correct: 1, 1, 1/2, 0
    second = model(1.0, [[0, 0, 1, 0], [0, 0, 1, 0]])  # correct: 1, 0, 1, 1
    treated = model(2.0, [[0, 1, 1, 0], [0, 1, 1, 1]])  # correct: 1, 1, 1, 1/2
    control, same = interpolated_control([first, second], treated)
    found = difference(same["probe"], control["probe"])
    by_hand = np.array([1, 1, 1, 0.5]) - (np.array([1, 1, 0.5, 0]) + np.array([1, 0, 1, 1])) / 2
    assert found.unit == "percentage points"
    assert found.value == pytest.approx(100 * by_hand.mean())
    assert found.stderr == pytest.approx(100 * by_hand.std(ddof=1) / 2)


# --- models of about one loss ----------------------------------------------------------------------------------------

# Models of grammars with a KL near that of the control, d32-40-cooldown: KL, accuracy, trace. The others' KL is 1.
# Each grammar g adds 0.001 g to the KL and 0.1 g to the accuracy, which differences within a grammar do not see.
NEAR = {
    ("d32-40-cooldown", 20): (0.050, 0.60, 40.0),
    ("d32-60-cooldown", 20): (0.032, 0.61, 30.0),
    ("d16-40-cooldown-40", 40): (0.069, 0.58, 70.0),
    ("adversary", 30): (0.060, 0.55, 35.0),
    ("helper", 30): (0.040, 0.62, 45.0),
    ("sgd-exact", 20): (0.0702, 0.90, 10.0),  # just beyond the edge
}
BAND = 0.385
OF_ADVERSARY = (-0.01, 0.0, 0.01)  # accuracy that grammar g adds to the adversary's
OUTSIDE = "pcfg-301-seed-1-helper"  # alone in having 0.05 nats more than the other helpers


class Known(Results):
    """Results without runs."""

    def run(self, name):
        return SimpleNamespace(result=lambda: {"num_parameters": 100 + int(self.experiments[name].size[1:])})


def known_results(near=NEAR, minimal=10.0, seeds=2):
    """Results with these models near the control's KL, on three grammars with two seeds."""
    languages = tuple(dataclasses.replace(SMOKE.datasets[0].languages[0], seed=seed) for seed in (300, 301, 302))
    dataset = dataclasses.replace(SMOKE.datasets[0], languages=languages, seeds=seeds, flatness=(), band=BAND)
    scale = Reproduction(description="known", datasets=(dataset,))
    checkpoints = {}
    for one in scale.datasets[0].units:
        for name, experiment in scale.experiments.items():
            if not name.startswith(f"{one.prefix}-"):
                continue
            arm = name.removeprefix(f"{one.prefix}-")
            for part in experiment.measurements:
                for step in experiment.steps(part):
                    kl, accuracy, trace = near.get((arm, step), (1.0, 0.5, 100.0))
                    kl += 0.001 * one.block + 0.05 * (name == OUTSIDE and step == 30)
                    accuracy += 0.1 * one.block + OF_ADVERSARY[one.block] * (arm == "adversary")
                    values = {"kl": kl, "trace": trace, "minimal-trace": minimal, "one-hot": 0.3}
                    values |= {"raw-lookup": 0.4, "standardized-lookup": 0.45, "log-lookup": 0.5}
                    if "loss" in part.measures:
                        checkpoints.setdefault((name, step), {})["entropy"] = measured(1.5)
                    at = checkpoints.setdefault((name, step), {})
                    for measure in part.measures:
                        key = "kl" if measure == "loss" else measure
                        value = values.get(key, values.get(key.partition("-prefix")[0], accuracy))
                        at[key] = measured(value, unit="accuracy" if "-prefix-" in key else "nats per predicted token")
    return Known(scale, checkpoints, None)


@pytest.fixture(scope="module")
def known():
    return known_results()


@pytest.fixture(scope="module")
def data(known):
    (data,) = by_dataset(known)
    return data


@pytest.fixture(scope="module")
def figures(known):
    return {each.name: each for each in page.parts(known).figures}


def test_the_band_is_as_wide_as_the_losses_of_the_papers_figure_1():
    low, high = (float(loss) - float(published.ENTROPY) for loss in published.LOSSES)
    for dataset in EVENING.datasets:
        assert dataset.band == pytest.approx((high - low) / (high + low))


def test_the_band_has_the_models_whose_kl_is_near_the_controls(known, data):
    assert data.control == Model("d32-40-cooldown", 20)
    assert data.band == pytest.approx((0.051 * (1 - BAND), 0.051 * (1 + BAND)))  # 0.051 on average over the grammars
    assert set(data.models) == {(name.split("-", 4)[4], step) for name, step in known.checkpoints if step}
    assert set(data.in_band) == set(NEAR) - {("sgd-exact", 20)}  # the helper's mean is 0.041 + 0.05 / 6
    of_each = {one.prefix: len(found) for one, found in zip(data.units, data.near(), strict=True)}
    assert of_each == dict.fromkeys(of_each, 5) | {"pcfg-301-seed-1": 4}
    assert [len(found) for found in data.near("d16")] == [1] * 6
    assert data.extremes("kl") == (Model("d32-60-cooldown", 20), Model("d16-40-cooldown-40", 40))
    assert data.extremes("probe-prefix-4") == (Model("adversary", 30), Model("helper", 30))


def test_correlations_in_the_band_are_within_grammars_and_seeds(data):
    table = _same_loss(data)
    rows = dict(table.rows)
    kinds = [(sizes, kind) for sizes in ("all sizes", "d32") for kind in ("Spearman", "Pearson")]
    assert list(rows) == [(*which, name) for which in kinds for name in ("kl", "trace")]
    columns = {"kl": [], "trace": [], "accuracy": []}
    for one in data.dataset.units:
        own = [
            (
                math.log(kl + 0.001 * one.block),
                math.log(trace),
                accuracy + OF_ADVERSARY[one.block] * (arm == "adversary"),
            )
            for (arm, _), (kl, accuracy, trace) in NEAR.items()
            if arm not in ("sgd-exact", "d16-40-cooldown-40") and one.run(arm) != OUTSIDE
        ]
        for column, values in zip(columns.values(), zip(*own, strict=True), strict=True):
            column += [value - sum(values) / len(values) for value in values]
    for name in ("kl", "trace"):
        for kind, by_scipy in (("Spearman", stats.spearmanr), ("Pearson", stats.pearsonr)):
            found = rows["d32", kind, name]["probe-prefix-4"]
            # deviations that are equal but for rounding have one rank here; in the table, rounding decides
            expected = by_scipy(np.round(columns[name], 9), np.round(columns["accuracy"], 9)).statistic
            assert found.value == pytest.approx(expected, abs=0.01)
            assert (found.num_predictions, found.samples) == (23, 3)
            assert 0 < found.stderr < 1
    # the minimal trace is the same everywhere
    assert "5 of all sizes" in table.caption
    assert "4 to 5 of all sizes and 3 to 4 of d32 for each language and seed" in table.caption
    assert "Not defined, and left out: Spearman's with minimal-trace of all sizes" in table.caption


def test_the_ranking_is_by_the_correlation_given_the_kl_within_grammars_and_seeds(data):
    table = _ranking(data, "pearson")
    columns = {"kl": [], "trace": [], "probe-prefix-4": []}
    for one in data.dataset.units:
        ends = [data.at(one, run) for run in compared(data.dataset)]
        for key, column in columns.items():
            own = np.array([end[key].value for end in ends])
            own = own if key.startswith("probe") else np.log(own)
            column += (own - own.mean()).tolist()
    kl = np.array(columns["kl"])
    of_trace, of_accuracy = (
        np.array(columns[key]) - kl * (kl @ columns[key]) / (kl @ kl) for key in ("trace", "probe-prefix-4")
    )
    ((labels, row),) = table.rows  # the minimal trace is the same everywhere
    assert labels == ("trace",)
    found = row["probe-prefix-4"]
    assert found.value == pytest.approx(stats.pearsonr(of_trace, of_accuracy).statistic)
    assert found.num_predictions == len(compared(data.dataset)) * 6


def test_no_table_of_correlations_where_none_is_defined():
    alone = known_results({("d32-40-cooldown", 20): NEAR["d32-40-cooldown", 20]})
    assert "pcfg_same_loss" not in {table.name for table in tables(alone)}


def test_figure_1_shows_the_band_magnified(data, figures):
    assert list(figures) == [f"pcfg-{name}" for name in ("longer", "same-loss", "sizes", "expanded", "sgd")]
    first = figures["pcfg-same-loss"]
    spec = first.chart
    assert len(spec["concat"]) == 4  # task B: all models, then the KL and both traces in the band
    everything, near, *_ = ([row["run"] for row in spec["datasets"][part["data"]["name"]]] for part in points(spec))
    assert len(everything) == len(data.models)
    assert sorted(near) == sorted(arm for arm, _ in NEAR if arm != "sgd-exact")
    adversary = next(row for row in drawn(first, 0) if (row["run"], row["step"]) == ("adversary", 30))
    assert adversary["probe_prefix_4"] == pytest.approx(65.0)
    # 8, 7 and 6 points on the three grammars, which differ by 10; Student's t of two degrees of freedom
    of_difference = 4.302653 / math.sqrt(3)
    assert adversary["probe_prefix_4_high"] == pytest.approx(65.0 + of_difference)
    assert adversary["kl_high"] == pytest.approx(adversary["kl"])
    assert page._baselines(data)["probe-prefix-4"]["Look-up table, raw"] == pytest.approx(0.4)
    assert "5 of 32 models whose KL is within 38% of the KL of the control, d32-40-cooldown." in first.caption
    assert "mean KL ranges from 0.033 to 0.07 nats" in first.caption
    assert "7.00 ± 0.58 points on prefix-4 (from adversary to helper)" in first.caption


@pytest.mark.parametrize(
    ("kls", "step"),
    [
        ((0.5, 0.1, 0.095, 0.091), 2.0),  # 9 % from step 2 on
        ((0.5, 0.1, 0.095, 0.089), 3.0),  # 11 % from step 2 on, 6 % from step 3
        ((0.5, 0.1, 0.2, 0.15), 2.0),  # it rises, so it does not fall
        ((0.5, 0.4, 0.3, 0.2), None),  # after the last step nothing is measured
    ],
)
def test_a_loss_is_saturated_once_the_kl_falls_by_less_than_a_tenth(kls, step):
    rows = pl.DataFrame({"step": [4.0, 2.0, 3.0, 1.0], "kl": [kls[3], kls[1], kls[2], kls[0]]})
    assert page._saturated(rows, "step") == step
    assert page._saturated(rows.drop("kl"), "step") is None


def test_a_saturated_loss_is_marked_in_every_panel():
    results = known_results({})
    for one in results.scale.datasets[0].units:
        for step, kl in ((20, 0.2), (40, 0.1), (60, 0.095)):
            results.at(one.run(f"d32-{step}-cooldown"))["kl"] = measured(kl)
    longer = page.parts(results).figures[0]
    for panel in longer.chart["concat"]:
        mark = panel["layer"][0]
        assert mark["mark"]["strokeDash"]
        assert longer.chart["datasets"][mark["data"]["name"]] == [{"step": 40}]
    assert "The dashed line marks the first step after which the KL falls by less than 10%." in longer.caption
    assert "the entropy, 1.5 nats per token" in longer.caption


def test_longer_training_is_drawn_as_differences_at_one_loss():
    """After 60 steps, the KL is half way, in the logarithm, between two cooldowns of the control after 40."""
    results = known_results({})
    known = {  # KL, accuracy, trace
        **{"d32-40-cooldown-10": (0.4, 0.5, 40.0), "d32-40-cooldown": (0.2, 0.6, 30.0)},
        **{"d32-40-cooldown-40": (0.1, 0.7, 20.0), "d32-60-cooldown": (0.2 / math.sqrt(2), 0.69, 12.5)},
    }
    for one in results.scale.datasets[0].units:
        for arm, (kl, accuracy, trace) in known.items():
            at, more = results.at(one.run(arm)), 0.01 * one.block * (arm == "d32-60-cooldown")
            at |= {"kl": measured(kl), "probe-prefix-4": measured(accuracy + more, unit="accuracy")}
            at |= {"trace": measured(trace * (1 + 10 * more))}
    figure = page.parts(results).figures[0]
    assert figure.name == "pcfg-longer"
    (panel,) = [
        place
        for place, panel in enumerate(figure.chart["concat"])
        if panel["layer"][-1]["encoding"]["y"]["title"] == "Probe accuracy, prefix-4, minus control (points)"
    ]
    rows = {row["step"]: row for row in drawn(figure, panel)}
    assert (rows[40]["probe_prefix_4"], rows[40]["trace"]) == (0, 1)  # the control itself
    assert 20 not in rows  # its KL is beyond the control's
    assert rows[60]["probe_prefix_4"] == pytest.approx(4 + 1)  # 4, 5 and 6 points on the three grammars
    half = 4.302653 / math.sqrt(3)  # Student's t of two degrees of freedom
    assert rows[60]["probe_prefix_4_high"] == pytest.approx(5 + half)
    factors = [12.5 * (1 + 0.1 * grammar) / 25 for grammar in range(3)]
    assert rows[60]["trace"] == pytest.approx(stats.gmean(factors))
    reach = 4.302653 * stats.sem(np.log(factors))
    assert rows[60]["trace_low"] == pytest.approx(stats.gmean(factors) * math.exp(-reach))
    # both are drawn with a line at no difference
    references = {0.0, 1.0}
    lines = [figure.chart["datasets"][one["data"]["name"]] for one in figure.chart["concat"][panel]["layer"][:2]]
    assert {value for line in lines for row in line for value in row.values()} & references


def test_an_arm_that_continues_the_control_is_compared_after_all_of_its_steps():
    """Also where it has a cooldown after as many of its steps as the control has had: at the scale `paper`, 15,000."""
    whole = STUDY.scale("paper").datasets[0]
    dataset = dataclasses.replace(whole, languages=whole.languages[:1])
    results = drawn_results(Reproduction(description="known", datasets=(dataset,)))
    (data,) = by_dataset(results)
    (one,) = data.units
    assert (one.run("sgd-sampled-15000-cooldown"), 2_000) in results.checkpoints
    assert data.end(one, "sgd-sampled", dataset.start) is results.at(one.run("sgd-sampled"), 32_000)
    assert data.end(one, "adversary", dataset.start) is results.at(one.run("adversary-15000-cooldown"))
    # longer training is that of the model that the figure beside the verdict follows
    (longer,) = (each for each in comparisons(dataset) if each.kind == "longer")
    pair = longer.pair(data, one)
    assert pair is None or pair[1]["kl"].value == results.at(one.run("d512-30000-cooldown"))["kl"].value
    assert "checkpoints of d512 after 15,000 steps" in longer.where


def test_a_factor_of_one_pair_has_the_error_over_its_examples():
    pair = checkpoint(0.1, 20.0, [1.0, -1.0]), checkpoint(0.1, 10.0, [3.0, -3.0])
    found = factor([pair], "trace", [])
    assert (found.value, found.unit) == (0.5, "times")
    # of second - 0.5 first the examples add 2.5 and -2.5, so its error is 2.5
    assert found.stderr == pytest.approx(2.5 / 20)


def test_the_page_of_the_first_language_that_is_done_speaks_of_it_alone():
    whole = known_results(seeds=1)
    figures = {}
    for complete in ((1,), (0, 2)):
        results = Known(whole.scale, whole.checkpoints, None, complete)
        figures[len(complete)] = page.parts(results).figures[0]
        assert len(by_dataset(results)[0].dataset.languages) == len(complete)
    assert "averaged over" not in figures[1].caption
    assert "of one run each" in figures[1].caption
    assert "averaged over languages" in figures[2].caption


def bars_beyond_their_frame(figure):
    """The ends of bars, bands and lines that lie beyond the domain of their axis: figure, field, value, domain."""
    found = []
    for panel in figure.chart["concat"]:
        for layer in panel["layer"]:
            if layer["mark"].get("clip"):  # beside a panel that shows the whole bar
                continue
            rows = figure.chart["datasets"][layer["data"]["name"]]
            for name, channel in layer["encoding"].items():
                if name in ("x", "y") and "scale" in channel:
                    low, high = channel["scale"]["domain"]
                    for field in {channel["field"], layer["encoding"].get(f"{name}2", channel)["field"]}:
                        values = [row[field] for row in rows if row[field] is not None]
                        found += [(figure.name, field, each) for each in values if not low <= each <= high]
    return found


def test_tables_pair_models_with_the_control_and_have_the_rates_of_each_task():
    results = known_results()
    for at in results.checkpoints.values():
        for key in [key for key in at if key.startswith("probe-")]:
            at[key] = dataclasses.replace(at[key], details={"majority_rate": 0.25, "bayes_accuracy": 0.95})
    made = {each.name: each for each in tables(results)}
    rows = {label[0]: row for label, row in made["pcfg_algorithms"].rows}
    assert next(iter(rows)) == "AdamW (d32), 40 steps"  # the control
    first, adversary = rows["AdamW (d32), 40 steps"], rows["Adversary"]
    assert first["probe-prefix-4"].value == pytest.approx(0.7)
    assert (first["probe-prefix-4 minus control"].value, first["probe-prefix-4 minus control"].stderr) == (0, 0)
    # -6, -5 and -4 points on the three grammars, whose own accuracies differ by 10 points
    assert adversary["probe-prefix-4 minus control"].value == pytest.approx(-5.0)
    assert adversary["probe-prefix-4 minus control"].stderr == pytest.approx(1 / math.sqrt(3))
    assert adversary["probe-prefix-4"].stderr > 0.05
    raw = rows["Look-up table, raw"]
    assert (raw["kl"].value, raw["probe-prefix-4"].value) == (0, pytest.approx(0.4))
    assert raw["kl minus control"].value == pytest.approx(-0.051)
    assert raw["probe-prefix-4 minus control"].value == pytest.approx(-30.0)
    assert [label for label, _ in made["pcfg_tasks"].rows] == [
        *(("A", "probe-prefix-8"), ("B", "probe-prefix-4"), ("C", "probe-prefix-2"))
    ]
    values = {key: each.value for key, each in made["pcfg_tasks"].rows[1][1].items()}
    assert values == pytest.approx(
        {
            **{"majority": 0.25, "Bayes": 0.95, "Look-up table, raw": 0.4, "Look-up table, standardized": 0.45},
            **{"Look-up table, logarithms": 0.5, "One-hot tokens": 0.3, "control": 0.7},
        }
    )


def test_sizes_are_shown_against_the_loss_after_cooldowns_of_every_length(figures):
    figure = figures["pcfg-expanded"]
    spec, rows = figure.chart, drawn(figure, 0)
    assert {(row["run"], row["step"]) for row in rows} == {
        (size, step) for size in ("d16", "d32") for step in (10, 20, 40)
    }
    axes = [part["layer"][-1]["encoding"] for part in spec["concat"]]
    assert {axis["x"]["field"] for axis in axes} == {"kl"}
    assert [axis["y"]["field"] for axis in axes] == ["trace_in_d32_paper", "trace_in_d32_exact", "minimal_trace_in_d32"]
    assert "expanded into d32" in figure.title
    probes = [part["layer"][-1]["encoding"]["y"]["title"] for part in figures["pcfg-sizes"].chart["concat"]]
    assert probes == [f"Projected probe, {task} (%)" for task in "ABC"]


# --- models of about one loss in the course of their training --------------------------------------------------------

LOSSES = {  # by arm, at steps 20 and 40
    "d16": (4.0, 3.0),
    "unregularized": (3.5, 2.0),  # the last one is out of the control's reach
    "sam": (5.0, 2.5),
}


def known_text(losses=LOSSES):
    """Results on text with these losses; accuracies rise by 0.1 from step 20 to 40, and seed 1 has 0.02 more."""
    dataset = next(each for each in SMOKE.datasets if each.name == "text")
    scale = Reproduction(description="known", datasets=(dataset,))
    checkpoints = {}
    for one in dataset.units:
        for arm, values in losses.items():
            for step, loss in zip(dataset.watched, values, strict=True):
                traces = {"loss": loss, "trace": 20.0 * loss, "minimal-trace": 10.0}
                accuracy = (
                    0.5
                    + 0.1 * (step == 40)
                    + 0.05 * (arm == "unregularized")
                    + 0.02 * (one.seed % 100) * (arm == "sam")
                )
                checkpoints[one.run(arm), step] = {
                    key: measured(traces.get(key, accuracy), unit="nats" if key in traces else "accuracy")
                    for key in dataset.measures
                }
    return Known(scale, checkpoints, None)


def test_without_a_cooldown_the_last_checkpoint_that_the_other_encloses_is_compared():
    made = contrasts(known_text())
    (unregularized,), (sam,) = made["text unregularized"], made["text sam"]
    assert unregularized.names == ("AdamW", "Without dropout and weight decay")
    assert unregularized.clusters_are == "seeds"
    for control, treated in unregularized.pairs:  # step 20 of the one, at 3.5, between 4 and 3 of the other
        assert control["loss"].value == treated["loss"].value == 3.5
        fraction = math.log(3.5 / 4) / math.log(3 / 4)
        assert treated["finetune-sentence-source"].value == pytest.approx(0.55)
        assert control["finetune-sentence-source"].value == pytest.approx(0.5 + 0.1 * fraction)
    assert sam.names == ("Without dropout and weight decay", "SAM, without dropout and weight decay")
    kind = change(sam.pairs, "finetune-sentence-source", clusters=sam.clusters)
    fraction = math.log(2.5 / 3.5) / math.log(2 / 3.5)
    assert kind.value == pytest.approx(100 * (0.6 + 0.01 - (0.55 + 0.1 * fraction)))
    assert kind.stderr == pytest.approx(1.0)  # of two seeds, 2 points apart
    assert made["pcfg sgd"] == []


def test_what_no_checkpoint_of_the_other_encloses_is_not_tested():
    found = known_text({**LOSSES, "unregularized": (2.5, 2.0)})
    results = judge_claims(STUDY.claims, found, loss_margin=STUDY.loss_margin, has_verdicts=False)
    (answered,) = next(each for each in results if each.claim.id == "text-unregularized-transfer").answers
    assert answered.verdict is Verdict.NOT_TESTED
    assert "vs. AdamW: only 0 of 2 pairs, from 0 seeds, could be matched in loss" in answered.explanation
    (answered,) = next(each for each in results if each.claim.id == "sgd-transfer").answers  # of a dataset not run
    assert answered.explanation == "The study has no pair of models with this measurement."


@pytest.mark.parametrize(
    ("seeds", "enclosed", "is_tested"),
    [
        (2, (0, 2, 4), True),
        (2, (0, 1, 2, 3), False),  # most of the models, but two grammars
        (3, (0, 3, 6), False),  # all grammars, but a third of the models
    ],
)
def test_claims_need_half_of_the_models_and_three_languages(seeds, enclosed, is_tested):
    """Some seeds of three grammars; the arm of some has a KL within the control's cooldowns, the others' is 9."""
    results = known_results({}, seeds=seeds)
    for place, one in enumerate(results.scale.datasets[0].units):
        kls = {"d32-40-cooldown-10": 0.3, "d32-40-cooldown": 0.2, "d32-40-cooldown-40": 0.1}
        for arm, kl in {**kls, "adversary": 0.15 if place in enclosed else 9.0}.items():
            results.at(one.run(arm))["kl"] = measured(kl)
    (made,) = contrasts(results)["pcfg adversary"]
    claim = next(each for each in STUDY.claims if each.id == "adversary-transfer")
    (answered,) = studies_answer(claim, made, {"prefix-4": "probe-prefix-4"})
    assert (answered.difference is not None) == is_tested
    if not is_tested:
        assert answered.verdict is Verdict.NOT_TESTED
        which = f"{len(enclosed)} of {3 * seeds} pairs, from {len({place // seeds for place in enclosed})} grammars"
        assert f"only {which}, could be matched" in answered.explanation


def test_the_error_of_the_interpolation_is_that_of_a_cooldown_between_two_others():
    """The middle cooldown has the KL half way in the logarithm, and a trace that is 2 above the straight line."""
    near = {
        ("d32-40-cooldown-10", 10): (0.4, 0.5, 40.0),
        ("d32-40-cooldown", 20): (0.2, 0.6, 32.0),
        ("d32-40-cooldown-40", 40): (0.1, 0.7, 20.0),
    }
    results = known_results(near)
    for one in results.scale.datasets[0].units:  # the same KL on all grammars
        for (arm, step), (kl, *_) in near.items():
            results.at(one.run(arm), step)["kl"] = measured(kl)
    (data,) = by_dataset(results)
    ((labels, row),) = [each for each in _interpolation(data).rows if each[0][0] == "d32"]
    assert labels == ("d32", 20)
    assert row["trace"].value == pytest.approx(2.0)
    assert row["probe-prefix-4"].value == pytest.approx(0.0)
    assert {"minimal-trace", "trace-in-d32-paper", "trace-in-d32-exact"} < row.keys()  # all that claims judge


def test_captions_say_what_holds_at_their_scale():
    """No baseline is drawn of hidden Markov models, and the gap is compared with the paper's as it is."""
    captions = {}
    for name in ("smoke", "paper"):
        few = [dataclasses.replace(each, languages=each.languages[:2], seeds=1) for each in STUDY.scale(name).datasets]
        results = drawn_results(dataclasses.replace(STUDY.scale(name), datasets=tuple(few)))
        for data in by_dataset(results):
            if data.dataset.name == "hmm":
                assert "Horizontal lines" not in page._caption(data)
            if data.dataset.name == "pcfg":
                captions[name] = page._caption(data)
                assert "Horizontal lines" in captions[name]
    assert "In the paper, on a larger grammar" in captions["smoke"]
    assert "In the paper, losses are 3.204 to 3.208 nats" in captions["paper"]
    for loss, is_larger in ((0.14, True), (0.12, False)):
        results = known_text()
        for one in results.scale.datasets[0].units:
            results.at(one.run("unregularized"))["generalization-gap"] = measured(loss, unit="nats")
        (data,) = by_dataset(results)
        assert ("It is larger here" in published._flatness(data).caption) == is_larger


def test_larger_models_minus_smaller_ones_by_expansion():
    """The smaller model's KL is half way, in the logarithm, between two cooldowns of the larger one."""
    inside = {  # arm and step: the KL; inside the largest, the trace by the paper's and by the exact expansion
        ("d16-40-cooldown-40", 40): (0.2, 90.0, 20.0),
        ("d32-40-cooldown", 20): (0.4, 50.0, 34.0),
        ("d32-40-cooldown-40", 40): (0.1, 40.0, 30.0),
    }
    results = known_results()
    for one in results.scale.datasets[0].units:
        for (arm, step), (kl, papers, exact) in inside.items():
            more = 3.0 * one.block  # of grammar 1 and 2, which the larger model has less of
            sign = -1 if arm.startswith("d32") else 1
            at = results.at(one.run(arm), step)
            at |= {"kl": measured(kl), "trace-in-d32-paper": measured(papers + sign * more)}
            at["trace-in-d32-exact"] = measured(exact)
    (data,) = by_dataset(results)
    ((labels, row),) = _expansions(data).rows
    assert labels == ("d16", "d32")
    assert list(row) == ["trace-in-d32-paper", "trace-in-d32-exact", "minimal-trace-in-d32"]
    papers = [45.0 - 90.0 - 6.0 * grammar for grammar in range(3)]
    assert row["trace-in-d32-paper"].value == pytest.approx(np.mean(papers))
    assert row["trace-in-d32-paper"].stderr == pytest.approx(stats.sem(papers))
    assert row["trace-in-d32-exact"].value == pytest.approx(12.0)
    assert row["trace-in-d32-exact"].stderr == pytest.approx(0.0)


def drawn_results(scale):
    """Results of a scale with numbers that are drawn: losses that fall with the steps, accuracies, traces."""
    draw, checkpoints = np.random.default_rng(0), {}
    for name, experiment in scale.experiments.items():
        known = "text" not in name and "web" not in name
        for part in experiment.measurements:
            for step in experiment.steps(part):
                at = checkpoints.setdefault((name, step), {})
                for measure in part.measures:
                    if measure == "loss":
                        loss = 0.1 * draw.uniform(0.9, 1.1) * (1 - 0.9 * step / experiment.last_step)
                        kl = {"kl": measured(loss), "entropy": measured(3.0)} if known else {}
                        at |= {**kl, "loss": measured(3 * known + loss)}
                    elif measure == "features":
                        gram = np.cov(draw.normal(size=(8, 20)))[np.triu_indices(8)]
                        features = measured(1.0)
                        at["effective-dimension"] = dataclasses.replace(features, examples={"gram": gram})
                    elif "trace" in measure or not any(
                        word in measure
                        for word in ("-prefix-", "-state-", "-task-", "probe", "projected", "finetune", "-root")
                    ):
                        at[measure] = measured(draw.uniform(5, 50), draw.normal(size=4))
                    else:
                        at[measure] = measured(draw.uniform(0.4, 0.9), draw.normal(size=4) / 100, unit="accuracy")
    return Known(scale, checkpoints, None)


@pytest.mark.parametrize("name", ["laptop", "evening", "smoke", "workstation", "paper"])  # authors: those of paper
def test_results_of_every_scale_make_claims_tables_and_figures(name):
    whole = STUDY.scale(name)
    few = [dataclasses.replace(each, languages=each.languages[:3], seeds=min(each.seeds, 2)) for each in whole.datasets]
    results = drawn_results(dataclasses.replace(whole, datasets=tuple(few)))
    claims = judge_claims(STUDY.claims, results, loss_margin=STUDY.loss_margin, has_verdicts=STUDY.has_verdicts(name))
    tested = {each.claim.id for each in claims if any(one.difference is not None for one in each.answers)}
    assert tested >= ({"noise-transfer", "lookup-transfer"} if whole.datasets[0].cooldowns else {"adversary-transfer"})
    assert {each.claim.id for each in claims} > set(page.PAPER_CLAIMS)
    assert all(each.answers for each in claims)
    if name == "evening":  # at the others no verdict is given
        assert len(answer(claims, results)) == 3
    parts, made = page.parts(results), tables(results)
    assert [bar for figure in parts.figures for bar in bars_beyond_their_frame(figure)] == []
    assert {each.name for each in made} >= {f"{each.name}_sizes" for each in few}
    assert list(parts.paper_claims) == list(page.PAPER_CLAIMS)
    captions = {re.sub("[-_]", " ", each.name, count=1): each.caption for each in (*parts.figures, *made)}
    for papers, ours in LISTED.items():
        number = " ".join(papers.split()[:2])
        for one in [] if papers.startswith("claim") else ours.replace("`", "").split(", "):
            assert one in captions, f"at scale {name}, nothing shows the paper's {papers}: {one} is missing"
            assert re.search(rf"Corresponds to the paper's [^.]*{number}[,.]", captions[one]), (papers, one)


def answered(case, verdict, value):
    about = {"samples": 6, "num_predictions": 6, "method": "known", "unit": "percentage points"}
    difference = Estimate(value=value, stderr=0.5, **about)
    return Answer(case=case, verdict=verdict, difference=difference, numbers={}, explanation="")


def test_the_first_table_has_a_line_for_each_case_under_its_verdict():
    claim = next(each for each in STUDY.claims if each.id == "adversary-transfer")
    verdicts = {"A": (Verdict.NOT_SHOWN, -1.0), "B": (Verdict.SHOWN, -4.0), "C": (Verdict.SHOWN, -3.0)}
    cases = tuple(answered(case, *verdict) for case, verdict in verdicts.items())
    (section,) = _beside_the_paper([ClaimResult(claim=claim, answers=cases)], {claim.id: ""})
    (cell,) = re.findall(r"<b>.*</td>", section.body.replace("\N{NO-BREAK SPACE}", " "))
    assert cell.startswith(
        "<b>shown</b><br>B -4.00 ± 0.50 points (95 % -5.29 to -2.71)<br>C -3.00 ± 0.50 points (95 % -4.29 to -1.71)"
        "<br><b>not shown</b><br>A -1.00 ± 0.50 points (95 % -2.29 to 0.29)"
    )


def test_the_documentation_lists_what_shows_each_of_the_papers_figures_tables_and_claims():
    ours = {name for each in vars(SHOWN["pcfg"]) for of in SHOWN.values() for name in getattr(of, each)}
    assert {" ".join(papers.split()[:2]) for papers in LISTED if not papers.startswith("claim")} == {*ours, *SGD_SHOWN}
    claimed = {f"claim `{claim}`": "the page's first table" for claim in page.PAPER_CLAIMS}
    assert {papers: ours for papers, ours in LISTED.items() if papers.startswith("claim")} == claimed


def test_the_page_lists_what_most_checkpoints_of_a_language_have():
    results = drawn_results(SMOKE)
    probes = {key for dataset in SMOKE.datasets for key in dataset.tasks.values()}
    assert set(results.columns) == {"kl", "loss", "trace", "minimal-trace", "generalization-gap", *probes}
    text = results.table().filter(pl.col("run").str.starts_with("text"))
    assert text["kl"].null_count() == text.height
    assert text["loss"].null_count() == 0


def drawn(figure, panel):
    """The rows of the points of a panel."""
    return figure.chart["datasets"][points(figure.chart)[panel]["data"]["name"]]


def points(spec):
    """The layer of points of each panel."""
    return [{"data": panel.get("data") or panel["layer"][-1]["data"]} for panel in spec["concat"]]


# --- what the paper reports ------------------------------------------------------------------------------------------


def test_the_papers_values_are_those_that_the_claims_quote():
    quoted = {claim.id: claim.paper for claim in STUDY.claims}
    rows = published.BY_ALGORITHM

    def against(row, first, second, unit=" %"):
        return f"{rows[row][first]} against {rows[row][second]}{unit}"

    for task in ("A", "B"):
        row = f"task {task} (%)"
        assert f"task {task} {against(row, 'adversary', 'AdamW')}" in quoted["adversary-transfer"]
        assert f"task {task} {rows[row]['AdamW']} % against {rows[row]['look-up table']} %" in quoted["lookup-transfer"]
    assert f"trace {against('trace', 'adversary', 'AdamW', '')}" in quoted["adversary-sharper"]
    for claim, what, unit in (("larger-transfer", "probe accuracy (%)", " %"), ("larger-flatter", "trace", "")):
        assert f"{what.removesuffix(' (%)')} from {' to '.join(published.BY_SIZE[what])}{unit}" in quoted[claim]
    assert all(published.PARAMETERS in quoted[name] for name in ("adversary-transfer", "lookup-transfer"))
    losses = rows["loss (nats)"]
    assert losses["look-up table"] == published.ENTROPY
    low, high = map(float, published.LOSSES)
    assert low <= float(losses["AdamW"]) <= float(losses["adversary"]) <= high


# --- the answer ------------------------------------------------------------------------------------------------------


def claims(**verdicts):
    """The result of every claim, by its id: verdict and difference; else not shown."""
    given = {name.replace("_", "-"): verdict for name, verdict in verdicts.items()}
    return [
        ClaimResult(claim=claim, answers=(answered("prefix-4", *given.get(claim.id, (Verdict.NOT_SHOWN, 0.1))),))
        for claim in STUDY.claims
    ]


def test_the_answer_follows_the_verdicts(known):
    open_ones = [card.value for card in answer(claims(), known)]
    assert open_ones == ["Not shown: +0.10 ± 0.50 points", "Not shown", "Not shown: +0.10 ± 0.50 points"]
    judged = claims(
        sgd_flatter=(Verdict.SHOWN, -20.0),
        sgd_transfer=(Verdict.CONTRADICTED, -2.0),
        helper_flatter=(Verdict.SHOWN, -3.0),
        helper_transfer=(Verdict.SHOWN, 4.0),
        adversary_sharper=(Verdict.SHOWN, 5.0),
        adversary_transfer=(Verdict.SHOWN, -6.0),
        longer_transfer=(Verdict.CONTRADICTED, -1.0),
    )
    differ, agreement, longer = answer(judged, known)
    assert (differ.value, differ.tone) == ("Yes: -6.00 ± 0.50 points", "good")
    # helper and adversary agree with the paper; SGD's flatter model transfers worse
    assert (agreement.value, agreement.tone) == ("In 2 of 3 comparisons", "unclear")
    assert (longer.value, longer.tone) == ("No, the opposite: -1.00 ± 0.50 points", "bad")
