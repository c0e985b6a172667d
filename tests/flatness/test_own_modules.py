"""Modules that are no models of transformers: what they take and return, and the rescalings that they declare."""

import importlib.util
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_position_selection import VOCAB, all_signs, assert_exact, sentences  # noqa: F401 (a fixture)
from torch import nn

from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError
from isoloss.flatness import check_rescaling, fisher_trace, rescaled_at_random, rescalings_of
from isoloss.flatness._ghost.engine import GhostNorms
from isoloss.flatness._rescaling.apply import rescaled
from isoloss.model_checks import max_length, run_on_ids

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_gpt.py"
VOCABULARY, WIDTH, LENGTH = 7, 6, 8


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def plain(self, ids):
        return self.head(self.hidden(ids))

    def hidden(self, ids):
        states = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return states + torch.tanh(self.mix(states)).cumsum(dim=1)


class Tensor(Base):
    def forward(self, ids):
        return self.head(self.hidden(ids))


class Pair(Base):
    """As nanoGPT: with targets the logits and the loss, without them the last position's logits alone."""

    def forward(self, idx, targets=None):
        hidden = self.hidden(idx)
        if targets is None:
            return self.head(hidden[:, [-1]]), None
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


class LossAlone(Base):
    """As nanochat: with targets the loss alone, without them the logits; the forward pass checks a buffer's type."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.ones(LENGTH, 1, dtype=torch.bfloat16))

    def forward(self, idx, targets=None, kv_cache=None):
        assert self.cos.dtype == torch.bfloat16
        logits = self.head(self.hidden(idx) * self.cos[: idx.shape[1]])
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Dictionary(Base):
    def forward(self, tokens, positions=None):
        return {"loss": None, "logits": self.head(self.hidden(tokens))}


def batch_of(vocabulary=VOCABULARY, *, sequences=4, length=5):
    ids = torch.randint(0, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Wrapped(nn.Module):
    """A module with the signature of transformers."""

    def __init__(self, logits_of):
        super().__init__()
        self.module = getattr(logits_of, "__self__", logits_of)
        self.logits_of = logits_of

    def forward(self, input_ids, attention_mask=None):
        return types.SimpleNamespace(logits=self.logits_of(input_ids))


def norms(module, batch):
    """The squared gradient norms of a cotangent, by sequence and parameter."""
    with GhostNorms(module, causal=True) as ghost:
        predictions = ghost.forward(batch)
        cotangent = torch.randn(
            predictions.logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        assert ghost.slow_parameters == ()
        return ghost.squared_norms(predictions, cotangent).by_column


@pytest.mark.parametrize("kind", [Tensor, Pair, LossAlone, Dictionary])
def test_a_module_may_name_its_ids_and_give_its_logits_in_any_form(kind):
    module, ids = kind().eval(), batch_of()["input_ids"]
    found = norms(module, batch_of())
    torch.testing.assert_close(found, norms(Wrapped(module.plain), batch_of()))
    torch.testing.assert_close(run_on_ids(module, ids), module.plain(ids).detach())
    assert max_length(module) == LENGTH
    # padding after the tokens changes no prediction of theirs
    padded = {name: F.pad(value, (0, 2), value=-100 if name == "labels" else 0) for name, value in batch_of().items()}
    torch.testing.assert_close(norms(module, padded), found)
    trace = fisher_trace(module, [batch_of()], causal=True)
    assert list(trace.by_parameter) == [name for name, _ in module.named_parameters()]


def test_padding_that_a_module_would_see_is_refused():
    batch = batch_of()
    batch["attention_mask"][0, 0] = 0
    with pytest.raises(IsolossError, match=r"sequences have padding before tokens, and Tensor takes no attention_mask"):
        fisher_trace(Tensor(), [batch], causal=True)
    batch = batch_of()
    batch["attention_mask"][0, -1] = 0
    with pytest.raises(IsolossError, match=r"sequences have padding, and Tensor takes no attention_mask"):
        fisher_trace(Tensor(), [batch], causal=False)


def test_rescalings_that_nobody_declared_are_named_by_the_class():
    with pytest.raises(
        IsolossError, match=r"no rescalings are known for the module Tensor: declare them in a method `rescalings`"
    ):
        rescalings_of(Tensor())


# --- the GPT of the gallery: QK-norm, squared ReLU, soft-capped logits ------------------------------------------------


@pytest.fixture(scope="module")
def example():
    """The example's code."""
    spec = importlib.util.spec_from_file_location("my_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.VOCABULARY = VOCAB  # few enough labels for all signs of a probe
    return module


@pytest.fixture(scope="module")
def gpt(example):
    """The example's model in float64, with weights far from their start."""
    model = example.build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model


def test_the_trace_of_the_example_is_by_enumeration_that_of_every_label(gpt, all_signs):  # noqa: F811
    selected, slow = assert_exact(gpt, sentences(True), causal=True, vocab=VOCAB, reference=Wrapped(gpt))
    assert slow == []
    assert selected == "before blocks.1.mix"


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel", "neuron"])
def test_declared_rescalings_of_the_example_keep_its_logits(gpt, granularity):
    found, batch = rescalings_of(gpt, granularity=granularity), batch_of(VOCAB)
    assert check_rescaling(gpt, found, batch) < 1e-10
    z = np.random.default_rng(0).uniform(-1, 1, len(found.names))
    new = rescaled(gpt, found, z)
    with torch.no_grad():
        # the eps of a norm without a module is what torch takes, 2e-16
        changed = torch.func.functional_call(gpt, new, batch["input_ids"])
        assert float((changed - gpt(batch["input_ids"])).abs().max()) < 1e-10
    # the square of hidden units has their factor twice, and queries and keys have one each
    up, down = (
        new[f"blocks.0.{name}.weight"] / gpt.get_parameter(f"blocks.0.{name}.weight") for name in ("up", "down")
    )
    stream = new["tokens.weight"] / gpt.tokens.weight
    torch.testing.assert_close(down * up[:, 0].square(), (stream[0, 0]).expand_as(down))


def test_the_minimal_trace_of_the_example_is_a_property_of_its_function(gpt):
    batches = [batch_of(VOCAB, sequences=16)]
    other = rescaled_at_random(gpt, granularity="head", seed=3)
    plain, moved = (fisher_trace(model, batches, causal=True).value for model in (gpt, other))
    least, same = (
        fisher_trace(model, batches, causal=True, rescaling="minimal", granularity="head") for model in (gpt, other)
    )
    assert least.value < 0.9 * plain
    assert abs(moved / plain - 1) > 0.5
    assert same.value == pytest.approx(least.value, rel=1e-9)
    assert least.details["log_probabilities_change_without_eps"] < 1e-10
    compared = compare_traces({"a": gpt, "b": other}, batches, causal=True, granularity="head")
    assert "one function, different weights" in str(compared.verdict())
