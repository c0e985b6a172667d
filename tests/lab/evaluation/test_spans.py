"""Probes of symbols at their spans: the states that they read, the rates beside them, and what is refused."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.context import MeasureContext
from isoloss.lab.evaluation.measures.base import make_measure
from isoloss.lab.languages.config import HMMConfig, PCFGConfig
from isoloss.lab.models.make import make_model
from isoloss.run_config import ModelConfig, ObjectiveConfig

GRAMMAR = PCFGConfig(
    levels=3, symbols_per_level=3, rules_per_symbol=3, vocab_size=6, stop_probability=0.2, seed=3
).build()


def context_of(language, kind):
    return MeasureContext(read=None, objective=ObjectiveConfig(kind=kind), language=language)


def nodes_of(split, number, level):
    """Yield (sentence, start, stop, symbol) of the nodes of a level, one after the other."""
    drawn = GRAMMAR.sample(number, generator=seeds.generator(0, "span", split), latent=True)
    for row, nodes in enumerate(drawn.latent.tolist()):
        for start, stop, symbol in nodes:
            if start >= 0 and GRAMMAR.symbols[symbol].startswith(f"L{level}."):
                yield row, start, stop, int(GRAMMAR.symbols[symbol].split(".")[1])


def states_of(model, split, number, level, state, kind):
    drawn = GRAMMAR.sample(number, generator=seeds.generator(0, "span", split), latent=True)
    features, labels, rows = [], [], []
    for row, start, stop, symbol in nodes_of(split, number, level):
        tokens = drawn.tokens[row : row + 1, : int(drawn.lengths[row])]
        shift = 0
        if kind == "causal":
            tokens, shift = torch.cat([torch.tensor([[GRAMMAR.start.id]]), tokens], dim=1), 1
        with torch.no_grad():
            layers = model(input_ids=tokens, output_hidden_states=True).hidden_states
        part = torch.stack(layers)[:, 0, start + shift : stop + shift]
        features.append((part[:, -1] if state == "last" else part.mean(1)).double().numpy())
        labels.append(symbol)
        rows.append(row)
    return np.stack(features, axis=1), np.array(labels), np.array(rows)


def probe(x, y, classes, strength):
    """Return the predictions of the probe that scipy finds: features centered and divided by one number."""
    center, scale = x.mean(0), np.sqrt(((x - x.mean(0)) ** 2).mean())

    def loss(flat):
        w = flat.reshape(classes, -1)
        z = (x - center) / scale @ w[:, :-1].T + w[:, -1]
        return -log_softmax(z, axis=1)[np.arange(len(y)), y].mean() + strength / 2 * (w[:, :-1] ** 2).sum()

    w = minimize(loss, np.zeros(classes * (x.shape[1] + 1)), method="L-BFGS-B").x.reshape(classes, -1)
    return lambda z: ((z - center) / scale @ w[:, :-1].T + w[:, -1]).argmax(1)


@pytest.mark.parametrize(("kind", "architecture", "state"), [("causal", "llama", "last"), ("masked", "bert", "mean")])
def test_probes_read_the_states_at_spans(kind, architecture, state):
    model = make_model(ModelConfig(architecture=architecture, size="d16"), GRAMMAR, seed=0).eval()
    settings = {"num_train": 60, "num_test": 50, "span_state": state, "span_regularization": 0.01}
    found = make_measure("span-2", settings).run(model, context_of(GRAMMAR, kind)).estimates
    train_x, train_y, _ = states_of(model, "train", 60, 2, state, kind)
    test_x, test_y, rows = states_of(model, "test", 50, 2, state, kind)
    assert list(found) == ["layer-0", "layer-1", "bayes", "majority"]
    for layer in (0, 1):
        right = probe(train_x[layer], train_y, 3, 0.01)(test_x[layer]) == test_y
        assert found[f"layer-{layer}"].value == pytest.approx(right.mean(), abs=0.02)
    assert found["majority"].value == pytest.approx((test_y == np.bincount(train_y).argmax()).mean())
    # the error is over sentences
    counts = np.bincount(rows, minlength=50)
    residuals = np.bincount(rows, weights=(test_y == np.bincount(train_y).argmax()) - found["majority"].value)
    residuals = np.pad(residuals, (0, 50 - len(residuals)))[counts > 0]
    n = len(residuals)
    expected = np.sqrt((residuals**2).sum() * n / (n - 1)) / counts.sum()
    assert found["majority"].stderr == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_the_bayes_rate_is_that_of_the_posterior_and_no_one_does_better(kind):
    model = make_model(ModelConfig(architecture="llama" if kind == "causal" else "bert", size="d16"), GRAMMAR, seed=0)
    found = make_measure("span-1", {"num_train": 40, "num_test": 150}).run(model.eval(), context_of(GRAMMAR, kind))
    drawn = GRAMMAR.sample(150, generator=seeds.generator(0, "span", "test"), latent=True)
    symbols = [GRAMMAR.symbols.index(f"L1.{i}") for i in range(3)]
    best, right = [], []
    for row, start, stop, symbol in nodes_of("test", 150, 1):
        one = {"tokens": drawn.tokens[row : row + 1], "lengths": drawn.lengths[row : row + 1]}
        if kind == "causal":
            posterior = GRAMMAR.prefix_span_posterior(**one, symbols=symbols, start=start, stop=stop)[0]
        else:
            posterior = GRAMMAR.span_posterior(**one, start=start, stop=stop)[0, symbols]
            posterior = posterior / posterior.sum()
        best.append(float(posterior.max()))
        right.append(int(posterior.argmax()) == symbol)
    rate = found.estimates["bayes"]
    assert rate.value == pytest.approx(np.mean(best), rel=1e-9)
    # whoever says the likeliest symbol is right as often
    assert abs(np.mean(right) - rate.value) < 4 * np.std(right) / np.sqrt(len(right))
    assert found.estimates["layer-1"].value < rate.value + 4 * rate.stderr + 0.1


def test_what_has_no_spans_says_so():
    model = make_model(ModelConfig(size="d16"), GRAMMAR, seed=0).eval()
    for language, name, message in (
        (HMMConfig(states=4, vocab_size=8, blocks=2, length=4).build(), "span-0", "spans are those of a grammar"),
        (GRAMMAR, "span-4", r"the grammar has no spans of level 4 \(no task 'level-4': .* level-D with D from 0 to 3"),
    ):
        measure = make_measure(name, {})
        assert measure.why_not_applicable(context_of(language, "masked"))
        with pytest.raises(IsolossError, match=message):
            measure.run(model, context_of(language, "masked"))
