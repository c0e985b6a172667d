"""The plan of the study: which models are pre-trained, what is measured on which checkpoint, at each scale."""

from __future__ import annotations

from dataclasses import dataclass

from isoloss.evaluation.config import EvalConfig
from isoloss.languages.config import LAPTOP_PCFG, PCFGConfig
from isoloss.run_config import ModelConfig, OptimizerConfig, TrainConfig
from isoloss.studies.design import Design, Experiment, Measurement, choose, steps_of

NAME = "same-loss"
EXPANSIONS = ("paper", "balanced", "exact")  # all values of isoloss expand --scale


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the study is.

    Attributes:
        text: What it is for and how long it takes.
        language: The grammar.
        sizes: Model sizes, ascending; the last is the main one, which is watched over time and continued with SGD.
        adamw: AdamW's optimizer settings, the paper's but for the warm-up (appendix A.5).
        steps: AdamW steps.
        watched: Steps at which the main run is measured, besides the last.
        batch_size: Sentences in an AdamW step.
        sgd: SGD's settings; its warm-up is 12 % of its steps (appendix B.2).
        sgd_steps: SGD steps, from the last AdamW checkpoint.
        sgd_watched: Steps at which they are measured, besides the last.
        sgd_batch_size: Sentences in an SGD step.
        tasks: Downstream tasks.
        evaluation: How much a checkpoint is measured on.
    """

    text: str
    language: PCFGConfig
    sizes: tuple[str, ...]
    adamw: OptimizerConfig
    steps: int
    watched: tuple[int, ...]
    batch_size: int
    sgd: OptimizerConfig
    sgd_steps: int
    sgd_watched: tuple[int, ...]
    sgd_batch_size: int
    tasks: tuple[str, ...]
    evaluation: EvalConfig


def _sgd(steps: int, learning_rate: float) -> OptimizerConfig:
    return OptimizerConfig(name="sgd", learning_rate=learning_rate, warmup_steps=round(0.12 * steps), weight_decay=0.0)


SCALES = {
    "laptop": Scale(
        text="about five minutes on two cores",
        language=LAPTOP_PCFG,
        sizes=("d16", "d32", "d64"),
        adamw=OptimizerConfig(warmup_steps=400),
        steps=16_000,
        watched=(500, 1_000, 2_000, 4_000, 8_000),
        batch_size=128,
        sgd=_sgd(8_000, 0.4),
        sgd_steps=8_000,
        sgd_watched=(1_000, 2_000, 4_000),
        sgd_batch_size=128,
        tasks=("root", "prefix-4"),
        evaluation=EvalConfig(),
    ),
    "smoke": Scale(
        text="a minute on two cores: every part runs, no result means anything",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        sizes=("d16", "d32"),
        adamw=OptimizerConfig(warmup_steps=20),
        steps=300,
        watched=(100,),
        batch_size=32,
        sgd=_sgd(300, 0.2),
        sgd_steps=300,
        sgd_watched=(100,),
        sgd_batch_size=16,
        tasks=("root", "prefix-2"),
        evaluation=EvalConfig(loss_sentences=256, trace_sentences=64, probe_train=256, probe_test=256, probe_epochs=10),
    ),
}


def scale_of(name: str) -> Scale:
    """Return the scale called `name`; an unknown name is an error that lists them."""
    return choose(SCALES, name, study=NAME)


def design(scale_name: str) -> Design:
    """Return all that is trained and measured at a scale."""
    return Design(NAME, scale_name, experiments(scale_of(scale_name)))


def main_run(scale: Scale) -> str:
    """The name of the AdamW run that is watched over time."""
    return adamw_run(scale.sizes[-1])


def adamw_run(size: str) -> str:
    """The name of the AdamW run of a size."""
    return f"adamw-{size}"


def expanded_trace(scale: Scale, way: str) -> str:
    """The measure of the trace of a model expanded into the largest size's architecture, by one of `EXPANSIONS`."""
    return f"trace-in-{scale.sizes[-1]}-{way}"


def sgd_run(scale: Scale) -> str:
    """The name of its continuation with SGD."""
    return f"sgd-{scale.sizes[-1]}"


def experiments(scale: Scale) -> dict[str, Experiment]:
    """Return each run by its name: AdamW at every size, and SGD on from the main one."""
    runs = {
        adamw_run(size): TrainConfig(
            language=scale.language,
            model=ModelConfig(size=size, dropout=0.0),
            optimizer=scale.adamw,
            steps=scale.steps,
            batch_size=scale.batch_size,
            checkpoints=scale.watched,
            device="cpu",
            threads=1,
        )
        for size in scale.sizes
    }
    runs[sgd_run(scale)] = TrainConfig(
        language=scale.language,
        model=ModelConfig(size=scale.sizes[-1], dropout=0.0),
        optimizer=scale.sgd,
        steps=scale.sgd_steps,
        batch_size=scale.sgd_batch_size,
        checkpoints=scale.sgd_watched,
        initial=f"../{main_run(scale)}/checkpoints/step-{scale.steps}",
        seed=1,
        device="cpu",
        threads=1,
    )
    return {name: _experiment(scale, name, config) for name, config in runs.items()}


def _experiment(scale: Scale, name: str, config: TrainConfig) -> Experiment:
    measures = ("loss", "trace", *(f"probe-{task}" for task in scale.tasks))
    parts = [Measurement(measures=measures, steps=steps_of(config), settings=scale.evaluation)]
    if name == main_run(scale):  # once: the look-up table is a function of the language alone
        parts.append(
            Measurement(
                measures=tuple(f"lookup-{task}" for task in scale.tasks),
                steps=(config.steps,),
                settings=scale.evaluation,
                verb="look-up table for",
            )
        )
    elif name != sgd_run(scale):
        parts.append(
            Measurement(
                measures=tuple(expanded_trace(scale, way) for way in EXPANSIONS),
                steps=(config.steps,),
                settings=scale.evaluation,
                verb="expanded trace of",
            )
        )
    after = (main_run(scale),) if name == sgd_run(scale) else ()
    return Experiment(config=config, measurements=tuple(parts), after=after)
