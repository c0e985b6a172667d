"""The settings of a suite, and the checkpoints that its patterns match. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss.checkpoints.places import expand_checkpoints, series_of
from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean, warn
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.base import make_measure
from isoloss.registry import MEASURES
from isoloss.runs import last_checkpoint
from isoloss.statistics.significance import LOSS_MARGIN
from isoloss.text import hub_datasets

MEASURED = ("loss", "trace", "minimal-trace", "int4-rise", "noise-rise", "features")
# fmt: off
COLUMNS = (
    "checkpoint", "text", "measure", "value", "stderr", "low", "high", "unit", "samples", "problem", "sha256",
)
# fmt: on
_BRACES = re.compile(r"\{([^{}]*)\}")
_WILDCARDS = {"*": r"[^/]*", "?": r"[^/]"}


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """The settings of `isoloss suite`, as in its TOML file.

    Attributes:
        checkpoints: Folders, names on the Hugging Face hub (`NAME@REVISION`), or patterns of either. In a pattern,
            `{seed}` matches any text, which becomes the label `seed` of the checkpoint; digits become an integer. `*`
            matches any text without a label. The folder of a run is its last checkpoint.
        labels: The values of a label to keep, such as `{step = [0, 512, 143_000]}`. If a pattern's labels all have
            values here, it stands for every combination, and neither folders nor the hub are searched.
        cluster: The label of the independent units, such as `seed`. Empty: each training run is one, that is, each
            combination of all labels except `along`.
        along: The label of the position in a training run. Empty: `step`, if there is such a label.
        levels: A label across which the answers must also hold, such as the optimizer or the recipe. Empty: none.
        texts: The texts to measure on, by name: text, a dataset or token ids, as for `isoloss measure`. Empty: the
            language of the checkpoints' runs, or else `python:docs`.
        measures: Names of measures (`isoloss ls measures`). The loss is always measured.
        outcomes: The numbers to predict: measures, such as `probe-sst2`, or names of imported outcomes. Empty: the
            rises of the loss.
        settings: Settings of the measures, by field.
        inputs: How the texts become inputs; the same for all checkpoints.
        loss_margin: Two losses count as the same within this margin, in nats per predicted token.
        parameters: Numbers of parameters by label and value, such as `{size = {14m = 14_067_712}}`, for `--plan`
            without the files and the hub.
        device: auto, cpu, cuda.
        trust_remote_code: Whether code that comes with a checkpoint may run.

    Example:
        >>> from isoloss.config import from_dict
        >>> from isoloss.suites.config import SuiteConfig
        >>> config = from_dict(SuiteConfig, {"checkpoints": ["lab/tiny-seed{seed}@step{step}"], "cluster": "seed"})
        >>> config.measured
        ('loss', 'trace', 'minimal-trace', 'int4-rise', 'noise-rise', 'features')
    """

    checkpoints: tuple[str, ...]
    labels: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    cluster: str = ""
    along: str = ""
    levels: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    measures: tuple[str, ...] = MEASURED
    outcomes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: InputConfig = field(default=InputConfig())
    loss_margin: float = setting(LOSS_MARGIN, above=0)
    parameters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    device: str = "auto"
    trust_remote_code: bool = False

    def check_fields(self) -> None:
        """Refuse settings of the wrong type, unknown measures, and texts that do not exist."""
        if not self.checkpoints:
            raise IsolossError("checkpoints is empty; name folders, names on the Hugging Face hub, or patterns")
        for name in ("labels", "texts", "settings", "parameters"):
            if not isinstance(table := getattr(self, name), Mapping):
                raise IsolossError(f"{name} is {table!r}; it must be a table, such as texts = {{docs = 'docs.txt'}}")
        for name, values in self.labels.items():
            if not isinstance(values, list | tuple) or not values:
                raise IsolossError(f"the values of the label {name} are {values!r}; they must be a list")
        for name, data in self.texts.items():
            if not isinstance(data, str):
                raise IsolossError(f"the text {name} is {data!r}; it must be a file, a folder or a dataset")
            hub_datasets.check_data(Path(data))
        for name in self.measured:
            make_measure(name, self.settings)
        self.inputs.check()

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of all measures, without repetition: the loss, `measures`, and the measures among `outcomes`."""
        outcomes = [name for name in self.outcomes if is_measure(name)]
        return tuple(dict.fromkeys(("loss", *self.measures, *outcomes)))

    def sources(self) -> dict[str, str]:
        """Return a fingerprint of each text by name: of its content, and of how it becomes inputs."""
        found = {
            name: ExternalCheckpoint(checkpoint="", data=data, inputs=self.inputs).fingerprint
            for name, data in self.texts.items()
        }
        return found or {"": configs.fingerprint(self.inputs)}


