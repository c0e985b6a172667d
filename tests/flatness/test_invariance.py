"""Which measures of flatness change with weights that compute the same: the table of docs/method/flatness.md, measured.

A tiny BERT in float64 without eps is changed so that its logits stay. Every measure is taken on the same inputs and
labels; where it is estimated with random probes, it is the mean over all of them, from the dense matrices.
"""

import copy
import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_curvature import dense_gauss_newton, dense_hessian, flat
from rescaling_models import FAMILIES, VOCABULARY, tokens
from torch import nn

from isoloss.flatness import (
    critical_sharpness,
    empirical_fisher_trace,
    fisher_rao_norm,
    fisher_trace,
    gradient_agreement,
    gradient_noise_scale,
    interpolation_barrier,
    loss_rises,
    relative_flatness,
    sam_sharpness,
    squared_parameter_norm,
)
from isoloss.flatness._rescaling.apply import rescaled
from isoloss.flatness._rescaling.symmetries import rescalings_of
from isoloss.flatness.formats import FORMATS
from isoloss.lab.evaluation.measures.flatness import flatness_measures, minimal_trace_by_kind
from isoloss.lab.evaluation.measures.transfer import effective_rank

HEADS, SIZE, INNER = 2, 2, 5
WIDTH = HEADS * SIZE
DOCS = Path(__file__).parents[2] / "docs" / "method" / "flatness.md"
# traces of other models, and so no rows of their own; what moves away from the weights by random or many steps; what is
# of one matrix, and depends on whether it is tied
_OTHERS = ("rescaling-control", "frontier", "llc", "unembedding-rank")
FLATNESS = [name for name in flatness_measures() if "-in-SIZE" not in name and name not in _OTHERS]


@functools.cache
def batches():
    """Two batches whose sequences predict one position each: the empirical Fisher's trace has no cross terms."""
    found = []
    for seed in range(2):
        input_ids = tokens(8, 4, seed=seed)
        labels = torch.full_like(input_ids, -100)
        labels[:, 1] = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(seed))
        found.append({"input_ids": input_ids, "labels": labels})
    return found


@functools.cache
def bert():
    """A BERT of one layer, whose norms have no eps; it is not changed."""
    (family,) = (family for family in FAMILIES if family.name == "bert")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER, "num_hidden_layers": 1}
    model = family.build(tied=True, **sizes, max_position_embeddings=4)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.0
    return model


# --- other weights of the same function -------------------------------------------------------------------------------


def rescale(model, *, granularity="tensor", features):
    """Multiply by random factors, those of the last hidden state among them or not."""
    found = rescalings_of(model, granularity=granularity)
    z = np.random.default_rng(0).normal(size=len(found.names))
    moves = np.abs(found.features).sum(axis=0) > 0
    z[moves] = 0.7 if features else 0.0
    if features:
        z[~moves] = 0.0
    for name, value in rescaled(model, found, z).items():
        model.get_parameter(name).copy_(value)


def translate(model):
    """Move the bias of the last norm before the head into the bias of the map that reads it."""
    norm, dense = model.bert.encoder.layer[-1].output.LayerNorm, model.cls.predictions.transform.dense
    dense.bias += dense.weight @ norm.bias
    norm.bias.zero_()


def transform(model):
    """Multiply the values of each head by an invertible matrix, and what reads them by its inverse."""
    attention = model.bert.encoder.layer[0].attention
    matrix = torch.block_diag(*torch.tensor([[[3.0, 5.0], [0.0, 2.0]], [[4.0, 0.0], [7.0, 3.0]]]).double())
    for parameter in (attention.self.value.weight, attention.self.value.bias):
        parameter.copy_(matrix @ parameter)
    output = attention.output.dense.weight
    output.copy_(output @ matrix.inverse())


def permute(model):
    """Exchange the heads, and the hidden units of the feed-forward block."""
    layer = model.bert.encoder.layer[0]
    heads, units = torch.arange(WIDTH).view(HEADS, SIZE).flip(0).flatten(), torch.arange(INNER).roll(2)
    maps = [layer.attention.self.query, layer.attention.self.key, layer.attention.self.value]
    for order, first, last in (
        (heads, maps, layer.attention.output.dense),
        (units, [layer.intermediate.dense], layer.output.dense),
    ):
        for module in first:
            module.weight.copy_(module.weight[order])
            module.bias.copy_(module.bias[order])
        last.weight.copy_(last.weight[:, order])


CHANGES = {
    "rescaling tensors, features fixed": functools.partial(rescale, features=False),
    "rescaling tensors and features": functools.partial(rescale, features=True),
    "rescaling channels": functools.partial(rescale, granularity="channel", features=False),
    "translation": translate,
    "matrix": transform,
    "permutation": permute,
}


@functools.cache
def changed(change):
    model = copy.deepcopy(bert())
    with torch.no_grad():
        CHANGES[change](model)
    return model


def outputs(model):
    with torch.no_grad():
        inputs = torch.cat([batch["input_ids"] for batch in batches()])
        return model(inputs).logits, model.base_model(inputs).last_hidden_state


# --- every measure, exactly -------------------------------------------------------------------------------------------


@functools.cache
def fisher(model):
    return dense_gauss_newton(model, batches(), causal=False)


@functools.cache
def hessian(model):
    return dense_hessian(model, batches(), causal=False)


