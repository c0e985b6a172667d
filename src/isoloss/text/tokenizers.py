"""Tokenizers: loaded by folder, hub name or WordPiece vocabulary, checked, and used on plain text."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from isoloss import files
from isoloss.early_checks import check_content, may_be_hub_name
from isoloss.errors import IsolossError, warn
from isoloss.text.documents import reading

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from isoloss.text.kept_tokens import KeptTokensTokenizer

Kind = Literal["wordpiece", "bpe"]

_BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CHOICES = "a tokenizer is a Hugging Face folder, a name on the Hugging Face hub or a WordPiece vocab.txt"
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")  # that a folder has a tokenizer in
_TRAINED = "wordpiece:"  # before a number of tokens
_MOST_TOKENS = 1_000_000
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a token of SentencePiece that stands for one byte


def load_tokenizer(spec: str, *, needs: Sequence[Literal["mask", "pad"]] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `spec` names.

    A `.txt` file is the vocabulary of a BERT tokenizer, one token per line; text is lower-cased, and its accents are
    stripped, if no ordinary entry has an upper-case letter. No code that comes with a tokenizer is run.

    Args:
        spec: A Hugging Face folder, a name on the hub, `NAME` or `NAME@REVISION` (what is on this machine already is
            taken from there), or a `vocab.txt`.
        needs: Special tokens that it has to have.
    """
    check_name(spec)
    path = Path(spec).expanduser()
    if path.is_file():
        tokenizer = _from_vocabulary(path)
    elif path.is_dir():
        tokenizer = _auto(str(path), f"the folder {spec} holds no tokenizer that transformers can load")
    else:
        tokenizer = _from_hub(spec)
    for name in needs:
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise IsolossError(f"the tokenizer {spec} has no {name} token, which is needed here")
    return tokenizer


def check_name(spec: str) -> None:
    """Refuse what is no file, no folder and not what may be a name on the hub; nothing is opened."""
    may_be_on_hub = may_be_hub_name(spec.partition("@")[0]) and not spec.endswith(".txt")
    if not may_be_on_hub and not (spec and Path(spec).expanduser().exists()):
        raise IsolossError(f"there is no tokenizer {spec!r}{files.nearest(spec) or ':'} {_CHOICES}")


