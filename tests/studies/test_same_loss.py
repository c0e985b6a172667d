"""The study same-loss: its plan, its verdicts on known numbers, and its page."""

import dataclasses

import known_estimates as known
import pytest

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.report.claims import Verdict
from isoloss.studies import design as designs
from isoloss.studies.engine.plan import check
from isoloss.studies.same_loss import claims, design, results
from isoloss.studies.same_loss.study import STUDY

SCALE = design.scale_of("smoke")
FOLDER_FILES = ["configs/adamw-d16.toml", "configs/adamw-d32.toml", "configs/sgd-d32.toml", "study.json"]


def at(kl=0.04, trace=40.0, root=0.5, prefix=0.5):
    return known.found(SCALE.tasks, kl, trace, (root, prefix))


def known_results(tmp_path, *, lookup=0.5, **last):
    """Results in which every checkpoint is the same but for the last ones of the named runs."""
    estimates = {
        (name, step): at()
        for name, experiment in design.experiments(SCALE).items()
        for step in designs.steps_of(experiment.config)
    }
    for name, changes in last.items():
        run = name.replace("_", "-")
        estimates[run, design.experiments(SCALE)[run].config.steps] = at(**changes)
    lookups = {task: known.estimate(lookup, 0.005, "accuracy") for task in SCALE.tasks}
    return results.Results(SCALE, estimates, lookups, tmp_path)


def verdicts(results):
    return {result.claim.id: result.verdict for result in claims.judge_all(results)}


SHOWN, NOT_SHOWN, CONTRADICTED, NOT_TESTED = Verdict


def test_every_claim_has_a_judge_and_every_judge_a_claim(tmp_path):
    assert list(verdicts(known_results(tmp_path))) == list(claims.JUDGES)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # nothing differs: the loss is the same, and nothing else is shown
        ({}, {"sgd-same-loss": SHOWN, "sgd-flatter": CONTRADICTED, "sgd-transfer-root": NOT_SHOWN}),
        # less than half the trace, and better probes, at the same loss
        (
            {"sgd_d32": {"trace": 15.0, "root": 0.55, "prefix": 0.55}},
            {
                "sgd-flatter": SHOWN,
                "sgd-transfer-root": SHOWN,
                "sgd-transfer-prefix": SHOWN,
                "larger-flatter": NOT_SHOWN,
            },
        ),
        # a trace that falls by less than half, and a probe that gains less than its error allows to say
        ({"sgd_d32": {"trace": 22.0, "root": 0.51}}, {"sgd-flatter": NOT_SHOWN, "sgd-transfer-root": NOT_SHOWN}),
        # the loss moves: whatever else moves says nothing about models of the same loss
        (
            {"sgd_d32": {"kl": 0.06, "trace": 5.0, "root": 0.7}},
            {"sgd-same-loss": CONTRADICTED, "sgd-flatter": NOT_TESTED, "sgd-transfer-root": NOT_TESTED},
        ),
        # a larger model that is flatter and transfers better than the smaller one of the same loss
        (
            {"adamw_d16": {"trace": 60.0, "prefix": 0.45}},
            {"larger-flatter": SHOWN, "larger-transfer": SHOWN, "lookup-transfer-root": NOT_SHOWN},
        ),
        # a worse model than the look-up table is not a better one
        ({"adamw_d32": {"root": 0.4}}, {"lookup-transfer-root": CONTRADICTED, "longer-transfer-prefix": NOT_SHOWN}),
        ({"adamw_d32": {"root": 0.6}}, {"lookup-transfer-root": SHOWN, "lookup-transfer-prefix": NOT_SHOWN}),
    ],
)
def test_verdicts_on_known_numbers(tmp_path, last, expected):
    judged = verdicts(known_results(tmp_path, **last))
    assert {name: judged[name] for name in expected} == expected
    assert judged["adversarial"] is judged["regularisation"] is NOT_TESTED


