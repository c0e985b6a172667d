"""Series of checkpoints: pairs at the same loss against closed forms, jumps and copies, and what the page asks."""

import dataclasses
import math
import re

import numpy as np
import pytest

from isoloss.checkpoints.places import series_of
from isoloss.comparison.models import ModelComparison
from isoloss.comparison.page import comparison_page
from isoloss.comparison.series import interpolated, jumps, pairs, summary
from isoloss.errors import IsolossError
from isoloss.statistics.comparison import linear_combination
from isoloss.statistics.estimate import Estimate

N = 64
PROBE = {"pooling": "last", "num_test": 99, "clusters": "test examples", "majority_rate": 0.5}
DRAWS = np.random.default_rng(0).standard_normal((8, N))


def estimate(value, influence, extra=()):
    """A value with this influence of each sample, and of what else stands behind the samples."""
    whole = np.concatenate([influence - np.mean(influence), extra])
    return Estimate(
        value=value,
        stderr=math.sqrt((whole**2).sum() / (N * (N - 1))),
        samples=N,
        unit="nats per predicted token",
        num_predictions=N,
        method="known",
        influence=whole,
        by_parameter={"w": value},
        details={"num_parameters": 7, "embeddings": [], "gauged": [], "infimum": value, "in_sample": value}
        | {"sequences": N, "clusters": "documents"},
    )


def model(loss, trace, draw, *, least=None, spread=0.002):
    influences = spread * DRAWS[0] + 1e-3 * DRAWS[draw]
    return {
        "loss": estimate(loss, influences),
        "trace": estimate(trace, 0.1 * DRAWS[draw]),
        "without-embeddings": estimate(trace / 2, 0.1 * DRAWS[draw]),
        "minimal-trace": estimate(trace / 2 if least is None else least, 0.05 * DRAWS[draw]),
    }


def compared(models, **options):
    weights = {name: name for name in models}
    return ModelComparison(models=models, weights=weights, architectures=dict.fromkeys(models, ""), **options)


def run(name, losses, traces):
    places = enumerate(zip(losses, traces, strict=True))
    return {f"{name}/checkpoint-{10 * (i + 1)}": model(loss, trace, 1 + i) for i, (loss, trace) in places}


def test_a_trace_that_is_linear_in_the_loss_is_interpolated_without_error_but_of_the_loss():
    """T = 3 + 5 L for every sample: at a loss, T is known as well as 5 times that loss, wherever the neighbors are."""
    losses = [estimate(value, DRAWS[draw]) for draw, value in enumerate((2.0, 1.0, 1.3))]
    lines = [
        {"loss": loss, "trace": dataclasses.replace(estimate(3 + 5 * loss.value, 5 * loss.influence))}
        for loss in losses
    ]
    found = interpolated(lines[0], lines[1], losses[2])
    assert found["loss"] is losses[2]
    assert found["trace"].value == pytest.approx(3 + 5 * 1.3)
    assert found["trace"].stderr == pytest.approx(5 * losses[2].stderr)
    assert found["trace"].influence == pytest.approx(5 * losses[2].influence)


def test_the_error_of_an_interpolation_is_that_of_fresh_samples():
    """Means of N samples, drawn 4,000 times: the spread of the interpolated trace is its error by influences."""
    generator = np.random.default_rng(1)
    root = np.tril(generator.standard_normal((5, 5))) * 0.05
    means = np.array([2.0, 1.0, 1.4, 7.0, 4.0])  # losses of the neighbors and the target, traces of the neighbors
    draws = means + generator.standard_normal((4000, N, 5)) @ root.T

    def at(values):
        one, two, target, lower, upper = values
        weight = (target - one) / (two - one)
        return (1 - weight) * lower + weight * upper

    spread = np.std([at(each) for each in draws.mean(axis=1)])
    one, two, target, lower, upper = (estimate(draws[0, :, i].mean(), draws[0, :, i]) for i in range(5))
    found = interpolated({"loss": one, "trace": lower}, {"loss": two, "trace": upper}, target)["trace"]
    assert found.value == pytest.approx(at(draws[0].mean(axis=0)))
    assert found.stderr == pytest.approx(spread, rel=0.25)


