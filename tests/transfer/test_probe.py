"""The linear probe against a plain loop over torch's own modules, and its errors against simulations."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from finetuning import bert, small_task
from isoloss import seeds
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.models.architectures import BERT
from isoloss.lab.tasks import make_task
from isoloss.run_config import ModelConfig
from isoloss.transfer import probe
from isoloss.transfer.config import ClassifierConfig, Solver
from isoloss.transfer.features import extract, store
from isoloss.transfer.logistic_regression import fit
from isoloss.transfer.probe import _folds, fit_linear_probe, fit_probe, linear_probe
from isoloss.transfer.results import TransferResult


def blobs(n: int, *, spread: float, num_classes: int = 4, width: int = 10, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return features around one random center per class, and the classes."""
    g = seeds.generator(seed, "blobs")
    centers = 3 * torch.randn(num_classes, width, generator=seeds.generator(0, "centres"))
    y = torch.randint(num_classes, (n,), generator=g)
    return centers[y] + spread * torch.randn(n, width, generator=g), y


def split(n_train: int, n_test: int, *, spread: float) -> tuple[torch.Tensor, ...]:
    return (*blobs(n_train, spread=spread, seed=1), *blobs(n_test, spread=spread, seed=2))


def reference_predictions(
    train_x: torch.Tensor,
    train_y: torch.Tensor,
    test_x: torch.Tensor,
    *,
    num_classes: int,
    index: int,
    epochs: int,
    batch_size: int,
    weight_decay: float,
    standardize: bool,
    schedule: str = "constant",
    warmup_steps: int = 0,
) -> torch.Tensor:
    """Return the logits of one seed's probe, trained alone by torch's Linear, cross-entropy, autograd and AdamW."""
    if standardize:
        center = train_x.double().mean(0)
        scale = ((train_x - center) ** 2).mean().sqrt()
        train_x, test_x = ((train_x - center) / scale).float(), ((test_x - center) / scale).float()
    g = seeds.generator(0, "probe", index)
    linear = torch.nn.Linear(train_x.shape[1], num_classes)
    bound = 1 / math.sqrt(train_x.shape[1])
    initial = torch.rand(num_classes, train_x.shape[1] + 1, generator=g) * 2 * bound - bound
    with torch.no_grad():
        linear.weight.copy_(initial[:, :-1])
        linear.bias.copy_(initial[:, -1])
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-3, weight_decay=weight_decay)
    total = epochs * math.ceil(len(train_x) / batch_size)
    step = 0
    for _ in range(epochs):
        for rows in torch.randperm(len(train_x), generator=g).split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(linear(train_x[rows]), train_y[rows]).backward()
            step += 1
            rate = 1e-3 * min(1.0, step / max(1, warmup_steps))
            if schedule == "linear" and step > warmup_steps:
                rate = 1e-3 * (total + 1 - step) / (total + 1 - warmup_steps)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    return linear(test_x).detach()


@pytest.mark.parametrize(
    ("weight_decay", "standardize", "schedule"),
    [
        (0.01, False, {}),
        (3.0, False, {}),
        (0.01, True, {}),
        (0.01, False, {"schedule": "linear", "warmup_steps": 9}),
    ],
)
def test_all_seeds_at_once_are_the_seeds_one_by_one(
    weight_decay: float, standardize: bool, schedule: dict[str, object]
) -> None:
    train_x, train_y, test_x, test_y = split(301, 500, spread=6.0)
    settings = {"epochs": 7, "batch_size": 64, "weight_decay": weight_decay, "standardize": standardize, **schedule}
    result = fit_linear_probe(train_x, train_y, test_x, test_y, classes=4, seeds=3, **settings)
    for index in range(3):
        logits = reference_predictions(train_x, train_y, test_x, num_classes=4, index=index, **settings)
        top = logits.topk(2).values
        clear = top[:, 0] - top[:, 1] > 1e-4  # float32 may turn a tie
        assert int(clear.sum()) > 490
        assert torch.equal(result.predictions[index][clear], logits.argmax(1)[clear])
    # seeds that all agreed would hide a mixed-up seed axis
    assert not torch.equal(result.predictions[0], result.predictions[1])


def test_the_scale_and_shift_of_the_features_do_not_matter_unless_asked() -> None:
    train_x, train_y, test_x, test_y = split(300, 500, spread=3.0)

    def run(scale: float, shift: float, *, standardize: bool) -> TransferResult:
        x, z = train_x * scale + shift, test_x * scale + shift
        return fit_linear_probe(x, train_y, z, test_y, classes=4, learning_rate=0.01, standardize=standardize)

    plain, small = run(1.0, 0.0, standardize=True), run(2.0**-10, 2.0**-12, standardize=True)
    assert float((plain.predictions == small.predictions).double().mean()) > 0.998  # but for rounding
    raw = run(2.0**-10, 0.0, standardize=False).accuracy
    assert raw.value < plain.accuracy.value - 0.1


