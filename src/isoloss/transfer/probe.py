"""Linear probes: a softmax regression on frozen features (paper, section 2.1 and A.5), by AdamW or at its minimum.

Shape letters: S seeds, B examples of a step, D features, C classes, n examples, R draws or projections.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isoloss import seeds
from isoloss.config import replaced
from isoloss.errors import IsolossError, require
from isoloss.statistics.estimate import Estimate
from isoloss.transfer import logistic_regression
from isoloss.transfer.config import ClassifierConfig, LinearProbeConfig
from isoloss.transfer.features import extract, projection_matrix, rows_at_once
from isoloss.transfer.results import TransferResult, absent_classes, check_labels, score
from isoloss.transfer.tasks import TaskData

MEMORY_BYTES = 2**31  # of the features of a split that stay in memory, and of a standardized copy

_FOLDS = 5  # of the training examples, to choose a regularization strength by
_RowReader = Callable[[torch.Tensor], torch.Tensor]  # float32 features of these rows, centered and scaled

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
    task: TaskData,
    train_x: torch.Tensor,
    test_x: torch.Tensor,
    config: ClassifierConfig | None,
    **settings: Any,
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
        The accuracy in `[0, 1]` (unit "accuracy") with `accuracies` (one per seed), `seed_std`, `binomial_stderr`,
        `train_accuracy`, `majority_rate`, `num_train` and `num_test` among its details (and, of the convex probe,
        `regularization`, `objective_nats` and the bound `gap_nats` on its excess over the minimum), and the
        predictions; see `isoloss.transfer.results.score` for the error. On a CPU, the same arguments and number of
        threads give the same bits.

    Raises:
        IsolossError: A split is empty; shapes or widths do not fit; a feature is not finite; a label is out of range; a
            setting is out of range.

    Warns:
        IsolossWarning: Test examples of a class that no training example has, which count as errors, as such a class is
            never predicted; training examples of a single class, which is then the prediction for all.

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
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    test_y: torch.Tensor,
    classes: Sequence[str],
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


# --- several draws or projections -------------------------------------------------------------------------------------


def over_draws(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    config: ClassifierConfig,
    *,
    classes: int,
    draws: int,
) -> Fitted:
    """Return the predictions of one probe per draw, where the draws are equal slices of the training examples.

    Each probe is fitted to its slice as by `fit_linear_probe`; a single draw can have a probe per seed. A class missing
    from the slice is never predicted.

    Args:
        train_x: (R n_train, D) features, the first n_train of them the first draw.
        train_y: (R n_train,) labels.
        test_x: (n_test, D) features.
        config: How a probe is fitted.
        classes: Number of classes.
        draws: R; 1 if the config has several seeds.

    Returns:
        (R, n_test) predictions, or one row per seed of a single draw; and details of the fits.

    Raises:
        IsolossError: A feature is not finite.

    Example:
        >>> import torch
        >>> from isoloss.transfer.config import ClassifierConfig
        >>> from isoloss.transfer.probe import over_draws
        >>> x = torch.tensor([[-1.0], [1.0], [1.0], [-1.0]])
        >>> config = ClassifierConfig(solver="convex", seeds=1)
        >>> over_draws(x, torch.tensor([0, 1, 0, 1]), x[:2], config, classes=2, draws=2)[0].tolist()
        [[0, 1], [1, 0]]
    """
    train_y = _checked(train_x, train_y, test_x)
    pairs = zip(train_x.chunk(draws), train_y.chunk(draws), strict=True)
    probes = [fit_probe(x, y, classes, config) for x, y in pairs]
    return torch.cat([probe.predict(test_x) for probe in probes]).cpu(), _details_of(
        probes, train_y.chunk(draws), classes
    )


def over_projections(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    config: ClassifierConfig,
    *,
    classes: int,
    width: int,
    projections: int,
    seed: int,
) -> Fitted:
    """Return the predictions of one probe per random projection of the features to `width` columns.

    The matrices come from `isoloss.transfer.features.projection_matrix`, the same for all models of one width.

    Args:
        train_x: (n_train, D) features.
        train_y: (n_train,) labels.
        test_x: (n_test, D) features.
        config: How a probe is fitted, with one seed.
        classes: Number of classes.
        width: Columns of a projection.
        projections: R.
        seed: Seed of the matrices.

    Returns:
        (R, n_test) predictions, and details of the fits.

    Raises:
        IsolossError: The features have fewer columns than `width`, or one is not finite.

    Example:
        >>> import torch
        >>> from isoloss.transfer.config import ClassifierConfig
        >>> from isoloss.transfer.probe import over_projections
        >>> x, y = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
        >>> config = ClassifierConfig(solver="convex", seeds=1)
        >>> over_projections(x, y, x, config, classes=2, width=1, projections=3, seed=0)[0].tolist()
        [[0, 1], [0, 1], [0, 1]]
    """
    if width > train_x.shape[1]:
        raise IsolossError(
            f"the width is {width}, but the model has {train_x.shape[1]} features: choose at most that many"
        )
    train_y = _checked(train_x, train_y, test_x)
    predictions, probes = [], []
    for number in range(projections):
        matrix = projection_matrix(train_x.shape[1], width, seed, number).to(train_x.device)
        probes.append(fit_probe(train_x @ matrix, train_y, classes, config))
        predictions.append(probes[-1].predict(test_x @ matrix))
    details = _details_of(probes, [train_y], classes) | {"width_before_projection": train_x.shape[1]}
    return torch.cat(predictions).cpu(), details


def _checked(train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor) -> torch.Tensor:
    """Refuse features that are not finite, and return the labels on their device."""
    for split, x in (("training", train_x), ("test", test_x)):
        refuse_nonfinite(x, split, x.device)
    return train_y.to(train_x.device)


def _details_of(probes: Sequence[Probe], labels: Sequence[torch.Tensor], classes: int) -> dict[str, Any]:
    """Return the details of the fits, a single value where all agree, and how many classes each draw lacks."""
    details = {}
    for name, first in probes[0].details.items():
        values = [probe.details[name] for probe in probes]
        details[name] = first if all(value == first for value in values) else values
    return {**details, "absent_classes": [len(absent_classes(y, classes)) for y in labels]}


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
        weight, bias, details = _fit_convex(
            train_x, train_y, num_classes, config.regularization, center, scale, config.seed
        )
        # the bias is written to below, which a view with one memory for all seeds does not allow
        weight, bias = weight.expand(config.seeds, -1, -1), bias.repeat(config.seeds, 1, 1)
    else:
        used = ("epochs", "learning_rate", "weight_decay", "batch_size", "seed")
        details = {name: getattr(config, name) for name in used}
        rows = _standardized(train_x, center, scale)
        weight, bias = _fit_adamw(rows, train_y, config, num_features=train_x.shape[1], num_classes=num_classes)
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


def _standardized(x: torch.Tensor, center: torch.Tensor, scale: float) -> _RowReader:
    """Return a function that reads rows of `(x - center) / scale`; features that are not too large are copied once."""
    # rows (S, B) give (S, B, D)
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
    read: _RowReader, y: torch.Tensor, config: ClassifierConfig, *, num_features: int, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C) after the last step.

    A seed decides the initial weights (uniform within ±1/sqrt(D), as in `torch.nn.Linear`) and the order of the
    examples in each epoch. The labels y (n,) are on the device to compute on.
    """
    generators = [seeds.generator(config.seed, "probe", index) for index in range(config.seeds)]
    weight, bias = _initial(generators, num_features, num_classes, y.device)
    # AdamW goes by elements, so that one optimizer of all seeds is one of each: S times fewer calls
    optimizer = torch.optim.AdamW([weight, bias], lr=config.learning_rate, weight_decay=config.weight_decay)
    for _ in range(config.epochs):
        orders = torch.stack([torch.randperm(len(y), generator=g) for g in generators]).to(y.device)
        for start in range(0, len(y), config.batch_size):
            rows = orders[:, start : start + config.batch_size]
            weight.grad, bias.grad = _gradients(weight, bias, read(rows), y[rows])
            optimizer.step()
    return weight, bias


