"""Hidden Markov models: states, numbers beyond float32, drawn tables; the contract has their probabilities."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from small_languages import NAMES, joint, language_of, sparse, unreachable

from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages._hmm import forward_backward
from isoloss.lab.languages.config import HMMConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.seeds import generator


def posteriors(p, tokens, known):
    """(T, S): the probability of each state given the known tokens, by summing the joint."""
    length = len(tokens)
    states = p[tuple([slice(None)] * length + [x if k else slice(None) for x, k in zip(tokens, known, strict=True)])]
    states = states.reshape(*p.shape[:length], -1).sum(axis=-1)
    kept = [states.sum(axis=tuple(s for s in range(length) if s != t)) for t in range(length)]
    return np.array([row / row.sum() for row in kept])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("hmm")])
def test_posteriors_are_sums_over_all_states(name):
    language, rng = language_of(name), np.random.default_rng(5)
    for length in range(1, language.max_length + 1):
        p = joint(language, length)
        possible = np.argwhere(p.sum(axis=tuple(range(length))) > 0)
        tokens = possible[rng.permutation(len(possible))[:20]]
        known = rng.random(tokens.shape) < rng.choice([0.6, 1.0], size=(len(tokens), 1))
        expected = [posteriors(p, *row) for row in zip(tokens.tolist(), known.tolist(), strict=True)]
        given = torch.tensor(np.where(known, tokens, 99))
        found = language.posterior(given, torch.full((len(tokens),), length), mask=torch.tensor(~known))
        np.testing.assert_allclose(found, np.array(expected), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(("length", "mixing_weight"), [(1, 0.0), (64, 0.0), (16, 0.1)])
def test_float32(length, mixing_weight):
    language = HMMConfig(states=40, blocks=4, vocab_size=80, length=length, mixing_weight=mixing_weight, seed=2).build()
    single = language.to(dtype=torch.float32)
    tokens, lengths, _ = language.sample(200, generator=generator(0, "float32"))
    for method in ("log_prob", "log_conditionals", "conditional_entropy", "posterior"):
        wide, narrow = (getattr(version, method)(tokens, lengths) for version in (language, single))
        assert narrow.dtype == torch.float32
        assert narrow.isfinite().all()
        if method == "log_conditionals":
            wide, narrow = wide.exp(), narrow.double().exp()
        else:
            narrow = narrow.double()
        large = wide.abs() > 1e-30
        assert ((narrow - wide).abs()[large] <= 2e-6 * wide.abs()[large]).all()
        assert (narrow[~large] <= 1e-30).all()


def test_what_float32_cannot_hold_is_computed_in_float64():
    """The sentence says state 1, the past says state 0, and between them stand factors of 1e-30."""
    e = 1e-30
    transition = [[1 - e, e, 0], [0, 1 - e, e], [0, 0, 1]]
    emission = [[0.5, 0.5 - e, e, 0], [0, 0.5, 0.5, 0], [0, 0, 0.25, 0.75]]
    language = HMM([1.0, 0, 0], transition, emission, 6)
    tokens = torch.tensor([[0, 0, 2, 2, 3, 3], [0, 0, 1, 1, 0, 1], [0, 3, 3, 2, 2, 2]])[:2]
    lengths = torch.tensor([6, 6])
    p = joint(language, 6)
    for index, sentence in enumerate(tokens.tolist()):
        expected, posterior = p[(..., *sentence)].sum(), posteriors(p, sentence, [True] * 6)
        conditionals = [p.sum(axis=tuple(range(6)))[(*sentence[:t], slice(None), *sentence[t + 1 :])] for t in range(6)]
        conditionals = np.array([row / row.sum() for row in conditionals])
        for version in (language, language.to(dtype=torch.float32)):
            tolerance = 1e-10 if version.dtype == torch.float64 else 2e-6
            assert math.isclose(version.log_prob(tokens, lengths)[index], math.log(expected), rel_tol=tolerance)
            found = version.log_conditionals(tokens, lengths)[index].exp()
            np.testing.assert_allclose(found, conditionals, rtol=tolerance, atol=1e-37)
            found = version.posterior(tokens, lengths)[index]
            np.testing.assert_allclose(found, posterior, rtol=tolerance, atol=1e-37)


def test_a_posterior_that_float32_cannot_hold():
    """Each state explains the token with probability 1e-43 or so; a third, which cannot be, would emit it."""
    emission = [[1, 1e-43], [1, 3e-23], [0, 1]]
    language = HMM([1, 1e-20, 0], [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]], emission, 2)
    tokens, lengths = torch.tensor([[0], [1]]), torch.tensor([1, 1])
    for version in (language, language.to(dtype=torch.float32)):
        found = version.posterior(tokens, lengths)[:, 0]
        np.testing.assert_allclose(found, [[1, 1e-20, 0], [0.25, 0.75, 0]], rtol=2e-6)


def exactly(language, tokens):
    """Return log-probability, posterior, conditionals and next tokens, by sums of fractions: nothing is rounded."""
    initial, transition, emission = (
        [[Fraction(x) for x in row] for row in np.atleast_2d(table).tolist()]
        for table in (language.initial, language.transition, language.emission)
    )
    states = range(len(transition))
    factors = [[emission[z][token] for z in states] for token in tokens]
    ahead, behind = [initial[0]], [[Fraction(1) for _ in states]]
    for f in factors[:-1]:
        ahead.append([sum(ahead[-1][y] * f[y] * transition[y][z] for y in states) for z in states])
    for f in factors[:0:-1]:
        behind.insert(0, [sum(transition[z][y] * f[y] * behind[0][y] for y in states) for z in states])

    def normalized(rows):
        return np.array([[float(x / sum(row)) for x in row] for row in rows])

    others = [[a * b for a, b in zip(*pair, strict=True)] for pair in zip(ahead, behind, strict=True)]
    every = [[x * f for x, f in zip(*pair, strict=True)] for pair in zip(others, factors, strict=True)]
    total = sum(every[0])
    log_prob = math.log(total.numerator) - math.log(total.denominator)
    return log_prob, normalized(every), normalized(others) @ language.emission, normalized(ahead) @ language.emission


FAINT = [[0.875, 0.125, 0], [0.09375, 0.875, 0.03125]]  # tokens 0 and 1 tell the states, again and again
KEPT = [[1, 0], [0, 1]]
LEFT = [[1 - 2**-10, 2**-10], [0, 1]]
STEEP = [[1 - 2**-40, 2**-40], [2**-40, 1 - 2**-40]]  # one token tells
THREE = [[0.5, 0.25, 0.25], [2**-13, 0.875, 0.125 - 2**-13], [2**-10, 2**-10, 1 - 2**-9]]


@pytest.mark.parametrize(
    ("transition", "emission", "runs", "in_logs"),
    [
        (KEPT, FAINT, [60, 80], False),
        (KEPT, STEEP, [5, 6], False),
        (KEPT, STEEP, [30, 31], True),
        (LEFT, FAINT, [0, 60, 0, 80], False),
        (np.eye(3), THREE, [15, 120, 20, 5], True),
    ],
)
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_state_that_is_lost_may_become_the_likely_one_again(
    transition, emission, runs, in_logs, backend, monkeypatch
):
    """Its probability given the tokens so far falls below the smallest number, and later tokens speak for it alone."""
    monkeypatch.setattr(forward_backward, "choose_backend", lambda device: backend)
    size = len(transition)
    language = HMM(np.full(size, 1 / size), transition, emission, 1000)
    sentence = [token % 3 for token, run in enumerate(runs) for _ in range(run)]
    truth = exactly(language, sentence)
    tokens, lengths = torch.tensor([sentence]), torch.tensor([len(sentence)])
    for version in (language, language.to(dtype=torch.float32)):
        assert version._engine.whole.backend == backend
        tolerance, tiny = (1e-10 if version is language else 3e-6), torch.finfo(version.dtype).tiny
        found = [getattr(version, name)(tokens, lengths)[0] for name in ("log_prob", "posterior")]
        found += [getattr(version, name)(tokens, lengths)[0].exp() for name in ("log_conditionals", "log_next")]
        for left, right in zip(found, truth, strict=True):
            np.testing.assert_allclose(
                left, np.maximum(right, tiny) if left.dim() else right, rtol=tolerance, atol=tolerance
            )
    whole = language._engine.assign(tokens, spare=0)[0][1]
    assert isinstance(whole.__dict__.get("_wide"), forward_backward.LogRecursions) == in_logs


def test_closed_parts_are_found_and_used():
    language = HMMConfig(states=12, blocks=3, vocab_size=12, length=6).build()
    assert [(part.states, part.tokens) for part in language._engine.parts] == [
        (slice(4 * k, 4 * k + 4), slice(4 * k, 4 * k + 4)) for k in range(3)
    ]
    assert not HMMConfig(states=12, blocks=3, vocab_size=12, mixing_weight=0.1).build()._engine.parts
    tokens, _, _ = language.sample(50, generator=generator(0, "parts"))
    assert all(model is not language._engine.whole for _, model in language._engine.assign(tokens, spare=1))
    # the other tokens of a sentence of one leave every part open
    assert [model for _, model in language._engine.assign(tokens[:, :1], spare=1)] == [language._engine.whole]


# --- drawing ---------------------------------------------------------------------------------------------------------


# --- configs and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concentration", [0.2, 1.0, 5.0])
def test_rows_are_as_concentrated_as_their_distribution(concentration):
    # the sum of squares of a Dirichlet row of n entries is (c + 1) / (n c + 1) on average
    language = HMMConfig(states=400, blocks=1, vocab_size=50, concentration=concentration, mixing_weight=0.0).build()
    squares = (language.emission**2).sum(axis=1)
    stderr = squares.std(ddof=1) / 20
    assert abs(squares.mean() - (concentration + 1) / (50 * concentration + 1)) < 4 * stderr


@pytest.mark.parametrize("mixing_weight", [0.0, 0.25])
def test_random_blocks(mixing_weight):
    language = HMMConfig(states=7, blocks=3, vocab_size=8, mixing_weight=mixing_weight, seed=4).build()
    block = np.array([0, 0, 0, 1, 1, 2, 2])
    for table, columns in ((language.transition, block), (language.emission, np.array([0, 0, 0, 1, 1, 1, 2, 2]))):
        np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-14)
        outside = np.where(block[:, None] != columns, table, 0)
        assert outside.sum(axis=1).max() <= mixing_weight
        assert (outside.any(axis=1) == (mixing_weight > 0)).all()
        assert (table[block[:, None] == columns] > 0).all()
    np.testing.assert_allclose(language.initial, 1 / 7)
    assert not np.array_equal(
        language.transition, HMMConfig(states=7, blocks=3, vocab_size=8, seed=5).build().transition
    )


GOOD = {"initial": [0.5, 0.5], "transition": np.eye(2), "emission": np.full((2, 3), 1 / 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": [0.5, 0.6]}, "the HMM: initial adds up to 1.1; it must add up to 1"),
        ({"initial": [1.5, -0.5]}, r"initial holds -0\.5; a probability is from 0 to 1"),
        ({"initial": []}, r"initial must be of shape \(states,\), not \(0,\)"),
        ({"initial": [[0.5, 0.5]]}, r"initial must be of shape \(states,\), not \(1, 2\)"),
        ({"initial": ["a", "b"]}, "initial must be numbers"),
        ({"transition": [[1, 0], [0.5, 0.4]]}, r"row 1 of transition adds up to 0\.9"),
        ({"transition": [[1, 0], [math.nan, 1]]}, "row 1 of transition holds nan"),
        ({"transition": [[math.inf, 0], [0, 1]]}, "row 0 of transition holds inf"),
        ({"transition": np.eye(3)}, r"transition must be of shape \(2, 2\), not \(3, 3\)"),
        ({"emission": np.eye(3)}, r"emission must be of shape \(2, tokens\), not \(3, 3\)"),
        ({"emission": np.zeros((2, 3))}, "row 0 of emission adds up to 0"),
        ({"emission": np.zeros((2, 0))}, r"not \(2, 0\)"),
        ({"emission": [[0.5, 0.5, 0.0], [1.0, 1e-5, 0.0]]}, r"row 1 of emission adds up to 1\.00001"),
        ({"length": 0}, "the length is 0; it must be from 1 to 1024"),
        ({"length": 1025}, "the length is 1025"),
        ({"vocabulary": ("a", "b")}, "the vocabulary must be 3 different strings"),
        ({"vocabulary": ("a", "b", "a")}, "the vocabulary must be 3 different strings"),
    ],
)
def test_broken_matrices(changes, message, tmp_path):
    with pytest.raises(IsolossError, match=message):
        HMM(**{**GOOD, "length": 3, **changes})


def test_positions_of_more_sentences_than_a_chunk():
    language = HMMConfig().build().to(dtype=torch.float32)
    tokens, lengths, _ = language.sample(1500, generator=generator(0, "some"))
    lengths = (torch.rand(1500, generator=generator(0, "lengths")) * 16).long() + 1
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.3
    positions = (torch.rand(1500, 3, generator=generator(1, "positions")) * lengths[:, None]).long()
    for method in (language.log_conditionals, language.conditional_entropy):
        everywhere = method(tokens, lengths, mask=mask)[torch.arange(1500)[:, None], positions]
        found = method(tokens, lengths, mask=mask, positions=positions)
        torch.testing.assert_close(found, everywhere, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("language", [sparse(0), HMMConfig(states=6, blocks=2, vocab_size=8, length=5).build()])
def test_states_are_drawn_with_the_sentences(language):
    """They are those of the exact posterior: one-hot minus posterior has mean 0."""
    n = 50_000
    tokens, lengths, states = language.sample(n, generator=generator(1, "draws"), latent=True)
    residual = torch.nn.functional.one_hot(states, len(language.states)) - language.posterior(tokens, lengths)
    z = residual.mean(0) / (residual.std(0) / n**0.5).clamp(min=1e-12)
    assert z.abs().max() < 4.5
    again = language.to(dtype=torch.float32).sample(40, generator=generator(1, "draws"), latent=True)
    assert torch.equal(again.latent, states[:40])
    assert language.posterior(tokens[:0], lengths[:0]).shape == (0, language.max_length, len(language.states))


def test_what_is_in_memory_has_no_config_and_an_impossible_sentence_no_posterior(tmp_path):
    with pytest.raises(IsolossError, match="is only in memory"):
        _ = unreachable().config
    languages.save(unreachable(), tmp_path / "h.safetensors")
    with pytest.raises(IsolossError, match="leave out --length"):
        languages.resolve(str(tmp_path / "h.safetensors"), length=5)
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(IsolossError, match="sentence 1 has probability 0"):
            unreachable().to(dtype=dtype).posterior(torch.tensor([[0, 1, 1], [0, 2, 1]]), torch.tensor([3, 3]))
