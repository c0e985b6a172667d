"""Options that are made from configs: one truth for names, defaults, choices and help."""

import dataclasses
import math
from importlib import import_module
from typing import Literal

import pytest
from speaking import in_one_line, refusal

from isoloss.cli import options
from isoloss.cli.main import SUBCOMMANDS, main


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """What both measures have."""

    seed: int = 0
    """Decides the sentences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(Base):
    """A trace."""

    trace_inputs: int = 512
    """Sequences to measure on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(Base):
    """A probe."""

    solver: Literal["adamw", "convex"] = "adamw"
    """How it is fitted."""
    layer: int | None = None
    """Which states; the last unless told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sam:
    """An algorithm."""

    kind: Literal["sam"] = "sam"
    rho: float = 0.05
    """How far."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """Another."""

    kind: Literal["plain"] = "plain"


COMPONENTS = {"plain": Plain, "sam": Sam}


class Algorithms(options.Options):
    """Options of each."""

    sources = options.sources_of(COMPONENTS, exclude=["kind"], prefixed=True)


class Settings(options.Options):
    """Options of both."""

    sources = options.sources_of({"trace": Trace, "probe": Probe})


@dataclasses.dataclass(frozen=True)
class Args:
    """A command."""

    algorithm: str = "plain"
    """Which one."""
    output: str | None = None
    """Where; none unless told."""
    settings: Settings = dataclasses.field(default_factory=Settings)
    components: Algorithms = dataclasses.field(default_factory=Algorithms)


def parsed(*words):
    return options.parse(Args, "example", words, examples=[])


def test_only_what_was_given_is_there():
    args = parsed("--seed", "0", "--sam-rho", "0.05")
    assert (args.settings, args.components) == ({"seed": 0}, {"sam_rho": 0.05})
    assert parsed().settings == {}
    assert parsed("--layer", "-1", "--solver", "convex").settings == {"layer": -1, "solver": "convex"}


def test_help_names_each_default_once_and_no_none(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = in_one_line(capsys.readouterr().out)
    assert "None" not in text
    assert text.count("(default: 0.05)") == text.count("(default: 512)") == text.count("(default: adamw)") == 1
    titles = ("settings options", "components options", "Options of each.", "Options of both.")
    for line in ("How far.", "Sequences to measure on.", "Decides the sentences.", *titles):
        assert text.count(line) == 1


def test_help_shows_the_common_options_and_where_the_rest_is(capsys):
    assert main(["train", "--help"]) == 0
    few = capsys.readouterr().out
    assert main(["train", "--help-all"]) == 0
    everything = capsys.readouterr().out
    assert "isoloss train --help-all shows all options" in few
    assert "--learning-rate" in few
    for option in ("--weight-decay", "--sam-rho", "--masked-copies"):
        assert option not in few
        assert option in everything


def subcommands():
    for name in SUBCOMMANDS:
        yield (name,)
        yield from ((name, action) for action in getattr(import_module(f"isoloss.cli.{name}"), "SUBCOMMANDS", ()))


@pytest.mark.parametrize("words", list(subcommands()), ids=" ".join)
def test_help_fits_on_a_screen_and_a_half(words, capsys):
    assert main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(max(1, math.ceil(len(line) / 100)) for line in lines) <= 60


def test_an_option_of_another_algorithm_is_refused(capsys):
    told = refusal(capsys, "train", "runs/x", "--language", "brackets-8", "--sam-rho", "0.05")
    assert "--sam-rho needs --algorithm sam" in told


@pytest.mark.parametrize("subcommand", ["measure", "compare", "transfer", "train", "ls", "tokenizer"])
def test_help_shows_what_is_required_and_of_which_shape(subcommand, capsys):
    assert main([subcommand, "--help"]) == 0
    text = capsys.readouterr().out
    assert "[MODELS]" not in text
    assert "[TEXTS]" not in text
    if subcommand in ("measure", "compare", "transfer"):
        assert "MODELS ..." in text.splitlines()[0]
    if subcommand == "ls":
        assert "A kind: measures, languages, models" in in_one_line(text)
