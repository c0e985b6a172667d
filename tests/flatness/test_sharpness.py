"""Rises of the loss against losses computed directly and against dense Hessians; weights come back bit for bit."""

import math
import statistics

import pytest
import torch
from dense_curvature import batch_of, bert, dense_hessian, flat, gpt2, on_vector, windows
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness import noise_sharpness, sam_sharpness
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness.sharpness import weights_restored
from isoloss.statistics.ratio import crossed_ratio


def loss_function(model, batch, *, causal=False):
    logits, targets = on_vector(model, [batch], causal=causal)
    return lambda vector: nn.functional.cross_entropy(logits(vector), targets)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("make", "causal"), [(bert, False), (gpt2, True)])
def test_one_step_is_the_loss_after_it_less_the_loss_before(make, causal, adaptive):
    model, batches = make(), [batch_of(size, seed=size) for size in (3, 4, 6)]
    theta = flat(dict(model.named_parameters()))
    expected = []
    for batch in batches:
        loss = loss_function(model, batch, causal=causal)
        gradient = torch.autograd.functional.jacobian(loss, theta)
        step = theta**2 * gradient / (theta * gradient).norm() if adaptive else gradient / gradient.norm()
        expected.append(float((loss(theta + 0.1 * step) - loss(theta)).detach()))
    found = sam_sharpness(model, batches, rho=0.1, adaptive=adaptive)
    assert found.value == pytest.approx(sum(expected) / 3, rel=1e-9)
    assert found.stderr == pytest.approx(statistics.stdev(expected) / math.sqrt(3), rel=1e-8)
    assert found.samples == 3
    assert found.details["sequences_per_batch"] == [3, 6]
    assert found.method.startswith("adaptive sharpness, 1 ascent step") == adaptive


def largest_rise(hessian, gradient, rho):
    """The maximum of g x + x H x / 2 over the ball |x| <= rho: at its edge (H - mu) x = -g."""
    values, vectors = torch.linalg.eigh(hessian)
    low, high = max(float(values.max()), 0.0), 1e6
    for _ in range(200):
        mu = (low + high) / 2
        x = vectors @ ((vectors.T @ gradient) / (mu - values))
        low, high = (mu, high) if float(x.norm()) > rho else (low, mu)
    return float(gradient @ x + x @ hessian @ x / 2)


@pytest.mark.parametrize("adaptive", [False, True])
def test_more_steps_stay_in_the_ball_and_come_to_its_maximum(adaptive):
    # the loss is quadratic to a good approximation: the maximum over the ball solves (H - mu) x = -g with |x| = rho;
    # of relative moves u, theta (1 + u), the Hessian is T H T
    model, batch, rho = windows(), batch_of(8), 0.02
    theta = flat(dict(model.named_parameters()))
    units = theta.abs() if adaptive else torch.ones_like(theta)
    hessian = units[:, None] * dense_hessian(model, [batch], causal=False) * units
    best = largest_rise(hessian, units * MeanLoss(model, [batch], causal=False).gradient(), rho)
    options = {"causal": False, "adaptive": adaptive}
    steps = [sam_sharpness(model, [batch, batch], rho=rho, num_steps=n, **options).value for n in (1, 2, 40)]
    assert steps[0] <= steps[1] <= steps[2]
    assert steps[2] == pytest.approx(best, rel=2e-3)
    if adaptive:
        return
    # a ball that is left would give far more
    big = [sam_sharpness(model, [batch, batch], causal=False, rho=0.2, num_steps=n).value for n in (1, 60)]
    assert big[0] <= big[1] < 1.2 * big[0]


def test_noise_of_a_small_size_is_a_quadratic_form_of_the_hessian():
    model, batch, std = bert(), batch_of(24), 1e-3
    hessian = dense_hessian(model, [batch], causal=False)
    forms = []
    for probe in range(6):
        noise = torch.cat(
            [
                torch.randn(p.shape, generator=seeds.generator(1, "noise", probe, name), dtype=p.dtype).reshape(-1)
                * p.detach().square().mean().sqrt()
                for name, p in model.named_parameters()
            ]
        )
        forms.append(float(noise @ hessian @ noise) / 2)
    found = noise_sharpness(model, [batch], relative_std=std, num_probes=6, seed=1)
    # what is left out is of the fourth order of 1e-3
    assert found.value / std**2 == pytest.approx(sum(forms) / 6, rel=1e-3)


