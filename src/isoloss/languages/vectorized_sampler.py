"""The draws of `alias_sampling` in torch, bit for bit: all sentences take a step at a time, on any device.

uint64 numbers are int64 tensors of the same bits: sums and products wrap around, and shifts are masked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isoloss.languages.alias_sampling import AliasTables, Rewrites
from isoloss.text.sentences import Sentences

_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_LOW = 2**32 - 1
_UNIT = 2.0**-53
_CELLS = 1 << 25  # numbers of the sentences that step together, at most


def to_device(tables: Any, device: torch.device) -> Any:
    """Return alias tables, `Rewrites` or an array as tensors on `device`."""
    if isinstance(tables, tuple):
        return type(tables)(*(to_device(part, device) for part in tables))
    return torch.as_tensor(tables.astype(np.int64) if tables.dtype == np.int32 else tables).to(device)


def philox(seed: int, sentences: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """Return four (n,) int64: Philox4x64-10 with the key (seed, 0) at the counters (block, sentence, 0, 0)."""
    zero = torch.zeros_like(sentences)
    a, b, c, d = zero + block, sentences, zero, zero
    k0, k1 = seed, 0
    for _ in range(_ROUNDS):
        high0, low0 = _product(a, _M0)
        high1, low1 = _product(c, _M1)
        a, b, c, d = high1 ^ b ^ _signed(k0), low1, high0 ^ d ^ _signed(k1), low0
        k0, k1 = k0 + _W0, k1 + _W1
    return a, b, c, d


def draw(bits: torch.Tensor, tables: AliasTables, rows: torch.Tensor) -> torch.Tensor:
    """Return (n,) int64: an outcome of each row, as `alias_sampling.draw`; tables on the rows' device."""
    offsets, threshold, kept, other = _tensors(tables)
    begin = offsets[rows]
    width = offsets[rows + 1] - begin
    position = _shifted(bits, 11).double() * _UNIT * width
    cell = torch.minimum(position.long(), width - 1)
    slot = begin + cell
    return torch.where(position - cell < threshold[slot], kept[slot], other[slot])


