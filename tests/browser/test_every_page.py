"""Every kind of page on a phone, a tablet and a laptop, on light and dark paper: no error, no overflow, WCAG by axe."""

from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
KINDS = ["two models", "three models", "two series", "suite", "study", "partial study", "study without claims"]
# one of each study
KEPT = ["brackets", "dose-response-24-grammars", "optimizers-three-rates", "paper-laptop", "same-loss-27-grammars"]
WIDTHS = (390, 768, 1280)
# a line for each text that is cut off or goes beyond its box; boxes that scroll may be narrower than what is in them
BEYOND = """() => {
  const found = [], root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} pixels wide`);
  for (const each of document.body.querySelectorAll("*:not(svg, svg *, .unseen)")) {
    if (["auto", "scroll"].includes(getComputedStyle(each).overflowX) || each.clientWidth === 0) continue;
    const text = each.textContent.trim().slice(0, 60);
    if (each.scrollWidth > each.clientWidth + 1) found.push(`${each.tagName} ${each.className}: ${text}`);
  }
  for (const text of document.querySelectorAll(".chart svg text")) {
    const { left, right } = text.getBoundingClientRect(), box = text.closest(".box").getBoundingClientRect();
    if (left < box.left - 1 || right > box.right + 1) found.push(`in a chart: ${text.textContent}`);
  }
  return found;
}"""


def resize(page, width):
    """Change the width, and wait until all charts are drawn anew."""
    page.evaluate("document.querySelectorAll('.chart svg').forEach((each) => { each.dataset.old = ''; })")
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_function("!document.querySelector('.chart svg[data-old]')")


def violations(page):
    """What axe finds: rule, element, why. A chart is one labeled image to it, so what is in it is taken out."""
    from axe_playwright_python.sync_playwright import Axe

    page.evaluate("document.querySelectorAll('.chart > *').forEach((each) => each.remove())")
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['html']}: {node['failureSummary']}" for rule in found for node in rule["nodes"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_its_window_and_can_be_read_by_all(pages, opened, kind):
    page = opened(pages[kind], width=WIDTHS[0])
    beyond = {}
    for width in WIDTHS:
        if width != WIDTHS[0]:
            resize(page, width)
        beyond[width] = page.evaluate(BEYOND)
    assert beyond == {width: [] for width in WIDTHS}
    assert violations(page) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_on_a_phone_in_dark_mode(pages, opened, kind):
    page = opened(pages[kind], width=390, scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert page.evaluate(BEYOND) + violations(page) == []


def test_every_kind_is_tested(pages):
    assert list(pages) == KINDS


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_page_opens_on_a_phone(opened, name):
    page = opened(RESULTS / name / "index.html", width=390)
    assert page.locator(".chart svg").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
