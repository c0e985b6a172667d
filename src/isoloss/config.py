"""Configuration: frozen dataclasses, read strictly from TOML and JSON, with a fingerprint of what decides a result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import cattrs

from isoloss import files
from isoloss.algorithms import AdversarialConfig as AdversarialConfig
from isoloss.algorithms import FisherPenaltyConfig as FisherPenaltyConfig
from isoloss.algorithms import GradientConfig as GradientConfig
from isoloss.algorithms import ObjectiveConfig as ObjectiveConfig
from isoloss.algorithms import OptimizerConfig as OptimizerConfig
from isoloss.algorithms import RuleConfig as RuleConfig
from isoloss.algorithms import SAMConfig as SAMConfig
from isoloss.errors import IsolossError

T = TypeVar("T")


def _incidental(default: Any) -> Any:
    """A field that says how a result is computed, not which result: it stays out of the fingerprint."""
    return field(default=default, metadata={"incidental": True})


def _later(default: Any) -> Any:
    """A field that decides a result and, at its default, stays out of the fingerprint: runs without it keep theirs."""
    return field(default=default, metadata={"later": True})


# --- languages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PCFGConfig:
    """A random levelled grammar (see `isoloss.languages.pcfg.PCFG.random`)."""

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
class GrammarConfig:
    """A grammar given by its rules, as `PCFG.to_file` writes them: the run keeps the rules, not a path to them."""

    kind: Literal["grammar"] = "grammar"
    rules: str
    """One rule a line: LHS RHS [RHS] weight."""
    max_length: int = 64
    """Longer sentences are left out of the language, and its probabilities are given that."""


@dataclass(frozen=True, kw_only=True)
class BracketsConfig:
    """The paper's bracket language (see `isoloss.languages.dyck.Brackets`)."""

    kind: Literal["brackets"] = "brackets"
    length: int = 8
    """Brackets in a sentence; even."""


@dataclass(frozen=True, kw_only=True)
class DyckConfig:
    """Nested brackets of several kinds, as a grammar (see `isoloss.languages.dyck.dyck_grammar`)."""

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
class HMMConfig:
    """A random block-diagonal hidden Markov model (see `isoloss.languages.hmm.HMM.random`)."""

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
class FileConfig:
    """A language in a file, as `isoloss.languages.save` or `HMM.to_file` writes it."""

    kind: Literal["file"] = "file"
    path: str
    """A safetensors file with the language's tables."""
    content: str = ""
    """SHA-256 of the file; filled in when a run is made and checked whenever it is opened."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A causal language model that writes the sentences (see `isoloss.languages.teacher.Teacher`)."""

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
class CorpusConfig:
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


LanguageConfig = (
    PCFGConfig | GrammarConfig | BracketsConfig | DyckConfig | HMMConfig | FileConfig | CorpusConfig | TeacherConfig
)

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


# --- pre-training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by its architecture and size name (`isoloss ls models`, `isoloss ls sizes`)."""

    architecture: Literal["bert", "bert-pre-ln", "lstm", "opt"] = "bert"
    """`opt` predicts each token from those before it, the others hidden tokens from both sides."""
    size: str = "d64"
    """Name of the shape: d16, d64, d768 of a transformer, h16, h128 of an LSTM."""
    dropout: float = 0.1
    """Dropout of hidden states and attention weights; between the layers of an LSTM."""
    layers: int | None = _later(None)
    """Number of layers; None: that of the size."""
    width: int | None = _later(None)
    """Width of the hidden states (for an LSTM, per direction); None: that of the size."""
    heads: int | None = _later(None)
    """Attention heads of a transformer's layer, a divisor of the width; None: those of the size."""
    ffn: int | None = _later(None)
    """Width inside a transformer's feed-forward blocks; None: 4 times the width, as in every size."""
    directions: Literal[1, 2] = _later(2)
    """Whether an LSTM reads from left to right only (1) or both ways (2)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One pre-training run."""

    language: LanguageConfig
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = field(default=ObjectiveConfig())
    optimizer: OptimizerConfig = field(default=OptimizerConfig())
    rule: RuleConfig = field(default=GradientConfig())
    steps: int = 1000
    batch_size: int = 128
    """Sentences in a step."""
    checkpoints: tuple[int, ...] = ()
    """Steps whose checkpoint is kept, besides the last."""
    initial: str | None = None
    """Checkpoint folder whose weights the run starts from, relative to the run's folder; None: random weights."""
    seed: int = 0
    """Decides the initial weights, the data, the masks and the dropout."""
    log_every: int = 50
    """Steps between two lines of metrics.jsonl."""
    measure_every: int = 0
    """Steps between two measurements of loss and trace in metrics.jsonl, a multiple of `log_every`; 0: none."""
    measure_sentences: int = 1024
    """Sentences that these are measured on, the same each time."""
    micro_batch: int = _incidental(0)
    """Sentences whose gradient is computed at once in a process, to save memory; 0: the process's whole share."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Matrix products of the loss and its gradient in float32 or, by autocast, bfloat16; weights are float32."""
    ema: float = _later(0.0)
    """Decay by step of an exponential moving average of the weights, kept beside each checkpoint; 0: none."""
    trackers: tuple[str, ...] = _incidental(())
    """Where metrics.jsonl is mirrored: tensorboard, trackio, wandb."""
    parallel: Literal["ddp", "fsdp"] = _incidental("ddp")
    """On several processes, each has the whole model (ddp), or a piece of every parameter (fsdp), to save memory."""
    device: str = _incidental("auto")
    """Device to train on: auto, cpu, cuda, cuda:1, mps."""
    threads: int = _incidental(0)
    """CPU threads; 0: all cores."""
    prefetch: bool = _incidental(False)
    """Make the next step's batch in a background thread while a step is at work; needs `threads` = 1."""
    save_every_seconds: float = _incidental(60.0)
    """Seconds between two checkpoints kept only for resuming."""


