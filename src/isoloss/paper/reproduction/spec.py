"""What the study trains and measures: a dataset with its sizes and arms becomes runs. The scales give the numbers.

They are in `isoloss.paper.reproduction.cpu_scales` and `isoloss.paper.reproduction.gpu_scales`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from isoloss.config import LanguageConfig
from isoloss.lab.languages.config import WithSpecialTokensConfig
from isoloss.lab.training.algorithms.config import SAMConfig
from isoloss.paper.design import MEASURED, OFFSET, Design, Unit, adamw, continued
from isoloss.paper.reproduction import costs
from isoloss.paper.reproduction.costs import Tokens
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies import Experiment, Measurement
from isoloss.studies.plan import Resources

FIGURE_1 = "figure 1"  # which on the page shows cooldowns too
SGD_SAMPLED, SGD_EXACT = "sgd-sampled", "sgd-exact"
# baselines of the probe without a model, and what they are called
BASELINES = {
    "raw-lookup": "Look-up table, raw",
    "standardized-lookup": "Look-up table, standardized",
    "log-lookup": "Look-up table, logarithms",
    "one-hot": "One-hot tokens",
}
# flatness by every measure that is one number
FLATNESS = (
    *("trace", "minimal-trace", "empirical-fisher", "hessian-trace", "weighted-trace", "fisher-rao"),
    *("relative-flatness", "largest-eigenvalue", "sam-sharpness", "adaptive-sharpness", "noise-sharpness"),
    "squared-norm",
)
SGD_SHOWN = ("figure 4", "figure 10")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant of the main model.

    Attributes:
        title: What it is called in figures and tables.
        changes: Fields of `TrainConfig` that differ from the main model's, which is trained from scratch.
        stages: Instead, what follows the step of the main model from which arms branch off.
        watched: Steps that are measured besides the main model's or, for an arm of stages, besides the last. Counted
            from the start of the arm.
        shown_in: The figures and tables of the paper that show it.
    """

    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[StageConfig, ...] = ()
    watched: tuple[int, ...] = ()
    shown_in: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The figures and tables of the paper that show a dataset's runs, by what the runs have in common."""

    sizes: tuple[str, ...] = ()  # every size
    longer: tuple[str, ...] = ()  # the model whose steps are followed
    expanded: tuple[str, ...] = ()  # sizes that are expanded into one
    main: tuple[str, ...] = ()  # the model that the arms are compared with
    baselines: tuple[str, ...] = ()  # probes without a model, such as on the look-up table


