"""The logits of BERTs at predicted positions, post- and pre-layer-norm, against those of the whole forward pass."""

import pytest
import torch

from isoloss.lab.models.architectures import BERT, PRE_LAYER_NORM_BERT
from isoloss.lab.models.bert import states
from isoloss.run_config import ModelConfig

ARCHITECTURES = {"bert": BERT, "bert-pre-ln": PRE_LAYER_NORM_BERT}


def perturbed(size, dtype=torch.float64, architecture="bert"):
    """A model whose layer norms and biases are not at their initial 1 and 0."""
    config = ModelConfig(architecture=architecture, size=size)
    model = ARCHITECTURES[architecture].new_model(config, vocab_size=12, max_length=6, pad_id=10, seed=0)
    model = model.to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def masked_logits(model, input_ids, mask, positions):
    return model.get_output_embeddings()(states(model, input_ids, mask, positions))


def padded_batch(*, is_one_each=False):
    """Sentences, their mask and some positions of each, or the first of these, or else the first of all."""
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(0, 10, (5, 6), generator=generator)
    present = torch.arange(6) < torch.tensor([6, 3, 1, 6, 4])[:, None]
    positions = (torch.rand(5, 6, generator=generator) < 0.5) & present
    if is_one_each:
        positions = torch.zeros_like(positions).scatter_(1, positions.int().argmax(dim=1, keepdim=True), True)
    return input_ids.masked_fill(~present, 10), present.long(), positions


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("size", ["d32", "d128"])
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("is_one_each", [True, False])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_logits_and_gradients_are_the_whole_models_and_the_model_stays_as_it_was(
    architecture, size, is_padded, is_one_each, kernel
):
    model = perturbed(size, architecture=architecture)
    model.set_attn_implementation(kernel)
    input_ids, attention_mask, positions = padded_batch(is_one_each=is_one_each)
    mask = attention_mask if is_padded else None
    whole = model(input_ids=input_ids, attention_mask=mask).logits[positions]
    ours = masked_logits(model, input_ids, mask, positions)
    assert ours.shape == (int(positions.sum()), 12)
    torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    for got, expected in zip(
        torch.autograd.grad(ours.square().mean(), parameters),
        torch.autograd.grad(whole.square().mean(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(IndexError):
        masked_logits(model, input_ids, mask, positions[:, :4])
    torch.testing.assert_close(model(input_ids=input_ids, attention_mask=mask).logits[positions], whole, rtol=0, atol=0)


@pytest.mark.parametrize("is_one_each", [True, False])
def test_logits_in_float32(is_one_each):
    model = perturbed("d128", torch.float32)
    input_ids, mask, positions = padded_batch(is_one_each=is_one_each)
    whole = model(input_ids=input_ids, attention_mask=mask).logits[positions]
    torch.testing.assert_close(masked_logits(model, input_ids, mask, positions), whole, rtol=1e-5, atol=1e-5)


def test_nothing_predicted_gives_no_logits():
    input_ids, mask, positions = padded_batch()
    assert masked_logits(perturbed("d32"), input_ids, mask, torch.zeros_like(positions)).shape == (0, 12)


def test_dropout_of_attention_is_the_same_in_law_where_one_position_is_predicted():
    # with dropout in attention alone, the mean over many draws is that of the whole model's own passes
    model = perturbed("d32").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.bert.encoder.layer[-1].attention.self.dropout.p = 0.3
    n = 4000
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]]).expand(n, 6)
    positions = torch.zeros(n, 6, dtype=torch.bool)
    positions[:, 2] = True
    torch.manual_seed(0)
    with torch.no_grad():
        ours = masked_logits(model, ids, None, positions)
        whole = model(input_ids=ids).logits[positions]
    assert float(ours.std(dim=0).min()) > 0
    error = (ours.var(dim=0) / n + whole.var(dim=0) / n).sqrt()
    assert bool(((ours.mean(dim=0) - whole.mean(dim=0)).abs() < 4 * error).all())
    spread = ours.var(dim=0) / whole.var(dim=0)
    assert bool(((spread - 1).abs() < 0.2).all())