def test_what_stands_behind_the_samples_stays_in_a_combination():
    one, two = estimate(1.0, DRAWS[0]), estimate(2.0, DRAWS[1], extra=[0.5])
    both = linear_combination([(2.0, one), (-1.0, two)], method="sum")
    assert (both.value, both.influence[-1], len(both.influence)) == (0.0, -0.5, N + 1)
    with pytest.raises(IsolossError, match="it is not known what each of the 64 samples adds"):
        linear_combination([(1.0, one), (1.0, dataclasses.replace(two, influence=None))], method="sum")


def test_two_series_are_compared_where_they_have_one_loss():
    a = run("a", [3.0, 2.0, 1.0], [10.0, 20.0, 40.0])
    b = run("b", [2.5, 2.001, 0.5], [9.0, 16.0, 38.0])
    comparison = compared(a | b)
    found = pairs(comparison, *comparison.series.items(), 0.01)
    # by equivalence; between neighbors, on either side; 3.0 and 0.5 are never extrapolated to
    assert [(pair.first, pair.second) for pair in found] == [
        ("a between steps 10 and 20", "b at step 10"),
        ("a at step 20", "b at step 20"),
        ("a at step 30", "b between steps 20 and 30"),
    ]
    middle, last = found[1].comparison, found[-1].comparison
    assert middle.ratio("trace", "b", "a")[0] == pytest.approx(16 / 20)
    weight = (1.0 - 2.001) / (0.5 - 2.001)
    assert last.models["b"]["trace"].value == pytest.approx((1 - weight) * 16 + weight * 38)
    assert [pair.comparison.verdict().flattest for pair in found] == ["b", "b", "b"]
    text = str(comparison)
    assert "There are 3 pairs at the same loss. By both traces, a is flatter in none of them and b in 3." in text
    assert "The pair with the smallest loss is a at step 30 and b between steps 20 and 30, at 1.0" in text
    between = "(interpolated in the loss: the errors do not cover how a trace bends between the two steps)"
    assert f" nats {between}. b is flatter: its trace is " in " ".join(text.split())
    *_, header, _, second, _ = (re.split("  +", line) for line in text.splitlines())
    ratios = ["trace, b / a (95 %)", "minimal trace, b / a (95 %)"]
    assert header == ["a", "b", "flatter by both traces", "loss, nats", *ratios]
    assert second[:3] == ["a at step 20", "b at step 20", "b"]
    ratio, (low, high) = middle.ratio("minimal-trace", "b", "a")
    assert second[-1] == f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    (answer,) = comparison.answers()
    assert (answer.question, answer.holds) == ("a or b: which is flatter at the same loss?", True)
    assert "of 3 pairs. By both traces, a is flatter in none of them and b in 3. b goes on to 0.5" in answer.detail
    assert "a goes on" not in answer.detail
    assert "compare checkpoints whose losses are nearer" not in text + str(comparison.to_dict())
    page = comparison_page(comparison)
    assert "At the same loss, which is flatter: a or b?" in page
    assert page.count('class="chart"') == 3
    assert 'a at step 20\\nb at step 20"' in page
    assert page.count("a between steps 10 and 20</") == 1


@pytest.mark.parametrize(("trace", "flattest"), [(8.0, "c"), (11.0, None), (29.0, None), (33.0, "a")])
def test_only_a_trace_beyond_both_neighbors_gives_a_verdict_on_an_interpolated_one(trace, flattest):
    # at a loss of 2.5 the line gives 20, but between 10 and 30 it may bend
    comparison = compared(run("a", [3.0, 2.0], [10.0, 30.0]) | {"c": model(2.5, trace, 3)})
    found = pairs(comparison, *comparison.series.items(), 0.01)[0].comparison.verdict()
    assert found.flattest == flattest
    if flattest is None:
        assert found.reasons == ("interpolated",)
        assert "but a's trace is interpolated between 10.000 ± 0.012 and 30.000 ± 0.012, and c's, " in str(found)
        assert "is not shown to be beyond both. Next: measure a checkpoint between these two steps, or" in str(found)


