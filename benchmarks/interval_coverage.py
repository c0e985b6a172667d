"""How often 95 % intervals on packed text hold the true value: replicates of consecutive rows, through the Python API.

Texts are put end to end and cut into rows of 32 words. Each replicate is 256 consecutive rows, no row is in two, and
the true value is that of all replicates together. What is measured is kept in a folder, from which a run goes on.

Shapes: R replicates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from timing import heading, record_of  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainerControl, TrainerState, TrainingArguments  # noqa: E402

from isoloss.errors import IsolossError  # noqa: E402
from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import FlatnessCallback, compare_traces  # noqa: E402
from isoloss.text.packing import pack  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers")
WORDS, LENGTH, ROWS, STEPS = 1000, 32, 256, 1000
OF_A_NOVEL = 4  # replicates
QUANTITIES = ("trace", "trace by FlatnessCallback", "loss", "difference of traces", "difference of losses")


class Texts:
    """Web pages and novels as ids of the commonest words of the pages; all other words are 2."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "openwebtext-1000" / "openwebtext-1000.decoded.jsonl").read_text().splitlines()
        pages = [json.loads(line)["text"].lower().split() for line in lines]
        names, counts = np.unique(np.concatenate(pages), return_counts=True)
        self._ids = {name: number + 3 for number, name in enumerate(names[np.argsort(-counts)[: WORDS - 3]])}
        self.pages = [self._read(page) for page in pages if page]
        self.novels = [self._read(path.read_text().lower().split()) for path in sorted(folder.glob("novels/*.txt"))]

    def _read(self, words: list[str]) -> np.ndarray[Any, Any]:
        return np.array([self._ids.get(word, 2) for word in words])


def packed(texts: list[np.ndarray[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (n, 32) of texts end to end, and (n,) the text in which each begins."""
    rows = np.concatenate(list(pack(iter(texts), LENGTH)))
    starts = np.arange(len(rows)) * LENGTH
    return torch.from_numpy(rows), torch.from_numpy(np.searchsorted(np.cumsum([*map(len, texts)]), starts, "right"))


def batches(texts: Texts) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each replicate with the name of its case."""
    rows, of_row = packed(texts.pages)
    for part, documents in zip(rows.split(ROWS), of_row.split(ROWS), strict=True):
        if len(part) == ROWS:
            yield "without documents", {"input_ids": part, "labels": part}
            yield "with documents", {"input_ids": part, "labels": part, "documents": documents}
    for novel in texts.novels:
        for part in packed([novel])[0].split(ROWS)[:OF_A_NOVEL]:
            yield "novels, without documents", {"input_ids": part, "labels": part}


def trained(seed: int, rows: torch.Tensor, folder: Path) -> GPT2LMHeadModel:
    """Return a small GPT-2, from the folder where it is there."""
    if not folder.exists():
        torch.manual_seed(seed)
        sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
        no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, bos_token_id=None, eos_token_id=None, **sizes, **no_dropout)
        )
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(STEPS):
            batch = rows[torch.randint(len(rows), (64,), generator=torch.Generator().manual_seed(step))]
            optimizer.zero_grad()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
        model.save_pretrained(folder)
    return GPT2LMHeadModel.from_pretrained(folder).eval()


def measured(models: Mapping[str, GPT2LMHeadModel], batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the value, the interval and the predictions of each quantity, and what the errors are over."""
    callback = FlatnessCallback([batch], every=1, seed=1)
    step = TrainerState(global_step=1, is_world_process_zero=True)
    callback.on_step_end(TrainingArguments("unused"), step, TrainerControl(), model=models["b"])
    comparison = compare_traces(models, [batch])
    first = comparison.models["a"]
    differences = (comparison.difference(name, "a", "b") for name in ("trace", "loss"))
    found = (first["trace"], callback.traces[1], first["loss"], *differences)
    values = {name: (e.value, *e.ci95, e.num_predictions) for name, e in zip(QUANTITIES, found, strict=True)}
    return {"values": values, "over": first["trace"].details["clusters"]}


def covered(replicates: list[dict[str, Any]], quantity: str) -> list[bool]:
    """Return (R,) whether each interval holds the value of all replicates together."""
    values, low, high, predictions = np.array([each["values"][quantity] for each in replicates]).T
    truth = np.average(values, weights=predictions)
    return ((low < truth) & (truth < high)).tolist()


def page(record: Mapping[str, Any]) -> str:
    """Return the table of a record."""
    lines = [
        *heading("How often 95 % intervals on packed text hold the true value", dict(record)),
        f"Two GPT-2s of width 32 with 2 layers, after {STEPS} steps on the web pages from two initializations. Texts "
        f"are put end to end and cut into rows of {LENGTH} words; a replicate is {ROWS} consecutive rows, no row is in "
        "two, and the true value is that of all replicates of the case together. The trace and the loss of the first "
        "model and the differences are by `compare`, the callback measures the second with other probes, by "
        "`fisher_trace`. The interval is `ci95`; standard "
        "errors of the shares are over replicates. A replicate within a single text has no interval with `documents`: "
        "the call is refused.",
        "",
        "| case | replicates | refused | " + " | ".join(QUANTITIES) + " |",
        "|---|---:|---:|" + "---:|" * len(QUANTITIES),
    ]
    for case, numbers in record["cases"].items():
        shares = (f"{100 * share:.1f} ± {100 * error:.1f} %" for share, error in numbers["covered"].values())
        lines.append(f"| {case} | {numbers['replicates']} | {numbers['refused']} | {' | '.join(shares)} |")
    lines += ["", "What the results say that the errors are over, of the replicates:", ""]
    for case, numbers in record["cases"].items():
        lines += [f"- {case}: {', '.join(f'{over} ({number})' for over, number in numbers['over'].items())}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is not there yet, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with openwebtext-1000 and novels")
    parser.add_argument("--work", type=Path, default=Path("runs/interval-coverage"), help="where the run goes on from")
    args = parser.parse_args()
    texts = Texts(args.data)
    rows, _ = packed(texts.pages)
    models = {name: trained(seed, rows, args.work / name) for seed, name in enumerate("ab")}
    file = args.work / "replicates.jsonl"
    done = len(file.read_text().splitlines()) if file.exists() else 0
    for number, (case, batch) in enumerate(batches(texts)):
        if number < done:
            continue
        try:
            found = {"case": case, **measured(models, batch)}
        except IsolossError as error:
            found = {"case": case, "refused": str(error)}
        with file.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
    cases: dict[str, Any] = {}
    replicates = [json.loads(line) for line in file.read_text().splitlines()]
    for case in dict.fromkeys(each["case"] for each in replicates):
        of_case = [each for each in replicates if each["case"] == case]
        kept = [each for each in of_case if "values" in each]
        shares = {quantity: float(np.mean(covered(kept, quantity))) for quantity in QUANTITIES}
        counted = (each["over"] if case != "with documents" else "documents" for each in kept)
        cases[case] = {
            "replicates": len(kept),
            "refused": len(of_case) - len(kept),
            "covered": {name: (share, math.sqrt(share * (1 - share) / len(kept))) for name, share in shares.items()},
            "over": dict(Counter(counted)),
        }
    record = {**record_of("interval_coverage.py", LIBRARIES), "cases": cases}
    write_text(RESULTS / "interval_coverage.json", json.dumps(record, indent=2) + "\n")
    write_text(RESULTS / "interval_coverage.md", page(record))
    print(page(record))


if __name__ == "__main__":
    main()
