"""Random cotangents of the logits whose covariance is the Fisher's, and control variates of mean 0.

Shapes: m predicted positions of B sequences, V vocabulary, d width of the decoder's input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from isoloss import seeds
from isoloss.flatness._ghost.capture import Decoder

NUM_INTERMEDIATES = 3  # whose cotangents are controls, at most
NUM_CONTROLS = 3 + 2 + NUM_INTERMEDIATES + 1 + 3  # squares, products, the first intermediate's square, further probes'
# numbers worked on at a time, so that no second buffer of the logits' shape is needed; on a CPU they stay in its cache
_CHUNK = {"cpu": 1 << 18}
_CHUNK_ELSEWHERE = 1 << 22
_ROWS = 256  # positions that a product with the decoder's weight is taken of at a time, so that they share reading it


def root_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return (m, V): the square roots of the softmax of the logits, in float32 or their own wider type."""
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for part in _parts(wide):
        torch.sqrt(part.softmax(dim=-1), out=part)
    return wide


def exact_labels_(
    root_p: torch.Tensor, counts: torch.Tensor, sequences: range, *, seed: int, probe: int
) -> torch.Tensor:
    """Turn square roots of probabilities into u = S v, S = diag(sqrt p) - p sqrt(p)^T, in place, and return them.

    v are random signs, a function of the seed, the sequence and the probe. E[u u^T] = diag(p) - p p^T: the labels are
    integrated out. With w = sqrt(p) v, u is w - w^2 sum(w), as v^2 = 1.
    """
    streams = streams_of(counts, root_p.shape[1], sequences, "probes", probe)
    return with_probe_(root_p, counts, packed_probes(streams, root_p.device, seed)[0])


