"""A whole study, killed at random moments and run again, ends with the same bytes as one that was not."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

KILLS = 5
CLOCK = {"log.jsonl", ".lock"}  # what says when things happened


def start(folder: Path) -> subprocess.Popen[bytes]:
    words = ("study", "run", "same-loss", "--scale", "smoke", "--folder", str(folder))
    command = [sys.executable, "-m", "isoloss", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its path, but for those that belong to the clock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in CLOCK and "units" not in path.relative_to(folder).parts
    }


def test_killed_study_ends_with_the_same_bytes(tmp_path):
    whole, killed = tmp_path / "whole" / "study", tmp_path / "killed" / "study"
    began = time.monotonic()
    assert start(whole).wait() == 0
    duration = time.monotonic() - began
    moments = random.Random(7)
    for _ in range(KILLS):
        process = start(killed)
        try:
            process.wait(timeout=moments.uniform(0.1, 0.9) * duration / 2)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert start(killed).wait() == 0
    expected = contents(whole)
    assert any(path.endswith("model.safetensors") for path in expected)
    assert any(path.endswith("metrics.jsonl") for path in expected)
    assert any(path.endswith("g300-s30000-base/evaluations/trace@step-60.json") for path in expected)
    assert contents(killed) == expected