def trained_size(spec: str) -> int | None:
    """Return the number of tokens in `wordpiece:NUMBER`, a tokenizer to be trained on the text; None for others.

    Raises:
        IsolossError: What follows the colon is not a whole number up to a million.

    Example:
        >>> trained_size("wordpiece:2000"), trained_size("vocab.txt")
        (2000, None)
    """
    if not spec.startswith(_TRAINED):
        return None
    number = spec.removeprefix(_TRAINED)
    if not (number.isascii() and number.isdecimal() and int(number[:20]) <= _MOST_TOKENS):
        raise IsolossError(
            f"tokenizer {spec!r}: expected {_TRAINED}N with N from 6 to {_MOST_TOKENS:,}, e.g. {_TRAINED}2000"
        )
    return int(number)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, kind: Kind = "wordpiece", lowercase: bool = True
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is learned from texts, with the library `tokenizers`.

    Its special tokens are BERT's: [PAD], [UNK], [CLS], [SEP] and [MASK]. [CLS] and [SEP] are put around a text. The
    same texts give the same tokenizer.

    Args:
        texts: Documents.
        vocab_size: Tokens to have, the special ones included; fewer if the texts hold no more, and more if they have
            more different characters.
        kind: `wordpiece`, as BERT's, or `bpe`, byte-level byte-pair encoding, as GPT-2's.
        lowercase: Of `wordpiece`: whether text is lower-cased and loses its accents.

    Example:
        >>> tokenizer = train_tokenizer(["One two three.", "Two and two."], vocab_size=50)
        >>> tokenizer.convert_ids_to_tokens(tokenizer("two")["input_ids"])
        ['[CLS]', 'two', '[SEP]']
    """
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import BertTokenizerFast, PreTrainedTokenizerFast

    # BPE has every byte, WordPiece at least one character
    least = len(_BERT_SPECIALS) + (256 if kind == "bpe" else 1)
    if vocab_size < least:
        raise IsolossError(f"the vocabulary size is {vocab_size}; for {kind} it must be at least {least}")
    # WordPiece reads them twice
    documents = list(texts)
    if kind == "wordpiece":
        ids = _wordpiece(documents, vocab_size, lowercase=lowercase)
        if len(ids) == len(_BERT_SPECIALS):
            raise IsolossError("there is no text to learn a tokenizer from")
        if len(ids) > vocab_size:
            warn(
                f"the tokenizer has {len(ids):,} tokens, not {vocab_size:,}: the characters of the texts and the "
                f"special tokens alone are {len(ids):,}"
            )
        tokenizer: PreTrainedTokenizerFast = BertTokenizerFast(vocab=ids, do_lower_case=lowercase)
        return tokenizer
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(documents, vocab_size, special_tokens=list(_BERT_SPECIALS), show_progress=False)
    ids = learner.get_vocab()
    # the library's class for training has no public name for it
    backend = learner._tokenizer
    around = [(token, ids[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=around
    )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), _BERT_SPECIALS, strict=True))
    special = {f"{name}_token": token for name, token in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _wordpiece(documents: list[str], vocab_size: int, *, lowercase: bool) -> dict[str, int]:
    """Return a WordPiece vocabulary, token to id.

    The library numbers the characters that go on a word (`##a`) as a hash map yields them, and breaks ties by these
    numbers. So a first pass finds the characters, and the second has them, in order, before all that it finds itself.
    """
    from tokenizers import BertWordPieceTokenizer

    def learned(size: int, first: list[str]) -> dict[str, int]:
        learner = BertWordPieceTokenizer(lowercase=lowercase)
        learner.train_from_iterator(documents, size, special_tokens=[*_BERT_SPECIALS, *first], show_progress=False)
        ids: dict[str, int] = learner.get_vocab()
        return ids

    # a vocabulary of size 0 has all characters nevertheless, and no merges
    within = sorted(token for token in learned(0, []) if len(token) == 3 and token.startswith("##"))
    return learned(vocab_size, within)


def encode(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], *, add_special_tokens: bool = False
) -> Iterator[np.ndarray]:
    """Yield the token ids of each text, int64 (tokens,), on all cores and however long the text is.

    Text is text: where it spells a special token, such as `[MASK]`, it gives ordinary tokens, never that one. What the
    tokenizer puts around a text comes with `add_special_tokens`.

    Example:
        >>> tokenizer = train_tokenizer(["Two, three.", "Two and three."], vocab_size=50)
        >>> [len(ids) for ids in encode(tokenizer, ["two", "two three"])]
        [1, 2]
    """
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    if not isinstance(tokenizer, KeptTokensTokenizer):
        yield from _encode(tokenizer.backend_tokenizer, texts, add_special_tokens)
        return
    around = tokenizer.build_inputs_with_special_tokens([]) if add_special_tokens else []
    for ids in _encode(tokenizer.source, texts, False):
        yield np.array([*around, *tokenizer.from_source(ids)], dtype=np.int64)


def _encode(backend: Tokenizer, texts: Iterable[str], add_special_tokens: bool) -> Iterator[np.ndarray]:
    # said aloud, so that a later fork (a git call, a data loader) makes the library neither warn nor go single
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # not put back afterwards: transformers sets both anew at each call of its tokenizer
    backend.no_truncation()
    backend.no_padding()
    as_before = backend.encode_special_tokens
    for batch in _batches(texts, characters=2_000_000):
        # for this call alone: between two batches the caller may use the tokenizer, or stop reading
        backend.encode_special_tokens = True
        try:
            encodings = backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)
        finally:
            backend.encode_special_tokens = as_before
        for encoding in encodings:
            yield np.array(encoding.ids, dtype=np.int64)


def serialized(tokenizer: PreTrainedTokenizerFast) -> bytes:
    """Return what decides a tokenizer's ids and special tokens, in a form that is equal for equal tokenizers."""
    document = {**content(tokenizer), "special_tokens": tokenizer.special_tokens_map}
    return json.dumps(document, sort_keys=True, default=str).encode()


