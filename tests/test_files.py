"""Files: whole or not at all, and one process at a time."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isoloss import files
from isoloss.errors import IsolossError


def test_a_file_of_another_name_is_no_typo(tmp_path):
    for name in ("b.jsonl", "text.txt", "o"):
        (tmp_path / name).touch()
    meant = {"a.jsonl": None, "mine.txt": None, "no": None, "tex.txt": "text.txt", "text.tx": "text.txt"}
    for name, other in meant.items():
        assert files.nearest(tmp_path / name) == ("" if other is None else f"; did you mean {tmp_path / other}?")


def test_a_failed_directory_leaves_the_old_one(tmp_path):
    target = tmp_path / "step-1"
    with files.new_directory(target) as folder:
        (folder / "a").write_text("old")

    def fail():
        with files.new_directory(target) as folder:
            (folder / "a").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (target / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_directory_is_replaced_whole(tmp_path):
    target = tmp_path / "step-1"
    for name in ("a", "b"):
        with files.new_directory(target) as folder:
            (folder / name).write_text(name)
    assert [p.name for p in target.iterdir()] == ["b"]


def test_an_error_between_the_renames_puts_the_old_directory_back(tmp_path, monkeypatch):
    target = tmp_path / "step-1"
    with files.new_directory(target) as folder:
        (folder / "a").write_text("old")
    rename = Path.rename

    def fails_for_the_new_one(path, name):
        if name == target and not path.name.endswith("-replaced"):
            raise KeyboardInterrupt
        return rename(path, name)

    monkeypatch.setattr(Path, "rename", fails_for_the_new_one)
    with pytest.raises(KeyboardInterrupt), files.new_directory(target) as folder:
        (folder / "a").write_text("new")
    assert (target / "a").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(tmp_path / "x.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IsolossError, match=r"cannot write .*below\.txt"):
        files.write_text(tmp_path / "file" / "below.txt", "text")


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    (tmp_path / "checkpoints" / f"{files.TEMPORARY}1-step-3").mkdir(parents=True)
    (tmp_path / f"{files.TEMPORARY}1-run.json").write_text("{")
    (tmp_path / "run.json").write_text("{}")
    files.remove_unfinished(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["checkpoints", "run.json"]


def test_a_place_for_results_is_tried_without_a_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("x")
    for folder in (tmp_path, tmp_path / "not" / "yet", Path(), Path("new")):
        files.check_writable(folder)
    for folder in (tmp_path / "kept.txt", tmp_path / "kept.txt" / "below", Path("kept.txt/new")):
        with pytest.raises(IsolossError, match=f"cannot write in {folder}: Not a directory"):
            files.check_writable(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_a_folder_is_held_by_one_process(tmp_path):
    code = (
        "import pathlib, sys\nfrom isoloss import files\nfrom isoloss.errors import IsolossError\n"
        "try:\n    with files.lock(pathlib.Path(sys.argv[1])): print('got it')\nexcept IsolossError as e: print(e)"
    )

    def other_process():
        return subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True).stdout

    with files.lock(tmp_path):
        assert "in use by another isoloss process" in other_process()
    assert other_process() == "got it\n"


def test_json_errors_name_the_file(tmp_path):
    with pytest.raises(IsolossError, match=r"a\.json does not exist"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"half": ')
    with pytest.raises(IsolossError, match=r"b\.json is not a readable JSON file"):
        files.read_json(tmp_path / "b.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_tensors_of_any_type_and_shape_have_a_checksum_of_their_bytes(dtype):
    one, zero = torch.ones(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    sums = {files.tensors_sha256({"x": x}.items()) for x in (one, zero, one[0], one[0, 0], one.T)}
    assert len(sums) == 5
    assert files.tensors_sha256({"x": one.T.contiguous()}.items()) == files.tensors_sha256({"x": one.T}.items())


def test_sha256_is_the_systems(tmp_path):
    (tmp_path / "x").write_bytes(os.urandom(100_000))
    theirs = subprocess.run(["sha256sum", tmp_path / "x"], capture_output=True, text=True).stdout.split()[0]
    assert files.sha256(tmp_path / "x") == theirs


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_is_written_to_and_stays(tmp_path):
    device, link = tmp_path / "full", tmp_path / "link"
    try:  # for root, a device of the test's own: a mistake would replace the machine's
        os.mknod(device, 0o666 | stat.S_IFCHR, Path("/dev/full").stat().st_rdev)
    except PermissionError:
        device = Path("/dev/full")
    link.symlink_to(device)
    for path in (device, link):
        files.check_outputs({"--csv": path, "--html": path})
        with pytest.raises(IsolossError, match=f"cannot write {path}: No space left on device"):
            files.write_text(path, "text")
        assert path.is_char_device()
    assert link.is_symlink()


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    files.write_text(pipe, "text")
    assert reader.communicate(timeout=60)[0] == b"text"
    assert pipe.is_fifo()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_the_file_that_the_output_goes_to_gets_both(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom isoloss import files\n"
        "print('first')\nfiles.write_text(Path(sys.argv[1]), 'second\\n')\nprint('third')"
    )
    for name in ("/proc/self/fd/1", tmp_path / "out.txt"):  # to the first of which /dev/stdout leads
        with (tmp_path / "out.txt").open("w") as out:
            subprocess.run([sys.executable, "-c", code, str(name)], stdout=out, check=True)
        assert (tmp_path / "out.txt").read_text() == "first\nsecond\nthird\n"


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    for name in ("folder", "empty", "new"):
        (tmp_path / f"to-{name}").symlink_to(name)
    for name in ("folder", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    (tmp_path / "to-file").symlink_to("folder/old")
    files.write_text(tmp_path / "to-file", "new")
    assert (tmp_path / "folder" / "old").read_text() == "new"
    files.write_text(tmp_path / "to-new", "new")
    with files.new_output(tmp_path / "to-empty") as made:
        (made / "a").write_text("a")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_symlink()) == [
        *("empty", "empty/a", "folder", "folder/old", "new")
    ]
    assert sum(path.is_symlink() for path in tmp_path.iterdir()) == 4


def test_a_failed_write_behind_a_link_leaves_the_old_file(tmp_path):
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "round").symlink_to("round")

    def fail():
        with files.new_file(tmp_path / "link") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with pytest.raises(IsolossError, match=r"cannot write .*round: Too many levels of symbolic links"):
        files.write_text(tmp_path / "round", "text")
    assert (tmp_path / "link").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "round"]


def test_outputs_that_would_cost_an_input_or_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "blobs"):
        Path(folder).mkdir()
    for name in ("text.txt", "blobs/1", "model/config.json", "model/page.html", "earlier.csv"):
        Path(name).write_text("old")
    Path("model/model.safetensors").symlink_to("../blobs/1")
    os.link("text.txt", "hard.csv")
    Path("alias.csv").symlink_to("model/config.json")
    inputs = ["model", "text.txt", "name/on-the-hub"]
    for name in ("model/config.json", "model/../model/model.safetensors", "blobs/1", "alias.csv", "hard.csv"):
        with pytest.raises(IsolossError, match=f"--csv is {name}, which is read as an input: name another file"):
            files.check_outputs({"--html": None, "--csv": Path(name)}, inputs)
    Path("z.csv").symlink_to("z")
    for name in ("z", "../" + tmp_path.name + "/z", "z.csv"):
        with pytest.raises(IsolossError, match="--html and --csv are the same file"):
            files.check_outputs({"--html": Path("z"), "--csv": Path(name)}, inputs)
    for name in ("model/new.csv", "model/page.html", "earlier.csv", "new.csv"):
        files.check_outputs({"--csv": Path(name), "--html": Path("other.html")}, inputs)
    assert not Path("z").exists()
