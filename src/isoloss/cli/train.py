"""`isoloss train`: pre-train a model into a run directory; the same command resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import config as configs
from isoloss import interrupts
from isoloss.cli import common
from isoloss.config import AlgorithmConfig, LanguageConfig
from isoloss.errors import IsolossError
from isoloss.models.sizes import default_size, find_architecture
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.runs import Run
from isoloss.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, GradientConfig, SAMConfig

if TYPE_CHECKING:
    from isoloss.languages import Language

EXAMPLES = [
    ("isoloss train runs/first --language pcfg-laptop --size d32 --steps 2000", "a small BERT on a random grammar"),
    ("isoloss train runs/heads --language pcfg-laptop --size d64 --heads 4 --layers 2", "a size with another shape"),
    (
        "isoloss train runs/text --language text/ --tokenizer tokenizer --masking fraction --steps 300",
        "on real text; isoloss text and isoloss tokenizer make both",
    ),
    (
        "isoloss train runs/teacher --language text/ --tokenizer tokenizer --architecture opt --steps 1000",
        "a causal language model, which can write a language's sentences",
    ),
    (
        "isoloss train runs/spoiled --language pcfg-laptop --rule adversarial --task prefix-4 --steps 4000",
        "the same loss, a worse probe",
    ),
    ("isoloss train runs/again --config run.toml", "from a file; --print-config writes one"),
    (
        "torchrun --nproc-per-node 2 -m isoloss train runs/two --language pcfg-laptop",
        "by two processes; so does accelerate launch",
    ),
]


@dataclass(frozen=True)
class Args:
    """Pre-train a masked or causal language model. The same command on the same directory resumes, bit for bit."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    config: Path | None = None
    """A TOML file with the whole config, instead of the options below but for micro-batch, device and threads."""
    language: str | None = None
    """A preset (isoloss ls languages), a stored language, grammar or .toml file; with --tokenizer, text or hf:NAME."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt."""
    length: int | None = None
    """For text: tokens in a packed sequence. For a grammar file: the longest sentence."""
    column: str | None = None
    """For JSON lines and datasets: the field or column with the text; default: text."""
    split: str | None = None
    """For datasets; default: train."""
    max_documents: int | None = None
    """For text: how many documents are taken; default: all."""
    architecture: Literal["bert", "bert-pre-ln", "lstm", "opt"] = ModelConfig.architecture
    """Architecture (isoloss ls models): opt predicts each next token, the others hidden tokens."""
    size: str | None = None
    """Model size (isoloss ls sizes); default: d64, or h64 for an LSTM."""
    layers: int | None = None
    """Number of layers; default: that of the size."""
    width: int | None = None
    """Width of the hidden states (for an LSTM, per direction); default: that of the size."""
    heads: int | None = None
    """Attention heads per layer, a divisor of the width; default: those of the size. Not for an LSTM."""
    ffn: int | None = None
    """Width inside the feed-forward blocks; default: 4 times the width. Not for an LSTM."""
    directions: Literal[1, 2] = ModelConfig.directions
    """lstm: read both ways (2), or from left to right only (1)."""
    dropout: float = ModelConfig.dropout
    """Dropout in training."""
    objective: Literal["masked", "causal"] | None = None
    """Predict hidden tokens, or each token from those before it; default: what the architecture learns."""
    masking: Literal["one", "fraction"] = ObjectiveConfig.masking
    """Hide one token of each sentence, or a fraction of all."""
    fraction: float = ObjectiveConfig.fraction
    """The fraction, where masking is fraction."""
    corruption: Literal["mask", "bert"] = ObjectiveConfig.corruption
    """What training shows for a hidden token: always the mask, or 80 % mask, 10 % random, 10 % itself (BERT)."""
    labels: Literal["sampled", "exact"] = ObjectiveConfig.labels
    """Learn from the tokens that were hidden, or from their exact conditionals, without label noise."""
    rule: Literal["gradient", "sam", "adversarial", "fisher-penalty"] = GradientConfig.kind
    """Step rule: which gradient the optimizer gets."""
    rho: float | None = None
    """sam: how far the loss is ascended; default: 0.05."""
    sam_batch: Literal["halves", "same"] | None = None
    """sam: one half of the batch ascends and the other descends (default), or all of it does both."""
    task: str | None = None
    """adversarial: the downstream task that is spoiled; default: root."""
    adversary_weight: float | None = None
    """adversarial: how much the task's loss counts (lambda); default: 0.1."""
    ascent: Literal["reduced", "per-rank"] | None = None
    """sam, adversarial: several processes share the ascent point or the head (default), or each has its own."""
    ridge: float | None = None
    """adversarial: penalty of the head's squared weights; default: 0.1."""
    penalty: float | None = None
    """fisher-penalty: how much the trace counts; default: 0.001."""
    optimizer: Literal["adamw", "sgd"] = OptimizerConfig.name
    """What turns the gradient into an update."""
    learning_rate: float = OptimizerConfig.learning_rate
    """The highest, after the warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = OptimizerConfig.schedule
    """The learning rate after the warm-up: constant, or down to 0."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; default: 6 % of the steps, at most 1000."""
    warmup_proportion: float | None = None
    """Share of the steps that warm up, instead of their number."""
    max_grad_norm: float | None = None
    """Scale larger gradients down to this norm; default: never."""
    weight_decay: float = OptimizerConfig.weight_decay
    """Decoupled weight decay (AdamW), or plain (SGD); biases and layer norms have none."""
    momentum: float = OptimizerConfig.momentum
    """SGD's momentum."""
    steps: int = TrainConfig.steps
    """Training steps."""
    batch_size: int = TrainConfig.batch_size
    """Sentences in a step."""
    checkpoints: tuple[int, ...] = ()
    """Steps whose checkpoint is kept, besides the last."""
    initial: str | None = None
    """Checkpoint folder to start from, relative to the run directory."""
    measure_every: int = TrainConfig.measure_every
    """Steps between measurements of KL and trace in metrics.jsonl, a multiple of 50; 0: none."""
    seed: int = TrainConfig.seed
    """Decides weights, data, masks and dropout."""
    micro_batch: int = 0
    """Sentences whose gradient is computed at once, to save memory; 0: the whole batch."""
    parallel: Literal["ddp", "fsdp"] | None = None
    """Several processes each have the whole model (ddp, the default), or a piece of every parameter (fsdp)."""
    precision: Literal["fp32", "bf16"] = TrainConfig.precision
    """Matrix products in float32 or, by autocast, bfloat16."""
    ema: float = TrainConfig.ema
    """Decay by step of an exponential moving average of the weights, saved beside each checkpoint; 0: none."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where metrics.jsonl is mirrored; each needs its package."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    prefetch: bool = False
    """Make the next batch while a step is at work; needs --threads 1 and a core for it."""
    print_config: bool = False
    """Print the config as TOML and stop."""
    json: bool = False
    """Print one JSON document when done."""


def main(arguments: list[str]) -> int:
    """Run the verb; of several processes, rank 0 speaks, and of those that fail, the first."""
    if not _is_one_of_several():
        return _main(arguments)
    from isoloss.training.distributed import together

    with together() as processes, contextlib.ExitStack() as silence:
        if not processes.is_main:
            nothing = silence.enter_context(Path(os.devnull).open("w"))
            silence.enter_context(contextlib.redirect_stdout(nothing))
            silence.enter_context(contextlib.redirect_stderr(nothing))
        try:
            return _main(arguments)
        except IsolossError:
            if processes.is_first_to_speak():
                raise
            return 2


def _is_one_of_several() -> bool:
    """Whether a launcher started several processes; `isoloss.training.distributed` knows, but needs torch."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _main(arguments: list[str]) -> int:
    args = common.parse(Args, "train", arguments, examples=EXAMPLES)
    config = _config(args)
    if args.print_config:
        common.say(configs.to_toml(config).rstrip())
        return 0

    from isoloss.evaluation.pretraining import pretrain
    from isoloss.training import Interrupted
    from isoloss.training import Progress as Step

    run = Run(args.run)
    language = _language(config.language)
    with common.Progress(f"training {run.name}", config.steps, "steps") as progress:

        def report(step: Step) -> None:
            progress(step.step, f"loss {step.loss_nats:.4f} nats, {step.tokens_per_second:,.0f} tokens/s")

        try:
            pretrain(run, config, language, progress=report)
        except Interrupted as stop:
            how = "To go on, by any number of processes:" if _is_one_of_several() else "To go on:"
            common.note(f"stopped at step {stop.step} of {config.steps}, saved. {how}")
            common.note("  " + common.command("train", *arguments))
            return interrupts.status()
    result = run.result()
    if args.json:
        common.emit_json({"run": str(run.path), **result})
    else:
        common.say(f"{run.path}: {config.steps} steps done, last training loss {result['loss_nats']:.4f} nats")
        common.say(f"checkpoints at steps {', '.join(map(str, run.steps()))}; measure them with")
        common.say("  " + common.command("eval", run.path))
    return 0


