"""The loop: what a run directory holds at the end, and resuming bit for bit."""

import gc
import json
import math
import os
import signal
import threading
import weakref

import pytest
import torch
from running import Dying, Signalling, content, files_of_at_most, small, trained
from safetensors.torch import load_file
from toy_language import PairLanguage

from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import BERT
from isoloss.lab.training.algorithms.config import SAMConfig
from isoloss.lab.training.objectives import prediction_loss, training_batch
from isoloss.lab.training.train import Interrupted, Progress, Training, train
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig
from isoloss.runs import Run


def weights(run, step):
    return run.checkpoint(step) / "model.safetensors"


# --- what a run leaves


def test_a_run_holds_what_it_should(tmp_path):
    config = small(checkpoints=(0, 5))
    run = trained(tmp_path / "run", config)
    assert run.complete
    assert run.config == config
    assert run.steps() == [0, 5, 10]
    assert set(content(run)) == {"metrics.jsonl", "result.json"} | {
        f"checkpoints/step-{step}/{name}"
        for step in (0, 5, 10)
        for name in ("config.json", "model.safetensors", "trainer.json", "trainer.safetensors")
    }
    result = files.read_json(run.path / "result.json")
    assert result["steps"] == 10
    assert result["loss_nats"] == run.metrics()[-1]["loss_nats"]
    assert result["num_parameters"] == load_model(run.checkpoint(10)).model.num_parameters()
    assert result["dtype"] == "float32"
    assert result["initial_sha256"] is None
    initial = BERT.new_model(config.model, vocab_size=10, max_length=4, pad_id=8, seed=0).state_dict()
    assert all(torch.equal(value, initial[name]) for name, value in load_file(weights(run, 0)).items())
    assert result["checkpoints"] == {str(step): files.sha256(weights(run, step)) for step in (0, 5, 10)}


def test_the_metrics_are_those_of_a_loop_written_out(tmp_path):
    config = small(model=ModelConfig(size="d16", dropout=0.0), optimizer=OptimizerConfig(name="sgd", warmup_steps=3))
    run = trained(tmp_path, config)
    language = PairLanguage()
    model = BERT.new_model(config.model, vocab_size=10, max_length=4, pad_id=8, seed=0)
    losses, norms, rates = [], [], []
    for step in range(1, 11):
        sentences = language.batch(step, 8, seed=0)
        batch = training_batch(language, config, step, torch.device("cpu")).inputs
        hidden = batch["labels"] >= 0
        loss = torch.nn.functional.cross_entropy(model(batch["input_ids"]).logits[hidden], sentences.tokens[hidden])
        parameters = list(model.named_parameters())
        gradients = torch.autograd.grad(loss, [p for _, p in parameters])
        losses.append(loss.item())
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
        rates.append(1e-3 * min(1, step / 3))
        with torch.no_grad():
            for (name, p), g in zip(parameters, gradients, strict=True):
                is_exempt = "bias" in name or "LayerNorm" in name
                p -= rates[-1] * (g + (0 if is_exempt else 0.01) * p)
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [4, 8, 10]
    for line, start in zip(metrics, (0, 4, 8), strict=True):
        step = line["step"]
        assert list(line) == ["step", "loss_nats", "learning_rate", "grad_norm"]
        assert line["loss_nats"] == pytest.approx(sum(losses[start:step]) / (step - start), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norms[step - 1], rel=1e-4)
        assert line["learning_rate"] == pytest.approx(rates[step - 1])
    found = load_model(run.checkpoint(10)).model.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "size", "rate", "steps"),
    [
        ("bert", "d64", 0.01, 200),
        ("bert-pre-ln", "d32", 0.01, 300),
        ("lstm", "h16", 0.02, 200),
        ("opt", "d16", 0.02, 150),
    ],
)
def test_training_reaches_the_languages_entropy(tmp_path, architecture, size, rate, steps):
    language, causal = PairLanguage(noise=0.1, is_ragged=True), architecture == "opt"
    config = small(
        model=ModelConfig(architecture=architecture, size=size, dropout=0.0),
        objective=ObjectiveConfig(kind="causal" if causal else "masked"),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=20, weight_decay=0.0),
        steps=steps,
        batch_size=128,
        log_every=50,
    )
    losses = [line["loss_nats"] for line in trained(tmp_path, config, language).metrics()]
    entropy = language.entropy_nats()
    if causal:  # of a pair's first token, and of its second given the first
        entropy = (math.log(8) + entropy) / 2
    assert losses[0] > entropy + 0.1
    # a token's loss has a standard deviation of 1.2, and the mean over 6,400 tokens one of 0.015; the entropy is 0.47
    assert entropy - 0.05 < losses[-1] < entropy + 0.1


