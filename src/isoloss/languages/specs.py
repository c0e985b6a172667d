"""How a language is named: a preset, a file, a checkpoint or text becomes a config, and a config a language."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, did_you_mean
from isoloss.languages.api import Language
from isoloss.languages.config import PRESETS, Progress, refuse_options
from isoloss.registry import LANGUAGES


def load_language(spec: str | Path | LanguageConfig, *, progress: Progress | None = None, **options: Any) -> Language:
    """Return the language that `spec` names or describes.

    Args:
        spec: A config; or a name or path, as for `resolve`.
        progress: Called with what is done and all there is, where making the language takes long.
        options: For a name or path, those of `resolve`: `tokenizer`, `length`, `column`, `split`, `max_documents`.

    Raises:
        IsolossError: As for `resolve`; or a setting of the config is out of range.

    Example:
        >>> from isoloss.languages.config import BracketsConfig
        >>> load_language("dyck-2").vocabulary
        ('(', ')', '[', ']')
        >>> load_language(BracketsConfig(length=4)).max_length
        4
    """
    config = resolve(str(spec), **options) if isinstance(spec, str | Path) else spec
    language: Language = config.build(progress)
    return language


def resolve(
    spec: str,
    *,
    tokenizer: str | None = None,
    length: int | None = None,
    column: str | None = None,
    split: str | None = None,
    max_documents: int | None = None,
) -> LanguageConfig:
    """Return the config of the language that `spec` names.

    Args:
        spec: A preset, or a registered kind, which has its defaults then (`isoloss ls languages`), a `.toml` file
            with a language's config, a `.safetensors` file (see `save`), a grammar file (NLTK's PCFG text or rule
            lines), the folder of a causal checkpoint, or, together with a tokenizer, a text file, JSON lines, a folder
            of them or a dataset (`hf:NAME`, see `isoloss.text.hub_datasets`); or what a registered kind of another
            package reads.
        tokenizer: For text: a Hugging Face folder or name, or a `vocab.txt`.
        length: For text: the length that tokens are packed to. For a grammar file: the longest sentence. For a
            checkpoint: tokens of a sentence.
        column: For JSON lines and datasets: where the text is; None: `text`.
        split: For datasets; None: `train`.
        max_documents: For text: how many documents are taken; None: all.

    Raises:
        IsolossError: `spec` names nothing, text comes without a tokenizer, or what is no text with an option of it.
    """
    named = {"tokenizer": tokenizer, "length": length, "column": column, "split": split, "max_documents": max_documents}
    options = {name: value for name, value in named.items() if value is not None}
    path = Path(spec)
    if spec in PRESETS:
        refuse_options(spec, options)
        return PRESETS[spec][0]
    if spec in LANGUAGES and not path.exists():
        refuse_options(spec, options)
        return _with_defaults(spec)
    if path.suffix == ".toml" and path.exists():
        refuse_options(spec, options)
        config: LanguageConfig = configs.read_toml(LanguageConfig, path)
        configs.check(config)
        return config.resolved()
    for kind in reversed(LANGUAGES.names()):
        own: LanguageConfig | None = LANGUAGES.load(kind).read(spec, options)
        if own is not None:
            return own
    raise IsolossError(
        f"no language {spec!r}{did_you_mean(spec, [*PRESETS, *LANGUAGES]) or files.nearest(spec) or ':'} it is "
        f"neither a preset ({', '.join(PRESETS)}), a registered kind ({', '.join(LANGUAGES)}), a file or folder that "
        "exists, nor a dataset hf:NAME"
    )


def _with_defaults(kind: str) -> LanguageConfig:
    config = LANGUAGES.load(kind)
    required = [field.name for field in dataclasses.fields(config) if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name != "kind"]:
        raise IsolossError(f"a language of the kind {kind} needs {', '.join(missing)}: give them in a .toml file")
    made: LanguageConfig = config()
    return made
