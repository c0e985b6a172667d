"""What can be rescaled in a DistilBERT without changing what it computes."""

from typing import Any


def distilbert(model: Any, signals: Any) -> Any:
    """Declare the maps of a `DistilBertForMaskedLM` in the order of its forward pass; return the last hidden state."""
    base, width = model.distilbert, model.config.dim

    def normed(label: str, norm: Any, read: Any) -> Any:
        written = signals.channels(label, width)
        signals.norm(norm, read, written)
        return written

    embedded = signals.channels("embeddings", width)
    for table in (base.embeddings.word_embeddings, base.embeddings.position_embeddings):
        signals.lookup(table, embedded)
    stream = normed("embeddings norm", base.embeddings.LayerNorm, embedded)
    for number, layer in enumerate(base.transformer.layer):
        where, attention, ffn = f"layer {number}", layer.attention, layer.ffn
        heads, size = attention.n_heads, attention.attention_head_size
        queries, keys, values, mixed = signals.attention(where, heads=heads, key_value_heads=heads, size=size)
        signals.linear(attention.q_lin, stream, queries)
        signals.linear(attention.k_lin, stream, keys)
        signals.linear(attention.v_lin, stream, values)
        signals.linear(attention.out_lin, mixed, stream)  # a term of a sum has the factor of the sum
        stream = normed(f"{where}: attention norm", layer.sa_layer_norm, stream)
        hidden = signals.activated(f"{where}: hidden units", ffn.lin1.out_features, ffn.activation)
        signals.linear(ffn.lin1, stream, hidden)
        signals.linear(ffn.lin2, hidden, stream)
        stream = normed(f"{where}: output norm", layer.output_layer_norm, stream)
    transformed = signals.activated("head transform", width, model.activation)
    signals.linear(model.vocab_transform, stream, transformed)
    top = normed("head norm", model.vocab_layer_norm, transformed)
    signals.linear(model.vocab_projector, top, signals.fixed(model.config.vocab_size))  # the logits do not change
    return stream
