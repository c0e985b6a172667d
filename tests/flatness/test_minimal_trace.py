"""The minimal trace: against minimization of measured traces, under random rescalings, its error and its bounds."""

import copy
import json
import math
import warnings

import numpy as np
import pytest
import scipy.optimize
import torch
from rescaling_models import FAMILIES, VOCABULARY
from torch.func import functional_call
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM, LlamaForCausalLM

from isoloss.cli.main import main
from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import fisher_trace
from isoloss.flatness._measurement import measure
from isoloss.flatness._rescaling.apply import rescaled, rescaled_at_random
from isoloss.flatness._rescaling.symmetries import rescalings_of
from isoloss.flatness.fisher import ExactLabels
from isoloss.flatness.minimal_trace import MinimalTraceEstimator
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.ratio import ClusteredRatioEstimator, ratio_estimate

FAMILY = {family.name: family for family in FAMILIES}


def small_eps(model):
    """The model with norms whose eps changes nothing."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "eps" in name and isinstance(value, float):
                setattr(module, name, 1e-30)
    return model


def made(name, *, tied=True, **options):
    return small_eps(FAMILY[name].build(tied=tied, **options))


def batches_of(model, number=48, length=4, size=16):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (number, length), generator=generator)
    causal = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__
    labels = ids.clone()
    labels[:, 2 if causal else 1 :] = -100
    return [{"input_ids": ids[i : i + size], "labels": labels[i : i + size]} for i in range(0, number, size)]


def norms_of(model):
    return [module for module in model.modules() if hasattr(module, "eps")]


def with_values(model, values):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in values.items():
            other.get_parameter(name).copy_(value)
    return other


def randomly(model, *, seed, largest=10.0):
    found = rescalings_of(model)
    limit = np.log(largest)
    return with_values(
        model, rescaled(model, found, np.random.default_rng(seed).uniform(-limit, limit, len(found.names)))
    )


def plain_trace(model, batches):
    """The trace at the given weights, with the control variates that a minimal one has."""
    return fisher_trace(model, batches, rescaling="minimal").details["trace"]


# the rules of every family are tested in test_rescaling_families; here one with gauges, fused maps, and gains less one
@pytest.mark.parametrize(("name", "tied"), [("bert", True), ("phi3", False), ("gemma2", True), ("isoloss-lstm", False)])
def test_it_is_invariant_under_random_rescalings_and_the_plain_trace_is_not(name, tied):
    model = made(name, tied=tied)
    batches = batches_of(model)
    found = [fisher_trace(each, batches, rescaling="minimal") for each in (model, randomly(model, seed=1))]
    minima, plain = ([value(e) for e in found] for value in (lambda e: e.value, lambda e: e.details["trace"]))
    assert minima[1] == pytest.approx(minima[0], rel=1e-5)
    assert found[1].stderr == pytest.approx(found[0].stderr, rel=1e-5)
    assert found[1].details["gauged"] == found[0].details["gauged"]
    if len(rescalings_of(model).names) > 1:  # an LSTM has the embeddings alone, whose part is small
        assert abs(plain[1] / plain[0] - 1) > 0.05
    # what is measured after the rescaling is what its parts said
    factors = np.array(list(found[0].details["log_factors"].values()))
    after = with_values(model, rescaled(model, rescalings_of(model), factors))
    assert plain_trace(after, batches) == pytest.approx(found[0].details["in_sample"], rel=1e-5)


def test_it_is_the_minimum_of_measured_traces():
    model = made("gpt2", n_layer=1)
    batches, found = batches_of(model, number=16), rescalings_of(model)
    details = fisher_trace(model, batches, rescaling="minimal").details
    assert not details["gauged"]

    def measured(z):
        return plain_trace(with_values(model, rescaled(model, found, z)), batches)

    z = np.array(list(details["log_factors"].values()))
    assert measured(z) == pytest.approx(details["in_sample"], rel=1e-6)
    assert details["in_sample"] < 0.9 * details["trace"]
    # the trace is convex in the log-factors, so that it is smallest where no slope is left: along random directions,
    # to which no gradient is orthogonal
    for step in 1e-3 * np.random.default_rng(0).choice([-1, 1], size=(3, len(z))):
        assert abs(np.log(measured(z + step) / measured(z - step))) / 2e-3 < 1e-5


def test_its_parts_add_up_and_are_those_of_the_rescaled_model():
    model = made("bert")
    batches = batches_of(model)
    minimal = fisher_trace(model, batches, rescaling="minimal")
    details = minimal.details
    factors = np.array(list(details["log_factors"].values()))
    other = with_values(model, rescaled(model, rescalings_of(model), factors))
    plain = measure(ExactLabels, other, batches, {}, num_probes=1, seed=0, parameter_blocks={})
    scale = minimal.value / details["in_sample"]
    for parts, others in ((minimal.by_parameter, plain.by_parameter), (minimal.by_layer, plain.by_layer)):
        assert sum(parts.values()) == pytest.approx(minimal.value, rel=1e-12)
        assert parts == {name: pytest.approx(scale * others[name], rel=1e-6, abs=1e-12) for name in parts}
    # that of the sum is the same but for the weights of other folds; those of parts, which are not stationary, are not
    assert minimal.stderr == pytest.approx(plain.stderr, rel=0.05)
    assert details["without_embeddings"] == pytest.approx(scale * plain.details["without_embeddings"], rel=1e-6)
    assert details["in_sample"] <= minimal.value <= details["cross_fitted"]
    n = minimal.samples
    assert (minimal.influence**2).sum() / (n * (n - 1)) == pytest.approx(minimal.stderr**2)
    assert details["leading_cluster"] == pytest.approx((minimal.influence**2).max() / (minimal.influence**2).sum())


@pytest.mark.slow
def test_features_are_kept_where_that_is_asked():
    model = made("bert", num_hidden_layers=1)
    batches = batches_of(model)
    details = fisher_trace(model, batches, rescaling="minimal").details
    found = rescalings_of(model)
    # a minimum over a part of the rescalings, by brute force over the generators that leave the features alone
    free = np.flatnonzero(abs(found.features.toarray()).sum(axis=0) == 0)

    def measured(values):
        z = np.zeros(len(found.names))
        z[free] = values
        return np.log(plain_trace(with_values(model, rescaled(model, found, z)), batches))

    least = np.exp(scipy.optimize.minimize(measured, np.zeros(len(free)), method="BFGS", options={"gtol": 1e-4}).fun)
    assert details["in_sample"] < least < details["trace"]
    assert details["keeping_features"] == pytest.approx(least, rel=2e-3)  # its mean with a cross-fitted one


def test_a_direction_without_a_minimum_has_a_gauge():
    model = made("llama", tied=False)
    batches = batches_of(model)
    details = fisher_trace(model, batches, rescaling="minimal").details
    assert details["gauged"] == ["residual stream"]
    assert 0 < details["infimum"] < details["in_sample"]
    assert any("embed_tokens" in name for name in details["vanishing"])
    # the geometric mean of the root mean squares of what the generator multiplies is 1
    found = rescalings_of(model)
    values = rescaled(model, found, np.array(list(details["log_factors"].values())))
    column = found.actions[:, [found.names.index("residual stream")]].toarray()[:, 0]
    names = [
        n
        for n in found.parameters
        for _ in range(found.parameter_blocks[n].num_blocks if n in found.parameter_blocks else 1)
    ]
    written = [names[row] for row in np.flatnonzero(column > 0)]
    logs = [float(values[name].square().mean().log()) / 2 * values[name].numel() for name in written]
    assert sum(logs) / sum(values[name].numel() for name in written) == pytest.approx(0, abs=1e-6)
    # far along the direction the trace approaches the infimum
    z = np.array(list(details["log_factors"].values()))
    z[found.names.index("residual stream")] += 12
    far = with_values(model, rescaled(model, found, z))
    assert plain_trace(far, batches) >= details["infimum"] * (1 - 1e-6)


@pytest.mark.parametrize("granularity", ["neuron", "channel"])  # heads are cut like channels
def test_a_finer_granularity_never_has_a_larger_minimum(granularity):
    model = made("opt")
    batches = batches_of(model)
    whole, finer = (
        fisher_trace(model, batches, rescaling="minimal", granularity=each) for each in ("tensor", granularity)
    )
    assert finer.details["in_sample"] <= whole.details["in_sample"] * (1 + 1e-9)
    again = fisher_trace(randomly(model, seed=3), batches, rescaling="minimal", granularity=granularity)
    assert again.value == pytest.approx(finer.value, rel=1e-5)


def test_models_are_compared_by_it():
    model = made("bert")
    other = with_values(
        model, {"bert.encoder.layer.0.output.dense.weight": 1.3 * model.bert.encoder.layer[0].output.dense.weight}
    )
    models = {"a": model, "rescaled": randomly(model, seed=2), "other": other}
    comparison = compare_traces(models, batches_of(model), minimal=True)
    least, rest = (comparison.models["a"][name] for name in ("minimal-trace", "minimal-without-embeddings"))
    same = comparison.difference("minimal-trace", "a", "rescaled")
    assert abs(same.value) < 1e-5 * least.value
    assert same.stderr < 1e-4 * least.stderr
    assert abs(comparison.difference("minimal-without-embeddings", "a", "rescaled").value) < 1e-5 * rest.value
    a, b = (fisher_trace(each, batches_of(model), rescaling="minimal") for each in (model, other))
    others = comparison.difference("minimal-trace", "a", "other")
    assert others.value == pytest.approx(a.value - b.value)
    assert others.stderr == pytest.approx(paired_difference(a, b).stderr, rel=1e-6)
    assert rest.value == pytest.approx(a.details["without_embeddings"])
    assert rest.stderr == pytest.approx(a.details["without_embeddings_stderr"])


def test_the_minimum_is_over_weights_and_the_eps_of_norms_together():
    """With weights as small as eps, where a rescaling of the weights alone would change the loss."""
    model = FAMILY["bert"].build(tied=True)
    for norm in norms_of(model):
        norm.eps = 1e-3
    batches, found = batches_of(model), rescalings_of(model)
    small = with_values(model, rescaled(model, found, np.array([-2.5, *[0.0] * (len(found.names) - 1)])))
    with warnings.catch_warnings():
        warnings.simplefilter("error", IsolossWarning)
        least = fisher_trace(small, batches, rescaling="minimal")
    factors = least.details["log_factors"]
    other = with_values(small, rescaled(small, found, np.array(list(factors.values()))))
    # what a norm reads has the factor of the generator that is named after the norm before it; the head's is fixed
    read = [factor for name, factor in factors.items() if name.endswith("norm")]
    for norm, factor in zip(norms_of(other), [*read, 0.0], strict=True):
        norm.eps *= math.exp(2 * factor)
    with torch.no_grad():
        inputs = {name: value for name, value in batches[0].items() if name not in ("labels", "documents")}
        torch.testing.assert_close(other(**inputs).logits, small(**inputs).logits, rtol=0, atol=1e-9)
    assert fisher_trace(other, batches).value == pytest.approx(least.details["in_sample"], rel=1e-7)
    assert fisher_trace(other, batches, rescaling="minimal").value == pytest.approx(least.value, rel=1e-7)


def test_a_model_that_hardly_reads_its_input_has_a_trace_and_no_minimal_one():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model, other = (BertForMaskedLM(config).eval() for _ in range(2))
    ids = torch.randint(0, 64, (32, 16))
    batches = [{"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)}]
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.output.dense.weight *= 1e-8
            layer.output.dense.weight *= 1e-8
    with pytest.raises(IsolossError, match=r"takes factors of e\^\d+, beyond floating-point numbers"):
        fisher_trace(model, batches, rescaling="minimal")
    found = compare_traces({"a": model, "b": other}, batches)
    assert found.traces == ("trace",)
    assert "beyond floating-point numbers" in found.no_minimal


def test_frozen_parameters_that_take_up_factors_are_told():
    model = FAMILY["llama"].build(tied=False).float()
    for name, value in model.named_parameters():
        value.requires_grad_("self_attn" in name)
    with pytest.warns(IsolossWarning, match="parameters of LlamaForCausalLM that are not measured"):
        found = fisher_trace(model, batches_of(model), rescaling="minimal")
    assert found.details["gauged"]


def test_a_model_that_its_rules_do_not_describe_is_refused():
    config = DistilBertConfig(vocab_size=VOCABULARY, dim=8, n_layers=1, n_heads=1, hidden_dim=8, dropout=0.0)
    unknown = DistilBertForMaskedLM(config).eval()
    with pytest.raises(IsolossError, match="no rescalings are known for models of type distilbert"):
        fisher_trace(unknown, batches_of(unknown), rescaling="minimal")
    model = made("bert")
    old = model.bert.encoder.layer[0].output.forward
    model.bert.encoder.layer[0].output.forward = lambda *args, **kwargs: old(*args, **kwargs) + 0.5
    with pytest.raises(IsolossError, match=r"changes log-probabilities by .* not exact for this model"):
        fisher_trace(model, batches_of(model), rescaling="minimal")


def test_a_rescaled_copy_computes_the_same():
    model = made("gpt2")
    other = rescaled_at_random(model, seed=4)
    (batch, *_) = batches_of(model)
    inputs = {"input_ids": batch["input_ids"]}
    before, after = (functional_call(each, {}, kwargs=inputs).logits for each in (model, other))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    assert not torch.equal(other.transformer.wte.weight, model.transformer.wte.weight)
    assert other.lm_head.weight is other.transformer.wte.weight


def test_the_control_of_the_command_line(capsys, tmp_path):
    model = FAMILY["bert"].build(tied=True).float()
    model.save_pretrained(tmp_path / "bert")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, VOCABULARY - 1, (40, 4)))
    words = ["measure", str(tmp_path / "bert"), "--data", str(tmp_path / "ids.npy"), "--mask-id", str(VOCABULARY - 1)]
    assert main([*words, "--control", "--json"]) == 0
    plain, minimal, control = (each["estimates"] for each in json.loads(capsys.readouterr().out)["evaluations"])
    assert control["minimal-trace-rescaled-at-random"]["value"] == pytest.approx(
        minimal["minimal-trace"]["value"], rel=1e-3
    )
    assert abs(control["trace-rescaled-at-random"]["value"] / plain["trace"]["value"] - 1) > 0.05
    assert main([*words, "--control"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"control of {tmp_path / 'bert'}: a random exact rescaling multiplies the trace by" in said
    assert main([*words, "--measures", "minimal-trace"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in (
        "trace at the given weights",
        "keep the last hidden state",
        "cross-fitted",
    ):
        assert part in out


def test_a_layer_with_two_places_is_left_as_found():
    model = FAMILY["llama"].build(tied=False)
    model.model.layers[1] = model.model.layers[0]
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    first, second = (fisher_trace(model, batches_of(model), rescaling="minimal") for _ in range(2))
    assert first.value == second.value
    for name, (parameter, value) in before.items():
        assert model.get_parameter(name) is parameter
        assert torch.equal(parameter, value)


class TanhLlamaForCausalLM(LlamaForCausalLM):
    """A Llama that takes tanh of its values, which no factor goes through; unused tokens have a logit of -1e9."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.v_proj.register_forward_hook(lambda *given: given[-1].tanh())
        self.lm_head.register_forward_hook(lambda *given: given[-1] + self.unused.to(given[-1]))
        self.register_buffer("unused", torch.tensor([*[0.0] * (config.vocab_size - 1), -1e9]), persistent=False)


