"""The settings of the paper, and of its authors' published command, as configs. Nothing here needs torch.

`PRESETS` is the one table. `train_config` makes a run's config from it; `isoloss train`, `eval` and `transfer` take
`--preset`, in which an option that is given wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isoloss import config as configs
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, did_you_mean
from isoloss.lab.finetune_config import FinetuneConfig
from isoloss.lab.languages.config import WithSpecialTokensConfig
from isoloss.lab.languages.serialization import FileConfig
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.transfer.config import ClassifierConfig, LinearProbeConfig

_MASKED = ObjectiveConfig(masking="fraction", fraction=0.15)
# The paper's appendix A.1
_GRAMMAR, _MARKOV = 20_000_000, 10_000_000  # sentences to train on


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How models are pre-trained, measured and transferred."""

    description: str
    architecture: str  # the size is free
    optimizer: OptimizerConfig  # of pre-training on a synthetic language
    text_warmup_steps: int  # on text, in place of the optimizer's
    steps: int
    batch_size: int = 4096
    dropout: float = 0.1
    # of the training set, by the kind of language; 0 for other kinds: fresh ones at every step, or the whole text
    num_sentences: Mapping[str, int] = field(
        default_factory=lambda: {"pcfg": _GRAMMAR, "grammar": _GRAMMAR, "dyck": _GRAMMAR, "hmm": _MARKOV}
    )
    objective: ObjectiveConfig  # of a synthetic language
    text_objective: ObjectiveConfig = _MASKED
    masked_copies: int = 0  # fixed masks of each sentence of a finite training set; 0: a new mask every time
    is_framed: bool = False  # whether [CLS] and [SEP] stand around the sentences of a synthetic language
    # settings of the measures of `isoloss measure`
    measures: Mapping[str, Any] = field(
        default_factory=lambda: {
            # appendices A.5 and, for the trace, B.1; the paper does not standardize what its probes read
            "loss_sentences": 1_000_000,
            "num_sequences": 10_000,
            "trace_method": "paper",
            "num_train": 100_000,
            "probe_epochs": 100,
            "probe_seeds": 5,
            "probe_standardize": False,
        }
    )
    # AdamW at 1e-3, 100 epochs and 5 seeds are these configs' defaults
    probe: LinearProbeConfig = field(default=LinearProbeConfig(standardize=False))
    lookup: ClassifierConfig = field(default=ClassifierConfig(standardize=False))
    finetuning: FinetuneConfig = field(default=FinetuneConfig(learning_rate=1e-4, warmup_steps=200, epochs=10, seeds=5))
    num_train: int = 100_000  # training examples of a task of a synthetic language
    tasks: Mapping[str, str]  # what the paper's names of tasks stand for

    def method(self, name: str) -> Any:
        """Return the config of a method of `isoloss transfer`: probe, lookup or finetune."""
        return {"probe": self.probe, "lookup": self.lookup, "finetune": self.finetuning}[name]


PRESETS: dict[str, Preset] = {
    # Appendix A.5, whose second beta_1 = 0.98 is beta_2; A.4 has a warm-up of 6 % instead. The rate is constant so that
    # checkpoints of different steps can be compared and continued.
    "paper": Preset(
        description="settings of the paper's text: post-layer-norm BERT, a constant rate of 1e-3 for 30,000 steps, a "
        "finite training set",
        architecture="bert",
        optimizer=OptimizerConfig(
            learning_rate=1e-3, schedule="constant", warmup_steps=1000, weight_decay=0.01, betas=(0.9, 0.98)
        ),
        text_warmup_steps=5000,
        steps=30_000,
        objective=ObjectiveConfig(masking="one"),
        tasks={"A": "prefix-32", "B": "prefix-16", "C": "prefix-8"},
    ),
    "authors": Preset(
        description="settings of the authors' published command: pre-layer-norm BERT, a rate of 5e-4 that falls to 0 "
        "in 25,000 steps, five fixed masks of 15 %, [CLS] and [SEP]",
        architecture="bert-pre-ln",
        optimizer=OptimizerConfig(learning_rate=5e-4, schedule="linear", warmup_steps=3333, adam_eps=1e-6),
        text_warmup_steps=3333,
        steps=25_000,
        objective=_MASKED,
        masked_copies=5,
        is_framed=True,
        # the README's: its schedule, polynomial, has the power 1
        probe=LinearProbeConfig(epochs=50, batch_size=512, schedule="linear", warmup_steps=50, standardize=False),
        finetuning=FinetuneConfig(warmup_steps=50, epochs=50, batch_size=128),
        num_train=10_000,
        tasks={"A": "root", "B": "prefix-4", "C": "prefix-2"},
    ),
}


