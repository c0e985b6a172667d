"""The rescalings of a model: their generators, and the exponents with which these act on the parts of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness.engine.parameters import counted_parameters
from isoloss.flatness.engine.splits import Split
from isoloss.flatness.rescaling.signals import Combination, Signal, Signals
from isoloss.model_checks import architecture, unwrapped
from isoloss.registry import RESCALINGS

Granularity = Literal["tensor", "head", "channel", "neuron"]

_MOST_PARTS = 50_000_000  # with some 120 bytes for each
_UNITS = {"tensor": (), "head": ("head",), "channel": ("head", "channel"), "neuron": ("neuron",)}


@dataclass(frozen=True)
class Rescalings:
    """The rescalings of a model's parameters that leave its function as it is: exp(z_r) is the factor of generator r.

    All entries of a part are multiplied by `exp(E z)` of its row of E. Rows are the parts of all measured parameters,
    in order, and after them those of the other parameters that are rescaled: these have no part in the trace, but a
    rescaling acts on them too.

    Attributes:
        names: What each of the R generators multiplies, such as `layer 0: values and attention output`.
        measured: The names of the measured parameters, tied ones once.
        others: The names of the other parameters that are rescaled.
        splits: The parts of those, among both, that have more than one.
        actions: (K + L, R) integers E, for the K parts of measured parameters and L of others.
        features: (F, R) integers, the log-factors of the last hidden state, one row for each that its channels have and
            that is not 0: `features @ z == 0` keeps what `model.base_model` gives.
        writers: For each generator, the rows of E whose exponent is positive: the parts that it multiplies.
        offsets: Of parameters that hold a gain less an offset, the offset: w becomes `s (w + offset) - offset`.
        normed: (R,) bool, the generators that multiply what a norm reads, and so are exact up to its eps alone.
    """

    names: tuple[str, ...]
    measured: tuple[str, ...]
    others: tuple[str, ...]
    splits: Mapping[str, Split]
    actions: Any
    features: Any
    writers: tuple[NDArray[np.int64], ...]
    offsets: Mapping[str, float]
    normed: NDArray[np.bool_]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters that rows are of, in order."""
        return self.measured + self.others

    @property
    def measured_splits(self) -> dict[str, Split]:
        """The splits of measured parameters, as an estimate by parts takes them."""
        return {name: self.splits[name] for name in self.measured if name in self.splits}

    @property
    def exponents(self) -> Any:
        """The (K, R) exponents of the measured parts, those that have a part in the trace."""
        splits = self.measured_splits
        number = len(self.measured) - len(splits) + sum(split.num_parts for split in splits.values())
        return self.actions[:number]


def rescalings_of(
    model: nn.Module,
    *,
    granularity: Granularity = "tensor",
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Rescalings:
    """Return the rescalings of a model, from the rules of its family (`isoloss.flatness.rescaling.families`).

    They are exact up to the eps of norms, which does not scale with what it is added to.

    Args:
        model: A language model of Hugging Face whose `config.model_type` has rules, or one that is wrapped around it by
            `torch.compile` or data parallelism.
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
    for name, value in [*measured.items(), *named.items()]:
        names.setdefault(id(value), name)
    signals = Signals(names, _UNITS[granularity])
    last = _rules(network)(network, signals)
    if unknown := signals.undeclared():
        raise IsolossError(
            f"{type(network).__name__} has {unknown[0]}, which the rescalings of {network.config.model_type} do not "
            f"cover: merge adapters, or add rules with isoloss.register_rescalings"
        )
    return _solution(signals, list(measured), list(names.values())[len(measured) :], last)


def _rules(network: nn.Module) -> Callable[[nn.Module, Signals], Signal]:
    """Return the function that declares the signals of a model like this one."""
    config: Any = getattr(network, "config", None)
    kind = str(getattr(config, "model_type", None))
    if kind not in RESCALINGS:
        raise IsolossError(
            f"no rescalings are known for models of type {kind} ({type(network).__name__}); they are for "
            f"{', '.join(RESCALINGS)}. Register others with isoloss.register_rescalings, or take an invariant measure: "
            "weighted-trace or fisher-rao"
        )
    head = getattr(network, "get_output_embeddings", None)
    if head is None or head() is None:
        raise IsolossError(f"{type(network).__name__} has no language-model head: rescalings keep the logits")
    rules: Callable[[nn.Module, Signals], Signal] = RESCALINGS.load(kind)
    return rules


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
    splits: dict[str, Split] = {}
    for name, ((rows, of_rows), (columns, of_columns)) in parts.items():
        row, column = np.divmod(np.arange(len(of_rows) * len(of_columns)), len(of_columns))
        block = _matrix(of_rows, places)[row] + _matrix(of_columns, places)[column]
        if name in measured or block.count_nonzero():
            blocks[name] = block
            if len(row) > 1:
                splits[name] = Split(torch.from_numpy(rows), torch.from_numpy(columns))
    actions = scipy.sparse.csr_array(scipy.sparse.vstack(list(blocks.values())))
    by_generator = actions.tocsc()
    read = {number for signal in signals.normed.values() for found in signals.groups(signal)[1] for number in found}
    ends = zip(by_generator.indptr, by_generator.indptr[1:], strict=False)
    return Rescalings(
        names=tuple(titles.values()),
        measured=tuple(measured),
        others=tuple(blocks)[len(measured) :],
        splits=splits,
        actions=actions,
        features=_matrix([combination for combination in features if combination], places),
        writers=tuple(by_generator.indices[i:j][by_generator.data[i:j] > 0] for i, j in ends),
        offsets={name: offset for name, offset in signals.offsets.items() if name in blocks},
        normed=np.array([number in read for number in titles], dtype=bool),
    )


def _matrix(found: list[Combination], places: Mapping[int, tuple[int, int]]) -> Any:
    """Return (n, R) integers, sums of log-factors as rows, given the column of each log-factor and its scale."""
    terms = [
        (row, *places[number], value) for row, combination in enumerate(found) for number, value in combination.items()
    ]
    entries = [(row, column, int(value * scale)) for row, column, scale, value in terms]
    row, column, value = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    return scipy.sparse.csr_array((value, (row, column)), shape=(len(found), len(places)))