def test_rules_that_are_not_exact_are_refused_whatever_the_logits_of_unused_tokens():
    torch.manual_seed(0)
    model = TanhLlamaForCausalLM(FAMILY["llama"].config(tied=False)).double().eval()
    with pytest.raises(IsolossError, match="not exact for this model"):
        fisher_trace(model, batches_of(model), rescaling="minimal")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_output_projections_that_start_at_zero(name):
    """The trace is near that with projections of nearly zero, up to what those do in the gauges."""
    found = []
    for fill in (0.0, 1e-9):
        model = small_eps(FAMILY[name].build(tied=False))
        for key, value in model.named_parameters():
            if key.endswith(("o_proj.weight", "attn.c_proj.weight")):
                value.data.normal_().mul_(fill)
        found.append(fisher_trace(model, batches_of(model), rescaling="minimal"))
    assert found[0].details["infimum"] == pytest.approx(found[1].details["infimum"], rel=1e-3)
    assert found[0].value > 0


def test_a_minimum_of_factors_that_fit_noise_is_refused():
    model = made("gpt2")
    estimator, number = MinimalTraceEstimator(model, granularity="tensor"), rescalings_of(model).exponents.shape[0]
    squares = torch.ones(40, number, dtype=torch.float64)
    squares[:, 30] = 1e-9  # in a fold, the factor is fitted without the one sequence that makes up all of this part
    squares[5, 30] = 1.0
    columns = ClusteredRatioEstimator(number, 0)
    columns.add(squares, torch.ones(40, dtype=torch.int64), torch.zeros(40, 0), torch.arange(40))
    plain = ratio_estimate(squares.sum(dim=1), unit="nats", method="known")
    with pytest.raises(IsolossError, match=r"the minimal trace comes out as .* above the trace, "):
        estimator.finish(plain, columns.columns())
