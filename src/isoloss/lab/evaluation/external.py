"""A checkpoint that was trained elsewhere, and the folder in which its evaluations are kept.

external.json      an `ExternalCheckpoint`: the checkpoint, and what it is measured on
result.json        written once the checkpoint was loaded: its size, architecture and weights, and the versions
evaluations/       as in the folder of a run, at step 0
log.jsonl          as in the folder of a run

Nothing is written into the checkpoint's own folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.checkpoints.places import PICKLE, check_checkpoint
from isoloss.config import LanguageConfig, setting
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.runs import Run, commit, versions
from isoloss.text import documents, hub_datasets

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext

RECORD = "external.json"
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # of a repository on the hub: no pickles


@dataclass(frozen=True, kw_only=True)
class ExternalCheckpoint:
    """A checkpoint that was trained elsewhere, and what it is measured on: text, token ids or a language.

    Attributes:
        checkpoint: A folder as `save_pretrained` writes it, or `NAME` or `NAME@REVISION` on the Hugging Face hub. What
            was once downloaded is used from then on.
        data: Text (.txt, .jsonl, a folder or a dataset hf:NAME), read with the checkpoint's own tokenizer, or token
            ids (.npy).
        language: Instead of `data`: the language on whose sentences it is measured.
        inputs: How `data` becomes inputs, and what is masked.
        seed: The seed that it was trained with. Checkpoints with the same group and seed count as steps of one training
            and are averaged; groups are paired by seed. None: not known; each checkpoint counts as independent.

    Raises:
        IsolossError: Both `data` and a `language` are given, or neither.

    Example:
        >>> from isoloss.studies import ExternalCheckpoint
        >>> ExternalCheckpoint(checkpoint="EleutherAI/pythia-14m", data="text.txt").measured_on
        'text.txt'
    """

    checkpoint: str
    data: str = ""
    language: LanguageConfig | None = None
    inputs: InputConfig = field(default=InputConfig())
    seed: int | None = setting(None, exclude_from_fingerprint=True)

    def __post_init__(self) -> None:
        if bool(self.data) == (self.language is not None):
            both_or_neither = "both data and a language" if self.data else "neither data nor a language"
            raise IsolossError(
                f"the checkpoint {self.checkpoint} has {both_or_neither} to be measured on: give it one of the two"
            )

    @property
    def measured_on(self) -> str:
        """What it is measured on, in a word."""
        return Path(self.data).name if self.language is None else self.language.kind

    @property
    def name(self) -> str:
        """The checkpoint without the folders around it."""
        folder = Path(self.checkpoint).expanduser()
        return folder.resolve().name if folder.is_dir() or folder.is_absolute() else self.checkpoint

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over all that decides its evaluations except its weights; the data by its content."""
        if hub_datasets.is_dataset(self.data):
            inputs = self.inputs
            (source,) = documents.open_sources([self.data], column=inputs.column or "text", split=inputs.split)
            return configs.fingerprint(replace(self, data=source.content(None)))
        path = Path(self.data)
        if self.data and not path.exists():
            raise IsolossError(f"there is no data {path}{files.nearest(path)}")
        content = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        return configs.fingerprint(replace(self, data=self.data and _digest(content)))

    def absolute(self) -> ExternalCheckpoint:
        """The same with absolute paths."""
        folder = Path(self.checkpoint).expanduser()
        checkpoint = str(folder.absolute()) if folder.is_dir() else self.checkpoint
        if hub_datasets.is_dataset(self.data):
            return replace(self, checkpoint=checkpoint, data=str(hub_datasets.parse(self.data)))
        return replace(self, checkpoint=checkpoint, data=self.data and str(Path(self.data).absolute()))

    def check(self) -> None:
        """Refuse a checkpoint that is neither a folder with weights nor what may be a name on the hub; ask no one."""
        check_checkpoint(self.checkpoint)

    def folder(self, *, download: bool = False) -> Path:
        """Return the folder with its files; with `download`, files that are on the hub alone are fetched first.

        Raises:
            IsolossError: There is no such checkpoint, or it is on the hub alone and may not be downloaded or cannot be.
        """
        folder = Path(self.checkpoint).expanduser()
        if folder.is_dir():
            return folder
        self.check()
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        name, _, revision = self.checkpoint.partition("@")
        try:
            cached = Path(snapshot_download(name, revision=revision or None, local_files_only=True))
            # the cache may hold nothing but a config that was looked at
            if any(cached.glob("model*.safetensors")):
                return cached
        except LocalEntryNotFoundError:
            pass
        if not download:
            raise IsolossError(f"{self.checkpoint} is not on this machine: it was not downloaded yet")
        from isoloss.checkpoints.places import hub_answers

        if not hub_answers(name, revision=revision or None):
            raise IsolossError(
                f"there is no checkpoint {name} on this machine, and the Hugging Face hub does not answer"
            )
        try:
            return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_WANTED)))
        except Exception as error:  # whatever the network or its library can raise
            raise IsolossError(f"{self.checkpoint} cannot be downloaded: {error}") from error


