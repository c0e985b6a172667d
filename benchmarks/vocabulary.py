"""What the trace costs at large vocabularies, on one thread: time and memory over one forward and backward pass.

Each batch of one call of `fisher_trace` is first given to plain training's passes, by a second model with the same
weights, so that the two take turns. The clock is the process's own processor time. Memory is measured in processes of
their own, by the largest resident set between two resets of it: Linux only.

Shapes: B sequences of a batch, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from processes import processes  # noqa: E402
from timing import heading, record_of  # noqa: E402
from torch import nn  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import fisher_trace  # noqa: E402
from isoloss.machine import disable_malloc_trim  # noqa: E402
from isoloss.seeds import derive, generator  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers")
LENGTH, WIDTH, LAYERS = 128, 256, 4
CASES = ((32_768, 1), (32_768, 8), (131_072, 1), (131_072, 4))  # V and B
MIB = 1 << 20


def gpt2(vocabulary: int) -> nn.Module:
    """Return a GPT-2, whose decoder is tied to the embedding."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=WIDTH // 64,
        n_positions=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def llama(vocabulary: int) -> nn.Module:
    """Return a Llama, whose decoder has a weight of its own."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 128,
        intermediate_size=WIDTH * 11 // 4,
        max_position_embeddings=LENGTH,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def built(name: str, vocabulary: int) -> nn.Module:
    """Return an untrained model in evaluation mode, the same each time."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(0, "weights"))
        return MODELS[name](vocabulary).eval()


def batches(vocabulary: int, sequences: int, number: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of random tokens (B, T), each position of which but the last predicts the next token."""
    for index in range(number):
        tokens = torch.randint(vocabulary, (sequences, LENGTH), generator=generator(0, "tokens", index))
        yield {"input_ids": tokens, "labels": tokens.clone()}


def train(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Take the loss of a batch and its gradient by all parameters."""
    model.zero_grad()
    model(**batch, use_cache=False).loss.backward()


def times(name: str, vocabulary: int, sequences: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of plain passes and of the trace, batch by batch of one call."""
    model = built(name, vocabulary)
    trained = copy.deepcopy(model)
    disable_malloc_trim()
    seconds: dict[str, list[float]] = {"plain": [], "trace": []}
    begun = 0.0

    def in_turns() -> Iterator[dict[str, torch.Tensor]]:
        nonlocal begun
        for batch in batches(vocabulary, sequences, rounds + 1):
            before = time.process_time()
            train(trained, batch)
            seconds["plain"].append(time.process_time() - before)
            trained.zero_grad()
            begun = time.process_time()
            yield batch

    def measured(_sequences: int) -> None:
        seconds["trace"].append(time.process_time() - begun)

    fisher_trace(model, in_turns(), progress=measured)
    return seconds


def resident(what: str) -> float:
    """Return the resident set (VmRSS) or its peak since the last reset (VmHWM), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def reset_peak() -> None:
    """Begin a peak of the resident set anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str, vocabulary: int, sequences: int) -> dict[str, Callable[[], list[float]]]:
    """Return contenders that give the peak in MiB above the model alone: in the first of 3 batches, and in the rest."""
    model = built(name, vocabulary)
    disable_malloc_trim()
    before = resident("VmRSS")
    given = list(batches(vocabulary, sequences, 3))
    peaks: list[float] = []

    def note(_sequences: int = 0) -> None:
        peaks.append(resident("VmHWM") - before)
        reset_peak()

    def plain() -> list[float]:
        reset_peak()
        for batch in given:
            train(model, batch)
            note()
        return [peaks[0], max(peaks[1:])]

    def trace() -> list[float]:
        reset_peak()
        fisher_trace(model, given, progress=note)
        return [peaks[0], max(peaks[1:])]

    return {"plain": plain, "trace": trace}


def compare(name: str, vocabulary: int, sequences: int, rounds: int) -> dict[str, Any]:
    """Return times and peaks of a model at a vocabulary and a number of sequences a batch."""
    seconds = times(name, vocabulary, sequences, rounds)
    with processes({"plain": "plain", "trace": "trace"}, memory, name, vocabulary, sequences) as run:
        peaks = {contender: run(contender) for contender in ("plain", "trace")}
    logits = sequences * LENGTH * vocabulary * torch.finfo(torch.float32).bits / 8 / MIB
    ratios = [b / a for a, b in zip(seconds["plain"][1:], seconds["trace"][1:], strict=True)]
    return {
        "model": name,
        "vocabulary": vocabulary,
        "sequences": sequences,
        "seconds": seconds,
        "over_plain": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "first_over_plain": seconds["trace"][0] / statistics.median(seconds["plain"][1:]),
        "peak_mib": peaks,
        "logits_mib": logits,
        "further_logits": [(ours - peaks["plain"][1]) / logits for ours in peaks["trace"]],
    }


def page(record: Mapping[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    lines = [
        *heading("The trace at large vocabularies: its cost over one forward and backward pass", dict(record)),
        f"Untrained models with {LAYERS} layers of width {WIDTH} in float32, {LENGTH} tokens a sequence, all but the "
        "last predicted; the GPT-2's decoder is tied to its embedding, the Llama's is not. Processor time of one "
        "process, in which `fisher_trace` with its default settings and the plain passes, which give the gradient of "
        "the loss by all parameters, take turns on the same batches: the median of the rounds' ratios, and their "
        "range. The first batch has the checks against plain automatic differentiation, and is given by itself. "
        "Peaks are of the resident set above that of the model alone, in processes of their own; the last columns "
        "are the trace's less those of plain passes, in units of one batch's logits.",
        "",
        "| model | V | sequences a batch | plain, s | trace, s | over plain | range | first batch, over plain "
        "| logits, MiB | plain peak, MiB | trace peak, MiB | in the first batch | further logits "
        "| in the first batch |",
        "|---|" + "---:|" * 13,
    ]
    for row in record["results"]:
        ratio, peaks = row["over_plain"], row["peak_mib"]
        cells = [row["model"], f"{row['vocabulary']:,}", str(row["sequences"])]
        cells += [f"{statistics.median(row['seconds'][who][1:]):.3f}" for who in ("plain", "trace")]
        cells += [f"{ratio['median']:.2f}", f"{ratio['least']:.2f}-{ratio['most']:.2f}"]
        cells += [f"{row['first_over_plain']:.1f}", f"{row['logits_mib']:.0f}", f"{peaks['plain'][1]:.0f}"]
        cells += [f"{peaks['trace'][1]:.0f}", f"{peaks['trace'][0]:.0f}"]
        cells += [f"{row['further_logits'][place]:+.1f}" for place in (1, 0)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Time, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="batches after the first one")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS / "vocabulary.json", help="and the table, .md")
    options = parser.parse_args()
    record, results = record_of("vocabulary.py", LIBRARIES), []
    for name in options.models:
        for vocabulary, sequences in CASES:
            print(f"{name}, V {vocabulary:,}, {sequences} sequences a batch", flush=True)
            results.append(compare(name, vocabulary, sequences, options.rounds))
    record["results"] = results
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