# --- evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How much a checkpoint is measured on."""

    loss_sentences: int = 4096
    """Sentences for the pre-training loss; for a corpus, held-out sequences at most."""
    trace_sentences: int = 2048
    """Sentences for the trace."""
    probe_train: int = 4096
    """Sentences that a linear probe is fitted on."""
    probe_test: int = 4096
    """Sentences that it is scored on."""
    probe_seeds: int = 5
    """Probes, each with its own initial weights and order."""
    probe_epochs: int = 100
    """Passes of a probe over its training sentences."""
    seed: int = 0
    """Decides the sentences, masks, random signs and probes; checkpoints compare best under the same."""


# --- TOML, JSON, fingerprint -----------------------------------------------------------------------------------------

_converter = cattrs.Converter(forbid_extra_keys=True)


def _structure_language(document: Any, _: Any) -> Any:
    kinds = {
        "pcfg": PCFGConfig,
        "grammar": GrammarConfig,
        "brackets": BracketsConfig,
        "dyck": DyckConfig,
        "hmm": HMMConfig,
        "file": FileConfig,
        "teacher": TeacherConfig,
        "corpus": CorpusConfig,
    }
    kind = document.get("kind") if isinstance(document, Mapping) else None
    if kind not in kinds:
        raise IsolossError(f"a language's kind is one of {', '.join(kinds)}, not {kind!r}")
    return _converter.structure(document, kinds[kind])


def _structure_rule(document: Any, _: Any) -> Any:
    kinds = {
        "gradient": GradientConfig,
        "sam": SAMConfig,
        "adversarial": AdversarialConfig,
        "fisher-penalty": FisherPenaltyConfig,
    }
    kind = document.get("kind") if isinstance(document, Mapping) else None
    if kind not in kinds:
        raise IsolossError(f"a step rule's kind is one of {', '.join(kinds)}, not {kind!r}")
    return _converter.structure(document, kinds[kind])


def _structure_strict(value: Any, target: Any) -> Any:
    """Refuse a value of another type instead of converting it: steps = "100" is a mistake, not a number."""
    if target is float and type(value) is int:
        return float(value)
    if type(value) is not target:
        raise TypeError(f"expected {target.__name__}, got {value!r}")
    return value


for _primitive in (bool, int, float, str):
    _converter.register_structure_hook(_primitive, _structure_strict)
_converter.register_structure_hook(LanguageConfig, _structure_language)
_converter.register_structure_hook(RuleConfig, _structure_rule)


def from_dict(cls: type[T], document: Mapping[str, Any]) -> T:
    """Return the `cls` that `document` describes; unknown keys and wrong types are errors that name the place.

    Raises:
        IsolossError: A key that `cls` does not have, a missing one, or a value of the wrong type.
    """
    try:
        return _converter.structure(document, cls)
    except cattrs.BaseValidationError as error:
        reasons = "; ".join(cattrs.transform_error(error, path="config"))
        name = getattr(cls, "__name__", "LanguageConfig")  # the one union among the configs
        raise IsolossError(f"not a valid {name}: {reasons}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config dataclass as JSON types (tuples become lists)."""
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return document


def read_toml(cls: type[T], path: Path) -> T:
    """Return the `cls` in the TOML file `path`; errors as for `from_dict`, and for a file that is not TOML."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IsolossError(f"{path} does not exist{files.nearest(path)}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise IsolossError(f"{path} is not a readable TOML file: {error}") from error
    return from_dict(cls, document)


def to_toml(config: Any) -> str:
    """Return a config dataclass as TOML that `read_toml` reads back; None is left out, as TOML has no word for it."""
    import tomlkit

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return value

    return tomlkit.dumps(without_none(to_dict(config)))


def fingerprint(config: Any) -> str:
    """Return 16 hexadecimal digits over the fields that decide a result; incidental ones (device, threads) are out."""
    document = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def differences(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """Return `field: ours != theirs` for each field that decides a result and in which two configs differ.

    Either may be what `identity` returned.
    """
    lines = []
    left, right = identity(ours), identity(theirs)

    def compare(a: Any, b: Any, path: str) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in dict.fromkeys([*a, *b]):
                compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        elif a != b:
            lines.append(f"{path}: {a!r} != {b!r}")

    compare(left, right, prefix)
    return lines


def identity(config: Any) -> Any:
    """Return the fields of a config that decide a result, as JSON types; what is no dataclass is returned as it is."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            f.name: identity(getattr(config, f.name))
            for f in dataclasses.fields(config)
            if not f.metadata.get("incidental")
            and not (f.metadata.get("later") and getattr(config, f.name) == f.default)
        }
    if isinstance(config, tuple):
        return [identity(item) for item in config]
    return config
