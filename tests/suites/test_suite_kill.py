"""A suite, killed at random moments and run again, ends with the same table as one that was not."""

import os
import random
import subprocess
import sys
import time

import pytest
from tiny_family import family, text_in

KILLS = 5


@pytest.mark.slow
def test_killed_suite_ends_with_the_same_bytes(tmp_path):
    family(tmp_path)
    text_in(tmp_path / "docs")
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    def start(folder):
        words = ("suite", "lab/tiny-seed{seed}@step{step}", "--data", "docs", "--num-sequences", "24")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path, "env": environment}
        return subprocess.Popen([sys.executable, "-m", "isoloss", *words, "--output", folder], **quiet)

    began = time.monotonic()
    assert start("whole").wait() == 0
    duration = time.monotonic() - began
    moments, killed = random.Random(7), 0
    for _ in range(KILLS):
        process = start("killed")
        try:
            process.wait(timeout=moments.uniform(0.2, 0.8) * duration)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    assert killed > 1
    assert start("killed").wait() == 0
    tables = [(tmp_path / name / "suite.parquet").read_bytes() for name in ("whole", "killed")]
    assert tables[0] == tables[1]
