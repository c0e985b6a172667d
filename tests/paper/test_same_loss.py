"""The study same-loss: its plan, its verdicts on known numbers, and its page."""

import dataclasses
import hashlib
import json

import pytest

import known_estimates as known
from isoloss.errors import IsolossError
from isoloss.paper.algorithms.study import STUDY as ALGORITHMS
from isoloss.paper.same_loss import page
from isoloss.paper.same_loss import study as design
from isoloss.paper.same_loss.study import STUDY
from isoloss.studies.answers import answer_all
from isoloss.studies.claims import read_claims
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import check
from isoloss.studies.results import Results, common_measures, run_of
from isoloss.studies.verdicts import Verdict

SCALE = design.SCALES["smoke"]
FOLDER_FILES = ["configs/adamw-d16.toml", "configs/adamw-d32.toml", "configs/sgd-d32.toml", "study.json"]


def at(kl=0.04, trace=40.0, root=0.5, prefix=0.5, minimum=10.0):
    return known.checkpoint(SCALE.tasks, kl, trace, (root, prefix), minimum)


def known_results(tmp_path, *, lookup=0.5, expanded=None, **last):
    """Results in which every checkpoint is the same but for the last ones of the named runs.

    `expanded` gives the smaller size's trace in the larger one's architecture by scale, 40 unless given, and its
    minimal trace by `minimum`, 10 unless given.
    """
    estimates = {(name, step): at() for name, experiment in SCALE.experiments.items() for step in experiment.kept_steps}
    for name, changes in last.items():
        run = name.replace("_", "-")
        estimates[run, SCALE.experiments[run].config.steps] = at(**changes)
    for size in SCALE.sizes[:-1]:
        for name, measure in SCALE.expanded_traces.items():
            trace = known.measured((expanded or {}).get(name, 40.0), 1.0)
            estimates[design.adamw_run(size), SCALE.steps][measure] = trace
        minimum = known.measured((expanded or {}).get("minimum", 10.0), 0.25)
        estimates[design.adamw_run(size), SCALE.steps][SCALE.expanded_minimum] = minimum
    for name, experiment in SCALE.experiments.items():
        checkpoint = estimates[name, experiment.config.steps]
        checkpoint |= known.control(checkpoint)
    main = SCALE.main_run, SCALE.steps
    estimates[main] |= {f"lookup-{task}": known.accuracy(lookup) for task in SCALE.tasks}
    return Results(SCALE, estimates, tmp_path)


def claims(results):
    """The result of every claim."""
    return answer_all(read_claims(STUDY.claims), design.contrasts(results), design.measures(results.scale))


def verdicts(results):
    """The verdict of each case of each claim."""
    return {(result.claim.id, answer.case): answer.verdict for result in claims(results) for answer in result.answers}


SHOWN, NOT_SHOWN, CONTRADICTED, NOT_TESTED, _ = Verdict
TASKS = ("root", "prefix-2")
TRANSFER = ("sgd-transfer", "longer-transfer", "larger-transfer", "lookup-transfer")


def test_every_claim_compares_what_there_is_and_every_contrast_is_asked_of(tmp_path):
    found = known_results(tmp_path)
    asked = [result.claim for result in claims(found) if not result.claim.not_tested]
    assert {claim.compares for claim in asked} == set(design.contrasts(found))
    assert {claim.measures for claim in asked} == {"kl", "flatness", "transfer", "flatness in one architecture"}


@pytest.mark.parametrize("study", [STUDY, ALGORITHMS])
def test_every_claim_about_flatness_is_asked_with_both_traces(study):
    measures = (study.measures or common_measures)(study.scale())
    for claim in read_claims(study.claims).claims:
        if "flat" in claim.id or "sharp" in claim.id:
            assert claim.measures in ("flatness", "flatness in one architecture")
            names = measures[claim.measures].values()
            assert {"minimal-trace" in name for name in names} == {True, False}


