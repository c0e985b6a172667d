"""Fine-tuning: a pre-trained model and a fresh linear head, trained on a task, for several seeds (paper, A.5).

A folder makes it resumable:

finetune.json             what decides the result: config, weights, examples
seed-K.json               predictions of a seed that is done
seed-K.safetensors        the state of a seed that is not done

Shape letters: S seeds, n examples, T tokens, d the width of the states, C classes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError, require
from isoloss.lab.finetune_config import FinetuneConfig
from isoloss.lab.training.algorithms.base import TrainingAlgorithm, TrainingContext
from isoloss.lab.training.process import process_settings, seed_dropout, signals
from isoloss.lab.training.train import Interrupted
from isoloss.model_checks import is_causal_class
from isoloss.runs import versions
from isoloss.seeds import derive, generator
from isoloss.text.masking import Batch
from isoloss.transfer.features import backbone_of, check_sentences, pool
from isoloss.transfer.results import TransferResult, absent_classes, check_labels, score
from isoloss.transfer.tasks import TaskData

_DEVIATION = 0.02  # of the head's initial weights, as in BERT
_PREDICTED_AT_ONCE = 256


def finetune(
    model: Any,
    task: TaskData,
    config: FinetuneConfig | None = None,
    *,
    output: Path | None = None,
    progress: Callable[[int, str], None] | None = None,
    **settings: Any,
) -> TransferResult:
    """Fine-tune copies of `model`, one for each seed, and return their test accuracy.

    The head is a linear layer on one state of the last layer, by default the first token's: [CLS] in tasks of real
    text, and an ordinary token of a synthetic language's sentences, which have no [CLS]. A causal model's last
    token is read instead; where the language has a start token, put it before the sentences (`read_from_start`). All
    weights are trained, dropout is that of the model's config, and there is no early stopping: the accuracy is that of
    the weights after the last step.

    With an `output`, a state is kept once a minute; Ctrl-C and SIGTERM save one and raise `Interrupted`. The same call
    then goes on from there, also after SIGKILL, and ends with the same result bit for bit on one device with the same
    number of threads. When more `seeds` are asked for, those in the folder are kept.

    Args:
        model: A Hugging Face model in float32, as `isoloss.checkpoints.loading.load_model` gives it; it stays as it is.
        task: Labeled sentences.
        config: The settings; None: the paper's.
        output: Folder where the state is kept; new, or of the same model, task and config. None: nowhere.
        progress: Called after every step with the number of steps so far, of `num_steps` times the seeds, and a note.
        settings: Fields of `FinetuneConfig` that replace those of `config`, e.g. `epochs=3`.

    Returns:
        The accuracy, with `seed_std` among its details, and the predictions of each seed; `details` has `losses_nats`,
        the mean training loss of each epoch of each seed.

    Raises:
        IsolossError: A setting out of its range; labels or tokens that do not fit; a model that is not float32; a loss
            or a prediction that is not finite; a folder of something else, of another config (the fields that differ
            are named), or in use.
        Interrupted: A signal came, and all is saved.

    Example:
        >>> from isoloss import finetune, load_language
        >>> from isoloss.lab.models.make import make_model
        >>> from isoloss.run_config import ModelConfig
        >>> from isoloss.lab.tasks import make_task
        >>> language = load_language("pcfg-laptop")
        >>> model = make_model(ModelConfig(size="d16"), language, seed=0)
        >>> task = make_task(language, "prefix-4", num_train=64, num_test=32, seed=0)
        >>> result = finetune(model, task, epochs=3, seeds=2, learning_rate=1e-2, warmup_steps=4, schedule="constant")
        >>> tuple(result.predictions.shape), result.details["losses_nats"][0][0] > result.details["losses_nats"][0][2]
        ((2, 32), True)
    """
    began = time.perf_counter()
    config = configs.replaced(config or FinetuneConfig(), settings)
    require("model", model, nn.Module, "a model, such as load_model(CHECKPOINT).model")
    require("task", task, TaskData, "a task, which make_task returns")
    steps = num_steps(config, len(task.train_labels))
    config.check_steps(steps)
    backbone, pooling = backbone_of(model), config.pooling
    if pooling == "auto":
        pooling = "last" if is_causal_class(type(model).__name__, model.config) else "first"
    check_labels(task.train_labels, task.test_labels, task.classes)
    for sentences in (task.train, task.test):
        check_sentences(backbone, sentences)
    if model.dtype != torch.float32:
        raise IsolossError(f"the model is {str(model.dtype).removeprefix('torch.')}; fine-tuning needs float32")
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_settings(0, model.device))
        # without a folder there is nothing to save, and Ctrl-C is a KeyboardInterrupt as ever
        stopped: Callable[[], bool] = lambda: False  # noqa: E731
        if output is not None:
            stack.enter_context(files.lock(output))
            _claim(output, _identity(backbone, task, config))
            # only in a folder that `_claim` has found to be this fine-tuning's
            files.remove_unfinished(output)
            stopped = stack.enter_context(signals())
        # one after another, and each without a name, so that only one seed's copy of the model is in memory
        done = [
            _Seed(index, backbone, pooling, task, config, output).run(stopped, progress)
            for index in range(config.seeds)
        ]
    return score(
        torch.tensor([seed["predictions"] for seed in done]),
        task.test_labels,
        task.classes,
        method="fine-tuning",
        settings={
            **configs.to_dict(config),
            "warmup_steps": config.num_warmup_steps(steps),
            "pooling": pooling,
            "num_train": len(task.train_labels),
            "steps": steps,
            "num_parameters": sum(p.numel() for p in backbone.parameters()),
            "attention": backbone.config._attn_implementation,
            "device": model.device.type,
        },
        bayes=task.bayes,
        details={"losses_nats": [seed["losses_nats"] for seed in done]},
        seconds=time.perf_counter() - began,
    )


def num_steps(config: FinetuneConfig, num_train: int) -> int:
    """Return the steps that one seed makes on `num_train` examples."""
    return config.epochs * math.ceil(num_train / config.batch_size)


class Classifier(nn.Module):
    """A model's body with a linear head on one of its last states, whose initial weights come from `draws`."""

    def __init__(self, backbone: Any, pooling: str, width: int, num_classes: int, draws: torch.Generator) -> None:
        super().__init__()
        self.backbone, self.pooling = backbone, pooling
        self.head = nn.Linear(width, num_classes)
        with torch.no_grad():
            self.head.weight.copy_(_DEVIATION * torch.randn(num_classes, width, generator=draws))
            self.head.bias.zero_()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the logits (n, C) of `input_ids`, `attention_mask` and, where it is there, `token_type_ids`."""
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        states: torch.Tensor = self.backbone(**inputs).last_hidden_state
        logits: torch.Tensor = self.head(pool(states, batch["attention_mask"].bool(), self.pooling))
        return logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy of the `labels`, in nats: a scalar."""
        return nn.functional.cross_entropy(self(batch), batch["labels"])