def chains(
    initial: AliasTables,
    transition: AliasTables,
    emission: AliasTables,
    *,
    numbers: torch.Tensor,
    length: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, length) tokens and states, as `alias_sampling.draw_chains`; the tables are tensors on one device."""
    n, numbers = len(numbers), numbers.to(_tensors(initial)[0].device)
    tokens, states = numbers.new_empty(n, length), numbers.new_empty(n, length)
    words: tuple[torch.Tensor, ...] = ()
    for t in range(length):
        if t % 2 == 0:
            words = philox(seed, numbers, t // 2)
        to_state, to_token = words[2 * (t % 2) : 2 * (t % 2) + 2]
        state = draw(to_state, transition, states[:, t - 1]) if t else draw(to_state, initial, numbers.new_zeros(n))
        states[:, t], tokens[:, t] = state, draw(to_token, emission, state)
    return tokens, states


def derivations(
    rewrites: Rewrites, *, numbers: torch.Tensor, seed: int, root: int, longest: int, pad: int, trees: bool
) -> Sentences:
    """Return the derivations of (n,) numbers, as `alias_sampling.draw_derivations`.

    The tables are tensors on one device. Every sentence that is not finished rewrites one symbol a step.
    """
    n, size = len(numbers), max(1, _CELLS // (longest + 1))
    numbers = numbers.to(_tensors(rewrites.tables)[0].device)
    parts = [_derive(rewrites, part, seed, root, longest, pad, trees) for part in torch.split(numbers, size)]
    tokens, lengths, nodes = zip(*parts, strict=True)
    every_length = torch.cat(lengths)
    every_node = None
    if trees:
        most = max(part.shape[1] for part in nodes)
        every_node = torch.cat(
            [torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1]), value=-1) for part in nodes]
        )
    return Sentences(torch.cat(tokens)[:, : int(every_length.max()) if n else 0], every_length, every_node)


def _derive(
    rewrites: Rewrites, sentences: torch.Tensor, seed: int, root: int, longest: int, pad: int, trees: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    left, right, kinds, inside, _ = _tensors(rewrites[1:])
    n, columns = len(sentences), inside.shape[1]
    pairs, not_emissions = kinds.tolist()
    stack = sentences.new_full((n, longest + 1), root)  # rows of the tables
    height, lengths = sentences.new_ones(n), sentences.new_zeros(n)
    tokens = sentences.new_full((n, longest), pad)
    nodes: list[torch.Tensor] = []
    live, used = torch.arange(n, device=sentences.device), 0
    words = philox(seed, sentences, 0)
    if root == len(inside) * columns:
        stack[:, 0], used = draw(words[0], rewrites.tables, stack[:, 0]), 2
    while len(live):
        if used and used % 4 == 0:
            for word, own in zip(words, philox(seed, sentences[live], used // 4), strict=True):
                word[live] = own
        top = height[live] - 1
        row = stack[live, top]
        rule = draw(words[used % 4][live], rewrites.tables, row)
        if trees:
            nodes.append(sentences.new_full((n, 3), -1))
            nodes[-1][live] = torch.stack([lengths[live], top, row // columns], dim=1)
        stack[live, top] = left[rule] * columns + row % columns  # a chain; pairs and emissions follow
        pair = torch.nonzero(rule < pairs).flatten()
        at, below, width = live[pair], top[pair], row[pair] % columns
        b, c = left[rule[pair]], right[rule[pair]]
        u = _split(words[used % 4 + 1][at], rewrites, rule[pair], width) if columns > 1 else width
        stack[at, below], stack[at, below + 1] = c * columns + width - u, b * columns + u
        height[at] += 1
        end = torch.nonzero(rule >= not_emissions).flatten()
        at = live[end]
        tokens[at, lengths[at]] = left[rule[end]]
        lengths[at] += 1
        height[at] -= 1
        live = live[height[live] > 0]
        used += 1 if columns == 1 else 2
    return tokens, lengths, _closed(nodes, lengths, longest)


def _split(bits: torch.Tensor, rewrites: Rewrites, rule: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Return u, as `alias_sampling._split`."""
    left, right, _, inside, scale = _tensors(rewrites[1:])
    u = torch.arange(1, inside.shape[1], device=width.device)
    rest = (width[:, None] - u).clamp_(min=0)  # no symbol yields 0 tokens
    products = inside[left[rule], 1:] * inside[right[rule]].gather(1, rest)
    total = products.mul_(scale[rule, width][:, None]).long().cumsum(1)
    target = torch.minimum(_shifted(bits, 12), total[:, -1] - 1)
    return 1 + (total <= target[:, None]).sum(1)


def _closed(nodes: list[torch.Tensor], lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Return (n, M, 3), as `alias_sampling._close`: a node stops where the first symbol that waits behind it begins."""
    if not nodes:
        return lengths.new_empty(len(lengths), 0, 3)
    starts = lengths.new_zeros(len(lengths), longest + 2)
    starts[:, 0] = lengths
    for node in reversed(nodes):
        own = torch.nonzero(node[:, 1] >= 0).flatten()
        start, waiting = node[own, 0], node[own, 1]
        node[own, 1] = starts[own, waiting]
        starts[own, waiting + 1] = start
    return torch.stack(nodes, dim=1)


def _product(x: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower 64 bits of x m, by halves of 32 bits."""
    x0, x1 = x & _LOW, _shifted(x, 32)
    m0, m1 = m & _LOW, m >> 32
    cross0, cross1 = x0 * m1, x1 * m0
    middle = _shifted(x0 * m0, 32) + (cross0 & _LOW) + (cross1 & _LOW)
    return x1 * m1 + _shifted(cross0, 32) + _shifted(cross1, 32) + (middle >> 32), x * _signed(m)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Return x >> by as of an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """Return the int64 with the bits of the number's lowest 64."""
    return ((number + 2**63) & (2**64 - 1)) - 2**63


def _tensors(tables: tuple[object, ...]) -> tuple[torch.Tensor, ...]:
    return tables  # type: ignore[return-value]