@pytest.mark.parametrize("name", list(design.SCALES))
def test_every_claim_about_transfer_is_asked_of_every_task(tmp_path, name, monkeypatch):
    """Also of one that a scale is given later: no claim names its tasks."""
    scale = design.SCALES[name]
    assert design.measures(scale)["transfer"] == {task: f"probe-{task}" for task in scale.tasks}
    asked = {}
    for claim, case in verdicts(known_results(tmp_path)):
        asked.setdefault(claim, []).append(case)
    for claim in TRANSFER:
        suffix = " (d16 to d32)" if claim == "larger-transfer" else ""
        assert asked[claim] == [f"{task}{suffix}" for task in TASKS]
    more = dataclasses.replace(SCALE, tasks=(*SCALE.tasks, "prefix-1"))
    extra = {"probe-prefix-1": known.accuracy(0.5), "lookup-prefix-1": known.accuracy(0.5)}
    checkpoints = {place: {**one, **extra} for place, one in known_results(tmp_path).checkpoints.items()}
    found = verdicts(Results(more, checkpoints, tmp_path))
    cases = {case for claim, case in found if claim == "longer-transfer"}
    assert cases == {*TASKS, "prefix-1"}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # nothing differs: the loss is the same, and nothing else is shown
        (
            {},
            {("sgd-same-loss", ""): SHOWN, ("sgd-flatter", "trace"): CONTRADICTED, ("sgd-transfer", "root"): NOT_SHOWN},
        ),
        # less than half the trace, the same minimal trace, and better probes, at the same loss
        (
            {"sgd_d32": {"trace": 15.0, "root": 0.56, "prefix": 0.56}},
            {
                ("sgd-flatter", "trace"): SHOWN,
                ("sgd-flatter", "minimal-trace"): CONTRADICTED,
                ("sgd-transfer", "root"): SHOWN,
                ("sgd-transfer", "prefix-2"): SHOWN,
                ("larger-flatter", "trace, scale paper (d16 to d32)"): NOT_SHOWN,
            },
        ),
        # the same of the minimal trace alone
        (
            {"sgd_d32": {"minimum": 4.0}, "adamw_d32": {"minimum": 8.0}},
            {
                ("sgd-flatter", "trace"): CONTRADICTED,
                ("sgd-flatter", "minimal-trace"): NOT_SHOWN,
                ("longer-flatter", "trace"): NOT_SHOWN,
                ("longer-flatter", "minimal-trace"): SHOWN,
                ("larger-flatter", "minimal-trace (d16 to d32)"): SHOWN,
            },
        ),
        # a trace that falls by less than half, and a probe that gains less than its error allows to say
        (
            {"sgd_d32": {"trace": 22.0, "root": 0.51}},
            {("sgd-flatter", "trace"): NOT_SHOWN, ("sgd-transfer", "root"): NOT_SHOWN},
        ),
        # the loss moves: whatever else moves says nothing about models of the same loss
        (
            {"sgd_d32": {"kl": 0.06, "trace": 5.0, "root": 0.7}},
            {
                ("sgd-same-loss", ""): CONTRADICTED,
                ("sgd-flatter", "trace"): NOT_TESTED,
                ("sgd-transfer", "root"): NOT_TESTED,
            },
        ),
        # a larger model that transfers better than the smaller one of the same loss, on one task
        (
            {"adamw_d16": {"prefix": 0.44}},
            {
                ("larger-transfer", "prefix-2 (d16 to d32)"): SHOWN,
                ("larger-transfer", "root (d16 to d32)"): NOT_SHOWN,
                ("lookup-transfer", "root"): NOT_SHOWN,
            },
        ),
        # what speaks against a claim on one task stands beside what speaks for it on the other
        (
            {"adamw_d32": {"root": 0.4, "prefix": 0.6}},
            {
                ("longer-transfer", "root"): CONTRADICTED,
                ("longer-transfer", "prefix-2"): SHOWN,
                ("lookup-transfer", "root"): CONTRADICTED,
                ("lookup-transfer", "prefix-2"): SHOWN,
            },
        ),
        # the trace of a smaller model in its own architecture says nothing of the sizes
        (
            {
                "adamw_d16": {"trace": 400.0, "minimum": 100.0},
                "expanded": {"paper": 120.0, "exact": 10.0, "minimum": 5.0},
            },
            {
                ("larger-flatter", "trace, scale paper (d16 to d32)"): SHOWN,
                ("larger-flatter", "trace, scale balanced (d16 to d32)"): NOT_SHOWN,
                ("larger-flatter", "trace, scale exact (d16 to d32)"): CONTRADICTED,
                ("larger-flatter", "minimal-trace (d16 to d32)"): CONTRADICTED,
            },
        ),
    ],
)
def test_verdicts_on_known_numbers(tmp_path, last, expected):
    judged = verdicts(known_results(tmp_path, **last))
    assert {name: judged[name] for name in expected} == expected
    assert judged["adversarial", ""] is judged["regularization", ""] is NOT_TESTED


def test_the_verdict_of_a_claim_says_where_its_tasks_differ(tmp_path):
    found = known_results(tmp_path, adamw_d32={"root": 0.4, "prefix": 0.6})
    longer = next(result for result in claims(found) if result.claim.id == "longer-transfer")
    assert longer.verdict == "shown for prefix-2; contradicted for root"


def test_the_plan_trains_before_it_measures(tmp_path):
    units = StudyFolder(STUDY, tmp_path, "laptop").plan()
    check(units)
    after = {unit.name: unit.after for unit in units}
    assert after["train sgd-d64"] == ("train adamw-d64",)
    assert after["measure sgd-d64"] == ("train sgd-d64",)
    assert not any(unit.done() for unit in units)
    assert {unit.arguments[0] for unit in units} == {"train", "eval"}


def test_laptop_has_what_the_paper_compares():
    scale = design.SCALES["laptop"]
    runs = scale.experiments
    assert {run.config.model.size for run in runs.values()} == {"d16", "d32", "d64"}
    assert len({run.config.language for run in runs.values()}) == 1
    sgd = runs["sgd-d64"].config
    assert sgd.optimizer.warmup_steps == 0.12 * sgd.steps  # appendix B.2


