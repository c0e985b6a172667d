"""The estimators that benchmarks/flatness.py compares: each gives the trace of one batch of sequences in one call."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from workloads import MASK, Batch, Workload

from isoloss.flatness._ghost.engine import GhostNorms
from isoloss.flatness.fisher import fisher_trace
from isoloss.text.masking import IGNORED

PEERS = {"curvlinops": "curvlinops-for-pytorch", "PyHessian": "PyHessian", "hessian-eigenthings": "hessian-eigenthings"}
FISHER, HESSIAN = "Fisher = Gauss-Newton", "true Hessian on given labels: another quantity"
OURS, PAPER = "isoloss", "paper's estimator, 1 label"
MANY_LABELS = 50  # the paper's, appendix B.1
MATVECS = 9  # of Hutch++
POOL = 16  # sequences that are read for each one that is measured
POOLED = f"{OURS}, {POOL} more sequences read for each"
_POOL_BATCH = 512
BATCHES_OF = ", batches of "
# Sequences of a peer's call. A call draws its signs once, so that small batches spread less for the time they take,
# until what each call costs by itself weighs more. Where that is depends on the model: the tables show the best.
PEER_BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Call:
    """What one call gave: the value and, where it comes from sequences one by one, its standard error by itself."""

    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Contender:
    """An estimator.

    Attributes:
        name: What the tables call it.
        quantity: What it estimates.
        sequences: How many it takes in the calls that its spread is measured with.
        by_sequence: Whether its value is a mean over independent sequences, with their signs or labels.
        run: Computes the trace on batches with a seed.
        share: Of the repetitions: fewer for what takes long, more for what is quick and varies much.
        one_by_one: Whether it takes the sequences one at a time, so that its memory does not depend on their number.
    """

    name: str
    quantity: str
    sequences: int
    by_sequence: bool
    run: Callable[[Workload, list[Batch], int], Call]
    share: float = 1.0
    one_by_one: bool = False


def installed(peer: str) -> bool:
    """Return whether a peer is installed, by its distribution."""
    try:
        importlib.metadata.version(PEERS[peer])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def ours(workload: Workload, batches: list[Batch], seed: int) -> Call:
    """Run `fisher_trace` as it is by default: one probe."""
    estimate = fisher_trace(workload.model, batches, seed=seed)
    return Call(estimate.value, estimate.stderr)


def pooled(workload: Workload, batches: list[Batch], seed: int) -> Call:
    """Run `fisher_trace` with a pool, the same one for the same batches; it is drawn here, so that its time counts."""
    ids = torch.cat([batch["input_ids"] for batch in batches])
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    pool = workload.batches(POOL * len(ids), _POOL_BATCH, "pool", digest)
    estimate = fisher_trace(workload.model, batches, seed=seed, auxiliary_sample=pool)
    return Call(estimate.value, estimate.stderr)


def paper(labels: int) -> Callable[[Workload, list[Batch], int], Call]:
    """Return the paper's estimator: each sequence by itself, with so many sampled labels a position."""

    def run(workload: Workload, batches: list[Batch], seed: int) -> Call:
        estimate = fisher_trace(workload.model, batches, method="paper", num_probes=labels, seed=seed)
        return Call(estimate.value, estimate.stderr)

    return run


class _Logits(nn.Module):
    """A model from token ids alone to the logits at the predicted positions, as the peers want it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self._causal = workload.model, workload.causal

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids).logits
        if self._causal:
            return logits[:, :-1].flatten(0, 1)
        return logits[torch.arange(len(ids)), (ids == MASK).int().argmax(dim=1)]


def _pair(workload: Workload, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and targets of the one batch that the peers get."""
    (batch,) = batches
    labels = batch["labels"]
    targets = labels[:, 1:].flatten() if workload.causal else labels[labels != IGNORED]
    return batch["input_ids"], targets


def curvlinops(workload: Workload, batches: list[Batch], seed: int, *, matvecs: int = 1) -> Call:
    """Run Hutchinson, or Hutch++ where there are several products, on curvlinops' Gauss-Newton operator."""
    from curvlinops import GGNLinearOperator, hutchinson_trace, hutchpp_trace

    torch.manual_seed(seed)
    model, (ids, targets) = _Logits(workload), _pair(workload, batches)
    operator = GGNLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(ids, targets)],
        check_deterministic=False,
        num_data=len(ids),
    )
    estimate = hutchinson_trace(operator, 1) if matvecs == 1 else hutchpp_trace(operator, matvecs)
    return Call(float(estimate))


def eigenthings(workload: Workload, batches: list[Batch], seed: int, *, matvecs: int = 1) -> Call:
    """Run Hutchinson, or Hutch++ where there are several products, on hessian-eigenthings' Gauss-Newton operator."""
    from hessian_eigenthings.algorithms.trace import trace
    from hessian_eigenthings.operators.ggn import GGNOperator

    loss = nn.CrossEntropyLoss()
    operator = GGNOperator(
        _Logits(workload),
        [_pair(workload, batches)],
        lambda model, batch: model(batch[0]),
        lambda logits, batch: loss(logits, batch[1]),
    )
    method = "hutchinson" if matvecs == 1 else "hutch++"
    return Call(float(trace(operator, num_matvecs=matvecs, method=method, seed=seed).estimate))


