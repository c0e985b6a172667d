"""The signals of the families of language models in transformers: a function for each form.

A function gets the model without wrappers and the `Signals` to declare, as the family's forward pass goes: which map
reads and writes which signal. It returns the last hidden state, which is what `model.base_model` gives. Constants, as
the scales of scores and embeddings, masks and rotations, change nothing. The functions are found by
`config.model_type` in `isoloss.registry.RESCALINGS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from isoloss.flatness._rescaling.symmetries import Signal, Signals

_STREAM, _FINAL = "residual stream", "final norm"
_ATTENTION, _FEED_FORWARD = "attention input norm", "feed-forward input norm"


def bert(model: Any, signals: Signals) -> Signal:
    """Declare a BERT or RoBERTa: a norm follows each sum, and what it writes is read and added to."""
    layers, width = model.base_model.encoder.layer, model.config.hidden_size
    embedded = signals.channels("embeddings", width)
    _bert_embeddings(model, signals, embedded)
    stream = _normed(signals, f"layer 0: {_ATTENTION}", model.base_model.embeddings.LayerNorm, embedded)
    for number, layer in enumerate(layers):
        where = f"layer {number}"
        _bert_attention(signals, where, layer.attention, stream, stream)
        middle = _normed(signals, f"{where}: {_FEED_FORWARD}", layer.attention.output.LayerNorm, stream)
        _bert_feed_forward(signals, where, layer, middle, middle)
        after = f"layer {number + 1}: {_ATTENTION}" if number + 1 < len(layers) else "last hidden state"
        stream = _normed(signals, after, layer.output.LayerNorm, middle)
    _bert_head(model, signals, stream)
    return stream


def bert_pre_layer_norm(model: Any, signals: Signals) -> Signal:
    """Declare a RoBERTa-PreLayerNorm: norms before attention and feed-forward block, and after the last layer."""
    base = model.base_model
    embedded = signals.channels("embeddings", model.config.hidden_size)
    _bert_embeddings(model, signals, embedded)
    stream = _normed(signals, _STREAM, base.embeddings.LayerNorm, embedded)
    for number, layer in enumerate(base.encoder.layer):
        where = f"layer {number}"
        read = _normed(signals, f"{where}: {_ATTENTION}", layer.attention.LayerNorm, stream)
        _bert_attention(signals, where, layer.attention, read, stream)
        read = _normed(signals, f"{where}: {_FEED_FORWARD}", layer.intermediate.LayerNorm, stream)
        _bert_feed_forward(signals, where, layer, read, stream)
    last = _normed(signals, _FINAL, base.LayerNorm, stream)
    _bert_head(model, signals, last)
    return last


def modernbert(model: Any, signals: Signals) -> Signal:
    """Declare a ModernBERT: a norm before each block but the first, one map to queries, keys and values, gated maps."""
    base, config, head = model.base_model, model.config, model.head
    embedded = signals.channels("embeddings", config.hidden_size)
    signals.lookup(base.embeddings.tok_embeddings, embedded)
    stream = _normed(signals, _STREAM, base.embeddings.norm, embedded)
    for number, layer in enumerate(base.layers):
        where, heads, size = f"layer {number}", config.num_attention_heads, layer.attn.head_dim
        # the first block has nn.Identity in place of a norm, as the embeddings end with one
        read = _normed(signals, f"{where}: {_ATTENTION}", layer.attn_norm, stream) if number else stream
        *fused, mixed = signals.attention(where, heads=heads, key_value_heads=heads, size=size, rotated=size)
        signals.linear(layer.attn.Wqkv, read, np.concatenate(fused))
        signals.linear(layer.attn.Wo, mixed, stream)
        read = _normed(signals, f"{where}: {_FEED_FORWARD}", layer.mlp_norm, stream)
        gate, value, product = _gated(signals, where, config.intermediate_size, layer.mlp.act)
        # the half that the activation function takes comes first
        signals.linear(layer.mlp.Wi, read, np.concatenate([gate, value]))
        signals.linear(layer.mlp.Wo, product, stream)
    last = _normed(signals, _FINAL, base.final_norm, stream)
    _transformed(model, signals, last, head.dense, head.act, head.norm)
    return last


def gpt2(model: Any, signals: Signals) -> Signal:
    """Declare a GPT-2: a norm before each block, one map to queries, keys and values."""
    base, heads = model.base_model, model.config.num_attention_heads
    stream = signals.channels(_STREAM, model.config.hidden_size)
    signals.lookup(base.wte, stream)
    signals.lookup(base.wpe, stream)
    for number, layer in enumerate(base.h):
        where = f"layer {number}"
        read = _normed(signals, f"{where}: {_ATTENTION}", layer.ln_1, stream)
        *fused, mixed = signals.attention(where, heads=heads, key_value_heads=heads, size=layer.attn.head_dim)
        signals.linear(layer.attn.c_attn, read, np.concatenate(fused))
        signals.linear(layer.attn.c_proj, mixed, stream)
        read = _normed(signals, f"{where}: {_FEED_FORWARD}", layer.ln_2, stream)
        _feed_forward(signals, where, layer.mlp.c_fc, layer.mlp.act, layer.mlp.c_proj, read, stream)
    last = _normed(signals, _FINAL, base.ln_f, stream)
    _decoder(model, signals, last)
    return last


def gpt_neox(model: Any, signals: Signals) -> Signal:
    """Declare a GPT-NeoX, whose blocks may stand side by side; one map to each head's query, key and value in turn."""
    base, heads = model.base_model, model.config.num_attention_heads
    stream = signals.channels(_STREAM, model.config.hidden_size)
    signals.lookup(base.embed_in, stream)
    for number, layer in enumerate(base.layers):
        where, attention, mlp = f"layer {number}", layer.attention, layer.mlp
        size, rotated = attention.head_size, attention.rotary_ndims
        read = _normed(signals, f"{where}: {_ATTENTION}", layer.input_layernorm, stream)
        *fused, mixed = signals.attention(where, heads=heads, key_value_heads=heads, size=size, rotated=rotated)
        # (heads, 3, size): the rows of the fused weight go by head first, unlike GPT-2's
        by_head = np.stack([signal.reshape(heads, size) for signal in fused], axis=1)
        signals.linear(attention.query_key_value, read, by_head.ravel())
        signals.linear(attention.dense, mixed, stream)
        read = _normed(signals, f"{where}: {_FEED_FORWARD}", layer.post_attention_layernorm, stream)
        _feed_forward(signals, where, mlp.dense_h_to_4h, mlp.act, mlp.dense_4h_to_h, read, stream)
    last = _normed(signals, _FINAL, base.final_layer_norm, stream)
    _decoder(model, signals, last)
    return last


