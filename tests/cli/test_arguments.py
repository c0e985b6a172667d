"""Command lines: whole numbers as people write them, choices, and what a misspelt option was meant to be."""

import importlib
import re
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Literal, Union, get_args, get_origin

import pytest
import tyro
from speaking import refusal

from isoloss.cli import common
from isoloss.cli.arguments import ALSO_CALLED, _arguments, read
from isoloss.cli.main import SUBCOMMANDS, main
from isoloss.errors import IsolossError

COMMANDS = {
    subcommand: importlib.import_module(f"isoloss.cli.{subcommand}").Args
    for subcommand in SUBCOMMANDS
    if subcommand != "theory"
}
COMMANDS |= {
    name: getattr(importlib.import_module("isoloss.cli.theory"), name)
    for name in ("BartlettArgs", "FlowArgs", "BracketsArgs")
}


@dataclass(frozen=True)
class Args:
    """An example."""

    action: tyro.conf.Positional[Literal["make", "show"]]
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    steps: int = 1000
    marks: tuple[int, ...] = ()
    ends: tuple[int, float] | None = None
    rate: float = 0.1
    kind: Literal["one", "two", "three"] | None = None
    test: int | Literal["all"] = 9
    out: Path | None = None
    number: int | Literal["all", "none"] = 5
    quick: bool = False


def parsed(*words):
    return common.parse(Args, "example", words, examples=[])


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
    assert parsed("make", "--steps", written).steps == meant
    assert parsed("make", f"--steps={written}").steps == meant
    assert parsed("make", "--marks", written, "3", written).marks == (meant, 3, meant)
    assert parsed("make", "--ends", written, "1e-3").ends == (meant, 0.001)
    assert parsed("make", "--test", written).test == meant
    assert parsed("make", "--test", "all").test == "all"


@pytest.mark.parametrize("written", ["1.5", "1e-4", "abc", "1e400", "inf", "nan", "", "0x10", "1,000"])
def test_what_is_no_whole_number(written):
    with pytest.raises(Exception, match=re.escape(f"--steps is {written!r}; it must be a whole number, such as 1000")):
        parsed("make", "--steps", written)


def test_a_number_or_a_word():
    assert [parsed("make", "--number", word).number for word in ("1e3", "-1", "all")] == [1000, -1, "all"]


def test_words_by_their_place_may_stand_anywhere():
    expected = Args("make", ("a", "b"), marks=(1, 2), quick=True, out=Path("x=y"))
    assert parsed("make", "a", "b", "--marks", "1", "2", "--quick", "--out=x=y") == expected
    assert parsed("make", "--quick", "a", "b", "--out", "x=y", "--marks", "1", "2") == expected
    assert parsed("--out", "x=y", "make", "--quick", "a", "b", "--marks", "1", "2") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ACTION is required: see isoloss example --help"),
        (["mak"], "ACTION is 'mak'; it must be make or show; did you mean make?"),
        (["make", "--test", "some"], "--test is 'some'; it must be a whole number, such as 1000 or 1e3, or all"),
        (["make", "--kind", "four"], "--kind is 'four'; it must be one, two or three"),
        (
            ["make", "--number", "al"],
            "--number is 'al'; it must be a whole number, such as 1000 or 1e3, or all, none; did",
        ),
        (
            ["make", "--number", "2.5"],
            "--number is '2.5'; it must be a whole number, such as 1000 or 1e3, or all, none",
        ),
        (["make", "--rate", "fast"], "--rate is 'fast'; it must be a number, such as 0.01 or 1e-3"),
        (["make", "--steps"], "--steps takes 1 value, but got none"),
        (["make", "--ends", "1"], "--ends takes 2 values, but got 1: 1"),
        (["make", "--quik"], "there is no option --quik; did you mean --quick? isoloss example --help lists all"),
        (["make", "--num_steps", "3"], "there is no option --num_steps; did you mean --steps? isoloss example --help"),
        (["make", "--zzz"], "there is no option --zzz: isoloss example --help lists all"),
        (["make", "-o", "x"], "there is no option -o: isoloss example --help lists all"),
    ],
)
def test_what_is_wrong_is_one_sentence(words, message):
    with pytest.raises(Exception, match="^" + re.escape(message)):
        parsed(*words)


