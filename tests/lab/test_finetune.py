"""Fine-tuning against a plain loop that reads one sentence at a time, and its folder against SIGKILL."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from finetuning import bert, opt, small_task
from isoloss import seeds
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.finetune_config import FinetuneConfig
from isoloss.lab.finetuning import finetune, num_steps
from isoloss.lab.languages.base import Sentences
from isoloss.lab.training.train import Interrupted
from isoloss.transfer.tasks import TaskData

FAST = FinetuneConfig(epochs=3, batch_size=8, seeds=2, learning_rate=0.01, warmup_steps=5)


def test_the_settings_are_the_papers() -> None:
    config = FinetuneConfig()
    assert (config.epochs, config.seeds) == (10, 5)
    assert (config.name, config.learning_rate, config.num_warmup_steps(780)) == ("adamw", 1e-4, 200)
    assert [config.num_warmup_steps(total) for total in (200, 199, 4)] == [200, 12, 0]  # of fewer, 6 %


def plain(
    model: PreTrainedModel,
    task: TaskData,
    index: int,
    *,
    pooling: str,
    rate: float,
    warmup: int,
    epochs: int,
    size: int,
) -> tuple[list[float], torch.Tensor]:
    """Return a seed's loss by epoch and its test logits: torch's AdamW, clipping and modules, sentence by sentence."""
    body = copy.deepcopy(model.base_model)
    head = torch.nn.Linear(16, len(task.classes))
    with torch.no_grad():
        head.weight.copy_(
            0.02 * torch.randn(len(task.classes), 16, generator=seeds.generator(0, "finetune", "head", index))
        )
        head.bias.zero_()

    def logits(sentences: Sentences, row: int) -> torch.Tensor:
        length = int(sentences.lengths[row])
        states = body(sentences.tokens[row : row + 1, :length]).last_hidden_state[0]
        return head({"first": states[0], "last": states[-1], "mean": states.mean(0)}[pooling])

    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.999),
    )
    n, step, losses = len(task.train_labels), 0, []
    total = epochs * len(range(0, n, size))
    for epoch in range(epochs):
        order = torch.randperm(n, generator=seeds.generator(0, "finetune", "order", index, epoch))
        summed = 0.0
        for rows in order.split(size):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * (step / warmup if step < warmup else (total + 1 - step) / (total + 1 - warmup))
            optimizer.zero_grad()
            found = torch.stack([logits(task.train, row) for row in rows.tolist()])
            loss = F.cross_entropy(found, task.train_labels[rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            summed += float(loss.detach()) * len(rows)
        losses.append(summed / n)
    with torch.no_grad():
        return losses, torch.stack([logits(task.test, row) for row in range(len(task.test_labels))])


@pytest.mark.parametrize(
    ("model", "pooling", "asked"),
    [(bert(), "first", "auto"), (bert(), "mean", "mean"), (opt(), "last", "auto")],
    ids=["bert", "mean", "causal"],
)
def test_each_seed_is_a_plain_loop(model: PreTrainedModel, pooling: str, asked: str) -> None:
    task = small_task()
    result = finetune(model, task, replace(FAST, pooling=asked, epochs=2))
    assert result.accuracy.details["pooling"] == pooling
    assert result.predictions.shape == (2, 30)
    for index in range(2):
        losses, logits = plain(model, task, index, pooling=pooling, rate=0.01, warmup=5, epochs=2, size=8)
        assert result.details["losses_nats"][index] == pytest.approx(losses, rel=2e-4)
        top = logits.topk(2).values
        clear = top[:, 0] - top[:, 1] > 5e-3
        assert int(clear.sum()) > 25
        assert torch.equal(result.predictions[index][clear], logits.argmax(1)[clear])
    assert result.details["losses_nats"][0] != result.details["losses_nats"][1]


def test_a_rule_is_learned_and_the_model_is_left_as_it_was() -> None:
    model, task = bert(dropout=0.1), small_task(200, 100)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    result = finetune(model, task, replace(FAST, epochs=4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training
    assert result.accuracy.value > 0.95 > task.majority_rate
    assert result.correct.shape == (2, 100)
    assert result.classes == task.classes


def test_token_types_reach_the_model() -> None:
    model, task = bert(), small_task()
    zeros = torch.zeros_like(task.train.tokens), torch.zeros_like(task.test.tokens)
    plainly = finetune(model, task, FAST)
    with_zeros = finetune(model, replace(task, train_types=zeros[0], test_types=zeros[1]), FAST)
    assert with_zeros.details == plainly.details
    with_ones = finetune(model, replace(task, train_types=zeros[0] + 1, test_types=zeros[1] + 1), FAST)
    assert with_ones.details != plainly.details


def test_parts_of_a_batch_add_up_to_it() -> None:
    whole, parts = (finetune(bert(), small_task(), replace(FAST, micro_batch_size=size)) for size in (0, 3))
    for left, right in zip(whole.details["losses_nats"], parts.details["losses_nats"], strict=True):
        assert left == pytest.approx(right, rel=1e-4)


# --- the folder

SCRIPT = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from finetuning import bert, small_task
from isoloss.lab.finetuning import finetune
from test_finetune import FAST

def progress(step, note):
    if step == 25:
        os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
finetune(bert(dropout=0.1), small_task(), replace(FAST, save_every_seconds=0.0), output=folder, progress=progress)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_killed_and_run_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run([sys.executable, "-c", SCRIPT, str(killed)], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert set(content(killed)) == {"finetune.json", "seed-0.json", "seed-1.safetensors"}  # 18 steps a seed
    steps: list[int] = []
    for folder in (whole, killed):
        progress = lambda step, note: steps.append(step)  # noqa: E731
        finetune(bert(dropout=0.1), small_task(), FAST, output=folder, progress=progress)
    # killed before the state of step 25 was written
    assert steps == [*range(1, 37), *range(25, 37)]
    assert set(content(whole)) == {"finetune.json", "seed-0.json", "seed-1.json"}
    assert content(killed) == content(whole)


def test_a_signal_saves_and_the_same_call_goes_on(tmp_path: Path) -> None:
    model, task, whole = bert(dropout=0.1), small_task(), finetune(bert(dropout=0.1), small_task(), FAST)
    steps: list[int] = []

    def progress(step: int, note: str) -> None:
        steps.append(step)
        if step == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="interrupted after step 20, which is saved"):
        finetune(model, task, FAST, output=tmp_path / "state", progress=progress)
    result = finetune(model, task, FAST, output=tmp_path / "state", progress=progress)
    assert steps == [*range(1, 37)]
    assert 2 * num_steps(FAST, 41) == 36
    assert torch.equal(result.predictions, whole.predictions)
    assert result.details == whole.details


def test_more_seeds_keep_those_that_are_there(tmp_path: Path) -> None:
    model, task = bert(), small_task()
    finetune(model, task, replace(FAST, seeds=1), output=tmp_path / "state")
    steps: list[int] = []
    result = finetune(model, task, FAST, output=tmp_path / "state", progress=lambda step, note: steps.append(step))
    assert steps == [*range(19, 37)]
    assert result.details == finetune(model, task, FAST).details


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    model, task, folder = bert(), small_task(), tmp_path / "state"
    short = replace(FAST, seeds=1, epochs=1)
    finetune(model, task, short, output=folder)
    before = content(folder)
    for changed, message in (
        ((model, task, replace(short, batch_size=4)), r"another config \(config.batch_size is 4 here and 8 there\)"),
        ((model, task, replace(short, learning_rate=0.5)), "config.learning_rate is 0.5 here and 0.01 there"),
        ((bert(dropout=0.1), replace(task, name="other"), short), r"task is 'other' here and 'thirds' there"),
        ((opt(), task, short), "weights is '"),
        ((model, replace(task, test_labels=task.test_labels.flip(0)), short), r"\(test is '"),
    ):
        with pytest.raises(IsolossError, match=message):
            finetune(*changed, output=folder)
    assert content(folder) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(IsolossError, match="is not empty and holds no fine-tuning"):
        finetune(model, task, short, output=tmp_path)


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    def progress(step: int, note: str) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        finetune(bert(), small_task(), FAST, output=tmp_path, progress=progress)
    state = tmp_path / "seed-0.safetensors"
    state.write_bytes(state.read_bytes()[:-40])
    with pytest.raises(IsolossError, match=r"seed-0.safetensors is damaged .* delete it, and its seed starts again"):
        finetune(bert(), small_task(), FAST, output=tmp_path)


# --- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"seeds": 0}, "seeds is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"micro_batch_size": -1}, "micro_batch_size is -1"),
        ({"save_every_seconds": -1.0}, "save_every_seconds is -1.0"),
        ({"pooling": "max"}, "pooling is 'max'; it must be one of auto, first, last, mean"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"warmup_steps": 200}, "warmup_steps is 200, more than the 18 steps"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(IsolossError, match=message):
        finetune(bert(), small_task(), replace(FAST, **changes))


def test_a_class_that_training_lacks_counts_as_errors() -> None:
    task = small_task()
    unseen = replace(task, train_labels=task.train_labels.clamp(max=1))
    with pytest.warns(IsolossWarning, match="have a label that none of the 41 training examples has"):
        result = finetune(bert(), unseen, FAST)
    assert (task.test_labels == 2).any()
    assert result.accuracy.value <= 1 - float((task.test_labels == 2).double().mean())


def test_what_does_not_fit_is_named() -> None:
    task = small_task()
    strange = Sentences(task.train.tokens + 13, task.train.lengths)
    with pytest.raises(IsolossError, match="the token id 32, and the model knows 0 to 19"):
        finetune(bert(), replace(task, train=strange), FAST)
    long = Sentences(torch.ones(30, 8, dtype=torch.int64), torch.full((30,), 8))
    with pytest.raises(IsolossError, match="up to 8 tokens, and the model reads 7 at most"):
        finetune(bert(), replace(task, test=long), FAST)
    with pytest.raises(IsolossError, match="the model is bfloat16; fine-tuning needs float32"):
        finetune(bert().bfloat16(), task, FAST)
    with pytest.raises(IsolossError, match="Linear has no base_model"):
        finetune(torch.nn.Linear(2, 2), task, FAST)


def test_a_loss_that_is_not_finite_ends_it() -> None:
    model = bert()
    with torch.no_grad():
        model.base_model.embeddings.word_embeddings.weight[5] = float("nan")
    with pytest.raises(IsolossError, match=r"the loss at step 1 of 18 of seed 0 is nan: lower the learning rate"):
        finetune(model, small_task(), FAST)