# options that decide no result
FREE = ("run", "config", "micro_batch", "parallel", "trackers", "device", "threads", "prefetch", "print_config", "json")


def _config(args: Args) -> TrainConfig:
    if args.config is None and args.language is not None:
        config = _from_options(args)
    else:
        chosen = [f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(args) if _decided(args, f)]
        if args.config is not None:
            if chosen:
                raise IsolossError(f"{args.config} holds the whole config; leave out {', '.join(chosen)}")
            config = configs.read_toml(TrainConfig, args.config)
        elif Run(args.run).exists:
            if chosen:
                raise IsolossError(
                    f"{args.run} goes on with the config it was made with; leave out {', '.join(chosen)}"
                )
            config = Run(args.run).config
        else:
            raise IsolossError(f"{args.run} holds no run yet: name a --language or a --config to start one")
    return dataclasses.replace(
        config,
        device=args.device,
        threads=args.threads,
        prefetch=args.prefetch or config.prefetch,
        micro_batch=args.micro_batch or config.micro_batch,
        parallel=args.parallel or config.parallel,
        trackers=args.trackers or config.trackers,
    )


def _decided(args: Args, field: dataclasses.Field[Any]) -> bool:
    """Whether an option that decides the result was given another value than its default."""
    return field.name not in FREE and getattr(args, field.name) != field.default


