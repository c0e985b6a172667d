"""The command line as a user meets it: results as JSON, errors as one sentence, nothing half-written."""

import errno
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import nltk
import pytest
from safetensors import SafetensorError
from speaking import as_json, refusal

from isoloss import config as configs
from isoloss.cli import ls
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import BracketsConfig
from isoloss.registry import MEASURES, RESCALINGS, STUDIES
from isoloss.run_config import TrainConfig
from isoloss.runs import Run

RULES = """\
S A B 2
S B A 1
A a 3
A b 1
B B A 2
B b 1
B c 1
"""


@pytest.fixture
def grammar(tmp_path):
    path = tmp_path / "tiny.pcfg"
    path.write_text(RULES)
    return path


# --- results


def sentence_probability(words):
    """Pr(words) under RULES by trying every split: A and B yield these words."""
    lexicon = {"A": {"a": 3 / 4, "b": 1 / 4}, "B": {"b": 1 / 4, "c": 1 / 4}}
    binary = {"S": [("A", "B", 2 / 3), ("B", "A", 1 / 3)], "B": [("B", "A", 2 / 4)]}

    def inside(symbol, span):
        total = lexicon.get(symbol, {}).get(span[0], 0.0) if len(span) == 1 else 0.0
        for left, right, p in binary.get(symbol, []):
            total += sum(p * inside(left, span[:k]) * inside(right, span[k:]) for k in range(1, len(span)))
        return total

    return inside("S", tuple(words))


def test_sample_gives_the_entropy_that_enumeration_gives(capsys, grammar):
    document = as_json(capsys, "sample", grammar, "--num-sentences", "40", "--length", "6")
    assert {len(s["words"]) for s in document["sentences"]} > {2, 3}
    for sentence in document["sentences"]:
        words = sentence["words"]
        for position, entropy in enumerate(sentence["conditional_entropy_nats"]):
            joint = [sentence_probability([*words[:position], w, *words[position + 1 :]]) for w in "abc"]
            shares = [p / sum(joint) for p in joint if p > 0]
            assert entropy == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-10, abs=1e-14)


def test_sample_gives_the_probability_given_the_longest_length(capsys, grammar):
    document = as_json(capsys, "sample", grammar, "--num-sentences", "40", "--length", "4")
    possible = sum(sentence_probability(words) for n in range(2, 5) for words in itertools.product("abc", repeat=n))
    for sentence in document["sentences"]:
        expected = math.log(sentence_probability(sentence["words"]) / possible)
        assert sentence["log_prob_nats"] == pytest.approx(expected, rel=1e-10)


def test_the_same_seed_samples_the_same(capsys):
    first, again, other = (as_json(capsys, "sample", "pcfg-varied", "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert first["sentences"] != other["sentences"]


def test_eval_measures_what_is_missing_and_nothing_twice(capsys, run):
    words = ("measure", run, "--measures", "loss", "trace", "--loss-sentences", "64", "--num-sequences", "32")
    document = as_json(capsys, *words)
    assert [(e["measure"], e["step"]) for e in document["evaluations"]] == [
        ("loss", 10),
        ("trace", 10),
        ("loss", 30),
        ("trace", 30),
    ]
    loss = document["evaluations"][0]["estimates"]
    assert loss["loss"]["value"] == pytest.approx(loss["entropy"]["value"] + loss["kl"]["value"], rel=1e-12)
    files = {p: p.stat().st_mtime_ns for p in run.rglob("*.json")}
    assert as_json(capsys, *words) == document
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*.json")} == files
    changed = as_json(capsys, *words[:-1], "16")
    assert changed["evaluations"][1]["settings"]["num_sequences"] == 16


def test_ls_shows_the_kinds_first_and_one_of_a_kind(capsys):
    kinds = {row["kind"]: row["number"] for row in as_json(capsys, "ls")["kinds"]}
    assert kinds["studies"] == len(list(STUDIES))
    assert kinds["measures"] == len(list(MEASURES))
    [probe] = as_json(capsys, "ls", "measures", "few-shot-root-100")["measures"]
    assert probe["measure"] == "few-shot-TASK-NUMBER"
    settings = {row["setting"]: row["default"] for row in probe["settings"]}
    assert settings["num_test"] == "4096"
    assert "task" not in settings
    assert main(["ls", "algorithms", "sam"]) == 0
    assert "\n  --sam-rho (default: 0.05): Radius: " in capsys.readouterr().out
    for words, told in {
        ("measures", "trce"): "no measure 'trce'; did you mean trace?",
        ("sizes", "d33"): "there is no 'd33' among the sizes; did you mean d32?",
        ("all", "trace"): "give the kind of 'trace'",
        ("lanuages",): "did you mean languages?",
    }.items():
        assert told in refusal(capsys, "ls", *words)


def test_ls_names_the_families_with_known_rescalings(capsys):
    rows = as_json(capsys, "ls", "rescalings")["rescalings"]
    assert {row["family"] for row in rows} == set(RESCALINGS)
    assert all(row["description"] == RESCALINGS.summary(row["family"]) != "" for row in rows)


def test_show_and_ls_find_the_run(capsys, run):
    shown = as_json(capsys, "show", run)
    assert shown["complete"] is True
    assert shown["checkpoints"] == [10, 30]
    assert shown["config"]["language"] == {"kind": "pcfg", **shown["config"]["language"]}
    listed = as_json(capsys, "ls", "runs", "--folder", run.parent)["runs"]
    assert [(row["run"], row["state"]) for row in listed] == [(str(run), "complete")]


def test_doctor_and_version(capsys):
    found = as_json(capsys, "doctor")
    assert found["software"]["python"] == sys.version.split()[0]
    installed, missing = found["software"]["extras"].split("; not installed: ")
    assert installed.startswith("lab, study, hub")
    assert ("tensorboard" in missing.split(", ")) == (importlib.util.find_spec("tensorboard") is None)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("isoloss ")


# --- refusals


# --- the console script


def isoloss(*words, stdout=subprocess.PIPE, **environment):
    """Run the console script in a process of its own."""
    command = [sys.executable, "-m", "isoloss", *map(str, words)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **environment}, timeout=60, check=False
    )


def test_a_terminal_without_a_plus_minus_sign():
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = isoloss("sample", "pcfg-laptop", **ascii_only)
    assert done.returncode == 0
    assert b"nats (mean over 2,000 drawn sentences)" in done.stdout
    assert b" +- " in done.stdout
    assert not any(byte > 127 for byte in done.stdout)


def test_json_is_the_same_words_in_any_encoding(tmp_path):
    for name in ("ascii", "utf-8"):
        folder = tmp_path / name / "\u00e9t\u00e9"
        done = isoloss("text", "python-docs", folder, "--json", PYTHONIOENCODING=name)
        assert json.loads(done.stdout)["folder"] == str(folder)


@pytest.mark.parametrize(
    ("words", "unbuffered"), [(("ls", "sizes"), ""), (("ls", "sizes"), "1"), (("--help",), ""), (("--help",), "1")]
)
def test_a_reader_that_has_gone_is_no_error(words, unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = isoloss(*words, stdout=write, PYTHONUNBUFFERED=unbuffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 75),
        (OSError(errno.EACCES, "Permission denied"), 2),
        # as safetensors words it
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 75),
        (SafetensorError("Error while serializing: I/O error: Permission denied (os error 13)"), 2),
    ],
)
def test_a_disk_that_is_full_is_told_from_wrong_input(monkeypatch, capsys, cause, status):
    def fail(_):
        raise IsolossError("cannot write the checkpoint") from cause

    monkeypatch.setattr(ls, "main", fail)
    assert main(["ls"]) == status
    assert capsys.readouterr().err == "isoloss ls: cannot write the checkpoint\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_sentence():
    with open("/dev/full", "wb") as full:
        done = isoloss("ls", "sizes", stdout=full)
    assert done.returncode == 75
    assert len(done.stderr.splitlines()) == 1
    assert b"No space left" in done.stderr


