"""What `isoloss compare` costs beside `isoloss measure`, and its rises beside torchao's weights of few bits.

Both commands run in this process by turns on two models that are not trained, with their defaults: 512 sequences of 128
tokens of text, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from timing import heading, record_of  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D  # noqa: E402
from workloads import workloads  # noqa: E402

from isoloss.cli.main import main as isoloss  # noqa: E402
from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import loss_rises  # noqa: E402
from isoloss.flatness.robustness import ROBUSTNESS, Rounding, rounded_layers  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "torchao")
VOCABULARY = 4096
SHAPES = {"d64": (64, 2)}  # width and layers


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer trained on texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def model_of(kind: str, shape: str, seed: int) -> nn.Module:
    """Return a model that is not trained."""
    width, layers = SHAPES[shape]
    torch.manual_seed(seed)
    if kind == "GPT-2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 32, "n_positions": 128}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **sizes)).eval()
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 32}
    sizes |= {"intermediate_size": 4 * width, "max_position_embeddings": 128}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes)).eval()


def seconds(*words: str) -> float:
    """Return the processor time of a subcommand in this process."""
    before = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if isoloss([*words, "--threads", "1"]) != 0:
            raise RuntimeError(" ".join(words))
    return time.process_time() - before


def costs(data: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the seconds of both commands on each kind and size of model."""
    lines = (data / "openwebtext-1000" / "openwebtext-1000.decoded.jsonl").read_text().splitlines()
    tokenizer = tokenizer_of([json.loads(line)["text"] for line in lines])
    with tempfile.TemporaryDirectory() as path:
        text = Path(path, "text.jsonl")
        text.write_text("\n".join(lines[:200]) + "\n")
        for shape in SHAPES:
            for kind in ("GPT-2", "BERT"):
                names = [f"{path}/{kind}-{shape}-{seed}" for seed in range(2)]
                for seed, name in enumerate(names):
                    model_of(kind, shape, seed).save_pretrained(name)
                    tokenizer.save_pretrained(name)
                times: dict[str, list[float]] = {"measure": [], "compare": []}
                options = {"measure": ("--measures", "minimal-trace"), "compare": ()}
                seconds("compare", *names, "--data", str(text), "--num-sequences", "8")  # imports
                for _ in range(rounds):
                    for command, taken in times.items():
                        taken.append(seconds(command, *names, "--data", str(text), *options[command]))
                        print(kind, shape, command, f"{taken[-1]:.1f} s", flush=True)
                yield {"model": f"{kind} {shape}", **times}


def by_torchao(weight: torch.Tensor, change: Rounding, *, narrow: bool) -> torch.Tensor:
    """Return a matrix (outputs, inputs) as torchao rounds it, to the range -k to k, or to all values of the type."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    inputs = weight.shape[1]
    size = change.group_size or inputs
    # torchao takes whole groups and no float64; the weights were float32
    padded = F.pad(weight.float(), (0, -inputs % size))
    most = 2 ** (change.bits - 1) - 1
    ends = (-most if narrow else -most - 1, most)
    scale, zero = choose_qparams_affine(padded, MappingType.SYMMETRIC, (1, size), torch.int8, *ends)
    whole = quantize_affine(padded, (1, size), scale, zero, torch.int8, *ends)
    back = dequantize_affine(whole, (1, size), scale, zero, torch.int8, *ends, output_dtype=torch.float32)
    return back[:, :inputs].to(weight.dtype)


@torch.no_grad()
def rise_of(model: nn.Module, batch: Mapping[str, torch.Tensor], change: Rounding, *, narrow: bool) -> float:
    """Return the rise of transformers' own loss with the weights that torchao rounds."""
    before = float(model(**batch).loss)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in rounded_layers(model).values():
        turned = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
        turned.copy_(by_torchao(turned.contiguous(), change, narrow=narrow))
    after = float(model(**batch).loss)
    model.load_state_dict(kept)
    return after - before


def rises() -> Iterator[dict[str, Any]]:
    """Yield our rise and torchao's of each trained model, in float64 so that the difference is not rounding."""
    for name, workload in workloads().items():
        if name != "stories":
            workload.train(40)
        model = workload.model.double()
        (batch,) = workload.batches(64, 64, "rises")
        for title in ("int8-rise", "int4-rise"):
            change = ROBUSTNESS[title]
            assert isinstance(change, Rounding)
            ours = loss_rises(model, [batch], {title: change})[title]
            theirs = {f"torchao, {n}": rise_of(model, batch, change, narrow=n == "narrow") for n in ("narrow", "full")}
            yield {"model": workload.name, "change": str(change), "ours": ours.value, "stderr": ours.stderr, **theirs}


def page(record: Mapping[str, Any]) -> str:
    """Return the tables of a record."""
    lines = [*heading("`isoloss compare`: its cost and its rises", dict(record))]
    if record.get("costs"):
        lines += [
            "## Cost beside `isoloss measure`",
            "",
            "Both commands in one process by turns, imports apart, on two models that are not trained, with their "
            f"defaults: 512 sequences of 128 tokens, here with a vocabulary of {VOCABULARY:,}; `measure` takes the "
            "minimal trace, which has the trace in the same pass. Processor seconds, median of the rounds and range.",
            "",
            "| models | rounds | measure, s | compare, s | times |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in record["costs"]:
            cells = []
            for command in ("measure", "compare"):
                taken = row[command]
                cells.append(f"{statistics.median(taken):.1f} ({min(taken):.1f} to {max(taken):.1f})")
            ratios = [b / a for a, b in zip(row["measure"], row["compare"], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            lines.append(f"| {row['model']} | {len(ratios)} | {' | '.join(cells)} |")
        lines.append("")
    if record.get("rises"):
        lines += [
            "## Rises beside torchao",
            "",
            "Weights are rounded by torchao's `choose_qparams_affine`, `quantize_affine` and `dequantize_affine`, "
            "symmetric, by channel or by group, in float32; the loss is transformers' own, in float64. With the values "
            "-127 to 127 and -7 to 7 (narrow), torchao does what `isoloss` does. By default torchao takes -128 to 127 "
            "and -8 to 7 with the scale max |w| / 127.5 or 7.5 (full), which cuts a largest weight that is positive: "
            "another rounding.",
            "",
            "| model | weights | rise by isoloss, nats/token | torchao, narrow, minus isoloss | torchao, full |",
            "|---|---|---:|---:|---:|",
        ]
        for row in record["rises"]:
            apart = row["torchao, narrow"] - row["ours"]
            cells = [f"{row['ours']:.6f} ± {row['stderr']:.6f}", f"{apart:.1e}", f"{row['torchao, full']:.6f}"]
            lines.append(f"| {row['model']} | {row['change']} | {' | '.join(cells)} |")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure, and write the result; what was not measured now stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with openwebtext-1000")
    parser.add_argument("--rounds", type=int, default=5, help="0: no costs")
    parser.add_argument("--torchao", action="store_true", help="compare with torchao, which has to be installed")
    args = parser.parse_args()
    file = RESULTS / "compare.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    record |= record_of("compare.py", LIBRARIES)
    if args.rounds:
        record["costs"] = list(costs(args.data, args.rounds))
    if args.torchao:
        record["rises"] = list(rises())
    write_text(file, json.dumps(record, indent=2) + "\n")
    write_text(RESULTS / "compare.md", page(record))
    print(page(record))


if __name__ == "__main__":
    main()