def opt(model: Any, signals: Signals) -> Signal:
    """Declare an OPT: a norm before each block, or after it as in OPT-350m, which projects its word embeddings too."""
    base, config = model.base_model.decoder, model.config
    before = config.do_layer_norm_before
    stream = signals.channels(_STREAM if before else "embeddings", config.hidden_size)
    embedded = stream
    if base.project_in is not None:
        embedded = signals.channels("word embeddings", config.word_embed_proj_dim)
        signals.linear(base.project_in, embedded, stream)
    signals.lookup(base.embed_tokens, embedded)
    signals.lookup(base.embed_positions, stream)
    for number, layer in enumerate(base.layers):
        where, attention = f"layer {number}", layer.self_attn
        maps = (attention.q_proj, attention.k_proj, attention.v_proj)
        read = _normed(signals, f"{where}: {_ATTENTION}", layer.self_attn_layer_norm, stream) if before else stream
        *written, mixed = signals.attention(
            where, heads=attention.num_heads, key_value_heads=attention.num_heads, size=attention.head_dim
        )
        _project(signals, maps, read, written)
        signals.linear(attention.out_proj, mixed, stream)
        # `final_layer_norm` is the norm of the feed-forward block: before it here, and after it in OPT-350m
        norm = layer.final_layer_norm if before else layer.self_attn_layer_norm
        read = _normed(signals, f"{where}: {_FEED_FORWARD}", norm, stream)
        stream = stream if before else read
        _feed_forward(signals, where, layer.fc1, layer.activation_fn, layer.fc2, read, stream)
        if not before:
            stream = _normed(signals, f"{where}: output norm", layer.final_layer_norm, stream)
    if base.final_layer_norm is not None:
        stream = _normed(signals, _FINAL, base.final_layer_norm, stream)
    if base.project_out is not None:
        projected = signals.channels("last hidden state", config.word_embed_proj_dim)
        signals.linear(base.project_out, stream, projected)
        stream = projected
    _decoder(model, signals, stream)
    return stream


