"""Tokenizers: loaded by folder, hub name or WordPiece vocabulary, checked, and used on plain text."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from isoloss import files
from isoloss.checkpoints.places import check_content, may_be_hub_name
from isoloss.errors import IsolossError, warn
from isoloss.text.documents import reading

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

    from isoloss.text.kept_tokens import KeptTokensTokenizer

Kind = Literal["wordpiece", "bpe"]
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

_BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CHOICES = "a tokenizer is a Hugging Face folder, a name on the Hugging Face hub or a WordPiece vocab.txt"
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")  # that a folder has a tokenizer in
_OPTIONS = (  # of the parts of a tokenizer.json, which tokenizer_config.json may set, and one that decides no id
    *("add_prefix_space", "prepend_scheme", "lowercase", "strip_accents", "handle_chinese_chars", "clean_text"),
    "trim_offsets",
)
_TRAINED = "wordpiece:"  # before a number of tokens
_MOST_TOKENS = 1_000_000


class NoTokenizerError(IsolossError):
    """No tokenizer was found; any other error is about a tokenizer that was found."""


def load_tokenizer(spec: str, *, needs: Sequence[Literal["mask", "pad"]] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `spec` names.

    A `.txt` file is the vocabulary of a BERT tokenizer, one token per line; text is lower-cased, and its accents are
    stripped, if no ordinary entry has an upper-case letter. No code that comes with a tokenizer is run.

    Args:
        spec: A Hugging Face folder, a name on the hub, `NAME` or `NAME@REVISION` (what is on this machine already is
            taken from there), or a `vocab.txt`.
        needs: Special tokens that it has to have.

    Raises:
        NoTokenizerError: There is none; any other error is about one that was found.
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
        raise NoTokenizerError(f"there is no tokenizer {spec!r}{files.nearest(spec) or ':'} {_CHOICES}")


def trained_size(spec: str) -> int | None:
    """Return the number of tokens in `wordpiece:NUMBER`, a tokenizer to be trained on the text; None for others."""
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
        >>> from isoloss.text.tokenizers import train_tokenizer
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
) -> Iterator[Ids]:
    """Yield the token ids of each text, int64 (tokens,), on all cores and however long the text is.

    Text is text: where it spells a special token, such as `[MASK]`, it gives ordinary tokens, never that one. What the
    tokenizer puts around a text comes with `add_special_tokens`.
    """
    for _, ids, _ in _encode(tokenizer, texts, add_special_tokens, with_offsets=False):
        yield ids


def encode_with_bytes(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], *, add_special_tokens: bool = False
) -> Iterator[tuple[Ids, Floats]]:
    """Yield what `encode` does, and (tokens,) how many bytes of the text, in UTF-8, each token stands for.

    They sum to the bytes of the original text, whatever the tokenizer changes (lower case, NFKC, a space before the
    text, unknown tokens), and are 0 for the tokens that it adds around the text. A character that several tokens share,
    such as one of several bytes in a byte-level tokenizer, is split equally. A character in no token, such as a space
    between two words, counts with the next character that is in a token, or else with the last.
    """
    for text, ids, encoding in _encode(tokenizer, texts, add_special_tokens, with_offsets=True):
        sizes = _bytes_of(text, encoding.offsets)
        # tokens that come before the texts of kept tokens
        yield ids, np.pad(sizes, (len(ids) - len(sizes), 0))


def _bytes_of(text: str, spans: list[tuple[int, int]]) -> Floats:
    """Return (tokens,): the bytes of the characters from start to end of each token; see `encode_with_bytes`."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
    starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    changes = np.bincount(starts, minlength=len(codes) + 1) - np.bincount(ends, minlength=len(codes) + 1)
    tokens_at = np.cumsum(changes)[:-1]
    covered = np.flatnonzero(tokens_at)
    if len(covered) == 0:
        return np.zeros(len(spans))
    owners = np.searchsorted(covered, np.arange(len(codes))).clip(max=len(covered) - 1)
    shares = np.bincount(owners, weights=sizes) / tokens_at[covered]
    before = np.concatenate([[0.0], np.cumsum(shares)])
    bytes_of: Floats = before[np.searchsorted(covered, ends)] - before[np.searchsorted(covered, starts)]
    return bytes_of


def _encode(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], add_special_tokens: bool, *, with_offsets: bool
) -> Iterator[tuple[str, Ids, Encoding]]:
    """Yield each text, its ids, and the encoding of the library, which has the offsets of the tokens."""
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    is_kept = isinstance(tokenizer, KeptTokensTokenizer)
    backend = tokenizer.source if is_kept else tokenizer.backend_tokenizer
    around = tokenizer.build_inputs_with_special_tokens([]) if is_kept and add_special_tokens else []
    # said aloud, so that a later fork (a git call, a data loader) makes the library neither warn nor go single
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # not put back afterwards: transformers sets both anew at each call of its tokenizer
    backend.no_truncation()
    backend.no_padding()
    as_before = backend.encode_special_tokens
    encode_batch = backend.encode_batch if with_offsets else backend.encode_batch_fast
    for batch in _batches(texts, characters=2_000_000):
        # for this call alone: between two batches the caller may use the tokenizer, or stop reading
        backend.encode_special_tokens = True
        try:
            encodings = encode_batch(batch, add_special_tokens=add_special_tokens and not is_kept)
        finally:
            backend.encode_special_tokens = as_before
        for text, encoding in zip(batch, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int64)
            yield text, np.array([*around, *tokenizer.from_source(ids)], dtype=np.int64) if is_kept else ids, encoding


