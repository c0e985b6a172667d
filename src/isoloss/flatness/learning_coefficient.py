"""The local learning coefficient, a measure of the volume of weights around the model with nearly the same loss.

Shapes: C chains of D draws. The example measures the model and the batches of the example of
`isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness.sharpness import refuse_half_precision, weights_restored
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate

_LARGEST_R_HAT = 1.05
_FEWEST_DRAWS = 100  # effective ones
_SAME = 0.05  # of the value: a smaller difference of the two step sizes does not matter
_ERRORS = 3.0  # standard errors: a larger difference is not chance


def local_learning_coefficient(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    localization: float = 300.0,
    step_size: float = 3e-4,
    num_chains: int = 4,
    num_draws: int = 350,
    burn_in: int = 100,
    seed: int = 0,
    causal: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Estimate:
    """Estimate the local learning coefficient by stochastic gradient Langevin dynamics (Lau et al. 2023).

    With L the mean loss per predicted token over n sequences and w* the given weights, the coefficient is `n beta
    (E[L(w)] - L(w*))`. The inverse temperature is `beta = 1 / log n`, and the mean is over weights with a density
    proportional to `exp(-n beta L(w) - gamma / 2 |w - w*|^2)` (arXiv:2308.12108, section 4). At a minimum of a
    quadratic loss with Hessian eigenvalues h_i, it is `sum_i n beta h_i / (n beta h_i + gamma) / 2`: half the number of
    parameters that the localization gamma leaves free. Where the loss is flatter than quadratic, it is smaller.

    A step of size epsilon is `-epsilon / 2 (n beta grad L_b(w) + gamma (w - w*)) + sqrt(epsilon) noise`, with L_b the
    mean loss of one of the batches, drawn at random. A draw is `L_b(w) - L_b(w*)`, so the level of the batch's own loss
    cancels.

    Chains that have not converged give values that depend on the settings. There is therefore no estimate unless split
    R-hat over chains is at most 1.05 and there are at least 100 effective draws (Gelman et al. 2013, Bayesian Data
    Analysis, sections 11.4 and 11.5), at this step size and at half of it with twice as many draws, and the two values
    are within 5 %, or 3 errors, of each other. The value returned is the one at half the step size. The defaults are
    for small models on 512 sequences: chains mix in about `2 / (step_size gamma)` steps where the loss is flat, and the
    error of a step grows with `step_size (gamma + n beta h)` for the largest eigenvalue h, about 0.3 there. A sharper
    model or more sequences need a smaller step and as many times more draws.

    Args:
        model: As for `fisher_trace`, with any attention. Its weights are moved, and set back bit for bit.
        batches: As for `fisher_trace`; the labels' values count. The value depends on the total number of sequences,
            through beta, and hardly on the batch size. All are kept in memory.
        localization: gamma, which keeps the chains near the weights.
        step_size: epsilon.
        num_chains: C, at least 2. All begin at the given weights.
        num_draws: D, the steps of a chain that count; at least 4.
        burn_in: Steps of a chain before its draws.
        seed: Decides batches and noise. The noise differs between devices.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        progress: Called with the number of chains done, of `2 num_chains`.

    Returns:
        The coefficient, which has no unit. Its error covers the draws (their variance over the number of effective
        draws) and the step size (the difference of the two values), but not the choice of inputs. The details have
        `r_hat`, `effective_draws` and `at_step`, the value and error at the full step size.

    Raises:
        IsolossError: The chains have not converged, or a loss is not finite; an argument is out of its range, a batch
            does not fit, there are fewer than 2 sequences, or the weights are in half precision.

    Example:
        >>> from isoloss.errors import IsolossError
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import local_learning_coefficient
        >>> model, batches = tiny_bert()
        >>> try:
        ...     found = local_learning_coefficient(model, batches, num_draws=10, burn_in=0)
        ... except IsolossError as error:
        ...     print(str(error).split(":")[0])
        the chains have not converged
    """
    for name, number in (("localization", localization), ("step_size", step_size)):
        if not 0 < number < math.inf:
            raise IsolossError(f"{name} is {number}; it must be more than 0 and finite")
    for name, count, least in (("num_chains", num_chains, 2), ("num_draws", num_draws, 4), ("burn_in", burn_in, 0)):
        if count < least:
            raise IsolossError(f"{name} is {count}; it must be at least {least}")
    loss = MeanLoss(model, batches, causal=causal)
    refuse_half_precision(loss)
    if loss.num_sequences < 2:
        raise IsolossError("the inverse temperature 1 / log n needs at least 2 sequences")
    level, heat = loss.value(), loss.num_sequences / math.log(loss.num_sequences)
    parts = [batch.checked for batch in loss.batches if batch.checked.predicts]
    # batches by their predictions: then the mean of their losses is L
    weights = torch.tensor([len(batch.targets) for batch in parts], dtype=torch.float64)
    parameters: list[torch.Tensor] = [*loss.parameters.values()]
    with loss.training() as of_batch:
        before = [of_batch(batch)[0] for batch in parts]

    def rises_of(size: float, skipped: int, kept: int, *names: int) -> torch.Tensor:
        """Return (kept,) float64: the rises of a chain, whose random numbers are called `names`."""
        rises = []
        generator = seeds.generator(seed, "llc batches", *names)
        order = torch.multinomial(weights, skipped + kept, replacement=True, generator=generator).tolist()
        noise = torch.Generator(device_of(model)).manual_seed(seeds.derive(seed, "llc", *names))
        with weights_restored(loss.parameters.values()) as originals, loss.training() as of_batch:
            for number in order:
                value, gradients = of_batch(parts[number])
                if not math.isfinite(value):
                    raise IsolossError(f"a chain's loss is not finite at the step size {size:g}: take a smaller one")
                rises.append(value - before[number])
                drawn = torch.randn(loss.num_parameters, generator=noise, device=noise.device)
                with torch.no_grad():
                    # as one: a small model's time is all overhead
                    torch._foreach_lerp_(parameters, originals, size / 2 * localization)
                    torch._foreach_add_(parameters, [*gradients], alpha=-size / 2 * heat)
                    torch._foreach_add_(parameters, loss.split(drawn), alpha=math.sqrt(size))
        return torch.tensor(rises[skipped:], dtype=torch.float64)

    runs = []
    for number, times in enumerate((1, 2)):
        chains = []
        for chain in range(num_chains):
            chains.append(rises_of(step_size / times, times * burn_in, times * num_draws, times, chain))
            if progress is not None:
                progress(number * num_chains + chain + 1)
        runs.append(chain_mean(heat * torch.stack(chains)))
    whole, half = runs
    # to first order in the step, what is still wrong at half of it
    apart = abs(whole.value - half.value)
    alike = apart <= max(_SAME * abs(half.value), _ERRORS * math.hypot(whole.stderr, half.stderr))
    mixed = all(run.r_hat <= _LARGEST_R_HAT and run.effective_draws >= _FEWEST_DRAWS for run in runs)
    if not (alike and mixed):
        values, hats, draws = (
            " and ".join(format(getattr(run, name), form) for run in runs)
            for name, form in (("value", ".4g"), ("r_hat", ".3f"), ("effective_draws", ".0f"))
        )
        raise IsolossError(
            f"the chains have not converged: at the step size {step_size:g} and half of it, the values are {values}, "
            f"R-hat {hats} (at most {_LARGEST_R_HAT}), and the effective draws {draws} (at least {_FEWEST_DRAWS}): "
            f"take {'more draws and a longer burn-in, or a stronger localization' if alike else 'a smaller step'}"
        )
    return Estimate(
        value=half.value,
        stderr=math.hypot(half.stderr, apart),
        samples=int(half.effective_draws),
        unit="learning coefficient",
        num_predictions=loss.num_positions,
        num_probes=num_chains,
        method="local learning coefficient, stochastic gradient Langevin dynamics",
        details={
            **loss.details(seed),
            **{"localization": localization, "step_size": step_size, "draws": num_draws, "burn_in": burn_in},
            "inverse_temperature": heat,
            "loss": level,
            "r_hat": half.r_hat,
            "effective_draws": half.effective_draws,
            "at_step": [whole.value, whole.stderr],
            "clusters": "effective draws",
            "error_covers": "draws and the length of the step, given these inputs",
        },
    )


class ChainMean(NamedTuple):
    """The mean over chains, and how far it can be trusted."""

    value: float
    stderr: float
    r_hat: float  # standard deviation of all draws over that within halves of chains; near 1 if chains agree
    effective_draws: float  # as many independent draws have the same error


def chain_mean(draws: torch.Tensor) -> ChainMean:
    """Return the mean of draws (C, D) of a stationary process, from the halves of the chains.

    With W the variance within halves and B the variance of their means, the variance of a draw is
    `V = (1 - 1 / n) W + B` for halves of n draws, R-hat is `sqrt(V / W)`, and the effective draws are C D over the
    autocorrelation time, summed while sums of neighboring autocorrelations are above 0 and fall (Geyer 1992, section
    3.3; the combination over chains is that of Bayesian Data Analysis, section 11.5).
    """
    n = draws.shape[1] // 2
    halves = torch.cat([draws[:, :n], draws[:, -n:]])
    centered = halves - halves.mean(dim=1, keepdim=True)
    # products at each lag, by the Fourier transform of the draws and as many zeros
    power = torch.fft.rfft(centered, 2 * n).abs().square()
    products = torch.fft.irfft(power, 2 * n)[:, :n].mean(dim=0) / n
    within = float(halves.var(dim=1).mean())
    variance = (1 - 1 / n) * within + float(halves.mean(dim=1).var())
    correlations = 1 - (within - products * n / (n - 1)) / variance
    correlations[0] = 1.0
    pairs = correlations[: n // 2 * 2].view(-1, 2).sum(dim=1)
    positive = int((pairs > 0).long().cumprod(dim=0).sum())
    time = 2 * float(pairs[:positive].cummin(dim=0).values.sum()) - 1
    # negative correlations may make draws better than independent ones, but no more than this is believed
    effective = halves.numel() / max(time, 1 / math.log10(halves.numel()))
    r_hat = math.sqrt(variance / within) if within > 0 else math.nan
    return ChainMean(float(halves.mean()), math.sqrt(variance / effective), r_hat, effective)
