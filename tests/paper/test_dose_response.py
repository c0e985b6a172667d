"""The study dose-response: its tasks by brute force, its arms, and its page of known results."""

import dataclasses

import numpy as np
import pytest
import torch
from known_study import judged, known_results

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Sentences
from isoloss.lab.languages.config import DyckConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.tasks import make_task
from isoloss.paper import dose_response as page
from isoloss.paper.dose_response import ARMS, BASE, CONTROL, DOSES, HELPER, SCALES, SHAM, STUDY, answer, tables
from isoloss.paper.dose_response_tasks import needed, spare, twins
from isoloss.report.save import save
from isoloss.studies.summary import claim_table

GRAMMAR = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=6, seed=4)


@pytest.fixture(scope="module")
def known():
    """A grammar, and by beginning the probabilities of what follows."""
    language = GRAMMAR.build()
    sentences, probabilities = all_sentences(language)
    follows = {}
    for tokens, p in zip(sentences.tokens.tolist(), probabilities.tolist(), strict=True):
        follows.setdefault(tuple(tokens[:2]), {})[tuple(tokens[2:])] = p
    return language, follows


def labels_of(labeling, beginnings):
    tokens = torch.tensor([[*beginning, 0, 0] for beginning in beginnings])
    return dict(zip(beginnings, labeling.label(Sentences(tokens, torch.full((len(tokens),), 4))).tolist(), strict=True))


def distance(first, second):
    """The total variation between two distributions that need not be normalized."""
    totals = sum(first.values()), sum(second.values())
    return sum(abs(first.get(k, 0) / totals[0] - second.get(k, 0) / totals[1]) for k in {*first, *second}) / 2


def test_needed_is_a_function_of_what_follows_and_halves_the_sentences(known):
    language, follows = known
    labels = labels_of(needed(language, "2"), list(follows))
    weights = {beginning: sum(each.values()) for beginning, each in follows.items()}
    assert set(labels.values()) == {0, 1}
    largest = max(weights.values())
    assert abs(sum(w for b, w in weights.items() if labels[b]) - 0.5) <= largest / 2 + 1e-12
    # a cut across one axis: the classes are further from each other than they are wide
    mean = [{}, {}]
    for beginning, each in follows.items():
        for rest, p in each.items():
            mean[labels[beginning]][rest] = mean[labels[beginning]].get(rest, 0) + p
    right = sum(
        weights[b]
        for b in follows
        if distance(follows[b], mean[labels[b]]) <= distance(follows[b], mean[1 - labels[b]])
    )
    assert right > 0.9


def test_spare_tells_twins_apart_whose_rest_is_nearly_the_same(known):
    language, follows = known
    labels = labels_of(spare(language, "2"), list(follows))
    left = {b for b, label in labels.items() if label == -1}
    assert len(left) == len(follows) % 2
    pairs, free = [], set(follows)
    while len(free) > 1:
        first, second = min(
            ((a, b) for a in free for b in free if a < b),
            key=lambda pair: (round(distance(follows[pair[0]], follows[pair[1]]), 12), pair),
        )
        pairs.append((first, second))
        free -= {first, second}
    assert all({labels[a], labels[b]} == {0, 1} for a, b in pairs)
    weight = {b: sum(each.values()) for b, each in follows.items()}
    between = sum((weight[a] + weight[b]) * distance(follows[a], follows[b]) for a, b in pairs)
    needed_labels = labels_of(needed(language, "2"), list(follows))
    across = np.mean(
        [distance(follows[a], follows[b]) for a in follows for b in follows if needed_labels[a] != needed_labels[b]]
    )
    assert between < 0.3 * across
    ones = sum(w for b, w in weight.items() if labels[b] == 1)
    assert 0.2 < ones / sum(w for b, w in weight.items() if labels[b] >= 0) < 0.8


def test_equal_distributions_are_paired_in_the_order_of_rows():
    assert twins(np.array([[0.5, 0.5]] * 4)) == [(0, 1), (2, 3)]


def test_the_tasks_are_drawn_by_name_and_need_a_language_that_can_be_enumerated(known):
    language, follows = known
    task = make_task(language, "spare-2", num_train=200, num_test=5, seed=0)
    labels = labels_of(spare(language, "2"), list(follows))
    assert task.train_labels.tolist() == [labels[tuple(row)] for row in task.train.tokens[:, :2].tolist()]
    with pytest.raises(IsolossError, match="L is 4; it must be at least 1 and below the number of tokens"):
        make_task(language, "needed-4")
    with pytest.raises(IsolossError, match="more than the 65,536 that can be enumerated"):
        make_task(DyckConfig().build(), "needed-2")


