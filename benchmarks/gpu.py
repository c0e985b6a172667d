"""Flatness on a GPU: what a trace, a minimal trace and a comparison cost, over a pass of training and beside peers.

GPT-2 and BERT-base are trained for a moment on the documentation that comes with Python, so that their predictions are
not uniform. Then the estimators take turns on the same batches, and their values on fresh batches spread: cost and
spread together give the time that a standard error of 1 % takes. `--small` runs the same on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import versions
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from isoloss import compare, compare_traces
from isoloss.files import write_text
from isoloss.flatness import fisher_trace
from isoloss.text import python_docs

RESULTS = Path(__file__).parent / "results"
LENGTH, BATCH = 128, 32
MASK, VOCAB = 256, 257  # bytes and a mask
Batch = dict[str, torch.Tensor]


def rows(length: int) -> torch.Tensor:
    """Return the documentation of Python as bytes in rows (n, T)."""
    texts = python_docs.rows("docs", "train")["text"]
    stream = torch.tensor(list("\n".join(texts).encode()), dtype=torch.int64)
    return stream[: len(stream) // length * length].view(-1, length)


def batch_of(ids: torch.Tensor, *, causal: bool, generator: torch.Generator) -> Batch:
    """Return a batch: next tokens, or 15 % of the tokens masked."""
    if causal:
        return {"input_ids": ids, "labels": ids}
    masked = torch.rand(ids.shape, generator=generator) < 0.15
    return {"input_ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, -100)}


def trained(model: nn.Module, draw: Callable[[int], Batch], steps: int) -> nn.Module:
    """Train a model for a moment, with a warm-up: without one, a BERT soon predicts the same for every input."""
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-4 * min(1.0, (step + 1) / 200)
        loss = model(**draw(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"  trained for {steps} steps, loss {float(loss):.3f}")
    return model.eval()


def training_pass(model: nn.Module, batch: Batch) -> float:
    """Run an ordinary forward and backward pass to all parameters: the floor."""
    model(**batch).loss.backward()
    model.zero_grad()
    return math.nan


def logits_of(model: nn.Module, batch: Batch, *, causal: bool) -> torch.Tensor:
    """Return the logits at the predicted positions."""
    logits: torch.Tensor = model(input_ids=batch["input_ids"]).logits
    return logits[:, :-1].flatten(0, 1) if causal else logits[batch["labels"] != -100]


def plain_loop(model: nn.Module, batch: Batch, seed: int, *, causal: bool) -> float:
    """Run one backward pass to labels that the model draws: what one writes without a library."""
    torch.manual_seed(seed)
    logits = logits_of(model, batch, causal=causal)
    labels = torch.multinomial(logits.detach().softmax(dim=-1), 1)[:, 0]
    F.cross_entropy(logits, labels, reduction="sum").backward()
    value = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    return value / len(labels)


class _Logits(nn.Module):
    """A model from a batch's token ids to the logits at its predicted positions."""

    def __init__(self, model: nn.Module, batch: Batch, *, causal: bool) -> None:
        super().__init__()
        self.model, self._batch, self._causal = model, batch, causal

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, self._batch, causal=self._causal)


def curvlinops(model: nn.Module, batch: Batch, seed: int, *, causal: bool) -> float:
    """Run one product of curvlinops' Gauss-Newton operator with random signs."""
    from curvlinops import GGNLinearOperator, hutchinson_trace

    torch.manual_seed(seed)
    labels = batch["labels"][:, 1:].flatten() if causal else batch["labels"][batch["labels"] != -100]
    data = [(batch["input_ids"], labels)]
    operator = GGNLinearOperator(
        _Logits(model, batch, causal=causal),
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        data,
        check_deterministic=False,
        num_data=len(batch["input_ids"]),
    )
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward differentiation
        return float(hutchinson_trace(operator, 1))


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return the seconds of a call with all that it queued on the device, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun, result


def about(sequences: int, seconds: float, spread: float, mean: float) -> dict[str, float]:
    """Return what is kept of a way to a trace: the time of a call on so many sequences, and what 1 % takes."""
    return {
        "sequences": sequences,
        "milliseconds": 1e3 * seconds,
        "relative_spread": spread,
        "seconds_to_1_percent": seconds * (spread / 0.01) ** 2,
        "mean": mean,
    }


