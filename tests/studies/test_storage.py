"""Snapshots in a storage: what is pulled is what was there when it was pushed, whatever happened in between."""

import hashlib
import itertools
import json
import os
import shutil
import threading
import time
from pathlib import Path

import fsspec
import pytest

from isoloss.errors import IsolossError
from isoloss.studies import storage as storages
from isoloss.studies.storage import Storage, listing

FILES = {
    "runs/a/run.json": b"{}",
    "runs/a/metrics.jsonl": b"1\n2\n",
    "runs/a/checkpoints/step-3/model.safetensors": bytes(range(256)) * 10_000,
    "runs/a/checkpoints/step-6/model.safetensors": bytes(range(256)) * 10_000,  # the same content twice
    "runs/a/empty": b"",
}


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path):
    if request.param == "local":
        yield Storage(str(tmp_path / "storage"))
        return
    yield Storage("memory://snapshots")
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def source(tmp_path):
    write(tmp_path / "source", FILES)
    return tmp_path / "source"


def write(root, contents):
    for path, data in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def read(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def push(storage, root, name="runs/a"):
    storage.push(name, lambda: listing(root / name, root))


def pull(storage, folder, name="runs/a"):
    storage.pull(name, folder, folder.with_name(f"{folder.name}-objects"))
    return read(folder)


def stored(storage):
    """The paths in the storage, relative to its folder, with their contents."""
    root = storage._root
    return {path.removeprefix(f"{root}/"): storage._fs.cat_file(path) for path in storage._fs.find(root)}


def test_what_is_pulled_is_a_plain_copy(storage, source, tmp_path):
    write(source, {"runs/a/.lock": b"", "runs/a/.tmp-x": b"half", "runs/a/.tmp-folder/x": b"half"})
    push(storage, source)
    shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns(".lock", ".tmp-*"))
    assert pull(storage, tmp_path / "pulled") == read(tmp_path / "copy") == FILES


def test_another_object_of_the_same_place_reads_it(source, tmp_path):
    push(Storage(str(tmp_path / "storage")), source)
    assert pull(Storage(f"file://{tmp_path / 'storage'}"), tmp_path / "pulled") == FILES


def test_changes_are_uploaded_and_nothing_else(storage, source, tmp_path, monkeypatch):
    uploaded = []
    upload = storage._upload
    monkeypatch.setattr(storage, "_upload", lambda name, *file: (uploaded.append(file[1].name), upload(name, *file)))
    push(storage, source)
    assert len(uploaded) == len(set(FILES.values()))  # equal contents are one object
    uploaded.clear()
    push(storage, source)
    assert uploaded == []
    with (source / "runs/a/metrics.jsonl").open("ab") as file:
        file.write(b"3\n")
    write(source, {"runs/a/result.json": b"[]"})
    push(storage, source)
    assert sorted(uploaded) == ["metrics.jsonl", "result.json"]
    assert pull(storage, tmp_path / "pulled") == FILES | {
        "runs/a/metrics.jsonl": b"1\n2\n3\n",
        "runs/a/result.json": b"[]",
    }


def test_a_push_without_changes_asks_the_storage_for_nothing(storage, source, monkeypatch):
    push(storage, source)
    monkeypatch.setattr(storage, "_fs", None)
    push(storage, source)


def test_a_push_by_another_process_uploads_nothing_twice(source, tmp_path, monkeypatch):
    push(Storage(str(tmp_path / "storage")), source)
    other = Storage(str(tmp_path / "storage"))
    monkeypatch.setattr(other, "_upload", None)
    push(other, source)


def test_deleted_files_vanish_with_their_objects(storage, source, tmp_path):
    push(storage, source)
    shutil.rmtree(source / "runs/a/checkpoints/step-3")
    (source / "runs/a/run.json").unlink()
    push(storage, source)
    left = {path: data for path, data in FILES.items() if "step-3" not in path and "run.json" not in path}
    assert pull(storage, tmp_path / "pulled") == left
    assert len(stored(storage)) == 1 + len(set(left.values()))


