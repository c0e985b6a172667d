"""How a language is named: a preset, a file, a checkpoint or text becomes a config, and a config a language."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, did_you_mean, require
from isoloss.lab.languages.config import PRESETS, Progress, refuse_options
from isoloss.registry import LANGUAGES
from isoloss.runs import refuse_run

if TYPE_CHECKING:
    from isoloss.lab.languages.api import Language


def load_language(spec: str | Path | LanguageConfig, *, progress: Progress | None = None, **options: Any) -> Language:
    """Return the language that `spec` names or describes.

    Args:
        spec: A config; or a name or path, as for `resolve`.
        progress: Called with (done, total) while a slow language is built.
        options: For a name or path, those of `resolve`: `tokenizer`, `length`, `column`, `split`, `max_documents`.

    Raises:
        IsolossError: `spec` names no language, or an option does not apply to it.

    Example:
        >>> from isoloss import load_language
        >>> from isoloss.lab.languages.config import BracketsConfig
        >>> load_language("dyck-2").vocabulary
        ('(', ')', '[', ']')
        >>> load_language(BracketsConfig(length=4)).max_length
        4
    """
    require("spec", spec, (str, Path, LanguageConfig), "a name, a path or the config of a language")
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
    is_kind, is_toml = spec in LANGUAGES and not path.exists(), path.suffix == ".toml" and path.exists()
    if spec in PRESETS or is_kind or is_toml:
        refuse_options(spec, options)
        if spec in PRESETS:
            return PRESETS[spec][0]
        config: LanguageConfig = _with_defaults(spec) if is_kind else configs.read_toml(LanguageConfig, path)
        return config.resolved()
    refuse_run(path, "not a language; a causal model can be one")
    for kind in reversed(LANGUAGES.loaded().values()):
        own: LanguageConfig | None = kind.read(spec, options)
        if own is not None:
            return own
    raise IsolossError(
        f"no language {spec!r}{did_you_mean(spec, [*PRESETS, *LANGUAGES]) or files.nearest(spec) or ':'} it is "
        f"neither a preset ({', '.join(PRESETS)}), a registered kind ({', '.join(LANGUAGES)}), a file or folder that "
        "exists, nor a dataset hf:NAME"
    )


def _with_defaults(kind: str) -> LanguageConfig:
    config = LANGUAGES.load(kind)
    if missing := config.required_fields():
        raise IsolossError(f"a language of the kind {kind} needs {', '.join(missing)}: give them in a .toml file")
    made: LanguageConfig = config()
    return made