def test_a_folder_of_another_plan_is_refused_and_left_alone(tmp_path):
    StudyFolder(STUDY, tmp_path, "smoke").prepare()
    StudyFolder(STUDY, tmp_path, "smoke").prepare()
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == FOLDER_FILES
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(IsolossError, match="another plan"):
        StudyFolder(STUDY, tmp_path, "laptop").prepare()
    assert (tmp_path / "study.json").read_bytes() == before


def save(results, folder):
    """Write results as the runs of a finished study."""
    known.save(folder, SCALE.experiments, results.checkpoints, SCALE.tasks)
    for task in SCALE.tasks:
        lookup = {"accuracy": results.at(SCALE.main_run)[f"lookup-{task}"]}
        known.save_evaluation(run_of(folder, SCALE.main_run), f"lookup-{task}", SCALE.steps, lookup)
    for run in map(design.adamw_run, SCALE.sizes[:-1]):
        for measure in SCALE.expanded_traces.values():
            known.save_evaluation(run_of(folder, run), measure, SCALE.steps, {"trace": results.at(run)[measure]})
        minimum = {"minimal-trace": results.at(run)[SCALE.expanded_minimum]}
        known.save_evaluation(run_of(folder, run), SCALE.expanded_minimum, SCALE.steps, minimum)


def test_results_are_what_the_files_say(tmp_path):
    written = known_results(tmp_path, sgd_d32={"trace": 15.0})
    save(written, tmp_path)
    read = Results.read(tmp_path, SCALE)
    assert read.checkpoints == written.checkpoints
    assert read.keys == ("kl", "trace", "minimal-trace", "probe-root", "probe-prefix-2")
    table = read.table()
    assert table.height == len(written.checkpoints)
    assert table.filter(run="sgd-d32", step=SCALE.sgd_steps)["trace"].item() == 15.0
    over_time = page._over_time(read).filter(run="sgd-d32")
    assert over_time["step"].to_list() == [SCALE.steps, SCALE.steps + 100, SCALE.steps + SCALE.sgd_steps]
    assert over_time["trace"].to_list() == [40.0, 40.0, 15.0]


def test_a_missing_evaluation_is_named(tmp_path):
    save(known_results(tmp_path), tmp_path)
    run_of(tmp_path, "sgd-d32").evaluation_path("trace", 100).unlink()
    with pytest.raises(IsolossError, match="sgd-d32 has no evaluation trace at step 100"):
        Results.read(tmp_path, SCALE)


def test_the_page_says_it_and_is_the_same_every_time(tmp_path):
    save(known_results(tmp_path, sgd_d32={"trace": 15.0}), tmp_path)
    folder = StudyFolder(STUDY, tmp_path, "smoke")
    index = folder.report()
    text = index.read_text()
    assert "Scale smoke: every part runs, no verdict is given, and no number means anything." in text
    assert f"claims.toml, SHA-256 {hashlib.sha256(STUDY.claims.read_bytes()).hexdigest()}" in text
    assert "multiplies the trace by 0.375 ± 0.027" in text  # hypot(1 / 15, 1 / 40) of it
    assert "the minimal trace by 1.000 ± 0.035" in text
    assert "The same models, rescaled at random" in text
    assert "../runs/sgd-d32/run.json" in text
    assert {p.suffix for p in (index.parent / "figures").iterdir()} == {".pdf", ".png"}
    before = {path: path.read_bytes() for path in index.parent.rglob("*.*")}
    folder.report()
    assert {path: path.read_bytes() for path in index.parent.rglob("*.*")} == before
    trace = {"trace": known.measured(30.0, 1.0)}
    known.save_evaluation(run_of(tmp_path, "sgd-d32"), "trace", SCALE.sgd_steps, trace)
    assert "multiplies the trace by 0.750 ± 0.031" in folder.report().read_text()


def test_the_summary_is_json(tmp_path):
    save(known_results(tmp_path), tmp_path)
    summary = StudyFolder(STUDY, tmp_path, "smoke").summary()
    document = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    answers = {claim["claim"]: [answer["case"] for answer in claim["answers"]] for claim in document["claims"]}
    assert len(answers) == 10
    assert answers["longer-transfer"] == list(TASKS)
    verdicts = {answer["verdict"] for claim in document["claims"] for answer in claim["answers"]}
    assert verdicts == {"no verdict at this scale", "not tested"}  # not tested: what the study does not have
    checkpoints, sizes, controls = summary.tables
    columns, rows = checkpoints.cells()
    assert "trace (nats/token)" in columns
    assert {len(row) for row in rows} == {len(columns)}
    columns, rows = sizes.cells()
    assert columns[1] == "raw, not comparable (nats/token)"
    assert [row[0] for row in rows] == list(SCALE.sizes)
    columns, rows = controls.cells()
    assert columns[2:4] == ["trace (nats/token)", "trace-rescaled-at-random (nats/token)"]
    assert [row[:2] for row in rows] == [[name, "300"] for name in SCALE.experiments]
    assert "The trace is multiplied by 2 to 2; the minimal trace changes by at most 0e+00" in controls.caption