def llama(model: Any, signals: Signals) -> Signal:
    """Declare a Llama, Mistral, Qwen, Phi-3 or Gemma: RMS norms before the blocks, gated feed-forward blocks.

    From Gemma 2 on there is a norm after each block too, of what it adds to the residual stream.
    """
    base = model.base_model
    stream = signals.channels(_STREAM, model.config.hidden_size)
    signals.lookup(base.embed_tokens, stream)
    for number, layer in enumerate(base.layers):
        where, attention, mlp = f"layer {number}", layer.self_attn, layer.mlp
        # `post_attention_layernorm` is what its name says from Gemma 2 on; elsewhere it is the norm before the
        # feed-forward block
        before, after = layer.post_attention_layernorm, (None, None)
        if hasattr(layer, "pre_feedforward_layernorm"):
            before, after = layer.pre_feedforward_layernorm, (before, layer.post_feedforward_layernorm)
        read = _normed(signals, f"{where}: {_ATTENTION}", layer.input_layernorm, stream)
        mixed = _llama_attention(model, signals, where, attention, read)
        _into(signals, f"{where}: attention output before its norm", attention.o_proj, mixed, after[0], stream)
        read = _normed(signals, f"{where}: {_FEED_FORWARD}", before, stream)
        product = _llama_gated(signals, where, mlp, model.config.intermediate_size, read)
        _into(signals, f"{where}: feed-forward output before its norm", mlp.down_proj, product, after[1], stream)
    last = _normed(signals, _FINAL, base.norm, stream)
    _decoder(model, signals, last)
    return last


def lstm(model: Any, signals: Signals) -> Signal:
    """Declare isoloss's LSTM: all that a layer writes went through tanh, so only what the first one reads is free."""
    base = model.base_model
    stream = signals.channels("embeddings", base.embeddings.embedding_dim)
    signals.lookup(base.embeddings, stream)
    for sides in zip(base.forwards, *([base.backwards] if base.backwards else []), strict=True):
        # all that passes a sigmoid or tanh is fixed, so the recurrent weights have no factors
        states, gates = signals.fixed(sides[0].hidden_size), signals.fixed(4 * sides[0].hidden_size)
        for side in sides:
            signals.factors(side.weight_ih_l0, gates, -stream)
            signals.factors(side.weight_hh_l0, gates, -states)
            signals.vector(side.bias_ih_l0, gates)
            signals.vector(side.bias_hh_l0, gates)
        stream = np.concatenate([states] * len(sides))
    _decoder(model, signals, stream)
    return stream


def bracket_attention(model: Any, signals: Signals) -> Signal:
    """Declare isoloss's model of brackets: queries and keys, and neurons whose sum is the output."""
    base, config = model.base_model, model.config
    encoded, keys = signals.fixed(base.key.in_features), signals.channels("queries and keys", config.key_width)
    signals.linear(base.query, encoded, -keys)
    signals.linear(base.key, encoded, keys)
    neurons = signals.neurons("hidden units", config.hidden_size)
    signals.linear(base.value, encoded, neurons)
    signals.linear(model.answers.read, neurons, signals.fixed(1))
    return neurons


def _normed(signals: Signals, label: str, norm: nn.Module, read: Signal) -> Signal:
    written = signals.channels(label, len(read))
    signals.norm(norm, read, written, offset=_offset(norm))
    return written


def _offset(norm: nn.Module) -> float:
    """Return the number that the norm adds to its weight, as Gemma's do."""
    return 1.0 if type(norm).__name__.startswith("Gemma") else 0.0


def _feed_forward(
    signals: Signals, where: str, first: Any, activation: Any, second: Any, read: Signal, written: Signal
) -> None:
    # transformers' Conv1D has no `out_features`, but always a bias
    width = len(first.bias) if first.bias is not None else first.out_features
    hidden = signals.activated(f"{where}: feed-forward hidden units", width, activation)
    signals.linear(first, read, hidden)
    signals.linear(second, hidden, written)


def _gated(signals: Signals, where: str, size: int, activation: Any) -> tuple[Signal, Signal, Signal]:
    """Return the gate, the linear part and their product."""
    gate = signals.activated(f"{where}: gate", size, activation)
    value = signals.neurons(f"{where}: up and down projections", size)
    return gate, value, signals.product(gate, value)


