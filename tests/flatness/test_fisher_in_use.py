"""The Fisher trace in use: invariances, progress, interruptions, several processes, and everything that it refuses."""

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
from small_models import Windows, bert, cut, gpt2, llama, patch_probes, rows
from torch import nn
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from isoloss.errors import IsolossError
from isoloss.flatness import InterruptedEstimate, empirical_fisher_trace, fisher_trace
from isoloss.flatness._ghost import controls
from isoloss.model_checks import is_causal
from isoloss.statistics.estimate import Estimate

# --- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ghost", "paper"])
def test_the_result_does_not_depend_on_how_rows_are_cut_into_batches(method):
    model, batch = bert(7, dtype=torch.float32), rows(12, 5, 7, predicted=((1,), (2, 3)))
    options = {"method": method, "num_probes": 2, "seed": 7}
    whole = fisher_trace(model, [batch], **options)
    for sizes in ([1] * 12, [6, 2, 4]):
        parts = fisher_trace(model, iter(cut(batch, sizes)), **options)
        # the same signs, and sums in another order
        assert parts.value == pytest.approx(whole.value, rel=1e-5)
        assert parts.stderr == pytest.approx(whole.stderr, rel=1e-4)
    assert fisher_trace(model, [batch], **{**options, "seed": 8}).value != whole.value


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


@pytest.mark.parametrize("options", [{}, {"rescaling": "minimal"}], ids=["trace", "minimal trace"])
def test_ids_may_be_of_32_bits(options):
    model, batch = gpt2(7), rows(8, 4, 7)
    short = {name: value.int() for name, value in batch.items()}
    assert fisher_trace(model, [short], **options).value == fisher_trace(model, [batch], **options).value
    assert empirical_fisher_trace(model, [short]).value == empirical_fisher_trace(model, [batch]).value


def test_attention_kernels_agree():
    batch = rows(24, 6, 7, predicted=((1, 3),))
    batch["attention_mask"][::2, 5:] = 0
    found = [fisher_trace(bert(7, attention=kernel), [batch]) for kernel in ("eager", "sdpa")]
    assert found[0].value == pytest.approx(found[1].value, rel=1e-10)
    assert found[0].stderr == pytest.approx(found[1].stderr, rel=1e-9)
    assert [e.details["attention"] for e in found] == ["eager", "sdpa"]


def test_the_model_is_left_as_it_was_found():
    model, batch = bert(7).train(), rows(8, 4, 7)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = torch.ones_like(model.cls.predictions.bias)
    model.cls.predictions.bias.grad = gradient
    with torch.no_grad():
        fisher_trace(model, [batch])
        assert not torch.is_grad_enabled()
    assert model.training
    assert model.cls.predictions.bias.grad is gradient
    assert bool((gradient == 1).all())
    assert all(p.grad is None for name, p in model.named_parameters() if name != "cls.predictions.bias")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


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


# --- progress and interruption ---------------------------------------------------------------------------------------


def test_an_interruption_before_there_is_an_error_bar_is_just_that():
    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fisher_trace(bert(7), cut(rows(8, 4, 7), [1, 7]), progress=stop)
    assert not isinstance(caught.value, InterruptedEstimate)


# --- stopping, going on, documents ----------------------------------------------------------------------------------


def test_the_error_counts_documents():
    model, batch = bert(7), rows(12, 4, 7)
    batch["documents"] = torch.arange(12) // 4
    found, plain = (
        fisher_trace(model, cut(b, [6, 6])) for b in (batch, {k: v for k, v in batch.items() if k != "documents"})
    )
    assert (found.samples, found.details["clusters"]) == (3, "documents")
    assert (plain.samples, plain.details["clusters"]) == (12, "sequences")
    assert found.value == pytest.approx(plain.value, rel=1e-12)
    refuses("all batches have `documents`, or none has", model, [batch, rows(4, 4, 7)])


def test_the_empirical_fisher_is_exact_where_a_sequence_predicts_one_token():
    model, batch = gpt2(5), rows(6, 5, 5, predicted=((1,), (4,), (2,)))
    norms = []
    for i in range(6):
        t = int((batch["labels"][i] != -100).nonzero())
        logits = model(input_ids=batch["input_ids"][i : i + 1]).logits[0, t - 1]
        loss = nn.functional.cross_entropy(logits, batch["labels"][i, t])
        norms.append(sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(model.parameters()))))
    found = empirical_fisher_trace(model, [batch])
    assert found.value == pytest.approx(sum(norms) / 6, rel=1e-10)
    assert found.method == "empirical Fisher, given labels"


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


