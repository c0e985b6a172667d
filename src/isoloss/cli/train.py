"""`isoloss train`: pre-train a model into a run directory; the same command resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from isoloss import config as configs
from isoloss import files, interrupts, machine
from isoloss.cli import common, options
from isoloss.cli.options import GivenOptions, LanguageOptions, option_name, sources_of
from isoloss.config import AlgorithmConfig, LanguageConfig
from isoloss.errors import IsolossError, require_package
from isoloss.registry import ALGORITHMS, MODELS, OPTIMIZERS
from isoloss.run_config import LATER_DECAY, ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.runs import Run
from isoloss.schema import json_schema
from isoloss.studies.run import usage

if TYPE_CHECKING:
    from isoloss.lab.languages import Language

EXAMPLES = [
    ("isoloss train runs/first --language pcfg-laptop --size d32 --steps 2000", "a small BERT on a random grammar"),
    (
        "isoloss train runs/equal --language pcfg-laptop --size d32 --steps 20000 --target-kl 0.05",
        "until the KL divergence of the model from the truth is 0.05 nats per predicted token, in at most 20,000 steps",
    ),
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
        "isoloss train runs/spoiled --language pcfg-laptop --algorithm adversarial --adversarial-task prefix-4",
        "the same loss, a worse probe",
    ),
    (
        "isoloss train runs/paper --preset paper --language pcfg-paper --size d512",
        "the paper's settings; options override them",
    ),
    ("isoloss train runs/again --config run.toml", "from a file, which may have stages; --print-config writes one"),
    (
        "torchrun --nproc-per-node 2 -m isoloss train runs/two --language pcfg-laptop",
        "by two processes; so does accelerate launch",
    ),
]

# what `--help` shows; `--help-all` shows the rest
COMMON = (
    "run config language tokenizer architecture size algorithm steps batch_size learning_rate checkpoints "
    "seed device json"
)

COMPILED_WIDTH = 64  # the widest model that is compiled unasked
_PARTS = ("language", "model", "objective", "optimizer", "algorithm", "stages")


class _Model(GivenOptions):
    """Architecture and shape."""

    sources = sources_of({"model": ModelConfig})


class _Masking(GivenOptions):
    """What a masked model learns from."""

    sources = sources_of({"masking": ObjectiveConfig}, exclude=["kind"])


class _Optimization(GivenOptions):
    """The optimizer's settings and schedule."""

    sources = sources_of({"optimization": OptimizerConfig}, exclude=["name"])


class _Training(GivenOptions):
    """Steps, data, checkpoints, seed and device."""

    sources = sources_of({"training": TrainConfig}, exclude=[*_PARTS, "compiled"])


class _Target(GivenOptions):
    """Training to a target loss; the number of steps is then a maximum."""

    sources = sources_of(
        {"target": StageConfig}, exclude=["labels", *(each.name for each in dataclasses.fields(TrainConfig))]
    )


class _Algorithms(GivenOptions):
    """Settings of training algorithms: the options of each begin with its name."""

    sources = sources_of(ALGORITHMS.loaded(), exclude=["kind"], prefixed=True)


@dataclass(frozen=True)
class Args:
    """Pre-train a masked or causal language model; the same command resumes, bit for bit."""

    run: options.Positional[Path]
    """The run directory."""
    config: Path | None = None
    """A TOML file with the whole config; only options that do not affect results may be combined with it."""
    language: str | None = None
    """A preset (isoloss ls languages), a stored language, grammar or .toml file; with --tokenizer, text or hf:NAME."""
    preset: str | None = None
    """Settings of the paper (paper) or of its authors' published command (authors); options override them."""
    frame: Literal["none", "cls-sep"] | None = None
    """Put [CLS] before and [SEP] after each sentence of a synthetic language; default: none, or the preset's."""
    objective: Literal["masked", "causal"] | None = None
    """Predict masked tokens, or each token from those before it; default: what the architecture learns."""
    algorithm: Annotated[str, f"The training algorithm: {', '.join(ALGORITHMS)}."] = "gradient"
    optimizer: Annotated[str, f"What turns the gradient into an update: {', '.join(OPTIMIZERS)}."] = (
        OptimizerConfig.name
    )
    compiled: bool = False
    """Compute loss and gradient of a narrow BERT in one compiled piece, several times as fast; default: where a run
    has this architecture, a width up to 64, one masked token a sentence, one process and a CPU."""
    no_compiled: bool = False
    """Train with transformers' own blocks there too."""
    schema: bool = False
    """Print the JSON schema of the files for --config, by which editors complete them; needs no RUN."""
    print_config: bool = False
    """Print the config as TOML, or with --json as JSON, and stop."""
    json: bool = False
    """Print one JSON document when done."""
    reading: LanguageOptions = field(default_factory=LanguageOptions)
    model: _Model = field(default_factory=_Model)
    masking: _Masking = field(default_factory=_Masking)
    optimization: _Optimization = field(default_factory=_Optimization)
    training: _Training = field(default_factory=_Training)
    target: _Target = field(default_factory=_Target)
    algorithms: _Algorithms = field(default_factory=_Algorithms)


