"""The figures of the theory's programs: what stands where."""

import pytest

from isoloss.report.flatness import save
from isoloss.report.theory import bartlett_gap, sgd_and_flow
from isoloss.theory import bartlett, sgd_flow


def test_the_gap_over_the_kl(tmp_path):
    found = bartlett.study(length=2, directions=2)
    figure = bartlett_gap(found)
    (ax,) = figure.axes
    rows = [row for row in found.rows if row.model == "softmax" and row.radius > 0]
    points = ax.containers[0].lines[0].get_xydata().tolist()
    assert points == [[row.kl_nats, row.gap] for row in rows]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    save(figure, tmp_path / "gap.pdf")
    assert (tmp_path / "gap.pdf").read_bytes().startswith(b"%PDF")


def test_sgd_beside_the_flow(tmp_path):
    settings = sgd_flow.Settings(trajectories=8, step_sizes=(0.2, 0.1), times=(0.5, 1.0), batch_sizes=(1, 2))
    found = sgd_flow.study(settings)
    figure = sgd_and_flow(settings, found)
    left, right = figure.axes
    rows = [row for row in found.rows if row.batch_size == 2 and row.step_size == 0.1]
    assert left.containers[1].lines[0].get_xydata().tolist() == [[row.time, row.trace.value] for row in rows]
    flow = next(line for line in left.lines if len(line.get_xdata()) > 2)
    assert flow.get_ydata()[-1] == pytest.approx(settings.problem.flow_trace(1.0))
    assert [label.get_text() for label in right.get_legend().get_texts()] == ["eta = 0.2", "eta = 0.1"]
    save(figure, tmp_path / "flow.png")
