"""Selecting, filtering, sorting and saving, by mouse and by keyboard, on the pages of a real study and suite."""

import csv
import json
import tomllib
from pathlib import Path

import pytest

POINTS = "#chart-{} .mark-symbol.role-mark path"
RESULTS = Path(__file__).parents[2] / "results"
SHOWN, MARKED, POINTED = "tr:not([hidden])", "tr.marked", "tr.pointed"


def rows(page, which=SHOWN):
    """The run and the step of these rows of the table of all checkpoints, in its order."""
    found = page.locator(f"#checkpoints tbody {which}").all()
    return [(row.locator("th").inner_text(), int(row.locator("td").nth(3).get_attribute("data-sort"))) for row in found]


def in_front(page, chart=0):
    """How many points of a chart are not dimmed."""
    of = "(points) => points.filter((each) => (each.getAttribute('opacity') ?? '1') === '1').length"
    return page.locator(POINTS.format(chart)).evaluate_all(of)


def wait_for(page, count, chart=0):
    """Wait until so many points of a chart are in front, as charts follow a moment later."""
    is_bright = "(each.getAttribute('opacity') ?? '1') === '1'"
    of = f"([points, n]) => [...document.querySelectorAll(points)].filter((each) => {is_bright}).length === n"
    page.wait_for_function(of, arg=[POINTS.format(chart), count])


def tab_to(page, selector):
    """Press Tab until what the selector finds has the focus."""
    for _ in range(60):
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {selector}")


def saved(page, press):
    """What a button saves: the name of the file, and its bytes."""
    with page.expect_download() as download:
        press()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


@pytest.fixture
def page(pages, opened):
    """The page of the study: six runs of two checkpoints each."""
    page = opened(pages["study"])
    assert in_front(page) == len(rows(page)) == 12
    return page


def test_what_the_mouse_selects_in_a_chart_is_marked_in_the_table(page):
    points = page.locator(POINTS.format(0))
    points.first.hover()
    wait_for(page, 2)  # the run's
    pointed = rows(page, POINTED)
    assert [step for _, step in pointed] == [3, 6]
    assert pointed[0][0] in page.locator("#vg-tooltip-element").inner_text()
    page.mouse.move(0, 0)
    wait_for(page, 12)
    assert rows(page, POINTED) == []
    points.first.click()
    page.mouse.move(0, 0)
    wait_for(page, 2)
    assert rows(page, MARKED) == pointed
    page.locator("#only").check()
    assert rows(page) == pointed
    page.locator("#clear").click()
    wait_for(page, 12)
    assert (len(rows(page)), rows(page, MARKED)) == (12, [])
    page.locator("#chart-0 .role-legend-symbol path").first.click()
    page.mouse.move(0, 0)
    wait_for(page, 6)
    assert {run[:-2] for run, _ in rows(page, MARKED)} == {"plain"}


def test_the_keyboard_filters_ticks_and_sorts(page, finished):
    table = finished.results().table()
    kl = dict(zip(zip(table["run"], table["step"], strict=True), table["kl"], strict=True))
    bound = sorted(kl.values())[5]
    tab_to(page, "#words")
    page.keyboard.type(f"KL<{bound:.6f}")
    below = {key for key, value in kl.items() if value < float(f"{bound:.6f}")}
    assert set(rows(page)) == below
    wait_for(page, len(below))
    assert page.locator("#count").inner_text() == f"{len(below)} of 12 rows shown"
    page.keyboard.press("Control+A")
    page.keyboard.type("plain")
    tab_to(page, "#choices select[data-key=step]")
    page.keyboard.type("6")
    assert rows(page) == [(f"plain-{seed}", 6) for seed in (1, 2, 3)]
    tab_to(page, "#clear")
    page.keyboard.press("Enter")
    wait_for(page, 12)
    tab_to(page, "thead th[data-key=kl] button")
    for sign, order in ((1, "ascending"), (-1, "descending")):
        page.keyboard.press("Enter")
        assert rows(page) == sorted(kl, key=lambda key: sign * kl[key])
        assert page.locator("thead th[data-key=kl]").get_attribute("aria-sort") == order
    tab_to(page, "#checkpoints tbody input")
    page.keyboard.press("Space")
    wait_for(page, 1)
    assert page.locator("#count").inner_text() == "12 of 12 rows shown, 1 ticked"


