"""How a language is named and made: a preset, file, checkpoint or text becomes a config, a config a language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, did_you_mean
from isoloss.languages import serialization
from isoloss.languages.api import Language
from isoloss.languages.config import (
    PRESETS,
    BracketsConfig,
    CorpusConfig,
    DyckConfig,
    FileConfig,
    GrammarConfig,
    HMMConfig,
    PCFGConfig,
    TeacherConfig,
)
from isoloss.languages.serialization import load


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
        spec: A preset (`isoloss ls languages`), a `.toml` file with a language's config, a `.safetensors` file
            (see `save`), a grammar file (NLTK's PCFG text or rule lines), the folder of a causal checkpoint, or,
            together with a tokenizer, a text file, JSON lines, a folder of them or a dataset (`hf:NAME`, see
            `isoloss.text.hub_datasets`).
        tokenizer: For text: a Hugging Face folder or name, or a `vocab.txt`.
        length: For text: the length that tokens are packed to. For a grammar file: the longest sentence. For a
            checkpoint: tokens of a sentence.
        column: For JSON lines and datasets: where the text is; None: `text`.
        split: For datasets; None: `train`.
        max_documents: For text: how many documents are taken; None: all.

    Raises:
        IsolossError: `spec` names nothing, text comes without a tokenizer, or what is no text with an option of it.
    """
    path = Path(spec)
    options = {"column": column, "split": split, "max_documents": max_documents}
    if spec.startswith("hf:"):
        return _text(spec, tokenizer, length, options)
    named = {"tokenizer": tokenizer, "length": length, **options}
    given = [f"--{name.replace('_', '-')}" for name, value in named.items() if value is not None]
    if given and (spec in PRESETS or path.suffix in (".toml", ".safetensors")):
        raise IsolossError(f"the language {spec} is complete as it is: leave out {', '.join(given)}")
    if spec in PRESETS:
        config: LanguageConfig = PRESETS[spec][0]
        return config
    if not path.exists():
        raise IsolossError(
            f"no language {spec!r}{did_you_mean(spec, PRESETS) or files.nearest(spec) or ':'} it is neither a preset "
            f"({', '.join(PRESETS)}), a file or folder that exists, nor a dataset hf:NAME"
        )
    if path.suffix == ".toml":
        read: LanguageConfig = configs.read_toml(LanguageConfig, path)
        if isinstance(read, FileConfig | TeacherConfig):
            return make(read).config  # type: ignore[attr-defined,no-any-return]  # with the content
        if isinstance(read, CorpusConfig):
            from isoloss.text import corpus

            return corpus.resolve(read)
        return read
    if path.suffix == ".safetensors":
        return load(path).config  # type: ignore[attr-defined,no-any-return]
    if tokenizer is None and (path / "config.json").is_file():
        return _teacher(path, length, options)
    if tokenizer is not None or path.is_dir() or path.suffix == ".jsonl":
        return _text(spec, tokenizer, length, options)
    if any(value is not None for value in options.values()):
        raise IsolossError(
            f"{spec} is read as a grammar: leave out {', '.join(given)}, or add --tokenizer if it is text"
        )
    return _grammar(path, GrammarConfig.max_length if length is None else length)


def _teacher(folder: Path, length: int | None, options: Mapping[str, Any]) -> TeacherConfig:
    from isoloss.languages.teacher.language import Teacher

    if any(value is not None for value in options.values()):
        raise IsolossError(f"{folder} is a checkpoint, a teacher: leave out --column, --split and --max-documents")
    wanted = TeacherConfig.length if length is None else length
    return Teacher.from_config(TeacherConfig(checkpoint=str(folder), length=wanted)).config


def _text(spec: str, tokenizer: str | None, length: int | None, options: Mapping[str, Any]) -> CorpusConfig:
    from isoloss.text import corpus

    if tokenizer is None:
        raise IsolossError(f"{spec} is text and needs --tokenizer: a Hugging Face folder or name, or a vocab.txt")
    given = {name: value for name, value in {"length": length, **options}.items() if value is not None}
    return corpus.resolve(CorpusConfig(paths=(spec,), tokenizer=tokenizer, **given))


def _grammar(path: Path, max_length: int) -> LanguageConfig:
    from isoloss.languages.pcfg.language import PCFG

    try:
        return PCFG.from_file(path, max_length=max_length).config
    except IsolossError as error:
        if path.suffix == ".txt":
            raise IsolossError(f"{error} ({path} was read as a grammar: if it is text, add --tokenizer)") from error
        raise


def make(config: LanguageConfig, *, progress: Callable[[int, int], None] | None = None) -> Language:
    """Return the language that `config` describes.

    Args:
        config: Which language.
        progress: For text that has to be tokenised first: as for `isoloss.text.corpus.Corpus.from_config`.
    """
    if isinstance(config, CorpusConfig):
        from isoloss.text.corpus import Corpus

        return Corpus.from_config(config, progress=progress)
    if isinstance(config, PCFGConfig | GrammarConfig):
        from isoloss.languages.pcfg.language import PCFG

        return PCFG.from_config(config)
    if isinstance(config, FileConfig):
        return serialization.from_config(config)
    if isinstance(config, HMMConfig):
        from isoloss.languages.hmm.language import HMM

        return HMM.from_config(config)
    if isinstance(config, BracketsConfig):
        from isoloss.languages.brackets import Brackets

        return Brackets.from_config(config)
    if isinstance(config, DyckConfig):
        from isoloss.languages.brackets import dyck_grammar
        from isoloss.languages.pcfg.language import PCFG

        return PCFG(dyck_grammar(config), max_length=config.max_length, config=config)
    if isinstance(config, TeacherConfig):
        from isoloss.languages.teacher.language import Teacher

        return Teacher.from_config(config)
    raise IsolossError(f"{config!r} is not the config of a language")
