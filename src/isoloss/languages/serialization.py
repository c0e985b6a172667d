"""A language in one file: safetensors with the tables, and JSON in its header that says what they are.

The tables decide: a language is read as it was written, whatever a generator draws from the same config elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import isoloss
from isoloss import config as configs
from isoloss import files
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.languages.config import (
    BracketsConfig,
    CorpusConfig,
    DyckConfig,
    FileConfig,
    HMMConfig,
    PCFGConfig,
    TeacherConfig,
)

if TYPE_CHECKING:
    from isoloss.languages.pcfg.grammar import Grammar

SUFFIX = ".safetensors"
_HEADER = "isoloss"  # the one key of a file's metadata: the order of several is not fixed
_HMM_HEADER = "hmm"  # that of `HMM.to_file`
_RULES = {"binary": 3, "unary": 2, "emission": 2}  # tensors of rules and the ids in a row
_TOLERANCE = 1e-6  # of a sum of probabilities, as for the rows of a hidden Markov model
_DRAWN = (PCFGConfig, HMMConfig, BracketsConfig, DyckConfig)  # configs that hold all that a language is made of

Tables = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What the JSON in a file's header says, besides the config."""

    kind: str
    max_length: int
    vocabulary: tuple[str, ...]
    symbols: tuple[str, ...] = ()


def save(language: Language, path: Path | str, *, overwrite: bool = False) -> None:
    r"""Write a grammar, a hidden Markov model or a language of brackets to a file that `load` reads, bit for bit.

    The file is in the safetensors format. The metadata has one entry, `isoloss`, a JSON object:
    `format` ("language"), `isoloss` (the version that wrote it), `kind` (pcfg, hmm or brackets), `max_length` (tokens
    of the longest sentence), `vocabulary` (the token strings by id), `symbols` (a grammar's, by id, the start symbol
    first) and `config` (what the language was drawn from, or null). The tensors of a grammar with R binary, U unary
    and E emission rules are `binary` (R, 3), `unary` (U, 2) and `emission` (E, 2), int64 ids of the left side and the
    right side, and `binary_probs` (R,), `unary_probs` (U,) and `emission_probs` (E,), float64; those of a hidden Markov
    model `initial` (S,), `transition` (S, S) and `emission` (S, V), float64. The length is all there is of brackets.

    Args:
        language: The language, on any device.
        path: A name that ends in `.safetensors`.
        overwrite: Whether a file of another content may be replaced.

    Raises:
        IsolossError: The language is made of files of its own (a corpus, a teacher), the name has another ending, there
            is a file of another content, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> from isoloss.languages.pcfg.language import PCFG
        >>> path = Path(tempfile.mkdtemp(), "ab.safetensors")
        >>> save(PCFG.from_text("S A A 1\nA a 0.25\nA b 0.75"), path)
        >>> load(path).vocabulary
        ('a', 'b')
    """
    from safetensors.numpy import save as to_bytes

    path = Path(path).expanduser()
    if path.suffix != SUFFIX:
        raise IsolossError(f"the file of a language is called NAME{SUFFIX}, not {path.name}")
    header, tables = _described(language)
    config = _config_of(language)
    document = {
        "format": "language",
        "isoloss": isoloss.__version__,
        "kind": header.kind,
        "max_length": header.max_length,
        "vocabulary": header.vocabulary,
        "symbols": header.symbols,
        "config": configs.to_dict(config) if isinstance(config, _DRAWN) else None,
    }
    data = to_bytes(tables, metadata={_HEADER: json.dumps(document, ensure_ascii=False)})
    if path.exists() and not overwrite:
        if path.is_file() and path.read_bytes() == data:
            return
        raise IsolossError(f"{path} exists and holds something else; choose another name, or ask to overwrite it")
    files.write_bytes(path, data)


def load(path: Path | str) -> Language:
    """Return the language in a file that `save` or `HMM.to_file` wrote, in float64 on the CPU.

    Its tables are those of the file to the last bit. Its config is the one that it was drawn from where that still
    draws the same tables; else a grammar's is its rules, and a hidden Markov model's the file's path and content.

    Raises:
        IsolossError: There is no such file, or it holds no language; the message says what is wrong, and where.
    """
    path = Path(path).expanduser()
    metadata, tables = read_tensors(path)
    if _HMM_HEADER in metadata:
        from isoloss.languages.hmm.language import HMM

        return HMM.from_file(path)
    header, config = _read_header(metadata, path)
    language = _build(header, tables, path)
    return _redrawn(config, language) or language


