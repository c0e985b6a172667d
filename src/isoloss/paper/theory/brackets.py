"""The bracket language (section 5): the flattest solution of its pre-training task counts, and transfers.

Theorem 5.1, Lemmas G.1 to G.5 and Theorem G.6, as printed and corrected. Shapes: n inputs of T brackets, 2 T the width
of an encoding (`isoloss.lab.languages.brackets.Brackets.encode`), m neurons; downstream, N = 2^T strings. A model is
its `Weights`, with the paper's factor: f = 1/m u^T relu(V h).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.stats import binom

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.brackets import OPEN, Brackets
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.models.bracket_attention import Weights, attend, squares
from isoloss.paper.theory.bracket_settings import LENGTHS, Settings
from isoloss.paper.theory.statements import Statement, counter, mean_and_stderr
from isoloss.statistics.estimate import rounded

UNIT = "squared answers"  # of the loss and of its second derivatives by weights
_TRACE_BLOCK = 1 << 22  # numbers of an (inputs, neurons) table that are held together
RATE = 0.05  # of Adam; it falls to 0 over the second half of the steps
WEIGHTS = (10.0, 1e5)  # of the loss beside trace / bound, at the first and the last step
KEPT = 60  # points of the path that are kept
ZERO = 1e-6  # population loss that counts as 0: a descent leaves some 1e-8, and a head that fails has 0.01 or more
CUTOFF = 1e-9  # fraction of the largest eigenvalue of the strings' products below which an eigenvalue counts as 0
_HEAD_BLOCK = 1 << 23  # numbers of a (training sets, strings, n) table that are held together
TWO, KINKS, FEATURES, BALANCED = "two neurons", "four on kinks", "random features", "features, balanced"
DESCENT, FROM_FEATURES = "descent", "features, descent"
LOSSES = (0.1, 0.01, 1e-9)  # that random features are to reach
EXTRA_FEATURES = 2  # random features, as a multiple of those that fit every input
WIDTHS = (2, 4, 8, 16)  # of the models with the two neurons
MAX_K = 50  # up to which Lemma G.5 is checked
ZERO_LOSS = 1e-9  # squared answers; for solutions that are constructed, not reached by descent
EXACT = 1e-9  # relative error that rounding may leave where something holds exactly
DESCENT_ALLOWED = 0.01  # of the bound
ERRORS = 4.0  # standard errors that a mean loss may be off; there are dozens of them
UNLIKELY = 3e-5  # chance of a frequency so far off: that of 4 standard errors, on one side


@dataclass(frozen=True)
class Inputs:
    """All inputs of a task, equally likely."""

    # (n, 2 T) float64: the sum of the encodings of an input's tokens. Token j is at coordinate j, or at j + T where it
    # is hidden, so that nothing is lost in the sum
    z: torch.Tensor
    y: torch.Tensor  # (n,) float64: the answers g*, the number of `>` minus the number of `<`

    @property
    def length(self) -> int:
        """T."""
        return self.z.shape[1] // 2


def pretraining_inputs(length: int) -> Inputs:
    """Return every sentence with each of its brackets hidden in turn, under both signs that may hide it.

    Example:
        >>> from isoloss.paper.theory.brackets import pretraining_inputs
        >>> len(pretraining_inputs(6).y)  # 2 T C(T, T/2)
        240
    """
    language = _language(length)
    tokens, hidden = each_bracket_hidden(language)
    # `encode` draws the sign that hides a token; which one does not matter, as the other is appended
    z = language.encode(tokens, hidden, generator=torch.Generator())
    y = torch.where(tokens[hidden] == OPEN, 1.0, -1.0).double()
    signs = torch.ones(2 * length, dtype=torch.float64)
    signs[length:] = -1
    return Inputs(torch.cat([z, z * signs]), torch.cat([y, y]))


def downstream_inputs(length: int) -> Inputs:
    """Return all 2^T strings of brackets, none hidden."""
    language, strings = _language(length), torch.cartesian_prod(*[torch.arange(2)] * length)
    return Inputs(language.encode(strings), language.mismatch(strings).double())


def each_bracket_hidden(language: Brackets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every sentence T times, (T C(T, T/2), T), and a mask that hides another bracket each time."""
    sentences = all_sentences(language)[0].tokens
    hidden = torch.eye(language.length, dtype=torch.bool).repeat(len(sentences), 1)
    return sentences.repeat_interleave(language.length, dim=0), hidden


def _language(length: int) -> Brackets:
    if length not in LENGTHS:
        raise IsolossError(f"the length is {length}; it must be {', '.join(map(str, LENGTHS))}, to visit every input")
    return Brackets(length)


@dataclass(frozen=True, kw_only=True)
class Flatness:
    r"""Loss, trace, and why the trace is above the bound: `trace = bound * heads * balance * cancellation * evenness`.

    Each of the four factors is at least 1 where the loss is 0. They are the inequalities (6) to (9) of the paper's
    proof of Lemma G.1, and each is 1 exactly where its condition holds.
    """

    loss: float  # mean squared error
    trace: float  # `2 E |grad f|^2` over Q, K, V and u: the trace of the Hessian of the loss, where that is 0
    bound: float  # `4 / (m sqrt(T))`
    heads: float  # what the gradients of Q and K add
    balance: float  # 1 where every active neuron has `V_i h = |u_i| |h|`: condition (3)
    cancellation: float  # 1 where no two active neurons have different signs of u: condition (4)
    evenness: float  # 1 where the attention is even: condition (5)
    kink: float  # fraction of the inputs that lie on the kink of a neuron

    @property
    def ratio(self) -> float:
        """The trace as a multiple of the bound."""
        return self.trace / self.bound

    @property
    def off_conditions(self) -> float:
        """The largest distance of a factor from 1."""
        return max(abs(each - 1) for each in (self.heads, self.balance, self.cancellation, self.evenness))


