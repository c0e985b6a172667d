"""Command lines: words as people write them, options that are made from configs, and help."""

import dataclasses
import math
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
from speaking import in_one_line

from isoloss.cli import options
from isoloss.cli.main import SUBCOMMANDS, main
from isoloss.errors import IsolossError


@dataclasses.dataclass(frozen=True)
class Plain:
    """An example."""

    action: options.Positional[Literal["make", "show"]]
    names: options.Positional[tuple[str, ...]] = ()
    steps: int = 1000
    marks: tuple[int, ...] = ()
    ends: tuple[int, int] | None = None
    rate: float = 0.1
    kind: Literal["one", "two", "three"] | None = None
    test: int | Literal["all"] = 9
    out: Path | None = None
    number: int | Literal["all", "none"] = 5
    quick: bool = False
    batch_size: int = 1


def read(*words):
    return options.parse(Plain, "example", words, examples=[])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e4", 10_000),
        ("10_000", 10_000),
        ("1E4", 10_000),
        ("2.5e3", 2500),
        ("-1", -1),
        ("+3", 3),
        ("1e-0", 1),
        ("7.0", 7),
    ],
)
def test_whole_numbers_as_people_write_them(written, meant):
    assert read("make", "--steps", written).steps == meant
    assert read("make", f"--steps={written}").steps == meant
    assert read("make", "--marks", written, "3", written).marks == (meant, 3, meant)
    assert read("make", "--ends", written, "2").ends == (meant, 2)
    assert read("make", "--test", written).test == meant
    assert read("make", "--test", "all").test == "all"


def told(*words):
    """What is said of a command line that is refused."""
    with pytest.raises(IsolossError) as error:
        read(*words)
    return str(error.value).removesuffix("; isoloss example --help says more")


@pytest.mark.parametrize("written", ["1.5", "1e-4", "abc", "1e400", "inf", "nan", "", "0x10", "1,000"])
def test_what_is_no_whole_number(written):
    text = f"--steps is {written!r}; it must be a whole number, such as 1000 or 1e3"
    assert told("make", "--steps", written) == text


def test_words_are_read_as_they_are_meant():
    assert read("make", "--rate", "-1e-3").rate == -0.001
    assert read("make", "--batch_size", "7").batch_size == read("make", "--bs=7").batch_size == 7


def test_a_number_or_a_word():
    assert [read("make", "--number", word).number for word in ("1e3", "-1", "all")] == [1000, -1, "all"]


def test_words_by_their_place_may_stand_before_and_after_options():
    expected = Plain("make", ("a", "b"), marks=(1, 2), quick=True, out=Path("x=y"))
    assert read("make", "a", "b", "--marks", "1", "2", "--quick", "--out=x=y") == expected
    assert read("make", "--quick", "a", "b", "--out", "x=y", "--marks", "1", "2") == expected
    assert read("--out", "x=y", "make", "--quick", "a", "b", "--marks", "1", "2") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ACTION is missing"),
        (["mak"], "action is 'mak'; did you mean make? it must be one of make, show"),
        (["make", "--test", "some"], "--test is 'some'; it must be a whole number, such as 1000 or 1e3, or all"),
        (["make", "--kind", "seven"], "--kind is 'seven'; it must be one of one, two, three"),
        (["make", "--kind", "tow"], "--kind is 'tow'; did you mean two? it must be one of one, two, three"),
        (
            ["make", "--number", "2.5"],
            "--number is '2.5'; it must be a whole number, such as 1000 or 1e3, or all or none",
        ),
        (["make", "--marks", "1", "two"], "--marks is 'two'; it must be a whole number, such as 1000 or 1e3"),
        (["make", "--rate", "fast"], "--rate is 'fast'; it must be a number"),
        (["make", "--steps"], "--steps needs 1 value"),
        (["make", "--ends", "1"], "--ends needs 2 values"),
        (["make", "-o", "x"], "there is no argument: -o, x"),
    ],
)
def test_what_is_wrong_is_one_message(words, message):
    assert told(*words) == message


# --- options from configs


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
class Other:
    """Another."""

    kind: Literal["plain"] = "plain"


COMPONENTS = {"plain": Other, "sam": Sam}


class Algorithms(options.GivenOptions):
    """Options of each."""

    sources = options.sources_of(COMPONENTS, exclude=["kind"], prefixed=True)


class Settings(options.GivenOptions):
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
