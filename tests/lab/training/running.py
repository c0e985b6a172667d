"""What the tests of whole runs share: small configs, a process that gets signals, a run's files."""

import contextlib
import os
import resource
import signal

import torch
from toy_language import PairLanguage

from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.objectives import prediction_loss
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.runs import Run
from isoloss.text.masking import objective_batch


def small(**changes):
    arguments = {
        "language": PCFGConfig(),
        "model": ModelConfig(size="d16"),
        "optimizer": OptimizerConfig(learning_rate=0.01, warmup_steps=3),
        "steps": 10,
        "batch_size": 8,
        "log_every": 4,
        "threads": 1,
        "device": "cpu",
        **changes,
    }
    return TrainConfig(**arguments)


SGD_MOMENTUM = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9)
STAGES = (
    StageConfig(steps=30, target_kl=2.21, validate_every=2),
    StageConfig(steps=5, optimizer=SGD_MOMENTUM, batch_size=4),
    StageConfig(steps=4, optimizer=OptimizerConfig(learning_rate=0.01, schedule="linear", warmup_steps=1)),
)
ENDS = (6, 11, 15)  # the target is reached at step 6 of at most 30


def staged(**changes):
    """Return a config of three stages, the first of which ends at its target."""
    return small(**{"stages": STAGES, "steps": 39, "log_every": 2, **changes})


def validate(what, model):
    """Return the loss of a model on sentences that are the same each time, under the name of what is asked for."""
    sentences = PairLanguage().sample(64, generator=torch.Generator().manual_seed(1))
    masks = torch.Generator().manual_seed(2)
    batch = objective_batch(sentences, PairLanguage(), ObjectiveConfig(), generator=masks)
    with torch.no_grad():
        return {f"validation_{what}_nats": prediction_loss(model, batch, causal=False).item()}


def trained(path, config=None, language=None, validate=None):
    run = Run(path)
    train(run, config or small(), language or PairLanguage(), validate=validate)
    return run


class Signalling(PairLanguage):
    """Sends this process a signal while the batches of some steps are made, each once."""

    def __init__(self, at, number=signal.SIGINT, **arguments):
        super().__init__(**arguments)
        self.at, self.number = set(at), number

    def batch(self, step, n, *, seed):
        if step in self.at:
            self.at.remove(step)
            os.kill(os.getpid(), self.number)
        return super().batch(step, n, seed=seed)


class Dying(PairLanguage):
    """Stops like a process that dies: at a step, without a word to the loop."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def batch(self, step, n, *, seed):
        if step == self.step:
            raise ZeroDivisionError
        return super().batch(step, n, seed=seed)


def content(run):
    """Every file that has to be the same, by name."""
    found = {str(p.relative_to(run.path)): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file()}
    return {name: data for name, data in found.items() if name not in ("log.jsonl", ".lock", "run.json")}


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """Let no file grow beyond this, as a full disk does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
