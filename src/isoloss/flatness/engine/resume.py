"""The file that a long measurement goes on from: what has been summed, and of what, whole or absent at any moment."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from isoloss import files
from isoloss.errors import IsolossError

_EVERY_SECONDS = 30.0

State = tuple[dict[str, Any], dict[str, torch.Tensor]]  # JSON types, and tensors


class ResumeFile:
    """A measurement's file."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        identity: Mapping[str, Any],
        inputs: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._path = path
        self._inputs = hashlib.sha256()  # of all batches so far
        for batch in inputs:
            self._add_inputs(batch)
        self._identity = {**identity, "weights": _weights_digest(model), "inputs": self._inputs.hexdigest()}
        self._expected = ""
        self._written = time.perf_counter()

    def read(self) -> State | None:
        """Return what the file holds, or None where there is none."""
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as opened:
                header = json.loads(opened.metadata()["measurement"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise IsolossError(f"{self._path} is not the resume file of a measurement: {error}") from error
        theirs = header["identity"]
        if other := [key for key in self._identity if self._identity[key] != theirs.get(key)]:
            what = ", ".join(other)
            raise IsolossError(
                f"{self._path} is the resume file of another measurement: it differs in {what}; remove it"
            )
        self._expected = header["read"]
        return header["state"], tensors

    def after(self, stream: Iterable[Mapping[str, Any]], number: int) -> Iterator[Mapping[str, Any]]:
        """Yield the batches that follow the first `number`, and keep account of all."""
        for count, batch in enumerate(stream, start=1):
            self._add_inputs(batch)
            if count == number and self._inputs.hexdigest() != self._expected:
                raise IsolossError(f"{self._path} is the resume file of a measurement on other inputs; remove it")
            if count > number:
                yield batch

    def write_sometimes(self, state: Callable[[], State]) -> None:
        """Write the file, in one step, if the last time was long ago."""
        if time.perf_counter() - self._written < _EVERY_SECONDS:
            return
        document, tensors = state()
        header = {"identity": self._identity, "read": self._inputs.hexdigest(), "state": document}
        files.write_bytes(self._path, save(tensors, metadata={"measurement": json.dumps(header)}))
        self._written = time.perf_counter()

    def remove(self) -> None:
        """Remove the file: the measurement is complete."""
        self._path.unlink(missing_ok=True)

    def _add_inputs(self, batch: Mapping[str, Any]) -> None:
        for name in sorted(batch):
            value = batch[name]
            data = value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            self._inputs.update(name.encode() + data)


def _weights_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
