"""The study algorithms: its plan, which checkpoints it compares, its verdicts on known numbers, and its page."""

import dataclasses
import itertools
import json
import math
import statistics

import pytest

import known_estimates as known
from isoloss import config as configs
from isoloss.cli import study as command
from isoloss.errors import IsolossError
from isoloss.lab.tasks import make_task
from isoloss.paper.algorithms import study as design
from isoloss.paper.algorithms.study import STUDY
from isoloss.report.html import Card
from isoloss.studies.claims import Verdict
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import check
from isoloss.studies.results import Results, run_of

SCALE = design.SCALES["laptop"]
(DATASET,) = SCALE.datasets
TASKS = tuple(DATASET.tasks)
FIRST = DATASET.replicates[0]
STEPS = DATASET.watched
EARLY = dict.fromkeys(DATASET.arms["exact"].watched, 0.2)  # KL of the runs with exact labels
KLS = (0.09, 0.08, 0.07, 0.06, 0.055, 0.05)  # of every run, unless told
SHOWN, _, NOT_SHOWN, CONTRADICTED, NOT_TESTED, _ = Verdict
SEEN = {"adversarial": {"accuracies": (0.35, 0.6, 0.7)}}  # the adversary takes 15 points of its task and nothing else


def known_results(folder, **algorithms):
    """Results in which runs differ by their grammar alone; `algorithms` gives kls, accuracies or traces by grammar."""
    estimates = {}
    for algorithm in design.ALGORITHMS:
        own = algorithms.get(algorithm.replace("-", "_"), {})
        for i, unit in enumerate(DATASET.replicates):
            shift = i / 100
            kls = dict(zip(STEPS, own.get("kls", KLS), strict=True))
            for step, kl in {**(EARLY if algorithm == "exact" else {}), **kls}.items():
                trace = own.get("traces", (40.0, 40.1, 40.3, 40.2, 40.1))[i]
                accuracies = [share + shift for share in own.get("accuracies", (0.5, 0.6, 0.7))]
                at = known.checkpoint(TASKS, kl, trace, accuracies, trace / 4)
                if (i, step) == (0, DATASET.last):
                    at |= known.control(at)
                estimates[unit.run(algorithm), step] = at
    return Results(SCALE, estimates, folder)


def config_of(algorithm):
    """What the first run of an algorithm is trained with."""
    return SCALE.experiments[FIRST.run(algorithm)].config


def verdicts(found):
    """The verdict of each claim, and of each case of those that have several as `claim: case`."""
    return {
        f"{result.claim.id}: {answer.case}" if answer.case else result.claim.id: answer.verdict
        for result in StudyFolder(STUDY, found.folder, "laptop").claims(found)
        for answer in result.answers
    }


def test_every_claim_is_asked_of_every_task(tmp_path):
    answered = list(verdicts(known_results(tmp_path)))
    assert len(answered) == 2 + 5 * 2 + 5 * len(TASKS)
    for claim in ("adversarial", "regularized", "sam", "exact", "penalty"):
        assert [name for name in answered if name.startswith(f"{claim}-transfer")] == [
            f"{claim}-transfer: {task}" for task in TASKS
        ]


