"""The pieces of a transformer in few passes over memory: matrix products, and compiled loops between them.

Each is a `torch.autograd.Function` with its gradient written out. In float32, with one thread of the CPU (`is_usable`),
they compute what the plain modules compute, up to rounding; the gradient itself has no derivative, and says so.

Shapes: n sentences, T tokens, N rows, d the model's width, m the feed-forward width, h heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isoloss.errors import IsolossError
from isoloss.languages.pcfg.inside_outside import choose_backend
from isoloss.models.dropout import LEVELS, num_levels, random_bits

Gradients = tuple[torch.Tensor | None, ...]


def is_usable(x: torch.Tensor) -> bool:
    """Return whether the pieces compute on `x`: float32 on the CPU with one thread, outside autocast, numba there."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.get_num_threads() == 1
        and not torch.is_autocast_enabled("cpu")
        and choose_backend(x.device) == "numba"
    )


def attention(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    projections: tuple[torch.nn.Linear, torch.nn.Linear, torch.nn.Linear],
    *,
    num_heads: int,
    dropout: float,
) -> torch.Tensor:
    """Return (n, T, d): self-attention of x (n, T, d) without its output projection, with dropout of its weights.

    One product gives queries, keys and values, whose projections have biases. A mask (n, 1, T, T), or what expands to
    it, is added to the scores.
    """
    parts = [tensor for linear in projections for tensor in (linear.weight, linear.bias)]
    mixed: torch.Tensor = _Attention.apply(x, mask, num_heads, dropout, *parts)  # type: ignore[no-untyped-call]
    return mixed


def linear_add_norm(
    x: torch.Tensor, linear: torch.nn.Linear, residual: torch.Tensor, norm: torch.nn.LayerNorm, *, dropout: float
) -> torch.Tensor:
    """Return norm(residual + dropout(linear(x))), for x (N, m) and residual (N, d)."""
    y: torch.Tensor = _LinearAddNorm.apply(  # type: ignore[no-untyped-call]
        x, linear.weight, linear.bias, residual, norm.weight, norm.bias, norm.eps, dropout
    )
    return y


def feed_forward_add_norm(
    x: torch.Tensor, inner: torch.nn.Linear, outer: torch.nn.Linear, norm: torch.nn.LayerNorm, *, dropout: float
) -> torch.Tensor:
    """Return norm(x + dropout(outer(gelu(inner(x))))), for x (N, d)."""
    y: torch.Tensor = _FeedForwardAddNorm.apply(  # type: ignore[no-untyped-call]
        x, inner.weight, inner.bias, outer.weight, outer.bias, norm.weight, norm.bias, norm.eps, dropout
    )
    return y


def embed(
    input_ids: torch.Tensor,
    words: torch.nn.Embedding,
    places: torch.Tensor,
    norm: torch.nn.LayerNorm,
    *,
    dropout: float,
) -> torch.Tensor:
    """Return (n, T, d): dropout(norm(words(input_ids) + places)), for input_ids (n, T) and places (T, d)."""
    y: torch.Tensor = _Embed.apply(  # type: ignore[no-untyped-call]
        input_ids, words.weight, words.padding_idx, places, norm.weight, norm.bias, norm.eps, dropout
    )
    return y


def attention_from_one(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    rows: torch.Tensor,
    projections: tuple[torch.nn.Linear, torch.nn.Linear, torch.nn.Linear],
    *,
    num_heads: int,
    dropout: float,
) -> torch.Tensor:
    """Return (n, d): what `attention` gives at one position of each sentence, row `rows` (n,) of x's n T states.

    No key and no value is computed; see `isoloss.models.bert`. A mask (n, T) is added to the scores.
    Torch draws the dropout.
    """
    parts = [tensor for linear in projections for tensor in (linear.weight, linear.bias)]
    mixed: torch.Tensor = _AttentionFromOne.apply(x, mask, rows, num_heads, dropout, *parts)  # type: ignore[no-untyped-call]
    return mixed


