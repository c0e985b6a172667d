"""The table of benchmarks/architectures.py, for a few classes of it, and that the table can fail."""

import pytest
import tiny_models
import torch
import transformers
from architectures import check, check_command_line, measured, orthogonal_signs
from plain_gradients import batch_of
from tiny_models import VARIANTS, Architecture

from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.flatness._ghost import controls
from isoloss.flatness._ghost.engine import GhostNorms


def test_the_trace_equals_the_enumeration_of_all_labels():
    row = measured(tiny_models.known()["MraForMaskedLM"])
    assert "left_out" not in row
    assert row["variants"].keys() == set(VARIANTS)
    for variant, result in row["variants"].items():
        assert result["outcome"] == "right", (variant, result)
        assert (result["zeroed"] > 0) is (variant != "perturbed")
    assert len({result["exact"] for result in row["variants"].values()}) > 2


def test_the_command_line_gives_the_enumeration_too():
    assert check_command_line(tiny_models.known()["EsmForMaskedLM"], torch.float64) == {"outcome": "right"}


def test_the_command_line_measures_the_text_part_of_a_multimodal_model():
    llava = Architecture(transformers.LlavaForConditionalGeneration, transformers.LlavaConfig, True)
    assert check_command_line(llava, torch.float64) == {"outcome": "right"}


def test_why_the_command_line_measures_nothing_is_told(monkeypatch):
    found = check_command_line(tiny_models.known()["CpmAntForCausalLM"], torch.float32)
    assert found["outcome"] == "refused"
    assert found["message"] == "is a CpmAntForCausalLM: it sees the tokens that it would predict"
    monkeypatch.setattr("architectures.exact_trace", lambda *_, **__: {"weight": 1.0})
    assert check_command_line(tiny_models.known()["GPTNeoForCausalLM"], torch.float32)["outcome"] == "wrong"


def test_a_reformer_says_that_it_has_no_gradient():
    with pytest.raises(IsolossError, match="ReformerModelWithLMHead has gradients in training mode only"):
        fisher_trace(
            tiny_models.build(tiny_models.known()["ReformerModelWithLMHead"]), [batch_of(vocab=tiny_models.VOCABULARY)]
        )


def test_it_sees_a_share_that_is_wrong(monkeypatch):
    norms = GhostNorms.squared_norms

    def wrong(self, *args, **options):
        found = norms(self, *args, **options)
        found.by_column[:, 3] *= 1 + 1e-7
        return found

    monkeypatch.setattr(GhostNorms, "squared_norms", wrong)
    result = check(tiny_models.build(tiny_models.known()["BertForMaskedLM"]), causal=False)
    assert result["outcome"] == "wrong"
    assert len(result["wrong"]) == 1


def test_a_crash_is_no_refusal(monkeypatch):
    def crash(self, *args, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr(GhostNorms, "squared_norms", crash)
    result = check(tiny_models.build(tiny_models.known()["BertForMaskedLM"]), causal=False)
    assert (result["outcome"], result["message"]) == ("failed", "RuntimeError: out of order")


def test_orthogonal_signs_give_the_trace_of_every_sequence():
    torch.manual_seed(0)
    matrices = [torch.randn(count, count, dtype=torch.float64) for count in (26, 13)]
    with orthogonal_signs(26) as number:
        total = torch.zeros(2, dtype=torch.float64)
        for probe in range(number):
            streams = [(len(matrix), ("probes", place, probe)) for place, matrix in enumerate(matrices)]
            octets = controls.packed_probes(streams, torch.device("cpu"), 0)[0]
            signs = controls.unpacked_probes(octets, [26, 13]).double().split([26, 13])
            total += torch.stack([v @ matrix @ v for v, matrix in zip(signs, matrices, strict=True)]) / number
    torch.testing.assert_close(total, torch.stack([matrix.trace() for matrix in matrices]))
    assert controls.packed_probes.__module__ == "isoloss.flatness._ghost.controls"
