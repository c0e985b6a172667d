"""The paper's model of brackets as a transformers model: against numpy, and its checkpoints, trace and rescalings."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from isoloss import config as configs
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.lab.evaluation.measures.brackets import parts
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.hidden_bracket import CLOSE, MINUS, OPEN, PLUS, HiddenBracket
from isoloss.lab.models.architectures import BRACKET_ATTENTION
from isoloss.lab.models.bracket_attention import BracketAttentionConfig, BracketAttentionForMaskedLM
from isoloss.lab.models.make import make_model, predicted_logits
from isoloss.run_config import ModelConfig
from isoloss.text.masking import IGNORED
from isoloss.transfer.features import extract

LENGTH = 4
LANGUAGE = HiddenBracket(LENGTH)


def tiny(seed=0):
    """A model in float64 whose attention is far from even."""
    config = ModelConfig(architecture="bracket-attention", width=3, ffn=5)
    model = make_model(config, LANGUAGE, seed=seed).double().eval()
    with torch.no_grad():
        model.brackets.query.weight.mul_(3)
        model.brackets.key.weight.mul_(2)
    return model


def masked(contexts):
    labels = torch.full_like(contexts, IGNORED)
    labels[:, -1] = 0
    return {"input_ids": contexts, "attention_mask": torch.ones_like(contexts), "labels": labels}


def by_numpy(model, context):
    """f and relu(V h) of one context, token by token."""
    names = ("brackets.query", "brackets.key", "brackets.value", "answers.read")
    query, key, value, output = (model.get_parameter(f"{name}.weight").detach().numpy() for name in names)
    vectors = []
    for place, token in enumerate(context):
        x = np.zeros(2 * LENGTH)
        x[place + LENGTH * (token in (PLUS, MINUS))] = {OPEN: 1, CLOSE: -1, PLUS: 1, MINUS: -1}[token]
        vectors.append(x)
    scores = np.array([(query @ vectors[0]) @ (key @ x) for x in vectors])
    attention = np.exp(scores) / np.exp(scores).sum()
    neurons = np.maximum(value @ (attention @ np.array(vectors)), 0)
    return float(output[0] @ neurons), neurons


def test_it_is_the_papers_model():
    model, contexts = tiny(), LANGUAGE.contexts()
    logits, states = model(contexts).logits[:, -1], extract(model, LANGUAGE.strings(), pooling="last")
    for row, context in enumerate(contexts[:, :-1].tolist()):
        f, _ = by_numpy(model, context)
        assert logits[row, :2].tolist() == pytest.approx([f / 2, -f / 2], rel=1e-12)
        assert logits[row, 2:].tolist() == [-100.0] * 6
    for row, string in enumerate(LANGUAGE.strings().tokens[:, :-1].tolist()):
        assert states[row].tolist() == pytest.approx(by_numpy(model, string)[1].tolist(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(predicted_logits(model, masked(contexts), causal=False), logits)
    both = masked(contexts) | {"labels": torch.zeros_like(contexts)}
    assert predicted_logits(model, both, causal=False).shape == (contexts.numel(), 8)


def test_its_ids_are_those_of_the_language():
    ids = torch.arange(LANGUAGE.model_vocab_size)[:, None]
    read = tiny().brackets.signs(ids, torch.float32)[:, 0].tolist()
    assert {token: read[token] for token in range(len(ids)) if any(read[token])} == {
        OPEN: [1, 0],
        CLOSE: [-1, 0],
        PLUS: [0, 1],
        MINUS: [0, -1],
    }
    with pytest.raises(IsolossError, match=r"bracket-attention reads the language hidden-bracket, not Brackets$"):
        make_model(ModelConfig(architecture="bracket-attention"), Brackets(4), seed=0)


def test_a_checkpoint_is_read_back(tmp_path):
    model = make_model(ModelConfig(architecture="bracket-attention"), LANGUAGE, seed=1).eval()
    model.save_pretrained(tmp_path)
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is BracketAttentionForMaskedLM
    contexts = LANGUAGE.contexts()
    loaded = load_model(tmp_path).model
    assert torch.equal(loaded(contexts).logits, model(contexts).logits)
    states = AutoModel.from_pretrained(tmp_path)(contexts).last_hidden_state
    assert torch.equal(states, model.brackets(contexts).last_hidden_state)
    assert sorted(dict(loaded.named_parameters())) == sorted(dict(model.named_parameters()))


def test_initial_weights_follow_from_the_seed():
    wide = ModelConfig(architecture="bracket-attention", width=400, ffn=500)
    model = make_model(wide, LANGUAGE, seed=1)
    stds = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters()}
    assert stds == {
        "brackets.query.weight": pytest.approx(8**-0.5, rel=0.05),
        "brackets.key.weight": pytest.approx(8**-0.5, rel=0.05),
        "brackets.value.weight": pytest.approx(BracketAttentionConfig().value_std, rel=0.05),
        "answers.read.weight": pytest.approx(500**-0.5, rel=0.1),
    }
    assert torch.equal(make_model(wide, LANGUAGE, seed=1).brackets.value.weight, model.brackets.value.weight)


def test_the_trace_by_part_is_autograds_and_agrees_with_the_estimates():
    model, contexts = tiny(), LANGUAGE.contexts()
    squares = {name: 0.0 for name, _ in model.named_parameters()}
    terms = sizes = bound = 0.0
    for context in contexts:
        f = model(context[None]).logits[0, -1, 0] * 2
        gradients = torch.autograd.grad(f, list(model.parameters()))
        f = f.detach()
        variance = float(f.sigmoid() * (1 - f.sigmoid())) / len(contexts)
        for name, gradient in zip(squares, gradients, strict=True):
            squares[name] = squares[name] + variance * gradient.square()
        _, neurons = by_numpy(model, context[:-1].tolist())
        terms += float((np.abs(model.answers.read.weight[0].detach().numpy()) * neurons).sum()) / len(contexts)
        sizes += float(f.abs()) / len(contexts)
        bound += variance * 2 * float(f.abs()) / LENGTH**0.5
    query, key, value, output = (s.sum(dim=1) if s.shape[0] > 1 else s[0] for s in squares.values())
    expected = {
        "attention-trace": float(query.sum() + key.sum()),
        "neurons-trace": float(value.sum() + output.sum()),
        "attention-minimal-trace": 2 * float((query * key).sqrt().sum()),
        "neurons-minimal-trace": 2 * float((value * output).sqrt().sum()),
        "cancellation": terms / sizes,
    }
    for kind in ("trace", "minimal-trace"):
        expected[f"parts-{kind}"] = expected[f"attention-{kind}"] + expected[f"neurons-{kind}"]
    expected["bound-ratio"] = expected["parts-trace"] / bound
    found = parts(model, contexts)
    assert found == pytest.approx(expected, rel=1e-8)
    assert found["bound-ratio"] > 1 < found["cancellation"]
    assert min(expected["attention-minimal-trace"], expected["neurons-minimal-trace"]) > 0.01
    for rescaling in (None, "minimal"):
        estimate = fisher_trace(model, [masked(contexts)], rescaling=rescaling)
        wanted = expected["parts-minimal-trace" if rescaling else "parts-trace"]
        assert abs(estimate.value - wanted) < 4 * estimate.stderr + 1e-12
        assert estimate.stderr < 0.2 * wanted


def test_shapes_are_refused_that_it_does_not_have():
    for wrong in ({"heads": 2}, {"layers": 2}, {"directions": 1}):
        with pytest.raises(IsolossError, match="bracket-attention has one layer and one head"):
            configs.check(ModelConfig(architecture="bracket-attention", **wrong))
    assert str(BRACKET_ATTENTION.shape(ModelConfig(architecture="bracket-attention", size="m16"))) == (
        "BracketShape(key_width=2, neurons=16)"
    )