def test_seeding_dropout_seeds_torch_and_keeps_nothing():
    from torch.cuda import _queued_calls

    from isoloss.lab.training.process import seed_dropout

    queued = len(_queued_calls)
    with torch.random.fork_rng(devices=[]):
        seed_dropout(7, torch.device("cpu"))
        drawn = torch.rand(5)
        assert len(_queued_calls) == queued  # as torch.manual_seed would, for each step, where there is no GPU
        torch.manual_seed(7)
        assert torch.equal(torch.rand(5), drawn)


def test_dropout_is_on_and_follows_the_seed(tmp_path):
    runs = [
        trained(tmp_path / str(i), small(model=ModelConfig(size="d16", dropout=rate), seed=seed))
        for i, (rate, seed) in enumerate([(0.1, 0), (0.1, 0), (0.2, 0), (0.1, 1)])
    ]
    first, again, *others = [content(run)["metrics.jsonl"] for run in runs]
    assert first == again
    assert first not in others


def test_the_callers_process_is_left_as_it_was(tmp_path):
    before = torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    trained(tmp_path, small(threads=before[1] + 1, steps=2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == before[1:]


def test_a_complete_run_is_left_alone(tmp_path):
    run = trained(tmp_path)
    with files.lock(run.path):  # it does not even ask for the lock
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        train(run, small(), PairLanguage())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_training_works_outside_the_main_thread(tmp_path):
    thread = threading.Thread(target=trained, args=(tmp_path,))
    thread.start()
    thread.join()
    assert Run(tmp_path).complete


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("isoloss.lab.training.train.REPORT_SECONDS", 0.0)
    reports: list[Progress] = []
    train(Run(tmp_path / "all"), small(), PairLanguage(is_ragged=True), progress=reports.append)
    assert [(report.step, report.steps) for report in reports] == [(step, 10) for step in range(1, 11)]
    losses = [report.loss_nats for report in reports]
    assert sum(losses[:4]) / 4 == pytest.approx(Run(tmp_path / "all").metrics()[0]["loss_nats"])
    num_tokens = sum(int(PairLanguage(is_ragged=True).batch(s, 8, seed=0).lengths.sum()) for s in range(1, 11))
    assert reports[-1].tokens_per_second == pytest.approx(num_tokens / reports[-1].seconds, rel=0.1)

    monkeypatch.setattr("isoloss.lab.training.train.REPORT_SECONDS", 1e9)
    train(Run(tmp_path / "last"), small(), PairLanguage(is_ragged=True), progress=reports.append)
    assert [report.step for report in reports[10:]] == [10]
    assert reports[-1].loss_nats == pytest.approx(sum(losses) / 10)


# --- stopping and going on


def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(tmp_path):
    config = small(checkpoints=(0, 5))
    run, language = Run(tmp_path / "run"), Signalling({1, 5, 7, 8, 10})
    # one in the last step completes the run, and is not lost
    for step in (1, 5, 7, 8, 10):
        with pytest.raises(Interrupted, match=f"interrupted after step {step}, which is saved") as caught:
            train(run, config, language)
        assert caught.value.step == step
        assert run.complete == (step == 10)
        assert run.steps() == sorted({0, step} | ({5} if step > 5 else set()))
    assert content(run) == content(trained(tmp_path / "whole", config))


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    class Impatient(PairLanguage):
        def batch(self, step, n, *, seed):
            if step == 6:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().batch(step, n, seed=seed)

    run = Run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, small(checkpoints=(4,)), Impatient())
    assert run.steps() == [4]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(run, small(checkpoints=(4,)), PairLanguage())
    assert content(run) == content(trained(tmp_path / "whole", small(checkpoints=(4,))))


def test_checkpoints_to_go_on_from_come_by_the_clock_and_go_again(tmp_path):
    config = small(checkpoints=(4,), save_every_seconds=0.0)
    run = Run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(run, config, Dying(8))
    assert run.steps() == [4, 7]
    train(run, config, PairLanguage())
    assert content(run) == content(trained(tmp_path / "whole", small(checkpoints=(4,))))

    rare = Run(tmp_path / "rare")
    with pytest.raises(ZeroDivisionError):
        train(rare, small(checkpoints=(4,), save_every_seconds=1e9), Dying(8))
    assert rare.steps() == [4]


def test_what_a_killed_process_left_behind_is_cleared_away(tmp_path):
    config = small(checkpoints=(5,), log_every=2)
    whole = trained(tmp_path / "whole", config)
    run = Run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(run, config, Dying(9))
    assert [line["step"] for line in run.metrics()] == [2, 4, 6, 8]  # beyond the checkpoint of step 5
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    (run.path / "checkpoints" / ".tmp-1-step-9").mkdir()
    (run.path / "checkpoints" / ".tmp-1-step-9" / "config.json").write_text("{")
    (run.path / ".tmp-1-result.json").write_text("{")
    train(run, config, PairLanguage())
    assert content(run) == content(whole)


def test_the_log_says_what_the_clock_said(tmp_path):
    with pytest.raises(Interrupted):
        train(Run(tmp_path), small(), Signalling({3}))
    trained(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("interrupted", 3),
        ("start", 3),
        ("complete", 10),
    ]
    assert events[0]["device"] == "cpu"
    assert (events[0]["threads"], events[0]["attention"], events[0]["compiled"]) == (1, "eager", False)
    assert events[-1]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(4000, r"cannot write the checkpoint .*step-8"), (350, r"cannot write .*metrics\.jsonl: File too large")],
)
def test_a_full_disk_loses_nothing_that_was_written(tmp_path, num_bytes, message):
    config = small(checkpoints=(4, 8), log_every=2)
    whole = trained(tmp_path / "whole", config)
    run = Run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(run, config, Dying(6))
    before = {name: data for name, data in content(run).items() if name.startswith("checkpoints")}
    with files_of_at_most(num_bytes), pytest.raises(IsolossError, match=message):
        train(run, config, PairLanguage())
    assert {name: data for name, data in content(run).items() if name in before} == before
    assert run.steps() == [4]
    train(run, config, PairLanguage())
    assert content(run) == content(whole)


