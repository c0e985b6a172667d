"""Tables and claims on terminals of some width, and piped."""

import dataclasses
import re
from pathlib import Path

import pytest

from isoloss.cli import common, ls, study
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.statistics.estimate import Estimate
from isoloss.studies.answer import card_of
from isoloss.studies.claims import Answer, Claim, ClaimResult, Verdict
from isoloss.studies.summary import Family, Summary, SummaryTable

COLUMNS = ("run", "step", "KL (nats/token)", "trace (nats/token)", "root (accuracy, %)", "prefix-4 (accuracy, %)")
ROWS = [
    ("adamw-d16", "8,000", "0.05980 ± 0.00095", "83 ± 11", "47.13 ± 0.78", "52.64 ± 0.78"),
    ("sgd-d16", "16,000", "0.04125 ± 0.00074", "9.343 ± 0.082", "49.85 ± 0.79", "55.36 ± 0.78"),
]


def printed(capsys, monkeypatch, columns, show):
    """The lines of what `show` prints on a terminal of this width; `None`: into a pipe."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    capsys.readouterr()
    show()
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def table():
    common.print_table("what was found", COLUMNS, ROWS, left=1)


@pytest.mark.parametrize("columns", [120, 100, 80])
def test_a_table_that_fits_has_its_numbers_whole(capsys, monkeypatch, columns):
    lines = printed(capsys, monkeypatch, columns, table)
    assert max(map(len, lines)) <= columns
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[-2:]] == [list(row) for row in ROWS]


@pytest.mark.parametrize("columns", [60, 40])
def test_rows_of_a_wider_table_are_lists(capsys, monkeypatch, columns):
    lines = printed(capsys, monkeypatch, columns, table)
    assert max(map(len, lines)) <= columns
    assert lines[1:] == [
        line
        for first, *cells in ROWS
        for line in (first, *(f"  {heading}: {cell}" for heading, cell in zip(COLUMNS[1:], cells, strict=True)))
    ]


def test_headings_fold_between_words(capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, 80, table)
    assert lines[0].strip() == "what was found"
    assert [line.split() for line in lines[1:4]] == [
        ["root", "prefix-4"],
        ["trace", "(accuracy,", "(accuracy,"],
        ["run", "step", "KL", "(nats/token)", "(nats/token)", "%)", "%)"],
    ]


def test_a_table_whose_text_fills_the_terminal_folds(capsys, monkeypatch):
    text = "a sentence that alone is wider than the terminal is"
    rows = [("first", text, "1"), ("second", text, "2")]
    lines = printed(capsys, monkeypatch, 30, lambda: common.print_table("t", ("a", "b", "n"), rows, left=2))
    assert max(map(len, lines)) <= 30
    assert " ".join(" ".join(lines).split()).count("terminal") == 2


def test_neither_a_long_name_nor_a_heading_is_torn(capsys, monkeypatch):
    name = "runs/" + "x" * 60
    rows = [(name, str(value), "1") for value in range(3)]
    columns = ("run", "trace (nats/token)", "samples that count")
    lines = printed(capsys, monkeypatch, 50, lambda: common.print_table("t", columns, rows, left=1))
    assert lines[1::3] == [name] * 3  # whole, to be copied
    narrow = printed(capsys, monkeypatch, 30, lambda: common.print_table("t", columns, [("a", "1", "2")] * 2, left=1))
    assert {"(nats/token)", "samples", "that", "count"} <= set(" ".join(narrow).split())


@pytest.mark.parametrize("rows", [[], [("a name", "", "1"), ("another", "", "2")]])
def test_a_column_of_nothing(capsys, monkeypatch, rows):
    columns = ("", "", "a heading of many words, which is wider")
    lines = printed(capsys, monkeypatch, 30, lambda: common.print_table("title", columns, rows, left=2))
    assert max(map(len, lines)) <= 30
    assert {word for row in rows for word in " ".join(row).split()} <= set(" ".join(lines).split())


def test_long_text_folds_before_rows_become_lists(capsys, monkeypatch):
    name = "bert.encoder.layer.*.attention.output.LayerNorm.weight"
    rows = [(name.replace(".", " "), "4,096", "0.006301", "0.003151", "0.5000")] * 2
    columns = ("parameter", "size", "before", "after", "ratio")
    lines = printed(capsys, monkeypatch, 80, lambda: common.print_table("t", columns, rows, left=1))
    assert sum(line.startswith("parameter") for line in lines) == 1
    assert sum(line.split()[-4:] == list(rows[0][1:]) for line in lines) == 2
    narrow = printed(capsys, monkeypatch, 50, lambda: common.print_table("t", columns, rows, left=1))
    assert "  before: 0.006301" in narrow


def test_a_wide_number_does_not_fold_as_text_does(capsys, monkeypatch):
    number = "0.041250 ± 0.000740 nats per token"
    rows = [("r", number, number)]
    lines = printed(capsys, monkeypatch, 70, lambda: common.print_table("t", ("run", "a", "b"), rows))
    assert lines[1:] == ["r", f"  a: {number}", f"  b: {number}"]


def test_sizes_are_numbers(capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, 80, lambda: ls.main(["sizes"]))
    last = lines[lines.index("d1920") :]
    assert {"  width: 1920", "  bert: 947,813,562", "  opt: 944,090,880"} <= set(last)


@pytest.mark.parametrize("columns", [None, 300])
def test_a_table_with_room_or_in_a_pipe_is_one(capsys, monkeypatch, columns):
    lines = printed(capsys, monkeypatch, columns, table)
    assert len(lines) == 2 + len(ROWS)
    assert re.split(r"\s{2,}", lines[1].strip()) == list(COLUMNS)
    for line, row in zip(lines[2:], ROWS, strict=True):
        assert re.split(r"\s{2,}", line.strip()) == list(row)
    if columns is None:
        assert lines == [line.rstrip() for line in lines]


# --- tables of text alone


@pytest.mark.parametrize("columns", [80, 60, 40])
@pytest.mark.parametrize("what", ["languages", "models", "tasks", "measures", "rescalings", "studies"])
def test_no_word_of_a_list_is_torn(capsys, monkeypatch, what, columns):
    lines = printed(capsys, monkeypatch, columns, lambda: ls.main([what]))
    assert max(map(len, lines)) <= columns
    whole = printed(capsys, monkeypatch, None, lambda: ls.main([what]))
    words, all_words = ({word.rstrip(":") for line in text for word in line.split()} for text in (lines, whole))
    assert words | {whole[1].split()[0]} == all_words  # a list has no heading of its first column


def test_a_row_of_a_wide_list_keeps_its_ranges_and_paths(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, monkeypatch, 80, lambda: ls.main(["models"]))
    bert = lines[lines.index("bert") :]
    assert bert[1:5] == [
        "  objective: masked",
        "  sizes: d16 to d1920",
        "  parameters: 524,570 to 947,813,562",
        "  AdamW in float32: 0.01 GB to 15.17 GB",
    ]
    paths = [Path("runs", "x" * width) for width in (10, 45)]
    for path in paths:
        Run(path).create(TrainConfig(language=PCFGConfig()))
    lines = printed(capsys, monkeypatch, 80, lambda: ls.main(["runs"]))
    assert max(map(len, lines)) <= 80
    assert all(str(path) in lines for path in paths)


def test_a_plan_opens_with_its_totals_and_says_where_the_commands_are(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, monkeypatch, 80, lambda: study.main(["plan", "same-loss"]))
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("same-loss at scale laptop: ")
    text = " ".join(line.strip() for line in lines)
    assert "--json has the command of each" in text
    assert re.search(r"\d+ min with 2 workers", text)


def test_text_shares_what_room_there_is(capsys, monkeypatch):
    sentence = "a word or two and some more to fold"
    rows = [("first", sentence, "short", sentence)]
    lines = printed(capsys, monkeypatch, 66, lambda: common.print_table("t", ("a", "b", "c", "d"), rows, left=4))
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[1:]] == [
        ["a", "b", "c", "d"],
        ["first", "a word or two and some", "short", "a word or two and some"],
        ["more to fold", "more to fold"],
    ]


# --- a study's summary


def estimate(value, stderr, unit="nats per predicted token"):
    return Estimate(value=value, stderr=stderr, samples=9, unit=unit, num_predictions=9, method="known")


ABOUT = {"direction": "increase", "of": print, "measures": "trace"}


def summary():
    flatter = Claim(
        id="sgd-flatter",
        statement="SGD, started from a converged model, makes it flatter: the trace falls by at least half",
        paper="theorem 3.3",
        **ABOUT | {"direction": "decrease"},
    )
    untested = [Claim(id=f"adversarial-{i}", statement="A model is sharper", paper="table 2", **ABOUT) for i in "12"]
    ours = {"AdamW's last": estimate(33.88, 0.13), "SGD's last": estimate(9.343, 0.082)}
    better = Claim(id="sgd-transfer", statement="SGD improves transfer", paper="figure 10", **ABOUT)
    numbers = {**ours, "half": estimate(-7.6, 0.11)}
    half = Answer(
        case="",
        numbers=numbers,
        verdict=Verdict.SHOWN,
        explanation="They were compared.",
        difference=numbers["half"],
        p_value=1e-9,
        p_adjusted=2e-9,
        detectable=0.354,
    )
    gains = (("a", 3, Verdict.SHOWN, {"role": "primary"}), ("b", 0.5, Verdict.NOT_SHOWN, {"below": 1.43}))
    answers = []
    for task, gain, verdict, more in gains:
        gained = estimate(gain, 0.5, "percentage points")
        both = {name: estimate(share, 0.01, "accuracy") for name, share in (("plain", 0.5), ("flat", 0.5 + gain / 100))}
        answers.append(
            Answer(
                case=task,
                numbers={**both, "difference": gained},
                verdict=verdict,
                explanation="They were compared.",
                difference=gained,
                p_value=0.0341,
                p_adjusted=0.0341 if "role" in more else 0.2,
                **more,
            )
        )
    untold = Answer(case="", numbers={}, verdict=Verdict.NOT_TESTED, explanation="There is no such run.")
    results = (
        ClaimResult(claim=flatter, answers=(half,)),
        ClaimResult(claim=better, answers=tuple(answers)),
        *(ClaimResult(claim=each, answers=(untold,)) for each in untested),
    )
    rows = [(("sgd-d64", 8000), {"kl": estimate(0.04125, 0.00074), "trace": estimate(9.343, 0.082)})]
    family = Family(claims_sha256="0a1b", loss_margin=0.01, secondary_tests=3)
    tables = (SummaryTable("checkpoints", "value ± standard error", ("run", "step"), rows),)
    cards = (card_of(better.statement, results[1]),)
    cards = tuple(dataclasses.replace(card, detail="a; 95 % 1.85 to 4.15") for card in cards)
    return Summary(tables, results, family, "Scale smoke: no verdict is given.", cards)


def test_the_answer_is_printed_and_a_line_for_each_claim(capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, 80, lambda: study.print_summary("Flatter?", summary()))
    assert lines == [
        "Flatter?",
        "",
        "SGD improves transfer: Yes: +3.00 ± 0.50 points",
        "    a; 95 % 1.85 to 4.15",
        "",
        "✓ sgd-flatter: shown; -7.60 ± 0.11 nats/token (95 % -7.85 to -7.35)",
        "✓ sgd-transfer, a: shown; +3.00 ± 0.50 points (95 % 1.85 to 4.15)",
        "○ sgd-transfer, b: not shown (adjusted p = 0.2); +0.50 ± 0.50 points (95 % -0.65",
        "  to 1.65)",
        "– adversarial-1; adversarial-2: not tested",
        "Scale smoke: no verdict is given.",
    ]


@pytest.mark.parametrize("columns", [None, 60, 40])
def test_the_answer_fits_where_it_is_printed(capsys, monkeypatch, columns):
    lines = printed(capsys, monkeypatch, columns, lambda: study.print_summary("Flatter?", summary()))
    if columns is not None:
        assert max(map(len, lines[:4])) <= columns
    assert "Yes: +3.00 ± 0.50 points" in " ".join(" ".join(lines).split())


# --- progress


@pytest.mark.parametrize(
    ("columns", "bar", "shown"),
    [
        (100, True, "  12/1000 steps, loss 3.5261 nats, 54,032 tokens/s"),
        (80, False, "  12/1000 steps, loss 3.5261 nats, 54,032 tokens/s"),
        (60, False, "  12/1000 steps, loss 3.5261 nats "),
    ],
)
def test_progress_is_whole_on_a_terminal(capsys, monkeypatch, columns, bar, shown):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    with common.Progress("training first", 1000, "steps") as progress:
        progress(12, "loss 3.5261 nats, 54,032 tokens/s")
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", capsys.readouterr().err)
    assert shown in said.replace("\n", "")
    assert ("━" in said) == bar
