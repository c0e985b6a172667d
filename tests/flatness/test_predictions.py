"""Predicted positions selected in the last layer, the decoder's input, the size of buffers, and what is refused."""

import gc
import weakref

import pytest
import torch
from plain_gradients import ARCHITECTURES, VOCAB, batch_of, build, check_norms
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.flatness._batches import Batch
from isoloss.flatness._ghost import factors
from isoloss.flatness._ghost.capture import PositionSelection
from isoloss.flatness._ghost.engine import GhostNorms, intermediates_of, tail_cotangents


class Mixing(nn.Module):
    """A head that needs all positions, before or after its decoder, over a `base_model`."""

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 8)

        def forward(self, input_ids):
            return BaseModelOutput(last_hidden_state=self.embed(input_ids).tanh())

    def __init__(self, after):
        super().__init__()
        self.after = after
        self.base_model = self.Base()
        self.decoder = nn.Linear(8, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        x = self.base_model(input_ids).last_hidden_state
        if not self.after:
            return CausalLMOutput(logits=self.decoder(x - x.mean(dim=1, keepdim=True)))
        logits = self.decoder(x)
        return CausalLMOutput(logits=logits * logits.mean(dim=1, keepdim=True))


@pytest.mark.parametrize(("after", "selected"), [(False, "before decoder"), (True, "after the head")])
def test_positions_are_gathered_where_that_leaves_the_logits_as_they_are(after, selected):
    torch.manual_seed(4)
    predictor, predictions, _ = check_norms(Mixing(after).double(), batch_of())
    assert str(predictor.selection) == selected
    assert (predictions.decoder is None) == after


class Bare(nn.Module):
    """Positions mix outside any submodule, and the decoder is a function of the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)

    def forward(self, input_ids, attention_mask=None):
        states = self.embed(input_ids).cumsum(dim=1).tanh()
        return CausalLMOutput(logits=nn.functional.linear(states, self.embed.weight))


def test_positions_are_gathered_before_a_decoder_that_is_no_submodule():
    torch.manual_seed(4)
    predictor, predictions, _ = check_norms(Bare().double(), batch_of())
    assert str(predictor.selection) == "before the decoder"
    assert predictions.hidden.shape == (len(predictions.rows), 8)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_decoder_hidden_states_and_their_cotangent(name):
    causal = ARCHITECTURES[name][3]
    model = build(name, dtype=torch.float32)
    batch = batch_of()
    with GhostNorms(model, causal=causal) as predictor:
        predictions = predictor.forward(batch)
        cotangent = torch.randn(predictions.logits.shape, generator=torch.Generator().manual_seed(0))
        norms = predictor.squared_norms(predictions, cotangent)
    bias = 0.0 if predictions.decoder.bias is None else predictions.decoder.bias
    torch.testing.assert_close(predictions.hidden @ predictions.decoder.weight.T + bias, predictions.logits.detach())
    torch.testing.assert_close(norms.hidden_cotangent, cotangent @ predictions.decoder.weight)
    shift = int(causal)
    chosen = batch["labels"][:, shift:] != -100
    assert predictions.rows.tolist() == chosen.nonzero()[:, 0].tolist()
    assert predictions.targets.tolist() == batch["labels"][:, shift:][chosen].tolist()
    assert predictions.num_sequences == 5


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gpt2", ("transformer.h.1.attn.c_proj", "transformer.h.1.ln_2", "transformer.h.1.mlp.c_proj")),
        (
            "bert",
            tuple(
                f"bert.encoder.layer.1.{part}"
                for part in ("attention.output.dense", "attention.output.LayerNorm", "output.dense")
            ),
        ),
    ],
)
def test_the_stations_are_outputs_behind_the_last_attention(name, modules):
    causal = ARCHITECTURES[name][3]
    model, batch, outputs = build(name), batch_of(), {}
    with GhostNorms(model, causal=causal) as predictor:
        predictions = predictor.forward(batch)
        cotangent = torch.randn(predictions.logits.shape, generator=torch.Generator().manual_seed(0)).double()
        hidden, first = tail_cotangents(predictions, intermediates_of(predictions)[0], cotangent)
        found = predictor.squared_norms(predictions, cotangent).intermediate_cotangents
    torch.testing.assert_close(first, found[0])
    torch.testing.assert_close(hidden, cotangent @ predictions.decoder.weight)
    for module in modules:
        model.get_submodule(module).register_forward_hook(lambda _m, _a, y, module=module: outputs.update({module: y}))
    labels = batch["labels"]
    predicted = labels != -100
    if causal:
        predicted = torch.cat([predicted[:, 1:], torch.zeros_like(predicted[:, :1])], dim=1)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[predicted]
    expected = torch.autograd.grad(logits, [outputs[module] for module in modules], cotangent)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain[predicted])


@pytest.mark.parametrize(("kernel", "dtype"), [("eager", torch.float64), ("sdpa", torch.bfloat16)])
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_attention_is_never_behind_the_place_whatever_the_batch_and_the_weights(name, sequences, dtype, kernel):
    """All positions of one sequence in order, weights so small that attention hardly changes a logit."""
    causal, model = ARCHITECTURES[name][3], build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
    model = model.to(dtype)
    model.set_attn_implementation(kernel)
    tokens = torch.randint(2, VOCAB, (sequences, 8), generator=torch.Generator().manual_seed(3))
    with GhostNorms(model, causal=causal) as predictor:
        predictor.forward({"input_ids": tokens, "labels": tokens})
    last = {"gpt2": "h.1.attn.c_proj", "llama": "layers.1.self_attn.o_proj", "bert": "layer.1.attention.output.dense"}
    assert str(predictor.selection).endswith(last[name])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_positions_of_very_short_sequences(length):
    """There is nothing to tell by where positions mix, and the norms are right."""
    batch = batch_of(sequences=1, length=4, every=True)
    batch = {key: value[:, :length] for key, value in batch.items()}
    predictor, *_ = check_norms(build("bert"), batch)
    assert str(predictor.selection) == "after the head"


def test_another_place_is_found_where_the_last_one_no_longer_fits():
    model = build("bert")
    batch = batch_of()
    with GhostNorms(model, causal=False) as predictor:
        predictor.forward(batch)
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    predictor, *_ = check_norms(model, batch)
    assert str(predictor.selection) == "before bert.encoder.layer.0.attention.output.dense"
    assert not any(name.startswith("bert.encoder.layer.1") for name in predictor.names)


class Allocations(TorchDispatchMode):
    """Counts results with as many elements as the logits that share no memory with what was there before."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.numel() >= self.elements:
                self.count += value.untyped_storage().data_ptr() not in before
        return result


@pytest.mark.parametrize(
    ("name", "every", "tied"), [("bert", False, True), ("bert", True, False), ("gpt2", True, True)]
)
def test_no_buffer_is_as_large_as_the_logits(name, every, tied, monkeypatch):
    monkeypatch.setattr(
        factors, "_LIMIT", 1 << 16
    )  # far less than the logits, as for a vocabulary and batch of real size
    causal, vocab = ARCHITECTURES[name][3], 20_000
    model = build(name, vocab=vocab, tied=tied, dtype=torch.float32)
    batch = batch_of(sequences=8, length=12, vocab=vocab, every=every)
    with GhostNorms(model, causal=causal) as predictor:
        predictor.forward(batch)  # the check of the rules
        with Allocations(len(predictor.forward(batch).rows) * vocab * 3 // 4) as forward:
            predictions = predictor.forward(batch)
        cotangent = torch.ones_like(predictions.logits)
        with Allocations(predictions.logits.numel() * 3 // 4) as backward:
            predictor.squared_norms(predictions, cotangent)
    assert forward.count == 1
    assert backward.count == 0


class Memory(TorchDispatchMode):
    """The most bytes that results of operations had at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and (storage := value.untyped_storage())._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def free(self, storage, size):
        self.alive.remove(storage)
        self.now -= size


def test_a_long_sequence_takes_the_memory_of_a_training_step():
    length, vocab = 512, 4000
    config = GPT2Config(
        vocab_size=vocab, n_embd=32, n_layer=4, n_head=2, n_positions=length, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    ids, others = torch.randint(0, vocab, (2, 1, length), generator=torch.Generator().manual_seed(0))
    with Memory() as step:
        nn.functional.cross_entropy(model(ids, use_cache=False).logits[0], ids[0]).backward()
    model.zero_grad()
    with Memory() as measured:
        fisher_trace(model, [{"input_ids": ids, "labels": ids}, {"input_ids": others, "labels": others}])
    assert 0.5 * step.most < measured.most < 1.3 * step.most


def test_a_long_sequence_is_checked_by_some_of_its_positions_and_the_last():
    labels = torch.arange(2 * 600).view(2, 600)
    labels[1, 100:] = -100
    batch = Batch.read({"input_ids": labels, "labels": labels}, nn.Linear(1, 1), causal=False)
    fewer = batch.thinned()
    assert fewer.predicted.sum(dim=1).tolist() == [120, 20]
    assert bool(fewer.predicted[0, 599] & fewer.predicted[1, 99] & (fewer.predicted <= batch.predicted).all())
    assert torch.equal(fewer.targets, labels[fewer.predicted])
    assert fewer.thinned() is fewer


def test_probabilities_are_not_taken_for_logits():
    model = build("bert")
    model.cls.register_forward_hook(lambda module, inputs, logits: logits.softmax(dim=-1))
    with pytest.raises(IsolossError, match="gives probabilities"), GhostNorms(model, causal=False) as predictor:
        predictor.forward(batch_of())


def test_the_smallest_number_marks_what_is_never_predicted():
    """Some multimodal models set the logits of image tokens to it; the sum of two is infinite."""
    values = []
    for never in (torch.finfo(torch.float64).min, -1e4):
        model = build("bert")
        with torch.no_grad():
            model.cls.predictions.decoder.bias[[3, 7, 8]] = never  # the probability is 0 either way
        values.append(fisher_trace(model, [batch_of()], seed=0).value)
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def shapes_of_tensors():
    """The shapes of the tensors that Python knows of."""
    return {tuple(value.shape) for value in gc.get_objects() if type(value) is torch.Tensor}


@pytest.mark.parametrize("early", [True, False], ids=["selected in the model", "selected from the logits"])
def test_logits_live_no_longer_than_the_predictions(early):
    """They are the largest buffer: none waits for the garbage collector, and none of all positions is kept."""
    model, batch = build("gpt2", vocab=31), batch_of(sequences=3, vocab=31, causal=True, every=True)
    with GhostNorms(model, causal=True) as predictor:
        predictor.forward(batch)
        assert predictor.selection.is_early
        if not early:
            predictor.selection = PositionSelection()
        gc.collect()
        gc.disable()
        try:
            predictions = predictor.forward(batch)
            cotangent = torch.randn(predictions.logits.shape, dtype=torch.float64)
            selected, everywhere = tuple(cotangent.shape), (*batch["input_ids"].shape, 31)
            assert selected in shapes_of_tensors()
            assert everywhere not in shapes_of_tensors()
            predictor.squared_norms(predictions, cotangent, keep=False)
            del predictions, cotangent
            assert shapes_of_tensors().isdisjoint({selected, (1, *selected), everywhere})
        finally:
            gc.enable()
