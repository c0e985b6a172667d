"""The study in blocks with runs of some seconds, for executors that are stopped while they train."""

import hashlib
import json
import sys

import studies_in_process

STEPS = 1200


def write(folder):
    """Write the study's file; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = studies_in_process.write(folder)
    text = file.read_text()
    assert text.count("steps=6") == 1
    file.write_text(text.replace("steps=6", f"steps={STEPS}").replace("(1, 2, 3)", "(1, 2)"))
    return file


def contents(folder):
    """SHA-256 of every file of the runs, but for those that say when things happened."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "runs").rglob("*"))
        if path.is_file() and path.name not in ("log.jsonl", ".lock")
    }


def ends(folder):
    """How often each kind of end is in the leases of a study's units."""
    leases = (json.loads(path.read_text()) for path in (folder / "units").glob("*/*.json"))
    kinds = [lease["end"] for lease in leases if "end" in lease]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def num_training(folder):
    """How many attempts at runs have a checkpoint and are not published yet."""
    return len({path.parents[1] for path in (folder / "runs").glob(".*.attempt-*/checkpoints/step-*")})


def command(file, folder, *options):
    """The command that carries out the study."""
    words = ("study", "run", str(file), "--folder", str(folder), *map(str, options))
    return [sys.executable, "-m", "isoloss", *words]
