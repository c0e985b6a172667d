"""The study: which models are pre-trained, what is measured of them, and which checkpoints its claims compare."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoloss.languages.config import LAPTOP_PCFG, PCFGConfig
from isoloss.run_config import ModelConfig, OptimizerConfig, TrainConfig
from isoloss.studies.claims import Contrast
from isoloss.studies.comparison import Checkpoint, Measured
from isoloss.studies.results import Results, SummaryTable, checkpoint_tables, common_measures
from isoloss.studies.spec import Experiment, Measurement, Study

EXPANSIONS = ("paper", "balanced", "exact")  # all values of isoloss expand --embedding-scale
SMOKE_LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
SMOKE_SETTINGS = {
    **{"loss_sentences": 256, "flatness_sentences": 64},
    **{"num_train": 256, "num_test": 256, "probe_epochs": 10},
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the study is."""

    description: str  # what it is for and how long it takes
    language: PCFGConfig  # the grammar
    # model sizes, ascending; the last is the main one, which is watched over time and continued with SGD
    sizes: tuple[str, ...]
    adamw: OptimizerConfig  # AdamW's optimizer settings, the paper's but for the warm-up (appendix A.5)
    steps: int  # AdamW steps
    watched: tuple[int, ...]  # steps at which the main run is measured, besides the last
    batch_size: int  # sentences in an AdamW step
    sgd: OptimizerConfig  # SGD's settings; its warm-up is 12 % of its steps (appendix B.2)
    sgd_steps: int  # SGD steps, from the last AdamW checkpoint
    sgd_watched: tuple[int, ...]  # steps at which they are measured, besides the last
    sgd_batch_size: int  # sentences in an SGD step
    tasks: tuple[str, ...]  # downstream tasks
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measures

    @property
    def main_run(self) -> str:
        """The AdamW run that is watched over time."""
        return adamw_run(self.sizes[-1])

    @property
    def sgd_run(self) -> str:
        """Its continuation with SGD."""
        return f"sgd-{self.sizes[-1]}"

    @property
    def expanded_traces(self) -> dict[str, str]:
        """By each of `EXPANSIONS`: the measure of a trace after expanding a model into the largest size."""
        return {scale: f"trace-in-{self.sizes[-1]}-{scale}" for scale in EXPANSIONS}

    @property
    def expanded_minimum(self) -> str:
        """The measure of the minimal trace after expanding a model into the largest size."""
        return f"minimal-trace-in-{self.sizes[-1]}"

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """AdamW at every size, and SGD on from the main run."""
        adamw = TrainConfig(
            language=self.language,
            optimizer=self.adamw,
            steps=self.steps,
            batch_size=self.batch_size,
            checkpoints=self.watched,
            device="cpu",
            threads=1,
        )
        models = {size: ModelConfig(size=size, dropout=0.0) for size in self.sizes}
        runs = {adamw_run(size): dataclasses.replace(adamw, model=model) for size, model in models.items()}
        runs[self.sgd_run] = dataclasses.replace(
            runs[self.main_run],
            optimizer=self.sgd,
            steps=self.sgd_steps,
            batch_size=self.sgd_batch_size,
            checkpoints=self.sgd_watched,
            init_from=f"../{self.main_run}/checkpoints/step-{self.steps}",
            seed=1,
        )
        return {name: self._experiment(name, config) for name, config in runs.items()}

    def _experiment(self, name: str, config: TrainConfig) -> Experiment:
        measures = ("loss", "trace", "minimal-trace", *(f"probe-{task}" for task in self.tasks))
        at_last = ["rescaling-control"]
        if name == self.main_run:  # once: the look-up table is a function of the language alone
            at_last += [f"lookup-{task}" for task in self.tasks]
        elif name != self.sgd_run:
            at_last += [*self.expanded_traces.values(), self.expanded_minimum]
        last = (config.steps,)
        return Experiment(
            config=config,
            measurements=(
                Measurement(measures=measures, settings=self.settings),
                Measurement(measures=tuple(at_last), steps=last, settings=self.settings, name="measure the last of"),
            ),
            after=(self.main_run,) if name == self.sgd_run else (),
            group="SGD from AdamW's last" if name == self.sgd_run else "AdamW",
        )


def adamw_run(size: str) -> str:
    """The name of the AdamW run of a size."""
    return f"adamw-{size}"


def sgd(steps: int, learning_rate: float) -> OptimizerConfig:
    """Return plain SGD with the paper's warm-up, 12 % of the steps (appendix B.2)."""
    return OptimizerConfig(name="sgd", learning_rate=learning_rate, warmup_steps=round(0.12 * steps), weight_decay=0.0)


SCALES = {
    "laptop": Scale(
        description="about five minutes on two cores",
        language=LAPTOP_PCFG,
        sizes=("d16", "d32", "d64"),
        adamw=OptimizerConfig(warmup_steps=400),
        steps=16_000,
        watched=(500, 1_000, 2_000, 4_000, 8_000),
        batch_size=128,
        sgd=sgd(8_000, 0.4),
        sgd_steps=8_000,
        sgd_watched=(1_000, 2_000, 4_000),
        sgd_batch_size=128,
        tasks=("root", "prefix-4"),
    ),
    "smoke": Scale(
        description="a minute on two cores: every part runs, no result means anything",
        language=SMOKE_LANGUAGE,
        sizes=("d16", "d32"),
        adamw=OptimizerConfig(warmup_steps=20),
        steps=300,
        watched=(100,),
        batch_size=32,
        sgd=sgd(300, 0.2),
        sgd_steps=300,
        sgd_watched=(100,),
        sgd_batch_size=16,
        tasks=("root", "prefix-2"),
        settings=SMOKE_SETTINGS,
    ),
}


