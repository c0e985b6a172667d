"""The figures of the theory's programs: what stands where."""

import pytest
from panel_rows import check, panels, xy

from isoloss.paper.theory import bartlett, brackets
from isoloss.paper.theory.brackets import sign_missing
from isoloss.paper.theory.figures import bartlett_gap, bracket_solutions, sgd_and_flow
from isoloss.paper.theory.sgd_flow import masked_lm, two_parameters
from isoloss.paper.theory.sgd_flow import study as sgd_flow
from isoloss.report.save import printed, save


def scale(panel, axis):
    return panel[axis]["scale"]["type"]


def test_the_gap_over_the_kl(tmp_path):
    result = bartlett.study(length=2, directions=2)
    chart = bartlett_gap(result)
    check(chart)
    (panel,) = panels(chart)
    softmax, other = ([row for row in result.rows if row.model == name and row.radius > 0] for name in panel["points"])
    first, second = panel["points"].values()
    assert xy(first) == [[row.kl_nats, row.gap] for row in softmax]
    assert (scale(panel, "x"), scale(panel, "y")) == ("log", "log")
    ends = [other[0].gap - other[0].gap_stderr, other[0].gap + other[0].gap_stderr]
    assert [second[0]["y_low"], second[0]["y_high"]] == pytest.approx(ends)
    assert panel["markers"]["square root of the KL"] == "stroke"
    assert printed(chart)["title"]["text"] == "Bars: standard errors"
    save(chart, tmp_path / "gap.pdf")
    assert (tmp_path / "gap.pdf").read_bytes().startswith(b"%PDF")


def test_sgd_beside_the_flow(tmp_path):
    few = {"trajectories": 8, "times": (0.5, 1.0), "batch_sizes": (1, 2)}
    both = [two_parameters(step_sizes=(0.2, 0.1), **few), masked_lm(step_sizes=(0.1, 0.05), **few)]
    results = [(settings, sgd_flow(settings)) for settings in both]
    chart = sgd_and_flow(results)
    drawn = panels(chart)
    for (settings, result), left, right in zip(results, drawn[::2], drawn[1::2], strict=True):
        eta = settings.step_sizes[1]
        rows = [row for row in result.rows if row.batch_size == 2 and row.step_size == eta]
        assert xy(left["points"]["B = 2"]) == [[row.time, row.trace.value] for row in rows]
        assert left["curves"]["B = 1"][-1]["y"] == pytest.approx(settings.flow_trace(1.0, 1))
        assert [row["y"] for row in left["points"]["no label noise, started off the minimizers"]] == list(
            result.control
        )
        limit = xy(right["points"]["η to 0"])
        assert limit == [[row.time, 100 * row.error] for row in result.limits if row.batch_size == 1]
        assert right["names"] == [f"η = {settings.step_sizes[0]:g}", f"η = {eta:g}", "η to 0"]
        assert left["title"] == settings.model.name
    assert printed(chart)["title"]["text"] == "Bars: standard errors; lines: the flow, at every η; points: SGD"
    save(chart, tmp_path / "flow.png")


def test_solutions_of_the_brackets(tmp_path):
    result = brackets.study(brackets.Settings(lengths=(4, 6), steps=30, trials=50, samples=(1, 3), draws=2))
    chart = bracket_solutions(result)
    left, middle, right = panels(chart)
    assert xy(left["curves"]["T = 6"]) == [[point.step, point.ratio] for point in result.paths[6]]
    two = [row for row in result.heads if row.solution == brackets.TWO and row.length == 6 and row.failures > 0]
    assert xy(middle["points"]["T = 6"]) == [[row.samples, row.failures] for row in two]
    assert [row["y"] for row in middle["curves"]["T = 4"]] == [sign_missing(4, n) for n in (1, 2, 3)]
    assert xy(right["curves"]["predicted"]) == [[4, 32], [6, 132]]
    assert xy(right["points"][f"loss {brackets.LOSSES[2]:g}"]) == [[4, 32], [6, 132]]
    assert [scale(panel, "y") for panel in (left, middle, right)] == ["linear", "log", "log"]
    assert printed(chart)["title"]["text"].startswith("Bars: standard errors; colored lines in the middle: ")
    save(chart, tmp_path / "brackets.svg")
