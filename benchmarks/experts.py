"""What the Fisher's trace costs for models with experts, or with another layout than (sequences, positions, width).

The trace, the trace without the rules of slices and of activations with the time first, and a plain forward and
backward pass of the same batch take turns in one process; the clock is the process's own processor time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
import transformers  # noqa: E402
from timing import heading, machine, versions  # noqa: E402
from torch import nn  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import fisher_trace  # noqa: E402
from isoloss.flatness._ghost import rules  # noqa: E402
from isoloss.flatness._ghost.rules import Layout  # noqa: E402
from isoloss.seeds import derive, generator  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "numpy")
VOCABULARY, LENGTH, SEQUENCES = 2000, 128, 8
WIDTH = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512}
DECODER = {**WIDTH, "num_key_value_heads": 4, "intermediate_size": 512}
EXPERTS = {**WIDTH, "num_key_value_heads": 4, "intermediate_size": 256, "num_experts_per_tok": 2}
NARROW = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 24, "qk_nope_head_dim": 24, "v_head_dim": 48}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
ENCODER = {**WIDTH, "intermediate_size": 768}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
XLNET = {"d_model": 192, "n_layer": 3, "n_head": 4, "d_inner": 768}
# the class's name without its head, its head and the fields of its config
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "ForCausalLM", DECODER),
    "Mixtral": ("Mixtral", "ForCausalLM", {**EXPERTS, "num_local_experts": 8}),
    "Qwen3-MoE": ("Qwen3Moe", "ForCausalLM", {**EXPERTS, **NARROW, "num_experts": 8, "head_dim": 48}),
    "GPT-OSS": ("GptOss", "ForCausalLM", {**EXPERTS, "num_local_experts": 8, "head_dim": 48}),
    "DeepSeek-V2": (
        "DeepseekV2",
        "ForCausalLM",
        {**EXPERTS, **LATENT, **GROUPS, "moe_intermediate_size": 256, "n_routed_experts": 8},
    ),
    "OLMoE": ("Olmoe", "ForCausalLM", {**EXPERTS, "num_experts": 8}),
    "XLNet": ("XLNet", "LMHeadModel", XLNET),
    "DeBERTa": ("Deberta", "ForMaskedLM", {**ENCODER, **RELATIVE}),
    "DeBERTa-v2": ("DebertaV2", "ForMaskedLM", {**ENCODER, **RELATIVE}),
    "DeBERTa-v3": (
        "DebertaV2",
        "ForMaskedLM",
        {**ENCODER, **RELATIVE, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 64},
    ),
    "Longformer": ("Longformer", "ForMaskedLM", {**ENCODER, "attention_window": 32}),
}
PLAIN, RULES, SLOW = "plain pass", "trace", "trace without these rules"


def build(name: str) -> nn.Module:
    """Return an untrained model in evaluation mode."""
    family, head, fields = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(0, "weights"))
        config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **fields)
        model: nn.Module = getattr(transformers, f"{family}{head}")(config)
    return model.eval()


def batches_for(number: int, *, causal: bool) -> list[dict[str, torch.Tensor]]:
    """Return batches that predict every token, or, where the model is not causal, about one in seven."""
    draws, found = generator(0, "tokens"), []
    for _ in range(number):
        tokens = torch.randint(5, VOCABULARY, (SEQUENCES, LENGTH), generator=draws)
        kept = torch.rand(tokens.shape, generator=draws) < (1 if causal else 0.15)
        found.append({"input_ids": tokens, "labels": tokens.where(kept, -100)})
    return found


def plain_pass(model: nn.Module, batch: dict[str, torch.Tensor], *, causal: bool) -> None:
    """Run one forward and one backward pass to all parameters."""
    logits = model(input_ids=batch["input_ids"]).logits
    labels = batch["labels"][:, 1:] if causal else batch["labels"]
    scored = logits[:, : labels.shape[1]]
    nn.functional.cross_entropy(scored.reshape(-1, VOCABULARY), labels.reshape(-1)).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def without_rules(run: Callable[[], Any]) -> Any:
    """Run with neither the rules of slices nor the layout with the time first."""
    without_slices = {name: rule for name, rule in rules._BY_NAME.items() if name not in rules.RULES}
    tokens = Layout.tokens

    def batch_first(self: Layout, values: torch.Tensor, trailing: int) -> torch.Tensor | None:
        rows = values.shape[:1] if values.ndim > trailing else ()
        known = ((self.num_sequences,), (self.num_sequences * self.length,))
        return tokens(self, values, trailing) if self.selected is not None or tuple(rows) in known else None

    with mock.patch.object(rules, "_BY_NAME", without_slices), mock.patch.object(Layout, "tokens", batch_first):
        return run()


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Time all contenders on the same batches, round by round; a trace by what more batches take more."""
    model = build(name)
    causal = MODELS[name][1] == "ForCausalLM"
    batches = batches_for(6, causal=causal)
    details: dict[str, Any] = {}

    def trace(contender: str, number: int) -> float:
        before = time.process_time()
        found = fisher_trace(model, batches[:number], num_probes=1, causal=causal)
        seconds = time.process_time() - before
        details[contender] = found.details["parameters_by_autograd"]
        return seconds

    def seconds_of(contender: str) -> float:
        """Return the seconds of one batch."""
        if contender == PLAIN:
            before = time.process_time()
            for batch in batches:
                plain_pass(model, batch, causal=causal)
            return (time.process_time() - before) / len(batches)
        if contender == RULES:
            return (trace(RULES, 6) - trace(RULES, 2)) / 4
        slow: float = without_rules(lambda: trace(SLOW, 3) - trace(SLOW, 1)) / 2
        return slow

    found: dict[str, list[float]] = {contender: [] for contender in (PLAIN, RULES, SLOW)}
    for number in range(rounds + 1):
        for contender, seconds in found.items():
            if number:
                seconds.append(seconds_of(contender))
            elif contender != SLOW:
                seconds_of(contender)  # loads what is loaded at first use
    ratios = {
        contender: [one / plain for one, plain in zip(found[contender], found[PLAIN], strict=True)]
        for contender in (RULES, SLOW)
    }
    config: Any = model.config
    return {
        "model": name,
        "class": type(model).__name__,
        "experts": config._experts_implementation if "expert" in str(config) else None,
        "parameters": sum(1 for _ in model.parameters()),
        "by_autograd": {contender: len(names) for contender, names in details.items()},
        "seconds": found,
        "over_plain": ratios,
    }


