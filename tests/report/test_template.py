import re

import pytest

from isoloss.report.html import Card, IntervalRow, Section, interval_rows, page, table

HOSTILE = '"><script>alert(1)</script>'


def row(value, low, high, **more):
    return IntervalRow(label="trace", effect=str(value), value=value, low=low, high=high, **more)


def drawn(rows):
    """The ends of each interval and the place of its marker, in the plot's units from the line of no effect."""
    svgs = re.findall(r"<svg.*?</svg>", interval_rows(rows))
    ends = [re.search(r'class="interval" x1="([\d.]+)" x2="([\d.]+)"', svg).groups() for svg in svgs]
    places = [re.search(r'cx="([\d.]+)"', svg)[1] for svg in svgs]
    return [tuple(float(x) - 110 for x in (low, place, high)) for (low, high), place in zip(ends, places, strict=True)]


def test_a_plot_is_to_scale_and_has_no_effect_in_its_middle():
    ((low, place, high),) = drawn([row(3.0, 1.0, 5.0)])
    assert (place / low, high / low) == pytest.approx((3, 5), rel=0.01)
    ((low, place, high),) = drawn([row(0.5, 0.25, 2.0, reference=1.0, log=True)])
    assert (low / place, high / place) == pytest.approx((2, -1), rel=0.01)


def test_rows_of_one_scale_share_an_axis_that_a_wide_interval_does_not_flatten():
    narrow, other, wide = drawn(
        [row(v, v - r, v + r, scale="points") for v, r in ((1.0, 1.0), (2.0, 1.0), (0.0, 99.0))]
    )
    assert other[1] == pytest.approx(2 * narrow[1], rel=0.01)
    assert narrow[0] == 0
    assert other[2] > 90  # of the 104 that there are
    document = interval_rows([row(0.0, -99.0, 99.0, scale="points"), row(1.0, 0.0, 2.0, scale="points")])
    assert document.count('class="beyond"') == 2  # an arrow at either end
    assert wide == (-104, 0, 104)


def test_every_text_stays_text():
    rows = [IntervalRow(label=HOSTILE, effect=HOSTILE, interval=HOSTILE, value=1, low=0, high=2, verdict=HOSTILE)]
    section = Section(title=HOSTILE, body=interval_rows(rows) + table([HOSTILE], [[HOSTILE]], caption=HOSTILE))
    cards = [Card(label=HOSTILE, value=HOSTILE, detail=HOSTILE, tone="bad")]
    document = page(title=HOSTILE, lede=HOSTILE, cards=cards, sections=[section, Section(title="x", body=HOSTILE)])
    assert "<script" not in document
    assert document.count("&lt;script") > 10
    assert "script-src 'none'" in document


def test_a_page_has_its_answers_before_its_sections_and_a_link_to_each():
    sections = [Section(title="The figure", body="first"), Section(title="All numbers", body="second", folded=True)]
    document = page(
        title="Flatter?", lede="A sentence.", cards=[Card(label="Flatter?", value="Yes")], sections=sections
    )
    places = [document.index(text) for text in ("<h1", "A sentence.", 'class="card', "first", "second", "<nav")]
    assert places == sorted(places)
    assert {"#top", "#section-the-figure", "#section-all-numbers"} == set(re.findall(r'href="([^"]+)"', document))
    assert document.count("<details") == 1
    twice = page(title="", lede="", sections=[Section(title="All", body=""), Section(title="all!", body="")])
    assert re.findall(r'<section id=(".*?")', twice) == ['"section-all"', '"section-all-2"']