def from_config(config: FileConfig) -> Language:
    """Return the language in the file that `config` names; errors as for `load`.

    Raises:
        IsolossError: Also where the file's content is another than `config.content` says.
    """
    language = load(config.path)
    if config.content and (found := files.sha256(Path(config.path).expanduser())) != config.content:
        raise IsolossError(
            f"{config.path} has changed since the run began: its SHA-256 was {config.content[:16]} and is "
            f"{found[:16]}; bring the former file back, or begin a new run"
        )
    return language


def file_config(path: Path) -> FileConfig:
    """Return the config of the language in `path`: where the file is, and its content."""
    return FileConfig(path=str(path.resolve()), content=files.sha256(path))


def read_tensors(path: Path) -> tuple[dict[str, str], Tables]:
    """Return the metadata and the tensors of a safetensors file.

    Raises:
        IsolossError: There is no such file, or it is not in that format.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise IsolossError(
            f"{path} does not exist{files.nearest(path)}" if not path.exists() else f"{path} is not a file"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (OSError, SafetensorError, TypeError) as error:
        raise IsolossError(f"{path} is not a readable safetensors file: {error}") from error


def check_names(tables: Mapping[str, Any], names: Iterable[str], path: Path) -> None:
    """Check that a file holds tensors of exactly these names.

    Raises:
        IsolossError: It does not.
    """
    wanted = list(names)
    if set(tables) != set(wanted):
        raise IsolossError(
            f"{path} must hold the tensors {', '.join(wanted) or '(none)'}, and holds {', '.join(tables) or 'none'}"
        )


# --- writing ---------------------------------------------------------------------------------------------------------


def _described(language: Language) -> tuple[_Header, Tables]:
    """Return all that decides the language."""
    from isoloss.languages.brackets import Brackets
    from isoloss.languages.hmm.language import HMM
    from isoloss.languages.hmm.tables import TABLES
    from isoloss.languages.pcfg.language import PCFG

    tables: Tables = {}
    symbols: tuple[str, ...] = ()
    if isinstance(language, PCFG):
        kind, symbols = "pcfg", language.symbols
        names = [name for rules in _RULES for name in (rules, f"{rules}_probs")]
        tables = {name: np.ascontiguousarray(getattr(language.grammar, name)) for name in names}
    elif isinstance(language, HMM):
        kind = "hmm"
        tables = {name: np.ascontiguousarray(getattr(language, name)) for name in TABLES}
    elif isinstance(language, Brackets):
        kind = "brackets"
    else:
        raise IsolossError(_refusal(language))
    return _Header(kind=kind, max_length=language.max_length, vocabulary=language.vocabulary, symbols=symbols), tables


def _refusal(language: Language) -> str:
    config = _config_of(language)
    if isinstance(config, CorpusConfig):
        kept = f"its text ({', '.join(config.paths)}) and its tokenizer ({config.tokenizer})"
        return f"a corpus is not stored as one file: keep {kept}"
    if isinstance(config, TeacherConfig):
        return f"a teacher is not stored as one file: keep its checkpoint ({config.checkpoint})"
    return f"{language!r} is not stored as one file: keep the files that its config names"


def _config_of(language: Language) -> Any:
    try:
        return getattr(language, "config", None)
    except IsolossError:  # of what was made in memory
        return None


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_header(metadata: Mapping[str, str], path: Path) -> tuple[_Header, Any]:
    """Return what the header says, and the config in it, which may be anything."""
    if _HEADER not in metadata:
        raise IsolossError(f"{path} holds no language: there is no {_HEADER!r} in the metadata of its header")
    try:
        document = json.loads(metadata[_HEADER])
        kind, form = document["kind"], document["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise IsolossError(f"{path}: {_HEADER!r} in the metadata must be a JSON object with format and kind") from error
    if form != "language" or kind not in ("pcfg", "hmm", "brackets"):
        raise IsolossError(
            f"{path} holds a {kind!r} of the format {form!r}, written by isoloss {document.get('isoloss')}; isoloss "
            f"{isoloss.__version__} reads the kinds pcfg, hmm and brackets of the format 'language'"
        )
    length, vocabulary, symbols = (document.get(name) for name in ("max_length", "vocabulary", "symbols"))
    if type(length) is not int or not _are_strings(vocabulary) or not _are_strings(symbols):
        raise IsolossError(
            f"{path}: {_HEADER!r} in the metadata must have max_length, a number, and vocabulary and symbols, lists of "
            "strings"
        )
    header = _Header(kind=kind, max_length=length, vocabulary=tuple(vocabulary), symbols=tuple(symbols))
    return header, document.get("config")


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _build(header: _Header, tables: Tables, path: Path) -> Language:
    if header.kind == "pcfg":
        from isoloss.languages.pcfg.language import PCFG

        return PCFG(_grammar(header, tables, path), max_length=header.max_length, source=str(path))
    if header.kind == "hmm":
        from isoloss.languages.hmm.language import HMM
        from isoloss.languages.hmm.tables import TABLES

        check_names(tables, TABLES, path)
        initial, transition, emission = (tables[name] for name in TABLES)
        return HMM(
            initial,
            transition,
            emission,
            header.max_length,
            vocabulary=header.vocabulary,
            config=file_config(path),
            source=str(path),
        )
    from isoloss.languages.brackets import Brackets

    check_names(tables, (), path)
    if header.vocabulary != Brackets.vocabulary:
        raise IsolossError(f"{path}: the vocabulary of brackets is < and >, not {', '.join(header.vocabulary)}")
    return Brackets(header.max_length)


def _grammar(header: _Header, tables: Tables, path: Path) -> Grammar:
    """Return the grammar in a file's tables, checked as one that is read from text."""
    from isoloss.languages.pcfg.grammar import Rule, build_grammar, vocabulary_of

    check_names(tables, (name for rules in _RULES for name in (rules, f"{rules}_probs")), path)
    symbols, vocabulary = header.symbols, header.vocabulary
    if not symbols or len(set(symbols)) < len(symbols):
        raise IsolossError(f"{path}: the symbols must be different names, at least one, not {', '.join(symbols)!r}")
    rules: list[tuple[int, Rule]] = []
    for name in _RULES:
        _check_rules(name, tables, path, num_symbols=len(symbols), num_tokens=len(vocabulary))
        is_token = name == "emission"
        names = vocabulary if is_token else symbols
        for (lhs, *rhs), prob in zip(tables[name].tolist(), tables[f"{name}_probs"].tolist(), strict=True):
            rules.append((lhs, Rule(0, symbols[lhs], tuple((names[index], is_token) for index in rhs), prob)))
    rules.sort(key=lambda entry: entry[0])  # symbols are numbered by their first rule
    for lhs, symbol in enumerate(symbols):
        total = math.fsum(rule.weight for owner, rule in rules if owner == lhs)
        if abs(total - 1) > _TOLERANCE:
            raise IsolossError(f"{path}: the rules of {symbol} add up to {total:.9g}; they must add up to 1")
    if vocabulary_of(rule for _, rule in rules) != vocabulary:
        raise IsolossError(
            f"{path}: the tokens of the vocabulary must be those of the rules, a token w2 before a token w10"
        )
    return build_grammar((rule for _, rule in rules), start=symbols[0], source=str(path))


