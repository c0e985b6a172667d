"""The kept suites, and the table of the documentation that is made of them."""

from pathlib import Path

import pytest

from isoloss.suites.table import SuiteTable

ROOT = Path(__file__).parents[2]
# the rows of each kept suite's table
DRAWS = {
    **{"suite-laptop-grammar": 780, "suite-laptop-grammar-repeated": 780},
    **{"suite-laptop-docs": 1260, "suite-laptop-docs-repeated": 1260},
}


@pytest.mark.parametrize(("number", "name", "measures"), [(0, "grammar", 4), (1, "docs", 5)])
def test_the_documentation_has_the_answers_of_both_draws(number, name, measures):
    lines = (ROOT / "docs/suites.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    starts = [place for place, row in enumerate(rows) if row[0] == "measure" and "int3-rise" in row]
    (_, *outcomes), *table = rows[starts[number] :][: 1 + measures]
    for place, draw in enumerate((f"suite-laptop-{name}", f"suite-laptop-{name}-repeated")):
        answers = SuiteTable.read(ROOT / "results" / draw).associations(())
        found = {(each.measure, each.outcome): each for each in answers}
        assert all(each.clusters == 20 and each.over_levels.clusters == 4 for each in answers)
        for measure, *cells in table:
            for outcome, cell in zip(outcomes, cells, strict=True):
                r, low, high = found[measure, outcome].pearson.texts
                mark = " ✓" * found[measure, outcome].shown
                assert cell.split("<br>")[place] == f"{r} ({low} to {high}){mark}"


@pytest.mark.parametrize("draw", DRAWS)
def test_a_kept_suite_is_whole_and_names_no_folder_of_a_machine(draw):
    table = SuiteTable.read(ROOT / "results" / draw)
    assert len(table.wide()) == 60
    assert table.frame["problem"].null_count() == len(table.frame) == DRAWS[draw]
    assert "/tmp/" not in "".join(path.read_text() for path in (ROOT / "results" / draw).glob("*.[jh]*"))