def test_arms_differ_in_what_is_added_to_the_loss_and_the_control_in_its_sentences():
    scale = SCALES["laptop"]
    unit = scale.units[0]
    configs = {arm: scale.experiments[unit.run(arm)].config for arm in ARMS}
    sham = configs[SHAM]
    for arm, config in configs.items():
        other = dataclasses.replace(config, stages=sham.stages, steps=sham.steps)
        assert other == (dataclasses.replace(sham, seed=config.seed) if arm == CONTROL else sham)
        first, last = config.stages
        # it stays until the end, but for the helper's task
        assert last.algorithm == (None if arm == HELPER else first.algorithm)
        assert dataclasses.replace(last, algorithm=None) == dataclasses.replace(sham.stages[1], algorithm=None)
        assert config.init_from == f"../{unit.run(BASE)}"
    assert configs[CONTROL].seed != sham.seed
    assert len({repr(config.stages[0]) for config in configs.values()}) == len(ARMS)


# --- known results ---------------------------------------------------------------------------------------------------

GRAMMARS = 5
FEW = dataclasses.replace(SCALES["laptop"], grammars=SCALES["laptop"].grammars[:GRAMMARS], seeds_per_grammar=2)
PER_NAT = -500.0  # points of accuracy


@pytest.fixture(scope="module")
def results():
    """Each dose costs 2 points of few-shot accuracy and halves the traces; an arm's rank adds a point for each 10."""
    draw = np.random.default_rng(0)
    ranks = {"narrower": -10, "wider": 10}

    def value(unit, arm, key):
        dose, noise = DOSES.index(arm) - DOSES.index(SHAM) if arm in DOSES else 0, draw.normal()
        kl = FEW.base_kl if arm == BASE else FEW.target_kl * (1 + 0.02 * dose)
        if key == "kl":
            return kl
        if key.removeprefix("invariant-") in FEW.probes.values():
            points = 70 - 2 * dose + ranks.get(arm, 0) / 10 + 0.1 * noise + PER_NAT * kl
            return (points + 20 * (arm == HELPER)) / 100
        if "trace" in key or key in ("attention-q", "attention-v", "mlp-up", "mlp-down", "norms"):
            return 10 * 2.0**-dose * (1 + 0.01 * noise)
        return 50 + dose + ranks.get(arm, 0) + noise / 10

    # a target ends every arm
    return known_results(FEW, value, ended=lambda arm, step: step and step - 100)


def test_tables_and_answer_are_of_the_arms_and_their_controls(results):
    trends, arms, differences, slopes, untrained = tables(results)
    assert [label[0] for label, _ in arms.rows] == [FEW.titles[arm] for arm in ARMS]
    unit = FEW.units[0]
    steps = {results.last_step(unit.run(arm)) for arm in ARMS}  # of every unit; the helper has fewer
    assert {label[1] for label, _ in arms.rows} == {f"{each:,} ({each:,} to {each:,})" for each in steps}
    assert {label[2] for label, _ in arms.rows} == {0}  # none missed the target
    rows = {label[0]: row for label, row in differences.rows}
    for dose, arm in enumerate(DOSES, -3):
        if arm != SHAM:
            row = rows[FEW.titles[arm]]
            for key in ("minimal-trace", "minimal-trace-of-attention", "minimal-trace-of-mlps"):
                assert row[key].value == pytest.approx(2.0**-dose, rel=0.02)
            assert row["prefix-mean"].value == pytest.approx(-2 * dose, abs=0.2)
            assert row["effective-rank"].value == pytest.approx(dose, abs=0.3)
    first = {label[0]: row["slope"] for label, row in slopes.rows}
    assert first["prefix-mean"].value == pytest.approx(PER_NAT, rel=1)  # a difference of 0.04 points, ± 0.02
    by_name = {label[0]: row for label, row in trends.rows}
    # at one loss: 2 points less with each halving; each halving has a KL that is higher by 0.02 of the target's
    sides = ("flatter side", "sharper side", "without the strongest penalty")
    for name in ("halving of the minimal trace", *(f"the same, {side}" for side in sides)):
        assert by_name[name]["prefix-mean"].value == pytest.approx(-2, abs=0.15)
    assert by_name["halving of attention's part"]["effective-rank"].value == pytest.approx(1, abs=0.1)
    assert by_name["halving of the minimal trace, given the rank"]["prefix-mean"].value == pytest.approx(-2.1, abs=0.15)
    assert by_name["doubling of the rank, given the minimal trace"]["prefix-mean"].value > 2
    # no slope of the rank on itself
    assert {name for name, row in by_name.items() if "effective-rank" not in row} == {
        name for name in by_name if name.endswith("rank") or "of the rank" in name
    }
    assert set(untrained.rows[0][1]) == set(FEW.probes.values())


