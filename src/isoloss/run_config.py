"""What a pre-training run is made from: model, objective, optimizer, algorithm. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isoloss.config import AlgorithmConfig, LanguageConfig, setting
from isoloss.registry import ALGORITHMS


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which tokens are predicted, and from what."""

    kind: Literal["masked", "causal"] = "masked"
    """`masked`: tokens that are hidden, from all others; `causal`: every token, from those before it."""
    masking: Literal["one", "fraction"] = "one"
    """`one` token of each sentence, or each token with probability `fraction` (at least one a sentence)."""
    fraction: float = 0.15
    """Share of masked tokens where masking is `fraction`."""
    corruption: Literal["mask", "bert"] = "mask"
    """In training, a hidden token is always the mask, or as in BERT: 80 % mask, 10 % a random token, 10 % itself."""
    labels: Literal["sampled", "exact"] = "sampled"
    """In training, learn from the tokens that were hidden, or from their exact conditionals: no label noise."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient becomes an update: the optimizer, clipping, and the schedule of the learning rate."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    """The highest, which the warm-up ends at."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to 0 in a line or half a cosine, to be reached one step after the last."""
    warmup_steps: int = 1000
    """Steps of the linear warm-up from 0; not looked at where `warmup_proportion` is given."""
    warmup_proportion: float | None = None
    """Share of all steps that warm up, instead of a number of them; rounded to a whole step."""
    weight_decay: float = 0.01
    """Decoupled (AdamW), or added to the gradient (SGD); biases and layer norms have none."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates."""
    momentum: float = 0.0
    """SGD's momentum."""
    max_grad_norm: float | None = None
    """A gradient of a larger Euclidean norm is scaled down to this one; None: never."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by its architecture and size name (`isoloss ls models`, `isoloss ls sizes`)."""

    architecture: Literal["bert", "bert-pre-ln", "lstm", "opt"] = "bert"
    """`opt` predicts each token from those before it, the others hidden tokens from both sides."""
    size: str = "d64"
    """Name of the shape: d16, d64, d768 of a transformer, h16, h128 of an LSTM."""
    dropout: float = 0.1
    """Dropout of hidden states and attention weights; between the layers of an LSTM."""
    layers: int | None = setting(None, omit_default=True)
    """Number of layers; None: that of the size."""
    width: int | None = setting(None, omit_default=True)
    """Width of the hidden states (for an LSTM, per direction); None: that of the size."""
    heads: int | None = setting(None, omit_default=True)
    """Attention heads of a transformer's layer, a divisor of the width; None: those of the size."""
    ffn: int | None = setting(None, omit_default=True)
    """Width inside a transformer's feed-forward blocks; None: 4 times the width, as in every size."""
    directions: Literal[1, 2] = setting(2, omit_default=True)
    """Whether an LSTM reads from left to right only (1) or both ways (2)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One pre-training run."""

    language: LanguageConfig
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = field(default=ObjectiveConfig())
    optimizer: OptimizerConfig = field(default=OptimizerConfig())
    rule: AlgorithmConfig = field(default_factory=lambda: ALGORITHMS.load("gradient")())
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
    micro_batch: int = setting(0, exclude_from_fingerprint=True)
    """Sentences whose gradient is computed at once in a process, to save memory; 0: the process's whole share."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Matrix products of the loss and its gradient in float32 or, by autocast, bfloat16; weights are float32."""
    ema: float = setting(0.0, omit_default=True)
    """Decay by step of an exponential moving average of the weights, kept beside each checkpoint; 0: none."""
    trackers: tuple[str, ...] = setting((), exclude_from_fingerprint=True)
    """Where metrics.jsonl is mirrored: tensorboard, trackio, wandb."""
    parallel: Literal["ddp", "fsdp"] = setting("ddp", exclude_from_fingerprint=True)
    """On several processes, each has the whole model (ddp), or a piece of every parameter (fsdp), to save memory."""
    device: str = setting("auto", exclude_from_fingerprint=True)
    """Device to train on: auto, cpu, cuda, cuda:1, mps."""
    threads: int = setting(0, exclude_from_fingerprint=True)
    """CPU threads; 0: all cores."""
    prefetch: bool = setting(False, exclude_from_fingerprint=True)
    """Make the next step's batch in a background thread while a step is at work; needs `threads` = 1."""
    save_every_seconds: float = setting(60.0, exclude_from_fingerprint=True)
    """Seconds between two checkpoints kept only for resuming."""