def _language(config: LanguageConfig) -> Language:
    if not config.reports_progress:
        return config.build()  # type: ignore[no-any-return]
    with common.Progress("tokenizing", 100, "%") as percent:
        return config.build(lambda done, total: percent(100 * done // total))  # type: ignore[no-any-return]


def _from_options(args: Args) -> TrainConfig:
    from isoloss import languages

    kind = args.objective or find_architecture(args.architecture).objective
    masks = ("masking", "fraction", "corruption", "labels")
    given = [f"--{name}" for name in masks if getattr(args, name) != getattr(Args, name)]
    if kind == "causal" and given:
        raise IsolossError(f"the causal objective hides no tokens: leave out {', '.join(given)}")
    if args.masking == "one" and args.fraction != Args.fraction:
        raise IsolossError("--fraction needs --masking fraction: without it, one token of each sentence is hidden")
    if args.optimizer != "sgd" and args.momentum != Args.momentum:
        raise IsolossError(f"--momentum needs --optimizer sgd: {args.optimizer} has none")
    if None not in (args.warmup_steps, args.warmup_proportion):
        raise IsolossError("--warmup-steps and --warmup-proportion say the same: leave one out")
    warmup = min(1000, round(0.06 * args.steps)) if args.warmup_steps is None else args.warmup_steps
    return TrainConfig(
        language=languages.resolve(
            str(args.language),
            tokenizer=args.tokenizer,
            length=args.length,
            column=args.column,
            split=args.split,
            max_documents=args.max_documents,
        ),
        model=ModelConfig(
            architecture=args.architecture,
            size=args.size or default_size(args.architecture),
            dropout=args.dropout,
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            ffn=args.ffn,
            directions=args.directions,
        ),
        objective=ObjectiveConfig(
            kind=kind,
            masking=args.masking,
            fraction=args.fraction,
            corruption=args.corruption,
            labels=args.labels,
        ),
        rule=_rule(args),
        optimizer=OptimizerConfig(
            name=args.optimizer,
            learning_rate=args.learning_rate,
            schedule=args.schedule,
            warmup_steps=warmup,
            warmup_proportion=args.warmup_proportion,
            max_grad_norm=args.max_grad_norm,
            weight_decay=args.weight_decay,
            momentum=args.momentum,
        ),
        steps=args.steps,
        batch_size=args.batch_size,
        checkpoints=args.checkpoints,
        initial=args.initial,
        seed=args.seed,
        measure_every=args.measure_every,
        precision=args.precision,
        ema=args.ema,
    )


RULES: dict[str, tuple[type[AlgorithmConfig], dict[str, str]]] = {
    "gradient": (GradientConfig, {}),
    "sam": (SAMConfig, {"rho": "rho", "sam_batch": "batch", "ascent": "ascent"}),
    "adversarial": (
        AdversarialConfig,
        {"task": "task", "adversary_weight": "weight", "ridge": "ridge", "ascent": "ascent"},
    ),
    "fisher-penalty": (FisherPenaltyConfig, {"penalty": "coefficient"}),
}  # by name: the config, and its fields by option


def _rule(args: Args) -> AlgorithmConfig:
    chosen, fields = RULES[args.rule]
    for option in dict.fromkeys(name for _, options in RULES.values() for name in options):
        if option not in fields and getattr(args, option) is not None:
            having = " or ".join(rule for rule, (_, options) in RULES.items() if option in options)
            raise IsolossError(f"--{option.replace('_', '-')} needs --rule {having}")
    given = {field: getattr(args, option) for option, field in fields.items()}
    return chosen(**{field: value for field, value in given.items() if value is not None})
