"""Random cotangents of the logits whose covariance is the Fisher's, and control variates of known mean.

Shapes: m predicted positions of B sequences, V vocabulary, d width of the decoder's input.
"""

from __future__ import annotations

import torch

from isoloss import seeds
from isoloss.measures.flatness.capture import Decoder

_CHUNK = 1 << 22  # numbers worked on at a time, so that no second buffer of the logits' shape is needed


def root_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Return (m, V): the square roots of the softmax of the logits, in float32 or their own wider type."""
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for part in _parts(wide):
        part.copy_(part.log_softmax(dim=-1).mul_(0.5).exp_())
    return wide


def integrated_(root_p: torch.Tensor, counts: torch.Tensor, sequences: range, *, seed: int, probe: int) -> torch.Tensor:
    """Turn square roots of probabilities into u = S v, S = diag(sqrt p) - p sqrt(p)^T, in place, and return them.

    v are random signs, a function of the seed, the sequence and the probe. E[u u^T] = diag(p) - p p^T: the labels are
    integrated out. With w = sqrt(p) v, u is w - w^2 sum(w), as v^2 = 1.

    Args:
        root_p: (m, V) square roots of probabilities.
        counts: (B,) predicted positions of each sequence.
        sequences: Places of the B sequences in the stream.
        seed: The measurement's.
        probe: Which of several.
    """
    start = 0
    for sequence, count in zip(sequences, counts.tolist(), strict=True):
        w = root_p[start : start + count]
        w.mul_(random_signs(w.shape, w.device, seed, "probes", sequence, probe))
        start += count
    for w in _parts(root_p):
        w.sub_(w.square().mul_(w.sum(dim=-1, keepdim=True)))
    return root_p


def observed_(
    root_p: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, sequences: range, *, seed: int
) -> torch.Tensor:
    """Turn square roots of probabilities into e (p - onehot(y)), in place: y the labels, e one random sign a position.

    The signs make the positions' gradients add up in square: E||sum_r e_r g_r||^2 = sum_r ||g_r||^2.
    """
    root_p.square_()
    root_p[torch.arange(len(root_p), device=root_p.device), targets.to(root_p.device)] -= 1
    signs = [
        random_signs((count, 1), root_p.device, seed, "observed", sequence)
        for sequence, count in zip(sequences, counts.tolist(), strict=True)
    ]
    return root_p.mul_(torch.cat(signs))


def random_signs(
    shape: torch.Size | tuple[int, ...], device: torch.device, seed: int, *names: str | int
) -> torch.Tensor:
    """Return `shape` random signs of the stream `names`, int8; a CUDA device draws its own, other than a CPU's."""
    place = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(device=place).manual_seed(seeds.derive(seed, *names))
    signs = torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.int8, device=place)
    return signs.mul_(2).sub_(1).to(device)


class Controls:
    """Control variates of one batch: what the cotangents give less what they give on average, by sequence.

    Both are squared norms of a part of each position's gradient that has a closed form. With g_r = W^T u_r the
    cotangent of the decoder's input h_r at position r, and h~ = (h, 1):

    - `sum_r |u_r h~_r^T|^2`, the decoder's own gradients, with the mean `sum_r |h~_r|^2 (1 - sum_c p_c^2)`;
    - `sum_r |g_r|^2`, what reaches the layers below, with the mean `sum_r (sum_c p_c |w_c|^2 - |sum_c p_c w_c|^2)`.

    Args:
        root_p: (m, V) square roots of the probabilities.
        hidden: (m, d) the decoder's inputs.
        decoder: Its weight and bias.
        rows: (m,) the sequence of each position.
        num_sequences: B.
    """

    NUMBER = 2

    def __init__(
        self, root_p: torch.Tensor, hidden: torch.Tensor, decoder: Decoder, rows: torch.Tensor, num_sequences: int
    ) -> None:
        self._rows, self._num_sequences = rows, num_sequences
        self._squares = 1 + hidden.to(root_p.dtype).square().sum(dim=1)
        weight = decoder.weight.to(root_p.dtype)
        squares = weight.square().sum(dim=1)
        below, above = [], []
        for part in _parts(root_p):
            p = part.square()
            above.append(1 - p.square().sum(dim=1))
            below.append(p @ squares - (p @ weight).square().sum(dim=1))
        own = self._squares * torch.cat(above)
        self._means = torch.stack([self._by_sequence(own), self._by_sequence(torch.cat(below))], dim=1)

    def centred(self, cotangent: torch.Tensor, hidden_cotangent: torch.Tensor) -> torch.Tensor:
        """Return (B, 2) float64: the control variates of cotangents (m, V) and W^T u (m, d), less their means."""
        own = self._by_sequence(cotangent.square().sum(dim=1) * self._squares)
        below = self._by_sequence(hidden_cotangent.to(cotangent.dtype).square().sum(dim=1))
        return torch.stack([own, below], dim=1) - self._means

    def _by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(self._num_sequences, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self._rows.to(values.device), values.double())


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split (m, V) so that each part has few enough numbers."""
    return torch.split(rows, max(1, _CHUNK // max(1, rows.shape[1])))
