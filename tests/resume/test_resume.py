"""A run whose process is killed, again and again, ends with the bytes of one that was not killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoloss.runs import Run

HELPERS = Path(__file__).parents[1] / "lab" / "training"

SCRIPT = """
import json, multiprocessing, os, signal, sys
from pathlib import Path
from toy_language import PairLanguage
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.lab.training.train import train
from isoloss.runs import Run
from running import validate

attempts, steps = json.loads(sys.argv[1]), int(sys.argv[2])
sgd = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9, schedule="linear")
stages = (  # the target is reached at step 21
    StageConfig(steps=7, batch_size=4), StageConfig(steps=100, target_kl=2.135, validate_every=3),
    StageConfig(steps=steps - 107, optimizer=sgd, batch_size=6),
) if sys.argv[3] else ()

class Deadly(PairLanguage):
    def __init__(self, kill_at):
        super().__init__(is_ragged=True)
        self.kill_at = kill_at

    def batch(self, step, n, *, seed):
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, n, seed=seed)

config = TrainConfig(
    language=PCFGConfig(),
    model=ModelConfig(size="d16", dropout=0.1),
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=5),
    steps=steps, batch_size=8, checkpoints=(0, 5, 20), log_every=3, threads=1, device="cpu",
    save_every_seconds=0.0, stages=stages,
)

def attempt(path, kill_at):
    train(Run(Path(path)), config, Deadly(kill_at), validate=validate)

*earlier, last = attempts
for path, kill_at in earlier:  # in processes forked from this one, which imports for all
    process = multiprocessing.get_context("fork").Process(target=attempt, args=(path, kill_at))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if kill_at else 0)
attempt(*last)
"""


def start(*attempts, steps, stages=False):
    """Start a process for each attempt at a run, one after the other: a path, and the step at which it is killed."""
    attempts = json.dumps([(str(path), kill_at) for path, kill_at in attempts])
    command = [sys.executable, "-c", SCRIPT, attempts, str(steps), "stages" * stages]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": f"{HELPERS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    )


def content(run):
    """Every file's bytes, by name; of run.json all but the commit, which may change between two processes."""
    found = {str(p.relative_to(run.path)): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file()}
    record = json.loads(found.pop("run.json"))
    del record["commit"]
    left = {name: data for name, data in found.items() if name not in ("log.jsonl", ".lock")}
    return {**left, "run.json": record}


def test_killed_in_the_middle_of_a_step(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start((whole, 0), (killed, 8), (killed, 0), steps=24).wait() == 0
    assert content(Run(killed)) == content(Run(whole))


@pytest.mark.slow
def test_killed_at_the_borders_of_stages(tmp_path):
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    # the first steps after a border: the rest is tested faster where processes only raise
    attempts = [(whole.path, 0), (killed.path, 8), (killed.path, 22), (killed.path, 0)]
    assert start(*attempts, steps=115, stages=True).wait() == 0
    assert content(killed) == content(whole)
    assert [(s["step"], s["ended"]) for s in killed.result()["stages"]] == [
        (7, "steps done"),
        (21, "target reached"),
        (29, "steps done"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [False, True], ids=["plain", "stages"])
def test_killed_at_any_moment(tmp_path, stages):
    # a checkpoint is written after every step, so that most kills fall into the writing of one
    assert start((tmp_path / "whole", 0), steps=400, stages=stages).wait() == 0
    killed = Run(tmp_path / "killed")
    kills = 0
    while not killed.complete:
        before = max(killed.steps(), default=-1)
        process = start((killed.path, 0), steps=400, stages=stages)
        # with stages, the borders are among the first steps, so that these are gone through more slowly
        while process.poll() is None and max(killed.steps(), default=-1) < before + (1 if stages else 20) + kills:
            time.sleep(0.001)
        time.sleep(0.0007 * kills)
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait()
    assert kills >= 5
    assert content(killed) == content(Run(tmp_path / "whole"))