def test_the_keyboard_opens_a_config_and_saves_it(page, finished):
    tab_to(page, "#checkpoints button.config")
    run = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    assert page.locator("dialog").is_visible()
    assert page.locator("#config-heading").inner_text() == run
    assert page.locator("dialog mark").count() > 0
    tab_to(page, "dialog [data-do=save]")
    name, config = saved(page, lambda: page.keyboard.press("Enter"))
    assert name == f"{run}.toml"
    assert tomllib.loads(config.decode())["seed"] == finished.results().experiments[run].config.seed
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    assert page.evaluate("document.activeElement.textContent") == run


def test_saved_files_have_what_is_shown_with_all_digits(page, finished):
    table = finished.results().table()
    page.locator("#words").fill("plain-1")
    expected = table.filter(table["run"] == "plain-1")
    name, text = saved(page, page.locator("[data-save=csv]").click)
    lines = [line for line in csv.DictReader(text.decode().splitlines()) if line["estimate"] == "kl"]
    assert name == "checkpoints.csv"
    assert [float(line["value"]) for line in lines] == expected["kl"].to_list()
    assert [float(line["standard error"]) for line in lines] == expected["kl_stderr"].to_list()
    page.locator("#which").select_option("all")
    name, text = saved(page, page.locator("[data-save=json]").click)
    assert len({(each["run"], each["step"]) for each in json.loads(text)}) == 12
    for kind, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        name, figure = saved(page, page.locator(".saves button", has_text=kind).first.click)
        assert name.endswith(f".{kind.lower()}")
        assert figure.startswith(start)


def test_a_selection_in_one_chart_of_a_suite_holds_in_all_of_its_charts(pages, opened, suite):
    page = opened(pages["suite"])
    panels = [in_front(page, chart) // 60 for chart in (0, 1)]  # of 60 checkpoints each
    page.locator(POINTS.format(0)).nth(5).click(force=True)  # another may lie on it
    page.mouse.move(0, 0)
    for chart, number in enumerate(panels):
        wait_for(page, number, chart)
    assert page.locator(f"#checkpoints {MARKED}").count() == 1
    page.locator("#clear").click()
    wait_for(page, 60 * panels[0])
    # the right half of the first panel
    plot = page.locator("#chart-0 .mark-group.role-scope .background").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] - 2, steps=3)
    page.mouse.up()
    page.wait_for_function(f"document.querySelector('#checkpoints {MARKED}')")
    marked = page.locator(f"#checkpoints {MARKED}").count()
    assert 0 < marked < 60
    for chart, number in enumerate(panels):
        wait_for(page, number * marked, chart)
    page.locator("#clear").click()
    page.locator("#words").fill("minimal-trace>6")
    left = int((suite.wide()["minimal-trace"] > 6).sum())
    assert 0 < left < 60
    assert page.locator(f"#checkpoints tbody {SHOWN}").count() == left
    for chart, number in enumerate(panels):
        wait_for(page, number * left, chart)


def test_a_print_has_all_rows_or_none(page, opened):
    long = opened(RESULTS / "dose-response-24-grammars" / "index.html")
    for each in (page, long):
        each.emulate_media(media="print")
    assert page.locator("#all").is_visible()
    assert not page.locator("#controls, .unprinted").first.is_visible()
    assert not long.locator("#all").is_visible()
    assert long.locator(".unprinted").is_visible()
    long.emulate_media(media="screen")
    long.locator("#words").fill("step=440")
    long.emulate_media(media="print")
    assert long.locator("#all").is_visible()
