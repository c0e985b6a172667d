"""What a language is made from: a config for each kind, and presets by name. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isoloss import config as configs
from isoloss import files
from isoloss.config import LanguageConfig, check, setting
from isoloss.errors import IsolossError, did_you_mean, naming_extras, require
from isoloss.registry import LANGUAGES
from isoloss.runs import refuse_run

if TYPE_CHECKING:
    from isoloss.lab.languages.base import Language, Stored

Progress = Callable[[int, int], None]  # called with (done, total)

MAX_LENGTH = 1024  # tokens of a grammar's sentence: the exact algorithms take time cubic in the length
_MAX_LEVELS = 10  # sentences of MAX_LENGTH tokens
_MAX_BRACKETS = 4096
_MAX_LISTED_BRACKETS = 12  # whose 44,352 sentences with one hidden bracket and its answer can be listed

SUFFIX = ".safetensors"  # of a language in a file

LATENT = "-latent"
_LATENT_TASKS = {
    f"NAME{LATENT}": "the symbol or state that produced the sentence, for root, level-D, prefix-L and state-K"
}
GRAMMAR_TASKS = {
    "root": "the most likely symbol below the start symbol (grammars)",
    "level-D": "the most likely first symbol on level D of the tree, where the root has level 0 (grammars with levels)",
    "prefix-L": "the most likely symbol over the first L tokens (grammars); A, B, C: the paper's L = 32, 16, 8",
    **_LATENT_TASKS,
}
STATE_TASKS = {
    "state-K": "the most likely k-th state (hidden Markov models); task-K: the paper's name",
    **_LATENT_TASKS,
}
BRACKET_TASKS = {"mismatch": "number of > minus number of <, in strings of random brackets (brackets)"}


@dataclass(frozen=True, kw_only=True)
class _Config(LanguageConfig):
    """A config of a class that is imported when it is needed, as it takes torch.

    Attributes:
        language_class: The class, `module:name` below `isoloss.lab.languages`; it has `from_config` and, where it is
            stored in a file, `from_tables`.
    """

    language_class: ClassVar[str]

    def build(self, progress: Progress | None = None) -> Any:
        """Return the language."""
        check(self)
        return self._class().from_config(self)

    @classmethod
    def from_tables(cls, stored: Stored, path: Path) -> Any:
        """Return the language in a file."""
        return cls._class().from_tables(stored, path)

    @classmethod
    def _class(cls) -> Any:
        module, _, name = cls.language_class.partition(":")
        with naming_extras():
            return getattr(importlib.import_module(f"isoloss.lab.languages.{module}"), name)


@dataclass(frozen=True, kw_only=True)
class PCFGConfig(_Config):
    """A random layered grammar, of the paper's kind (appendix A.1); a sentence has at most 2^levels tokens.

    The start symbol S is rewritten to a symbol of level 0 (`L0.0`, `L0.1`, ...). A symbol of level l < `levels` is
    rewritten to one of `rules_per_symbol` pairs of symbols of level l + 1; with probability `stop_probability` it emits
    one of `rules_per_symbol` tokens instead. A symbol of the lowest level emits one of
    max(rules_per_symbol, ceil(2 vocab_size / symbols_per_level)) tokens. Rules are drawn without replacement, and their
    probabilities from the flat Dirichlet distribution. Every symbol and every token can occur.
    """

    is_self_contained: ClassVar[bool] = True
    task_patterns: ClassVar[Mapping[str, str]] = GRAMMAR_TASKS
    language_class = "pcfg:PCFG"
    kind: Literal["pcfg"] = "pcfg"
    levels: int = setting(3, minimum=1, maximum=_MAX_LEVELS)
    """Number of binary levels: a sentence has at most 2^levels tokens."""
    symbols_per_level: int = setting(6, minimum=1)
    """Symbols of each level, the root level included."""
    rules_per_symbol: int = setting(8, minimum=1)
    """Binary rules of each symbol above the lowest level."""
    vocab_size: int = setting(32, minimum=1)
    """Tokens of the language."""
    stop_probability: float = setting(0.0, minimum=0, below=1)
    """Probability that a symbol above the lowest level emits a token instead of splitting; makes lengths vary."""
    zipf: float = setting(0.0, minimum=0, omit_default=True)
    """Exponent of Zipf's law of frequencies: a symbol emits token w<i> with its drawn probability times (i + 1)^-zipf,
    normalized. About 1 in natural languages; 0: no law."""
    seed: int = 0
    """Decides the rules and their weights."""
    redrawn_level: int = setting(-1, minimum=-1, omit_default=True)
    """A level whose rules are drawn anew; all other rules stay the ones that the seed decides. -1: none."""

    def check_fields(self) -> None:
        """Raise an `IsolossError` where there are fewer pairs of symbols than rules, or no level to draw anew."""
        if self.redrawn_level > self.levels:
            raise IsolossError(f"redrawn_level is {self.redrawn_level}; the lowest level is {self.levels}")
        if self.rules_per_symbol > self.symbols_per_level**2:
            raise IsolossError(
                f"rules_per_symbol is {self.rules_per_symbol}, but {self.symbols_per_level} symbols per level make "
                f"only {self.symbols_per_level**2} different pairs; take fewer rules or more symbols"
            )


@dataclass(frozen=True, kw_only=True)
class GrammarConfig(_Config):
    """A grammar given by its rules, as `PCFG.to_file` writes them: the run keeps the rules, not a path to them."""

    task_patterns: ClassVar[Mapping[str, str]] = GRAMMAR_TASKS
    language_class = "pcfg:PCFG"
    kind: Literal["grammar"] = "grammar"
    rules: str
    """One rule per line: LHS RHS [RHS] weight."""
    max_length: int = setting(64, minimum=1, maximum=MAX_LENGTH)
    """Longer sentences are left out of the language, and its probabilities are given that."""

    def build(self, progress: Progress | None = None) -> Any:
        """Return the language."""
        check(self)
        return self._class().from_text(self.rules, source="the config's rules", max_length=self.max_length)

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        """Return the config of the grammar in a file of rules; any file that no other kind of language reads is one."""
        path = Path(spec)
        if not path.is_file():
            return None
        if given := [f"--{name.replace('_', '-')}" for name in options if name != "length"]:
            raise IsolossError(
                f"{spec} is read as a grammar: leave out {', '.join(given)}, or add --tokenizer if it is text"
            )
        try:
            language = cls._class().from_file(path, max_length=options.get("length", cls.max_length))
        except IsolossError as error:
            # A .txt file is more often text than a grammar: the message says how it was read.
            if path.suffix == ".txt":
                raise IsolossError(f"{error} ({path} was read as a grammar: if it is text, add --tokenizer)") from error
            raise
        config: LanguageConfig = language.config
        return config


@dataclass(frozen=True, kw_only=True)
class BracketsConfig(_Config):
    """The paper's bracket language (see `isoloss.lab.languages.brackets.Brackets`)."""

    is_self_contained: ClassVar[bool] = True
    task_patterns: ClassVar[Mapping[str, str]] = BRACKET_TASKS
    language_class = "brackets:Brackets"
    kind: Literal["brackets"] = "brackets"
    length: int = setting(8, minimum=2, maximum=_MAX_BRACKETS, note="even")
    """Brackets in a sentence; even."""

    def check_fields(self) -> None:
        """Raise an `IsolossError` for an odd length."""
        if self.length % 2:
            raise IsolossError(f"length is {self.length}; it must be even")


