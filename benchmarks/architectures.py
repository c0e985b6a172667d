"""Whether the Fisher's trace is right for every architecture of language model in transformers.

Tiny random models, noise on every parameter, and the same with zeros where zeros are usual at initialization; the
truth is an enumeration of all labels with a plain backward pass each. Of the estimate nothing is random: its random
signs are replaced by the rows of a Hadamard matrix, over which its mean is the trace exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import inspect
import io
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")  # before the libraries are loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from timing import heading, machine, versions  # noqa: E402
from tiny_models import HEAD, PAD, VARIANTS, VOCABULARY, Architecture, architectures, build, zero  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from isoloss.checkpoints.loading import load_model, quiet  # noqa: E402
from isoloss.cli.main import main as isoloss  # noqa: E402
from isoloss.errors import IsolossError  # noqa: E402
from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import fisher_trace  # noqa: E402
from isoloss.flatness._ghost import controls  # noqa: E402
from isoloss.lab.evaluation.context import ModelInfo, data_context  # noqa: E402
from isoloss.lab.evaluation.input_config import InputConfig  # noqa: E402
from isoloss.seeds import generator  # noqa: E402

FEWEST = 150  # classes that can be built, or the script no longer fits transformers
RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "numpy")
LENGTH = 6
# tokens and predicted positions of each sequence of two batches, the second with an attention mask
BATCHES = (((6, (1, 3)), (6, (2,))), ((6, (1, 4)), (4, (2,))))
# relative, and of the total; norms and rotations of many models compute in float32 whatever the weights are
TOLERANCES = {torch.float64: (1e-8, 1e-12), torch.float32: (1e-4, 1e-7)}


Batch = dict[str, torch.Tensor]


def batches_for(model: nn.Module, *, causal: bool) -> list[Batch]:
    """Return two batches of two sequences: whole ones without a mask, and padded ones."""
    found = []
    for number, rows in enumerate(BATCHES):
        tokens = torch.randint(3, VOCABULARY, (len(rows), LENGTH), generator=generator(0, "tokens", number))
        tokens[:, 3] = tokens[:, 1]  # a token twice, whose gradients add
        mask = (torch.arange(LENGTH) < torch.tensor([length for length, _ in rows])[:, None]).long()
        tokens = tokens.masked_fill(mask == 0, PAD)
        labels = torch.full_like(tokens, -100)
        for row, (_, positions) in enumerate(rows):
            for position in positions:
                place = position + 1 if causal else position
                labels[row, place] = tokens[row, place]
        found.append({"input_ids": tokens, "labels": labels})
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        found[-1]["attention_mask"] = mask
    return found


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the model's logits (B, T, V), by a plain call."""
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    logits: torch.Tensor = model(**inputs).logits
    return logits


def log_probabilities(model: nn.Module, batch: Batch, *, causal: bool) -> torch.Tensor:
    """Return (m, V) float64: the logarithms of the model's probabilities at the predicted positions.

    Raises:
        ArithmeticError: They are not finite.
    """
    predicted = batch["labels"] != -100
    if causal:
        predicted = torch.cat([predicted[:, 1:], torch.zeros_like(predicted[:, :1])], dim=1)
    log_p = logits_of(model, batch)[predicted].double().log_softmax(dim=-1)
    if not bool(log_p.isfinite().all()):
        raise ArithmeticError("its logits are not finite")
    return log_p


def exact_trace(model: nn.Module, batches: Sequence[Batch], *, causal: bool) -> dict[str, float]:
    """Return the trace by parameter: `sum_y p_y |grad log p_y|^2`, a backward pass a label, mean over positions."""
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    log_p = [position for batch in batches for position in log_probabilities(model, batch, causal=causal)]
    totals = dict.fromkeys(named, 0.0)
    for position in log_p:
        for log_probability in position:
            gradients = torch.autograd.grad(log_probability, list(named.values()), retain_graph=True, allow_unused=True)
            weight = float(log_probability.detach().exp()) / len(log_p)
            for name, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    totals[name] += weight * float(dense.double().square().sum())
    return totals


