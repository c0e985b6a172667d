"""The parts of the minimal trace by kind of map."""

import math

import numpy as np
import pytest
from rescaling_models import FAMILIES, tokens

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.flatness.minimal_trace import kinds_of
from isoloss.lab.evaluation.measures.flatness import minimal_trace_by_kind

FAMILY = {family.name: family for family in FAMILIES}
MLP = {"mlp-up", "mlp-down"}
ATTENTION, FUSED = {f"attention-{name}" for name in "qkvo"}, {"attention-qkv", "attention-o"}
USUAL = {"embeddings", "norms"}
KINDS = {
    "bert": USUAL | ATTENTION | MLP | {"output"},
    "roberta": USUAL | ATTENTION | MLP | {"output"},
    "roberta-prelayernorm": USUAL | ATTENTION | MLP | {"output"},
    "modernbert with biases": USUAL | FUSED | {"mlp-gate-up", "mlp-down", "output"},
    "gpt2": USUAL | FUSED | MLP,
    "gpt_neox": USUAL | FUSED | MLP,
    "opt post-layer-norm with projections": USUAL | ATTENTION | MLP | {"output"},
    "llama": USUAL | ATTENTION | MLP | {"mlp-gate"},
    "phi3": USUAL | FUSED | {"mlp-gate-up", "mlp-down"},
    "gemma3_text": USUAL | ATTENTION | MLP | {"mlp-gate"},
    "isoloss-lstm": {"embeddings", "recurrent", "output"},
}


def batches():
    ids = tokens(12, 4)
    labels = ids.clone()
    labels[:, 2:] = -100
    return [{"input_ids": ids, "labels": labels}]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_parts_are_sums_over_the_parameters_of_a_kind_and_add_up(name):
    model = FAMILY[name].build(tied=True)
    whole = fisher_trace(model, batches(), rescaling="minimal")
    kinds = minimal_trace_by_kind(model, batches())
    assert kinds.keys() == KINDS[name]
    assert sum(part.value for part in kinds.values()) == pytest.approx(whole.value, rel=1e-12)
    influence = sum(part.influence for part in kinds.values())
    np.testing.assert_allclose(influence, whole.influence, rtol=0, atol=1e-12 * abs(whole.influence).max())
    of_all = {}
    for part in kinds.values():
        assert part.value == pytest.approx(sum(whole.by_parameter[key] for key in part.by_parameter), rel=1e-12)
        assert part.stderr == pytest.approx(math.sqrt((part.influence**2).sum() / (12 * 11)), rel=1e-12)
        of_all |= part.by_parameter
    assert of_all == pytest.approx(whole.by_parameter, rel=1e-12)
    expected = [key for key in whole.by_parameter if "mlp.down" in key or (".output.dense" in key and "att" not in key)]
    assert list(kinds["mlp-down"].by_parameter) == expected
    # of a single parameter, the error is the one that the whole says
    embedded = kinds["embeddings"]
    if len(embedded.by_parameter) == 1:
        assert [embedded.stderr] == pytest.approx([whole.by_parameter_stderr[key] for key in embedded.by_parameter])


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_of_a_family_has_its_kind(name):
    models = [FAMILY[name].build(tied=is_tied) for is_tied in (True, False)]
    tied, untied = (kinds_of(key for key, _ in model.named_parameters()).keys() for model in models)
    assert tied == KINDS[name]
    assert untied == KINDS[name] | {"output"}


def test_a_model_without_known_rescalings_is_refused():
    model = FAMILY["llama"].build(tied=True)
    model.config.model_type = "mamba"
    with pytest.raises(IsolossError, match="no rescalings are known for models of type mamba"):
        minimal_trace_by_kind(model, batches())
