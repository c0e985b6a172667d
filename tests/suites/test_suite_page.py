"""The page of a suite: its answers, its charts and their data, and its size."""

import json
import re

import polars as pl
import pytest

from isoloss.cli.suite import _sentences
from isoloss.statistics.association import Association
from isoloss.suites.page import suite_page
from isoloss.suites.table import SuiteTable
from pages import unpacked
from synthetic_suite import NO_TRACE, answers, suite


@pytest.fixture(scope="module")
def table():
    return suite(seeds=8, steps=12, measures=1)


@pytest.fixture(scope="module")
def document(table):
    return suite_page(table, answers(table), command="isoloss suite 'lab/m-{seed}@{step}' --output m")


def specs(document):
    return [json.loads(text) for text in re.findall(r'class="spec"[^>]*>(.*?)</script>', document)]


def datasets(document):
    return json.loads(re.search(r'id="datasets">(.*?)</script>', document)[1])


def test_all_charts_share_one_list_of_rows_with_every_checkpoint_once(document, table):
    ((name, columns),) = datasets(document).items()
    assert [f"lab/{each}" for each in columns["checkpoint"]] == table.wide()["checkpoint"].to_list()
    drawn = specs(document)
    assert {tuple(each["datasets"]) for each in drawn} == {(name,)}
    assert {layer["data"]["name"] for each in drawn for panel in each["concat"] for layer in panel["layer"]} == {name}
    # at the same loss, along the steps, all pairs, the loss
    assert [len(each["concat"]) for each in drawn] == [5, 5, 4, 4]
    for each in drawn:
        views = {view for param in each["params"] for view in param.get("views", ())}
        assert {"picked_checkpoint", "picked_area", "marked"} <= {param["name"] for param in each["params"]}
        assert views == {panel["layer"][-1]["name"] for panel in each["concat"]}


def test_no_bar_goes_beyond_its_axis(document):
    (columns,) = datasets(document).values()
    for panel in (panel for each in specs(document) for panel in each["concat"]):
        for channel in ("x", "y"):
            axis = panel["layer"][-1]["encoding"][channel]
            low, high = axis["scale"]["domain"]
            ends = [axis["field"], *(f"{axis['field']}_{end}" for end in ("low", "high"))]
            values = [value for end in ends for value in columns.get(end, []) if value is not None]
            assert low <= min(values) + 1e-6 * abs(low)
            assert max(values) <= high + 1e-6 * abs(high)
            assert axis["title"]


def test_what_is_shown_comes_first_and_every_pair_is_in_the_matrix(document, table):
    cards = re.findall(r'<li class="card (\w+)"><span class="label">([^<]*)</span>\s*<strong>(.*?)</strong>', document)
    (tone, label, value), (last, not_shown, rest) = cards
    assert (tone, label, last, not_shown) == ("good", "int4-rise", "unclear", "Not shown")
    assert "minimal-trace predicts it" in value
    assert rest.endswith("No correlation shown in 3 of 4 pairs of measure and outcome")
    found = {(each.measure, each.outcome): each for each in answers(table)}
    assert [key for key, each in found.items() if each.shown] == [("minimal-trace", "int4-rise")]
    assert "<p>minimal-trace: " in document  # in words
    for each in found.values():
        assert "{} ({} to {})".format(*each.pearson.texts) in document


def test_empty_cells_copies_and_jumps_are_named(document):
    assert f"minimal-trace of m-0@2: {NO_TRACE}" in document
    assert "m-2@3 and m-2@4 have identical weights" in document
    assert re.findall(r"Jump: loss (\S+) from .* in (\S+) to .* in (\S+)\.</p>", document) == [
        ("rises", "m-1@7", "m-1@8"),
        ("falls", "m-1@8", "m-1@9"),
    ]


def test_a_short_course_has_no_jumps(table):
    few = SuiteTable(table.frame.filter(pl.col("step") > 6), table.labels, table.config)
    assert "Jump: loss" in suite_page(few, ())
    few = SuiteTable(table.frame.filter(pl.col("step").is_between(6, 9)), table.labels, table.config)
    assert "Jump: loss" not in suite_page(few, ())


def test_a_pair_that_is_not_known_says_why(table):
    frame = table.frame.filter(pl.col("seed") < 2)
    few = SuiteTable(frame, table.labels, table.config)
    known, *unknown = answers(table)[0], *answers(few)[1:]
    document = suite_page(few, [known, *unknown])
    assert document.count(f">{unknown[0].problem}</small>") == 3
    assert document.count('class="card good"') == 1


def test_a_suite_of_which_nothing_could_be_measured_has_a_page_that_says_why(table):
    frame = table.frame.with_columns(
        *(pl.lit(None, pl.Float64).alias(name) for name in ("value", "stderr", "low", "high")),
        pl.lit("it could not be loaded").alias("problem"),
    )
    document = suite_page(SuiteTable(frame, table.labels, table.config), ())
    assert "it could not be loaded" in document
    assert 'class="chart"' not in document


def test_the_table_has_all_digits_and_filters_without_spaces(document, table):
    body = unpacked(document, "rows")
    assert body.count("<tr>") == 96
    assert f'data-sort="{table.frame["value"][0]}"' in body
    about = json.loads(re.search(r'id="about">(.*?)</script>', document)[1])
    assert about["id"] == ["checkpoint"]
    assert about["choices"] == ["seed", "step"]
    assert about["fields"]["along"] == ["step", 1]
    assert ["probe-a", 100] in about["fields"].values()


def test_a_thousand_checkpoints_with_twelve_measures_are_below_5_mb(table):
    large = suite(seeds=40, steps=25, measures=9)
    assert len(large.frame) == 1000 * 13
    assert len(suite_page(large, answers(table)).encode()) < 5e6 / 2


def test_pairs_that_are_not_known_are_told_once_for_each_reason():
    about = {"given": ("loss",), "over": ("seeds",)}
    known = next(each.pearson for each in answers(suite(seeds=4, steps=5, measures=1)) if each.pearson)
    outcomes = [f"outcome {number}" for number in range(12)]
    unknown = [Association(measure="trace", outcome=each, problem="too few", **about) for each in outcomes]
    others = [Association(measure="rank", outcome=each, pearson=known, p_adjusted=0.5, **about) for each in outcomes]
    assert list(_sentences(unknown)) == [
        "At the same loss, 12 of 12 pairs cannot be tested, such as trace and outcome 0: too few."
    ]
    assert list(_sentences(unknown[:1])) == [unknown[0].sentence()]
    *strongest, left, nothing = _sentences([*unknown, *others])
    assert strongest == [each.sentence() for each in others[:8]]
    assert left == "4 more pairs are not shown, with weaker correlations: they are on the page."
    assert "12 of 24 pairs cannot be tested" in nothing
    document = suite_page(suite(seeds=2, steps=3, measures=1), unknown)
    assert "No correlation known in 12 of 12 pairs" in document
    assert "Measures by outcomes" not in document
