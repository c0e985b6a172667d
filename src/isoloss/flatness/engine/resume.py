"""The file that a long measurement goes on from: what has been summed, and of what, whole or absent at any moment."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.statistics.ratio_estimator import Tally

_EVERY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a measurement has come: batches, sequences and predicted positions done, and the seconds it took."""

    batches: int = 0
    sequences: int = 0
    positions: int = 0
    skipped: int = 0
    by_document: bool = False
    seconds: float = 0.0


class Record:
    """A measurement's file.

    Args:
        path: Where it is.
        model: What is measured; the file is of no use for other weights.
        names: Its parameters.
        identity: What else decides the result.
    """

    def __init__(self, path: Path, model: nn.Module, names: list[str], identity: Mapping[str, Any]) -> None:
        self._path = path
        self._identity = {**identity, "parameters": names, "weights": _weights_digest(model)}
        self._inputs = hashlib.sha256()  # of all batches up to the place
        self._expected = ""
        self._written = time.perf_counter()

    def read(self) -> tuple[Place, Tally, dict[str, int]] | None:
        """Return where the file ends, what it holds and what had been settled, or None where there is none.

        Raises:
            IsolossError: It is damaged, or of another measurement.
        """
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as opened:
                header = json.loads(opened.metadata()["measurement"])
                state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise IsolossError(f"{self._path} is not the record of a measurement: {error}") from error
        theirs = header["identity"]
        if other := [key for key in self._identity if self._identity[key] != theirs.get(key)]:
            what = ", ".join(other)
            raise IsolossError(f"{self._path} is the record of another measurement: it differs in {what}; remove it")
        self._expected = header["inputs"]
        return Place(**header["place"]), Tally.from_state(state), header["settled"]

    def after(self, stream: Iterator[Mapping[str, Any]], place: Place) -> Iterator[Mapping[str, Any]]:
        """Yield the batches that follow `place`, and keep account of all.

        Raises:
            IsolossError: The batches before it are other ones than those that were measured.
        """
        for number, batch in enumerate(stream, start=1):
            for name in sorted(batch):
                value = batch[name]
                data = value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
                self._inputs.update(name.encode() + data)
            if number == place.batches and self._inputs.hexdigest() != self._expected:
                raise IsolossError(f"{self._path} is the record of a measurement on other inputs; remove it")
            if number > place.batches:
                yield batch

    def write_sometimes(self, place: Place, tally: Tally, settled: Mapping[str, int]) -> None:
        """Write the file, in one step, if the last time was long ago; `place` is behind the last batch of `after`."""
        if time.perf_counter() - self._written < _EVERY_SECONDS:
            return
        header = {
            "identity": self._identity,
            "inputs": self._inputs.hexdigest(),
            "place": asdict(place),
            "settled": dict(settled),
        }
        files.write_bytes(self._path, save(tally.state(), metadata={"measurement": json.dumps(header)}))
        self._written = time.perf_counter()

    def remove(self) -> None:
        """Remove the file: the measurement is complete."""
        self._path.unlink(missing_ok=True)


def _weights_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
