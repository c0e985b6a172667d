"""Comparisons of models against repetitions, closed forms and each model measured alone."""

import copy
import dataclasses
import functools
import json
import math
import re
import warnings
import weakref

import numpy as np
import pytest
import small_models
import torch
import transformers
from dense_curvature import batch_of, windows

from isoloss.comparison import traces
from isoloss.comparison.traces import InterruptedComparison, Outline
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import fisher_trace
from isoloss.statistics.estimate import Estimate, rounded
from isoloss.statistics.ratio import ClusteredRatio
from known_estimates import leave_one_out_error

VOCAB = 5

compare = functools.partial(traces.compare_traces, minimal=False)  # of the plain traces


def bert(seed=0, *, size=8, vocab=VOCAB):
    return small_models.bert(vocab, seed=seed, size=size, layers=1)


def moved(model, by, seed=1):
    """A copy with all weights a little elsewhere, as a later checkpoint of one run is."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def inputs(n, seed=0, *, vocab=VOCAB, batch_size=None, documents=None):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (n, 4), generator=generator)
    labels = tokens.masked_fill(torch.rand(n, 4, generator=generator) < 0.6, -100)
    labels[:, 1] = tokens[:, 1]
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    if documents is not None:
        batch["documents"] = documents
    size = batch_size or n
    return [{name: value[start : start + size] for name, value in batch.items()} for start in range(0, n, size)]


@torch.no_grad()
def exact_loss(model, batches):
    """Cross-entropy over all predicted positions, and its sums by row."""
    nats, counts = [], []
    for batch in batches:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        for row, labels in zip(logits, batch["labels"], strict=True):
            at = labels != -100
            nats.append(float(torch.nn.functional.cross_entropy(row[at], labels[at], reduction="sum")))
            counts.append(int(at.sum()))
    return np.array(nats), np.array(counts)


def test_an_input_that_makes_up_most_of_an_error_is_told(monkeypatch):
    models, batches = {"a": bert(), "b": bert(1)}, inputs(400, documents=torch.arange(400))
    found = compare(models, batches)
    assert found.warning == ""
    influence = np.zeros(400)
    influence[3] = 5.0
    odd = dict(found.models["a"])  # beside the rest of the error, which is much the same for both
    odd["trace"] = dataclasses.replace(odd["trace"], influence=found.models["b"]["trace"].influence + influence)
    assert re.match(
        "one of the sequences makes up 100 % of the squared error of the difference in trace of a and b",
        dataclasses.replace(found, models=found.models | {"a": odd}).warning,
    )
    monkeypatch.setattr(ClusteredRatio, "leading", 0.92)
    assert "makes up 92 % of the squared error of the trace of a" in str(compare(models, batches))


# --- each model ------------------------------------------------------------------------------------------------------


def test_each_trace_is_what_the_model_alone_gets_and_each_loss_the_cross_entropy():
    models = {"a": bert(), "b": bert(1), "wide": bert(2, size=12)}
    batches = inputs(40, batch_size=16)
    with pytest.warns(IsolossWarning, match="a and wide have different parameters"):
        found = compare(models, batches, seed=3, num_probes=2)
    for name, measured in found.models.items():
        trace, loss = measured["trace"], measured["loss"]
        alone = fisher_trace(models[name], batches, seed=3, num_probes=2)
        assert (trace.value, trace.stderr) == (alone.value, alone.stderr)
        nats, counts = exact_loss(models[name], batches)
        assert loss.value == pytest.approx(nats.sum() / counts.sum(), rel=1e-12)
        assert loss.stderr == pytest.approx(leave_one_out_error(nats, counts))
        assert loss.num_predictions == trace.num_predictions == counts.sum()


@pytest.mark.parametrize("minimal", [False, True])
def test_models_of_different_parameters_are_compared_with_one_warning(minimal):
    models = {"a": bert(), "b": bert(1), "wide": bert(2, size=12), "wider": bert(3, size=16)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = compare(models, inputs(40), minimal=minimal)
    (warning,) = told
    assert re.match("a and wide have different parameters.*not comparable.*isoloss expand", str(warning.message))
    assert len(found.models) == 4
    compare({"a": models["a"], "b": models["b"]}, inputs(40), minimal=minimal)  # warnings are errors here


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_a_model_differs_from_itself_by_nothing():
    model = bert()
    found = compare({"a": model, "b": copy.deepcopy(model), "c": copy.deepcopy(model)}, inputs(40))
    for pair in (("a", "b"), ("a", "c"), ("b", "c")):
        for name in found.names:
            difference = found.difference(name, *pair)
            assert (difference.value, difference.stderr) == (0, 0)
        assert found.ratio("trace", *pair) == (1, (1, 1))
    assert list(found.probability_of_smallest("trace").values()) == pytest.approx([1 / 3] * 3)


def test_a_model_differs_from_itself_by_nothing_in_packed_rows_either():
    """Documents that separators show lie in blocks, and here the error over documents is the larger one."""
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(1, 50, (60, 16)).masked_fill(torch.rand(60, 16) < 0.08, 0)
    found = compare({"a": model, "b": copy.deepcopy(model)}, [{"input_ids": tokens, "labels": tokens}])
    for name in ("loss", "trace"):
        difference = found.difference(name, "a", "b")
        assert (difference.value, difference.stderr) == (0, 0)
    assert found.verdict().reasons == ("weights",)


def test_paired_errors_agree_with_repetitions_and_are_far_below_unpaired_ones():
    a = windows()
    b = moved(a, 0.003)
    traces, losses, ratios, told, unpaired = [], [], [], [], []
    repetitions = 24
    for seed in range(repetitions):
        found = compare({"a": a, "b": b}, [batch_of(64, seed=seed + 1)], seed=seed, causal=False)
        trace, loss, ratio = pair = (
            found.difference("trace", "a", "b"),
            found.difference("loss", "a", "b"),
            found.log_ratio("trace", "a", "b"),
        )
        traces.append(trace.value)
        losses.append(loss.value)
        ratios.append(ratio.value)
        told.append([each.stderr for each in pair])
        unpaired.append(math.hypot(*(each.stderr for each in found.of("trace").values())))
    told = np.sqrt((np.array(told) ** 2).mean(axis=0))
    # the deviation of a standard deviation over n repetitions is about its share 1 / sqrt(2 n): 15 %
    for values, error in zip((traces, losses, ratios), told, strict=True):
        assert np.std(values, ddof=1) == pytest.approx(error, rel=0.45)
    assert told[0] < 0.2 * np.mean(unpaired)


@pytest.mark.slow
def test_intervals_of_the_difference_cover_the_truth():
    a = bert()
    b = moved(a, 0.05)
    population = inputs(400, 99)[0]
    exact = [fisher_trace_of_rows(model, population) for model in (a, b)]
    counts = (population["labels"] != -100).sum(dim=1)
    truth = float((exact[0] - exact[1]).sum() / counts.sum())
    true_ratio = float(exact[0].sum() / exact[1].sum())
    covered = np.zeros(2)
    for repetition in range(400):
        chosen = torch.randint(0, 400, (64,), generator=torch.Generator().manual_seed(repetition))
        batch = {name: value[chosen] for name, value in population.items()}
        found = compare({"a": a, "b": b}, [batch], seed=repetition)
        low, high = found.difference("trace", "a", "b").ci95
        covered[0] += low < truth < high
        _, (low, high) = found.ratio("trace", "a", "b")
        covered[1] += low < true_ratio < high
    # 95 % nominal; the binomial standard deviation over 400 repetitions is 1.1 points
    assert covered.min() / 400 >= 0.92
    assert covered.max() / 400 <= 0.98


def fisher_trace_of_rows(model, batch):
    """(n,) the sum over predicted positions and labels of p ||grad log p||^2, by the plain gradient of each."""
    parameters = list(model.parameters())
    sums = []
    for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        log_p = model(tokens[None]).logits[0].log_softmax(-1)
        total, every = 0.0, torch.eye(log_p.shape[1], dtype=log_p.dtype)
        for t in (labels != -100).nonzero()[:, 0].tolist():
            gradients = torch.autograd.grad(
                log_p[t], parameters, every, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            norms = sum(g.square().flatten(1).sum(dim=1) for g in gradients if g is not None)
            total += float(log_p[t].detach().exp() @ norms)
        sums.append(total)
    return torch.tensor(sums, dtype=torch.float64)


def test_one_estimator_is_right_for_models_that_are_not_alike():
    """The second model gets control variates that were made for the first; the signs still average out."""
    batches = inputs(40)
    models = {"a": bert(), "wide": bert(2, size=12)}
    num_predictions = int((batches[0]["labels"] != -100).sum())
    copies = {name: value.repeat(16, 1) for name, value in batches[0].items()}  # of the same inputs
    found = compare(models, [{**copies, "documents": torch.arange(640) // 40}], one_estimator=True)
    for trace, model in zip(found.of("trace").values(), models.values(), strict=True):
        truth = float(fisher_trace_of_rows(model, batches[0]).sum()) / num_predictions
        assert abs(trace.value - truth) < 4 * trace.stderr
        assert trace.stderr < 0.07 * truth


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_the_ranking_starts_with_the_flattest():
    sharp = bert()
    with torch.no_grad():
        for parameter in sharp.parameters():
            parameter *= 1.5
    found = compare({"sharp": sharp, "flat": bert()}, inputs(64))
    assert found.ranking("trace") == ("flat", "sharp")
    assert found.probability_of_smallest("trace")["flat"] > 0.99
    assert found.difference("trace", "flat", "sharp").value < 0 < found.difference("trace", "sharp", "flat").value
    with pytest.raises(IsolossError, match="there is no model round; the models are sharp, flat"):
        found.difference("trace", "flat", "round")
    with pytest.raises(IsolossError, match="no estimate kl; the estimates are trace, without-embeddings, loss"):
        found.ratio("kl", "flat", "sharp")


def test_it_prints_as_one_line_and_as_tables():
    sharp = bert()
    with torch.no_grad():
        for parameter in sharp.parameters():
            parameter *= 1.5
    found = compare({"sharp": sharp, "flat": bert()}, inputs(64))
    assert repr(found) == "TraceComparison(2 models; flattest: no verdict)"
    lines = str(found).splitlines()
    starts = [line.split()[0] for line in lines if line]
    assert starts[:8] == ["model", "flat", "sharp", "paired", "sharp", "trace", "without", "nats"]
    of_loss, of_trace = (found.difference(name, "sharp", "flat") for name in ("loss", "trace"))
    loss, trace = (line for line in lines if re.match(r"(sharp minus flat|\s+)\s+(loss|trace) ", line))
    assert rounded(of_loss.value, of_loss.stderr) in loss
    assert rounded(of_trace.value, of_trace.stderr) in trace
    assert trace.endswith("{:#.4g} to {:#.4g}".format(*found.ratio("trace", "sharp", "flat")[1]))
    turned = compare({"flat": bert(), "sharp": sharp}, inputs(64))
    assert str(turned) == str(found)
    assert found._repr_html_().count("<tr>") == 7


def test_a_comparison_is_json():
    found = traces.compare_traces({"a": bert(), "b": bert(1)}, inputs(20))
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Estimate.from_dict(document["models"]["b"]["minimal-trace"]) == found.models["b"]["minimal-trace"]
    pairs = {pair["estimate"]: pair for pair in document["pairs"]}
    assert set(pairs) == set(found.names)
    difference = found.difference("minimal-trace", "a", "b")
    assert Estimate.from_dict(pairs["minimal-trace"]["difference"]) == difference
    assert document["ranking"]["trace"] == list(found.ranking("trace"))


# --- loading, stopping, interruptions --------------------------------------------------------------------------------


def test_loaded_models_are_dropped_before_the_next():
    alive = []

    def loader(seed):
        def load():
            assert not [reference for reference in alive if reference() is not None]
            model = bert(seed)
            alive.append(weakref.ref(model))
            return model

        return load

    found = compare({"a": loader(0), "b": loader(1), "c": loader(2)}, inputs(20))
    assert len(alive) == 3
    assert found.models["b"]["trace"].value == fisher_trace(bert(1), inputs(20)).value


def test_checkpoints_are_loaded_by_name(tmp_path):
    names = [str(tmp_path / name) for name in "ab"]
    for seed, name in enumerate(names):
        bert(seed).float().save_pretrained(name)
    found = compare(names, inputs(20))
    assert list(found.models) == names
    expected = fisher_trace(bert(1).float(), inputs(20)).value
    assert found.models[names[1]]["trace"].value == pytest.approx(expected, rel=1e-6)
    with pytest.raises(IsolossError, match="named twice"):
        compare([names[0], names[0]], inputs(20))


def test_the_first_model_decides_where_a_tolerance_stops_all():
    models = {"a": bert(), "b": moved(bert(), 0.5)}
    batches = inputs(512, batch_size=16)
    alone = fisher_trace(models["a"], batches, rtol=0.1)
    found = compare(models, iter(batches), rtol=0.1)
    assert alone.details["ended"] == "rtol"
    assert alone.details["sequences"] < 512
    assert [trace.details["sequences"] for trace in found.of("trace").values()] == [alone.details["sequences"]] * 2
    assert found.models["a"]["loss"].samples == alone.samples
    few = compare(models, batches, num_sequences=20)
    assert [loss.samples for loss in few.of("loss").values()] == [20, 20]


def test_progress_names_the_model():
    steps = []
    compare(
        {"a": bert(), "b": bert(1)}, inputs(8, batch_size=4), progress=lambda name, done: steps.append((name, done))
    )
    assert steps == [("a", 4), ("a", 8), ("b", 4), ("b", 8)]


def test_an_interruption_keeps_what_is_done():
    models, batches = {"a": bert(), "b": bert(1), "c": bert(2)}, inputs(24, batch_size=8)

    def stop_at(name, count):
        def progress(model, done):
            if (model, done) == (name, count):
                raise KeyboardInterrupt

        return progress

    with pytest.raises(InterruptedComparison) as caught:
        compare(models, batches, progress=stop_at("c", 16))
    assert list(caught.value.complete.models) == ["a", "b"]
    alone = compare({"a": bert(), "b": bert(1)}, batches)
    assert caught.value.complete.difference("trace", "a", "b") == alone.difference("trace", "a", "b")
    assert caught.value.name == "c"
    assert caught.value.partial.value == fisher_trace(bert(2), batches[:2]).value
    with pytest.raises(InterruptedComparison) as caught:
        compare(models, batches, progress=stop_at("a", 8))
    assert caught.value.complete is None
    assert caught.value.partial.samples == 8


# --- refusals --------------------------------------------------------------------------------------------------------


def test_models_that_do_not_compare_are_refused():
    with pytest.raises(IsolossError, match="b predicts next tokens and a predicts masked tokens"):
        compare({"a": bert(), "b": small_models.gpt2(VOCAB)}, inputs(8))
    with pytest.raises(IsolossError, match="a has a vocabulary of 5 tokens and b of 6"):
        compare({"a": bert(), "b": bert(vocab=6)}, inputs(8))
    assert Outline.of("a", bert()) == Outline("a", False, VOCAB)


def test_bad_input_names_the_model():
    broken = bert()
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(IsolossError, match=r"b: batch 0: .*NaN"):
        compare({"a": bert(), "b": broken}, inputs(8))
    labels = inputs(8)
    labels[0]["labels"][0, 1] = VOCAB
    with pytest.raises(IsolossError, match=f"a: batch 0: a label is {VOCAB}; the model predicts ids 0 to {VOCAB - 1}"):
        compare({"a": bert()}, labels)
    with pytest.raises(IsolossError, match="models is"):
        compare({}, inputs(8))
    with pytest.raises(IsolossError, match="models is 'a'"):
        compare("a", inputs(8))
    constant = bert()
    with torch.no_grad():
        for parameter in constant.parameters():
            parameter.zero_()
        constant.cls.predictions.bias[0] = 1e4  # certain of one token: no gradient at all
    with pytest.raises(IsolossError, match="a: the trace is 0, which has no ratio to another: all gradients are 0"):
        compare({"a": constant}, inputs(8))