def parts(args):
    """The arguments, then each group of options in them."""
    return [args, *(part for value in vars(args).values() if is_dataclass(value) for part in parts(value))]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_subcommand_is_read_as_tyro_reads_it(name):
    """Each option with a value of its type, alone; what is left to tyro must then be what it takes."""
    cls = COMMANDS[name]
    samples = {int: "1e1", float: "1e-1", str: "word", Path: "file"}

    def value(kind):
        if get_origin(kind) is Union:  # a number or a word
            return value(get_args(kind)[0])
        return samples.get(kind) or str(kind.__args__[-1])

    known = list(_arguments(cls))
    fixed = [value(kind) for argument in known if argument.is_positional for kind in argument.types]
    required = [w for a in known if a.is_required and not a.is_positional for w in (a.name, value(a.types[0]))]
    options = [argument for argument in known if not argument.is_positional]
    assert {"--json"} <= {option.name for option in options}
    for option in options:
        words = [*fixed, *required, option.name, *map(value, option.types)]
        found = common.parse(cls, name, words, examples=[])
        field = option.name[2:].replace("-", "_")
        if option.types == (int,):
            assert _value_of(found, field) == ((10,) if option.is_many else 10)
        assert read(cls, name, words) == read(cls, name, read(cls, name, words))


def _value_of(args, field):
    """The value of a field, also of a group of options."""
    if hasattr(args, field):
        return getattr(args, field)
    groups = [value for value in vars(args).values() if is_dataclass(value)]
    values = [_value_of(group, field) for group in groups]
    return next((value for value in values if value is not None), None)


def test_what_other_programs_call_an_option_leads_to_ours():
    ours = {argument.name[2:] for cls in COMMANDS.values() for argument in _arguments(cls)}
    assert set(ALSO_CALLED.values()) <= ours
    for cls in COMMANDS.values():
        own = {argument.name[2:] for argument in _arguments(cls)}
        assert not {(other, name) for other, name in ALSO_CALLED.items() if {other, name} <= own}


def test_a_dtype_of_training_is_its_precision():
    with pytest.raises(IsolossError, match=r"^there is no option --dtype; did you mean --precision\?"):
        read(COMMANDS["train"], "train", ["run", "--dtype", "bfloat16"])


def test_the_commands_of_every_day(capsys, tmp_path):
    train = ("train", tmp_path / "run", "--language", "pcfg-laptop")
    assert "did you mean --learning-rate?" in refusal(capsys, *train, "--lr", "0.1", alone=True)
    assert "did you mean --batch-size?" in refusal(capsys, *train, "--bs", "8", alone=True)
    assert "did you mean --weight-decay?" in refusal(capsys, *train, "--wd", "0", alone=True)
    assert "float32, bfloat16 or float64" in refusal(capsys, "flatness", "x", "--dtype", "fp16", alone=True)
    assert main(["trian"]) == 2
    assert "no subcommand 'trian'; did you mean train?" in capsys.readouterr().err
    assert main([*map(str, train), "--steps", "1e4", "--print-config"]) == 0
    assert "steps = 10000\n" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_path_with_a_typo_is_told_the_nearest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs", "first", "checkpoints", "step-100").mkdir(parents=True)
    Path("book.txt").write_text("words")
    meant = {
        ("eval", "runs/frist"): "runs/first",
        ("show", "runs/frist"): "runs/first",
        ("train", "r", "--config", "bok.txt"): "book.txt",
        ("sample", "bok.txt", "--tokenizer", "x"): "book.txt",
        ("sample", "pcfg-latop"): "pcfg-laptop",
        ("transfer", "runs/frist", "--task", "root"): "runs/first",
        ("flatness", "runs/frist", "--data", "book.txt"): "runs/first",
        ("expand", "runs/frist/checkpoints/step-100", "--into", "d32"): "runs/first/checkpoints/step-100",
        ("tokenizer", "bok.txt", "--output", "t"): "book.txt",
        ("study", "plan", "same-los"): "same-loss",
        ("theory", "bracket"): "brackets",
    }
    for words, name in meant.items():
        assert f"did you mean {name}?" in refusal(capsys, *words, alone=True)
