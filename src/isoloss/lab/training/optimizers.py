"""From a gradient to an update: the optimizers, the schedule of the learning rate, and clipping."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from isoloss.errors import IsolossError
from isoloss.lab.training import distributed
from isoloss.registry import OPTIMIZERS
from isoloss.run_config import ELEMENTWISE, OptimizerConfig, learning_rate

if TYPE_CHECKING:
    from isoloss.lab.models.compiled_bert import CompiledLoss


Groups = list[dict[str, Any]]  # of parameters: see `Optimizer`


def adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW, with m' = m / (1 - b1^t), v' = v / (1 - b2^t), the learning rate eta and the weight decay w.

    m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, theta <- (1 - eta w) theta - eta m' / (sqrt(v') + adam_eps).
    """
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.adam_eps, fused=True)


def sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return SGD: b <- momentum b + g + w theta, theta <- theta - eta b, where b starts at the first g + w theta."""
    # torch fuses AdamW on shards of parameters, too, but not SGD
    fused = not any(isinstance(p, DTensor) for group in groups for p in group["params"])
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)


def muon(groups: Groups, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al. 2024) for the matrices of hidden layers, and AdamW for all other parameters.

    Muon orthogonalizes the momentum and scales it by 0.2 sqrt(max(rows, columns)), to about the root mean square of
    AdamW's update, so that both take the same learning rate and weight decay (Liu et al. 2025, arXiv:2502.16982). A
    momentum of 0 stands for 0.95.
    """
    hidden = [group for group in groups if group["role"] == "hidden"]
    others = [group for group in groups if group["role"] != "hidden"]
    momentum = config.momentum or 0.95
    made: list[torch.optim.Optimizer] = []
    if hidden:
        made.append(
            torch.optim.Muon(hidden, lr=config.learning_rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        )
    return [*made, adamw(others, config)] if others else made


class _AveragedAdamW(torch.optim.AdamW):
    """AdamW that keeps a copy of its weights every few steps; `eval` gives the parameters the latest copies' mean."""

    kept, every = 6, 20

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make an update, and every few steps keep a copy of the weights."""
        result = super().step(closure)
        for parameter, state in self.state.items():
            if int(state["step"]) % self.every == 0:
                state["latest"] = [*state.get("latest", []), parameter.detach().clone()][-self.kept :]
        return result

    @torch.no_grad()
    def eval(self) -> None:
        """Give the parameters the average; before there is any, they stay as they are."""
        for parameter, state in self.state.items():
            if latest := state.get("latest"):
                parameter.copy_(torch.stack(latest).mean(dim=0))

    def train(self) -> None:
        """Do nothing: `Optimizer.evaluated` sets the trained weights back."""


def lawa(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW with the mean of the latest 6 copies of its weights, one kept every 20 steps (LAWA; Kaddour 2022).

    The mean is what is saved and measured, so that a run can stop where it has reached a target. To average
    checkpoints after training, there is `isoloss average`.
    """
    return _AveragedAdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.adam_eps, fused=True)


_SETTINGS = "settings"  # of an optimizer's state: what is not in tensors