def test_snapshots_are_deleted_as_a_whole_and_alone(storage, source, tmp_path):
    push(storage, source)
    write(source, {"runs/b/run.json": b"b"})
    push(storage, source, "runs/b")
    storage.delete("runs/a")
    storage.delete("runs/a")
    assert storage.manifest("runs/a") is None
    assert not any(path.startswith("runs/a") for path in stored(storage))
    assert pull(storage, tmp_path / "b", "runs/b") == {"runs/b/run.json": b"b"}
    with pytest.raises(IsolossError, match="has no snapshot runs/a"):
        pull(storage, tmp_path / "a")
    push(storage, source)
    assert pull(storage, tmp_path / "again") == FILES


def test_a_push_killed_before_its_manifest_leaves_the_old_snapshot(storage, source, tmp_path, monkeypatch):
    push(storage, source)
    write(source, {"runs/a/run.json": b"new", "runs/a/more": b"more"})
    with monkeypatch.context() as patched:
        patched.setattr(storage, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            push(storage, source)
    assert pull(storage, tmp_path / "old") == FILES
    push(storage, source)
    assert pull(storage, tmp_path / "new") == read(source)


def killed(*_):
    raise KeyboardInterrupt


def test_a_corrupt_object_is_refused_by_name(storage, source, tmp_path, monkeypatch):
    monkeypatch.setattr(storages, "_PAUSE", 0.0)
    push(storage, source)
    path = next(path for path, data in stored(storage).items() if data == b"1\n2\n")
    storage._fs.pipe_file(f"{storage._root}/{path}", b"1\n3\n")
    digest = hashlib.sha256(b"1\n3\n").hexdigest()
    with pytest.raises(IsolossError, match=f"{path.removeprefix('runs/a/')} is corrupt, as its SHA-256 is {digest}"):
        pull(storage, tmp_path / "pulled")
    objects = tmp_path / "pulled-objects"
    assert path.removeprefix("runs/a/") not in os.listdir(objects)
    storage._fs.rm_file(f"{storage._root}/{path}")
    with pytest.raises(IsolossError, match=f"{path.removeprefix('runs/a/')} is missing"):
        pull(storage, tmp_path / "pulled")


def test_a_manifest_that_leaves_the_folder_is_refused(storage, source, tmp_path):
    push(storage, source)
    for path in ("../x", "/etc/x"):
        manifest = json.dumps({path: ["0" * 64, 0]}).encode()
        storage._fs.pipe_file(f"{storage._root}/runs/a.json", manifest)
        with pytest.raises(IsolossError, match=f"names {path}, which is outside"):
            pull(storage, tmp_path / "pulled")
    storage._fs.pipe_file(f"{storage._root}/runs/a.json", b'{"a"')
    with pytest.raises(IsolossError, match=r"runs/a\.json is not the manifest of a snapshot"):
        pull(storage, tmp_path / "pulled")


def test_what_is_there_is_not_downloaded_again_and_cannot_be_changed_through_copies(source, tmp_path):
    storage = Storage(str(tmp_path / "storage"))
    push(storage, source)
    objects = tmp_path / "objects"
    storage.pull("runs/a", tmp_path / "one", objects)
    model = "runs/a/checkpoints/step-3/model.safetensors"
    assert (tmp_path / "one" / model).samefile(tmp_path / "one" / model.replace("3", "6"))
    with (tmp_path / "one/runs/a/metrics.jsonl").open("ab") as file:  # as a resumed run does
        file.write(b"3\n")
    shutil.rmtree(tmp_path / "storage/runs/a")  # all but the manifest
    storage.pull("runs/a", tmp_path / "other", objects)
    assert read(tmp_path / "other") == FILES


def test_a_file_that_grows_and_one_that_is_replaced_are_stored_whole(tmp_path):
    """A writer as training is: a line of metrics, then a checkpoint, which must not outlive the line; old ones go."""
    run, enough = tmp_path / "source/runs/a", threading.Event()
    run.mkdir(parents=True)
    storage = Storage(str(tmp_path / "storage"))

    def train():
        with (run / "metrics.jsonl").open("a") as metrics:
            for step in itertools.takewhile(lambda _: not enough.is_set(), itertools.count(1)):
                metrics.write(f"{step}\n")
                metrics.flush()
                made = run / ".tmp-checkpoint"
                made.mkdir()
                (made / "weights").write_text(str(step) * 1000)
                made.rename(run / f"step-{step}")
                shutil.rmtree(run / f"step-{step - 2}", ignore_errors=True)
                time.sleep(0.05)

    training = threading.Thread(target=train, daemon=True)
    training.start()
    seen, deadline = [], time.monotonic() + 60
    while len(set(seen)) < 4:
        assert time.monotonic() < deadline
        push(storage, tmp_path / "source")
        found = pull(storage, tmp_path / f"pulled-{len(seen)}")
        lines = found.get("runs/a/metrics.jsonl", b"").split()
        made = {path: data for path, data in found.items() if "step-" in path}
        newest = max((int(path.split("/")[2].removeprefix("step-")) for path in made), default=0)
        assert lines[:newest] == [b"%d" % step for step in range(1, newest + 1)]
        for path, data in made.items():
            assert data == path.split("/")[2].removeprefix("step-").encode() * 1000
        seen.append(newest)
    enough.set()
    training.join()
    push(storage, tmp_path / "source")
    assert pull(storage, tmp_path / "last") == read(tmp_path / "source")


@pytest.mark.parametrize("changes", [1, 2, 3])
def test_a_reader_beside_a_writer_sees_one_snapshot(tmp_path, monkeypatch, changes):
    """The writer replaces both files and deletes the objects of the time before while the reader downloads."""
    monkeypatch.setattr(storages, "_PAUSE", 0.0)
    source, writer, reader = tmp_path / "source", Storage(str(tmp_path / "s")), Storage(str(tmp_path / "s"))

    def go_on(i):
        write(source, {"runs/a/x": b"%d" % i, "runs/a/y": b"y%d" % i})
        push(writer, source)

    go_on(0)
    download, fetched = reader._download, []

    def and_the_writer_goes_on(name, stored, objects):
        if len(fetched) < changes:
            fetched.append(stored)
            go_on(len(fetched))  # before this object is read
        download(name, stored, objects)
        if len(fetched) < changes:
            fetched.append(stored)
            go_on(len(fetched))  # after it was read, and before the other is

    monkeypatch.setattr(reader, "_download", and_the_writer_goes_on)
    monkeypatch.setattr(reader, "_all", lambda function, items: [function(item) for item in items])
    assert pull(reader, tmp_path / "pulled") == {"runs/a/x": b"%d" % changes, "runs/a/y": b"y%d" % changes}
    assert len(fetched) == changes


def test_of_two_studies_that_find_a_storage_free_one_gets_it(tmp_path, monkeypatch):
    write(tmp_path, {"one.json": b'{"study": "one"}', "other.json": b'{"study": "other"}'})
    storage = Storage(str(tmp_path / "storage"))
    late = storage.path / "study.json"  # the other has found it free too, and writes now
    monkeypatch.setattr(storages.time, "sleep", lambda _: late.write_bytes((tmp_path / "other.json").read_bytes()))
    with pytest.raises(IsolossError, match="storage holds the files of another study"):
        storage.reserve(tmp_path / "one.json")
    storage.reserve(tmp_path / "other.json")


def test_a_file_that_never_rests_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr(storages, "_PAUSE", 0.0)
    storage = Storage(str(tmp_path / "storage"))
    gone = {"runs/a/run.json": source / "runs/a/vanished"}
    with pytest.raises(IsolossError, match="vanished changes too often to be stored in file:"):
        storage.push("runs/a", lambda: gone)
    assert storage.manifest("runs/a") is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense://x/y", "nonsense://x/y cannot be used as storage: Protocol not known: nonsense"),
        ("dropbox://x/y", "dropbox://x/y cannot be used as storage: .*dropbox"),  # of a package that is not installed
        ("memory://x", "memory:///x cannot be used as storage: it is in the memory of one process"),
        ("/proc/storage", "file:///proc/storage cannot be used as storage: cannot write /proc/storage/"),
        ("http://127.0.0.1:1/x", "http://127.0.0.1:1/x cannot be used as storage: "),
    ],
)
def test_a_storage_that_cannot_be_used_is_refused(url, why):
    with pytest.raises(IsolossError, match=why):
        Storage(url).check()


def test_a_check_leaves_nothing(tmp_path):
    Storage(str(tmp_path)).check()
    assert not list(Path(tmp_path).iterdir())
