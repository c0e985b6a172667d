"""Every pair of the paper's Table 4 of which one can hold the other: differences of logits and hidden states."""

from __future__ import annotations

import argparse
import gc
import itertools
from pathlib import Path
from typing import Any

import torch

from isoloss.errors import IsolossError
from isoloss.files import write_text
from isoloss.lab.models.architectures import SIZES
from isoloss.lab.models.expansion import Scale, check_fits, expand
from isoloss.paper.theory.expansion import differences
from isoloss.registry import MODELS
from isoloss.run_config import ModelConfig
from isoloss.seeds import generator

TABLE_4 = ("d128", "d192", "d320", "d384", "d640", "d960", "d1920")
ARCHITECTURES = ("bert", "bert-pre-ln")
TOKENS, LENGTH = 32, 8
MASK, PAD = 32, 33


def sentences(n: int, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, T) sentences in which each token is the one before it plus one, and one hidden position in each."""
    g = generator(0, "benchmark embedding", step)
    ids = (torch.randint(0, TOKENS, (n, 1), generator=g) + torch.arange(LENGTH)) % TOKENS
    hidden = torch.nn.functional.one_hot(torch.randint(0, LENGTH, (n,), generator=g), LENGTH).bool()
    return ids, hidden


def trained(architecture: str, size: str, *, steps: int, noise: float) -> Any:
    """Return a model in float64 after `steps` of AdamW at 1e-3, then with noise on every parameter.

    The noise's standard deviation is `noise` at the entries of vectors, and `noise` over the root of the number of
    inputs at those of matrices.
    """
    config = ModelConfig(architecture=architecture, size=size, dropout=0.0)
    model = MODELS.load(architecture).new_model(config, vocab_size=PAD + 1, max_length=LENGTH, pad_id=PAD, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids, hidden = sentences(4, step=step)
        loss = model(ids.masked_fill(hidden, MASK), labels=ids.masked_fill(~hidden, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del optimizer
    model = model.double().eval()
    g = generator(0, "benchmark embedding noise")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = noise / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else noise
            parameter.grad = None
            parameter += scale * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return model


def measured(architecture: str, small: Any, size: str, *, embedding_scale: Scale) -> list[str]:
    """Return the cells of a row: differences of logits and hidden states in float32 and in float64."""
    ids, hidden = sentences(4, step=-1)
    batch = {"input_ids": ids.masked_fill(hidden, MASK)}
    cells = []
    for dtype in (torch.float32, torch.float64):
        small = small.to(dtype)
        found = differences(small, expand(small, SIZES[size], embedding_scale=embedding_scale), [batch])
        cells += [f"{found.logits:.1e}", f"{found.hidden:.1e}"]
        gc.collect()
    return cells


def main() -> None:
    """Measure the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of training")
    parser.add_argument("--noise", type=float, default=0.1, help="noise on the trained parameters")
    parser.add_argument("--embedding-scale", default="exact", help="exact, balanced or paper")
    parser.add_argument("--sizes", nargs="*", default=list(TABLE_4), help="sizes to pair")
    parser.add_argument("--output", type=Path, help="file for the table")
    args = parser.parse_args()
    lines = [
        "| blocks | small | large | parameters | logits, float32 | states, float32 | logits, float64 | states, float64 "
        "|",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for small, architecture in itertools.product(args.sizes, ARCHITECTURES):
        larger = [size for size in args.sizes[args.sizes.index(small) + 1 :] if fits(small, size)]
        if not larger:
            continue
        model = trained(architecture, small, steps=args.steps, noise=args.noise)
        before = {name: p.clone() for name, p in model.state_dict().items()}
        for size in larger:
            model.double().load_state_dict(before)
            many = MODELS.load(architecture).num_parameters(SIZES[size], PAD + 1, LENGTH, pad_id=PAD) / 1e6
            cells = measured(architecture, model, size, embedding_scale=args.embedding_scale)
            name = "post-LN" if architecture == "bert" else "pre-LN"
            lines.append(f"| {name} | {small} | {size} | {many:.1f} M | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if args.output is not None:
        write_text(args.output, "\n".join(lines) + "\n")


def fits(small: str, large: str) -> bool:
    """Return whether the one size can be expanded to the other."""
    try:
        check_fits(SIZES[small], SIZES[large])
    except IsolossError:
        return False
    return True


if __name__ == "__main__":
    main()