class _Seed:
    """The fine-tuning of one seed."""

    def __init__(
        self, index: int, backbone: Any, pooling: str, task: TaskData, config: FinetuneConfig, folder: Path | None
    ) -> None:
        self.index, self.backbone, self.pooling = index, backbone, pooling
        self.task, self.config, self.folder = task, config, folder
        self._result, self._state = (Path(folder or "", f"seed-{index}.{kind}") for kind in ("json", "safetensors"))
        self.total = num_steps(config, len(task.train_labels))
        self.per_epoch = self.total // config.epochs
        self.device = next(backbone.parameters()).device

    def run(self, stopped: Callable[[], bool], progress: Callable[[int, str], None] | None) -> dict[str, Any]:
        """Return the predictions (n_test ids) and the losses by epoch, computed now or read from the folder.

        Where `stopped` says so after a step, save the state and raise `Interrupted`.
        """
        if self.folder is not None and self._result.exists():
            document: dict[str, Any] = files.read_json(self._result)
            return document
        self._start()
        saved = time.monotonic()
        while self.step < self.total:
            loss = self._one_step()
            if progress is not None:
                note = f"seed {self.index + 1} of {self.config.seeds}, loss {loss:.4f} nats"
                progress(self.index * self.total + self.step, note)
            # after the last step comes the result, and a state would be of no use
            if self.folder is not None and self.step < self.total:
                stop = stopped()
                if stop or time.monotonic() - saved >= self.config.save_every_seconds:
                    self._save()
                    saved = time.monotonic()
                if stop:
                    raise Interrupted(self.index * self.total + self.step)
        self.algorithm.optimizer.to_evaluated()
        result = {"predictions": self._predict().tolist(), "losses_nats": self.losses.tolist()}
        if self.folder is not None:
            # the result first: killed in between, the seed counts as done, and its state is not read
            files.write_json(self._result, result)
            self._state.unlink(missing_ok=True)
        return result

    def _start(self) -> None:
        """Begin at the pre-trained weights and a fresh head, or at the state in the folder."""
        draws = generator(self.config.seed, "finetune", "head", self.index)
        one = {name: tensor[:, :1].to(self.device) for name, tensor in self.task.batch("test", slice(0, 1)).items()}
        with torch.no_grad():
            width = int(self.backbone(**one).last_hidden_state.shape[-1])
        self.classifier = Classifier(copy.deepcopy(self.backbone), self.pooling, width, len(self.task.classes), draws)
        self.classifier.to(self.device).train()
        context = TrainingContext(
            optimizer=self.config, total_steps=self.total, micro_batch_size=self.config.micro_batch_size
        )
        self.algorithm = TrainingAlgorithm(self.classifier, context)
        self.step = 0
        self.losses = torch.zeros(self.config.epochs, dtype=torch.float64)
        if self.folder is not None and self._state.exists():
            self._load()

    def _one_step(self) -> float:
        """Make the next step and return its loss."""
        epoch, index = divmod(self.step, self.per_epoch)
        count, size = len(self.task.train_labels), self.config.batch_size
        # a function of the epoch, so that a resumed seed has no random state to restore
        order = torch.randperm(count, generator=generator(self.config.seed, "finetune", "order", self.index, epoch))
        rows = order[index * size : (index + 1) * size]
        batch = _trimmed(self.task.batch("train", rows), self.device)
        batch["labels"] = self.task.train_labels[rows].to(self.device)
        number = self.step + 1
        seed_dropout(derive(self.config.seed, "finetune", "dropout", self.index, number), self.device)
        loss = self.algorithm.step(number, batch, self.classifier.loss).loss_nats
        self._check_finite(loss, f"the loss at step {number}")
        self.step = number
        # the last step of an epoch may have fewer examples
        self.losses[epoch] += loss * len(rows) / count
        return loss

    def _check_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise IsolossError(
                f"{what} of {self.total} of seed {self.index} is {value}: lower the learning rate or lengthen the "
                "warm-up"
            )

    def _predict(self) -> torch.Tensor:
        """Return (n_test,): the class of the largest logit, in eval mode."""
        self.classifier.eval()
        absent = absent_classes(self.task.train_labels, len(self.task.classes)).to(self.device)
        predictions = []
        with torch.no_grad():
            for first in range(0, len(self.task.test_labels), _PREDICTED_AT_ONCE):
                rows = slice(first, first + _PREDICTED_AT_ONCE)
                logits = self.classifier(_trimmed(self.task.batch("test", rows), self.device))
                # a single NaN or infinity makes the sum one
                self._check_finite(float(logits.sum()), "a logit after the last step")
                # the random start may have left them likely
                logits[:, absent] = -math.inf
                predictions.append(logits.argmax(dim=1).cpu())
        return torch.cat(predictions)

    def _save(self) -> None:
        tensors = {f"model/{name}": p.detach() for name, p in self.classifier.named_parameters()}
        tensors |= {f"algorithm/{name}": tensor for name, tensor in self.algorithm.state().items()}
        tensors |= {"losses": self.losses, "step": torch.tensor(self.step)}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        files.write_bytes(self._state, safetensors.torch.save(tensors))

    def _load(self) -> None:
        try:
            state = safetensors.torch.load_file(self._state)
            self.step, self.losses = int(state.pop("step")), state.pop("losses")
            with torch.no_grad():
                for name, parameter in self.classifier.named_parameters():
                    parameter.copy_(state.pop(f"model/{name}"))
            self.algorithm.load_state({name.removeprefix("algorithm/"): tensor for name, tensor in state.items()})
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, IsolossError) as error:
            raise IsolossError(f"{self._state} is damaged ({error}): delete it, and its seed starts again") from error


