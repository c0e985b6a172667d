"""A language: rolls of a loaded die. The config needs no torch, so that `isoloss --help` stays fast."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from isoloss.config import LanguageConfig, setting


@dataclass(frozen=True, kw_only=True)
class DiceConfig(LanguageConfig):
    """Rolls of a loaded die: tokens that are independent of each other."""

    task_patterns: ClassVar[Mapping[str, str]] = {"total": "whether the rolls add up to an even number (dice)"}
    kind: Literal["dice"] = "dice"
    sides: int = setting(6, minimum=2)
    """Tokens of the language."""
    length: int = setting(8, minimum=1)
    """Tokens in a sentence."""
    bias: float = setting(0.5, minimum=0)
    """How much more probable each side is than the one before it."""

    def build(self, progress: Any = None) -> Any:
        """Return the language."""
        from mylab.dice_language import Dice

        return Dice(self)
