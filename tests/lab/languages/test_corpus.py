import collections
import dataclasses
import hashlib
import json
import shutil
import threading

import datasets
import numpy as np
import pytest
import torch

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages import Language
from isoloss.lab.languages.config import CorpusConfig
from isoloss.lab.languages.text import Corpus
from isoloss.seeds import generator
from isoloss.text.packing import pack
from isoloss.text.tokenizers import train_tokenizer, vocabulary

CLS, SEP, MASK = 3, 4, 64


@pytest.fixture
def text(tmp_path, words):
    """Forty documents of 1 to 60 words, the first and the last of them equal."""
    draw = np.random.default_rng(0)
    documents = [" ".join(draw.choice(words, size)) for size in draw.integers(1, 61, 39)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*documents, documents[0]]))
    return path


@pytest.fixture
def config(text, vocab):
    return CorpusConfig(paths=(str(text),), tokenizer=str(vocab), length=8, held_out=0.2)


@pytest.fixture
def corpus(config, tmp_path):
    return Corpus.from_config(config, cache=tmp_path / "cache")


def reference(path, tokenizer, length, held_out):
    """Training and held-out rows by the documented rule, one token at a time."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts]
    distinct = sorted(set(hashes))
    chosen = distinct[: max(1, round(held_out * len(distinct)))]
    parts = []
    for part in (False, True):
        stream = []
        for text, key in zip(texts, hashes, strict=True):
            if (key in chosen) == part:
                stream += tokenizer(text, add_special_tokens=False).input_ids
        rows, row = [], []
        for token in stream:
            row.append(token)
            if len(row) == length - 2:
                rows.append([CLS, *row, SEP])
                row = []
        parts.append(rows)
    return parts


def training(corpus):
    """The training rows in their own order, from one epoch of single batches."""
    order = torch.randperm(corpus.num_training, generator=generator(0, "corpus order", 0))
    rows = torch.empty(corpus.num_training, corpus.max_length, dtype=torch.int64)
    rows[order] = corpus.batch(1, corpus.num_training, seed=0).tokens
    return rows.tolist()


def test_a_tokenizer_can_be_learned_from_the_text(config, text, tmp_path):
    learned = Corpus.from_config(dataclasses.replace(config, tokenizer="wordpiece:60"), cache=tmp_path / "cache")
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    assert learned.vocabulary == vocabulary(train_tokenizer(texts, vocab_size=60))
    assert len(learned.vocabulary) == 60
    assert learned.held_out().tokens[:, [0, -1]].unique(dim=0).tolist() == [[2, 3]]  # its own [CLS] and [SEP]
    assert learned.config.content != config.resolved().content
    for number in ("many", "", "-3", "99999999999999999999999", "٣"):
        message = (
            f"tokenizer 'wordpiece:{number}': expected wordpiece:N with N from 6 to 1,000,000, e.g. wordpiece:2000"
        )
        with pytest.raises(IsolossError, match=message):
            Corpus.from_config(dataclasses.replace(config, tokenizer=f"wordpiece:{number}"))
    with pytest.raises(IsolossError, match="the vocabulary size is 3; for wordpiece it must be at least 6"):
        Corpus.from_config(dataclasses.replace(config, tokenizer="wordpiece:3"))


def test_rows_against_the_documented_rule(corpus, text):
    expected_training, expected_held_out = reference(text, corpus.tokenizer, 8, 0.2)
    assert corpus.held_out().tokens.tolist() == expected_held_out
    assert training(corpus) == expected_training
    assert (corpus.num_training, corpus.num_held_out) == (len(expected_training), len(expected_held_out))
    assert corpus.num_held_out > 10


def test_it_is_a_language(corpus, vocab):
    assert isinstance(corpus, Language)
    assert corpus.vocabulary == tuple(vocab.read_text().split())
    assert corpus.vocab_size == corpus.model_vocab_size == 66
    assert (corpus.max_length, corpus.pad_id, corpus.mask_id) == (8, 0, MASK)
    assert corpus.special_token_ids == (0, 2, 3, 4, MASK)
    for sentences in (corpus.batch(1, 5, seed=0), corpus.sample(5), corpus.held_out(5)):
        assert sentences.tokens.shape == (5, 8)
        assert sentences.tokens.dtype == torch.int64
        assert sentences.lengths.tolist() == [8] * 5
        assert sentences.present().all()


def test_equal_documents_are_on_one_side(tmp_path, vocab, words):
    distinct = [" ".join(words[2 * i : 2 * i + 2] * 3) for i in range(10)]  # a row each, of two words of its own
    documents = distinct + distinct[:5] * 4
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = CorpusConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer=str(vocab), length=8, held_out=0.3)
    corpus = Corpus.from_config(config, cache=tmp_path / "cache")
    held_out = set(corpus.held_out().tokens[:, 1:-1].flatten().tolist())
    trained = {token for row in training(corpus) for token in row[1:-1]}
    assert not held_out & trained
    assert (len(held_out), len(trained)) == (6, 14)  # 30 % of the ten distinct ones, however often they come
    assert corpus.num_held_out + corpus.num_training == 30


def test_batches_walk_through_permutations(corpus):
    total = corpus.num_training
    walk = corpus.batch(1, 3 * total, seed=5).tokens.tolist()
    epochs = [walk[i * total : (i + 1) * total] for i in range(3)]
    rows = collections.Counter(map(tuple, training(corpus)))
    assert all(collections.Counter(map(tuple, epoch)) == rows for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for n in (1, 7, total - 1, total + 3):
        steps = 3 * total // n
        parts = [corpus.batch(step, n, seed=5).tokens for step in range(1, steps + 1)]
        assert torch.cat(parts).tolist() == walk[: steps * n]


def test_a_batch_is_a_function_of_seed_and_step(config, tmp_path, corpus):
    again = Corpus.from_config(config, cache=tmp_path / "elsewhere")
    first = corpus.batch(3, 4, seed=1).tokens
    corpus.batch(9, 4, seed=2)
    assert corpus.batch(3, 4, seed=1).tokens.equal(first)
    assert again.batch(3, 4, seed=1).tokens.equal(first)
    assert not corpus.batch(3, 4, seed=2).tokens.equal(first)
    for step, n in ((0, 4), (1, 0)):
        with pytest.raises(IsolossError, match=f"no batch of {n} sequences at step {step}"):
            corpus.batch(step, n, seed=0)


def test_samples_are_uniform_over_training(corpus):
    rows = {tuple(row): index for index, row in enumerate(training(corpus))}
    assert len(rows) == corpus.num_training  # no two alike, so that they can be told apart
    n = 200 * len(rows)
    drawn = corpus.sample(n, generator=generator(0, "test")).tokens
    counts = np.bincount([rows[tuple(row)] for row in drawn.tolist()], minlength=len(rows))
    statistic = ((counts - 200) ** 2 / 200).sum()
    freedom = len(rows) - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
    assert corpus.sample(9, generator=generator(0, "test")).tokens.equal(drawn[:9]) or n < 9
    with pytest.raises(IsolossError, match="no known latent structure"):
        corpus.sample(1, latent=True)


def test_held_out_is_spread_evenly(corpus):
    every = corpus.held_out().tokens
    total = len(every)
    assert corpus.held_out(total).tokens.equal(every)
    assert corpus.held_out(10 * total).tokens.equal(every)
    few = corpus.held_out(4).tokens.tolist()
    assert few == [every[i * total // 4].tolist() for i in range(4)]
    with pytest.raises(IsolossError, match="cannot take 0"):
        corpus.held_out(0)


def test_tokens_are_kept_and_mapped(config, corpus, text, tmp_path):
    def stamps():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npy")}

    before = stamps()
    assert len(before) == 2
    arrays = [np.load(path, mmap_mode="r") for path in before]
    assert all(array.dtype == np.uint16 and array.shape[1] == 8 for array in arrays)
    assert isinstance(corpus._training, np.memmap)
    other = text.with_name("moved.jsonl")
    other.write_bytes(text.read_bytes())
    moved = Corpus.from_config(dataclasses.replace(config, paths=(str(other),)), cache=tmp_path / "cache")
    assert stamps() == before  # the same text, wherever it lies
    assert moved.config.content == corpus.config.content
    Corpus.from_config(dataclasses.replace(config, length=9), cache=tmp_path / "cache")
    Corpus.from_config(dataclasses.replace(config, held_out=0.3), cache=tmp_path / "cache")
    assert len(stamps()) == 6


def test_cache_folder_comes_from_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "named"))
    Corpus.from_config(config)
    assert len(list((tmp_path / "named" / "corpora").glob("*/tokens/meta.json"))) == 1
    monkeypatch.delenv("ISOLOSS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Corpus.from_config(config)
    assert len(list((tmp_path / "home/.cache/isoloss/corpora").glob("*/tokens/meta.json"))) == 1


def test_what_a_killed_writer_left_is_cleared(config, corpus, tmp_path):
    (folder,) = (tmp_path / "cache" / "corpora").iterdir()
    (folder / "tokens").rename(folder / ".tmp-1-tokens")
    again = Corpus.from_config(config, cache=tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "tokens"]
    assert again.held_out().tokens.equal(corpus.held_out().tokens)


def test_one_writer_at_a_time(config, tmp_path):
    found, start = [], threading.Barrier(4)

    def open_it():
        start.wait()
        found.append(Corpus.from_config(config, cache=tmp_path / "cache").held_out().tokens)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(tokens.equal(found[0]) for tokens in found)


def test_damaged_cache_is_named(config, corpus, tmp_path):
    path = next((tmp_path / "cache").rglob("training.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IsolossError, match=r"training.npy is damaged .* delete its folder"):
        Corpus.from_config(config, cache=tmp_path / "cache")
    np.save(path, np.zeros((3, 7), np.uint16))
    with pytest.raises(IsolossError, match=r"training.npy is damaged \(shape \(3, 7\)\)"):
        Corpus.from_config(config, cache=tmp_path / "cache")


def test_resolved_config_stands_anywhere(config, text, vocab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = dataclasses.replace(config, paths=("text.jsonl",), tokenizer="vocab.txt")
    resolved = relative.resolved()
    assert (resolved.paths, resolved.tokenizer) == ((str(text),), str(vocab))
    assert len(resolved.content) == 64
    assert resolved.resolved() == resolved == config.resolved()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert Corpus.from_config(resolved, cache=tmp_path / "cache").config == resolved


def test_content_covers_files_order_and_tokenizer(config, text, vocab, tmp_path):
    resolved = config.resolved()
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text.read_bytes())
    both = [
        dataclasses.replace(config, paths=p).resolved().content
        for p in ((str(text), str(copy)), (str(copy), str(text)))
    ]
    as_text = dataclasses.replace(config, paths=(str(copy),)).resolved().content  # read otherwise
    assert len({resolved.content, as_text, *both}) == 4
    original = text.read_bytes()
    text.write_bytes(original + b'{"text": "av"}\n')
    with pytest.raises(IsolossError, match=rf"text.jsonl\) or the tokenizer .* changed .* was {resolved.content[:16]}"):
        Corpus.from_config(resolved, cache=tmp_path / "cache")
    text.write_bytes(original)
    Corpus.from_config(resolved, cache=tmp_path / "cache")
    vocab.write_text(vocab.read_text().replace("av", "va"))
    with pytest.raises(IsolossError, match="changed since the run began"):
        Corpus.from_config(resolved, cache=tmp_path / "cache")


def test_bad_settings_and_too_little_text(config, text, tmp_path):
    def fails(message, **changes):
        with pytest.raises(IsolossError, match=message):
            Corpus.from_config(dataclasses.replace(config, **changes), cache=tmp_path / "cache")

    fails("is 2; it must be at least 3", length=2)
    for share in (0.0, 1.0, -0.1):
        fails(f"held_out is {share}; it must be above 0 and below 1", held_out=share)
    fails("no text file or folder", paths=(str(tmp_path / "nowhere"),))
    fails("held-out part .* has 1 of 40 documents but not one sequence of 200 tokens", length=200, held_out=0.001)
    fails("training part .* has 1 of 40 documents but not one sequence of 200 tokens", length=200, held_out=0.999)
    one = tmp_path / "one.txt"
    one.write_text("av aw " * 1000)
    fails("one distinct document .* less than 30,000 characters", paths=(str(one),))
    (tmp_path / "two.txt").write_text(one.read_text())
    fails("one distinct document", paths=(str(one), str(tmp_path / "two.txt")))
    assert not list((tmp_path / "cache").rglob("tokens"))  # nothing half-made is left to be opened
    assert not list((tmp_path / "cache").rglob(".tmp-*"))


def test_cache_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IsolossError, match=r"cannot write in .*file"):
        Corpus.from_config(config, cache=tmp_path / "file")


def test_without_brackets_and_with_many_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({"?": 0, "p": 1, "m": 2} | {f"w{i}": i for i in range(3, 70_000)}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", pad_token="p", mask_token="m")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    documents = [f"w{first} w{first + 1} w{first + 2}" for first in range(66_000, 66_400, 4)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = CorpusConfig(paths=(str(tmp_path),), tokenizer=str(tmp_path / "tokenizer"), length=9, held_out=0.3)
    corpus = Corpus.from_config(config, cache=tmp_path / "cache")
    assert (corpus.num_training, corpus.num_held_out) == (23, 10)  # 210 and 90 tokens, the last 3 dropped
    rows = torch.cat([corpus.held_out().tokens, torch.tensor(training(corpus))])
    assert (rows[:, 1] == rows[:, 0] + 1).all()
    assert (rows[:, 8] == rows[:, 6] + 2).all()
    assert rows.min() >= 66_000


@pytest.mark.parametrize("first", [None, 7])
@pytest.mark.parametrize("last", [None, 8])
def test_pack_against_a_plain_loop(first, last):
    draw = np.random.default_rng(1)
    arrays = [draw.integers(10, 99, size) for size in draw.integers(0, 40, 700)]  # several yields' worth
    stream = np.concatenate(arrays).tolist()
    body = 5 - (first is not None) - (last is not None)
    expected = [
        [*([] if first is None else [first]), *stream[i : i + body], *([] if last is None else [last])]
        for i in range(0, len(stream) - body + 1, body)
    ]
    chunks = list(pack(iter(arrays), 5, first=first, last=last))
    assert len(chunks) > 1
    assert np.concatenate(chunks).tolist() == expected
    assert list(pack([], 5)) == []
    assert list(pack([np.arange(4)], 5)) == []


def test_real_text(shared_data, tmp_path):
    config = CorpusConfig(
        paths=(str(shared_data / "wikitext-2" / "valid.txt"),),
        tokenizer=str(shared_data / "bert-uncased-vocab" / "vocab.txt"),
    )
    corpus = Corpus.from_config(config, cache=tmp_path)
    assert (corpus.vocab_size, corpus.mask_id, corpus.special_token_ids) == (30522, 103, (0, 100, 101, 102, 103))
    assert (corpus.num_training, corpus.num_held_out) == (1942, 122)
    sentence = corpus.held_out(1).tokens[0]
    assert sentence[[0, -1]].tolist() == [101, 102]
    piece = corpus.tokenizer.decode(sentence[1:-1]).replace(" ", "").replace("##", "")
    everything = (shared_data / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    assert piece in "".join(everything.lower().split())


def test_a_dataset_is_tokenised_as_the_same_lines_are(config, corpus, text, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(tmp_path / "saved")
    named = dataclasses.replace(config, paths=(f"hf:{tmp_path / 'saved'}",), column="body")
    again = Corpus.from_config(named, cache=tmp_path / "cache")
    assert again.held_out().tokens.equal(corpus.held_out().tokens)
    assert again.batch(3, 5, seed=1).tokens.equal(corpus.batch(3, 5, seed=1).tokens)
    assert again.config.paths == named.paths
    resolved = named.resolved()
    assert resolved == again.config
    shutil.rmtree(tmp_path / "saved")
    datasets.Dataset.from_dict({"body": [*texts[:-1], "av"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(IsolossError, match=r"hf:.*saved\) or the tokenizer .* has changed since the run began"):
        Corpus.from_config(resolved, cache=tmp_path / "cache")


def test_a_number_of_documents_is_that_of_a_shorter_file(config, text, tmp_path):
    few = Corpus.from_config(dataclasses.replace(config, max_documents=25), cache=tmp_path / "cache")
    lines = text.read_text().splitlines(keepends=True)
    whole = Corpus.from_config(config, cache=tmp_path / "cache")  # the same file, with other tokens in the same cache
    assert whole.num_training > few.num_training
    text.write_text("".join(lines[:25]))
    short = Corpus.from_config(config, cache=tmp_path / "cache")
    assert training(few) == training(short)
    assert few.held_out().tokens.equal(short.held_out().tokens)
    assert Corpus.from_config(
        dataclasses.replace(config, max_documents=500), cache=tmp_path / "cache"
    ).num_training == (short.num_training)
    with pytest.raises(IsolossError, match="max_documents is 1; it must be at least 2"):
        Corpus.from_config(dataclasses.replace(config, max_documents=1), cache=tmp_path / "cache")


def test_progress_counts_documents_to_the_last(tmp_path, vocab, words):
    documents = [" ".join(np.random.default_rng(i).choice(words, 9)) for i in range(350)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = CorpusConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer=str(vocab), length=8, held_out=0.2)
    calls = []
    Corpus.from_config(config, cache=tmp_path / "cache", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(100, 350), (200, 350), (300, 350), (350, 350)]
    Corpus.from_config(config, cache=tmp_path / "cache", progress=lambda *_: calls.append(_))
    assert len(calls) == 4  # nothing was left to tokenise


def test_tokens_are_written_whole_or_not_at_all(config, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    text = [{"text": f"av aw ax ay az {word}"} for word in ("bu", "bv", "bw", "bx") * 60]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    with pytest.raises(KeyboardInterrupt):
        Corpus.from_config(config, cache=tmp_path / "cache", progress=stop)
    assert not list((tmp_path / "cache").rglob("*.npy"))
    assert Corpus.from_config(config, cache=tmp_path / "cache").num_training > 0


def test_languages_are_named_with_their_text(config, text, vocab, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.Dataset.from_dict({"body": ["av aw", "ax ay"]}).save_to_disk(tmp_path / "saved")
    name = f"hf:{tmp_path / 'saved'}"
    found = languages.resolve(name, tokenizer=str(vocab), length=9, column="body", max_documents=2)
    assert isinstance(found, CorpusConfig)
    assert (found.paths, found.column, found.max_documents, found.length) == ((name,), "body", 2, 9)
    toml = tmp_path / "corpus.toml"
    toml.write_text(configs.to_toml(dataclasses.replace(config, content="")))
    assert languages.resolve(str(toml)) == config.resolved()
    with pytest.raises(IsolossError, match=r"saved is text and needs --tokenizer"):
        languages.resolve(name)
    with pytest.raises(IsolossError, match=r"complete as it is: leave out --length, --max-documents"):
        languages.resolve("pcfg-laptop", length=3, max_documents=4)
    (tmp_path / "g.txt").write_text("S a 1\n")
    with pytest.raises(IsolossError, match=r"read as a grammar: leave out --column, or add --tokenizer"):
        languages.resolve(str(tmp_path / "g.txt"), column="body")