def test_noise_is_the_mean_over_pairs_on_common_data():
    model = windows()
    batches = [batch_of(5, seed=1), batch_of(3, seed=2)]
    found = noise_sharpness(model, batches, causal=False, relative_std=0.1, num_probes=3)
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    assert noise_sharpness(model, [joined], causal=False, relative_std=0.1, num_probes=3).value == pytest.approx(
        found.value, rel=1e-9
    )
    assert (found.num_predictions, found.num_probes, found.samples, found.details["sequences"]) == (13, 3, 3, 8)
    # a gradient of any size cancels in a pair: the rise grows as the square of the noise
    ratio = [
        noise_sharpness(model, batches, causal=False, relative_std=std, num_probes=3).value for std in (1e-3, 2e-3)
    ]
    assert ratio[1] / ratio[0] == pytest.approx(4, rel=1e-3)
    documents = [{**batch, "documents": torch.zeros(len(batch["labels"])) + n} for n, batch in enumerate(batches)]
    assert noise_sharpness(model, documents, causal=False, num_probes=3).samples == 2


def test_a_tensor_of_zeros_gets_no_noise():
    model = windows()
    nn.init.zeros_(model.mix.bias)
    only = {"mix.bias": model.mix.bias}
    assert noise_sharpness(model, [batch_of(4)], causal=False, parameters=only).value == 0


def test_the_crossed_error_is_right_whatever_varies():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for rows, columns, noise in ((1.0, 0.2, 0.2), (0.2, 1.0, 0.5), (0.3, 0.3, 3.0)):
        values, variances = [], []
        for _ in range(500):
            sizes = torch.randint(1, 4, (12,), generator=generator).double()
            table = sizes[:, None] * 5 + rows * normal(12, 1) + columns * normal(1, 8) + noise * normal(12, 8)
            value, stderr, _ = crossed_ratio(table, sizes)
            values.append(value)
            variances.append(stderr**2)
        spread = torch.tensor(values).double()
        assert abs(float(spread.mean()) - 5) < 4 * float(spread.std()) / math.sqrt(500)
        # a variance over 500 repetitions is right to 6.3 %
        assert 0.8 < float(spread.var()) / (sum(variances) / 500) < 1.2


class Failing(nn.Module):
    """Fails at its n-th call."""

    def __init__(self, inner, calls):
        super().__init__()
        self.inner, self.left = inner, calls

    def forward(self, input_ids):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.inner(input_ids)


@pytest.mark.parametrize("measure", [sam_sharpness, noise_sharpness])
def test_the_weights_come_back_bit_for_bit(measure):
    for calls in (0, 1, 2, 3, 4):
        model = Failing(windows().float(), calls)
        with torch.no_grad():
            model.inner.mix.bias[0] = -0.0
            model.inner.mix.bias[1] = 1e-40
        before = {name: value.clone().view(torch.int32) for name, value in model.state_dict().items()}
        options = {"causal": False}
        if calls:
            with pytest.raises(KeyboardInterrupt):
                measure(model, [batch_of(3), batch_of(3)], **options)
        else:
            measure(model, [batch_of(3), batch_of(3)], **options)
        after = {name: value.view(torch.int32) for name, value in model.state_dict().items()}
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(p.grad is None for p in model.parameters())


def test_weights_are_moved_inside():
    model = windows()
    with weights_restored([model.mix.bias]) as (original,):
        with torch.no_grad():
            model.mix.bias.add_(1)
        assert not torch.equal(model.mix.bias, original)
    assert torch.equal(model.mix.bias, original)


def test_rounding_and_a_gradient_of_zero_are_refused():
    narrow = bert(dtype=torch.bfloat16)
    with pytest.raises(IsolossError, match=r"lost in the rounding of torch.bfloat16: load the model in a wider dtype"):
        noise_sharpness(narrow, [batch_of(3)], relative_std=1e-3)
    flat_model = windows()
    for parameter in flat_model.parameters():
        nn.init.zeros_(parameter)
    with pytest.raises(IsolossError, match="zero: it has no direction"):
        sam_sharpness(flat_model, [batch_of(3), batch_of(3)], causal=False)