@dataclass(frozen=True, kw_only=True)
class Replicate(Unit):
    """A language of a dataset with a pre-training seed."""

    dataset: str
    index: int  # of the seed


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One of the paper's datasets: its languages, models, tasks, and what is trained and measured.

    Attributes:
        name: E.g. `pcfg`.
        title: What the page calls it.
        languages: Its languages, e.g. grammars; errors are over them where there are several.
        teacher: The run that is trained first, as `NAME-teacher`: the causal model whose checkpoint is the language.
        seeds: Pre-training seeds for each.
        offset: Of a repetition with other seeds; 0: the study itself.
        tasks: The measure of each downstream task, by the paper's name of the task.
        common: Fields of `TrainConfig` that all runs share, other than the language, the model and the seed.
        sizes: The models of figure 3 and its like by name, ascending.
        expanded: Models that are compared inside the last of them, the largest (Table 4); some may be `sizes` too.
        main: The size that is followed over its steps and that the arms are compared with.
        followed: The size of figure 2, where it is another one.
        watched: The measured steps; the last is the end of training.
        branch: The watched step of the main model that arms continue from; 0: its last.
        cooldown_steps: Steps of AdamW with a learning rate that decays to 0, after the last step of every size and arm,
            and after each watched step of the main size, in a run of its own: they bring models to about the same loss.
            0: there are none, as in the paper.
        other_cooldowns: Other lengths of the cooldown after `branch`, for every size: together with `cooldown_steps`,
            they give losses that bracket the losses of the other models.
        cooldown_labels: The labels of the cooldown: the exact conditionals, where they are known, or sampled tokens.
        cooldown_rate: Its highest learning rate.
        band: Models whose KL differs from the control's by at most this fraction of it count as having its loss. The
            paper's models of one loss have losses of 3.204 to 3.208 and an entropy of 3.196: a KL of 0.010 ± 20 %.
        arms: Variants of the main model, by name.
        measures: What is measured of every watched checkpoint.
        size_measures: What is also measured at the end of every size and of its cooldowns.
        arm_measures: What is also measured at the end of the main model's cooldowns and of its arms.
        expanded_measures: What is also measured of the models in `expanded` at their last step.
        settings: Settings of the measures.
        shown: The paper's figures and tables.
        needs: What training and measuring need: of the pairs of a width and needs, the last whose width the model has.
        tokens: What the expected costs are computed from; None: they are not.
    """

    name: str
    title: str
    languages: tuple[LanguageConfig, ...]
    teacher: TrainConfig | None = None
    seeds: int = 1
    offset: int = 0
    tasks: Mapping[str, str]
    common: Mapping[str, Any]
    sizes: Mapping[str, ModelConfig]
    expanded: Mapping[str, ModelConfig] = field(default_factory=dict)
    main: str
    followed: str = ""
    watched: tuple[int, ...]
    branch: int = 0
    cooldown_steps: int = 0
    other_cooldowns: tuple[int, ...] = ()
    cooldown_labels: Literal["exact", "sampled"] = "exact"
    cooldown_rate: float = 3e-3
    band: float = 0.2
    arms: Mapping[str, Arm] = field(default_factory=dict)
    measures: tuple[str, ...]
    size_measures: tuple[str, ...] = ()
    arm_measures: tuple[str, ...] = ()
    expanded_measures: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    shown: Shown = field(default_factory=Shown)
    needs: tuple[tuple[int, Resources], ...] = ((0, Resources()),)
    tokens: Tokens | None = None

    @property
    def replicates(self) -> tuple[Replicate, ...]:
        """Every language with every seed."""
        # a text has no seed: its place stands for it
        numbers = [int(getattr(each, "seed", place + self.offset)) for place, each in enumerate(self.languages)]
        return tuple(
            Replicate(
                prefix=f"{self.name}-{number}-seed-{index}",
                cluster=f"{self.name} {number}",
                language=language,
                seed=100 * number + index,
                block=block,
                dataset=self.name,
                index=index,
            )
            for block, (number, language) in enumerate(zip(numbers, self.languages, strict=True))
            for index in range(self.seeds)
        )

    @property
    def last(self) -> int:
        """The last step of training."""
        return self.watched[-1]

    @property
    def start(self) -> int:
        """The step of the main model that arms continue from."""
        return self.branch or self.last

    @property
    def control(self) -> str:
        """The run that others are compared with: the main model where arms branch off, after the usual cooldown."""
        return cooldown_run(self.main, self.start) if self.cooldown_steps else self.main

    @property
    def when_expanded(self) -> tuple[str, ...]:
        """What is measured of models after their expansion into the largest."""
        return (*self.expanded_measures, *(key for key in self.size_measures if "trace-in-" in key))

    @property
    def look_up(self) -> str:
        """The baseline with the look-up table as features whose probe is that of the models."""
        return "standardized-lookup" if self.settings.get("probe_standardize", True) else "raw-lookup"

    @property
    def few_shot(self) -> tuple[str, ...]:
        """The probes on few examples."""
        return tuple(key for key in self.arm_measures if key.startswith("few-shot-"))

    @property
    def expands_cooled(self) -> bool:
        """Whether sizes are expanded after a cooldown; not those of Table 4, which are so only for being expanded."""
        return bool(self.cooldown_steps and not self.expanded)

    @property
    def largest(self) -> str:
        """The size that others are expanded into."""
        return list(self.expanded or self.sizes)[-1]

    def steps_before_cooldown(self, size: str) -> tuple[int, ...]:
        """Return the steps of a size, or of an arm from scratch, after which a usual cooldown branches off."""
        if not self.cooldown_steps:
            return ()
        return self.watched if size == self.main else tuple(sorted({self.start, self.last}))

    @property
    def cooldown_lengths(self) -> tuple[int, ...]:
        """All lengths of the cooldown after `branch`, ascending; 0 stands for the usual one, as in `cooldown_run`."""
        # in the order of the KL after them, so that neighbors can enclose a loss (`compare.interpolated_control`)
        lengths = sorted((*self.other_cooldowns, self.cooldown_steps))
        return tuple(0 if length == self.cooldown_steps else length for length in lengths)


def paired_by(dataset: Dataset) -> str:
    """Return in words what two models that are compared have in common."""
    several = {"language": len(dataset.languages) > 1, "seed": dataset.seeds > 1}
    common = " and ".join(what for what, are in several.items() if are)
    return f"paired by {common}" if common else "of one run each"


def teacher_run(dataset: str) -> str:
    """Return the name of the run of a dataset's teacher."""
    return f"{dataset}-teacher"


