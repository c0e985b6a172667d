"""Drawing in torch against drawing by compiled loops: bit for bit, whatever is drawn."""

import numpy as np
import pytest
import torch
from slow_grammar import random_rules

from isoloss.languages import alias_sampling, vectorized_sampler
from isoloss.languages.config import HMMConfig, PCFGConfig
from isoloss.languages.pcfg.grammar import parse_grammar
from isoloss.languages.pcfg.language import PCFG
from isoloss.languages.pcfg.random_grammar import random_grammar
from isoloss.languages.pcfg.sampler import Sampler, longest_yields
from isoloss.seeds import generator

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("block", [1, 9, 2**31])
def test_the_random_numbers_are_philox(seed, block):
    sentences = torch.tensor([0, 77, 2**40, 2**62 + 3])
    found = torch.stack(vectorized_sampler.philox(seed, sentences, block), dim=1).numpy().view(np.uint64)
    for row, sentence in zip(found.tolist(), sentences.tolist(), strict=True):
        counter = np.array([block - 1, sentence, 0, 0], dtype=np.uint64)  # NumPy counts up before it draws
        numbers = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=counter)
        assert row == numbers.random_raw(4).tolist()


def test_uniform_numbers_are_the_words_of_philox():
    numbers = torch.tensor([3, 2**60, 0])
    words = torch.stack([word for block in (0, 1) for word in vectorized_sampler.philox(9, numbers, block)], dim=1)
    wanted = (words.numpy().view(np.uint64)[:, :7] >> np.uint64(11)).astype(np.float64) / 2.0**53
    assert np.array_equal(alias_sampling.uniforms(9, numbers.numpy(), 7).numpy(), wanted)
    assert alias_sampling.uniforms(9, numbers.numpy(), 0).shape == (3, 0)


def test_both_ends_of_a_row():
    tables = vectorized_sampler.to_device(alias_sampling.alias_tables(np.full((2, 999), 1 / 999)), CPU)
    ends = torch.tensor([0, -1])  # as unsigned numbers the smallest and the largest
    assert vectorized_sampler.draw(ends, tables, torch.tensor([1, 1])).tolist() == [0, 998]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_chains(length):
    rng = np.random.default_rng(0)
    sparse = rng.dirichlet(np.full(9, 0.1), size=9) + 1e-300
    sparse[::2, ::2] = 0
    tables = [
        alias_sampling.alias_tables(x / x.sum(axis=1, keepdims=True))
        for x in (sparse[1:2], sparse, rng.random((9, 30)))
    ]
    moved = [vectorized_sampler.to_device(table, CPU) for table in tables]
    for seed in (3, 2**63 - 2):
        expected = alias_sampling.draw_chains(*tables, numbers=np.arange(20_000), length=length, seed=seed)
        assert all(
            map(
                torch.equal,
                vectorized_sampler.chains(*moved, numbers=torch.arange(20_000), length=length, seed=seed),
                expected,
            )
        )


def both(sampler, n, seed, *, length, trees, monkeypatch):
    """What the sampler draws by either way, the torch one made to run on the CPU."""
    slow = torch.device("meta")  # stands for a device that is not a CPU; the tables stay where they are
    with monkeypatch.context() as patch:
        moved = vectorized_sampler.to_device
        patch.setattr(vectorized_sampler, "to_device", lambda rewrites, _: moved(rewrites, CPU))
        return sampler(n, seed, length=length, trees=trees), sampler(n, seed, length=length, trees=trees, device=slow)


SAMPLERS = {
    "levels": Sampler(random_grammar(PCFGConfig(stop_probability=0.2)), 8),
    "cut levels": Sampler(random_grammar(PCFGConfig(stop_probability=0.2)), 7),
    **{f"recursive {seed}": Sampler(parse_grammar(random_rules(seed)), 9) for seed in range(4)},
    **{
        f"free {seed}": Sampler(grammar, int(longest_yields(grammar, 99)[0]))
        for seed in range(2)
        for grammar in [parse_grammar(random_rules(seed, recursive=False))]
    },
    "one token": Sampler(parse_grammar("S A 1\nA B 1\nB a 1"), 1),
}


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_derivations(name, trees, monkeypatch):
    sampler = SAMPLERS[name]
    lengths = [None, *np.flatnonzero(sampler._refined.inside[0]).tolist()]
    for seed, length in enumerate(lengths):
        for n in (0, 1, 3000):
            fast, slow = both(sampler, n, seed, length=length, trees=trees, monkeypatch=monkeypatch)
            for one, other in zip(fast, slow, strict=True):
                assert (one is None and other is None) or torch.equal(one, other)


def test_sentences_that_do_not_fit_in_memory_together(monkeypatch):
    sampler = SAMPLERS["levels"]
    whole = sampler(1000, 3, trees=True)
    monkeypatch.setattr(vectorized_sampler, "_CELLS", 9 * 300)
    _, parts = both(sampler, 1000, 3, length=None, trees=True, monkeypatch=monkeypatch)
    assert all(map(torch.equal, whole, parts))


@pytest.mark.gpu
def test_cuda_draws_the_same_sentences():
    rules = "S A 0.4\nS S A 0.6\nA x 0.5\nA S B 0.3\nA y 0.2\nB x 1"
    for language in (
        PCFGConfig(stop_probability=0.1).build(),
        PCFG.from_text(rules, max_length=20),
        HMMConfig().build(),
    ):
        moved = language.to("cuda")
        for options in ({}, {"length": 6}) if isinstance(language, PCFG) else ({},):
            one, other = (
                x.sample(20_000, generator=generator(1, "x"), latent=True, **options) for x in (language, moved)
            )
            for part, again in zip(one, other, strict=True):
                assert again.device.type == "cuda"
                assert torch.equal(again.cpu(), part)
