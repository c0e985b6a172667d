"""Trace of the Fisher matrix of a language model's loss with an error bar: the paper's flatness (section 4, B.1).

Shapes: n sequences, T positions, P predicted positions of a group, V vocabulary, K trainable parameter tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.estimate import Estimate
from isoloss.languages.masking import IGNORED
from isoloss.measures import statistics
from isoloss.measures.checks import device_of, refuse_dropout

UNIT = "nats per predicted token"
_METHODS = {"sketch": "fisher, grouped sketch", "paper": "fisher, sampled labels"}
_DEFAULT_PROBES = {"sketch": 1, "paper": 50}
_UNSHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel")  # named like causal models, but transformers shifts no labels


class InterruptedEstimate(KeyboardInterrupt):
    """Ctrl-C during a measurement that already has an error bar.

    Attributes:
        partial: The estimate from the groups measured so far.
    """

    def __init__(self, partial: Estimate) -> None:
        super().__init__(f"interrupted at {partial}")
        self.partial = partial


def fisher_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: Literal["sketch", "paper"] = "sketch",
    num_probes: int | None = None,
    seed: int = 0,
    group_size: int = 8,
    causal: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Estimate the trace of the Fisher matrix of the mean loss per predicted token.

    The value is `E_x E_{y~f(x)} ||grad_theta log f(x)_y||^2` (paper, section 4), the mean over predicted positions x
    with the label y drawn from the model's own prediction f(x). It is the trace of the Gauss-Newton matrix of the
    cross-entropy at any parameters, and the trace of its Hessian where the prediction is the true conditional. The sum
    runs over all trainable parameters, tied ones once.

    `method="sketch"` integrates the label out. With p = f(x), `S = diag(sqrt p) - p sqrt(p)^T` and v of V random signs,
    the cotangent u = S v has `E[u u^T] = diag(p) - p p^T`, so `E||J^T u||^2 = Tr(J^T (diag(p) - p p^T) J)` is the sum
    over labels exactly. One backward pass serves a group of sequences: the cotangents of different positions are
    independent with mean zero, so `E||sum_i J_i^T u_i||^2` is the sum of the positions' traces, for any model and any
    sharing of parameters. Only first derivatives are taken, so every attention kernel does.

    `method="paper"` is the estimator of appendix B.1 to the letter: at each predicted position it samples `num_probes`
    labels from the model and averages the squared norms of their gradients, one backward pass a label.

    The value is the sum of the squared norms over the sum of the predicted positions. The error is that ratio's, over
    groups (over sequences for `"paper"`), so it covers the data and the probes together. Sequences are taken to be
    independent samples.

    The signs (or labels) of a sequence depend on `seed` and on its place in the stream of sequences alone. Groups are
    cut from that stream in order, across batches wherever their inputs have equal widths and types, so the result does
    not depend on how equally wide rows were batched; where the width changes, a smaller group ends.

    Args:
        model: A Hugging Face language model, or a module whose output has `logits` (n, T, V). It is left as found:
            gradients, training mode and `requires_grad` untouched.
        batches: Mappings of `labels` (n, T), -100 where nothing is predicted, and the model's inputs, n rows each. The
            values of the other labels are not used. A causal model's labels are unshifted: label t + 1 is predicted at
            position t.
        method: Which estimator.
        num_probes: Sign vectors a position, sharing one forward pass (default 1), or labels a position for `"paper"`
            (default 50).
        seed: Decides the signs or labels.
        group_size: Sequences summed in a backward pass. Larger is faster per sequence and noisier. Not used by
            `"paper"`, which takes one sequence at a time.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        progress: Called with the number of sequences done after each group.

    Returns:
        The estimate in nats per predicted token, with `by_parameter` adding up to `value`, `samples` the number of
        groups and `num_inputs` the number of predicted positions.

    Raises:
        IsolossError: Dropout is on, no parameter is trainable, there are no batches, a batch predicts nothing or does
            not fit the model, a logit or gradient is not finite, or there are fewer than two groups.
        InterruptedEstimate: Ctrl-C after at least two groups; it carries the estimate so far.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (64, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(64, 4)
        >>> trace = fisher_trace(model, [{"input_ids": input_ids, "labels": labels}])
        >>> trace.num_inputs, trace.samples, trace.value > 0, trace.stderr < 0.2 * trace.value
        (64, 8, True, True)
    """
    started = time.perf_counter()
    probes = _checked_probes(method, num_probes)
    size = 1 if method == "paper" else group_size
    if size < 1:
        raise IsolossError(f"group_size is {size}; it must be at least 1")
    refuse_dropout(model)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise IsolossError(f"{type(model).__name__} has no trainable parameter: set requires_grad on what should count")
    shifted = _is_causal(model) if causal is None else causal
    square_norms = _sketched_norms if method == "sketch" else _sampled_label_norms
    measured: list[_Group] = []
    sequences = 0

    def result() -> Estimate:
        details = {"seed": seed, "group_size": size, "predicts": "next token" if shifted else "masked tokens"}
        return _estimate(model, parameters, measured, _METHODS[method], probes, details, time.perf_counter() - started)

    try:
        for rows in _groups(batches, size, shifted):
            with torch.enable_grad():
                measured.append(_measure(model, rows, parameters, square_norms, probes, seed))
            sequences += len(rows)
            if progress is not None:
                progress(sequences)
    except KeyboardInterrupt as interruption:
        if len(measured) < 2:
            raise
        raise InterruptedEstimate(result()) from interruption
    return result()