def test_separable_classes_are_learned_perfectly_and_random_labels_not_at_all() -> None:
    train_x, train_y, test_x, test_y = split(300, 500, spread=0.1)
    result = fit_linear_probe(train_x, train_y, test_x, test_y, classes=4)
    assert result.accuracy.value == result.accuracy.details["train_accuracy"] == 1.0
    assert torch.equal(result.predictions, test_y.expand(5, -1))
    g = seeds.generator(3, "noise")
    x, y = torch.randn(3000, 8, generator=g), torch.randint(5, (3000,), generator=g)
    accuracy = fit_linear_probe(x[:1000], y[:1000], x[1000:], y[1000:], classes=5, epochs=30).accuracy
    assert abs(accuracy.value - 0.2) < 4 * accuracy.stderr < 0.08


def test_the_numbers_that_come_with_the_accuracy() -> None:
    train_x, train_y, test_x, test_y = split(200, 300, spread=6.0)
    result = fit_linear_probe(train_x, train_y, test_x, test_y, classes=4, seeds=4, epochs=5)
    accuracy, details = result.accuracy, result.accuracy.details
    assert torch.equal(result.correct, result.predictions == test_y)
    per_seed = [sum(row) / 300 for row in result.correct.tolist()]
    assert details["accuracies"] == pytest.approx(per_seed, abs=1e-15)
    mean, variance = statistics.mean(per_seed), statistics.variance(per_seed)
    assert (accuracy.value, details["seed_std"]) == pytest.approx((mean, math.sqrt(variance)))
    assert variance > 0
    assert accuracy.stderr == pytest.approx(math.sqrt(mean * (1 - mean) / 300 + variance / 4))
    assert details["majority_rate"] == max(test_y.tolist().count(c) for c in range(4)) / 300
    assert (details["num_train"], details["num_test"], accuracy.num_predictions) == (200, 300, 300)
    assert (accuracy.unit, accuracy.samples) == ("accuracy", 300)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not() -> None:
    data = split(200, 400, spread=6.0)

    def run(seed: int) -> TransferResult:
        torch.manual_seed(seed + 17)  # the global state must not matter
        return fit_linear_probe(*data, classes=4, epochs=3, seed=seed)

    first, again, other = run(0), run(0), run(1)
    assert torch.equal(first.predictions, again.predictions)
    assert {**first.accuracy.to_dict(), "seconds": 0} == {**again.accuracy.to_dict(), "seconds": 0}
    assert not torch.equal(first.predictions, other.predictions)


@pytest.mark.parametrize(
    ("epochs", "learning_rate", "most"),
    # answers that are independent from seed to seed, as of untrained probes, would give S + 1 = 4
    [(30, 0.15, 1), (1, 1e-9, 4)],
    ids=["trained", "untrained"],
)
def test_the_stderr_is_the_spread_over_fresh_examples_and_seeds(epochs: int, learning_rate: float, most: int) -> None:
    train_x, train_y = blobs(150, spread=8.0, seed=1)
    values, variances = [], []
    for repeat in range(200):
        test = blobs(100, spread=8.0, seed=100 + repeat)
        settings = {"seeds": 3, "epochs": epochs, "learning_rate": learning_rate, "seed": repeat}
        accuracy = fit_linear_probe(train_x, train_y, *test, classes=4, **settings).accuracy
        values.append(accuracy.value)
        variances.append(accuracy.stderr**2)
    ratio = sum(variances) / 200 / float(torch.tensor(values, dtype=torch.float64).var())
    error = 3 * math.sqrt(2 / 199)  # three relative standard errors of a variance from 200 values
    assert 1 - error < ratio < most * (1 + error)


FITTED = {"adamw": {"epochs": 20}, "convex": {"solver": "convex", "regularization": (0.1, 1.0)}}

# --- errors