@dataclass(frozen=True, kw_only=True)
class HiddenBracketConfig(_Config):
    """Brackets with one hidden, and which one it was (see `isoloss.lab.languages.hidden_bracket.HiddenBracket`)."""

    is_self_contained: ClassVar[bool] = True
    language_class = "hidden_bracket:HiddenBracket"
    kind: Literal["hidden-bracket"] = "hidden-bracket"
    length: int = setting(6, minimum=2, maximum=_MAX_LISTED_BRACKETS, note="even")
    """Brackets in a context; even. A sentence has one more token, the answer."""
    flip: float = setting(0.1, minimum=0, below=0.5)
    """Probability that the answer is the other bracket than the hidden one."""

    def check_fields(self) -> None:
        """Raise an `IsolossError` for an odd length."""
        if self.length % 2:
            raise IsolossError(f"length is {self.length}; it must be even")


@dataclass(frozen=True, kw_only=True)
class DyckConfig(_Config):
    """Nested brackets of several kinds, as a grammar (see `isoloss.lab.languages._pcfg.grammar.dyck_grammar`)."""

    is_self_contained: ClassVar[bool] = True
    task_patterns: ClassVar[Mapping[str, str]] = GRAMMAR_TASKS
    language_class = "pcfg:Dyck"
    kind: Literal["dyck"] = "dyck"
    kinds: int = setting(2, minimum=1)
    """Kinds of bracket; all are equally likely."""
    max_depth: int = setting(3, minimum=1)
    """Brackets that may be open at once."""
    max_length: int = setting(16, minimum=2, maximum=MAX_LENGTH, note="even")
    """Longer sentences are left out of the language; even."""
    continue_probability: float = setting(0.5, minimum=0, below=1)
    """Probability that after a group of brackets another one follows, at the same depth."""
    nest_probability: float = setting(0.5, above=0, maximum=1)
    """Probability that a pair of brackets holds others, where the depth allows it."""
    tokens_per_bracket: int = setting(1, minimum=1)
    """Tokens that each bracket may be written as, by random probabilities."""
    seed: int = 0
    """Decides the probabilities of these tokens."""

    def check_fields(self) -> None:
        """Raise an `IsolossError` for an odd length, or a depth that it does not allow."""
        if self.max_length % 2:
            raise IsolossError(f"max_length is {self.max_length}; it must be even, because brackets come in pairs")
        if self.max_depth > self.max_length // 2:
            raise IsolossError(
                f"max_depth is {self.max_depth}, but {self.max_length} brackets nest at most "
                f"{self.max_length // 2} deep; take a smaller max_depth or a larger max_length"
            )


