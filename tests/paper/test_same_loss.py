"""The study same-loss: its plan, its verdicts on known numbers, its answer and its page."""

import dataclasses
import json
import math
import re

import pytest
from known_study import judged, known_results, verdicts

import known_estimates as known
from isoloss.paper import same_loss as page
from isoloss.paper.design import pilot_slopes, read_pilot
from isoloss.paper.same_loss import BASE, GROUPS, PILOT, SCALES, STUDY, UNTOUCHED, tables
from isoloss.paper.same_loss_pilot import loss_margin
from isoloss.paper.tables import factor
from isoloss.report.data import TRACE
from isoloss.studies.claims import Verdict, claims_sha256
from isoloss.studies.folder import StudyFolder
from isoloss.studies.page import report
from isoloss.studies.results import run_of

SCALE = SCALES["laptop"]
FIRST = SCALE.units[0].prefix
SHOWN, NO_EFFECT, NOT_SHOWN, CONTRADICTED, NOT_TESTED, _ = Verdict
# label noise flattens and improves transfer, and the helper is seen: what the other claims are tested after
PASSING = {
    "label_noise": {"trace": -40.0, "minimal-trace": -5.0, "probe-prefix-4": 0.02},
    "helper": {"probe-prefix-4": 0.05},
}
PRIMARY = ("noise-transfer", "prefix-4")


def value(key, arm, grammar, changes):
    """The known value of an estimate: the same for all arms, but for a number of the grammar and for `changes`."""
    by_kind = {"kl": 0.003, "trace": 80.0, "minimal-trace": 20.0}
    kind = key.removesuffix("-rescaled-at-random")
    base = by_kind.get(kind, 20.0 if "minimal" in key else 80.0 if "trace" in key else 0.6)
    spread = {"kl": 1e-5}.get(key, 0.1 if base > 1 else 0.001)
    noise = spread * math.sin(7 * grammar + len(arm) + len(key))
    scale = 2.0 if key == "trace-rescaled-at-random" else 1.0
    return scale * base + (0 if arm == UNTOUCHED and key != "kl" else noise) + changes.get((arm, key), 0.0)


def results_of(scale=SCALE, **given):
    """Results in which nothing differs but what is `given`: by arm, the change of each estimate at all checkpoints."""
    changes = {(arm.replace("_", "-"), key): by for arm, some in given.items() for key, by in some.items()}
    return known_results(scale, lambda unit, arm, key: value(key, arm, unit.language.seed, changes))


# --- the design ------------------------------------------------------------------------------------------------------


def test_every_claim_about_flatness_is_asked_with_both_traces():
    for claim in STUDY.claims:
        if "flat" in claim.id or "sharp" in claim.id:
            names = claim.keys(STUDY.scale()).values()
            assert {"minimal-trace" in name for name in names} == {True, False}


@pytest.mark.parametrize("name", list(SCALES))
def test_every_claim_about_transfer_is_asked_of_every_task(name):
    scale = SCALES[name]
    asked = {}
    for result in judged(STUDY, results_of(scale), name):
        asked[result.claim.id] = [one.case for one in result.answers]
    tasks = list(scale.tasks)
    fewest = [f"{task} ({scale.shots[0]} examples)" for task in tasks]
    for claim in ("sgd", "noise", "longer", "adversary", "helper", "decay"):
        assert asked[f"{claim}-transfer"] == tasks + fewest
    kinds = ("probabilities", "logarithms")
    assert asked["lookup-transfer"] == [f"{task} ({kind})" for kind in kinds for task in tasks]


def test_all_arms_of_a_unit_have_the_same_cooldown_and_are_measured_alike():
    unit = SCALE.units[0]
    arms = [SCALE.experiments[unit.run(arm)] for arm in GROUPS]
    stage = SCALE.experiments[f"{FIRST}-label-noise"].config.stages[0]
    assert stage.optimizer.warmup_steps == 0.12 * stage.steps  # appendix B.2
    assert (stage.labels, SCALE.experiments[f"{FIRST}-no-noise"].config.stages[0].labels) == ("sampled", "exact")
    # the base is what the untouched arm has before its cooldown
    assert SCALE.experiments[unit.run(UNTOUCHED)].config.init_from == f"../{unit.run(BASE)}"
    assert SCALE.experiments[unit.run(BASE)].kept_steps == (0, SCALE.steps)
    cooldowns = {arm.config.stages[-1].applied_to(arm.config).optimizer for arm in arms}
    assert [cooldown.weight_decay for cooldown in cooldowns] == [0.0]
    assert {arm.config.stages[-1].steps for arm in arms} == {SCALE.cooldown_steps}
    assert len({str(arm.measurements[0].settings) for arm in SCALE.experiments.values() if arm.block == 0}) == 1
    seeds = {arm.measurements[0].settings["seed"] for arm in arms}
    assert not seeds & {arm.config.seed for arm in arms}  # no probe is fitted on the adversary's examples


