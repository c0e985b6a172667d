"""The study `paper`: what its scales have of the paper's figures and tables, row by row."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from isoloss import config as configs
from isoloss.cli.main import main
from isoloss.lab.presets import PRESETS
from isoloss.paper.reproduction.design import Costs, Tokens
from isoloss.paper.reproduction.scales import POWER
from isoloss.paper.reproduction.study import STUDY
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig
from isoloss.statistics.power import pairs_for_power, sd_upper_bound
from isoloss.studies.folder import StudyFolder

# layers by d_model of the paper's Table 3 and Table 4; heads are 64 wide, and the feed-forward is four times d_model
TABLE_3 = {64: 1, 128: 4, 192: 5, 256: 6, 512: 8, 768: 12, 1024: 16, 1280: 20, 1536: 24}
TABLE_4 = {128: 4, 192: 5, 320: 6, 384: 7, 640: 12, 960: 16, 1920: 20}
LSTM_WIDTHS, LSTM_LAYERS = (128, 256, 512, 768, 1024), (4, 6, 8, 12, 16)
# by figure or table: the dataset, and how many runs show it
SHOWN = {
    "figure 1": {"pcfg": 9},
    "figure 2a": {"pcfg": 1},
    "figure 2b": {"generated": 1},
    "figure 2c": {"web": 1},
    "figure 3a": {"pcfg": 9},
    "figure 3b": {"hmm": 6},
    "figure 3c": {"generated": 9},
    "figure 4": {"pcfg": 2, "hmm": 2, "web": 1},
    "figure 5": {"pcfg": 7, "generated": 7},
    "figure 8": {"pcfg": 9, "hmm": 6, "generated": 9},
    "figure 9": {"pcfg": 9, "generated": 1},
    "figure 10": {"pcfg": 2, "hmm": 2},
    "table 1": {"pcfg": 3, "text": 3},
    "table 2": {"pcfg": 3, "text": 3},
}
HMM = Tokens(vocab_size=202, length=16)
GPU_SCALES = ("paper", "authors")  # with every row of the paper


def experiments(scale, dataset, figure="", *, cooldowns=False):
    """The runs of a dataset with its first seed, by the part of their name that says what they are.

    Without cooldowns, as the paper does not have them, or cooldowns alone.
    """
    return {
        name.partition("-seed-0-")[2]: one
        for name, one in STUDY.scale(scale).experiments.items()
        if re.match(rf"{dataset}\b.*-seed-0-", name)
        and ("cooldown" in name) == cooldowns
        and (not figure or figure in one.shown_in)
    }


def shape(experiment):
    """The shape of a run's model."""
    model = experiment.config.model
    return MODELS.load(model.architecture).shape(model)


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_every_figure_and_table_has_its_runs(scale):
    shown = {figure for one in STUDY.scale(scale).experiments.values() for figure in one.shown_in}
    datasets = ("pcfg", "hmm", "generated", "web", "text")
    found = {figure: {of: len(experiments(scale, of, figure)) for of in datasets} for figure in shown}
    assert {figure: {of: n for of, n in runs.items() if n} for figure, runs in found.items()} == SHOWN


