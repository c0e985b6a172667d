"""Options that are made from configs: one truth for names, defaults, choices and help."""

import dataclasses
from typing import Literal

import pytest

from isoloss.cli import common, options
from isoloss.cli.main import main
from isoloss.errors import IsolossError


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
Algorithms = options.component_options("Algorithms", COMPONENTS, option="--algorithm")
Settings = options.options_of("Settings", Trace, Probe)


@dataclasses.dataclass(frozen=True)
class Args:
    """A command."""

    algorithm: str = "plain"
    """Which one."""
    output: str | None = None
    """Where; none unless told."""
    settings: options.titled(Settings, "measure") = dataclasses.field(default_factory=Settings)
    components: options.titled(Algorithms, "") = dataclasses.field(default_factory=Algorithms)


def parsed(*words):
    return common.parse(Args, "example", words, examples=[])


def test_every_field_is_an_option_with_the_configs_default():
    args = parsed("--seed", "1")
    assert options.select(args.settings, Trace) == Trace(seed=1)
    assert options.select(args.settings, Probe) == Probe(seed=1)


def test_the_component_gets_its_own_options_and_refuses_those_of_others():
    args = parsed("--algorithm", "sam", "--sam-rho", "0.2")
    assert options.chosen(args.components, "sam", Sam, option="--algorithm") == Sam(rho=0.2)
    with pytest.raises(IsolossError, match="--sam-rho needs --algorithm sam"):
        options.chosen(args.components, "plain", Plain, option="--algorithm")


def test_help_names_each_default_once_and_no_none(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "None" not in text
    assert text.count("(default: 0.05)") == text.count("(default: 512)") == text.count("(default: adamw)") == 1
    titles = ("measure options", "--algorithm sam options")
    for line in ("How far.", "Sequences to measure on.", "Decides the sentences.", "An algorithm.", *titles):
        assert text.count(line) == 1


@pytest.mark.parametrize("subcommand", ["flatness", "eval", "transfer", "train", "ls", "tokenizer"])
def test_help_shows_what_is_required_and_of_which_shape(subcommand, capsys):
    with pytest.raises(SystemExit):
        main([subcommand, "--help"])
    text = capsys.readouterr().out
    for shape in ("[MODELS]", "[TEXTS]", "{[", "[FLOAT [", "[INT [", "[STR ["):
        assert f" {shape}" not in text.replace("STR [STR", "").replace("INT [INT", "").replace("FLOAT [FLOAT", "")
    if subcommand in ("flatness", "eval", "transfer"):
        assert "MODELS ..." in text.splitlines()[0]
    if subcommand == "ls":
        assert "What to list: all, languages, models" in " ".join(text.split())
