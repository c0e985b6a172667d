"""`isoloss train`: pre-train a model into a run directory; the same command resumes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from isoloss import config as configs
from isoloss.cli import common
from isoloss.config import CorpusConfig, LanguageConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.errors import IsolossError
from isoloss.models.sizes import find_architecture
from isoloss.runs import Run

if TYPE_CHECKING:
    from isoloss.languages import Language

EXAMPLES = [
    ("isoloss train runs/first --language pcfg-laptop --size d32 --steps 2000", "a small BERT on a random grammar"),
    (
        "isoloss train runs/novels --language novels/ --tokenizer vocab.txt --masking fraction --steps 300",
        "on real text",
    ),
    (
        "isoloss train runs/teacher --language novels/ --tokenizer vocab.txt --architecture opt --steps 1000",
        "a causal language model, which can write a language's sentences",
    ),
    ("isoloss train runs/again --config run.toml", "from a file; --print-config writes one"),
]


@dataclass(frozen=True)
class Args:
    """Pre-train a masked or causal language model. The same command on the same directory resumes, bit for bit."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    config: Path | None = None
    """A TOML file with the whole config, instead of the options below but for device and threads."""
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
    architecture: Literal["bert", "opt"] = ModelConfig.architecture
    """Architecture (isoloss ls models): bert predicts hidden tokens, opt each next token."""
    size: str = ModelConfig.size
    """Model size (isoloss ls sizes)."""
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
    optimizer: Literal["adamw", "sgd"] = OptimizerConfig.name
    """Step rule."""
    learning_rate: float = OptimizerConfig.learning_rate
    """After the warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; default: 6 % of the steps, at most 1000."""
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
    seed: int = TrainConfig.seed
    """Decides weights, data, masks and dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    print_config: bool = False
    """Print the config as TOML and stop."""
    json: bool = False
    """Print one JSON document when done."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "train", arguments, examples=EXAMPLES)
    config = _config(args)
    if args.print_config:
        common.say(configs.to_toml(config).rstrip())
        return 0

    from isoloss.pretraining import Interrupted, train
    from isoloss.pretraining import Progress as Step

    run = Run(args.run)
    language = _language(config.language)
    with common.Progress(f"training {run.name}", config.steps, "steps") as progress:

        def report(step: Step) -> None:
            progress(step.step, f"loss {step.loss_nats:.4f} nats, {step.tokens_per_second:,.0f} tokens/s")

        try:
            train(run, config, language, progress=report)
        except Interrupted as stop:
            common.note(f"stopped at step {stop.step} of {config.steps}, saved. To go on:")
            common.note("  " + common.command("train", *arguments))
            return 130
    result = run.result()
    if args.json:
        common.emit_json({"run": str(run.path), **result})
    else:
        common.say(f"{run.path}: {config.steps} steps done, last training loss {result['loss_nats']:.4f} nats")
        common.say(f"checkpoints at steps {', '.join(map(str, run.steps()))}; measure them with")
        common.say("  " + common.command("eval", run.path))
    return 0


FREE = ("run", "config", "device", "threads", "print_config", "json")  # options that decide no result


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
    return dataclasses.replace(config, device=args.device, threads=args.threads)


def _decided(args: Args, field: dataclasses.Field[Any]) -> bool:
    """Whether an option that decides the result was given another value than its default."""
    return field.name not in FREE and getattr(args, field.name) != field.default


def _language(config: LanguageConfig) -> Language:
    from isoloss import languages

    if not isinstance(config, CorpusConfig):
        return languages.make(config)
    with common.Progress("tokenising", 100, "%") as percent:
        return languages.make(config, progress=lambda done, total: percent(100 * done // total))


def _from_options(args: Args) -> TrainConfig:
    from isoloss import languages

    kind = args.objective or find_architecture(args.architecture).objective
    masks = ("masking", "fraction", "corruption")
    given = [f"--{name}" for name in masks if getattr(args, name) != getattr(Args, name)]
    if kind == "causal" and given:
        raise IsolossError(f"the causal objective hides no tokens: leave out {', '.join(given)}")
    if args.masking == "one" and args.fraction != Args.fraction:
        raise IsolossError("--fraction needs --masking fraction: without it, one token of each sentence is hidden")
    if args.optimizer != "sgd" and args.momentum != Args.momentum:
        raise IsolossError(f"--momentum needs --optimizer sgd: {args.optimizer} has none")
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
        model=ModelConfig(architecture=args.architecture, size=args.size, dropout=args.dropout),
        objective=ObjectiveConfig(kind=kind, masking=args.masking, fraction=args.fraction, corruption=args.corruption),
        optimizer=OptimizerConfig(
            name=args.optimizer,
            learning_rate=args.learning_rate,
            warmup_steps=warmup,
            weight_decay=args.weight_decay,
            momentum=args.momentum,
        ),
        steps=args.steps,
        batch_size=args.batch_size,
        checkpoints=args.checkpoints,
        initial=args.initial,
        seed=args.seed,
    )
