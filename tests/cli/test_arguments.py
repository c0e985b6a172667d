"""Command lines: whole numbers as people write them, choices, and what a misspelt option was meant to be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from speaking import refusal

from isoloss.cli import options
from isoloss.cli.main import main
from isoloss.errors import IsolossError


@dataclass(frozen=True)
class Args:
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


def parsed(*words):
    return options.parse(Args, "example", words, examples=[])


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
    assert parsed("make", "--ends", written, "2").ends == (meant, 2)
    assert parsed("make", "--test", written).test == meant
    assert parsed("make", "--test", "all").test == "all"


def told(*words):
    """What is said of a command line that is refused."""
    with pytest.raises(IsolossError) as error:
        parsed(*words)
    return str(error.value).removesuffix("; isoloss example --help says more")


@pytest.mark.parametrize("written", ["1.5", "1e-4", "abc", "1e400", "inf", "nan", "", "0x10", "1,000"])
def test_what_is_no_whole_number(written):
    text = f"--steps is {written!r}; it must be a whole number, such as 1000 or 1e3"
    assert told("make", "--steps", written) == text


def test_words_are_read_as_they_are_meant():
    assert parsed("make", "--rate", "-1e-3").rate == -0.001
    assert parsed("make", "--batch_size", "7").batch_size == parsed("make", "--bs=7").batch_size == 7


def test_a_number_or_a_word():
    assert [parsed("make", "--number", word).number for word in ("1e3", "-1", "all")] == [1000, -1, "all"]


def test_words_by_their_place_may_stand_before_and_after_options():
    expected = Args("make", ("a", "b"), marks=(1, 2), quick=True, out=Path("x=y"))
    assert parsed("make", "a", "b", "--marks", "1", "2", "--quick", "--out=x=y") == expected
    assert parsed("make", "--quick", "a", "b", "--out", "x=y", "--marks", "1", "2") == expected
    assert parsed("--out", "x=y", "make", "--quick", "a", "b", "--marks", "1", "2") == expected


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


def test_the_commands_of_every_day(capsys, tmp_path):
    train = ("train", tmp_path / "run", "--language", "pcfg-laptop")
    told = refusal(capsys, "measure", "x", "--dtype", "fp16", alone=True)
    assert told.endswith("it must be one of float32, bfloat16, float64; isoloss measure --help-all says more")
    assert main([*map(str, train), "--steps", "1e4", "--print-config"]) == 0
    assert "steps = 10000\n" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_path_with_a_typo_is_told_the_nearest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs", "first", "checkpoints", "step-100").mkdir(parents=True)
    Path("book.txt").write_text("words")
    meant = {
        ("measure", "runs/frist"): "runs/first",
        ("show", "runs/frist"): "runs/first",
        ("train", "r", "--config", "bok.txt"): "book.txt",
        ("sample", "bok.txt", "--tokenizer", "x"): "book.txt",
        ("sample", "pcfg-latop"): "pcfg-laptop",
        ("transfer", "runs/frist", "--task", "root"): "runs/first",
        ("measure", "runs/frist", "--data", "book.txt"): "runs/first",
        ("expand", "runs/frist/checkpoints/step-100", "--into", "d32"): "runs/first/checkpoints/step-100",
        ("tokenizer", "bok.txt", "--output", "t"): "book.txt",
        ("study", "plan", "same-los"): "same-loss",
    }
    for words, name in meant.items():
        assert f"did you mean {name}?" in refusal(capsys, *words, alone=True)
