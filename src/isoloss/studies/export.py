"""Export of a finished study: its numbers, how they were made, and its page, in one small folder."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies import page
from isoloss.studies.folder import StudyFolder
from isoloss.studies.results import Results

VALUES, SUMMARY, PROVENANCE = "values.csv", "summary.json", "provenance.json"
COLUMNS = ("run", "group", "block", "size", "step", "estimate", "value", "standard error", "unit")
SAME = ("study", "scale", "seed_offset")  # what identifies an export


def export(folder: StudyFolder, output: Path) -> None:
    """Write the results of a finished study to `output`, whole or not at all.

    - `values.csv`: a row for each checkpoint and estimate; an accuracy is a fraction from 0 to 1.
    - `summary.json`: the study's tables and claims.
    - `provenance.json`: study, scale and seeds, the fingerprints of the configs, versions, processor, seconds.
    - `index.html` and `figures/`: the page, with figures as PNG.

    No file names a path of this machine.

    Args:
        folder: The study.
        output: New, empty, or an earlier export of the same study, scale and seeds, which is replaced.

    Raises:
        IsolossError: The study is not finished, or `output` is something else or cannot be written.
    """
    provenance = _provenance(folder)
    _check(output, provenance)
    results = folder.results()
    try:
        with files.new_directory(output) as new:
            files.write_text(new / VALUES, _values(results))
            summary = {key: provenance[key] for key in SAME} | folder.summary(results).to_dict()
            files.write_json(new / SUMMARY, summary)
            files.write_json(new / PROVENANCE, provenance)
            page.write(folder, results, new / "index.html", formats=("png",))
    except OSError as error:
        raise IsolossError(f"cannot write {output}: {error.strerror or error}") from error


def _check(output: Path, provenance: dict[str, Any]) -> None:
    """Refuse to replace anything but an earlier export of the same results."""
    if (output / PROVENANCE).is_file():
        found = files.read_json(output / PROVENANCE)
        held, ours = (
            ", ".join(f"{key.replace('_', ' ')} {one.get(key)}" for key in SAME) for one in (found, provenance)
        )
        if held != ours:
            raise IsolossError(
                f"{output} holds other results ({held}), which this export ({ours}) does not replace: choose another "
                "--output"
            )
    else:
        files.check_new(output)


def _values(results: Results) -> str:
    """Return the rows of values.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (run, step), checkpoint in results.checkpoints.items():
        experiment = results.experiments[run]
        row = (run, experiment.group or run, experiment.block, experiment.config.model.size or "free shape", step)
        for key, one in checkpoint.items():
            writer.writerow((*row, key, one.estimate.value, one.estimate.stderr, one.estimate.unit))
    return text.getvalue()


def _provenance(folder: StudyFolder) -> dict[str, Any]:
    """Return how the results were made."""
    results, claims = folder.results(), folder.study.claims
    made: dict[str, dict[str, Any]] = {}  # most often one; a study that went on with another version has two
    for name in results.experiments:
        record = {key: results.run(name).record[key] for key in ("versions", "commit")}
        made.setdefault(json.dumps(record), {**record, "runs": []})["runs"].append(name)
    return {
        "study": folder.study.name,
        "scale": folder.scale_name,
        "seed_offset": folder.seed_offset,
        "description": folder.scale.description,
        "blocks": results.blocks,
        "runs": {name: configs.fingerprint(one.config) for name, one in results.experiments.items()},
        "claims_sha256": None if claims is None else files.sha256(claims),
        "made_with": list(made.values()),
        "exported_with": {"isoloss": metadata.version("isoloss"), "processor": processor()},
        "units": len(folder.plan()),
        "unit_seconds": round(sum(each for name in results.experiments for each in _seconds(results.run(name))), 1),
    }


def _seconds(run: Run) -> Iterator[float]:
    """Yield the seconds that training and each evaluation of a run took, as logged."""
    log = run.path / "log.jsonl"
    for line in log.read_text().splitlines() if log.is_file() else ():
        with contextlib.suppress(ValueError):  # of a line cut short by a full disk or a power failure
            yield json.loads(line).get("seconds", 0.0)


def processor() -> str:
    """Return this machine's processor in words.

    Example:
        >>> "cores" in processor()
        True
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.processor() or 'unknown')}, {platform.machine()}, {os.cpu_count()} cores"