@pytest.mark.parametrize(("first", "flattest"), [(6.0, "c"), (4.0, None)])
def test_a_series_that_comes_back_to_a_loss_has_a_verdict_only_where_the_order_is_the_same(first, flattest):
    """At a loss of 2.5, its last trace is 20; the one before, on the way down, is 8 or 7, and the other model's 7.5."""
    comparison = compared(run("a", [3.0, 2.0, 3.0], [first, 10.0, 30.0]) | {"c": model(2.5, 7.5, 4)})
    (pair,) = comparison.pairs_at_same_loss["c"]
    assert (pair.first, pair.second) == ("a between steps 20 and 30", "c")
    found = pair.comparison.verdict()
    assert found.flattest == flattest
    words = "The order of the traces is the same at the other steps with this loss."
    assert (words in " ".join(str(comparison).split())) is (flattest is not None)
    if flattest is None:
        assert found.reasons == ("elsewhere",)
        assert (
            "but a has this loss, as far as can be told, between steps 10 and 20 too, and its trace there is 0.933 "
            "times c's. Next: give only steps over which the loss falls, or only steps over which it rises, or "
        ) in str(found)
        assert "At step 0: c, without steps." in comparison_page(comparison)


def test_checkpoints_of_one_loss_are_pairs_without_a_verdict_where_their_orders_differ():
    """Neighbors of one loss are one time, of which the nearest is taken; step 20 is another loss."""
    series = run("a", [2.5, 2.0, 2.501, 2.5001], [6.0, 5.0, 12.0, 13.0])
    comparison = compared(series | {"c": model(2.5, 8.0, 5)})
    found = {pair.first: pair.comparison.verdict() for pair in comparison.pairs_at_same_loss["c"]}
    assert list(found) == ["a at step 30", "a at step 40", "a at step 10"]
    assert [each.reasons for each in found.values()] == [("elsewhere",)] * 3
    assert "a has this loss, as far as can be told, at step 10 too, and its trace there is 0.75" in str(
        found["a at step 30"]
    )
    assert "at step 40 too, and its trace there is 1.62 times c's" in str(found["a at step 10"])
    alone = compared({name: series[name] for name in list(series)[1:]} | {"c": model(2.5, 8.0, 5)})
    assert [pair.comparison.verdict().flattest for pair in alone.pairs_at_same_loss["c"]] == ["c", "c"]


def test_series_of_which_neither_is_flatter_are_said_so_in_words():
    comparison = compared(run("a", [3.0, 2.0], [9.0, 16.0]) | run("b", [3.001, 2.001], [9.01, 16.01]))
    (_, pair) = comparison.pairs_at_same_loss["b"]
    assert str(comparison).splitlines()[-1].startswith("a at step 20  b at step 20  no verdict: the ")
    text = comparison.texts()[-2]
    assert text.startswith("There are 2 pairs at the same loss. None of them has a verdict: in 2, the ")
    one = summary([pair], "a", "b", "more inputs")
    assert one.startswith("There is one pair at the same loss: a at step 20 and b at step 20, at 2.0")
    assert " nats. No verdict on which is flatter. " in one


def test_series_whose_losses_never_overlap_have_no_pair():
    comparison = compared(run("a", [3.0, 2.8], [10.0, 20.0]) | run("b", [2.0, 1.8], [9.0, 16.0]))
    assert comparison.pairs_at_same_loss == {"b": []}
    assert comparison.pairs_tables() == []
    assert comparison.texts()[-1] == "The losses of a and b never overlap, so they have no pair at the same loss."
    assert comparison.answers()[0].answer == "No verdict: the losses never overlap"