def serialized(tokenizer: PreTrainedTokenizerFast) -> bytes:
    """Return what decides a tokenizer's ids, in a form that is equal for equal tokenizers."""
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    is_kept = isinstance(tokenizer, KeptTokensTokenizer)
    document = json.loads((tokenizer.source if is_kept else tokenizer.backend_tokenizer).to_str())
    document |= {"kept_tokens": tokenizer.kept_tokens} if is_kept else {}
    # any call may change truncation and padding, which decide no id
    document |= {"truncation": None, "padding": None, "special_tokens": tokenizer.special_tokens_map}
    return json.dumps(document, sort_keys=True, default=str).encode()


def files_key(folder: Path) -> Hashable | None:
    """Return a key that is equal where the files from which a folder's tokenizer is made are; None: it has none."""
    held = _tokenizer_files(str(folder), "") if folder.is_dir() else []
    if not any(path.name != "tokenizer_config.json" for path in held):
        return None
    # the model's config may name the tokenizer's class
    return tuple((path.name, files.sha256(path)) for path in [*held, *folder.glob("config.json")])


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
    """Return the token strings by id; an id that stands for no token has the empty string."""
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
        raise NoTokenizerError(f"{path} is a file but not a vocab.txt: {_CHOICES}")
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
    except NoTokenizerError:
        pass  # only the model may be here
    from isoloss.checkpoints.places import hub_answers

    if not hub_answers(name, what="tokenizer", revision=revision or None):
        raise NoTokenizerError(
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
        held = _tokenizer_files(spec, revision)
        # an OSError of the hub may be of the connection
        if not held and (Path(spec).is_dir() or local_files_only or not isinstance(error, OSError)):
            raise NoTokenizerError(message) from None
        raise IsolossError(f"{message}: {_reason(held, error)}") from error
    finally:
        logger.setLevel(level)
    if not isinstance(tokenizer, PreTrainedTokenizerFast | KeptTokensTokenizer):
        raise IsolossError(f"{spec} has a tokenizer without a fast form ({type(tokenizer).__name__})")
    # transformers makes up a tokenizer of special tokens alone for a checkpoint folder without a vocabulary
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        if held := _tokenizer_files(spec, revision):
            raise IsolossError(f"{message}: it has {', '.join(path.name for path in held)}, and no vocabulary")
        raise NoTokenizerError(message)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        _read_as_stored(tokenizer, spec, revision=revision or "main", local_files_only=local_files_only)
    return tokenizer


def _read_as_stored(tokenizer: PreTrainedTokenizerFast, spec: str, **place: Any) -> None:
    """Restore the parts of a tokenizer.json that transformers replaces with the defaults of the tokenizer's class.

    A custom tokenizer whose class or model type is GPT-2's, Qwen 2's or Llama's would get their pre-tokenizer.
    """
    from tokenizers import Tokenizer
    from transformers.utils import cached_file

    path = cached_file(spec, "tokenizer.json", **place, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return
    backend, stored = tokenizer.backend_tokenizer, Tokenizer.from_file(str(path))
    now, then = (json.loads(each.to_str()) for each in (backend, stored))
    changed = [
        part
        for part in ("normalizer", "pre_tokenizer", "model")
        if _without_options(now[part]) != _without_options(then[part])
    ]
    for part in changed:
        setattr(backend, part, getattr(stored, part))
    if changed:
        warn(
            f"transformers reads text with another {' and '.join(changed).replace('_', '-')} than the tokenizer.json "
            f"of {spec} has, that of its class {type(tokenizer).__name__}: text is read as tokenizer.json says"
        )


def _without_options(part: Any) -> Any:
    """Return a part of a tokenizer.json without what tokenizer_config.json may set, or what decides no id."""
    if isinstance(part, list):
        return [_without_options(each) for each in part]
    if not isinstance(part, dict):
        return part or None
    # a vocabulary is not searched
    return {
        key: value if key in ("vocab", "merges") else _without_options(value)
        for key, value in part.items()
        if key not in _OPTIONS
    }


def _tokenizer_files(spec: str, revision: str) -> list[Path]:
    """Return the files of a tokenizer in a folder, or in the copy of a repository of the hub on this machine."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(spec)
    if not folder.is_dir():
        config = try_to_load_from_cache(spec, "config.json", revision=revision or "main")
        folder = Path(config).parent if isinstance(config, str) else folder
    return [path for pattern in _FILES for path in sorted(folder.glob(pattern)) if path.is_file()]


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
