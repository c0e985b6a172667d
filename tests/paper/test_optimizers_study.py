"""The study optimizers: its arms, and its tables, answer and page of known results."""

import dataclasses

import numpy as np
import pytest
from known_study import judged, known_results

from isoloss.paper.optimizers import (
    ARMS,
    BRANCHES,
    MUON_SGD,
    OPTIMIZERS,
    OTHERS,
    PREDICTORS,
    RATES,
    SCALES,
    STABLE,
    STABLE_MUON,
    STUDY,
    answer,
    associations,
    outcomes,
    parts,
    tables,
)
from isoloss.report.save import save

FEW = dataclasses.replace(SCALES["laptop"], grammars=SCALES["laptop"].grammars[:6])
EVERY = (STABLE, STABLE_MUON, *ARMS, *OTHERS)


def test_arms_end_at_one_target_and_differ_in_how_they_get_there():
    unit = FEW.units[0]
    configs = {arm: FEW.experiments[unit.run(arm)].config for arm in EVERY}
    for arm, config in configs.items():
        (stage,) = config.stages
        assert stage.target_kl == (FEW.stable_kl if arm in (STABLE, STABLE_MUON) else FEW.target_kl)
        assert config.init_from == (f"../{unit.run(BRANCHES[arm])}" if arm in BRANCHES else None)
        assert config.init_optimizer == arm.startswith("wsd")
        # the branches have other sentences than the run before them
        assert config.seed == configs[MUON_SGD if arm in BRANCHES else STABLE].seed
    assert configs[MUON_SGD].seed != configs[STABLE].seed
    # all but the target is AdamW's, so that AdamW on its way is a part of it
    (way,), (whole,) = configs[STABLE].stages, configs["adamw"].stages
    assert dataclasses.replace(way, target_kl=FEW.target_kl) == whole
    assert len({repr((config.stages, config.algorithm, config.init_from)) for config in configs.values()}) == len(EVERY)
    for name in OPTIMIZERS:
        rates = [configs[f"{name}{ending}"].stages[0].optimizer.learning_rate for ending in RATES]
        assert rates == [rates[1] / 2, rates[1], 2 * rates[1]]


def results_of(slope, folder=None):
    """Results in which the first probe changes by `slope` points, and nothing else, where the minimal trace doubles."""
    draw, first = np.random.default_rng(0), next(iter(FEW.probes.values()))
    doubled = {(unit, arm): draw.normal() for unit in FEW.units for arm in EVERY}

    def value(unit, arm, key):
        if key == "kl":
            return FEW.stable_kl if arm == STABLE else FEW.target_kl + 1e-4 * draw.normal()
        if key == "loss":
            return 2.0
        if key == "minimal-trace":
            return 10 * 2.0 ** doubled[unit, arm]
        if key in PREDICTORS or key.startswith(("attention-", "mlp-", "norms")):
            return 5 + draw.normal() ** 2
        by_grammar = 0.5 + unit.language.seed % 7 / 50 + 0.01 * draw.normal()
        return by_grammar + slope * doubled[unit, arm] / 100 * (key == first) + 0.2 * (arm == "helper" and key == first)

    return known_results(FEW, value, folder, ended=lambda arm, step: step and 10 * EVERY.index(arm) + 30)


@pytest.mark.parametrize(("slope", "shown"), [(-2.0, {"minimal-trace"}), (0.0, set())])
def test_a_measure_that_predicts_an_outcome_is_found_and_no_other(slope, shown):
    results = results_of(slope)
    found = associations(results)
    assert len(found) == len(PREDICTORS) * len(outcomes(FEW))
    assert {each.measure for each in found if each.verdict == "shown"} == shown
    first = next(iter(FEW.probes.values()))
    one = next(each for each in found if (each.measure, each.outcome) == ("minimal-trace", first))
    assert one.over_grammars.observations == one.over_optimizers.observations == 6 * len(ARMS)
    assert (one.over_grammars.clusters, one.over_optimizers.clusters) == (6, len(OPTIMIZERS))
    for correlation in (one.over_grammars, one.over_optimizers):
        assert correlation.value == pytest.approx(partial_within(results, first), rel=1e-9)
    assert one.given_other.value == pytest.approx(partial_within(results, first, "effective-rank"), rel=1e-9)


def partial_within(results, outcome, *given):
    """The correlation of what grammars' means and the KL leave of the two, by least squares on indicators."""
    ends = [(unit.language.seed, results.at(unit.run(arm))) for unit in FEW.units for arm in ARMS]
    covariates = [
        [float(g == grammar) for grammar in FEW.grammars]
        + [end["kl"].value, *(np.log(end[name].value) for name in given)]
        for g, end in ends
    ]
    left = []
    for values in ([np.log(end["minimal-trace"].value) for _, end in ends], [end[outcome].value for _, end in ends]):
        left.append(np.array(values) - np.array(covariates) @ np.linalg.lstsq(np.array(covariates), values)[0])
    return float(left[0] @ left[1] / np.sqrt((left[0] @ left[0]) * (left[1] @ left[1])))


