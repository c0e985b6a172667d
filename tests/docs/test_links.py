"""Links between the pages: every file and heading that one names is there. Sphinx checks those within docs alone."""

import re

import pytest
from blocks import PAGES, ROOT

WITH_LINKS = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / name for name in ("results/README.md", "results/verdicts.md", "benchmarks/README.md")),
]


def text_of(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_to_a_heading_in_it(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)) if "://" not in link]
    for link in links:
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def test_a_page_that_the_code_names_is_there():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\bdocs/[\w/-]+\.md", source)}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