def _project(signals: Signals, maps: Sequence[Any], read: Signal, written: Sequence[Signal]) -> None:
    for module, signal in zip(maps, written, strict=True):
        signals.linear(module, read, signal)


def _decoder(model: Any, signals: Signals, read: Signal) -> None:
    decoder = model.get_output_embeddings()
    signals.linear(decoder, read, signals.fixed(decoder.out_features))


def _transformed(model: Any, signals: Signals, last: Signal, dense: Any, activation: Any, norm: Any) -> None:
    """Declare a head of a linear map, an activation function and a norm before the decoder."""
    hidden = signals.activated("head transform", dense.out_features, activation)
    signals.linear(dense, last, hidden)
    _decoder(model, signals, _normed(signals, "head norm", norm, hidden))


def _bert_head(model: Any, signals: Signals, last: Signal) -> None:
    if hasattr(model, "cls"):
        head, transform = model.cls.predictions, model.cls.predictions.transform
        _transformed(model, signals, last, transform.dense, transform.transform_act_fn, transform.LayerNorm)
    else:
        head = model.lm_head
        _transformed(model, signals, last, head.dense, nn.functional.gelu, head.layer_norm)
    signals.vector(head.bias, signals.fixed(len(head.bias)))  # the decoder's, or unused where that is not tied


def _bert_embeddings(model: Any, signals: Signals, written: Signal) -> None:
    embeddings = model.base_model.embeddings
    for module in (embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings):
        signals.lookup(module, written)


def _bert_attention(signals: Signals, where: str, attention: Any, read: Signal, written: Signal) -> None:
    inner = attention.self
    heads, size = inner.num_attention_heads, inner.attention_head_size
    *signal, mixed = signals.attention(where, heads=heads, key_value_heads=heads, size=size)
    _project(signals, (inner.query, inner.key, inner.value), read, signal)
    signals.linear(attention.output.dense, mixed, written)


def _bert_feed_forward(signals: Signals, where: str, layer: Any, read: Signal, written: Signal) -> None:
    first, activation = layer.intermediate.dense, layer.intermediate.intermediate_act_fn
    _feed_forward(signals, where, first, activation, layer.output.dense, read, written)


def _llama_attention(model: Any, signals: Signals, where: str, attention: Any, read: Signal) -> Signal:
    """Return the mixed values; queries and keys may be normalized by head, with one gain for all heads."""
    config, size = model.config, attention.head_dim
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    frequencies = getattr(model.base_model.rotary_emb, "inv_freq", None)
    rotated = size if frequencies is None else 2 * len(frequencies)  # all, where each kind of layer has its own
    *written, mixed = signals.attention(where, heads=heads, key_value_heads=shared, size=size, rotated=rotated)
    for place, (what, number) in enumerate((("queries", heads), ("keys", shared))):
        norm = getattr(attention, "q_norm" if what == "queries" else "k_norm", None)
        if norm is not None:
            after, written[place] = written[place], signals.heads(f"{where}: {what} before their norm", number, size)
            # one gain serves all heads: declared for each of them, it gives what they write the same factors
            for start in range(0, number * size, size):
                span = slice(start, start + size)
                signals.norm(norm, written[place][span], after[span], offset=_offset(norm))
    if hasattr(attention, "qkv_proj"):
        signals.linear(attention.qkv_proj, read, np.concatenate(written))
    else:
        _project(signals, (attention.q_proj, attention.k_proj, attention.v_proj), read, written)
    return mixed


def _llama_gated(signals: Signals, where: str, mlp: Any, size: int, read: Signal) -> Signal:
    """Return the input of the down-projection."""
    if hasattr(mlp, "gate_up_proj"):
        gate, value, product = _gated(signals, where, size, mlp.activation_fn)
        signals.linear(mlp.gate_up_proj, read, np.concatenate([gate, value]))
    else:
        gate, value, product = _gated(signals, where, size, mlp.act_fn)
        _project(signals, (mlp.gate_proj, mlp.up_proj), read, (gate, value))
    return product


def _into(signals: Signals, label: str, module: Any, read: Signal, norm: nn.Module | None, written: Signal) -> None:
    """Declare a map, and the norm of what it writes where there is one."""
    if norm is None:
        signals.linear(module, read, written)
        return
    between = signals.channels(label, len(written))
    signals.linear(module, read, between)
    signals.norm(norm, between, written, offset=_offset(norm))
