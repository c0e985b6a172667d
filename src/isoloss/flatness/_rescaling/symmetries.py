"""The signals of a network and how their factors are related: what may be rescaled without changing the function.

A rescaling gives each signal (the activations between the maps of a network) a factor, or one to each group of its
dimensions, and each parameter the factors that preserve every map. In logarithms these are linear equations with
integer coefficients. Of `y = W x + b` with log-factors f, the entry W[i, j] has f(y[i]) - f(x[j]), and b[i] has
f(y[i]). All that a norm reads has one factor, whichever; what it writes has the factor of its gain and bias. Logits,
and what a function that is not homogeneous reads and writes, have the factor 1, and the scores of attention too. What
is left to solve are parameters with several uses, tied ones among them, and signals that must have one factor. The
factors that remain free generate all rescalings of this form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._parameters import ParameterBlocks, counted_parameters
from isoloss.model_checks import architecture, unwrapped
from isoloss.registry import RESCALINGS

# For each dimension the number of its log-factor; 0: the factor is 1; -n: one over the factor of number n.
Signal = NDArray[np.int64]
Combination = dict[int, int | Fraction]  # a sum of free log-factors: their coefficients, by number

_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity)


class Signals:
    """The signals of a network, declared in the order of its forward pass, and the maps between them.

    A signal is an array of signed numbers, so that slices and `numpy.concatenate` of signals are signals, as is `-x`,
    whose factors are one over the factors of x. A fused map writes the concatenation of what its parts write.

    Args:
        names: The name of each parameter, by its `id`.
        units: What has a factor of its own, any of `head`, `channel` and `neuron`; none: whole signals.

    Example:
        >>> from torch import nn
        >>> from isoloss.flatness import Signals
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
        # those that follow from others; number 0, the factor 1, is a sum of nothing
        self._solved: dict[int, Combination] = {0: {}}
        self._factors: dict[str, tuple[Signal, Signal]] = {}  # of parameters, for their rows and columns
        self.offsets: dict[str, float] = {}  # of parameters that hold a gain less an offset

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
        """Return the signal at an activation function: fixed, unless the function is homogeneous, as ReLU is."""
        if isinstance(activation, _HOMOGENEOUS) or activation in (torch.relu, nn.functional.relu):
            return self.neurons(label, size)
        return self.fixed(size)

    def heads(self, label: str, heads: int, size: int) -> Signal:
        """Return the input of a norm that takes each of `heads` heads of `size` dimensions by itself."""
        each = bool(self._units & {"head", "channel"})
        return self._new(label, np.repeat(np.arange(heads) * each, size), "head")

    def product(self, gate: Signal, value: Signal) -> Signal:
        """Return the product of two signals, dimension by dimension."""
        # the usual gate, SiLU or GELU, is fixed
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
        # the planes of rotation are numbered first, then the dimensions that are not turned
        plane = np.where(place < rotated, place % max(rotated // 2, 1), place - rotated // 2)
        if "channel" in self._units:
            members, pairs, unit = head * size + place, head * size + plane, "channel"
            pair = "pair" if rotated == size else "channel"
        else:
            members = pairs = head * ("head" in self._units)
            unit = pair = "head"
        # the factor is the queries', so that the generator makes queries larger and keys smaller
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

    def norm(self, module: nn.Module | None, read: Signal, written: Signal, *, offset: float = 0.0) -> None:
        """Declare a layer norm or RMS norm without eps, whose gain is its weight plus `offset`; None: it has none."""
        self._equate(read, read)
        gain: Any = getattr(module, "weight", None)
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
        # two sums rows[i] + columns[j] are equal everywhere if they are in the first column and in the first row
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
            # declared last: what stays free are the first signals, by which a reader of the forward pass would name it
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
        # what it was solved for may have been solved since; kept, so that chains are walked once, as in union-find
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


Granularity = Literal["tensor", "head", "channel", "neuron"]

_MOST_PARTS = 50_000_000  # with some 120 bytes for each
_UNITS = {"tensor": (), "head": ("head",), "channel": ("head", "channel"), "neuron": ("neuron",)}


@dataclass(frozen=True)
class Rescalings:
    """The rescalings of a model's parameters that leave its function as it is: exp(z_r) is the factor of generator r.

    All entries of a part are multiplied by `exp(E z)` of its row of E. Rows are the parts of all measured parameters,
    in order, and after them the parts of the other parameters that are rescaled: these have no part in the trace, but a
    rescaling acts on them too.

    Attributes:
        names: What each of the R generators multiplies, such as `layer 0: values and attention output`.
        measured: The names of the measured parameters, tied ones once.
        others: The names of the other parameters that are rescaled.
        parameter_blocks: The parts of those, among both, that have more than one.
        actions: (K + L, R) integers E, for the K parts of measured parameters and L of others.
        features: (F, R) integers, the log-factors of the last hidden state, one row for each that its channels have and
            that is not 0: `features @ z == 0` keeps what `model.base_model` gives.
        writers: For each generator, the rows of E whose exponent is positive: the parts that it multiplies.
        offsets: Of parameters that hold a gain less an offset, the offset: w becomes `s (w + offset) - offset`.
    """

    names: tuple[str, ...]
    measured: tuple[str, ...]
    others: tuple[str, ...]
    parameter_blocks: Mapping[str, ParameterBlocks]
    actions: Any
    features: Any
    writers: tuple[NDArray[np.int64], ...]
    offsets: Mapping[str, float]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that rows are of, in order."""
        return self.measured + self.others

    @property
    def measured_blocks(self) -> dict[str, ParameterBlocks]:
        """The parameter_blocks of measured parameters, as an estimate by parts takes them."""
        return {name: self.parameter_blocks[name] for name in self.measured if name in self.parameter_blocks}

    @property
    def exponents(self) -> Any:
        """The (K, R) exponents of the measured parts, those that have a part in the trace."""
        parameter_blocks = self.measured_blocks
        number = (
            len(self.measured) - len(parameter_blocks) + sum(split.num_blocks for split in parameter_blocks.values())
        )
        return self.actions[:number]


def rescalings_of(
    model: nn.Module,
    *,
    granularity: Granularity = "tensor",
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Rescalings:
    """Return the rescalings of a model, from the rules of its family (`isoloss.flatness._rescaling.families`).

    They are exact if the eps of each norm is rescaled too, by the square of the factor of the norm's input. If eps
    stays as it is, they are exact up to eps.

    Args:
        model: A language model of Hugging Face whose `config.model_type` has rules, or a module with a method
            `rescalings` that declares its own; it may be inside of `torch.compile` or data parallelism.
        granularity: What has a factor of its own. `tensor`: signals as a whole, and so parameters, or the parts of
            fused ones. `head`: keys and values by head, with the queries that read them. `channel`: what norms write,
            keys and values by channel, or by pair of channels where positions rotate them. `neuron`: the hidden units
            of feed-forward blocks with ReLU or a gate. Factors that turn out equal are one generator, and entries of a
            parameter that are always multiplied alike are one part.
        parameters: Those that are measured, by their names in the model; None: all trainable ones. The others are
            rescaled just the same.

    Raises:
        IsolossError: There are no rules for the model's type, or they do not know all of its parameters, as adapters; a
            weight is quantized; the granularity is none of these or makes more than 50 million parts; or `parameters`
            has names of its own.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import rescalings_of
        >>> model, _ = tiny_bert()
        >>> found = rescalings_of(model)  # a BERT of one layer
        >>> for name in found.names:
        ...     print(name)
        embeddings and head norm
        layer 0: attention input norm
        layer 0: queries and keys
        layer 0: values and attention output
        layer 0: feed-forward input norm
        last hidden state
        >>> found.exponents.shape, rescalings_of(model, granularity="channel").exponents.shape
        ((26, 6), (96, 27))
    """
    if granularity not in _UNITS:
        raise IsolossError(f"granularity is {granularity!r}; it is one of {', '.join(_UNITS)}")
    network: Any = architecture(model)
    measured = counted_parameters(model, parameters)
    parameters_of = [name for name, _ in network.named_parameters()]
    if adapters := [name for name in parameters_of if ".lora_" in name or ".base_layer." in name]:
        raise IsolossError(
            f"{type(network).__name__} has adapters ({adapters[0]}), which rescalings do not cover: merge them, and "
            "set requires_grad on what is to be measured"
        )
    named = {
        name.replace("_orig_mod.", ""): value
        for name, value in unwrapped(model).named_parameters(remove_duplicate=False)
    }
    if others := [name for name, value in measured.items() if named.get(name) is not value]:
        raise IsolossError(
            f"parameters has {others[0]}, which is not the name of that parameter in {type(network).__name__}"
        )
    names: dict[int, str] = {}
    # measured ones first, in the order of the parts of a trace: `_solution` counts on it
    for name, value in [*measured.items(), *named.items()]:
        names.setdefault(id(value), name)
    signals = Signals(names, _UNITS[granularity])
    last = _rules(network)(network, signals)
    if unknown := signals.undeclared():
        raise IsolossError(
            f"{type(network).__name__} has {unknown[0]}, which the rescalings that are declared for it do not cover: "
            "merge adapters, or add rules with isoloss.RESCALINGS.register"
        )
    return _solution(signals, list(measured), list(names.values())[len(measured) :], last)


def why_no_rescalings(model: nn.Module) -> str | None:
    """Return why nothing is known of the rescalings of a model, as a sentence; None if something is."""
    try:
        _rules(architecture(model))
    except IsolossError as error:
        return str(error)
    return None


def _rules(network: nn.Module) -> Callable[[nn.Module, Signals], Signal]:
    """Return the function that declares the signals of a model like this one: its own, or the one of its family."""
    rules: Any = getattr(network, "rescalings", None)
    if callable(rules):
        # of a method, which is bound, the function
        return getattr(rules, "__func__", rules)  # type: ignore[no-any-return]
    config: Any = getattr(network, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise IsolossError(
            f"no rescalings are known for the module {type(network).__name__}: declare them in a method `rescalings` "
            "(docs/own-modules.md), or take an invariant measure: weighted-trace or fisher-rao"
        )
    if kind not in RESCALINGS:
        raise IsolossError(
            f"no rescalings are known for models of type {kind} ({type(network).__name__}); they are for "
            f"{', '.join(RESCALINGS)}. Register others with isoloss.RESCALINGS.register, or take an invariant measure: "
            "weighted-trace or fisher-rao"
        )
    head = getattr(network, "get_output_embeddings", None)
    if head is None or head() is None:
        raise IsolossError(f"{type(network).__name__} has no language-model head: rescalings keep the logits")
    return RESCALINGS.load(kind)  # type: ignore[no-any-return]


def _solution(signals: Signals, measured: list[str], others: list[str], last: Signal) -> Rescalings:
    """Return the rescalings, given the names of the parameters that are measured and of the others."""
    titles = signals.generators()
    parts = {name: signals.parts(name) for name in [*measured, *others]}
    number = sum(len(rows) * len(columns) for (_, rows), (_, columns) in parts.values())
    if number > _MOST_PARTS:
        raise IsolossError(
            f"at this granularity the model has {number:,} parts to rescale, and {_MOST_PARTS:,} at most can be: "
            "choose a coarser one, 'tensor' or 'head'"
        )
    _, features = signals.groups(last)
    scales = dict.fromkeys(titles, 1)  # what makes the exponents of a generator integers
    for combination in chain(features, *(found for sides in parts.values() for _, found in sides)):
        for number, value in combination.items():
            scales[number] = math.lcm(scales[number], value.denominator)
    places = {number: (column, scale) for column, (number, scale) in enumerate(scales.items())}

    blocks: dict[str, Any] = {}
    parameter_blocks: dict[str, ParameterBlocks] = {}
    for name, ((rows, of_rows), (columns, of_columns)) in parts.items():
        row, column = np.divmod(np.arange(len(of_rows) * len(of_columns)), len(of_columns))
        block = _matrix(of_rows, places)[row] + _matrix(of_columns, places)[column]
        if name in measured or block.count_nonzero():
            blocks[name] = block
            if len(row) > 1:
                parameter_blocks[name] = ParameterBlocks(torch.from_numpy(rows), torch.from_numpy(columns))
    actions = scipy.sparse.csr_array(scipy.sparse.vstack(list(blocks.values())))
    by_generator = actions.tocsc()
    ends = zip(by_generator.indptr, by_generator.indptr[1:], strict=False)
    return Rescalings(
        names=tuple(titles.values()),
        measured=tuple(measured),
        others=tuple(blocks)[len(measured) :],
        parameter_blocks=parameter_blocks,
        actions=actions,
        features=_matrix([combination for combination in features if combination], places),
        writers=tuple(by_generator.indices[i:j][by_generator.data[i:j] > 0] for i, j in ends),
        offsets={name: offset for name, offset in signals.offsets.items() if name in blocks},
    )


def _matrix(found: list[Combination], places: Mapping[int, tuple[int, int]]) -> Any:
    """Return (n, R) integers, sums of log-factors as rows, given the column of each log-factor and its scale."""
    terms = [
        (row, *places[number], value) for row, combination in enumerate(found) for number, value in combination.items()
    ]
    entries = [(row, column, int(value * scale)) for row, column, scale, value in terms]
    row, column, value = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    return scipy.sparse.csr_array((value, (row, column)), shape=(len(found), len(places)))
