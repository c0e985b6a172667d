"""What tests of several commands share: a trained run, made once and copied for each test."""

import shutil
from pathlib import Path

import pytest

from isoloss.cli.main import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of a d16 on pcfg-laptop with checkpoints at steps 10 and 30, and no evaluations."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = ["train", str(path), "--language", "pcfg-laptop", "--size", "d16", "--steps", "30", "--checkpoints", "10"]
    assert main([*words, "--batch-size", "8", "--threads", "1"]) == 0
    return path


@pytest.fixture
def run(trained, tmp_path):
    """A run of a test's own."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "tiny"))