def content(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return what decides the ids of a text: normalizer, vocabulary, merges and so on, as JSON types."""
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    is_kept = isinstance(tokenizer, KeptTokensTokenizer)
    document = json.loads((tokenizer.source if is_kept else tokenizer.backend_tokenizer).to_str())
    document |= {"kept_tokens": tokenizer.kept_tokens} if is_kept else {}
    # any call may change truncation and padding, which decide no id
    return {**document, "truncation": None, "padding": None}


def files_key(folder: Path) -> Hashable | None:
    """Return a key that is equal where the files from which a folder's tokenizer is made are; None: it has none."""
    held = _held(folder)
    if not any(path.name != "tokenizer_config.json" for path in held):
        return None
    # the model's config may name the tokenizer's class
    return tuple((path.name, files.sha256(path)) for path in [*held, *folder.glob("config.json")])


def _held(folder: Path) -> list[Path]:
    return [path for pattern in _FILES for path in sorted(folder.glob(pattern)) if path.is_file()]


def keep(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], *, length: int) -> KeptTokensTokenizer:
    """Return the tokenizer of the language of some of a tokenizer's tokens, in the order of the language's ids.

    `length` is the most tokens that a model of the language reads. Nothing is read from or written to disk.
    """
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    if not isinstance(tokenizer, KeptTokensTokenizer):
        return KeptTokensTokenizer(tokenizer.backend_tokenizer, kept_tokens=tokens, model_max_length=length)
    # these ids are of another teacher's language, whose tokens are kept ones themselves
    kept = [tokenizer.kept_tokens[index] for index in tokens]
    return KeptTokensTokenizer(tokenizer.source, kept_tokens=kept, model_max_length=length)


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Return the token strings by id; an id that stands for no token has the empty string.

    Example:
        >>> vocabulary(train_tokenizer(["aa"], vocab_size=7))
        ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '##a', 'a')
    """
    ids = tokenizer.get_vocab()
    tokens = [""] * (max(ids.values()) + 1)
    for token, index in ids.items():
        tokens[index] = token
    return tuple(tokens)


def _batches(texts: Iterable[str], *, characters: int) -> Iterator[list[str]]:
    # by characters, as a text may be a sentence or a book
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _from_vocabulary(path: Path) -> PreTrainedTokenizerFast:
    from transformers import BertTokenizerFast

    if path.suffix != ".txt":
        raise IsolossError(f"{path} is a file but no vocab.txt: {_CHOICES}")
    with reading(path):
        # not `splitlines`, which also cuts at characters that a token may be, such as U+2028
        tokens = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    ids = {token: index for index, token in enumerate(tokens)}
    missing = [token for token in _BERT_SPECIALS if token not in ids]
    if missing:
        raise IsolossError(f"{path} is no WordPiece vocabulary, one token per line: it lacks {', '.join(missing)}")
    if len(ids) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise IsolossError(f"{path} holds the token {twice!r} twice")
    uncased = not any(token != token.lower() for token in tokens if not (token[:1] == "[" and token[-1:] == "]"))
    tokenizer: PreTrainedTokenizerFast = BertTokenizerFast(vocab=ids, do_lower_case=uncased)
    return tokenizer


def _from_hub(spec: str) -> PreTrainedTokenizerFast:
    name, _, revision = spec.partition("@")
    message = f"the Hugging Face repository {spec} holds no tokenizer that transformers can load"
    try:
        return _auto(name, message, revision=revision, local_files_only=True)
    except IsolossError as error:
        # an OSError says that it is not here; anything else, that it is and cannot be read
        if not isinstance(error.__cause__, OSError):
            raise
    from isoloss.early_checks import hub_answers

    if not hub_answers(name, what="tokenizer", revision=revision or None):
        raise IsolossError(
            f"there is no tokenizer {spec} on this machine, and the Hugging Face hub does not answer"
            f"{files.nearest(name) or ':'} {_CHOICES}"
        )
    return _auto(name, message, revision=revision)


def _auto(spec: str, message: str, *, revision: str = "", local_files_only: bool = False) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from isoloss.text.kept_tokens import KeptTokensTokenizer

    logger = logging.getLogger("transformers")
    level = logger.level
    # else transformers warns about a model that it was not asked to load
    logger.setLevel(logging.ERROR)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec, revision=revision or "main", trust_remote_code=False, local_files_only=local_files_only
        )
    except Exception as error:
        # transformers raises nearly anything on a folder that does not suit it
        held = _held(Path(spec))
        if Path(spec).is_dir() and not held:
            raise IsolossError(message) from None
        raise IsolossError(f"{message}: {_reason(held, error)}") from error
    finally:
        logger.setLevel(level)
    if not isinstance(tokenizer, PreTrainedTokenizerFast | KeptTokensTokenizer):
        raise IsolossError(f"{spec} has a tokenizer without a fast form ({type(tokenizer).__name__})")
    # transformers makes up a tokenizer of special tokens alone for a checkpoint folder without a vocabulary
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise IsolossError(message)
    return tokenizer


def _reason(held: list[Path], error: Exception) -> str:
    """Return why the tokenizer in some files cannot be loaded, for which transformers raised an error."""
    for path in held:
        try:
            check_content(path)
            document = files.read_json(path) if path.suffix == ".json" else None
        except IsolossError as found:
            return str(found)
        if path.name == "tokenizer_config.json" and isinstance(document, dict) and "auto_map" in document:
            return "it is code of its own, which isoloss does not run: save its fast form, a tokenizer.json"
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64] | None:
    """Return (V,) how many bytes of UTF-8 text each token id stands for; None where the tokenizer's kind is not known.

    Byte-level tokenizers (GPT-2's, Llama 3's) write each byte as one character, tokenizers of SentencePiece a space as
    `▁` and single bytes as `<0x0A>`; special tokens stand for no text. A loss in nats per token times the tokens of a
    text, divided by its bytes and by ln 2, is its bits per byte, which tokenizers share.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> backend = Tokenizer(models.BPE({"a": 0, "\u0120b": 1, "\u00c3\u00a9": 2}, []))
        >>> backend.decoder = decoders.ByteLevel()
        >>> token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend)).tolist()
        [1, 2, 2]
    """
    backend = tokenizer.backend_tokenizer
    decoder = json.loads(backend.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if "ByteLevel" in kinds:

        def size(token: str) -> int:
            return len(token)
    elif kinds & {"Metaspace", "ByteFallback"}:

        def size(token: str) -> int:
            return 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
    else:
        return None
    vocab = tokenizer.get_vocab()
    sizes = np.zeros(max(vocab.values()) + 1, dtype=np.int64)
    added = tokenizer.added_tokens_decoder
    for token, index in vocab.items():
        # an added token is text as it is, not in the letters of the tokenizer
        sizes[index] = 0 if token in special else len(token.encode()) if index in added else size(token)
    return sizes