def cross_entropy(
    logits: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropies (r,) of logits + bias (r, V) at the labels (r,), and the sum (V,) of the gradients.

    The logits become their own gradients times `scale`.

    Raises:
        IndexError: A label is not an id from 0 to V - 1.
    """
    from isoloss.models import fused_kernels

    losses, sums = logits.new_empty(len(logits)), logits.new_zeros(logits.shape[1])
    added = np.zeros(len(sums), np.float32) if bias is None else _copied(bias)
    operands = logits.numpy(), added, labels.numpy(), np.float32(scale), losses.numpy(), sums.numpy()
    fused_kernels.cross_entropy(*operands)
    return losses, sums


Dropped = tuple[Any, Any, Any]  # a dropout that was drawn: bits, level and scale, as `fused_kernels` reads them


def _drawn(rows: int, width: int, probability: float) -> Dropped:
    """Draw a dropout of (rows, width) values, as `isoloss.models.dropout.Dropout` does."""
    levels = min(num_levels(probability), LEVELS - 1)
    bits = random_bits(rows * width).view(-1, width).numpy() if levels else _unread(width, np.int16)
    return bits, np.int16(levels - LEVELS // 2), np.float32(LEVELS / (LEVELS - levels))


def _unread(width: int, dtype: type[np.generic]) -> Any:
    """Return an array (0, 0) to pass instead of rows of this width that a kernel does not read.

    A compiled loop checks whether what it may read overlaps what it writes; if so, its sums are rounded differently.
    In an array (0, width), row i would be looked for in memory of others; in (0, 0), all rows are its own buffer.
    """
    return np.empty(width, dtype)[:0].reshape(0, 0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mask: torch.Tensor | None, num_heads: int, dropout: float, *parts: torch.Tensor
    ) -> torch.Tensor:
        from isoloss.models import fused_kernels

        n, length, width = x.shape
        rows, weight, bias = x.reshape(-1, width), torch.cat(parts[::2]), torch.cat(parts[1::2])
        qkv = _linear(rows, weight, bias).view(n, length, 3, num_heads, width // num_heads)
        p = x.new_empty(num_heads, n, length, length)
        for head in range(num_heads):
            torch.bmm(qkv[:, :, 0, head], qkv[:, :, 1, head].transpose(1, 2), out=p[head])
        factor = inside = np.float32((width // num_heads) ** -0.5)
        if mask is not None:
            p.mul_(float(factor)).add_(mask[:, 0])
            inside = np.float32(1)
        dropped, weights = _drawn(p.numel() // length, length, dropout), torch.empty_like(p)
        fused_kernels.softmax(p.view(-1, length).numpy(), inside, *dropped, weights.view(-1, length).numpy())
        mixed = x.new_empty(num_heads, n, length, width // num_heads)
        for head in range(num_heads):
            torch.bmm(weights[head], qkv[:, :, 2, head], out=mixed[head])
        ctx.save_for_backward(rows, weight, qkv, p, weights)
        ctx.dropped, ctx.factor = dropped, factor
        return mixed.permute(1, 2, 0, 3).reshape(n, length, width)

    @staticmethod
    def backward(ctx: Any, d_mixed: torch.Tensor) -> Gradients:
        from isoloss.models import fused_kernels

        _check_first()
        rows, weight, qkv, p, weights = ctx.saved_tensors
        n, length, _, num_heads, size = qkv.shape
        g = d_mixed.reshape(n, length, num_heads, size)
        d_scores, d_qkv = torch.empty_like(p), torch.empty_like(qkv)
        for head in range(num_heads):
            torch.bmm(g[:, :, head], qkv[:, :, 2, head].transpose(1, 2), out=d_scores[head])
            d_qkv[:, :, 2, head] = weights[head].transpose(1, 2) @ g[:, :, head]
        operands = d_scores.view(-1, length).numpy(), p.view(-1, length).numpy()
        fused_kernels.softmax_backward(*operands, ctx.factor, *ctx.dropped)
        for head in range(num_heads):
            d_qkv[:, :, 0, head] = d_scores[head] @ qkv[:, :, 1, head]
            d_qkv[:, :, 1, head] = d_scores[head].transpose(1, 2) @ qkv[:, :, 0, head]
        flat = d_qkv.view(len(rows), -1)
        d_x = _linear(flat, weight.T).view(n, length, -1)
        d_weights, d_biases = _outer(flat, rows).chunk(3), flat.sum(dim=0).chunk(3)
        return d_x, None, None, None, *(part for pair in zip(d_weights, d_biases, strict=True) for part in pair)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_ids: torch.Tensor,
        words: torch.Tensor,
        padding: int | None,
        places: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        dropout: float,
    ) -> torch.Tensor:
        from isoloss.models import fused_kernels

        tokens = input_ids.flatten()
        x = words.index_select(0, tokens)
        dropped, inverse, y = _drawn(len(x), x.shape[1], dropout), x.new_empty(len(x)), torch.empty_like(x)
        operands = (x.numpy(), _copied(places), *dropped, _copied(weight), _copied(shift))
        fused_kernels.embed_norm(*operands, np.float32(eps), inverse.numpy(), y.numpy())
        ctx.save_for_backward(tokens, x, inverse, weight)
        ctx.dropped, ctx.sizes, ctx.padding = dropped, (len(words), len(places)), -1 if padding is None else padding
        return y.view(*input_ids.shape, -1)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> Gradients:
        from isoloss.models import fused_kernels

        _check_first()
        tokens, normalized, inverse, weight = ctx.saved_tensors
        d_words, d_places, d_norm = (d_y.new_zeros(rows, d_y.shape[-1]) for rows in (*ctx.sizes, 2))
        bits, level, scale = ctx.dropped
        fused_kernels.embed_norm_backward(
            d_y.reshape(normalized.shape).numpy(),
            normalized.numpy(),
            inverse.numpy(),
            bits,
            level,
            scale,
            _copied(weight),
            tokens.numpy(),
            ctx.padding,
            d_words.numpy(),
            d_places.numpy(),
            d_norm.numpy(),
        )
        return None, d_words, None, d_places, *d_norm, None, None


class _AttentionFromOne(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        rows: torch.Tensor,
        num_heads: int,
        dropout: float,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        from isoloss.models import fused_kernels

        to_query, query_bias, to_key, _, to_value, value_bias = parts
        n, length, width = x.shape
        x = x.contiguous()
        at = x.view(-1, width).index_select(0, rows)
        query = torch.nn.functional.linear(at, to_query, query_bias).view(n, num_heads, -1)
        factor = np.float32(query.shape[2] ** -0.5)
        kept = torch.nn.functional.dropout(x.new_ones(n, num_heads, length), dropout)
        towards, mixed, p = (x.new_empty(n, num_heads, size) for size in (width, width, length))
        keys, mass = to_key.view(num_heads, -1, width), x.new_empty(n, num_heads)
        for head in range(num_heads):
            towards[:, head] = query[:, head] @ keys[head]
        masks = _unread(length, np.float32) if mask is None else mask.contiguous().numpy()
        given = towards.numpy(), x.numpy(), masks, factor, kept.numpy()
        fused_kernels.attend_from_one(*given, p.numpy(), mass.numpy(), mixed.numpy())
        y = x.new_empty(n, num_heads, query.shape[2])
        for head, of_head in enumerate(to_value.view(num_heads, -1, width)):
            y[:, head] = mixed[:, head] @ of_head.T
        y += mass[:, :, None] * value_bias.view(num_heads, -1)
        ctx.save_for_backward(x, rows, at, query, towards, kept, p, mass, mixed, *parts)
        ctx.factor = factor
        return y.flatten(1)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> Gradients:
        from isoloss.models import fused_kernels

        _check_first()
        x, rows, at, query, towards, kept, p, mass, mixed, *parts = ctx.saved_tensors
        to_query, _, to_key, key_bias, to_value, value_bias = parts
        n, num_heads, width = towards.shape
        g = d_y.reshape(query.shape)
        d_mixed, d_towards, d_x = torch.empty_like(towards), torch.empty_like(towards), torch.empty_like(x)
        d_key, d_value = torch.empty_like(to_key), torch.empty_like(to_value)
        keys, values, d_keys, d_values = (w.view(num_heads, -1, width) for w in (to_key, to_value, d_key, d_value))
        for head in range(num_heads):
            d_mixed[:, head] = g[:, head] @ values[head]
            torch.mm(g[:, head].T, mixed[:, head], out=d_values[head])
        d_mass = (g * value_bias.view(num_heads, -1)).sum(dim=2)
        given = d_mixed.numpy(), d_mass.numpy(), towards.numpy(), x.numpy(), ctx.factor, kept.numpy(), p.numpy()
        fused_kernels.attend_from_one_backward(*given, d_towards.numpy(), d_x.numpy())
        d_query = torch.empty_like(query)
        for head in range(num_heads):
            d_query[:, head] = d_towards[:, head] @ keys[head].T
            torch.mm(query[:, head].T, d_towards[:, head], out=d_keys[head])
        flat = d_query.view(n, -1)
        d_x.view(-1, width).index_add_(0, rows, flat @ to_query)
        d_value_bias = (g * mass[:, :, None]).sum(dim=0).flatten()
        # a constant added to all scores of a row changes nothing: the gradient of the keys' bias is 0
        d_parts = flat.T @ at, flat.sum(dim=0), d_key, torch.zeros_like(key_bias), d_value, d_value_bias
        return d_x, None, None, None, None, *d_parts


class _LinearAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
        *norm: Any,
    ) -> torch.Tensor:
        y, ctx.dropped, saved = _add_norm(_linear(x, weight), bias, residual, *norm)
        ctx.save_for_backward(x, weight, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> Gradients:
        _check_first()
        x, weight, *saved = ctx.saved_tensors
        d_product, d_residual, (d_bias, d_scale, d_shift) = _add_norm_backward(d_y, ctx.dropped, *saved)
        d_x, d_weight = _linear(d_product, weight.T), _outer(d_product, x)
        return d_x, d_weight, d_bias, d_residual, d_scale, d_shift, None, None


class _FeedForwardAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        inner: torch.Tensor,
        inner_bias: torch.Tensor,
        outer: torch.Tensor,
        outer_bias: torch.Tensor,
        *norm: Any,
    ) -> torch.Tensor:
        from isoloss.models import fused_kernels

        slope = _linear(x, inner)
        hidden = torch.empty_like(slope)
        fused_kernels.gelu(slope.numpy(), _copied(inner_bias), hidden.numpy())
        y, ctx.dropped, saved = _add_norm(_linear(hidden, outer), outer_bias, x, *norm)
        ctx.save_for_backward(x, inner, outer, slope, hidden, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> Gradients:
        from isoloss.models import fused_kernels

        _check_first()
        x, inner, outer, slope, hidden, *saved = ctx.saved_tensors
        d_product, d_residual, (d_outer_bias, d_scale, d_shift) = _add_norm_backward(d_y, ctx.dropped, *saved)
        d_outer = _outer(d_product, hidden)
        d_hidden, d_inner_bias = _linear(d_product, outer.T), slope.new_zeros(slope.shape[1])
        fused_kernels.gelu_backward(d_hidden.numpy(), slope.numpy(), d_inner_bias.numpy())
        d_inner = _outer(d_hidden, x)
        d_x = _linear(d_hidden, inner.T).add_(d_residual)
        return d_x, d_inner, d_inner_bias, d_outer, d_outer_bias, d_scale, d_shift, None, None


def _add_norm(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    dropout: float,
) -> tuple[torch.Tensor, Dropped, tuple[torch.Tensor, ...]]:
    """Return norm(residual + dropout(x + bias)), what was dropped, and what the gradient needs; x is overwritten."""
    from isoloss.models import fused_kernels

    dropped, inverse, y = _drawn(len(x), x.shape[1], dropout), x.new_empty(len(x)), torch.empty_like(x)
    residual = residual.detach().contiguous()
    operands = (x.numpy(), _copied(bias), residual.numpy(), *dropped, _copied(weight), _copied(shift))
    fused_kernels.add_norm(*operands, np.float32(eps), inverse.numpy(), y.numpy())
    return y, dropped, (x, inverse, weight)


def _add_norm_backward(
    d_y: torch.Tensor, dropped: Dropped, normalized: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients (N, d) of x and residual, and (3, d) those of bias, weight and shift."""
    from isoloss.models import fused_kernels

    d_x, d_residual, sums = torch.empty_like(normalized), torch.empty_like(normalized), d_y.new_zeros(3, d_y.shape[1])
    operands = (d_y.contiguous().numpy(), normalized.numpy(), inverse.numpy(), *dropped, _copied(weight))
    fused_kernels.add_norm_backward(*operands, d_x.numpy(), d_residual.numpy(), sums.numpy())
    return d_x, d_residual, sums


def _check_first() -> None:
    if torch.is_grad_enabled():  # create_graph: what the gradient is computed from would count as constant
        raise IsolossError(
            "the blocks of a model in training mode have no second derivative on one thread: call the model's eval()"
        )


def _copied(parameter: torch.Tensor) -> Any:
    """Return a vector as numpy's own: a view would pin the storage, which FSDP2 frees between its uses."""
    return parameter.detach().clone().numpy()


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias: if it is large by oneDNN, through the operator that torch.compile uses for it."""
    if _ONEDNN is None or x.numel() * len(weight) < _LARGE:
        return torch.nn.functional.linear(x, weight, bias)
    y: torch.Tensor = _ONEDNN(x, weight, bias, "none", [], "")
    return y


def _outer(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return g.T @ x, the gradient of a weight; by oneDNN as by `_linear`, with the fewer columns first."""
    return _linear(g.T, x.T) if g.shape[1] <= x.shape[1] else _linear(x.T, g.T).T


def _onednn() -> Any:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_ONEDNN = _onednn()
_LARGE = 1 << 21  # multiplications, from which on oneDNN is faster: a call of it takes longer to begin
