"""Named datasets from folders of every kind, from the cache, and from a hub that does not answer."""

import json
import shutil
import subprocess
import sys

import datasets
import huggingface_hub
import pytest

from isoloss.errors import IsolossError
from isoloss.text.hub_datasets import DatasetName, load, parse

TEXTS = [f"text {i}" for i in range(2500)]  # more than are in memory at a time


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of `datasets` for this test alone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def dataset():
    return datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})


def texts(spec, split="train"):
    return [text for (text,) in load(spec, split=split, columns=["text"])]


@pytest.mark.parametrize("kind", ["saved", "saved splits", "parquet", "jsonl", "csv"])
def test_folders_of_every_kind(tmp_path, kind):
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "saved":
        dataset().save_to_disk(folder)
    elif kind == "saved splits":
        datasets.DatasetDict({"test": dataset().select([0]), "train": dataset()}).save_to_disk(folder)
    elif kind == "parquet":
        dataset().to_parquet(folder / "train.parquet")
    elif kind == "jsonl":
        (folder / "train.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))
    else:
        dataset().to_csv(folder / "train.csv", index=False)
    assert texts(f"hf:{folder}") == TEXTS
    rows = load(f"hf:{folder}", split="train", columns=["text", "id"])
    assert next(iter(rows))[0] == "text 0"
    with pytest.raises(IsolossError, match=r"data has no column 'body'; it has id, text"):
        load(f"hf:{folder}", split="train", columns=["body"])
    if kind != "saved":
        with pytest.raises(IsolossError, match=r"split 'nope'"):
            load(f"hf:{folder}", split="nope", columns=["text"])


def test_rows_are_mapped_and_a_part_of_a_split_can_be_named(tmp_path):
    (tmp_path / "data").mkdir()
    dataset().to_parquet(tmp_path / "data" / "train.parquet")
    assert texts(f"hf:{tmp_path / 'data'}", "train[10:13]") == TEXTS[10:13]


def test_a_saved_split_does_not_stand_for_another(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}, split="train").save_to_disk(tmp_path / "data")
    assert texts(f"hf:{tmp_path / 'data'}") == ["a"]
    with pytest.raises(IsolossError, match="no split 'validation'; it has train"):
        load(f"hf:{tmp_path / 'data'}", split="validation", columns=["text"])


def test_names_have_their_parts(tmp_path, monkeypatch):
    assert parse("hf:openwebtext") == DatasetName("openwebtext")
    assert parse("hf:a/b:c@refs/convert/parquet") == DatasetName("a/b", "c", "refs/convert/parquet")
    assert str(parse("hf:a/b:c@main")) == "hf:a/b:c@main"
    assert not parse("hf:a/b").is_local
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse("hf:a/b") == DatasetName(str(tmp_path / "a" / "b"))
    assert parse("hf:a/b").is_local
    for spec in ("hf:", "hf:a/b/c", "hf:a b", "hf:/nowhere/at all", "hf:a@", "hf:a:"):
        with pytest.raises(IsolossError, match=r"there is no dataset .*hf:NAME\[:CONFIG\]\[@REVISION\]"):
            parse(spec)


def test_a_folder_without_data_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsolossError, match=r"cannot load the split 'train' of hf:.*empty"):
        load(f"hf:{tmp_path / 'empty'}", split="train", columns=["text"])


@pytest.fixture
def no_hub(monkeypatch):
    """A hub whose address is a port that nobody listens on."""
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("no_hub")
def test_what_was_downloaded_before_needs_no_hub(tmp_path, cache):
    folder = tmp_path / "data"
    folder.mkdir()
    dataset().select(range(3)).to_parquet(folder / "train.parquet")
    datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "made"))
    (made,) = (path for path in (tmp_path / "made").iterdir() if path.is_dir())
    named = cache / "someone___something"
    shutil.copytree(made, named)
    (variant,) = named.iterdir()
    variant.rename(named / "default")  # as that of a dataset from the hub is called
    for file in named.rglob("*.arrow"):
        file.rename(file.with_name(file.name.replace(made.name, "something")))
    assert texts("hf:someone/something") == TEXTS[:3]
    with pytest.raises(IsolossError, match=r"does not answer, so the revision of hf:someone/something@main cannot be"):
        texts("hf:someone/something@main")
    with pytest.raises(IsolossError, match=r"no dataset hf:someone/something:other on this machine"):
        texts("hf:someone/something:other")


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_does_not_answer_is_one_clear_error(capfd):
    with pytest.raises(
        IsolossError, match=r"no dataset hf:someone/nothing on this machine, and the Hugging Face hub does not answer"
    ):
        texts("hf:someone/nothing")
    assert capfd.readouterr() == ("", "")  # no list of attempts


def test_the_library_is_loaded_only_where_it_is_used():
    code = (
        "import sys, isoloss.lab.languages.text, isoloss.text.labeled_text\n"
        "assert not {'datasets', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
