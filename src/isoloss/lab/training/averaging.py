"""Averages of weights: an exponential moving one, which follows a run and changes nothing in it, and of checkpoints."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.lab.training import distributed
from isoloss.loading import stored_weights
from isoloss.runs import Run, check_weights

_PREFIX = "ema/"  # of its tensors' names among the trainer's


class WeightAverage:
    """a_0 = theta_0, a_t = decay a_(t-1) + (1 - decay) theta_t, with theta_t the weights after step t.

    It has the weights' dtype, float32 or wider, and is sharded as they are. At decay 0 there is no average, no memory
    is held, and every method does nothing.

    Raises:
        IsolossError: Weights narrower than float32, whose dtype loses small steps.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        >>> average = WeightAverage(model, 0.75)
        >>> _ = model.weight.add_(4.0)
        >>> average.update()
        >>> round(float(model.weight - average.state()["ema/weight"]), 5)
        3.0
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = dict(model.named_parameters()) if decay else {}
        for name, parameter in self._weights.items():
            if torch.finfo(parameter.dtype).bits < 32:
                raise IsolossError(f"the weights {name} are {parameter.dtype}; their average needs float32 or wider")
        self._averages = {name: parameter.detach().clone() for name, parameter in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        if self._averages:
            # a + (1 - decay) (theta - a), in one call for all parameters; each process has the same part of both
            averages = [distributed.local_shard(average) for average in self._averages.values()]
            torch._foreach_lerp_(
                averages, [distributed.local_shard(p) for p in self._weights.values()], 1 - self._decay
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Return the full average by name, each with the prefix `ema/`; all processes call this."""
        return {_PREFIX + name: distributed.full_tensor(average) for name, average in self._averages.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned; other names in it are ignored.

        Raises:
            IsolossError: A tensor is missing or of another shape.
        """
        for name, average in self._averages.items():
            tensor = state.get(_PREFIX + name)
            if tensor is None or tensor.shape != average.shape:
                what = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise IsolossError(f"the average of the weights {name}, of shape {tuple(average.shape)}, is {what}")
            distributed.local_shard(average).copy_(distributed.local_shard(distributed.shard_like(tensor, average)))


def without_average(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the trainer's tensors that are not of the average."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}


@contextlib.contextmanager
def averaged(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give `model` the average of its weights that `WeightAverage.state` returned, for a while.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        >>> with averaged(model, {"ema/weight": torch.full((1, 1), 3.0)}):
        ...     model.weight.item()
        3.0
    """
    # in the model itself, so that `save_pretrained` can write it and no second model is built
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        try:
            for name, parameter in model.named_parameters():
                parameter.copy_(state[_PREFIX + name])
            yield
        finally:
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])


def average_checkpoints(checkpoints: Sequence[str | Path], output: str | Path) -> Path:
    """Write the model whose weights are the mean of those of several checkpoints, as a Hugging Face folder.

    The mean of the last checkpoints of one run is LAWA (Kaddour 2022, arXiv:2209.14981); the mean of several runs that
    start from one checkpoint is a uniform soup (Wortsman et al. 2022, arXiv:2203.05482). It is taken in float64, one
    tensor at a time; config and tokenizer are those of the last checkpoint.

    Args:
        checkpoints: At least two folders: of checkpoints, or of complete runs, whose last checkpoint is taken.
        output: The folder to write, new or empty.

    Returns:
        The folder.

    Raises:
        IsolossError: Weights are missing, damaged or of other names or shapes, or the folder is not empty.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from isoloss import average_checkpoints
        >>> shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("first", "second"):
        ...         BertForMaskedLM(BertConfig(vocab_size=10, **shape)).save_pretrained(f"{folder}/{name}")
        ...     average_checkpoints([f"{folder}/first", f"{folder}/second"], f"{folder}/mean").name
        'mean'
    """
    if len(checkpoints) < 2:
        raise IsolossError(f"there is {'one' if checkpoints else 'no'} checkpoint to average: name at least two")
    folders = [Run(path).last_checkpoint() if Run(path).exists else path for path in map(Path, checkpoints)]
    sources: list[dict[str, Path]] = []
    for folder in folders:
        check_weights(folder)
        source = stored_weights(str(folder), {"revision": "main", "local_files_only": True}) if folder.is_dir() else {}
        if not source:
            raise IsolossError(f"{folder} is not a checkpoint folder with weights in safetensors")
        if sources and (different := source.keys() ^ sources[0].keys()):
            raise IsolossError(
                f"{folder} and {folders[0]} are not of one architecture: one of them lacks {min(different)}"
            )
        sources.append(source)
    with contextlib.ExitStack() as opened, files.new_output(Path(output)) as made:
        readers = {
            path: opened.enter_context(safe_open(path, framework="pt"))
            for path in {path for source in sources for path in source.values()}
        }
        means = {}
        for name in sources[0]:
            tensors = [readers[source[name]].get_tensor(name) for source in sources]
            shapes = [tuple(tensor.shape) for tensor in tensors]
            if len({*shapes}) > 1:
                raise IsolossError(
                    f"{name} has the shapes {', '.join(map(str, shapes))}: the checkpoints differ in size"
                )
            means[name] = torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[-1].dtype)
        save_file(means, made / "model.safetensors", metadata={"format": "pt"})
        for path in folders[-1].iterdir():
            if path.suffix in _COPIED and path.name not in _OF_TRAINING:
                shutil.copyfile(path, made / path.name)
        (made / "model.safetensors").chmod((made / "config.json").stat().st_mode)
    return Path(output)


_COPIED = {".json", ".txt", ".model", ".jinja", ".py"}  # config, tokenizer, and code of a model of its own
_OF_TRAINING = {"trainer.json", "trainer_state.json", "model.safetensors.index.json"}
