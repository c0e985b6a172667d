"""What every measure asks of a model before it runs, and how a model is run: eagerly, whatever it is wrapped in."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import modeling_auto

from isoloss.errors import IsolossError, require

_COMPILED = "_orig_mod"  # what torch.compile calls the module that it is given

# of PEFT's prompt learning: what is put before the keys and values, not before the tokens
_BEFORE_KEYS = ("PREFIX_TUNING", "CARTRIDGE")


def refuse_dropout(model: nn.Module) -> None:
    """Raise where a part of the model is in training mode and would drop something at random or update statistics.

    Dropout modules are found by their `p`, parts that drop by themselves (LSTM layers, the attention of Llama) by an
    attribute whose name says so.
    """
    require("model", model, nn.Module, "a model, such as isoloss.load_model(CHECKPOINT).model")
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise IsolossError(
                f"the model is in training mode and {name or type(model).__name__} normalizes by the batch: call "
                "model.eval() before measuring"
            )
        rates = [value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            raise IsolossError(
                f"the model is in training mode and {name or type(model).__name__} has dropout {max(rates)}: "
                "call model.eval() before measuring"
            )


def refuse_random_training(model: nn.Module) -> None:
    """Raise where a model that draws random numbers, such as router jitter, has a part in training mode."""
    if any(module.training for module in model.modules()):
        raise IsolossError(
            f"{type(model).__name__} is in training mode and its forward pass draws random numbers: call model.eval() "
            "before measuring"
        )


def measured_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, tied ones once. Compiled parts have the names that they had before."""
    model = unwrapped(model)
    named = ((name.replace(f"{_COMPILED}.", ""), value) for name, value in model.named_parameters())
    parameters = {name: value for name, value in named if value.requires_grad}
    if not parameters:
        raise IsolossError(f"{type(model).__name__} has no trainable parameter: set requires_grad on what should count")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise IsolossError(
            f"{type(model).__name__} was loaded in torch.inference_mode, where parameters have no gradient: load it "
            "outside"
        )
    return parameters


def resharded(model: nn.Module) -> list[Any]:
    """Return the modules that `torch.distributed.fsdp.fully_shard` was called on, with their parameters in shards.

    After a forward pass, some have whole parameters in the place of a model's own. The outermost module comes first.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it is not imported nothing is sharded
    groups = [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for group in groups:
        group.reshard()
    return groups


def gathered_parameters(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Return, by each parameter that `fully_shard` cut, the whole one that forward passes have in its place.

    All processes call this. A whole parameter is one object in all passes, and has numbers only while one is at its
    layer: here, one group after another is put together.
    """
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for group in resharded(model):
        shards = dict(group.named_parameters())
        group.unshard()
        gathered |= {shards[name]: value for name, value in group.named_parameters() if value is not shards[name]}
        group.reshard()
    return gathered


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, where its inputs belong."""
    for parameter in model.parameters():
        return parameter.device
    raise IsolossError(f"{type(model).__name__} has no parameters, so there is nothing to measure")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` or data parallelism was put around, else the model itself."""
    # a compiled model may hold a DataParallel one and the other way round, so wrappers are taken off until none is left
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get(_COMPILED), nn.Module):
            model = inner
        else:
            return model