@contextlib.contextmanager
def orthogonal_signs(rows: int) -> Iterator[int]:
    """Let the estimate's signs be the rows of a Hadamard matrix, one a probe; yields how many probes go through them.

    With H^T H = n I the mean of v^T M v over the rows v is the trace of M, for each sequence alone.

    Args:
        rows: The most signs of one sequence.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < rows:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    drawn = controls.packed_probes

    def packed(streams: controls.Streams, device: torch.device, seed: int, *, copies: int = 1) -> torch.Tensor:
        if streams[0][1][0] != "probes":
            return drawn(streams, device, seed, copies=copies)
        octets = []
        for count, (_, _, probe) in streams:
            bits = torch.zeros(8 * ((count + 7) // 8), dtype=torch.int64)
            bits[:count] = (matrix[int(probe), :count] > 0).long()
            octets.append((bits.view(-1, 8) << torch.arange(8)).sum(dim=1).to(torch.uint8))
        return torch.cat(octets).expand(copies, -1)

    controls.packed_probes = packed  # type: ignore[assignment]
    try:
        yield len(matrix)
    finally:
        controls.packed_probes = drawn


class _Narrowest(TorchDispatchMode):
    """Notes whether anything is computed in less than float64."""

    dtype = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16):
                self.dtype = torch.float32
        return result


def check(model: nn.Module, *, causal: bool) -> dict[str, Any]:
    """Compare a model's trace with the enumeration, in all and by parameter.

    Returns:
        `outcome`: right, wrong, refused (by one clear sentence) or failed (any other error); and its particulars.

    Raises:
        ArithmeticError: The model's own logits are not finite.
    """
    batches = batches_for(model, causal=causal)
    with _Narrowest() as narrowest:
        logits_of(model, batches[0])
    relative, of_total = TOLERANCES[narrowest.dtype]
    expected = exact_trace(model, batches, causal=causal)
    total = sum(expected.values())
    row: dict[str, Any] = {"exact": total, "dtype": str(narrowest.dtype).removeprefix("torch.")}
    try:
        most = max(len(positions) for rows in BATCHES for _, positions in rows)
        with orthogonal_signs(VOCABULARY * most) as num_probes:
            found = fisher_trace(model, batches, num_probes=num_probes, causal=causal)
    except IsolossError as error:
        return {"outcome": "refused", "message": str(error), **row}
    except Exception as error:
        return {"outcome": "failed", "message": _first_line(error), **row}
    assert found.by_parameter is not None
    wrong = {
        name: [found.by_parameter.get(name, 0.0), value]
        for name, value in expected.items()
        if not abs(found.by_parameter.get(name, 0.0) - value) <= relative * value + of_total * total
    }
    gap = abs(found.value - total)
    is_right = not wrong and gap <= relative * total and found.by_parameter.keys() == expected.keys()
    return {
        "outcome": "right" if is_right else "wrong",
        "trace": found.value,
        "relative_difference": gap / total if total else gap,
        **({"wrong": wrong} if wrong else {}),
        "positions_selected": found.details["positions_selected"],
        "parameters": len(expected),
        "parameters_by_autograd": len(found.details["parameters_by_autograd"]),
        **row,
    }


def check_command_line(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Save a model, measure the folder by `isoloss measure`, and compare with the enumeration of the model itself.

    Returns:
        `outcome`, as for `check`, and a `message` that says why it is not right.
    """
    model = build(architecture, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder, orthogonal_signs(2 * VOCABULARY) as num_probes:
        data, out, said = Path(folder) / "tokens.npy", io.StringIO(), io.StringIO()
        tokens = torch.randint(3, VOCABULARY - 1, (4, 3), generator=generator(0, "tokens of a file"))
        tokens[-1, -1] = -1  # padding
        np.save(data, tokens.numpy())
        name = str(dtype).removeprefix("torch.")
        words = ["--num-probes", str(num_probes), "--dtype", name, "--threads", "1"]
        config = InputConfig(mask_id=None if architecture.causal else VOCABULARY - 1)
        if config.mask_id is not None:
            words += ["--mask-id", str(config.mask_id)]
        try:
            with quiet():
                model.save_pretrained(folder)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
                status = isoloss(["measure", folder, "--data", str(data), "--measures", "trace", "--json", *words])
            if status:
                message = said.getvalue().splitlines()[-1].removeprefix("isoloss measure: ")
                return {"outcome": "refused", "message": message.removeprefix(folder).strip()}
            info = ModelInfo.of(load_model(folder, dtype=dtype, device="cpu"))
        except Exception as error:
            return {"outcome": "failed", "message": _first_line(error)}
        inputs = data_context(data, [info], config, shuffled=False).inputs(512, 0)
        expected = sum(exact_trace(model, inputs.batches, causal=info.outline.causal).values())
        found = json.loads(out.getvalue())["evaluations"][0]["estimates"]["trace"]["value"]
    if abs(found - expected) > max(tolerance for tolerance, _ in TOLERANCES.values()) * expected:
        return {"outcome": "wrong", "message": f"{found:.6g} for {expected:.6g}"}
    return {"outcome": "right"}


def measured(architecture: Architecture) -> dict[str, Any]:
    """Check a class at each variant; one whose own forward or backward pass fails is left out, with the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _checked(architecture, torch.float64)
        except Exception as first:
            try:  # some compute in float32 whatever their weights are
                return _checked(architecture, torch.float32)
            except Exception:
                return {"model": architecture.name, "left_out": _first_line(first)}


def _checked(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    variants = _variants(architecture, dtype)
    return {
        "model": architecture.name,
        "variants": variants,
        "command_line": check_command_line(architecture, dtype),
    }


def _variants(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    found = {}
    for variant in VARIANTS:
        model = build(architecture, tied=False if variant == HEAD else None, dtype=dtype)
        zeros = zero(model, variant)
        if zeros or variant == VARIANTS[0]:
            found[variant] = {"zeroed": len(zeros), **check(model, causal=architecture.causal)}
    return found


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:157] + '...'}"


def outcomes(rows: Sequence[Mapping[str, Any]], variant: str) -> Counter[str]:
    """Return how many models had which outcome at a variant."""
    return Counter(row["variants"][variant]["outcome"] for row in rows if variant in row.get("variants", {}))


def page(record: dict[str, Any]) -> str:
    """Return the record as a page in Markdown."""
    rows = record["models"]
    checked = [row for row in rows if "variants" in row]
    lines = [
        *heading("Architectures: the trace against an enumeration of labels, on one thread", record),
        f"{len(checked)} of the {len(rows)} classes that transformers lists for causal and masked language models, "
        f"each with {VOCABULARY} tokens and mostly two layers. All parameters have noise of standard deviation 0.2. "
        "In the other variants the weights of one kind of projection are also zero, in models that have it. A result "
        "is right if the trace and every parameter's share agree with the enumeration: within "
        f"{TOLERANCES[torch.float64][0]:g} of the value where all of the model computes in float64, within "
        f"{TOLERANCES[torch.float32][0]:g} where part of it, be it a mask, is in float32. Refused means one clear "
        "sentence, failed any other error. The table of classes gives the relative difference of the trace.",
        "",
        f"{sum(row['command_line']['outcome'] == 'right' for row in checked)} of them are also measured through the "
        "command line: the model is saved, `isoloss measure FOLDER --data tokens.npy` measures it, and its trace "
        f"agrees with the enumeration within {TOLERANCES[torch.float32][0]:g}. Else the table says why not.",
        "",
        "| variant | models | right | wrong | failed | refused |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for variant in VARIANTS:
        count = outcomes(rows, variant)
        cells = [variant, sum(count.values()), *(count[name] for name in ("right", "wrong", "failed", "refused"))]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    titles = ["class", *VARIANTS, "computes in", "parameters by autograd", "through the command line"]
    lines += ["", "## Each class", "", f"| {' | '.join(titles)} |"]
    lines.append("|---|" + "---|" * len(VARIANTS) + "---|---:|---|")
    for row in checked:
        first = row["variants"][VARIANTS[0]]
        slow = f"{first['parameters_by_autograd']} of {first['parameters']}" if "parameters" in first else ""
        commands = row["command_line"]
        said = "yes" if commands["outcome"] == "right" else f"{commands['outcome']}: {commands['message']}"
        cells = [row["model"], *(_cell(row["variants"].get(name)) for name in VARIANTS), first["dtype"], slow, said]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Not right", ""]
    lines += [f"- {line}" for row in checked for line in _complaints(row)] or ["None."]
    lines += ["", "## Left out", ""]
    lines += [f"- {row['model']}: {row['left_out']}" for row in rows if "left_out" in row] or ["None."]
    return "\n".join(lines) + "\n"


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "has none"
    if result["outcome"] != "right":
        return str(result["outcome"])
    return f"{result['relative_difference']:.0e}"


def _complaints(row: Mapping[str, Any]) -> Iterator[str]:
    """Say what is not right with a class, a line a variant."""
    for variant, result in row["variants"].items():
        if result["outcome"] == "right":
            continue
        if "message" in result:
            yield f"{row['model']}, {variant}: {result['outcome']}: {result['message']}"
            continue
        shares = result.get("wrong", {}).items()
        parts = [f"`{name}` {found:.6g} for {exact:.6g}" for name, (found, exact) in shares]
        more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
        whole = f"{result['trace']:.6g} for {result['exact']:.6g}"
        yield f"{row['model']}, {variant}: wrong, {whole}: {', '.join(parts[:4])}{more}"


def main() -> int:
    """Check all classes, write what was found, and return 1 where one is not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="classes, such as GPT2LMHeadModel; default: all")
    parser.add_argument("--output", type=Path, help="for the table as JSON, and beside it as .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    known = {architecture.name: architecture for architecture in architectures()}
    if unknown := set(options.models or ()) - known.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no class that transformers lists for language models")
    out = options.output or (None if options.models else RESULTS / "architectures.json")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rows = []
    for name in options.models or known:
        begun = time.perf_counter()
        rows.append(row := measured(known[name]))
        found = [f"{key}: {value['outcome']}" for key, value in row.get("variants", {}).items()]
        print(f"{name} ({time.perf_counter() - begun:.1f} s): {', '.join(found) or row['left_out']}", flush=True)
        for line in _complaints(row) if found else ():
            print(f"    {line}", flush=True)
        if found:
            print(f"    through the command line: {row['command_line']}", flush=True)
    record = {
        "command": " ".join(
            ["python", "benchmarks/architectures.py", *(["--models", *options.models] if options.models else [])]
        ),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": load,
        "versions": versions(LIBRARIES),
        "models": rows,
    }
    if out is not None:
        write_text(out, json.dumps(record, indent=1) + "\n")
        write_text(out.with_suffix(".md"), page(record))
    print()
    for variant in VARIANTS:
        print(f"{variant}: " + ", ".join(f"{number} {name}" for name, number in outcomes(rows, variant).most_common()))
    bad = [count[name] for variant in VARIANTS for name in ("wrong", "failed") if (count := outcomes(rows, variant))]
    bad += [row.get("command_line", {}).get("outcome") in ("wrong", "failed") for row in rows]
    if options.models is None and sum(outcomes(rows, VARIANTS[0]).values()) < FEWEST:
        print(f"fewer than {FEWEST} classes could be checked")
        return 1
    return 1 if sum(bad) else 0


if __name__ == "__main__":
    raise SystemExit(main())