def test_the_slopes_are_those_of_the_pilot():
    slopes = {slope.size: slope.value for slope in read_pilot(PILOT) if slope.measure == "probe-prefix-4"}
    assert set(slopes) == set(SCALE.sizes)
    assert pilot_slopes(PILOT, "d32")["probe-prefix-4"].value == slopes["d32"]
    both = pilot_slopes(PILOT, "d16", "d32")["probe-prefix-4"]
    assert both.value == pytest.approx((slopes["d16"] + slopes["d32"]) / 2)
    errors = [pilot_slopes(PILOT, size)["probe-prefix-4"].stderr for size in ("d16", "d32")]
    apart = (slopes["d16"] - slopes["d32"]) / 2
    assert both.stderr**2 == pytest.approx((errors[0] ** 2 + errors[1] ** 2) / 4 + apart**2)
    for key in (*SCALE.probes.values(), *SCALE.projected_probes.values()):
        assert pilot_slopes(PILOT, "d32", "d64")[key].samples > 1


def test_the_margin_of_the_loss_is_worth_a_fifth_of_the_smallest_effect():

    margin = loss_margin(pilot_slopes(PILOT, SCALE.main_size)["probe-prefix-4"])
    assert STUDY.loss_margin == pytest.approx(margin, rel=0.02)
    others = {claim.id: claim.loss_margin for claim in STUDY.claims if claim.loss_margin}
    wider = "noise-flatter", "adversary-transfer", "adversary-sharper", "helper-flatter"
    assert others == pytest.approx(dict.fromkeys(wider, 5 * STUDY.loss_margin))


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # the gates, one after the other
        (
            {"label_noise": {"trace": -40.0}},
            {("noise-flatter", "trace"): NOT_SHOWN, ("helper-transfer", "prefix-4"): NOT_TESTED, PRIMARY: NOT_TESTED},
        ),
        (
            {"helper": {}},
            {("noise-flatter", "trace"): SHOWN, PRIMARY: NOT_TESTED, ("sgd-flatter", "trace"): NOT_TESTED},
        ),
        (
            {"label_noise": {"trace": -40.0, "minimal-trace": -5.0}},
            {PRIMARY: NO_EFFECT, ("sgd-flatter", "trace"): SHOWN, ("helper-transfer", "prefix-2"): NOT_SHOWN},
        ),
        # flatter and better, at the same loss
        (
            {},
            {
                PRIMARY: SHOWN,
                ("noise-transfer", "prefix-2"): NO_EFFECT,
                ("sgd-flatter", "trace"): SHOWN,
                ("noise-flatter", "minimal-trace"): SHOWN,
                ("sgd-transfer", "prefix-4"): SHOWN,
            },
        ),
        # the loss moves: whatever else moves says nothing about models of the same loss
        (
            {"longer": {"kl": -0.001, "trace": -40.0, "probe-prefix-4": 0.02}},
            {("longer-transfer", "prefix-4"): NOT_TESTED, ("longer-flatter", "trace"): NOT_TESTED},
        ),
        # controls
        (
            {"adversary": {"probe-prefix-4": 0.05}},
            {
                ("helper-transfer", "prefix-4"): SHOWN,
                ("helper-flatter", "minimal-trace"): NOT_SHOWN,
                ("adversary-transfer", "prefix-4"): CONTRADICTED,
                ("rescaling", "trace"): CONTRADICTED,
                ("rescaling", "minimal-trace"): SHOWN,
            },
        ),
        # sizes: by features as many of each, and in one architecture
        (
            {
                "d16": {
                    "projected-prefix-4-64": -0.03,
                    "probe-prefix-2": 0.3,
                    "trace-in-d64-paper": 40.0,
                    "minimal-trace-in-d64": -5.0,
                }
            },
            {
                ("larger-transfer", "prefix-4 (d16 to d32)"): SHOWN,
                ("larger-transfer", "prefix-2 (d16 to d32)"): NOT_SHOWN,
                ("larger-flatter", "trace, scale paper (d16 to d32)"): SHOWN,
                ("larger-flatter", "minimal-trace (d16 to d32)"): CONTRADICTED,
                ("larger-flatter", "minimal-trace (d32 to d64)"): NOT_SHOWN,
            },
        ),
        # the tables
        (
            {"base": {"lookup-prefix-4": -0.05, "log-lookup-prefix-4": 0.05}},
            {
                ("lookup-transfer", "prefix-4 (probabilities)"): SHOWN,
                ("lookup-transfer", "prefix-4 (logarithms)"): CONTRADICTED,
            },
        ),
    ],
)
def test_verdicts_on_known_numbers(given, expected):
    found = verdicts(STUDY, results_of(**PASSING | given))
    assert {name: found[name] for name in expected} == expected


