"""Archive of a study: the results of its complete blocks without checkpoints, which count as done when unpacked.

A file for each block, `block-N.tar.xz`, holds the block's run directories without checkpoints. Of the files with what
each example adds to an estimate, it holds those that have anything else as well: without the others, errors of
differences between two checkpoints are unpaired, while those over seeds or clusters are as before. A run that comes
from an archive has a file `archived.json`, with the SHA-256 of its other files.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.evaluation.external import RECORD
from isoloss.runs import ARCHIVED, Run
from isoloss.studies.folder import StudyFolder
from isoloss.studies.growing import complete_blocks
from isoloss.studies.results import ARCHIVE_FILES, run_of
from isoloss.studies.spec import Experiment

_OF_EXAMPLES = ("influence", "predictions", "labels")  # arrays that only serve the errors of paired differences
_FILES = ("run.json", RECORD, "result.json", "metrics.jsonl", "log.jsonl")


def archive(folder: StudyFolder, output: Path) -> list[Path]:
    """Write the complete blocks of a study to `output`, a file each, and return the files that are new or differ.

    Equal results give equal bytes, so that a repository of archives grows by new blocks only.

    Args:
        folder: The study, finished or not.
        output: Folder of the archive, e.g. an earlier archive of the same study.

    Raises:
        IsolossError: No block is complete, or `output` cannot be written.
    """
    units = folder.plan()
    complete = complete_blocks(units, {unit.name for unit in units if unit.done()})
    if not complete:
        raise IsolossError(f"no block of {folder.path} is complete yet: an archive holds complete blocks")
    written = []
    for block in complete:
        runs = {name: one for name, one in folder.scale.experiments.items() if one.block == block}
        content, path = _packed(folder.path, runs), output / f"block-{block:03}.tar.xz"
        if not path.is_file() or path.read_bytes() != content:
            files.write_bytes(path, content)
            written.append(path)
    return written


def blocks(archive: Path) -> list[Path]:
    """Return the files of an archive, a block each; an error if there are none."""
    paths = sorted(archive.glob(ARCHIVE_FILES)) if archive.is_dir() else []
    if not paths:
        raise IsolossError(f"{archive} holds no archive of a study: it has no block-N.tar.xz{files.nearest(archive)}")
    return paths


def check(folder: StudyFolder, archive: Path) -> None:
    """Refuse an archive that cannot be unpacked into a study, before anything is written.

    Raises:
        IsolossError: There is no archive, a file of it is damaged, or it holds no run of this plan.
    """
    if not sum(1 for _ in _wanted(folder, archive)):
        raise IsolossError(
            f"{archive} holds no run of the study {folder.study.name} at scale {folder.scale_name}: it was made by "
            "another plan"
        )


def restore(folder: StudyFolder, archive: Path) -> list[str]:
    """Unpack the runs of an archive that are in the study's plan and not in its folder; return their names.

    Raises:
        IsolossError: There is no archive, or a file of it is damaged.
    """
    restored = []
    for name, members in _wanted(folder, archive):
        run = run_of(folder.path, name, folder.scale.experiments[name])
        if run.complete:
            continue
        with files.new_output(run.path) as new:
            for member, content in members.items():
                files.write_bytes(new / member, content)
        restored.append(name)
    return restored


def _wanted(folder: StudyFolder, archive: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the runs of an archive that are in the study's plan, with the content of their files."""
    wanted = {name: one.fingerprint for name, one in folder.scale.experiments.items()}
    for path in blocks(archive):
        for name, members in _runs(path):
            if json.loads(members[ARCHIVED])["fingerprint"] == wanted.get(name):
                yield name, members


def _packed(folder: Path, runs: Mapping[str, Experiment]) -> bytes:
    """Return the archive of some runs; a pure function of their files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, experiment in sorted(runs.items(), key=lambda each: each[0]):
            members = dict(_members(run_of(folder, name, experiment)))
            sums = {member: hashlib.sha256(content).hexdigest() for member, content in members.items()}
            record = {"fingerprint": experiment.fingerprint, "files": sums}
            members = {ARCHIVED: (json.dumps(record, indent=1) + "\n").encode(), **members}
            for member, content in members.items():
                about = tarfile.TarInfo(f"{name}/{member}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=6)


def _members(run: Run) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a run that an archive holds, by their paths in the run."""
    names = [name for name in _FILES if (run.path / name).is_file()]
    for path in sorted((run.path / "evaluations").rglob("*")):
        if path.suffix == ".json" or (path.suffix == ".safetensors" and _has_more(path)):
            names.append(str(path.relative_to(run.path)))
    for name in names:
        yield name, (run.path / name).read_bytes()


def _has_more(path: Path) -> bool:
    """Whether a file of examples has arrays that are not only for the errors of paired differences."""
    from safetensors import safe_open

    with safe_open(path, "numpy") as arrays:
        return any(name.rpartition(".")[2] not in _OF_EXAMPLES for name in arrays.keys())  # noqa: SIM118


def _runs(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the runs in a file of an archive, with the content of their files."""
    runs: dict[str, dict[str, bytes]] = {}
    name = ""
    try:
        with tarfile.open(path, mode="r:xz") as tar:
            for about in tar:
                if about.name.endswith(f"/{ARCHIVED}"):  # the first file of each run
                    name = about.name.removesuffix(f"/{ARCHIVED}")
                member = about.name.removeprefix(f"{name}/")
                file = tar.extractfile(about)
                if file is None or member == about.name or not {"..", ""}.isdisjoint(about.name.split("/")):
                    raise IsolossError(f"{path} is not an archive of a study: it holds {about.name!r}")
                runs.setdefault(name, {})[member] = file.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise IsolossError(f"{path} cannot be read: {error}") from error
    for name, members in runs.items():
        try:
            record = json.loads(members[ARCHIVED])
            sums, _ = dict(record["files"]), record["fingerprint"]
            wrong = {*sums, *members} - {ARCHIVED}
            wrong = {each for each in wrong if hashlib.sha256(members[each]).hexdigest() != sums[each]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IsolossError(f"{path} is damaged: the files of {name} are not those that were archived") from error
        if wrong:
            raise IsolossError(f"{path} is damaged: {name}/{min(wrong)} is not what was archived")
        yield name, members
