"""Runs with the compiled step: those of transformers' blocks up to rounding, and what it does not have."""

import dataclasses
import json

import pytest
import torch
from running import small, validate
from toy_language import PairLanguage

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PRESETS
from isoloss.lab.training.algorithms.base import Examples
from isoloss.lab.training.algorithms.config import (
    AdversarialConfig,
    FeatureEntropyConfig,
    FisherPenaltyConfig,
    SAMConfig,
)
from isoloss.lab.training.distributed import ProcessGroup
from isoloss.lab.training.train import check_compiled, train
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.runs import Run

DROPPING = ModelConfig(size="d16", dropout=0.1)
ADVERSARY = AdversarialConfig(task="first", head_examples=8, loss_examples=8, task_examples=32)


def compiled(**changes):
    return small(**{"compiled": True, "model": DROPPING, "checkpoints": (0, 5), **changes})


def task_examples(_name, n):
    sentences = PairLanguage().batch(1, n, seed=9)
    return Examples(sentences, sentences.tokens[:, 0], 8)


def trained(path, config, language=None):
    language = language or PairLanguage(is_ragged=True)
    train(Run(path), config, language, validate=validate, task_examples=task_examples)
    return Run(path)


@pytest.mark.parametrize(
    "algorithm",
    [None, SAMConfig(), SAMConfig(batch="same"), ADVERSARY, FisherPenaltyConfig(sentences=4), FeatureEntropyConfig()],
    ids=["gradient", "sam-halves", "sam-same", "adversarial", "fisher-penalty", "feature-entropy"],
)
@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_it_is_training_as_with_transformers_blocks_up_to_rounding(tmp_path, algorithm, micro_batch_size):
    """Without dropout, whose bits are drawn in another order."""
    changes = {"model": ModelConfig(size="d16", dropout=0.0), "log_every": 1, "micro_batch_size": micro_batch_size}
    changes |= {} if algorithm is None else {"algorithm": algorithm}
    one, other = trained(tmp_path / "compiled", compiled(**changes)), trained(tmp_path / "plain", small(**changes))
    for ours, theirs in zip(one.metrics(), other.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    start = json.loads((one.path / "log.jsonl").read_text().splitlines()[0])
    assert (start["compiled"], start["threads"]) == (True, 1)


def test_other_devices_and_several_processes_are_refused():
    with pytest.raises(IsolossError, match="the device is cuda: name the device cpu"):
        check_compiled(torch.device("cuda"), ProcessGroup())
    with pytest.raises(IsolossError, match="takes one process, and these are 2"):
        check_compiled(torch.device("cpu"), ProcessGroup(world_size=2))


def test_the_compiled_step_is_part_of_what_decides_a_result():
    assert configs.fingerprint(compiled()) != configs.fingerprint(dataclasses.replace(compiled(), compiled=False))
    assert "compiled" not in configs.identity(TrainConfig(language=PRESETS["pcfg-laptop"][0]))