@dataclass(frozen=True, kw_only=True)
class HMMConfig(_Config):
    """A random block-diagonal hidden Markov model, of the paper's kind (appendix A.1).

    States and tokens are divided into `blocks` runs of nearly equal size. A state is followed by states of its own
    block and emits tokens of its own block; each row's probabilities are from a Dirichlet distribution over these, by
    default the flat one. With `mixing_weight` above 0, a row is (1 - mixing_weight) of that plus mixing_weight of a
    draw over all states or tokens. The first state is uniform over all states: with `mixing_weight` 0 it decides the
    block for good.
    """

    is_self_contained: ClassVar[bool] = True
    task_patterns: ClassVar[Mapping[str, str]] = STATE_TASKS
    language_class = "hmm:HMM"
    kind: Literal["hmm"] = "hmm"
    states: int = setting(100, minimum=1)
    """Hidden states."""
    blocks: int = setting(4, minimum=1)
    """Runs of states that only follow one another, each with tokens of its own."""
    vocab_size: int = setting(200, minimum=1)
    """Tokens of the language."""
    length: int = setting(16, minimum=1, maximum=MAX_LENGTH)
    """Tokens in a sentence."""
    mixing_weight: float = setting(0.0, minimum=0, maximum=1)
    """Fraction of every row's probability that goes to all states and tokens instead of the block's."""
    concentration: float = setting(1.0, above=0, omit_default=True)
    """Of the Dirichlet distributions: the smaller, the fewer states and tokens have most of a row's probability."""
    seed: int = 0
    """Decides the matrices."""

    def check_fields(self) -> None:
        """Raise an `IsolossError` where there are more blocks than states or tokens."""
        if self.blocks > min(self.states, self.vocab_size):
            raise IsolossError(
                f"blocks is {self.blocks}, more than the {self.states} states or the {self.vocab_size} tokens: a "
                "block needs one of each"
            )


