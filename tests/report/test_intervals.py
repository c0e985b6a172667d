"""Charts of differences with their intervals."""

import dataclasses

import pytest
from panel_rows import check

from isoloss.errors import IsolossError
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.save import save

LOSS = [Interval(row=row, series="KL", value=0.0, low=-1e-4, high=1e-4, text="0 nats") for row in ("a", "b")]
TRACES = [
    Interval(row=row, series=series, value=value, low=value / 2, high=2 * value, text="times")
    for row in ("a", "b")
    for series, value in (("trace", 0.4), ("minimal trace", 0.8))
]
PANELS = [
    IntervalPanel(title="KL", intervals=LOSS),
    IntervalPanel(title="Trace", intervals=TRACES, reference=1.0, log=True),
]


def values(spec, layer):
    """The rows of a layer, which are kept once for the whole chart."""
    return spec["datasets"][layer["data"]["name"]]


def test_it_is_vega_lite():
    check(intervals(PANELS, ["b", "a"], note="95 %"))


def test_every_interval_is_drawn_in_its_row_and_panel():
    spec = intervals(PANELS, ["b", "a"], note="95 %")
    assert [len(panel["layer"]) for panel in spec["concat"]] == [3, 3]
    for panel, given in zip(spec["concat"], PANELS, strict=True):
        reference, lines, points = panel["layer"]
        assert values(spec, reference) == [{"value": given.reference}]
        assert values(spec, lines) == values(spec, points) == [dataclasses.asdict(each) for each in given.intervals]
        assert (lines["encoding"]["x"]["field"], lines["encoding"]["x2"]["field"]) == ("low", "high")
        assert points["encoding"]["y"]["sort"] == ["b", "a"]
        low, high = points["encoding"]["x"]["scale"]["domain"]
        assert low < min(each.low for each in given.intervals)
        assert high > max(each.high for each in given.intervals)
    scales = [panel["layer"][2]["encoding"]["x"]["scale"]["type"] for panel in spec["concat"]]
    assert scales == ["linear", "log"]
    color = spec["concat"][0]["layer"][2]["encoding"]["color"]["scale"]
    assert color["domain"] == ["KL", "trace", "minimal trace"]


def test_only_the_first_panel_names_the_rows_and_one_series_has_no_legend():
    panels = intervals(PANELS, ["a", "b"], note="")["concat"]
    assert [panel["layer"][2]["encoding"]["y"]["axis"]["labels"] for panel in panels] == [True, False]
    alone = intervals(PANELS[:1], ["a", "b"], note="")["concat"][0]["layer"][2]["encoding"]["color"]
    assert alone["legend"] is None


def test_names_of_several_lines_are_drawn_so_and_many_rows_have_room(tmp_path):
    rows = [f"row {i}\nits second line" for i in range(40)]
    panel = IntervalPanel(title="KL", intervals=[dataclasses.replace(LOSS[0], row=rows[0])])
    spec = intervals([panel], rows, note="")
    save(spec, tmp_path / "rows.svg")
    assert (tmp_path / "rows.svg").read_text().count(">its second line<") == 40
    assert spec["concat"][0]["height"] >= 2 * 40 * spec["config"]["axis"]["labelFontSize"]


def test_it_is_drawn(tmp_path):
    save(intervals(PANELS, ["a", "b"], note="95 %"), tmp_path / "arms.png")
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ([IntervalPanel(title="KL", intervals=[])], "'KL' has no interval"),
        ([IntervalPanel(title="KL", intervals=[dataclasses.replace(LOSS[0], row="c")])], "'c', which is none of a, b"),
        (
            [IntervalPanel(title="t", intervals=[dataclasses.replace(LOSS[0], series=str(i)) for i in range(31)])],
            "31 series and 30 colors",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(panels, message):
    with pytest.raises(IsolossError, match=message):
        intervals(panels, ["a", "b"], note="")
