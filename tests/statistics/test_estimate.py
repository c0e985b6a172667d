"""Estimates: what is printed, what is refused, and JSON both ways."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.estimate import Estimate, interval, rounded, student95
from isoloss.statistics.ratio import ratio_estimate


def estimate(value=1.0, stderr=0.1, **more):
    return Estimate(value=value, stderr=stderr, samples=10, unit="nats", num_predictions=10, method="mean", **more)


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_the_error_is_printed_to_two_digits_and_the_value_as_far(value, stderr):
    if stderr <= 1e-15 * abs(value):  # below what floating-point numbers can tell
        assert float(rounded(value, stderr)) == pytest.approx(value, rel=5e-5, abs=0.5 * (abs(value) >= 1e5))
        return
    left, right = (float(part) for part in rounded(value, stderr).split("±"))
    quantum = 10.0 ** (math.floor(math.log10(stderr)) - 1)
    assert abs(right - stderr) <= quantum * 0.5001 + 1e-12
    assert abs(left - value) <= quantum * 0.5001 + 1e-6 * quantum + abs(value) * 1e-15


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.659364291, "2.6594"),
        (-0.00123456789, "-0.0012346"),
        (46.78901234, "46.789"),
        (100.0, "100"),
        (65536.0, "65536"),
        (123456789.4, "123456789"),
        (99999.97, "100000"),
        (1.23456789e-9, "1.2346e-09"),
        (-0.0, "0"),
    ],
)
def test_an_exact_value_is_printed_to_five_digits_and_never_cut_before_the_point(value, text):
    assert rounded(value, 0.0) == text
    assert str(Estimate(value=value, stderr=0, samples=0, unit="nats", num_predictions=0, method="sum")) == (
        f"{text} nats (exact)"
    )


def test_json_round_trip():
    e = estimate(by_parameter={"a": 0.5}, details={"device": "cpu"}, seconds=1.5, num_probes=2)
    assert Estimate.from_dict(json.loads(json.dumps(e.to_dict()))) == e


@pytest.mark.parametrize(("value", "stderr"), [(math.nan, 0.1), (math.inf, 0.1), (1.0, math.nan)])
def test_what_is_no_number_is_refused(value, stderr):
    with pytest.raises(IsolossError, match="not finite"):
        estimate(value, stderr)


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 29, 100, 1000])
def test_students_t_is_that_of_scipy(freedom):
    assert student95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-7)


def test_the_interval_grows_as_samples_are_few():
    low, high = estimate(10.0, 2.0).ci95  # of ten samples
    assert high - 10 == pytest.approx(2.2621572 * 2, rel=1e-7)
    assert (low + high) / 2 == pytest.approx(10)


def test_no_interval_of_a_difference_of_accuracies_is_beyond_100_points():
    about = {"unit": "difference in accuracy", "num_predictions": 2, "method": "mean"}
    of_two = Estimate(value=-0.5, stderr=0.5, samples=2, **about)
    assert (of_two.ci95, str(of_two), interval(of_two)) == ((-1, 1), "-50 ± 50 points", "-100 to 100")
    assert dataclasses.replace(of_two, samples=1000).ci95 == pytest.approx((-1, 0.4812), abs=1e-4)
    assert dataclasses.replace(of_two, unit="nats").ci95 == pytest.approx((-6.853, 5.853), abs=1e-3)


def test_an_accuracy_is_a_fraction_and_one_in_percent_is_left_as_it_is():
    def accuracy(values):
        return ratio_estimate(values, unit="accuracy", method="")

    def ends(values):
        return tuple(stats.ttest_1samp(values, 0).confidence_interval(0.95))

    few, most = [1.0, *[0.0] * 7], [0.0, *[1.0] * 7]
    assert ends(few)[0] < 0 < ends(few)[1] < 1 < ends(most)[1]
    assert accuracy(few).ci95 == pytest.approx((0, ends(few)[1]))
    assert accuracy(most).ci95 == pytest.approx((ends(most)[0], 1))
    assert accuracy([1.0, 0, 0, 0]).ci95 == (0, 1)
    difference = paired_difference(accuracy(few), accuracy(most))  # no accuracy, and may be below 0
    differences = [one - other for one, other in zip(few, most, strict=True)]
    assert difference.ci95 == pytest.approx((-1, ends(differences)[1]))
    assert (str(difference), difference.row()["unit"]) == ("-75 ± 25 points", "difference in accuracy")
    assert accuracy([30.0, 60.0, 50.0]).ci95 == pytest.approx(ends([30.0, 60.0, 50.0]))


def test_one_sample_has_no_interval_but_an_exact_value_has():
    one = {"samples": 1, "unit": "nats", "num_predictions": 1, "method": "mean"}
    with pytest.raises(IsolossError, match="at least 2"):
        _ = Estimate(value=1.0, stderr=0.1, **one).ci95
    assert Estimate(value=1.0, stderr=0.0, **one).ci95 == (1.0, 1.0)


def test_an_exact_value_says_so_and_a_sample_without_variance_does_not():
    exact = Estimate(value=8.5, stderr=0.0, samples=0, unit="bits", num_predictions=0, method="enumeration")
    assert (str(exact), repr(exact)) == ("8.5 bits (exact)", "Estimate(8.5 bits (exact); enumeration)")
    assert str(estimate(1.0, 0.0)) == "1 nats"
    accuracy = dataclasses.replace(exact, value=0.75, unit="accuracy")
    assert str(accuracy) == "75 % (exact)"
    assert str(dataclasses.replace(accuracy, stderr=0.0078, samples=5)) == "75.00 ± 0.78 %"
    shown = estimate(34.08, 0.52, influence=np.ones(10))
    assert repr(shown) == "Estimate(34.08 ± 0.52 nats; mean; 10 samples)"
    table = shown._repr_html_()
    assert table.count("<tr>") == 4
    assert "<td>34.08 ± 0.52 nats</td>" in table
    assert "32.90 to 35.26" in table


def test_the_influence_is_no_part_of_the_document_nor_of_equality():
    e = estimate(influence=np.arange(10.0))
    assert "influence" not in e.to_dict()
    assert Estimate.from_dict(e.to_dict()) == e == estimate(influence=np.zeros(10))