def with_probe_(root_p: torch.Tensor, counts: torch.Tensor, octets: torch.Tensor) -> torch.Tensor:
    """Do as `exact_labels_` with the signs of one row of `packed_probes`, a stream for each sequence."""
    sizes, vocabulary, start, read = counts.tolist(), root_p.shape[1], 0, 0
    # signs are drawn 8 to the octet, and unpacked for a few sequences at a time, or a few positions of a long one: all
    # of them, in the type of what they multiply, would take the logits' memory once more
    step = _limit(root_p) // max(1, vocabulary * max(sizes))  # sequences whose signs are unpacked together
    few = max(8, _limit(root_p) // vocabulary // 8 * 8)  # positions, whose signs end with an octet
    parts = [[min(few, count - done)] for count in sizes for done in range(0, count, few)]
    for counts_of_part in [sizes[first : first + step] for first in range(0, len(sizes), step)] if step else parts:
        numbers = [count * vocabulary for count in counts_of_part]
        rows = root_p[start : start + sum(numbers) // vocabulary]
        length = sum(map(_octets, numbers))
        rows.mul_(unpacked_probes(octets[read : read + length], numbers).view(rows.shape).to(rows.device))
        start, read = start + len(rows), read + length
    for w in _parts(root_p):
        w.sub_(w.square().mul_(w.sum(dim=-1, keepdim=True)))
    return root_p


def given_labels_(
    root_p: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, sequences: range, *, seed: int
) -> torch.Tensor:
    """Turn square roots of probabilities into e (p - onehot(y)), in place: y the labels, e one random sign a position.

    The signs make the positions' gradients add up in square: E||sum_r e_r g_r||^2 = sum_r ||g_r||^2.
    """
    # p - onehot(y) is the cotangent of the cross-entropy
    root_p.square_()
    root_p[torch.arange(len(root_p), device=root_p.device), targets.to(root_p.device)] -= 1
    octets = packed_probes(streams_of(counts, 1, sequences, "observed"), root_p.device, seed)[0]
    return root_p.mul_(unpacked_probes(octets, counts.tolist())[:, None].to(root_p.device))


def rademacher(shape: torch.Size | tuple[int, ...], device: torch.device, seed: int, *names: str | int) -> torch.Tensor:
    """Return `shape` random signs of the stream `names`, int8; a CUDA device draws its own, other than a CPU's."""
    count = math.prod(shape)
    octets = packed_probes([(count, names)], device, seed)[0]
    return unpacked_probes(octets, [count]).view(tuple(shape)).to(device)


Streams = Sequence[tuple[int, tuple[str | int, ...]]]  # how many signs, and the stream's name


def streams_of(counts: torch.Tensor, width: int, sequences: range, purpose: str, *probe: int) -> Streams:
    """Return the streams of B sequences, each of `width` signs for each of its `counts` (B,) positions."""
    pairs = zip(sequences, counts.tolist(), strict=True)
    return [(count * width, (purpose, sequence, *probe)) for sequence, count in pairs]


def packed_probes(streams: Streams, device: torch.device, seed: int, *, copies: int = 1) -> torch.Tensor:
    """Return (copies, octets) uint8: independent random signs of streams, 8 to the octet, end to end."""
    source = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(device=source)
    octets = []
    for count, names in streams:
        # each sequence has a stream of its own, so that no sign depends on how the sequences are cut into batches
        generator.manual_seed(seeds.derive(seed, *names))
        size = (copies, _octets(count))
        octets.append(torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device=source))
    return torch.cat(octets, dim=1)


def unpacked_probes(octets: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the signs of a row of `packed_probes`, int8, end to end: `counts` of each stream."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    signs = (octets[:, None] >> shifts).bitwise_and_(1).view(torch.int8).mul_(2).sub_(1).view(-1)
    if not any(count % 8 for count in counts):
        return signs
    parts = torch.split(signs, [8 * _octets(count) for count in counts])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _octets(count: int) -> int:
    return (count + 7) // 8


class Controls:
    """Control variates of one batch: what the cotangents give minus what they give on average, by sequence.

    With g_r = W^T u_r the cotangent of the decoder's input h_r at position r and w the mean row of W, they are squared
    norms of a part of each position's gradient that has a closed form, and products of two positions, whose signs are
    independent. Where there are too few sequences for all, the first ones are used:

    - `sum_r |u_r h_r^T|^2`, the decoder's own gradient of its weight, with the mean `sum_r |h_r|^2 (1 - sum_c p_c^2)`;
    - `sum_r |g_r|^2`, what reaches the layers below, with the mean `sum_r (sum_c p_c |w_c|^2 - |sum_c p_c w_c|^2)`;
    - `sum_{r != s} <g_r, g_s>`, with the mean 0: the cross terms of the layers below, were these a multiple of the
      identity;
    - `sum_{r != s} <g_r, w> <g_s, w>`, with the mean 0: the same along the direction that the decoder's rows share,
      of which less reaches the layers or more than of all others;
    - `sum_{r != s} <b_r, b_s>`, with the mean 0, for each of up to 3 intermediates: outputs in the model whose
      cotangent b_r at a position depends on u_r alone;
    - `sum_r |b_r|^2` of the first intermediate, with the mean over further probes in the place of its own;
    - the first two, their mean over these probes, which takes from the noise of that mean;
    - `sum_r |u_r|^2`, the gradient of the decoder's bias, with the mean `sum_r (1 - sum_c p_c^2)`, and its mean over
      these probes. They are apart from the weight's, because each then keeps its scale when the model is rescaled:
      estimates by them go with the rescaling exactly, as the minimal trace needs.
    """

    def __init__(
        self,
        root_p: torch.Tensor,
        hidden: torch.Tensor,
        decoder: Decoder,
        rows: torch.Tensor,
        num_sequences: int,
    ) -> None:
        self._rows, self._num_sequences = rows, num_sequences
        self._squares = _squared_norms(hidden.to(root_p.dtype))  # (m,)
        self._shared = decoder.weight.mean(dim=0, dtype=root_p.dtype)
        self._has_bias = decoder.bias is not None  # where there is none, its control would only double the weight's
        above, below = label_means(root_p, decoder.weight)
        self._means = self._by_sequence(torch.stack([self._squares * above, below, above * self._has_bias], dim=1))

    def centered(
        self,
        cotangent: torch.Tensor,
        hidden_cotangent: torch.Tensor,
        intermediates: Sequence[torch.Tensor] = (),
        others: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Return (B, `NUM_CONTROLS`) float64: the control variates minus their means; 0 where one has nothing."""
        along = (hidden_cotangent.to(cotangent.dtype) @ self._shared)[:, None]
        crossed = [self._crossed(values) for values in (hidden_cotangent, along, *intermediates)]
        crossed += [torch.zeros_like(crossed[0])] * (NUM_INTERMEDIATES - len(intermediates))
        first, further = torch.zeros_like(crossed[0]), torch.zeros_like(self._means)
        if intermediates and others:
            # the mean of |b_r|^2 has no closed form behind several layers, so that further probes of these layers alone
            # estimate it
            mean = sum(_squared_norms(values).double() for values, _ in others) / len(others)
            first = self._by_sequence(_squared_norms(intermediates[0]).double() - mean)
            further = torch.stack([squares for _, squares in others]).mean(dim=0)
        squares, between = self.squares(cotangent, hidden_cotangent), torch.stack([*crossed, first], dim=1)
        # in the order of their worth: where sequences are few, `ClusteredRatioEstimator` takes the first ones
        return torch.cat([squares[:, :2], between, further[:, :2], squares[:, 2:], further[:, 2:]], dim=1)

    def squares(self, cotangent: torch.Tensor, hidden_cotangent: torch.Tensor) -> torch.Tensor:
        """Return (B, 3) float64: the squared norms of u (m, V) times h, W^T u (m, d) and u, minus their means."""
        of_bias, below = _squared_norms(cotangent), _squared_norms(hidden_cotangent.to(cotangent.dtype))
        squares = torch.stack([self._squares * of_bias, below, of_bias * self._has_bias], dim=1)
        return self._by_sequence(squares) - self._means

    def _crossed(self, values: torch.Tensor) -> torch.Tensor:
        """Return (B,): the products of any two different rows (m, n) of a sequence, summed; 0 where there is one."""
        values = values.double()
        # sum_{r != s} <b_r, b_s> = sum_r <b_r, B - b_r> with B the sum over the sequence: no matrix of pairs
        others = self._by_sequence(values)[self._rows.to(values.device)] - values
        return self._by_sequence((values * others).sum(dim=1))

    def _by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Return (B, ...) float64: the sums over the rows (m, ...) of each sequence."""
        sums = torch.zeros(self._num_sequences, *values.shape[1:], dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self._rows.to(values.device), values.double())


def label_means(root_p: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (m,) each: `1 - sum_c p_c^2`, and `sum_c p_c |w_c|^2 - |sum_c p_c w_c|^2` of the weight's rows w_c (V, d).

    The probabilities are made, and the weight widened, in blocks of many positions and few ids: a product of few
    positions with all ids takes as long as reading the whole weight.
    """
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=root_p.dtype).square()
    above, below = [], []
    for roots in torch.split(root_p, _ROWS):
        size = max(1, _limit(root_p) // max(1, len(roots)))
        purity, mean_square = roots.new_zeros(len(roots)), roots.new_zeros(len(roots))
        mean = roots.new_zeros(len(roots), weight.shape[1])
        blocks = (torch.split(roots, size, dim=1), torch.split(weight, size), torch.split(squares, size))
        for root, part, square in zip(*blocks, strict=True):
            p = root.square()
            purity += _squared_norms(p)
            mean_square.addmv_(p, square)
            mean.addmm_(p, part.to(p.dtype))
        above.append(1 - purity)
        below.append(mean_square - _squared_norms(mean))
    return torch.cat(above), torch.cat(below)


def _squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return (m,): the squared norms of rows (m, n), without a buffer of their shape."""
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split rows (m, V) so that each part has few enough numbers."""
    return torch.split(rows, max(1, _limit(rows) // max(1, rows.shape[1])))


def _limit(rows: torch.Tensor) -> int:
    return _CHUNK.get(rows.device.type, _CHUNK_ELSEWHERE)
