"""Stages: what each one does, where it ends, and that a run with stages goes on bit for bit from anywhere."""

import dataclasses
import json

import pytest
import torch
from distributed_workers import examples
from running import ENDS, STAGES, Dying, Signalling, content, small, staged, trained, validate
from stepping import gradients_of, plain_loss, reference
from toy_language import PairLanguage

from isoloss import config as configs
from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.config import AdversarialConfig, SAMConfig
from isoloss.lab.training.objectives import training_batch
from isoloss.lab.training.train import Interrupted, train
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.runs import Run

EVEN = ModelConfig(size="d16", dropout=0.0)
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.5, schedule="linear", warmup_steps=2)


def weights(run, step):
    return (run.checkpoint(step) / "model.safetensors").read_bytes()


# --- what a stage does


def test_each_stage_makes_the_steps_of_its_settings(tmp_path):
    """The second stage, written out: its batches are those of the run's steps, its rates those of its own."""
    config = small(
        model=EVEN,
        steps=12,
        log_every=1,
        stages=(StageConfig(steps=5), StageConfig(steps=7, optimizer=SGD, batch_size=4)),
    )
    run = trained(tmp_path / "run", config)
    assert weights(run, 5) == weights(trained(tmp_path / "first", small(model=EVEN, steps=5)), 5)
    second = small(batch_size=4)
    batches = [training_batch(PairLanguage(), second, step, torch.device("cpu")).inputs for step in range(6, 13)]

    def gradient(model, _t, batch):
        loss = plain_loss(model, batch)
        return loss, gradients_of(loss, model)

    expected, outcomes = reference(load_model(run.checkpoint(5)).model, SGD, gradient, batches)
    for line, (loss, rate, norm) in zip(run.metrics()[5:], outcomes, strict=True):
        assert line["loss_nats"] == pytest.approx(loss, rel=1e-5)
        assert line["learning_rate"] == pytest.approx(rate)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = load_model(run.checkpoint(12)).model.state_dict()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_labels_are_a_stages_own(tmp_path):
    config = small(steps=6, stages=(StageConfig(steps=3, labels="exact"), StageConfig(steps=3)))
    language = config.language.build()
    run = trained(tmp_path / "run", config, language)
    exact = small(steps=3, objective=ObjectiveConfig(labels="exact"))
    assert weights(run, 3) == weights(trained(tmp_path / "exact", exact, language), 3)
    both = small(steps=6, stages=(StageConfig(steps=3, labels="exact"), StageConfig(steps=3, labels="exact")))
    assert weights(run, 6) != weights(trained(tmp_path / "both", both, language), 6)


def test_the_draws_of_an_algorithm_differ_between_stages(tmp_path):
    adversary = AdversarialConfig(head_examples=8, loss_examples=4, task_examples=40)
    config = small(
        model=EVEN, steps=2, log_every=1, optimizer=OptimizerConfig(name="sgd", learning_rate=1e-12, warmup_steps=0)
    )
    one = StageConfig(steps=1, algorithm=adversary)
    run = Run(tmp_path)
    train(run, dataclasses.replace(config, stages=(one, one)), PairLanguage(), task_examples=examples)
    first, second = (line["adversary_loss"] for line in run.metrics())
    assert abs(first - second) > 1e-3  # of the same weights, to 1e-10


# --- where a stage ends


def test_a_stage_ends_at_its_target_and_the_others_shift(tmp_path):
    config = staged(checkpoints=(0, 3, 13, 30))
    run = trained(tmp_path, config, validate=validate)
    lines = run.metrics()
    assert [(line["step"], line["stage"]) for line in lines] == [
        *((2, 1), (4, 1), (6, 1)),
        *((8, 2), (10, 2), (11, 2)),
        *((12, 3), (14, 3), (15, 3)),
    ]
    found = [line["validation_kl_nats"] for line in lines[:3]]
    assert min(found[:2]) > 2.21 >= found[2]
    for step, value in zip((2, 4, 6), found, strict=True):
        alone = trained(tmp_path / str(step), small(steps=step))
        assert validate("kl", load_model(alone.checkpoint(step)).model)["validation_kl_nats"] == pytest.approx(value)
    assert not any("validation_kl_nats" in line for line in lines[3:])
    assert [line.get("stage_ended") for line in lines] == [
        *(None, None, "target reached"),
        *(None, None, "steps done"),
        *(None, None, "steps done"),
    ]
    assert [line["learning_rate"] for line in lines[6:]] == pytest.approx([0.01, 0.005, 0.0025])
    assert run.steps() == [0, 3, 6, 11, 13, 15]
    result = run.result()
    assert result["steps"] == 15
    assert list(result["checkpoints"]) == ["0", "3", "6", "11", "13", "15"]
    assert [(s["stage"], s["step"], s["ended"]) for s in result["stages"]] == [
        (1, 6, "target reached"),
        (2, 11, "steps done"),
        (3, 15, "steps done"),
    ]
    assert result["stages"][0]["validation_kl_nats"] == found[2]
    log = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    assert [(e["stage"], e["step"], e["why"]) for e in log if e["event"] == "stage ended"] == [
        (s["stage"], s["step"], s["ended"]) for s in result["stages"]
    ]


