"""Runs trained together: each is what it is alone, bit for bit, wherever it ends, and however it was interrupted."""

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
from isoloss.languages.config import PRESETS
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.runs import Run
from isoloss.training.algorithms.config import SAMConfig
from isoloss.training.optimizers import Optimizer, RowOptimizer
from isoloss.training.stack import Member, StackError, train_together
from isoloss.training.trainer import Interrupted, train

SGD = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9)
DROPPING = ModelConfig(size="d16", dropout=0.1)


def stacked(**changes):
    return small(**{"stacked": True, "model": DROPPING, "checkpoints": (0, 5), **changes})


def member(path, config, language=None):
    return Member(Run(path), config, language or PairLanguage(is_ragged=True), validate=validate)


def alone(path, config, language=None):
    train(Run(path), config, language or PairLanguage(is_ragged=True), validate=validate)
    return Run(path)


DIFFERENT = {
    "plain": stacked(),
    "seed": stacked(seed=1),
    "clipped": stacked(seed=2, optimizer=OptimizerConfig(learning_rate=0.01, max_grad_norm=0.1)),
    "batch": stacked(seed=3, batch_size=6, steps=7),
    "averaged": stacked(seed=4, ema=0.9),
    "stages": stacked(
        seed=5,
        stages=(StageConfig(steps=30, target_kl=2.21, validate_every=2), StageConfig(steps=5, optimizer=SGD)),
        steps=35,
        log_every=2,
        checkpoints=(),
    ),
    "prefetched": stacked(seed=6, prefetch=True),
}


# --- a member is what it is alone


def test_runs_trained_together_have_the_bytes_of_runs_trained_alone(tmp_path):
    train_together([member(tmp_path / "together" / name, config) for name, config in DIFFERENT.items()])
    for name, config in DIFFERENT.items():
        run = alone(tmp_path / "alone" / name, config)
        assert content(Run(tmp_path / "together" / name)) == content(run), name
    ends = Run(tmp_path / "together" / "stages").result()["stages"]
    assert [stage["ended"] for stage in ends] == ["target reached", "steps done"]
    assert ends[0]["step"] < 30
    start = json.loads((tmp_path / "together" / "plain" / "log.jsonl").read_text().splitlines()[0])
    assert (start["blocks"], start["threads"]) == ("stacked", 1)


def test_it_is_training_as_without_a_stack_up_to_rounding(tmp_path):
    """Without dropout, whose bits are drawn in another order."""
    changes = {"model": ModelConfig(size="d16", dropout=0.0), "log_every": 1}
    one, other = alone(tmp_path / "stacked", stacked(**changes)), alone(tmp_path / "plain", small(**changes))
    for ours, theirs in zip(one.metrics(), other.metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("optimizer", [OptimizerConfig(max_grad_norm=0.5, weight_decay=0.1), SGD], ids=["adamw", "sgd"])
def test_a_rows_optimizer_is_that_of_the_model(optimizer):
    from isoloss.models.make import make_model
    from isoloss.models.stacked import Stack

    language = PairLanguage()
    model = make_model(DROPPING, language, seed=0)
    stack = Stack(model, 3)
    for row in range(3):
        stack.read(row, model)
    ours, theirs = RowOptimizer(stack, 1, optimizer, total=10), Optimizer(model, optimizer, total=10)
    generator = torch.Generator().manual_seed(0)
    for number in range(1, 4):
        parts = stack.layout.views(stack.gradients[1])
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            parts[name].copy_(p.grad)
        rate, norm = theirs.update(number, with_norm=True)
        assert ours.update(number, with_norm=True) == (rate, pytest.approx(norm, rel=1e-6))
    for name, p in model.named_parameters():
        torch.testing.assert_close(stack.layout.views(stack.parameters[1])[name], p.detach(), rtol=1e-6, atol=1e-7)
    mine, state = ours.state(), theirs.state()
    assert mine.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-9)
    again = RowOptimizer(stack, 2, optimizer, total=10)
    again.load_state(mine)
    assert all(bool((tensor == mine[name]).all()) for name, tensor in again.state().items())
    with pytest.raises(IsolossError, match="fits no parameter"):
        again.load_state({next(iter(mine)): torch.zeros(2, 3)})


# --- members that end


def test_a_run_that_fails_leaves_the_others_alone(tmp_path):
    bad = stacked(optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0), steps=20)
    wrong_weights = stacked(init_from="nowhere")
    with pytest.raises(StackError) as caught:
        train_together(
            [
                member(tmp_path / "diverges", bad),
                member(tmp_path / "good", stacked()),
                member(tmp_path / "starts-from-nothing", wrong_weights),
            ]
        )
    assert caught.value.errors.keys() == {"diverges", "starts-from-nothing"}
    assert "diverges: the " in str(caught.value)
    assert not Run(tmp_path / "diverges").complete
    assert content(Run(tmp_path / "good")) == content(alone(tmp_path / "alone", stacked()))


