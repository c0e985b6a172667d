"""What a measure is: a frozen dataclass whose fields are its settings, and how one is made from its name.

A measure of one's own is a subclass of `Measure`, registered in `isoloss.registry.MEASURES` under a name, or under a
pattern such as `probe-TASK` whose parts in capital letters are fields: those of `probe-root` are `task="root"`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean
from isoloss.registry import MEASURES

if TYPE_CHECKING:
    import torch

    from isoloss.lab.evaluation.context import MeasureContext
    from isoloss.statistics.estimate import Estimate


# in the example of a name
_REPLACED = {"TASK": "root", "SIZE": "d64", "EMBEDDING_SCALE": "paper", "NUMBER": "100", "WIDTH": "16", "LEVEL": "1"}


@dataclass(frozen=True, kw_only=True)
class MeasureResult:
    """What a measure found on one model."""

    estimates: Mapping[str, Estimate]  # the numbers, by name
    # numpy arrays by name that are kept with them besides their influences (see `isoloss.runs.Run.examples`)
    more: Mapping[str, Any] = field(default_factory=dict)
    # SHA-256 of the inputs (`digest`); empty where there are none. Two results on the same inputs are paired
    inputs: str = ""

    @classmethod
    def of(cls, measure: str, result: MeasureResult | Mapping[str, Estimate]) -> MeasureResult:
        """Return the result of the measure called so, which may have returned its estimates alone.

        Raises:
            IsolossError: It is none.
        """
        from isoloss.statistics.estimate import Estimate

        made = result if isinstance(result, cls) else cls(estimates=result)  # type: ignore[arg-type]
        if not isinstance(made.estimates, Mapping) or not all(isinstance(e, Estimate) for e in made.estimates.values()):
            raise IsolossError(f"the measure {measure} returned {made.estimates!r}; it must be estimates by name")
        return made

    def arrays(self) -> dict[str, Any]:
        """Return the influences of the estimates, in float32 as `<name>.influence`, and what there is more."""
        import numpy as np

        influences = {
            f"{name}.influence": estimate.influence.astype(np.float32)
            for name, estimate in self.estimates.items()
            if estimate.influence is not None
        }
        return {**influences, **self.more}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured of a model; a subclass has its settings as fields with defaults and ranges.

    Measures that share a field inherit it from one class, so that an option of the command line is the same for all.
    """

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why the measure cannot be taken here, as a sentence; None if it can."""
        return None

    def run(self, model: Any, context: MeasureContext) -> MeasureResult | Mapping[str, Estimate]:
        """Return what is found on a model.

        Args:
            model: A Hugging Face language model in evaluation mode.
            context: What it is measured on, and when to stop.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SeededMeasure(Measure):
    """A measure that draws random numbers."""

    seed: int = setting(0)
    """Decides the sentences, masks, Rademacher signs and probes; checkpoints compare best under the same."""


@dataclass(frozen=True, kw_only=True)
class SequenceMeasure(SeededMeasure):
    """A measure on sequences."""

    num_sequences: int = setting(512, minimum=2)
    """Sequences to measure on, at most."""


def make_measure(name: str, settings: Mapping[str, Any] | None = None) -> Measure:
    """Return the measure called `name`.

    Args:
        name: E.g. `loss`, `probe-root`.
        settings: Values of fields, by name; those of other measures are not used.

    Example:
        >>> make_measure("few-shot-root-100", {"probe_draws": 3, "loss_sentences": 100}).probe_draws
        3
    """
    pattern, parts = MEASURES.match(name)
    if not parts and name_fields(pattern):
        raise IsolossError(f"{pattern} is a pattern: replace {' and '.join(_placeholders(pattern))}{_example(pattern)}")
    cls = MEASURES.load(pattern)
    fields = _fields(cls)
    settings = dict(settings or {})
    # settings of other measures are left out below: a command gives all of its measures the same ones
    if unknown := [key for key in settings if key not in fields]:
        known = frozenset[str]().union(*map(_fields, MEASURES.loaded().values()))
        if wrong := next((key for key in unknown if key not in known), None):
            names = ", ".join(sorted(fields - name_fields(pattern))) or "none"
            hint = did_you_mean(wrong, known) or f"; those of {name} are {names}"
            raise IsolossError(f"no measure has a setting {wrong!r}{hint}")
    values = {key: value for key, value in settings.items() if key in fields}
    hints = configs.hints_of(cls)
    named = {part.lower(): value for part, value in parts.items()}
    numbers = {key: int(value) for key, value in named.items() if hints[key] is int and value.isdecimal()}
    for field_ in dataclasses.fields(cls):
        has_default = {field_.default, field_.default_factory} != {dataclasses.MISSING}
        if not has_default and field_.name not in {*values, *named}:
            raise IsolossError(f"the measure {name} has no default for {field_.name}: give one in its settings")
    measure: Measure = cls(**values, **named | numbers)
    configs.check(measure)
    return measure


@functools.cache
def _fields(measure: type[Measure]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(measure))


def settings_of(name: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that decide the result of a measure: they are kept with it. Arguments as for `make_measure`.

    Example:
        >>> settings_of("probe-root", {"probe_seeds": 3})
        {'num_train': 4096, 'num_test': 4096, 'probe_seeds': 3, 'probe_epochs': 100, 'seed': 0}
    """
    values: dict[str, Any] = configs.identity(make_measure(name, settings))
    by_name = name_fields(MEASURES.match(name)[0])
    return {key: values[key] for key in sorted(values, key=lambda key: key == "seed") if key not in by_name}


def name_fields(pattern: str) -> set[str]:
    """Return the fields of a registered measure that its name gives.

    Example:
        >>> sorted(name_fields("trace-in-SIZE-EMBEDDING_SCALE"))
        ['embedding_scale', 'size']
    """
    return {word.lower() for word in _placeholders(pattern)}


def _placeholders(pattern: str) -> list[str]:
    return [word for word in pattern.split("-") if word.isupper()]


def _example(pattern: str) -> str:
    """Return what a pattern becomes with its placeholders replaced; empty where one of them is not isoloss's own."""
    words = [_REPLACED.get(word, word) if word.isupper() else word for word in pattern.split("-")]
    return "" if any(word.isupper() for word in words) else f", e.g. {'-'.join(words)}"


def digest(*tensors: torch.Tensor, more: object = None) -> str:
    """Return the SHA-256 of the shapes and values of tensors, and of a JSON document."""
    sha256 = hashlib.sha256(json.dumps(more).encode())
    for tensor in tensors:
        sha256.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        sha256.update(tensor.cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers, by name."""
    import torch

    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        # as bytes, because numpy has no bfloat16
        sha256.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def digest_batches(batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of all sequences of some batches, however they are cut into these, and of no documents."""
    import torch

    names = sorted(batches[0].keys() - {"documents"})
    return digest(*(torch.cat([batch[name] for batch in batches]) for name in names))