def is_measure(name: str) -> bool:
    """Whether an outcome is a measure; otherwise it is imported."""
    try:
        MEASURES.match(name)
    except IsolossError:
        return False
    return True


def file_name(name: str) -> str:
    """Return a safe file name without an ending, unique for every name; names may have any characters."""
    plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[-80:].strip("-.")
    return f"{plain}-{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:8]}"


@dataclass(frozen=True)
class Member:
    """A checkpoint of a suite."""

    name: str  # a folder, or NAME or NAME@REVISION on the Hugging Face hub
    labels: Mapping[str, int | str]  # read from its name

    @property
    def folder(self) -> str:
        """The name of the folder that keeps its measurements."""
        return file_name(self.name)


def members(config: SuiteConfig, say: Callable[[str], None] = lambda text: None) -> list[Member]:
    """Return the checkpoints of a suite, in the order of its patterns, each once.

    A pattern without a match is left out with a warning, as is a value in `labels` that no checkpoint has.

    Raises:
        IsolossError: No pattern has a match, braces hold a name that no column can have, the name of a checkpoint can
            be read in several ways, or `cluster`, `along`, `levels` or a name in `labels` is not a label.
    """
    found: dict[str, Mapping[str, int | str]] = {}
    places: dict[str, str] = {}  # one folder may be named in several ways, and is one checkpoint
    problems, bare = [], []
    for pattern in config.checkpoints:
        is_literal = Path(pattern).expanduser().exists()
        names = [] if is_literal else _label_names(pattern)
        if names and config.labels.keys() >= set(names):
            for values in itertools.product(*(config.labels[name] for name in dict.fromkeys(names))):
                given = dict(zip(dict.fromkeys(names), values, strict=True))
                found.setdefault(_filled(pattern, given), given)
            continue
        try:
            matching = expand_checkpoints([pattern if is_literal else _BRACES.sub("*", pattern)], say)
        except IsolossError as error:
            problems.append(error)
            continue
        for name in matching:
            if places.setdefault(os.path.realpath(os.path.expanduser(name)), name) != name:
                continue
            if not names:
                bare.append(name)
                found.setdefault(name, {})
            elif (of_it := _read(name, pattern, config.labels)) is not None:
                found.setdefault(name, of_it)
    # without braces, as when the shell expands `*`: checkpoints of one run are no independent clusters
    for series, by_step in series_of(dict.fromkeys(bare)).items():
        found |= {name: {"series": series, "step": step} for step, name in by_step.items() if not found[name]}
    if not found:
        raise problems[0] if problems else IsolossError(f"no checkpoint matches {', '.join(config.checkpoints)}")
    for problem in problems:
        warn(f"left out: {problem}")
    labels = label_names(found.values())
    if clash := next((name for name in labels if name in config.measured), None):
        raise IsolossError(f"the label {{{clash}}} has the name of a measure of the suite: give it another name")
    named = [(role, getattr(config, role)) for role in ("cluster", "along", "levels")]
    for role, name in (*named, *(("a name in the table labels", name) for name in config.labels)):
        if name and name not in labels:
            known = did_you_mean(name, labels) or f"; the labels are {', '.join(labels) or 'none: there are no braces'}"
            raise IsolossError(f"{role} is {name!r}, which is not a label of the checkpoints{known}")
    _warn_of_values(config, found)
    # a run stands for its last checkpoint, as in a comparison
    return [Member(last_checkpoint(name), of_it) for name, of_it in found.items()]