def lookups(results: Results) -> dict[str, Measured]:
    """Return the accuracy of the look-up table on each task, by the key of the probe."""
    last = results.at(results.scale.main_run)
    return {f"probe-{task}": last[f"lookup-{task}"] for task in results.scale.tasks}


def sizes_expanded(results: Results) -> dict[str, Checkpoint]:
    """Return AdamW's last checkpoints by size, each with its trace in the largest size's architecture.

    The largest is in that architecture as it is.
    """
    scale: Scale = results.scale
    checkpoints = {size: results.at(adamw_run(size)) for size in scale.sizes}
    last = checkpoints[scale.sizes[-1]]
    own = dict.fromkeys(scale.expanded_traces.values(), last["trace"])
    minimum = {scale.expanded_minimum: last["minimal-trace"]}
    return {**checkpoints, scale.sizes[-1]: {**last, **own, **minimum}}


def measures(scale: Scale) -> Mapping[str, Mapping[str, str]]:
    """Return what can be measured of two models, by what claims.toml calls it."""
    expanded = {f"trace, scale {name}": key for name, key in scale.expanded_traces.items()}
    return {
        **common_measures(scale),
        "flatness in one architecture": {**expanded, "minimal-trace": scale.expanded_minimum},
    }


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them."""
    scale: Scale = results.scale
    earlier = scale.watched[-1]
    before, last = results.at(scale.main_run, earlier), results.at(scale.main_run)
    by_size = sizes_expanded(results)
    return {
        "sgd": [Contrast(names=("AdamW's last", "SGD's last"), pairs=[(last, results.at(scale.sgd_run))])],
        "longer": [Contrast(names=(f"step {earlier:,}", f"step {scale.steps:,}"), pairs=[(before, last)])],
        "larger": [
            Contrast(names=(small, large), pairs=[(by_size[small], by_size[large])], case=f"{small} to {large}")
            for small, large in itertools.pairwise(scale.sizes)
        ],
        "look-up table": [
            Contrast(
                names=("look-up table", "AdamW's last"),
                pairs=[(lookups(results), last)],
                where=f"The model's KL is {last['kl'].estimate}, the table's is 0.",
                at_same_loss=False,
            )
        ],
    }


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return every checkpoint, and the traces of the sizes in their own architectures and in the largest."""
    scale: Scale = results.scale
    rows = []
    for size, checkpoint in sizes_expanded(results).items():
        traces = {"raw, not comparable": checkpoint["trace"].estimate}
        for name, key in scale.expanded_traces.items():
            traces[f"in {scale.sizes[-1]}, scale {name}"] = checkpoint[key].estimate
        traces[f"minimal, in {scale.sizes[-1]}"] = checkpoint[scale.expanded_minimum].estimate
        rows.append(((size,), traces))
    title = f"traces of the sizes after {scale.steps:,} steps, value ± standard error"
    return *checkpoint_tables(results), SummaryTable("sizes", title, ("size",), rows, expansion_caption(results))


def expansion_caption(results: Results) -> str:
    """Return how the sizes' traces were brought into one architecture."""
    scale: Scale = results.scale
    traces = [one[key].estimate for one in sizes_expanded(results).values() for key in scale.expanded_traces.values()]
    differ = max(trace.details.get("logits_differ_by", 0.0) for trace in traces)
    return (
        "A trace is a sum over parameters. Models of different widths, each in its own architecture, have sums over "
        "different things: those traces are not comparable. To compare the sizes, each smaller model is expanded into "
        f"the architecture of {scale.sizes[-1]}, with its function unchanged: r copies of every unit side by side, r "
        "the ratio of the widths, and matrices divided by r (section 4 and appendix B.4 of the paper; isoloss expand "
        f"--embedding-scale). Its trace is measured there, on the same {traces[0].num_predictions:,} sentences with "
        f"the same Rademacher probes. The logits differ by at most {differ:.0e} of the largest. The function does not "
        "say what the copies of the embeddings are divided by, and the trace depends on it. Scale paper divides them "
        "by r, as the paper prints, and multiplies their part of the trace by r; balanced divides by the root of r and "
        "keeps it; exact divides by 1, and divides that part by r. All three are shown, and the claim is tested with "
        "each. The minimal trace is the same for all three, as they differ by an exact rescaling."
    )


STUDY = Study(
    name="same-loss",
    scales=SCALES,
    title="Same loss, different models",
    lead=(
        "Language models are compared by their pre-training loss, yet models of the same loss differ in what they "
        "transfer. This study trains small masked language models on sentences of a random grammar. Its true "
        "conditionals are known exactly, so the loss is measured as the KL divergence from the truth, and “the same "
        "loss” is a fact rather than an impression.",
        "One model is trained with AdamW and watched over time; plain SGD goes on from its last checkpoint; smaller "
        "models are trained alike. Each checkpoint gets its KL, the trace of the Fisher of its loss (its flatness: "
        "smaller is flatter), and linear probes for symbols of the grammar. Rescaling weights can change the trace "
        "without changing any prediction, so the minimal trace, its minimum over such rescalings, is reported "
        "beside it.",
    ),
    claims=Path(__file__).with_name("claims.toml"),
    contrasts=contrasts,
    measures=measures,
    tables=tables,
    page="isoloss.paper.same_loss.page:parts",
)
