"""The results in the repository: those of the present design and claims, and what the README says of them."""

import re
from pathlib import Path

import pytest

from isoloss import files
from isoloss.paper.algorithms.study import STUDY as ALGORITHMS
from isoloss.paper.bracket_study.study import STUDY as BRACKETS
from isoloss.paper.dose_response.study import STUDY as DOSE_RESPONSE
from isoloss.paper.optimizers.study import STUDY as OPTIMIZERS
from isoloss.paper.reproduction.study import STUDY as REPRODUCTION
from isoloss.paper.same_loss import pilot
from isoloss.paper.same_loss.pilot import STUDY as PILOT
from isoloss.paper.same_loss.study import STUDY
from isoloss.statistics.estimate import Estimate, number
from isoloss.studies.claims import read_claims
from isoloss.studies.reading import read_study
from isoloss.studies.repetition import compare

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def test_the_slopes_are_those_that_the_pilot_found():
    found = {
        (row["size"], row["accuracy"]): row["estimates"]["slope"]
        for row in files.read_json(RESULTS / "pilot" / "summary.json")["slopes"]
    }
    slopes = pilot.read()
    assert {(slope.size, slope.measure) for slope in slopes} == found.keys()
    for slope in slopes:
        of_pilot = found[slope.size, slope.measure]
        assert (slope.value, slope.stderr) == (round(of_pilot["value"], 1), round(of_pilot["stderr"], 1))
        assert slope.grammars == of_pilot["samples"]


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("brackets", BRACKETS),
        ("dose-response", DOSE_RESPONSE),
        ("pilot", PILOT),
        ("algorithms", ALGORITHMS),
        ("optimizers", OPTIMIZERS),
        ("optimizers-repeated", OPTIMIZERS),
        ("paper", REPRODUCTION),
        ("paper-repeated", REPRODUCTION),
        ("paper-evening", REPRODUCTION),
    ],
)
def test_results_are_of_the_present_design(name, study):
    provenance = files.read_json(RESULTS / name / "provenance.json")
    runs = study.scale(provenance["scale"], seed_offset=provenance["seed_offset"]).experiments
    assert provenance["runs"].keys() == runs.keys()
    # a teacher is not measured
    assert set(read_study(RESULTS / name).values["run"]) == {run for run, one in runs.items() if one.measurements}


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("brackets", BRACKETS),
        ("brackets-repeated", BRACKETS),
        ("dose-response", DOSE_RESPONSE),
        ("dose-response-repeated", DOSE_RESPONSE),
        ("third", STUDY),
        ("fourth", STUDY),
        ("algorithms", ALGORITHMS),
        ("optimizers", OPTIMIZERS),
        ("optimizers-repeated", OPTIMIZERS),
        ("paper", REPRODUCTION),
        ("paper-repeated", REPRODUCTION),
        ("paper-evening", REPRODUCTION),
    ],
)
def test_results_are_of_claims_that_are_still_asked(name, study):
    # they had no roles when these results were judged
    asked = {claim.id for claim in read_claims(study.claims).claims}
    assert set(read_study(RESULTS / name).claims["claim"]) == asked


def test_no_two_draws_share_a_grammar_and_the_next_ones_have_new_ones():
    kept = ("third", "fourth", "first", "second", "first-design", "pilot")
    draws = [files.read_json(RESULTS / name / "provenance.json")["runs"] for name in kept]
    draws += [STUDY.scale("laptop", seed_offset=offset).experiments for offset in (0, 1)]
    grammars = [{run.split("-")[0] for run in runs} for runs in draws]
    assert sum(map(len, grammars)) == len(set().union(*grammars))


def numbers_in(text):
    found = re.findall(r"[-+]?[\d.,]+ ± [\d.]*\d", " ".join(text.replace("\N{MINUS SIGN}", "-").split()))
    return {number.lstrip("+") for number in found}


def judged(name):
    """The differences that the claims of a kept study are judged by."""
    document = files.read_json(RESULTS / name / "summary.json")
    for claim in document["claims"]:
        for answer in claim["answers"]:
            for estimate in (answer["difference"], answer["adjusted"]):
                if estimate is not None:
                    yield number(Estimate.from_dict(estimate))


def test_the_answer_and_the_readme_give_the_differences_that_were_judged():
    names = (
        "brackets",
        "brackets-repeated",
        "dose-response",
        "dose-response-repeated",
        "third",
        "fourth",
        "algorithms",
    )
    found = {number for name in names for number in judged(name)}
    assert len(given := numbers_in((ROOT / "docs/answer.md").read_text())) > 12
    assert given <= found
    readme = (ROOT / "README.md").read_text().partition("## What we found")[2].partition("\n## ")[0]
    found |= {each for name in DRAWN_BY_OPTIMIZERS for each in of_tables(name)}
    assert len(given := numbers_in(readme)) == 15
    assert {each.lstrip("-") for each in given} <= {each.lstrip("-") for each in found}


DRAWN_BY_OPTIMIZERS = ("optimizers", "optimizers-repeated")


def of_tables(name):
    """Every estimate of the tables of a kept study, as it is printed."""
    return estimates(files.read_json(RESULTS / name / "summary.json"))


def test_the_numbers_of_the_study_optimizers_are_those_of_its_tables():
    part = (ROOT / "docs/method/studies.md").read_text().partition("## optimizers\n")[2].partition("\n## ")[0]
    found = {each for name in DRAWN_BY_OPTIMIZERS for each in of_tables(name)}
    assert len(given := numbers_in(part)) > 150
    assert given <= found


def test_the_accuracies_of_same_loss_are_those_of_the_two_draws():
    text = (ROOT / "docs/method/studies.md").read_text().partition("Accuracy in percentage points:")[2]
    given = numbers_in(text.partition("Loss, in")[0])
    both = compare(RESULTS / "third", RESULTS / "fourth").numbers
    assert len(given) > 40
    assert given <= {number(found) for pair in both for found in (pair.first, pair.second)}


def test_the_numbers_of_the_paper_study_are_those_of_its_tables():
    text = (ROOT / "docs/method/studies.md").read_text()
    for title, names in (
        ("### Two draws on a laptop", ("paper", "paper-repeated")),
        ("### An evening", ("paper-evening",)),
        ("### The first design", ("paper-first-design",)),
    ):
        part = text.partition(f"{title}\n")[2].partition("\n##")[0]
        lines = part.replace("**", "").splitlines()
        found = {each for name in names for each in of_tables(name)}
        assert numbers_in("\n".join(line for line in lines if line.startswith("|"))) <= found
        # sentences have sizes, too
        assert (given := numbers_in("\n".join(lines)))
        assert {each.lstrip("-") for each in given} <= {each.lstrip("-") for each in found}


def estimates(document):
    """Every estimate in a JSON document, as it is printed."""
    if isinstance(document, list):
        document = dict(enumerate(document))
    if not isinstance(document, dict):
        return
    if {"value", "stderr", "method"} <= document.keys():
        yield number(Estimate.from_dict(document))
    for each in document.values():
        yield from estimates(each)


def test_kept_pages_may_load_the_script_that_they_share():
    pages = list(RESULTS.glob("*/index.html"))
    assert len(pages) > 3
    for page in pages:
        text = page.read_text()
        assert '<script src="../vega.js"></script>' in text, page
        policy = text.partition("script-src ")[2].partition(";")[0]
        assert {"'self'", "file:"} <= set(policy.split()), page