@dataclass(frozen=True, kw_only=True)
class WithSpecialTokensConfig(_Config):
    """Another language with [CLS] before and [SEP] after each sentence (see `WithSpecialTokens`)."""

    language_class = "special_tokens:WithSpecialTokens"
    kind: Literal["framed"] = "framed"
    language: LanguageConfig
    """The language of what stands between the two."""

    def check_fields(self) -> None:
        """Raise an `IsolossError` for text, whose sequences the tokenizer frames."""
        if self.language.is_finite:
            raise IsolossError("text has the special tokens of its tokenizer: [CLS] and [SEP] are for other languages")
        if isinstance(self.language, WithSpecialTokensConfig):
            raise IsolossError("the language has [CLS] and [SEP] around its sentences already: leave out one frame")

    def within(self, folder: Path) -> LanguageConfig:
        """Return the config with paths that are relative to the folder made absolute."""
        return dataclasses.replace(self, language=self.language.within(folder))

    def teacher_sha256(self, folder: Path) -> str:
        """Return the SHA-256 of the weights of a teacher at such a path."""
        return self.language.teacher_sha256(folder)

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        """Return the config of `framed:NAME`, where NAME is a language."""
        prefix, colon, inner = spec.partition(":")
        if prefix != "framed" or not colon:
            return None
        return cls(language=resolve(inner, **options))


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(_Config):
    """A causal language model that writes the sentences (see `isoloss.lab.languages.teacher.Teacher`)."""

    language_class = "teacher:Teacher"
    kind: Literal["teacher"] = "teacher"
    checkpoint: str
    """A Hugging Face folder or name; in a run's config also a folder relative to the run's, such as
    `../RUN/checkpoints/step-N`."""
    length: int = setting(24, minimum=1)
    """Tokens in a sentence."""
    tokens: tuple[int, ...] = ()
    """The checkpoint's ids of the language's tokens; none: the most frequent, filled in when a run is made."""
    vocab_size: int = setting(2000, minimum=1)
    """The most tokens that are chosen; of no effect where `tokens` are given."""
    corpus: tuple[str, ...] = ()
    """Text files or folders in which tokens are counted; none: the checkpoint's own samples."""
    samples: int = setting(4096, minimum=1)
    """Sequences of `length` tokens that are drawn to count tokens in."""
    seed: int = 0
    """Decides those sequences."""
    start_id: int | None = None
    """The checkpoint's id that sentences begin after; None: its bos, else its eos, filled in when a run is made."""
    content: str = ""
    """SHA-256 of weights and config.json; filled in when a run is made and checked whenever it is opened."""

    def resolved(self) -> LanguageConfig:
        """Return the config with the tokens, the start and the content filled in."""
        config: LanguageConfig = self.build().config
        return config

    def within(self, folder: Path) -> LanguageConfig:
        """Return the config with the checkpoint's absolute path where it is relative to the folder."""
        path = self._beside(folder)
        return self if path is None else dataclasses.replace(self, checkpoint=str(path))

    def teacher_sha256(self, folder: Path) -> str:
        """Return the SHA-256 of the checkpoint's weights where its path is relative to the folder."""
        path = self._beside(folder)
        weights = path and path / "model.safetensors"
        return files.sha256(weights) if weights and weights.is_file() else ""

    def _beside(self, folder: Path) -> Path | None:
        # any other path or name means the same in every folder, also where the run has a folder of that name
        if not self.checkpoint.startswith("../"):
            return None
        path = (folder / self.checkpoint).resolve()  # first, as the run's folder may not be there yet
        return path if path.is_dir() else None

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        """Return the config of the causal model in a folder, where no tokenizer makes it a folder of text."""
        if "tokenizer" in options or not Path(spec, "config.json").is_file():
            return None
        if set(options) - {"length"}:
            raise IsolossError(f"{spec} is a checkpoint, a teacher: leave out --column, --split and --max-documents")
        return cls(checkpoint=spec, **options).resolved()


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(_Config):
    """Real text: files or datasets, a tokenizer and the length that the tokens are packed to."""

    reports_progress: ClassVar[bool] = True
    is_finite: ClassVar[bool] = True
    language_class = "text:Corpus"
    kind: Literal["corpus"] = "corpus"
    paths: tuple[str, ...]
    """Text files (.txt), JSON lines (.jsonl), folders of them, or datasets: hf:NAME[:CONFIG][@REVISION], or python:docs
    and python:docstrings, which come with Python."""
    tokenizer: str
    """A Hugging Face folder or name, a `vocab.txt` of WordPiece, or wordpiece:N, to train one with N tokens on the
    text."""
    # [CLS], a token and [SEP]
    length: int = setting(128, minimum=3)
    """Tokens in a packed sequence, the tokenizer's special tokens included."""
    held_out: float = setting(0.05, above=0, below=1)
    """Fraction of the documents kept out of training, for the validation loss."""
    column: str = "text"
    """Field of JSON lines and column of datasets that holds the text."""
    split: str | None = None
    """Which split of a dataset is taken. None is `train`."""
    max_documents: int | None = setting(None, minimum=2, note="one is held out")
    """How many documents are taken, from the first on; None: all."""
    content: str = ""
    """SHA-256 over the text and the tokenizer; filled in when a run is made and checked whenever it is opened."""

    def build(self, progress: Progress | None = None) -> Any:
        """Return the language; `progress` is called with the documents tokenized and all there are."""
        return self._class().from_config(self, progress=progress)

    def resolved(self) -> LanguageConfig:
        """Return the config with absolute paths and the content filled in."""
        config: LanguageConfig = self._class().resolve(self)
        return config

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        """Return the config of text: a dataset, a folder, JSON lines, or anything together with a tokenizer."""
        path = Path(spec)
        is_text = path.exists() and ("tokenizer" in options or path.is_dir() or path.suffix == ".jsonl")
        if not is_text and not spec.startswith(("hf:", "python:")):
            return None
        if "tokenizer" not in options:
            raise IsolossError(
                f"{spec} is text and needs --tokenizer: a Hugging Face folder or name, a vocab.txt, or wordpiece:2000"
            )
        from isoloss.text import tokenizers

        if tokenizers.trained_size(options["tokenizer"]) is None:
            tokenizers.check_name(options["tokenizer"])
        return cls(paths=(spec,), **options).resolved()