def cooldown_run(arm: str, step: int, length: int = 0) -> str:
    """Return the name of the cooldown that follows a step of a run; of another length than all, if one is given."""
    return f"{arm}-{step}-cooldown{f'-{length}' if length else ''}"


@dataclass(frozen=True)
class _Runs:
    """The runs of one replicate, and what is measured of each."""

    dataset: Dataset
    replicate: Replicate

    def experiments(self) -> dict[str, Experiment]:
        """Return the runs by the names of their arms."""
        dataset = self.dataset
        runs: dict[str, Experiment] = {}
        for size, model in dataset.sizes.items():
            runs |= self._of_size(size, model)
        for size, model in dataset.expanded.items():
            if size not in runs:
                about: Any = {"shown_in": dataset.shown.expanded, "more": self._inside(size)}
                runs[size] = self._trained(self._config(model), size, steps=(dataset.last,), **about)
        for name, arm in dataset.arms.items():
            runs |= self._of_arm(name, arm)
        return runs

    def _config(self, model: ModelConfig, **changes: Any) -> TrainConfig:
        dataset = self.dataset
        fields = {"steps": dataset.last, "checkpoints": dataset.watched[:-1], **dataset.common, **changes}
        return TrainConfig(language=self.replicate.language, model=model, seed=self.replicate.seed, **fields)

    def _of_size(self, size: str, model: ModelConfig) -> dict[str, Experiment]:
        dataset = self.dataset
        shown_in = [*dataset.shown.sizes]
        if size == (dataset.followed or dataset.main):
            shown_in += dataset.shown.longer
        if size == dataset.main:
            shown_in += dataset.shown.main
        if size in dataset.expanded or dataset.expands_cooled:
            shown_in += dataset.shown.expanded
        tables: tuple[Measurement, ...] = ()
        config = self._config(model)
        if size == dataset.main and dataset.shown.baselines:
            shown_in += dataset.shown.baselines
            # probes on tables need no model, but an evaluation belongs to a checkpoint: the untrained one
            config = dataclasses.replace(config, checkpoints=(0, *config.checkpoints))
            features = [
                f"{kind}-{each.removeprefix('probe-')}" for kind in BASELINES for each in dataset.tasks.values()
            ]
            tables = (self._measurement(dict.fromkeys(features), (0,), "measure the baselines of", model),)
        shown, more = tuple(dict.fromkeys(shown_in)), (*tables, *self._inside(size))
        is_main = size == dataset.main
        ends = dataset.size_measures
        runs = {size: self._trained(config, size, steps=dataset.watched, shown_in=shown, ends=ends, more=more)}
        ends = (*ends, *(dataset.arm_measures if is_main else ()))
        for step in dataset.steps_before_cooldown(size):
            runs[cooldown_run(size, step)] = self._cooldown(size, step, config, size, ends=ends)
        for length in dataset.other_cooldowns:
            name = cooldown_run(size, dataset.start, length)
            runs[name] = self._cooldown(size, dataset.start, config, size, ends=ends, length=length)
        return runs

    def _inside(self, size: str) -> tuple[Measurement, ...]:
        """Return what is measured of a size inside the largest of Table 4, at that one's cost."""
        dataset = self.dataset
        if size not in dataset.expanded or not dataset.expanded_measures:
            return ()
        largest = list(dataset.expanded)[-1]
        wanted = dict.fromkeys(dataset.expanded_measures)
        return (self._measurement(wanted, (dataset.last,), f"measure inside {largest} of", dataset.expanded[largest]),)

    def _of_arm(self, name: str, arm: Arm) -> dict[str, Experiment]:
        """Return the run of an arm and, if it is trained from scratch, a cooldown after its last step."""
        dataset = self.dataset
        if arm.stages:
            return {name: self._continued(arm)}
        changes, steps = dict(arm.changes), (*arm.watched, *dataset.watched)
        config = self._config(changes.pop("model", dataset.sizes[dataset.main]), checkpoints=steps[:-1], **changes)
        runs = {name: self._trained(config, arm.title, steps=steps, shown_in=arm.shown_in)}
        # after the step from which the control's cooldown starts, too: as long as the control has trained
        for step in dataset.steps_before_cooldown(name):
            runs[cooldown_run(name, step)] = self._cooldown(name, step, config, arm.title, ends=dataset.arm_measures)
        return runs

    def _continued(self, arm: Arm) -> Experiment:
        """Return an arm that continues the main model; its last stage is the cooldown, if there is one."""
        dataset, start = self.dataset, self.replicate.run(self.dataset.main)
        stages = (*arm.stages, *([self._cooldown_stage()] if dataset.cooldown_steps else []))
        config = self._config(
            dataset.sizes[dataset.main],
            steps=sum(stage.steps for stage in stages),
            stages=stages,
            checkpoints=arm.watched,
        )
        config = continued(self.replicate, config, f"{dataset.main}/checkpoints/step-{dataset.start}")
        # before the cooldown, if there is one, and at the end
        steps = (*arm.watched, *config.stage_ends())
        about: Any = {"shown_in": arm.shown_in, "after": (start,), "ends": dataset.arm_measures}
        return self._trained(config, arm.title, steps=steps, **about)

    def _cooldown_stage(self) -> StageConfig:
        dataset = self.dataset
        return StageConfig(
            steps=dataset.cooldown_steps, labels=dataset.cooldown_labels, optimizer=adamw(self.dataset.cooldown_rate)
        )

    def _cooldown(
        self, arm: str, step: int, config: TrainConfig, group: str, *, ends: tuple[str, ...], length: int = 0
    ) -> Experiment:
        dataset, start = self.dataset, self.replicate.run(arm)
        cooldown = dataclasses.replace(
            config,
            steps=length or dataset.cooldown_steps,
            checkpoints=(),
            objective=dataclasses.replace(config.objective, labels=dataset.cooldown_labels),
            optimizer=adamw(dataset.cooldown_rate),
        )
        cooldown = continued(self.replicate, cooldown, f"{arm}/checkpoints/step-{step}")
        shown = [each for each in dataset.shown.sizes if each == FIGURE_1]
        if arm in dataset.sizes and step == dataset.start and dataset.expands_cooled:
            shown += dataset.shown.expanded
        steps, shown_in = (cooldown.steps,), tuple(shown)
        return self._trained(cooldown, group, steps=steps, shown_in=shown_in, after=(start,), ends=ends)

    def _trained(
        self,
        config: TrainConfig,
        group: str,
        *,
        steps: Sequence[int],
        shown_in: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
        ends: tuple[str, ...] = (),
        more: tuple[Measurement, ...] = (),
    ) -> Experiment:
        dataset, model = self.dataset, config.model
        steps, needs, expected = tuple(dict.fromkeys(steps)), self._needs(model, training=True), None
        if dataset.tokens is not None:
            processes = needs.processes
            micro = costs.micro_batch_size(model, dataset.tokens, config.batch_size, processes)
            config = dataclasses.replace(config, micro_batch_size=micro if micro * processes < config.batch_size else 0)
            expected = costs.training(config, dataset.tokens, needs, kept=len({*config.checkpoints, config.steps}))
        at_end, common = dict.fromkeys(ends), dict.fromkeys(dataset.measures)
        # one unit of work instead of two, which would load the same checkpoint
        if steps == (config.steps,):
            common, at_end = common | at_end, {}
        parts = [self._measurement(common, steps, "measure", model)]
        if at_end:
            parts.append(self._measurement(at_end, (config.steps,), "measure the end of", model))
        return Experiment(
            config=config,
            measurements=(*parts, *more),
            after=after,
            group=group,
            shown_in=shown_in,
            needs=needs,
            expected=expected,
        )

    def _measurement(
        self, measures: Mapping[str, None], steps: Sequence[int], name: str, model: ModelConfig
    ) -> Measurement:
        # drawn apart from what the adversary and the helper train on, and the same for all seeds of a language
        settings = {**self.dataset.settings, "seed": self.replicate.seed - self.replicate.index + MEASURED}
        needs, expected = self._needs(model, training=False), None
        if (tokens := self.dataset.tokens) is not None:
            examples = {name: costs.num_examples(name, settings) for name in measures}
            # backward passes: for the paper's trace one for each of 50 sampled labels (appendix B.1) of each sequence
            expected = costs.measuring(
                model,
                tokens,
                needs,
                checkpoints=len(steps),
                conditionals=settings["loss_sentences"] if "loss" in measures else 0,
                sentences=settings["loss_sentences"] + sum(examples.values()),
                backward=settings["num_sequences"] * (51 if settings.get("trace_method") == "paper" else 2)
                # 5 seeds of 10 epochs
                + sum(50 * count for name, count in examples.items() if name.startswith("finetune-")),
                measures=len(measures),
            )
        return Measurement(
            measures=tuple(measures), steps=tuple(steps), settings=settings, name=name, needs=needs, expected=expected
        )

    def _needs(self, model: ModelConfig, *, training: bool) -> Resources:
        shape = MODELS.load(model.architecture).shape(model)
        width = getattr(shape, "d_model", None) or shape.hidden
        needs = [needs for least, needs in self.dataset.needs if width >= least][-1]
        # only training can use several
        return needs if training else dataclasses.replace(needs, processes=1)


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


