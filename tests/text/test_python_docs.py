"""The text and the tasks that come with Python, held against the modules themselves."""

import inspect
import json
import logging
import shutil
from pathlib import Path

import pytest

from isoloss.errors import IsolossError
from isoloss.text import documents, python_docs
from isoloss.text.hub_datasets import is_dataset, load, parse
from isoloss.text.python_docs import MODULES, docstrings, rows
from isoloss.transfer.text_sources import DOCSTRING_KIND, DOCSTRING_MODULE, SENTENCE_ORDER
from isoloss.transfer.text_tasks import read_examples


@pytest.fixture(scope="module", autouse=True)
def small_library(tmp_path_factory):
    """A standard library of the modules that the tests ask about: to read all of it takes seconds."""
    whole, folder = Path(python_docs.sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    for name in {*MODULES, "json"}:
        shutil.copytree(whole / name, folder / name)
    for name in ("argparse", "statistics", "textwrap"):
        shutil.copy(whole / f"{name}.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_docs.sysconfig, "get_path", lambda name: str(folder))
        yield


def test_docstrings_are_those_that_python_shows():
    found = {(each.module, each.name): each.text for each in docstrings()}
    for name, thing in (
        ("getLogger", logging.getLogger),
        ("Logger.exception", logging.Logger.exception),
        ("Formatter.formatTime", logging.Formatter.formatTime),
        ("Handler", logging.Handler),
    ):
        if len(inspect.getdoc(thing)) >= 60:
            assert found["logging", name] == inspect.getdoc(thing)
    assert found["json", "dumps"] == inspect.getdoc(json.dumps)


def test_docstrings_are_distinct_and_not_those_of_tests():
    texts = [each.text for each in docstrings()]
    assert len(set(texts)) == len(texts) > 1_000
    assert min(map(len, texts)) >= 60
    assert "test" not in {each.module for each in docstrings()}


def test_they_are_read_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    library = tmp_path / "library"
    library.mkdir()
    long = "Return the number of words in a text, however long it may be."
    (library / "words.py").write_text(f'def count_words(text):\n    """{long}"""\n')
    (library / "broken.py").write_text("this is no Python")
    (library / "test").mkdir()
    (library / "test" / "words.py").write_text(f'"""{long} (test)"""\n')
    monkeypatch.setattr(python_docs.sysconfig, "get_path", lambda name: str(library))
    assert docstrings() == [("words", "function", "count_words", long)]
    monkeypatch.setattr(python_docs, "_docstrings_of", lambda *arguments, **named: pytest.fail("read again"))
    assert docstrings() == [("words", "function", "count_words", long)]
    monkeypatch.undo()
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(python_docs.sysconfig, "get_path", lambda name: str(library))
    (kept,) = (tmp_path / "cache/python").iterdir()
    for damaged in ("", "[1]", '[["words"]]'):
        kept.write_text(damaged)
        assert docstrings() == [("words", "function", "count_words", long)]
    (library / "words.py").write_text(f'def count_words(text):\n    """{long} Or short."""\n')
    assert docstrings() == [("words", "function", "count_words", f"{long} Or short.")]
    for path in (library / "words.py", library / "broken.py", library / "test" / "words.py"):
        path.unlink()
    with pytest.raises(IsolossError, match="installed without the source of its standard library"):
        docstrings()


def test_modules_are_those_of_the_docstrings_and_the_splits_are_disjoint():
    module_of = {each.text: each.module for each in docstrings()}
    train, validation = (rows("docstring-module", split) for split in ("train", "validation"))
    for part in (train, validation):
        assert set(part["label"]) <= set(MODULES)
        assert [module_of[text] for text in part["text"]] == part["label"]
    assert not set(train["text"]) & set(validation["text"])
    every = [each for each in docstrings() if each.module in MODULES]
    assert len(train["text"]) + len(validation["text"]) == len(every)
    assert len(validation["text"]) == pytest.approx(len(every) / 5, abs=4 * (len(every) * 0.16) ** 0.5)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_kinds_are_those_of_the_things_themselves(split):
    by_text = {each.text: each for each in docstrings()}
    part = rows("docstring-kind", split)
    checked = 0
    for text, label in zip(part["text"], part["label"], strict=True):
        own = by_text[text]
        if own.module in ("logging", "json", "argparse", "textwrap", "statistics"):
            thing = __import__(own.module)
            for name in own.name.split("."):
                thing = getattr(thing, name, None)
            if thing is not None:
                is_class = inspect.isclass(thing)
                assert label == ("class" if is_class else "method" if "." in own.name else "function")
                checked += 1
    assert checked >= 5
    assert set(part["label"]) == {"class", "function", "method"}


def test_they_are_datasets_by_name():
    assert is_dataset("python:docstrings")
    assert str(parse("python:docs")) == "python:docs"
    texts = [text for (text,) in load("python:docstrings", split="train", columns=["text"])]
    assert texts == [each.text for each in docstrings()]
    read = [text for _, text in documents.read_documents(["python:docs"])]
    assert any("Assert statements are a convenient way" in text for text in read)
    for spec, split, column, message in (
        ("python:docz", "train", "text", r"there is no dataset python:docz; did you mean docs"),
        ("python:docs", "validation", "text", r"python:docs has no split 'validation'; it has train"),
        ("python:docs", "train", "body", r"python:docs has no column 'body'; it has text"),
    ):
        with pytest.raises(IsolossError, match=message):
            load(spec, split=split, columns=[column])


def test_their_tasks_have_a_train_and_a_validation_split():
    modules, kinds = read_examples(DOCSTRING_MODULE), read_examples(DOCSTRING_KIND)
    assert modules.train.label_names == MODULES
    assert kinds.train.label_names == ("class", "function", "method")
    assert kinds.test.texts == tuple(rows("docstring-kind", "validation")["text"])


def test_sentences_are_of_their_source_and_their_halves_in_the_order_that_the_label_says():
    reference, of_docstrings = (
        " ".join(" ".join(rows(name, "train")["text"]).split()) for name in ("docs", "docstrings")
    )
    texts = {"reference": reference, "docstring": of_docstrings}
    parts = [rows("sentence-source", split) for split in ("train", "validation")]
    assert not set(parts[0]["text"]) & set(parts[1]["text"])
    for part in parts:
        assert part["label"].count("reference") == part["label"].count("docstring") > 500
        assert all(text in texts[label] for text, label in zip(part["text"], part["label"], strict=True))
    order = rows("sentence-order", "validation")
    assert 0.45 < order["label"].count("right") / len(order["label"]) < 0.55
    for text, pair, label in [*zip(*order.values(), strict=True)][:200]:
        assert (f"{text} {pair}" if label == "right" else f"{pair} {text}") in f"{reference} {of_docstrings}"
    examples = read_examples(SENTENCE_ORDER, num_train=20, num_test=20)
    assert examples.train.label_names == ("right", "swapped")
    assert all(len(each.split()) == 4 for each in (*examples.test.texts, *examples.test.pairs))
