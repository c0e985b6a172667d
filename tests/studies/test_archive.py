"""The archive of a study: results without checkpoints that count as done, and what is no longer known of them."""

import io
import lzma
import shutil
import tarfile

import pytest

from isoloss import files
from isoloss.cli import study as command
from isoloss.errors import IsolossError
from isoloss.runs import ARCHIVED, Run
from isoloss.studies.archive import archive, check, restore
from isoloss.studies.comparison import difference
from isoloss.studies.folder import StudyFolder
from isoloss.studies.results import run_of
from isoloss.studies.spec import load_study
from studies_in_process import call, carry_out


@pytest.fixture
def study(file, finished):
    """The finished study in blocks."""
    return StudyFolder(load_study(file), finished)


@pytest.fixture
def restored(study, file, tmp_path):
    """A folder with all that an archive of it holds."""
    archive(study, tmp_path / "archive")
    folder = StudyFolder(load_study(file), tmp_path / "restored")
    folder.prepare()
    restore(folder, tmp_path / "archive")
    return folder


def test_what_was_archived_is_done_and_gives_the_same_report(study, restored):
    assert all(unit.done() for unit in restored.plan())
    assert not list(restored.path.rglob("checkpoints"))
    assert restored.summary().to_dict() == study.summary().to_dict()
    assert restored.results().table().equals(study.results().table())


def test_the_rest_is_done_as_if_nothing_had_been_archived(study, file, tmp_path):
    archive(study, tmp_path / "archive")
    (tmp_path / "archive/block-001.tar.xz").unlink()
    folder = StudyFolder(load_study(file), tmp_path / "out")
    folder.prepare()
    assert restore(folder, tmp_path / "archive") == ["dropped-1", "plain-1", "dropped-3", "plain-3"]
    _, done = carry_out(folder.plan(), folder.path)
    assert sorted(done) == ["measure dropped-2", "measure plain-2", "train dropped-2", "train plain-2"]
    assert folder.summary().to_dict() == study.summary().to_dict()
    assert restore(folder, tmp_path / "archive") == []


def test_equal_results_give_equal_bytes_and_an_archive_of_an_archive_is_the_same(study, restored, tmp_path):
    assert archive(study, tmp_path / "archive") == []
    assert archive(restored, tmp_path / "archive") == []
    assert [path.name for path in archive(restored, tmp_path / "again")] == [f"block-00{i}.tar.xz" for i in range(3)]


def test_verify_says_what_it_can_no_longer_check(restored):
    checks = dict(restored.verify())
    assert set(checks.values()) == {None}
    assert "plain-1: from an archive without checkpoints: weights not checked, nothing measured again" in checks
    path = run_of(restored.path, "plain-1", restored.scale.experiments["plain-1"]).evaluation_path("loss", 6)
    path.write_text(path.read_text().replace("0", "1", 1))
    problems = {name: problem for name, problem in restored.verify() if problem}
    assert problems["plain-1: files from the archive"] == "missing or changed: evaluations/loss@step-6.json"


def test_a_difference_of_two_archived_checkpoints_is_not_paired(study, restored):
    exact, loose = (
        difference(*(folder.results().at(name)["trace"] for name in ("plain-1", "dropped-1")))
        for folder in (study, restored)
    )
    assert loose.value == exact.value
    parts = [restored.results().at(name)["trace"].estimate.stderr for name in ("plain-1", "dropped-1")]
    assert loose.stderr == pytest.approx((parts[0] ** 2 + parts[1] ** 2) ** 0.5)
    assert "not archived" in loose.method


def test_arrays_other_than_those_of_errors_are_kept(study, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = StudyFolder(study.study, shutil.copytree(study.path, tmp_path / "copy"))
    run = run_of(folder.path, "plain-1", folder.scale.experiments["plain-1"])
    path = run.evaluation_path("trace", 6)
    examples = path.with_suffix(".safetensors")
    save_file({**load_file(examples), "trace.gram": load_file(examples)["trace.influence"]}, examples)
    files.write_json(path, files.read_json(path) | {"examples": files.sha256(examples)})
    archive(folder, tmp_path / "archive")
    with tarfile.open(tmp_path / "archive/block-000.tar.xz") as tar:
        kept = [name for name in tar.getnames() if name.endswith(".safetensors")]
    assert kept == ["plain-1/evaluations/trace@step-6.safetensors"]


def test_what_is_no_archive_is_refused(study, restored, file, tmp_path):
    with pytest.raises(IsolossError, match=r"nowhere holds no archive of a study: it has no block-N\.tar\.xz"):
        restore(restored, tmp_path / "nowhere")
    other = StudyFolder(study.study, tmp_path / "other", seed_offset=1)
    with pytest.raises(IsolossError, match="archive holds no run of the study blocks at scale tiny: it was made by an"):
        check(other, tmp_path / "archive")
    empty = StudyFolder(study.study, tmp_path / "empty")
    with pytest.raises(IsolossError, match=r"no block of .*empty is complete yet"):
        archive(empty, tmp_path / "none")
    path = tmp_path / "archive/block-000.tar.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IsolossError, match=r"block-000\.tar\.xz cannot be read"):
        restore(other, tmp_path / "archive")
    path.write_bytes(lzma.compress(lzma.decompress(whole).replace(b'"value": 0.', b'"value": 1.', 1)))
    fresh = StudyFolder(study.study, tmp_path / "fresh")
    with pytest.raises(IsolossError, match=r"is damaged: .*/evaluations/.* is not what was archived"):
        restore(fresh, tmp_path / "archive")
    assert not Run(tmp_path / "fresh/runs/dropped-1").exists
    for record in (b"[]", b'{"files": {}}', b"nothing"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            about = tarfile.TarInfo("plain-1/archived.json")
            about.size = len(record)
            tar.addfile(about, io.BytesIO(record))
        path.write_bytes(lzma.compress(packed.getvalue()))
        with pytest.raises(IsolossError, match=r"is damaged: the files of plain-1 are not those that were archived"):
            check(fresh, tmp_path / "archive")


def test_the_commands(capsys, file, finished, tmp_path, here):
    out = tmp_path / "kept"
    words = "archive", file, "--folder", finished, "--output", out
    assert "wrote block-000.tar.xz, block-001.tar.xz, block-002.tar.xz to" in call(capsys, *words)
    assert "has all complete blocks already" in call(capsys, *words)
    assert command.main(["run", str(file), "--folder", str(tmp_path / "new"), "--archive", str(out), *here]) == 0
    said = capsys.readouterr().err
    assert f"6 runs restored from {out}, without checkpoints" in said
    assert "all 12 units were already done" in said
    assert (tmp_path / "new/runs/plain-1" / ARCHIVED).is_file()
    with pytest.raises(IsolossError, match="holds no archive of a study"):
        command.main(["run", str(file), "--folder", str(tmp_path / "typo"), "--archive", str(tmp_path / "kep"), *here])
    assert not (tmp_path / "typo").exists()
    for wrong, problem in (
        (("archive", file, "--folder", finished), "--output is required for study archive"),
        (("archive", file, "--folder", tmp_path / "no", "--output", out), "holds no study yet"),
        (("status", file, "--archive", out), "--archive is for study run, not for study status"),
    ):
        with pytest.raises(IsolossError, match=problem):
            command.main([str(word) for word in wrong])
