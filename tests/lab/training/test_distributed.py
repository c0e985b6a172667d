"""Two processes over gloo: the same as one, checkpoints that any number goes on from, and an end that all come to."""

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from distributed_workers import (
    FAILED,
    LOST,
    SGD,
    Workers,
    command_line,
    examples,
    language_of,
    measure,
    one_voice,
    train_all,
    train_all_on_a_full_disk,
    validate_on_main,
)
from running import STAGES, Signalling, content, small
from stepping import batches, context, gradients_of, plain_loss, reference, tiny
from toy_language import PairLanguage

from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.models.make import make_model
from isoloss.lab.training.algorithms.adversarial import Adversarial
from isoloss.lab.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig
from isoloss.lab.training.distributed import ProcessGroup, SingleProcess
from isoloss.lab.training.objectives import prediction_loss, training_batch
from isoloss.lab.training.train import Interrupted, train
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig
from isoloss.runs import Run
from isoloss.seeds import derive

STEPS = 6
EVEN = ModelConfig(size="d16", dropout=0.0)
# a small rate: AdamW scales the rounding of gradients that are nearly 0 up to its full step
ADAMW = OptimizerConfig(learning_rate=0.0005, warmup_steps=3)
CLIPPED = dataclasses.replace(SGD, max_grad_norm=0.5)
FRACTION = ObjectiveConfig(masking="fraction", fraction=0.5)  # unequally many predicted tokens
ADVERSARIAL = AdversarialConfig(weight=0.5, head_examples=10, loss_examples=6, task_examples=40)
PENALTY = FisherPenaltyConfig(weight=0.02, sentences=5)


def config(**changes):
    return small(**{"model": EVEN, "steps": STEPS, "log_every": 2, "optimizer": SGD, **changes})


SAME_AS_ONE = {
    "adamw": config(optimizer=ADAMW, objective=FRACTION),
    "sgd": config(optimizer=CLIPPED, objective=FRACTION, micro_batch_size=3, measure_every=2),
    "schedule-free": config(optimizer=dataclasses.replace(ADAMW, name="schedule-free"), measure_every=2),
    "sam": config(algorithm=SAMConfig(rho=0.2), objective=FRACTION, micro_batch_size=1),
    "sam-same": config(algorithm=SAMConfig(rho=0.2, batch="same"), optimizer=ADAMW),
    "exact": config(objective=dataclasses.replace(FRACTION, labels="exact")),
    "adversarial": config(algorithm=ADVERSARIAL, micro_batch_size=2),
    "penalty": config(algorithm=PENALTY, objective=FRACTION, optimizer=dataclasses.replace(SGD, learning_rate=0.01)),
    "lstm": config(model=dataclasses.replace(EVEN, architecture="lstm", size="h16")),
    "opt": config(model=dataclasses.replace(EVEN, architecture="opt"), objective=ObjectiveConfig(kind="causal")),
}
WITH_FSDP = {
    f"fsdp-{name}": dataclasses.replace(SAME_AS_ONE[name], parallel="fsdp", **changes)
    for name, changes in {
        # of two layers; a token a sentence, as AdamW scales up the rounding by which a share that happens to have one
        # each differs
        "adamw": {
            "model": dataclasses.replace(EVEN, size="d128"),
            "batch_size": 4,
            "objective": ObjectiveConfig(),
        },
        "sam": {},
        "adversarial": {},
        "opt": {},
    }.items()
}
PER_PROCESS = {
    "sam-per-process": config(algorithm=SAMConfig(rho=0.2, batch="same", ascent="per-process")),
    "adversarial-per-process": config(algorithm=dataclasses.replace(ADVERSARIAL, head="per-process")),
    "fsdp-adversarial-per-process": config(
        algorithm=dataclasses.replace(ADVERSARIAL, head="per-process"), parallel="fsdp"
    ),
}
NOISY = config(model=ModelConfig(size="d16", dropout=0.2), optimizer=ADAMW, steps=9, checkpoints=(0, 4))
SHARDED_NOISY = dataclasses.replace(NOISY, parallel="fsdp")
# AdamW until its target, at step 6, then SGD, then a decay
STAGED = config(stages=STAGES, steps=39, optimizer=small().optimizer, checkpoints=(4,))
WHOLE = {
    "noisy": NOISY,
    "fsdp-noisy": SHARDED_NOISY,
    "staged": STAGED,
    "fsdp-staged": dataclasses.replace(STAGED, parallel="fsdp"),
}


