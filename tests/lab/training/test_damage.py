"""Damage between two processes of a run is noticed by whoever reads the file next."""

import re

import pytest
from running import Signalling, small, trained
from toy_language import PairLanguage

from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.training.train import Interrupted, train
from isoloss.runs import Run


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def interrupted(path, **changes):
    """Return a run that stopped after step 7."""
    run, config = Run(path), small(checkpoints=(0, 4), log_every=2, **changes)
    with pytest.raises(Interrupted):
        train(run, config, Signalling([7]))
    return run, config


def test_a_flipped_bit_in_weights_is_noticed_where_they_are_used(tmp_path):
    run = trained(tmp_path / "run")
    folder = run.last_checkpoint()
    load_model(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(IsolossError, match=r"model\.safetensors is damaged: its SHA-256 is not the one that training"):
        load_model(folder)
    with pytest.raises(IsolossError, match=r"model\.safetensors is damaged"):
        trained(tmp_path / "next", small(init_from="../run"))
    assert not Run(tmp_path / "next").exists


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.safetensors"])
def test_a_resume_notices_a_damaged_older_checkpoint(tmp_path, name):
    run, config = interrupted(tmp_path)
    flip(run.checkpoint(4) / name)
    with pytest.raises(IsolossError, match=rf"step-4/{name} is damaged: delete its folder and those of later steps"):
        train(run, config, PairLanguage())


def test_following_the_advice_gives_the_bytes_of_a_run_without_damage(tmp_path):
    whole = trained(tmp_path / "whole", small(checkpoints=(0, 4), log_every=2))
    run, config = interrupted(tmp_path / "run")
    flip(run.checkpoint(4) / "model.safetensors")
    for step in (4, 7):
        for file in run.checkpoint(step).iterdir():
            file.unlink()
        run.checkpoint(step).rmdir()
    train(run, config, PairLanguage())
    for name in ("metrics.jsonl", "result.json", "checkpoints/step-10/trainer.json"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_resume_notices_a_digit_of_the_metrics_that_changed(tmp_path):
    run, config = interrupted(tmp_path)
    path = run.path / "metrics.jsonl"
    text = path.read_text()
    place = text.index("loss_nats") + len('loss_nats": 2.')
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    with pytest.raises(
        IsolossError, match=r"metrics\.jsonl is damaged: its first 3 lines are not those of the 7 steps"
    ):
        train(run, config, PairLanguage())
    path.write_text(text)
    train(run, config, PairLanguage())
    assert run.complete


def test_a_resume_under_other_versions_or_threads_is_told_and_kept(tmp_path):
    run, config = interrupted(tmp_path)
    record = run.record
    now = record["versions"]["torch"]
    record["versions"]["torch"] = "1.0"
    files.write_sealed(run.path / "run.json", record)
    lines = (run.path / "log.jsonl").read_text().replace('"threads": 1', '"threads": 3')
    (run.path / "log.jsonl").write_text(lines)
    told = re.escape(f"was made with torch 1.0, now {now}; 3 threads, now 1: its numbers may")
    with pytest.warns(IsolossWarning, match=told):
        train(run, config, PairLanguage())
    after = run.record
    versions = {**record["versions"], "torch": now}
    assert after == {**record, "resumed_with": [{"step": 7, "versions": versions, "threads": 1}]}


def test_a_resume_under_the_same_versions_leaves_the_record(tmp_path):
    run, config = interrupted(tmp_path)
    before = (run.path / "run.json").read_bytes()
    train(run, config, PairLanguage())
    assert (run.path / "run.json").read_bytes() == before


def test_what_is_whole_of_torn_metrics_is_read(tmp_path):
    run = trained(tmp_path)
    whole = run.metrics()
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(IsolossWarning, match=r"line 3 of .*metrics\.jsonl is damaged: it and the lines after it"):
        assert run.metrics() == whole[:2]