def test_a_target_that_is_not_reached_is_recorded_as_such(tmp_path):
    never = dataclasses.replace(STAGES[0], steps=5, target_kl=0.01, validate_every=4)
    run = trained(tmp_path / "never", small(steps=7, stages=(never, StageConfig(steps=2))), validate=validate)
    assert [(s["stage"], s["step"], s["ended"]) for s in run.result()["stages"]] == [
        (1, 5, "target not reached"),
        (2, 7, "steps done"),
    ]
    assert [line["step"] for line in run.metrics() if "validation_kl_nats" in line] == [4, 5]


def test_the_last_step_of_a_stage_is_compared_too_and_may_be_the_runs_end(tmp_path):
    last = StageConfig(steps=7, target_loss=2.21, validate_every=100)
    run = trained(tmp_path, small(steps=7, log_every=50, stages=(last,)), validate=validate)
    assert run.complete
    assert [(s["step"], s["ended"]) for s in run.result()["stages"]] == [(7, "target reached")]
    assert [line["step"] for line in run.metrics()] == [7]
    early = trained(
        tmp_path / "early",
        small(log_every=2, steps=30, checkpoints=(2, 20), stages=(STAGES[0],)),
        validate=validate,
    )
    assert early.complete
    assert early.result()["steps"] == 6
    assert early.steps() == [2, 6]


# --- stopping and going on


def test_a_run_with_stages_goes_on_bit_for_bit_from_every_step(tmp_path):
    at = range(1, 15)
    config, language, stops = staged(checkpoints=(0, 9)), Signalling(at), []
    run = Run(tmp_path / "run")
    while not run.complete:
        try:
            train(run, config, language, validate=validate)
        except Interrupted as stop:
            stops.append(stop.step)
    assert ENDS[0] in stops  # right after the target was reached
    assert len(stops) == len(at)
    assert content(run) == content(trained(tmp_path / "whole", config, validate=validate))


@pytest.mark.parametrize("at", [ENDS[0], ENDS[0] + 1, ENDS[1] + 1, ENDS[2]])
def test_a_process_that_dies_at_a_stages_border_leaves_no_trace(tmp_path, at):
    """It dies in the step of a border, with its line written or not, and with no checkpoint but those that are kept."""
    whole = trained(tmp_path / "whole", staged(), validate=validate)
    run = Run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(run, staged(), Dying(at), validate=validate)
    assert run.steps() == [end for end in ENDS if end < at]
    train(run, staged(), PairLanguage(), validate=validate)
    assert content(run) == content(whole)


def test_a_process_that_dies_between_reaching_a_target_and_saving(tmp_path, monkeypatch):
    run = Run(tmp_path / "run")

    def save(folder, *arguments, **names):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("isoloss.lab.training.checkpoints.save", save)
        with pytest.raises(ZeroDivisionError):
            train(run, staged(), PairLanguage(), validate=validate)
    assert run.metrics()[-1]["stage_ended"] == "target reached"
    assert run.steps() == []
    assert content(trained(run.path, staged(), validate=validate)) == content(
        trained(tmp_path / "whole", staged(), validate=validate)
    )


@pytest.mark.parametrize("config", [small(), staged()], ids=["plain", "stages"])
def test_a_process_killed_between_the_last_checkpoint_and_the_result(tmp_path, config):
    run = trained(tmp_path, config, validate=validate)
    before = content(run)
    (run.path / "result.json").unlink()
    train(run, config, Dying(1), validate=validate)
    assert content(run) == before


def test_a_checkpoint_that_is_older_than_stages_is_gone_on_from(tmp_path):
    whole, run = trained(tmp_path / "whole"), Run(tmp_path / "run")
    with pytest.raises(Interrupted):
        train(run, small(), Signalling({6}))
    path = run.checkpoint(6) / "trainer.json"
    document = files.read_sealed(path, "")
    assert document.pop("targets_reached") == []
    files.write_json(path, document)  # nor had it a digest
    assert content(trained(run.path)) == content(whole)


