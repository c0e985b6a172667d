"""The options of `isoloss transfer`, those of a method made from its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from isoloss.cli import options
from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.transfer.config import ClassifierConfig, FinetuneConfig, LinearProbeConfig

METHODS: dict[str, type] = {"probe": LinearProbeConfig, "lookup": ClassifierConfig, "finetune": FinetuneConfig}
_NO_OPTIONS = ("name", "betas", "momentum", "standardize", "seed")  # only the library sets these; seed is in `Args`


def _groups() -> Iterator[tuple[str, Any, Any]]:
    """Yield a group of options for each set of methods that share them; an option that was not given is None."""
    names = dict.fromkeys(own.name for config in METHODS.values() for own in dataclasses.fields(config))
    groups: dict[tuple[str, ...], list[tuple[str, Any, None]]] = {}
    for name in names:
        if name not in _NO_OPTIONS:
            methods = tuple(method for method, config in METHODS.items() if hasattr(config, name))
            groups.setdefault(methods, []).append((name, _option(name, methods), None))
    for methods, members in groups.items():
        name = "every_method" if len(methods) == len(METHODS) else "_or_".join(methods)
        group = dataclasses.make_dataclass(name, members, frozen=True, kw_only=True)
        group.__doc__ = f"With --method {' or '.join(methods)}."
        marked = tyro.conf.OmitArgPrefixes[group]  # type: ignore[valid-type]
        yield name, marked, field(default_factory=group)


def _option(name: str, methods: Iterable[str]) -> Any:
    """Return the annotation of an option: what any of the methods takes, with the help and the default of each."""
    configs = {method: METHODS[method] for method in methods}
    hints = [get_type_hints(config)[name] for config in configs.values()]
    if get_origin(hints[0]) is Literal:
        choices = dict.fromkeys(choice for hint in hints for choice in get_args(hint))
        hints[0] = Literal.__getitem__(tuple(choices))
    texts = {method: " ".join(options.help_texts(config)[name].split()) for method, config in configs.items()}
    defaults = _by_method({method: _told(getattr(config, name)) for method, config in configs.items()}, ", ")
    told = tyro.conf.arg(help=_by_method(texts, " "), help_behavior_hint=f"(default: {defaults})" if defaults else "")
    return Annotated.__class_getitem__((hints[0] | None, told))  # type: ignore[attr-defined]


def _by_method(texts: Mapping[str, str], separator: str) -> str:
    """Return the one text, or each with the methods that it is of."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    methods: dict[str, list[str]] = {}
    for method, text in texts.items():
        methods.setdefault(text, []).append(method)
    return separator.join(f"{' and '.join(own)}: {text}" for text, own in methods.items())


def _told(default: Any) -> str:
    return "" if default is None else " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


@dataclass(frozen=True, kw_only=True)
class _SentenceOptions:
    """For a task of a synthetic language."""

    language: str | None = None
    """The language; default: that of the models' runs."""
    train_lengths: tuple[int, int] | None = None
    """Least and most tokens of the training sentences."""
    test_lengths: tuple[int, int] | None = None
    """Least and most tokens of the test sentences."""
    test_redraw: float | None = None
    """Test on a language with the same rules, with new probabilities for this fraction of the symbols or states."""


@dataclass(frozen=True, kw_only=True)
class _TextOptions:
    """For a task of text."""

    data: str | None = None
    """Labeled text: a .tsv, .csv, .jsonl or .json file, a folder with one for each split, or a dataset hf:NAME."""
    test_data: str | None = None
    """The same for the test examples; default: another split of --data or, of a single file, one example in five."""
    text: str | None = None
    """Column of the text."""
    pair: str | None = None
    """Column of the second text, where an example is two."""
    label: str = "label"
    """Column of the label."""
    train_split: str = "train"
    """Split of a folder or dataset."""
    test_split: str | None = None
    """Split of the test examples; default: dev or validation."""
    tokenizer: str | None = None
    """A Hugging Face folder or name, or a vocab.txt; default: the model's own."""
    max_length: int | None = None
    """The most tokens of an example; default: 128, or as many as the model reads."""


if TYPE_CHECKING:
    SentenceOptions = _SentenceOptions
    TextOptions = _TextOptions
else:
    SentenceOptions = options.without_none(_SentenceOptions)
    TextOptions = options.without_none(_TextOptions)


@dataclass(frozen=True)
class TransferArgs:
    """Accuracy on a downstream task: a linear probe (the paper's), fine-tuning, or the look-up table.

    The accuracy of the majority class and, where it is known, that of the Bayes classifier are printed beside it.
    Several models are compared on the same examples.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """Runs (their last checkpoints), checkpoint folders, or names on the Hugging Face hub."""
    task: str
    """A task of the language (root, prefix-L, ...), of GLUE (sst2, rte, ...), or a name of your own for --data; see
    isoloss ls tasks."""
    method: Literal["probe", "lookup", "finetune"] = "probe"
    """A probe on the model's token states, one on the true conditionals, or training all weights."""
    num_train: int | None = None
    """Training examples; default: 4096 sentences of a language, all of a text."""
    num_test: int | None = None
    """Test examples; default: as for training."""
    seed: int = 0
    """Decides the examples and the classifiers."""
    sentences: tyro.conf.OmitArgPrefixes[SentenceOptions] = field(default_factory=SentenceOptions)
    labeled_text: tyro.conf.OmitArgPrefixes[TextOptions] = field(default_factory=TextOptions)
    output: Path | None = None
    """Folder for each model's result (.json), predictions (.jsonl) and, of fine-tuning, the state to resume from."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Only for checkpoints that you trust."""
    json: bool = False
    """Print one JSON document."""


Args: Any = dataclasses.make_dataclass("Args", _groups(), bases=(TransferArgs,), frozen=True)
Args.__doc__ = TransferArgs.__doc__


def method_config(args: TransferArgs) -> Any:
    """Return the config of the method with what the command line gives of it.

    Raises:
        IsolossError: An option that the method does not have, or a value out of its range.
    """
    config = METHODS[args.method]
    own = {member.name for member in dataclasses.fields(TransferArgs)}
    groups = [vars(group) for name, group in vars(args).items() if name not in own]
    given = {name: value for group in groups for name, value in group.items() if value is not None}
    if unknown := [options.option_name(name) for name in given if not hasattr(config, name)]:
        raise IsolossError(f"{', '.join(unknown)}: no effect with --method {args.method}")
    chosen = config(**given, seed=args.seed)
    check(chosen)
    return chosen