def test_copies_and_jumps_of_a_series_are_named():
    models = run("a", [3.0, 2.9, 2.8, 1.5, 1.4, 1.3], [10.0, 11.0, 12.0, 13.0, 40.0, 43.0])
    models["a/checkpoint-70"] = models["a/checkpoint-60"]
    comparison = compared(models)
    comparison.weights["a/checkpoint-70"] = "a/checkpoint-60"
    _, along, *named = comparison.texts()
    assert along.startswith("a, from step 10 to 70: loss falls from 3.0")
    assert "trace rises from 10" in along
    assert [text.partition(", ")[0] for text in named] == [
        "The loss jumps between checkpoint-30 and checkpoint-40",
        "The trace jumps between checkpoint-40 and checkpoint-50",
        "checkpoint-60 and checkpoint-70 have identical weights.",
    ]
    assert "How do the measures change over the steps of a?" in comparison_page(comparison)
    # neither is a jump nor the interval of a ratio an error that is near the value, or that of one input
    for value, influence in ((4e3, 2e4 * DRAWS[5]), (4e3, 3e3 * np.where(np.arange(N) == 7, N - 1, -1) / N)):
        course = run("a", [3.0, 2.9, 2.8, 2.7, 2.6], [10.0, 11.0, 12.0, 13.0, value])
        assert sum("jumps" in text for text in compared(course).texts()) == 1
        course["a/checkpoint-50"]["trace"] = estimate(value, influence)
        assert not any("jumps" in text for text in compared(course).texts())
    course["a/checkpoint-50"]["trace"] = estimate(value, 2e4 * DRAWS[5])
    assert "to 4000 ± 2300 (difference 4000 ± 2300, 95 % -600 to 8600)" in compared(course).texts()[1]
    of_run = compared(run("runs/a/checkpoints", [3.0, 2.9, 2.8], [10.0, 11.0, 12.0]))
    assert of_run.texts()[1].startswith("a, from step 10 to 30: loss falls")
    falling = compared(run("a", [3, 2, 1.7, 1.6, 1.55, 1.53], [9, 10, 11, 12, 13, 14]))
    assert not list(jumps(falling, dict(enumerate(falling.models)), {}))


def test_a_missing_checkpoint_makes_no_jump():
    models = run("a", [3.0, 2.9, 2.8, 2.0, 1.9, 1.8], [10, 11, 12, 13, 14, 15])
    assert len(list(jumps(compared(models), dict(enumerate(models)), {name: name for name in models}))) == 1
    steps = dict(zip([1, 2, 3, 11, 12, 13], models, strict=True))
    assert not list(jumps(compared(models), steps, {}))


def test_a_copy_counts_once_at_one_loss_and_a_shared_start_is_a_step_of_both_series():
    a = run("a", [3.0, 2.0, 1.0], [10.0, 20.0, 40.0])
    b = run("b", [2.0, 2.001], [16.0, 16.0])
    b["b/checkpoint-20"] = b["b/checkpoint-10"]
    comparison = compared(a | b)
    comparison.weights["b/checkpoint-20"] = "b/checkpoint-10"
    assert [pair.first for pair in comparison.pairs_at_same_loss["b"]] == ["a at step 20"]
    course = run("a", [3.0, 2.9, 2.8, 1.5, 1.4], [10.0, 11.0, 12.0, 13.0, 14.0])
    both = compared(course | {name.replace("a/", "b/"): each for name, each in course.items()})
    for name in course:
        both.weights[name.replace("a/", "b/")] = name
    # all of b are copies of a, and b still has its own course
    assert sum(text.startswith("The loss jumps") for text in both.texts()) == 2


