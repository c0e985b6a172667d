"""What the training loop refuses: folders, damaged files, losses and settings."""

import pytest
from running import Signalling, content, small, trained

from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.training.train import Interrupted, train
from isoloss.run_config import ModelConfig, OptimizerConfig
from isoloss.runs import Run


def test_a_directory_of_another_config(tmp_path):
    trained(tmp_path)
    with pytest.raises(IsolossError, match=r"holds a run of another config .*batch_size is 9 here and 8 there"):
        trained(tmp_path, small(batch_size=9))


def test_a_run_of_another_version_names_the_fields(tmp_path):
    run = trained(tmp_path)
    record = run.record
    record["config"]["color"] = "red"
    files.write_sealed(run.path / "run.json", record)
    with pytest.raises(IsolossError, match=r"run\.json is not of this version of isoloss: .*color"):
        trained(tmp_path)


def test_a_directory_in_use(tmp_path):
    with files.lock(tmp_path), pytest.raises(IsolossError, match="is in use by another isoloss process"):
        trained(tmp_path)


def test_a_damaged_checkpoint_is_named_and_an_earlier_one_serves(tmp_path):
    config = small(checkpoints=(4,))
    run = Run(tmp_path / "run")
    with pytest.raises(Interrupted):
        train(run, config, Signalling({7}))
    weights = run.checkpoint(7) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(IsolossError, match=r"step-7/model\.safetensors is damaged: delete its folder"):
        trained(run.path, config)
    weights.unlink()
    for path in (*run.checkpoint(7).iterdir(), run.checkpoint(7)):
        path.rmdir() if path.is_dir() else path.unlink()
    trained(run.path, config)
    assert content(run) == content(trained(tmp_path / "whole", config))


def test_a_checkpoint_under_another_steps_name(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(Interrupted):
        train(run, small(), Signalling({3}))
    run.checkpoint(3).rename(run.checkpoint(5))
    with pytest.raises(IsolossError, match="step-5 holds step 3"):
        trained(tmp_path)


def test_a_kept_checkpoint_that_is_gone(tmp_path):
    run = Run(tmp_path)
    config = small(checkpoints=(2,))
    with pytest.raises(Interrupted):
        train(run, config, Signalling({3}))
    run.checkpoint(2).rename(tmp_path / "elsewhere")
    with pytest.raises(IsolossError, match="lacks the checkpoint of step 2: delete the later ones too"):
        trained(tmp_path, config)


@pytest.mark.parametrize("text", ["", '{"step": 4}\n', '{"step": 4}\nnonsense\n', '{"step": 4}\n{"step": 12}\n'])
def test_metrics_that_were_tampered_with(tmp_path, text):
    run = Run(tmp_path)
    with pytest.raises(Interrupted):
        train(run, small(), Signalling({9}))
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(IsolossError, match="is damaged: its first 2 lines are not those of the 9 steps"):
        trained(tmp_path)


def test_a_loss_that_is_not_finite(tmp_path):
    config = small(optimizer=OptimizerConfig(name="sgd", learning_rate=1e30, warmup_steps=0), checkpoints=(0,))
    with pytest.raises(IsolossError, match=r"the loss at step \d+ is (nan|inf).*the checkpoint of step 0 is kept"):
        trained(tmp_path / "kept", config)
    assert Run(tmp_path / "kept").steps() == [0]
    assert load_model(Run(tmp_path / "kept").checkpoint(0)).kind == "masked"
    with pytest.raises(IsolossError, match="no checkpoint was saved"):
        trained(tmp_path / "none", small(optimizer=config.optimizer))


def test_weights_that_are_not_finite_never_become_a_checkpoint(tmp_path):
    config = small(
        optimizer=OptimizerConfig(name="sgd", learning_rate=1e38, warmup_steps=0, weight_decay=1e10), steps=1
    )
    with pytest.raises(IsolossError, match=r"after step 1 the weights .* are not finite"):
        trained(tmp_path, config)
    assert Run(tmp_path).steps() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"checkpoints": (3, 11)}, "checkpoints is 3, 11; it must be steps from 0 to 10"),
        ({"checkpoints": (-1,)}, "checkpoints is -1; it must be steps from 0 to 10"),
        ({"model": ModelConfig(size="d7")}, "has no model size 'd7'"),
        ({"device": "gpu"}, "device is 'gpu'; it must be auto, cpu"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(IsolossError, match=message):
        trained(tmp_path / "run", small(**changes))
    assert not (tmp_path / "run").exists()