# --- from batches to groups ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Consecutive sequences that go through the model together.

    `inputs` holds the model's inputs, n rows each, `constants` its other arguments; `predicted` (n, T) marks the
    positions whose logits are scored, `sequence` and `batch` (n,) say where in the stream each row stood.
    """

    inputs: dict[str, torch.Tensor]
    constants: dict[str, Any]
    predicted: torch.Tensor
    sequence: torch.Tensor
    batch: torch.Tensor

    def __len__(self) -> int:
        return len(self.sequence)

    def layout(self) -> Any:
        """What has to agree for two stretches of rows to share a group."""
        shapes = {name: (value.shape[1:], value.dtype, value.device) for name, value in self.inputs.items()}
        return shapes, self.predicted.shape[1:], self.constants

    def cut(self, start: int, stop: int | None) -> _Rows:
        inputs = {name: value[start:stop] for name, value in self.inputs.items()}
        rest = (value[start:stop] for value in (self.predicted, self.sequence, self.batch))
        return _Rows(inputs, self.constants, *rest)

    def followed_by(self, other: _Rows) -> _Rows:
        inputs = {name: torch.cat([value, other.inputs[name]]) for name, value in self.inputs.items()}
        pairs = ((self.predicted, other.predicted), (self.sequence, other.sequence), (self.batch, other.batch))
        return _Rows(inputs, self.constants, *(torch.cat(pair) for pair in pairs))


def _groups(batches: Iterable[Mapping[str, Any]], size: int, causal: bool) -> Iterator[_Rows]:
    """Cut the stream of rows into groups of `size`; a change of layout ends a group early."""
    if isinstance(batches, Mapping):
        raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
    pending: _Rows | None = None
    sequences = 0
    for number, batch in enumerate(batches):
        rows = _rows(batch, number, sequences, causal)
        sequences += len(rows)
        if pending is not None and pending.layout() != rows.layout():
            yield pending
            pending = None
        pending = rows if pending is None else pending.followed_by(rows)
        while pending is not None and len(pending) >= size:
            yield pending.cut(0, size)
            pending = pending.cut(size, None) if len(pending) > size else None
    if pending is not None:
        yield pending


def _rows(batch: Mapping[str, Any], number: int, first: int, causal: bool) -> _Rows:
    """Check a batch and mark the positions whose logits are scored."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
        raise IsolossError(f"batch {number} is no mapping with `labels` of shape (sequences, positions)")
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name != "labels"}
    constants = {name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        expected = labels.shape if name == "input_ids" else labels.shape[:1]
        if value.shape[: len(expected)] != expected:
            raise IsolossError(
                f"batch {number}: labels of shape {tuple(labels.shape)} do not fit {name} of shape {tuple(value.shape)}"
            )
    predicted = labels != IGNORED
    if causal:
        predicted = torch.cat([predicted[:, 1:], torch.zeros_like(predicted[:, :1])], dim=1)
    if not bool(predicted.any()):
        raise IsolossError(f"batch {number} predicts nothing: every label that the model could be scored on is -100")
    n = len(labels)
    return _Rows(tensors, constants, predicted, torch.arange(first, first + n), torch.full((n,), number))


# --- one group -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Squared gradient norms of a group by parameter (K,) float64, and the parameters that had a gradient (K,) bool."""

    square_norms: torch.Tensor
    reached: torch.Tensor
    positions: int
    sequences: int


_Norms = Callable[[torch.Tensor, _Rows, list[nn.Parameter], int, int], tuple[torch.Tensor, torch.Tensor]]


def _measure(
    model: nn.Module, rows: _Rows, parameters: dict[str, nn.Parameter], square_norms: _Norms, probes: int, seed: int
) -> _Group:
    """Run one group; its graph lives no longer than this call."""
    logits = _predicted_logits(model, rows)
    if not logits.requires_grad:
        raise IsolossError(f"no trainable parameter of {type(model).__name__} reaches its logits")
    norms, reached = square_norms(logits, rows, list(parameters.values()), probes, seed)
    if not bool(norms.isfinite().all()):
        broken = list(parameters)[int((~norms.isfinite()).nonzero()[0])]
        raise IsolossError(f"batch {int(rows.batch[0])}: the gradient of {broken} is not finite; use a wider dtype")
    return _Group(norms, reached, len(logits), len(rows))


def _predicted_logits(model: nn.Module, rows: _Rows) -> torch.Tensor:
    """Return (P, V): the logits at the predicted positions, row by row."""
    device = device_of(model)
    output = model(**{name: value.to(device) for name, value in rows.inputs.items()}, **rows.constants)
    logits = getattr(output, "logits", None)
    name = type(model).__name__
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise IsolossError(
            f"{name} gives no logits of shape (sequences, positions, vocabulary): is it a language model?"
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", logits.shape[-1])
    if logits.shape[-1] != vocabulary:
        raise IsolossError(
            f"{name} gives {logits.shape[-1]} logits a position for a vocabulary of {vocabulary}: has it an LM head?"
        )
    batch = int(rows.batch[0])
    if logits.shape[:2] != rows.predicted.shape:
        raise IsolossError(
            f"batch {batch}: labels of shape {tuple(rows.predicted.shape)} do not fit logits of {tuple(logits.shape)}"
        )
    selected = logits[rows.predicted.to(logits.device)]
    finite = selected.detach().isfinite().all(dim=1).cpu()
    if not bool(finite.all()):
        row = int(rows.predicted.nonzero()[~finite, 0][0])
        raise IsolossError(
            f"batch {int(rows.batch[row])}: the model's logits are NaN or infinite (sequence {int(rows.sequence[row])})"
        )
    return selected


def _sketched_norms(
    logits: torch.Tensor, rows: _Rows, parameters: list[nn.Parameter], num_probes: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (K,) squared norms of sum_i J_i^T S_i v_i, averaged over probes, and which parameters were reached."""
    log_p = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    root_p = (0.5 * log_p).exp()
    counts = rows.predicted.sum(dim=1).tolist()
    sequences = rows.sequence.tolist()
    total: torch.Tensor | float = 0.0
    for probe in range(num_probes):
        signs = torch.cat(
            [_signs(seed, sequence, probe, (m, logits.shape[1])) for sequence, m in zip(sequences, counts, strict=True)]
        )
        weighted = root_p * signs.to(root_p)
        cotangent = weighted - root_p.square() * weighted.sum(dim=-1, keepdim=True)
        norms, reached = _square_norms(
            logits, cotangent.to(logits.dtype), parameters, retain_graph=probe + 1 < num_probes
        )
        total = total + norms / num_probes
    assert isinstance(total, torch.Tensor)
    return total, reached


def _signs(seed: int, sequence: int, probe: int, shape: tuple[int, int]) -> torch.Tensor:
    """Return `shape` random signs, -1 or 1, of one sequence and probe."""
    generator = seeds.generator(seed, "probes", sequence, probe)
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1


def _sampled_label_norms(
    logits: torch.Tensor, rows: _Rows, parameters: list[nn.Parameter], num_labels: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (K,) squared norms of grad log f(x)_y, averaged over sampled labels y and summed over positions x."""
    generator = seeds.generator(seed, "labels", int(rows.sequence[0]))
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    total = torch.zeros(len(parameters), dtype=torch.float64)
    reached = torch.zeros(len(parameters), dtype=torch.bool)
    for row in log_p:
        labels = torch.multinomial(row.detach().cpu().double().exp(), num_labels, replacement=True, generator=generator)
        for label in labels.tolist():
            norms, reached = _square_norms(row[label], None, parameters, retain_graph=True)
            total += norms / num_labels
    return total, reached


def _square_norms(
    outputs: torch.Tensor, cotangent: torch.Tensor | None, parameters: list[nn.Parameter], *, retain_graph: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (K,) float64 squared norms of the gradients, 0 where a parameter has none, and (K,) which have one."""
    gradients = torch.autograd.grad(outputs, parameters, cotangent, retain_graph=retain_graph, allow_unused=True)
    squares = [
        torch.zeros((), device=outputs.device)
        if gradient is None
        else gradient.to_dense()
        .to(torch.promote_types(gradient.dtype, torch.float32))
        .square()
        .sum()
        .to(outputs.device)
        for gradient in gradients
    ]
    reached = torch.tensor([gradient is not None for gradient in gradients])
    return torch.stack(squares).cpu().double(), reached


# --- the result ------------------------------------------------------------------------------------------------------


def _estimate(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    measured: list[_Group],
    method: str,
    num_probes: int,
    details: dict[str, Any],
    seconds: float,
) -> Estimate:
    if not measured:
        raise IsolossError("there are no batches, so there is nothing to measure")
    sequences = sum(group.sequences for group in measured)
    if len(measured) < 2:
        raise IsolossError(
            f"{sequences} sequences make one group of group_size {details['group_size']}, and an error bar needs at "
            "least two: reduce group_size or give more sequences"
        )
    norms = torch.stack([group.square_norms for group in measured])
    positions = torch.tensor([group.positions for group in measured], dtype=torch.float64)
    value, stderr = statistics.ratio(norms.sum(dim=1), positions)
    reached = torch.stack([group.reached for group in measured]).any(dim=0).tolist()
    by_parameter = (norms.sum(dim=0) / positions.sum()).tolist()
    first = next(iter(parameters.values()))
    return Estimate(
        value=value,
        stderr=stderr,
        samples=len(measured),
        unit=UNIT,
        num_inputs=int(positions.sum()),
        num_probes=num_probes,
        method=method,
        seconds=seconds,
        by_parameter=dict(zip(parameters, by_parameter, strict=True)),
        details={
            "device": str(device_of(model)),
            "dtype": str(first.dtype).removeprefix("torch."),
            "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
            "num_parameters": sum(parameter.numel() for parameter in parameters.values()),
            "parameters_without_gradient": [name for name, hit in zip(parameters, reached, strict=True) if not hit],
            "sequences": sequences,
            **details,
        },
    )


def _checked_probes(method: str, num_probes: int | None) -> int:
    if method not in _METHODS:
        raise IsolossError(f"method is {method!r}; it is one of {', '.join(_METHODS)}")
    probes = _DEFAULT_PROBES[method] if num_probes is None else num_probes
    if probes < 1:
        raise IsolossError(f"num_probes is {probes}; it must be at least 1")
    return probes


def _is_causal(model: nn.Module) -> bool:
    """Decide by the class name, then by the config, whether position t predicts token t + 1."""
    name = type(model).__name__
    if "ForMaskedLM" in name:
        return False
    if "ForCausalLM" in name or (name.endswith("LMHeadModel") and name not in _UNSHIFTED):
        return True
    if getattr(getattr(model, "config", None), "is_decoder", False) is True:
        return True
    raise IsolossError(
        f"{name} does not say whether it predicts masked or next tokens: pass causal=False or causal=True"
    )
