"""Squared norms of each sequence's gradient of one parameter, from factors of the gradient, without forming it.

Shapes: B sequences, S tokens in each, m rows of selected positions in all, (a, b) the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isoloss.flatness._parameters import ParameterBlocks

# elements of a temporary buffer; a single sequence that needs more gets more
_LIMIT = 1 << 21


@dataclass(frozen=True)
class SelectedRows:
    """Which sequence each selected row belongs to."""

    rows: torch.Tensor  # (m,) the sequence of each row, ascending
    counts: list[int]  # rows of each of the B sequences
    firsts: list[int]  # first row of each of the B sequences
    apart: bool = True  # whether the rows are positions, the gradients of which are independent

    @staticmethod
    def of(predicted: torch.Tensor) -> SelectedRows:
        """Return the rows that a mask (B, T) selects."""
        return SelectedRows.sorted(predicted.nonzero()[:, 0], len(predicted))

    @staticmethod
    def sorted(rows: torch.Tensor, num_sequences: int, *, apart: bool = True) -> SelectedRows:
        """Return the rows that belong to these sequences (m,), which ascend."""
        counts = torch.bincount(rows, minlength=num_sequences)
        return SelectedRows(rows, counts.tolist(), (counts.cumsum(0) - counts).tolist(), apart)

    def padded(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return (stop - start, S, n): the rows (m, n) of some sequences, padded with zeros; a view if none are."""
        counts = self.counts[start:stop]
        first, longest = self.firsts[start], max(counts)
        part = values[first : first + sum(counts)]
        # as with one masked token a sequence, or causal sequences of one length: no copy
        if min(counts) == longest:
            return part.reshape(stop - start, longest, part.shape[1])
        sequence = self.rows[first : first + len(part)]
        offsets = torch.tensor(self.firsts[start:stop], device=values.device)
        column = torch.arange(first, first + len(part), device=values.device) - offsets[sequence - start]
        result = part.new_zeros(stop - start, longest, part.shape[1])
        result[sequence - start, column] = part
        return result