def bound(length: int, width: int) -> float:
    """Return 4 / (m sqrt(T)), the least trace at zero loss.

    The paper has sqrt(4 / T) for every m; the two agree at m = 2.
    """
    return 4 / (width * math.sqrt(length))


class Parts(NamedTuple):
    """What a block of inputs adds to the trace and to the steps of the bound; all (n,)."""

    outputs: torch.Tensor  # f
    neurons: torch.Tensor  # `|grad_u f|^2 + |grad_V f|^2`
    attention: torch.Tensor  # `|grad_Q f|^2 + |grad_K f|^2`
    products: torch.Tensor  # `2 / m^2 |h| sum_i |u_i| relu(V_i h)`: the part of `neurons` that no balance removes
    norms: torch.Tensor  # `|h|`, h what the attention gives
    on_kink: torch.Tensor  # whether V_i h = 0 for a neuron with V_i and u_i not 0: the Hessian does not exist


def parts(model: Weights, z: torch.Tensor, *, count_kink: bool = False) -> Parts:
    """Return the squared gradients of f, differentiable by the weights almost everywhere."""
    m = len(model.output)
    by_row = squares(model._replace(output=model.output / m), z, count_kink=count_kink)
    return Parts(
        outputs=by_row.outputs,
        neurons=by_row.output.sum(dim=1) / m**2 + by_row.value.sum(dim=1),
        attention=by_row.query.sum(dim=1) + by_row.key.sum(dim=1),
        products=2 / m * by_row.norms * by_row.terms.sum(dim=1),
        norms=by_row.norms,
        on_kink=by_row.on_kink,
    )


@torch.no_grad()
def flatness(model: Weights, inputs: Inputs, *, count_kink: bool = False) -> Flatness:
    """Return the loss, the trace and its factors, exactly: averaged over every input.

    Example:
        >>> import math
        >>> from isoloss.paper.theory.brackets import flatness, pretraining_inputs, two_neurons
        >>> result = flatness(two_neurons(6, 2), pretraining_inputs(6))
        >>> result.loss < 1e-9, round(result.trace * math.sqrt(6), 9)
        (True, 2.0)
    """
    m = len(model.output)
    # at T = 10 a table of all inputs and random features has 26 million numbers, 0.2 GB, and `parts` makes several
    blocks = [parts(model, z, count_kink=count_kink) for z in torch.split(inputs.z, max(1, _TRACE_BLOCK // m))]
    outputs, neurons, attention, products, norms, on_kink = map(torch.cat, zip(*blocks, strict=True))
    least = bound(inputs.length, m)
    without_cancelling = 2 / m * (norms * outputs.abs()).mean()
    return Flatness(
        loss=float((outputs - inputs.y).square().mean()),
        trace=float(2 * (neurons + attention).mean()),
        bound=least,
        # each side of the inequalities (6) to (9) over the next, so that their product is trace / bound
        heads=float((neurons + attention).mean() / neurons.mean()),
        balance=float(neurons.mean() / products.mean()),
        cancellation=float(products.mean() / without_cancelling),
        evenness=float(2 * without_cancelling / least),
        kink=float(on_kink.double().mean()),
    )


def hessian_trace(model: Weights, inputs: Inputs) -> float:
    """Return the trace of the Hessian of the loss by differentiating it twice, weight by weight; for small models."""
    weights = [each.detach().requires_grad_() for each in model]
    # by `outputs` alone: what else `squares` gives are closed forms, which this is to check
    loss = (parts(Weights(*weights), inputs.z).outputs - inputs.y).square().mean()
    flat = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights, create_graph=True)])
    identity = torch.eye(len(flat), dtype=flat.dtype)
    rows = torch.autograd.grad(flat, weights, identity, is_grads_batched=True)
    return float(torch.cat([row.flatten(start_dim=1) for row in rows], dim=1).trace())