@pytest.mark.parametrize(
    ("algorithms", "expected"),
    [
        (
            {},
            {
                "adversarial-same-loss": SHOWN,
                "adversarial-transfer: prefix-4": SHOWN,
                "sam-flatter: trace": NOT_SHOWN,
                "adversarial-transfer: root": NOT_SHOWN,
                "adversarial-sharper: trace": NOT_SHOWN,
            },
        ),
        (
            {"adversarial": {"accuracies": (0.5, 0.6, 0.7)}},
            {"adversarial-transfer: prefix-4": NOT_SHOWN, "sam-transfer: prefix-4": NOT_TESTED},
        ),
        (
            {"adversarial": {"accuracies": (0.55, 0.55, 0.7)}},
            {"adversarial-transfer: prefix-4": CONTRADICTED, "adversarial-same-loss": NOT_TESTED},
        ),
        (
            {"adversarial": {**SEEN["adversarial"], "traces": (50.0, 51.0, 50.5, 50.2, 50.7)}},
            {"adversarial-sharper: trace": SHOWN, "exact-sharper: trace": NOT_SHOWN},
        ),
        # flatter on average, but not by grammars that disagree
        ({"sam": {"traces": (30.0, 39.0, 39.5, 39.4, 39.2)}}, {"sam-flatter: trace": NOT_SHOWN}),
        # each algorithm alone: its own claims and no other's
        *(
            (
                {algorithm: {"traces": (30.0, 30.5, 31.0, 30.2, 30.8), "accuracies": (share, 0.6, 0.7)}},
                {
                    f"{claim}: trace": CONTRADICTED if "sharper" in claim else SHOWN,
                    f"{claim.split('-')[0]}-transfer: prefix-4": SHOWN,
                    f"{other}: trace": NOT_SHOWN,
                    f"{other.split('-')[0]}-transfer: root": NOT_SHOWN,
                },
            )
            for algorithm, claim, other, share in (
                ("regularized", "regularized-flatter", "sam-flatter", 0.6),
                ("sam", "sam-flatter", "penalty-flatter", 0.6),
                ("exact", "exact-sharper", "adversarial-sharper", 0.4),
                ("adversarial", "adversarial-sharper", "exact-sharper", 0.4),
                ("fisher_penalty", "penalty-flatter", "regularized-flatter", 0.6),
            )
        ),
        # a loss that is higher at the end is compared with AdamW's earlier one
        (
            {"regularized": {"kls": (0.1, 0.1, 0.1, 0.1, 0.09, 0.07), "accuracies": (0.6, 0.6, 0.7)}},
            {"regularized-same-loss": CONTRADICTED, "regularized-transfer: prefix-4": SHOWN},
        ),
        # and one that AdamW never has is not compared
        (
            {"regularized": {"kls": (0.2, 0.2, 0.2, 0.2, 0.2, 0.2), "accuracies": (0.6, 0.6, 0.7)}},
            {
                "regularized-same-loss": CONTRADICTED,
                "regularized-transfer: root": NOT_TESTED,
                "regularized-flatter: trace": NOT_TESTED,
            },
        ),
    ],
)
def test_verdicts_on_known_numbers(tmp_path, algorithms, expected):
    judged = verdicts(known_results(tmp_path, **SEEN | algorithms))
    assert {name: judged[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kls", "steps"),
    [
        (KLS, (3_000, 3_000)),
        # the algorithm's loss ends higher: its last beside AdamW's nearest
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.062), (1_900, 3_000)),
        # it ends lower: AdamW's last beside the algorithm's nearest
        ((0.08, 0.07, 0.06, 0.049, 0.04, 0.03), (3_000, 1_900)),
        # of two as near the later one
        ((0.08, 0.07, 0.05, 0.05, 0.04, 0.03), (3_000, 1_900)),
    ],
)
def test_which_checkpoints_are_compared(tmp_path, kls, steps):
    found = known_results(tmp_path, sam={"kls": kls, "traces": (30.0, 31.0, 32.0, 31.5, 30.5)})
    matched = design.matched(found, "sam")
    assert matched.steps == (steps,) * 5
    assert matched.ranges() == (f"{steps[1]:,}", f"{steps[0]:,}")
    for unit, (control, own) in zip(DATASET.replicates, matched.pairs, strict=True):
        assert control is found.checkpoints[f"{unit.prefix}-adamw", steps[0]]
        assert own is found.checkpoints[f"{unit.prefix}-sam", steps[1]]
    # AdamW's traces are 40.0, 40.1, 40.3, 40.2, 40.1
    moves = [-10.0, -9.1, -8.3, -8.7, -9.6]
    found = design.differences(found, "sam")["trace"]
    assert (found.value, found.stderr) == pytest.approx(
        (statistics.fmean(moves), statistics.stdev(moves) / math.sqrt(5))
    )