X, Y = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_x": X[:, :1]}, "training features are 1 wide and test features 2"),
        ({"train_x": X[:0], "train_y": Y[:0]}, "the training split is empty"),
        ({"test_x": X[:0], "test_y": Y[:0]}, "the test split is empty"),
        ({"test_x": X[:2]}, r"the test split needs features \(n, D\) and labels \(n,\), not \(2, 2\) and \(3,\)"),
        ({"train_x": X.log() * 0}, "2 of the 3 training examples have features that are NaN or infinite"),
        ({"train_x": X[:1].expand(3, 2) + 0.3}, "the training features are the same for every example"),
        ({"test_y": Y - 1}, "the test labels go from -1 to 0; with 2 classes they are 0 to 1"),
        ({"classes": 1}, "the training labels go from 0 to 1; with 1 classes they are 0 to 0"),
        ({"train_y": Y.float()}, "int64 labels, not torch.float32"),
        ({"seeds": 0}, "seeds is 0; it must be at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be at least 0"),
        ({"solver": "newton"}, "solver is 'newton'; it must be one of adamw, convex"),
        ({"solver": "convex"}, "epochs has no effect with the solver convex: leave it out"),
        ({"regularization": 0.5}, "regularization has no effect with the solver adamw"),
        ({"solver": "convex", "epochs": 100, "regularization": ()}, "regularization is empty"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], message: str) -> None:
    good = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y, "classes": 2, "epochs": 1}
    fit_linear_probe(**good)
    with pytest.raises(IsolossError, match=message):
        fit_linear_probe(**{**good, **arguments})


@pytest.mark.parametrize("solver", ["adamw", "convex"])
def test_a_class_that_training_lacks_counts_as_errors(solver: Solver) -> None:
    train_x, train_y, test_x, test_y = split(300, 200, spread=4.0)
    settings = {"classes": ("a", "b", "c", "d"), "seeds": 2, **FITTED[solver]}
    seen = train_y < 3
    absent = int((test_y == 3).sum())
    with pytest.warns(IsolossWarning, match=rf"^{absent} of the 200 test examples .* \(d\): they count as errors$"):
        result = fit_linear_probe(train_x[seen], train_y[seen], test_x, test_y, **settings)
    alone = fit_linear_probe(train_x[seen], train_y[seen], test_x[test_y < 3], test_y[test_y < 3], **settings)
    assert not result.correct[:, test_y == 3].any()
    assert torch.equal(result.predictions[:, test_y < 3], alone.predictions)


@pytest.mark.parametrize("solver", ["adamw", "convex"])
@pytest.mark.filterwarnings("ignore:.*count as errors")
def test_training_examples_of_one_class_make_it_the_prediction(solver: Solver) -> None:
    train_x, train_y, test_x, test_y = split(60, 40, spread=4.0)
    settings = {"classes": 4, "seeds": 2, **FITTED[solver]}
    with pytest.warns(IsolossWarning, match="all 60 training examples have the label 2, so every prediction is that"):
        result = fit_linear_probe(train_x, torch.full_like(train_y, 2), test_x, test_y, **settings)
    assert (result.predictions == 2).all()
    assert result.accuracy.value == pytest.approx(float((test_y == 2).double().mean()))


# --- a model on a task


def test_probing_a_model_is_extracting_and_probing() -> None:
    language = PCFG.from_text("S A B 1\nS B 1\nA a 2\nA b 1\nB b 1\nB c 1")
    task = make_task(language, "prefix-1", num_train=60, num_test=40, seed=0)
    model = BERT.new_model(
        ModelConfig(size="d16"),
        vocab_size=language.model_vocab_size,
        max_length=language.max_length,
        pad_id=language.pad_id,
        seed=0,
    ).eval()
    result = linear_probe(model, task, seeds=2, epochs=3, pooling="mean", layer=0, learning_rate=0.01)
    by_hand = fit_linear_probe(
        extract(model, task.train, pooling="mean", layer=0),
        task.train_labels,
        extract(model, task.test, pooling="mean", layer=0),
        task.test_labels,
        classes=3,
        seeds=2,
        epochs=3,
        learning_rate=0.01,
        bayes=task.bayes,
    )
    assert {**result.accuracy.to_dict(), "seconds": 0} == {**by_hand.accuracy.to_dict(), "seconds": 0}
    assert torch.equal(result.predictions, by_hand.predictions)
    with pytest.raises(IsolossError, match="training mode"):
        linear_probe(model.train(), task)