# --- starting from a checkpoint


def test_a_run_starts_from_anothers_weights(tmp_path):
    first = trained(tmp_path / "first", small(checkpoints=(6,)))
    config = small(init_from="../first/checkpoints/step-6", checkpoints=(0,), steps=3)
    second = trained(tmp_path / "second", config)
    assert weights(second, 0).read_bytes() == weights(first, 6).read_bytes()
    assert files.read_json(second.path / "result.json")["initial_sha256"] == files.sha256(weights(first, 6))

    interrupted = Run(tmp_path / "interrupted")
    with pytest.raises(Interrupted):
        train(interrupted, config, Signalling({2}))
    (tmp_path / "first").rename(tmp_path / "gone")  # the weights are only needed to start
    train(interrupted, config, PairLanguage())
    assert content(interrupted) == content(second)


def test_a_branch_goes_on_with_the_optimizers_state(tmp_path):
    still = {"model": ModelConfig(size="d16", dropout=0.0)}
    stable = trained(tmp_path / "stable", small(checkpoints=(6,), **still))
    decay = OptimizerConfig(learning_rate=0.01, warmup_steps=0, schedule="1-sqrt")
    source = {"init_from": "../stable/checkpoints/step-6", "init_optimizer": True}
    config = small(**still, **source, optimizer=decay, steps=4, seed=1)
    branch = trained(tmp_path / "branch", config)

    model = load_model(str(stable.checkpoint(6))).model.train()
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98))
    state = load_file(stable.checkpoint(6) / "trainer.safetensors")
    for name, parameter in parameters.items():
        adamw.state[parameter] = {what: state[f"{what}/{name}"] for what in ("step", "exp_avg", "exp_avg_sq")}
    for step in range(1, 5):
        batch = training_batch(PairLanguage(), config, step, torch.device("cpu")).inputs
        for group in adamw.param_groups:
            group["lr"] = 0.01 * (1 - ((step - 1) / 4) ** 0.5)
        adamw.zero_grad()
        prediction_loss(model, batch, causal=False).backward()
        adamw.step()
    got = load_file(branch.checkpoint(4) / "model.safetensors")
    for name, parameter in parameters.items():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-4, atol=1e-5)

    interrupted = Run(tmp_path / "interrupted")
    with pytest.raises(Interrupted):
        train(interrupted, config, Signalling({2}))
    train(interrupted, config, PairLanguage())
    assert content(interrupted) == content(branch)


