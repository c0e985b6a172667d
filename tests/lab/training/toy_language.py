"""A language that a tiny model learns: pairs of tokens, the second a copy of the first or noise, of known entropy."""

import math

import torch

from isoloss.lab.languages.base import Language, Sentences
from isoloss.seeds import generator as stream


class PairLanguage(Language):
    """Sentences of two pairs: (a, b, c, d), b = a and d = c with probability 1 - noise, otherwise uniform.

    With `is_ragged`, half the sentences are one pair long.
    """

    vocab_size, max_length = 8, 4
    pad_id, mask_id = 8, 9
    model_vocab_size = 10
    vocabulary = tuple("abcdefgh")

    def __init__(self, *, noise=0.1, is_ragged=False):
        self.noise, self.is_ragged = noise, is_ragged

    def sample(self, n, *, generator=None, latent=False):
        first = torch.randint(0, 8, (n, 2), generator=generator)
        is_noise = torch.rand(n, 2, generator=generator) < self.noise
        second = torch.where(is_noise, torch.randint(0, 8, (n, 2), generator=generator), first)
        tokens = torch.stack([first, second], dim=-1).reshape(n, 4)
        lengths = torch.full((n,), 4)
        if self.is_ragged:
            lengths -= 2 * torch.randint(0, 2, (n,), generator=generator)
        tokens = tokens.masked_fill(torch.arange(4) >= lengths[:, None], self.pad_id)
        return Sentences(tokens, lengths)

    def batch(self, step, n, *, seed):
        return self.sample(n, generator=stream(seed, "data", step))

    def entropy_nats(self):
        """Return the entropy of a token given all others: its partner has 1 - noise + noise / 8, the rest noise / 8."""
        match, other = 1 - self.noise * 7 / 8, self.noise / 8
        return -match * math.log(match) - (7 * other * math.log(other) if other else 0.0)
