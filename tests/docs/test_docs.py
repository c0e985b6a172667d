"""What README and the pages of docs show is run: every fenced block, in order, in one folder, as a newcomer would."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from blocks import PAGES, ROOT, blocks_of

from forking import Commands

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
OUTPUTS = ("text", "json")  # what a command prints
DOCTESTS = "errata.md"  # whose Python is run by tests/theory/test_errata.py


def is_doctest(block):
    return block.page.name == DOCTESTS and block.is_python and block.text.startswith(">>> ")


def is_directive(block):
    return block.language.startswith("{")


def test_every_block_is_of_a_kind_that_is_known():
    assert len(BLOCKS) > 40
    for block in BLOCKS:
        known = block.language in ("sh", "python", *OUTPUTS) or block.mark == "file" or is_directive(block)
        assert known, f"{block.place}: neither run nor an output: mark it, or use one of sh, python, text, json"
        assert block.reason or not block.mark, f"{block.place}: the mark {block.mark} needs a reason or a name"


def test_a_block_in_json_is_json():
    for block in BLOCKS:
        for line in block.text.splitlines() if block.language == "json" else ():
            json.loads(line)


def test_blocks_are_found_with_what_the_comment_above_says(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```sh\ntrue\n```\n<!-- slow: minutes -->\n```python\n1\n\n2\n```\n<!-- no-run -->\n~~~sh\n```\n~~~\n"
        "<!-- no-run: far above -->\n\n```text\n```\n"
    )
    found = [(b.line, b.language, b.mark, b.reason, b.text) for b in blocks_of(page)]
    assert found == [
        (3, "sh", "", "", "true\n"),
        (7, "python", "slow", "minutes", "1\n\n2\n"),
        (13, "sh", "no-run", "", "```\n"),
        (18, "text", "", "", "\n"),
    ]


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("```sh\nfalse\ntrue\n```\n", "exit status 1"),
        ("```sh\nfalse | cat\n```\n", "exit status 1"),
        ("```sh\nisoloss train runs/x --larning-rate 1\n```\n", "did you mean --learning-rate?"),
        ("```sh\necho Warning: careful >&2\n```\n", "a warning"),
        ("```python\nfrom isoloss.flatness import fisher_tracee\n```\n", "ImportError"),
        ("```python\nimport warnings\nwarnings.warn('careful')\n```\n", "UserWarning: careful"),
    ],
)
def test_a_block_that_does_not_do_what_it_should_is_a_failure(tmp_path, block, why):
    page = tmp_path / "page.md"
    page.write_text(block)
    with Commands(tmp_path / "bin", preloaded=()) as commands:
        newcomer = Newcomer(tmp_path, commands)
        newcomer.do(*blocks_of(page))
    assert len(newcomer.failures) == 1
    assert why in newcomer.failures[0]


class Newcomer:
    """Does what the pages say, in a folder; keeps what went wrong."""

    def __init__(self, folder, commands):
        self.folder, self.failures, self.seconds = folder, [], []
        path = os.pathsep.join([str(commands.folder), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.names = {}
        self.done = set()

    def do(self, block):
        began = time.monotonic()
        try:
            if block.mark == "file":
                path = self.folder / block.reason
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.text)
            elif block.is_python:
                self.python(block)
            else:
                self.shell(block)
        except Exception as error:
            story = "".join(traceback.format_exception(error))  # an import may fail for what it imports
            self.failures.append(f"--- {block.place}: {story}\n{block.text}")
        self.seconds.append((time.monotonic() - began, block.place))

    def shell(self, block):
        # pages repeat each other's commands; one that has been done would only say that all is there
        commands = re.sub(r"\\\n\s*|\s+#.*", "", block.text).splitlines()
        script = "\n".join(command for command in commands if command not in self.done)
        self.done.update(commands)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}"
        assert "warning" not in done.stdout.lower(), f"a warning\n{done.stdout[-3000:]}"

    def python(self, block):
        names = self.names.setdefault(block.page, {"__name__": "__main__"})
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        with contextlib.chdir(self.folder):
            exec(code, names)


def do_all(folder, chosen):
    """Do the chosen blocks; return the newcomer."""
    with Commands(folder / "bin") as commands:
        scratch = folder / "scratch"
        scratch.mkdir()
        newcomer = Newcomer(scratch, commands)
        for block in BLOCKS:
            if chosen(block):
                newcomer.do(block)
    return newcomer


def is_run(block):
    is_output = block.language in OUTPUTS and block.mark != "file"
    return not (block.mark == "no-run" or is_output or is_directive(block) or is_doctest(block))


def report(newcomer):
    slowest = ", ".join(f"{place} {seconds:.1f} s" for seconds, place in sorted(newcomer.seconds)[:-6:-1])
    print(f"{len(newcomer.seconds)} blocks in {sum(s for s, _ in newcomer.seconds):.0f} s; the slowest: {slowest}")
    assert not newcomer.failures, "\n".join(newcomer.failures)


@pytest.mark.slow  # minutes
def test_every_block_does_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    report(do_all(tmp_path, lambda block: is_run(block) and block.mark != "slow"))


@pytest.mark.slow
def test_every_slow_block_does_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    report(do_all(tmp_path, is_run))
