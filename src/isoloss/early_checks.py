"""What can be refused from names and files alone, before torch is imported, which takes seconds."""

from __future__ import annotations

import os
import re
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.runs import refuse_run
from isoloss.text import hub_datasets

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_STEP = re.compile(r"step-\d+|ema")  # the checkpoints of a run
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST_THREADS = 1024  # on a machine with fewer cores; OpenMP ends the process where it cannot start a thread


def check_device(name: str) -> None:
    """Refuse what is not the name of a device; whether there is such a device here, torch knows."""
    kind, _, index = name.partition(":")
    if name not in ("auto", "cpu", "cuda", "mps") and not (kind == "cuda" and index.isdecimal()):
        raise IsolossError(f"the device is {name!r}; it must be auto, cpu, cuda, cuda:N or mps")


def check_threads(threads: int) -> None:
    """Refuse a number of CPU threads that is negative, or more than can be started."""
    most = max(_MOST_THREADS, os.cpu_count() or 1)
    if not 0 <= threads <= most:
        raise IsolossError(f"--threads is {threads}; it must be at least 0 (0: all cores) and at most {most}")


def may_be_hub_name(name: str) -> bool:
    """Return whether `name` may be `model` or `owner/model` on the Hugging Face hub; otherwise it is a path.

    A path is what lies in a folder that exists, or is called as a checkpoint of a run is.

    Example:
        >>> may_be_hub_name("google-bert/bert-base-uncased"), may_be_hub_name("runs/first/checkpoints/step-100")
        (True, False)
    """
    folder, _, last = name.rpartition("/")
    is_path = (bool(folder) and Path(folder).is_dir()) or _STEP.fullmatch(last) is not None
    return _HUB_NAME.fullmatch(name) is not None and not is_path


def check_checkpoint(name: str) -> None:
    """Refuse what is neither a folder with a config and weights nor what may be `NAME@REVISION` on the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not may_be_hub_name(name.partition("@")[0]):
            raise IsolossError(f"there is no checkpoint {name}: it is not a folder{files.nearest(folder)}")
        return
    if not (folder / "config.json").is_file():
        refuse_run(folder, "not a checkpoint")
        raise IsolossError(f"{folder} is not a checkpoint: it has no config.json")
    if not isinstance(files.read_json(folder / "config.json"), dict):
        raise IsolossError(f"{folder / 'config.json'} is not a model's config: it holds no JSON object")
    if not any((folder / weights).is_file() for weights in ("model.safetensors", "model.safetensors.index.json")):
        pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
        if pickles:
            raise IsolossError(
                f"{folder} has its weights only as a pickle ({', '.join(sorted(pickles))}), and loading a pickle can "
                "run any code: convert it to safetensors where you trust it, with transformers' save_pretrained"
            )
        raise IsolossError(f"{folder} has no weights: there is no model.safetensors in it")


def check_data(data: str | Path) -> None:
    """Refuse a path that holds neither text nor token ids, as there is nothing; a dataset's name may be any."""
    if not (hub_datasets.is_dataset(data) or Path(data).exists()):
        raise IsolossError(
            f"there is no data {data}{files.nearest(data) or ':'} give a .npy file of token ids, a .txt or .jsonl "
            "file, a folder, or a dataset hf:NAME"
        )
