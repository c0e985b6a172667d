"""What a pre-training run is made from: model, objective, optimizer, algorithm. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from isoloss.config import AlgorithmConfig, LanguageConfig, check, setting
from isoloss.errors import IsolossError
from isoloss.registry import ALGORITHMS, MODELS, OPTIMIZERS

_WARMUP, _MOST_WARMUP = 0.06, 1000  # of the steps, and at most so many, unless told


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which tokens are predicted, and from what."""

    kind: Literal["masked", "causal"] = "masked"
    """`masked`: masked tokens, from all others; `causal`: every token, from those before it."""
    masking: Literal["one", "fraction"] = "one"
    """Mask `one` token of each sentence, or each token with probability `fraction` (at least one per sentence)."""
    fraction: float = setting(0.15, above=0, maximum=1)
    """Fraction of masked tokens where masking is `fraction`."""
    corruption: Literal["mask", "bert"] = "mask"
    """What training shows for a masked token: always the mask, or as in BERT 80 % mask, 10 % random, 10 % itself."""
    labels: Literal["sampled", "exact"] = "sampled"
    """Learn from the tokens themselves, or from their exact conditionals, without label noise."""

    def check_fields(self) -> None:
        """Refuse settings that contradict each other."""
        if self.kind == "causal":
            own = ("kind", "labels")
            of_masking = [f.name for f in fields(self) if f.name not in own and getattr(self, f.name) != f.default]
            if of_masking:
                raise IsolossError(f"the causal objective masks no tokens: leave out {', '.join(of_masking)}")
        if self.masking == "one" and self.fraction != ObjectiveConfig.fraction:
            raise IsolossError(
                f"fraction is {self.fraction}, but masking is 'one', which masks one token of each sentence: "
                "choose the masking 'fraction'"
            )
        if self.labels == "exact" and self.corruption != "mask":
            raise IsolossError(
                "exact labels are the conditionals given the visible tokens, and the corruption 'bert' shows tokens in "
                "the place of masked ones: choose the corruption 'mask'"
            )