def check_name(path: Path) -> None:
    """Raise an `IsolossError` where a language cannot be written to a file of this name."""
    if path.suffix != SUFFIX:
        raise IsolossError(f"the file of a language is called NAME{SUFFIX}, not {path.name}")


def check_unchanged(what: str, before: str, now: str) -> None:
    """Raise an `IsolossError` where a run was begun with other content; `before` is empty where none was."""
    if before not in ("", now):
        raise IsolossError(
            f"{what} has changed since the run began: its SHA-256 was {before[:16]} and is {now[:16]}; bring the "
            "former content back, or begin a new run"
        )


def refuse_options(spec: str, options: Mapping[str, Any]) -> None:
    """Raise an `IsolossError` where options come with a language that leaves nothing open."""
    if options:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise IsolossError(f"the language {spec} is complete as it is: leave out {given}")


# of the first few seeds, this one's symbols are the most evenly used: no downstream label is nearly always the same
LAPTOP_PCFG = PCFGConfig(seed=4)

PRESETS: dict[str, tuple[LanguageConfig, str]] = {
    "pcfg-laptop": (
        LAPTOP_PCFG,
        "a grammar of 3 binary levels with 6 symbols each over 32 tokens; sentences of 8 tokens",
    ),
    "pcfg-varied": (
        PCFGConfig(seed=4, stop_probability=0.2),
        "pcfg-laptop with symbols that may stop early; sentences of 1 to 8 tokens",
    ),
    "pcfg-paper": (
        PCFGConfig(levels=5, symbols_per_level=8, rules_per_symbol=3, vocab_size=200, stop_probability=0.15, seed=7),
        "a grammar of the paper's shape (appendix A.1): 49 symbols, 200 tokens, sentences of up to 32 tokens, 17 on "
        "average, an entropy of 3.20 nats; tasks A, B and C have 8, 16 and 24 classes, the paper's 50",
    ),
    "pcfg-authors": (
        PCFGConfig(levels=4, symbols_per_level=10, rules_per_symbol=10, vocab_size=200, stop_probability=0.127),
        "a grammar of the shape of the authors' file: 50 symbols, 200 tokens, sentences of up to 16 tokens, 10.7 on "
        "average",
    ),
    "hmm-laptop": (
        HMMConfig(states=8, blocks=2, vocab_size=32, length=8, seed=3),
        "a hidden Markov model of 8 states in 2 blocks over 32 tokens; sentences of 8 tokens",
    ),
    "hmm-paper": (
        HMMConfig(concentration=0.25, seed=6),
        "a hidden Markov model of the paper's shape (appendix A.1): 100 states in 4 blocks, 200 tokens, an entropy of "
        "3.76 nats; sentences of 16 tokens",
    ),
    "brackets-8": (
        BracketsConfig(length=8),
        "the paper's bracket language (section 5): as many < as >, in any order; sentences of 8 tokens",
    ),
    "dyck-2": (
        DyckConfig(),
        "nested brackets of 2 kinds, at most 3 deep; sentences of 2 to 16 tokens",
    ),
}


