"""The callback in a real Trainer: what it logs, and that training does not notice it."""

import contextlib

import pytest
import small_models
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.flatness.trainer_callback import FlatnessCallback, evaluating

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")


def bert():
    return small_models.bert(12, layers=1, dropout=0.1, spread=0.02, dtype=torch.float32)


def rows(n, seed):
    tokens = torch.randint(0, 12, (n, 6), generator=torch.Generator().manual_seed(seed))
    labels = tokens.masked_fill(torch.arange(6) % 3 != 1, -100)
    return [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(tokens, labels, strict=True)]


def held_out():
    return [{name: torch.stack([row[name] for row in rows(40, 1)]) for name in ("input_ids", "labels")}]


def trained(tmp_path, callbacks, *, log=False, **options):
    model = bert()
    chosen = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    arguments = TrainingArguments(output_dir=str(tmp_path), **chosen | options)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows(24, 0), eval_dataset=rows(8, 2), callbacks=callbacks
    )
    if log:
        callbacks[0].log = trainer.log
    trainer.train()
    return model, trainer.state.log_history


def test_the_trainer_logs_traces_and_trains_as_without_them(tmp_path, capsys):
    callback = FlatnessCallback(iter(held_out()), every=2)
    model, history = trained(tmp_path, [callback])
    plain, plain_history = trained(tmp_path, [])
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses == [entry["loss"] for entry in plain_history if "loss" in entry]
    logged = [entry for entry in history if "fisher_trace" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6] == list(callback.traces)
    assert len({entry["fisher_trace"] for entry in logged}) == 3  # each of another model
    last = fisher_trace(model.eval(), held_out())
    assert (logged[-1]["fisher_trace"], logged[-1]["fisher_trace_stderr"]) == (last.value, last.stderr)
    assert callback.traces[6].value == last.value


OPTIONS = {
    "max_steps": 12,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "logging_first_step": True,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    "load_best_model_at_end": True,
}


def patience():
    return EarlyStoppingCallback(early_stopping_patience=2)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A folder, a model that was trained without the callback, and its history."""
    folder = tmp_path_factory.mktemp("without")
    return folder, *trained(folder, [patience()], **OPTIONS)


@pytest.mark.parametrize("log", [False, True])
def test_the_trainers_history_is_the_same_with_the_callback(tmp_path, without, log):
    """Losses, evaluations and checkpoints at the steps they had, also where the trace is logged at the same step."""
    callback = FlatnessCallback(held_out(), every=4)
    model, history = trained(tmp_path, [callback, patience()], log=log, **OPTIONS)
    folder, plain, expected = without
    clock = ("runtime", "per_second")

    def without_clock(entries):
        return [{name: value for name, value in entry.items() if not name.endswith(clock)} for entry in entries]

    assert len([entry for entry in expected if "loss" in entry]) == 7
    assert without_clock(e for e in history if "fisher_trace" not in e) == without_clock(expected)
    assert [entry["step"] for entry in history if "fisher_trace" in entry] == [4, 8, 12] == list(callback.traces)
    for made in (tmp_path, folder):
        assert sorted(path.name for path in made.glob("*")) == [
            "checkpoint-12",
            "checkpoint-4",
            "checkpoint-8",
        ]
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_each_part_gets_its_mode_back_and_the_random_state_too():
    model = bert().train()
    model.bert.embeddings.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before = torch.get_rng_state()
    with contextlib.suppress(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        torch.rand(3)
        raise ZeroDivisionError
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), before)
    with evaluating(nn.Dropout()) as module:
        assert not module.training


def test_settings_out_of_range_are_refused_before_training():
    with pytest.raises(IsolossError, match="every is 0"):
        FlatnessCallback(held_out(), every=0)
    with pytest.raises(IsolossError, match="rtol is 2"):
        FlatnessCallback(held_out(), every=1, rtol=2)
    with pytest.raises(IsolossError, match="single batch"):
        FlatnessCallback(held_out()[0], every=1)
