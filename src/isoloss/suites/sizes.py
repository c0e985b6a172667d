"""The sizes of checkpoints and of their downloads, without reading weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from isoloss.checkpoints.places import downloaded
from isoloss.checkpoints.stored import stored_weights
from isoloss.errors import IsolossError
from isoloss.suites.config import Member, SuiteConfig

_STORED = 2  # bytes of a parameter on the hub, if not known: most are in 16 bits


@dataclass(frozen=True)
class Size:
    """The size of a checkpoint."""

    parameters: int | None = None  # None: not known
    download: int | None = None  # in bytes; 0 if it is on this machine
    source: str = "nothing"  # of the numbers


def sizes(config: SuiteConfig, members: tuple[Member, ...]) -> dict[str, Size]:
    """Return the size of each checkpoint by name; once the hub does not answer, it is not asked again."""
    found, ask = {}, True
    for member in members:
        folder = Path(member.name).expanduser()
        name, _, revision = member.name.partition("@")
        size = None
        try:
            there = folder if folder.is_dir() else downloaded(name, revision or None)
            parameters = sum(math.prod(weight.shape) for weight in stored_weights(str(there)).values())
            size = Size(parameters, 0, "headers of files") if parameters else None
        except (IsolossError, ValueError, OSError):  # not on this machine
            if ask and not folder.is_absolute():
                size, ask = _of_hub(name, revision or None)
        found[member.name] = size or _of_table(config.parameters, member)
    return found


def _of_hub(name: str, revision: str | None) -> tuple[Size | None, bool]:
    """Return the size from the hub's metadata, and whether the hub answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=20)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None, True
    except Exception:  # whatever the network or its library can raise
        return None, False
    files = [each for each in info.siblings or () if each.rfilename.endswith(".safetensors")]
    bytes_there = sum(each.size or 0 for each in files)
    parameters = info.safetensors.total if info.safetensors else bytes_there // _STORED
    return (Size(parameters, bytes_there, "the hub's metadata") if bytes_there else None), True


def _of_table(table: Mapping[str, Mapping[str, float]], member: Member) -> Size:
    for label, by_value in table.items():
        if (parameters := by_value.get(str(member.labels.get(label)))) is not None:
            return Size(int(parameters), _STORED * int(parameters), "the suite's table of parameters")
    return Size()
