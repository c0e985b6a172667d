"""The Hessian's trace against dense Hessians, its parts against each other, and its error against repetitions."""

import itertools
import math

import pytest
import torch
from dense_curvature import batch_of, bert, dense

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace, hessian_trace
from isoloss.flatness._ghost import controls
from isoloss.lab.models.architectures import PRE_LAYER_NORM_BERT
from isoloss.run_config import ModelConfig


def named(model, *endings):
    return {name: p for name, p in model.named_parameters() if name.endswith(endings)}


def test_the_residual_is_exact_over_all_signs(monkeypatch):
    model, batches, causal = bert(), [batch_of(3, seed=1), batch_of(2, seed=2)], False
    parameters = dict(itertools.islice(named(model, "output.LayerNorm.bias").items(), 1))
    hessian, gauss_newton = dense(model, batches, causal=causal, parameters=parameters)
    drawn, chosen = controls.rademacher, []
    monkeypatch.setattr(
        controls,
        "rademacher",
        lambda shape, device, seed, *names: chosen[0] if names[0] == "residual" else drawn(shape, device, seed, *names),
    )
    values = []
    for signs in itertools.product((-1, 1), repeat=4):
        chosen[:] = [torch.tensor(signs)]
        found = hessian_trace(model, batches, causal=causal, parameters=parameters, group_size=2, num_probes=2)
        values.append(found.details["residual"])
    rest = float(hessian.trace() - gauss_newton.trace())
    assert sum(values) / len(values) == pytest.approx(rest, rel=1e-9)
    assert max(values) - min(values) > 1e-3 * abs(rest)
    assert found.value == pytest.approx(found.details["fisher"] + found.details["residual"], rel=1e-12)


def test_the_fishers_part_is_that_of_fisher_trace():
    model, batch = bert(), batch_of(20)
    found = hessian_trace(model, [batch], group_size=4, seed=3)
    fisher = fisher_trace(model, [{**batch, "documents": torch.arange(20) // 4}], seed=3)
    assert found.details["fisher"] == pytest.approx(fisher.value, rel=1e-12)
    assert found.details["fisher_stderr"] == pytest.approx(fisher.stderr, rel=1e-10)


def test_the_published_code_is_as_published():
    model = bert()
    batches = [batch_of(size, seed=size) for size in (2, 5)]
    kept = {name: p for name, p in model.named_parameters() if name != "cls.predictions.bias"}
    expected = []
    for number, batch in enumerate(batches):
        hessian, _ = dense(model, [batch], causal=False, parameters=kept)
        z = torch.randn(len(hessian), generator=seeds.generator(7, "authors", number), dtype=torch.float64)
        expected.append(float(z @ hessian @ z))
    found = hessian_trace(model, batches, method="published-code", seed=7)
    assert found.value == pytest.approx(sum(expected) / 2, rel=1e-9)
    assert found.stderr == pytest.approx(
        float(torch.tensor(expected, dtype=torch.float64).std()) / math.sqrt(2), rel=1e-9
    )
    assert sum(found.by_parameter.values()) == pytest.approx(found.value, rel=1e-10)
    assert found.details["parameters_left_out"] == ["cls.predictions.bias"]
    assert (found.samples, found.details["sequences"]) == (2, 7)
    pre_ln = PRE_LAYER_NORM_BERT.new_model(ModelConfig(size="d16"), vocab_size=8, pad_id=0, max_length=4, seed=0)
    found = hessian_trace(pre_ln.eval(), batches, method="published-code")
    assert found.details["parameters_left_out"] == ["lm_head.bias"]


def test_a_single_group_of_sequences_is_refused():
    six = batch_of(6)
    with pytest.raises(IsolossError, match="1 group of up to 8 sequences; take more sequences or a smaller group_size"):
        hessian_trace(bert(), [six])
    assert hessian_trace(bert(), [six], group_size=3).samples == 2


def test_parameters_require_gradients_for_the_residual_only():
    model, seen = bert(), []

    def batches():
        for seed in range(3):
            seen.append(any(p.requires_grad for p in model.parameters()))
            yield batch_of(4, seed=seed)

    hessian_trace(model, batches(), group_size=4)
    assert seen == [False] * 3  # the forward pass for the Fisher's part keeps no graph of the weights
    assert all(p.requires_grad for p in model.parameters())