def main(arguments: list[str]) -> int:
    """Run the subcommand; of several processes, rank 0 prints, and of those that fail, the first."""
    if "--schema" in arguments:
        common.emit_json(json_schema(TrainConfig))
        return 0
    if not _is_one_of_several():
        return _main(arguments)
    from isoloss.lab.training.distributed import process_group

    with process_group() as group, contextlib.ExitStack() as silence:
        if not group.is_main:
            nothing = silence.enter_context(Path(os.devnull).open("w"))
            silence.enter_context(contextlib.redirect_stdout(nothing))
            silence.enter_context(contextlib.redirect_stderr(nothing))
        try:
            return _main(arguments)
        except IsolossError:
            if group.is_first_to_report():
                raise
            return 2


def _is_one_of_several() -> bool:
    """Whether a launcher started several processes, as `isoloss.lab.training.distributed` asks, which needs torch."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _main(arguments: list[str]) -> int:
    args = options.parse(Args, "train", arguments, examples=EXAMPLES, common=COMMON)
    run, config = Run(args.run), _config(args)
    try:
        configs.check(config)
    except IsolossError as error:
        if not args.target:
            raise
        # the stage is made of options: a user knows these, and no stage
        text = str(error).removeprefix("stages[0]").lstrip(".: ")
        for name in ("log_every", *_Target.sources):
            text = text.replace(name, option_name(name))
        raise IsolossError(text) from error
    _check_machine(run, config)
    # a config, a run or a preset already says how it is trained
    is_free = args.config is None and args.language is not None and args.preset is None
    if is_free and not (args.compiled or args.no_compiled):
        config = dataclasses.replace(config, compiled=_is_compiled(run, config))
    if args.print_config:
        if args.json:
            common.emit_json(configs.to_dict(config))
        else:
            common.say(configs.to_toml(config).rstrip())
        return 0

    from isoloss.lab.training.train import Interrupted

    try:
        _train(run, config)
    except Interrupted as stop:
        how = "To resume, with any number of processes:" if _is_one_of_several() else "To resume:"
        common.note(f"stopped at step {stop.step} of {config.steps}; progress is saved. {how}")
        common.note("  " + common.command("train", *arguments))
        return interrupts.status()
    result = run.result()
    if args.json:
        common.emit_json({"run": str(run.path), **result})
        return 0
    common.say(f"{run.path}: {result['steps']} steps done, last training loss {result['loss_nats']:.4f} nats")
    common.say_stages(run)
    if run.missed_targets():
        _suggest_longer(run, args, arguments)
    steps = ", ".join(map(str, run.steps()))
    # a unit of a study: the study renames the run and measures it, so a command for that would only mislead
    if usage.USAGE in os.environ:
        common.say(f"checkpoints (step): {steps}")
        return 0
    common.say(f"checkpoints (step): {steps}; measure them with")
    common.say("  " + common.command("measure", run.path))
    return 0


def _suggest_longer(run: Run, args: Args, arguments: Sequence[str]) -> None:
    """Print the command that trains such a run for longer, in a new folder."""
    longer = f"{args.run}-longer"
    if run.config.decays:
        common.say_wrapped(f"{LATER_DECAY}.")
    if args.config is None and args.language is not None:
        common.say("to train again, for twice as many steps, in a new folder")
        common.say("(the default warm-up grows with --steps; --warmup-steps sets it):")
        words = [longer if word == str(args.run) else word for word in arguments]
        common.say("  " + common.command_with("train", words, "--steps", 2 * run.config.steps))
    else:
        common.say("to train again, for longer, in a new folder, raise the steps of the stage in a copy of the config")
        common.say("(the default warm-up grows with steps; warmup_steps sets it):")
        common.say(f"  {common.command('train', args.run, '--print-config')} > {shlex.quote(f'{longer}.toml')}")
        common.say("  " + common.command("train", longer, "--config", f"{longer}.toml"))


def _check_machine(run: Run, config: TrainConfig) -> None:
    """Refuse a device, a number of threads and first weights that there cannot be on this machine."""
    machine.check_device(config.device)
    machine.check_threads(config.threads)
    if config.init_from is not None and not run.steps():
        first = run.path / config.init_from
        # resolved, as the path may begin with `..` of a folder that is not there yet
        if not first.resolve().exists():
            raise IsolossError(
                f"init_from is {config.init_from}, relative to the run's folder, and there is no {first}"
                f"{files.nearest(first)}"
            )


def _is_compiled(run: Run, config: TrainConfig) -> bool:
    """Whether a run whose command does not say so is compiled."""
    # the step decides the bits of the result, so a run goes on with the step that it began with, on any machine
    if run.exists:
        if run.config.compiled and (reason := config.compiled_lacks()):
            raise IsolossError(f"{run.path} was begun with the compiled step, and {reason}")
        return run.config.compiled
    width = getattr(MODELS.load(config.model.architecture).shape(config.model), "d_model", math.inf)
    # wider models spend their time in matrix products, where a BLAS is as fast
    if width > COMPILED_WIDTH or config.compiled_lacks() or _is_one_of_several():
        return False
    if config.device == "auto":
        from isoloss.machine import resolve_device

        return resolve_device("auto").type == "cpu"
    return config.device == "cpu"


def _train(run: Run, config: TrainConfig) -> None:
    require_package("numba")
    from isoloss.lab.evaluation.pretraining import pretrain
    from isoloss.lab.training.train import Progress as Step

    if config.compiled and not run.complete:
        from isoloss.lab.models.compiled_bert import compile_step

        compile_step(lambda: common.note("compiling the training step, once: about 15 seconds, or more"))
    language = None if run.complete else _language(config.language.within(run.path))
    with common.Progress(f"training {run.name}", config.steps, "steps") as progress:

        def report(step: Step) -> None:
            progress(step.step, f"loss {step.loss_nats:.4f} nats, {step.tokens_per_second:,.0f} tokens/s")

        pretrain(run, config, language=language, progress=report)


def _language(config: LanguageConfig) -> Language:
    if not config.reports_progress:
        return config.build()  # type: ignore[no-any-return]
    with common.Progress("tokenizing", 100, "%") as percent:
        return config.build(lambda done, total: percent(100 * done // total))  # type: ignore[no-any-return]


def _config(args: Args) -> TrainConfig:
    """Return the config of the run."""
    if args.config is None and args.language is not None:
        return _from_options(args)
    free = {f.name for f in dataclasses.fields(TrainConfig) if f.metadata.get("exclude_from_fingerprint")}
    changed: dict[str, Any] = {}
    for option in dataclasses.fields(args):
        value = getattr(args, option.name)
        if isinstance(value, GivenOptions):
            changed |= value
        elif option.name not in ("run", "config", "print_config", "json") and value != option.default:
            changed[option.name] = value
    decisive = ", ".join(option_name(name) for name in changed if name not in free)
    if args.config is not None:
        if decisive:
            raise IsolossError(f"{args.config} holds the whole config; leave out {decisive}")
        return dataclasses.replace(configs.read_toml(TrainConfig, args.config), **changed)
    run = Run(args.run)
    if not run.exists:
        raise IsolossError(f"{run.path} holds no run yet: name a --language or a --config to start one")
    if decisive:
        raise IsolossError(f"{run.path} goes on with the config it was made with; leave out {decisive}")
    return dataclasses.replace(run.config, **changed)


def _from_options(args: Args) -> TrainConfig:
    """Return the config that the options give; what was not given is the preset's, where there is one."""
    from isoloss.lab import languages, presets

    optimization: dict[str, Any] = dict(args.optimization)
    if {"warmup_steps", "warmup_proportion"} <= optimization.keys():
        raise IsolossError("--warmup-steps and --warmup-proportion say the same: leave one out")
    if "warmup_proportion" in optimization:
        # in the place of the preset's steps: a config states one of the two
        optimization["warmup_steps"] = None
    preset = None if args.preset is None else presets.load_preset(args.preset)
    language = languages.resolve(str(args.language), **args.reading)
    of_preset: dict[str, Any] = {"architecture": preset.architecture, "dropout": preset.dropout} if preset else {}
    model = ModelConfig(**{**of_preset, **args.model})
    objective_kind = args.objective or MODELS.load(model.architecture).objective
    if preset:
        data = {name: args.training[name] for name in ("num_sentences",) if name in args.training}
        base = presets.train_config(preset, language, model, **data)
    else:
        base = TrainConfig(language=language, model=model, objective=ObjectiveConfig(kind=objective_kind))
    if args.frame is not None:
        base = dataclasses.replace(base, language=presets.framed(language) if args.frame == "cls-sep" else language)
    if args.compiled and args.no_compiled:
        raise IsolossError("--compiled and --no-compiled contradict each other: leave one out")
    config = dataclasses.replace(
        base,
        compiled=args.compiled,
        objective=dataclasses.replace(base.objective, kind=objective_kind, **args.masking),
        optimizer=dataclasses.replace(base.optimizer, name=args.optimizer, **optimization),
        algorithm=_algorithm(args),
        **args.training,
    )
    # the whole run as one stage, because a target ends a stage
    return dataclasses.replace(config, stages=(StageConfig(steps=config.steps, **args.target),) if args.target else ())


def _algorithm(args: Args) -> AlgorithmConfig:
    """Return the config of the algorithm with the options that begin with its name; others' are refused."""
    config, settings = ALGORITHMS.load(args.algorithm), {}
    for name, value in args.algorithms.items():
        field, (kind,) = args.algorithms.sources[name]
        if kind != args.algorithm:
            raise IsolossError(f"{option_name(name)} needs --algorithm {kind}")
        settings[field] = value
    return config(**settings)  # type: ignore[no-any-return]