def test_runs_that_are_complete_stay_as_they_are(tmp_path):
    config = stacked()
    train_together([member(tmp_path / "a", config)])
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*") if p.is_file() and p.name != ".lock"}
    train_together([member(tmp_path / "a", config), member(tmp_path / "b", stacked(seed=1))])
    assert all(p.stat().st_mtime_ns == time for p, time in before.items())
    assert Run(tmp_path / "b").complete


# --- interrupted and killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_all_runs(tmp_path, number):
    both = {"a": stacked(), "b": stacked(seed=1)}
    with pytest.raises(Interrupted):
        train_together(
            [
                member(tmp_path / "a", both["a"], Signalling([4], number, is_ragged=True)),
                member(tmp_path / "b", both["b"]),
            ]
        )
    assert [max(Run(tmp_path / name).steps()) for name in "ab"] == [4, 3]  # `a` was making the batch of its 4th step
    train_together([member(tmp_path / "b", both["b"])])  # one alone, the other later
    train_together([member(tmp_path / "a", both["a"])])
    for name, config in both.items():
        assert content(Run(tmp_path / name)) == content(alone(tmp_path / f"alone-{name}", config))


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from running import validate
from toy_language import PairLanguage
from isoloss import config as configs
from isoloss.run_config import TrainConfig
from isoloss.runs import Run
from isoloss.training.stack import Member, train_together

class Deadly(PairLanguage):
    def batch(self, step, n, *, seed):
        if step == kill_at and seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, n, seed=seed)

kill_at = int(sys.argv[1])
train_together([
    Member(Run(Path(path)), configs.from_dict(TrainConfig, document), Deadly(is_ragged=True), validate=validate)
    for path, document in json.loads(sys.argv[2]).items()
])
"""


def process(runs, kill_at=0):
    documents = json.dumps({str(path): configs.to_dict(config) for path, config in runs.items()})
    helpers = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(kill_at), documents], env={**os.environ, "PYTHONPATH": helpers}, check=False
    ).returncode


def test_killed_runs_go_on_together_or_alone(tmp_path):
    """Killed in the middle of a step, after runs of the stack have saved it and before others have."""
    runs = {
        tmp_path / name: dataclasses.replace(DIFFERENT[name], save_every_seconds=0.0, steps=steps)
        for name, steps in (("plain", 10), ("clipped", 10), ("stages", 35))
    }
    assert process(runs, kill_at=4) == -signal.SIGKILL
    assert process(runs, kill_at=8) == -signal.SIGKILL
    steps = {path.name: max(Run(path).steps()) for path in runs}
    assert steps == {"plain": 7, "clipped": 7, "stages": 5}  # the last one was a step behind at each kill
    some = list(runs)[::2]
    assert process({path: runs[path] for path in some}) == 0  # without the one whose language kills
    assert process(runs) == 0
    for path, config in runs.items():
        assert content(Run(path)) == content(alone(tmp_path / "alone" / path.name, config)), path.name


# --- what does not stack


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(architecture="lstm")}, "architecture is lstm; only BERTs"),
        ({"model": ModelConfig(architecture="bert-pre-ln")}, "architecture is bert-pre-ln; only BERTs"),
        ({"model": ModelConfig(size="d16", width=24)}, "width is 24; it must be a multiple of 16"),
        ({"model": ModelConfig(size="d16", ffn=50)}, "ffn is 50; it must be a multiple of 4"),
        ({"objective": ObjectiveConfig(masking="fraction")}, "masking is 'fraction'; it must be 'one'"),
        ({"algorithm": SAMConfig()}, "algorithm is sam; it must be gradient"),
        ({"stages": (StageConfig(steps=10, algorithm=SAMConfig()),)}, r"stages\[0\].* algorithm is sam"),
        ({"precision": "bfloat16"}, "precision is bfloat16; it must be float32"),
        ({"micro_batch_size": 2}, "micro_batch_size is 2; it must be 0"),
        ({"threads": 2}, "threads is 2; it must be 1, or 0"),
    ],
)
def test_a_config_that_does_not_stack_says_why(changes, message):
    with pytest.raises(IsolossError, match=message):
        check(stacked(**changes))


def test_runs_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(IsolossError, match="stacked = false"):
        train_together([member(tmp_path / "a", stacked()), member(tmp_path / "b", small())])
    with pytest.raises(IsolossError, match="not of the shape of the others"):
        train_together(
            [member(tmp_path / "c", stacked()), member(tmp_path / "d", stacked(model=ModelConfig(size="d32")))]
        )
    with pytest.raises(IsolossError, match="in use"):
        train_together([member(tmp_path / "e", stacked()), member(tmp_path / "e", stacked())])
    assert not any((tmp_path / name).joinpath("run.json").exists() for name in "abe")


def test_stacked_is_part_of_what_decides_a_result():
    assert configs.fingerprint(stacked()) != configs.fingerprint(dataclasses.replace(stacked(), stacked=False))
    plain = TrainConfig(language=PRESETS["pcfg-laptop"][0])
    assert "stacked" not in configs.identity(plain)
