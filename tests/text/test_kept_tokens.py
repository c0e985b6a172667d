"""The tokenizer of a teacher's language: its ids are those of the teacher's, looked up one by one, for every kind."""

import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertConfig, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from isoloss.errors import IsolossError
from isoloss.lab.languages.config import CorpusConfig
from isoloss.lab.languages.text import Corpus
from isoloss.text.kept_tokens import KeptTokensTokenizer
from isoloss.text.tokenizers import encode, keep, load_tokenizer, serialized

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog isn't amused: it barks at the fox.",
    "A naïve café in Zürich serves 1,234 coffees a day; who'd have thought so? Nobody, really.",
    "Where there is a will there is a way, where there is a way there is a wall, and over the wall a fox.",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<mask>"]
KINDS = ("byte-level BPE", "BPE with bytes as fallback", "WordPiece", "Unigram")


def trained(kind):
    """A fast tokenizer of one kind, learned from a few sentences, with special tokens that it puts around a text."""
    if kind == "byte-level BPE":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind == "BPE with bytes as fallback":
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        some = [f"<0x{byte:02X}>" for byte in range(0x80, 0xC8)]  # not all: there are unknown characters as well
        trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=[*SPECIAL, *some])
    elif kind == "WordPiece":
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=140, special_tokens=SPECIAL)
    else:
        backend = Tokenizer(models.Unigram())
        backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>")
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens(["fox"])  # an ordinary token outside the model's vocabulary
    around = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=around)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", mask_token="<mask>")


@pytest.fixture(scope="module", params=KINDS)
def teacher(request):
    return trained(request.param)


def some_tokens(teacher, seed=0, share=0.5):
    """Ordinary tokens in random order, the added one among them."""
    rng = random.Random(seed)
    ids = sorted(set(teacher.get_vocab().values()) - set(teacher.all_special_ids))
    kept = rng.sample(ids, round(share * len(ids)))
    added = teacher.convert_tokens_to_ids("fox")
    return kept if added in kept else [added, *kept]


def random_texts(seed, n=200):
    """Texts of known and unknown words, spaces, other scripts, and what spells special tokens."""
    rng = random.Random(seed)
    others = ["<pad>", "[MASK]", "猫", "🦊", "ﬁn", "\n", "  ", "\u0301", "x" * 130, "0x1F"]
    words = [*" ".join(TEXT).split(), *SPECIAL, *others]
    drawn = (
        "".join(rng.choice(words) + rng.choice([" ", "", " "]) for _ in range(rng.randrange(12))) for _ in range(n)
    )
    return ["", " ", *drawn]


def looked_up(teacher, kept, text):
    """The ids by definition: those of the teacher, one by one, what is not kept being K + 1."""
    index = {token: place for place, token in enumerate(kept)}
    (ids,) = encode(teacher, [text])
    return [index.get(token, len(kept) + 1) for token in ids.tolist()]


def test_ids_are_those_of_the_teacher_looked_up(teacher):
    for seed in range(3):
        kept = some_tokens(teacher, seed, share=(0.2, 0.5, 1.0)[seed])
        tokenizer = keep(teacher, kept, length=24)
        texts = random_texts(seed)
        expected = [looked_up(teacher, kept, text) for text in texts]
        assert len({token for ids in expected for token in ids}) > 10
        start = [len(kept) + 1]
        assert [ids.tolist() for ids in encode(tokenizer, texts)] == expected
        assert [ids.tolist() for ids in encode(tokenizer, texts, add_special_tokens=True)] == [
            start + i for i in expected
        ]
        assert tokenizer(texts, split_special_tokens=True)["input_ids"] == [start + ids for ids in expected]
        assert tokenizer.get_vocab() == {tokenizer.convert_ids_to_tokens(i): i for i in range(len(kept) + 2)}
        assert tokenizer.convert_ids_to_tokens(list(range(len(kept)))) == teacher.convert_ids_to_tokens(kept)
        assert (len(tokenizer), tokenizer.pad_token_id) == (len(kept) + 2, len(kept))
        assert tokenizer.mask_token_id == tokenizer.unk_token_id == len(kept) + 1


def test_a_saved_one_is_the_same(teacher, tmp_path):
    kept = some_tokens(teacher)
    tokenizer = keep(teacher, kept, length=24)
    BertConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)  # as in a checkpoint
    tokenizer.save_pretrained(tmp_path)
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path), needs=("mask", "pad"))):
        assert isinstance(again, KeptTokensTokenizer)
        assert again.model_max_length == 24
        assert again.get_vocab() == tokenizer.get_vocab()
        assert again.special_tokens_map == tokenizer.special_tokens_map
        assert serialized(again) == serialized(tokenizer)
        texts = random_texts(7, 50)
        assert again(texts) == tokenizer(texts)
    again.save_pretrained(tmp_path / "twice")
    name = "source_tokenizer.json"
    assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert load_tokenizer(str(tmp_path / "twice")).kept_tokens == kept
    assert serialized(keep(teacher, kept[::-1], length=24)) != serialized(tokenizer)


