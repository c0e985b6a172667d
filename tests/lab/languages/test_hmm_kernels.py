"""The compiled recursions of hidden Markov models against those in torch, and bit for bit against themselves."""

import sys

import numpy as np
import pytest
import torch
from small_languages import NAMES, language_of

from isoloss.lab.languages._hmm.forward_backward import ForwardBackward
from isoloss.lab.languages.config import HMMConfig
from isoloss.lab.languages.hmm import HMM

CPU = torch.device("cpu")
PAPER = {"closed blocks": HMMConfig(), "dense": HMMConfig(mixing_weight=0.1)}


def engine(language, dtype, backend):
    states = np.arange(len(language.states))
    tables = language.initial, language.transition, language.emission
    return ForwardBackward(*tables, states, CPU, dtype, backend)


def sentences(language, n, length, hidden=0.2):
    """Random tokens, some unknown, possible and not."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(language.vocab_size, (n, length), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < hidden] = language.vocab_size
    return ids


def everything(model, ids):
    """Return states, own states, conditionals, whether possible by each, and log-probabilities."""
    size, tokens = model.emission.shape
    shapes = [(*ids.shape, columns) for columns in (size, size, tokens)]
    outs = [torch.full(shape, torch.nan, dtype=model.dtype) for shape in shapes]
    possible = [model.states_given(ids, out, own=own) for out, own in zip(outs[:2], (False, True), strict=True)]
    possible.append(model.conditionals(ids, outs[2], log=False))
    return outs, possible, model.log_prob(ids)


@pytest.mark.parametrize("name", [*(name for name in NAMES if name.startswith("hmm")), "wide"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "length"), [(1, 1), (300, 5), (129, 4)])
def test_the_two_back_ends_agree(name, dtype, n, length):
    language = HMMConfig(states=37, blocks=1, vocab_size=9).build() if name == "wide" else language_of(name)
    models = [engine(language, dtype, backend) for backend in ("numba", "torch")]
    ids = sentences(language, n, length)
    (found, possible, log_prob), (expected, truth, expected_log_prob) = (everything(model, ids) for model in models)
    close = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 3e-6, "atol": 1e-12}
    assert torch.equal(log_prob.isneginf(), expected_log_prob.isneginf())
    torch.testing.assert_close(log_prob, expected_log_prob, **close)
    for left, right, seen, known in zip(found, expected, possible, truth, strict=True):
        assert torch.equal(seen, known)
        assert torch.equal(seen, ~log_prob.isneginf())
        torch.testing.assert_close(left[seen], right[seen], **close)


@pytest.mark.parametrize(("name", "dtype"), [("closed blocks", torch.float64), ("dense", torch.float32)])
def test_no_sentence_depends_on_its_neighbors_or_the_threads(name, dtype):
    language = PAPER[name].build().to(dtype=dtype)
    tokens, lengths, _ = language.sample(1000, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    for method in (language.log_prob, language.log_conditionals, language.posterior):
        together = method(tokens, lengths)
        for rows in (slice(0, 1), slice(3, 130), slice(999, 1000), order):
            assert torch.equal(method(tokens[rows], lengths[rows]), together[rows])
        try:
            torch.set_num_threads(3)
            assert torch.equal(method(tokens, lengths), together)
        finally:
            torch.set_num_threads(threads)


def test_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # an import of it fails
    language = HMM([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], 3)
    assert language._engine.whole.backend == "torch"
    found = language.log_prob(torch.tensor([[0, 2]]), torch.tensor([2])).exp()
    torch.testing.assert_close(found, torch.tensor([0.5 * 0.5 * 0.1 * 0.5], dtype=torch.float64))