@pytest.mark.parametrize("scale", GPU_SCALES)
@pytest.mark.parametrize(
    ("figures", "dataset", "rows"),
    [
        (("figure 1", "figure 3a", "figure 8", "figure 9"), "pcfg", TABLE_3),
        (("figure 3c", "figure 8"), "generated", TABLE_3),
        (("figure 5",), "pcfg", TABLE_4),
        (("figure 5",), "generated", TABLE_4),
    ],
)
def test_transformers_have_the_shapes_of_tables_3_and_4(scale, figures, dataset, rows):
    for figure in figures:
        shapes = [shape(one) for one in experiments(scale, dataset, figure).values()]
        assert sorted((one.d_model, one.num_heads, one.num_layers, one.intermediate) for one in shapes) == [
            (width, width // 64, layers, 4 * width) for width, layers in rows.items()
        ]


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_lstms_have_the_widths_and_layers_of_appendix_a4(scale):
    shapes = [shape(one) for one in experiments(scale, "hmm", "figure 3b").values()]
    pairs = [*zip(LSTM_WIDTHS, LSTM_LAYERS, strict=True), (1024, 8)]  # and the model of figure 4
    assert sorted((one.hidden, one.num_layers) for one in shapes) == sorted(pairs)
    assert {shape(one) for one in experiments(scale, "hmm", "figure 4").values()} == {
        one for one in shapes if (one.hidden, one.num_layers) == (1024, 8)
    }


@pytest.mark.parametrize(
    ("dataset", "figure", "millions"),
    [("pcfg", "figure 2a", 41), ("generated", "figure 2b", 235), ("pcfg", "table 1", 235), ("text", "table 1", 335)],
)
def test_models_have_the_parameters_that_the_text_gives(dataset, figure, millions):
    tokens = Tokens(vocab_size=30_522, length=128)  # as the paper counts: docs/errata.md
    for experiment in experiments("paper", dataset, figure).values():
        assert Costs(experiment.config.model, tokens).parameters / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_the_tables_have_their_algorithms(scale):
    pcfg = {name: one.config for name, one in experiments(scale, "pcfg", "table 1").items()}
    assert {name: (c.algorithm.kind, getattr(c.algorithm, "task", "")) for name, c in pcfg.items()} == {
        "d1024": ("gradient", ""),
        "adversary-A": ("adversarial", PRESETS[scale].tasks["A"]),
        "adversary": ("adversarial", PRESETS[scale].tasks["B"]),
    }
    lookup = f"raw-lookup-{PRESETS[scale].tasks['A']}"
    tables = [part for part in experiments(scale, "pcfg")["d1024"].measurements if lookup in part.measures]
    assert [part.steps for part in tables] == [(0,)]
    text = {name: one.config for name, one in experiments(scale, "text", "table 2").items()}
    assert {
        name: (c.model.dropout, c.optimizer.weight_decay, c.algorithm.kind, getattr(c.algorithm, "rho", None))
        for name, c in text.items()
    } == {
        "d1024-24-layers": (0.1, 0.01, "gradient", None),
        "unregularized": (0.0, 0.0, "gradient", None),
        "sam": (0.0, 0.0, "sam", 0.05),
    }
    for one in experiments(scale, "text", "table 2").values():
        assert {"finetune-qnli", "finetune-sst2", "finetune-rte", "trace"} <= set(one.measurements[0].measures)


def test_training_is_as_in_appendix_a5():
    for dataset, warmup, steps, sentences in (
        ("pcfg", 1_000, 30_000, 20_000_000),
        ("hmm", 1_000, 30_000, 10_000_000),
        ("generated", 1_000, 30_000, 0),  # fresh ones: fewer than the paper's 2e8 are seen
        ("web", 5_000, 1_400_000, 0),
    ):
        for name, experiment in experiments("paper", dataset).items():
            config, optimizer = experiment.config, experiment.config.optimizer
            assert config.num_sentences == sentences
            assert (config.batch_size, optimizer.betas, optimizer.schedule) == (4096, (0.9, 0.98), "constant")
            assert optimizer.num_warmup_steps(config.steps) == warmup
            assert (optimizer.learning_rate, optimizer.weight_decay, config.model.dropout) == (1e-3, 0.01, 0.1)
            if name.startswith("sgd"):
                stage, cooldown = config.stages
                assert (stage.steps, cooldown.steps) == (30_000, 2_000)
                assert (stage.optimizer.name, stage.optimizer.learning_rate) == ("sgd", 1e-3)
                assert stage.optimizer.num_warmup_steps(stage.steps) == 0.12 * stage.steps
            else:
                assert config.steps == steps
    assert experiments("paper", "web")["d384"].kept_steps == tuple(range(400_000, 1_400_001, 200_000))


def test_the_published_command_differs_as_its_readme_says():
    for name, experiment in experiments("authors", "pcfg").items():
        config, optimizer = experiment.config, experiment.config.optimizer
        assert config.model.architecture == "bert-pre-ln"
        assert config.language.kind == "framed"
        assert (config.num_sentences, config.masked_copies) == (20_000_000, 5)
        assert (config.objective.masking, config.objective.fraction) == ("fraction", 0.15)
        assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (5e-4, "linear", 3_333)
        assert config.steps == (32_000 if name.startswith("sgd") else 25_000)


@pytest.mark.parametrize("scale", list(STUDY.scales))
def test_every_plan_is_complete_and_its_configs_can_be_trained(scale, tmp_path):
    folder = StudyFolder(STUDY, tmp_path, scale)
    units = folder.plan()
    assert {unit.name for unit in units if unit.arguments[0] == "train"}
    for experiment in folder.scale.experiments.values():
        configs.check(experiment.config)
    if scale in GPU_SCALES:
        for unit in units:
            assert unit.needs.gpus >= 1
            assert min(dataclasses.astuple(unit.expected)) > 0


def test_claims_at_the_scale_of_the_paper_have_the_languages_and_seeds_that_they_need():
    for name, (number, effect, sd, pilot) in POWER.items():
        dataset = STUDY.scale("paper").dataset(name)
        assert number == len(dataset.units) == len({one.seed for one in dataset.units})
        # Holm's first step, for up to 130 tests
        assert pairs_for_power(effect, sd_upper_bound(sd, pilot), alpha=0.05 / 130) == number
    assert StudyFolder(STUDY, Path(), "paper").secondary_tests <= 130


@pytest.mark.parametrize("scale", [*GPU_SCALES, "workstation"])
def test_all_examples_of_text_are_used_and_one_probe_is(scale):
    for dataset in STUDY.scale(scale).datasets:
        settings, is_text = dataset.settings, dataset.name in ("generated", "web", "text")
        number = 20_000 if scale == "workstation" else "all" if is_text else 100_000
        assert settings["num_train"] == number
        assert [settings[f"probe_{name}"] for name in ("epochs", "seeds", "standardize")] == [100, 5, False]


@pytest.mark.parametrize(
    ("directions", "said"),
    [(2, "have 201.9M and 403.3M parameters"), (1, "in one direction they have 67.4M and 134.6M")],
)
def test_the_scale_says_the_papers_count_beside_that_of_lstms_that_read_both_ways(directions, said):
    counts = [
        Costs(ModelConfig(architecture="lstm", size="h1024", layers=layers, directions=directions), HMM).parameters
        for layers in (8, 16)
    ]
    assert re.findall(r"[\d.]+(?=M)", said) == [f"{count / 1e6:.1f}" for count in counts]
    assert said in STUDY.scale("paper").description


def test_arms_of_a_small_scale_differ_from_the_main_model_in_what_they_are_named_after():
    runs = experiments("evening", "pcfg-720")
    differing = {line.partition(" is ")[0] for line in configs.differences(runs["pre-ln"].config, runs["d32"].config)}
    # the checkpoints: the step at which the look-up table is probed
    assert differing == {"model.architecture", "compiled", "checkpoints"}
    arms = {name: runs[name].config for name in ("sgd-sampled", "sgd-exact", "adversary", "helper")}
    for config in arms.values():
        assert config.init_from.endswith("d32/checkpoints/step-2000")
        assert (config.stages[-1].labels, config.stages[-1].steps) == ("exact", 1_000)
    assert [arms[name].stages[0].labels for name in ("sgd-sampled", "sgd-exact")] == ["sampled", "exact"]
    adversary, helper = (arms[name].stages[0].algorithm.weight for name in ("adversary", "helper"))
    assert adversary == -helper > 0


def test_a_plan_says_which_figures_show_cooldowns():
    shown = {name: one.shown_in for name, one in experiments("evening", "pcfg", cooldowns=True).items()}
    assert shown["d16-2000-cooldown-500"] == shown["d64-2000-cooldown"] == ("figure 1", "figure 5")
    assert shown["d32-4000-cooldown"] == shown["pre-ln-2000-cooldown"] == ("figure 1",)
    assert set(shown.values()) == {("figure 1", "figure 5"), ("figure 1",)}


def test_a_teacher_is_one_run_of_the_study_that_its_students_come_after():
    runs = STUDY.scale("smoke").experiments
    (language,) = STUDY.scale("smoke").dataset("generated").languages
    teacher = runs["generated-teacher"]
    assert language.checkpoint == f"../generated-teacher/checkpoints/step-{teacher.config.steps}"
    assert teacher.measurements == teacher.shown_in == ()
    students = [one for name, one in runs.items() if name.startswith("generated-0")]
    assert len(students) > 10
    assert all("generated-teacher" in one.after and one.config.language == language for one in students)
    other = STUDY.scale("smoke", seed_offset=1).experiments["generated-teacher"]
    assert other.config.seed != teacher.config.seed


@pytest.mark.parametrize("scale", GPU_SCALES)
def test_a_repetition_has_other_grammars(scale):
    def grammars(offset):
        dataset = STUDY.scale(scale).with_seed_offset(offset).dataset("pcfg")
        return {getattr(one.language, "language", one.language).seed for one in dataset.units}

    assert len(grammars(0)) == len(grammars(1)) > 1
    assert not grammars(0) & grammars(1)


def test_the_table_of_settings_says_of_which_models_a_value_is(capsys):
    """Text has two sets of runs with one name, with dropout and without, and a cooldown has another schedule."""
    assert main(["study", "show", "paper", "--scale", "smoke", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    dropout = settings["model.dropout"]
    assert dropout["0.1"] == ["some of corpus: d16"]
    assert "some of corpus: d16" in dropout["0.0"]
    assert "corpus: all" not in dropout["0.0"]
    assert "pcfg: d32" in settings["optimizer.schedule"]["constant"]
    assert "pcfg: d32 (continued)" in settings["optimizer.schedule"]["cosine"]
    assert settings["optimizer.name"] == {"adamw": []}
    # a default that no study names; AdamW's settings do not apply to convex probes
    assert list(settings["measures.curvature_matrix"]) == ["gauss-newton"]
    assert settings["measures.probe_solver"] == {"convex": ["pcfg: all", "hmm: all", "teacher: all"]}
    assert "measures.probe_epochs" not in settings