def test_distributed_without_processes_is_refused():
    refuses("torch.distributed has no process group", bert(), [rows(4, 4, 3)], distributed=True)


# --- refusals --------------------------------------------------------------------------------------------------------


def refuses(sentence, model, batches, **options):
    with pytest.raises(IsolossError, match=sentence):
        fisher_trace(model, batches, **options)


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    refuses(
        "T5ForConditionalGeneration is an encoder-decoder", T5ForConditionalGeneration(config).eval(), [rows(4, 4, 3)]
    )


def test_sequences_longer_than_the_model_takes_are_refused():
    model = bert()
    longest = model.config.max_position_embeddings
    refuses(
        f"sequences have {longest + 1} positions; the model takes at most {longest}", model, [rows(4, longest + 1, 3)]
    )


def test_dropout_that_is_on_is_refused():
    refuses(r"call model\.eval\(\)", bert(dropout=0.1).train(), [rows(4, 4, 3)])
    sleeping = llama()
    sleeping.train()
    sleeping.model.layers[0].self_attn.attention_dropout = 0.2
    refuses(r"self_attn has dropout 0\.2: call model\.eval\(\)", sleeping, [rows(4, 4, 3)])
    fisher_trace(bert(dropout=0.1), [rows(4, 4, 3)])
    fisher_trace(bert(dropout=0.0).train(), [rows(4, 4, 3)])


def test_batches_that_predict_nothing_are_refused_where_all_do():
    nothing = rows(4, 4, 3, predicted=((),))
    for method in ("ghost", "paper"):
        refuses("nothing is predicted: every label", bert(), [nothing, nothing], method=method)
    refuses("nothing is predicted", gpt2(), [rows(4, 4, 3, predicted=((0,),))])


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


def test_batches_that_do_not_fit_are_refused():
    batch = rows(4, 4, 3)
    refuses("there are no batches", bert(), [])
    refuses(r"pass an iterable of batches", bert(), batch)
    refuses("batch 0: there are no `labels`", bert(), [{"input_ids": batch["input_ids"]}])
    refuses("batch 0 is a Tensor, not a mapping", bert(), [batch["input_ids"]])
    refuses(
        r"labels of shape \(4, 3\) do not fit input_ids of shape \(4, 4\)",
        bert(),
        [{**batch, "labels": batch["labels"][:, :3]}],
    )
    refuses("do not fit attention_mask", bert(), [{**batch, "attention_mask": batch["attention_mask"][:2]}])
    states = {"inputs_embeds": torch.zeros(4, 5, 8, dtype=torch.float64), "labels": batch["labels"]}
    refuses(r"labels of shape \(2, 4\) do not fit logits of \(2, 5, 3\)", bert(), [states])


def test_one_sequence_is_refused():
    refuses("at least 2 independent sequences or documents, not 1", bert(), [rows(1, 4, 3)])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "hutchinson"}, "method is 'hutchinson'; it is one of ghost, paper"),
        ({"num_probes": 0}, "num_probes is 0; it must be at least 1"),
        ({"num_sequences": 1}, "num_sequences is 1; an error bar needs at least 2"),
        ({"rtol": 1.0}, "rtol is 1.0; it is a fraction of the value, between 0 and 1"),
        ({"seconds": 0.0}, "seconds is 0.0; it must be more than 0"),
    ],
)
def test_settings_out_of_range_are_refused(options, sentence):
    refuses(sentence, bert(), [rows(4, 4, 3)], **options)


@pytest.mark.parametrize("method", ["ghost", "paper"])
def test_a_time_limit_holds_within_a_batch_of_many_probes(method):
    sentence = "batch 0: .* of 100,000 probes took .* s, and the time limit of 0.01 s .* lower num_probes"
    refuses(sentence, bert(), [rows(4, 4, 3)], method=method, num_probes=100_000, seconds=0.01)


def test_the_kind_of_model_is_read_from_its_class_or_config():
    kinds = {type(make()).__name__: is_causal(make()) for make in (bert, gpt2, llama)}
    assert kinds == {"BertForMaskedLM": False, "GPT2LMHeadModel": True, "LlamaForCausalLM": True}
    decoder = nn.Module()
    decoder.config = types.SimpleNamespace(is_decoder=True)
    assert is_causal(decoder) is True
