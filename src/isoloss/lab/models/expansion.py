"""Function-preserving expansion of a transformer: width by copies, depth by layers that do nothing (as in Net2Net).

The construction is appendix B.4 of the paper, corrected where blocks end in a layer norm and completed for the parts
that Hugging Face's classes have and its formulas lack. Shapes: d and D the two widths, r = D / d, L and L' the two
depths.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    BertForMaskedLM,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    RobertaForMaskedLM,
    RobertaPreLayerNormForMaskedLM,
)

from isoloss.checkpoints.loading import quiet
from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import SIZES, Shape

Scale = Literal["exact", "balanced", "paper"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a parameter of the small model lies in the large one: copies of it in blocks, each divided by `divisor`."""

    name: str  # of the large model's parameter
    blocks: tuple[int, ...]  # copies along each dimension of the parameter
    divisor: float

    @property
    def copies(self) -> int:
        """How many copies there are."""
        return math.prod(self.blocks)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the large model's parameter, given the small one's."""
        return (parameter.detach() / self.divisor).repeat(*self.blocks)

    @property
    def trace_factor(self) -> float:
        """The parameter's part of the Fisher's trace in the large model, over that in the small one.

        All copies have the same gradient, as exchanging them leaves the large model as it is. By the chain rule the
        small model's is their sum over `divisor`, so a copy's is `divisor / copies` times it, and the squared norm of
        all of them `divisor**2 / copies` times its square.
        """
        return self.divisor**2 / self.copies


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """A large model with the function of a small one.

    The copies that make up the states after the last layer are divided by `last_divisor`. It is 1, but r for OPT, whose
    decoder reads these states.
    """

    model: Any  # the large one, in evaluation mode
    parts: Mapping[str, Part]  # by parameter of the small model, where it lies in the large one
    added: tuple[str, ...]  # the large model's other parameters: 0, or 1 for the weights of layer norms
    last_divisor: float = 1.0


@dataclass(frozen=True)
class _Family:
    """What the construction has to know of an architecture."""

    layers: str  # the list of its blocks
    last_norm: str  # the layer norm whose output the decoder reads
    closing_norm: str | None  # in a post-layer-norm block, the layer norm that ends it; None: blocks are pre-layer-norm
    queries_and_keys: tuple[str, str] = ("query", "key")  # whose outputs meet in the attention scores
    inner_width: str = "intermediate_size"  # the config's field for the width inside the feed-forward blocks
    is_bare: bool = False  # whether no layer norm follows the embeddings, and no transform the blocks


_FAMILIES: dict[type[PreTrainedModel], _Family] = {
    BertForMaskedLM: _Family("bert.encoder.layer", "cls.predictions.transform.LayerNorm", "output.LayerNorm"),
    RobertaForMaskedLM: _Family("roberta.encoder.layer", "lm_head.layer_norm", "output.LayerNorm"),
    RobertaPreLayerNormForMaskedLM: _Family("roberta_prelayernorm.encoder.layer", "lm_head.layer_norm", None),
    OPTForCausalLM: _Family(
        "model.decoder.layers",
        "model.decoder.final_layer_norm",
        None,
        queries_and_keys=("q_proj", "k_proj"),
        inner_width="ffn_dim",
        is_bare=True,
    ),
}


def expand(model: PreTrainedModel, into: Shape, *, embedding_scale: Scale = "exact") -> Expanded:
    """Return a model of the shape `into` with the same logits, whose hidden states are r copies side by side.

    A matrix becomes blocks of copies divided by the number of blocks in a row, W / r; vectors become copies. Heads are
    copied whole. Where the large model's heads are s times as wide, which takes a small model of one head, each holds
    s copies of it; queries and keys are then divided by a further s^(1/4), as a score is the sum of s equal products,
    divided by a root of the head size that is sqrt(s) times as large. Of the added blocks all parameters are 0, so that
    they add nothing to the residual stream. Where a block ends in a layer norm, which keeps only what is normalized
    already, the layer norms from the small model's last block on have weight 1 and bias 0, and the small model's last
    weight and bias stand in the large model's last block.

    The r copies of the token embedding E that the decoder multiplies must not add up to r times the logits: with
    `divisor` c of the embeddings, the last layer norm before the decoder is divided by r / c.

    Args:
        model: A Hugging Face BERT or RoBERTa with its masked-language-model head, a RoBERTa-PreLayerNorm (which is
            isoloss's `bert-pre-ln`) or an OPT, in any floating-point type.
        into: The large model's shape.
        embedding_scale: What the embeddings are divided by. `exact`: 1, exact at every eps of the layer norms (but for
            the added layers of post-layer-norm models, docs/method/expansion.md). `balanced`: sqrt(r), which keeps the
            embeddings' part of the trace; the layer norm after them sees r times its eps. `paper`: r, as printed in
            appendix B.4.2; r^2 times the eps. The last two are not for OPT, whose embeddings have no layer norm.

    Example:
        >>> import torch
        >>> from isoloss.lab.models.architectures import BERT
        >>> from isoloss.lab.models.expansion import SIZES, expand
        >>> from isoloss.run_config import ModelConfig
        >>> small = BERT.new_model(ModelConfig(size="d64"), vocab_size=34, max_length=8, pad_id=32, seed=0)
        >>> small = small.double().eval()
        >>> large = expand(small, SIZES["d192"]).model
        >>> tokens = torch.arange(8)[None]
        >>> bool((large(tokens).logits - small(tokens).logits).abs().max() < 1e-9)
        True
    """
    family = _family(model)
    if embedding_scale not in ("exact", "balanced", "paper"):
        raise IsolossError(f"the embedding scale is {embedding_scale!r}; it must be exact, balanced or paper")
    if embedding_scale != "exact" and family.is_bare:
        raise IsolossError(
            f"the embedding scale is {embedding_scale!r}, but {type(model).__name__} has no layer norm after its "
            "embeddings, which therefore cannot be divided by anything: use exact"
        )
    small = shape_of(model)
    check_fits(small, into)
    # Shapes without values: no memory, and nothing is drawn from the caller's generator.
    with torch.device("meta"):
        outline = type(model)(_config(model.config, family, into))
    ratio = into.d_model // small.d_model
    divisor = {"exact": 1.0, "balanced": ratio**0.5, "paper": float(ratio)}[embedding_scale]
    parts = _parts(model, outline, family, ratio, divisor)
    tensors = {parts[name].name: parts[name].of(parameter) for name, parameter in model.named_parameters()}
    # What no small parameter is mapped to is 0, but for the weights of layer norms: so is the small model's last
    # closing one, whose values `_target` moves up.
    norms = {f"{name}.weight" for name, module in outline.named_modules() if isinstance(module, nn.LayerNorm)}
    added = {
        name: torch.full(parameter.shape, float(name in norms), dtype=model.dtype)
        for name, parameter in outline.named_parameters()
        if name not in tensors
    }
    tensors |= added
    with quiet():
        # Loading ties the decoder and fills buffers, as for a checkpoint; filling the outline by hand would not.
        large: Any = type(model).from_pretrained(None, config=outline.config, state_dict=tensors, dtype=model.dtype)
    return Expanded(
        model=large.to(model.device).eval(),
        parts=parts,
        added=tuple(added),
        last_divisor=float(ratio) if family.is_bare else 1.0,
    )


def shape_of(model: PreTrainedModel) -> Shape:
    """Return the shape of a model that `expand` takes; other models are refused."""
    family, config = _family(model), model.config
    return Shape(
        config.hidden_size, config.num_attention_heads, config.num_hidden_layers, getattr(config, family.inner_width)
    )


def check_fits(small: Shape, large: Shape) -> None:
    """Refuse two shapes that `expand` cannot fit together; the message names the sizes that fit."""
    reason = _misfit(small, large)
    if reason is None:
        return
    fitting = ", ".join(name for name, other in SIZES.items() if _misfit(small, other) is None)
    advice = f"the sizes that hold it are {fitting}"
    if not fitting:
        advice = "no named size holds it with its own layers, heads and feed-forward width"
    raise IsolossError(
        f"a transformer of width {_described(small)} cannot be expanded to one of width {_described(large)}: {reason}; "
        f"{advice}"
    )


def _misfit(small: Shape, large: Shape) -> str | None:
    """Return why the one shape does not fit in the other, or None if it does."""
    if large.d_model % small.d_model:
        return f"{large.d_model} is not a multiple of {small.d_model}"
    few, many = small.d_model // small.num_heads, large.d_model // large.num_heads
    if few != many and (small.num_heads > 1 or many % few):
        return f"its heads have {few} dimensions, and those have {many}"
    if large.intermediate % small.intermediate:
        return f"the feed-forward width {large.intermediate} is not a multiple of {small.intermediate}"
    if large.num_layers < small.num_layers:
        return f"{large.num_layers} layers do not hold {small.num_layers}"
    return None


def _described(shape: Shape) -> str:
    heads, layers = shape.num_heads, shape.num_layers
    return f"{shape.d_model} ({heads} head{'s'[: heads > 1]}, {layers} layer{'s'[: layers > 1]})"


def _family(model: Any) -> _Family:
    family = _FAMILIES.get(type(model))
    if family is None:
        known = ", ".join(cls.__name__ for cls in _FAMILIES)
        raise IsolossError(f"a {type(model).__name__} cannot be expanded; the architectures are {known}")
    config = model.config
    if isinstance(model, OPTForCausalLM) and not (
        config.do_layer_norm_before
        and config.layer_norm_elementwise_affine
        and not config._remove_final_layer_norm
        and config.word_embed_proj_dim == config.hidden_size
    ):
        raise IsolossError(
            "an OPT can be expanded if its blocks are pre-layer-norm, a layer norm with weights follows the last one, "
            "and its embeddings have the model's width; this one is a variant (OPT-350M is)"
        )
    if getattr(config, "is_decoder", False):
        raise IsolossError(f"this {type(model).__name__} is a decoder (is_decoder in its config.json), not an encoder")
    return family


def _config(config: PretrainedConfig, family: _Family, into: Shape) -> PretrainedConfig:
    """Return a copy of a config with another shape."""
    new = copy.deepcopy(config)
    new.hidden_size, new.num_attention_heads, new.num_hidden_layers = into.d_model, into.num_heads, into.num_layers
    setattr(new, family.inner_width, into.intermediate)
    if hasattr(new, "word_embed_proj_dim"):
        new.word_embed_proj_dim = into.d_model
    return new


def _embedding_tables(model: PreTrainedModel) -> set[str]:
    """Return the names of the embeddings of tokens, positions and types, and of a decoder that is not tied to them."""
    # A tied decoder is among the embeddings, and is named once.
    decoder: Any = model.get_output_embeddings()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {name for name, p in model.named_parameters() if id(p) in tables or p is decoder.weight}


def _parts(
    model: PreTrainedModel, outline: PreTrainedModel, family: _Family, ratio: int, embedding_divisor: float
) -> dict[str, Part]:
    """Return where each parameter of the small model lies; `outline` is the large one, without values."""
    large = dict(outline.named_parameters())
    tables = _embedding_tables(outline)
    sizes = [config.hidden_size // config.num_attention_heads for config in (outline.config, model.config)]
    wider = sizes[0] / sizes[1]
    parts = {}
    for name, parameter in model.named_parameters():
        target = _target(name, family, model.config.num_hidden_layers, outline.config.num_hidden_layers)
        blocks = tuple(many // few for many, few in zip(large[target].shape, parameter.shape, strict=True))
        if name in tables:
            divisor = embedding_divisor
        elif name.startswith(f"{family.last_norm}."):
            divisor = ratio / embedding_divisor
        else:
            # The blocks of a row add up; vectors are copied as they are.
            divisor = float(blocks[1]) if len(blocks) == 2 else 1.0
        if name.split(".")[-2] in family.queries_and_keys:
            # For queries and for keys, so that scores change by sqrt(wider).
            divisor *= wider**0.25
        parts[name] = Part(name=target, blocks=blocks, divisor=divisor)
    return parts


def _target(name: str, family: _Family, few: int, many: int) -> str:
    """Return which parameter of a model of `many` layers takes the one called `name` of a model of `few`."""
    if family.closing_norm is None:
        return name
    closing = f"{family.layers}.{{}}.{family.closing_norm}."
    last = closing.format(few - 1)
    return closing.format(many - 1) + name.removeprefix(last) if name.startswith(last) else name


def expand_mlp(mlp: nn.Sequential, factor: int) -> Expanded:
    """Return a perceptron whose hidden layers are `factor` times as wide, with the same outputs (appendix B.4.1).

    Every parameter is copied n times and divided by sqrt(n): the first layer's weight and the hidden biases with
    n = factor, the weights between hidden layers with n = factor^2, the last layer's weight with n = factor; its bias
    stays. So hidden layers are `factor` copies divided by sqrt(factor), which rectifiers let through, and every
    parameter keeps its part of the Fisher's trace (`Part.trace_factor` is 1).

    The layers are linear, with `nn.ReLU` or `nn.LeakyReLU` between them; there is at least one hidden layer, and
    `factor` is at least 1.
    """
    if factor < 1:
        raise IsolossError(f"the factor is {factor}; it must be at least 1")
    layers = list(mlp)
    linear, between = layers[::2], layers[1::2]
    is_known = all(isinstance(layer, nn.Linear) for layer in linear)
    is_known &= all(isinstance(layer, nn.ReLU | nn.LeakyReLU) for layer in between)
    if len(linear) < 2 or len(linear) != len(between) + 1 or not is_known:
        found = ", ".join(type(layer).__name__ for layer in layers) or "nothing"
        raise IsolossError(
            f"the layers are {found}; they must be Linear layers with ReLU or LeakyReLU between them, at least two "
            "Linear, as other activations do not let a factor through"
        )
    shapes = [(layer.out_features, layer.in_features) for layer in linear if isinstance(layer, nn.Linear)]
    parts: dict[str, Part] = {}
    wide = copy.deepcopy(mlp)
    for number, (rows, columns) in enumerate(shapes):
        layer = wide[2 * number]
        assert isinstance(layer, nn.Linear)
        high = factor if number < len(shapes) - 1 else 1
        across = factor if number > 0 else 1
        layer.out_features, layer.in_features = rows * high, columns * across
        for name, parameter in list(layer.named_parameters()):
            blocks = (high, across)[: parameter.ndim]
            part = Part(name=f"{2 * number}.{name}", blocks=blocks, divisor=math.sqrt(math.prod(blocks)))
            parts[part.name] = part
            setattr(layer, name, nn.Parameter(part.of(parameter)))
    return Expanded(model=wide.eval(), parts=parts, added=())
