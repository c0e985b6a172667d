"""The average of the weights: a loop written out, resuming bit for bit, its folder, and nothing where it is off."""

import contextlib
import json
import math
import shutil

import pytest
import torch
from distributed_workers import SGD, Workers, train_all
from running import Signalling, content, small
from safetensors.torch import load_file
from toy_language import PairLanguage
from transformers import AutoModelForMaskedLM

from isoloss import config as configs
from isoloss.checkpoints.loading import load_model
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.config import GradientConfig, SAMConfig
from isoloss.lab.training.averaging import WeightAverage, average_checkpoints, averaged
from isoloss.lab.training.train import Interrupted, train
from isoloss.run_config import ModelConfig
from isoloss.runs import Run, checkpoint_of

DECAY = 0.8
EVERY = tuple(range(11))


def trained(path, config, language=None):
    run = Run(path)
    train(run, config, language or PairLanguage())
    return run


def weights(folder):
    return load_file(folder / "model.safetensors")


def check_average(run, decay, rtol=1e-5):
    """Fail unless every step's average is that of the weights of the steps up to it, one number after another."""
    expected = {name: w.double() for name, w in weights(run.checkpoint(0)).items()}
    for step in run.steps():
        own = weights(run.checkpoint(step))
        if step > 0:
            for name in expected:
                expected[name] = decay * expected[name] + (1 - decay) * own[name].double()
        got = weights(run.checkpoint(step) / "ema")
        assert set(got) == set(own) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(got[name].double(), value, rtol=rtol, atol=1e-7)
            assert got[name].dtype == torch.float32
    moved = max(float((own[name] - got[name]).abs().max()) for name in own)
    assert moved > 1e-3


@pytest.mark.parametrize("rule", [GradientConfig(), SAMConfig(rho=0.2)], ids=["gradient", "sam"])
def test_the_average_is_that_of_a_loop_written_out(tmp_path, rule):
    run = trained(tmp_path, small(ema=DECAY, checkpoints=EVERY, algorithm=rule))
    assert run.steps() == list(EVERY)
    check_average(run, DECAY)


def test_averaging_changes_nothing_else(tmp_path):
    with_it = content(trained(tmp_path / "with", small(ema=DECAY, checkpoints=(5,))))
    without = content(trained(tmp_path / "without", small(checkpoints=(5,))))
    assert {name.split("/")[-2] for name in set(with_it) - set(without)} == {"ema"}
    for name, data in without.items():
        # result.json has the hash of trainer.json
        if not name.endswith(("trainer.json", "trainer.safetensors", "result.json")):
            assert with_it[name] == data, name
    plain = Run(tmp_path / "without").checkpoint(5)
    both = load_file(Run(tmp_path / "with").checkpoint(5) / "trainer.safetensors")
    own = load_file(plain / "trainer.safetensors")
    assert {name for name in both if name not in own} == {f"ema/{name}" for name in weights(plain)}
    assert all(torch.equal(both[name], own[name]) for name in own)


def test_a_run_without_one_is_as_it_was_before_there_were_any():
    """Fingerprint and recorded config of a run that averages nothing do not know of the field."""
    assert "ema" not in configs.identity(small())
    assert configs.identity(small(ema=0.5))["ema"] == 0.5
    assert configs.differences(small(ema=0.5), small()) == ["ema is 0.5 here and not set there"]


@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_run_goes_on_bit_for_bit(tmp_path, at):
    config = small(ema=DECAY, checkpoints=(0, 5))
    whole = trained(tmp_path / "whole", config)
    with pytest.raises(Interrupted):
        trained(tmp_path / "again", config, Signalling(at=[at]))
    assert not (Run(tmp_path / "again").checkpoint(at) / "ema").exists()  # only kept to go on from
    assert content(trained(tmp_path / "again", config)) == content(whole)


def test_it_begins_at_the_initial_weights(tmp_path):
    first = trained(tmp_path / "first", small())
    run = trained(tmp_path / "second", small(init_from="../first/checkpoints/step-10", checkpoints=EVERY, ema=DECAY))
    start, average = weights(first.checkpoint(10)), weights(run.checkpoint(0) / "ema")
    assert all(torch.equal(average[name], start[name]) for name in start)
    check_average(run, DECAY)


def test_its_folder_is_a_checkpoint(tmp_path):
    run = trained(tmp_path, small(ema=DECAY, checkpoints=(5,)))
    folder = run.checkpoint(5) / "ema"
    ours, theirs = load_model(folder).model, AutoModelForMaskedLM.from_pretrained(folder)
    saved = load_file(run.checkpoint(5) / "trainer.safetensors")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, saved[f"ema/{name}"])
        assert torch.equal(parameter, ours.get_parameter(name))
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert checkpoint_of(folder) == (run.averaged, 5)
    assert checkpoint_of(run.checkpoint(5)) == (run, 5)
    assert checkpoint_of(run.path / "ema") is None
    assert run.steps() == [5, 10]