def test_errors_are_over_grammars_and_differences_are_adjusted():
    found = results_of(label_noise={"kl": -1e-4})
    primary, longer = (
        next(result for result in judged(STUDY, found) if result.claim.id == name).answers[0]
        for name in ("noise-transfer", "longer-transfer")
    )
    assert f"over {len(SCALE.grammars)} grammars" in primary.explanation
    assert longer.difference.samples == len(SCALE.grammars)
    assert (primary.role, longer.role) == ("primary", "secondary")
    differences = [
        100
        * (
            found.at(unit.run("label-noise"))["probe-prefix-4"].value
            - found.at(unit.run("no-noise"))["probe-prefix-4"].value
        )
        for unit in SCALE.units
    ]
    losses = [
        found.at(unit.run("label-noise"))["kl"].value - found.at(unit.run("no-noise"))["kl"].value
        for unit in SCALE.units
    ]
    slope = pilot_slopes(PILOT, "d32")["probe-prefix-4"].value
    adjusted = sum(differences) / len(differences) - slope * sum(losses) / len(losses)
    assert primary.difference.value == primary.adjusted.value == pytest.approx(adjusted)


def answer(results):
    """The cards of the answer."""
    return STUDY.answer(judged(STUDY, results), results)


def test_the_answer_says_what_the_verdicts_say():
    flatter, transfers, differ = answer(results_of())
    assert flatter.value.startswith("Not shown: 1.00 times the trace, 1.00 times the minimal trace")
    assert transfers.value == differ.value == "Not tested: the manipulation check is not shown"
    same = {"trace": -40.0, "minimal-trace": -5.0}
    _, transfers, differ = answer(results_of(**PASSING | {"label_noise": same}))
    assert transfers.value.startswith("No effect of 0.5 points or more: ")
    assert (differ.value[:9], differ.tone) == ("Not shown", "unclear")
    assert "positive control shown" in differ.detail
    flatter, transfers, differ = answer(
        results_of(**PASSING, adversary={"probe-prefix-4": -0.05, "probe-prefix-2": -0.05})
    )
    assert flatter.value == "Yes: 0.50 times the trace, 0.75 times the minimal trace"
    assert re.match(r"Yes: \+(1\.9|2\.0)", transfers.value)
    assert (differ.value, differ.tone) == ("2 of 4 cases shown", "unclear")
    assert re.search(r": -(4\.9|5\.0)\d* ± .*, shown; .*; 3 more cases below: 1 shown, 2 not shown$", differ.detail)
    worse = answer(results_of(**PASSING | {"label_noise": same | {"probe-prefix-4": -0.02}}))
    assert re.match(r"No, the opposite: -(1\.9|2\.0)", worse[1].value)
    blind = answer(results_of(**PASSING | {"helper": {}}))
    assert blind[1].value == "Not tested: the positive control is not shown"
    other = answer(results_of(label_noise={"kl": 0.01}))
    assert other[0].value == "Not tested: the losses may differ"


# --- tables and the page ---------------------------------------------------------------------------------------------


def test_the_factor_of_a_trace_is_the_geometric_mean():
    pairs = [({"trace": known.measured(10.0)}, {"trace": known.measured(each)}) for each in (20.0, 40.0)]
    found = factor(pairs, "trace", ["a", "b"])
    assert found.value == pytest.approx(math.sqrt(8))
    assert found.stderr == pytest.approx(found.value * math.log(2) / 2)