def test_a_branch_that_cannot_be_is_refused(tmp_path):
    sgd = OptimizerConfig(name="sgd", momentum=0.5)
    stages = (StageConfig(steps=4), StageConfig(steps=6, optimizer=sgd))
    trained(tmp_path / "first", small(stages=stages, steps=10, checkpoints=(6,)))
    last = {"init_from": "../first", "init_optimizer": True, "seed": 1}
    for changes, message in (
        (last, "step-10 has the state of sgd: choose the same optimizer"),
        ({**last, "optimizer": sgd, "algorithm": SAMConfig()}, "has the state of gradient: choose the same algorithm"),
        (
            {**last, "optimizer": sgd, "seed": 0},
            r"seed is 0, also that of the run of .* whose first batches this run would",
        ),
        (
            {**last, "init_from": "../first/checkpoints/step-4", "optimizer": sgd},
            "step-4 has no state of its optimizer",
        ),
        ({"init_optimizer": True}, r"init_optimizer is on, and there is no init_from"),
    ):
        with pytest.raises(IsolossError, match=message):
            trained(tmp_path / "branch", small(**changes))
        assert not (tmp_path / "branch" / "run.json").exists()
    trained(tmp_path / "branch", small(**{**last, "optimizer": sgd}))


def test_initial_weights_that_do_not_fit_are_refused(tmp_path):
    trained(tmp_path / "first")
    with pytest.raises(IsolossError, match=r"do not fit the model: .* \(10, 16\) there and \(10, 32\) in the model"):
        trained(tmp_path / "wide", small(model=ModelConfig(size="d32"), init_from="../first/checkpoints/step-10"))
    with pytest.raises(IsolossError, match="is not a checkpoint folder"):
        trained(tmp_path / "none", small(init_from="../first/checkpoints/step-11"))


@pytest.mark.parametrize("settings", [{}, {"compiled": True}])
def test_what_was_trained_is_freed_at_its_end(tmp_path, monkeypatch, settings):
    if "compiled" in settings:  # numba's compiler keeps its callers until they are collected
        trained(tmp_path / "first", small(**settings))
        gc.collect()
    made, begin = [], Training.__post_init__

    def noted(training):
        made.append(weakref.ref(training))
        begin(training)

    monkeypatch.setattr(Training, "__post_init__", noted)
    gc.disable()
    try:
        trained(tmp_path / "run", small(**settings))
        assert [training() for training in made] == [None]
    finally:
        gc.enable()