# the advice to train for longer takes a treatment away where it is the schedule
LATER_DECAY = (
    "With more steps, the decay of the learning rate begins later or takes longer: a run may meet its target before it "
    "has ended"
)
ELEMENTWISE = ("adamw", "sgd")  # optimizers that a vector of several parameters, or a shard of one, is enough for


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How a gradient becomes an update: the optimizer, clipping, and the schedule of the learning rate."""

    name: str = "adamw"
    """Name of the optimizer (isoloss ls optimizers)."""
    learning_rate: float = setting(1e-3, above=0)
    """Peak learning rate, at the end of the warm-up."""
    schedule: Literal["constant", "linear", "cosine", "1-sqrt"] = "constant"
    """After the warm-up: constant, or a decay that reaches 0 one step after the last: 1 - r (linear),
    (1 + cos(pi r)) / 2 (cosine) or 1 - sqrt(r), with r the fraction of the decay that is done."""
    decay_steps: int | None = setting(None, minimum=1, omit_default=True)
    """Steps of the decay, before which the rate is constant: warm-up, stable, decay (WSD); default: all after the
    warm-up."""
    warmup_steps: int | None = setting(None, minimum=0)
    """Steps of the linear warm-up from 0; default: 6 % of the steps, at most 1000."""
    warmup_proportion: float | None = setting(None, minimum=0, maximum=1)
    """Fraction of all steps that warm up, instead of a number of steps; rounded to a whole step."""
    weight_decay: float = setting(0.01, minimum=0)
    """Added to the gradient by SGD, decoupled in all others; biases and layer norms have none."""
    betas: tuple[float, float] = setting((0.9, 0.98), minimum=0, below=1)
    """Decay rates of the first and second moments, in all optimizers that have them."""
    adam_eps: float = setting(1e-8, above=0, omit_default=True)
    """Added to the root of Adam's second moment, in all optimizers that have Adam's update."""
    momentum: float = setting(0.0, minimum=0, below=1)
    """Momentum of SGD, or of Muon, where 0 stands for its usual 0.95."""
    max_grad_norm: float | None = setting(None, above=0)
    """Clip the gradient to this Euclidean norm; none: no clipping."""

    def check_fields(self) -> None:
        """Refuse settings that contradict each other."""
        # its function needs torch, and is loaded when a run begins
        OPTIMIZERS.match(self.name)
        if self.momentum and OPTIMIZERS.is_builtin(self.name) and self.name not in ("sgd", "muon"):
            raise IsolossError(f"momentum is {self.momentum}, but the optimizer is {self.name}: it needs sgd or muon")
        if self.schedule == "constant" and self.decay_steps is not None:
            raise IsolossError(
                f"decay_steps is {self.decay_steps}, but the schedule is constant: choose linear, cosine or 1-sqrt"
            )

    def num_warmup_steps(self, total: int) -> int:
        """Return how many of `total` steps warm up."""
        if self.warmup_proportion is not None:
            return round(self.warmup_proportion * total)
        return min(_MOST_WARMUP, round(_WARMUP * total)) if self.warmup_steps is None else self.warmup_steps

    def check_steps(self, total: int) -> None:
        """Refuse a warm-up that leaves no step of `total` to a decaying schedule."""
        if self.schedule != "constant" and self.num_warmup_steps(total) > total:
            raise IsolossError(
                f"optimizer.warmup_steps is {self.warmup_steps}, more than the {total} steps, which leaves "
                f"none for the {self.schedule} schedule: lower it"
            )
        if self.decay_steps is not None and self.num_warmup_steps(total) + self.decay_steps > total:
            raise IsolossError(
                f"optimizer.decay_steps is {self.decay_steps}, which the {total} steps do not have after a warm-up of "
                f"{self.num_warmup_steps(total)}: lower it"
            )


def learning_rate(config: OptimizerConfig, step: int, *, total: int) -> float:
    """Return the rate of step `step`, counted from 1, of a run of `total` steps.

    A linear warm-up from 0 reaches the highest rate at its last step, or at step 1 where there is none. After that it
    is constant (the paper, appendix A.5) or, with r the fraction of the way from there to step `total` + 1, the highest
    rate times 1 - r (linear), (1 + cos(pi r)) / 2 (cosine) or 1 - sqrt(r) (1-sqrt; Hägele et al. 2024). With
    `decay_steps`, the way begins so many steps before the last, and the rate is constant until then: WSD.

    Example:
        >>> from isoloss.run_config import OptimizerConfig, learning_rate
        >>> config = OptimizerConfig(learning_rate=0.1, warmup_steps=4, schedule="linear")
        >>> [round(learning_rate(config, step, total=8), 3) for step in range(1, 9)]
        [0.025, 0.05, 0.075, 0.1, 0.08, 0.06, 0.04, 0.02]
    """
    warmup = config.num_warmup_steps(total)
    if step < warmup:
        return config.learning_rate * step / warmup
    if config.schedule == "constant":
        return config.learning_rate
    begin = max(warmup, 1) if config.decay_steps is None else total - config.decay_steps
    done = max(step - begin, 0) / (total + 1 - begin)
    remaining = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "1-sqrt": 1 - math.sqrt(done)}
    return config.learning_rate * remaining[config.schedule]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by its architecture and size name (`isoloss ls models`, `isoloss ls sizes`).

    Example:
        >>> from isoloss.run_config import ModelConfig
        >>> str(ModelConfig(heads=4)), ModelConfig(architecture="lstm").size
        ('bert d64, heads 4', 'h64')
    """

    architecture: str = "bert"
    """Name of the architecture (isoloss ls models)."""
    size: str = ""
    """Name of the shape (isoloss ls sizes); default: the architecture's own, d64 of a transformer, h64 of an LSTM."""
    dropout: float = setting(0.1, minimum=0, below=1)
    """Dropout of hidden states and attention weights; between the layers of an LSTM."""
    layers: int | None = setting(None, minimum=1, omit_default=True)
    """Number of layers; default: that of the size."""
    width: int | None = setting(None, minimum=1, omit_default=True)
    """Width of the hidden states (for an LSTM, per direction); default: that of the size."""
    heads: int | None = setting(None, minimum=1, omit_default=True)
    """Attention heads per layer, a divisor of the width; default: those of the size. Not for an LSTM."""
    ffn: int | None = setting(None, minimum=1, omit_default=True)
    """Width inside the feed-forward blocks; default: 4 times the width, as in every size. Not for an LSTM."""
    directions: Literal[1, 2] = setting(2, omit_default=True)
    """Whether an LSTM reads from left to right only (1) or both ways (2)."""

    def __post_init__(self) -> None:
        """Name the default size."""
        # an unknown architecture passes here, and `check` names the choices. The size is filled in at once, so that
        # run.json and the fingerprint say which one it was
        if not self.size and self.architecture in MODELS:
            object.__setattr__(self, "size", MODELS.load(self.architecture).default_size)

    def __str__(self) -> str:
        changes = [f"{name} {value}" for name in ("layers", "width", "heads", "ffn") if (value := getattr(self, name))]
        changes += [f"directions {self.directions}"] * (self.directions != 2)
        return ", ".join([f"{self.architecture} {self.size}", *changes])

    def check_fields(self) -> None:
        """Refuse an unknown architecture or size, or a shape that cannot be."""
        MODELS.load(self.architecture).shape(self)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A part of a run with settings of its own; what it does not name is the run's.

    An optimizer or algorithm that it names is its own in full: fields left out have their defaults, not the run's
    values. Each stage begins with a new optimizer, and the schedule of its learning rate runs over its own steps.
    """

    steps: int = setting(minimum=1)
    """Training steps of the stage; the most, where it has a target."""
    optimizer: OptimizerConfig | None = None
    """How a gradient becomes an update; default: as the run has it."""
    labels: Literal["sampled", "exact"] | None = None
    """What it learns from, as in the objective; default: as the run has it."""
    batch_size: int | None = setting(None, minimum=1)
    """Sentences in a step; default: as the run has it."""
    algorithm: AlgorithmConfig | None = None
    """Which gradient the optimizer gets; default: as the run has it."""
    target_kl: float | None = setting(None, above=0)
    """End the stage once the KL divergence of the model from the truth on validation sentences, in nats per predicted
    token, is at most this."""
    target_loss: float | None = setting(None, above=0)
    """The same for the loss on validation sentences, where the true conditionals are not known."""
    validate_every: int = setting(50, minimum=1)
    """Compare with the target at every step that is a multiple of this, counted from the start of the run, and at the
    stage's last step; a multiple of `log_every`."""

    @property
    def target(self) -> tuple[Literal["kl", "loss"], float] | None:
        """What is compared with the target and the target in nats; None: the stage makes all its steps."""
        if self.target_kl is not None:
            return "kl", self.target_kl
        return None if self.target_loss is None else ("loss", self.target_loss)

    def check_fields(self) -> None:
        """Refuse settings that contradict each other."""
        if self.target_kl is not None and self.target_loss is not None:
            raise IsolossError("target_kl and target_loss are given: a stage ends at one target, so leave one out")
        if self.target is None and self.validate_every != StageConfig.validate_every:
            raise IsolossError(f"validate_every is {self.validate_every}, and the stage has no target: leave it out")

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """Return the config of a run that is this stage of `config` alone, without target and checkpoints."""
        named = {name: getattr(self, name) for name in ("optimizer", "batch_size", "algorithm")}
        labels = self.labels or config.objective.labels
        return dataclasses.replace(
            config,
            objective=dataclasses.replace(config.objective, labels=labels),
            steps=self.steps,
            stages=(),
            checkpoints=(),
            **{name: value for name, value in named.items() if value is not None},
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One pre-training run."""

    # settings of earlier versions, and the values at which they did nothing; None: no result depends on the setting
    removed: ClassVar[Mapping[str, Any]] = {"ema": 0.0, "loggers": None, "prefetch": None}

    language: LanguageConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default=ObjectiveConfig())
    optimizer: OptimizerConfig = field(default=OptimizerConfig())
    algorithm: AlgorithmConfig = field(default_factory=lambda: ALGORITHMS.load("gradient")())
    steps: int = setting(1000, minimum=1)
    """Training steps; with stages, the sum of theirs."""
    batch_size: int = setting(128, minimum=1)
    """Sentences in a step."""
    num_sentences: int = setting(0, minimum=0, note="0: fresh ones at every step", omit_default=True)
    """Train on so many sentences of the language, in a new order every epoch; of a corpus, on as many sequences,
    evenly spaced. 0: fresh sentences at every step, or the whole corpus."""
    masked_copies: int = setting(0, minimum=0, note="0: a new mask every time", omit_default=True)
    """Fixed masks of each sentence of a finite training set: an epoch has each sentence once with each of them. 0: a
    new mask every time."""
    stages: tuple[StageConfig, ...] = setting((), omit_default=True)
    """Parts of the run with settings of their own, one after the other; default: one, as the run has it."""
    checkpoints: tuple[int, ...] = ()
    """Steps whose checkpoint is kept, besides the last of the run and of each stage. Counted from the run's start."""
    init_from: str | None = None
    """Checkpoint folder whose weights the run starts from, or the folder of a complete run, for its last; relative to
    the run's folder. Default: random weights."""
    init_optimizer: bool = setting(False, omit_default=True)
    """Take over the optimizer's state of `init_from`, too, as a branch of that run: its decay after a stable rate."""
    seed: int = 0
    """Decides the initial weights, the data, the masks and the dropout."""
    log_every: int = setting(50, minimum=1)
    """Steps between two lines of metrics.jsonl."""
    measure_every: int = setting(0, minimum=0, note="0: never")
    """Measure loss and trace every this many steps, for metrics.jsonl; a multiple of `log_every`; 0: never."""
    measure_sentences: int = setting(1024, minimum=10)
    """Sentences that these are measured on, the same each time; as many others are compared with a stage's target."""
    micro_batch_size: int = setting(0, minimum=0, note="0: the whole batch", exclude_from_fingerprint=True)
    """Sentences whose gradient is computed at once in a process, to save memory; 0: the process's whole part of the
    batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Matrix products of the loss and its gradient in float32 or, by autocast, bfloat16; weights are float32."""
    compiled: bool = setting(False, omit_default=True)
    """Compute loss and gradient in one compiled piece, several times as fast where the model is narrow: BERT, one
    masked token a sentence, isoloss's own algorithms, one thread of a CPU. `isoloss train` turns it on by itself where
    it is faster."""
    tensorboard: bool = setting(False, exclude_from_fingerprint=True)
    """Write the numbers of metrics.jsonl also as TensorBoard's files, in the run's folder."""
    parallel: Literal["ddp", "fsdp"] = setting("ddp", exclude_from_fingerprint=True)
    """Several processes each have the whole model (ddp), or a shard of every parameter (fsdp), to save memory."""
    device: str = setting("auto", exclude_from_fingerprint=True)
    """Device to train on: auto, cpu, cuda, cuda:1, mps."""
    threads: int = setting(0, minimum=0, note="0: all cores", exclude_from_fingerprint=True)
    """CPU threads; 0: all cores, or one for the compiled step."""
    save_every_seconds: float = setting(60.0, minimum=0, exclude_from_fingerprint=True)
    """Seconds between two checkpoints kept only for resuming."""

    def __post_init__(self) -> None:
        """Count the steps of the stages."""
        # something that is no stage passes here, and `check` names it
        with contextlib.suppress(TypeError, AttributeError):
            if self.stages and self.steps == TrainConfig.steps:
                object.__setattr__(self, "steps", sum(stage.steps for stage in self.stages))

    def stage_configs(self) -> tuple[TrainConfig, ...]:
        """Return each stage as the config of a run that is this stage alone; without stages, the run itself."""
        return tuple(stage.applied_to(self) for stage in self.stages) or (self,)

    @property
    def decays(self) -> bool:
        """Whether the learning rate of some stage decays."""
        return any(optimizer.schedule != "constant" for optimizer in self.optimizers)

    @property
    def optimizers(self) -> tuple[OptimizerConfig, ...]:
        """The optimizer of each stage, or of the run if it has none."""
        return tuple(stage.optimizer or self.optimizer for stage in self.stages) or (self.optimizer,)

    def stage_ends(self, reached: Collection[int] = ()) -> tuple[int, ...]:
        """Return the last step of each stage, counted from the run's start, if targets were reached at these steps.

        Example:
            >>> from isoloss.lab.languages.config import LAPTOP_PCFG
            >>> from isoloss.run_config import StageConfig, TrainConfig
            >>> stages = (StageConfig(steps=500, target_kl=0.1), StageConfig(steps=100))
            >>> config = TrainConfig(language=LAPTOP_PCFG, stages=stages)
            >>> config.stage_ends(), config.stage_ends([350])
            ((500, 600), (350, 450))
        """
        ends, end = [], 0
        for steps in [stage.steps for stage in self.stages] or [self.steps]:
            end, begin = end + steps, end
            end = next((step for step in reached if begin < step <= end), end)
            ends.append(end)
        return tuple(ends)

    def check_fields(self) -> None:
        """Refuse what its parts refuse of each other."""
        if self.stages and self.steps != (total := sum(stage.steps for stage in self.stages)):
            raise IsolossError(f"steps is {self.steps}, and the stages have {total} together: leave steps out")
        if not all(0 <= step <= self.steps for step in self.checkpoints):
            steps = ", ".join(map(str, self.checkpoints))
            raise IsolossError(f"checkpoints is {steps}; it must be steps from 0 to {self.steps}")
        self._check_training_set()
        if self.init_optimizer and self.init_from is None:
            raise IsolossError("init_optimizer is on, and there is no init_from: name the checkpoint to branch from")
        if self.measure_every % self.log_every:
            raise IsolossError(
                f"measure_every is {self.measure_every}; it must be a multiple of log_every, {self.log_every}"
            )
        architecture = MODELS.load(self.model.architecture)
        if self.objective.kind != architecture.objective:
            raise IsolossError(
                f"the objective is {self.objective.kind!r}, and the architecture {self.model.architecture} learns "
                f"{architecture.objective!r}: set objective.kind to {architecture.objective!r}, or choose another "
                "architecture (isoloss ls models)"
            )
        if self.parallel == "fsdp" and not architecture.supports_fsdp:
            raise IsolossError(f"parallel is 'fsdp', but {self.model.architecture} needs full weights: use ddp")
        if self.parallel == "fsdp" and self.optimizer.name not in ELEMENTWISE:
            raise IsolossError(
                f"parallel is 'fsdp', but {self.optimizer.name} does not run with it: use ddp, or adamw or sgd"
            )
        if self.compiled and (reason := self.compiled_lacks()):
            raise IsolossError(f"compiled is on and {reason}: leave compiled out")
        for number, stage in enumerate(self.stages):
            self._check_stage(f"stages[{number}]", stage)
        # of a run with stages, each stage was checked with its own steps, optimizer and algorithm
        if not self.stages:
            self.optimizer.check_steps(self.steps)
            self.algorithm.check_run(self)

    def _check_training_set(self) -> None:
        """Refuse what a finite training set cannot have."""
        if self.masked_copies and self.objective.kind == "causal":
            raise IsolossError("the causal objective masks no tokens: leave out masked_copies")
        if self.masked_copies and not self.num_sentences and not self.language.is_finite:
            raise IsolossError(
                f"masked_copies is {self.masked_copies}, and the sentences are fresh ones at every step: give "
                "num_sentences"
            )
        sizes = {stage.batch_size or self.batch_size for stage in self.stages}
        if (self.num_sentences or self.masked_copies) and len({*sizes, self.batch_size}) > 1:
            raise IsolossError(
                f"a stage has a batch_size other than {self.batch_size}, and the sentences of a finite training set "
                "come in batches of one size: leave out the stages' batch_size, num_sentences and masked_copies"
            )

    def compiled_lacks(self) -> str:
        """Return the first thing that this run needs and the compiled step does not have; empty: it has everything."""
        architecture = MODELS.load(self.model.architecture)
        shape = architecture.shape(self.model) if architecture.has_compiled_loss else None
        # 0 is a multiple of all: where the architecture has no compiled step, only that is told
        width, inner = (0, 0) if shape is None else (shape.d_model, shape.intermediate)
        wrong = {
            f"the architecture is {self.model.architecture}; it must be bert": not architecture.has_compiled_loss,
            f"the width is {width}; it must be a multiple of 16": width % 16,
            f"ffn is {inner}; it must be a multiple of 4": inner % 4,
            f"masking is {self.objective.masking!r}; it must be 'one'": self.objective.masking != "one",
            f"precision is {self.precision}; it must be float32": self.precision != "float32",
            f"the optimizer is {self.optimizer.name}; it must be adamw or sgd": self.optimizer.name not in ELEMENTWISE,
            # another may replace parameters or gradients, or watch the model's forward pass, which is not called
            f"the algorithm {self.algorithm.kind} is not isoloss's": not ALGORITHMS.is_builtin(self.algorithm.kind),
            f"threads is {self.threads}; it must be 1, or 0": self.threads > 1,
        }
        return next((reason for reason, is_wrong in wrong.items() if is_wrong), "")

    def _check_stage(self, name: str, stage: StageConfig) -> None:
        """Refuse what the run's settings and a stage's refuse of each other."""
        try:
            # as a run of its own, a stage is under all rules of a run
            check(stage.applied_to(self))
        except IsolossError as error:
            raise IsolossError(f"{name}: {error}") from error
        if stage.target is not None and stage.validate_every % self.log_every:
            raise IsolossError(
                f"{name}: validate_every is {stage.validate_every}; it must be a multiple of log_every, "
                f"{self.log_every}"
            )
