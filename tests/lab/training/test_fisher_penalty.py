"""The Fisher penalty: its estimate and its gradient against the exact trace, its steps against Jacobians."""

import itertools
from functools import partial

import pytest
import torch
from stepping import batches, check, check_slope, context, gradients_of, loss_of, plain_loss, run, tiny
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.models.make import make_model
from isoloss.lab.training.algorithms.base import TrainingAlgorithm
from isoloss.lab.training.algorithms.config import FisherPenaltyConfig
from isoloss.lab.training.algorithms.fisher_penalty import FisherPenalty, trace_estimate
from isoloss.lab.training.objectives import training_batch
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.seeds import generator
from isoloss.text.masking import IGNORED


class Small(torch.nn.Module):
    """Logits of 4 ids from 3 inputs through a hidden layer."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.a, self.b = (
            torch.nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64)) for shape in ((3, 2), (2, 4))
        )

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


def exact_trace(model, x):
    """Return the mean over rows of sum_y p_y ||grad log p_y||^2 (the paper, section 4)."""
    total = 0.0
    for row in x:
        log_p = model(row).log_softmax(0)
        for value in log_p:
            gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
            total = total + value.exp() * sum((g**2).sum() for g in gradients)
    return total / len(x)


@pytest.mark.parametrize("rows", [1, 2])
def test_over_all_signs_the_estimate_and_its_gradient_are_those_of_the_trace(rows):
    model = Small()
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = list(model.parameters())
    all_signs = list(itertools.product([-1.0, 1.0], repeat=4 * rows))
    mean = sum(
        trace_estimate(model(x), parameters, torch.tensor(signs, dtype=torch.float64).view(rows, 4))
        for signs in all_signs
    ) / len(all_signs)
    exact = exact_trace(model, x)
    torch.testing.assert_close(mean, exact, rtol=1e-12, atol=0)
    for got, want in zip(gradients_of(mean, model), gradients_of(exact, model), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_certain_prediction_has_a_finite_gradient():
    logits = torch.nn.Parameter(torch.tensor([[200.0, 0.0, -200.0]]))
    trace_estimate(logits * 1.0, [logits], torch.tensor([[1.0, -1.0, 1.0]])).backward()
    assert logits.grad.isfinite().all()


SETTINGS = FisherPenaltyConfig(weight=0.02, sentences=2)


def reference_gradient(model, t, batch, *, weight, is_penalized, logarithm=False):
    """The objective by Jacobians of the first two sentences' logits and S written out as a matrix."""
    parameters = [p for name, p in model.named_parameters() if is_penalized(name)]
    group = {name: tensor[:2] for name, tensor in batch.items()}
    hidden = group.pop("labels") != IGNORED
    logits = model(**group).logits[hidden]
    width = logits.shape[1:]  # one predicted token a sentence
    draws = [torch.randint(0, 2, width, generator=generator(5, "penalty", t, i)) for i in range(2)]
    signs = 2.0 * torch.stack(draws).double() - 1
    total = [torch.zeros_like(p) for p in parameters]
    for row, v in zip(logits, signs, strict=True):
        p = row.softmax(0)
        s = torch.diag(p.sqrt()) - torch.outer(p, p.sqrt())
        for value, by in zip(row, s @ v, strict=True):
            gradients = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
            total = [a + by * g for a, g in zip(total, gradients, strict=True)]
    trace = sum((g**2).sum() for g in total) / len(logits)
    loss = plain_loss(model, batch)
    return loss, gradients_of(loss + weight * (trace.log() if logarithm else trace), model)


def algorithm_for(model, optimizer, settings=SETTINGS, **changes):
    return FisherPenalty(model, context(optimizer, seed=5, **changes), settings)


@pytest.mark.parametrize(
    ("weight", "patterns", "is_penalized", "logarithm"),
    [
        (0.02, ("*",), lambda name: True, False),
        (-0.01, ("*",), lambda name: True, False),
        (0.05, ("*.query.*", "cls.*"), lambda name: ".query." in name or name.startswith("cls."), False),
        (-0.05, ("*",), lambda name: True, True),
    ],
    ids=["flatter", "sharper", "some-parameters", "logarithm"],
)
def test_the_steps_are_those_of_the_definition(weight, patterns, is_penalized, logarithm):
    optimizer = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0)
    model = tiny()
    settings = FisherPenaltyConfig(weight=weight, sentences=2, parameters=patterns, logarithm=logarithm)
    gradient = partial(reference_gradient, weight=weight, is_penalized=is_penalized, logarithm=logarithm)
    check(model, algorithm_for(model, optimizer, settings, micro_batch_size=3), optimizer, gradient, batches(8))