def own_flatness(
    answers: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], theta: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and `2 E |grad f|^2`, the trace where the loss is 0, of `f = answers(theta, z)`: differentiable."""
    found = answers(theta, inputs.z)
    # a column would be subtracted from a row
    if found.shape != inputs.y.shape:
        raise IsolossError(
            f"the answers have the shape {tuple(found.shape)}; it must be ({len(inputs.y)},), one for each input"
        )
    gradients = torch.func.jacrev(answers)(theta, inputs.z)
    return (found - inputs.y).square().mean(), 2 * gradients.square().sum() / len(inputs.y)


def with_even_attention(value: torch.Tensor, output: torch.Tensor) -> Weights:
    """Return the model with (m, 2 T) V, (m,) u and Q = K = 0."""
    nothing = value.new_zeros(1, value.shape[1])
    return Weights(nothing, nothing, value, output)


def two_neurons(length: int, width: int) -> Weights:
    """Return the paper's transferable solution (1): even attention, V_1 = c [1; 0], V_2 = -c [1; 0], f = g* everywhere.

    Any c > 0 gives this function with u_1 = -m T / c and u_2 = m T / c: the attention averages the encodings where the
    paper's neurons read their sum. This is the flattest: it has `c = sqrt(m) T^(3/4)`, where the trace of the Hessian
    is `4 / (m sqrt(T))`. All other weights are 0.
    """
    if width < 2:
        raise IsolossError(f"the solution needs two neurons and the model has {width}")
    value, output = torch.zeros(width, 2 * length).double(), torch.zeros(width).double()
    # condition (3), V_i h = |u_i| |h|, is c / T = (m T / c) / sqrt(T)
    scale = width**0.5 * length**0.75
    value[0, :length], value[1, :length] = scale, -scale
    output[0], output[1] = -width * length / scale, width * length / scale
    return with_even_attention(value, output)


def on_the_kink(length: int) -> Weights:
    r"""Return a solution of four neurons that obeys conditions (3) to (5) and reads more than the answer.

    Let w = [1; 0], so that the answer is -<w, z>, and let v = e_1 + e_{T+1} read the first token: <v, z> is 1 or -1
    on every input, hidden or not. The neurons are c/2 (w + v) and c/2 (w - v), and their negatives. Of the first two,
    one is c and the other 0 wherever <w, z> = 1; so every input lies on a neuron's kink, where relu has no
    derivative. With `>` in the conditions, as the paper writes them, such a neuron does not count; with `>=`, as in
    its inequality (7), it does, and the trace is above the bound.
    """
    w, v = torch.zeros(2, 2 * length, dtype=torch.float64)
    w[:length] = 1
    v[0] = v[length] = 1
    width = 4
    scale = math.sqrt(width) * length**0.75
    value = scale / 2 * torch.stack([w + v, w - v, -w - v, v - w])
    output = width * length / scale * torch.tensor([-1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    return with_even_attention(value, output)


def full_width(length: int) -> int:
    """Return how many random features fit every input exactly: T C(T, T/2) + 2 T.

    Features of z and -z have a sum that is even, `|<V, z>|`, one for each pair of inputs, and a difference that is
    linear in z, with 2 T dimensions. The answer is linear, so the sums must cancel at each of the pairs.
    """
    return length * math.comb(length, length // 2) + 2 * length


def random_features(inputs: Inputs, width: int, *, seed: int) -> Weights:
    """Return the paper's solution (2): V_i normal with covariance T I, u of least loss and, of these, of least norm."""
    least = full_width(inputs.length)
    if width < least:
        raise IsolossError(f"the width is {width}; random features fit every input of {inputs.length} from {least} on")
    value = _values(inputs.length, width, seed)
    rows, targets = _equations(inputs, value)
    # `gels` takes a matrix of full rank, as this is from the full width on, and gives the solution of least norm
    output = torch.linalg.lstsq(rows, targets[:, None], driver="gels").solution[:, 0]
    return with_even_attention(value, output)


@torch.no_grad()
def balanced(model: Weights, inputs: Inputs) -> Weights:
    """Return the same function with the least trace that scaling can give: V_i times s_i, u_i over s_i.

    The model must have Q = K = 0, so that `|h|` is the same for every input.
    """
    h = inputs.z / inputs.length
    values, active = torch.zeros(2, len(model.output), dtype=torch.float64)
    for block in torch.split(h, 512):
        reads = block @ model.value.T
        values += reads.relu().square().sum(dim=0)
        # |h|^2 is 1 / T for every input
        active += (reads > 0).sum(dim=0) / inputs.length
    # s^2 * values + u^2 * active / s^2 is the neuron's part of the trace, up to a factor; it is least at this s
    wanted = (model.output.square() * active / values).pow(0.25)
    # an idle neuron stays as it is
    scale = torch.where((values > 0) & (model.output != 0), wanted, 1.0)
    return with_even_attention(model.value * scale[:, None], model.output / scale)


def losses_by_width(inputs: Inputs, *, seed: int) -> torch.Tensor:
    """Return (w + 1,): the least loss that u can reach over the first 0, 1, ..., w random features, w the full width.

    One orthogonal basis serves every width: feature by feature it takes away a part of the answer.
    """
    rows, targets = _equations(inputs, _values(inputs.length, full_width(inputs.length), seed))
    basis = torch.linalg.qr(rows).Q
    parts = (targets @ basis).square()
    # summed from the last feature on: 1 minus the sum of the first ones would be rounding below the least of LOSSES
    losses = parts.flip(0).cumsum(0).flip(0)
    return torch.cat([losses, torch.zeros(1, dtype=losses.dtype)])


def shifted_signs(k: int) -> torch.Tensor:
    """Return (2k + 1, 2k + 1): Lemma G.5's matrix, the row of k + 1 ones and k minus ones in every cyclic shift."""
    row = torch.cat([torch.ones(k + 1, dtype=torch.float64), -torch.ones(k, dtype=torch.float64)])
    return torch.stack([row.roll(shift) for shift in range(2 * k + 1)])


def _values(length: int, width: int, seed: int) -> torch.Tensor:
    generator = seeds.generator(seed, "brackets", "features", length)
    return math.sqrt(length) * torch.randn(width, 2 * length, generator=generator, dtype=torch.float64)