@dataclass(frozen=True, kw_only=True)
class Reproduction(Design):
    """A scale of the study."""

    datasets: tuple[Dataset, ...]

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study on other grammars and other hidden Markov models, with other seeds."""
        return dataclasses.replace(self, datasets=tuple(_other_seeds(each, offset) for each in self.datasets))

    def dataset(self, name: str) -> Dataset | None:
        """Return the dataset of a name, if the scale has it."""
        return next((each for each in self.datasets if each.name == name), None)

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every run of every dataset; a language is a block of the study."""
        by_name: dict[str, Experiment] = {}
        block = 0
        for dataset in self.datasets:
            first: tuple[str, ...] = ()
            if dataset.teacher is not None:
                first = (teacher_run(dataset.name),)
                by_name[first[0]] = Experiment(config=dataset.teacher, measurements=(), block=block)
            for replicate in dataset.replicates:
                for arm, experiment in _Runs(dataset, replicate).experiments().items():
                    place, after = block + replicate.block, (*first, *experiment.after)
                    by_name[replicate.run(arm)] = dataclasses.replace(experiment, block=place, after=after)
            block += len(dataset.languages)
        return by_name


def _other_seeds(dataset: Dataset, offset: int) -> Dataset:
    def other(language: Any) -> Any:
        if isinstance(language, WithSpecialTokensConfig):
            return dataclasses.replace(language, language=other(language.language))
        # a text has no seed: it is repeated with other seeds of training alone
        return dataclasses.replace(language, seed=language.seed + move) if hasattr(language, "seed") else language

    move = OFFSET * offset
    languages = tuple(map(other, dataset.languages))
    teacher = dataset.teacher and dataclasses.replace(dataset.teacher, seed=dataset.teacher.seed + move)
    return dataclasses.replace(dataset, languages=languages, teacher=teacher, offset=move)


def sgd_arms(steps: int, optimizer: OptimizerConfig, *, watched: tuple[int, ...]) -> dict[str, Arm]:
    """Return SGD without label noise, the control, and with it."""
    kinds: tuple[tuple[str, Literal["sampled", "exact"]], ...] = ((SGD_EXACT, "exact"), (SGD_SAMPLED, "sampled"))
    return {
        name: Arm(
            title=f"SGD ({labels} labels)",
            stages=(StageConfig(steps=steps, labels=labels, optimizer=optimizer),),
            watched=watched,
            shown_in=SGD_SHOWN,
        )
        for name, labels in kinds
    }


def without_regularization(changes: Mapping[str, Any]) -> dict[str, Arm]:
    """Return the arms of text, with and without SAM; `changes` take away dropout and weight decay."""
    shown_in = ("table 1", "table 2")
    sam = {**changes, "algorithm": SAMConfig()}
    return {
        "unregularized": Arm(title="Without dropout and weight decay", changes=changes, shown_in=shown_in),
        "sam": Arm(title="SAM, without dropout and weight decay", changes=sam, shown_in=shown_in),
    }
