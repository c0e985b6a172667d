"""Whether a model beats the look-up table, by a probe on raw and on standardized features.

Random grammars of the shape of `pcfg-laptop`, each with a d32 BERT trained briefly; the paper's probe (AdamW, 1e-3, 100
epochs) on 2,000 sentences of the task prefix-4. Both are tested on the same sentences, and grammars are the sample.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from timing import heading, record_of

from isoloss import linear_probe, load_model, make_task, pretrain
from isoloss.files import write_text
from isoloss.lab.languages.config import PRESETS
from isoloss.lab.lookup import lookup_probe
from isoloss.run_config import ModelConfig, TrainConfig

RESULTS = Path(__file__).parent / "results"
GRAMMARS, STEPS, EXAMPLES, SEEDS = range(900, 905), 1000, 2000, 2


def main() -> None:
    """Train, probe, and write the differences in percentage points."""
    torch.set_num_threads(1)
    rows: dict[str, list[float]] = {"raw": [], "standardized": []}
    for grammar in GRAMMARS:
        language = dataclasses.replace(PRESETS["pcfg-laptop"][0], seed=grammar)
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(
                language=language, model=ModelConfig(size="d32"), steps=STEPS, batch_size=64, threads=1, device="cpu"
            )
            run = pretrain(Path(folder, "run"), config)
            model = load_model(run.checkpoint(STEPS), device="cpu").model
        built = language.build()
        task = make_task(built, "prefix-4", num_train=EXAMPLES, num_test=EXAMPLES, seed=0)
        for name, standardize in (("raw", False), ("standardized", True)):
            settings = {"seeds": SEEDS, "standardize": standardize}
            ours, table = linear_probe(model, task, **settings), lookup_probe(built, task, **settings)
            rows[name].append(100 * (ours.accuracy.value - table.accuracy.value))
            print(grammar, name, ours.accuracy, table.accuracy, flush=True)
    record = {**record_of("lookup_features.py", ("isoloss", "torch", "transformers", "numpy")), "results": rows}
    lines = heading("The model minus the look-up table, percentage points", record)
    lines += [" ".join((__doc__ or "").split()), ""]
    lines += [f"Grammars {GRAMMARS.start} to {GRAMMARS.stop - 1}, {STEPS:,} training steps of 64 sentences,"]
    lines += [f"{EXAMPLES:,} test sentences, {SEEDS} probes each; mean and standard error over grammars.", ""]
    lines += ["| features | model minus look-up table | by grammar |", "|---|---:|---|"]
    for name, values in rows.items():
        error = statistics.stdev(values) / math.sqrt(len(values))
        each = ", ".join(f"{value:+.1f}" for value in values)
        lines.append(f"| {name} | {statistics.mean(values):+.1f} \u00b1 {error:.1f} | {each} |")
    write_text(RESULTS / "lookup_features.md", "\n".join(lines) + "\n")
    write_text(RESULTS / "lookup_features.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
