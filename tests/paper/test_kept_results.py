"""The results in the repository: those of the present design and claims, and what the README says of them."""

import functools
import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from isoloss import files
from isoloss.paper.brackets import STUDY as BRACKETS
from isoloss.paper.design import read_pilot
from isoloss.paper.dose_response import STUDY as DOSE_RESPONSE
from isoloss.paper.optimizers import STUDY as OPTIMIZERS
from isoloss.paper.reproduction.study import STUDY as REPRODUCTION
from isoloss.paper.same_loss import PILOT as SAME_LOSS_PILOT
from isoloss.paper.same_loss import STUDY
from isoloss.paper.same_loss_pilot import STUDY as PILOT
from isoloss.statistics.clusters import slope_within
from isoloss.statistics.correlation import correlation, jackknife
from isoloss.statistics.estimate import Estimate, number
from isoloss.studies.reading import read_study
from isoloss.studies.repetition import compare

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def test_the_slopes_are_those_that_the_pilot_found():
    found = {
        (row["size"], row["accuracy"]): row["estimates"]["slope"]
        for row in files.read_json(RESULTS / "same-loss-pilot" / "summary.json")["slopes"]
    }
    slopes = read_pilot(SAME_LOSS_PILOT)
    assert {(slope.size, slope.measure) for slope in slopes} == found.keys()
    for slope in slopes:
        of_pilot = found[slope.size, slope.measure]
        assert (slope.value, slope.stderr) == (round(of_pilot["value"], 1), round(of_pilot["stderr"], 1))
        assert slope.grammars == of_pilot["samples"]


KEPT = {  # but for the first designs of dose-response and optimizers
    **{"brackets": BRACKETS, "brackets-repeated": BRACKETS},
    **{"dose-response-24-grammars": DOSE_RESPONSE, "dose-response-24-grammars-repeated": DOSE_RESPONSE},
    **{"optimizers-three-rates": OPTIMIZERS, "optimizers-three-rates-repeated": OPTIMIZERS},
    **{"paper-laptop": REPRODUCTION, "paper-laptop-repeated": REPRODUCTION, "paper-evening": REPRODUCTION},
    **{"same-loss-27-grammars": STUDY, "same-loss-27-grammars-repeated": STUDY, "same-loss-pilot": PILOT},
}


@pytest.mark.parametrize("name", KEPT)
def test_results_are_of_the_claims_and_the_design_of_today(name):
    study, kept = KEPT[name], read_study(RESULTS / name)
    # they had no roles when these results were judged
    assert set(kept.claims["claim"]) == {claim.id for claim in study.claims}
    if study is STUDY or name == "paper-evening":
        return  # whose scales have fewer grammars today, or more cooldowns and tasks
    provenance = files.read_json(RESULTS / name / "provenance.json")
    runs = study.scale(provenance["scale"], seed_offset=provenance["seed_offset"]).experiments
    assert {today(run) for run in provenance["runs"]} == runs.keys()
    # a teacher is not measured
    assert set(map(today, kept.values["run"])) == {run for run, one in runs.items() if one.measurements}


def today(run):
    """The name that a run of kept results has today (results/README.md)."""
    return run.replace("-polished", "-cooldown")


def test_no_two_draws_share_a_grammar_and_the_next_ones_have_new_ones():
    kept = RESULTS.glob("same-loss*/provenance.json")
    draws = [files.read_json(path)["runs"] for path in kept]
    assert len(draws) == 6
    draws += [STUDY.scale("laptop", seed_offset=offset).experiments for offset in (0, 1)]
    grammars = [{run.split("-")[0] for run in runs} for runs in draws]
    assert sum(map(len, grammars)) == len(set().union(*grammars))


def numbers_in(text):
    found = re.findall(r"[-+]?[\d.,]+ ± [\d.]*\d", " ".join(text.replace("\N{MINUS SIGN}", "-").split()))
    return {number.lstrip("+") for number in found}


def between(path, start, end):
    """The text of a page between two others."""
    return (ROOT / path).read_text().partition(start)[2].partition(end)[0]


