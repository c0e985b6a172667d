"""Tiny models of every architecture, batches for them, and their squared gradient norms by plain backward passes."""

import numpy as np
import torch
import transformers

from isoloss.flatness._ghost.engine import GhostNorms

VOCAB = 40
_ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_DECODER = {**_ENCODER, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_GROUPED = {**_DECODER, "num_attention_heads": 4, "num_key_value_heads": 2}

_DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
_NARROW = {**_ENCODER, "embedding_size": 8}

# config, class, its options, causal, float64 all through
ARCHITECTURES = {
    "bert": ("BertConfig", "BertForMaskedLM", _ENCODER, False, True),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _ENCODER, False, True),
    "roberta-prelayernorm": ("RobertaPreLayerNormConfig", "RobertaPreLayerNormForMaskedLM", _ENCODER, False, True),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", _DISTILBERT, False, True),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", _NARROW, False, True),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", _NARROW, False, True),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2, True, True),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_DECODER, "ffn_dim": 24, "word_embed_proj_dim": 16}, True, True),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _DECODER, True, True),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED, True, False),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED, True, False),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 6}, True, False),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_GROUPED, "head_dim": 6}, True, False),
}
DEBERTA = {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}


def build(name, *, tied=True, dtype=torch.float64, vocab=VOCAB):
    config, model, options, _, _ = ARCHITECTURES[name]
    return make(config, model, options, tied=tied, dtype=dtype, vocab=vocab)


def make(config, model, options, *, tied=True, dtype=torch.float64, vocab=VOCAB):
    torch.manual_seed(1)
    made = getattr(transformers, config)(vocab_size=vocab, tie_word_embeddings=tied, **options)
    result = getattr(transformers, model)(made)
    # nothing at zero or one, so that no use of a parameter goes unseen
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return result.to(dtype).eval()


def batch_of(*, sequences=5, length=7, vocab=VOCAB, causal=False, every=False, seed=0):
    """Sequences of different lengths that predict different numbers of positions; the fourth predicts none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocab, (sequences, length), generator=generator)
    tokens[:, 3] = tokens[:, 1]  # a token twice, whose gradients add
    mask = torch.ones_like(tokens)
    for row in range(sequences if not every else 0):
        mask[row, length - row % 3 :] = 0
    tokens[mask == 0] = 1
    labels = torch.full_like(tokens, -100)
    for row in range(sequences):
        if row != 3 or every:
            labels[row, 0 : 2 + row % 3] = tokens[row, 0 : 2 + row % 3]
    if every:
        labels = tokens.clone()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def packed(signs, copies=1):
    """Signs as `packed_probes` gives them: every 8 an octet, a list of streams end to end."""
    octets = [torch.from_numpy(np.packbits((part > 0).numpy().astype(np.uint8), bitorder="little")) for part in signs]
    return torch.cat(octets).expand(copies, -1)


def parts_of(squares, block):
    """Sums over the parts of a tensor, by sums over one part at a time."""
    if block is None:
        return [squares.sum()]
    axes = squares.reshape(len(block.rows), -1, len(block.columns))
    places = [(row, column) for row in range(block.num_rows) for column in range(block.num_columns)]
    return [axes[block.rows == row][:, :, block.columns == column].sum() for row, column in places]


def reference(model, batch, cotangent, *, causal, blocks=None):
    """(B, K) of parameters or parts: for each sequence the squares of one backward pass through the plain model."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    predicted = batch["labels"] != -100
    if causal:
        predicted = torch.cat([predicted[:, 1:], torch.zeros_like(predicted[:, :1])], dim=1)
    logits = model(**inputs).logits[predicted]
    rows = predicted.nonzero()[:, 0]
    norms = []
    for row in range(len(predicted)):
        loss = (logits * cotangent)[rows == row].sum()
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        parts = []
        for (name, value), gradient in zip(named.items(), gradients, strict=True):
            squares = torch.zeros_like(value) if gradient is None else gradient
            parts += parts_of(squares.double().square(), (blocks or {}).get(name))
        norms.append(torch.stack(parts))
    return list(named), torch.stack(norms).detach(), logits.detach()


def check_norms(model, *batches, causal=False, rtol=1e-10, slow=(), blocks=None):
    """Assert that the norms of all batches are right and which parameters are slow: predictor, predictions, norms."""
    flags, found = {name: value.requires_grad for name, value in model.named_parameters()}, []
    with GhostNorms(model, causal=causal, parameter_blocks=blocks or {}) as predictor:
        for number, batch in enumerate(batches):
            predictions = predictor.forward(batch)
            draws = torch.Generator().manual_seed(5 + number)
            cotangent = torch.randn(predictions.logits.shape, generator=draws).to(predictions.logits.dtype)
            norms = predictor.squared_norms(predictions, cotangent).by_column
            torch.testing.assert_close(predictor.squared_norms(predictions, 2 * cotangent).by_column, 4 * norms)
            found.append((batch, cotangent, norms, predictions.logits.detach()))
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    for batch, cotangent, norms, logits in found:
        names, expected, plain = reference(model, batch, cotangent, causal=causal, blocks=blocks)
        assert predictor.names == names
        torch.testing.assert_close(logits, plain)
        assert_norms(norms, expected, rtol=rtol)
    assert set(predictor.slow_parameters) == set(slow)
    return predictor, predictions, norms


def assert_norms(norms, expected, *, rtol):
    """Every norm is right, relative to itself, but for what cancels down to rounding of the sequence's total."""
    floor = rtol * 1e-6 * expected.sum(dim=1, keepdim=True)
    assert ((norms - expected).abs() <= rtol * expected + floor).all()
