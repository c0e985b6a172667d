"""The figure of a comparison: what stands where, and files that are the same bytes every time."""

import pytest
from notes import note_of

from isoloss.errors import IsolossError
from isoloss.flatness.differences import Comparison, Measured
from isoloss.report.flatness import save, trace_against_loss
from isoloss.statistics.estimate import Estimate


def estimate(value, stderr):
    return Estimate(value=value, stderr=stderr, samples=101, unit="nats per predicted token", num_inputs=9, method="m")


def comparison(*traces):
    models = tuple(
        Measured(
            name=f"m{i}",
            trace=estimate(trace, 0.5),
            without_embeddings=estimate(trace / 2, 0.5),
            loss=estimate(2.0 + i, 0.1),
            flattest=1 / len(traces),
        )
        for i, trace in enumerate(traces)
    )
    return Comparison(models=models, pairs=())


def test_each_model_is_a_point_with_its_intervals():
    figure = trace_against_loss(comparison(10.0, 12.0), {"m1": "second"})
    (ax,) = figure.axes
    points = [container.lines[0].get_xydata().tolist()[0] for container in ax.containers]
    assert points == [[2.0, 10.0], [3.0, 12.0]]
    vertical = ax.containers[1].lines[2][1].get_segments()[0]
    assert vertical[:, 1].tolist() == pytest.approx(list(estimate(12.0, 0.5).ci95))
    horizontal = ax.containers[1].lines[2][0].get_segments()[0]
    assert horizontal[:, 0].tolist() == pytest.approx(list(estimate(3.0, 0.1).ci95))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["m0", "second"]
    assert ax.get_yscale() == "linear"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_it_says_what_its_bars_are(count):
    assert note_of(trace_against_loss(comparison(*range(10, 10 + count)))) == "Bars: 95 % confidence intervals"


@pytest.mark.parametrize("folders", ["runs/first", "runs/" + 8 * "a-name-as-long-as-some-are/"])
def test_long_names_stay_in_the_figure(folders):
    found = comparison(10.0, 12.0, 14.0, 15.0)
    names = {model.name: f"{folders}/{model.name}/checkpoints/step-16000" for model in found.models}
    figure = trace_against_loss(found, names)
    assert note_of(figure).startswith("Bars: ")
    texts = [text.get_text().replace("\n", "") for text in figure.legends[0].get_texts()]
    assert texts == list(names.values())


def test_far_apart_traces_get_a_logarithmic_axis():
    assert trace_against_loss(comparison(10.0, 41.0)).axes[0].get_yscale() == "log"


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_files_are_the_same_every_time(tmp_path, ending, start):
    for name in ("a", "b"):
        save(trace_against_loss(comparison(10.0, 12.0)), tmp_path / f"{name}.{ending}")
    written = (tmp_path / f"a.{ending}").read_bytes()
    assert written.startswith(start)
    assert written == (tmp_path / f"b.{ending}").read_bytes()


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(IsolossError, match=r"must end in .png, .svg or .pdf"):
        save(trace_against_loss(comparison(10.0)), tmp_path / "figure.gif")