def test_small_values_of_a_series_are_in_the_unit_of_their_title():
    comparison = compared(run("a", [5e-4, 4e-4, 2e-4], [10.0, 20.0, 40.0]))
    answer = comparison.answers()[0]
    assert answer.question == "Loss, millinats?"
    assert answer.answer.startswith("It is not shown to change, from 0.5")
    assert answer.detail.startswith("difference -0.3")


def test_the_least_loss_with_rounded_weights_of_each_series_is_named():
    models = run("a", [3.0, 2.0], [10.0, 30.0]) | run("b", [3.001, 2.5], [20.0, 24.0])
    rises = dict(zip(models, (0.2, 0.02, -0.03, 0.04), strict=True))
    details = {"rounded_weights": 9, "map_weights": 9}
    for name, rise in rises.items():
        models[name]["int4-rise"] = dataclasses.replace(models[name]["loss"], value=rise)
        models[name]["int4-rise"].details.update(details)
        models[name]["int4-loss"] = dataclasses.replace(models[name]["loss"], value=models[name]["loss"].value + rise)
    *_, answer = compared(models).answers()
    assert (answer.question, answer.holds) == ("Least loss with 4-bit weights?", True)
    assert re.fullmatch(r"a/checkpoint-20, by 0\.520* nats", answer.answer)
    least = r"the least of each: a 2\.020* ± [\d.]+ nats \(step 20\), b 2\.540* ± [\d.]+ nats \(step 20\); "
    assert re.fullmatch(least + r"rounding moves a loss by -0\.030* ± .* to 0\.20* ± [\d.]+ nats", answer.detail)


def test_a_verdict_on_another_pair_stands_beside_that_there_is_none_at_the_smallest_loss():
    comparison = compared(run("a", [3.0, 2.0], [10.0, 30.0]) | run("b", [3.001, 2.5], [20.0, 24.0]))
    (answer,) = comparison.answers()
    assert answer.holds is None
    assert answer.answer.startswith("No verdict at 2.5")
    assert answer.answer.endswith(". By both traces, a is flatter in 1 of them and b in none; 1 has no verdict")
    assert answer.detail.endswith(
        "the smallest loss of 2 pairs. a goes on to 2.00000 ± 0.00025 nats, where b has nothing to compare"
    )


def test_what_is_not_compared_at_one_loss_is_said():
    models = run("a", [3.0, 2.0], [10.0, 20.0]) | run("b", [2.5, 1.5], [9.0, 16.0])
    said = "Only traces are compared at the same loss; other measures are at each checkpoint's own loss."
    texts = compared(models).texts()
    assert said not in texts
    assert texts[-1].startswith("One run with each of two settings shows how these runs differ")
    tasks = {
        name: each | {"probe-root": dataclasses.replace(each["loss"], details=PROBE)} for name, each in models.items()
    }
    text = compared(tasks).texts()[-1]
    assert text.startswith(said)
    tasks["a/checkpoint-10"]["loss"] = dataclasses.replace(models["a/checkpoint-10"]["loss"], value=2.9)
    text = compared(tasks).texts()[-1]
    assert "the nearest are a/checkpoint-10 and b/checkpoint-10, and b/checkpoint-10 minus a/checkpoint-10 is " in text
    assert "Measure checkpoints in between." in text
    # the lowest loss of near ones, though others are nearer, as long as none are the same
    for name, loss in (("a/checkpoint-10", 2.520), ("b/checkpoint-20", 2.0405)):
        tasks[name]["loss"] = dataclasses.replace(models[name]["loss"], value=loss)
    text = compared(tasks).texts()[-1]
    assert (
        "a/checkpoint-20 and b/checkpoint-20 have the lowest: b/checkpoint-20 minus a/checkpoint-20 is 0.0405" in text
    )
    assert "same within 0.041 nats. Is that near" in text
    tasks["a/checkpoint-10"]["loss"] = dataclasses.replace(models["a/checkpoint-10"]["loss"], value=2.501)
    text = compared(tasks).texts()[-1]
    assert "Of those with the same loss, a/checkpoint-10 and b/checkpoint-10 have the lowest" in text


