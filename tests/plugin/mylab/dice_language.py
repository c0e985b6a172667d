"""The language itself: it draws sentences and knows the exact probability of every token."""

import torch

from isoloss.lab.languages.base import ExactLanguage, Labeling, Sentences, cpu_generator
from mylab.dice import DiceConfig


class Dice(ExactLanguage):
    """Sentences of `length` rolls, each side with its own probability."""

    task_patterns = DiceConfig.task_patterns

    def __init__(self, config: DiceConfig) -> None:
        self._config, self.max_length = config, config.length
        self.set_vocabulary(tuple(str(side + 1) for side in range(config.sides)))
        self.device, self.dtype = torch.device("cpu"), torch.float64
        weights = 1 + config.bias * torch.arange(config.sides, dtype=torch.float64)
        self.probs = weights / weights.sum()

    def sample(self, n, *, generator=None, latent=False):
        rolls = torch.multinomial(self.probs, n * self.max_length, True, generator=cpu_generator(n, generator))
        return Sentences(rolls.view(n, self.max_length), torch.full((n,), self.max_length))

    # ids and lengths are checked; the id `vocab_size`, with probability 1 here, stands for an unknown or absent token

    def _log_prob(self, ids, lengths):
        return torch.nn.functional.pad(self.probs, (0, 1), value=1.0).log()[ids].sum(1)

    def _probabilities(self, ids, positions):
        return self.probs.expand(*positions.shape, self.vocab_size).clone()

    def labeling(self, name):
        if name != "total":
            return super().labeling(name)
        return Labeling(classes=("even", "odd"), label=lambda sentences: (sentences.tokens + 1).sum(1) % 2)
