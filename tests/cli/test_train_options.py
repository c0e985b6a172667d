"""The options of `isoloss train` for algorithms, schedules and labels: the config they give, and what is refused."""

import json
import shlex

import pytest
from speaking import refusal

from isoloss import config as configs
from isoloss import machine
from isoloss.cli.main import main
from isoloss.lab.models.architectures import BERT
from isoloss.lab.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig
from isoloss.run_config import ModelConfig, StageConfig, TrainConfig
from isoloss.runs import Run


def config_of(capsys, tmp_path, *options):
    assert main(["train", str(tmp_path / "run"), "--language", "pcfg-laptop", *options, "--print-config"]) == 0
    path = tmp_path / "config.toml"
    path.write_text(capsys.readouterr().out)
    return configs.read_toml(TrainConfig, path)


@pytest.mark.parametrize(
    ("options", "algorithm"),
    [
        ("--algorithm sam", SAMConfig()),
        ("--algorithm sam --sam-rho 0.1 --sam-batch same", SAMConfig(rho=0.1, batch="same")),
        ("--algorithm sam --sam-ascent per-process", SAMConfig(ascent="per-process")),
        ("--algorithm adversarial --adversarial-head per-process", AdversarialConfig(head="per-process")),
        (
            "--algorithm adversarial --adversarial-task prefix-4 --adversarial-weight 0.2 --adversarial-ridge 0.01",
            AdversarialConfig(task="prefix-4", weight=0.2, ridge=0.01),
        ),
        ("--algorithm adversarial --adversarial-weight -0.1", AdversarialConfig(weight=-0.1)),
        ("--algorithm fisher-penalty --fisher-penalty-weight 0.01", FisherPenaltyConfig(weight=0.01)),
    ],
)
def test_an_algorithm_and_its_options(capsys, tmp_path, options, algorithm):
    assert config_of(capsys, tmp_path, *options.split()).algorithm == algorithm


@pytest.mark.parametrize("option", ["--width 1e9", "--layers 1e6", "--batch-size 1e9", "--batch-size 1e9 --compiled"])
def test_what_cannot_fit_into_memory_is_refused_before_a_run_is_made(capsys, tmp_path, monkeypatch, option):
    monkeypatch.setattr(machine, "physical_memory", lambda: 2.0**38)
    told = refusal(capsys, "train", tmp_path / "run", "--language", "pcfg-laptop", *option.split())
    assert "is too large: it needs at least" in told
    assert "and this machine has 256 GiB" in told
    assert not list(tmp_path.rglob("*.json"))


def test_the_least_memory_of_a_model_is_below_what_it_takes():
    shape, tokens = BERT.shape(ModelConfig(size="d64")), 128 * 8
    by_hand = 8 * 57250 + 50_000 + 16 * 64 * tokens  # weights and gradient, one layer's objects, four arrays of it
    assert BERT.least_memory(shape, 34, 8, num_tokens=tokens) == by_hand


def test_schedule_labels_and_measures(capsys, tmp_path):
    options = (
        "--schedule cosine --warmup-proportion 0.12 --max-grad-norm 1 --labels exact --measure-every 100 "
        "--micro-batch-size 32"
    )
    config = config_of(capsys, tmp_path, *options.split())
    optimizer = config.optimizer
    assert (optimizer.schedule, optimizer.warmup_proportion, optimizer.max_grad_norm) == ("cosine", 0.12, 1.0)
    assert (config.objective.labels, config.measure_every, config.micro_batch_size) == ("exact", 100, 32)


