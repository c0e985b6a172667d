"""How a study's results were made: the content of an export's provenance.json."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import files
from isoloss.runs import Run

if TYPE_CHECKING:
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.results import Results


def provenance(folder: StudyFolder, results: Results) -> dict[str, Any]:
    """Return how results of a study were made."""
    claims = folder.study.claims
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
        "blocks_done": results.blocks_done,
        "runs": {name: one.fingerprint for name, one in results.experiments.items()},
        "claims_sha256": None if claims is None else files.sha256(claims),
        "made_with": list(made.values()),
        "exported_with": {"isoloss": metadata.version("isoloss"), "processor": processor()},
        "units": len(folder.plan()),
        "unit_seconds": round(sum(_seconds(results)), 1),
    }


def _seconds(results: Results) -> Iterator[float]:
    """Yield the seconds that each training and evaluation took, as logged."""
    for name in results.experiments:
        for entry in _log(results.run(name)):
            yield entry.get("seconds", 0.0)


def _log(run: Run) -> Iterator[Mapping[str, Any]]:
    path = run.path / "log.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # of a line cut short by a full disk or a power failure
            yield json.loads(line)


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