class Optimizer:
    """The optimizer that a config names, on the gradients that the parameters hold, with schedule and clipping.

    An optimizer is made by the function that is registered under its name (`isoloss.registry.OPTIMIZERS`), from groups
    of parameters, each with its `weight_decay` and its `role`: `hidden` for matrices of hidden layers, `embedding` for
    those of embeddings and output layers, and for tensors of more dimensions, `vector` for biases and norms. It is a
    `torch.optim.Optimizer`, or a list of these.

    A gradient over all parameters whose norm is above `max_grad_norm` is first scaled down to it.

    Weights and embeddings decay, biases and layer norms do not (every parameter of one dimension), as in BERT's
    training and in Izsak et al. (2021), whose code the paper trains with.

    The model is updated in place, in `total` steps of a whole run. With a compiled loss, the tensors that are updated,
    `parameters`, are its two parts; the state has the names of the model's own parameters all the same.
    """

    def __init__(
        self, model: torch.nn.Module, config: OptimizerConfig, *, total: int, compiled: CompiledLoss | None = None
    ) -> None:
        self._config, self._total, self._compiled = config, total, compiled
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # the matrices first
        self._names = sorted(self._trainable, key=lambda name: self._trainable[name].ndim <= 1)
        if compiled is None:
            self.parameters = [self._trainable[name] for name in self._names]
            roles = _roles(model, self.parameters)
        else:
            self.parameters, roles = compiled.parts, ["hidden", "vector"]
        groups: Groups = []
        for role in dict.fromkeys(roles):
            own = [p for p, its in zip(self.parameters, roles, strict=True) if its == role]
            decay = 0.0 if role == "vector" else config.weight_decay
            groups.append({"params": own, "weight_decay": decay, "role": role})
        made = OPTIMIZERS.load(config.name)(groups, config)
        self._optimizers: list[torch.optim.Optimizer] = made if isinstance(made, list) else [made]
        self._numbers: dict[torch.Tensor, int] = {parameter: number for number, parameter in enumerate(self.parameters)}
        self._settings = [[dict(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        # a schedule-free or averaging optimizer is told when its model is trained and when it is evaluated
        self._averaging: list[Any] = [one for one in self._optimizers if hasattr(one, "eval")]
        for optimizer in self._averaging:
            optimizer.train()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if self._compiled is None:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        else:
            self._compiled.zero_gradient()

    def grad_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the gradient over all parameters: a scalar."""
        return distributed.total_norm([p.grad for p in self.parameters if p.grad is not None])

    def update(self, number: int, *, with_norm: bool) -> tuple[float, float | None]:
        """Make the update of step `number`; return the rate and, if asked for, the norm before clipping."""
        rate = learning_rate(self._config, number, total=self._total)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        limit = self._config.max_grad_norm
        norm = self.grad_norm() if with_norm or limit is not None else None
        if norm is not None and limit is not None:
            scale = (limit / norm).clamp(max=1.0)  # of a norm of 0: inf, then 1
            torch._foreach_mul_([distributed.local_shard(p.grad) for p in self.parameters if p.grad is not None], scale)
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise IsolossError(
                f"at step {number}, {self._config.name} cannot decompose a matrix of gradients: lower the learning "
                "rate or lengthen the warm-up"
            ) from error
        return rate, float(norm) if with_norm and norm is not None else None

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """Give the model the weights that are saved and measured for a while: an average, with some optimizers."""
        trained = [p.detach().clone() for p in self.parameters] if self._averaging else []
        self.to_evaluated()
        try:
            yield
        finally:
            for optimizer in self._averaging:
                optimizer.train()
            # `train` computes the weights from the average, which rounds
            self._set_weights(trained)

    def to_evaluated(self) -> None:
        """Give the model the weights of `evaluated` for good, after the last step."""
        for optimizer in self._averaging:
            optimizer.eval()

    @torch.no_grad()
    def _set_weights(self, weights: Iterable[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=False):
            parameter.copy_(value)

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything that the next step depends on besides the evaluated weights; nothing before the first step.

        The optimizer's full tensors are named `<what>/<parameter>`, with `<what>.<place>` for one in a list. The
        weights that a schedule-free optimizer trains are `weights/<parameter>`. What an optimizer keeps besides
        tensors, such as a count of steps, is in `settings`, the bytes of a JSON document. So is the order in memory of
        a matrix that does not have its rows one after the other, on which the rounding of its products depends.
        """
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, dict[str, Any]] = {}  # of a parameter, by its number: what is no tensor
        for optimizer in self._optimizers:
            for parameter, named in optimizer.state.items():
                number = self._numbers[parameter]
                for what, value in named.items():
                    found: dict[str, torch.Tensor] = {}
                    without = _without_tensors(value, what, found)
                    if value is not None and not isinstance(value, torch.Tensor):
                        values.setdefault(str(number), {})[what] = without
                    for path, tensor in found.items():
                        tensors |= self._by_name(path, number, tensor)
        if not tensors:
            return {}
        if self._averaging:
            for number, parameter in enumerate(self.parameters):
                tensors |= self._by_name("weights", number, parameter.detach().clone())
        counts = [
            [_changed(group, before) for group, before in zip(optimizer.param_groups, settings, strict=True)]
            for optimizer, settings in zip(self._optimizers, self._settings, strict=True)
        ]
        strides = {key: tensor.stride() for key, tensor in tensors.items() if not tensor.is_contiguous()}
        if values or strides or any(any(groups) for groups in counts):
            document = json.dumps({"values": values, "strides": strides, "counts": counts}).encode()
            tensors[_SETTINGS] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        return tensors

    def _by_name(self, what: str, number: int, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a tensor that belongs to one of `parameters` by the names of the model's own."""
        if self._compiled is None:
            return {f"{what}/{self._names[number]}": distributed.full_tensor(tensor)}
        return {f"{what}/{name}": own for name, own in self._compiled.by_name(number, tensor).items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned; names and shapes of another model are refused."""
        nothing: list[list[dict[str, Any]]] = [[{} for _ in optimizer.param_groups] for optimizer in self._optimizers]
        settings: dict[str, Any] = {"values": {}, "strides": {}, "counts": nothing}
        if _SETTINGS in state:
            settings = json.loads(bytes(state[_SETTINGS].tolist()))
        by_kind: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in state.items():
            if key == _SETTINGS:
                continue
            what, _, name = key.partition("/")
            parameter = self._trainable.get(name)
            # others have matrices of their own, such as a preconditioner of the rows
            is_whole = tensor.ndim > 0 and self._config.name in ELEMENTWISE
            if parameter is None or (is_whole and tensor.shape != parameter.shape):
                raise IsolossError(
                    f"the optimizer's {key}, of shape {tuple(tensor.shape)}, fits no parameter of the model"
                )
            # a copy: the optimizer updates its state in place, and the caller's tensors are to stay as they are
            shard = distributed.shard_like(tensor, parameter) if is_whole else tensor
            if strides := settings["strides"].get(key):
                shard = torch.empty_strided(shard.shape, strides, dtype=shard.dtype, device=shard.device).copy_(shard)
            by_kind.setdefault(what, {})[name] = shard.clone()
        by_number: dict[int, dict[str, Any]] = {}
        for what, tensors in by_kind.items():
            if self._compiled is None:
                for name, tensor in tensors.items():
                    by_number.setdefault(self._names.index(name), {})[what] = tensor
            else:
                for part in range(len(self._compiled.parts)):
                    by_number.setdefault(part, {})[what] = self._compiled.joined(part, tensors)
        for number, values in settings["values"].items():
            own = by_number.setdefault(int(number), {})
            own |= {what: _with_tensors(value, own) for what, value in values.items()}
        if self._averaging:
            self._set_weights(by_number[number].pop("weights") for number in range(len(self.parameters)))
        for optimizer, counts in zip(self._optimizers, settings["counts"], strict=True):
            groups = optimizer.state_dict()["param_groups"]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [self._numbers[parameter] for parameter in parameters]
            optimizer.load_state_dict(
                {
                    "state": {index: by_number[n] for index, n in enumerate(numbers) if n in by_number},
                    # settings such as betas stay those of the config
                    "param_groups": [{**group, **changed} for group, changed in zip(groups, counts, strict=True)],
                }
            )


def _roles(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> list[str]:
    """Return the role of each parameter; see `Optimizer`."""
    outer = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if isinstance(model, PreTrainedModel) and (head := model.get_output_embeddings()) is not None:
        outer.append(head.weight)
    embeddings = {*outer}
    return ["vector" if p.ndim <= 1 else "embedding" if p in embeddings or p.ndim > 2 else "hidden" for p in parameters]


def _without_tensors(value: Any, path: str, found: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON has it, and put its tensors into `found`, by their places in it."""
    if isinstance(value, torch.Tensor):
        found[path] = value
        return {"tensor": path}
    if isinstance(value, list | tuple):
        return [_without_tensors(one, f"{path}.{place}", found) for place, one in enumerate(value)]
    if value is None or isinstance(value, int | float | str):
        return value
    raise IsolossError(
        f"the optimizer keeps a {type(value).__name__} as {path}; what it keeps must be tensors, numbers, text and "
        "lists of these, which a checkpoint can hold"
    )


def _with_tensors(value: Any, tensors: dict[str, Any]) -> Any:
    """Return what `_without_tensors` was given; its tensors are taken out of `tensors`."""
    if isinstance(value, dict):
        return tensors.pop(value["tensor"])
    return [_with_tensors(one, tensors) for one in value] if isinstance(value, list) else value


def _changed(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group that steps have changed, such as counts; the rate is given anew at each step."""
    return {
        name: value
        for name, value in group.items()
        if isinstance(value, int | float) and name != "lr" and value != before.get(name)
    }
