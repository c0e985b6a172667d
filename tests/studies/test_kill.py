"""A whole study, killed at random moments and run again, ends with the same bytes as one that was not."""

import random
import subprocess
import sys
import time

import pytest
from longer_study import ENVIRONMENT, contents

KILLS = 5


def start(folder):
    words = ("study", "run", "same-loss", "--scale", "smoke", "--folder", str(folder))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "isoloss", *words], **quiet, env=ENVIRONMENT)


def result(folder):
    """Every file but those of the units, which say when things happened."""
    return {path: digest for path, digest in contents(folder, ".").items() if not path.startswith("units/")}


@pytest.mark.slow
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
            process.kill()
            process.wait()
    assert start(killed).wait() == 0
    expected = result(whole)
    for end in ("model.safetensors", "metrics.jsonl", "g300-s30000-base/evaluations/trace@step-60.json"):
        assert any(path.endswith(end) for path in expected)
    assert result(killed) == expected
