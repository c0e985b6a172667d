"""The mean of the weights of several checkpoints."""

import pytest
import torch
from running import small
from safetensors.torch import load_file
from toy_language import PairLanguage
from transformers import AutoModelForMaskedLM

from isoloss.checkpoints.loading import load_model
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab.training.averaging import average_checkpoints
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig
from isoloss.runs import Run


def trained(path, config):
    run = Run(path)
    train(run, config, PairLanguage())
    return run


def weights(folder):
    return load_file(folder / "model.safetensors")


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
