"""The figures of the theory's programs: what stands where."""

import pytest
from notes import note_of

from isoloss.paper.theory import bartlett
from isoloss.paper.theory.bracket_language import study
from isoloss.paper.theory.bracket_language.heads import sign_missing
from isoloss.paper.theory.figures import bartlett_gap, bracket_solutions, sgd_and_flow
from isoloss.paper.theory.sgd_flow.study import masked_lm, two_parameters
from isoloss.paper.theory.sgd_flow.study import study as sgd_flow
from isoloss.report.flatness import save


def test_the_gap_over_the_kl(tmp_path):
    found = bartlett.study(length=2, directions=2)
    figure = bartlett_gap(found)
    (ax,) = figure.axes
    rows = [row for row in found.rows if row.model == "softmax" and row.radius > 0]
    points = ax.containers[0].lines[0].get_xydata().tolist()
    assert points == [[row.kl_nats, row.gap] for row in rows]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    bars = ax.containers[1].lines[2][0].get_segments()[0]
    other = next(row for row in found.rows if row.model != "softmax" and row.radius > 0)
    assert bars[:, 1].tolist() == pytest.approx([other.gap - other.gap_stderr, other.gap + other.gap_stderr])
    assert note_of(figure) == "Bars: standard errors"
    save(figure, tmp_path / "gap.pdf")
    assert (tmp_path / "gap.pdf").read_bytes().startswith(b"%PDF")


def test_sgd_beside_the_flow(tmp_path):
    few = {"trajectories": 8, "times": (0.5, 1.0), "batch_sizes": (1, 2)}
    both = [two_parameters(step_sizes=(0.2, 0.1), **few), masked_lm(step_sizes=(0.1, 0.05), **few)]
    found = [(settings, sgd_flow(settings)) for settings in both]
    figure = sgd_and_flow(found)
    for (settings, result), left, right in zip(found, figure.axes[::2], figure.axes[1::2], strict=True):
        eta = settings.step_sizes[1]
        rows = [row for row in result.rows if row.batch_size == 2 and row.step_size == eta]
        assert left.containers[1].lines[0].get_xydata().tolist() == [[row.time, row.trace.value] for row in rows]
        flow = next(line for line in left.lines if len(line.get_xdata()) > 3)
        assert flow.get_ydata()[-1] == pytest.approx(settings.flow_trace(1.0, 1))
        crosses = next(line for line in left.lines if line.get_marker() == "x")
        assert crosses.get_ydata().tolist() == list(result.control)
        limit = right.containers[2].lines[0].get_xydata().tolist()
        assert limit == [[row.time, 100 * row.error] for row in result.limits if row.batch_size == 1]
        texts = [label.get_text() for label in right.get_legend().get_texts()]
        assert texts == [f"eta = {settings.step_sizes[0]:g}", f"eta = {eta:g}", "eta to 0"]
        assert left.get_title() == settings.model.name
    assert note_of(figure) == "Bars: standard errors"
    save(figure, tmp_path / "flow.png")


def test_solutions_of_the_brackets(tmp_path):
    found = study.study(study.Settings(lengths=(4, 6), steps=30, trials=50, samples=(1, 3), draws=2))
    figure = bracket_solutions(found)
    left, middle, right = figure.axes
    assert left.lines[1].get_xydata().tolist() == [[point.step, point.ratio] for point in found.paths[6]]
    points = middle.containers[1].lines[0].get_xydata().tolist()
    two = [row for row in found.heads if row.solution == study.TWO and row.length == 6]
    assert points == [[row.samples, row.failures] for row in two]
    curve = next(line for line in middle.lines if len(line.get_xdata()) == 3)
    assert curve.get_ydata().tolist() == [sign_missing(4, n) for n in (1, 2, 3)]
    assert right.lines[0].get_xydata().tolist() == [[4, 32], [6, 132]]
    assert right.containers[2].lines[0].get_xydata().tolist() == [[4, 32], [6, 132]]
    assert (middle.get_yscale(), right.get_yscale(), left.get_yscale()) == ("log", "log", "linear")
    assert note_of(figure).startswith("Bars: standard errors; coloured lines in the middle: ")
    assert not any("$" in label.get_text() for ax in figure.axes for label in ax.get_yticklabels())
    save(figure, tmp_path / "brackets.svg")
