"""Several models on the same inputs with the same random signs: paired differences of their flatness and loss.

Shapes: m predicted positions, V vocabulary, N clusters, L models.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.estimate import Estimate
from isoloss.loading import load
from isoloss.measures.checks import is_causal
from isoloss.measures.flatness.fisher import Integrated
from isoloss.measures.flatness.measurement import UNIT, InterruptedEstimate, Measurement, Stopping
from isoloss.measures.flatness.pool import Pool
from isoloss.measures.flatness.predictions import Predictions
from isoloss.measures.flatness.tally import Tally

Model = nn.Module | Callable[[], nn.Module]

_DRAWS = 200_000  # for the probability of being the flattest, which is then within 0.003
_TIE = 1e-9  # of a trace: differences below it are rounding
_CHUNK = 1 << 22  # logits widened at a time


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One of the models.

    Attributes:
        name: What it is called.
        trace: The trace of its Fisher.
        loss: Its cross-entropy on the same predicted positions.
        flattest: The probability that its trace is the smallest of all.
    """

    name: str
    trace: Estimate
    loss: Estimate
    flattest: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The difference between two models; the errors are of the differences within each cluster.

    Attributes:
        first: A model's name.
        second: The other's.
        trace: The trace of the first less that of the second.
        loss: The loss of the first less that of the second.
        log_ratio: The logarithm of the ratio of the traces, first to second.
    """

    first: str
    second: str
    trace: Estimate
    loss: Estimate
    log_ratio: Estimate

    @property
    def ratio(self) -> float:
        """The trace of the first over that of the second."""
        return math.exp(self.log_ratio.value)

    @property
    def ratio_ci95(self) -> tuple[float, float]:
        """Its 95 % confidence interval, that of the logarithm carried over."""
        low, high = self.log_ratio.ci95
        return math.exp(low), math.exp(high)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found.

    Attributes:
        models: The models, in the order in which they were given.
        pairs: Each two of them, in this order.
    """

    models: tuple[Measured, ...]
    pairs: tuple[Pair, ...]

    @property
    def ranking(self) -> tuple[str, ...]:
        """The models' names, the flattest first."""
        return tuple(model.name for model in sorted(self.models, key=lambda model: model.trace.value))

    def pair(self, first: str, second: str) -> Pair:
        """Return the pair of these two models, in this order or the other.

        Raises:
            IsolossError: There is none.
        """
        for pair in self.pairs:
            if {pair.first, pair.second} == {first, second}:
                return pair
        names = ", ".join(model.name for model in self.models)
        raise IsolossError(f"there is no pair of {first} and {second}; the models are {names}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        document = dataclasses.asdict(self)
        return {name: list(parts) for name, parts in document.items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Comparison:
        """Return the comparison that `to_dict` wrote."""

        def part(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: Estimate.from_dict(value) if isinstance(value, Mapping) else value
                for name, value in fields.items()
            }

        return cls(
            models=tuple(Measured(**part(fields)) for fields in document["models"]),
            pairs=tuple(Pair(**part(fields)) for fields in document["pairs"]),
        )


class InterruptedComparison(KeyboardInterrupt):
    """Ctrl-C during a comparison that already has a result.

    Attributes:
        complete: The comparison of the models that were done; None where none was.
        name: The model that was being measured.
        partial: Its trace so far; None where there was no error bar yet.
    """

    def __init__(self, complete: Comparison | None, name: str, partial: Estimate | None) -> None:
        super().__init__(f"interrupted while {name} was measured")
        self.complete, self.name, self.partial = complete, name, partial


@dataclass(frozen=True)
class Outline:
    """What models must share for their losses and traces per token to be of the same thing.

    Attributes:
        name: What the model is called.
        causal: Whether it predicts next tokens, not hidden ones.
        vocabulary: How many ids it knows; None where its config does not say.
    """

    name: str
    causal: bool
    vocabulary: int | None

    @classmethod
    def of(cls, name: str, model: nn.Module, causal: bool | None = None) -> Outline:
        """Return a model's outline; `causal` None: by its class."""
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return cls(name, is_causal(model) if causal is None else causal, getattr(text, "vocab_size", None))

    def check(self, other: Outline) -> None:
        """Refuse another model that cannot be compared with this one.

        Raises:
            IsolossError: It predicts other tokens, or has another vocabulary.
        """
        if self.causal != other.causal:
            next_tokens, hidden = (self, other) if self.causal else (other, self)
            raise IsolossError(
                f"{next_tokens.name} predicts next tokens and {hidden.name} hidden ones, so they have no inputs in "
                "common: compare models of one kind"
            )
        if self.vocabulary != other.vocabulary:
            raise IsolossError(
                f"{self.name} has a vocabulary of {self.vocabulary} tokens and {other.name} of {other.vocabulary}, so "
                "a token is not the same thing to both: compare models of one tokenizer"
            )


def compare(
    models: Mapping[str, Model] | Sequence[str],
    batches: Iterable[Mapping[str, Any]],
    *,
    seed: int = 0,
    num_probes: int | None = None,
    num_sequences: int | None = None,
    rtol: float | None = None,
    seconds: float | None = None,
    causal: bool | None = None,
    pool: Iterable[Mapping[str, Any]] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Compare the flatness of models, each measured on the same inputs with the same random signs.

    What makes an input hard, or a draw of signs lucky, is much the same for similar models, so that the difference of
    two traces is known far better than either of them. With psi_b the influence of cluster b on a trace
    (`isoloss.measures.flatness.tally.Shares`), the error of the difference is that of the mean of psi_b - psi'_b; the
    error of the logarithm of the ratio is that of the mean of psi_b / R - psi'_b / R' (the delta method). The
    probability of being the flattest is that of the smallest of L jointly normal numbers with the estimates as means
    and the influences' covariance: in closed form for two models, from 200,000 draws for more.

    Args:
        models: Language models by name, or functions that load them, or names of checkpoints. What is loaded here is
            dropped before the next one is. Sizes may differ; vocabularies may not.
        batches: As for `isoloss.measures.flatness.fisher_trace`. The values of the labels count for the loss.
        seed: Decides the signs.
        num_probes: Sign vectors a position; None: 1.
        num_sequences: Stop after as many; None: at the end of the batches.
        rtol: As for `fisher_trace`; the first model decides, and the others are measured on as many sequences.
        seconds: As for `fisher_trace`; the first model decides, and the others are measured on as many sequences.
        causal: Whether position t predicts token t + 1. None: by each model's class.
        pool: As for `fisher_trace`; it is read once, by the embeddings of the first model, which need not be the one
            that is measured: they only tell the sequences apart. The first model decides how much of it is used.
        progress: Called with a model's name and the number of its sequences done.

    Raises:
        IsolossError: No models, two of one name, models that predict different things or have different vocabularies,
            a trace that is not above 0, or whatever `fisher_trace` refuses; the model is named.
        InterruptedComparison: Ctrl-C; it carries what is complete, and the trace of the model in work so far.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> models = {}
        >>> for name, seed in (("a", 0), ("b", 1)):
        ...     _ = torch.manual_seed(seed)
        ...     models[name] = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (64, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(64, 4)
        >>> found = compare(models, [{"input_ids": input_ids, "labels": labels}])
        >>> [model.name for model in found.models], sum(model.flattest for model in found.models)
        (['a', 'b'], 1.0)
        >>> difference = found.pair("a", "b").trace
        >>> round(difference.value - (found.models[0].trace.value - found.models[1].trace.value), 9)
        0.0
    """
    named = _named(models)
    stopping = Stopping(num_sequences=num_sequences, rtol=rtol, seconds=seconds)
    if not isinstance(batches, Mapping):  # that one is refused by the measurement
        batches = list(batches)
    first: Outline | None = None
    read: Pool | None = None
    done: list[_Influence] = []
    for name, given in named.items():
        step = None if progress is None else _progress_of(name, progress)
        try:
            model = given if isinstance(given, nn.Module) else given()
            outline = Outline.of(name, model, causal)
            first = first or outline
            first.check(outline)
            source = WithLoss(model, num_probes=num_probes, seed=seed, causal=outline.causal, parameters=None)
            if pool is not None and read is None:
                read = Pool.read(model, pool)
            one = _measure(name, Measurement(model, source, pool=read), source, batches, stopping, step)
        except InterruptedEstimate as stop:
            raise InterruptedComparison(_comparison(done) if done else None, name, stop.partial) from stop
        except KeyboardInterrupt as stop:
            if not done:
                raise
            raise InterruptedComparison(_comparison(done), name, None) from stop
        if not done and read is not None:
            read = dataclasses.replace(read, number=sum(one.pool_controls))
        if not done and (rtol is not None or seconds is not None):
            stopping = Stopping(num_sequences=one.trace.details["sequences"])
        done.append(one)
        del model, source  # so that two are never held
    return _comparison(done)


class WithLoss(Integrated):
    """The integrated labels' cotangents, keeping the loss at the given labels of every sequence."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_probes: int | None,
        seed: int,
        causal: bool | None,
        parameters: Mapping[str, nn.Parameter] | None,
    ) -> None:
        super().__init__(model, num_probes=num_probes, seed=seed, causal=causal, parameters=parameters)
        self._nats: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    def loss(self, batches: Iterable[Mapping[str, Any]], sequences: int) -> tuple[Estimate, torch.Tensor]:
        """Return the loss of the first `sequences` sequences, and (N,) the influence of each cluster on it."""
        nats, positions = torch.cat(self._nats)[:sequences], torch.cat(self._positions)[:sequences]
        ids = [batch["documents"] for batch in batches if "documents" in batch]
        tally = Tally(num_parameters=1, num_controls=0)
        tally.add(
            nats[:, None], positions, torch.zeros(len(nats), 0), torch.cat(ids)[: len(nats)].cpu() if ids else None
        )
        shares = tally.shares()
        estimate = Estimate(
            value=shares.value,
            stderr=shares.stderr,
            samples=len(tally),
            unit=UNIT,
            num_inputs=int(positions.sum()),
            method="cross-entropy",
        )
        return estimate, shares.influence

    def _probe(
        self, predictions: Predictions, positions: torch.Tensor, first: int, probe: int, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if probe == 0:
            nats = torch.zeros(len(positions), dtype=torch.float64)
            nats.index_add_(0, predictions.rows.cpu(), _surprise(predictions.logits, predictions.targets).cpu())
            self._nats.append(nats)
            self._positions.append(positions.cpu())
        return super()._probe(predictions, positions, first, probe, keep=keep)


def _surprise(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return (m,) float64: the cross-entropy of each position in nats, without a second buffer of logits."""
    if int(targets.max()) >= logits.shape[1] or int(targets.min()) < 0:
        raise IsolossError(
            f"a label is {int(targets.min())} or {int(targets.max())}; the model has {logits.shape[1]} logits"
        )
    rows = max(1, _CHUNK // logits.shape[1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    parts = zip(torch.split(logits.detach(), rows), torch.split(targets, rows), strict=True)
    losses = [nn.functional.cross_entropy(part.to(wide), target, reduction="none") for part, target in parts]
    return torch.cat(losses).double()


@dataclass(frozen=True)
class _Influence:
    """A model's estimates, and what each of N clusters adds to their errors: (N,) on the loss.

    On the trace it is (N + r,), with each of the r means of a pool, which are the same for all models; it has (r,)
    which of these were used.
    """

    name: str
    trace: Estimate
    loss: Estimate
    on_trace: torch.Tensor
    on_loss: torch.Tensor
    pool_controls: tuple[bool, ...]


def _measure(
    name: str,
    measurement: Measurement,
    source: WithLoss,
    batches: Iterable[Mapping[str, Any]],
    stopping: Stopping,
    progress: Callable[[int], None] | None,
) -> _Influence:
    try:
        trace = measurement.run(batches, stopping, progress=progress)
    except IsolossError as error:
        raise IsolossError(f"{name}: {error}") from error
    if trace.value <= 0:
        raise IsolossError(f"{name}: the trace is {trace.value:.3g}, which has no ratio to another; take more inputs")
    loss, on_loss = source.loss(batches, trace.details["sequences"])
    shares = measurement.shares()
    return _Influence(name, trace, loss, shares.influence, on_loss, shares.pool_controls)


def _named(models: Mapping[str, Model] | Sequence[str]) -> dict[str, Model]:
    if isinstance(models, str) or not models:
        raise IsolossError(f"models is {models!r}; it is a mapping of names to models, or several names of checkpoints")
    if isinstance(models, Mapping):
        return dict(models)
    if twice := next((name for i, name in enumerate(models) if name in models[:i]), None):
        raise IsolossError(f"{twice} is named twice; a model is compared with others")
    return {name: _loader(name) for name in models}


def _loader(name: str) -> Callable[[], nn.Module]:
    def loaded() -> nn.Module:
        model: nn.Module = load(name).model
        return model

    return loaded


def _progress_of(name: str, progress: Callable[[str, int], None]) -> Callable[[int], None]:
    return lambda done: progress(name, done)


def _comparison(done: list[_Influence]) -> Comparison:
    chances = _flattest(
        [one.trace.value for one in done], torch.stack([one.on_trace for one in done]), done[0].trace.samples
    )
    return Comparison(
        models=tuple(
            Measured(name=one.name, trace=one.trace, loss=one.loss, flattest=chance)
            for one, chance in zip(done, chances, strict=True)
        ),
        pairs=tuple(_pair(a, b) for a, b in itertools.combinations(done, 2)),
    )


def _pair(a: _Influence, b: _Influence) -> Pair:
    log_ratio = math.log(a.trace.value) - math.log(b.trace.value)
    of_logs = a.on_trace / a.trace.value - b.on_trace / b.trace.value
    return Pair(
        first=a.name,
        second=b.name,
        trace=_paired(a.trace.value - b.trace.value, a.on_trace - b.on_trace, a.trace, UNIT),
        loss=_paired(a.loss.value - b.loss.value, a.on_loss - b.on_loss, a.loss, UNIT),
        log_ratio=_paired(log_ratio, of_logs, a.trace, "logarithm of a ratio"),
    )


def _paired(value: float, influence: torch.Tensor, like: Estimate, unit: str) -> Estimate:
    n = like.samples
    return Estimate(
        value=value,
        stderr=math.sqrt(float(influence.square().sum()) / (n * (n - 1))),
        samples=n,
        unit=unit,
        num_inputs=like.num_inputs,
        num_probes=like.num_probes,
        method="paired difference",
    )


def _flattest(values: list[float], influences: torch.Tensor, n: int) -> list[float]:
    """Return for each of L models the probability that its trace is the smallest, given influences on n clusters."""
    number = len(values)
    if number == 1:
        return [1.0]
    if number == 2:
        difference = values[1] - values[0]
        deviation = math.sqrt(float((influences[0] - influences[1]).square().sum()) / (n * (n - 1)))
        if deviation == 0:
            first = 0.5 + 0.5 * ((difference > 0) - (difference < 0))
        else:
            first = 0.5 * math.erfc(-difference / deviation / math.sqrt(2))
        return [first, 1 - first]
    root = torch.linalg.qr(influences.T / math.sqrt(n * (n - 1)), mode="r").R  # R^T R is the covariance
    normals = torch.randn(_DRAWS, len(root), generator=seeds.generator(0, "flattest"), dtype=torch.float64)
    drawn = torch.tensor(values, dtype=torch.float64) + normals @ root
    least = drawn.min(dim=1, keepdim=True).values
    smallest = (drawn <= least + _TIE * least.abs()).double()  # models that are the same share the place
    chances: list[float] = (smallest / smallest.sum(dim=1, keepdim=True)).mean(dim=0).tolist()
    return chances
