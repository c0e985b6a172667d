"""What a subcommand answers: one JSON document, or one sentence for bad input."""

import json

from isoloss.cli.main import main


def as_json(capsys, *words):
    """What a subcommand prints with --json; stdout must be that one document."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def call(capsys, *words, status=0):
    """What a call prints on stdout and stderr."""
    capsys.readouterr()
    assert main([*map(str, words)]) == status
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed


def in_one_line(text):
    """Help without its line breaks."""
    return " ".join(text.split())


def refusal(capsys, *words, alone=False):
    """What bad input gets: one sentence; `alone`: with no note before it."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert lines[-1].startswith(f"isoloss {words[0]}: ")
    assert not alone or len(lines) == 1
    return lines[-1]


def trace_of(document, model=0):
    """The trace of a model in what `isoloss measure --json` prints."""
    traces = [each["estimates"]["trace"] for each in document["evaluations"] if each["measure"] == "trace"]
    return traces[model]
