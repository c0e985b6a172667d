"""The linear probe: a softmax regression on frozen features, for several seeds at once (paper, section 2.1 and A.5).

Shape letters: S seeds, B examples of a step, D features, C classes, n examples.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from isoloss import seeds as streams
from isoloss.errors import IsolossError
from isoloss.estimate import Estimate
from isoloss.transfer.convex import fit
from isoloss.transfer.features import Pooling, extract
from isoloss.transfer.tasks import TaskData, majority_rate

Solver = Literal["adamw", "convex"]

_METHODS = {"adamw": "linear probe, AdamW", "convex": "linear probe, convex"}
_CHUNK = 4096  # examples predicted at once


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a linear probe reached.

    Attributes:
        accuracy: Share of the test examples that are classified correctly, mean over the seeds.
        predictions: (S, n_test) int64, the class that each seed's probe gives to each test example.
        correct: (S, n_test) bool, whether that is its label; `paired_difference` compares two of them.
    """

    accuracy: Estimate
    predictions: torch.Tensor
    correct: torch.Tensor


def linear_probe(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
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
    regularisation: float = 1e-3,
) -> ProbeResult:
    """Train a linear classifier on frozen features and return its test accuracy.

    The paper's probe: AdamW at a constant 1e-3 on the cross-entropy for 100 epochs, over 5 seeds. A seed decides the
    initial weights (uniform within ±1/sqrt(D), as `torch.nn.Linear`) and the order of the examples in each epoch. The
    batch size and the weight decay, which the paper does not give, are 256 and AdamW's default.

    AdamW's steps have a fixed size, so small features are learned slowly: after 100 epochs the probe would compare the
    scales of two models' features more than their content. By default the features are therefore centred at their
    training mean and divided by one number, the root mean square of what remains, which leaves their proportions alone.
    (With 4,000 sentences of the language `pcfg-laptop` and task `prefix-4`, the look-up table reaches 0.537; on raw
    features it reaches 0.442, and after 400 epochs 0.502, each ± 0.008.)

    The error of the mean accuracy `a` over S seeds joins the draw of the test examples and the draw of the seeds:
    `stderr^2 = a (1 - a) / n_test + sd^2 / S`, with `sd` the standard deviation of the seeds' accuracies. That is the
    spread over fresh examples and seeds where the probes of all seeds give nearly the same answers, as trained ones do;
    where they do not, part of their noise is in both terms and the error is too large, at worst (answers independent
    from seed to seed) by sqrt(S + 1). It does not hold the draw of the training examples, and at an accuracy of exactly
    0 or 1 it is 0: there the accuracy is known to about 3 / n_test.

    With `solver="convex"` the probe is instead the minimum of the mean cross-entropy plus
    `regularisation / 2 |W|^2`, to 1e-6 of it (`isoloss.transfer.convex.fit`). It depends on no seed: its predictions
    stand for every seed, the seeds' deviation is 0, and epochs, learning rate, weight decay and batch size have no
    part.

    Args:
        train_x: (n_train, D) features; the probe runs in float32 on their device.
        train_y: (n_train,) labels in 0..num_classes - 1.
        test_x: (n_test, D) features.
        test_y: (n_test,) labels, each of which occurs in training.
        num_classes: Number of classes, C.
        seeds: Number of probes, at least 2.
        epochs: Passes over the training examples.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay, on weights and biases.
        batch_size: Examples in a step; the last step of an epoch takes what is left.
        standardize: Whether the features are centred and scaled; False takes them as they are, as the paper does.
        seed: The seed from which those of the probes are derived.
        solver: `"adamw"`, the paper's training, or `"convex"`, the minimum.
        regularisation: The convex probe's strength, above 0; scikit-learn's `C` is `1 / (regularisation * n_train)`.

    Returns:
        The accuracy in `[0, 1]` (unit "accuracy") with `accuracies` (one per seed), `seed_std`, `binomial_stderr`,
        `train_accuracy`, `majority_rate`, `num_train` and `num_test` among its details (and, of the convex probe,
        `objective_nats` and the bound `gap_nats` on what it is above its minimum), and the predictions. On a CPU, the
        same arguments and number of threads give the same bits.

    Raises:
        IsolossError: A split is empty; shapes or widths do not fit; a feature is not finite; a label is out of range or
            occurs in the test examples only; a setting is out of range.

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
    device = train_x.device
    train_x, test_x = train_x.float(), test_x.to(device).float()
    train_y, test_y = train_y.to(device), test_y.to(device)
    _check_splits(train_x, train_y, test_x, test_y, num_classes)
    if standardize:
        centre, scale = _centre_and_scale(train_x)
        train_x, test_x = (train_x - centre) / scale, (test_x - centre) / scale

    settings: dict[str, Any] = {"standardize": standardize}
    if solver == "convex":
        weight, bias, found = _minimum(train_x, train_y, num_classes, regularisation)
        weight, bias = weight.expand(seeds, -1, -1), bias.expand(seeds, -1, -1)
        settings |= {"solver": solver, "regularisation": regularisation, **found}
    else:
        optimizer = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        generators = [streams.generator(seed, "probe", index) for index in range(seeds)]
        weight, bias = _initial(generators, train_x.shape[1], num_classes, device)
        _train(weight, bias, train_x, train_y, generators, epochs=epochs, batch_size=batch_size, **optimizer)
        settings |= {"epochs": epochs, **optimizer, "batch_size": batch_size, "seed": seed}

    predictions = _predict(weight, bias, test_x)
    settings |= {
        "train_accuracy": float((_predict(weight, bias, train_x) == train_y).double().mean()),
        "num_train": len(train_y),
        "num_features": train_x.shape[1],
        "num_classes": num_classes,
        "device": device.type,
    }
    correct = predictions == test_y
    accuracy = _accuracy(
        correct, majority_rate(test_y), settings, method=_METHODS[solver], seconds=time.perf_counter() - began
    )
    return ProbeResult(accuracy=accuracy, predictions=predictions, correct=correct)


def probe_task(
    model: torch.nn.Module,
    task: TaskData,
    *,
    pooling: Pooling = "concatenate",
    layer: int = -1,
    seeds: int = 5,
    epochs: int = 100,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.01,
    batch_size: int = 256,
    standardize: bool = True,
    seed: int = 0,
    solver: Solver = "adamw",
    regularisation: float = 1e-3,
) -> ProbeResult:
    """Return the accuracy of a linear probe of `model` on `task`: `extract`, then `linear_probe`.

    Args:
        model: A Hugging Face model in eval mode.
        task: Labelled sentences, from `make_task`.
        pooling: How token states become features, as for `extract`.
        layer: Whose hidden states are read, as for `extract`.
        seeds: Number of probes.
        epochs: Passes over the training examples.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
        batch_size: Examples in a step of the probe.
        standardize: Whether the features are centred and scaled.
        seed: The seed from which those of the probes are derived.
        solver: How the probe is fitted.
        regularisation: The convex probe's strength.

    Raises:
        IsolossError: As `extract` and `linear_probe`.
    """
    train_x = extract(model, task.train, pooling=pooling, layer=layer)
    test_x = extract(model, task.test, pooling=pooling, layer=layer)
    return linear_probe(
        train_x,
        task.train_labels,
        test_x,
        task.test_labels,
        num_classes=len(task.classes),
        seeds=seeds,
        epochs=epochs,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batch_size=batch_size,
        standardize=standardize,
        seed=seed,
        solver=solver,
        regularisation=regularisation,
    )


def paired_difference(correct_a: torch.Tensor, correct_b: torch.Tensor) -> Estimate:
    """Return the accuracy of probe a minus that of probe b, from the same test examples.

    Models that fail on the same examples are compared more sharply this way than by two separate accuracies. With
    `d_si = a_si - b_si` over S seeds and n examples, seeds and examples are two crossed random effects, and the
    variance of the mean of `d` is estimated without bias by `(M_examples + M_seeds - M_rest) / (S n)`, the mean squares
    of the two-way analysis of variance. Where a large rest makes that smaller than one of the two effects alone says,
    the larger of `M_examples / (S n)` and `M_seeds / (S n)` is taken.

    Args:
        correct_a: (S, n) bool, `ProbeResult.correct` of the first model, at least 2 seeds and 2 examples.
        correct_b: The same of the second model, for the same test examples in the same order.

    Raises:
        IsolossError: The shapes differ, or there are fewer than 2 seeds or examples.

    Example:
        >>> a = torch.tensor([[True, True, True, False], [True, True, False, True]])
        >>> b = torch.tensor([[True, False, False, False], [True, True, False, False]])
        >>> print(paired_difference(a, b))
        0.38 ± 0.12 difference in accuracy
    """
    if correct_a.shape != correct_b.shape or correct_a.ndim != 2:
        raise IsolossError(
            f"a paired comparison needs two (seeds, examples) arrays of one shape, not {tuple(correct_a.shape)} and "
            f"{tuple(correct_b.shape)}"
        )
    num_seeds, num_examples = correct_a.shape
    if num_seeds < 2 or num_examples < 2:
        raise IsolossError(
            f"a paired comparison needs at least 2 seeds and 2 examples, not {num_seeds} and {num_examples}"
        )
    difference = correct_a.double() - correct_b.to(correct_a.device).double()
    mean = difference.mean()
    by_example, by_seed = difference.mean(dim=0), difference.mean(dim=1)
    rest = difference - by_example - by_seed[:, None] + mean
    square_examples = num_seeds * float(by_example.var())
    square_seeds = num_examples * float(by_seed.var())
    square_rest = float(rest.square().sum()) / ((num_seeds - 1) * (num_examples - 1))
    square = max(square_examples + square_seeds - square_rest, square_examples, square_seeds)
    return Estimate(
        value=float(mean),
        stderr=math.sqrt(square / (num_seeds * num_examples)),
        samples=num_examples,
        unit="difference in accuracy",
        num_inputs=num_examples,
        method="paired difference of linear probes",
        details={"seeds": num_seeds, "differences": by_seed.tolist()},
    )


def _accuracy(
    correct: torch.Tensor, majority: float, settings: dict[str, Any], *, method: str, seconds: float
) -> Estimate:
    """Return the mean accuracy of `correct` (S, n) with its error."""
    num_seeds, num_test = correct.shape
    accuracies = correct.double().mean(dim=1)
    value, seed_std = float(accuracies.mean()), float(accuracies.std())
    binomial = math.sqrt(value * (1 - value) / num_test)
    return Estimate(
        value=value,
        stderr=math.hypot(binomial, seed_std / math.sqrt(num_seeds)),
        samples=num_test,
        unit="accuracy",
        num_inputs=num_test,
        method=method,
        seconds=seconds,
        details={
            "accuracies": accuracies.tolist(),
            "seed_std": seed_std,
            "binomial_stderr": binomial,
            "majority_rate": majority,
            "num_test": num_test,
            "seeds": num_seeds,
            **settings,
        },
    )


def _centre_and_scale(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the mean (D,) of the features and the root mean square of what is left of them."""
    centre = x.mean(dim=0)
    scale = float((x - centre).square().mean().sqrt())
    if scale <= 1e-6 * float(x.abs().amax()):
        raise IsolossError("the training features are the same for every example, so there is nothing to classify by")
    return centre, scale


