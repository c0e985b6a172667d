"""The entropy of the features' spectrum: its value and gradient, and what training by it does to the rank."""

import math

import numpy as np
import pytest
import torch
from stepping import context, run, tiny
from toy_language import PairLanguage

from isoloss.lab.training.algorithms.adversarial import token_states
from isoloss.lab.training.algorithms.base import TrainingAlgorithm
from isoloss.lab.training.algorithms.config import FeatureEntropyConfig
from isoloss.lab.training.algorithms.feature_entropy import FeatureEntropy, spectral_entropy
from isoloss.run_config import OptimizerConfig
from isoloss.seeds import generator
from isoloss.transfer import effective_rank, gram_matrix

LANGUAGE = PairLanguage(is_ragged=True)


def test_its_exponential_is_the_effective_rank_at_any_scale():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ torch.diag(
        torch.arange(1, 7).double()
    )
    rank = effective_rank(gram_matrix(x)).value
    assert math.exp(spectral_entropy(x)) == pytest.approx(rank, rel=1e-9)
    assert math.exp(spectral_entropy(3 * x + 5)) == pytest.approx(rank, rel=1e-9)
    assert torch.autograd.gradcheck(spectral_entropy, x.requires_grad_())


def test_directions_that_are_not_there_add_nothing_and_have_a_gradient():
    x = torch.zeros(5, 3, dtype=torch.float64)
    x[:, 0] = torch.arange(5)
    x.requires_grad_()
    entropy = spectral_entropy(x)
    entropy.backward()
    assert entropy.item() == pytest.approx(0, abs=1e-12)
    assert np.isfinite(x.grad.numpy()).all()


def algorithm_for(model, weight):
    made = context(OptimizerConfig(learning_rate=3e-3), language=LANGUAGE, seed=3)
    return FeatureEntropy(model, made, FeatureEntropyConfig(weight=weight, sentences=16))


def rank_of(model):
    sentences = LANGUAGE.sample(64, generator=generator(99))
    with torch.no_grad():
        return math.exp(spectral_entropy(token_states(model, sentences, LANGUAGE, causal=False)))


def test_training_moves_the_effective_rank_to_the_weights_side():
    ranks = {}
    for weight in (-0.3, 0.3):
        model = tiny()
        results = run(model, algorithm_for(model, weight), 25)
        assert all(1 < math.exp(one.details["feature_entropy"]) < 16 for one in results)
        ranks[weight] = rank_of(model)
    plain = tiny()
    run(plain, TrainingAlgorithm(plain, context(OptimizerConfig(learning_rate=3e-3))), 25)
    assert ranks[-0.3] < 0.9 * rank_of(plain) < 1.1 * rank_of(plain) < ranks[0.3]
