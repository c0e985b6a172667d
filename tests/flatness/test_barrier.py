"""The barrier between two models, against losses taken one by one on the line between their weights."""

import copy
import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from isoloss.errors import IsolossError
from isoloss.flatness import interpolation_barrier
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.evaluation.input_config import InputConfig

VOCAB = 11
SIZES = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert():
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=8, **SIZES)).double().eval()


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=12, n_layer=1, n_head=2, n_positions=8)).double().eval()


def two(make):
    torch.manual_seed(0)
    first, second = make(), make()
    with torch.no_grad():
        for model in (first, second):
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return first, second


def losses(model, ids, labels):
    """Return the mean loss of each sequence."""
    logits = model(input_ids=ids).logits
    if isinstance(model, GPT2LMHeadModel):
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return each.sum(1) / (labels != -100).sum(1)


@pytest.mark.parametrize("make", [bert, gpt2])
def test_the_barrier_is_the_highest_of_losses_taken_one_by_one(make):
    first, second = two(make)
    ids = torch.randint(0, VOCAB, (30, 6))
    labels = ids if make is gpt2 else torch.where(torch.arange(6) % 3 == 1, ids, -100)
    before = copy.deepcopy(first.state_dict())
    found = interpolation_barrier(first, second, [{"input_ids": ids, "labels": labels}], fractions=(0.25, 0.5, 0.8))
    assert all(torch.equal(value, before[name]) for name, value in first.state_dict().items())
    between, heights = copy.deepcopy(first), {}
    with torch.no_grad():
        ends = losses(first, ids, labels), losses(second, ids, labels)
        for a in (0.25, 0.5, 0.8):
            weights = zip(between.parameters(), first.parameters(), second.parameters(), strict=True)
            for parameter, start, end in weights:
                parameter.copy_((1 - a) * start + a * end)
            each = losses(between, ids, labels) - (1 - a) * ends[0] - a * ends[1]
            heights[a] = (each.mean().item(), each.std().item() / math.sqrt(30))
    best = max(heights, key=heights.get)
    assert found.details["fraction"] == best
    assert (found.value, found.stderr) == pytest.approx(heights[best], rel=1e-9)
    for a, height in heights.items():
        assert found.details["heights"][str(a)] == pytest.approx(height, rel=1e-9)


def test_what_has_no_barrier_is_refused():
    first, second = two(bert)
    ids = torch.randint(0, VOCAB, (4, 6))
    batches = [{"input_ids": ids, "labels": ids}]
    with pytest.raises(IsolossError, match=r"fractions is \(0\.5, 1\.0\); each must be between 0 and 1"):
        interpolation_barrier(first, second, batches, fractions=(0.5, 1.0))
    deeper = BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=9, **SIZES)).double().eval()
    with pytest.raises(IsolossError, match=r"position_embeddings\.weight has the shapes \(8, 12\) and \(9, 12\)"):
        interpolation_barrier(first, deeper, batches)
    with pytest.raises(IsolossError, match="the models do not have the same architecture: only one of them has bert"):
        interpolation_barrier(first, gpt2(), batches)


def test_a_line_is_between_weights_of_one_function():
    first, second = two(bert)
    ids = torch.randint(0, VOCAB, (4, 6))
    other = BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=8, hidden_act="relu", **SIZES))
    other.double().eval().load_state_dict(first.state_dict())
    with pytest.raises(IsolossError, match="hidden_act is 'gelu' in the model and 'relu' in the other"):
        interpolation_barrier(first, other, [{"input_ids": ids, "labels": ids}])
    second.config.hidden_dropout_prob, second.config._name_or_path = 0.3, "elsewhere"
    assert interpolation_barrier(first, second, [{"input_ids": ids, "labels": ids}]).value != 0


class Own(torch.nn.Module):
    """A causal model without a config."""

    def __init__(self, act, scale=1.0, dropout=0.1):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCAB, 4), torch.nn.Linear(4, VOCAB)
        self.act, self.scale, self.drop = act, scale, torch.nn.Dropout(dropout)

    def forward(self, input_ids):
        return self.head(self.act(self.scale * self.drop(self.embed(input_ids)).cumsum(1)))


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((torch.nn.ReLU(),), (torch.nn.GELU(),), r"act\.class is 'ReLU' in the model and 'GELU' in the other"),
        ((torch.relu,), (torch.tanh,), "act is 'relu' in the model and 'tanh' in the other"),
        ((torch.relu, 1.0), (torch.relu, 2.0), "scale is 1.0 in the model and 2.0 in the other"),
        ((torch.relu, 1.0, 0.1), (torch.relu, 1.0, 0.2), None),
    ],
)
def test_parts_of_a_module_of_ones_own_agree(one, other, message):
    ids = torch.randint(0, VOCAB, (4, 6))
    models = [Own(*settings).double().eval() for settings in (one, other)]
    batches = [{"input_ids": ids, "labels": ids}]
    if message is None:
        interpolation_barrier(*models, batches, causal=True)
        return
    with pytest.raises(IsolossError, match=message):
        interpolation_barrier(*models, batches, causal=True)


def test_buffers_that_differ_are_refused():
    """They would stay the first model's, so that the end of the line would not be the other model."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (4, 6))
    first = Own(torch.relu).double().eval()
    first.register_buffer("mean", torch.tensor([1.0, 1 / 3]).double())
    other = copy.deepcopy(first)
    other.half().double()  # its buffer is rounded
    batches = [{"input_ids": ids, "labels": ids}]
    with pytest.raises(IsolossError, match="the buffer mean differs between the models, and only weights are moved"):
        interpolation_barrier(first, other, batches, causal=True)
    assert math.isfinite(interpolation_barrier(first, copy.deepcopy(first).float(), batches, causal=True).value)


def test_the_measure_reads_the_other_checkpoint(tmp_path):
    first, second = two(bert)
    first.float().save_pretrained(tmp_path / "first")
    second.float().save_pretrained(tmp_path / "second")
    ids = torch.randint(0, VOCAB, (20, 6))
    np.save(tmp_path / "ids.npy", ids.numpy())
    (found,) = evaluate(
        tmp_path / "first",
        "barrier",
        data=str(tmp_path / "ids.npy"),
        settings={"barrier_with": str(tmp_path / "second"), "num_sequences": 20},
        inputs=InputConfig(mask_id=3),
    )
    assert found.estimates["barrier"].details["fraction"] in [a / 10 for a in range(1, 10)]
    with pytest.raises(IsolossError, match="barrier_with names no other checkpoint"):
        evaluate(tmp_path / "first", "barrier", data=str(tmp_path / "ids.npy"), inputs=InputConfig(mask_id=3))
