"""Languages: where text comes from, and the truth about it; here, how a language is named and made."""

from __future__ import annotations

from pathlib import Path

from isoloss import config as configs
from isoloss.config import (
    PRESETS,
    BracketsConfig,
    CorpusConfig,
    DyckConfig,
    GrammarConfig,
    HMMConfig,
    HMMFileConfig,
    LanguageConfig,
    PCFGConfig,
)
from isoloss.errors import IsolossError
from isoloss.languages.base import ExactLanguage, Language, Sentences

__all__ = ["ExactLanguage", "Language", "Sentences", "make", "resolve"]


def resolve(spec: str, *, tokenizer: str | None = None, length: int | None = None) -> LanguageConfig:
    """Return the config of the language that `spec` names.

    Args:
        spec: A preset (`isoloss ls languages`), a `.toml` file with a language's config, a `.safetensors` file of a
            hidden Markov model, a grammar file (NLTK's PCFG text or rule lines), or, together with a tokenizer, a text
            file, JSON lines or a folder of them.
        tokenizer: For text: a Hugging Face folder or name, or a `vocab.txt`.
        length: For text: the length that tokens are packed to. For a grammar file: the longest sentence.

    Raises:
        IsolossError: `spec` names nothing, text comes without a tokenizer, or a preset or `.toml` file with one.
    """
    path = Path(spec)
    if spec in PRESETS or path.suffix == ".toml":
        given = [name for name, value in (("--tokenizer", tokenizer), ("--length", length)) if value is not None]
        if given:
            raise IsolossError(f"the language {spec} is complete as it is: leave out {', '.join(given)}")
    if spec in PRESETS:
        config: LanguageConfig = PRESETS[spec][0]
        return config
    if not path.exists():
        raise IsolossError(
            f"no language {spec!r}: neither a preset ({', '.join(PRESETS)}) nor a file or folder that exists"
        )
    if path.suffix == ".toml":
        read: LanguageConfig = configs.read_toml(LanguageConfig, path)  # type: ignore[arg-type]
        if isinstance(read, HMMFileConfig):
            from isoloss.languages.hmm import HMM

            return HMM.from_config(read).config  # with the file's content
        return read
    if path.suffix == ".safetensors":
        if tokenizer is not None or length is not None:
            raise IsolossError(f"the language {spec} is complete as it is: leave out --tokenizer and --length")
        from isoloss.languages.hmm import HMM

        return HMM.from_file(path).config
    if tokenizer is not None:
        from isoloss.languages import corpus

        packed = CorpusConfig.length if length is None else length
        return corpus.resolve(CorpusConfig(paths=(str(path),), tokenizer=tokenizer, length=packed))
    if path.is_dir() or path.suffix == ".jsonl":
        raise IsolossError(f"{spec} is text and needs --tokenizer: a Hugging Face folder or name, or a vocab.txt")
    return _grammar(path, GrammarConfig.max_length if length is None else length)


def _grammar(path: Path, max_length: int) -> LanguageConfig:
    from isoloss.languages.pcfg import PCFG

    try:
        return PCFG.from_file(path, max_length=max_length).config
    except IsolossError as error:
        if path.suffix == ".txt":
            raise IsolossError(f"{error} ({path} was read as a grammar: if it is text, add --tokenizer)") from error
        raise


def make(config: LanguageConfig) -> Language:
    """Return the language that `config` describes."""
    if isinstance(config, CorpusConfig):
        from isoloss.languages.corpus import Corpus

        return Corpus.from_config(config)
    if isinstance(config, PCFGConfig | GrammarConfig):
        from isoloss.languages.pcfg import PCFG

        return PCFG.from_config(config)
    if isinstance(config, HMMConfig | HMMFileConfig):
        from isoloss.languages.hmm import HMM

        return HMM.from_config(config)
    if isinstance(config, BracketsConfig):
        from isoloss.languages.dyck import Brackets

        return Brackets.from_config(config)
    if isinstance(config, DyckConfig):
        from isoloss.languages.dyck import dyck_grammar
        from isoloss.languages.pcfg import PCFG

        return PCFG(dyck_grammar(config), max_length=config.max_length)
    raise IsolossError(f"{config!r} is not the config of a language")
