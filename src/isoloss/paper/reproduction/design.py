"""What the study trains and measures: a dataset with its sizes and arms becomes runs. `scales.py` has the numbers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from isoloss.config import LanguageConfig
from isoloss.lab.languages.config import WithSpecialTokensConfig
from isoloss.lab.models.architectures import LSTMShape
from isoloss.paper.design import MEASURED, OFFSET, Design, Unit, adamw, continued
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig, StageConfig, TrainConfig
from isoloss.studies import Experiment, Measurement
from isoloss.studies.plan import Expected, Resources

FIGURE_1 = "figure 1"  # on the page it shows cooldowns, too
SGD_SHOWN = ("figure 4", "figure 10")
SGD_SAMPLED, SGD_EXACT = "sgd-sampled", "sgd-exact"
AGAIN = 15  # added to the seed of a run that has been continued once, for other sentences
TEACHER = "teacher"  # the run whose last checkpoint is the language of a dataset
# probes without a model, and their titles
BASELINES = {
    "raw-lookup": "Look-up table, raw",
    "standardized-lookup": "Look-up table, standardized",
    "log-lookup": "Look-up table, logarithms",
    "one-hot": "One-hot tokens",
}
# all measures of flatness that are one number
FLATNESS = (
    *("trace", "minimal-trace", "empirical-fisher", "hessian-trace", "weighted-trace", "fisher-rao"),
    *("relative-flatness", "largest-eigenvalue", "sam-sharpness", "adaptive-sharpness", "noise-sharpness"),
    "squared-norm",
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The figures and tables of the paper that show a dataset's runs, by what the runs have in common."""

    sizes: tuple[str, ...] = ()  # every size
    longer: tuple[str, ...] = ()  # the model whose steps are followed
    expanded: tuple[str, ...] = ()  # sizes that are expanded into one
    main: tuple[str, ...] = ()  # the model that the arms are compared with
    baselines: tuple[str, ...] = ()  # probes without a model, such as on the look-up table


SHOWN: Mapping[str, Shown] = {
    "pcfg": Shown(
        sizes=(FIGURE_1, "figure 3a", "figure 8", "figure 9"),
        longer=("figure 2a", "figure 9"),
        expanded=("figure 5",),
        main=("table 1", "table 2"),
        baselines=(FIGURE_1, "table 1"),
    ),
    "hmm": Shown(sizes=("figure 3b", "figure 8")),
    "generated": Shown(sizes=("figure 3c", "figure 8"), longer=("figure 2b", "figure 9"), expanded=("figure 5",)),
    "web": Shown(longer=("figure 2c", "figure 4")),
    "text": Shown(main=("table 1", "table 2")),
}