def _equations(inputs: Inputs, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (full width, m) rows and targets such that |rows @ u - targets|^2 is the loss of u over the features.

    The loss is the sum over pairs z and -z of the squares of the even and of the odd part; the odd part, linear in z,
    is brought to 2 T rows.
    """
    length, width = inputs.length, len(value)
    # z, not -z: entries are 0 and ±1, so the last one that is not 0 decides the sign of their sum with weights 2^i
    pairs = inputs.z[inputs.z @ torch.arange(2 * length).double().exp2() > 0]
    # f = 1/m u^T relu(V z / T), relu(s) = (|s| + s) / 2
    weight = 1 / (2 * width * length * math.sqrt(len(pairs)))
    # |R w| = |pairs @ w| for every w
    triangle = torch.linalg.qr(pairs, mode="r").R
    answer = torch.zeros(2 * length, dtype=torch.float64)
    answer[:length] = -1
    odd = triangle @ value.T
    rows = torch.cat([(pairs @ value.T).abs(), odd]) * weight
    targets = torch.cat([torch.zeros(len(pairs), dtype=torch.float64), triangle @ answer / math.sqrt(len(pairs))])
    return rows, targets


@dataclass(frozen=True, kw_only=True)
class PathPoint:
    """Where the descent is."""

    step: int  # steps taken
    ratio: float  # trace as a multiple of the bound
    loss: float  # mean squared error


def initial(length: int, width: int, *, key_width: int = 1, seed: int) -> Weights:
    """Return random weights with variance 1 / (2 T) for Q, K and V and 1 for u, in float64."""
    generator = seeds.generator(seeds.derive(seed, "brackets", "start", length), "weights")
    query, key, value = (
        torch.randn(rows, 2 * length, generator=generator) / (2 * length) ** 0.5
        for rows in (key_width, key_width, width)
    )
    return Weights(*(each.double() for each in (query, key, value, torch.randn(width, generator=generator))))


def descend(
    model: Weights, inputs: Inputs, *, steps: int, progress: Callable[[], None] | None = None
) -> tuple[Weights, tuple[PathPoint, ...]]:
    """Return the end and the path of Adam on `trace / bound + weight * loss`, the weight growing with the steps.

    The trace is `2 E |grad f|^2`, differentiated once more; the relu's kinks, where it jumps, have no derivative. Each
    step sees all inputs. The model need not solve the task at the start; `progress` is called after every step.
    """
    model = Weights(*(each.clone().requires_grad_() for each in model))
    optimizer = torch.optim.Adam(model, lr=RATE)
    least, path = bound(inputs.length, len(model.output)), []
    first, last = map(math.log, WEIGHTS)
    for step in range(steps):
        fraction = step / steps
        # Adam's steps are as long as its rate however small the gradient, so only a rate that falls to 0 lets it settle
        optimizer.param_groups[0]["lr"] = RATE * min(1, 2 * (1 - fraction))
        at = parts(model, inputs.z)
        ratio = 2 * (at.neurons + at.attention).mean() / least
        loss = (at.outputs - inputs.y).square().mean()
        if step % max(1, steps // KEPT) == 0:
            path.append(PathPoint(step=step, ratio=float(ratio.detach()), loss=float(loss.detach())))
        optimizer.zero_grad()
        (ratio + math.exp(first + fraction * (last - first)) * loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if progress is not None:
            progress()
    return Weights(*(each.detach() for each in model)), tuple(path)


@dataclass(frozen=True, kw_only=True)
class HeadRow:
    """Heads on many training sets of one size."""

    solution: str  # name of the solution whose neurons the heads read
    length: int  # T
    samples: int  # n
    trials: int  # training sets
    failures: float  # fraction of them after which the population loss is not 0
    loss: float  # mean population loss, squared answers; an answer of 0 for every string has loss T
    loss_stderr: float  # its standard error over the training sets
    excess: float  # mean of the loss minus the loss of heads on two neurons after the same training sets
    excess_stderr: float  # its standard error over the training sets, which are paired
    # largest population loss after a training set with answers of both signs; None: there was none
    worst_covered: float | None
    expected: float  # probability that the set lacks a sign

    @property
    def failures_stderr(self) -> float:
        """Standard error of `failures`."""
        return binomial_stderr(self.failures, self.trials)

    @property
    def claimed(self) -> float:
        """The theorem's bound on the probability of failure, 2^-n."""
        return 2.0**-self.samples


def binomial_stderr(frequency: float, trials: int) -> float:
    """Return the standard error of a frequency."""
    return math.sqrt(frequency * (1 - frequency) / trials)


def sign_missing(length: int, samples: int) -> float:
    """Return the probability that n strings have no positive g*, or no negative one: 2 ((1 + p) / 2)^n - p^n.

    p = C(T, T/2) / 2^T is the probability of g* = 0. The theorem's 2^-n holds for one of the signs, where g* is never
    0.
    """
    zero = math.comb(length, length // 2) / 2**length
    # no positive one, or no negative one, each (1 + p) / 2 per string; all 0 would count twice
    return float(2 * ((1 + zero) / 2) ** samples - zero**samples)


@torch.no_grad()
def kernel(model: Weights | torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return (N, N): products of the neurons' outputs, divided by m^2; a head of least norm depends on nothing else.

    Of a model of one's own the (N, m) features are taken as they are.
    """
    if isinstance(model, torch.Tensor):
        if model.ndim != 2 or len(model) != len(inputs.y) or not model.isfinite().all():
            raise IsolossError(
                f"the features have the shape {tuple(model.shape)}; it must be ({len(inputs.y)}, features), a row of "
                "finite numbers for each input"
            )
        return model.double() @ model.double().T
    _, attended = attend(model, inputs.z)
    features = (attended @ model.value.T).relu() / len(model.output)
    return features @ features.T


def population_losses(products: torch.Tensor, answers: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return (k,): the loss over all strings of the head of least norm that fits a training set.

    Among the heads of least training loss it is the one of least norm, so it exists where no head fits. `products`
    (N, N) are those of `kernel`, `answers` (N,) those of all strings, `chosen` (k, n) the strings of each training set.
    """
    size = max(1, _HEAD_BLOCK // (len(answers) * chosen.shape[1]))
    losses = []
    # a block is (k, n): training sets of n strings
    for block in torch.split(chosen, size):
        # (k, n, n). Strings are drawn with replacement and features may be dependent, so that this has no inverse
        values, vectors = torch.linalg.eigh(products[block[:, :, None], block[:, None, :]])
        # relative to all strings, not to the training set: on one whose answers are all 0 two neurons give 0 alone
        is_nonzero = values > CUTOFF * products.diagonal().max()
        parts = (vectors.transpose(1, 2) @ answers[block][:, :, None])[:, :, 0]
        parts = torch.where(is_nonzero, parts / values.where(is_nonzero, 1.0), 0.0)
        weights = (vectors @ parts[:, :, None])[:, :, 0]
        predicted = torch.einsum("knN,kn->kN", products[block], weights)
        losses.append((predicted - answers).square().mean(dim=1))
    return torch.cat(losses)


def try_heads(
    models: Mapping[str, Weights | torch.Tensor], inputs: Inputs, *, samples: int, trials: int, seed: int
) -> list[HeadRow]:
    """Return how heads on `trials` training sets of `samples` strings, drawn with replacement, do on all strings.

    A model is its weights, or the (N, m) features that a model of one's own gives the strings. All models have the
    same training sets, and `excess` compares each with the first: in `study` the two neurons.
    """
    length = inputs.length
    generator = seeds.generator(seed, "brackets", "heads", length, samples)
    chosen = torch.randint(len(inputs.y), (trials, samples), generator=generator)
    signs = inputs.y[chosen].sign()
    covered = (signs > 0).any(dim=1) & (signs < 0).any(dim=1)
    losses = {name: population_losses(kernel(model, inputs), inputs.y, chosen) for name, model in models.items()}
    first = next(iter(losses.values()))
    return [
        HeadRow(
            solution=name,
            length=length,
            samples=samples,
            trials=trials,
            failures=float((each > ZERO).double().mean()),
            loss=float(each.mean()),
            loss_stderr=float(each.std() / math.sqrt(trials)),
            excess=float((each - first).mean()),
            excess_stderr=float((each - first).std() / math.sqrt(trials)),
            worst_covered=float(each[covered].max()) if covered.any() else None,
            expected=sign_missing(length, samples),
        )
        for name, each in losses.items()
    ]


@dataclass(frozen=True, kw_only=True)
class SolutionRow:
    """A solution of the pre-training task."""

    solution: str  # its name
    length: int  # T
    width: int  # m
    flatness: Flatness  # loss, trace and factors; a neuron counts as active where V_i h > 0
    closed_trace: float  # the trace where a neuron with V_i h = 0 counts too
    hessian: float | None  # trace of the Hessian by differentiating the loss twice; None where that was not done
    off_axis: float  # fraction of the neurons' weight, `|u_i| |V_i|`, that is not along [1; 0]
    # the same among the first T coordinates alone, which are all that a string without a hidden token has
    uneven: float


@dataclass(frozen=True, kw_only=True)
class WidthRow:
    """How many random features a length needs."""

    length: int  # T
    inputs: int  # inputs of the pre-training task
    predicted: int  # the width at which they fit every input, by counting equations
    rank: int  # rank of the inputs whose answer is 1; 2 T if conditions (3) and (4) leave one direction only
    widths: tuple[float, ...]  # mean least width at which the loss is at most each of `LOSSES`
    widths_stderr: tuple[float, ...]  # their standard errors over the draws
    norm: float  # `|u|^2 / T^2` of the solution, which Theorem G.6 bounds by a constant
    features: int  # the width of that solution


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `study`."""

    solutions: tuple[SolutionRow, ...]  # one row for each solution and length
    heads: tuple[HeadRow, ...]  # one for each solution, length and size of training set
    widths: tuple[WidthRow, ...]  # one for each length
    paths: dict[int, tuple[PathPoint, ...]]  # by length: the descent from random weights
    ranks: dict[int, int]  # by k: the rank of Lemma G.5's matrix of 2k + 1 shifted rows


def study(settings: Settings, *, progress: Callable[[int], None] | None = None) -> Result:
    """Make every solution, measure it, descend on the trace, and fit heads downstream.

    `progress` is called with the number of descents' steps that are done, of `settings.num_steps`.
    """
    steps, seed, count = settings.steps, settings.seed, counter(progress)
    rows: list[SolutionRow] = []
    tried: list[HeadRow] = []
    widths: list[WidthRow] = []
    paths: dict[int, tuple[PathPoint, ...]] = {}
    for length in settings.lengths:
        inputs = pretraining_inputs(length)
        features = random_features(inputs, EXTRA_FEATURES * full_width(length), seed=seed)
        rescaled = balanced(features, inputs)
        widths.append(_width_row(settings, inputs, features))
        rows += [_solution_row(TWO, two_neurons(length, width), inputs, differentiate=width == 2) for width in WIDTHS]
        kinks = on_the_kink(length)
        made = {KINKS: kinks, FEATURES: features, BALANCED: rescaled}
        rows += [_solution_row(name, model, inputs) for name, model in made.items()]
        start = initial(length, settings.width, seed=seed)
        end, paths[length] = descend(start, inputs, steps=steps, progress=count)
        rows.append(_solution_row(DESCENT, end, inputs))
        models = {TWO: two_neurons(length, 2), DESCENT: end, KINKS: kinks, BALANCED: rescaled}
        strings, draws = downstream_inputs(length), {"trials": settings.trials, "seed": seed}
        by_size = [try_heads(models, strings, samples=n, **draws) for n in settings.samples]
        tried += itertools.chain.from_iterable(zip(*by_size, strict=True))  # by solution, then by n
        if length == settings.lengths[0]:
            rows.append(_solution_row(FROM_FEATURES, descend(rescaled, inputs, steps=steps, progress=count)[0], inputs))
    ranks = {k: int(torch.linalg.matrix_rank(shifted_signs(k))) for k in range(1, MAX_K + 1)}
    return Result(solutions=tuple(rows), heads=tuple(tried), widths=tuple(widths), paths=paths, ranks=ranks)


def _solution_row(name: str, model: Weights, inputs: Inputs, *, differentiate: bool = False) -> SolutionRow:
    return SolutionRow(
        solution=name,
        length=inputs.length,
        width=len(model.output),
        flatness=flatness(model, inputs),
        closed_trace=flatness(model, inputs, count_kink=True).trace,
        hessian=hessian_trace(model, inputs) if differentiate else None,
        off_axis=_off_axis(model, 2 * inputs.length),
        uneven=_off_axis(model, inputs.length),
    )


@torch.no_grad()
def _off_axis(model: Weights, coordinates: int) -> float:
    """Return the fraction of |u_i| |V_i|, V_i cut to its first coordinates, that is not along [1; 0]."""
    value, length = model.value[:, :coordinates], model.value.shape[1] // 2
    rest = value.clone()
    # a row's projection on [1; 0] is its mean over the first T coordinates, in each of these
    rest[:, :length] -= rest[:, :length].mean(dim=1, keepdim=True)
    weight = model.output.abs()
    return float(weight @ rest.norm(dim=1) / (weight @ value.norm(dim=1)))


def _width_row(settings: Settings, inputs: Inputs, features: Weights) -> WidthRow:
    length = inputs.length
    needed: list[list[int]] = []
    for draw in range(settings.draws):
        losses = losses_by_width(inputs, seed=seeds.derive(settings.seed, "brackets", "widths", draw))
        needed.append([int((losses <= least).nonzero()[0]) for least in LOSSES])
    means, errors = zip(*map(mean_and_stderr, zip(*needed, strict=True)), strict=True)
    return WidthRow(
        length=length,
        inputs=len(inputs.y),
        predicted=full_width(length),
        rank=int(torch.linalg.matrix_rank(inputs.z[inputs.y > 0])),
        widths=means,
        widths_stderr=errors,
        norm=float(features.output.square().sum()) / length**2,
        features=len(features.output),
    )


def judge(result: Result) -> list[Statement]:
    """Return the statements with their verdicts."""
    return [*_on_traces(result), *_on_conditions(result), *_downstream(result), *_on_width(result)]


def _on_traces(result: Result) -> list[Statement]:
    two = _rows(result, TWO)
    narrow = [row for row in two if row.width == 2]
    wide = [row for row in two if row.width > 2]
    constructed = [*two, *_rows(result, FEATURES), *_rows(result, BALANCED)]
    smooth = [row for row in result.solutions if row.solution != KINKS]
    largest = max(row.flatness.loss for row in constructed)
    gap = max(abs((row.hessian or 0.0) / row.flatness.trace - 1) for row in narrow)
    exact = max(abs(row.flatness.ratio - 1) for row in wide)
    at_two = max(abs(row.flatness.trace * math.sqrt(row.length) / 2 - 1) for row in narrow)
    # at a loss L, E|f| >= 1 - sqrt(L), and the bound holds times this; a solution on its kinks has no Hessian to bound
    below = min(row.flatness.ratio / (1 - math.sqrt(row.flatness.loss)) for row in smooth)
    lowest = min(row.flatness.trace * math.sqrt(row.length) / 2 for row in wide)
    example = wide[-1]
    ends = [*_rows(result, DESCENT), *_rows(result, FROM_FEATURES)]
    off = [f"{100 * (row.flatness.ratio - 1):+.4f} % (T = {row.length}, m = {row.width})" for row in ends]
    end_loss, off_axis = max(row.flatness.loss for row in ends), max(row.off_axis for row in ends)
    factors = [
        f"{row.flatness.ratio:.1f} ({other.flatness.ratio:.1f} once balanced) at T = {row.length}"
        for row, other in zip(_rows(result, FEATURES), _rows(result, BALANCED), strict=True)
    ]
    return [
        Statement(
            text="Both solutions, two neurons and random features, have zero loss.",
            evidence=f"largest loss {largest:.1e}; {ZERO_LOSS:.0e} allowed",
            shown=largest <= ZERO_LOSS,
        ),
        Statement(
            text="Lemma G.4, corrected: at zero loss the trace of the Hessian is 2 E|grad f|^2; the paper lacks the 2.",
            evidence=f"two neurons, the loss differentiated twice: relative gap {gap:.1e}; {EXACT:.0e} allowed",
            shown=gap <= EXACT,
        ),
        Statement(
            text="Lemma G.1 as printed: at zero loss the trace is at least sqrt(4/T) for every m >= 2.",
            evidence=f"m = {example.width} with two neurons has {example.flatness.trace:.4g} at T = {example.length}, "
            f"where sqrt(4/T) is {math.sqrt(4 / example.length):.4g}; the lowest has {lowest:.4g} of that",
            shown=lowest >= 1 - EXACT,
            contradicted=lowest < 1 - EXACT,
        ),
        Statement(
            text="Lemma G.1, corrected: the trace is at least 4 / (m sqrt(T)); two neurons reach it at every width.",
            evidence=f"two neurons: off by {at_two:.1e} from 2 / sqrt(T) at m = 2 and by {exact:.1e} from the bound at "
            f"m = {', '.join(map(str, sorted({row.width for row in wide})))}, {EXACT:.0e} allowed; the lowest of all "
            f"solutions, allowing for its loss, has {below:.9f} of the bound",
            shown=at_two <= EXACT and exact <= EXACT and below >= 1 - EXACT,
        ),
        Statement(
            text="Random features are sharper than two neurons in a model of the same width.",
            evidence=f"trace as a multiple of the bound for the same width: {', '.join(factors)}",
            shown=all(row.flatness.ratio > 1 + DESCENT_ALLOWED for row in _rows(result, BALANCED)),
        ),
        Statement(
            text="Descent on the trace, from random weights and from random features, ends at the bound, with all "
            "neurons along [1; 0].",
            evidence=f"trace off the bound by {', '.join(off)}, {100 * DESCENT_ALLOWED:g} % allowed; loss "
            f"{end_loss:.1e}, {ZERO_LOSS:.0e} allowed; {100 * off_axis:.2g} % of the weight elsewhere, "
            f"{100 * DESCENT_ALLOWED:g} % allowed",
            shown=all(abs(row.flatness.ratio - 1) <= DESCENT_ALLOWED for row in ends)
            and end_loss <= ZERO_LOSS
            and off_axis <= DESCENT_ALLOWED,
        ),
    ]


def _on_conditions(result: Result) -> list[Statement]:
    two, features, kinks = _rows(result, TWO), _rows(result, FEATURES), _rows(result, KINKS)
    held = max(row.flatness.off_conditions for row in two)
    broken = min(min(row.flatness.balance, row.flatness.cancellation) for row in features)
    obeyed = max(row.flatness.off_conditions for row in kinks)
    away = min(row.uneven for row in kinks)
    closed = min(row.closed_trace / row.flatness.bound for row in kinks)
    full = sum(rank == 2 * k + 1 for k, rank in result.ranks.items())
    ranks = [f"{row.rank} of {2 * row.length} (T = {row.length})" for row in result.widths]
    return [
        Statement(
            text="Conditions (3) to (5) hold for two neurons; random features break (3) and (4).",
            evidence=f"factors of the trace over the bound: those of two neurons are off 1 by {held:.1e}, {EXACT:.0e} "
            f"allowed; those of random features for (3) and (4) are at least {broken:.2f}",
            shown=held <= EXACT and broken > 1 + DESCENT_ALLOWED,
        ),
        Statement(
            text="Lemma G.3 as printed: conditions (3) to (5), with > 0 for an active neuron, leave only neurons whose "
            "first T coordinates are equal.",
            evidence=f"four neurons obey them, to {obeyed:.1e}, and reach the bound at zero loss with "
            f"{100 * away:.0f} % of these coordinates' weight uneven; each input lies on a kink, and counting "
            f">= 0 their trace is {closed:.3g} times the bound",
            # one solution that obeys the conditions and is uneven contradicts the lemma
            shown=not (obeyed <= EXACT and away > DESCENT_ALLOWED),
            contradicted=obeyed <= EXACT and away > DESCENT_ALLOWED,
        ),
        Statement(
            text="Lemma G.3, corrected: where no input lies on a kink, so that the Hessian exists, all neurons lie "
            "along [1; 0].",
            evidence="each neuron is then one constant on all inputs of one answer, and these have rank "
            f"{', '.join(ranks)}, so that it has one direction",
            shown=all(row.rank == 2 * row.length for row in result.widths),
        ),
        Statement(
            text="Lemma G.5: all cyclic shifts of a row of k + 1 ones and k minus ones have full rank.",
            evidence=f"k from 1 to {max(result.ranks)}: rank 2k + 1 for {full} of {len(result.ranks)}",
            shown=full == len(result.ranks),
        ),
    ]


def _downstream(result: Result) -> list[Statement]:
    two = [row for row in result.heads if row.solution == TWO]
    worst = max((row.worst_covered for row in two if row.worst_covered is not None), default=math.inf)
    last = {row.length: row for row in two}
    above = [row for row in two if _chance_of_more(row, row.claimed) < UNLIKELY]
    chances = [chance(row, row.expected) for row in two for chance in (_chance_of_more, _chance_of_fewer)]
    within = min(chances) >= UNLIKELY
    # of fewer than 10 failures the frequency is known too badly to be the example
    clearest = max(two, key=lambda row: row.failures / row.claimed if row.failures * row.trials >= 10 else 0.0)
    balanced_heads = {(row.length, row.samples): row for row in result.heads if row.solution == BALANCED}
    pairs = [(row, balanced_heads[row.length, row.samples]) for row in last.values()]
    losses = [f"{other.loss:.3g} against {row.loss:.3g} at T = {row.length}" for row, other in pairs]
    # a descent ends at the two neurons
    others = [row for row in result.heads if row.solution in (KINKS, BALANCED)]
    better = [row for row in others if row.excess < -ERRORS * row.excess_stderr]
    example = ""
    if better:
        best = min(better, key=lambda row: row.excess / row.excess_stderr)
        example = (
            f"; most clearly {best.solution}: {best.loss:.3g} at T = {best.length} and n = {best.samples}, lower by "
            f"{rounded(-best.excess, best.excess_stderr)}"
        )
    return [
        Statement(
            text="Theorem 5.1: on top of two neurons, the head of least norm is right on every string once its "
            "training set has positive and negative answers.",
            evidence=f"largest population loss after such a training set {worst:.1e}; {ZERO_LOSS:.0e} allowed",
            shown=worst <= ZERO_LOSS,
        ),
        Statement(
            text="Theorem 5.1 as printed: it fails with probability at most 2^-n.",
            evidence=f"{100 * clearest.failures:.2f} ± {100 * clearest.failures_stderr:.2f} % fail at T = "
            f"{clearest.length} and n = {clearest.samples}, where 2^-n is "
            f"{clearest.claimed:.3g}; {len(above)} of {len(two)} frequencies are so far above it that the chance of "
            f"that many failures is below {UNLIKELY:.0e} (exact binomial)",
            shown=not above,
            contradicted=bool(above),
        ),
        Statement(
            text="Theorem 5.1, corrected: it fails with probability 2 ((1 + p) / 2)^n - p^n, p = C(T, T/2) / 2^T the "
            "probability that an answer is 0.",
            evidence=f"{'all' if within else 'not all'} of {len(two)} frequencies are where the chance of as many "
            f"failures, and of as few, is at least {UNLIKELY:.0e} (exact binomial)",
            shown=within,
        ),
        Statement(
            text="Random features do not transfer as well as two neurons.",
            evidence=f"mean population loss at n = {pairs[0][0].samples}: {', '.join(losses)}; {ERRORS:g} standard "
            "errors of the difference, paired by training set, needed",
            shown=all(other.excess > ERRORS * other.excess_stderr for _, other in pairs),
        ),
        Statement(
            text="No other solution transfers better than two neurons.",
            evidence=f"{len(better)} of {len(others)} mean population losses of other solutions are lower by more than "
            f"{ERRORS:g} standard errors of the difference, paired by training set{example}",
            shown=all(row.excess > ERRORS * row.excess_stderr for row in others),
            contradicted=bool(better),
        ),
    ]


def _chance_of_more(row: HeadRow, probability: float) -> float:
    """Return the chance of at least as many failures, if each has this probability."""
    return float(binom.sf(round(row.failures * row.trials) - 1, row.trials, probability))


def _chance_of_fewer(row: HeadRow, probability: float) -> float:
    """Return the chance of at most as many failures, if each has this probability."""
    return float(binom.cdf(round(row.failures * row.trials), row.trials, probability))


def _on_width(result: Result) -> list[Statement]:
    widths = result.widths
    counts = [f"{row.widths[-1]:g} of {row.predicted} predicted (T = {row.length})" for row in widths]
    norms = [f"{row.norm:.3g} for m = {row.features}" for row in widths]
    each = [f"{row.norm / row.features:.3g}" for row in widths]
    floor = min(row.norm * row.length**2 / row.features for row in widths)
    return [
        Statement(
            text="Theorem G.6, sharpened: random features solve the task exactly from T C(T, T/2) + 2T neurons on, and "
            "no earlier.",
            evidence=f"least width at loss {LOSSES[-1]:.0e}: {', '.join(counts)}",
            shown=all(row.widths[-1] == row.predicted and row.widths_stderr[-1] == 0 for row in widths),
        ),
        Statement(
            text="Theorem G.6 as printed: |u|^2 is at most a constant times T^2.",
            evidence=f"|u|^2 / T^2 is {', '.join(norms)}. As f has the factor 1 / m, |u|^2 cannot be below 2m, so that "
            f"only |u|^2 / (m T^2) stays bounded: {', '.join(each)}",
            # |f| = 1 and E relu(v h)^2 = 1/2 need |u|^2 >= 2m, by Cauchy and Schwarz
            shown=floor < 2,
            contradicted=floor >= 2,
        ),
    ]


def _rows(result: Result, name: str) -> list[SolutionRow]:
    return [row for row in result.solutions if row.solution == name]
