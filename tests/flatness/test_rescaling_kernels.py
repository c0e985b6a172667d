"""The checks of a rescaling with any attention kernel, with weights in narrow types, and where there is no room."""

import dataclasses

import numpy as np
import pytest
import torch
from rescaling_models import FAMILIES, VOCABULARY
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace, minimal_trace
from isoloss.flatness._rescaling import symmetries
from isoloss.flatness._rescaling.apply import check_rescaling
from isoloss.flatness._rescaling.symmetries import rescalings_of

FAMILY = {family.name: family for family in FAMILIES}
NARROW_ONLY = "narrow only"


def narrow_only(module, query, *args, **options):
    """A kernel that takes the types that FlashAttention does."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"this kernel takes float16 and bfloat16, not {query.dtype}")
    return sdpa_attention_forward(module, query, *args, **options)


AttentionInterface.register(NARROW_ONLY, narrow_only)
AttentionMaskInterface.register(NARROW_ONLY, sdpa_mask)


def made(name, kernel):
    model = FAMILY[name].build(tied=True).bfloat16()
    model.config._attn_implementation = kernel
    return model


def batch_of(number=48):
    ids = torch.randint(0, VOCABULARY, (number, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


@pytest.mark.filterwarnings("ignore")  # torch's of flex_attention on a CPU
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention", NARROW_ONLY])
@pytest.mark.parametrize("name", ["bert", "modernbert", "llama"])
def test_logits_are_checked_with_any_kernel_and_narrow_weights(name, kernel):
    model, batch = made(name, kernel), batch_of(2)
    found = rescalings_of(model)
    assert check_rescaling(model, found, batch) < 1e-12
    actions = found.actions.tolil()
    actions[np.argmax(np.abs(actions.toarray()[:, 0])), 0] += 1
    assert check_rescaling(model, dataclasses.replace(found, actions=actions.tocsr()), batch) > 1e-3
    assert model.config._attn_implementation == kernel
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


@pytest.mark.parametrize("kernel", ["sdpa", NARROW_ONLY])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_narrow_weights_have_the_minimal_trace_of_wide_ones(name, kernel):
    model = made(name, kernel)
    found = fisher_trace(model, [batch_of()], rescaling="minimal")
    wide = fisher_trace(made(name, "sdpa").float(), [batch_of()], rescaling="minimal")
    assert found.details["log_probabilities_change_without_eps"] < 1e-12
    # the gradients of the narrow model are rounded to 8 bits, on the same probes
    assert found.value == pytest.approx(wide.value, rel=0.03)
    assert wide.details["trace"] > 1.15 * wide.value


def test_a_large_model_is_not_checked(monkeypatch):
    monkeypatch.setattr(minimal_trace, "_LARGEST_CHECKED", 100)
    found = fisher_trace(made("bert", "sdpa"), [batch_of()], rescaling="minimal").details
    assert found["log_probabilities_change_without_eps"] is None


def test_parts_that_would_not_fit_into_memory_are_refused(monkeypatch):
    model, batches = FAMILY["bert"].build(tied=True), [batch_of(), batch_of()]
    parts = rescalings_of(model, granularity="channel").exponents.shape[0]
    monkeypatch.setattr(
        minimal_trace, "physical_memory", lambda: parts * (minimal_trace._BYTES_OF_A_PART + 8.0 * 96) - 1
    )
    told = f"granularity 'channel' makes {parts} parts of this model, whose sums over 96 sequences take at least .* GiB"
    with pytest.raises(IsolossError, match=told):
        fisher_trace(model, batches, rescaling="minimal", granularity="channel")
    with pytest.raises(IsolossError, match=f"it: {told}"):
        compare_traces({"it": model}, batches, minimal=True, granularity="channel")
    for options in ({"granularity": "head"}, {"granularity": "channel", "num_sequences": 90}):
        assert fisher_trace(model, batches, rescaling="minimal", **options).value > 0
    streamed = fisher_trace(model, iter(batches), rescaling="minimal", granularity="channel")
    assert streamed.details["sequences"] == 96


def test_more_parts_than_can_be_listed_are_refused(monkeypatch):
    model = FAMILY["gpt2"].build(tied=True)
    found = rescalings_of(model, granularity="channel").exponents.shape[0]
    monkeypatch.setattr(symmetries, "_MOST_PARTS", found)
    assert len(rescalings_of(model, granularity="channel").names) > 0
    monkeypatch.setattr(symmetries, "_MOST_PARTS", found - 1)
    with pytest.raises(IsolossError, match=f"the model has {found:,} parts to rescale, and {found - 1:,} at most"):
        rescalings_of(model, granularity="channel")