def test_tables_of_differences():
    found = results_of(label_noise={"trace": -40.0, "kl": 1e-3, "few-shot-prefix-4-100": 0.1})
    for run in (unit.run("label-noise") for unit in SCALE.units):
        step = SCALE.sgd_steps
        found.checkpoints[run, step]["kl"] = exactly(found.checkpoints[run, step]["kl"], 0.013)
    by_name = {table.name: dict(table.rows) for table in tables(found)}
    after, before = by_name["after"], by_name["before"]
    label = GROUPS["label-noise"], GROUPS[UNTOUCHED], len(SCALE.grammars)
    assert after[label]["kl"].value == pytest.approx(1e-3, abs=5e-5)
    assert after[label]["trace"].value == pytest.approx(0.5, abs=0.01)
    assert after[label]["few-shot-prefix-4-100"].value == pytest.approx(10, abs=0.3)
    assert before[label]["kl"].value == pytest.approx(1e-2, abs=5e-5)
    cooldowns = by_name["cooldowns"]
    assert [row[0] for row in cooldowns] == [0, *SCALE.other_cooldowns, SCALE.cooldown_steps]
    baselines = by_name["baselines"]
    assert baselines[("Bayes-optimal classifier",)]["probe-prefix-4"].value == 1.0
    assert baselines[("Majority class",)]["probe-prefix-4"].value == pytest.approx(0.2)


def exactly(one, value):
    """The same with another value."""
    return dataclasses.replace(one, value=value)


def test_the_page_has_every_part_and_is_the_same_every_time(tmp_path, quick_figures):
    smoke = SCALES["smoke"]
    save(results_of(smoke, label_noise={"trace": -40.0}), tmp_path)
    folder = StudyFolder(STUDY, tmp_path, "smoke")
    index, *_ = report(folder)
    text = index.read_text()
    assert "Scale smoke is too small to say anything, and no verdict is given." in text
    assert claims_sha256(STUDY.claims, smoke) in text
    assert "The same models, rescaled at random" in text
    assert f'"{smoke.units[0].prefix}-helper"' in text  # among the configs
    assert {p.stem for p in (index.parent / "figures").iterdir()} == {
        "arms",
        "flatness-probe-prefix-4",
        "flatness-probe-prefix-2",
        "sizes",
    }
    before = {path: path.read_bytes() for path in index.parent.rglob("*.*")}
    report(folder)
    assert {path: path.read_bytes() for path in index.parent.rglob("*.*")} == before
    document = json.loads(json.dumps(folder.summary().to_dict(), allow_nan=False))
    assert {one["verdict"] for claim in document["claims"] for one in claim["answers"]} == {"no verdict at this scale"}


def save(results, folder):
    """Write results as the runs of a finished study."""
    for name, experiment in results.experiments.items():
        run = run_of(folder, name, experiment)
        run.create(experiment.config)
        known.files.write_json(
            run.path / "result.json", {"num_parameters": 1000 * int(experiment.config.model.size[1:])}
        )
        for part in experiment.measurements:
            for step in experiment.steps(part):
                at = results.checkpoints[name, step]
                for measure in part.measures:
                    names = {
                        "loss": ("entropy", "kl", "loss"),
                        "rescaling-control": tuple(k for k in at if "random" in k),
                    }
                    own = names.get(measure, (measure,))
                    known.save_evaluation(run, measure, step, {key: at[key] for key in own})


def test_the_correlation_is_within_grammars_and_given_the_loss():
    found = results_of()
    for place, unit in enumerate(SCALE.units):
        for number, arm in enumerate(arm for arm in GROUPS if unit.run(arm) in SCALE.experiments):
            at = found.checkpoints[unit.run(arm), SCALE.experiments[unit.run(arm)].config.steps]
            logs = number + 0.3 * math.sin(5 * number + place)
            at["trace"] = exactly(at["trace"], math.exp(place + logs))
            at["probe-prefix-4"] = exactly(at["probe-prefix-4"], 0.1 * place - 0.01 * number)
    row = page._correlation(found, TRACE, "prefix-4", "all arms", ())
    assert row.value < -0.9  # less the grammars' own means, which rise together
    assert row.low < row.value < row.high
    models = len(GROUPS) * len(SCALE.grammars)
    assert row.label.endswith(f", {models} models")
    few = page._correlation(results_of(SCALES["smoke"]), TRACE, "prefix-4", "all arms", ())
    assert "not known" in few.effect
