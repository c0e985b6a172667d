"""What a language is made from: a config for each kind, and presets by name. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isoloss.config import LanguageConfig


@dataclass(frozen=True, kw_only=True)
class PCFGConfig(LanguageConfig):
    """A random levelled grammar (see `isoloss.languages.pcfg.language.PCFG.random`)."""

    kind: Literal["pcfg"] = "pcfg"
    levels: int = 3
    """Number of binary levels: a sentence has at most 2^levels tokens."""
    symbols_per_level: int = 6
    """Symbols of each level, the root level included."""
    rules_per_symbol: int = 8
    """Binary rules of each symbol above the lowest level."""
    vocab_size: int = 32
    """Tokens of the language."""
    stop_probability: float = 0.0
    """Probability that a symbol above the lowest level emits a token instead of splitting; makes lengths vary."""
    seed: int = 0
    """Decides the rules and their weights."""


@dataclass(frozen=True, kw_only=True)
class GrammarConfig(LanguageConfig):
    """A grammar given by its rules, as `PCFG.to_file` writes them: the run keeps the rules, not a path to them."""

    kind: Literal["grammar"] = "grammar"
    rules: str
    """One rule a line: LHS RHS [RHS] weight."""
    max_length: int = 64
    """Longer sentences are left out of the language, and its probabilities are given that."""


@dataclass(frozen=True, kw_only=True)
class BracketsConfig(LanguageConfig):
    """The paper's bracket language (see `isoloss.languages.brackets.Brackets`)."""

    kind: Literal["brackets"] = "brackets"
    length: int = 8
    """Brackets in a sentence; even."""


@dataclass(frozen=True, kw_only=True)
class DyckConfig(LanguageConfig):
    """Nested brackets of several kinds, as a grammar (see `isoloss.languages.brackets.dyck_grammar`)."""

    kind: Literal["dyck"] = "dyck"
    kinds: int = 2
    """Kinds of bracket; all are equally likely."""
    max_depth: int = 3
    """Brackets that may be open at once."""
    max_length: int = 16
    """Longer sentences are left out of the language; even."""
    continue_probability: float = 0.5
    """Probability that after a group of brackets another one follows, at the same depth."""
    nest_probability: float = 0.5
    """Probability that a pair of brackets holds others, where the depth allows it."""
    tokens_per_bracket: int = 1
    """Tokens that each bracket may be written as, by random probabilities."""
    seed: int = 0
    """Decides those probabilities."""


@dataclass(frozen=True, kw_only=True)
class HMMConfig(LanguageConfig):
    """A random block-diagonal hidden Markov model (see `isoloss.languages.hmm.language.HMM.random`)."""

    kind: Literal["hmm"] = "hmm"
    states: int = 100
    """Hidden states."""
    blocks: int = 4
    """Runs of states that only follow one another, each with tokens of its own."""
    vocab_size: int = 200
    """Tokens of the language."""
    length: int = 16
    """Tokens in a sentence."""
    leak: float = 0.0
    """Share of every row's probability that is spread over all states and tokens instead of the block's."""
    seed: int = 0
    """Decides the matrices."""


@dataclass(frozen=True, kw_only=True)
class FileConfig(LanguageConfig):
    """A language in a file, as `isoloss.languages.save` or `HMM.to_file` writes it."""

    kind: Literal["file"] = "file"
    path: str
    """A safetensors file with the language's tables."""
    content: str = ""
    """SHA-256 of the file; filled in when a run is made and checked whenever it is opened."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(LanguageConfig):
    """A causal language model that writes the sentences (see `isoloss.languages.teacher.language.Teacher`)."""

    kind: Literal["teacher"] = "teacher"
    checkpoint: str
    """A Hugging Face folder or name."""
    length: int = 24
    """Tokens in a sentence."""
    tokens: tuple[int, ...] = ()
    """The checkpoint's ids of the language's tokens; none: the most frequent, filled in when a run is made."""
    vocab_size: int = 2000
    """The most tokens that are chosen; of no effect where `tokens` are given."""
    corpus: tuple[str, ...] = ()
    """Text files or folders in which tokens are counted; none: the checkpoint's own samples."""
    samples: int = 4096
    """Sequences of `length` tokens that are drawn to count tokens in."""
    seed: int = 0
    """Decides those sequences."""
    start_id: int | None = None
    """The checkpoint's id that sentences begin after; None: its bos, else its eos, filled in when a run is made."""
    content: str = ""
    """SHA-256 of weights and config.json; filled in when a run is made and checked whenever it is opened."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(LanguageConfig):
    """Real text: files or datasets, a tokenizer and the length that the tokens are packed to."""

    kind: Literal["corpus"] = "corpus"
    paths: tuple[str, ...]
    """Text files (.txt), JSON lines (.jsonl), folders of them, or datasets: hf:NAME[:CONFIG][@REVISION]."""
    tokenizer: str
    """A Hugging Face folder or name, or a `vocab.txt` of WordPiece."""
    length: int = 128
    """Tokens in a packed sequence, the tokenizer's special tokens included."""
    held_out: float = 0.05
    """Share of the documents kept out of training, for the validation loss."""
    column: str = "text"
    """Field of JSON lines and column of datasets that holds the text."""
    split: str | None = None
    """Which split of a dataset is taken. None is `train`."""
    max_documents: int | None = None
    """How many documents are taken, from the first on; None: all."""
    content: str = ""
    """SHA-256 over the text and the tokenizer; filled in when a run is made and checked whenever it is opened."""


# of the first few seeds, this one's symbols are the most evenly used: no downstream label is nearly always the same
LAPTOP_PCFG = PCFGConfig(seed=4)

PRESETS: dict[str, tuple[LanguageConfig, str]] = {
    "pcfg-laptop": (
        LAPTOP_PCFG,
        "a grammar of 3 binary levels with 6 symbols each over 32 tokens; sentences of 8 tokens",
    ),
    "pcfg-varied": (
        PCFGConfig(seed=4, stop_probability=0.2),
        "the same with symbols that may stop early; sentences of 1 to 8 tokens",
    ),
    "pcfg-paper": (
        PCFGConfig(levels=5, symbols_per_level=8, rules_per_symbol=14, vocab_size=200, stop_probability=0.1),
        "a grammar of the paper's shape (appendix A.1): 49 symbols, 200 tokens, sentences of up to 32 tokens",
    ),
    "hmm-laptop": (
        HMMConfig(states=8, blocks=2, vocab_size=32, length=8, seed=3),
        "a hidden Markov model of 8 states in 2 blocks over 32 tokens; sentences of 8 tokens",
    ),
    "hmm-paper": (
        HMMConfig(),
        "one of the paper's shape (appendix A.1): 100 states in 4 blocks, 200 tokens; sentences of 16 tokens",
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