ONE_STEP = config(model=NOISY.model, steps=1, log_every=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of runs by two processes."""
    folder = tmp_path_factory.mktemp("two")
    workers = Workers(folder, train_all, folder, {**SAME_AS_ONE, **WITH_FSDP, **PER_PROCESS, **WHOLE, "one": ONE_STEP})
    assert workers.wait() == [0, 0], workers.output()
    return folder


def check_same(got, want, *, rtol=1e-5, atol=1e-5):
    """Fail unless two runs' metrics and weights are the same to 1e-5."""
    assert len(got.metrics()) == len(want.metrics()) > 0
    for a, b in zip(got.metrics(), want.metrics(), strict=True):
        assert list(a) == list(b)
        assert a.pop("stage_ended", None) == b.pop("stage_ended", None)
        assert a == pytest.approx(b, rel=rtol)
    step = max(want.steps())
    found = load_model(got.checkpoint(step)).model.state_dict()
    for name, value in load_model(want.checkpoint(step)).model.state_dict().items():
        # the keys' biases have a gradient of 0 but for rounding, which AdamW scales up to its full step
        if not name.endswith(("key.bias", "k_proj.bias")):
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", [*SAME_AS_ONE, *WITH_FSDP])
def test_two_processes_train_as_one(trained, tmp_path, name):
    settings = {**SAME_AS_ONE, **WITH_FSDP}[name]
    one = Run(tmp_path / "one")
    train(one, settings, language_of(settings), task_examples=examples, measure=measure)
    check_same(Run(trained / name), one)
    assert {path.relative_to(one.path) for path in one.path.rglob("*")} == {
        path.relative_to(trained / name) for path in (trained / name).rglob("*")
    }


@pytest.mark.parametrize("name", ["staged", "fsdp-staged"])
def test_two_processes_end_a_stage_at_the_same_step_as_one(trained, tmp_path, name):
    one, two = Run(tmp_path / "one"), Run(trained / name)
    train(one, WHOLE[name], language_of(STAGED), validate=validate_on_main)
    # AdamW scales up the rounding of gradients that are nearly 0
    check_same(two, one, rtol=1e-3, atol=1e-3)
    assert two.result()["stages"][0]["ended"] == "target reached"
    assert two.steps() == one.steps()


def test_each_process_may_have_its_own_ascent_point(trained):
    """m-sharpness: the gradient of each share at the point that this share climbs to."""
    settings = PER_PROCESS["sam-per-process"]

    def gradient(model, _t, batch):
        loss, total = plain_loss(model, batch), [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            rows = slice(rank, None, 2)
            own = gradients_of(plain_loss(model, batch, rows), model)
            norm = torch.stack([g.norm() for g in own]).norm()
            climbed = copy.deepcopy(model)
            with torch.no_grad():
                for p, g in zip(climbed.parameters(), own, strict=True):
                    p.add_(settings.algorithm.rho * g / norm)
            for sum_, g in zip(total, gradients_of(plain_loss(climbed, batch, rows), climbed), strict=True):
                sum_.add_(g / 2)  # one predicted token a sentence, so that both shares weigh the same
        return loss, total

    check_reference(Run(trained / "sam-per-process"), settings, gradient)


@pytest.mark.parametrize("name", ["adversarial-per-process", "fsdp-adversarial-per-process"])
def test_each_process_may_have_its_own_head(trained, name):
    settings = PER_PROCESS[name]

    def gradient(model, t, batch):
        loss = plain_loss(model, batch)
        objective = loss
        for rank in range(2):
            parts = {"language": PairLanguage(is_ragged=True), "task_examples": examples, "seed": settings.seed}
            made = context(SGD, total=1, parallel=SingleProcess(model, ProcessGroup(rank, 2)), **parts)
            algorithm = Adversarial(model, made, settings.algorithm)
            objective = objective - settings.algorithm.weight * algorithm.head_loss(t)[0] / 2
        return loss, gradients_of(objective, model)

    check_reference(Run(trained / name), settings, gradient)


def check_reference(run, settings, gradient):
    expected, outcomes = reference(tiny(torch.float32), settings.optimizer, gradient, batches(STEPS))
    last = run.metrics()[-1]
    assert last["loss_nats"] == pytest.approx((outcomes[-1][0] + outcomes[-2][0]) / 2, rel=1e-5)
    assert last["grad_norm"] == pytest.approx(outcomes[-1][2], rel=1e-4)
    found = load_model(run.checkpoint(STEPS)).model.state_dict()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_dropout_is_drawn_by_rank(trained):
    language, losses = PairLanguage(is_ragged=True), []
    model = make_model(ONE_STEP.model, language, seed=ONE_STEP.seed)
    for rank in range(2):
        share = training_batch(language, ONE_STEP, 1, torch.device("cpu"), ProcessGroup(rank, 2).rows()).inputs
        torch.manual_seed(derive(ONE_STEP.seed, "dropout", 1, rank))
        losses.append(prediction_loss(model, share, causal=False).item())
    assert Run(trained / "one").metrics()[0]["loss_nats"] == pytest.approx(sum(losses) / 2, rel=1e-6)


# --- stopping and going on


class Stopped(PairLanguage):
    """Sends a signal to the process of one rank, or raises there, while the batch of a step is made."""

    def __init__(self, step, rank, what):
        super().__init__(is_ragged=True)
        self.step, self.rank, self.what = step, rank, what

    def batch(self, step, n, *, seed):
        if step == self.step and os.environ.get("RANK") == str(self.rank):
            if isinstance(self.what, IsolossError):
                raise self.what
            os.kill(os.getpid(), self.what)
        return super().batch(step, n, seed=seed)


# by the folder of a run: the same run without a stop, and what stops it: one of its two processes, a full disk, or
# (None) one of them in the first step of the second stage
STOPS = {
    "quick": {
        "killed": ("fsdp-noisy", Stopped(7, 1, signal.SIGKILL)),
        "killed-at-the-border": ("staged", None),
        "interrupted": ("noisy", Stopped(7, 1, signal.SIGTERM)),
        "full": ("noisy", 4000),
    },
    "slow": {
        "killed": ("noisy", Stopped(7, 0, signal.SIGKILL)),
        "killed-at-the-border": ("fsdp-staged", None),
        "interrupted": ("fsdp-noisy", Stopped(7, 1, signal.SIGTERM)),
    },
}


@pytest.fixture(scope="module", params=["quick", pytest.param("slow", marks=pytest.mark.slow)])
def stopped(request, trained, tmp_path_factory):
    """The folder of runs that were stopped and have gone on since; of each what stopped it, and what became of it."""
    folder, stops, found = tmp_path_factory.mktemp("stopped"), STOPS[request.param], {}
    for name, (whole, cause) in stops.items():
        target = train_all_on_a_full_disk if name == "full" else train_all
        cause = cause or Stopped(border_of(Run(trained / whole)) + 1, 0, signal.SIGKILL)
        workers = Workers(folder, target, folder, {name: WHOLE[whole]}, cause)
        found[name] = (whole, cause, workers.wait(), workers.output(), Run(folder / name).steps())
    again = Workers(folder, train_all, folder, {name: WHOLE[whole] for name, (whole, _) in stops.items()})
    assert again.wait() == [0, 0], again.output()
    return folder, found


def test_a_stopped_run_goes_on_bit_for_bit(trained, stopped):
    folder, found = stopped
    for name, (whole, *_) in found.items():
        assert content(Run(folder / name)) == content(Run(trained / whole)), name


def border_of(run):
    """The last step of the first stage."""
    return run.result()["stages"][0]["step"]


def test_all_processes_end_and_what_was_saved_is_kept(stopped):
    folder, found = stopped
    for name, (_, cause, statuses, output, steps) in found.items():
        if name.startswith("killed"):
            assert statuses[cause.rank] == -signal.SIGKILL
            assert statuses[1 - cause.rank] == LOST
            assert "another process of this run has ended" in output[1 - cause.rank]
            assert steps == ([0, 4] if name == "killed" else [4, border_of(Run(folder / name))])
        else:
            message = "cannot write the checkpoint" if name == "full" else "interrupted after step 7, which is saved"
            assert statuses == [FAILED, FAILED]
            assert all(message in text for text in output)
            assert steps == ([] if name == "full" else [0, 4, 7])


@pytest.mark.parametrize("name", ["fsdp-adamw", pytest.param("adamw", marks=pytest.mark.slow)])
def test_one_process_goes_on_with_what_two_began_and_two_with_what_one_began(trained, tmp_path, name):
    settings, run = {**SAME_AS_ONE, **WITH_FSDP}[name], Run(tmp_path / name)
    began = Workers(tmp_path, train_all, tmp_path, {name: settings}, Stopped(2, 0, signal.SIGINT))
    assert began.wait() == [FAILED, FAILED]
    assert run.steps() == [2]
    with pytest.raises(Interrupted):
        train(run, settings, Signalling({4}, is_ragged=True))
    assert run.steps() == [4]
    ended = Workers(tmp_path, train_all, tmp_path, {name: settings})
    assert ended.wait() == [0, 0], ended.output()
    check_same(run, Run(trained / name))
    log = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    assert [line["processes"] for line in log if line["event"] == "start"] == [2, 1, 2]


# --- what goes wrong in one is told once, and ends all


TINY = ("--language", "pcfg-laptop", "--size", "d16", "--device", "cpu", "--threads", "1", "--batch-size", "8")


def command(tmp_path, *options, **arguments):
    """Start the command in two processes; return their exit statuses and all that they wrote."""
    workers = Workers(tmp_path, command_line, "train", str(tmp_path / "run"), *TINY, *options, **arguments)
    statuses = workers.wait()
    return statuses, "".join(workers.output())


def test_the_command_says_once_what_it_says(tmp_path):
    statuses, text = command(tmp_path, "--steps", "50", "--measure-every", "50")
    assert statuses == [0, 0], text
    assert text.count("50 steps done, last training loss") == 1
    assert text.count("checkpoints (step): 50") == 1
    assert Run(tmp_path / "run").metrics()[0]["trace"] > 0


def test_the_command_says_once_what_is_wrong(tmp_path):
    statuses, text = command(tmp_path, "--batch-size", "7")
    assert statuses == [FAILED, FAILED]
    assert text.count("batch_size is 7; 2 processes need a multiple of 2") == text.count("isoloss train: ") == 1, text
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_error_of_one_ends_the_other_which_says_nothing_more(tmp_path):
    workers = Workers(tmp_path, one_voice, tmp_path, NOISY, Stopped(6, 1, IsolossError("the text is gone")))
    assert workers.wait() == [FAILED, FAILED]
    assert workers.output() == ["", "the text is gone\n"]


def test_a_loss_that_is_not_finite_is_told_by_all(tmp_path):
    diverging = config(optimizer=OptimizerConfig(name="sgd", learning_rate=1e30, warmup_steps=0))
    workers = Workers(tmp_path, train_all, tmp_path, {"run": diverging})
    assert workers.wait() == [FAILED, FAILED]
    assert all("the loss at step 2 is nan" in text for text in workers.output())


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6, "algorithm": SAMConfig()}, "sam's halves on 2 processes need a multiple of 4"),
        ({"algorithm": FisherPenaltyConfig(sentences=1)}, "sentences are 1; 2 processes need at least one each"),
    ],
)
def test_a_batch_that_does_not_divide_among_the_processes(changes, message):
    settings = config(**changes)
    settings.algorithm.check_run(settings)
    with pytest.raises(IsolossError, match=message):
        settings.algorithm.check_run(settings, num_processes=2)