def _warn_of_values(config: SuiteConfig, found: Mapping[str, Mapping[str, int | str]]) -> None:
    """Warn of values in the table `labels` that no checkpoint has, and of labels with both integers and words."""
    for name in label_names(found.values()):
        values = {of_it[name]: checkpoint for checkpoint, of_it in found.items() if name in of_it}
        known = {str(value) for value in values}
        if unused := [each for each in map(str, config.labels.get(name, ())) if str(_value(each)) not in known]:
            warn(f"no checkpoint has the {name} {' or '.join(unused)} that the table labels lists")
        words = [value for value in values if isinstance(value, str)]
        if name not in config.labels and 0 < len(words) < len(values):
            warn(
                f"{{{name}}} is {words[0]!r} in {values[words[0]]} but an integer in other names: if this is wrong, "
                f"list the values in a TOML file, as labels = {{{name} = [...]}}"
            )


def label_names(labels: Iterable[Mapping[str, object]]) -> tuple[str, ...]:
    """Return the names of the labels, each once."""
    return tuple(dict.fromkeys(name for each in labels for name in each))


def _label_names(pattern: str) -> list[str]:
    names = _BRACES.findall(pattern)
    for name in names:
        if not name.isidentifier() or name in COLUMNS:
            raise IsolossError(
                f"{pattern!r} has {{{name}}}: braces hold the name of a new column, such as seed, and not one of "
                f"{', '.join(COLUMNS)}"
            )
    return names


def _filled(pattern: str, labels: Mapping[str, int | str]) -> str:
    return _BRACES.sub(lambda match: str(labels[match[1]]), pattern)


def _read(name: str, pattern: str, labels: Mapping[str, Sequence[int | str]]) -> dict[str, int | str] | None:
    """Return the labels in a name; None: it does not match the pattern with the given values of labels."""
    # each value as short as possible, and as long as possible
    matches = [re.fullmatch(_as_regex(pattern, labels, longest=longest), name) for longest in (False, True)]
    readings = [{key: _value(text) for key, text in match.groupdict().items()} for match in matches if match]
    if not readings:
        return None
    one, other = readings
    if one != other:
        told = (" and ".join(f"{key} {value}" for key, value in each.items()) for each in (one, other))
        *_, open_one = (key for key in one if one[key] != other[key] and key not in labels)
        raise IsolossError(
            f"{pattern!r} reads {name} as {', or as '.join(told)}: list the values in a TOML file, as "
            f"labels = {{{open_one} = [...]}}"
        )
    return one


def _as_regex(pattern: str, labels: Mapping[str, Sequence[int | str]], *, longest: bool) -> str:
    """Return the regular expression of a pattern; braces that occur twice stand for the same text."""
    parts, seen = [], set()
    for name, wildcard, other in re.findall(r"\{([^{}]*)\}|([*?]|\[[^]]+\])|(.)", pattern, flags=re.DOTALL):
        if name:
            given = sorted(map(str, labels.get(name, ())), key=len, reverse=longest)
            # a whole number may be written with zeros
            values = "|".join(f"0*{value}" if value.isdecimal() else re.escape(value) for value in given)
            values = values or ("[^/]+" if longest else "[^/]+?")
            parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{values})")
            seen.add(name)
        elif wildcard:
            parts.append(_WILDCARDS.get(wildcard, wildcard.replace("[!", "[^")))
        else:
            parts.append(re.escape(other))
    return "".join(parts)


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def replaced(config: SuiteConfig, changes: Mapping[str, Any]) -> SuiteConfig:
    """Return a config with other values of some fields; tables of settings and inputs are merged."""
    inputs = dataclasses.replace(config.inputs, **changes.get("inputs", {}))
    settings = {**config.settings, **changes.get("settings", {})}
    return configs.replaced(config, {**changes, "inputs": inputs, "settings": settings})
