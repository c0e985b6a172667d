"""A run whose process is killed, again and again, ends with the bytes of one that was not killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoloss.runs import Run

HELPERS = Path(__file__).parents[1] / "lab" / "training"

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from toy_language import PairLanguage
from isoloss import config as configs
from isoloss.config import AlgorithmConfig
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.lab.training.algorithms.base import Examples
from isoloss.lab.training.train import train
from isoloss.runs import Run
from isoloss.seeds import generator
from running import validate

path, steps, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
algorithm = configs.from_dict(AlgorithmConfig, json.loads(sys.argv[4]))
sgd = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9, schedule="linear")
stages = (  # the target is reached at step 21
    StageConfig(steps=7, batch_size=4), StageConfig(steps=100, target_kl=2.135, validate_every=3),
    StageConfig(steps=steps - 107, optimizer=sgd, batch_size=6),
) if sys.argv[5] else ()

class Deadly(PairLanguage):
    def batch(self, step, n, *, seed):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, n, seed=seed)

config = TrainConfig(
    language=PCFGConfig(),
    model=ModelConfig(size="d16", dropout=0.1),
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=5),
    steps=steps, batch_size=8, checkpoints=(0, 5, 20), log_every=3, threads=1, device="cpu",
    save_every_seconds=0.0, algorithm=algorithm, stages=stages,
)
sentences = PairLanguage().sample(40, generator=generator(0, "examples"))
examples = Examples(sentences, sentences.tokens[:, 0], 8)
train(Run(path), config, Deadly(is_ragged=True), task_examples=lambda name, n: examples, validate=validate)
"""


def start(path, steps, kill_at=0, algorithm=None, stages=False):
    algorithm = json.dumps(algorithm or {"kind": "gradient"})
    arguments = [str(path), str(steps), str(kill_at), algorithm, "stages" * stages]
    command = [sys.executable, "-c", SCRIPT, *arguments]
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


ALGORITHMS = [
    {"kind": "gradient"},
    {"kind": "sam"},
    {"kind": "adversarial", "head_examples": 8, "loss_examples": 4, "task_examples": 40},
    {"kind": "fisher-penalty", "sentences": 3},
]


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHMS[0], *(pytest.param(algorithm, marks=pytest.mark.slow) for algorithm in ALGORITHMS[1:])],
    ids=lambda algorithm: algorithm["kind"],
)
def test_killed_in_the_middle_of_a_step(tmp_path, algorithm):
    whole = start(tmp_path / "whole", steps=24, algorithm=algorithm)
    killed = tmp_path / "killed"
    assert start(killed, steps=24, kill_at=8, algorithm=algorithm).wait() == -signal.SIGKILL
    assert start(killed, steps=24, algorithm=algorithm).wait() == 0
    assert whole.wait() == 0
    assert content(Run(killed)) == content(Run(tmp_path / "whole"))


@pytest.mark.slow
def test_killed_at_the_borders_of_stages(tmp_path):
    whole = start(tmp_path / "whole", steps=115, stages=True)
    killed = Run(tmp_path / "killed")
    for step in (8, 22):  # the first steps after a border: the rest is tested faster where processes only raise
        assert start(killed.path, steps=115, kill_at=step, stages=True).wait() == -signal.SIGKILL
    assert start(killed.path, steps=115, stages=True).wait() == 0
    assert whole.wait() == 0
    assert content(killed) == content(Run(tmp_path / "whole"))
    assert [(s["step"], s["ended"]) for s in killed.result()["stages"]] == [
        (7, "steps done"),
        (21, "target reached"),
        (29, "steps done"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [False, True], ids=["plain", "stages"])
def test_killed_at_any_moment(tmp_path, stages):
    # a checkpoint is written after every step, so that most kills fall into the writing of one
    assert start(tmp_path / "whole", steps=400, stages=stages).wait() == 0
    killed = Run(tmp_path / "killed")
    kills = 0
    while not killed.complete:
        before = max(killed.steps(), default=-1)
        process = start(killed.path, steps=400, stages=stages)
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