def by_tensor(model, diagonal):
    return torch.stack([part.sum() for part in diagonal.split([value.numel() for value in model.parameters()])])


def noise(model):
    """The rise of the loss under noise in proportion to each tensor's root mean square, to leading order."""
    mean_squares = torch.stack([value.detach().square().mean() for value in model.parameters()])
    return mean_squares @ by_tensor(model, hessian(model).diagonal()) / 2


def estimated(measure, **options):
    return lambda model: torch.tensor(measure(model, batches(), **options).value, dtype=torch.float64)


def rise(change):
    return lambda model: torch.tensor(loss_rises(model, batches(), {"rise": change})["rise"].value, dtype=torch.float64)


@functools.cache
def neighbor():
    """Another model, which is not changed along: of the two that a barrier is between, users change one."""
    model = copy.deepcopy(bert())
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    return model


def barrier(model):
    found = interpolation_barrier(copy.deepcopy(model), neighbor(), batches())
    return torch.tensor(found.value, dtype=torch.float64)


def agreement(model):
    # of one label, so that the gradients of eight sequences have something in common
    texts = ([{**batch, "labels": batch["labels"].clamp(max=0)}] for batch in batches())
    found = gradient_agreement(model, *texts)
    return torch.tensor(found.value, dtype=torch.float64)


def ranks(model):
    return torch.tensor([each.value for each in effective_rank(model, batches()).values()], dtype=torch.float64)


def kinds(model):
    found = minimal_trace_by_kind(model, batches()).values()
    return torch.tensor([each.value for each in found], dtype=torch.float64)


VALUES = {
    "squared-norm": lambda model: torch.tensor(squared_parameter_norm(model).value, dtype=torch.float64),
    "trace": lambda model: fisher(model).trace(),
    "minimal-trace": estimated(fisher_trace, rescaling="minimal"),
    "minimal-trace-by-kind": kinds,
    "diagonal-fisher": lambda model: fisher(model).trace(),  # the sum
    "empirical-fisher": estimated(empirical_fisher_trace),
    "hessian-trace": lambda model: hessian(model).trace(),
    "weighted-trace": lambda model: flat(dict(model.named_parameters())).square() @ fisher(model).diagonal(),
    "fisher-rao": estimated(fisher_rao_norm),
    "relative-flatness": estimated(relative_flatness),
    "largest-eigenvalue": lambda model: torch.linalg.eigvalsh(fisher(model))[-1],
    "spectral-density": lambda model: torch.linalg.eigvalsh(fisher(model)),
    "sam-sharpness": estimated(sam_sharpness),
    "adaptive-sharpness": estimated(sam_sharpness, adaptive=True),
    "noise-sharpness": noise,
    **{f"{name}-rise": rise(rounding) for name, rounding in FORMATS.items()},
    "noise-rise": noise,
    "barrier": barrier,
    "effective-rank": ranks,
    "critical-sharpness": estimated(critical_sharpness),
    "gradient-noise-scale": estimated(gradient_noise_scale),
    "gradient-agreement": agreement,
}


@functools.cache
def stays(name, change):
    """Whether a measure stays up to rounding; else it moves by far more."""
    before, after = VALUES[name](bert()), VALUES[name](changed(change))
    moved = float((after - before).norm() / before.norm())
    assert moved < 1e-9 or moved > 1e-5, f"{name} moved by {moved:.1e} under {change}"
    return moved < 1e-9


def table():
    """The table of the page: its columns, and the cells of each measure."""
    section = DOCS.read_text().split("## What is invariant under what\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    return rows[0][1:], {row[0].strip("`"): row[1:] for row in rows[2:]}


@pytest.mark.parametrize("change", CHANGES)
def test_the_function_stays_and_the_features_where_it_is_said(change):
    (logits, features), (new_logits, new_features) = outputs(bert()), outputs(changed(change))
    torch.testing.assert_close(new_logits, logits, rtol=1e-11, atol=1e-11)
    same = torch.allclose(new_features, features, rtol=1e-11, atol=1e-11)
    assert same == (change not in ("rescaling tensors and features", "translation"))


def test_every_measure_has_a_row():
    assert sorted(VALUES) == sorted(FLATNESS)
    columns, rows = table()
    assert columns == list(CHANGES)
    assert sorted(rows) == sorted(FLATNESS)


@pytest.mark.parametrize("name", FLATNESS)
def test_the_page_says_what_is_measured(name):
    assert table()[1][name] == ["yes" if stays(name, change) else "no" for change in CHANGES]


def test_relative_flatness_changes_with_the_channels_that_the_decoder_reads():
    (family,) = (family for family in FAMILIES if family.name == "llama")
    model = family.build(tied=False, num_hidden_layers=1)
    before = relative_flatness(model, batches(), causal=False).value
    for granularity, same in (("tensor", True), ("channel", False)):
        other = copy.deepcopy(model)
        found = rescalings_of(other, granularity=granularity)
        z = np.array([0.1 * (number % 5) * name.startswith("final norm") for number, name in enumerate(found.names)])
        assert z.any()
        with torch.no_grad():
            for name, value in rescaled(other, found, z).items():
                other.get_parameter(name).copy_(value)
        after = relative_flatness(other, batches(), causal=False).value
        assert (abs(after / before - 1) < 1e-9) == same