def page(record: Mapping[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    lines = [
        *heading("Experts and other layouts: the trace over a plain pass, on one thread", dict(record)),
        f"Untrained models of width 192 with three layers, 8 experts of which each token has 2, batches of {SEQUENCES} "
        f"sequences of {LENGTH} tokens, a vocabulary of {VOCABULARY:,}. Causal models predict every token, the others "
        "15 %. Processor time of one process in which the contenders take turns: a batch of the trace with one probe, "
        "over one forward and backward pass of a batch to all parameters. What a trace spends once is not in it. "
        "Median of the rounds, and the lowest and highest. The last two columns are the trace without the rules of "
        "slices and of activations with the time first, whose parameters then take one backward pass a sequence.",
        "",
        "| model | class | experts by | trace over plain | by autograd | without these rules | by autograd |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in record["models"]:
        cells = [row["model"], row["class"], row["experts"] or ""]
        for contender in (RULES, SLOW):
            ratios = row["over_plain"][contender]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
            cells.append(f"{row['by_autograd'][contender]} of {row['parameters']}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS / "experts.json", help="and the table, .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rows = []
    for name in options.models:
        rows.append(row := compare(name, options.rounds))
        print(f"{name}: {json.dumps(row['over_plain'])} {row['by_autograd']}", flush=True)
    record = {
        "command": " ".join(["python", "benchmarks/experts.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": load,
        "versions": versions(LIBRARIES),
        "models": rows,
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