def test_convex_solver_is_the_minimum_for_every_seed() -> None:
    train_x, train_y, test_x, test_y = split(300, 200, spread=4.0)
    result = fit_linear_probe(train_x, train_y, test_x, test_y, classes=6, solver="convex", regularization=0.01)
    center = train_x.double().mean(0)
    scale = ((train_x - center) ** 2).mean().sqrt()
    left, right = ((x - center) / scale for x in (train_x, test_x))
    linear = torch.nn.Linear(10, 4, dtype=torch.float64)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    for _ in range(3000):
        loss = F.cross_entropy(linear(left), train_y) + 0.005 * linear.weight.square().sum()
        gradients = torch.autograd.grad(loss, list(linear.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(linear.parameters(), gradients, strict=True):
                parameter -= 0.3 * gradient
    logits = linear(right).detach()
    sure = logits.topk(2, dim=1).values.diff(dim=1)[:, 0].abs() > 0.02  # others may go either way at 1e-6
    assert int(sure.sum()) > 180
    assert torch.equal(result.predictions[:, sure], logits.argmax(1)[sure].expand(5, -1))
    details = result.accuracy.details
    assert details["objective_nats"] == pytest.approx(float(loss.detach()), rel=2e-6)
    assert 0 <= details["gap_nats"] <= 1e-6 * details["objective_nats"]
    assert details["seed_std"] == 0
    assert result.accuracy.method == "linear probe, convex"


def test_several_strengths_are_chosen_from_by_held_out_accuracy() -> None:
    train_x, train_y, test_x, test_y = split(150, 400, spread=9.0)
    train_y = torch.where(train_y == 3, 0, train_y)
    train_y[7], test_y = 3, torch.where(test_y == 3, 0, test_y)  # a class with one example, which no fold holds out
    strengths = [10.0, 1.0, 1e-1, 1e-2, 1e-3]

    def convex(strength: float | list[float]) -> TransferResult:
        settings = {"classes": 4, "solver": "convex", "seeds": 1}
        return fit_linear_probe(train_x, train_y, test_x, test_y, regularization=strength, **settings)

    result = convex(strengths)
    folds = _folds(train_y, seeds.generator(0, "probe", "folds"))
    assert folds[7] == -1
    for label in range(3):
        counts = folds[(train_y == label) & (folds >= 0)].bincount(minlength=5)
        assert int(counts.max()) - int(counts.min()) <= 1
    accuracies = []
    # each fold by itself; its features are not scaled anew, so the strengths are taken to their scale
    scale = ((train_x - train_x.mean(0)) ** 2).mean()
    for strength in strengths:
        right = 0
        for k in range(5):
            kept, out = folds != k, folds == k
            found = fit(train_x[kept], train_y[kept], classes=4, regularization=[strength * float(scale)])
            right += int((found.predict(train_x[out])[0] == train_y[out]).sum())
        accuracies.append(right / int((folds >= 0).sum()))
    assert len(set(accuracies)) > 1
    details = result.accuracy.details
    assert details["held_out_accuracies"] == pytest.approx(accuracies, abs=1e-9)
    best = max(strength for strength, a in zip(strengths, accuracies, strict=True) if a == max(accuracies))
    assert details["regularization"] == best
    assert torch.equal(result.predictions, convex(best).predictions)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("solver", ["adamw", "convex"])
def test_features_in_a_file_are_probed_as_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solver: str, standardize: bool
) -> None:
    train_x, train_y, test_x, test_y = split(150, 200, spread=6.0)
    train_x, test_x = train_x.bfloat16(), test_x.bfloat16()
    stored = [
        store(tmp_path / f"{index}", [x], shape=tuple(x.shape), dtype=torch.bfloat16)
        for index, x in enumerate((train_x, test_x))
    ]
    settings = {"classes": 4, "seeds": 2, "standardize": standardize, **FITTED[solver]}
    in_memory = fit_linear_probe(train_x, train_y, test_x, test_y, **settings)
    monkeypatch.setattr(probe, "MEMORY_BYTES", 0)  # rows are read as they are needed
    in_files = fit_linear_probe(stored[0], train_y, stored[1], test_y, **settings)
    assert float((in_files.predictions == in_memory.predictions).double().mean()) > 0.99  # but for rounding
    broken = store(tmp_path / "broken", [train_x * math.nan], shape=(150, 10), dtype=torch.float32)
    with pytest.raises(IsolossError, match="150 of the 150 training examples have features that are NaN"):
        fit_linear_probe(broken, train_y, stored[1], test_y, **settings)


def test_a_model_is_probed_through_a_file_where_memory_is_short() -> None:
    model, task = bert(), small_task()
    settings = {"seeds": 2, "epochs": 3, "pooling": "first"}
    in_memory, in_files = (linear_probe(model, task, memory_bytes=size, **settings) for size in (10**6, 0))
    assert torch.equal(in_memory.predictions, in_files.predictions)
    projected = linear_probe(model, task, projection=5, **settings)
    assert projected.accuracy.details["num_features"] == 5
    assert projected.classes == task.classes


def test_where_no_class_has_two_examples_the_largest_strength_is_taken():
    x, config = torch.eye(3), ClassifierConfig(solver="convex", seeds=1, regularization=(1e-3, 1e-1))
    details = fit_probe(x, torch.arange(3), 3, config).details
    assert details["regularization"] == 1e-1
    assert details["held_out_accuracies"] == [0.0, 0.0]  # as a number, which JSON can have