def test_sample_prints_the_tree_that_a_sentence_was_derived_by(capsys, grammar):
    plain = as_json(capsys, "sample", grammar, "--num-sentences", "40", "--length", "6")["sentences"]
    treed = as_json(capsys, "sample", grammar, "--num-sentences", "40", "--length", "6", "--tree")["sentences"]
    assert [{**sentence, "tree": None} for sentence in plain] == [{**sentence, "tree": None} for sentence in treed]
    assert "tree" not in plain[0]
    rules = nltk.PCFG.fromstring(
        "S -> A B [0.666666666667] | B A [0.333333333333]\nA -> 'a' [0.75] | 'b' [0.25]\n"
        "B -> B A [0.5] | 'b' [0.25] | 'c' [0.25]"
    )
    allowed = {nltk.Production(rule.lhs(), rule.rhs()) for rule in rules.productions()}
    for sentence in treed:
        tree = nltk.Tree.fromstring(sentence["tree"])
        assert tree.leaves() == sentence["words"]
        assert tree.label() == "S"
        assert set(tree.productions()) <= allowed


def test_a_tree_with_unary_rules_and_quoted_brackets(capsys, tmp_path):
    path = tmp_path / "unary.pcfg"
    path.write_text("S A 1\nA L R 1\nL ( 1\nR ) 1\n")
    assert main(["sample", str(path), "--tree", "--num-sentences", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == ["( )", "    (S (A (L '(') (R ')')))"]


def test_runs_that_cannot_be_read_are_listed_beside_the_others(tmp_path, capsys):
    texts = {
        "broken": "{",
        "empty": "{}",
        "other": json.dumps(
            {"config": {**configs.to_dict(TrainConfig(language=BracketsConfig())), "language": {"kind": "dice"}}}
        ),
    }
    Run(tmp_path / "good").create(TrainConfig(language=BracketsConfig()))
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert main(["ls", "runs", "--folder", str(tmp_path), "--json"]) == 0
    states = {Path(row["run"]).name: row["state"] for row in json.loads(capsys.readouterr().out)["runs"]}
    assert states["good"] == "step 0"
    assert "unreadable: " in states["broken"]
    assert "not a readable JSON file" in states["broken"]
    assert "has no config" in states["empty"]
    assert "not 'dice'; another may be in a package that is not installed" in states["other"]
    assert main(["ls", "runs", "--folder", str(tmp_path)]) == 0


def test_evaluations_are_listed_in_the_order_in_which_they_were_asked_for(run, capsys):
    words = ["--measures", "trace", "squared-norm", "--steps", "30", "--num-sequences", "32", "--threads", "1"]
    capsys.readouterr()
    assert main(["measure", str(run), *words]) == 0
    rows = [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["trace", "squared-norm"]


@pytest.mark.parametrize("subcommand", ["train", "measure"])
def test_an_interruption_says_which_command_goes_on(subcommand, run, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    from isoloss.cli import options

    monkeypatch.setattr(options, "parse", stop)
    assert main([subcommand, str(run)]) == 130
    err = capsys.readouterr().err
    assert "To go on:" in err
    assert f"  isoloss {subcommand} {run}" in err


def test_a_tokenizer_that_is_smaller_than_asked_is_told(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three " * 50)
    assert main(["tokenizer", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t"), "--vocab-size", "500"]) == 0
    assert "tokens, not 500: the texts hold no more" in capsys.readouterr().err
