"""Models that make leaves of the graph in their forward pass: the norms against plain backward passes in float64."""

import types

import peft
import pytest
import torch
from plain_gradients import VOCAB, assert_norms, batch_of, build, make, measure
from torch import nn

from isoloss.flatness._ghost.engine import GhostNorms

# peft asks transformers by a name that it is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

_PROJECTIONS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "qwen3": ["q_proj", "v_proj", "down_proj"]}


def lora(name, *, tied=True, started=False):
    """An adapted model, its adapters as PEFT makes them, or as after some training."""
    model = build(name, tied=tied, dtype=torch.float32)
    fan_in_fan_out = name == "gpt2"
    config = peft.LoraConfig(r=2, target_modules=_PROJECTIONS[name], fan_in_fan_out=fan_in_fan_out, lora_dropout=0.0)
    adapted = peft.get_peft_model(model, config)
    if started:
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
    return adapted.double().eval()


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "input gradients"])
@pytest.mark.parametrize("started", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("name", _PROJECTIONS)
def test_adapters_of_peft(name, started, hooked):
    model = lora(name, started=started)
    if hooked:
        model.enable_input_require_grads()
    norms, expected, predictor, _ = measure(model, batch_of(), causal=name != "bert")
    assert predictor.slow_parameters == ()
    assert predictor.selection.is_early
    assert_norms(norms.by_column, expected, rtol=1e-10 if name != "qwen3" else 1e-5)
    assert (norms.by_column > 0).any()


def test_input_gradients_without_adapters():
    model = build("gpt2")
    model.enable_input_require_grads()
    norms, expected, predictor, _ = measure(model, batch_of(), causal=True)
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-10)


def test_a_kernel_that_returns_a_leaf_of_its_own():
    """On a CPU, MRA's attention is zeros that require a gradient: its output projection leads nowhere else."""
    options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = make("MraConfig", "MraForMaskedLM", {**options, "max_position_embeddings": 64}, dtype=torch.float32)
    norms, expected, predictor, _ = measure(model, batch_of(length=32), causal=False)
    biases = [place for place, name in enumerate(predictor.names) if name.endswith("attention.output.dense.bias")]
    assert len(biases) == 2
    assert (expected[:3, biases] > 0.01).all()
    assert_norms(norms.by_column, expected, rtol=1e-5)


class Leaves(nn.Module):
    """A use between two leaves of the model's own, and one of which a part leads to a leaf only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids, attention_mask=None):
        x = self.first(self.embed(input_ids)).detach().requires_grad_()
        y = self.second(x.cumsum(dim=1)).tanh()
        constant = torch.ones_like(y).requires_grad_()
        return types.SimpleNamespace(logits=self.head(y + self.third(constant)))


def test_parameters_above_and_below_leaves():
    norms, expected, predictor, _ = measure(Leaves().double(), batch_of(), causal=False)
    assert set(predictor.unreached) == {"embed.weight", "first.weight", "first.bias"}  # behind `detach`
    assert predictor.slow_parameters == ()
    assert_norms(norms.by_column, expected, rtol=1e-10)


def test_leaves_of_a_model_are_left_to_it():
    """A backward pass of the measurement adds to no `grad`, not even to that of a leaf."""
    model, seen = build("gpt2").requires_grad_(False), []
    model.transformer.h[1].mlp.c_fc.weight.requires_grad_()

    def hook(module, args, output):
        seen.append(output.requires_grad_())

    model.get_input_embeddings().register_forward_hook(hook)
    with GhostNorms(model, causal=True) as predictor:
        predictions = predictor.forward(batch_of())
        predictor.squared_norms(predictions, torch.ones_like(predictions.logits))
    assert len(seen) > 1
    assert all(value.grad is None for value in seen)
    assert predictor.unreached == ()
