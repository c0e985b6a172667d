"""Several BERTs of one shape as rows of one array of parameters, and the loss and gradient of each on its own batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from isoloss.models.dropout import LEVELS, num_levels
from isoloss.text.masking import IGNORED, Batch

if TYPE_CHECKING:
    from isoloss.models.stacked_attention import Sizes

_ALIGNED = 16  # float32 values in a cache line, on which every parameter begins
_LOW = -1e30  # added to the score of a key that is padding


class Layout:
    """Where the parameters of a BERT are in a vector: first those of two dimensions, which decay, then the others.

    Attributes:
        size: Length of the vector.
        num_decaying: Length of its first part.
        slices: Of each parameter by its name.
    """

    def __init__(self, model: Any) -> None:
        named = dict(model.named_parameters())
        order = sorted(named, key=lambda name: named[name].ndim <= 1)  # a stable sort
        self.slices: dict[str, slice] = {}
        self._shapes = {name: named[name].shape for name in order}
        self.size = self.num_decaying = 0
        for name in order:
            self.slices[name] = slice(self.size, self.size + named[name].numel())
            self.size += -(-named[name].numel() // _ALIGNED) * _ALIGNED
            if named[name].ndim > 1:
                self.num_decaying = self.size

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a whole vector by name, in the parameters' shapes."""
        return {name: vector[place].view(self._shapes[name]) for name, place in self.slices.items()}

    def parts(self, which: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what `tensor` is for each parameter of a part, `decaying` or `others`; a scalar is the same for all.

        The inverse of `joined`.
        """
        first = 0 if which == "decaying" else self.num_decaying
        names = [name for name, place in self.slices.items() if (place.start < self.num_decaying) == (first == 0)]
        if tensor.ndim == 0:
            return {name: tensor.clone() for name in names}
        flat = tensor.flatten()
        return {
            name: flat[self.slices[name].start - first : self.slices[name].stop - first].view(self._shapes[name])
            for name in names
        }

    def joined(self, named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the two parts with the tensor of each, from those of all parameters."""
        if all(tensor.ndim == 0 for tensor in named.values()):
            for which in ("decaying", "others"):
                yield which, next(named[name] for name in self.parts(which, torch.tensor(0.0)))
            return
        vector = torch.zeros(self.size)
        for name, place in self.slices.items():
            vector[place] = named[name].flatten()
        yield "decaying", vector[None, : self.num_decaying]
        yield "others", vector[self.num_decaying :]

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a scalar or of the shape of the parameter `name`."""
        return name in self._shapes and (tensor.ndim == 0 or tensor.shape == self._shapes[name])

    def starts(self, num_layers: int) -> np.ndarray[Any, Any]:
        """Return where the parameters begin, in the order of `isoloss.models.stacked_kernels`."""
        names = [
            "bert.embeddings.word_embeddings.weight",
            "bert.embeddings.position_embeddings.weight",
            "bert.embeddings.token_type_embeddings.weight",
            "bert.embeddings.LayerNorm.weight",
            "bert.embeddings.LayerNorm.bias",
            "cls.predictions.transform.dense.weight",
            "cls.predictions.transform.dense.bias",
            "cls.predictions.transform.LayerNorm.weight",
            "cls.predictions.transform.LayerNorm.bias",
            "cls.predictions.bias",
        ]
        for layer in range(num_layers):
            for name in (
                "attention.self.query",
                "attention.output.dense",
                "attention.output.LayerNorm",
                "intermediate.dense",
                "output.dense",
                "output.LayerNorm",
            ):
                names += [f"bert.encoder.layer.{layer}.{name}.{part}" for part in ("weight", "bias")]
        return np.array([self.slices[name].start for name in names], dtype=np.int64)


class Stack:
    """The parameters of `count` models of the shape of `model`, their gradients, and what computes these.

    Attributes:
        layout: Where a model's parameters are in its row.
        parameters: (S, P) float32.
        gradients: The same, of the last batches' losses.
    """

    def __init__(self, model: Any, count: int) -> None:
        config = model.config
        self.layout = Layout(model)
        self.parameters = torch.zeros(count, self.layout.size)
        self.gradients = torch.zeros_like(self.parameters)
        self._config = config
        self._starts = self.layout.starts(config.num_hidden_layers)
        self._levels = min(num_levels(config.hidden_dropout_prob), LEVELS - 1)
        self._generator = torch.Generator()

    def fits(self, model: Any) -> bool:
        """Return whether `model` is of the shape of the stack's."""
        return bool(model.config.to_dict() == self._config.to_dict())

    @torch.no_grad()
    def read(self, row: int, model: Any) -> None:
        """Take the weights of `model` into a row."""
        parts = self.layout.views(self.parameters[row])
        for name, parameter in model.named_parameters():
            parts[name].copy_(parameter)

    @torch.no_grad()
    def write(self, row: int, model: Any) -> None:
        """Give `model` the weights of a row."""
        parts = self.layout.views(self.parameters[row])
        for name, parameter in model.named_parameters():
            parameter.copy_(parts[name])

    def row(self, row: int) -> nn.Module:
        """Return a row as a module whose parameters `decaying` (1, ...) and `others` (...) share memory with it."""
        module, split = nn.Module(), self.layout.num_decaying
        for name, values, gradient in (
            ("decaying", self.parameters[row : row + 1, :split], self.gradients[row : row + 1, :split]),
            ("others", self.parameters[row, split:], self.gradients[row, split:]),
        ):
            parameter = nn.Parameter(values)
            parameter.grad = gradient
            module.register_parameter(name, parameter)
        return module

    def loss_and_gradient(self, members: Sequence[int], batches: Sequence[Batch], seeds: Sequence[int]) -> list[float]:
        """Compute the gradients of some members' losses, each on its own batch; return the losses, in nats.

        The batches are of one shape, (n, T), with one label in each sentence; the seeds are of the dropout.
        """
        from isoloss.models.stacked_attention import Sizes
        from isoloss.models.stacked_kernels import loss_and_gradient

        first = batches[0]["input_ids"]
        count, (n, length), config = len(members), first.shape, self._config
        sizes = Sizes(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            width=config.hidden_size,
            inner=config.intermediate_size,
            ids=config.vocab_size,
            padding=config.pad_token_id,
            sentences=n,
            tokens=length,
        )
        tokens = torch.stack([batch["input_ids"].T for batch in batches])
        predicted = torch.stack([batch["labels"] for batch in batches])
        places = (predicted != IGNORED).int().argmax(dim=2)
        labels = predicted.gather(2, places[:, :, None])[:, :, 0]
        unseen = torch.zeros(count, length, n)
        for row, batch in zip(unseen, batches, strict=True):
            if "attention_mask" in batch:
                row.masked_fill_(batch["attention_mask"].T == 0, _LOW)
        targets = torch.zeros(count, n, 0)
        if "targets" in batches[0]:
            targets = torch.stack([batch["targets"] for batch in batches]).float()
        losses = torch.empty(count, n)
        loss_and_gradient(
            self.parameters.numpy(),
            self.gradients.numpy(),
            np.array(members),
            self._starts,
            sizes,
            tokens.numpy(),
            places.numpy(),
            unseen.numpy(),
            labels.numpy(),
            targets.numpy(),
            self._bits(seeds, sizes).numpy(),
            np.int16(self._levels - LEVELS // 2),
            np.float32(LEVELS / (LEVELS - self._levels)),
            losses.numpy(),
        )
        return losses.double().mean(dim=1).tolist()

    def _bits(self, seeds: Sequence[int], sizes: Sizes) -> torch.Tensor:
        """Return the random bits of the members' dropout, each a function of its own seed."""
        from isoloss.models.stacked_attention import num_drawn

        if not self._levels:
            return torch.empty(len(seeds), 0, dtype=torch.int16)
        bits = torch.empty(len(seeds), -(-num_drawn(sizes) // 4), dtype=torch.int64)
        for row, seed in zip(bits, seeds, strict=True):
            row.random_(-(1 << 63), None, generator=self._generator.manual_seed(seed))
        return bits.view(torch.int16)