def _initial(
    generators: list[torch.Generator], num_features: int, num_classes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (S, C, D) and biases (S, 1, C), uniform within ±1/sqrt(D), each seed's from its own generator."""
    bound = num_features**-0.5
    drawn = [torch.rand(num_classes, num_features + 1, generator=g) * (2 * bound) - bound for g in generators]
    stacked = torch.stack(drawn).to(device)
    return stacked[:, :, :-1].contiguous(), stacked[:, None, :, -1].contiguous()


def _train(
    weight: torch.Tensor,
    bias: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    generators: list[torch.Generator],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Train the probes of all seeds by AdamW, in place; a seed's generator gives its order of the examples."""
    optimizer = torch.optim.AdamW([weight, bias], lr=learning_rate, weight_decay=weight_decay)
    for _ in range(epochs):
        orders = torch.stack([torch.randperm(len(y), generator=g) for g in generators]).to(x.device)
        for start in range(0, len(y), batch_size):
            chosen = orders[:, start : start + batch_size]
            weight.grad, bias.grad = _gradients(weight, bias, x[chosen], y[chosen])
            optimizer.step()


def _minimum(
    x: torch.Tensor, y: torch.Tensor, num_classes: int, regularisation: float
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return weights (1, C, D) and biases (1, 1, C) of the convex probe, and its objective and gap.

    A class of which there is no training example has a bias of minus infinity.
    """
    present = torch.tensor(sorted(set(y.tolist())), device=y.device)
    if len(present) < 2:
        raise IsolossError(f"all {len(y)} training labels are {int(y[0])}: a convex probe needs two classes")
    found = fit(x, torch.searchsorted(present, y), classes=len(present), regularisation=[regularisation])
    weight = x.new_zeros(1, num_classes, x.shape[1])
    bias = x.new_full((1, 1, num_classes), -math.inf)
    weight[0, present] = found.weights[0, 0].T.to(x)
    bias[0, 0, present] = found.intercepts[0, 0].to(x)
    return weight, bias, {"objective_nats": float(found.objectives), "gap_nats": float(found.gaps)}


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


def _predict(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return (S, n): the class of the largest logit."""
    stacked = weight.flatten(0, 1).T
    classes = []
    for first in range(0, len(x), _CHUNK):
        logits = (x[first : first + _CHUNK] @ stacked).view(-1, *weight.shape[:2]) + bias[:, 0]
        classes.append(logits.argmax(dim=2))
    return torch.cat(classes).T.contiguous()


def _check_settings(counts: dict[str, int], learning_rate: float, weight_decay: float) -> None:
    for name, value in counts.items():
        least = 2 if name == "seeds" else 1
        if value < least:
            raise IsolossError(f"{name} is {value}; a linear probe needs at least {least}")
    if not (learning_rate > 0 and math.isfinite(learning_rate)):
        raise IsolossError(f"learning_rate is {learning_rate}; it must be above 0")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise IsolossError(f"weight_decay is {weight_decay}; it must be 0 or above")


def _check_splits(
    train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor, num_classes: int
) -> None:
    _check_split("training", train_x, train_y, num_classes)
    _check_split("test", test_x, test_y, num_classes)
    if train_x.shape[1] != test_x.shape[1]:
        raise IsolossError(
            f"training features are {train_x.shape[1]} wide and test features {test_x.shape[1]}: both must come from "
            "the same model and be padded to one length"
        )
    unseen = sorted(set(test_y.tolist()) - set(train_y.tolist()))
    if unseen:
        raise IsolossError(
            f"test labels {unseen} do not occur in the {len(train_y)} training labels: train on more examples"
        )


def _check_split(split: str, x: torch.Tensor, y: torch.Tensor, num_classes: int) -> None:
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y):
        raise IsolossError(
            f"the {split} split needs features (n, D) and labels (n,), not {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if x.numel() == 0:
        raise IsolossError(f"the {split} split is empty: its features are {tuple(x.shape)}")
    if y.dtype != torch.int64:
        raise IsolossError(f"the {split} split needs int64 labels, not {y.dtype}")
    if not bool(x.isfinite().all()):
        rows = int((~x.isfinite()).any(dim=1).sum())
        raise IsolossError(f"{rows} of the {len(x)} {split} examples have features that are NaN or infinite")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= num_classes:
        raise IsolossError(
            f"the {split} labels go from {low} to {high}; with {num_classes} classes they are 0 to {num_classes - 1}"
        )
