"""The one-layer attention model against its sum written out, and the paper's two-neuron solution on every sentence."""

import itertools
import math

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.brackets import Brackets
from isoloss.paper.theory.brackets import BracketAttention, two_neurons
from isoloss.seeds import generator


def hidden_one(length):
    """Every sentence of the language with every bracket hidden in turn, and g* of what is left."""
    sentences = [s for s in itertools.product((0, 1), repeat=length) if sum(s) == length // 2]
    tokens, targets = [], []
    for sentence, place in itertools.product(sentences, range(length)):
        tokens.append([3 if t == place else bracket for t, bracket in enumerate(sentence)])
        targets.append(1.0 if sentence[place] == 0 else -1.0)
    return torch.tensor(tokens), torch.tensor(targets)


def encode(tokens, step=0):
    language = Brackets(tokens.shape[1])
    return language.encode(tokens, tokens == language.mask_id, generator=generator(0, "signs", step), summed=False)


def test_the_encoding_is_the_papers():
    tokens, targets = hidden_one(6)
    x = encode(tokens)
    assert x.shape == (len(tokens), 6, 12)
    for row, encoded in zip(tokens.tolist(), x.tolist(), strict=True):
        for t, (bracket, vector) in enumerate(zip(row, encoded, strict=True)):
            place = t + 6 if bracket == 3 else t
            assert [i for i, value in enumerate(vector) if value] == [place]
            assert vector[place] in ((1.0, -1.0) if bracket == 3 else (1.0,) if bracket == 0 else (-1.0,))
    torch.testing.assert_close(-x.sum(dim=1)[:, :6].sum(dim=1), targets.double())
    signs = x.sum(dim=1)[:, 6:].sum(dim=1)
    assert abs(float(signs.mean())) < 4 / len(signs) ** 0.5  # four standard errors of a fair sign


def test_the_output_is_the_sum_written_out():
    model = BracketAttention(length=4, width=5, key_width=2, seed=0).double()
    x = encode(hidden_one(4)[0])
    got = model(x)
    q, k, v, u = (parameter.tolist() for parameter in (model.query, model.key, model.value, model.output))

    def dot(a, b):
        return sum(s * t for s, t in zip(a, b, strict=True))

    for sentence, value in zip(x.tolist(), got.tolist(), strict=True):
        query = [dot(row, sentence[0]) for row in q]
        scores = [math.exp(dot(query, [dot(row, token) for row in k])) for token in sentence]
        total = 0.0
        for neuron, weight in zip(v, u, strict=True):
            reads = sum(s * dot(neuron, token) for s, token in zip(scores, sentence, strict=True)) / sum(scores)
            total += weight * max(reads, 0.0)
        assert value == pytest.approx(total / 5, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("width", [2, 5])
def test_two_neurons_solve_the_pre_training_and_the_downstream_task(width):
    model = two_neurons(6, width)
    tokens, targets = hidden_one(6)
    x = encode(tokens)
    torch.testing.assert_close(model(x), targets.double(), rtol=1e-12, atol=1e-12)
    free, g = Brackets(6).downstream(200, generator=generator(0, "downstream"))
    x = encode(free)
    torch.testing.assert_close(model(x), g.double(), rtol=1e-12, atol=1e-12)


def test_even_attention_and_its_softmax():
    model = BracketAttention(length=4, width=2, key_width=3, seed=1).double()
    x = encode(hidden_one(4)[0])
    attention, query, key = model.attention(x), model.query.detach(), model.key.detach()
    for row, sentence in zip(attention, x, strict=True):
        scores = [float(query @ sentence[0] @ (key @ token)) for token in sentence]
        expected = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
        assert row.tolist() == pytest.approx(expected, rel=1e-12)
    assert two_neurons(4, 2).attention(x).tolist() == [[0.25] * 4] * len(x)


def test_squared_loss_trains_it():
    model = BracketAttention(length=4, width=32, seed=0)
    tokens, targets = hidden_one(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(300):
        x = encode(tokens, step).float()
        loss = (model(x) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5
    assert losses[-1] < 0.05


def test_the_weights_are_a_function_of_the_seed():
    first, again, other = (BracketAttention(length=4, width=3, seed=seed).value for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bad_arguments_are_refused():
    with pytest.raises(IsolossError, match="width is 0; it must be at least 1"):
        BracketAttention(length=4, width=0, seed=0)
    with pytest.raises(IsolossError, match="needs two neurons and the model has 1"):
        two_neurons(4, 1)
