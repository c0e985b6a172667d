"""`isoloss doctor`: what this machine and this installation have, and what isoloss would use."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Any

from isoloss.cli import common, options
from isoloss.errors import EXTRAS, is_installed
from isoloss.runs import commit, versions

EXAMPLES = [("isoloss doctor", "versions, extras, devices, threads and kernels")]


@dataclass(frozen=True)
class Args:
    """Say what this machine has and what isoloss would use of it."""

    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "doctor", arguments, examples=EXAMPLES)
    document = _findings()
    if args.json:
        common.emit_json(document)
        return 0
    rows = []
    for section, values in document.items():
        rows += [(section if index == 0 else "", key, value) for index, (key, value) in enumerate(values.items())]
    common.print_table("isoloss doctor", ("", "what", "found"), rows, left=3)
    return 0


def _findings() -> dict[str, dict[str, Any]]:
    import torch

    from isoloss.lab.languages.batches import describe_backend
    from isoloss.machine import resolve_device

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = {f"cuda:{i}": f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for i, p in enumerate(properties)}
    return {
        "software": {**versions(), "commit": commit() or "not a checkout", "extras": _extras()},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu cores": os.cpu_count(),
            "torch threads": torch.get_num_threads(),
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "devices": {
            "auto chooses": str(resolve_device("auto")),
            **(gpus or {"cuda": "none"}),
            "mps": "available" if torch.backends.mps.is_available() else "none",
        },
        "engines": {
            "exact inference": f"{describe_backend(torch.device('cpu'))}; torch on other devices",
            "flatness": "exact expectation over labels, one backward pass to activations per batch",
            "training attention": "eager",
        },
    }


def _extras() -> str:
    """Which extras of the package are installed, and which are not."""
    missing = {extra: None for package, extra in EXTRAS.items() if not is_installed(package)}
    installed = {extra: None for extra in EXTRAS.values() if extra not in missing}
    return f"{', '.join(installed) or 'none'}; not installed: {', '.join(missing) or 'none'}"