def test_a_sham_makes_the_steps_of_the_loss_alone_and_tells_the_trace():
    optimizer = OptimizerConfig(learning_rate=3e-3)
    plain, sham, penalized = tiny(torch.float32), tiny(torch.float32), tiny(torch.float32)
    for model in (plain, sham):
        model.set_attn_implementation("eager")
    run(plain, TrainingAlgorithm(plain, context(optimizer, seed=5)), 10)
    told = run(sham, algorithm_for(sham, optimizer, FisherPenaltyConfig(weight=0.0, sentences=2)), 10)
    for (name, a), b in zip(plain.named_parameters(), sham.parameters(), strict=True):
        assert torch.equal(a, b), name
    (first,) = run(penalized, algorithm_for(penalized, optimizer), 1)
    assert told[0].details == first.details
    assert all(step.details["trace_estimate"] > 0 for step in told)


def test_a_pattern_that_matches_no_parameter_is_named():
    settings = FisherPenaltyConfig(parameters=("*.bias", "*.atention.*"))
    some = r"are bert.embeddings.word_embeddings.weight, .* and cls.predictions.transform.LayerNorm.bias$"
    with pytest.raises(IsolossError, match=rf"no parameter of the model matches '\*.atention.\*', .* {some}"):
        algorithm_for(tiny(), OptimizerConfig(), settings)


def test_the_estimate_agrees_with_the_measured_trace():
    model = tiny(torch.float32, dropout=0.3)  # which the estimate leaves out
    algorithm = algorithm_for(model, OptimizerConfig(name="sgd", learning_rate=1e-9), FisherPenaltyConfig(sentences=8))
    made = batches(50)
    estimates = torch.tensor(
        [algorithm.step(n, b, loss_of(model)).details["trace_estimate"] for n, b in enumerate(made, 1)]
    )
    measured = fisher_trace(model.eval(), made, causal=False)
    error = (float(estimates.var()) / 50 + measured.stderr**2) ** 0.5
    assert abs(float(estimates.mean()) - measured.value) < 4 * error
    assert error < 0.1 * measured.value


def test_a_penalized_model_is_flatter():
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)
    flat, plain = tiny(torch.float32), tiny(torch.float32)
    run(flat, algorithm_for(flat, optimizer, FisherPenaltyConfig(weight=0.05, sentences=8)), 50)
    run(plain, TrainingAlgorithm(plain, context(optimizer, total=50)), 50)
    traces = [fisher_trace(model.eval(), batches(60)[50:], causal=False).value for model in (flat, plain)]
    assert traces[0] < 0.5 * traces[1]


@pytest.mark.parametrize(
    ("architecture", "size"), [("bert", "d16"), ("bert-pre-ln", "d16"), ("lstm", "h16"), ("opt", "d16")]
)
def test_every_architecture_is_penalized_whatever_its_kernel(architecture, size):
    language = PairLanguage(is_ragged=True)
    causal = architecture == "opt"
    model = make_model(ModelConfig(architecture=architecture, size=size, dropout=0.0), language, seed=0).double()
    if architecture != "lstm":
        model.set_attn_implementation("sdpa")
    objective = ObjectiveConfig(kind="causal" if causal else "masked")
    config = TrainConfig(language=PCFGConfig(), batch_size=8, objective=objective)
    algorithm = algorithm_for(model, OptimizerConfig(), causal=causal)
    batch = training_batch(language, config, 1, torch.device("cpu")).inputs

    def penalty():
        algorithm.optimizer.zero_grad()
        return algorithm.add_gradient(1, batch, lambda _: 0.0 * model.get_input_embeddings().weight.sum())[1][
            "trace_estimate"
        ]

    penalty()
    parameters = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad.clone() for p in parameters]
    # OPT's attention takes its softmax in float32, whose rounding the difference divides by the step
    tolerance = 1e-3 if architecture == "opt" else 1e-5
    check_slope(lambda: SETTINGS.weight * penalty(), parameters, gradients, rel=tolerance)