def measured(name: str, model: nn.Module, ids: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Return what is measured of a model."""
    causal, device = name.startswith("GPT"), options.device
    generator = torch.Generator().manual_seed(0)

    def draw(step: int, size: int = BATCH) -> Batch:
        chosen = torch.randint(len(ids), (size,), generator=generator)
        return {k: v.to(device) for k, v in batch_of(ids[chosen], causal=causal, generator=generator).items()}

    print(name)
    first = trained(model.to(device), draw, options.steps)
    found: dict[str, Any] = {}
    inputs = [draw(0) for _ in range(options.rounds)]
    for way, settings in (("trace", {}), ("trace and minimal trace", {"rescaling": "minimal"})):
        trace = functools.partial(fisher_trace, first, **settings)
        trace(inputs[:1])  # warms up
        whole = [timed(functools.partial(trace, inputs), device) for _ in range(2)]
        once = min(timed(functools.partial(trace, inputs[:1]), device)[0] for _ in range(2))
        seconds, estimate = min(whole, key=lambda each: each[0])
        # one batch has the checks of the model in it, each further one only itself
        each = (seconds - once) / (len(inputs) - 1)
        spread = estimate.stderr / estimate.value * math.sqrt(len(inputs))
        found[f"isoloss, {way}"] = about(BATCH, each, spread, estimate.value) | {"once_a_model_ms": 1e3 * (once - each)}
        print(f"  isoloss, {way}: {1e3 * each:.1f} ms a batch, {1e3 * (once - each):.0f} once, spread {spread:.3f}")
    ways: dict[str, tuple[Callable[..., float], int]] = {
        "one forward and backward pass": (lambda model, batch, seed: training_pass(model, batch), BATCH),
        "a plain loop": (functools.partial(plain_loop, causal=causal), 4),
        "a plain loop, whole batch": (functools.partial(plain_loop, causal=causal), BATCH),
        "curvlinops, GGN, Hutchinson": (functools.partial(curvlinops, causal=causal), 4),
    }
    for way, (run, size) in ways.items():
        small = [{k: v[:size] for k, v in batch.items()} for batch in inputs]
        try:
            for batch in small[:2]:
                run(first, batch, 0)  # warms up
        except ImportError as error:
            print(f"  {way}: {error}")
            continue
        times, values = [], []
        for seed, batch in enumerate(small):
            seconds, value = timed(functools.partial(run, first, batch, seed), device)
            times.append(seconds)
            values.append(value)
        mean = statistics.fmean(values)
        spread = math.nan if math.isnan(mean) else statistics.stdev(values) / mean
        found[way] = about(size, statistics.median(times), spread, mean)
        print(f"  {way}: {found[way]['milliseconds']:.1f} ms, spread {spread:.3f}")
    second = trained(first, draw, options.steps // 10)
    models = {"a": second, "b": first}
    many = [draw(0) for _ in range(512 // BATCH)]
    for way, compared in (
        ("traces and minimal traces of two models", lambda: compare_traces(models, many)),
        ("isoloss.compare of two models", lambda: compare(models, many)),
    ):
        found[way] = {"sequences": 512, "seconds": min(timed(compared, device)[0] for _ in range(2))}
        print(f"  {way}: {found[way]['seconds']:.2f} s")
    few = [{k: v[:2] for k, v in many[0].items()}]
    single, double = (fisher_trace(first.to(dtype), few, seed=1).value for dtype in (torch.float32, torch.float64))
    found["relative difference to float64"] = abs(single / double - 1)
    print(f"  float32 over float64, less 1: {single / double - 1:.1e}")
    return {"parameters": sum(p.numel() for p in first.parameters()), **found}


def main() -> None:
    """Measure the models and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--models", nargs="+", default=["GPT-2", "BERT"], choices=["GPT-2", "BERT"])
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    width, layers, heads, vocab, bert_vocab = 768, 12, 12, 50257, 30522
    if options.small:
        options.device, options.steps, options.rounds = "cpu", 20, 4
        width, layers, heads, vocab, bert_vocab = 32, 2, 2, VOCAB, VOCAB
    warnings.simplefilter("ignore")
    ids = rows(LENGTH)
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=heads, n_positions=LENGTH)
    bert = BertConfig(
        vocab_size=bert_vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    models = {"GPT-2": GPT2LMHeadModel(gpt2), "BERT": BertForMaskedLM(bert)}
    models = {each: models[each] for each in options.models}
    for model in models.values():
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    record: dict[str, Any] = {
        "command": f"python benchmarks/gpu.py --models {' '.join(models)}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": name,
        "versions": versions(("torch", "transformers", "curvlinops-for-pytorch")),
        "batch": f"{BATCH} sequences of {LENGTH} tokens, float32",
        "models": {each: measured(each, model, ids, options) for each, model in models.items()},
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