def test_a_run_with_an_algorithm_and_measures(capsys, tmp_path):
    words = ["train", str(tmp_path / "run"), "--language", "pcfg-laptop", "--size", "d16", "--steps", "50"]
    options = "--batch-size 8 --algorithm adversarial --measure-every 50 --device cpu --threads 1 --json"
    assert main([*words, *options.split()]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 50
    line = Run(tmp_path / "run").metrics()[-1]
    assert {"adversary_loss", "kl_nats", "trace"} <= set(line)


STAGES = """
batch_size = 8
log_every = 10
device = "cpu"
threads = 1
measure_sentences = 64
language = {kind = "pcfg", levels = 2, symbols_per_level = 3, rules_per_symbol = 3, vocab_size = 8}
model = {size = "d16"}

[[stages]]
steps = 20
labels = "exact"
target_kl = 10.0
validate_every = 10

[[stages]]
steps = 5
optimizer = {name = "sgd", learning_rate = 0.1}
"""


def test_a_file_with_stages(capsys, tmp_path):
    (tmp_path / "run.toml").write_text(STAGES)
    words = ["train", str(tmp_path / "run"), "--config", str(tmp_path / "run.toml")]
    assert main([*words, "--print-config"]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    configs_ = [configs.read_toml(TrainConfig, tmp_path / f"{name}.toml") for name in ("run", "again")]
    assert configs_[0] == configs_[1]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "15 steps done" in printed
    for text in (printed, shown):
        assert "stage 1 of 2: ended at step 10, target reached (validation KL 0." in text
        assert "stage 2 of 2: ended at step 15, steps done" in text
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    assert [stage["step"] for stage in json.loads(capsys.readouterr().out)["stages"]] == [10, 15]
    (tmp_path / "wrong.toml").write_text(STAGES.replace("steps = 5", "step = 5"))
    assert main(["train", str(tmp_path / "other"), "--config", str(tmp_path / "wrong.toml")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "stages[1]: no setting 'step'; did you mean steps?" in error


def test_training_to_a_target_is_a_stage_and_a_miss_is_told_with_the_command_that_goes_on(capsys, tmp_path):
    few = ("--steps", "4", "--batch-size", "8", "--measure-sentences", "64", "--threads", "1")
    given = ("--size", "d16", *few, "--target-kl")
    assert config_of(capsys, tmp_path, *given, "0.5").stages == (StageConfig(steps=4, target_kl=0.5),)
    assert "a stage ends at one target" in refusal(
        capsys, "train", tmp_path / "run", "--language", "pcfg-laptop", *given, "1", "--target-loss", "1"
    )
    run = tmp_path / "run"
    assert main(["train", str(run), "--language", "pcfg-laptop", *given, "1e-9"]) == 0
    out = capsys.readouterr().out
    (missed,) = Run(run).missed_targets()
    assert missed.endswith("nats per predicted token, above its target of 1e-09")
    assert missed in " ".join(out.split())
    longer = next(line for line in out.splitlines() if "run-longer" in line)
    assert main([*shlex.split(longer)[1:], "--print-config"]) == 0
    assert "steps = 8\ntarget_kl = 1e-09" in capsys.readouterr().out
    # of a run whose command has no options
    assert main(["train", str(run)]) == 0
    assert f"isoloss train {run} --print-config > {run}-longer.toml" in capsys.readouterr().out
    assert main(["train", str(run), "--target-kl", "1"]) == 2
    assert "goes on with the config it was made with; leave out --target-kl" in capsys.readouterr().err


def test_the_config_is_printed_as_json_too(capsys, tmp_path):
    words = ["train", str(tmp_path / "run"), "--language", "pcfg-laptop", "--print-config"]
    assert main([*words, "--json"]) == 0
    config = configs.from_dict(TrainConfig, json.loads(capsys.readouterr().out))
    assert config == config_of(capsys, tmp_path)


# --- the compiled step


@pytest.mark.parametrize("option", ["", "--no-compiled"])
def test_a_narrow_bert_is_compiled_unless_told(capsys, tmp_path, option):
    words = f"--language pcfg-laptop --size d16 --steps 4 --batch-size 8 --device cpu --json {option}".split()
    assert main(["train", str(tmp_path / "run"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    assert Run(tmp_path / "run").config.compiled is (not option)


@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [
        ("--size d64 --device cpu", True),
        ("--size d128 --device cpu", False),
        ("--size d128 --device cpu --compiled", True),
        ("--size d64 --device cpu --threads 2", False),
        ("--size d64 --device cpu --masking fraction", False),
        ("--architecture lstm --device cpu", False),
    ],
)
def test_where_the_step_is_compiled_unasked(capsys, tmp_path, options, is_compiled):
    assert config_of(capsys, tmp_path, *options.split()).compiled is is_compiled


def test_a_run_goes_on_with_the_step_it_was_made_with(capsys, tmp_path):
    Run(tmp_path / "run").create(config_of(capsys, tmp_path, "--no-compiled"))
    assert not config_of(capsys, tmp_path).compiled
