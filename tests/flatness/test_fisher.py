"""The Fisher trace against enumeration of every label and every probe; invariances, processes, and what it refuses."""

import itertools
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small_models import MODELS, Windows, bert, cut, exact, gpt2, llama, patch_probes, rows
from torch import nn
from transformers import BertForSequenceClassification, BertForTokenClassification, T5Config, T5ForConditionalGeneration

from isoloss.errors import IsolossError
from isoloss.flatness import _measurement, _parameters, empirical_fisher_trace, fisher, fisher_trace
from isoloss.flatness._ghost import controls, engine
from isoloss.model_checks import is_causal
from isoloss.statistics.estimate import Estimate

# --- exactness -------------------------------------------------------------------------------------------------------


def copied(batch, copies):
    """A batch of so many copies, each of which is a document."""
    documents = torch.arange(copies).repeat_interleave(len(batch["labels"]))
    return {**{name: value.repeat(copies, 1) for name, value in batch.items()}, "documents": documents}


def expectation_over_signs(monkeypatch, model, batch, *, causal, positions, vocab):
    """The mean of `fisher_trace` over every sign vector, the same ones in each sequence; v and -v give the same."""
    choices = [torch.tensor([1, *rest]) for rest in itertools.product((-1, 1), repeat=vocab * positions - 1)]
    values, splits, size = [], [], len(batch["labels"])
    # a copy of the batch for each choice; so few sequences have no controls, whose coefficients would join them
    for start in range(0, len(choices), 8):
        some = choices[start : start + 8]
        patch_probes(monkeypatch, lambda sequence, some=some: some[sequence // size])
        found = fisher_trace(model, [copied(batch, len(some))], causal=causal)
        assert found.details["sequences"] == size * len(some) < 32
        values.append(found.value)
        splits.append(list(found.by_parameter.values()))
    return math.fsum(values) / len(values), torch.tensor(splits, dtype=torch.float64).mean(dim=0)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_single_positions_are_exact_over_all_signs(name, monkeypatch):
    make, causal = MODELS[name]
    model, batch = make(4), rows(2, 5, 4, predicted=((2,), (4,)))
    mean, split = expectation_over_signs(monkeypatch, model, batch, causal=None, positions=1, vocab=4)
    truth, truth_split = exact(model, batch, causal=causal)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    torch.testing.assert_close(split, truth_split, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("chunk", "positions"), [(1, 1), (35, 7), (24, 5)])
def test_the_trace_does_not_depend_on_the_blocks_of_the_vocabulary(chunk, positions, monkeypatch):
    """The blocks divide the 14 positions and 10 ids, or do not."""
    model, batches = gpt2(10), cut(rows(8, 8, 10, predicted=(range(8),)), [2, 2, 2, 2])
    expected = fisher_trace(model, batches, causal=True)
    for module in (engine, _parameters):
        monkeypatch.setattr(module, "_PART", chunk)
    monkeypatch.setattr(controls, "_CHUNK", {"cpu": chunk})
    monkeypatch.setattr(controls, "_ROWS", positions)
    found = fisher_trace(model, batches, causal=True)
    assert found.value == pytest.approx(expected.value, rel=1e-11)
    assert found.stderr == pytest.approx(expected.stderr, rel=1e-9)


def test_positions_of_one_sequence_are_exact_over_all_signs(monkeypatch):
    model, batch = gpt2(3), rows(2, 5, 3, seed=2, predicted=((1, 4),))
    mean, _ = expectation_over_signs(monkeypatch, model, batch, causal=True, positions=2, vocab=3)
    truth, _ = exact(model, batch, causal=True)
    assert mean == pytest.approx(sum(truth) / 4, rel=1e-10)


def test_padding_and_extra_inputs_are_passed_on(monkeypatch):
    model, batch = bert(3), rows(2, 4, 3, seed=3)
    batch["attention_mask"][1, 3:] = 0
    batch["token_type_ids"] = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    mean, _ = expectation_over_signs(monkeypatch, model, batch, causal=None, positions=1, vocab=3)
    truth, _ = exact(model, batch, causal=False)
    assert mean == pytest.approx(sum(truth) / 2, rel=1e-10)
    del batch["token_type_ids"]
    without, _ = exact(model, batch, causal=False)
    assert sum(without) != pytest.approx(sum(truth), rel=1e-3)


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "sequences", "repetitions", "options"),
    [
        ("ghost", 64, 60, {}),
        pytest.param("ghost", 512, 1600, {}, marks=pytest.mark.slow),
        pytest.param("paper", 60, 400, {"num_probes": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_interval_covers_the_truth_over_all_inputs(method, sequences, repetitions, options):
    torch.manual_seed(0)
    model = Windows(4, 3).double()
    everything = torch.tensor(list(itertools.product(range(4), repeat=3)))
    weights = torch.linspace(1, 5, len(everything), dtype=torch.float64)  # the inputs' distribution
    # rows predict one or two positions, so the number of predicted positions varies between groups
    both = {"input_ids": everything, "labels": everything * torch.tensor([0, 1, 1]) + torch.tensor([-100, 0, 0])}
    values = torch.tensor(exact(model, both, causal=False)[0], dtype=torch.float64).view(-1, 2)
    two = everything[:, 0] == 0
    share = weights / weights.sum()
    positions = (share * (1 + two)).sum()
    truth = float((share * (values[:, 1] + two * values[:, 0])).sum() / positions)
    both["labels"][~two, 1] = -100

    covered, squares = [], []
    for repetition in range(repetitions):
        generator = torch.Generator().manual_seed(repetition)
        chosen = torch.multinomial(weights, sequences, replacement=True, generator=generator)
        batch = {name: value[chosen] for name, value in both.items()}
        found = fisher_trace(model, [batch], method=method, causal=False, seed=repetition, **options)
        low, high = found.ci95
        covered.append(low < truth < high)
        squares.append(((found.value - truth) / found.stderr) ** 2)
    # 95 % nominal, and three binomial standard deviations: 8.4 points over 60 repetitions
    error = 3 * math.sqrt(0.95 * 0.05 / repetitions)
    assert 0.95 - error <= sum(covered) / len(covered) <= 0.95 + error
    # their mean is 1, to 18 % over 60 repetitions: an error that is too small or large by a third is seen
    assert sum(squares) / repetitions == pytest.approx(1, abs=3 * math.sqrt(2 / repetitions))


# --- further probes of the last layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.001, 8), (0.02, 5), (0.025, 4), (0.026, 0), (1.0, 0)])
def test_there_are_as_many_further_probes_as_a_tenth_of_a_forward_pass_pays_for(share, number):
    assert fisher._tail_probes(share) == number


def test_further_probes_of_the_last_layer_take_noise_away_and_leave_the_mean(monkeypatch):
    model, batch = bert(7, layers=3), rows(24, 16, 7)
    truth = math.fsum(exact(model, batch, causal=False)[0]) / 24
    noise = []
    for most in (8, 0):
        monkeypatch.setattr(fisher, "_MOST_TAIL_PROBES", most)
        found = fisher_trace(model, [copied(batch, 64)])  # the inputs are the same in every copy
        assert found.details["tail_probes"] == min(most, 4)
        assert abs(found.value - truth) < 4 * found.stderr < 0.1 * truth
        noise.append(found.stderr**2)
    # the ratio of two variances of 64 draws has a standard error of 25 %; it is 3.4
    assert noise[0] < noise[1] / 1.64


def test_no_signs_are_drawn_twice(monkeypatch):
    draw, names, octets = controls.packed_probes, [], []

    def signs(streams, device, seed, **options):
        names.extend(name for _, name in streams)
        octets.extend(draw(streams, device, seed, **options))
        return draw(streams, device, seed, **options)

    monkeypatch.setattr(controls, "packed_probes", signs)
    model, batch = bert(70, layers=4, size=16), rows(6, 16, 70)
    assert fisher_trace(model, [batch], num_probes=2).details["tail_probes"] == 4
    assert len(set(names)) == len(names) == 6 * 2 * 2
    assert len({tuple(row.tolist()) for row in octets}) == len(octets) == 2 * (1 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [64, 512])
@pytest.mark.parametrize(("make", "causal"), [(lambda: bert(7, layers=3), False), (lambda: gpt2(7, spread=0.05), True)])
def test_the_interval_covers_with_every_control_in_use(make, causal, sequences):
    model, predicted = make(), ((1,),) if not causal else (tuple(range(1, 8)),)
    found = [
        fisher_trace(model, [rows(sequences, 16 if not causal else 8, 7, seed=100 + s, predicted=predicted)], seed=s)
        for s in range(400)
    ]
    truth = math.fsum(e.value for e in found) / 400  # of all repetitions, with a twentieth of one's error
    assert found[0].details["tail_probes"] == (0 if causal else 4)
    # 95 % nominal; the binomial standard deviation over 400 repetitions is 1.1 points
    assert 0.92 <= sum(e.ci95[0] < truth < e.ci95[1] for e in found) / 400 <= 0.98


# --- invariances -----------------------------------------------------------------------------------------------------


def test_other_arguments_reach_the_model():
    model, batch = bert(7), rows(4, 4, 7)
    seen = []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs), with_kwargs=True)
    fisher_trace(model, [{**batch, "output_attentions": False}])
    assert len(seen) > 1
    assert not any(kwargs["output_attentions"] for kwargs in seen)
    assert all("labels" not in kwargs for kwargs in seen)


def test_label_values_are_not_used():
    model, batch = bert(7), rows(8, 4, 7)
    other = {**batch, "labels": torch.where(batch["labels"] == -100, -100, (batch["labels"] + 1) % 7)}
    assert fisher_trace(model, [batch]).value == fisher_trace(model, [other]).value


def test_parameters_without_a_gradient_count_zero_and_are_named():
    torch.manual_seed(0)
    model = Windows(4, 3).double()
    batch = {"input_ids": rows(6, 3, 4)["input_ids"], "labels": rows(6, 3, 4)["labels"]}
    expected = fisher_trace(model, [batch], causal=False)
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    found = fisher_trace(model, [batch], causal=False)
    assert found.value == expected.value
    assert found.by_parameter["unused"] == 0
    assert found.details["parameters_without_gradient"] == ["unused"]
    assert found.details["num_parameters"] == expected.details["num_parameters"] + 2


def test_bfloat16_agrees_with_float32_to_its_precision():
    batch = rows(64, 6, 7)
    wide, narrow = (fisher_trace(bert(7, dtype=d), [batch]) for d in (torch.float32, torch.bfloat16))
    assert narrow.value == pytest.approx(wide.value, rel=0.05)
    assert (wide.details["dtype"], narrow.details["dtype"]) == ("float32", "bfloat16")


def test_the_estimate_says_what_was_done_and_survives_json():
    found = fisher_trace(bert(7), [rows(8, 4, 7)], seed=5)
    assert Estimate.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.seconds > 0
    details = dict(found.details)
    assert 0 < details.pop("leading_cluster") < 1
    others = [share for name, share in found.by_parameter.items() if "embeddings.weight" not in name]
    assert details.pop("without_embeddings") == pytest.approx(sum(others), rel=1e-12)
    assert 0 < details.pop("without_embeddings_stderr") < found.stderr
    assert details == {
        "device": "cpu",
        "dtype": "float64",
        "attention": "eager",
        "embeddings": [name for name in found.by_parameter if name.endswith("embeddings.weight")],
        "num_parameters": sum(p.numel() for p in bert(7).parameters()),
        "quantized_weights": 0,
        "predicts": "masked tokens",
        "sequences": 8,
        "skipped_batches": 0,
        "clusters": "sequences",
        "auxiliary_sequences": 0,
        "auxiliary_bigrams": False,
        "auxiliary_directions": 0,
        "auxiliary_differs": False,
        "processes": 1,
        "seed": 5,
        "ended": "end of the batches",
        "positions_selected": "before bert.encoder.layer.1.attention.output.dense",
        "tail_probes": 0,
        "parameters_without_gradient": [],
        "parameters_by_autograd": [],
    }


# --- stopping, going on, documents ----------------------------------------------------------------------------------


def test_cross_terms_of_the_empirical_fisher_vanish_over_all_signs(monkeypatch):
    model, batch = bert(4), rows(2, 5, 4, predicted=((0, 2, 3),))
    choices = [torch.tensor(choice) for choice in itertools.product((-1, 1), repeat=3)]
    patch_probes(monkeypatch, lambda sequence: choices[sequence // 2])
    # a copy of the batch for each choice; so few sequences have no controls, whose coefficients would join them
    mean = empirical_fisher_trace(model, [{name: value.repeat(8, 1) for name, value in batch.items()}]).value
    norms = []
    for i, t in itertools.product(range(2), (0, 2, 3)):
        logits = model(**{name: value[i : i + 1] for name, value in batch.items() if name != "labels"}).logits[0, t]
        loss = nn.functional.cross_entropy(logits, batch["labels"][i, t])
        norms.append(sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(model.parameters()))))
    assert mean == pytest.approx(sum(norms) / 6, rel=1e-10)


# --- several processes -----------------------------------------------------------------------------------------------

PROCESSES = """
import json, os, sys
import torch, torch.distributed as dist
from small_models import bert, rows
from isoloss.flatness import fisher_trace
rank = int(os.fork() == 0)  # one process imports for both
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
batch = {name: value[40 * rank : 40 * rank + 40] for name, value in rows(80, 4, 7).items()}
batch["documents"] = torch.arange(40) + 40 * rank
found = fisher_trace(bert(7), [batch], seed=3, distributed=True).to_dict()
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
sys.exit(0 if rank else os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_two_processes_have_the_estimate_over_all_sequences(tmp_path, monkeypatch):
    meeting, here = tmp_path / "meeting", str(Path(__file__).parent)
    path = os.pathsep.join([here, *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", PROCESSES, meeting], env=environment, check=True, timeout=300)
    first, second = (Estimate.from_dict(json.loads(Path(f"{meeting}.{rank}").read_text())) for rank in range(2))
    assert (first.value, first.stderr, first.by_parameter) == (second.value, second.stderr, second.by_parameter)
    assert (first.samples, first.num_predictions, first.details["processes"]) == (80, 80, 2)
    # the same in one process, whose second half has the places of a second process's sequences
    draw = controls.packed_probes

    def signs(streams, device, seed, **options):
        moved = [
            (count, (purpose, sequence if sequence < 40 else (1 << 40) + sequence - 40, probe))
            for count, (purpose, sequence, probe) in streams
        ]
        return draw(moved, device, seed, **options)

    monkeypatch.setattr(controls, "packed_probes", signs)
    alone = fisher_trace(bert(7), cut({**rows(80, 4, 7), "documents": torch.arange(80)}, [40, 40]), seed=3)
    assert first.value == pytest.approx(alone.value, rel=1e-12)
    assert first.stderr == pytest.approx(alone.stderr, rel=1e-12)


# --- refusals --------------------------------------------------------------------------------------------------------


def refuses(sentence, model, batches, **options):
    with pytest.raises(IsolossError, match=sentence):
        fisher_trace(model, batches, **options)


def test_distribution_without_processes_is_refused():
    refuses("torch.distributed has no process group", bert(), [rows(4, 4, 3)], distributed=True)


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    refuses(
        "T5ForConditionalGeneration is an encoder-decoder", T5ForConditionalGeneration(config).eval(), [rows(4, 4, 3)]
    )


def test_logits_that_are_not_finite_are_refused():
    model = bert(4)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[3] = math.nan
    model.cls.predictions.decoder.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.float64))
    good, bad = rows(5, 4, 3), rows(5, 4, 3)
    bad["input_ids"][2, 0] = 3
    refuses(r"batch 1: the model's logits are NaN or infinite \(sequence 2 of the batch\)", model, [good, bad])


def test_a_gradient_that_is_not_finite_is_refused():
    class Steep(Windows):
        def forward(self, input_ids):
            output = super().forward(input_ids)
            return types.SimpleNamespace(logits=output.logits + (self.mix.bias.sum() * 0).sqrt())

    refuses(
        "batch 0: the gradient of mix.bias is not finite",
        Steep(3, 2),
        [{name: value for name, value in rows(4, 4, 3).items() if name != "attention_mask"}],
        causal=False,
    )


def test_models_that_cannot_be_measured_are_refused():
    batch = rows(4, 4, 3)
    refuses("BertForMaskedLM has no trainable parameter", bert().requires_grad_(False), [batch])
    refuses(
        "BertForSequenceClassification gives no logits", bert(cls=BertForSequenceClassification), [batch], causal=False
    )
    refuses(
        "gives 2 logits a position for a vocabulary of 3", bert(cls=BertForTokenClassification), [batch], causal=False
    )
    refuses("BertModel gives no logits", bert().bert, [batch], causal=False)
    refuses("pass causal=False or causal=True", bert().bert, [batch])
    unreached = bert().requires_grad_(False)
    unreached.extra = nn.Parameter(torch.ones(1))
    refuses("no trainable parameter of BertForMaskedLM reaches its logits", unreached, [batch])


def test_a_time_limit_holds_within_a_batch_of_many_probes(monkeypatch):
    now = [0.0]

    def clock():
        now[0] += 0.3
        return now[0]

    monkeypatch.setattr(_measurement.time, "perf_counter", clock)
    sentence = "batch 0: .* of 100,000 probes took .* s, and the time limit of 0.01 s .* lower num_probes"
    refuses(sentence, bert(), [rows(4, 4, 3)], num_probes=100_000, seconds=0.01)


def test_the_kind_of_model_is_read_from_its_class_or_config():
    kinds = {type(make()).__name__: is_causal(make()) for make in (bert, gpt2, llama)}
    assert kinds == {"BertForMaskedLM": False, "GPT2LMHeadModel": True, "LlamaForCausalLM": True}
    decoder = nn.Module()
    decoder.config = types.SimpleNamespace(is_decoder=True)
    assert is_causal(decoder) is True