def _initial(
    generators: list[torch.Generator], num_features: int, num_classes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C), each seed's from its own generator."""
    bound = num_features**-0.5
    drawn = [torch.rand(num_classes, num_features + 1, generator=g) * (2 * bound) - bound for g in generators]
    stacked = torch.stack(drawn).to(device)
    return stacked[:, :, :-1].contiguous(), stacked[:, None, :, -1].contiguous()


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
    regularization: Sequence[float],
    center: torch.Tensor,
    scale: float,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the weights and biases of the convex probe on centered and scaled features, and how it was fitted.

    The features x (n, D) are as they are; scaled ones are centered at `center`, (D,) or a single 0, and divided by
    `scale`. Of several regularization strengths one is chosen by five folds, from a stream of `seed`.

    A class of which there is no training example has a bias of minus infinity; where all are of one class, that is all
    there is.

    Returns:
        Weights (1, C, D) and biases (1, 1, C), both in float32; `regularization`, `objective_nats` and `gap_nats`, and
        of several strengths also `regularization_strengths` and `held_out_accuracies`.
    """
    present = torch.tensor(sorted(set(y.tolist())), device=y.device)
    weight = torch.zeros(1, num_classes, x.shape[1], dtype=torch.float64, device=y.device)
    bias = torch.full((1, 1, num_classes), -math.inf, dtype=torch.float64, device=y.device)
    strengths = list(regularization)
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
        folds = _folds(targets.cpu(), seeds.generator(seed, "probe", "folds")).to(y.device)
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
