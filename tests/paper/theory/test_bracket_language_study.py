"""Heads, descents and verdicts of the bracket language: against brute force, and on figures that were spoiled."""

import dataclasses
import itertools
import math

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory import brackets
from isoloss.paper.theory.brackets import downstream_inputs, flatness, judge, parts, pretraining_inputs

SMALL = brackets.Settings(lengths=(4, 6), steps=900, trials=400, samples=(2, 4, 8), draws=2, seed=1)
NEGATIVE = {2, 7, 11, 14, 16}  # wrong: G.1, G.3, 5.1 and G.6 as printed, and that no other solution does better


@pytest.fixture(scope="module")
def found():
    done = []
    result = brackets.study(SMALL, progress=done.append)
    assert done == list(range(1, SMALL.num_steps + 1))
    return result


def verdicts(result):
    return [statement.shown for statement in judge(result)]


@pytest.mark.parametrize(("length", "samples"), [(4, 1), (4, 2), (4, 3), (6, 2)])
def test_sign_missing_by_enumeration(length, samples):
    answers = downstream_inputs(length).y.tolist()
    missing = sum(max(chosen) <= 0 or min(chosen) >= 0 for chosen in itertools.product(answers, repeat=samples))
    assert brackets.sign_missing(length, samples) == pytest.approx(missing / len(answers) ** samples, rel=1e-12)
    assert brackets.sign_missing(length, samples) > 2.0**-samples


@pytest.mark.parametrize("name", ["two", "kinks", "features", "start"])
def test_heads_of_least_norm_by_the_pseudoinverse(name, monkeypatch):
    monkeypatch.setattr(brackets, "_HEAD_BLOCK", 16 * 3 * 7)  # blocks of training sets change nothing
    length, inputs = 4, downstream_inputs(4)
    model = {
        "two": lambda: brackets.two_neurons(length, 5),
        "kinks": lambda: brackets.on_the_kink(length),
        "features": lambda: brackets.random_features(pretraining_inputs(length), 40, seed=0),
        "start": lambda: brackets.initial(length, 6, seed=0),
    }[name]()
    chosen = torch.randint(16, (20, 3), generator=torch.Generator().manual_seed(1))
    got = brackets.population_losses(brackets.kernel(model, inputs), inputs.y, chosen)
    for row, loss in zip(chosen, got.tolist(), strict=True):
        columns = []
        for neuron in range(len(model.output)):
            single = brackets.with_even_attention(model.value[neuron : neuron + 1], torch.ones(1, dtype=torch.float64))
            single = single._replace(query=model.query, key=model.key)
            columns.append(parts(single, inputs.z).outputs)
        features = torch.stack(columns, dim=1)
        head = torch.linalg.pinv(features[row], rtol=1e-8) @ inputs.y[row]
        assert loss == pytest.approx(float((features @ head - inputs.y).square().mean()), rel=1e-6, abs=1e-12)


def test_a_feature_that_is_a_millionth_of_the_others_counts_as_none():
    generator = torch.Generator().manual_seed(0)
    features, answers = torch.randn(3, 16, generator=generator, dtype=torch.float64)[:2], torch.arange(16.0).double()
    chosen = torch.tensor([[0, 5, 9], [2, 3, 15]])
    one = brackets.population_losses(torch.outer(features[0], features[0]), answers, chosen)
    both = torch.outer(features[0], features[0]) + 1e-12 * torch.outer(features[1], features[1])
    torch.testing.assert_close(brackets.population_losses(both, answers, chosen), one, rtol=1e-5, atol=0)
    expected = []
    for row in chosen:
        head = features[0, row] @ answers[row] / features[0, row].square().sum()
        expected.append(float((head * features[0] - answers).square().mean()))
    assert one.tolist() == pytest.approx(expected, rel=1e-9)


def test_two_neurons_fail_exactly_where_a_sign_is_missing():
    inputs = downstream_inputs(6)
    for samples in (1, 3, 6):
        row = brackets.try_heads({"two": brackets.two_neurons(6, 2)}, inputs, samples=samples, trials=500, seed=0)[0]
        error = math.sqrt(row.expected * (1 - row.expected) / 500)
        assert abs(row.failures - row.expected) <= 4 * error
        assert row.worst_covered is None if samples == 1 else row.worst_covered < 1e-20
    # a set without a sign leaves that sign's half of E g*^2 = T
    chosen = torch.tensor([[int(inputs.y.argmax())] * 4, [int(inputs.y.argmin())] * 4])
    losses = brackets.population_losses(brackets.kernel(brackets.two_neurons(6, 2), inputs), inputs.y, chosen)
    assert losses.tolist() == pytest.approx([3, 3], rel=1e-12)