def test_the_plan_trains_before_it_measures(tmp_path):
    units = STUDY.plan(tmp_path, "laptop")
    check(units)
    after = {unit.name: unit.after for unit in units}
    assert after["train sgd-d64"] == ("train adamw-d64",)
    assert after["measure sgd-d64"] == ("train sgd-d64",)
    assert not any(unit.done() for unit in units)
    assert {unit.arguments[0] for unit in units} == {"train", "eval"}


def test_laptop_has_what_the_paper_compares():
    scale = design.scale_of("laptop")
    runs = design.experiments(scale)
    assert {run.config.model.size for run in runs.values()} == {"d16", "d32", "d64"}
    assert len({run.config.language for run in runs.values()}) == 1
    sgd = runs["sgd-d64"].config
    assert sgd.optimizer.warmup_steps == 0.12 * sgd.steps  # appendix B.2


def test_a_folder_of_another_plan_is_refused_and_left_alone(tmp_path):
    STUDY.prepare(tmp_path, "smoke")
    STUDY.prepare(tmp_path, "smoke")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == FOLDER_FILES
    before = (tmp_path / "study.json").read_bytes()
    with pytest.raises(IsolossError, match="another plan"):
        STUDY.prepare(tmp_path, "laptop")
    assert (tmp_path / "study.json").read_bytes() == before


def save(results, folder):
    """Write results as the runs of a finished study."""
    known.save(folder, design.experiments(SCALE), results.estimates, SCALE.tasks)
    main = designs.run_of(folder, design.main_run(SCALE))
    for task, accuracy in results.lookups.items():
        main.save(known.evaluation(f"lookup-{task}", SCALE.steps, {"accuracy": accuracy}))


def test_results_are_what_the_files_say(tmp_path):
    written = known_results(tmp_path, sgd_d32={"trace": 15.0})
    save(written, tmp_path)
    read = results.read(tmp_path, SCALE)
    assert read.estimates == written.estimates
    assert read.lookups == written.lookups
    table = read.table()
    assert table.height == len(written.estimates)
    assert table.filter(run="sgd-d32", step=SCALE.sgd_steps)["trace"].item() == 15.0
    over_time = read.over_time().filter(run="sgd-d32")
    assert over_time["step"].to_list() == [SCALE.steps, SCALE.steps + 100, SCALE.steps + SCALE.sgd_steps]
    assert over_time["trace"].to_list() == [40.0, 40.0, 15.0]


def test_a_missing_evaluation_is_named(tmp_path):
    save(known_results(tmp_path), tmp_path)
    designs.run_of(tmp_path, "sgd-d32").evaluation_path("trace", 100).unlink()
    with pytest.raises(IsolossError, match="sgd-d32 has no evaluation trace at step 100"):
        results.read(tmp_path, SCALE)


def test_the_page_says_it_and_is_written_once(tmp_path):
    save(known_results(tmp_path, sgd_d32={"trace": 15.0}), tmp_path)
    page = STUDY.report(tmp_path, "smoke")
    text = page.read_text()
    assert "multiplies the trace by 0.38" in text
    assert "../runs/sgd-d32/run.json" in text
    assert {p.suffix for p in (page.parent / "figures").iterdir()} == {".pdf", ".png"}
    before = page.stat().st_mtime_ns
    assert STUDY.report(tmp_path, "smoke").stat().st_mtime_ns == before
    run = designs.run_of(tmp_path, "sgd-d32")
    changed = run.evaluation("trace", SCALE.sgd_steps)
    run.save(dataclasses.replace(changed, estimates={"trace": known.estimate(30.0, 1.0)}))
    assert "multiplies the trace by 0.75" in STUDY.report(tmp_path, "smoke").read_text()


def test_the_summary_is_json(tmp_path):
    save(known_results(tmp_path), tmp_path)
    document = STUDY.summary(tmp_path, "smoke").to_dict()
    files.write_json(tmp_path / "summary.json", document)
    assert len(document["claims"]) == len(claims.JUDGES)
    (table,) = STUDY.summary(tmp_path, "smoke").tables
    columns, rows = table.cells()
    assert "trace (nats/token)" in columns
    assert {len(row) for row in rows} == {len(columns)}
