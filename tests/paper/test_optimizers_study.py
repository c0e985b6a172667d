"""The study optimizers: its arms, and its tables, answer and page of known results."""

import dataclasses

import numpy as np
import pytest
from known_study import judged, known_results

from isoloss.paper.optimizers import (
    ADAMW,
    ARMS,
    BRANCHES,
    FLATNESS,
    OPTIMIZERS,
    SCALES,
    STABLE,
    STUDY,
    answer,
    associations,
    outcomes,
    parts,
    tables,
)
from isoloss.report.save import save

FEW = dataclasses.replace(SCALES["laptop"], grammars=SCALES["laptop"].grammars[:6])


def test_arms_end_at_one_target_and_differ_in_how_they_get_there():
    unit = FEW.units[0]
    configs = {arm: FEW.experiments[unit.run(arm)].config for arm in (STABLE, *ARMS)}
    for arm, config in configs.items():
        (stage,) = config.stages
        assert stage.target_kl == (FEW.stable_kl if arm == STABLE else FEW.target_kl)
        assert config.init_from == (f"../{unit.run(STABLE)}" if arm in BRANCHES else None)
        assert config.init_optimizer == (arm in (ADAMW, "wsd"))
        # the branches have other sentences than the run before them, and one another's
        assert config.seed == (configs[ADAMW].seed if arm in BRANCHES else configs[STABLE].seed)
    assert configs[ADAMW].seed != configs[STABLE].seed
    assert len({repr((config.stages, config.algorithm)) for config in configs.values()}) == len(ARMS) + 1


def results_of(slope, folder=None):
    """Results in which the first probe changes by `slope` points, and nothing else, where the minimal trace doubles."""
    draw, first = np.random.default_rng(0), next(iter(FEW.probes.values()))
    doubled = {(unit, arm): draw.normal() for unit in FEW.units for arm in (STABLE, *ARMS)}

    def value(unit, arm, key):
        if key == "kl":
            return FEW.target_kl + 1e-4 * draw.normal()
        if key == "minimal-trace":
            return 10 * 2.0 ** doubled[unit, arm]
        if key in FLATNESS:
            return 5 + draw.normal() ** 2
        by_grammar = 0.5 + unit.language.seed % 7 / 50 + 0.01 * draw.normal()
        return by_grammar + slope * doubled[unit, arm] / 100 * (key == first)

    return known_results(FEW, value, folder, ended=lambda arm, step: 10 * (STABLE, *ARMS).index(arm) + 30)


@pytest.mark.parametrize(("slope", "shown"), [(-2.0, {"minimal-trace"}), (0.0, set())])
def test_a_measure_that_predicts_an_outcome_is_found_and_no_other(slope, shown):
    results = results_of(slope)
    found = associations(results)
    assert len(found) == len(FLATNESS) * len(outcomes(FEW))
    assert {each.measure for each in found if each.verdict == "shown"} == shown
    assert {each.correlation.observations for each in found} == {len(FEW.grammars) * len(OPTIMIZERS)}
    first = next(iter(FEW.probes.values()))
    one = next(each for each in found if (each.measure, each.outcome) == ("minimal-trace", first))
    by_hand = partial_within(results, first)
    assert one.correlation.value == pytest.approx(by_hand, rel=1e-9)


def partial_within(results, outcome):
    """The correlation of what grammars' means and the KL leave of the two, by least squares on indicators."""
    ends = [(unit.language.seed, results.at(unit.run(arm))) for unit in FEW.units for arm in OPTIMIZERS]
    covariates = [[float(g == grammar) for grammar in FEW.grammars] + [end["kl"].value] for g, end in ends]
    left = []
    for values in ([np.log(end["minimal-trace"].value) for _, end in ends], [end[outcome].value for _, end in ends]):
        left.append(np.array(values) - np.array(covariates) @ np.linalg.lstsq(np.array(covariates), values)[0])
    return float(left[0] @ left[1] / np.sqrt((left[0] @ left[0]) * (left[1] @ left[1])))


def test_tables_answer_and_page_are_of_the_arms(tmp_path):
    results = results_of(-2.0, tmp_path)
    predicted, arms, differences, spans = tables(results)
    rows = {label[:2]: (label, row) for label, row in predicted.rows}
    label, row = rows["minimal trace", "accuracy on prefix-4"]
    assert label[3] == "shown"
    assert row["correlation"].value < -0.5
    assert row["without Muon and SOAP"].num_predictions == len(FEW.grammars) * (len(OPTIMIZERS) - 2)
    steps = {label[0]: label[1] for label, _ in arms.rows}
    # the branches have the steps of the run before them
    assert (steps["AdamW"], steps["Muon"]) == ("70 to 70", "60 to 60")
    assert [label[0] for label, _ in differences.rows] == [title for arm, title in ARMS.items() if arm != ADAMW]
    pairs = [[results.at(unit.run(arm))["trace"].value for arm in (ADAMW, "muon")] for unit in FEW.units]
    ratio = np.exp(np.mean([np.log(second / first) for first, second in pairs]))
    assert dict(differences.rows)["Muon",]["trace"].value == pytest.approx(ratio, rel=1e-9)
    assert list(spans.rows[0][1]) == ["layer-0", "layer-1", "layer-2", "bayes", "majority"]
    claims = judged(STUDY, results)
    assert all(one.difference is not None for claim in claims for one in claim.answers)
    first, *_ = answer(claims, results)
    assert first.value == "Minimal trace: the sharper, the lower the accuracy on prefix-4"
    made = parts(results)
    for figure in made.figures:
        save(figure.chart, tmp_path / f"{figure.name}.svg")
        save(figure.chart, tmp_path / f"{figure.name}.csv")
    assert (tmp_path / "arms.svg").read_text().count("Schedule-free AdamW") >= 1
    assert (tmp_path / "associations.svg").read_text().count("rise under noise") >= 1