def test_the_claims_are_judged_by_slopes(results):
    claims = {one.claim.id: one for one in judged(STUDY, results)}
    assert all(one.difference is not None for each in claims.values() for one in each.answers)
    (trend,) = claims["trend"].answers
    assert trend.verdict.value == "contradicted"
    assert str(trend.difference).endswith("points per halving")
    assert claim_table(claims["trend"])[0][2] == "slope (points per halving)"
    assert claim_table(claims["flatter"])[0][4] == "difference (nats/token)"
    assert "fitted within 10 groups of 7 models; 95 % interval over 5 grammars" in trend.explanation
    assert claims["flatter"].verdict == claims["helper"].verdict == claims["wider"].verdict == "shown"
    cards = answer(list(claims.values()), results)
    assert cards[0].value.startswith("No, the opposite: -1.99")
    assert len(cards) == 3


def test_a_base_with_an_arm_that_diverged_is_left_out_and_told(results):
    unit = FEW.units[0]
    name, end = unit.run("sharp-3"), results.at(unit.run("sharp-3"))
    broken = {**end, "kl": dataclasses.replace(end["kl"], value=2 * FEW.largest_kl)}
    others = type(results)(FEW, {**results.checkpoints, (name, results.last_step(name)): broken}, results.folder)
    assert FEW.complete(others) == list(FEW.units[1:])
    assert "Of 10 bases, 1 left out: an arm of these ended above 0.0008." in tables(others)[1].caption
    assert "left out" not in tables(results)[1].caption


def test_a_dose_that_missed_the_target_is_named_beside_the_figure(results):
    missed = dict(results.checkpoints)
    for unit in FEW.units:
        key = (name := unit.run("flat-3")), results.last_step(name)
        missed[key] = {**missed[key], "kl": dataclasses.replace(missed[key]["kl"], value=2 * FEW.target_kl)}
    figure, _ = page.parts(type(results)(FEW, missed, results.folder)).figures
    missed = "; of 10 runs of each arm, a KL more than 10 % above the target have 10 of Penalty +0.004. Thin: "
    assert missed in figure.caption
    figure, _ = page.parts(results).figures
    assert "not adjusted to the same loss. Thin: the penalty's arms of each of 5 grammars." in figure.caption


def test_one_complete_grammar_has_no_figure_and_no_table(results):
    one = dataclasses.replace(results, complete=[0])
    assert page.parts(one).figures == []
    assert tables(one) == ()
    assert {claim.verdict for claim in judged(STUDY, one)} == {"not tested"}


def test_the_figure_has_a_curve_for_each_grammar_and_the_means(tmp_path, results):
    figure, others = page.parts(results).figures
    save(figure.chart, tmp_path / "figure.svg")
    save(figure.chart, tmp_path / "figure.csv")
    assert (tmp_path / "figure.svg").read_text().count(">Minimal trace over the sham") == 2
    assert len(others.chart["concat"]) == len(FEW.probes) + 1
    panel = figure.chart["concat"][0]["layer"]
    rows = [figure.chart["datasets"][layer["data"]["name"]] for layer in panel]
    assert len(rows[1]) == GRAMMARS * len(DOSES)
    means = {row["arm"]: row for row in rows[-1]}
    assert (means["Sham"]["trace"], means["Sham"]["value"]) == (1, 0)
    for dose, arm in enumerate(DOSES, -3):
        row = means[FEW.titles[arm]]
        assert row["trace"] == pytest.approx(2.0**-dose, rel=0.02)
        assert row["value"] == pytest.approx(-2 * dose, abs=0.3)
        assert dose == 0 or row["low"] < row["value"] < row["high"]
