"""The figure of a comparison: what stands where."""

import pytest
from panel_rows import panels, xy

from isoloss.comparison.figure import trace_against_loss
from isoloss.comparison.verdict import TraceComparison
from isoloss.report.save import PANEL, printed, save
from isoloss.statistics.estimate import Estimate


def estimate(value, stderr):
    return Estimate(
        value=value, stderr=stderr, samples=101, unit="nats per predicted token", num_predictions=9, method="m"
    )


def comparison(*traces):
    models = {
        f"m{i}": {"trace": estimate(trace, 0.5), "loss": estimate(2.0 + i, 0.1)} for i, trace in enumerate(traces)
    }
    return TraceComparison(models=models, weights={}, architectures={})


def test_each_model_is_a_point_with_its_intervals():
    (panel,) = panels(trace_against_loss(comparison(10.0, 12.0), {"m1": "second"}))
    assert panel["names"] == ["m0", "second"]
    assert [xy(rows) for rows in panel["points"].values()] == [[[2.0, 10.0]], [[3.0, 12.0]]]
    (row,) = panel["points"]["second"]
    assert [row["y_low"], row["y_high"]] == pytest.approx(list(estimate(12.0, 0.5).ci95))
    assert [row["x_low"], row["x_high"]] == pytest.approx(list(estimate(3.0, 0.1).ci95))
    assert panel["y"]["scale"]["type"] == "linear"
    assert panel["y"]["title"] == "Trace of the Fisher (nats per token)"


@pytest.mark.parametrize("count", [1, 2, 9])
def test_it_says_what_its_bars_are(count):
    chart = trace_against_loss(comparison(*range(10, 10 + count)))
    assert printed(chart)["title"]["text"] == "Bars: 95 % confidence intervals"
    assert len(set(panels(chart)[0]["markers"].values())) == (2 if count > 7 else 1)  # colors come again


@pytest.mark.parametrize("folders", ["runs/first", "runs/" + 8 * "a-name-as-long-as-some-are/"])
def test_long_names_stay_in_the_figure(folders, tmp_path):
    few = comparison(10.0, 12.0, 14.0, 15.0)
    names = {model: f"{folders}/{model}/checkpoints/step-16000" for model in few.models}
    chart = trace_against_loss(few, names)
    lines = [name.split("\n") for name in panels(chart)[0]["names"]]
    assert ["".join(parts) for parts in lines] == list(names.values())
    assert max(len(line) for parts in lines for line in parts) <= 50
    save(chart, tmp_path / "long.svg")
    width = float((tmp_path / "long.svg").read_text().split('width="')[1].split('"')[0])
    assert width < 1.6 * PANEL[0]


def test_far_apart_traces_get_a_logarithmic_axis():
    assert panels(trace_against_loss(comparison(10.0, 41.0)))[0]["y"]["scale"]["type"] == "log"
