"""Rescalings of every family against the model itself: logits, the dimension of the space, gradients, features."""

import numpy as np
import pytest
import torch
from rescaling_models import FAMILIES, LAYERS, VOCABULARY, tokens
from torch import nn
from torch.func import functional_call

from isoloss.flatness._rescaling.apply import check_rescaling, rescaled, without_rounding
from isoloss.flatness._rescaling.symmetries import Signals, rescalings_of
from isoloss.registry import RESCALINGS

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
EACH_TIE = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def gradients(model, inputs, number, changed=None):
    """For random sums of logits, `number` of them, the gradient by each parameter: (number, *shape) by name."""
    with without_rounding(model) as (network, values):
        leaves = {name: values[name].clone() for name, _ in network.named_parameters()} | (changed or {})
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        logits = functional_call(network, {**values, **leaves}, kwargs=inputs).logits.flatten()
        directions = torch.randn(number, len(logits), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        found = torch.autograd.grad(logits, list(leaves.values()), directions, is_grads_batched=True, allow_unused=True)
    return {
        name: torch.zeros(number, *leaf.shape).double() if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def by_log(family, model, inputs, number):
    """The same by the logarithm of each entry, of Gemma's gains by that of 1 + w."""
    values = dict(model.named_parameters())
    return {
        name: grad * (values[name].detach() + family.offset(name))
        for name, grad in gradients(model, inputs, number).items()
    }


def null_dimension(matrix):
    """The dimension of the null space; there is a wide gap between what is rounding and what is not."""
    values = np.linalg.svd(matrix.numpy(), compute_uv=False)
    assert not ((values > 1e-12 * values[0]) & (values < 1e-6 * values[0])).any()
    return int((values < 1e-9 * values[0]).sum()) + max(0, matrix.shape[1] - len(values))


@EACH_TIE
@EACH_FAMILY
def test_logits_stay_and_squared_gradients_go_with_the_inverse_square(family, tied):
    model, inputs = family.build(tied=tied), {"input_ids": tokens()}
    before = gradients(model, inputs, 2)
    for granularity in ("channel", "neuron") if tied else ("tensor", "head"):
        found = rescalings_of(model, granularity=granularity)
        assert check_rescaling(model, found, inputs) < 1e-12
        z = np.random.default_rng(0).uniform(-np.log(10), np.log(10), len(found.names))
        after = gradients(model, inputs, 2, rescaled(model, found, z))
        row = 0
        for name in found.parameters:
            split = found.parameter_blocks.get(name)
            for part in range(1 if split is None else split.num_blocks):
                mask = torch.ones_like(before[name][0], dtype=torch.bool)
                if split is not None:
                    i, j = divmod(part, split.num_columns)
                    mask = (split.rows == i) if mask.ndim == 1 else (split.rows == i)[:, None] & (split.columns == j)
                assert mask.any()
                expected = before[name][:, mask] * np.exp(-float((found.actions[[row]] @ z)[0]))
                torch.testing.assert_close(after[name][:, mask], expected, rtol=1e-7, atol=1e-10)
                row += 1
        assert row == found.actions.shape[0] == found.exponents.shape[0]


@EACH_TIE
@EACH_FAMILY
def test_they_are_all_rescalings_of_whole_tensors(family, tied):
    """Every tensor, and every slice of a fused one, by a factor: which of these keep the logits to first order?

    All that do are found, but for parameters that no logit depends on: biases of keys without rotation, which add the
    same to all scores of a query, and the bias beside a decoder that is not tied.
    """
    model = family.build(tied=tied)
    columns = []
    for name, change in by_log(family, model, {"input_ids": tokens()}, 70).items():
        groups = family.groups(name, model.get_parameter(name).shape)
        for group in range(int(groups.max()) + 1):
            columns.append((change * (groups == group)).flatten(1).sum(1))
    assert len(columns) < 60
    without_gradient = family.key_bias * LAYERS + (family.head_bias and not tied)
    found = rescalings_of(model)
    assert null_dimension(torch.stack(columns, dim=1)) == len(found.names) + without_gradient
    assert np.linalg.matrix_rank(found.exponents.toarray()) == len(found.names)
    assert found.exponents.shape[0] == len(columns)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family.name in ("bert", "gpt2", "gpt_neox", "qwen3") else pytest.mark.slow)
        for family in FAMILIES
        if family.name != "bert with ReLU"  # some of its hidden units are never active in so few sentences
    ],
    ids=lambda family: family.name,
)
@EACH_TIE
def test_they_are_all_rescalings_of_rows_and_columns(family, tied):
    """Each row and column of a map by a factor, biases with their rows, each column of an embedding: as above.

    All that keep the logits are found with heads, channels and neurons apart, but for what is said above (a key's bias
    without its weight: rows and columns by inverse factors), and for token types, of which all tokens have the same:
    a layer norm takes out what is added to all channels alike, which is no rescaling of this form at other types.
    """
    model = family.build(tied=tied, **family.one_layer)
    signals = Signals({id(value): name for name, value in model.named_parameters()}, ["head", "channel", "neuron"])
    RESCALINGS.load(model.config.model_type)(model, signals)
    tables = {name + ".weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    shapes = {name: value.shape for name, value in model.named_parameters()}
    number = sum(sum(shape) for shape in shapes.values())  # more than there are unknowns
    rows, columns, cancel = {}, {}, 0
    for name, change in by_log(family, model, {"input_ids": tokens(16, 8)}, number).items():
        written = name.replace("bias", "weight")
        if change.ndim == 2:
            rows[written] = rows.get(written, 0) + change
            continue
        own, read = (1, 2) if "c_" not in name else (2, 1)
        columns[name] = change.sum(own)
        if name not in tables:
            rows[written] = rows.get(written, 0) + change.sum(read)
            cancel += name.replace("weight", "bias") not in shapes  # all rows times s, all columns by s
    null = null_dimension(torch.cat([*rows.values(), *columns.values()], dim=1)) - cancel
    separate_keys = family.key_bias and "gpt2" not in family.name
    others = separate_keys + family.head_bias * (1 + VOCABULARY * (not tied))
    assert null == len(signals.generators()) + others


@EACH_FAMILY
def test_features_say_what_the_last_hidden_state_is_multiplied_by(family):
    model = family.build(tied=False)
    with without_rounding(model) as (network, values), torch.no_grad():
        # an OPT calls the decoder of its base model
        base = network.base_model.decoder if family.name.startswith("opt") else network.base_model

        def last_hidden_state(changed):
            states = []
            hook = base.register_forward_hook(lambda _module, _inputs, output: states.append(output.last_hidden_state))
            functional_call(network, {**values, **changed}, kwargs={"input_ids": tokens()})
            hook.remove()
            return states[0]

        for granularity in ("tensor", "channel"):
            found = rescalings_of(model, granularity=granularity)
            before, features = last_hidden_state({}), found.features.toarray()
            z = np.random.default_rng(1).normal(size=len(found.names))
            ratios = (last_hidden_state(rescaled(model, found, z)) / before).flatten(0, 1).log()
            assert float(ratios.std(dim=0).max()) < 1e-9  # one factor a channel
            expected = features @ z if len(features) else [0.0]
            np.testing.assert_allclose(np.unique(ratios[0].numpy().round(9)), np.sort(expected), atol=1e-8)
            kept = z - np.linalg.pinv(features) @ (features @ z)
            torch.testing.assert_close(last_hidden_state(rescaled(model, found, kept)), before, rtol=1e-9, atol=1e-11)
