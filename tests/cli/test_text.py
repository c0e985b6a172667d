"""A real text and a tokenizer from nothing but this Python: `isoloss text` and `isoloss tokenizer`."""

import subprocess
import sys
from pydoc_data.topics import topics

import pytest
from speaking import as_json, refusal
from transformers import AutoTokenizer

from isoloss.cli.main import main
from isoloss.text.tokenizers import load_tokenizer, train_tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "text"
    done = subprocess.run([sys.executable, "-m", "isoloss", "text", "python-docs", str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_text_is_pythons_own(capsys, text, tmp_path):
    assert {path.stem: path.read_text(encoding="utf-8") for path in text.iterdir()} == topics
    assert as_json(capsys, "text", "python-docs", text)["files"] == len(topics)  # the same again is no error
    assert main(["text", "python-docs", str(text)]) == 0
    assert "they were there already" in capsys.readouterr().out
    (tmp_path / "precious").write_text("data")
    assert "not an empty folder" in refusal(capsys, "text", "python-docs", tmp_path, alone=True)
    assert "it must be python-docs" in refusal(capsys, "text", "novels", tmp_path / "x", alone=True)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_tokenizer_that_reads_the_text_back(capsys, text, tmp_path, kind):
    words = ("tokenizer", text, "--vocab-size", "2e3", "--kind", kind, "--output", tmp_path / "tokenizer")
    assert as_json(capsys, *words)["tokens"] == 2000
    assert as_json(capsys, *words)["tokens"] == 2000  # the same again is no error
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"), needs=["mask", "pad"])
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    sentence = "Assert statements are a convenient way to insert debugging assertions into a program."
    ids = tokenizer(sentence)["input_ids"]
    assert theirs(sentence)["input_ids"] == ids
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["[CLS]", "[SEP]"]
    assert tokenizer.unk_token_id not in ids
    read = tokenizer.decode(ids[1:-1], clean_up_tokenization_spaces=kind == "wordpiece")
    assert read == (sentence.lower() if kind == "wordpiece" else sentence)
    assert len(ids) < len(sentence) / 3
    assert all(tokenizer.convert_tokens_to_ids(name) < len(SPECIALS) for name in SPECIALS)
    pair = tokenizer("one", "two")
    assert pair["token_type_ids"] == [0] * 3 + [1] * (len(pair["input_ids"]) - 3) if kind == "wordpiece" else True
    other = (*words[:3], "1000", *words[4:])
    assert "not an empty folder" in refusal(capsys, *other, alone=True)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_the_same_text_gives_the_same_tokenizer(kind):
    """With equally frequent pairs to choose from, of which a hash map yields now one and now another first."""
    first, *others = (train_tokenizer(topics.values(), vocab_size=4000, kind=kind).get_vocab() for _ in range(3))
    assert all(other == first for other in others)


def test_case_is_kept_where_it_is_asked_for():
    texts = ["Rome Rome rome Été"] * 3
    assert "Rome" in train_tokenizer(texts, vocab_size=60, lowercase=False).get_vocab()
    lower = train_tokenizer(texts, vocab_size=60)
    assert "Rome" not in lower.get_vocab()
    assert lower("ROME été")["input_ids"] == lower("rome ete")["input_ids"]


def test_more_characters_than_tokens_are_a_warning(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("abc ab bca\n")
    words = ["tokenizer", tmp_path / "text.txt", "--vocab-size", "10", "--output", tmp_path / "out"]
    assert main([*map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert "of 11 tokens" in out  # five special ones, three letters, and each of these within a word
    assert "the tokenizer has 11 tokens, not 10: the characters of the texts and the special tokens alone are 11" in err
    words[3], words[5] = "11", tmp_path / "other"
    assert main([*map(str, words)]) == 0
    assert capsys.readouterr().err == ""
