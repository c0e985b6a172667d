import contextlib
import json
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.text.tokenizers import encode, encode_with_bytes, keep, load_tokenizer, serialized, vocabulary


def ids(tokenizer, *texts, **options):
    return [array.tolist() for array in encode(tokenizer, texts, **options)]


def word_level(folder, vocab, **special):
    """A tokenizer of another kind than BERT's: words by white space, no [CLS]."""
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("model_type", "tokenizer_class"), [("qwen2", None), ("gpt2", "GPT2Tokenizer"), (None, None)])
def test_text_is_read_as_the_stored_tokenizer_says(model_type, tokenizer_class, tmp_path):
    """For a class or a type of model, transformers puts its own pre-tokenizer in the place of the stored one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", *alphabet, "12", "Ġa"]
    backend = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [("1", "2"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
    expected = backend.encode("12 a").ids
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": tokenizer_class}))
        backend.model.save(str(tmp_path))
    says = pytest.warns(
        IsolossWarning, match="pre-tokenizer.* than the tokenizer.json of .*: text is read as tokenizer.json"
    )
    with says if model_type is not None else contextlib.nullcontext():
        tokenizer = load_tokenizer(str(tmp_path))
    assert ids(tokenizer, "12 a") == [expected]
    assert [names[index] for index in expected] == ["1", "2", "Ġa"]


def test_vocabulary_file_gives_a_bert_tokenizer(vocab):
    tokenizer = load_tokenizer(str(vocab), needs=("mask", "pad"))
    assert ids(tokenizer, "Av AUu, ÁV", "zz") == [[5, 1, 65, 2, 5], [2]]  # lower-cased, accents off, [UNK] is 2
    assert ids(tokenizer, "av", add_special_tokens=True) == [[3, 5, 4]]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id, len(tokenizer)) == (0, 64, 66)


def test_case_follows_the_vocabulary(tmp_path, vocab):
    cased = tmp_path / "cased.txt"
    cased.write_text(vocab.read_text() + "Av\r\nÁv\r\n")
    tokenizer = load_tokenizer(str(cased))
    assert ids(tokenizer, "av Av Áv AV") == [[5, 66, 67, 2]]


def test_real_vocabulary_against_the_python_implementation(shared_data):
    path = shared_data / "bert-uncased-vocab" / "vocab.txt"
    tokenizer = load_tokenizer(str(path))
    assert len(tokenizer) == 30522
    assert ids(tokenizer, "Hello World, unaffable!") == [[7592, 2088, 1010, 14477, 20961, 3468, 999]]
    text = (shared_data / "novels" / "Hardy_Madding_1874.txt").read_text(encoding="utf-8-sig")[:60_000]
    legacy = BertTokenizerLegacy(str(path))
    assert ids(tokenizer, text) == [legacy.convert_tokens_to_ids(legacy.tokenize(text))]


def test_encode_gives_text_whole_and_as_text(vocab, tmp_path, capfd):
    folder = tmp_path / "short"
    tokenizer = load_tokenizer(str(vocab))
    tokenizer.model_max_length = 4
    tokenizer.save_pretrained(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    loaded = load_tokenizer(str(folder))
    assert ids(loaded, "av " * 1000, "aw", "") == [[5] * 1000, [6], []]
    # what a text spells is never a special token, and the tokenizer is as before
    assert not set(ids(loaded, "av [MASK] [SEP] aw")[0]) & {64, 4}
    assert loaded("av [MASK]").input_ids == [3, 5, 64, 4]
    assert capfd.readouterr() == ("", "")


def test_encode_agrees_with_the_tokenizer_call_over_many_batches(vocab, words):
    tokenizer = load_tokenizer(str(vocab))
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, size)) for size in draw.integers(1, 9, 50)]
    long = "av" + 700_000 * " "  # a few of them end a batch
    found = ids(tokenizer, *texts, long, long, long, long, *texts)
    assert found[:50] == found[54:] == [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert found[50:54] == [[5]] * 4
    assert next(encode(tokenizer, ["av"])).dtype == np.int64


def test_folder_round_trip_is_the_same_tokenizer(vocab, tmp_path):
    tokenizer = load_tokenizer(str(vocab))
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    before = serialized(tokenizer)
    tokenizer(["av aw", "av"], padding=True, truncation=True, max_length=3)  # leaves its settings in the backend
    assert serialized(again) == serialized(tokenizer) == before
    vocab.write_text(vocab.read_text().replace("ax", "xa"))
    assert serialized(load_tokenizer(str(vocab))) != before


def test_vocabulary_lists_tokens_by_id(vocab, tmp_path):
    assert vocabulary(load_tokenizer(str(vocab))) == tuple(vocab.read_text().split())
    folder = word_level(tmp_path / "holes", {"<unk>": 0, "a": 1, "b": 4})
    assert vocabulary(load_tokenizer(folder)) == ("<unk>", "a", "", "", "b")


def test_needed_special_tokens_are_named(tmp_path):
    folder = word_level(tmp_path / "words", {"<unk>": 0, "<pad>": 1, "a": 2}, pad_token="<pad>")
    assert ids(load_tokenizer(folder, needs=("pad",)), "a b a") == [[2, 0, 2]]
    with pytest.raises(IsolossError, match="words has no mask token"):
        load_tokenizer(folder, needs=("pad", "mask"))


def test_a_checkpoint_without_vocabulary_has_no_tokenizer(tmp_path):
    BertConfig().save_pretrained(tmp_path)  # for which transformers makes up one of five special tokens
    with pytest.raises(IsolossError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


def test_what_is_wrong_with_a_tokenizers_files_is_said(tmp_path):
    folder = tmp_path / "words"
    word_level(folder, {"<unk>": 0, "a": 1})
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    whole = tokenizer.read_text()
    for text, message in (
        (whole[:40], "words/tokenizer.json is not a readable JSON file: "),
        (
            "version https://git-lfs.github.com/spec/v1\n",
            f"pointer of Git LFS, not the file itself: git -C {folder} lfs",
        ),
        ("{}", "KeyError: "),
    ):
        tokenizer.write_text(text)
        with pytest.raises(IsolossError, match=f"holds no tokenizer that transformers can load: .*{message}"):
            load_tokenizer(str(folder))
    tokenizer.unlink()
    config.write_text(json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "own.py").write_text("raise SystemExit")
    (folder / "vocab.own").touch()
    with pytest.raises(IsolossError, match=r"it is code of its own, which isoloss does not run: save its fast form"):
        load_tokenizer(str(folder))


def test_bad_names_and_files(tmp_path, vocab):
    (tmp_path / "empty").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(IsolossError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))
    for spec in (str(tmp_path / "nowhere"), "nowhere.txt", "~/no-such-folder-of-mine", "a/b/c", ""):
        with pytest.raises(IsolossError, match=r"there is no tokenizer .*hub or a WordPiece vocab.txt"):
            load_tokenizer(spec)
    with pytest.raises(IsolossError, match=r"not a vocab.txt"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    broken = tmp_path / "broken.txt"
    for content, message in [
        ("\n".join(w for w in vocab.read_text().split() if w not in ("[CLS]", "[MASK]")), r"lacks \[CLS\], \[MASK\]"),
        (vocab.read_text() + "av\n", "the token 'av' twice"),
    ]:
        broken.write_text(content)
        with pytest.raises(IsolossError, match=message):
            load_tokenizer(str(broken))
    broken.write_bytes(b"caf\xe9\n")
    with pytest.raises(IsolossError, match=r"broken.txt is not UTF-8"):
        load_tokenizer(str(broken))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RepositoryNotFoundError("no such repository", response=Mock()), "nor on the Hugging Face hub"),
        (ConnectionError(), "hub does not answer"),
    ],
    ids=["answers", "does not"],
)
def test_hub_names(answer, message, monkeypatch):
    asked = []

    def ask(name, **options):
        asked.append(name)
        raise answer

    monkeypatch.setattr("huggingface_hub.model_info", ask)
    with pytest.raises(IsolossError, match=f"there is no tokenizer someone/something.*{message}"):
        load_tokenizer("someone/something")
    assert asked == ["someone/something"]


def test_a_revision_on_the_hub_has_its_own_tokenizer(vocab, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(str(vocab))
    repository = tmp_path / "hub" / "models--someone--something"
    for revision, token in (("main", "alpha"), ("step1000", "beta")):
        tokenizer.add_tokens([token])
        snapshot = repository / "snapshots" / f"commit-of-{revision}"
        tokenizer.save_pretrained(snapshot)
        (snapshot / "config.json").write_text('{"model_type": "bert"}')
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(f"commit-of-{revision}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = {name: load_tokenizer(name).get_vocab() for name in ("someone/something", "someone/something@step1000")}
    assert "beta" not in found["someone/something"]
    assert "beta" in found["someone/something@step1000"]
    with pytest.raises(IsolossError, match="there is no tokenizer someone/something@step2 on this machine"):
        load_tokenizer("someone/something@step2")


# --- the bytes of a text that its tokens stand for


def gemma():
    """Its runs of spaces and line ends are added tokens that are not special; what it does not know becomes bytes."""
    runs = ["\n", "\n\n", "▁▁", "▁▁▁▁"]
    tokens = ["<unk>", "<bos>", *runs, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefx:"]
    merges = [("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    backend.add_special_tokens(["<unk>", "<bos>"])
    backend.add_tokens([AddedToken(run, normalized=False, special=False) for run in runs])
    return backend


def sentence_pieces():
    """As T5's: NFKC, lower case, runs of spaces as one, and a space before a text."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("f", -3.0), ("i", -3.0), ("▁fi", -2.5), ("s", -3.0)]
    backend = Tokenizer(models.Unigram(pieces, 0))
    parts = [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(parts)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def byte_level():
    """As GPT-2's, whose offsets leave out the spaces where they are trimmed, as RoBERTa's are."""
    merges = [("\u0120", "a"), ("a", "\u00c3")]
    tokens = ["<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def lower_casing():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "na": 1, "##ive": 2, "y": 3}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return backend


@pytest.mark.parametrize(
    ("make", "text", "sizes"),
    [
        # what looks like a run of spaces is bytes of ▁ where the text has it
        (gemma, "a:\n\n    x  é", [0, 1, 1, 2, 4, 1, 2, 1, 1]),
        (gemma, "▁▁a<bos>", [0, 6, 1, 1, 1, 1, 1, 1]),
        # the space before a text has an equal share in its first character
        (sentence_pieces, "fi  FI ☃s", [2, 4, 1, 3, 1]),
        (sentence_pieces, "\N{LATIN SMALL LIGATURE FI}s", [3, 1]),
        (byte_level, "aé a☃", [2, 1, 2, 1, 1, 1]),
        # white space goes to the next word or, at the end, to the last; [UNK] stands for a word
        (lower_casing, "  Naïve y\n \N{EM DASH}\n", [4, 4, 2, 6]),
        (lower_casing, "", []),
        (lower_casing, " \n", []),
    ],
)
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(make, text, sizes):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make())
    ((ids, found),) = encode_with_bytes(tokenizer, [text], add_special_tokens=True)
    assert found.tolist() == pytest.approx(sizes)
    assert found.sum() == pytest.approx(len(text.encode()) if sizes else 0)
    assert ids.tolist() == next(iter(encode(tokenizer, [text], add_special_tokens=True))).tolist()


def test_kept_tokens_stand_for_what_the_teachers_tokens_do():
    tokenizer = keep(PreTrainedTokenizerFast(tokenizer_object=lower_casing()), [3, 1], length=8)
    ((ids, sizes),) = encode_with_bytes(tokenizer, ["y Naïve ☃"], add_special_tokens=True)
    assert (ids.tolist(), sizes.tolist()) == ([3, 0, 1, 3, 3], [0, 1, 3, 4, 4])
