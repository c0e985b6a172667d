"""Dropout: the distribution, the mean, the derivatives, and where it is put."""

import math

import pytest
import torch

from isoloss.lab.languages.config import PRESETS
from isoloss.lab.models.dropout import Dropout, with_fast_dropout
from isoloss.lab.models.make import make_model
from isoloss.run_config import ModelConfig

LANGUAGE = PRESETS["pcfg-varied"][0].build()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_values_are_dropped_independently_with_probability_p(p):
    torch.manual_seed(0)
    n = 400_000
    kept = Dropout(p)(torch.ones(n, dtype=torch.float64)) != 0
    sigma = math.sqrt(p * (1 - p) / n)
    assert float((~kept).double().mean()) == pytest.approx(p, abs=4 * sigma + 2**-17)
    centered = kept.double() - (1 - p)
    for lag in (1, 2, 3, 4, 5, 8, 64):  # four values share one draw of 64 bits
        covariance = float((centered[lag:] * centered[:-lag]).mean())
        assert abs(covariance) < 4 * p * (1 - p) / math.sqrt(n)


def test_two_calls_are_independent():
    torch.manual_seed(0)
    n = 200_000
    first, second = ((Dropout(0.5)(torch.ones(n)) != 0).double() - 0.5 for _ in range(2))
    assert abs(float((first * second).mean())) < 4 * 0.25 / math.sqrt(n)


def test_the_mean_is_kept():
    levels = round(0.1 * 2**16)
    torch.manual_seed(0)
    out = Dropout(0.1)(torch.full((7, 3), 2.0, dtype=torch.float64))
    values = {0.0, 2.0 * 2**16 / (2**16 - levels)}
    assert {float(v) for v in out.flatten()} <= values
    assert (1 - levels / 2**16) * max(values) == 2.0


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_dtypes(shape, dtype):
    out = Dropout(0.3)(torch.ones(shape, dtype=dtype))
    assert (out.shape, out.dtype) == (shape, dtype)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1e-6, True), (0.5, False)])
def test_what_drops_nothing_leaves_the_values_alone(p, training):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    torch.testing.assert_close(Dropout(p).train(training)(x), x, rtol=1e-5, atol=0)


def test_derivatives_of_both_orders():
    def function(x):
        torch.manual_seed(3)
        return (Dropout(0.4)(x) ** 3).sum()

    x = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_a_model_that_is_trained_has_it_everywhere():
    for name in ("bert", "bert-pre-ln", "lstm"):
        model = make_model(ModelConfig(architecture=name, dropout=0.2), LANGUAGE, seed=0)
        found = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
        assert {(type(m), m.p, m.training) for m in found} == {(Dropout, 0.2, True)}


def test_the_mode_of_a_module_is_kept():
    model = torch.nn.Sequential(torch.nn.Dropout(0.3).eval(), torch.nn.Sequential(torch.nn.Dropout(0.2)))
    with_fast_dropout(model)
    assert [(type(m), m.p, m.training) for m in (model[0], model[1][0])] == [
        (Dropout, 0.3, False),
        (Dropout, 0.2, True),
    ]
