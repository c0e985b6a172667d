"""Linear probes: a softmax regression on frozen features (paper, section 2.1 and A.5), by AdamW or at its minimum.

Shape letters: S seeds, B examples of a step, D features, C classes, n examples, R parts or seeds.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isoloss import seeds
from isoloss.config import replaced
from isoloss.errors import IsolossError, require
from isoloss.run_config import OptimizerConfig, learning_rate
from isoloss.statistics.estimate import Estimate
from isoloss.transfer import logistic_regression
from isoloss.transfer.config import ClassifierConfig, LinearProbeConfig
from isoloss.transfer.features import extract, rows_at_once
from isoloss.transfer.results import TransferResult, absent_classes, check_labels, score
from isoloss.transfer.tasks import TaskData

MEMORY_BYTES = 2**31  # of the features of a split that stay in memory, and of a standardized copy

_FOLDS = 5  # of the training examples, to choose a regularization strength by

Fitted = tuple[torch.Tensor, dict[str, Any]]  # predictions (R, n_test), and how the classifiers were fitted

# --- on a task -------------------------------------------------------------------------------------------------------


def linear_probe(
    model: torch.nn.Module,
    task: TaskData,
    config: LinearProbeConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int = MEMORY_BYTES,
    **settings: Any,
) -> TransferResult:
    """Return the test accuracy of a linear classifier on the frozen states of `model`.

    Features of more than `memory_bytes` are kept in a temporary file (in the environment's `TMPDIR`) meanwhile.

    Args:
        model: A Hugging Face model in eval mode.
        task: Labeled sentences, from `make_task` or `make_text_task`.
        config: The settings; None: those of `ClassifierConfig`.
        dtype: Type of the features, float32 or bfloat16.
        memory_bytes: The largest features of a split that are held in memory, in bytes.
        settings: Fields of `LinearProbeConfig` that replace those of `config`, e.g. `solver="convex"`.

    Returns:
        The accuracy with its error, and the predictions of each seed, (seeds, n_test).

    Raises:
        IsolossError: A setting out of range, labels or tokens that do not fit the model, or a feature that is not
            finite.

    Example:
        >>> from isoloss import linear_probe, load_language
        >>> from isoloss.lab.models.make import make_model
        >>> from isoloss.run_config import ModelConfig
        >>> from isoloss.lab.tasks import make_task
        >>> language = load_language("pcfg-laptop")
        >>> model = make_model(ModelConfig(size="d16"), language, seed=0).eval()
        >>> task = make_task(language, "prefix-4", num_train=64, num_test=32)
        >>> linear_probe(model, task, epochs=3, seeds=2).predictions.shape
        torch.Size([2, 32])
    """
    config = replaced(config or LinearProbeConfig(), settings)
    require("model", model, torch.nn.Module, "a model, such as load_model(CHECKPOINT).model")
    require("task", task, TaskData, "a task, which make_task returns")
    with tempfile.TemporaryDirectory(prefix="isoloss-") as folder:
        train_x, test_x = (
            extract(
                model,
                sentences,
                types=types,
                pooling=config.pooling,
                layer=config.layer,
                projection=config.projection,
                dtype=dtype,
                path=Path(folder, f"{split}.safetensors"),
                memory_bytes=memory_bytes,
            )
            for split, sentences, types in (
                ("train", task.train, task.train_types),
                ("test", task.test, task.test_types),
            )
        )
        return fit_on_task(task, train_x, test_x, config, device=next(model.parameters()).device)


def fit_on_task(
    task: TaskData, train_x: torch.Tensor, test_x: torch.Tensor, config: ClassifierConfig | None, **settings: Any
) -> TransferResult:
    """Fit a linear classifier to features of the task's sentences, as `fit_linear_probe`."""
    return fit_linear_probe(
        train_x, task.train_labels, test_x, task.test_labels, config, classes=task.classes, bayes=task.bayes, **settings
    )


def fit_linear_probe(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    test_y: torch.Tensor,
    config: ClassifierConfig | None = None,
    *,
    classes: int | Sequence[str],
    bayes: Estimate | None = None,
    device: torch.device | str | None = None,
    **settings: Any,
) -> TransferResult:
    """Fit a linear classifier to features and return its test accuracy.

    AdamW's steps have a fixed size, so small features are learned slowly: after 100 epochs the probe would compare the
    scales of two models' features more than their content. With `standardize`, the default, the features are therefore
    centered at their training mean and divided by one number, the root mean square of what remains, which leaves their
    proportions alone. (With 4,000 sentences of the language `pcfg-laptop` and task `prefix-4`, the look-up table
    reaches 0.537; on raw features it reaches 0.442, and after 400 epochs 0.502, each ± 0.008.)

    With `solver="convex"` the probe is the minimum of the mean cross-entropy plus `regularization / 2 |W|^2`, to 1e-9
    of it (`isoloss.transfer.logistic_regression.fit`), in float64. It depends on no
    seed: its predictions are repeated for every seed, and the seeds' standard deviation is 0. Of several regularization
    strengths the one with the highest accuracy on held-out training examples, in five folds, is chosen (the largest
    where several are equal).

    Args:
        train_x: (n_train, D) features; the probe runs in float32.
        train_y: (n_train,) labels in 0..C - 1.
        test_x: (n_test, D) features.
        test_y: (n_test,) labels.
        config: The settings; None: those of `ClassifierConfig`.
        classes: The C names, or their number.
        bayes: The Bayes-optimal accuracy, where it is known.
        device: Where the probe runs; None: where the training features are.
        settings: Fields of `ClassifierConfig` that replace those of `config`.

    Returns:
        The accuracy and the predictions; `isoloss.transfer.results.score` says how the error is computed. The
        accuracy's details have `accuracies` (one per seed), `seed_std`, `binomial_stderr`, `train_accuracy`,
        `majority_rate`, `num_train` and `num_test`; those of the convex probe also `regularization`, `objective_nats`
        and the bound `gap_nats` on its excess over the minimum. On a CPU, the same arguments and number of threads give
        the same bits.

    Raises:
        IsolossError: A split is empty; shapes or widths do not fit; a feature is not finite; a label or a setting is
            out of range.

    Warns:
        IsolossWarning: No training example has one of the classes: it is never predicted, and its test examples count
            as errors.

    Example:
        >>> import torch
        >>> from isoloss.transfer.probe import fit_linear_probe
        >>> x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
        >>> y = torch.tensor([0, 0, 1, 1])
        >>> fit_linear_probe(x, y, x, y, classes=("low", "high"), learning_rate=0.1, seeds=3)
        TransferResult(accuracy 100 %, 4 test examples, 2 classes, seeds 3, linear probe, AdamW)
    """
    began = time.perf_counter()
    config = replaced(config or ClassifierConfig(), settings)
    where = torch.device(device) if device else train_x.device
    train_y, test_y = train_y.to(where), test_y.to(where)
    names = [str(index) for index in range(classes)] if isinstance(classes, int) else classes
    _check_splits(train_x, train_y, test_x, test_y, names)
    probe = fit_probe(train_x, train_y, len(names), config)
    return score(
        probe.predict(test_x),
        test_y,
        names,
        method=probe_method(config),
        settings=probe.details,
        bayes=bayes,
        seconds=time.perf_counter() - began,
    )


def probe_method(config: ClassifierConfig) -> str:
    """Return what made the predictions of a probe, as results say it."""
    return f"linear probe, {'AdamW' if config.solver == 'adamw' else 'convex'}"


def _check_splits(
    train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor, classes: Sequence[str]
) -> None:
    for split, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        if x.ndim != 2 or y.ndim != 1 or len(x) != len(y):
            raise IsolossError(
                f"the {split} split needs features (n, D) and labels (n,), not {tuple(x.shape)} and {tuple(y.shape)}"
            )
        if math.prod(x.shape) == 0:
            raise IsolossError(f"the {split} split is empty: its features are {tuple(x.shape)}")
        refuse_nonfinite(x, split, y.device)
    if train_x.shape[1] != test_x.shape[1]:
        raise IsolossError(
            f"training features are {train_x.shape[1]} wide and test features {test_x.shape[1]}: both must come from "
            "the same model and be padded to one length"
        )
    check_labels(train_y, test_y, classes)


def fit_each(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], config: ClassifierConfig, *, classes: int
) -> Fitted:
    """Fit one probe to each part (training features, their labels, test features).

    Returns the predictions (R, n_test) and the details of the fits. With several seeds in the config, each seed has a
    row. A detail is a single value where all fits agree. A class that a part lacks is never predicted;
    `absent_classes` has the number of such classes.

    Example:
        >>> import torch
        >>> from isoloss.transfer.config import ClassifierConfig
        >>> from isoloss.transfer.probe import fit_each
        >>> low, high = torch.tensor([[-1.0]]), torch.tensor([[1.0]])
        >>> draws = [(torch.cat(pair), torch.tensor([0, 1]), low) for pair in ((low, high), (high, low))]
        >>> fit_each(draws, ClassifierConfig(solver="convex", seeds=1), classes=2)[0].tolist()
        [[0], [1]]
    """
    predictions, fits, absent = [], [], []
    for train_x, train_y, test_x in parts:
        for split, x in (("training", train_x), ("test", test_x)):
            refuse_nonfinite(x, split, x.device)
        probe = fit_probe(train_x, train_y.to(train_x.device), classes, config)
        predictions.append(probe.predict(test_x))
        fits.append(probe.details)
        absent.append(len(absent_classes(train_y, classes)))
    details = {}
    for name, first in fits[0].items():
        values = [fit[name] for fit in fits]
        details[name] = first if all(value == first for value in values) else values
    return torch.cat(predictions).cpu(), {**details, "absent_classes": absent}


