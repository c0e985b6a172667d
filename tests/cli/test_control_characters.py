"""No name of a file and no token commands the terminal that it is printed on."""

import json
import re

import pytest

from isoloss.cli import common
from isoloss.cli.main import main

CLEAR = "\x1b[2J"
NAMES = (f"a{CLEAR}b", "a\x9b2Jb", "a\rb", "a\x07b")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_has_no_control_characters(capsys, name):
    common.say(name)
    common.say_wrapped(name)
    common.note(name)
    common.print_table(name, ["name", name], [[name, "1"]])
    assert main(["measure", f"./{name}"]) == 2
    assert main([name]) == 2
    out, err = capsys.readouterr()
    assert not CONTROLS.search(out + err)
    assert f"./{name.encode('unicode_escape').decode()}".replace("\\r", "\\x0d") in err


@pytest.mark.parametrize("columns", ["100", "12"])
def test_a_table_on_a_terminal_has_no_others_than_its_own(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    common.print_table("title", ["name", "value"], [[f"a{CLEAR}b c", "1"]])
    out = capsys.readouterr().out
    assert CLEAR not in out
    assert "\\x1b[2J" in out


def test_a_json_document_reads_back_without_control_characters(capsys):
    document = {"names": [*NAMES, r"\x9b", "\\\x9b", "\x7f"]}
    common.emit_json(document)
    out = capsys.readouterr().out
    assert json.loads(out) == document
    assert not CONTROLS.search(out)


def test_tokens_are_printed_without_them(capsys, tmp_path):
    (tmp_path / "grammar.pcfg").write_text(f"S A A 1\nA a{CLEAR} 0.5\nA b 0.5\n")
    assert main(["sample", str(tmp_path / "grammar.pcfg"), "--num-sentences", "9"]) == 0
    out = capsys.readouterr().out
    assert CLEAR not in out
    assert "a\\x1b[2J" in out