def architecture(model: nn.Module) -> nn.Module:
    """Return the language model inside whatever is around it, adapters of PEFT included."""
    model = unwrapped(model)
    base: Any = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def input_embeddings(model: nn.Module) -> torch.Tensor | None:
    """Return a Hugging Face model's input embeddings (V, d), detached; None where it has none to ask for."""
    holder: Any = unwrapped(model)
    is_sharded = bool(resharded(model))
    try:
        weight = getattr(holder.get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    weight = weight.detach()
    return cast("Any", weight).full_tensor() if is_sharded and hasattr(weight, "full_tensor") else weight


def virtual_tokens(model: nn.Module) -> int:
    """Return how many positions a model puts before the tokens that it is given, by PEFT's prompt tuning."""
    config: Any = getattr(unwrapped(model), "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or config.peft_type in _BEFORE_KEYS:
        return 0
    return int(config.num_virtual_tokens)


@contextmanager
def eager_with_grad(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model so that each function that it calls can be watched and differentiated, and leave it as found.

    Inside, gradients are enabled, `torch.inference_mode` is off, nothing runs compiled, and no activation is
    recomputed. None of this changes what is computed.
    """
    inner = unwrapped(model)
    checkpointing = [module for module in inner.modules() if getattr(module, "gradient_checkpointing", False) is True]
    with ExitStack() as stack:
        # without it nothing is compiled, and `set_stance` would import it: five seconds
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for module in checkpointing:
            stack.callback(setattr, module, "gradient_checkpointing", True)
            module.gradient_checkpointing = False  # type: ignore[assignment]
        try:
            yield inner
        except RuntimeError as error:
            if "torch.utils.checkpoint" in str(error):
                raise IsolossError(
                    f"{type(inner).__name__} recomputes activations (torch.utils.checkpoint with "
                    "use_reentrant=True): switch that off before measuring"
                ) from error
            raise
        except AssertionError as error:
            if "model.train()" in str(error):  # Reformer's reversible layers
                raise IsolossError(f"{type(inner).__name__} has gradients in training mode only") from error
            raise


def is_causal(model: nn.Module) -> bool:
    """Decide by the class name, then by the config, whether position t predicts token t + 1."""
    model = architecture(model)
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) is True:
        raise IsolossError(f"{name} is an encoder-decoder; a masked or causal language model is needed")
    causal = is_causal_class(name, config)
    if causal is None and getattr(config, "is_decoder", False) is True:
        return True
    if causal is None:
        raise IsolossError(
            f"{name} does not say whether it predicts masked or next tokens: pass causal=False or causal=True"
        )
    return causal


# classes whose name does not say it: language models that transformers lists, and those inside a multimodal model
_CAUSAL = {
    *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
}


def is_causal_class(name: str, config: Any) -> bool | None:
    """Return whether models of the class `name` predict next tokens; False: masked ones; None: neither is known."""
    if "ForMaskedLM" in name or name.endswith("ForPreTraining"):
        return False
    if name.endswith("WithLMHeadModel"):  # XLM and FlauBERT
        return bool(getattr(config, "causal", False))
    # XLNet sees all tokens, but for those that a permutation mask hides
    if name == "XLNetLMHeadModel":
        return getattr(config, "attn_type", "bi") == "uni"
    if "ForCausalLM" in name or name.endswith("LMHeadModel"):
        return True
    return True if name in _CAUSAL and not getattr(config, "is_encoder_decoder", False) else None


# whether a module that takes targets gives all positions' logits with these alone, as nanoGPT's does
_NEEDS_TARGETS: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def text_config(model: nn.Module) -> Any:
    """Return the transformers config of a model, or of its part for text; None where a module has none."""
    config: Any = getattr(unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def takes_mask(model: nn.Module) -> bool:
    """Return whether a model's forward pass takes an attention mask, which says what is padding."""
    known = inspect.signature(architecture(model).forward).parameters
    return "attention_mask" in known or any(value.kind is value.VAR_KEYWORD for value in known.values())


def forward_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model's forward pass is given: transformers' arguments, without a cache of keys and values.

    A module of one's own has its first argument for the token ids, whatever it is called, and may take no mask.
    """
    known = inspect.signature(architecture(model).forward).parameters
    arguments = {name: value for name, value in inputs.items() if name != "attention_mask" or takes_mask(model)}
    if "use_cache" in known:
        # transformers keeps packed documents apart only without a cache, which would also copy keys and values
        arguments.setdefault("use_cache", False)
    first = next((name for name, value in known.items() if value.kind is value.POSITIONAL_OR_KEYWORD), "input_ids")
    if "input_ids" in arguments and "input_ids" not in known:
        arguments[first] = arguments.pop("input_ids")
        if "targets" in known and _needs_targets(model, first):
            arguments["targets"] = arguments[first]
    return arguments


def _needs_targets(model: nn.Module, first: str) -> bool:
    if model not in _NEEDS_TARGETS:
        with torch.no_grad():
            logits = logits_of_output(model(**{first: torch.zeros(1, 2, dtype=torch.int64, device=device_of(model))}))
        _NEEDS_TARGETS[model] = isinstance(logits, torch.Tensor) and logits.shape[1:2] == (1,)
    return _NEEDS_TARGETS[model]


def logits_of_output(output: Any) -> Any:
    """Return the logits among what a forward pass returns, or None.

    They are the output itself, its attribute or entry `logits`, or the first tensor of a tuple that has three axes.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple) and not hasattr(output, "logits"):
        return next((each for each in output if isinstance(each, torch.Tensor) and each.ndim == 3), None)
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)


def run_on_ids(model: nn.Module, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, T, V) of token ids (B, T), without gradients and without a cache of keys and values."""
    ids = ids.to(device_of(model))
    # with a mask, as transformers warns of ids of padding without one
    arguments = forward_arguments(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more})
    with torch.no_grad():
        logits = logits_of_output(model(**arguments))
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise IsolossError(f"{type(model).__name__} gives no logits of shape (sequences, positions, vocabulary)")
    return logits


# the position of the left factor among the arguments of a matrix product
_LEFT_FACTOR = {torch.ops.aten.mm.default: 0, torch.ops.aten.bmm.default: 0, torch.ops.aten.addmm.default: 1}


class _LastProduct(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the left factor of the last matrix product, and how many columns the product has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left: torch.Tensor | None = None
        self.columns = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _LEFT_FACTOR:
            self.left, self.columns = args[_LEFT_FACTOR[func]], result.shape[-1]
        return result


def states_before_output(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return (B, T, d): the input of the output layer for `input_ids` (B, T), in any module with logits.

    It is the left factor of the last matrix product in the forward pass, however that product is written, by
    sequence or, as in recurrent layers, by position first. The product may have more columns than there are logits, as
    where the vocabulary is padded.

    Raises:
        IsolossError: The last product does not make the logits.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from isoloss.model_checks import states_before_output
        >>> model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 5))
        >>> ids = torch.tensor([[0, 4]])
        >>> torch.equal(states_before_output(model, {"input_ids": ids}), model[:2](ids))
        True
    """
    shape = inputs["input_ids"].shape
    states = _states_by_row(model, inputs)
    if _is_position_first(model, inputs):
        return states.reshape(shape[1], shape[0], -1).transpose(0, 1)
    return states.reshape(*shape, -1)


def _states_by_row(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return (B T, d), in whichever order the module has them."""
    with torch.no_grad(), _LastProduct() as product:
        logits = logits_of_output(model(**forward_arguments(model, inputs)))
    left, number = product.left, inputs["input_ids"].numel()
    if left is None or left.numel() != number * left.shape[-1] or product.columns < logits.shape[-1]:
        raise _no_output_layer(model)
    states: torch.Tensor = left.reshape(number, -1)
    return states


# of modules: whether the rows of the last product are by position first
_POSITION_FIRST: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _is_position_first(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the rows are (T, B), and not (B, T): other tokens in a sequence move its rows alone."""
    if model not in _POSITION_FIRST:
        first = inputs["input_ids"][:1]
        one, other = (
            _states_by_row(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            for ids in (torch.cat([first, torch.full_like(first, token)]) for token in (0, 1))
        )
        moved = (one - other).float().abs().amax(dim=1)
        orders = {False: moved.view(2, -1), True: moved.view(-1, 2).T}
        # not 0: experts, for one, may compute in another order
        fitting = [order for order, rows in orders.items() if rows[0].max() < 0.01 * rows[1].max()]
        if not fitting:
            raise _no_output_layer(model)
        # of one position, both fit
        if len(fitting) == len(orders):
            return False
        _POSITION_FIRST[model] = fitting[0]
    return _POSITION_FIRST[model]


def _no_output_layer(model: nn.Module) -> IsolossError:
    return IsolossError(f"{type(model).__name__} has no output layer that makes its logits from one state per token")


class _Lookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number of rows of each table in which something is looked up for each token, and the last one used."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # more than one axis: of pairs of tokens, whose distances may be in groups
        if func is torch.ops.aten.embedding.default and args[1].numel() == max(args[1].shape):
            self.seen.append((len(args[0]), int(args[1].max())))
        return func(*args, **(kwargs or {}))


def max_length(model: nn.Module) -> int | None:
    """Return how many tokens a model takes at most, or None where nothing bounds them.

    That is what its config says, or less where a table of positions has fewer rows from the first token's row on:
    RoBERTa's first position, for one, is the row after its padding id. The rows are those that short sequences use.
    """
    text = text_config(model)
    said = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len", "max_target_positions"))
    bounds = [number for number in said if isinstance(number, int) and number > 0]
    if (table := position_ids(model)) is not None:
        bounds.append(table.stop)
    return min(bounds, default=None)


def position_ids(model: nn.Module, *, explicit: bool = False) -> range | None:
    """Return the ids of positions that a model has an embedding for; None where it has no table of them, or fails.

    The first token has position 0. With `explicit`, the model gets `position_ids`: it may then use other rows than
    when it counts positions itself, as RoBERTa does.
    """
    # not the padding's id, for which some models look up no position
    token = 2 if getattr(text_config(model), "pad_token_id", None) == 0 else 0
    lookups = []
    # the table of positions is the one whose last used row moves by one with one more token: other tables, such as that
    # of token types, use the same rows for both lengths
    for length in (2, 3):
        ids = torch.arange(length, device=device_of(model))[None]
        with _Lookups() as mode:
            try:
                run_on_ids(model, torch.full((1, length), token), **({"position_ids": ids} if explicit else {}))
            except Exception:  # a model that does not run says so where it is measured
                return None
        lookups.append(mode.seen)
    pairs = zip(*lookups, strict=False)
    # of two tokens, the first used row last - 1
    tables = [range(1 - last, rows - last + 1) for (rows, last), (_, next_last) in pairs if next_last == last + 1]
    return min(tables, key=lambda table: table.stop, default=None)