def test_a_process_has_the_device_of_its_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [ProcessGroup(rank, 4, rank % 2).device("auto").index for rank in range(4)] == [0, 1, 0, 1]
    assert ProcessGroup(1, 2, 1).device("cpu") == torch.device("cpu")
    with pytest.raises(IsolossError, match=r"process 3 of this machine has no device of its own, .* finds 2 CUDA"):
        ProcessGroup(2, 3, 2).device("cuda")
    with pytest.raises(IsolossError, match="the device is 'cuda:1', and 2 processes cannot share it"):
        ProcessGroup(0, 2).device("cuda:1")


# --- as users start it


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ctrl_c_to_torchrun_saves(tmp_path, parallel):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train_words = ["-m", "isoloss", "train", str(tmp_path / "run"), *TINY, "--steps", "400", "--parallel", parallel]
    run = Run(tmp_path / "run")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*launcher, *train_words], stdout=log, stderr=log)
    while process.poll() is None and not run.metrics():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    text = (tmp_path / "log").read_text()
    stopped = f"stopped at step {run.steps()[0]} of 400; progress is saved. To resume, with any number"
    assert text.count(stopped) == 1, text
    assert subprocess.run([*launcher, *train_words, "--json"], capture_output=True, check=False).returncode == 0
    assert run.complete
    whole = Run(tmp_path / "whole")
    train_words[3] = str(whole.path)
    assert subprocess.run([*launcher, *train_words], capture_output=True, check=False).returncode == 0
    assert content(run) == content(whole)
