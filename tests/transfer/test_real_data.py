"""The example with real data runs, and goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_data.py"


@pytest.mark.slow
def test_the_example_with_real_data(tmp_path: Path, shared_data: Path) -> None:
    command = [
        *(sys.executable, str(EXAMPLE), "--output", str(tmp_path), "--text", str(shared_data / "openwebtext-1000")),
        *("--sst2", str(shared_data / "glue-sst2"), "--rte", str(shared_data / "glue-rte"), "--size", "d16"),
        *("--steps", "4", "--sst2-examples", "650", "--rte-examples", "650", "--seeds", "1", "--vocabulary", "400"),
        *("--threads", "1"),
    ]
    first = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    found = {(result["task"], result["method"], result["model"].rpartition("-")[2]) for result in results.values()}
    assert found == {(task, how, step) for task in ("sst2", "rte") for how in ("probe", "finetune") for step in "04"}
    assert all(0.3 < result["accuracy"]["value"] < 0.7 for result in results.values())
    # a second time everything is there: the same figures
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == first