def cooldown_run(arm: str, step: int, length: int = 0) -> str:
    """Return the name of the cooldown run after a step of an arm; `length` is given if it is not the usual one."""
    return f"{arm}-{step}-cooldown{f'-{length}' if length else ''}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant of the main model."""

    title: str  # in figures and tables
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the main model's config, if trained from scratch
    stages: tuple[StageConfig, ...] = ()  # instead: what follows the main model's step `start`
    watched: tuple[int, ...] = ()  # of its first stage: steps after which a cooldown branches off, and is measured
    shown_in: tuple[str, ...] = ()  # the figures and tables of the paper


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One of the paper's datasets: its languages, models, tasks, and what is trained and measured.

    Cooldowns are AdamW with a learning rate that decays to 0. They bring models to about the same loss; the paper has
    none. One of the usual length follows the last step of every size and arm, and each watched step of the main size,
    in a run of its own. Cooldowns of other lengths follow the step `start` of every size: their losses bracket the
    losses of the other models.
    """

    name: str  # e.g. `pcfg`
    title: str  # on the page
    languages: tuple[LanguageConfig, ...]  # e.g. grammars; errors are over them where there are several
    teacher: TrainConfig | None = None  # trained first: the causal model whose checkpoint is the language
    seeds: int = 1  # of pre-training, for each language
    offset: int = 0  # of a repetition with other seeds; 0: the study itself
    tasks: Mapping[str, str]  # the measure of each downstream task, by the paper's name of the task
    common: Mapping[str, Any]  # fields of `TrainConfig` that all runs share, besides language, model and seed
    sizes: Mapping[str, ModelConfig]  # of figure 3 and its like, ascending
    expanded: Mapping[str, ModelConfig] = field(default_factory=dict)  # of Table 4; the last is what all become
    main: str  # the size that is followed over its steps and that the arms are compared with
    followed: str = ""  # the size of figure 2, where it is another one
    watched: tuple[int, ...]  # the measured steps; the last is the end of training
    cooldowns: tuple[int, ...] = ()  # lengths of the cooldown: the usual one, then the others
    cooldown_rate: float = 3e-3  # its highest learning rate
    # models whose KL differs from the control's by at most this fraction of it count as having its loss. The losses
    # in the paper's figure 1 are 3.204 to 3.208 nats, the entropy is 3.196 nats: a KL of 0.010 nats ± 20 %
    band: float = 0.2
    arms: Mapping[str, Arm] = field(default_factory=dict)
    projected: int = 0  # width to which the features of every size are projected for one more probe; 0: no such probe
    flatness: tuple[str, ...] = ()  # measures at the end of the arms and of the main model's cooldowns
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measures
    # what training and measuring need: of the pairs of a least width and needs, the last that the model reaches
    needs: tuple[tuple[int, Resources], ...] = ((0, Resources()),)
    tokens: Tokens | None = None  # to compute the expected costs; None: they are not computed

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every language with every seed."""
        # a text has no seed: its index stands for it
        numbers = [int(getattr(each, "seed", place + self.offset)) for place, each in enumerate(self.languages)]
        return tuple(
            Unit(
                prefix=f"{self.name}-{number}-seed-{index}",
                cluster=f"{self.name} {number}",
                language=language,
                seed=100 * number + index,
                block=block,
            )
            for block, (number, language) in enumerate(zip(numbers, self.languages, strict=True))
            for index in range(self.seeds)
        )

    @property
    def shown(self) -> Shown:
        """The paper's figures and tables."""
        return SHOWN[self.name]

    @property
    def last(self) -> int:
        """The last step of training."""
        return self.watched[-1]

    @property
    def start(self) -> int:
        """The step of the main model that arms continue from: the middle one if there are cooldowns, else the last."""
        return self.watched[(len(self.watched) - 1) // 2] if self.cooldowns else self.last

    @property
    def control(self) -> str:
        """The run that others are compared with: the main model where arms branch off, after the usual cooldown."""
        return cooldown_run(self.main, self.start) if self.cooldowns else self.main

    @property
    def cooldown_lengths(self) -> tuple[int, ...]:
        """All lengths of the cooldown, ascending; 0 stands for the usual one, as in `cooldown_run`."""
        # in the order of the KL after them, so that neighbors can enclose a loss (`interpolated_control`)
        return tuple(0 if length == self.cooldowns[0] else length for length in sorted(self.cooldowns))

    @property
    def cooldown_labels(self) -> Literal["exact", "sampled"]:
        """The labels of the cooldown: the exact conditionals, where they are known and fast."""
        return "exact" if self.name in ("pcfg", "hmm") else "sampled"

    def steps_before_cooldown(self, size: str) -> tuple[int, ...]:
        """Return the steps of a size, or of an arm from scratch, after which a usual cooldown branches off."""
        if not self.cooldowns:
            return ()
        return self.watched if size in (self.main, self.followed) else tuple(sorted({self.start, self.last}))

    @property
    def expands_cooled(self) -> bool:
        """Whether sizes are expanded after a cooldown; those of Table 4 are trained only to be expanded."""
        return bool(self.cooldowns and not self.expanded)

    @property
    def largest(self) -> str:
        """The size that others are expanded into."""
        return list(self.expanded or self.sizes)[-1]

    # --- what is measured --------------------------------------------------------------------------------------------

    @property
    def traces(self) -> tuple[str, ...]:
        """The trace and, of transformers, the minimal trace."""
        is_lstm = self.sizes[self.main].architecture == "lstm"
        return ("trace",) if is_lstm else ("trace", "minimal-trace")

    @property
    def measures(self) -> tuple[str, ...]:
        """What is measured of every watched checkpoint."""
        gap = ("generalization-gap",) if self.name == "text" else ()
        return ("loss", *gap, *self.traces, *self.tasks.values())

    def of_tasks(self, kind: str, number: str = "") -> tuple[str, ...]:
        """Return the measure of each task of another kind than `probe`, such as `few-shot`."""
        return tuple(f"{kind}-{key.removeprefix('probe-')}{number}" for key in self.tasks.values())

    @property
    def projected_probes(self) -> tuple[str, ...]:
        """The probes on features that are projected to one width for all sizes."""
        return self.of_tasks("projected", f"-{self.projected}") if self.projected else ()

    @property
    def when_expanded(self) -> tuple[str, ...]:
        """What is measured of models after their expansion into the largest."""
        if not self.shown.expanded:
            return ()
        minimal = () if self.expanded else (f"minimal-trace-in-{self.largest}",)
        return (*(f"trace-in-{self.largest}-{scale}" for scale in ("paper", "exact")), *minimal)

    @property
    def size_measures(self) -> tuple[str, ...]:
        """What is also measured at the end of every size and of its cooldowns."""
        return (*self.projected_probes, *(() if self.expanded else self.when_expanded))

    @property
    def few_shot(self) -> tuple[str, ...]:
        """The probes on few examples."""
        return self.of_tasks("few-shot", "-100") if self.name == "pcfg" and self.flatness else ()

    @property
    def arm_measures(self) -> tuple[str, ...]:
        """What is also measured at the end of the main model's cooldowns and of its arms."""
        return (*self.few_shot, *self.flatness, "features") if self.flatness else ()

    @property
    def ranked(self) -> list[str]:
        """The measures of flatness by which models are ranked."""
        return [key for key in FLATNESS if key in (*self.measures, *self.arm_measures)]

    @property
    def look_up(self) -> str:
        """The baseline with the look-up table as features whose probe is that of the models."""
        return "standardized-lookup" if self.settings.get("probe_standardize", True) else "raw-lookup"

    # --- the runs ----------------------------------------------------------------------------------------------------

    def runs(self, unit: Unit) -> dict[str, Experiment]:
        """Return the runs of a language and seed by the names of their arms, and what is measured of each."""
        runs: dict[str, Experiment] = {}
        for size, model in self.sizes.items():
            runs |= self._of_size(unit, size, model)
        for size, model in self.expanded.items():
            if size not in runs:
                about: Any = {"shown_in": self.shown.expanded, "more": self._inside(unit, size)}
                runs[size] = self._run(unit, self._config(unit, model), size, (self.last,), **about)
        for name, arm in self.arms.items():
            if arm.stages:
                runs[name] = self._continued(unit, arm)
                for step in arm.watched if self.cooldowns else ():
                    config: Any = runs[name].config
                    config = dataclasses.replace(config, stages=())
                    runs[cooldown_run(name, step)] = self._cooldown(unit, name, step, config, arm.title, self.few_shot)
                continue
            config = self._config(unit, **{"model": self.sizes[self.main], **arm.changes})
            runs[name] = self._run(unit, config, arm.title, self.watched, shown_in=arm.shown_in)
            # one cooldown starts at the step from which the control's starts: both have then trained equally long
            for step in self.steps_before_cooldown(name):
                runs[cooldown_run(name, step)] = self._cooldown(unit, name, step, config, arm.title, self.arm_measures)
        return runs

    def _config(self, unit: Unit, model: ModelConfig, **changes: Any) -> TrainConfig:
        fields = {"steps": self.last, "checkpoints": self.watched[:-1], **self.common, **changes}
        return TrainConfig(language=unit.language, model=model, seed=unit.seed, **fields)

    def _of_size(self, unit: Unit, size: str, model: ModelConfig) -> dict[str, Experiment]:
        """Return a size with its cooldowns."""
        is_main, shown = size == self.main, self.shown
        has_baselines = is_main and bool(shown.baselines)
        shown_in = (
            *shown.sizes,
            *(shown.longer if size == (self.followed or self.main) else ()),
            *(shown.main if is_main else ()),
            *(shown.expanded if size in self.expanded or self.expands_cooled else ()),
            *(shown.baselines if is_main else ()),
        )
        more, config = self._inside(unit, size), self._config(unit, model)
        if has_baselines:
            # probes on tables need no model, but an evaluation belongs to a checkpoint: the untrained one
            config = dataclasses.replace(config, checkpoints=(0, *config.checkpoints))
            tables = [each for kind in BASELINES for each in self.of_tasks(kind)]
            more = (self._measurement(unit, tables, (0,), "measure the baselines of", model), *more)
        about: Any = {"shown_in": tuple(dict.fromkeys(shown_in)), "ends": self.size_measures, "more": more}
        runs = {size: self._run(unit, config, size, self.watched, **about)}
        ends = (*self.size_measures, *(self.arm_measures if is_main else ()))
        cooldowns = [
            *((step, 0) for step in self.steps_before_cooldown(size)),
            *((self.start, length) for length in self.cooldowns[1:]),
        ]
        for step, length in cooldowns:
            runs[cooldown_run(size, step, length)] = self._cooldown(unit, size, step, config, size, ends, length)
        return runs

    def _inside(self, unit: Unit, size: str) -> tuple[Measurement, ...]:
        """Return what is measured of a size inside the largest of Table 4, at that one's cost."""
        if size not in self.expanded:
            return ()
        name, model = f"measure inside {self.largest} of", self.expanded[self.largest]
        return (self._measurement(unit, self.when_expanded, (self.last,), name, model),)

    def _continued(self, unit: Unit, arm: Arm) -> Experiment:
        """Return an arm that continues the main model; its last stage is the cooldown, if there is one."""
        cooldown = [
            StageConfig(steps=length, labels=self.cooldown_labels, optimizer=adamw(self.cooldown_rate))
            for length in self.cooldowns[:1]
        ]
        stages = (*arm.stages, *cooldown)
        steps = sum(stage.steps for stage in stages)
        config = self._config(unit, self.sizes[self.main], steps=steps, stages=stages, checkpoints=arm.watched)
        config = continued(unit, config, f"{self.main}/checkpoints/step-{self.start}")
        about: Any = {"shown_in": arm.shown_in, "after": (unit.run(self.main),), "ends": self.arm_measures}
        # before the cooldown, if there is one, and at the end; without cooldowns, at the watched steps
        watched = () if self.cooldowns else arm.watched
        return self._run(unit, config, arm.title, (*watched, *config.stage_ends()), **about)

    def _cooldown(
        self, unit: Unit, arm: str, step: int, config: TrainConfig, group: str, ends: tuple[str, ...], length: int = 0
    ) -> Experiment:
        cooldown = dataclasses.replace(
            config,
            steps=length or self.cooldowns[0],
            checkpoints=(),
            objective=dataclasses.replace(config.objective, labels=self.cooldown_labels),
            optimizer=adamw(self.cooldown_rate),
        )
        cooldown = continued(unit, cooldown, f"{arm}/checkpoints/step-{step}")
        if config.seed != unit.seed:  # after an arm that goes on from the main model: other sentences than that arm's
            cooldown = dataclasses.replace(cooldown, seed=config.seed + AGAIN)
        shown = [each for each in self.shown.sizes if each == FIGURE_1]
        if arm in self.sizes and step == self.start and self.expands_cooled:
            shown += self.shown.expanded
        about: Any = {"shown_in": tuple(shown), "after": (unit.run(arm),), "ends": ends}
        return self._run(unit, cooldown, group, (cooldown.steps,), **about)

    def _run(
        self,
        unit: Unit,
        config: TrainConfig,
        group: str,
        steps: Sequence[int],
        *,
        ends: tuple[str, ...] = (),
        more: tuple[Measurement, ...] = (),
        **about: Any,
    ) -> Experiment:
        """Return a run that is measured at these steps, and at its end by more measures."""
        model, needs, expected = config.model, self._needs(config.model), None
        if self.tokens is not None:
            costs = Costs(model, self.tokens, needs)
            micro, processes = costs.micro_batch_size(config.batch_size), needs.processes
            config = dataclasses.replace(config, micro_batch_size=micro if micro * processes < config.batch_size else 0)
            expected = costs.training(config)
        # one unit of work instead of two, which would load the same checkpoint
        if tuple(steps) == (config.steps,):
            parts = [self._measurement(unit, (*self.measures, *ends), steps, "measure", model)]
        else:
            parts = [self._measurement(unit, self.measures, steps, "measure", model)]
            if ends:
                parts.append(self._measurement(unit, ends, (config.steps,), "measure the end of", model))
        return Experiment(
            config=config, measurements=(*parts, *more), group=group, needs=needs, expected=expected, **about
        )

    def _measurement(
        self, unit: Unit, measures: Iterable[str], steps: Sequence[int], name: str, model: ModelConfig
    ) -> Measurement:
        # other examples than the adversary and the helper train on, and the same for all seeds of a language
        settings = dict(self.settings)
        if self.when_expanded and not self.expanded:
            largest = self.sizes[self.largest]
            settings |= {"expanded_layers": largest.layers, "expanded_heads": largest.heads}
        settings["seed"] = unit.seed - unit.seed % 100 + MEASURED
        # only training can use several processes
        needs, expected = dataclasses.replace(self._needs(model), processes=1), None
        measures, steps = tuple(dict.fromkeys(measures)), tuple(dict.fromkeys(steps))
        if self.tokens is not None:
            expected = Costs(model, self.tokens, needs).measuring(measures, settings, checkpoints=len(steps))
        return Measurement(measures=measures, steps=steps, settings=settings, name=name, needs=needs, expected=expected)

    def _needs(self, model: ModelConfig) -> Resources:
        shape = MODELS.load(model.architecture).shape(model)
        width = getattr(shape, "d_model", None) or shape.hidden
        return [needs for least, needs in self.needs if width >= least][-1]

    def with_seed_offset(self, offset: int) -> Self:
        """Return the dataset with other languages and seeds."""
        move = OFFSET * offset

        def other(language: Any) -> Any:
            if isinstance(language, WithSpecialTokensConfig):
                return dataclasses.replace(language, language=other(language.language))
            # a text has no seed: it is repeated with other seeds of training alone
            return dataclasses.replace(language, seed=language.seed + move) if hasattr(language, "seed") else language

        languages = tuple(map(other, self.languages))
        teacher = self.teacher and dataclasses.replace(self.teacher, seed=self.teacher.seed + move)
        return dataclasses.replace(self, languages=languages, teacher=teacher, offset=move)


@dataclass(frozen=True, kw_only=True)
class Reproduction(Design):
    """A scale of the study."""

    datasets: tuple[Dataset, ...]

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study on other grammars and other hidden Markov models, with other seeds."""
        return dataclasses.replace(self, datasets=tuple(each.with_seed_offset(offset) for each in self.datasets))

    def dataset(self, name: str) -> Dataset | None:
        """Return the dataset of a name, if the scale has it."""
        return next((each for each in self.datasets if each.name == name), None)

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every run of every dataset; a language is a block of the study."""
        runs: dict[str, Experiment] = {}
        block = 0
        for dataset in self.datasets:
            first: tuple[str, ...] = ()
            if dataset.teacher is not None:
                first = (f"{dataset.name}-{TEACHER}",)
                runs[first[0]] = Experiment(config=dataset.teacher, measurements=(), block=block)
            for unit in dataset.units:
                for arm, run in dataset.runs(unit).items():
                    runs[unit.run(arm)] = dataclasses.replace(run, block=block + unit.block, after=(*first, *run.after))
            block += len(dataset.languages)
        return runs


# --- what it costs ---------------------------------------------------------------------------------------------------

# Time, memory and disk space of models of the paper's sizes, before they are tried. These are rough: they may be off
# by a factor of two. Training takes 6 floating-point operations per parameter and token (Kaplan et al., 2020,
# section 2.1) and 12 L d T per token for attention, at an assumed fraction of a GPU's peak. Activations take
# 34 d + 5 h T bytes per token and layer in 16 bits (Korthikanti et al., 2022, section 4).
PEAK = 989e12  # floating-point operations per second of one NVIDIA H100 in bfloat16, dense
UTILIZATION, LSTM_UTILIZATION = 0.4, 0.1  # of a model at least WIDE; narrower ones in proportion to their width
WIDE = 1024
BYTES = 16  # of a parameter's value, gradient and AdamW's two moments, in float32
MICRO_BATCH_BYTES = 20 * 2**30  # for the activations of a micro-batch
STEP_SECONDS = 0.01  # of a step at least: drawing its sentences, starting its kernels
EXAMPLES = {"qnli": 104_743 + 5_463, "sst2": 67_349 + 872, "rte": 2_490 + 277}  # of GLUE, to train on and to test on
OVERHEAD_SECONDS = 60.0  # of a measure: loading, exact conditionals on the CPU


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What costs depend on besides the model."""

    vocab_size: int  # ids that the model knows
    length: int  # the most tokens in a sentence
    predicted: float = 1.0  # predicted tokens in a sentence
    truth: float = 0.0  # floating-point operations of one exact conditional; 0: a small part of the rest


class Costs:
    """The costs of a model, with what it needs while it runs.

    Example:
        >>> from isoloss.paper.reproduction.design import Costs, Tokens
        >>> from isoloss.run_config import ModelConfig
        >>> Costs(ModelConfig(size="d1024"), Tokens(vocab_size=30_522, length=128)).parameters  # with the embedding
        234011450
    """

    def __init__(self, model: ModelConfig, tokens: Tokens, needs: Resources | None = None) -> None:
        self.tokens, self.needs = tokens, needs or Resources()
        architecture = MODELS.load(model.architecture)
        shape = architecture.shape(model)
        is_lstm = isinstance(shape, LSTMShape)
        width = shape.hidden * shape.directions if is_lstm else shape.d_model
        self.parameters: int = architecture.num_parameters(shape, tokens.vocab_size, tokens.length)

        # of one sentence: all tokens through the layers, the predicted ones through the decoder. The embeddings of
        # tokens and positions are looked up, not multiplied by
        layers = self.parameters - width * (tokens.vocab_size + tokens.length)
        # queries by keys, then weights by values: 2 d T each for a token
        attention = 0 if is_lstm else 4 * shape.num_layers * width * tokens.length
        decoder = tokens.predicted * 2 * width * tokens.vocab_size
        self._forward_flops: float = tokens.length * (2 * layers + attention) + decoder
        utilization = LSTM_UTILIZATION if is_lstm else UTILIZATION
        self._flops_per_second: float = PEAK * utilization * min(1.0, width / WIDE) * max(1.0, self.needs.all_gpus)

        # of one sentence in 16 bits, and in float32 the logits of its predicted tokens with their gradients
        activations = shape.num_layers * (34 * width + 5 * (0 if is_lstm else shape.num_heads) * tokens.length)
        self._activation_bytes: float = tokens.length * activations + tokens.predicted * 8 * tokens.vocab_size

    def micro_batch_size(self, batch_size: int) -> int:
        """Return how many sentences a process computes on at once: the most, by halving, that fit."""
        size = batch_size // self.needs.processes
        while size > 1 and size * self._activation_bytes > MICRO_BATCH_BYTES:
            size //= 2
        return size

    def training(self, config: TrainConfig) -> Expected:
        """Return what a run of the model takes."""
        # each of SAM's two passes takes half of the batch
        passes = 1.2 if config.algorithm.kind == "adversarial" else 1.0
        # a backward pass is twice a forward pass: gradients by inputs and by weights
        flops = 3 * self._forward_flops * config.batch_size * config.steps * passes
        activations = self.micro_batch_size(config.batch_size) * self._activation_bytes
        return Expected(
            seconds=max(flops / self._flops_per_second, config.steps * STEP_SECONDS),
            memory=round(4 * self.parameters + 4 * 2**30),
            gpu_memory=round(BYTES * self.parameters + activations),
            # the last checkpoint has AdamW's two moments as well
            disk=4 * self.parameters * (len({*config.checkpoints, config.steps}) + 2),
        )

    def measuring(self, measures: Sequence[str], settings: Mapping[str, Any], *, checkpoints: int) -> Expected:
        """Return what measuring some checkpoints of one run takes."""
        examples = {name: num_examples(name, settings) for name in measures}
        forward = settings["loss_sentences"] + sum(examples.values())
        # for the paper's trace one pass for each of 50 sampled labels (appendix B.1) of each sequence; 5 seeds of 10
        # epochs of fine-tuning
        backward = settings["num_sequences"] * (51 if settings.get("trace_method") == "paper" else 2)
        backward += sum(50 * count for name, count in examples.items() if name.startswith("finetune-"))
        flops = self._forward_flops * (forward + 3 * backward)
        seconds = flops / self._flops_per_second + OVERHEAD_SECONDS * len(measures)
        # the conditionals are of the sentences alone, so one evaluation computes them for all checkpoints
        conditionals = settings["loss_sentences"] if "loss" in measures else 0
        return Expected(
            seconds=checkpoints * seconds + conditionals * self.tokens.truth / (PEAK * UTILIZATION),
            memory=round(4 * self.parameters + 8 * 2**30),
            gpu_memory=round(8 * self.parameters + MICRO_BATCH_BYTES),
            disk=checkpoints * len(measures) * 2**17,
        )


def num_examples(measure: str, settings: Mapping[str, Any]) -> int:
    """Return how many examples the measure of a task reads; 0 of another measure.

    Example:
        >>> from isoloss.paper.reproduction.design import num_examples
        >>> num_examples("finetune-rte", {"num_train": "all", "num_test": "all"})
        2767
    """
    kind, _, task = measure.partition("-")
    if kind not in ("probe", "projected", "finetune"):
        return 0
    wanted = settings["num_train"] + settings["num_test"] if settings["num_train"] != "all" else math.inf
    return int(min(EXAMPLES.get(task, math.inf), wanted))