def test_errors_are_over_grammars(tmp_path):
    for result in StudyFolder(STUDY, tmp_path, "laptop").claims(known_results(tmp_path)):
        for answer in result.answers:
            assert "95 % interval over 5 grammars (t with 4 degrees of freedom)" in answer.explanation


def test_a_pair_of_another_loss_is_marked(tmp_path):
    found = known_results(tmp_path, sgd={"kls": (0.2,) * 6})
    _, matched = design.tables(found)
    marks = {labels[0]: labels[3] for labels, _ in matched.rows}
    assert marks == {text: "no" if text == "SGD" else "yes" for text in list(design.ALGORITHMS.values())[1:]}


def test_exact_labels_are_compared_early():
    runs = SCALE.experiments
    exact = runs[FIRST.run("exact")]
    assert exact.steps(exact.measurements[0]) == (200, 300, 400, 500, *STEPS)
    assert runs[FIRST.run("sgd")].kept_steps == STEPS


def test_an_algorithm_changes_one_thing():
    changed = {}
    for algorithm in design.ALGORITHMS:
        lines = configs.differences(*(config_of(name) for name in (design.BASELINE, algorithm)))
        changed[algorithm] = {line.split(" is ")[0].split(".")[0] for line in lines}
    assert changed == {
        "adamw": set(),
        "regularized": {"model", "optimizer"},
        "sam": {"algorithm"},
        "adversarial": {"algorithm"},
        "exact": {"objective", "checkpoints"},
        "fisher-penalty": {"algorithm"},
        "sgd": {"optimizer"},
    }
    plain = config_of(design.BASELINE)
    assert (plain.model.dropout, plain.optimizer.weight_decay) == (0, 0)
    assert config_of("adversarial").algorithm.task == TASKS[0]


@pytest.mark.parametrize("name", list(design.SCALES))
def test_grammars_are_measured_on_sentences_of_their_own(name):
    scale = design.SCALES[name]
    grammars = [language.seed for language in scale.datasets[0].languages]
    measured, trained = {}, {}
    for experiment in scale.experiments.values():
        grammar = experiment.config.language.seed
        assert grammar == grammars[experiment.block]
        measured.setdefault(grammar, set()).add(experiment.measurements[0].settings["seed"])
        trained.setdefault(grammar, set()).add(experiment.config.seed)
    every = [*itertools.chain(*measured.values()), *itertools.chain(*trained.values())]
    assert len(set(every)) == len(every) == 2 * len(grammars)


def test_another_offset_has_other_grammars_and_seeds():
    again = SCALE.with_seed_offset(1).datasets[0]
    for key in ("number", "seed"):
        ours, theirs = ({getattr(one, key) for one in each.replicates} for each in (DATASET, again))
        assert len(ours) == len(theirs) == 5
        assert not ours & theirs


@pytest.mark.parametrize("name", list(design.SCALES))
def test_every_run_can_be_trained_and_every_task_be_made(name):
    (dataset,) = design.SCALES[name].datasets
    for experiment in design.SCALES[name].experiments.values():
        configs.check(experiment.config)
    for config in dataset.languages:
        for task in dataset.tasks:
            assert make_task(config.build(), task, num_train=50, num_test=50, seed=1).majority_rate < 1


def test_the_plan_holds_every_run(tmp_path):
    units = StudyFolder(STUDY, tmp_path, "laptop").plan()
    check(units)
    assert len(units) == 2 * 7 * 5 + 7
    assert not any(unit.done() for unit in units)