def test_checkpoints_of_which_one_input_makes_up_much_of_the_error_are_named():
    models = run("a", [3.0, 2.0, 1.0], [10.0, 20.0, 30.0])
    assert not compared(models).warning
    # one influence of (N - 1) times the others makes up 1 - 1 / N of the squares
    alone = np.where(np.arange(N) == 7, N - 1, -1) / N
    for step, trace in ((20, "trace"), (30, "trace"), (30, "minimal-trace")):
        models[f"a/checkpoint-{step}"][trace] = estimate(step, alone)
    warning = (
        "One of the documents makes up more than a quarter of the squared error of the trace of checkpoint-20 (98 %) "
        "and checkpoint-30 (98 %), and of the minimal trace of checkpoint-30 (98 %): with so few like it, these "
        "errors are unreliable."
    )
    assert compared(models).texts()[-1] == warning
    # beside a change of a trace by such an error stands what it is without the input
    moved = {step: estimate(10.0 * step, 20 * alone) for step in (1, 3)}
    changed = {f"a/checkpoint-{10 * step}": {"trace": trace} for step, trace in moved.items()}
    changed = {name: each | changed.get(name, {}) for name, each in models.items()}
    text = compared(changed | {"a/checkpoint-10": models["a/checkpoint-10"]}).texts()[1]
    assert "trace rises from 10.0" in text
    assert "; one input makes up much of the error, without it 2.9" in text
    assert "30 (98 %): with so few like it" in " ".join(comparison_page(compared(models)).split())
    # by document, where these have names
    models["a/checkpoint-10"]["trace"] = estimate(10.0, np.roll(alone, 1))
    named = compared(models, documents=tuple(f'x.jsonl:{i}, "word {i} …"' for i in range(N)))
    several = named.texts()[-1]
    assert several == named.to_dict()["warning"]
    assert several.startswith('One of the documents (x.jsonl:8, "word 8 …") makes up more than a quarter of the ')
    assert (
        ' trace of checkpoint-10 (98 %); another one (x.jsonl:7, "word 7 …") '
        "of the trace of checkpoint-20 (98 %) and checkpoint-30 (98 %), and of the minimal trace of "
        "checkpoint-30 (98 %): with so few like them, these errors are unreliable."
    ) in several
    # of two models, a verdict may say it
    judged = compared({"a": model(2.0, 20.0, 1) | {"trace": estimate(20.0, 20 * alone)}, "b": model(2.0, 21.5, 2)})
    assert judged.verdict().reasons == ("rare",)
    assert str(judged).count("with so few like it") == 1
    assert judged.answers()[1].answer == "No verdict: one input makes up much of the error"
    judged.models["b"]["loss"] = estimate(3.0, 1e-3 * DRAWS[2])
    assert judged.verdict().reasons == ("rare", "loss")
    assert judged.answers()[1].answer == "No verdict: the losses differ"


@pytest.mark.parametrize(
    ("names", "series"),
    [
        (["r/checkpoint-20", "r/checkpoint-3", "r/checkpoint-100"], {"r": [3, 20, 100]}),
        (["o/m@stage1-step10-tokens4B", "o/m@stage1-step9-tokens4B", "x"], {"o/m@stage1": [9, 10], "x": [0]}),
        (["o/m@step1", "o/m@step2", "o/m"], {"o/m": [1, 2], "o/m itself": [0]}),
        (["out", "out/checkpoint-1", "out/checkpoint-2"], {"out itself": [0], "out": [1, 2]}),
        (["a/step-1", "a/step-2"], {}),
        (["a/step-1", "b/step-1", "c/step-1"], {}),
        (["a/step-1-x", "a/step-1-y", "a/step-2"], {}),
        (["seed1", "seed2", "seed3"], {}),
    ],
)
def test_names_with_steps_are_series(names, series):
    assert {name: list(steps) for name, steps in series_of(names).items()} == series
