"""The executor of the studies' tests, a finished study with its repetition, and one that takes some seconds."""

import subprocess

import longer_study
import pytest

import studies_in_process
from isoloss import registry
from isoloss.studies import load_study
from isoloss.studies.export import export
from isoloss.studies.folder import StudyFolder


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_figures):
    """No page here is made for its figures."""


@pytest.fixture
def here(monkeypatch):
    """The options of `isoloss study run` for units in this process."""
    monkeypatch.setattr(registry.EXECUTORS, "_entries", dict(registry.EXECUTORS._entries))
    registry.EXECUTORS.register("here", studies_in_process.run)
    return "--executor", "here"


@pytest.fixture
def file(tmp_path):
    """The file of the study in blocks."""
    return studies_in_process.write(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of the finished study; do not write into it."""
    return studies_in_process.finish(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def repeated(tmp_path_factory):
    """The same with other seeds."""
    return studies_in_process.finish(tmp_path_factory.mktemp("repeated"), seed_offset=1)


@pytest.fixture(scope="session")
def exports(finished, repeated, tmp_path_factory):
    """The study and its repetition, exported; do not write into them."""
    results = tmp_path_factory.mktemp("results")
    for offset, folder in enumerate((finished, repeated)):
        study = load_study(folder.parent / "blocks.py")
        export(StudyFolder(study, folder, seed_offset=offset), results / "ab"[offset])
    return results / "a", results / "b"


@pytest.fixture(scope="session")
def carried_out(tmp_path_factory):
    """The file of a study of some seconds, and its folder after the local executor: the bytes that others must give."""
    folder = tmp_path_factory.mktemp("local")
    file = longer_study.write(folder)
    words = longer_study.command(file, folder / "out")
    subprocess.run(words, check=True, env=longer_study.ENVIRONMENT, stdout=subprocess.DEVNULL)
    return file, folder / "out"
