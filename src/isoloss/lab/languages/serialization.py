"""A language in one file: safetensors with the tables, and JSON in its header that says what they are.

The tables decide: a language is read as it was written, whatever a generator draws from the same config elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss import config as configs
from isoloss import files
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import SUFFIX, Progress, check_name, check_unchanged, refuse_options
from isoloss.registry import LANGUAGES

if TYPE_CHECKING:
    import numpy.typing as npt

    from isoloss.lab.languages.base import Language, Stored

_HEADER = "isoloss"  # the one key of a file's metadata: the order of several is not fixed


@dataclass(frozen=True, kw_only=True)
class FileConfig(LanguageConfig):
    """A language in a file, as `isoloss.lab.languages.save` writes it."""

    kind: Literal["file"] = "file"
    path: str
    """A safetensors file with the language's tables."""
    content: str = ""
    """SHA-256 of the file; filled in when a run is made and checked whenever it is opened."""

    def build(self, progress: Progress | None = None) -> Any:
        """Return the language; a file of another content than `content` says is an error."""
        return load(self.path, content=self.content)

    def resolved(self) -> LanguageConfig:
        """Return the config that the language itself has, with the content filled in."""
        config: LanguageConfig = self.build().config
        return config

    @classmethod
    def of(cls, path: Path) -> FileConfig:
        """Return the config of the language in `path`: where the file is, and its content."""
        return cls(path=str(path.resolve()), content=files.sha256(path))

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        """Return the config of the language in a `.safetensors` file."""
        if not spec.endswith(SUFFIX) or not Path(spec).exists():
            return None
        refuse_options(spec, options)
        return cls(path=spec).resolved()


def save(language: Language, path: Path | str, *, overwrite: bool = False) -> None:
    r"""Write a grammar, a hidden Markov model or a language of brackets to a file that `load` reads, bit for bit.

    The file is in the safetensors format. The metadata has one entry, `isoloss`, a JSON object:
    `format` ("language"), `isoloss` (the version that wrote it), `kind` (pcfg, hmm or brackets), `max_length` (tokens
    of the longest sentence), `vocabulary` (the token strings by id), `symbols` (a grammar's, by id, the start symbol
    first) and `config` (what the language was drawn from, or null). The tensors of a grammar with R binary, U unary
    and E emission rules are `binary` (R, 3), `unary` (U, 2) and `emission` (E, 2), int64 ids of the left side and the
    right side, and `binary_probs` (R,), `unary_probs` (U,) and `emission_probs` (E,), float64. A hidden Markov model
    has `initial` (S,), `transition` (S, S) and `emission` (S, V), float64. Brackets have no tensors: their length says
    all. A language between [CLS] and [SEP] is its inner language's file, of the kind framed, with the inner kind before
    the symbols. A language of another package writes the tensors that its `tables` returns, under its own kind.

    Args:
        language: The language, on any device.
        path: A name that ends in `.safetensors`.
        overwrite: Whether a file of another content may be replaced.

    Raises:
        IsolossError: The language is made of files of its own (a corpus, a teacher), the name has another ending, there
            is a file of another content, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss.lab.languages import load, save
        >>> from isoloss.lab.languages.pcfg import PCFG
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "grammar.safetensors")
        ...     save(PCFG.from_text("S A A 1\nA a 0.25\nA b 0.75"), path)
        ...     load(path).vocabulary
        ('a', 'b')
    """
    import numpy as np
    from safetensors.numpy import save as to_bytes

    path = Path(path).expanduser()
    check_name(path)
    stored = language.tables()
    config = language._config
    document = {
        "format": "language",
        "isoloss": version("isoloss"),
        "kind": stored.kind,
        "max_length": stored.max_length,
        "vocabulary": stored.vocabulary,
        "symbols": stored.symbols,
        "config": configs.to_dict(config) if config is not None and config.is_self_contained else None,
    }
    tables = {name: np.asarray(table, order="C") for name, table in stored.tables.items()}
    data = to_bytes(tables, metadata={_HEADER: json.dumps(document, ensure_ascii=False)})
    if path.exists() and not overwrite:
        # The same language gives the same bytes: writing it again, as a script that is run twice does, is no conflict.
        if path.is_file() and path.read_bytes() == data:
            return
        raise IsolossError(f"{path} exists and holds something else; choose another name, or ask to overwrite it")
    files.write_bytes(path, data)


def load(path: Path | str, *, content: str = "") -> Language:
    """Return the language in a file that `save` wrote, in float64 on the CPU.

    Its tables equal the file's to the last bit. Its config is the one that it was drawn from where that still draws the
    same tables; else a grammar's config is its rules, and a hidden Markov model's the file's path and content.

    Args:
        path: The file.
        content: The SHA-256 that it must have; empty: any.

    Raises:
        IsolossError: There is no such file, it has another content, or it holds no language.
    """
    path = Path(path).expanduser()
    stored, config = _read(path)
    language: Language = LANGUAGES.load(stored.kind).from_tables(stored, path)
    check_unchanged(str(path), content, files.sha256(path))
    return _drawn_again(config, language) or language


def _read(path: Path) -> tuple[Stored, Any]:
    """Return what a file holds, and the config in its header, which may be anything."""
    from isoloss.lab.languages.base import Stored

    metadata, tables = _read_tensors(path)
    if _HEADER not in metadata:
        raise IsolossError(f"{path} holds no language: there is no {_HEADER!r} in the metadata of its header")
    try:
        document = json.loads(metadata[_HEADER])
        kind, form = document["kind"], document["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise IsolossError(f"{path}: {_HEADER!r} in the metadata must be a JSON object with format and kind") from error
    if form != "language" or not isinstance(kind, str) or kind not in LANGUAGES:
        raise IsolossError(
            f"{path} holds a {kind!r} of the format {form!r}, written by isoloss {document.get('isoloss')}; isoloss "
            f"{version('isoloss')} reads the kinds {', '.join(LANGUAGES)} of the format 'language'"
        )
    length, vocabulary, symbols = (document.get(name) for name in ("max_length", "vocabulary", "symbols"))
    if type(length) is not int or not _are_strings(vocabulary) or not _are_strings(symbols):
        raise IsolossError(
            f"{path}: {_HEADER!r} in the metadata must have max_length, a number, and vocabulary and symbols, lists of "
            "strings"
        )
    names = {"vocabulary": tuple(vocabulary), "symbols": tuple(symbols)}
    return Stored(kind=kind, max_length=length, tables=tables, **names), document.get("config")


def _read_tensors(path: Path) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
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


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _drawn_again(document: Any, language: Language) -> Language | None:
    """Return the language that a stored config makes, where it is `language` to the last bit, else None."""
    try:
        config: Any = configs.from_dict(LanguageConfig, document)
        drawn: Language | None = config.build() if config.is_self_contained else None
    except IsolossError:  # a generator with other settings than here
        return None
    # NumPy may change what a generator draws from one version to the next: then the config no longer describes the
    # file.
    return drawn if drawn is not None and drawn.tables().equals(language.tables()) else None