def pyhessian(workload: Workload, batches: list[Batch], seed: int) -> Call:
    """Run one probe of PyHessian."""
    from pyhessian import hessian

    torch.manual_seed(seed)
    model = _Logits(workload)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reference cycle that it makes
        value = hessian(model, nn.CrossEntropyLoss(), data=_pair(workload, batches), cuda=False).trace(maxIter=1)[0]
    for parameter in model.parameters():
        parameter.grad = None  # breaks the cycle
    return Call(float(value))


def _plus_plus(run: Callable[..., Call]) -> Callable[[Workload, list[Batch], int], Call]:
    return lambda workload, batches, seed: run(workload, batches, seed, matvecs=MATVECS)


def plain_loop(workload: Workload, batches: list[Batch], seed: int) -> Call:
    """Run what one writes without a library: one backward pass for a batch, to labels that the model draws.

    Their gradients at the positions are independent and have mean zero, so that the squared norm of their sum has the
    mean of the sum of the squared norms.
    """
    (batch,) = batches
    logits = _Logits(workload)(batch["input_ids"])
    labels = torch.multinomial(logits.softmax(dim=-1), 1, generator=torch.Generator().manual_seed(seed))
    nn.functional.cross_entropy(logits, labels[:, 0], reduction="sum").backward()
    value = sum(float(p.grad.square().sum()) for p in workload.model.parameters() if p.grad is not None)
    workload.model.zero_grad()
    return Call(value / len(labels))


def training_pass(workload: Workload, batches: list[Batch], seed: int = 0) -> Call:
    """Run an ordinary forward and backward pass to all parameters: the floor."""
    for batch in batches:
        workload.model(**batch).loss.backward()
        workload.model.zero_grad()
    return Call(math.nan)


def contenders(*, causal: bool) -> tuple[list[Contender], list[str]]:
    """Return the estimators that can run, ours and the paper's first, and the names of the peers that are missing.

    A peer gets a fresh batch with each probe, of each of the sizes: many probes of one large batch, as they are mostly
    used, would need more time.
    """
    found = [
        Contender(OURS, FISHER, 256 if causal else 512, True, ours),
        Contender(POOLED, FISHER, 256 if causal else 512, True, pooled),
        Contender(PAPER, FISHER, 4 if causal else 16, True, paper(1), one_by_one=True),
    ]
    name = f"paper's estimator, {MANY_LABELS} labels"
    share = 1 / 12 if causal else 1 / 3  # at all positions a call takes minutes
    found.append(Contender(name, FISHER, 4 if causal else 16, True, paper(MANY_LABELS), share, one_by_one=True))
    products = f"Hutch++, {MATVECS} products"
    ways: list[tuple[str, str, Callable[[Workload, list[Batch], int], Call]]] = [("a plain loop", FISHER, plain_loop)]
    if installed("curvlinops"):
        ways += [("curvlinops, GGN, Hutchinson", FISHER, curvlinops)]
        ways += [(f"curvlinops, GGN, {products}", FISHER, _plus_plus(curvlinops))]
    if installed("hessian-eigenthings"):
        ways += [("hessian-eigenthings, GGN, Hutchinson", FISHER, eigenthings)]
        ways += [(f"hessian-eigenthings, GGN, {products}", FISHER, _plus_plus(eigenthings))]
    if installed("PyHessian"):
        ways += [("PyHessian, Hutchinson", HESSIAN, pyhessian)]
    for way, quantity, run in ways:
        if causal and "++" in way:
            continue  # too dear at all positions
        share = 1 / 3 if "++" in way else 6.0  # one call is one draw, so that the spread takes many
        for size in PEER_BATCHES:
            found.append(Contender(f"{way}{BATCHES_OF}{size}", quantity, size, False, run, share))
    return found, [peer for peer in PEERS if not installed(peer)]


def exact_trace(workload: Workload, batch: Batch) -> float:
    """Return the Fisher's trace of a batch by enumeration: every label at every predicted position.

    The sum over labels c of p_c ||J^T (e_c - p)||^2, position after position.
    """
    total = 0.0
    with GhostNorms(workload.model, causal=workload.causal) as predictor:
        predictions = predictor.forward(batch)
        p = predictions.logits.detach().softmax(dim=-1)
        each = len(p) // predictions.num_sequences  # the same number of positions in every sequence
        for position in range(each):
            rows = torch.arange(position, len(p), each)
            for label in range(p.shape[1]):
                cotangent = torch.zeros_like(p)
                cotangent[rows] = -p[rows]
                cotangent[rows, label] += 1
                cotangent[rows] *= p[rows, label, None].sqrt()
                total += float(predictor.squared_norms(predictions, cotangent).by_column.sum())
    return total / len(p)
