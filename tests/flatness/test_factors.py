"""Norms from factors, against gradients formed by adding outer products one at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloss.flatness._ghost import factors
from isoloss.flatness._ghost.factors import Dense, Outer, SelectedRows, Sliced, lookups, squared_norms
from isoloss.flatness._parameters import ParameterBlocks


def formed(factor, num_sequences, shape):
    """(B, *shape): the gradient of each sequence."""
    gradient = torch.zeros(num_sequences, *shape, dtype=torch.float64)
    if isinstance(factor, Dense):
        rows = range(num_sequences) if factor.selected is None else factor.selected.rows.tolist()
        for row, value in zip(rows, factor.values, strict=True):
            gradient[row] += value
        return gradient
    if factor.selected is None:
        tokens = [
            (b, factor.left[b, s], factor.right[b, s])
            for b in range(num_sequences)
            for s in range(factor.left.shape[1])
        ]
    else:
        tokens = list(zip(factor.selected.rows.tolist(), factor.left, factor.right, strict=True))
    for b, left, right in tokens:
        if factor.is_index:
            gradient[b, int(left)] += right
        else:
            gradient[b] += left[:, None] * right
    return gradient


def drawn(kinds, counts, length, shape, generator):
    """One factor a kind, for sequences with these counts of gathered rows."""
    n, (a, b) = len(counts), shape
    predicted = torch.arange(max(max(counts), 1)) < torch.tensor(counts)[:, None]

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    made = []
    for kind in kinds:
        m = sum(counts)
        if kind == "tokens":
            made.append(Outer(normal(n, length, a), normal(n, length, b)))
        elif kind == "rows":
            made.append(Outer(normal(m, a), normal(m, b), SelectedRows.of(predicted)))
        else:
            made.append(Outer(torch.randint(0, a, (n, length), generator=generator), normal(n, length, b)))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_factors_are_summed_in_a_wide_type(dtype):
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn((2, 300, width), generator=generator).to(dtype) for width in (4, 3))
    expected = (left.double().mT @ right.double()).square().sum(dim=(1, 2))
    found = squared_norms([Outer(left, right)], 2)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_gradient_that_cancels_has_no_negative_norm():
    generator = torch.Generator().manual_seed(2)
    left = torch.randn((500, 1, 30), generator=generator).expand(-1, 3, -1)
    right = torch.randn((500, 2, 20), generator=generator)
    cancelling = torch.cat([right, -right.sum(dim=1, keepdim=True)], dim=1)
    norms = squared_norms([Outer(left, cancelling)], 500)
    assert (norms >= 0).all()
    assert (norms == 0).any()  # where rounding left less than nothing


def test_separate_positions_leave_out_products_of_two_and_nothing_else():
    draws = torch.Generator().manual_seed(0)
    places = SelectedRows.of(torch.tensor([[True, True, False], [False, False, False], [True, True, True]]))
    left, right = (torch.randn(5, n, generator=draws, dtype=torch.float64) for n in (7, 4))
    index = torch.randint(7, (3, 6), generator=draws)
    looked_up = torch.randn(3, 6, 4, generator=draws, dtype=torch.float64)
    gathered, lookup = Outer(left, right, places), Outer(index, looked_up)
    products = torch.zeros(3, dtype=torch.float64)
    for r in range(5):
        for s in range(5):
            if r != s and places.rows[r] == places.rows[s]:
                products[places.rows[r]] += (left[r] @ left[s]) * (right[r] @ right[s])
    for uses in ([gathered], [gathered, lookup], [lookup, gathered]):
        found = squared_norms(uses, 3, separate=True)
        torch.testing.assert_close(found, squared_norms(uses, 3) - products, rtol=1e-10, atol=1e-10)
    rows = Dense(left, places)
    expected = torch.stack([left[:2].square().sum(), torch.zeros((), dtype=torch.float64), left[2:].square().sum()])
    torch.testing.assert_close(squared_norms([rows], 3, separate=True), expected)
    # two uses at one position share its cotangent, so their products stay
    assert torch.equal(squared_norms([gathered, gathered], 3, separate=True), squared_norms([gathered, gathered], 3))
    assert torch.equal(squared_norms([lookup], 3, separate=True), squared_norms([lookup], 3))


# --- parts -----------------------------------------------------------------------------------------------------------


def groups_of(number, kind, generator):
    """Groups of an axis: one, one of each index, or at random, in blocks or mixed."""
    if kind == "none":
        return torch.zeros(number, dtype=torch.int64)
    if kind == "each":
        return torch.arange(number)
    drawn_groups = torch.randint(0, max(1, number // 2), (number,), generator=generator)
    groups = drawn_groups.unique(return_inverse=True)[1]
    return groups.sort().values if kind == "blocks" else groups


def by_part(squares, split):
    """(B, parts) of squares (B, a, b), entry by entry."""
    parts = torch.zeros(len(squares), split.num_blocks, dtype=torch.float64)
    for i, row in enumerate(split.rows.tolist()):
        for j, column in enumerate(split.columns.tolist()):
            parts[:, row * split.num_columns + column] += squares[:, i, j]
    return parts


KINDS = st.sampled_from(["none", "each", "blocks", "mixed"])


@settings(deadline=None, max_examples=100)
@given(
    kinds=st.lists(st.sampled_from(["tokens", "rows", "index"]), min_size=1, max_size=3),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    length=st.integers(1, 6),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    axes=st.tuples(KINDS, KINDS),
    limit=st.sampled_from([1, 40, 1 << 21]),
    seed=st.integers(0, 99),
)
def test_parts_of_matrices(kinds, counts, length, shape, axes, limit, seed):
    generator = torch.Generator().manual_seed(seed)
    made = drawn(kinds, counts, length, shape, generator)
    split = ParameterBlocks(*(groups_of(number, kind, generator) for number, kind in zip(shape, axes, strict=True)))
    expected = by_part(sum(formed(factor, len(counts), shape) for factor in made).square(), split)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "_LIMIT", limit)
        found = squared_norms(made, len(counts), blocks=split)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        whole = squared_norms(made, len(counts))
        torch.testing.assert_close(whole, expected.sum(dim=1), rtol=1e-11, atol=1e-11)
        if kinds.count("rows") == 1 and "tokens" not in kinds:  # each selected position by itself
            matrix = next(factor for factor in made if factor.selected is not None)
            own = torch.zeros_like(expected)
            for row, left, right in zip(matrix.selected.rows.tolist(), matrix.left, matrix.right, strict=True):
                own[row] += by_part((left[:, None] * right)[None].square(), split)[0]
            expected += own - by_part(formed(matrix, len(counts), shape).square(), split)
            found = squared_norms(made, len(counts), separate=True, blocks=split)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    shape=st.sampled_from([(1,), (5,), (4, 3), (2, 3, 4)]),
    axes=st.tuples(KINDS, KINDS),
    uses=st.lists(st.booleans(), min_size=1, max_size=3),
    limit=st.sampled_from([1, 1 << 21]),
)
def test_parts_of_what_is_used_by_element(counts, shape, axes, uses, limit):
    generator = torch.Generator().manual_seed(0)
    places = SelectedRows.of(torch.arange(max(counts)) < torch.tensor(counts)[:, None])
    a, b, width = shape[0], shape[-1] if len(shape) > 1 else 1, torch.Size(shape).numel()
    split = ParameterBlocks(groups_of(a, axes[0], generator), groups_of(b, axes[1], generator))
    split.check("scale", torch.Size(shape))
    made = []
    for gathered in uses:
        values = torch.randn(
            (sum(counts) if gathered else len(counts), width), generator=generator, dtype=torch.float64
        )
        made.append(Dense(values, places if gathered else None))

    def parts(gradient):
        return by_part(gradient.reshape(-1, a, width // (a * b), b).square().sum(dim=2), split)

    expected = parts(sum(formed(factor, len(counts), (width,)) for factor in made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "_LIMIT", limit)
        torch.testing.assert_close(squared_norms(made, len(counts), blocks=split), expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(squared_norms(made, len(counts)), expected.sum(dim=1), rtol=1e-11, atol=1e-11)
    if uses == [True]:
        each = torch.zeros_like(expected).index_add_(0, places.rows, parts(made[0].values))
        torch.testing.assert_close(squared_norms(made, len(counts), separate=True, blocks=split), each)


@pytest.mark.parametrize("axes", [("each", "none"), ("none", "blocks"), ("blocks", "each")])
def test_parts_of_long_narrow_factors_are_close_in_float32(axes):
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn((2, 3000, width), generator=generator) + 1 for width in (90, 70))
    for length in (20, 3000):  # by the products of tokens, and by the gradient itself
        factor = Outer(left[:, :length], right[:, :length])
        split = ParameterBlocks(groups_of(90, axes[0], generator), groups_of(70, axes[1], generator))
        squares = (factor.left.double().mT @ factor.right.double()).square()
        torch.testing.assert_close(squared_norms([factor], 2, blocks=split), by_part(squares, split), rtol=2e-5, atol=0)


def sliced(owners, slots, shape, generator, selected=None):
    """Rows of these owners, each with an outer product in one slice."""
    n, (_, a, b) = len(owners), shape
    left, right = (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (a, b))
    return Sliced(left, right, torch.tensor(slots), torch.tensor(owners), selected)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=14),
    cut=st.integers(0, 14),
    shape=st.tuples(st.just(4), st.integers(1, 5), st.integers(1, 5)),
    limit=st.sampled_from([1, 40, 1 << 21]),
    is_split=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_of_a_slice_and_a_sequence_add_before_they_are_squared(rows, cut, shape, limit, is_split, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    made = [sliced(*zip(*part, strict=True), shape, generator) for part in parts]
    gradients = torch.zeros(3, *shape, dtype=torch.float64)
    for factor in made:
        for left, right, slot, owner in zip(factor.left, factor.right, factor.slots, factor.sequence_ids, strict=True):
            gradients[owner, slot] += left[:, None] * right
    split = ParameterBlocks(torch.tensor([0, 1, 1, 2]), torch.zeros(shape[2], dtype=torch.int64)) if is_split else None
    expected = gradients.square().flatten(1)
    expected = expected.sum(dim=1) if split is None else split.sums(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "_LIMIT", limit)
        torch.testing.assert_close(squared_norms(made, 3, blocks=split), expected, rtol=1e-11, atol=1e-11)


def test_with_separate_the_rows_of_a_slice_and_a_position_add_and_positions_are_squared_one_by_one():
    generator = torch.Generator().manual_seed(0)
    places = SelectedRows.of(torch.tensor([[True, True], [False, True]]))
    factor = sliced([0, 1, 0, 2, 0], [1, 1, 1, 0, 0], (2, 3, 4), generator, places)
    gradients = torch.zeros(3, 2, 3, 4, dtype=torch.float64)
    for left, right, slot, owner in zip(factor.left, factor.right, factor.slots, factor.sequence_ids, strict=True):
        gradients[owner, slot] += left[:, None] * right
    own = gradients.square().sum(dim=(1, 2, 3))
    expected = torch.stack([own[0] + own[1], own[2]])
    torch.testing.assert_close(squared_norms([factor], 2, separate=True), expected)
    whole = torch.stack([gradients[0] + gradients[1], gradients[2]]).square().sum(dim=(1, 2, 3))
    torch.testing.assert_close(squared_norms([factor], 2), whole)
    assert not torch.allclose(expected, whole)


def test_rows_that_are_looked_up_add_to_those_of_an_embedding():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    slots, sequences = torch.tensor([4, 0, 4, 4, 2, 0, 4]), torch.tensor([1, 1, 0, 1, 1, 0, 1])

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    table = Outer(torch.randint(0, 5, (2, 6), generator=generator), normal(2, 6, 3))
    gradients = formed(table, 2, (5, 3))
    for value, slot, sequence in zip(values, slots, sequences, strict=True):
        gradients[sequence, slot] += value
    found = lookups(values, slots, sequences, 2)
    torch.testing.assert_close(squared_norms([found, table], 2), gradients.square().sum(dim=(1, 2)))
    matrix = Outer(
        torch.randn(2, 4, 5, generator=generator).double(), torch.randn(2, 4, 3, generator=generator).double()
    )
    gradients += formed(matrix, 2, (5, 3))
    torch.testing.assert_close(squared_norms([found, matrix, table], 2), gradients.square().sum(dim=(1, 2)))