# --- going on in another run


def test_runs_branch_from_a_shared_beginning(tmp_path):
    """From the last checkpoint of a stage, or of a whole run whose last step nobody knows beforehand."""
    shared = trained(tmp_path / "shared", staged(), validate=validate)
    for name, step in (("shared", 15), ("shared/checkpoints/step-6", 6)):
        branch = trained(tmp_path / f"from-{step}", small(steps=2, init_from=f"../{name}", checkpoints=(0,)))
        assert weights(branch, 0) == weights(shared, step)
        assert branch.result()["initial_sha256"] == shared.result()["checkpoints"][str(step)]
    (shared.path / "result.json").unlink()
    with pytest.raises(IsolossError, match=r"shared is not complete: isoloss train .* goes on with it"):
        trained(tmp_path / "early", small(init_from="../shared"))


# --- configs


def test_steps_are_those_of_the_stages():
    stages = (StageConfig(steps=500), StageConfig(steps=100))
    config = TrainConfig(language=small().language, stages=stages)
    assert config.steps == 600
    assert dataclasses.replace(config, batch_size=3).steps == 600
    assert config.stage_ends() == (500, 600)
    assert small().stage_ends() == (10,)


def test_a_run_without_stages_has_the_fingerprint_that_it_had():
    assert "stages" not in configs.identity(small())
    assert configs.fingerprint(small()) == "c93a3c49f2314bdd"
    assert configs.fingerprint(staged()) != configs.fingerprint(staged(stages=STAGES[:2], steps=35))


DECAYING = OptimizerConfig(schedule="cosine", warmup_steps=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 11}, r"steps is 11, and the stages have 10 together: leave steps out"),
        ({"checkpoints": (11,)}, "checkpoints is 11; it must be steps from 0 to 10"),
        ({"stages": ({"steps": 10},)}, r"stages\[0\] is of the type dict; it must be an isoloss config, StageConfig"),
        ({"stages": 3}, "stages is 3; it must be a list, each an isoloss config, StageConfig"),
        ({"stages": [{"steps": 0}]}, r"stages\[0\]\.steps is 0; it must be at least 1"),
        ({"stages": [{"steps": "10"}]}, r"stages\[0\]\.steps is '10'; it must be a whole number"),
        ({"stages": [{"optimizer": "sgd"}]}, r"stages\[0\]\.optimizer is 'sgd'; it must be an isoloss config"),
        ({"stages": [{"target_kl": 1.0, "target_loss": 1.0}]}, "target_kl and target_loss are given"),
        ({"stages": [{"validate_every": 4}]}, "validate_every is 4, and the stage has no target: leave it out"),
        (
            {"stages": [{"target_kl": 1.0, "validate_every": 6}]},
            r"stages\[0\]: validate_every is 6; it must be a multiple of log_every, 4",
        ),
        (
            {"stages": [{"optimizer": DECAYING, "steps": 5}, {"steps": 5}]},
            r"stages\[0\]: optimizer\.warmup_steps is 6, more than the 5 steps, .* the cosine schedule",
        ),
        (
            {
                "stages": [{}, {"labels": "exact"}],
                "objective": ObjectiveConfig(masking="fraction", corruption="bert"),
                "steps": 20,
            },
            r"stages\[1\]: exact labels are .* choose the corruption 'mask'",
        ),
        ({"stages": [{"algorithm": SAMConfig(), "batch_size": 7}]}, r"stages\[0\]: batch_size is 7; sam's halves"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_written(tmp_path, changes, message):
    stages = changes.get("stages", [{}])
    if isinstance(stages, list):
        stages = tuple(StageConfig(**{"steps": 10, **stage}) for stage in stages)
    with pytest.raises(IsolossError, match=message):
        trained(tmp_path / "run", small(**{**changes, "stages": stages}), validate=validate)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_had_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(IsolossError, match="a stage has a target, and nothing measures how far it is"):
        trained(tmp_path / "run", staged())
    exact = small(stages=(StageConfig(steps=5), StageConfig(steps=5, labels="exact")))
    with pytest.raises(IsolossError, match="PairLanguage has no exact conditionals: train on sampled labels"):
        trained(tmp_path / "run", exact)
    late = AdversarialConfig(head_examples=8, loss_examples=4, task_examples=40)  # of which nobody gave the examples
    with pytest.raises(IsolossError, match="the training algorithm needs 40 examples"):
        trained(tmp_path / "run", small(stages=(StageConfig(steps=5), StageConfig(steps=5, algorithm=late))))
    assert not (tmp_path / "run" / "run.json").exists()