def test_a_damaged_average_is_named(tmp_path):
    config = small(ema=DECAY, checkpoints=(5,))
    with pytest.raises(Interrupted):
        trained(tmp_path, config, Signalling(at=[5]))
    (Run(tmp_path).checkpoint(5) / "ema" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(IsolossError, match=r"step-5/ema/model\.safetensors is damaged"):
        trained(tmp_path, config)


def test_a_state_that_does_not_fit_is_refused():
    average = WeightAverage(torch.nn.Linear(2, 1), 0.5)
    with pytest.raises(IsolossError, match=r"the average of the weights bias, of shape \(1,\), is missing"):
        average.load_state({"ema/weight": torch.zeros(1, 2)})
    with pytest.raises(IsolossError, match=r"weight, of shape \(1, 2\), is of shape \(2, 1\)"):
        average.load_state({"ema/weight": torch.zeros(2, 1), "ema/bias": torch.zeros(1)})


def test_it_is_of_a_dtype_that_small_steps_do_not_vanish_in():
    double = WeightAverage(torch.nn.Linear(1, 1).double(), 0.5).state()
    assert {tensor.dtype for tensor in double.values()} == {torch.float64}
    with pytest.raises(IsolossError, match="float32 or wider"):
        WeightAverage(torch.nn.Linear(1, 1).bfloat16(), 0.5)


def test_a_model_gets_its_own_weights_back():
    model = torch.nn.Linear(3, 2)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {f"ema/{name}": torch.full_like(p, 7.0) for name, p in own.items()}
    with contextlib.suppress(KeyboardInterrupt), averaged(model, state):
        assert all(bool((p == 7).all()) for p in model.parameters())
        raise KeyboardInterrupt
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_a_decay_out_of_range_is_refused_before_anything_is_written(tmp_path, decay):
    with pytest.raises(IsolossError, match=rf"ema is {decay}; .*at least 0 and below 1 \(0: no average\)"):
        trained(tmp_path / "run", small(ema=decay))
    assert not (tmp_path / "run").exists()


def test_two_processes_average_as_one_and_go_on_bit_for_bit(tmp_path):
    model = ModelConfig(size="d16", dropout=0.0)
    every = {
        parallel: small(
            ema=DECAY, parallel=parallel, model=model, optimizer=SGD, steps=5, checkpoints=tuple(range(6)), log_every=2
        )
        for parallel in ("ddp", "fsdp")
    }
    runs = {parallel: Run(tmp_path / parallel) for parallel in every}

    def train_both():
        workers = Workers(tmp_path, train_all, tmp_path, every)
        assert workers.wait() == [0, 0], workers.output()

    train_both()
    one = trained(tmp_path / "one", every["ddp"], PairLanguage(is_ragged=True))
    before = {}
    for parallel, run in runs.items():
        check_average(run, DECAY)
        got, want = weights(run.checkpoint(5) / "ema"), weights(one.checkpoint(5) / "ema")
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)
        before[parallel] = content(run)
        (run.path / "result.json").unlink()
        for step in (3, 4, 5):
            shutil.rmtree(run.checkpoint(step))
    train_both()
    assert {parallel: content(run) for parallel, run in runs.items()} == before


def test_the_command_line_has_it(tmp_path, capsys):
    arguments = ["train", str(tmp_path), "--language", "pcfg-laptop", "--size", "d16", "--steps", "3"]
    assert main([*arguments, "--ema", "0.9", "--threads", "1", "--json"]) == 0
    capsys.readouterr()
    folder = Run(tmp_path).checkpoint(3) / "ema"
    assert main(["flatness", str(folder), "--num-sequences", "64", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["model"] == str(folder)
    assert main([*arguments, "--ema", "1.5"]) == 2
    assert "ema is 1.5; it must be" in capsys.readouterr().err


# --- the mean of several checkpoints


def test_the_mean_of_checkpoints_is_a_checkpoint(tmp_path, capsys):
    run = trained(tmp_path / "run", small(checkpoints=(4, 7)))
    folders = [run.checkpoint(4), run.checkpoint(7), run.path]
    assert main(["average", *map(str, folders), "--output", str(tmp_path / "soup")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'soup'}: the mean of 3 checkpoints\n"
    made = AutoModelForMaskedLM.from_pretrained(tmp_path / "soup", local_files_only=True)
    parts = [weights(run.checkpoint(step)) for step in (4, 7, 10)]
    for name, parameter in made.named_parameters():
        expected = sum(part[name].double() for part in parts) / 3
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-6, atol=1e-8)
    assert sorted(path.name for path in (tmp_path / "soup").iterdir()) == ["config.json", "model.safetensors"]


def test_weights_in_several_files_are_averaged(tmp_path):
    model = load_model(str(trained(tmp_path / "run", small()).checkpoint(10))).model
    model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    average_checkpoints([tmp_path / "whole", tmp_path / "shards"], tmp_path / "mean")
    got, start = weights(tmp_path / "mean"), weights(tmp_path / "whole")
    assert got.keys() == start.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, start[name] + 0.5)


def test_checkpoints_that_have_no_mean_are_refused(tmp_path, capsys):
    first = trained(tmp_path / "first", small())
    wide = trained(tmp_path / "wide", small(model=ModelConfig(size="d32")))
    deep = trained(tmp_path / "deep", small(model=ModelConfig(size="d16", layers=2)))
    for others, message in (
        ([], "there is one checkpoint to average: name at least two"),
        ([wide.path], "hidden_size is 16 in .*first.* and 32 in .*wide"),
        ([deep.path], "num_hidden_layers is 1 in .*first.* and 2 in .*deep"),
        ([tmp_path / "none"], "none is not a checkpoint folder"),
    ):
        with pytest.raises(IsolossError, match=message):
            average_checkpoints([first.path, *others], tmp_path / "mean")
        assert not (tmp_path / "mean").exists()
    assert main(["average", str(first.path), str(first.path), "--output", str(first.path)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
