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
from small_models import Windows, bert, cut, failing, gpt2, llama, patch_probes, rows
from torch import nn
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from isoloss.errors import IsolossError
from isoloss.flatness import _measurement, empirical_fisher_trace, fisher_trace
from isoloss.flatness._ghost import controls
from isoloss.model_checks import is_causal
from isoloss.statistics.estimate import Estimate

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


def test_a_record_of_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_measurement, "_EVERY_SECONDS", 0.0)
    model, batches, path = bert(7), cut(rows(8, 4, 7), [4, 4]), tmp_path / "trace.safetensors"
    with pytest.raises(RuntimeError):
        fisher_trace(model, failing(batches, 1), resume=path)
    kept = path.read_bytes()
    refuses("resume file of another measurement: it differs in seed; remove it", model, batches, seed=1, resume=path)
    refuses("it differs in method, probes", model, batches, method="paper", resume=path)
    refuses("measurement on other inputs", model, cut(rows(8, 4, 7, seed=1), [4, 4]), resume=path)
    with torch.no_grad():
        model.cls.predictions.bias += 1
    refuses("it differs in weights", model, batches, resume=path)
    assert path.read_bytes() == kept
    path.write_bytes(b"no record")
    refuses("is not the resume file of a measurement", model, batches, resume=path)


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