@dataclass(frozen=True, repr=False)
class ExternalRun(Run):
    """The folder of an external checkpoint: a run without training, whose only checkpoint, at step 0, is elsewhere."""

    @property
    def exists(self) -> bool:
        """Whether the folder belongs to an external checkpoint."""
        return (self.path / RECORD).is_file()

    @property
    def external(self) -> ExternalCheckpoint:
        """The checkpoint, with absolute paths."""
        return configs.from_dict(ExternalCheckpoint, files.read_json(self.path / RECORD))

    def result(self) -> dict[str, Any]:
        """Return the content of result.json; an error if the checkpoint was not measured yet."""
        return files.read_sealed(self.path / "result.json", f"delete {self.path} to measure the checkpoint again")

    @property
    def record(self) -> dict[str, Any]:
        """The content of result.json, which has the versions that it was first measured with."""
        return self.result()

    def steps(self) -> list[int]:
        """Its only step, 0."""
        return [0]

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint, which must be there."""
        return self.external.folder()

    def model_files(self, step: int) -> str:
        """The SHA-256 over its config and tokenizer; empty if the checkpoint is gone."""
        return "" if self.is_missing else super().model_files(step)

    def damage(self, *, tensors: bool = False, evaluations: bool = True) -> Iterator[str]:
        """Yield a sentence for each file in its folder that is not the one that isoloss wrote."""
        return super().damage(tensors=tensors, evaluations=evaluations) if self.complete else iter(())

    def _checkpoints(self) -> list[Path]:
        # none here: whoever loads the checkpoint checks it
        return []

    @property
    def is_missing(self) -> bool:
        """Whether the checkpoint is no longer there."""
        try:
            return not self.external.folder().is_dir()
        except IsolossError:
            return True

    def weights(self, step: int) -> str:
        """The SHA-256 of the weights; if the checkpoint is gone, of the last weights that were measured."""
        if self.complete and self.is_missing:
            weights: str = self.result()["weights"]
            return weights
        folder = self.checkpoint(step)
        shards = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("model-*.safetensors"))
        shards = shards or sorted(folder.glob(PICKLE))
        if not shards:
            raise IsolossError(f"{folder} has no weights: there is no model.safetensors in it")
        # of a single file its own, as of a run's checkpoint
        return files.sha256(shards[0]) if len(shards) == 1 else _digest(shards)

    def context(self, device: Any) -> MeasureContext:
        """Return what it is measured on, after writing down what the checkpoint is."""
        from isoloss.checkpoints.loading import load_model
        from isoloss.lab.evaluation import context as contexts

        external = self.external
        language = external.language
        words = () if language is None or language.is_finite else language.build().vocabulary
        loaded = load_model(external.folder(download=True), device=device, words=words)
        weights = self.weights(0)
        # other weights may have come under the same name; `weights` reads the record once the checkpoint is gone
        if not self.complete or self.result()["weights"] != weights:
            files.write_sealed(
                self.path / "result.json",
                {
                    "architecture": loaded.architecture,
                    "num_parameters": loaded.model.num_parameters(),
                    "weights": weights,
                    "versions": versions(),
                    "commit": commit(),
                },
            )
        info = contexts.ModelInfo.of(loaded)
        if language is None:
            return contexts.data_context(Path(external.data), [info], external.inputs, shuffled=False)
        objective = external.inputs.objective(info.name, is_causal=info.outline.causal, default="one")
        return contexts.language_context(language, objective, [info], external.inputs, shuffled=False)


def _digest(paths: list[Path]) -> str:
    """Return the SHA-256 of several files' contents."""
    return hashlib.sha256(" ".join(map(files.sha256, paths)).encode()).hexdigest()