_ALIASES = {"A": "prefix-32", "B": "prefix-16", "C": "prefix-8"}  # the paper's names of tasks, appendix A.1
_NUMBERED = re.compile(r"([a-z]+)-(0|[1-9]\d*)")


def canonical(name: str) -> str:
    """Return the one name of a task that has several."""
    base = name.removesuffix(LATENT)
    suffix = name[len(base) :]
    base = _ALIASES.get(base, base)
    return ("state-" + base.removeprefix("task-") if base.startswith("task-") else base) + suffix


def task_number(name: str, kind: str, low: int, high: int) -> int | None:
    """Return the number in e.g. `state-6`, or None where the name is of another kind or the number out of range."""
    match = _NUMBERED.fullmatch(name)
    return int(match[2]) if match and match[1] == kind and low <= int(match[2]) <= high else None


def load_language(spec: str | Path | LanguageConfig, *, progress: Progress | None = None, **options: Any) -> Language:
    """Return the language that `spec` names or describes.

    Args:
        spec: A config; or a name or path, as for `resolve`.
        progress: Called with (done, total) while a slow language is built.
        options: For a name or path, as for `resolve`: `tokenizer`, `length`, `column`, `split`, `max_documents`.

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
            of them or a dataset (`hf:NAME`, see `isoloss.text.hub_datasets`); or anything that a registered kind of
            another package reads.
        tokenizer: For text: a Hugging Face folder or name, or a `vocab.txt`.
        length: For text: the length that tokens are packed to. For a grammar file: the longest sentence. For a
            checkpoint: tokens of a sentence.
        column: For JSON lines and datasets: where the text is; None: `text`.
        split: For datasets; None: `train`.
        max_documents: For text: how many documents are taken; None: all.

    Raises:
        IsolossError: `spec` names nothing, text comes without a tokenizer, or another language with an option of text.
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
    # The last registered kind first: another package's comes before isoloss's, and the grammar, which takes any file,
    # comes near the end.
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