def test_the_summary_the_page_and_what_is_printed_say_it(tmp_path, capsys, quick_figures):
    written = known_results(
        tmp_path, adversarial={"accuracies": (0.35, 0.6, 0.7), "traces": (41.0, 42.1, 43.3, 42.2, 42.1)}
    )
    known.save(tmp_path, SCALE.experiments, written.checkpoints, TASKS)
    assert Results.read(tmp_path, SCALE).checkpoints == written.checkpoints

    def answer(claims, results):
        transfer = next(result for result in claims if result.claim.id == "adversarial-transfer")
        blocks = f"{results.blocks_done} of {results.blocks} blocks"
        return [Card(label="The adversary's task", value=f"{transfer.answer('prefix-4').verdict}, by {blocks}")]

    folder = StudyFolder(dataclasses.replace(STUDY, answer=answer), tmp_path, "laptop")
    summary = folder.summary()
    last, matched, controls = summary.tables
    assert [labels for labels, _ in controls.rows] == [(FIRST.run(name), 3_000) for name in design.ALGORITHMS]
    columns, rows = last.cells()
    assert columns[:4] == ["algorithm", "step", "KL (nats/token)", "trace (nats/token)"]
    assert columns[4:6] == ["minimal-trace (nats/token)", "probe-prefix-4 (accuracy, %)"]
    assert [row[0] for row in rows] == list(design.ALGORITHMS.values())
    assert rows[3][:2] == ["Adversary", "3,000"]
    assert rows[3][5] == "37.00 ± 0.71"
    columns, rows = matched.cells()
    assert columns[7] == "probe-prefix-4 (points)"
    assert rows[2][:4] == ["Adversary", "3,000", "3,000", "yes"]
    assert rows[2][5] == "2.00 ± 0.32"
    document = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
    assert [row["algorithm"] for row in document["last"]] == list(design.ALGORITHMS.values())
    assert document["matched"][2]["estimates"]["trace"]["value"] == pytest.approx(2.0)
    shown = {claim["claim"]: claim["answers"][0]["numbers"] for claim in document["claims"]}
    assert shown["adversarial-transfer"]["difference"] == "-15 percentage points"
    page = folder.report()
    text = page.read_text()
    assert f'"{FIRST.run("adversarial")}"' in text  # among the configs
    assert {p.name for p in (page.parent / "figures").iterdir()} == {
        f"trace-{task}.{kind}" for task in TASKS for kind in ("pdf", "png")
    }
    assert 0 < text.index("shown, by 5 of 5 blocks") < text.index('id="section-claims"')
    assert 'class="banner"' not in text
    command._emit_summary(folder, page, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == STUDY.title
    assert "The adversary's task: shown, by 5 of 5 blocks" in lines
    assert lines[-1] == f"page: {page}"
    assert len(lines) < 30 + 27  # a line for each of 27 cases: its verdict, its effect and its interval
    assert "✓ adversarial-transfer, prefix-4: shown; -15 points (exact)" in lines
    # what is said follows the files: an accuracy that its sampled examples make uncertain
    name = FIRST.run("adversarial")
    changed = run_of(tmp_path, name, SCALE.experiments[name])
    known.save_evaluation(changed, "probe-prefix-4", DATASET.last, {"accuracy": known.accuracy(0.2)})
    claims = json.loads(json.dumps(folder.summary().to_dict()))["claims"]
    shown = {claim["claim"]: claim["answers"][0]["numbers"] for claim in claims}
    assert shown["adversarial-transfer"]["difference"] == "-18.0 ± 3.0 percentage points"
    # at a scale without verdicts there is none
    elsewhere = StudyFolder(
        dataclasses.replace(STUDY, answer=answer, verdicts_at=("smoke",)), tmp_path, "laptop"
    ).summary()
    assert elsewhere.answer == ()
    assert elsewhere.warning.startswith("Scale laptop is too small to say anything, and no verdict is given.")
    assert {each.verdict for result in elsewhere.claims for each in result.answers} == {Verdict.NO_VERDICT}


def test_an_answer_that_is_no_card_is_refused(tmp_path):
    folder = StudyFolder(dataclasses.replace(STUDY, answer=lambda claims, results: ["Yes."]), tmp_path, "laptop")
    with pytest.raises(IsolossError, match=r"answer of the study algorithms returns a str; it must return isoloss\.st"):
        folder.summary(known_results(tmp_path))