# --- fitting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """Linear classifiers, one per seed, of centered and scaled features."""

    weight: torch.Tensor  # (S, C, D)
    bias: torch.Tensor  # (S, 1, C), minus infinity for a class that no training example has
    center: torch.Tensor  # (D,), or a single 0
    scale: float
    details: Mapping[str, Any]  # how they were fitted

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return (S, n): the class of the largest logit of each of n examples; x (n, D) is not yet centered."""
        stacked = self.weight.flatten(0, 1).T
        classes = []
        for first in range(0, len(x), size := rows_at_once(x.shape[1])):
            rows = (x[first : first + size].to(self.center) - self.center) / self.scale
            logits = (rows @ stacked).view(-1, *self.weight.shape[:2]) + self.bias[:, 0]  # (B, S, C)
            classes.append(logits.argmax(dim=2))
        return torch.cat(classes).T.contiguous()


def fit_probe(train_x: torch.Tensor, train_y: torch.Tensor, num_classes: int, config: ClassifierConfig) -> Probe:
    """Return the probe of `fit_linear_probe`, on the labels' device, of checked features (n, D) and labels (n,)."""
    where = train_y.device
    center, scale = torch.zeros((), device=where), 1.0
    # with a single class the prediction is known, and features may all be the same
    if config.standardize and bool((train_y != train_y[0]).any()):
        center, scale = _center_and_scale(train_x, where)
    if config.solver == "convex":
        weight, bias, details = _fit_convex(train_x, train_y, num_classes, config, center, scale)
        # the bias is written to below, which a view with one memory for all seeds does not allow
        weight, bias = weight.expand(config.seeds, -1, -1), bias.repeat(config.seeds, 1, 1)
    else:
        used = ("epochs", "learning_rate", "weight_decay", "batch_size", "seed")
        details = {name: getattr(config, name) for name in used}
        weight, bias = _fit_adamw(train_x, train_y, num_classes, config, center, scale)
    # the random start may have left them likely
    bias[..., absent_classes(train_y, num_classes)] = -math.inf
    probe = Probe(weight, bias, center, scale, {})
    train_accuracy = (probe.predict(train_x) == train_y).double().mean()
    known = {
        "solver": config.solver,
        "standardize": config.standardize,
        **details,
        "train_accuracy": float(train_accuracy),
        "num_train": len(train_y),
        "num_features": train_x.shape[1],
        "num_classes": num_classes,
        "device": where.type,
    }
    return replace(probe, details=known)