def _trimmed(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a batch on `device` without the columns that are padding in every row."""
    longest = int(batch["attention_mask"].sum(dim=1).max())
    return {name: tensor[:, :longest].to(device) for name, tensor in batch.items()}


def _identity(backbone: Any, task: TaskData, config: FinetuneConfig) -> dict[str, Any]:
    """Return what decides the result of a seed, as JSON types."""
    splits = {"train": task.train_labels, "test": task.test_labels}
    return {
        "config": configs.identity(config),
        "weights": files.tensors_sha256(backbone.named_parameters()),
        "task": task.name,
        "classes": list(task.classes),
        **{
            split: files.tensors_sha256({**task.batch(split), "labels": labels}.items())
            for split, labels in splits.items()
        },
    }


def _claim(folder: Path, identity: dict[str, Any]) -> None:
    """Write the identity of this fine-tuning into `folder`, or check that the one that is there is the same."""
    path = folder / "finetune.json"
    if path.exists():
        differing = configs.differences(identity, files.read_json(path).get("identity"))
        if differing:
            raise IsolossError(
                f"{folder} holds a fine-tuning of another config ({'; '.join(differing)}): choose another directory, "
                "or what it was made with"
            )
    elif any(not entry.name.startswith(".") for entry in folder.iterdir()):  # the lock's own file is there already
        raise IsolossError(f"{folder} is not empty and holds no fine-tuning: choose another directory")
    else:
        files.write_json(path, {"identity": identity, "versions": versions()})
