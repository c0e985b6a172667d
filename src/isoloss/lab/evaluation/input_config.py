"""How inputs for a checkpoint are read. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isoloss import config as configs
from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.runs import checkpoint_of
from isoloss.text import tokenizers

_FOR_MASKED = ("masking", "fraction", "mask_id")
_FOR_TEXT = ("column", "split", "tokenizer", "length", "mask_id")


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """How text or token ids become inputs."""

    column: str | None = setting(None, omit_default=True)
    """For JSON lines and datasets: the field or column with the text; default: text."""
    split: str | None = setting(None, omit_default=True)
    """For datasets; default: train."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt; default: the first checkpoint's own."""
    length: int | None = setting(None, minimum=1)
    """Tokens in a sequence, for text and flat token-id arrays; default: 128, or the first model's maximum if
    smaller."""
    masking: Literal["one", "fraction"] | None = None
    """For masked models: mask one token of each sequence, or a fraction of all; default: fraction for text and token
    ids, one for sentences of a language."""
    fraction: float | None = setting(None, above=0, maximum=1)
    """The fraction, where masking is fraction; default: 0.15."""
    mask_id: int | None = setting(None, minimum=0)
    """For masked models and token ids: the mask's id; default: the tokenizer's."""
    batch_size: int | None = setting(None, minimum=1)
    """Sequences in a pass; default: as many, up to 256, as keep the logits of the predicted tokens below 256 MiB and
    the layers' activations around 1 GiB. It does not change the inputs or probes, only time and memory."""

    def objective(
        self, name: str, *, is_causal: bool, default: Literal["one", "fraction"] = "fraction"
    ) -> ObjectiveConfig:
        """Return what the model called `name` predicts, with the masking `default` unless one was chosen."""
        if is_causal and (unused := self._given(_FOR_MASKED)):
            raise IsolossError(f"{name} predicts next tokens and has none masked: leave out {', '.join(unused)}")
        if is_causal:
            return ObjectiveConfig(kind="causal")
        fraction = ObjectiveConfig.fraction if self.fraction is None else self.fraction
        objective = ObjectiveConfig(masking=self.masking or default, fraction=fraction)
        configs.check(objective)
        return objective

    def check(self) -> None:
        """Refuse a value out of its range, or a tokenizer that is nowhere."""
        configs.check(self)
        if self.tokenizer is not None:
            tokenizers.check_name(self.tokenizer)

    def check_run(self, name: str, *also: str) -> None:
        """Refuse what the run of the model called `name` decides, and the fields in `also`."""
        if unused := self._given((*_FOR_TEXT, *_FOR_MASKED[:2], *also)):
            raise IsolossError(
                f"{name} is measured on its run's language, masked as in its training: leave out "
                f"{', '.join(unused)}, or add --data"
            )

    def check_language(self, name: str) -> None:
        """Refuse an option for text where the model called `name` is measured on a language."""
        if unused := self._given(_FOR_TEXT):
            raise IsolossError(f"{name} is measured on a language: leave out {', '.join(unused)}, or add --data")

    def _given(self, names: tuple[str, ...]) -> list[str]:
        """Return those of the options that were given, as the command line calls them."""
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]


def language_of_runs(names: Sequence[str]) -> TrainConfig | None:
    """Return the `common_run_config` of checkpoints, if any is of a run without a tokenizer; else None."""
    folders = [Path(name) for name in names]
    if any(checkpoint_of(folder) is not None and not any(folder.glob("tokenizer*")) for folder in folders):
        return common_run_config(names)
    return None


def common_run_config(names: Sequence[str]) -> TrainConfig:
    """Return the config of the first of some checkpoints of runs on one language with one objective."""
    known: tuple[str, TrainConfig] | None = None
    for name in names:
        checkpoint = checkpoint_of(Path(name))
        if checkpoint is None:
            raise IsolossError(
                f"{name} is not a checkpoint of a run, so there is no language to measure it on: add --data with "
                "text or a .npy file of token ids, or measure it on a language with isoloss measure --language"
            )
        config = checkpoint[0].absolute_config
        if known is not None and (known[1].language, known[1].objective) != (config.language, config.objective):
            raise IsolossError(
                f"{known[0]} and {name} are of runs with different languages or objectives: add --data to compare them"
            )
        known = known or (name, config)
    assert known is not None
    return known[1]
