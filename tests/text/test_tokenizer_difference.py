"""What makes two tokenizers read alike or not, each way round."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from isoloss.text.tokenizer_difference import difference
from isoloss.text.tokenizers import keep, load_tokenizer

WORDS = ["<s>", "</s>", "<mask>", "a", "b", "c", "A", "ab", "bc"]
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(change=None, *, words=WORDS, merges=MERGES, roles=(), **options):
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges, **options))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([word for word in words if word.startswith("<")])
    if change is not None:
        change(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(roles))


def setting(name, value):
    return lambda backend: setattr(backend, name, value)


def adding(token, *, special=False, **options):
    return lambda backend: backend.add_tokens([AddedToken(token, special=special, normalized=False, **options)])


def start(index):
    word = WORDS[index]
    return setting("post_processor", processors.TemplateProcessing(single=f"{word} $A", special_tokens=[(word, index)]))


OTHERS = {
    "merges": (tokenizer(merges=MERGES[::-1]), "merge 0 is a+b in A and b+c in B"),
    "fewer merges": (tokenizer(merges=MERGES[:1]), "A has 2 merges and B 1"),
    "the ids": (tokenizer(words=[*WORDS[:3], "b", "a", *WORDS[5:]]), "'a' is token 3 of A and token 4 of B"),
    "a token": (tokenizer(words=[*WORDS, "d"]), "'d' is a token of B alone"),
    "an added token": (tokenizer(adding("abc")), "'abc' is a token of B alone"),
    "how an added token is read": (tokenizer(adding("ab", lstrip=True)), "they match 'ab' in a text by different"),
    "the normalizer": (tokenizer(setting("normalizer", normalizers.Lowercase())), "nothing in A and Lowercase"),
    "the pre-tokenizer": (tokenizer(setting("pre_tokenizer", pre_tokenizers.Punctuation())), "WhitespaceSplit in A"),
    "the model": (tokenizer(unk_token="a"), "the unk_token of the model is None in A and a in B"),
    "what is put before a text": (tokenizer(start(1)), "A puts the ids [] around a text and B [1]"),
    "a role": (tokenizer(roles={"mask_token": "</s>"}), "the mask token is 2 in A and 1 in B"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_reads_a_text_differently_is_named_whichever_comes_first(case):
    other, what = OTHERS[case]
    plain = tokenizer(roles={"mask_token": "<mask>"})
    assert what in difference(plain, other, ("A", "B")).reason
    assert difference(other, plain, ("B", "A")).reason


def test_settings_of_one_step_are_compared():
    first, second = (tokenizer(setting("normalizer", normalizers.BertNormalizer(lowercase=on))) for on in (True, False))
    assert difference(first, second, ("A", "B")).reason == "the normalizers have different settings"


def test_unigram_scores_are_compared():
    first, second = (
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", -1.0), ("b", score)])))
        for score in (-2.0, -3.0)
    )
    assert difference(first, second, ("A", "B")).reason == "they match 'b' in a text by different rules"


def test_what_decides_no_id_is_not_compared(tmp_path):
    plain = tokenizer()
    written = tokenizer(setting("decoder", decoders.Fuse()), continuing_subword_prefix="")
    written.backend_tokenizer.enable_truncation(4)
    written.backend_tokenizer.enable_padding(pad_id=1, pad_token="</s>", length=9)
    written.backend_tokenizer.normalizer = normalizers.Sequence([])
    written.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    written.save_pretrained(tmp_path)
    for other in (written, load_tokenizer(str(tmp_path))):
        found = difference(plain, other, ("A", "B"))
        assert (found.reason, found.special) == ("", ())


def test_special_tokens_that_no_text_is_read_as_may_differ():
    plain, more = tokenizer(), tokenizer(adding("<pad>", special=True))
    for pair in ((plain, more), (more, plain)):
        assert difference(*pair, ("A", "B")) == difference(more, plain, ("B", "A"))
        assert difference(*pair, ("A", "B")).special == ("<pad>",)
        assert not difference(*pair, ("A", "B")).reason


def test_kept_tokens_are_compared():
    first, second = (keep(tokenizer(), tokens, length=8) for tokens in ([3, 4], [3, 5]))
    assert difference(first, second, ("A", "B")).reason == "they keep different tokens"
    assert not difference(first, keep(tokenizer(), [3, 4], length=8), ("A", "B")).reason