def differences(*names):
    """The differences that the claims of kept studies are judged by."""
    for name in names:
        for claim in files.read_json(RESULTS / name / "summary.json")["claims"]:
            for answer in claim["answers"]:
                found = (answer["difference"], answer["adjusted"])
                yield from (Estimate.from_dict(estimate) for estimate in found if estimate is not None)


def of_tables(*names):
    """Every estimate of the tables of kept studies, as it is printed."""
    return {each for name in names for each in estimates(files.read_json(RESULTS / name / "summary.json"))}


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


def unsigned(numbers):
    """Numbers as sentences have them: by their sizes."""
    return {each.lstrip("-") for each in numbers}


def test_the_answer_and_the_readme_give_the_differences_that_were_judged():
    draws = [name for name in KEPT if name.startswith(("brackets", "same-loss-27"))]
    draws += POST_HOC.DOSE_RESPONSE
    found = {number(each) for each in differences(*draws)} | post_hoc_numbers()
    found.add("-4.98 ± 0.35")  # of a retired study, whose results are at commit 91da9663
    assert len(given := numbers_in((ROOT / "docs/answer.md").read_text())) > 12
    assert given <= found
    assert len(given := numbers_in(between("README.md", "## Findings", "\n## "))) == 13
    assert unsigned(given) <= unsigned(found | of_tables("optimizers", "optimizers-repeated"))


def test_the_numbers_of_the_study_optimizers_are_those_of_its_tables():
    given = numbers_in(between("docs/method/studies.md", "### The first design of optimizers\n", "\n##"))
    assert len(given) > 150
    assert given <= of_tables("optimizers", "optimizers-repeated") | post_hoc_numbers()


@pytest.mark.parametrize("study", ["dose-response", "optimizers"])
def test_the_numbers_of_slopes_are_those_of_their_draws(study):
    draws = POST_HOC.SLOPES if study == "dose-response" else POST_HOC.RATES
    given = numbers_in(between("docs/method/studies.md", f"\n## {study}\n", "### The first design of"))
    assert len(given) > 15
    judged = {number(each) for each in differences(*draws)}
    explained = numbers_in("".join((RESULTS / name / "summary.json").read_text() for name in draws))  # not adjusted
    assert given <= of_tables(*draws) | judged | explained | post_hoc_numbers()


def test_the_accuracies_of_same_loss_are_those_of_the_two_draws():
    given = numbers_in(between("docs/method/studies.md", "Accuracy in percentage points:", "Loss, in"))
    both = compare(RESULTS / "same-loss-27-grammars", RESULTS / "same-loss-27-grammars-repeated").numbers
    assert len(given) > 40
    assert given <= {number(found) for pair in both for found in (pair.first, pair.second)}


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Two replications on a laptop", ("paper-laptop", "paper-laptop-repeated")),
        ("An evening", ("paper-evening",)),
        ("The first design", ("paper-evening-first-design",)),
    ],
)
def test_the_numbers_of_the_paper_study_are_those_of_its_tables(title, names):
    text = between("docs/method/studies.md", f"### {title}\n", "\n##").replace("**", "")
    found = of_tables(*names)
    assert numbers_in("\n".join(line for line in text.splitlines() if line.startswith("|"))) <= found
    assert (given := numbers_in(text))
    assert unsigned(given) <= unsigned(found)


def test_kept_pages_warn_only_of_missed_targets_and_may_load_the_script_that_they_share():
    pages = list(RESULTS.glob("*/index.html"))
    assert len(pages) > 3
    for page in pages:
        text = page.read_text()
        # other claims than those that the study was started with, or identical weights, would be told there too
        banner = text.partition('class="banner"')[2].partition("</div>")[0]
        assert not banner or re.search(r">\s*\d+ of \d+ runs missed a target", banner), page
        assert "after this study was started" not in banner, page
        assert "Identical" not in banner, page
        assert '<script src="../vega.js"></script>' in text, page
        assert {"'self'", "file:"} <= set(text.partition("script-src ")[2].partition(";")[0].split()), page


# --- what no claim asked for ------------------------------------------------------------------------------------------