@dataclass(frozen=True)
class Outer:
    """A gradient (a, b) that is a sum of outer products over the tokens of a sequence."""

    # (B, S, a) or, with `selected`, (m, a). An int64 (B, S) or (m,) stands for one-hot vectors: rows of the parameter
    left: torch.Tensor
    right: torch.Tensor  # (B, S, b) or, with `selected`, (m, b)
    selected: SelectedRows | None = None  # the sequences of selected rows

    @property
    def is_index(self) -> bool:
        """Whether the left factor is one-hot."""
        return not self.left.is_floating_point()

    def part(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the left (c, S, a) or (c, S), and the right (c, S, b), of sequences start to stop, wide enough."""
        if self.selected is None:
            return _wide(self.left[start:stop]), _wide(self.right[start:stop])
        right = _wide(self.selected.padded(self.right, start, stop))
        if self.is_index:  # what is padded is row 0, with nothing on the right
            return self.selected.padded(self.left[:, None], start, stop)[..., 0], right
        return _wide(self.selected.padded(self.left, start, stop)), right

    def size(self) -> int:
        """Return the elements of a sequence's temporaries: its Gram matrix, or what is padded."""
        tokens = self.left.shape[1] if self.selected is None else max(self.selected.counts)
        if self.selected is None or min(self.selected.counts) == tokens:
            return tokens * tokens
        return max(tokens * tokens, tokens * ((1 if self.is_index else self.left.shape[-1]) + self.right.shape[-1]))


@dataclass(frozen=True)
class Sliced:
    """A gradient (E, a, b): each slice a sum of outer products over the rows that the slice was used for."""

    left: torch.Tensor  # (n, a)
    right: torch.Tensor  # (n, b)
    slots: torch.Tensor  # (n,) the slice of each row
    sequence_ids: torch.Tensor  # (n,) the sequence of each row or, with `selected`, the selected row
    selected: SelectedRows | None = None  # the sequences of selected rows

    def sequences(self) -> torch.Tensor:
        return self.sequence_ids if self.selected is None else self.selected.rows[self.sequence_ids]


@dataclass(frozen=True)
class Dense:
    """A gradient of n numbers, formed for each sequence: of a bias or a scale."""

    values: torch.Tensor  # (B, n) or, with `selected`, (m, n), to be summed over the rows of a sequence
    selected: SelectedRows | None = None  # the sequences of selected rows


Factor = Outer | Dense | Sliced


def lookups(values: torch.Tensor, slots: torch.Tensor, sequences: torch.Tensor, num_sequences: int) -> Outer:
    """Return the gradient of a matrix that each row (n, b) of an activation had a row of, by index, added to it."""
    size = int(slots.max()) + 1 if len(slots) else 1
    # a token that occurs twice in a sequence has one row with the sum of both, whose square is what counts
    keys, places = torch.unique(sequences * size + slots, return_inverse=True)
    sums = values.new_zeros(len(keys), values.shape[1]).index_add_(0, places, values)
    return Outer(keys % size, sums, SelectedRows.sorted(keys // size, num_sequences, apart=False))


def squared_norms(
    factors: Sequence[Factor], num_sequences: int, *, separate: bool = False, blocks: ParameterBlocks | None = None
) -> torch.Tensor:
    """Return (B,) float64: for each sequence the squared norm of the sum of the factors of one parameter.

    With `blocks`, return (B, num_blocks): the squared norm of each part of the sum.

    Several factors are several uses of the parameter in one forward pass: their gradients add before they are squared.

    With `separate`, the selected positions' gradients of a parameter that is used once at each of them are squared one
    by one. Each row's cotangent belongs to one position, so that for independent cotangents of mean 0 the
    products of two of them that this leaves out have mean 0: the same expectation with less noise, and less work. Where
    the parameter is also looked up by tokens, the result may be negative.

    Example:
        >>> import torch
        >>> from isoloss.flatness._ghost.factors import Outer, squared_norms
        >>> left, right = torch.ones(1, 3, 2), torch.ones(1, 3, 5)  # sums to a gradient (2, 5) full of threes
        >>> squared_norms([Outer(left, right)], 1)
        tensor([90.], dtype=torch.float64)
    """
    dense = [factor for factor in factors if isinstance(factor, Dense)]
    outer = [factor for factor in factors if isinstance(factor, Outer)]
    # the gradients would have to be added entry by entry in one form; no architecture does it
    if dense and outer:
        raise TypeError("a parameter is used as a matrix and by element")
    sliced = [factor for factor in factors if isinstance(factor, Sliced)]
    if sliced:
        if len(sliced) < len(factors):
            raise TypeError("a parameter is used by slices and as a whole")
        return _sliced_norms(sliced, num_sequences, blocks, separate=separate)
    whole: list[Outer | Dense] = [*dense, *outer]
    if separate and len(whole) == 1 and _is_apart(whole[0]):
        return _separate_norms(whole[0], num_sequences, blocks)
    # in chunks: of the decoder's bias a row has V numbers, and the sums (B, V) may be as large as the logits
    if len(dense) == 1 and dense[0].selected is not None:
        return _ragged_norms(dense[0].values, dense[0].selected, num_sequences, blocks)
    if dense:
        values = [(_wide(factor.values), factor.selected) for factor in dense]
        summed = [part if rows is None else _by_sequence(part, rows, num_sequences) for part, rows in values]
        total = torch.stack(summed).sum(dim=0)
        return _sums(total.square(), blocks)
    matrices = [factor for factor in outer if not factor.is_index]
    if not matrices and blocks is None and any(factor.selected is not None for factor in outer):
        return _lookup_norms(outer, num_sequences)
    if separate and len(matrices) == 1 and _is_apart(matrices[0]):
        # a tied embedding: |D + L|^2 = |D|^2 + 2 <D, L> + |L|^2 with D the decoder's part, of which only |D|^2 is taken
        # position by position
        decoder = _separate_norms(matrices[0], num_sequences, blocks)
        return decoder + _outer_norms(outer, num_sequences, blocks, without_matrices=True)
    return _outer_norms(outer, num_sequences, blocks)


def _is_apart(factor: Outer | Dense) -> bool:
    """Whether the rows are selected positions, each once."""
    return factor.selected is not None and factor.selected.apart


def _sums(values: torch.Tensor, blocks: ParameterBlocks | None) -> torch.Tensor:
    """Return (c,) or (c, num_blocks) float64: the sums of values (c, n) of the parameter's n elements."""
    return values.sum(dim=1, dtype=torch.float64) if blocks is None else blocks.sums(values)


def _separate_norms(factor: Outer | Dense, num_sequences: int, blocks: ParameterBlocks | None) -> torch.Tensor:
    """Return the sums over each sequence's selected rows of the squared norms of their own gradients or its parts."""
    selected = factor.selected
    assert selected is not None
    if blocks is None:
        return _by_sequence(_squares(factor), selected, num_sequences)
    if isinstance(factor, Dense):
        return blocks.sums(_by_sequence(factor.values.double().square(), selected, num_sequences))
    # block (i, j) of an outer product l r^T has the squared norm |l_i|^2 |r_j|^2, of part i of l and part j of r
    left = _length_squares(factor.left) if blocks.num_rows == 1 else blocks.row_sums(_wide(factor.left).square(), 1)
    right = (
        _length_squares(factor.right) if blocks.num_columns == 1 else blocks.column_sums(_wide(factor.right).square())
    )
    norms = left.new_zeros(num_sequences, blocks.num_blocks)
    for start, stop in _chunks(num_sequences, max(selected.counts) * (left.shape[1] + right.shape[1])):
        if max(selected.counts[start:stop]):
            parts = selected.padded(left, start, stop).mT @ selected.padded(right, start, stop)
            norms[start:stop] = parts.flatten(1)
    return norms


def _length_squares(rows: torch.Tensor) -> torch.Tensor:
    """Return (m, 1) float64: the squared lengths of rows (m, n), without a buffer (m, n)."""
    lengths: torch.Tensor = torch.linalg.vector_norm(_wide(rows), dim=1, keepdim=True)
    return lengths.double().square()


def _squares(factor: Outer | Dense) -> torch.Tensor:
    """Return (m,): the squared norms of the selected rows' own gradients."""
    if isinstance(factor, Dense):
        return _length_squares(factor.values)[:, 0]
    return _length_squares(factor.left)[:, 0] * _length_squares(factor.right)[:, 0]


def _by_sequence(values: torch.Tensor, selected: SelectedRows, num_sequences: int) -> torch.Tensor:
    return values.new_zeros(num_sequences, *values.shape[1:]).index_add_(0, selected.rows, values)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return float64 and integers as they are, the rest in float32."""
    return values.float() if values.is_floating_point() and values.dtype != torch.float64 else values


def _ragged_norms(
    values: torch.Tensor, selected: SelectedRows, num_sequences: int, blocks: ParameterBlocks | None
) -> torch.Tensor:
    norms = _zeros(num_sequences, blocks, values.device)
    for start, stop in _chunks(num_sequences, max(selected.counts) * values.shape[1]):
        if max(selected.counts[start:stop]):
            total = _wide(selected.padded(values, start, stop)).sum(dim=1)
            norms[start:stop] = _sums(total.square(), blocks)
    return norms


def _zeros(num_sequences: int, blocks: ParameterBlocks | None, device: torch.device) -> torch.Tensor:
    shape = (num_sequences,) if blocks is None else (num_sequences, blocks.num_blocks)
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _chunks(num_sequences: int, size: int) -> list[tuple[int, int]]:
    """Cut the sequences so that a chunk's buffer, `size` elements a sequence, stays small."""
    step = max(1, _LIMIT // max(size, 1))
    return [(start, min(start + step, num_sequences)) for start in range(0, num_sequences, step)]


def _outer_norms(
    factors: Sequence[Outer], num_sequences: int, blocks: ParameterBlocks | None, *, without_matrices: bool = False
) -> torch.Tensor:
    """Return the squared norms of the sums, less the squared norms of the matrices where these are left out."""
    norms = _zeros(num_sequences, blocks, factors[0].right.device)
    dense = [factor for factor in factors if not factor.is_index]
    tokens = sum(f.left.shape[1] if f.selected is None else max(f.selected.counts) for f in dense)
    a, b = (dense[0].left.shape[-1], dense[0].right.shape[-1]) if dense else (0, 0)
    # either form the gradient, a b S multiplications, or the Gram matrices of both factors, S^2 (a + b): whichever is
    # less
    direct = bool(dense) and a * b < tokens * (a + b)
    size = max(sum(f.size() for f in factors), a * b if direct else tokens * tokens)
    if blocks is not None:
        a, b = len(blocks.rows), len(blocks.columns)
        direct |= blocks.num_rows > 1 and (blocks.num_columns > 1 or len(dense) < len(factors))
        longest = max(f.left.shape[1] if f.selected is None else max(f.selected.counts) for f in factors)
        size = max(size, a * b if direct else len(factors) * longest * max(a, b))
    for start, stop in _chunks(num_sequences, size):
        parts = [
            (f.is_index, *f.part(start, stop))
            for f in factors
            if f.selected is None or max(f.selected.counts[start:stop])
        ]
        matrices = _joined([(left, right) for is_index, left, right in parts if not is_index])
        lookups = _joined([(left, right) for is_index, left, right in parts if is_index])
        if blocks is not None:
            if parts:
                norms_of = _formed_part_norms if direct else _part_norms
                norms[start:stop] = norms_of(matrices, lookups, blocks, without_matrices=without_matrices)
            continue
        total = torch.zeros(stop - start, dtype=torch.float64, device=norms.device)
        if matrices is not None and not without_matrices:
            left, right = matrices
            if direct:
                total += (left.mT @ right).square_().sum(dim=(1, 2), dtype=torch.float64)
            else:
                total += _inner(_gram(left), _gram(right))
        if lookups is not None:
            # one-hot factors: their Gram matrix says which tokens are equal
            same = lookups[0][:, :, None] == lookups[0][:, None, :]
            total += _inner(_gram(lookups[1]), same)
        if matrices is not None and lookups is not None:
            # twice the inner product of the decoder's part and the lookups of a tied table
            index = lookups[0][:, None, :].expand(-1, matrices[0].shape[1], -1)
            total += 2 * _inner(matrices[0].gather(2, index), matrices[1] @ lookups[1].mT)
        # rounding may leave less than nothing of a gradient that is zero
        norms[start:stop] = total if without_matrices else total.clamp_min_(0.0)
    return norms


def _sliced_norms(
    factors: Sequence[Sliced], num_sequences: int, blocks: ParameterBlocks | None, *, separate: bool
) -> torch.Tensor:
    """Return the squared norms of sums over slices. The rows of one sequence and slice make a group with a norm of its
    own; with `separate`, the rows of one selected row and slice.
    """
    separate = separate and all(factor.selected is not None and factor.selected.apart for factor in factors)
    left, right = (torch.cat(parts) for parts in zip(*((f.left, f.right) for f in factors), strict=True))
    slots, sequences = torch.cat([f.slots for f in factors]), torch.cat([f.sequences() for f in factors])
    units = torch.cat([f.sequence_ids for f in factors]) if separate else sequences
    norms = _zeros(num_sequences, blocks, right.device)
    if not len(slots):
        return norms
    size = int(slots.max()) + 1
    keys, groups, counts = torch.unique(units * size + slots, return_inverse=True, return_counts=True)
    by_size = counts.argsort()  # groups of much the same size are padded to the same length
    groups = by_size.argsort()[groups]
    order = groups.argsort(stable=True)
    outer = Outer(left[order], right[order], SelectedRows.sorted(groups[order], len(keys), apart=False))
    of_groups = torch.empty_like(keys).scatter_(0, groups, sequences)
    if blocks is None:
        return norms.index_add_(0, of_groups, _outer_norms([outer], len(keys), None))
    squares = _zeros(num_sequences, None, right.device)[:, None, None].repeat(1, len(blocks.rows), right.shape[1])
    for start, stop in _chunks(len(keys), max(left.shape[1] * right.shape[1], outer.size())):
        lefts, rights = outer.part(start, stop)
        places = (of_groups[start:stop], keys[by_size[start:stop]] % size)
        squares.index_put_(places, (lefts.mT @ rights).square_().sum(dim=1, dtype=torch.float64), accumulate=True)
    return blocks.sums(squares.flatten(1))


def _lookup_norms(factors: Sequence[Outer], num_sequences: int) -> torch.Tensor:
    """Return the squared norms of the sums of lookups: a matrix's row that a sequence used is added up first."""
    rows, slots, sequences = [], [], []
    for factor in factors:
        rows.append(_wide(factor.right).flatten(0, -2))
        slots.append(factor.left.flatten())
        every = torch.arange(num_sequences, device=factor.left.device)
        places = every.repeat_interleave(factor.left.shape[-1]) if factor.selected is None else factor.selected.rows
        sequences.append(places)
    summed = lookups(torch.cat(rows), torch.cat(slots), torch.cat(sequences), num_sequences)
    assert summed.selected is not None
    return _by_sequence(_length_squares(summed.right)[:, 0], summed.selected, num_sequences)


def _joined(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Put several uses end to end along the tokens."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([left for left, _ in parts], dim=1), torch.cat([right for _, right in parts], dim=1)


def _gram(values: torch.Tensor) -> torch.Tensor:
    return values @ values.mT


def _inner(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * second).sum(dim=(1, 2), dtype=torch.float64)


# --- norms of a gradient's parts, which are groups of its rows or columns, or both ------------------------------------

_Pair = tuple[torch.Tensor, torch.Tensor]  # left (c, S, a) or (c, S), and right (c, S, b)


def _part_norms(
    matrices: _Pair | None, lookups: _Pair | None, blocks: ParameterBlocks, *, without_matrices: bool
) -> torch.Tensor:
    """Return (c, num_blocks) where only rows or only columns are blocks, and rows only without lookups.

    The squared norms of the columns of L^T R are diag(R^T (L L^T) R) = sum_s R * (L L^T R), which takes as much as
    L L^T and R R^T for the norm of the whole.
    """
    by_rows = blocks.num_rows > 1
    terms = []
    if matrices is not None and not without_matrices:
        left, right = matrices[::-1] if by_rows else matrices
        terms.append(_along(_gram(left) @ right, right))
    if lookups is not None:
        same = (lookups[0][:, :, None] == lookups[0][:, None, :]).to(lookups[1].dtype)
        terms.append(_along(same @ lookups[1], lookups[1]))
    if matrices is not None and lookups is not None:
        index = lookups[0][:, None, :].expand(-1, matrices[0].shape[1], -1)
        terms.append(2 * _along(matrices[0].gather(2, index).mT @ matrices[1], lookups[1]))
    entries = torch.stack(terms).sum(dim=0)
    norms = blocks.row_sums(entries, 1) if by_rows else blocks.column_sums(entries)
    return norms if without_matrices else norms.clamp_min_(0.0)


def _along(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return (c, n) float64: the products of (c, S, n), the first of which is overwritten, summed over the tokens.

    Each sum has the type of the products: in float64 it would take half as long as the product of the matrices.
    """
    return first.mul_(second).sum(dim=1).double()


def _formed_part_norms(
    matrices: _Pair | None, lookups: _Pair | None, blocks: ParameterBlocks, *, without_matrices: bool
) -> torch.Tensor:
    """Return (c, num_blocks) of any blocks, by forming the gradients (c, a, b)."""
    factors = matrices or lookups
    assert factors is not None
    number, a, b = len(factors[1]), len(blocks.rows), len(blocks.columns)
    gradients = factors[1].new_zeros(number, a, b) if matrices is None else matrices[0].mT @ matrices[1]
    of_matrices = blocks.sums(gradients.square().flatten(1)) if without_matrices else 0.0
    if lookups is not None:
        rows = lookups[0] + a * torch.arange(number, device=gradients.device)[:, None]
        gradients.view(-1, b).index_add_(0, rows.flatten(), lookups[1].reshape(-1, b))
    return blocks.sums(gradients.square_().flatten(1)) - of_matrices
