"""Alias tables against the probabilities they are made of; the random numbers against NumPy's and published ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from isoloss.lab.languages import alias_sampling


@njit
def words(seed, sentence, block):
    return alias_sampling.philox(seed, sentence, block)


@njit
def cells(bits, tables, out):
    for index in range(len(bits)):
        out[index] = alias_sampling.draw(bits[index], tables, 0)


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize(("sentence", "block"), [(0, 1), (77, 9), (2**40, 3)])
def test_the_random_numbers_are_philox(seed, sentence, block):
    found = words(np.uint64(seed), np.uint64(sentence), np.uint64(block))
    counter = np.array([block - 1, sentence, 0, 0], dtype=np.uint64)  # NumPy counts up before it draws
    assert list(found) == np.random.Philox(key=np.array([seed, 0], np.uint64), counter=counter).random_raw(4).tolist()


def test_the_published_numbers():
    """The first known answer of Random123's kat_vectors for philox4x64-10: a key and a counter of zeros."""
    known = (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)
    assert words(np.uint64(0), np.uint64(0), np.uint64(0)) == known


def probabilities(tables, outcomes):
    """(rows, outcomes): the distributions that the tables draw from, cell by cell."""
    widths = np.diff(tables.offsets)
    row = np.repeat(np.arange(len(widths)), widths)
    probs = np.zeros((len(widths), outcomes))
    np.add.at(probs, (row, tables.kept), tables.threshold / widths[row])
    np.add.at(probs, (row, tables.alias), (1 - tables.threshold) / widths[row])
    return probs


def distributions():
    rng = np.random.default_rng(0)
    sparse = rng.dirichlet(np.ones(50), size=40) * (rng.random((40, 50)) < 0.3)
    sparse[:, 7] += 1e-3
    yield sparse / sparse.sum(axis=1, keepdims=True)
    yield rng.dirichlet(np.full(200, 0.02), size=30)  # nearly all of it on a few
    yield np.eye(5)
    yield np.array([[1.0]])
    yield np.array([[1e-300, 1.0, 0.0], [0.0, 0.3, 0.7]])
    yield np.full((2, 64), 1 / 64)


@pytest.mark.parametrize("rows", list(distributions()))
def test_tables_are_the_probabilities(rows):
    tables = alias_sampling.alias_tables(rows)
    assert ((tables.threshold >= 0) & (tables.threshold <= 1)).all()
    found = probabilities(tables, rows.shape[1])
    np.testing.assert_allclose(found, rows, rtol=0, atol=1e-15)
    assert (found[rows == 0] == 0).all()  # what is impossible is never drawn
    assert np.diff(tables.offsets).tolist() == (rows > 0).sum(axis=1).tolist()  # memory is that of the outcomes


def test_cells_in_any_order_and_rows_without_any():
    rows, outcomes, weights = np.array([3, 0, 3, 0]), np.array([5, 1, 2, 0]), np.array([3.0, 0.5, 1.0, 0.5])
    tables = alias_sampling.sparse_tables(rows, outcomes, weights, rows=5)
    expected = np.zeros((5, 6))
    expected[0, :2], expected[3, 2], expected[3, 5] = 0.5, 0.25, 0.75
    assert np.array_equal(probabilities(tables, 6), expected)


def test_every_part_of_a_cell_gives_what_it_should():
    """An even grid of numbers through `draw` gives each outcome its share, and both ends of the range are safe."""
    rows = np.array([[0.125, 0.5, 0.0, 0.375]])
    tables = alias_sampling.alias_tables(rows)
    grid = np.arange(3 * 2**14, dtype=np.uint64) * np.uint64(2**64 // (3 * 2**14))
    out = np.empty(len(grid), np.int64)
    cells(grid, tables, out)
    np.testing.assert_allclose(np.bincount(out, minlength=4) / len(grid), rows[0], atol=3 / len(grid))
    out = np.empty(2, np.int64)
    wide = alias_sampling.alias_tables(np.full((1, 999), 1 / 999))
    cells(np.array([0, 2**64 - 1], np.uint64), wide, out)
    assert out.tolist() == [0, 998]


def test_sentences_depend_on_seed_and_index_alone():
    rng = np.random.default_rng(2)
    tables = [alias_sampling.alias_tables(rng.dirichlet(np.ones(9), size=k)) for k in (1, 9, 9)]
    n, threads = 3 * (1 << 14) + 5, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = alias_sampling.draw_chains(*tables, numbers=np.arange(n), length=5, seed=7)
        torch.set_num_threads(3)
        three = alias_sampling.draw_chains(*tables, numbers=np.arange(n), length=5, seed=7)
    finally:
        torch.set_num_threads(threads)
    few = alias_sampling.draw_chains(*tables, numbers=np.arange(11), length=5, seed=7)
    long = alias_sampling.draw_chains(*tables, numbers=np.arange(11), length=8, seed=7)
    other = alias_sampling.draw_chains(*tables, numbers=np.arange(11), length=5, seed=8)
    for index in range(2):
        assert torch.equal(one[index], three[index])
        assert torch.equal(one[index][:11], few[index])
        assert torch.equal(long[index][:, :5], few[index])
        assert not torch.equal(other[index], few[index])
    assert len(torch.unique(one[0][:1000], dim=0)) > 900
    assert alias_sampling.draw_chains(*tables, numbers=np.arange(0), length=5, seed=7)[0].shape == (0, 5)


def test_uniform_numbers_are_the_words_of_philox():
    numbers = np.array([3, 2**60, 0])
    blocks = [words(np.uint64(9), np.uint64(number), np.uint64(block)) for number in numbers for block in (0, 1)]
    wanted = (np.array(blocks, np.uint64).reshape(3, 8)[:, :7] >> np.uint64(11)).astype(np.float64) / 2.0**53
    assert np.array_equal(alias_sampling.uniforms(9, numbers, 7).numpy(), wanted)
    assert alias_sampling.uniforms(9, numbers, 0).shape == (3, 0)