def load_preset(name: str) -> Preset:
    """Return a preset by its name."""
    if name not in PRESETS:
        raise IsolossError(f"no preset {name!r}{did_you_mean(name, PRESETS) or ':'} choose {' or '.join(PRESETS)}")
    return PRESETS[name]


def train_config(
    preset: str | Preset, language: str | LanguageConfig, model: ModelConfig | None = None, **settings: Any
) -> TrainConfig:
    """Return the config of a run of `preset`, on a language and with a model of one's own.

    The preset decides the masking, the training set, whether [CLS] and [SEP] stand around the sentences, the optimizer,
    the steps and the batch size. A causal model predicts next tokens and has no masks; a given model keeps its dropout.

    Args:
        preset: `paper` or `authors` (`isoloss ls presets`), or one made here.
        language: A language's name, as for `isoloss.load_language`, or its config.
        model: The model; None: the preset's architecture in its default size.
        settings: Fields of `TrainConfig` that replace the preset's, such as `seed`.

    Raises:
        IsolossError: No such preset or language, or settings that contradict each other.

    Example:
        >>> from isoloss.lab.presets import train_config
        >>> from isoloss.run_config import ModelConfig
        >>> config = train_config("paper", "pcfg-paper", ModelConfig(size="d128"), seed=3)
        >>> config.num_sentences, config.steps, config.optimizer.learning_rate, config.model.architecture
        (20000000, 30000, 0.001, 'bert')
        >>> config = train_config("authors", "pcfg-authors")
        >>> config.language.kind, config.masked_copies, config.model.architecture, config.optimizer.warmup_steps
        ('framed', 5, 'bert-pre-ln', 3333)
    """
    chosen = load_preset(preset) if isinstance(preset, str) else preset
    if isinstance(language, str):
        from isoloss.lab.languages.config import resolve

        language = resolve(language)
    model = model or ModelConfig(architecture=chosen.architecture, dropout=chosen.dropout)
    is_text = language.is_finite
    objective = chosen.text_objective if is_text else chosen.objective
    if MODELS.load(model.architecture).objective == "causal":
        objective = ObjectiveConfig(kind="causal")
    kind, is_framed = _kind(language)
    num_sentences = settings.get("num_sentences", chosen.num_sentences.get(kind, 0))
    optimizer = chosen.optimizer
    if is_text:
        optimizer = dataclasses.replace(optimizer, warmup_steps=chosen.text_warmup_steps)
    made: dict[str, Any] = {
        "language": framed(language) if chosen.is_framed and not is_framed and not is_text else language,
        "model": model,
        "objective": objective,
        "optimizer": optimizer,
        "num_sentences": num_sentences,
        "masked_copies": chosen.masked_copies if num_sentences and objective.kind == "masked" else 0,
        # Stages have steps of their own, and the two together would contradict each other.
        **({} if "stages" in settings else {"steps": chosen.steps}),
        "batch_size": chosen.batch_size,
    }
    config = TrainConfig(**{**made, **settings})
    configs.check(config)
    return config


def framed(language: LanguageConfig) -> WithSpecialTokensConfig:
    """Return the config of a language between [CLS] and [SEP]; of one that is, its own."""
    return language if isinstance(language, WithSpecialTokensConfig) else WithSpecialTokensConfig(language=language)


def _kind(language: LanguageConfig) -> tuple[str, bool]:
    """Return the kind of language that a config makes, within a frame or a file, and whether it has a frame."""
    if isinstance(language, WithSpecialTokensConfig):
        return _kind(language.language)[0], True
    if isinstance(language, FileConfig):
        # Only the file itself says what it holds.
        stored = language.build().tables()
        is_framed = stored.kind == "framed"
        return str(stored.symbols[0] if is_framed else stored.kind), is_framed
    return language.kind, False
