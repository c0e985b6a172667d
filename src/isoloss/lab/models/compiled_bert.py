"""The loss of a BERT that predicts one token a sentence, with its gradient, compiled as a whole for one CPU thread.

It takes the place of `isoloss.lab.training.objectives.prediction_loss` in training: several times as fast for a narrow
model, where calling small operations one by one takes longer than they do. Everything is float32.

Shapes: n sentences, T tokens, N = n T columns, column t n + i for token t of sentence i; d the width, m the
feed-forward width, h heads of e = d / h, V ids. Activations are (features, N), as `compiled_kernels` has
them, but for the embedding and the last layer's attention, which are (N, features). In the last layer all that follows
the scores runs on the n predicted positions alone.

A step reads its random bits in this order: for the embedding (N, d); in each layer but the last, for the attention's
weights (h, T, T, n), its output (d, N) and the feed-forward block (d, N); in the last layer, for the weights (h, n, T),
the output (d, n) and the feed-forward block (d, n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.core import event
from torch.autograd.function import once_differentiable

from isoloss.lab.jit import jit
from isoloss.lab.models.compiled_kernels import (
    FIRST,
    HEAD,
    HEAD_BIAS,
    HEAD_NORM,
    HEAD_SHIFT,
    INNER,
    INNER_BIAS,
    KEEP_ALL,
    NORM,
    NORM1,
    NORM2,
    OF_BLOCK,
    OUT,
    OUT_BIAS,
    OUTER,
    OUTER_BIAS,
    OUTPUT,
    POSITIONS,
    QKV,
    QKV_BIAS,
    SHIFT,
    SHIFT1,
    SHIFT2,
    TYPES,
    WORDS,
    Bits,
    Floats,
    Ints,
    Sizes,
    add_norm,
    add_norm_backward,
    add_rows,
    attention,
    attention_backward,
    cross_entropy,
    embed,
    embed_backward,
    empty,
    gelu,
    matrix,
    outer_product,
    part,
    product,
    single_query,
    single_query_backward,
    transpose,
    transposed,
    vector,
    zeros,
)
from isoloss.lab.models.dropout import LEVELS, num_levels, random_bits
from isoloss.text.masking import IGNORED, Batch

_ALIGNED = 16  # float32 values in a cache line, on which every parameter begins
# Not -inf: where all keys are padding, the highest score would be -inf too, and the difference NaN.
_LOW = -1e30  # added to the score of a key that is padding
_OUTER_NAMES = (  # in the order of `compiled_kernels`
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.token_type_embeddings.weight",
    "bert.embeddings.LayerNorm.weight",
    "bert.embeddings.LayerNorm.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.bias",
)
_BLOCK_NAMES = (  # each with a weight and a bias; the keys and values lie behind the queries
    "attention.self.query",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


class CompiledLoss:
    """The mean cross-entropy of the predicted tokens of a BERT, in nats, as a function of the batch.

    Value and gradient equal those of `isoloss.lab.training.objectives.prediction_loss` up to rounding. The gradient is
    computed with the value and has itself no derivative. Dropout draws from torch's default generator, in an order of
    its own.

    The model is on the CPU, in float32, with a width that is a multiple of 16 and a feed-forward width that is one of
    4. From now on its parameters and their gradients lie in two vectors, whose parts an optimizer updates at once:
    with a call for each of them, that would take as long as a narrow model's loss and gradient.

    Attributes:
        parts: The matrices, which decay, and the other parameters: two vectors that share memory with the model.
    """

    def __init__(self, model: Any) -> None:
        self._config, self._named = model.config, dict(model.named_parameters())
        # a stable sort, after which the keys and values of a layer lie behind its queries
        order = sorted(self._named, key=lambda name: self._named[name].ndim <= 1)
        self._slices: dict[str, slice] = {}
        size = split = 0
        # In the gaps before the next cache line, value and gradient are 0 and stay 0 in every optimizer that treats
        # numbers one by one.
        for name in order:
            self._slices[name] = slice(size, size + self._named[name].numel())
            size += -(-self._named[name].numel() // _ALIGNED) * _ALIGNED
            split = size if self._named[name].ndim > 1 else split
        self._vector, self._gradient, self._split = torch.zeros(size), torch.zeros(size), split
        self._gradients = {name: self._view(name, self._gradient) for name in order}
        for name, parameter in self._named.items():
            parameter.data = self._view(name, self._vector).copy_(parameter.data)
            parameter.grad = self._gradients[name]
        self.parts = [torch.nn.Parameter(self._vector[:split]), torch.nn.Parameter(self._vector[split:])]
        self.parts[0].grad, self.parts[1].grad = self._gradient[:split], self._gradient[split:]
        names = [*_OUTER_NAMES]
        for layer in range(model.config.num_hidden_layers):
            names += [f"bert.encoder.layer.{layer}.{n}.{what}" for n in _BLOCK_NAMES for what in ("weight", "bias")]
        self._starts = np.array([self._slices[name].start for name in names], dtype=np.int64)
        # At a probability of 1 the others' factor would be infinite.
        self._levels = min(num_levels(model.config.hidden_dropout_prob), LEVELS - 1)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch with one label in each sentence: a scalar in float64."""
        loss: torch.Tensor = _Loss.apply(self, batch, *self.parts)  # type: ignore[no-untyped-call]
        return loss

    def loss_and_gradient(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """Return the loss of a batch, and its gradient as one vector."""
        config, (n, length) = self._config, batch["input_ids"].shape
        z = Sizes(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            width=config.hidden_size,
            inner=config.intermediate_size,
            ids=config.vocab_size,
            padding=config.pad_token_id,
            sentences=n,
            tokens=length,
        )
        positions = (batch["labels"] != IGNORED).int().argmax(dim=1)
        attention_bias = torch.zeros(length, n)
        if "attention_mask" in batch:
            attention_bias.masked_fill_(batch["attention_mask"].T == 0, _LOW)
        targets = batch["targets"].float() if "targets" in batch else torch.zeros(n, 0)
        gradient, losses = torch.zeros_like(self._vector), torch.empty(n)
        loss_and_gradient(
            self._vector.numpy(),
            gradient.numpy(),
            self._starts,
            z,
            batch["input_ids"].T.contiguous().numpy(),
            positions.numpy(),
            attention_bias.numpy(),
            batch["labels"].gather(1, positions[:, None])[:, 0].numpy(),
            targets.contiguous().numpy(),
            # of 16 random bits as an int16, the share levels / 2^16 is below levels - 2^15
            random_bits(num_drawn(z) if self._levels else 0).numpy(),
            np.int16(self._levels - LEVELS // 2),
            np.float32(LEVELS / (LEVELS - self._levels)),
            losses.numpy(),
        )
        return losses.double().mean().item(), gradient

    def zero_gradient(self) -> None:
        """Set the gradient to zeros, and let each parameter have its part: what was measured may have taken it away."""
        self._gradient.zero_()
        for name, parameter in self._named.items():
            parameter.grad = self._gradients[name]

    def by_name(self, part: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut a tensor of a part's shape into its parameters' tensors, by name; a scalar is every parameter's."""
        if tensor.ndim == 0:
            return {name: tensor.clone() for name in self._names(part)}
        whole = torch.cat([torch.zeros(self._split), tensor]) if part else tensor
        return {name: self._view(name, whole) for name in self._names(part)}

    def joined(self, part: int, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor that `by_name` cuts into `named`: its inverse."""
        tensors = {name: named[name] for name in self._names(part)}
        first = next(iter(tensors.values()))
        if first.ndim == 0:
            return first
        vector = torch.zeros_like(self._vector)
        for name, tensor in tensors.items():
            self._view(name, vector).copy_(tensor)
        return vector[self._split :] if part else vector[: self._split]

    def _names(self, part: int) -> list[str]:
        return [name for name, where in self._slices.items() if (where.start >= self._split) == bool(part)]

    def _view(self, name: str, vector: torch.Tensor) -> torch.Tensor:
        return vector[self._slices[name]].view(self._named[name].shape)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: CompiledLoss, batch: Batch, *parts: torch.Tensor) -> torch.Tensor:
        loss, gradient = compiled.loss_and_gradient(batch)
        ctx.gradient, ctx.sizes = gradient, [len(part) for part in parts]
        return torch.tensor(loss, dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *torch.split(ctx.gradient.mul_(d_loss.item()), ctx.sizes)


def num_drawn(z: Sizes) -> int:
    """Return how many values dropout decides on in a step."""
    rows = z.sentences * z.tokens
    full = z.heads * z.tokens * rows + 2 * rows * z.width
    return rows * z.width + (z.layers - 1) * full + z.heads * rows + 2 * z.sentences * z.width


@jit(nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
def loss_and_gradient(
    theta: Floats,
    grad: Floats,
    at: Ints,
    z: Sizes,
    tokens: Ints,
    positions: Ints,
    attention_bias: Floats,
    labels: Ints,
    targets: Floats,
    bits: Bits,
    level: np.int16,
    scale: np.float32,
    losses: Floats,
) -> None:
    """Set `losses` (n,), in nats, and add the gradient of their mean with respect to `theta` to zeros in `grad`.

    `at` says where each parameter begins in `theta`. The `tokens` (T, n) are ids, `positions` (n,) the predicted ones;
    `attention_bias` (T, n) is added to the scores of a key: 0, or very low at padding. The `targets` (n, C) are
    probabilities of the first C ids or, with C = 0, the `labels` (n,) are the ids predicted. The random `bits` are read
    from the first to the last.
    """
    n, length, d, m, layers, heads = z.sentences, z.tokens, z.width, z.inner, z.layers, z.heads
    rows, last, of_layer = n * length, layers - 1, d * n * length
    words, position = matrix(theta, at[WORDS], z.ids, d), matrix(theta, at[POSITIONS], length, d)
    kind, norm, shift = theta[at[TYPES] :][:d], theta[at[NORM] :][:d], theta[at[SHIFT] :][:d]

    # --- forward 1, the embedding: tokens (T, n) -> states (N, d)
    u0, inverse0, states = empty(rows, d), vector(rows), empty(rows, d)
    embed(words, position, kind, norm, shift, tokens, _taken(bits, 0, rows, d), level, scale, u0, inverse0, states)
    drawn = rows * d
    # --- forward 2, the layers: inputs (d, N) -> outputs (d, N), in the last layer -> (d, n)
    # What each layer keeps for the backward pass. The last one has n columns, so it fills only the start of its part.
    # x: inputs of the layers. mixed: values mixed by attention. between: states between attention and feed-forward.
    # u, inverse: normalized columns of a layer norm and their scale. slope, hidden: GELU's derivative and value.
    x, mixed, between = vector((layers + 1) * of_layer), vector(layers * of_layer), vector(layers * of_layer)
    u1, u2, inverse1, inverse2 = (
        vector(layers * of_layer),
        vector(layers * of_layer),
        vector(layers * rows),
        vector(layers * rows),
    )
    slope, hidden, qkv = vector(layers * m * rows), vector(layers * m * rows), vector(last * 3 * of_layer)
    p, w = vector(last * heads * length * rows), vector(last * heads * length * rows)
    selected, chosen, values = empty(n, d), empty(d, n), empty(n, d)
    query, keyed, seen = empty(n, d), empty(heads * n, d).reshape(heads, n, d), empty(heads * n, d).reshape(heads, n, d)
    p1, w1 = empty(heads * n, length), empty(heads * n, length)
    # The last layer reads tokens as rows, as the embedding has them; all others read columns.
    if last:
        transpose(states, matrix(x, 0, d, rows))
    # One loop with branches: each call of a part in this text would be compiled again.
    for layer in range(layers):
        a, columns = at[FIRST + OF_BLOCK * layer :], rows if layer < last else n
        start, inner = layer * of_layer, layer * m * rows
        mixture, after, y = (
            matrix(mixed, start, d, columns),
            matrix(between, start, d, columns),
            matrix(x, start + of_layer, d, columns),
        )
        residual = matrix(x, start, d, rows)
        # attention: residual (d, N) -> mixture (d, columns)
        if layer < last:
            layer_qkv, square = matrix(qkv, 3 * start, 3 * d, rows), heads * length * rows
            product(matrix(theta, a[QKV], 3 * d, d), residual, layer_qkv)
            # the attention's weights before and after dropout
            before, thinned = (
                matrix(p, layer * square, heads * length, rows),
                matrix(w, layer * square, heads * length, rows),
            )
            dropped = _taken(bits, drawn, heads * length, rows)
            attention(
                theta[a[QKV_BIAS] :], z, attention_bias, layer_qkv, before, thinned, mixture, dropped, level, scale
            )
            drawn += square
        else:
            if last:
                transpose(residual, states)
            # In the last layer only the predicted positions go on: 1 / T of the columns, from here to the loss.
            for i in range(n):
                for j in range(d):
                    selected[i, j] = states[positions[i] * n + i, j]
            dropped = _taken(bits, drawn, heads * n, length)
            single_query(
                theta, a, z, states, selected, attention_bias, query, keyed, p1, w1, seen, values, dropped, level, scale
            )
            drawn += heads * rows
            transpose(values, mixture)
            transpose(selected, chosen)
            residual = chosen
        # after = norm(residual + dropout(out(mixture))), then y = norm(after + dropout(outer(gelu(inner(after)))))
        sum1, sum2 = matrix(u1, start, d, columns), matrix(u2, start, d, columns)
        slopes, inside = matrix(slope, inner, m, columns), matrix(hidden, inner, m, columns)
        product(matrix(theta, a[OUT], d, d), mixture, sum1)
        dropped, more = _taken(bits, drawn, d, columns), _taken(bits, drawn + columns * d, d, columns)
        drawn += 2 * columns * d
        add_norm(
            sum1, theta[a[OUT_BIAS] :], residual, dropped, level, scale, theta[a[NORM1] :], theta[a[SHIFT1] :],
            inverse1[layer * rows :], after,
        )  # fmt: skip
        product(matrix(theta, a[INNER], m, d), after, slopes)
        gelu(slopes, theta[a[INNER_BIAS] :], inside)
        product(matrix(theta, a[OUTER], d, m), inside, sum2)
        add_norm(
            sum2, theta[a[OUTER_BIAS] :], after, more, level, scale, theta[a[NORM2] :], theta[a[SHIFT2] :],
            inverse2[layer * rows :], y,
        )  # fmt: skip
    # --- forward 3, the head: top (d, n) -> features (d, n) -> logits (V, n) -> losses (n,)
    top = matrix(x, layers * of_layer, d, n)
    head, head_slope, features = matrix(theta, at[HEAD], d, d), empty(d, n), empty(d, n)
    # In front of the head's layer norm stand no bias, residual or dropout: `zero` serves as the first two.
    v3, i3, nothing, zero = empty(d, n), vector(n), bits[:0].reshape(0, n), zeros(d, n)
    product(head, top, head_slope)
    gelu(head_slope, theta[at[HEAD_BIAS] :], v3)
    head_norm = theta[at[HEAD_NORM] :]
    add_norm(v3, zero.reshape(-1), zero, nothing, KEEP_ALL, scale, head_norm, theta[at[HEAD_SHIFT] :], i3, features)
    # Rows of zeros up to a multiple of 4, for the product with the transposed words below.
    logits = zeros(-(-z.ids // 4) * 4, n)
    product(words, features, logits[: z.ids])
    cross_entropy(logits[: z.ids], theta[at[OUTPUT] :], labels, targets, losses)

    # --- backward 3, the head: logits (V, n) -> d_features (d, n), the gradient of the last layer's output
    d_features, d_top, unused, unused_bias = empty(d, n), empty(d, n), empty(d, n), vector(d)
    # `logits` holds the gradient now. This product sets the words' gradient, as decoder; `embed_backward`, which adds
    # to it, must come later.
    outer_product(logits[: z.ids], features, matrix(grad, at[WORDS], z.ids, d))
    add_rows(logits[: z.ids], grad[at[OUTPUT] :])
    product(transposed(words), logits, d_features)
    add_norm_backward(
        d_features, v3, i3, nothing, KEEP_ALL, scale, head_norm, d_top, unused, unused_bias,
        grad[at[HEAD_NORM] :], grad[at[HEAD_SHIFT] :],
    )  # fmt: skip
    _multiply(d_top, head_slope)
    outer_product(d_top, top, matrix(grad, at[HEAD], d, d))
    add_rows(d_top, grad[at[HEAD_BIAS] :])
    product(transposed(head), d_top, d_features)
    # --- backward 2, the layers from the last to the first: d_y -> d_x, of a layer's output and input
    d_states, d_values, d_selected = zeros(rows, d), empty(n, d), empty(n, d)
    d_x, d_qkv = empty(d, rows), empty(3 * d, rows)
    # (d, n) above the last layer, (d, N) above the others
    d_y = d_features
    for layer in range(last, -1, -1):
        a, columns = at[FIRST + OF_BLOCK * layer :], rows if layer < last else n
        start, inner = layer * of_layer, layer * m * rows
        # The backward pass meets the dropouts in reverse, and counts their places down.
        drawn -= 2 * columns * d
        dropped, more = _taken(bits, drawn, d, columns), _taken(bits, drawn + columns * d, d, columns)
        d_product, d_between, d_more = empty(d, columns), empty(d, columns), empty(d, columns)
        d_hidden, d_mixed, d_residual = empty(m, columns), empty(d, columns), empty(d, columns)
        # the feed-forward block: d_y -> d_between, the gradient of `after` above
        add_norm_backward(
            d_y, matrix(u2, start, d, columns), inverse2[layer * rows :], more, level, scale, theta[a[NORM2] :],
            d_product, d_between, grad[a[OUTER_BIAS] :], grad[a[NORM2] :], grad[a[SHIFT2] :],
        )  # fmt: skip
        outer_product(d_product, matrix(hidden, inner, m, columns), matrix(grad, a[OUTER], d, m))
        product(transposed(matrix(theta, a[OUTER], d, m)), d_product, d_hidden)
        _multiply(d_hidden, matrix(slope, inner, m, columns))
        outer_product(d_hidden, matrix(between, start, d, columns), matrix(grad, a[INNER], m, d))
        add_rows(d_hidden, grad[a[INNER_BIAS] :])
        product(transposed(matrix(theta, a[INNER], m, d)), d_hidden, d_more)
        _add(d_between, d_more)
        # the attention's output: d_between -> d_mixed and d_residual, each (d, columns)
        add_norm_backward(
            d_between, matrix(u1, start, d, columns), inverse1[layer * rows :], dropped, level, scale,
            theta[a[NORM1] :], d_product, d_residual, grad[a[OUT_BIAS] :], grad[a[NORM1] :], grad[a[SHIFT1] :],
        )  # fmt: skip
        outer_product(d_product, matrix(mixed, start, d, columns), matrix(grad, a[OUT], d, d))
        product(transposed(matrix(theta, a[OUT], d, d)), d_product, d_mixed)
        # attention: d_mixed and d_residual -> d_x (d, N); of all layers, the last one alone spreads n columns over N
        if layer < last:
            layer_qkv, square = matrix(qkv, 3 * start, 3 * d, rows), heads * length * rows
            before, thinned = (
                matrix(p, layer * square, heads * length, rows),
                matrix(w, layer * square, heads * length, rows),
            )
            drawn -= square
            attention_backward(
                z, layer_qkv, before, thinned, d_mixed, _taken(bits, drawn, heads * length, rows), level, scale, d_qkv
            )
            outer_product(d_qkv, matrix(x, start, d, rows), matrix(grad, a[QKV], 3 * d, d))
            add_rows(d_qkv, grad[a[QKV_BIAS] :])
            product(transposed(matrix(theta, a[QKV], 3 * d, d)), d_qkv, d_x)
            _add(d_x, d_residual)
        else:
            transpose(d_mixed, d_values)
            transpose(d_residual, d_selected)
            drawn -= heads * rows
            single_query_backward(
                theta, grad, a, z, states, selected, query, keyed, p1, w1, seen, d_values,
                _taken(bits, drawn, heads * n, length), level, scale, d_states, d_selected,
            )  # fmt: skip
            for i in range(n):
                for j in range(d):
                    d_states[positions[i] * n + i, j] += d_selected[i, j]
            if last:
                transpose(d_states, d_x)
        d_y = d_x
    # --- backward 1, the embedding: d_states (N, d) -> the gradients of words, positions, types and the norm
    if last:
        transpose(d_x, d_states)
    sums = zeros(2, d)
    d_words, d_position = matrix(grad, at[WORDS], z.ids, d), matrix(grad, at[POSITIONS], length, d)
    dropped = _taken(bits, 0, rows, d)
    embed_backward(d_states, u0, inverse0, norm, tokens, z.padding, dropped, level, scale, d_words, d_position, sums)
    for j in range(d):
        grad[at[NORM] + j] = sums[0, j]
        grad[at[SHIFT] + j] = sums[1, j]
    for t in range(length):
        for j in range(d):
            # Every token has the type 0 and one position: its gradient is the sum of the positions'.
            grad[at[TYPES] + j] += d_position[t, j]


def compile_step(note: Callable[[], object] = lambda: None) -> None:
    """Compile the step, or read it from the disk, before the first batch needs it; `note` is called if it compiles."""
    # The signature with which `loss_and_gradient` is called, so that the first batch finds it compiled.
    floats, ints, table = types.float32[::1], types.int64[::1], types.float32[:, ::1]
    sizes = numba.typeof(Sizes(*[0] * len(Sizes._fields)))
    of_batch = (types.int64[:, ::1], ints, table, ints, table, types.int16[::1], types.int16, types.float32, floats)
    listener = _Listener(note)
    # A step that is read from the disk is no event: `note` is called only when one has to wait.
    with event.install_listener("numba:compile", listener):
        loss_and_gradient.compile((floats, floats, ints, sizes, *of_batch))  # type: ignore[attr-defined]


class _Listener(event.Listener):  # type: ignore[misc]
    def __init__(self, note: Callable[[], object]) -> None:
        self._note, self._is_new = note, True

    def on_start(self, event: Any) -> None:
        # every part has an event of its own: the first one is noted
        if self._is_new:
            self._note()
        self._is_new = False

    def on_end(self, event: Any) -> None:
        pass


@part
def _taken(bits: Bits, start: int, rows: int, columns: int) -> Bits:
    """Return the bits of (rows, columns) values, or of none where nothing is dropped."""
    if bits.shape[0] == 0:
        return bits.reshape(0, columns)
    return bits[start : start + rows * columns].reshape(rows, columns)


@part
def _multiply(x: Floats, y: Floats) -> None:
    for j in range(x.shape[0]):
        for n in range(x.shape[1]):
            x[j, n] *= y[j, n]


@part
def _add(x: Floats, y: Floats) -> None:
    for j in range(x.shape[0]):
        for n in range(x.shape[1]):
            x[j, n] += y[j, n]
