"""The linear probe: a softmax regression on frozen features, for several seeds at once (paper, section 2.1 and A.5).

Shape letters: S seeds, B examples of a step, D features, C classes, n examples.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from isoloss import seeds as streams
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate
from isoloss.transfer.checks import absent_classes, check_labels
from isoloss.transfer.convex_probe import convex_probe
from isoloss.transfer.features import Pooling, extract_to
from isoloss.transfer.results import TransferResult, score
from isoloss.transfer.stored_features import StoredFeatures, rows_at_once
from isoloss.transfer.tasks import TaskData

Solver = Literal["adamw", "convex"]

MEMORY_BYTES = 2**31  # of the features of a split that stay in memory
_METHODS = {"adamw": "linear probe, AdamW", "convex": "linear probe, convex"}


def linear_probe(
    train_x: torch.Tensor | StoredFeatures,
    train_y: torch.Tensor,
    test_x: torch.Tensor | StoredFeatures,
    test_y: torch.Tensor,
    *,
    num_classes: int,
    seeds: int = 5,
    epochs: int = 100,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.01,
    batch_size: int = 256,
    standardize: bool = True,
    seed: int = 0,
    solver: Solver = "adamw",
    regularisation: float | Sequence[float] = 1e-3,
    classes: Sequence[str] | None = None,
    bayes: Estimate | None = None,
    device: torch.device | str | None = None,
) -> TransferResult:
    """Train a linear classifier on frozen features and return its test accuracy.

    The paper's probe: AdamW at a constant 1e-3 on the cross-entropy for 100 epochs, over 5 seeds. A seed decides the
    initial weights (uniform within ±1/sqrt(D), as `torch.nn.Linear`) and the order of the examples in each epoch. The
    batch size and the weight decay, which the paper does not give, are 256 and AdamW's default.

    AdamW's steps have a fixed size, so small features are learned slowly: after 100 epochs the probe would compare the
    scales of two models' features more than their content. By default the features are therefore centred at their
    training mean and divided by one number, the root mean square of what remains, which leaves their proportions alone.
    (With 4,000 sentences of the language `pcfg-laptop` and task `prefix-4`, the look-up table reaches 0.537; on raw
    features it reaches 0.442, and after 400 epochs 0.502, each ± 0.008.)

    With `solver="convex"` the probe is instead the minimum of the mean cross-entropy plus
    `regularisation / 2 |W|^2`, to 1e-6 of it (`isoloss.transfer.convex.fit`). It depends on no seed: its predictions
    stand for every seed, the seeds' deviation is 0, and epochs, learning rate, weight decay and batch size have no
    part. Of several strengths the one is taken whose accuracy on held-out training examples, in five folds, is the
    highest (the largest of equals); all folds and strengths are solved side by side.

    Args:
        train_x: (n_train, D) features, in memory or in a file; the probe runs in float32.
        train_y: (n_train,) labels in 0..num_classes - 1.
        test_x: (n_test, D) features.
        test_y: (n_test,) labels, each of which occurs in training.
        num_classes: Number of classes, C.
        seeds: Number of probes.
        epochs: Passes over the training examples.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay, on weights and biases.
        batch_size: Examples in a step; the last step of an epoch takes what is left.
        standardize: Whether the features are centred and scaled; False takes them as they are, as the paper does.
        seed: The seed from which those of the probes and folds are derived.
        solver: `"adamw"`, the paper's training, or `"convex"`, the minimum.
        regularisation: The convex probe's strength, above 0, or several; scikit-learn's `C` is
            `1 / (regularisation * n_train)`.
        classes: Their names; None: their numbers.
        bayes: The Bayes-optimal accuracy, where it is known.
        device: Where the probe runs; None: where the training features are.

    Returns:
        The accuracy in `[0, 1]` (unit "accuracy") with `accuracies` (one per seed), `seed_std`, `binomial_stderr`,
        `train_accuracy`, `majority_rate`, `num_train` and `num_test` among its details (and, of the convex probe,
        `regularisation`, `objective_nats` and the bound `gap_nats` on what it is above its minimum), and the
        predictions; see `isoloss.transfer.results.score` for the error. On a CPU, the same arguments and number of
        threads give the same bits.

    Raises:
        IsolossError: A split is empty; shapes or widths do not fit; a feature is not finite; a label is out of range; a
            setting is out of range.

    Warns:
        IsolossWarning: Test examples of a class that no training example has, which count as errors, as such a class is
            never predicted; training examples of a single class, which is then the prediction for all.

    Example:
        >>> x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
        >>> y = torch.tensor([0, 0, 1, 1])
        >>> result = linear_probe(x, y, x, y, num_classes=2, learning_rate=0.1, seeds=3)
        >>> result.accuracy.value, tuple(result.predictions.shape)
        (1.0, (3, 4))
    """
    began = time.perf_counter()
    _check_settings({"seeds": seeds, "epochs": epochs, "batch_size": batch_size}, learning_rate, weight_decay)
    if solver not in _METHODS:
        raise IsolossError(f"no solver {solver!r}: choose adamw or convex")
    where = torch.device(device) if device else train_x.device if isinstance(train_x, torch.Tensor) else "cpu"
    train_y, test_y = train_y.to(where), test_y.to(where)
    names = classes or [str(index) for index in range(num_classes)]
    _check_splits(train_x, train_y, test_x, test_y, names)
    centre, scale = _centre_and_scale(train_x, where) if standardize else (torch.zeros((), device=where), 1.0)
    train_rows, test_rows = (_standardized(x, centre, scale) for x in (train_x, test_x))
    if solver == "convex":
        weight, bias, found = convex_probe(train_x, train_y, num_classes, regularisation, centre, scale, seed)
        weight, bias = weight.expand(seeds, -1, -1), bias.repeat(seeds, 1, 1)
    else:
        found = {"epochs": epochs, "learning_rate": learning_rate, "weight_decay": weight_decay}
        found |= {"batch_size": batch_size, "seed": seed}
        weight, bias = _adamw(train_rows, train_y, (seeds, num_classes, train_x.shape[1]), **found)
    bias[..., absent_classes(train_y, num_classes)] = -math.inf  # the random start may have left them likely
    train_accuracy = (_predict(weight, bias, train_rows, len(train_y)) == train_y).double().mean()
    return score(
        _predict(weight, bias, test_rows, len(test_y)),
        test_y,
        names,
        method=_METHODS[solver],
        settings={
            "standardize": standardize,
            **found,
            "train_accuracy": float(train_accuracy),
            **_described(train_x, train_y, num_classes),
        },
        bayes=bayes,
        seconds=time.perf_counter() - began,
    )


def probe_task(
    model: torch.nn.Module,
    task: TaskData,
    *,
    pooling: Pooling = "concatenate",
    layer: int = -1,
    projection: int | None = None,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int = MEMORY_BYTES,
    **settings: Any,
) -> TransferResult:
    """Return the accuracy of a linear probe of `model` on `task`: `extract_to`, then `linear_probe`.

    Features of more than `memory_bytes` lie in a file in the folder for temporary ones (the environment's `TMPDIR`)
    while the probe is fitted.

    Args:
        model: A Hugging Face model in eval mode.
        task: Labelled sentences.
        pooling: How token states become features, as for `extract`.
        layer: Whose hidden states are read, as for `extract`.
        projection: Width that the features are projected to, as for `extract`; the paper's is 512.
        dtype: Type of the features, float32 or bfloat16.
        memory_bytes: Bytes of a split's features that memory may hold.
        settings: As for `linear_probe`.

    Raises:
        IsolossError: As `extract_to` and `linear_probe`.
    """
    with tempfile.TemporaryDirectory(prefix="isoloss-") as folder:
        train_x, test_x = (
            extract_to(
                Path(folder, f"{split}.safetensors"),
                model,
                sentences,
                dtype=dtype,
                types=types,
                pooling=pooling,
                layer=layer,
                projection=projection,
                memory_bytes=memory_bytes,
            )
            for split, sentences, types in (
                ("train", task.train, task.train_types),
                ("test", task.test, task.test_types),
            )
        )
        return probe_features(task, train_x, test_x, device=next(model.parameters()).device, **settings)


def probe_features(
    task: TaskData, train_x: torch.Tensor | StoredFeatures, test_x: torch.Tensor | StoredFeatures, **settings: Any
) -> TransferResult:
    """Return the accuracy of a linear probe on features of the sentences of `task`.

    Args:
        task: Labelled sentences.
        train_x: (n_train, D) features of its training sentences.
        test_x: (n_test, D) features of its test sentences.
        settings: As for `linear_probe`, but for the labels and classes.

    Raises:
        IsolossError: As `linear_probe`.
    """
    return linear_probe(
        train_x,
        task.train_labels,
        test_x,
        task.test_labels,
        num_classes=len(task.classes),
        classes=task.classes,
        bayes=task.bayes,
        **settings,
    )


Rows = Callable[[slice | torch.Tensor], torch.Tensor]  # features of these rows, centred, scaled, in float32


def _centre_and_scale(x: torch.Tensor | StoredFeatures, device: torch.device | str) -> tuple[torch.Tensor, float]:
    """Return the mean (D,) of the features and the root mean square of what is left of them."""
    n, width = x.shape
    total = torch.zeros(width, dtype=torch.float64, device=device)
    largest = 0.0
    for block in _blocks(x, device):
        total += block.sum(dim=0, dtype=torch.float64)
        largest = max(largest, float(block.abs().amax()))
    centre = total / n
    squares = sum(float((block - centre.float()).square().sum(dtype=torch.float64)) for block in _blocks(x, device))
    scale = math.sqrt(squares / (n * width))
    if scale <= 1e-6 * largest:
        raise IsolossError("the training features are the same for every example, so there is nothing to classify by")
    return centre.float(), scale


def _blocks(x: torch.Tensor | StoredFeatures, device: torch.device | str) -> Iterator[torch.Tensor]:
    """Yield the features in float32, (B, D)."""
    for first in range(0, len(x), size := rows_at_once(x.shape[1])):
        yield x[first : first + size].to(device, torch.float32)


def _standardized(x: torch.Tensor | StoredFeatures, centre: torch.Tensor, scale: float) -> Rows:
    """Return how to read rows of `(x - centre) / scale`: of features in memory a copy is made once."""
    if isinstance(x, torch.Tensor):
        return ((x.to(centre) - centre) / scale).__getitem__
    return lambda rows: (x[rows].to(centre) - centre) / scale


def _adamw(
    rows: Rows,
    y: torch.Tensor,
    shape: tuple[int, int, int],
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    batch_size: int,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights of `shape`, (S, C, D), and biases (S, 1, C): what AdamW makes of each seed's initial ones."""
    num_seeds, num_classes, num_features = shape
    generators = [streams.generator(seed, "probe", index) for index in range(num_seeds)]
    weight, bias = _initial(generators, num_features, num_classes, y.device)
    optimizer = torch.optim.AdamW([weight, bias], lr=learning_rate, weight_decay=weight_decay)
    for _ in range(epochs):
        orders = torch.stack([torch.randperm(len(y), generator=g) for g in generators]).to(y.device)
        for start in range(0, len(y), batch_size):
            chosen = orders[:, start : start + batch_size]
            weight.grad, bias.grad = _gradients(weight, bias, rows(chosen), y[chosen])
            optimizer.step()
    return weight, bias


def _initial(
    generators: list[torch.Generator], num_features: int, num_classes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C), uniform within ±1/sqrt(D), each seed's from its own generator."""
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
    residual.scatter_add_(2, y[:, :, None], residual.new_full((1, 1, 1), -1.0).expand(*y.shape, 1))
    residual /= y.shape[1]
    return residual.transpose(1, 2) @ x, residual.sum(dim=1, keepdim=True)


def _predict(weight: torch.Tensor, bias: torch.Tensor, rows: Rows, count: int) -> torch.Tensor:
    """Return (S, n): the class of the largest logit of each of the `count` examples."""
    stacked = weight.flatten(0, 1).T
    classes = []
    for first in range(0, count, size := rows_at_once(weight.shape[2])):
        logits = (rows(slice(first, first + size)) @ stacked).view(-1, *weight.shape[:2]) + bias[:, 0]
        classes.append(logits.argmax(dim=2))
    return torch.cat(classes).T.contiguous()


def _described(x: torch.Tensor | StoredFeatures, y: torch.Tensor, num_classes: int) -> dict[str, Any]:
    """What an accuracy says of the examples it comes from."""
    return {
        "num_train": len(y),
        "num_features": x.shape[1],
        "features": "in memory" if isinstance(x, torch.Tensor) else "in a file",
        "num_classes": num_classes,
        "device": y.device.type,
    }


def _check_settings(counts: dict[str, int], learning_rate: float, weight_decay: float) -> None:
    for name, value in counts.items():
        if value < 1:
            raise IsolossError(f"{name} is {value}; a linear probe needs at least 1")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise IsolossError(f"learning_rate is {learning_rate}; it must be above 0")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise IsolossError(f"weight_decay is {weight_decay}; it must be 0 or above")


def _check_splits(
    train_x: torch.Tensor | StoredFeatures,
    train_y: torch.Tensor,
    test_x: torch.Tensor | StoredFeatures,
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
        rows = sum(int((~block.isfinite()).any(dim=1).sum()) for block in _blocks(x, y.device))
        if rows:
            raise IsolossError(f"{rows} of the {len(x)} {split} examples have features that are NaN or infinite")
    if train_x.shape[1] != test_x.shape[1]:
        raise IsolossError(
            f"training features are {train_x.shape[1]} wide and test features {test_x.shape[1]}: both must come from "
            "the same model and be padded to one length"
        )
    check_labels(train_y, test_y, classes)