def test_tables_answer_and_page_are_of_the_arms(tmp_path):
    results = results_of(-2.0, tmp_path)
    predicted, room, arms, differences, rises, spans = tables(results)
    rows = {label[:2]: (label, row) for label, row in predicted.rows}
    label, row = rows["minimal trace", "accuracy on prefix-4"]
    assert label[3] == "shown"
    assert row["over grammars"].value < -0.5
    titles = [FEW.title(arm) for arm in (*ARMS, *OTHERS)]
    assert titles[:2] == ["AdamW, rate x 0.5", "AdamW"]
    before = ["Majority class", "Tokens, one-hot", "Untrained model"]
    assert [label[0] for label, _ in room.rows] == [*before, *titles]
    by_name = {label[0]: row for label, row in room.rows}
    first = next(iter(FEW.probes.values()))
    assert by_name["Majority class"][first].value == pytest.approx(0.2)
    assert by_name["Tokens, one-hot"][f"{first}, above"].value == 0
    own = [
        results.at(unit.run("muon"))[first].value - results.at(unit.run(STABLE), 0)["one-hot-prefix-4"].value
        for unit in FEW.units
    ]
    assert by_name["Muon"][f"{first}, above"].value == pytest.approx(100 * np.mean(own), rel=1e-9)
    steps = {label[0]: label[1] for label, _ in arms.rows}
    # the branches have the steps of the run before them
    assert steps["SGD after AdamW"] == f"{30 + 10 * EVERY.index('sgd') + 30} to {30 + 10 * EVERY.index('sgd') + 30}"
    assert steps["AdamW"] == f"{10 * EVERY.index('adamw') + 30} to {10 * EVERY.index('adamw') + 30}"
    assert [label[0] for label, _ in differences.rows] == [title for title in titles if title != "AdamW"]
    pairs = [[results.at(unit.run(arm))["trace"].value for arm in ("adamw", "muon")] for unit in FEW.units]
    ratio = np.exp(np.mean([np.log(second / first) for first, second in pairs]))
    assert dict(differences.rows)["Muon",]["trace"].value == pytest.approx(ratio, rel=1e-9)
    shares = [100 * results.at(unit.run("muon"))["int3-rise"].value / 2 for unit in FEW.units]
    assert dict(rises.rows)["Muon",]["int3-rise"].value == pytest.approx(np.mean(shares), rel=1e-9)
    assert list(spans.rows[0][1]) == ["layer-0", "layer-1", "layer-2", "bayes", "majority"]
    claims = {one.claim.id: one for one in judged(STUDY, results)}
    assert all(one.difference is not None for claim in claims.values() for one in claim.answers)
    # a halving of the minimal trace gives 2 points, at any rank
    (flatness,) = claims["flatness"].answers
    assert flatness.difference.value == pytest.approx(2, abs=4 * flatness.difference.stderr)
    assert claims["flatness"].verdict == claims["helper"].verdict == "shown"
    assert claims["flatness-given-rank"].answers[0].difference.value == pytest.approx(2, abs=0.3)
    assert len(answer(list(claims.values()), results)) == 3
    made = parts(results)
    for figure in made.figures:
        save(figure.chart, tmp_path / f"{figure.name}.svg")
        save(figure.chart, tmp_path / f"{figure.name}.csv")
    assert (tmp_path / "arms.svg").read_text().count("Schedule-free AdamW") >= 1
    assert (tmp_path / "associations.svg").read_text().count("rise at 3 bits") >= 1


def test_a_fine_tuning_that_missed_the_common_gain_leaves_out_the_forgetting_alone():
    results = results_of(-2.0)
    run = FEW.units[0].run("sam-double")
    key = run, results.last_step(run)
    missing = {name: each for name, each in results.checkpoints[key].items() if name != "frontier"}
    others = type(results)(FEW, {**results.checkpoints, key: missing}, results.folder)
    claims = {one.claim.id: one.verdict for one in judged(STUDY, others)}
    assert claims.pop("forgetting") == "not tested"
    assert claims == {one.claim.id: one.verdict for one in judged(STUDY, results) if one.claim.id != "forgetting"}
    assert {each.outcome for each in associations(results)} - {each.outcome for each in associations(others)} == {
        "frontier"
    }
    assert "frontier" not in tables(others)[2].rows[0][1]


def test_one_grammar_is_no_study():
    results = dataclasses.replace(results_of(-2.0), complete=[0])
    assert FEW.complete(results) == []
    assert tables(results) == ()
    assert {claim.verdict for claim in judged(STUDY, results)} == {"not tested"}


@pytest.mark.parametrize(("scale", "expected"), [("laptop", {(34.0, 18.0)}), ("smoke", {(None, None)})])
def test_the_plan_knows_what_a_draw_took(scale, expected):
    def seconds(each):
        return each.expected and each.expected.seconds

    runs = STUDY.scale(scale).experiments.values()
    assert {(seconds(run), seconds(part)) for run in runs for part in run.measurements} == expected
