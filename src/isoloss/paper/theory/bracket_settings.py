"""What the study of the bracket language runs: the options of `isoloss theory brackets`. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isoloss.config import check, setting
from isoloss.errors import IsolossError

LENGTHS = (4, 6, 8, 10)  # brackets in a sentence: 48 to 5,040 inputs
_MAX_TABLE = 1 << 26  # numbers of the training sets of one size


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `isoloss.paper.theory.brackets.study` runs; checked where it is made."""

    lengths: tuple[int, ...] = (6, 8, 10)
    """Brackets in a sentence: of 4, 6, 8 and 10, increasing."""
    width: int = setting(16, minimum=2, maximum=1024)
    """Neurons of the descent from random weights."""
    steps: int = setting(1500, minimum=1)
    """Steps of each descent."""
    samples: tuple[int, ...] = setting((2, 4, 8, 16), minimum=1)
    """Strings in a downstream training set."""
    trials: int = setting(4096, minimum=2)
    """Training sets of each size."""
    draws: int = setting(3, minimum=2)
    """Draws of random features for the width that they need."""
    seed: int = 0
    """Decides all random numbers."""

    def __post_init__(self) -> None:
        check(self)

    def check_fields(self) -> None:
        """Refuse lengths that cannot be visited, an order that is not increasing, and too many training sets."""
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths) & set(LENGTHS)):
            raise IsolossError(
                f"the lengths are {_list(self.lengths)}; choose from {_list(LENGTHS)}, increasing, to visit every input"
            )
        if not self.samples or list(self.samples) != sorted(set(self.samples)):
            raise IsolossError(f"the sizes of training sets are {_list(self.samples)}; they must be increasing")
        if self.trials * self.samples[-1] > _MAX_TABLE:
            raise IsolossError(
                f"{self.trials} training sets of {self.samples[-1]} strings are too many: at most {_MAX_TABLE} strings"
            )

    @property
    def num_steps(self) -> int:
        """Steps of all descents: one for each length, and one from the random features of the shortest."""
        return self.steps * (len(self.lengths) + 1)


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"