def _center_and_scale(x: torch.Tensor, device: torch.device | str) -> tuple[torch.Tensor, float]:
    """Return the mean (D,) of the features and the root mean square of the centered features."""
    n, width = x.shape
    total = torch.zeros(width, dtype=torch.float64, device=device)
    largest = 0.0
    for block in _blocks(x, device):
        total += block.sum(dim=0, dtype=torch.float64)
        largest = max(largest, float(block.abs().amax()))
    center = total / n
    # in a second pass: mean square minus squared mean cancels where the mean is far from 0
    squares = sum(float((block - center.float()).square().sum(dtype=torch.float64)) for block in _blocks(x, device))
    scale = math.sqrt(squares / (n * width))
    # what remains after centering is the rounding of float32
    if scale <= 1e-6 * largest:
        raise IsolossError("the training features are the same for every example, so there is nothing to classify by")
    return center.float(), scale


def _blocks(x: torch.Tensor, device: torch.device | str) -> Iterator[torch.Tensor]:
    """Yield the features in float32, (B, D)."""
    for first in range(0, len(x), size := rows_at_once(x.shape[1])):
        yield x[first : first + size].to(device, torch.float32)


def _standardized(x: torch.Tensor, center: torch.Tensor, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of rows (S, B) that reads `(x - center) / scale`, (S, B, D); small features are copied once."""
    if 4 * x.numel() <= MEMORY_BYTES:
        return ((x.to(center) - center) / scale).__getitem__
    # row by row, as features may be mapped from a file
    return lambda rows: (x[rows.to(x.device)].to(center) - center) / scale


def refuse_nonfinite(x: torch.Tensor, split: str, device: torch.device | str) -> None:
    """Raise an `IsolossError` where features (n, D) of the `split`, e.g. training, are NaN or infinite."""
    rows = sum(int((~block.isfinite()).any(dim=1).sum()) for block in _blocks(x, device))
    if rows:
        raise IsolossError(f"{rows} of the {len(x)} {split} examples have features that are NaN or infinite")


def _fit_adamw(
    x: torch.Tensor, y: torch.Tensor, num_classes: int, config: ClassifierConfig, center: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C) on centered and scaled features after the last step.

    A seed decides the initial weights (uniform within ±1/sqrt(D), as in `torch.nn.Linear`) and the order of the
    examples in each epoch. The labels y (n,) are on the device to compute on.
    """
    generators = [seeds.generator(config.seed, "probe", index) for index in range(config.seeds)]
    read, num_features = _standardized(x, center, scale), x.shape[1]
    bound = num_features**-0.5
    drawn = [torch.rand(num_classes, num_features + 1, generator=g) * (2 * bound) - bound for g in generators]
    initial = torch.stack(drawn).to(y.device)
    weight, bias = initial[:, :, :-1].contiguous(), initial[:, None, :, -1].contiguous()
    # AdamW goes by elements, so that one optimizer of all seeds is one of each: S times fewer calls
    optimizer = torch.optim.AdamW([weight, bias], lr=config.learning_rate, weight_decay=config.weight_decay)
    fields = ("learning_rate", "schedule", "warmup_steps")
    schedule = OptimizerConfig(**{field: getattr(config, field) for field in fields})
    step, total = 0, config.epochs * math.ceil(len(y) / config.batch_size)
    for _ in range(config.epochs):
        orders = torch.stack([torch.randperm(len(y), generator=g) for g in generators]).to(y.device)
        for start in range(0, len(y), config.batch_size):
            rows = orders[:, start : start + config.batch_size]
            weight.grad, bias.grad = _gradients(weight, bias, read(rows), y[rows])
            step += 1
            optimizer.param_groups[0]["lr"] = learning_rate(schedule, step, total=total)
            optimizer.step()
    return weight, bias


def _gradients(
    weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of each seed's mean cross-entropy on its batch: x (S, B, D), y (S, B).

    The gradient at the logits is (softmax - one-hot) / B; written out, a step takes 0.6 of autograd's time.
    """
    residual = torch.baddbmm(bias, x, weight.transpose(1, 2)).softmax(dim=2)
    # in place of the one-hot labels, which would be as large as the logits
    residual.scatter_add_(2, y[:, :, None], residual.new_full((1, 1, 1), -1.0).expand(*y.shape, 1))
    residual /= y.shape[1]
    return residual.transpose(1, 2) @ x, residual.sum(dim=1, keepdim=True)


def _fit_convex(
    x: torch.Tensor,
    y: torch.Tensor,
    num_classes: int,
    config: ClassifierConfig,
    center: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return weights (1, C, D) and biases (1, 1, C) on centered and scaled features, float32, and how they were fitted.

    The features x (n, D) are given as they are; `center` is (D,) or a single 0. Of several regularization strengths one
    is chosen by five folds. A class of which there is no training example has a bias of minus infinity.
    """
    present = torch.tensor(sorted(set(y.tolist())), device=y.device)
    weight = torch.zeros(1, num_classes, x.shape[1], dtype=torch.float64, device=y.device)
    bias = torch.full((1, 1, num_classes), -math.inf, dtype=torch.float64, device=y.device)
    strengths = list(config.regularization)
    if len(present) == 1:
        bias[..., present] = 0.0
        return weight.float(), bias.float(), {"regularization": max(strengths), "objective_nats": 0.0, "gap_nats": 0.0}
    # classes that no example has would have no best intercept
    targets = torch.searchsorted(present, y)

    def fit(rows: torch.Tensor | slice, chosen: Sequence[float]) -> logistic_regression.LogisticFit:
        # the features are as they are, and their penalty is `scale` squared times the penalty of scaled ones
        of_raw = [strength * scale**2 for strength in chosen]
        return logistic_regression.fit(
            x[rows], targets[rows], classes=len(present), regularization=of_raw, device=y.device
        )

    details: dict[str, Any] = {}
    best = strengths[0]
    if len(strengths) > 1:
        folds = _folds(targets.cpu(), seeds.generator(config.seed, "probe", "folds")).to(y.device)
        # folds depend on the labels alone, so that all models of a task are held out on the same examples
        correct = torch.zeros(len(strengths), device=y.device)
        for fold in range(_FOLDS):
            # with few examples a fold may have none
            if (held_out := folds == fold).any():
                correct += (fit(~held_out, strengths).predict(x[held_out]) == targets[held_out]).sum(dim=1)
        accuracies = (correct.double() / (folds >= 0).sum().clamp(min=1)).tolist()
        # the pairs compare the strengths of equal accuracies: the largest wins
        best = max(zip(accuracies, strengths, strict=True))[1]
        details = {"regularization_strengths": strengths, "held_out_accuracies": accuracies}
    minimum = fit(slice(None), [best])
    weight[0, present] = minimum.weights[0]
    bias[0, 0, present] = minimum.intercepts[0]
    # the bias of centered features, and the weights of scaled ones
    bias = bias + (weight @ center.double().expand(weight.shape[2])[:, None]).transpose(1, 2)
    reached = {"objective_nats": float(minimum.objectives), "gap_nats": float(minimum.gaps)}
    return (weight * scale).float(), bias.float(), {"regularization": best, **details, **reached}


def _folds(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the fold of each example (n,), stratified by class; -1 for a class's only example, never held out."""
    folds = torch.full_like(y, -1)
    for label in sorted(set(y.tolist())):
        members = (y == label).nonzero()[:, 0]
        if len(members) > 1:
            folds[members[torch.randperm(len(members), generator=generator)]] = torch.arange(len(members)) % _FOLDS
    return folds