def test_pairs_are_cut_and_numbered_as_fast_tokenizers_do(teacher):
    kept = some_tokens(teacher)
    tokenizer = keep(teacher, kept, length=24)
    index = {token: place for place, token in enumerate(kept)}
    first, second = random_texts(1, 60), random_texts(2, 60)
    for limit, side in ((9, "right"), (10, "left"), (40, "right")):
        options = {"truncation": "longest_first", "max_length": limit, "split_special_tokens": True}
        tokenizer.truncation_side = teacher.truncation_side = side
        theirs = teacher(first, second, return_token_type_ids=True, return_special_tokens_mask=True, **options)
        ours = tokenizer(first, second, return_special_tokens_mask=True, **options)
        assert ours["input_ids"] == [[index.get(i, len(kept) + 1) for i in ids] for ids in theirs["input_ids"]]
        assert ours["special_tokens_mask"] == theirs["special_tokens_mask"]
        for ids, types in zip(ours["input_ids"], ours["token_type_ids"], strict=True):
            assert sorted(types) == types
            assert ids[types.index(1)] == tokenizer.mask_token_id  # the second text begins with the mask, too
    tokenizer.truncation_side = teacher.truncation_side = "right"


def test_what_is_not_kept_is_never_predicted(teacher):
    tokenizer = keep(teacher, some_tokens(teacher), length=24)
    texts = TEXT * 20
    plain = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)([tokenizer(text) for text in texts])
    labels = batch["labels"]
    assert 0.4 < (labels >= 0)[plain < tokenizer.pad_token_id].double().mean() < 0.6
    assert (labels[plain >= tokenizer.pad_token_id] == -100).all()


def test_text_of_kept_tokens_comes_back():
    teacher = trained("byte-level BPE")
    tokenizer = keep(teacher, some_tokens(teacher, share=1.0), length=24)
    assert tokenizer.decode(tokenizer(TEXT[1])["input_ids"], skip_special_tokens=True).strip() == TEXT[1]


def test_names_of_special_ids_are_none_of_a_kept_token():
    backend = Tokenizer(models.WordLevel({"<mask>": 0, "<pad>": 1, "<pad>_": 2, "a": 3}))
    tokenizer = KeptTokensTokenizer(backend, kept_tokens=[2, 0, 1, 9])
    assert tokenizer.convert_ids_to_tokens(list(range(6))) == ["<pad>_", "<mask>", "<pad>", "t9", "<pad>__", "<mask>_"]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (4, 5)
    assert tokenizer.from_source([0, 1, 2, 3]).tolist() == [1, 2, 0, 5]


def test_the_kept_tokens_of_a_teacher_that_has_kept_tokens(teacher):
    outer = some_tokens(teacher)
    middle = keep(teacher, outer, length=24)
    inner = [7, 3, 11]
    tokenizer = keep(middle, inner, length=9)
    for text in random_texts(3, 50):
        (ids,) = encode(tokenizer, [text])
        assert ids.tolist() == looked_up(teacher, [outer[token] for token in inner], text)
        assert ids.tolist() == looked_up(middle, inner, text)


def test_a_corpus_is_packed_with_it(teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    tokenizer = keep(teacher, some_tokens(teacher), length=24)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for index in range(4):
        (tmp_path / f"{index}.txt").write_text(" ".join([*TEXT, str(index)]))
    config = CorpusConfig(paths=(str(tmp_path),), tokenizer=str(tmp_path / "tokenizer"), length=8)
    corpus = Corpus.from_config(config)
    assert corpus.model_vocab_size == len(tokenizer)
    assert corpus.special_token_ids == (tokenizer.pad_token_id, tokenizer.mask_token_id)
    streams = [looked_up(teacher, tokenizer.kept_tokens, " ".join([*TEXT, str(i)])) for i in range(4)]
    rows = {tuple(ids[k : k + 8]) for ids in streams for k in range(len(ids) - 7)}
    assert {tuple(row) for row in corpus.held_out().tokens.tolist()} <= rows


@pytest.mark.slow
def test_without_isoloss_nothing_is_taken_for_it(tmp_path):
    teacher = trained("WordPiece")
    BertConfig().save_pretrained(tmp_path)
    keep(teacher, some_tokens(teacher), length=24).save_pretrained(tmp_path)
    program = f"from transformers import AutoTokenizer\nprint(AutoTokenizer.from_pretrained({str(tmp_path)!r})('fox'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    (tmp_path / "source_tokenizer.json").unlink()
    with pytest.raises(IsolossError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))
