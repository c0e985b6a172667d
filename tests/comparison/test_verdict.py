"""The verdict on several models, from estimates with known errors and from models with known relations."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import ModelOutput

from isoloss import compare_traces
from isoloss.comparison.models import ModelComparison
from isoloss.comparison.page import comparison_page
from isoloss.comparison.verdict import TraceComparison, verdict
from isoloss.errors import IsolossError
from isoloss.flatness._rescaling.apply import rescaled_at_random
from isoloss.statistics.estimate import Estimate, rarity
from isoloss.statistics.significance import equivalence

N = 64


def estimate(value, error, draws, **details):
    """A value with this error, whose influences are independent of those of other draws."""
    influence = np.random.default_rng(draws).standard_normal(N)
    influence *= error * np.sqrt(N * (N - 1) / (influence**2).sum())
    return Estimate(
        value=value,
        stderr=error,
        samples=N,
        unit="nats per predicted token",
        num_predictions=N,
        method="known",
        influence=influence,
        by_parameter=details.pop("by_parameter", {"w": value}),
        details={"num_parameters": 7, "embeddings": [], "gauged": [], "infimum": value, "in_sample": value, **details}
        | {"sequences": N, "clusters": "documents"},
    )


def compared(models):
    """The comparison of models, each with its trace and minimal trace (None: not measured), loss and weights."""
    found = {}
    for name, (trace, least, loss, weights) in models.items():
        seed = 10 * int(weights)
        rest = estimate(trace / 2, 0.1, seed)
        found[name] = {"trace": estimate(trace, 0.1, seed + 1), "without-embeddings": rest}
        found[name]["loss"] = estimate(loss, 0.001, seed + 3)
        if least is not None:
            found[name]["minimal-trace"] = estimate(least, 0.1, seed + 2)
            found[name]["minimal-without-embeddings"] = rest
    weights = {name: model[-1] for name, model in models.items()}
    return TraceComparison(models=found, weights=weights, architectures=dict.fromkeys(models, ""))


def test_a_model_is_the_flattest_where_both_measures_say_so_at_the_same_loss():
    found = verdict(compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.004, "2"), "c": (7, 5, 2.0, "3")}))
    assert (found.flattest, found.reasons) == ("a", ())
    assert str(found) == (
        "a is the flattest: b's trace is 1.20 times (95 % 1.14 to 1.26) a's and its minimal trace is 1.33 times "
        "(95 % 1.22 to 1.46) a's, at the same loss as the others within ± 0.01 nats."
    )


def test_the_answer_on_the_loss_is_about_the_same_models_as_the_verdict():
    known = compared({"a": (6, 4, 2.0, "1"), "b": (5, 3, 1.992, "2"), "c": (7, 5, 2.008, "3")})
    found = ModelComparison(models=known.models, weights=known.weights, architectures=known.architectures)
    same_loss, _ = found.answers()
    assert found.verdict().reasons == ("loss",)
    assert (same_loss.answer, same_loss.holds) == ("No, 0.016 nats apart", False)
    assert same_loss.detail.startswith("c minus b: 0.0160 ± ")


@pytest.mark.parametrize(("second", "answer"), [(5, "b, with 0.833 times the trace of a"), (7, "a; b has 1.17 times")])
def test_of_two_models_every_ratio_is_of_the_second_to_the_first(second, answer):
    known = compared({"a": (6, 6, 2.0, "1"), "b": (second, second, 2.0, "2")})
    found = ModelComparison(models=known.models, weights=known.weights, architectures=known.architectures)
    apart = with_more(known, "loss", {"a": (2.0, 0.001), "b": (2.5, 0.001)})
    assert "The losses differ by more than 0.01 nats: b minus a is 0.50" in str(apart.verdict())
    _, flatter = found.answers()
    assert flatter.answer.startswith(answer)
    size = flatter.answer.partition(" times")[0].rpartition(" ")[2]
    assert flatter.detail.startswith(f"b's trace is {size} times (95 % ")
    assert f" trace is {size} times (95 % " in str(found.verdict())
    assert f"× {size}" in comparison_page(found)


def test_of_three_models_a_ratio_is_of_the_later_to_the_earlier_as_on_the_page():
    known = compared({"a": (6, 4, 2.0, "1"), "b": (5, 3, 2.0, "2"), "c": (7, 5, 2.0, "3")})
    found = ModelComparison(models=known.models, weights=known.weights, architectures=known.architectures)
    _, flatter = found.answers()
    assert flatter.answer == "b, with 0.833 times the trace of a"
    assert flatter.detail.startswith("b's trace is 0.833 times (95 % ")
    assert str(found.verdict()).startswith("b is the flattest: its trace is 0.833 times (95 % ")
    assert "× 0.833" in comparison_page(found)


def with_more(known, key, of):
    """The comparison with one more estimate of each model: value and error."""
    found = {
        name: {**each, key: estimate(*of[name], 100 + place)} for place, (name, each) in enumerate(known.models.items())
    }
    return ModelComparison(models=found, weights=known.weights, architectures=known.architectures)


def test_a_margin_that_was_set_and_the_interval_of_its_test_are_said():
    known = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.0, "2")})
    apart = with_more(known, "loss", {"a": (2.0, 0.001), "b": (2.0076, 0.001)})
    same_loss, *_ = apart.answers()
    ends = equivalence(apart.difference("loss", "b", "a"), 0.01).interval
    assert ends[1] < 0.01 < apart.difference("loss", "b", "a").ci95[1]
    assert same_loss.answer == "Yes, within ± 0.01 nats"
    assert same_loss.detail.endswith(f"takes the 90 % interval, {ends[0]:.4f} to {ends[1]:.4f}")
    wider = dataclasses.replace(apart, loss_margin=0.02).answers()[0]
    assert wider.answer == "Yes, within ± 0.02 nats"
    assert wider.detail.endswith("; they differ, but not by more than the margin that was set (default 0.01)")
    assert "90 %" not in wider.detail
    texts = dataclasses.replace(apart, loss_margin=0.02).texts()
    assert [text.split("? ")[0] for text in texts[2:3]] == ["Same loss"]
    # beyond the default margin, the losses are beside the answer on flatness too
    far = dataclasses.replace(with_more(known, "loss", {"a": (2.0, 0.001), "b": (2.03, 0.001)}), loss_margin=0.04)
    for comparison, is_far in ((far, True), (dataclasses.replace(apart, loss_margin=0.02), False)):
        flatter = comparison.answers()[1]
        assert flatter.holds
        assert ("and that alone may move a trace" in flatter.detail) == is_far
    assert not any(text.startswith("Same loss?") for text in apart.texts())


def test_a_loss_that_surely_differs_is_no_less_so_beside_a_larger_uncertain_difference():
    known = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.03, "2"), "c": (7, 5, 2.04, "3")})
    wide = with_more(known, "loss", {"a": (2.0, 0.001), "b": (2.03, 0.001), "c": (2.04, 0.1)})
    same_loss, _ = wide.answers()
    assert wide.verdict().reasons == ("loss",)
    assert (same_loss.answer, same_loss.holds) == ("No, 0.03 nats apart", False)
    assert same_loss.detail.startswith("b minus a: 0.0300 ± ")


def test_a_model_is_better_at_a_task_only_if_it_is_better_than_every_other():
    known = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.0, "2"), "c": (7, 5, 2.0, "3")})
    accuracies = {"a": (90.0, 0.1), "b": (88.0, 0.1), "c": (87.0, 5.0)}
    task = with_more(known, "probe-mine", accuracies)
    for each in task.models.values():
        each["probe-mine"].details.update(pooling="mean", majority_rate=0.5)
    better = task.answers()[-1]
    assert (better.answer, better.holds) == ("No difference shown, by a probe of the mean over tokens", None)
    for each in task.models.values():
        each["probe-mine"].details["majority_rate"] = 90.0  # as a's accuracy
    assert task.answers()[-1].answer.endswith(" over tokens; none is above the majority class's 9000.00 %")
    assert "c minus a -3.0 ± 5.0 points" in better.detail


@pytest.mark.parametrize("other", [6, 7, 60])  # surely larger, if the error can be trusted; the last, if it is far off
def test_an_input_that_makes_up_much_of_an_error_gives_no_verdict_on_what_is_near(other):
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (other, 4, 2.0, "2")})
    influence = np.full(N, 0.1)
    influence[7] = 9
    for name in "ab":
        trace = comparison.models[name]["trace"]
        rare = {"trace": dataclasses.replace(trace, influence=influence + trace.influence)}
        comparison = dataclasses.replace(comparison, models=comparison.models | {name: comparison.models[name] | rare})
        judged = ModelComparison(
            models=comparison.models,
            weights=comparison.weights,
            architectures=comparison.architectures,
            documents=tuple(f"document {i}" for i in range(N)),
        )
        found = judged.verdict()
        # what it does to both models alike is not in the difference
        is_rare = name == "a" and other < 60
        assert (found.flattest, found.reasons) == ((None, ("rare",)) if is_rare else ("a", ()))
        assert (", but one of the documents (document 7) makes up" in str(found)) == is_rare
        assert judged.texts()[-1].startswith("One of the documents (document 7) makes up ") != is_rare
        assert (
            judged.texts()[-1].endswith(
                " The verdict rests on their differences, which are less uneven, or far beyond what counts."
            )
            != is_rare
        )


def test_an_input_that_decides_the_error_of_values_is_named_beside_another_that_decides_the_difference():
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (7, 4, 2.0, "2")})
    of_both, of_a = (np.where(np.arange(N) == place, size, 0.0) for place, size in ((3, 60.0), (7, 9.0)))
    models = {
        name: each | {"trace": dataclasses.replace(each["trace"], influence=each["trace"].influence + more)}
        for (name, each), more in zip(comparison.models.items(), (of_both + of_a, of_both), strict=True)
    }
    documents = tuple(f"document {i}" for i in range(N))
    comparison = ModelComparison(
        models=models, weights=comparison.weights, architectures=comparison.architectures, documents=documents
    )
    assert comparison.verdict().reasons == ("rare",)
    assert "(document 7)" in str(comparison.verdict())
    assert comparison.warning.startswith("One of the documents (document 3) makes up")
    assert "document 7" not in comparison.warning


@pytest.mark.parametrize(
    ("other", "large", "said"),
    [
        (
            7,
            [40],
            "As a hint, since rare inputs may make up much of the mean: without it, a is flatter: b's trace is 1.6",
        ),  # 7 / (5 - 40 / 63), and 1.4 with it
        (7, [40, 13], "mean: without it and 1 more like it (document 8), a is flatter: b's trace is "),
        (7, [30, 16, 8], "mean: without it and 2 more like it (document 8), (document 9), a is flatter: b's trace is "),
        (7, [36, 20, 12, 8], "Without it and 2 more like it, yet another one makes up much of an error."),
        (5.4, [-10], "Without it, there is no verdict either: the traces, or the minimal traces, are too close."),
    ],
)
def test_what_the_verdict_would_be_without_the_inputs_that_decide_an_error_is_said(other, large, said):
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (other, 4, 2.0, "2")})
    trace = comparison.models["a"]["trace"]
    influence = 0.3 * trace.influence
    influence[7 : 7 + len(large)] = large
    of_a = comparison.models["a"] | {"trace": dataclasses.replace(trace, influence=influence)}
    comparison = dataclasses.replace(
        comparison,
        models=comparison.models | {"a": of_a},
        documents=tuple(f"document {i}" for i in range(N)),
    )
    found = comparison.verdict()
    assert (found.flattest, found.reasons) == (None, ("rare",))
    assert said in str(found).partition("with so few like it, the error is unreliable. ")[2]


def test_a_part_just_over_a_quarter_is_not_printed_as_one():
    influence = np.ones(N)
    influence[7] = np.sqrt(0.2505 / 0.7495 * (N - 1))  # of the squares, 25.05 %
    one = dataclasses.replace(estimate(5, 0.1, 1), influence=influence)
    assert rarity({"a": one}).startswith("one of the documents makes up over 25 % of the squared error of a: ")


def test_a_ratio_that_excludes_1_beside_a_difference_that_includes_0_is_said():
    known = compared({"a": (1, 3, 2.0, "1"), "b": (2, 4, 2.0, "2")})
    wide = with_more(known, "trace", {"a": (1, 0.01), "b": (2, 0.52)})
    for name, each in wide.models.items():
        details = known.models[name]["trace"].details
        each["trace"] = dataclasses.replace(each["trace"], by_parameter={"w": 1.0}, details=details)
    high = wide.ratio("trace", "a", "b")[1][1]
    assert high < 1
    assert wide.difference("trace", "b", "a").ci95[0] < 0
    said = "The interval of the ratio excludes 1 in trace, but that of the difference includes 0: a verdict needs both."
    assert said in str(wide.verdict())


def test_a_difference_that_is_sure_but_small_gives_no_verdict():
    # thousands of standard errors apart, by 4 and by 6 %
    near, apart = (compared({"a": (5000, 3000, 2.0, "1"), "b": (6000, least, 2.0, "2")}) for least in (3120, 3180))
    assert (verdict(near).flattest, verdict(near).reasons) == (None, ("near",))
    assert (
        "the smaller minimal trace (probability above 0.999); b's trace is 1.20 times (95 % 1.20 to 1.20) a's and its "
        "minimal trace is 1.04 times (95 % 1.04 to 1.04) a's, but the minimal traces differ by less than a factor "
        "of 1.05, the smallest that counts. Next: let a smaller ratio count (isoloss compare MODEL MODEL --min-ratio "
        "RATIO), or ask"
    ) in str(verdict(near))
    assert verdict(near, min_ratio=1.03).flattest == verdict(apart).flattest == "a"
    # no ratio gives a verdict where the two traces disagree
    apart = compared({"a": (5000, 3000, 2.0, "1"), "b": (5100, 2950, 2.0, "2")})
    assert verdict(apart).reasons == ("near",)
    assert "--min-ratio" not in str(verdict(apart))
    with pytest.raises(IsolossError, match=r"min_ratio is 0\.9"):
        verdict(near, min_ratio=0.9)


def test_traces_that_are_shown_to_be_alike_need_no_more_inputs():
    found = verdict(compared({"a": (500, 300, 2.0, "1"), "b": (500.01, 300.01, 2.0, "2")}))
    assert found.reasons == ("near",)


@pytest.mark.parametrize(
    "change", [{"n_inner": 48, "n_positions": 16}, {"n_head": 4}, {"activation_function": "relu"}], ids=str
)
def test_architectures_of_as_many_parameters_are_not_compared(change):
    sizes = {"vocab_size": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 32, "n_positions": 49}
    models = []
    for config in (sizes, {**sizes, **change}):
        torch.manual_seed(0)
        models.append(GPT2LMHeadModel(GPT2Config(**config, bos_token_id=0, eos_token_id=0)).eval())
    first, second = (sum(p.numel() for p in model.parameters()) for model in models)
    assert first == second
    ids = torch.randint(0, 16, (64, 8), generator=torch.Generator().manual_seed(1))
    found = compare_traces(dict(zip("ab", models, strict=True)), [{"input_ids": ids, "labels": ids}]).verdict()
    assert (found.flattest, found.reasons) == (None, ("parameters",))
    assert "a and b have different architectures" in str(found)


def test_two_measures_that_disagree_give_no_verdict():
    found = verdict(compared({"a": (5, 4, 2.0, "1"), "b": (6, 3, 2.0, "2")}), names={"a": "A", "b": "B"})
    assert (found.flattest, found.reasons) == (None, ("disagree",))
    assert str(found) == (
        "No verdict on which is flatter. A has the smaller trace (probability above 0.999) and B has the smaller "
        "minimal trace (probability above 0.999); B's trace is 1.20 times (95 % 1.14 to 1.26) A's and A's minimal "
        "trace is 1.33 times (95 % 1.22 to 1.46) B's: the scale of the weights decides the order of the traces. "
        "Next: ask which is better at a task (isoloss compare MODEL MODEL --task TASK)."
    )
    # with a task, that step is behind them
    same = verdict(compared({"a": (5, 4, 2.0, "1"), "b": (6, 3, 2.0, "2")}), with_tasks=True)
    assert str(same).endswith("the scale of the weights decides the order of the traces.")


def test_other_losses_give_no_verdict_but_a_wider_margin_does():
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.02, "2")})
    found = comparison.verdict()
    assert (found.flattest, found.reasons) == (None, ("loss",))
    assert "The losses differ by more than 0.01 nats: b minus a is 0.02" in str(found)
    assert " nats. Next: compare checkpoints whose losses are nearer (isoloss compare takes all" in str(found)
    assert comparison.verdict(loss_margin=0.03).flattest == "a"
    with pytest.raises(IsolossError, match="margin"):
        comparison.verdict(loss_margin=0)


def test_losses_that_may_be_the_same_take_more_inputs_and_no_other_checkpoints():
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.0006, "2")})
    for name in comparison.models:
        loss = comparison.models[name]["loss"]
        comparison.models[name]["loss"] = dataclasses.replace(loss, stderr=0.007, influence=7 * loss.influence)
    found = verdict(comparison, more="more luck")
    assert (found.flattest, found.reasons) == (None, ("loss open",))
    assert "The losses are not shown to be within ± 0.01 nats: b minus a is " in str(found)
    assert "Next: take more luck, or ask which is better at a task" in str(found)
    margin = equivalence(comparison.difference("loss", "b", "a"), 0.01).smallest_margin
    (said,) = re.findall(r"They are shown to be within ([\d.]+) nats", str(found))
    assert margin < float(said) <= margin + 0.001


def test_a_small_difference_leaves_it_open():
    found = verdict(compared({"a": (5, 3, 2.0, "1"), "b": (6, 3.1, 2.0, "2")}), more="more luck")
    assert (found.flattest, found.reasons) == (None, ("open",))
    assert "a has the smaller trace (probability above 0.999) and the smaller minimal trace (probability" in str(found)
    assert "The errors are too large to tell. Next: take more luck, or ask which is better at a task" in str(found)


def test_a_ratio_whose_interval_has_1_in_it_leaves_it_open_though_the_difference_is_sure():
    known = compared({"a": (6, 4, 2.0, "1"), "b": (5, 3, 2.0, "2")})
    wide = with_more(known, "minimal-trace", {"a": (22.5, 0.1), "b": (14.4, 3.8)})
    assert wide.difference("minimal-trace", "b", "a").ci95[1] < 0
    found = wide.verdict()
    assert (found.flattest, found.reasons) == (None, ("open",))
    assert (
        "The errors are too large to tell. The difference in minimal trace excludes 0, but the interval of the ratio, "
        "which is wider with errors so large, does not exclude 1. Next: "
    ) in str(found)
    narrow = with_more(known, "minimal-trace", {"a": (22.5, 0.1), "b": (14.4, 2.8)})
    assert narrow.verdict().flattest == "b"


def test_one_measure_alone_gives_no_verdict():
    found = verdict(compared({"a": (5, None, 2.0, "1"), "b": (6, None, 2.0, "2")}))
    assert (found.flattest, found.reasons) == (None, ("no minimal trace",))
    assert "is missing: it was not measured" in str(found)


def test_minimal_traces_by_different_conventions_give_no_verdict():
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.0, "2")})
    details = comparison.models["b"]["minimal-trace"].details
    details["gauged"].append("residual stream")
    assert comparison.verdict().flattest == "a"  # a gauge that the value does not depend on, as it is the infimum
    details["infimum"] = 3.5
    found = comparison.verdict()
    assert (found.flattest, found.reasons) == (None, ("gauges",))


def test_other_parameters_give_no_verdict_whatever_the_numbers():
    comparison = compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 3.0, "2")})
    comparison.models["b"]["trace"].by_parameter["v"] = 0.0
    found = comparison.verdict()
    assert (found.flattest, found.reasons) == (None, ("parameters",))
    assert "a and b have different parameters" in str(found)


def test_identical_models_share_their_place():
    found = verdict(compared({"a": (5, 3, 2.0, "1"), "copy": (5, 3, 2.0, "1")}))
    assert (found.flattest, found.reasons) == (None, ("weights",))
    assert str(found) == "a and copy have identical weights. There is nothing to compare."
    models = {"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.004, "2"), "copy": (5, 3, 2.0, "1")}
    found = verdict(compared(models))
    assert found.flattest == "a"  # although either copy has but half of the probability
    assert str(found).startswith("a and copy have identical weights. a is flatter")


def test_equal_weights_under_another_config_are_another_function():
    found = verdict(compared({"a": (5, 3, 2.0, "1"), "b": (6, 4, 2.004, "1")}))
    assert found.flattest == "a"
    assert "identical" not in str(found)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=11, max_position_embeddings=8, initializer_range=0.5, bos_token_id=None, eos_token_id=None, **sizes
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(0, 11, (64, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": ids, "labels": ids}]


def test_a_rescaled_model_is_said_to_be_the_same_function(model, batches):
    comparison = compare_traces(
        {"it": model, "rescaled": rescaled_at_random(model, granularity="tensor", seed=0)}, batches
    )
    assert not 0.9 < comparison.ratio("trace", "it", "rescaled")[0] < 1.1
    found = comparison.verdict()
    assert (found.flattest, found.reasons) == (None, ("function",))
    assert "it and rescaled have the same loss on every input: one function, different weights." in str(comparison)


def test_a_rescaling_does_not_make_a_model_the_flattest(model):
    """The plain trace alone said so, with a probability above 0.99."""
    ids = torch.randint(0, 11, (1024, 6), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids, "labels": ids}]
    torch.manual_seed(1)
    models = {"a": model, "b": LlamaForCausalLM(model.config).double().eval()}
    flatter, sharper = compare_traces(models, batches).ranking("minimal-trace")
    models[flatter] = rescaled_at_random(models[flatter], granularity="tensor", seed=0)
    comparison = compare_traces(models, batches)
    assert comparison.ranking("trace") == (sharper, flatter)
    assert comparison.probability_of_smallest("trace")[sharper] > 0.99
    assert comparison.ranking("minimal-trace") == (flatter, sharper)
    found = comparison.verdict(loss_margin=1)
    assert (found.flattest, found.reasons) == (None, ("disagree",))


def test_a_model_without_known_rescalings_is_compared_without_a_verdict(batches):
    class Bigram(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.config = None
            self.embed, self.head = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)

        def forward(self, input_ids, **_):
            return ModelOutput(logits=self.head(self.embed(input_ids)))

    models = {"a": Bigram(0).eval(), "b": Bigram(1).eval()}
    comparison = compare_traces(models, batches, causal=True)
    assert comparison.traces == ("trace",)
    assert comparison.verdict().reasons[0] == "no minimal trace"
    assert f"is missing: {comparison.no_minimal}" in str(comparison)
    with pytest.raises(IsolossError, match=r"^a: "):
        compare_traces(models, batches, causal=True, minimal=True)


def test_of_more_than_20_models_the_differences_in_json_are_those_from_the_first():
    found = []
    for number in (3, 21):
        known = compared({f"m{place}": (5 + place, 3 + place, 2.0, str(place)) for place in range(number)})
        found.append({(pair["first"], pair["second"]) for pair in known.to_dict()["pairs"]})
    few, many = found
    assert few == {("m0", "m1"), ("m0", "m2"), ("m1", "m2")}
    assert many == {("m0", f"m{place}") for place in range(1, 21)}


def test_the_loss_of_tokens_whose_probability_float32_does_not_hold():
    class Sure(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8)

        def forward(self, input_ids):
            return ModelOutput(logits=100 * self.head(self.table(input_ids)))

    model, ids = Sure(), torch.randint(0, 8, (16, 6), generator=torch.Generator().manual_seed(0))
    found = compare_traces({"a": model}, [{"input_ids": ids, "labels": ids}], causal=True).models["a"]["loss"].value
    logits = model(ids).logits[:, :-1].detach().double()
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    assert found == pytest.approx(float(each.mean()), rel=1e-6)
    assert each.max() > 104  # exp(-104) is 0 in float32
