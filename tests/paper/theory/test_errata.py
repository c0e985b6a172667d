"""The snippets of the page of errata do what the page says."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "errata.md"


def test_every_snippet_runs():
    found = doctest.testfile(str(PAGE), module_relative=False)
    assert found.failed == 0
    assert found.attempted > 90
