"""The signals of a network and how their factors are related: what may be rescaled without changing the function.

A rescaling gives each signal (the activations between the maps of a network) a factor, or one to each group of its
dimensions, and each parameter the factors that preserve every map. In logarithms these are linear equations with
integer coefficients. Of `y = W x + b` the entry W[i, j] has the log-factor of y[i] less that of x[j], and b[i] that of
y[i]. All that a norm reads has one factor, whichever; what it writes has that of its gain and bias. Logits, and what a
function that is not homogeneous reads and writes, have the factor 1, and the scores of attention too. What is left to
solve are parameters with several uses, tied ones among them, and signals that must have one factor. The factors that
remain free generate all rescalings of this form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from isoloss.errors import IsolossError

# For each dimension the number of its log-factor; 0: the factor is 1; -n: the log-factor is minus that of number n.
Signal = NDArray[np.int64]
Combination = dict[int, int | Fraction]  # a sum of free log-factors: their coefficients, by number

_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity)


class Signals:
    """The signals of a network, declared in the order of its forward pass, and the maps between them.

    A signal is an array of signed numbers, so that slices and `numpy.concatenate` of signals are signals, as is `-x`,
    whose factors are one over those of x. A map that is the fusion of several writes the concatenation of theirs.

    Args:
        names: The name of each parameter, by its `id`.
        units: What has a factor of its own, any of `head`, `channel` and `neuron`; none: whole signals.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> signals = Signals({id(value): name for name, value in network.named_parameters()}, units=["neuron"])
        >>> hidden = signals.activated("hidden units", 3, network[1])
        >>> signals.linear(network[0], signals.fixed(2), hidden)
        >>> signals.linear(network[2], hidden, signals.fixed(1))
        >>> signals.generators()
        {1: 'hidden units, neuron 0', 2: 'hidden units, neuron 1', 3: 'hidden units, neuron 2'}
        >>> rows, columns = signals.parts("2.weight")  # (1, 3): the columns are in a group each
        >>> columns
        (array([0, 1, 2]), [{1: -1}, {2: -1}, {3: -1}])
    """

    def __init__(self, names: Mapping[int, str], units: Collection[str]) -> None:
        self._names, self._units = names, frozenset(units)
        self._labels: list[tuple[str, str]] = [("", "")]  # of each log-factor: of which signal, and of what of it
        self._solved: dict[int, Combination] = {0: {}}  # those that follow from others
        self._factors: dict[str, tuple[Signal, Signal]] = {}  # of parameters, for their rows and columns
        self.offsets: dict[str, float] = {}  # of parameters that hold a gain less an offset
        self.normed: dict[int, Signal] = {}  # what norms read, by the first log-factor

    def fixed(self, size: int) -> Signal:
        """Return a signal with the factor 1: what a function that is not homogeneous reads or writes."""
        return np.zeros(size, dtype=np.int64)

    def channels(self, label: str, size: int) -> Signal:
        """Return a signal of `size` channels, such as what a norm writes."""
        return self._new(label, np.arange(size) * ("channel" in self._units), "channel")

    def neurons(self, label: str, size: int) -> Signal:
        """Return a signal of `size` hidden units that nothing fixes, such as the linear part of a gated block."""
        return self._new(label, np.arange(size) * ("neuron" in self._units), "neuron")

    def activated(self, label: str, size: int, activation: Any) -> Signal:
        """Return what an activation function reads and writes: fixed, unless it is homogeneous, as ReLU is."""
        if isinstance(activation, _HOMOGENEOUS) or activation in (torch.relu, nn.functional.relu):
            return self.neurons(label, size)
        return self.fixed(size)

    def heads(self, label: str, heads: int, size: int) -> Signal:
        """Return what a norm that takes each of `heads` heads of `size` dimensions by itself reads."""
        each = bool(self._units & {"head", "channel"})
        return self._new(label, np.repeat(np.arange(heads) * each, size), "head")

    def product(self, gate: Signal, value: Signal) -> Signal:
        """Return the product of two signals, dimension by dimension."""
        if not gate.any():
            return value
        result = self._new("", np.arange(len(gate)), "")
        for one, other, both in _distinct(gate, value, result):
            self._require([one, other, -both])
        return result

    def attention(
        self, where: str, *, heads: int, key_value_heads: int, size: int, rotated: int = 0
    ) -> tuple[Signal, Signal, Signal, Signal]:
        """Return the queries, keys and values of an attention, and the mixed values that its output projection reads.

        Queries have one over the factors of the keys that they meet, so that scores do not change.

        Args:
            where: Whose they are, such as `layer 0`.
            heads: Heads of the queries. Each `heads / key_value_heads` neighbors share keys and values.
            key_value_heads: Heads of keys and values.
            size: Dimensions of a head.
            rotated: How many of these, the first ones, are turned by their position, each i with i + rotated / 2: such
                a pair has one factor.
        """
        head, place = np.divmod(np.arange(key_value_heads * size), size)
        plane = np.where(place < rotated, place % max(rotated // 2, 1), place - rotated // 2)
        if "channel" in self._units:
            members, pairs, unit = head * size + place, head * size + plane, "channel"
            pair = "pair" if rotated == size else "channel"
        else:
            members = pairs = head * ("head" in self._units)
            unit = pair = "head"
        keys = -self._new(f"{where}: queries and keys", pairs, pair)
        values = self._new(f"{where}: values and attention output", members, unit)
        queries, mixed = (
            signal.reshape(key_value_heads, size).repeat(heads // key_value_heads, axis=0).ravel()
            for signal in (-keys, values)
        )
        return queries, keys, values, mixed

    def linear(self, module: nn.Module, read: Signal, written: Signal) -> None:
        """Declare `written = W read + b`, for a linear layer or a `Conv1D` of transformers, whose weight is W^T."""
        if type(module).__name__ == "Conv1D":
            self.factors(module.weight, -read, written)
        else:
            self.factors(getattr(module, "weight", None), written, -read)
        self.vector(getattr(module, "bias", None), written)

    def lookup(self, module: nn.Module, written: Signal) -> None:
        """Declare an embedding whose rows are `written`, or terms of a sum that is."""
        weight: Any = module.weight
        self.factors(weight, self.fixed(len(weight)), written)

    def norm(self, module: nn.Module, read: Signal, written: Signal, *, offset: float = 0.0) -> None:
        """Declare a layer norm or RMS norm without eps, whose gain is its weight plus `offset`."""
        self.normed[int(read[0])] = read
        self._equate(read, read)
        gain: Any = module.weight
        if gain is None:  # what it writes is what it is
            self._equate(written, self.fixed(1))
            return
        self.vector(gain, written)
        self.vector(getattr(module, "bias", None), written)
        if offset:
            self.offsets[self._name(gain)] = offset

    def vector(self, parameter: Any, written: Signal) -> None:
        """Declare a parameter with the factors of `written`, such as a bias; None: there is none."""
        if parameter is not None:
            self.factors(parameter, written, self.fixed(1))

    def factors(self, parameter: Any, rows: Signal, columns: Signal) -> None:
        """Declare that entry (i, j) of a parameter has the log-factor `rows[i] + columns[j]`, in one of its uses.

        Raises:
            IsolossError: It is no floating-point parameter of the model with so many rows and columns.
        """
        name = self._name(parameter)
        shape = (len(rows), len(columns))[: parameter.ndim if len(columns) == 1 else 2]
        if parameter.shape != shape or not parameter.is_floating_point():
            raise IsolossError(
                f"{name} has the shape {tuple(parameter.shape)} and the type {parameter.dtype}, and not {shape} in "
                "floating point, so it cannot be rescaled"
            )
        if name not in self._factors:
            self._factors[name] = (rows, columns)
            return
        other_rows, other_columns = self._factors[name]
        for row, other in _distinct(rows, other_rows):
            self._require([row, int(columns[0]), -other, -int(other_columns[0])])
        for column, other in _distinct(columns, other_columns):
            self._require([int(rows[0]), column, -int(other_rows[0]), -other])

    def undeclared(self) -> list[str]:
        """Return the names of the parameters that are in no map."""
        return [name for name in self._names.values() if name not in self._factors]

    def generators(self) -> dict[int, str]:
        """Return the free log-factors that parameters depend on, by number, with what each of them moves."""
        sides = [np.unique(np.abs(side)) for sides in self._factors.values() for side in sides]
        used = np.unique(np.concatenate(sides)) if sides else ()
        moved: dict[int, list[int]] = {free: [] for number in used for free in self._combination(int(number))}
        for number in range(len(self._labels)):
            for free in self._combination(number):
                if free in moved:
                    moved[free].append(number)
        sizes = Counter(label for label, _ in self._labels)
        return {free: self._title(free, moved[free], sizes) for free in sorted(moved)}

    def parts(self, name: str) -> tuple[tuple[NDArray[np.int64], list[Combination]], ...]:
        """Return a parameter's groups of rows and of columns: the group of each, and the log-factor of each group."""
        return tuple(self.groups(side) for side in self._factors[name])

    def groups(self, signal: Signal) -> tuple[NDArray[np.int64], list[Combination]]:
        """Return which dimensions have the same log-factor, (n,) numbers from 0, and each as a sum of free ones."""
        entries, firsts, inverse = np.unique(signal, return_index=True, return_inverse=True)
        numbers: dict[frozenset[tuple[int, int | Fraction]], int] = {}
        places = np.empty(len(entries), dtype=np.int64)
        for place in np.argsort(firsts):
            combination = self._sum([(int(entries[place]), 1)])
            places[place] = numbers.setdefault(frozenset(combination.items()), len(numbers))
        return places[inverse], [dict(items) for items in numbers]

    def _new(self, label: str, groups: NDArray[Any], unit: str) -> Signal:
        """Return a signal with a log-factor for each group, given the group of each dimension."""
        kinds, members = np.unique(groups, return_inverse=True)
        first = len(self._labels)
        self._labels += [(label, f"{unit} {number}") for number in range(len(kinds))]
        return first + members.astype(np.int64)

    def _name(self, parameter: Any) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise IsolossError(
                f"the weight of a map is a {type(parameter).__name__}, not a parameter of the model: is it quantized?"
            )
        return name

    def _equate(self, signal: Signal, other: Signal) -> None:
        """Let all dimensions of a signal have the factor of another's first."""
        for entry in np.unique(signal):
            self._require([int(entry), -int(other[0])])

    def _require(self, entries: Iterable[int]) -> None:
        """Let the sum of log-factors be 0: solve for the latest of them that is free."""
        rest = self._sum((entry, 1) for entry in entries)
        if rest:
            latest = max(rest)
            factor = rest.pop(latest)
            if abs(factor) == 1:  # as always in the families here: integers stay integers
                self._solved[latest] = {number: -value * factor for number, value in rest.items()}
            else:
                self._solved[latest] = {number: Fraction(-value) / factor for number, value in rest.items()}

    def _sum(self, terms: Iterable[tuple[int, int | Fraction]]) -> Combination:
        total: Combination = {}
        for entry, factor in terms:
            signed = factor if entry > 0 else -factor
            for number, value in self._combination(abs(entry)).items():
                total[number] = total.get(number, 0) + signed * value
        return {number: value for number, value in total.items() if value}

    def _combination(self, number: int) -> Combination:
        """Return a log-factor as a sum of free ones."""
        known = self._solved.get(number)
        if known is None:
            return {number: 1}
        if not self._solved.keys().isdisjoint(known):
            known = self._solved[number] = self._sum(known.items())
        return known

    def _title(self, free: int, moved: list[int], sizes: Mapping[str, int]) -> str:
        """Return a generator's name: the signals that it moves, and which part of them, where it is not the whole."""
        number_of = Counter(self._labels[number][0] for number in moved)
        labels = [label for label in number_of if label]
        places = {label.rpartition(": ")[0] for label in labels}
        if len(places) == 1:
            labels[1:] = [label.rpartition(": ")[2] for label in labels[1:]]
        label, part = self._labels[free]
        return " and ".join(labels) + f", {part}" * (number_of[label] < sizes[label])


def _distinct(*signals: Signal) -> Iterator[list[int]]:
    """Yield the entries of signals at the same dimension, each combination once."""
    yield from np.unique(np.stack(signals), axis=1).T.tolist()
