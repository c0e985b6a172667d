"""The pre-layer-norm BERT against its equations written out, and its positions."""

import math

import torch
from test_bert import perturbed

from isoloss.flatness import fisher_trace

LENGTHS = (6, 3, 1, 6, 4)


def padded():
    ids = torch.randint(0, 10, (5, 6), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(6) < torch.tensor(LENGTHS)[:, None]).long()
    return ids.masked_fill(mask == 0, 10), mask


def normed(layer_norm, h):
    centered = h - h.mean(dim=-1, keepdim=True)
    return (
        centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-12).sqrt() * layer_norm.weight + layer_norm.bias
    )


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attention(block, h):
    parts = [linear(h).view(len(h), 2, 64) for linear in (block.self.query, block.self.key, block.self.value)]
    q, k, v = (part.transpose(0, 1) for part in parts)
    weights = (q @ k.transpose(1, 2) / 8).softmax(dim=-1)  # heads of 64
    return block.output.dense((weights @ v).transpose(0, 1).reshape(len(h), 128))


def logits_of(model, tokens):
    """The logits of one sentence without padding, by the equations of a pre-layer-norm BERT."""
    base, head = model.roberta_prelayernorm, model.lm_head
    embeddings = base.embeddings
    words = embeddings.word_embeddings.weight
    h = words[tokens] + embeddings.position_embeddings.weight[11 : 11 + len(tokens)]
    h = normed(embeddings.LayerNorm, h + embeddings.token_type_embeddings.weight[0])
    for layer in base.encoder.layer:
        h = h + attention(layer.attention, normed(layer.attention.LayerNorm, h))
        inner = gelu(layer.intermediate.dense(normed(layer.intermediate.LayerNorm, h)))
        h = h + layer.output.dense(inner)
    h = normed(base.LayerNorm, h)
    return normed(head.layer_norm, gelu(head.dense(h))) @ words.T + head.bias


def test_the_logits_are_those_of_the_equations():
    model = perturbed("d128", architecture="bert-pre-ln")
    ids, mask = padded()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, tokens, length in zip(logits, ids.tolist(), LENGTHS, strict=True):
            torch.testing.assert_close(row[:length], logits_of(model, tokens[:length]), rtol=1e-10, atol=1e-10)


def test_position_rows_of_no_token_have_no_gradient_and_the_others_do():
    model = perturbed("d32", architecture="bert-pre-ln")
    ids, mask = padded()
    loss = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].square().mean()
    gradient = torch.autograd.grad(loss, model.roberta_prelayernorm.embeddings.position_embeddings.weight)[0]
    assert gradient.abs().amax(dim=1).gt(0).tolist() == [False] * 11 + [True] * 6


def test_the_trace_knows_a_rule_for_every_parameter():
    ids, mask = padded()
    labels = ids.masked_fill(torch.arange(6) != 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    trace = fisher_trace(perturbed("d32", architecture="bert-pre-ln"), [batch], seed=0)
    assert list(trace.details["parameters_by_autograd"]) == []
