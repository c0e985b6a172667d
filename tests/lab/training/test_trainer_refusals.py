"""What the training loop refuses: folders, files that were damaged between two processes, and losses."""

import re
import shutil

import pytest
from running import Signalling, content, small, trained
from toy_language import PairLanguage

from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.training.train import Interrupted, train
from isoloss.run_config import OptimizerConfig
from isoloss.runs import Run


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def interrupted(path):
    """Return a run that stopped after step 7, with checkpoints of the steps 0, 4 and 7."""
    run, config = Run(path), small(checkpoints=(0, 4), log_every=2)
    with pytest.raises(Interrupted):
        train(run, config, Signalling([7]))
    return run, config


# --- folders


def test_a_directory_of_another_config_or_version_or_in_use(tmp_path):
    run = trained(tmp_path)
    with pytest.raises(IsolossError, match=r"holds a run of another config .*batch_size is 9 here and 8 there"):
        trained(tmp_path, small(batch_size=9))
    record = run.record
    record["config"]["color"] = "red"
    files.write_sealed(run.path / "run.json", record)
    with pytest.raises(IsolossError, match=r"run\.json cannot be read here: .*color.*; it is of another"):
        trained(tmp_path)
    with files.lock(tmp_path / "used"), pytest.raises(IsolossError, match="is in use by another isoloss process"):
        trained(tmp_path / "used")


def test_a_checkpoint_that_was_renamed_or_is_gone(tmp_path):
    run, config = interrupted(tmp_path)
    run.checkpoint(7).rename(run.checkpoint(5))
    with pytest.raises(IsolossError, match="step-5 holds step 7"):
        trained(tmp_path, config)
    run.checkpoint(5).rename(run.checkpoint(7))
    run.checkpoint(4).rename(tmp_path / "elsewhere")
    with pytest.raises(IsolossError, match="lacks the checkpoint of step 4: delete the later ones too"):
        trained(tmp_path, config)


# --- damage


def test_a_flipped_bit_in_weights_is_noticed_where_they_are_used(tmp_path):
    folder = trained(tmp_path / "run").last_checkpoint()
    load_model(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(IsolossError, match=r"model\.safetensors is damaged: its SHA-256 is not the one that training"):
        load_model(folder)
    with pytest.raises(IsolossError, match=r"model\.safetensors is damaged"):
        trained(tmp_path / "next", small(init_from="../run"))
    assert not Run(tmp_path / "next").exists


@pytest.mark.parametrize(
    ("step", "name"), [(4, "model.safetensors"), (4, "trainer.safetensors"), (7, "model.safetensors")]
)
def test_a_damaged_checkpoint_is_named_and_following_the_advice_gives_the_bytes_of_a_whole_run(tmp_path, step, name):
    run, config = interrupted(tmp_path / "run")
    flip(run.checkpoint(step) / name)
    with pytest.raises(IsolossError, match=rf"step-{step}/{name} is damaged: delete its folder and those of later"):
        train(run, config, PairLanguage())
    for later in {step, 7}:
        shutil.rmtree(run.checkpoint(later))
    train(run, config, PairLanguage())
    assert content(run) == content(trained(tmp_path / "whole", config))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: '{"step": 2}\n',
        lambda text: '{"step": 2}\nnonsense\n{"step": 6}\n',
        lambda text: '{"step": 2}\n{"step": 4}\n{"step": 12}\n',
        lambda text: re.sub(r"(?<=loss_nats\": 2\.)\d", lambda digit: str((int(digit[0]) + 1) % 10), text, count=1),
    ],
    ids=["empty", "short", "no JSON", "another step", "a digit"],
)
def test_metrics_that_changed(tmp_path, damage):
    run, config = interrupted(tmp_path)
    path = run.path / "metrics.jsonl"
    text = path.read_text()
    path.write_text(damage(text))
    with pytest.raises(IsolossError, match=r"metrics\.jsonl is damaged: its first 3 lines are not those of the 7"):
        train(run, config, PairLanguage())
    path.write_text(text)
    train(run, config, PairLanguage())
    assert run.complete


def test_what_is_whole_of_torn_metrics_is_read(tmp_path):
    run = trained(tmp_path)
    whole = run.metrics()
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(IsolossWarning, match=r"line 3 of .*metrics\.jsonl is damaged: it and the lines after it"):
        assert run.metrics() == whole[:2]


def test_a_resume_under_other_versions_or_threads_is_told_and_kept(tmp_path):
    run, config = interrupted(tmp_path / "other")
    record = run.record
    now = record["versions"]["torch"]
    record["versions"]["torch"] = "1.0"
    files.write_sealed(run.path / "run.json", record)
    log = run.path / "log.jsonl"
    log.write_text(log.read_text().replace('"threads": 1', '"threads": 3'))
    message = re.escape(f"was made with torch 1.0, now {now}; 3 threads, now 1: its numbers may")
    with pytest.warns(IsolossWarning, match=message):
        train(run, config, PairLanguage())
    versions = {**record["versions"], "torch": now}
    assert run.record == {**record, "resumed_with": [{"step": 7, "versions": versions, "threads": 1}]}

    same, config = interrupted(tmp_path / "same")
    before = (same.path / "run.json").read_bytes()
    train(same, config, PairLanguage())
    assert (same.path / "run.json").read_bytes() == before


# --- losses


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