def _check_rules(name: str, tables: Tables, path: Path, *, num_symbols: int, num_tokens: int) -> None:
    """Check that the rules called `name` are rows of ids within the names and probabilities above 0."""
    ids, probs = tables[name], tables[f"{name}_probs"]
    width, size = _RULES[name], len(probs) if probs.ndim else 0
    for called, table, dtype, shape in (
        (f"{name}_probs", probs, "float64", (size,)),
        (name, ids, "int64", (size, width)),
    ):
        if table.dtype != dtype or table.shape != shape:
            raise IsolossError(
                f"{path}: {called} must be {dtype} of shape {shape}, not {table.dtype} of shape {table.shape}"
            )
    limits = np.full(width, num_symbols)
    limits[-1] = num_tokens if name == "emission" else num_symbols
    if (wrong := ((ids < 0) | (ids >= limits)).any(axis=1)).any():
        row = int(wrong.argmax())
        raise IsolossError(f"{path}: row {row} of {name} is {ids[row].tolist()}; ids there are below {limits.tolist()}")
    if (wrong := ~(np.isfinite(probs) & (probs > 0))).any():
        row = int(wrong.argmax())
        raise IsolossError(f"{path}: row {row} of {name}_probs is {probs[row]}; a rule's probability is above 0")


def _redrawn(document: Any, language: Language) -> Language | None:
    """Return the language that a stored config makes, where it is `language` to the last bit, else None."""
    from isoloss.languages import make

    try:
        config: Any = configs.from_dict(LanguageConfig, document)
        drawn = make(config) if isinstance(config, _DRAWN) else None
    except IsolossError:  # a generator with other settings than here
        return None
    if drawn is None:
        return None
    (header, tables), (own_header, own_tables) = _described(drawn), _described(language)
    alike = header == own_header and all(np.array_equal(tables[name], own_tables[name]) for name in own_tables)
    return drawn if alike else None