def test_heads_are_compared_on_the_same_training_sets():
    inputs = downstream_inputs(4)
    models = {"two": brackets.two_neurons(4, 2), "kinks": brackets.on_the_kink(4)}
    two, kinks = brackets.try_heads(models, inputs, samples=3, trials=400, seed=0)
    alone = brackets.try_heads({"kinks": models["kinks"]}, inputs, samples=3, trials=400, seed=0)[0]
    assert (two.excess, two.excess_stderr, alone.loss) == (0, 0, kinks.loss)
    assert kinks.excess == pytest.approx(kinks.loss - two.loss)
    assert 0 < kinks.excess_stderr < math.hypot(kinks.loss_stderr, two.loss_stderr)


def test_descent_moves_the_attention_too_and_ends_at_the_bound():
    inputs = pretraining_inputs(4)
    model = brackets.initial(4, 8, seed=3)
    before = flatness(model, inputs)
    assert before.heads > 1
    assert before.loss > 0.5
    calls = []
    end, path = brackets.descend(model, inputs, steps=900, progress=lambda: calls.append(1))
    after = flatness(end, inputs)
    assert len(calls) == 900
    assert path[0].ratio == pytest.approx(before.ratio, rel=1e-9)
    assert path[0].loss == pytest.approx(before.loss, rel=1e-9)
    assert [point.step for point in path[:3]] == [0, 15, 30]
    assert after.ratio == pytest.approx(1, abs=0.01)
    assert after.loss < 1e-9
    assert after.evenness == pytest.approx(1, abs=1e-4)


def test_everything_that_is_true_is_shown(found):
    shown = verdicts(found)
    assert [place for place, value in enumerate(shown) if not value] == sorted(NEGATIVE)
    assert all(judge(found)[place].verdict == "contradicted" for place in NEGATIVE)
    assert len(shown) == 17


def test_rows(found):
    names = [row.solution for row in found.solutions if row.length == 6]
    assert names == [brackets.TWO] * 4 + [brackets.KINKS, brackets.FEATURES, brackets.BALANCED, brackets.DESCENT]
    assert [row.solution for row in found.solutions if row.length == 4][-1] == brackets.FROM_FEATURES
    assert [(row.length, row.predicted, row.widths[-1]) for row in found.widths] == [(4, 32, 32), (6, 132, 132)]
    assert all(row.widths[0] < row.widths[1] <= row.widths[2] for row in found.widths)
    assert len(found.heads) == 2 * 4 * 3
    two = next(row for row in found.solutions if row.solution == brackets.TWO and row.length == 6 and row.width == 2)
    assert two.hessian == pytest.approx(2 / math.sqrt(6), rel=1e-10)
    assert two.off_axis < 1e-12


def test_off_axis_is_the_weight_off_the_direction():
    value = torch.tensor([[2.0, 2, 2, 2, 0, 0, 0, 0], [1, -1, 0, 0, 0, 0, 0, 2]], dtype=torch.float64)
    model = brackets.with_even_attention(value, torch.tensor([-3.0, 1.0], dtype=torch.float64))
    assert brackets._off_axis(model, 8) == pytest.approx(math.sqrt(6) / (12 + math.sqrt(6)))
    assert brackets._off_axis(model, 4) == pytest.approx(math.sqrt(2) / (12 + math.sqrt(2)))


def test_the_same_seed_gives_the_same_numbers(found):
    settings = dataclasses.replace(SMALL, lengths=(4,), steps=20, trials=30)
    assert brackets.study(settings) == brackets.study(settings)
    assert brackets.study(settings) != brackets.study(dataclasses.replace(settings, seed=2))