def script():
    spec = importlib.util.spec_from_file_location("post_hoc", RESULTS / "post_hoc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


POST_HOC = script()


@functools.cache
def post_hoc_tables():
    return {table.__name__: POST_HOC.markdown(table()) for table in POST_HOC.TABLES}


def post_hoc_numbers():
    return set().union(*map(numbers_in, post_hoc_tables().values()))


@pytest.mark.parametrize("name", [table.__name__ for table in POST_HOC.TABLES])
def test_the_results_page_has_the_tables_that_were_made_after_the_results_were_known(name):
    page = "docs/answer.md" if name == "sign_counts" else "docs/method/studies.md"
    assert post_hoc_tables()[name] in (ROOT / page).read_text()


def test_the_answer_gives_the_ranges_of_those_tables():
    rows = [line.strip("| ").split(" | ") for line in post_hoc_tables()["association_table"].splitlines()[2:]]
    cells = {tuple(row[:3]): row[3].split("<br>") for row in rows}
    asked = (("minimal trace", "KL"), ("effective rank", "KL"), ("minimal trace", "KL, effective rank"))
    answer = (ROOT / "docs/answer.md").read_text()
    for task in POST_HOC.ACCURACIES.values():
        assert " | ".join("; ".join(cells[*pair, task]) for pair in asked) in answer

    def span(pair):
        values = [each for task in POST_HOC.ACCURACIES.values() for each in cells[*pair, task]]
        ordered = sorted(values, key=lambda each: float(each.replace("\N{MINUS SIGN}", "-")))
        return f"{ordered[0]} to {ordered[-1]}"

    assert f"correlate ({span(asked[0])})" in answer
    rises = {name: POST_HOC.by_optimizer(name, "int4-rise").mean(axis=0) for name in POST_HOC.OPTIMIZERS}
    shares = [max(rises[name] / POST_HOC.by_optimizer(name, "loss").mean(axis=0)) for name in rises]
    assert f"{max(map(max, rises.values())):.4f} nats ({100 * max(shares):.2f} %)" in answer
    judged_intervals = {
        f"{low:.2f} to {high:.2f}".replace("-", "\N{MINUS SIGN}")
        for name in (*POST_HOC.DOSE_RESPONSE, *POST_HOC.SLOPES)
        for low, high in (each.ci95 for each in differences(name))
    }
    given = set(re.findall(r"(?:95 %|;) (\S+ to [\d.]+)", answer))
    assert len(given) == 6
    assert {each for each in given if each not in "".join(post_hoc_tables().values())} <= judged_intervals


def test_the_slope_of_a_grammar_is_the_mean_of_its_seeds():
    rows, key = POST_HOC.values("dose-response").filter(pl.col("arm").is_in(POST_HOC.DOSES)), POST_HOC.PROBES[1]
    accuracies, halvings = 100 * rows[key].to_numpy(), -np.log2(rows["minimal-trace"].to_numpy())
    within = slope_within(accuracies, halvings, rows["seed"].to_list(), unit="points a halving")
    assert np.mean(POST_HOC.trends(rows, {key: 1}, adjusted=False)) == pytest.approx(within.value)
    # accuracies that follow from the trace and the KL alone
    slopes = {slope.measure: slope.value for slope in read_pilot(RESULTS / "dose-response" / "pilot.toml")}
    made = rows.with_columns(pl.Series(key, (2 * halvings + slopes[key] * rows["kl"].to_numpy()) / 100))
    assert POST_HOC.trends(made, {key: 1}) == pytest.approx([2.0] * 12)


@pytest.mark.parametrize("axis", [0, 1], ids=["over grammars", "over optimizers"])
def test_partial_correlations_are_those_of_the_library(axis):
    x, y, kl = (POST_HOC.by_optimizer("optimizers", key) for key in ("minimal-trace", "few-shot-root-30", "kl"))

    def library(without=()):
        a, b, c = (np.delete(each, without, axis) for each in (x, y, kl))
        grammars = np.indices(a.shape)[0].ravel()
        found = correlation(a.ravel(), b.ravel(), grammars, given={"KL": c.ravel()}, within=grammars, resamples=100)
        return math.atanh(found.value)

    z = jackknife(library(), [library([i]) for i in range(8)], range(8), unit="artanh", num_observations=64)
    value, _, interval = POST_HOC.jackknifed(x, y, [kl], axis)
    assert (value, *interval) == pytest.approx([math.tanh(each) for each in (z.value, *z.ci95)])
