"""Processes for the tests of several processes: forked from one that has torch imported, told their places by the
environment as torchrun does."""

import multiprocessing
import os
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

from running import files_of_at_most, validate
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.base import Examples
from isoloss.lab.training.distributed import ProcessLost, process_group
from isoloss.lab.training.train import train
from isoloss.run_config import OptimizerConfig
from isoloss.runs import Run
from isoloss.seeds import generator

FAILED, LOST = 2, 3  # exit statuses of a worker

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["distributed_workers", "isoloss.cli.train", "isoloss.lab.evaluation.pretraining"])

SGD = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0, momentum=0.5)


class Workers:
    """Two processes that do the same; `wait` ends them and gives their exit statuses and what they wrote."""

    def __init__(self, folder, target, *arguments, number=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank-{rank}.log" for rank in range(number)]
        self.processes = [
            CONTEXT.Process(target=_enter, args=(rank, number, port, self.logs[rank], target, arguments), daemon=True)
            for rank in range(number)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds=120):
        for process in self.processes:
            process.join(seconds)
        hanging = [process for process in self.processes if process.is_alive()]
        for process in hanging:
            process.kill()
        assert not hanging, self.output()
        return [process.exitcode for process in self.processes]

    def output(self):
        """What each printed, without what gloo says of itself in torch 2.8."""
        texts = [log.read_text() if log.exists() else "" for log in self.logs]
        return ["".join(line for line in text.splitlines(True) if not line.startswith("[Gloo]")) for text in texts]


def _enter(rank, number, port, log, target, arguments):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("error")
    try:
        status = target(*arguments) or 0
    except ProcessLost as error:
        print(error)
        status = LOST
    except IsolossError as error:
        print(error)
        status = FAILED
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)


def examples(task="root", n=40):
    sentences = PairLanguage(is_ragged=True).sample(n, generator=generator(0, "examples"))
    return Examples(sentences, sentences.tokens[:, 0], 8)


def language_of(config):
    """The toy language, or that of the config where exact labels are wanted."""
    return config.language.build() if config.objective.labels == "exact" else PairLanguage(is_ragged=True)


def train_all(folder, configs, language=None):
    """Train each config in the folder of its name."""
    with process_group():
        for name, config in configs.items():
            train(
                Run(Path(folder) / name),
                config,
                language or language_of(config),
                task_examples=examples,
                measure=measure,
                validate=validate_on_main,
            )


def train_all_on_a_full_disk(folder, configs, num_bytes):
    """Train where no file grows beyond a size."""
    with files_of_at_most(num_bytes):
        train_all(folder, configs)


def one_voice(folder, config, language):
    """Train, and print an error as the command does."""
    with process_group() as group:
        try:
            train(Run(Path(folder) / "run"), config, language)
        except IsolossError as error:
            if group.is_first_to_report():
                print(error)
            return FAILED
    return 0


def measure(model):
    """What is logged on the way: a number that only whole weights give."""
    return {"sum_of_squares": sum(float(p.detach().double().square().sum()) for p in model.parameters())}


def validate_on_main(what, model):
    """What rank 0 compares with a target; another rank, which must not, would find it reached at once."""
    return {**validate(what, model), **({f"validation_{what}_nats": 0.0} if os.environ.get("RANK") == "1" else {})}


def command_line(*arguments):
    from isoloss.cli.main import main

    return main(list(arguments))
