"""A study of some seconds that the local executor has carried out: what all others must give, byte for byte."""

import os
import subprocess

import longer_study
import pytest


@pytest.fixture(scope="session")
def carried_out(tmp_path_factory):
    """The file of the study, and its folder."""
    folder = tmp_path_factory.mktemp("local")
    file = longer_study.write(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(longer_study.command(file, folder / "out"), check=True, env=environment, stdout=subprocess.DEVNULL)
    return file, folder / "out"
