"""A model of Academic Budget BERT, written from its definition, and a checkpoint as its code saves one."""

import json

import torch
from torch.nn import functional as F

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def random_weights(config, *, seed=0):
    """Return weights by the names of its modeling file, none of them at its initial value."""
    width, inner, generator = config["hidden_size"], config["intermediate_size"], torch.Generator().manual_seed(seed)

    def draw(*shape, around=0.0, scale=0.2):
        return around + scale * torch.randn(*shape, generator=generator)

    def linear(name, rows, columns):
        return {f"{name}.weight": draw(rows, columns), f"{name}.bias": draw(rows)}

    def norm(name):
        return {f"{name}.weight": draw(width, around=1.0), f"{name}.bias": draw(width)}

    dense = "dense_act" if config.get("fused_linear_layer", True) else "dense_act.dense"
    weights = {
        "bert.embeddings.word_embeddings.weight": draw(config["vocab_size"], width),
        "bert.embeddings.position_embeddings.weight": draw(config["max_position_embeddings"], width),
        "bert.embeddings.token_type_embeddings.weight": draw(2, width),
        **norm("bert.embeddings.LayerNorm"),
        **norm("bert.encoder.FinalLayerNorm"),
        **linear(f"bert.pooler.{dense}", width, width),
        "cls.predictions.bias": draw(config["vocab_size"]),
        **linear(f"cls.predictions.transform.{dense}", width, width),
        **norm("cls.predictions.transform.LayerNorm"),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{number}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            weights |= linear(f"{layer}.attention.{part}", width, width)
        weights |= norm(f"{layer}.PreAttentionLayerNorm") | norm(f"{layer}.PostAttentionLayerNorm")
        weights |= linear(f"{layer}.intermediate.{dense}", inner, width) | linear(f"{layer}.output.dense", width, inner)
    return {**weights, "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"]}


def logits(weights, config, ids, mask):
    """Return the scores (n, T, V) of its masked language model, in evaluation mode."""
    is_pre, dense = config["encoder_ln_mode"] == "pre-ln", "dense_act"
    if not config.get("fused_linear_layer", True):
        dense += ".dense"

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    embeddings = {part: weights[f"bert.embeddings.{part}_embeddings.weight"] for part in ("word", "position")}
    types = weights["bert.embeddings.token_type_embeddings.weight"]
    x = embeddings["word"][ids] + embeddings["position"][: ids.shape[1]] + types[0]
    x = norm("bert.embeddings.LayerNorm", x)
    hidden = -10000.0 * (1.0 - mask.to(x.dtype))[:, None, None]
    for number in range(config["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{number}"
        first, second = f"{layer}.PreAttentionLayerNorm", f"{layer}.PostAttentionLayerNorm"
        read = norm(first, x) if is_pre else x
        query, key, value = (
            linear(f"{layer}.attention.self.{part}", read)
            .unflatten(-1, (config["num_attention_heads"], -1))
            .transpose(1, 2)
            for part in ("query", "key", "value")
        )
        scores = query @ key.mT / query.shape[-1] ** 0.5 + hidden
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        x = x + linear(f"{layer}.attention.output.dense", mixed)
        x = x if is_pre else norm(first, x)
        inner = F.gelu(linear(f"{layer}.intermediate.{dense}", norm(second, x) if is_pre else x))
        x = x + linear(f"{layer}.output.dense", inner)
        x = x if is_pre else norm(second, x)
    x = norm("bert.encoder.FinalLayerNorm", x) if is_pre else x
    x = norm("cls.predictions.transform.LayerNorm", F.gelu(linear(f"cls.predictions.transform.{dense}", x)))
    # where only masked positions are predicted, the stored bias is never added
    return x @ embeddings["word"].T


def make_config(mode, **more):
    """Return what is in the config.json of a small model."""
    return {
        "architectures": ["BertLMHeadModel"],
        "model_type": "bert",
        "encoder_ln_mode": mode,
        "layer_norm_type": "apex",
        "fused_linear_layer": True,
        "sparse_mask_prediction": True,
        "useLN": True,
        "vocab_size": 16,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "hidden_act": "gelu",
        "max_position_embeddings": 10,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "layer_norm_eps": 1e-5,  # not what its layer norms have
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        **more,
    }


def save(folder, config, weights, words=()):
    """Write a checkpoint as its `save_pretrained` of transformers 4.4 does, with a vocabulary of WordPiece."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.bin")
    if words:
        (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in (*WORDS, *words)))
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder
