"""The adversarial algorithm: its closed form against least squares, its gradient against finite differences."""

import itertools

import pytest
import torch
from distributed_workers import examples
from stepping import batches, check, check_slope, context, gradients_of, plain_loss, run, tiny
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Sentences
from isoloss.lab.models.make import make_model
from isoloss.lab.training.algorithms.adversarial import Adversarial, ridge_predictions, token_states
from isoloss.lab.training.algorithms.base import Examples, TrainingAlgorithm
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.run_config import ModelConfig, OptimizerConfig
from isoloss.seeds import generator

LANGUAGE = PairLanguage(is_ragged=True)
SETTINGS = AdversarialConfig(weight=0.5, ridge=0.03, head_examples=10, loss_examples=6)


def algorithm_for(model, optimizer=None, settings=SETTINGS, n=40, **changes):
    made = context(
        optimizer or OptimizerConfig(),
        **{"task_examples": lambda name, _: examples(name, n), "language": LANGUAGE, "seed": 3, **changes},
    )
    return Adversarial(model, made, settings)


def drawn(n, d, seed):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def least_squares_predictions(train_x, train_y, test_x, ridge):
    """Return the predictions of the ridge regression as a least-squares problem with a row a penalized weight."""
    n, d = train_x.shape
    center = train_x.mean(0)
    scale = ((train_x - center) ** 2).sum(1).mean().sqrt()
    train_z, test_z = (train_x - center) / scale, (test_x - center) / scale
    penalty = (n * ridge) ** 0.5 * torch.eye(d, dtype=train_x.dtype)
    rows = torch.cat([train_z, penalty])
    targets = torch.cat([train_y - train_y.mean(0), train_y.new_zeros(d, train_y.shape[1])])
    weight = torch.linalg.lstsq(rows, targets).solution
    return test_z @ weight + train_y.mean(0)


@pytest.mark.parametrize(("n", "d"), [(9, 4), (5, 20)])  # more examples than features, and fewer
def test_the_head_is_the_ridge_regression(n, d):
    train_x, train_y, test_x = drawn(n, d, 0), drawn(n, 3, 1), drawn(6, d, 2)
    got = ridge_predictions(train_x, train_y, test_x, ridge=0.05)
    torch.testing.assert_close(got, least_squares_predictions(train_x, train_y, test_x, 0.05), rtol=1e-10, atol=1e-12)
    moved = ridge_predictions(7 * train_x + 2, train_y, 7 * test_x + 2, ridge=0.05)
    torch.testing.assert_close(moved, got, rtol=1e-10, atol=1e-12)


def test_the_closed_form_is_differentiated():
    inputs = [drawn(7, 5, seed).requires_grad_() for seed in (0, 1)]
    targets = drawn(7, 2, 2)
    assert torch.autograd.gradcheck(lambda x, z: ridge_predictions(x, targets, z, ridge=0.1), inputs)


def test_the_gradient_of_the_heads_loss_is_that_of_finite_differences():
    model = tiny()
    algorithm = algorithm_for(model)
    parameters = list(model.bert.parameters())
    gradients = torch.autograd.grad(algorithm.head_loss(1)[0], parameters, materialize_grads=True)
    for seed in range(5):
        check_slope(lambda: algorithm.head_loss(1)[0].item(), parameters, gradients, seed=seed)


def reference_gradient(model, t, batch):
    """The objective with features read sentence by sentence and the head by least squares."""
    sentences, labels, _ = examples()
    order = torch.randperm(40, generator=generator(3, "adversary", t))[:16]
    rows = []
    for i in order.tolist():
        length = int(sentences.lengths[i])
        states = model.bert(input_ids=sentences.tokens[i : i + 1, :length]).last_hidden_state[0]
        rows.append(torch.cat([states.flatten(), states.new_zeros(16 * (4 - length))]))
    x = torch.stack(rows)
    y = torch.eye(8, dtype=x.dtype)[labels[order]]
    predicted = least_squares_predictions(x[:10], y[:10], x[10:], SETTINGS.ridge)
    head_loss = ((predicted - y[10:]) ** 2).sum() / 6
    loss = plain_loss(model, batch)
    return loss, gradients_of(loss - SETTINGS.weight * head_loss, model)


def test_the_steps_are_those_of_the_definition():
    optimizer = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0)
    model = tiny()
    check(model, algorithm_for(model, optimizer), optimizer, reference_gradient, batches())


def test_the_two_subsets_are_disjoint_and_drawn_anew_each_step(monkeypatch):
    model = tiny()
    tokens = torch.tensor(list(itertools.product([0, 1], repeat=4)))  # no two are the same: a row tells which it is
    everyone = Examples(Sentences(tokens, torch.full((16,), 4)), torch.arange(16) % 8, 8)
    algorithm = algorithm_for(model, task_examples=lambda *_: everyone)
    seen = []
    states = torch.eye(16, dtype=torch.float64)
    index = {tuple(row): i for i, row in enumerate(tokens.tolist())}

    def record(_model, sentences, _language, *, causal):
        seen.append([index[tuple(row)] for row in sentences.tokens.tolist()])
        return states

    monkeypatch.setattr("isoloss.lab.training.algorithms.adversarial.token_states", record)
    for number in (1, 2, 1):
        algorithm.head_loss(number)
    assert sorted(seen[0]) == list(range(16))
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]


def test_the_adversary_keeps_the_head_from_its_task():
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)
    settings = AdversarialConfig(weight=1.0, ridge=0.1, head_examples=60, loss_examples=60)
    spoiled, plain = tiny(torch.float32), tiny(torch.float32)
    run(spoiled, algorithm_for(spoiled, optimizer, settings, n=400), 100)
    run(plain, TrainingAlgorithm(plain, context(optimizer, total=100)), 100)
    accuracy = [algorithm_for(m, optimizer, settings, n=400).head_loss(999)[1] for m in (spoiled, plain)]
    assert accuracy[1] > 0.5  # of 8 classes
    assert accuracy[0] < 0.25


def test_features_have_no_dropout_and_a_causal_model_reads_the_start():
    noisy = tiny(dropout=0.5)
    loss, again = (algorithm_for(noisy).head_loss(1)[0] for _ in range(2))
    assert torch.equal(loss, again)
    assert noisy.training

    causal = make_model(ModelConfig(architecture="opt", size="d16"), LANGUAGE, seed=0).eval()
    sentences = examples().sentences
    states = token_states(causal, sentences, LANGUAGE, causal=True)
    tokens, length = sentences.tokens[0], int(sentences.lengths[0])
    alone = causal.model(input_ids=torch.cat([torch.tensor([LANGUAGE.mask_id]), tokens[:length]])[None])
    torch.testing.assert_close(states[0, : 16 * length], alone.last_hidden_state[0, 1:].flatten())
    assert states.shape == (40, 64)


def test_too_few_examples_are_refused():
    with pytest.raises(IsolossError, match="draws 16 examples per step, and the task has 15"):
        algorithm_for(tiny(), n=15)