def spoil(found, table, where, **changes):
    """Return the result with other fields, also of the flatness, in the rows of a table for which `where` holds."""

    def spoiled(row):
        inner = {key: value for key, value in changes.items() if hasattr(getattr(row, "flatness", None), key)}
        outer = {key: value for key, value in changes.items() if key not in inner}
        return dataclasses.replace(
            row, **outer, **({"flatness": dataclasses.replace(row.flatness, **inner)} if inner else {})
        )

    rows = [spoiled(row) if where(row) else row for row in getattr(found, table)]
    return dataclasses.replace(found, **{table: tuple(rows)})


@pytest.mark.parametrize(
    ("table", "name", "changes", "lost"),
    [
        ("solutions", brackets.FEATURES, {"loss": 1e-8}, {0}),
        ("solutions", brackets.TWO, {"hessian": 0.5}, {1}),
        ("solutions", brackets.TWO, {"trace": 1.1}, {1, 3}),
        ("solutions", brackets.BALANCED, {"trace": 0.03}, {3, 4}),
        ("solutions", brackets.DESCENT, {"trace": 0.127}, {5}),
        ("solutions", brackets.DESCENT, {"loss": 1e-8}, {5}),
        ("solutions", brackets.FROM_FEATURES, {"off_axis": 0.02}, {5}),
        ("solutions", brackets.TWO, {"balance": 1.001}, {6}),
        ("solutions", brackets.FEATURES, {"cancellation": 1.0}, {6}),
        ("widths", None, {"rank": 7}, {8}),
        ("widths", None, {"widths": (20.0, 30.0, 31.0)}, {15}),
        ("heads", brackets.TWO, {"worst_covered": 1e-3}, {10}),
        ("heads", brackets.TWO, {"failures": 0.5}, {12}),
        ("heads", brackets.BALANCED, {"excess": 0.0}, {13}),
    ],
)
def test_a_spoiled_row_is_not_shown(found, table, name, changes, lost):
    of_name = [row for row in getattr(found, table) if getattr(row, "solution", None) == name]
    spoiled = [of_name[0]] if table != "heads" else [row for row in of_name if row.samples == 8]
    before = verdicts(found)
    after = verdicts(spoil(found, table, lambda row: any(row is each for each in spoiled), **changes))
    assert {place for place in range(17) if before[place] and not after[place]} == lost


def test_a_matrix_without_full_rank_is_not_shown(found):
    assert not verdicts(dataclasses.replace(found, ranks={**found.ranks, 3: 6}))[9]


@pytest.mark.parametrize(
    ("place", "table", "changes"),
    [
        (2, "solutions", {"trace": 1.0}),
        (7, "solutions", {"uneven": 0.0}),
        (14, "heads", {"excess": 1.0}),
        (16, "widths", {"norm": 0.5}),
    ],
)
def test_the_negative_verdicts_can_turn(found, place, table, changes):
    assert judge(spoil(found, table, lambda row: True, **changes))[place].verdict == "shown"
    few = dataclasses.replace(found, heads=tuple(dataclasses.replace(row, failures=row.claimed) for row in found.heads))
    assert verdicts(few)[11:13] == [True, False]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": ()}, "the lengths are none; choose from 4, 6, 8, 10"),
        ({"lengths": (8, 6)}, "the lengths are 8, 6"),
        ({"width": 1}, "width is 1; it must be at least 2 and at most 1024"),
        ({"samples": (0, 2)}, r"samples\[0\] is 0; it must be at least 1"),
        ({"samples": ()}, "the sizes of training sets are none"),
        ({"trials": 10**8}, "100000000 training sets of 8 strings are too many"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(IsolossError, match=message):
        _ = dataclasses.replace(SMALL, **wrong)


def test_heads_on_features_that_are_given_are_those_of_the_model():
    inputs, two = brackets.downstream_inputs(6), brackets.two_neurons(6, 2)
    features = (inputs.z / 6 @ two.value.T).relu() / 2
    models = {"weights": two, "features": features}
    rows = brackets.try_heads(models, inputs, samples=3, trials=50, seed=0)
    assert rows[0].loss == pytest.approx(rows[1].loss, abs=1e-12)
    (single,) = brackets.try_heads({"float32": features.float()}, inputs, samples=3, trials=50, seed=0)
    assert single.loss == pytest.approx(rows[0].loss, rel=1e-5)
    with pytest.raises(IsolossError, match=r"features have the shape \(10, 2\); it must be \(64, features\)"):
        brackets.try_heads({"some": features[:10]}, inputs, samples=3, trials=50, seed=0)
