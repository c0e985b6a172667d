"""A convex probe on features in a file that is larger than the memory it may take: peak memory, time and proof."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

import torch
from timing import machine, versions

from isoloss.files import write_text
from isoloss.seeds import generator
from isoloss.transfer.fits.convex import fit
from isoloss.transfer.stored_features import store

RESULTS = Path(__file__).parent / "results"
ROWS = 500  # drawn at once


def gib(size: float) -> float:
    """Return bytes in GiB."""
    return size / 2**30


def peak() -> float:
    """Return the largest resident set of this process so far, in GiB."""
    return gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    """Write the features, fit, delete them, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=24_576)
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--strengths", type=float, nargs="+", default=[1e-1, 1e-2])
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--folder", type=Path, help="for the features; default: where temporary files go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deviations = 5 * torch.arange(1, args.width + 1) ** -0.75
    rule = 3 * torch.randn(args.width, args.classes, generator=generator(0, "rule")) / deviations.norm()
    labels = torch.empty(args.examples, dtype=torch.int64)

    def drawn() -> Iterator[torch.Tensor]:
        for first in range(0, args.examples, ROWS):
            g = generator(0, "block", first)
            x = torch.randn(min(ROWS, args.examples - first), args.width, generator=g) * deviations
            noise = -(-torch.rand(len(x), args.classes, generator=g).log()).log()
            labels[first : first + ROWS] = (x @ rule + noise).argmax(dim=1)
            yield x + 1

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        shape = (args.examples, args.width)
        features = store(Path(folder, "features"), drawn(), shape=shape, dtype=torch.bfloat16)
        size, before = gib(features.path.stat().st_size), peak()
        print(f"{size:.2f} GiB written; peak memory so far {before:.2f} GiB", flush=True)
        began, used = time.perf_counter(), time.process_time()
        found = fit(features, labels, classes=args.classes, regularization=args.strengths, tolerance=args.tolerance)
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
    gap = float((found.gaps / found.objectives).max())
    line = (
        f"| {args.examples:,} x {args.width:,}, {args.classes} | {', '.join(f'{s:g}' for s in args.strengths)} "
        f"| {size:.2f} | {peak():.2f} | {found.passes} | {cpu:.0f} | {seconds:.0f} | {gap:.1e} |"
    )
    print(line)
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/transfer_streamed.py " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "versions": versions(("isoloss", "torch", "numpy")),
        "file_gib": size,
        "peak_gib": peak(),
        "peak_before_gib": before,
        "readings": found.passes,
        "processor_seconds": cpu,
        "seconds": seconds,
        "relative_gap": gap,
        "objectives": found.objectives.flatten().tolist(),
    }
    write_text(RESULTS / "transfer_streamed.json", json.dumps(record, indent=1) + "\n")
    page = [
        "# A convex probe on features in a file: one thread",
        "",
        f"{record['date']}, `{record['command'].strip()}`. {record['machine']}.",
        "",
        "Gaussian features of deviations j^-0.75 in bfloat16. Peak: the largest resident set, Python and torch",
        f"included, of which {before:.2f} GiB before the fit. Above: the proven bound on how far the objective is",
        "above its minimum, relative, the larger of the strengths.",
        "",
        "| n x D, classes | strengths | file, GiB | peak, GiB | readings | processor s | wall-clock s | above |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        line,
    ]
    write_text(RESULTS / "transfer_streamed.md", "\n".join(page) + "\n")


if __name__ == "__main__":
    main()
