"""Runs with the compiled step: those of transformers' blocks up to rounding, the same bytes however interrupted."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from running import Signalling, content, small, validate
from toy_language import PairLanguage

from isoloss import config as configs
from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PRESETS
from isoloss.lab.training.algorithms.base import Examples
from isoloss.lab.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig
from isoloss.lab.training.distributed import ProcessGroup
from isoloss.lab.training.train import Interrupted, check_compiled, train
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.runs import Run

SGD = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9)
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


DIFFERENT = {
    "plain": compiled(),
    "clipped": compiled(seed=2, optimizer=OptimizerConfig(learning_rate=0.01, max_grad_norm=0.1)),
    "stages": compiled(
        seed=5,
        stages=(
            StageConfig(steps=30, target_kl=2.21, validate_every=2),
            StageConfig(steps=5, optimizer=SGD, batch_size=6),
            StageConfig(steps=3, algorithm=SAMConfig()),
        ),
        steps=38,
        log_every=2,
        checkpoints=(),
    ),
    "adversary": compiled(seed=7, algorithm=ADVERSARY),
}


@pytest.mark.parametrize(
    "algorithm",
    [None, SAMConfig(), SAMConfig(batch="same"), ADVERSARY, FisherPenaltyConfig(sentences=4)],
    ids=["gradient", "sam-halves", "sam-same", "adversarial", "fisher-penalty"],
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


SCRIPT = """
import json, multiprocessing, os, signal, sys
from pathlib import Path
from test_compiled import trained
from toy_language import PairLanguage
from isoloss import config as configs
from isoloss.run_config import TrainConfig

class Deadly(PairLanguage):
    def batch(self, step, n, *, seed):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, n, seed=seed)

path, config = Path(sys.argv[1]), configs.from_dict(TrainConfig, json.loads(sys.argv[2]))
for kill_at in map(int, sys.argv[3:]):  # in processes forked from this one, which imports for all
    process = multiprocessing.get_context("fork").Process(target=trained, args=(path, config, Deadly(is_ragged=True)))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if kill_at else 0)
"""


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_signal_saves_and_the_bytes_are_those_of_a_run_without(tmp_path, name):
    whole = trained(tmp_path / "whole", DIFFERENT[name])
    with pytest.raises(Interrupted):
        trained(tmp_path / "parts", DIFFERENT[name], Signalling([4], signal.SIGTERM, is_ragged=True))
    assert content(trained(tmp_path / "parts", DIFFERENT[name])) == content(whole)


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path):
    config = dataclasses.replace(DIFFERENT["stages"], save_every_seconds=0.0)
    helpers = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    arguments = [str(tmp_path / "killed"), json.dumps(configs.to_dict(config)), "4", "8", "0"]
    subprocess.run([sys.executable, "-c", SCRIPT, *arguments], env={**os.environ, "PYTHONPATH": helpers}, check=True)
    assert content(Run(tmp_path / "killed")) == content(trained(tmp_path / "whole", config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(architecture="lstm")}, "architecture is lstm; it must be bert"),
        ({"model": ModelConfig(architecture="bert-pre-ln")}, "architecture is bert-pre-ln; it must be bert"),
        ({"model": ModelConfig(size="d16", width=24)}, "width is 24; it must be a multiple of 16"),
        ({"model": ModelConfig(size="d16", ffn=50)}, "ffn is 50; it must be a multiple of 4"),
        ({"objective": ObjectiveConfig(masking="fraction")}, "masking is 'fraction'; it must be 'one'"),
        ({"precision": "bfloat16"}, "precision is bfloat16; it must be float32"),
        ({"threads": 2}, "threads is 2; it must be 1, or 0"),
    ],
)
def test_what_the_compiled_step_does_not_have_is_refused(changes, message):
    with pytest.raises(IsolossError, match=message):
        check(compiled(**changes))


def test_other_devices_and_several_processes_are_refused():
    with pytest.raises(IsolossError, match="the device is cuda: name the device cpu"):
        check_compiled(torch.device("cuda"), ProcessGroup())
    with pytest.raises(IsolossError, match="takes one process, and these are 2"):
        check_compiled(torch.device("cpu"), ProcessGroup(world_size=2))


def test_the_compiled_step_is_part_of_what_decides_a_result():
    assert configs.fingerprint(compiled()) != configs.fingerprint(dataclasses.replace(compiled(), compiled=False))
    assert "compiled" not in configs.identity(TrainConfig(language=PRESETS["pcfg-laptop"][0]))
