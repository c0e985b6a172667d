"""Architectures by name: what each learns, its sizes and shapes, its number of parameters. Nothing here needs torch.

An architecture is an `Architecture` object, registered in `isoloss.registry.MODELS` under its name.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isoloss.errors import IsolossError
from isoloss.seeds import derive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from isoloss.lab.languages.base import Language
    from isoloss.run_config import ModelConfig
    from isoloss.text.masking import Batch

TOKEN_TYPES = 2  # rows of the token-type embedding, as BERT's tokenizers expect when they pair two sentences
_LAYER_BYTES = 50_000  # of the Python objects of a layer, about

# --- sizes


@dataclass(frozen=True)
class Shape:
    """The shape of a transformer."""

    d_model: int  # width of the hidden states
    num_heads: int  # attention heads of each layer; they divide the width
    num_layers: int
    intermediate: int  # width inside the feed-forward blocks


@dataclass(frozen=True)
class LSTMShape:
    """The shape of an LSTM."""

    hidden: int  # width of each direction; tokens are embedded in `directions` times as many dimensions
    num_layers: int  # each of all directions
    directions: int = 2  # from left to right and from right to left; 1: from left to right only


@dataclass(frozen=True)
class BracketShape:
    """The shape of the paper's model of brackets."""

    key_width: int  # of queries and keys
    neurons: int


# Two for a laptop, and the rows of the paper's Tables 3 and 4, whose first two are the same. The feed-forward width is
# 4 d_model, as appendix B.4.2 states it and as its expansion of a small model into a large one needs it; Table 4 prints
# the column of Table 3 there, which is not 4 d_model from d320 on, nor that of the 950 million parameters in the text.
SIZES: dict[str, Shape] = {
    "d16": Shape(16, 1, 1, 64),
    "d32": Shape(32, 1, 1, 128),
    "d64": Shape(64, 1, 1, 256),
    "d128": Shape(128, 2, 4, 512),
    "d192": Shape(192, 3, 5, 768),
    "d256": Shape(256, 4, 6, 1024),
    "d320": Shape(320, 5, 6, 1280),
    "d384": Shape(384, 6, 7, 1536),
    "d512": Shape(512, 8, 8, 2048),
    "d640": Shape(640, 10, 12, 2560),
    "d768": Shape(768, 12, 12, 3072),
    "d960": Shape(960, 15, 16, 3840),
    "d1024": Shape(1024, 16, 16, 4096),
    "d1280": Shape(1280, 20, 20, 5120),
    "d1536": Shape(1536, 24, 24, 6144),
    "d1920": Shape(1920, 30, 20, 7680),
}

# three for a laptop, and the paper's (appendix A.4): the i-th width with the i-th number of layers
LSTM_SIZES: dict[str, LSTMShape] = {
    "h16": LSTMShape(16, 1),
    "h32": LSTMShape(32, 1),
    "h64": LSTMShape(64, 2),
    "h128": LSTMShape(128, 4),
    "h256": LSTMShape(256, 6),
    "h512": LSTMShape(512, 8),
    "h768": LSTMShape(768, 12),
    "h1024": LSTMShape(1024, 16),
}

BRACKET_SIZES: dict[str, BracketShape] = {f"m{neurons}": BracketShape(2, neurons) for neurons in (16, 64, 256)}


def shape(name: str) -> Shape:
    """Return the shape of a transformer by the name of its size, e.g. d128."""
    if name not in SIZES:
        raise IsolossError(f"there is no model size {name!r}; the sizes are {', '.join(SIZES)}")
    return SIZES[name]


def reshaped(
    named: Shape,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    ffn: int | None = None,
) -> Shape:
    """Return a shape with other numbers; None keeps the old one, but with a width, `ffn` is 4 times that.

    Example:
        >>> from isoloss.lab.models.architectures import reshaped, shape
        >>> reshaped(shape("d64"), width=96, heads=6)
        Shape(d_model=96, num_heads=6, num_layers=1, intermediate=384)
    """
    for name, number in {"layers": layers, "width": width, "heads": heads, "ffn": ffn}.items():
        if number is not None and number < 1:
            raise IsolossError(f"{name} is {number}; it must be at least 1")
    d_model, num_heads = width or named.d_model, heads or named.num_heads
    if d_model % num_heads:
        divisors = ", ".join(str(n) for n in range(1, d_model + 1) if d_model % n == 0)
        raise IsolossError(
            f"{num_heads} heads cannot divide the width {d_model} evenly; the number of heads (--heads) can be "
            f"{divisors}"
        )
    inner = ffn or (named.intermediate if width is None else 4 * width)
    return Shape(d_model, num_heads, layers or named.num_layers, inner)


# --- architectures


@contextlib.contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Let torch draw on the CPU from the seed's stream `"weights"`, and leave the caller's random state alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed would also reseed the GPUs, which fork_rng does not restore here
        torch.default_generator.manual_seed(derive(seed, "weights"))
        yield


class Architecture:
    """A family of models in several sizes; a subclass says what its models' Hugging Face config is made of.

    Attributes:
        objective: What it is trained with, as `isoloss.run_config.ObjectiveConfig.kind` names it.
        model_class: Name of the Hugging Face class of its models.
        library: The module that has this class.
        sizes: Its shapes by name.
        default_size: The size where none is named.
        supports_fsdp: Whether its parameters can be sharded.
        has_compiled_loss: Whether `isoloss.lab.models.compiled_bert` computes its loss.
        reads_last_states: Whether the output layer reads the last hidden states as they are.
    """

    objective: Literal["masked", "causal"] = "masked"
    model_class: str
    library = "transformers"
    sizes: Mapping[str, Any]
    default_size: str
    supports_fsdp = True
    has_compiled_loss = False
    reads_last_states = False

    def shape(self, config: ModelConfig) -> Any:
        """Return the shape of the config's size, changed by what the config sets itself."""
        if config.size not in self.sizes:
            known = ", ".join(self.sizes)
            raise IsolossError(f"{config.architecture} has no model size {config.size!r}; its sizes are {known}")
        return self.reshaped(self.sizes[config.size], config)

    def reshaped(self, named: Any, config: ModelConfig) -> Any:
        """Return the shape of a size, changed by what the config sets itself."""
        raise NotImplementedError

    def num_parameters(self, shape: Any, vocab_size: int, max_length: int, *, pad_id: int = 0) -> int:
        """Return the number of parameters of a model, tied ones counted once: of V ids, T positions and padding P."""
        raise NotImplementedError

    def least_memory(self, shape: Any, vocab_size: int, max_length: int, *, num_tokens: int) -> float:
        """Return how many bytes training needs at least, with so many tokens in a forward pass; 0: not known."""
        return 0.0

    def settings(
        self, shape: Any, dropout: float, *, pad_id: int, max_length: int, start_id: int | None, end_id: int | None
    ) -> dict[str, Any]:
        """Return what the models' Hugging Face config takes besides the vocabulary, the padding and the kernel."""
        raise NotImplementedError

    def new_model(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        pad_id: int,
        max_length: int,
        start_id: int | None = None,
        end_id: int | None = None,
        seed: int,
    ) -> Any:
        """Return a randomly initialized model, in float32 on the CPU, in training mode.

        The weights are a pure function of the arguments (normal with standard deviation 0.02, an LSTM's by Glorot's
        uniform rule, ModernBERT's by its own; biases 0, layer norms 1 and 0; the padding's embedding 0), and the
        caller's random state is left alone. Attention is the eager kernel: as fast as the fused one at short lengths,
        made of operations that repeat bit for bit, and with second derivatives.

        `vocab_size` counts the special ids, too, and `max_length` the start of a sentence. A causal model starts from
        `start_id`, the checkpoint's bos; `end_id` is its eos.

        Example:
            >>> from isoloss.lab.models.architectures import BERT
            >>> from isoloss.run_config import ModelConfig
            >>> BERT.new_model(ModelConfig(size="d16"), vocab_size=34, pad_id=32, max_length=8, seed=0).num_parameters()
            4354
        """
        if not 0 <= pad_id < vocab_size:
            raise IsolossError(
                f"the padding's id is {pad_id}; it must be one of the model's ids, 0 to {vocab_size - 1}"
            )
        settings = self.settings(
            self.shape(config), config.dropout, pad_id=pad_id, max_length=max_length, start_id=start_id, end_id=end_id
        )
        model_class = getattr(importlib.import_module(self.library), self.model_class)
        made = model_class.config_class(
            vocab_size=vocab_size, pad_token_id=pad_id, attn_implementation="eager", **settings
        )
        with seeded_weights(seed):
            model = model_class(made).train()
        # ModernBERT draws the padding's embedding, too
        embedding = model.get_input_embeddings()
        if hasattr(embedding, "padding_idx"):
            embedding.weight.data[pad_id] = 0.0
        return model

    def build(self, config: ModelConfig, language: Language, *, seed: int) -> PreTrainedModel:
        """Return a randomly initialized model of a language's sentences; see `new_model`."""
        ids: dict[str, Any] = {"vocab_size": language.model_vocab_size, "pad_id": language.pad_id}
        max_length = language.max_length
        if self.objective == "causal":
            start = language.start
            # A start that is put in front of a sentence takes a position of its own.
            max_length += not start.is_in_sentences
            ids |= {"start_id": start.id, "end_id": start.end_id}
        return self.new_model(config, max_length=max_length, **ids, seed=seed)

    def predicted_states(self, model: Any, batch: Batch, predicted: torch.Tensor) -> torch.Tensor:
        """Return (k, d): what the output layer turns into logits, at the k tokens where `predicted` (n, T) is true.

        The batch has `input_ids` and, where something is padded, `attention_mask`, each (n, T). Of an architecture of
        which no more is known, these are the output layer's inputs in a forward pass, whose logits are thrown away.
        """
        given = {"input_ids": batch["input_ids"], "attention_mask": batch.get("attention_mask")}
        if self.reads_last_states:
            states = model.base_model(**given).last_hidden_state
        else:
            inputs: list[torch.Tensor] = []
            with model.get_output_embeddings().register_forward_pre_hook(lambda _, read: inputs.append(read[0])):
                model(**given)
            states = inputs[0]
        return at_predicted(states, predicted, causal=self.objective == "causal")


def at_predicted(values: torch.Tensor, predicted: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Return (k, ...): the values (n, T, ...) at the positions that predict the predicted tokens."""
    return values[:, :-1][predicted[:, 1:]] if causal else values[predicted]


def _least_memory(num_parameters: int, num_layers: int, width: int, num_tokens: int) -> float:
    # weights and gradient; the objects of a layer's modules; and of the numbers that a layer keeps for the backward
    # pass, at least its input and three more of its width (queries, keys and values; the gates of an LSTM), in float32
    return 8.0 * num_parameters + _LAYER_BYTES * num_layers + 16.0 * width * num_layers * num_tokens


class Transformer(Architecture):
    """What the transformers have in common: a `Shape`, and blocks of 4 (d^2 + d) + 2 d i + i + d + 4 d parameters.

    Attributes:
        dropouts: The fields of the Hugging Face config that hold the rate of dropout.
        inner_width: The field for the width inside the feed-forward blocks.
    """

    sizes = SIZES
    default_size = "d64"
    dropouts: tuple[str, ...]
    inner_width = "intermediate_size"

    def reshaped(self, named: Shape, config: ModelConfig) -> Shape:
        """Return the shape of a config, which has no directions."""
        if config.directions != 2:
            raise IsolossError(
                f"directions is {config.directions}, but {config.architecture} is not an LSTM: leave it out"
            )
        return reshaped(named, layers=config.layers, width=config.width, heads=config.heads, ffn=config.ffn)

    def num_parameters(self, shape: Shape, vocab_size: int, max_length: int, *, pad_id: int = 0) -> int:
        """Return the number of parameters of the blocks and of `other_parameters`.

        Example:
            >>> from isoloss.lab.models.architectures import BERT, SIZES
            >>> BERT.num_parameters(SIZES["d64"], vocab_size=34, max_length=8)
            57250
        """
        d, inner = shape.d_model, shape.intermediate
        blocks = shape.num_layers * (4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d)
        return blocks + self.other_parameters(d, vocab_size, max_length, pad_id)

    def least_memory(self, shape: Shape, vocab_size: int, max_length: int, *, num_tokens: int) -> float:
        """Return the bytes of weights, gradient and layers."""
        num_parameters = self.num_parameters(shape, vocab_size, max_length)
        return _least_memory(num_parameters, shape.num_layers, shape.d_model, num_tokens)

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return the number of parameters outside the blocks, at width d."""
        raise NotImplementedError

    def settings(self, shape: Shape, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        """Return the shape, the dropout and the length by the names of the Hugging Face config's fields."""
        return {
            "hidden_size": shape.d_model,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            self.inner_width: shape.intermediate,
            "max_position_embeddings": max_length,
            **dict.fromkeys(self.dropouts, dropout),
        }


class _BERT(Transformer):
    """Post-layer-norm blocks, GELU, decoder tied to the token embedding, no pooler."""

    model_class = "BertForMaskedLM"
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    has_compiled_loss = True

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return (V + T + 2 + 2) d of the embeddings and their layer norm, and d^2 + d + 2 d + V of the head."""
        return (vocab_size + max_length + TOKEN_TYPES + 2) * d + d * d + d + 2 * d + vocab_size

    def settings(self, shape: Shape, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        own = {"hidden_act": "gelu", "type_vocab_size": TOKEN_TYPES, "layer_norm_eps": 1e-12}
        return {**super().settings(shape, dropout, max_length=max_length), **own}

    def predicted_states(self, model: Any, batch: Batch, predicted: torch.Tensor) -> torch.Tensor:
        from isoloss.lab.models import bert

        return bert.states(model, batch["input_ids"], batch.get("attention_mask"), predicted)


class _PreLayerNormBERT(_BERT):
    """BERT with the blocks h + Attn(LN(h)), then h + FF(LN(h)), and a layer norm after the last one.

    It is transformers' RoBERTa-PreLayerNorm, whose positions count from `pad_id` + 1: the rows of the position
    embedding before that one belong to no token and have no gradient, and no token may have the padding's id.
    """

    model_class = "RobertaPreLayerNormForMaskedLM"
    has_compiled_loss = False

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return BERT's, 2 d of the last layer norm and (P + 1) d of position embeddings that no token uses."""
        return super().other_parameters(d, vocab_size, max_length, pad_id) + 2 * d + (pad_id + 1) * d

    def settings(self, shape: Shape, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        # transformers' defaults, 0 and 2, are ids of ordinary tokens here.
        own = {"bos_token_id": None, "eos_token_id": None}
        return {**super().settings(shape, dropout, max_length=ids["pad_id"] + 1 + max_length), **own}


class _OPT(Transformer):
    """The blocks of OPT-125M (Zhang et al., 2022): pre-layer-norm, ReLU, learned positions, tied decoder, no bias."""

    model_class, objective = "OPTForCausalLM", "causal"
    dropouts, inner_width = ("dropout", "attention_dropout"), "ffn_dim"
    reads_last_states = True

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return (V + T + 2) d of the embeddings, as OPT's positions count from 2, and 2 d of the last layer norm."""
        return (vocab_size + max_length + 2) * d + 2 * d

    def settings(self, shape: Shape, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        own = {"bos_token_id": ids["start_id"], "eos_token_id": ids["end_id"]}
        return {**super().settings(shape, dropout, max_length=max_length), **own}


class _Gated(Transformer):
    """Rotary positions, gated feed-forward blocks, no biases: blocks of 4 d^2 + 3 d i + 2 d parameters."""

    dropouts: tuple[str, ...] = ("attention_dropout",)

    def reshaped(self, named: Shape, config: ModelConfig) -> Shape:
        """Return the shape of a config, whose heads must be of even width: positions rotate pairs of dimensions."""
        shape = super().reshaped(named, config)
        if (shape.d_model // shape.num_heads) % 2:
            raise IsolossError(
                f"a width of {shape.d_model} in {shape.num_heads} heads gives each {shape.d_model // shape.num_heads} "
                f"dimensions; the rotary positions of {config.architecture} need an even number"
            )
        return shape

    def num_parameters(self, shape: Shape, vocab_size: int, max_length: int, *, pad_id: int = 0) -> int:
        """Return the number of parameters of the blocks and of `other_parameters`."""
        d, inner = shape.d_model, shape.intermediate
        blocks = shape.num_layers * (4 * d * d + 3 * d * inner + 2 * d)
        return blocks + self.other_parameters(d, vocab_size, max_length, pad_id)

    def settings(self, shape: Shape, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        own = {"tie_word_embeddings": True, "bos_token_id": ids["start_id"], "eos_token_id": ids["end_id"]}
        return {**super().settings(shape, dropout, max_length=max_length), **own}


class _Llama(_Gated):
    """The blocks of Llama (Touvron et al., 2023): RMS norms before each, SiLU; a tied decoder without bias.

    Dropout is that of attention weights: Llama has no other.
    """

    model_class, objective = "LlamaForCausalLM", "causal"
    reads_last_states = True

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return V d of the embedding and d of the last norm."""
        return vocab_size * d + d


class _ModernBERT(_Gated):
    """The blocks of ModernBERT (Warner et al., 2024): layer norms before each, GELU; every third layer sees all tokens.

    The other layers see 64 tokens to each side. The decoder is tied, after a transform.
    """

    model_class = "ModernBertForMaskedLM"
    dropouts = ("attention_dropout", "embedding_dropout", "mlp_dropout")

    def other_parameters(self, d: int, vocab_size: int, max_length: int, pad_id: int) -> int:
        """Return V d of the embedding, d^2 of the transform, V of the bias, and the norms but for the first block's."""
        return vocab_size * d + d * d + vocab_size + 2 * d

    def settings(self, shape: Shape, dropout: float, **arguments: Any) -> dict[str, Any]:
        return {**super().settings(shape, dropout, **arguments), "cls_token_id": None, "sep_token_id": None}


class _LSTM(Architecture):
    """Bidirectional layers, or causal ones, with dropout between them; the decoder's weight is the token embedding.

    The paper (appendix A.4) names widths and numbers of layers; that both sides are read, it leaves unsaid.
    """

    model_class, library = "LSTMForMaskedLM", "isoloss.lab.models.lstm"
    sizes, default_size = LSTM_SIZES, "h64"
    supports_fsdp = False  # torch's LSTM kernels need full weights
    reads_last_states = True

    def reshaped(self, named: LSTMShape, config: ModelConfig) -> LSTMShape:
        """Return the shape of a config, which has no heads and no feed-forward width."""
        given = " and ".join(name for name in ("heads", "ffn") if getattr(config, name) is not None)
        if given:
            raise IsolossError(f"an LSTM has no attention heads and no feed-forward blocks: leave out {given}")
        return LSTMShape(config.width or named.hidden, config.layers or named.num_layers, config.directions)

    def num_parameters(self, shape: LSTMShape, vocab_size: int, max_length: int, *, pad_id: int = 0) -> int:
        """Return k h V of the embedding, k (4 (k + 1) h^2 + 8 h) of each layer, and V of the decoder's bias.

        The width is h in each of k directions.
        """
        h, k = shape.hidden, shape.directions
        return k * h * vocab_size + shape.num_layers * k * (4 * (k + 1) * h * h + 8 * h) + vocab_size

    def least_memory(self, shape: LSTMShape, vocab_size: int, max_length: int, *, num_tokens: int) -> float:
        """Return the bytes of weights, gradient and layers."""
        num_parameters = self.num_parameters(shape, vocab_size, max_length)
        return _least_memory(num_parameters, shape.num_layers, shape.directions * shape.hidden, num_tokens)

    def settings(self, shape: LSTMShape, dropout: float, **ids: Any) -> dict[str, Any]:
        return {
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.num_layers,
            "num_directions": shape.directions,
            "hidden_dropout_prob": dropout,
        }


class _BracketAttention(Architecture):
    """The paper's model of brackets (section 5), which reads the language `hidden-bracket` alone and has no dropout."""

    model_class, library = "BracketAttentionForMaskedLM", "isoloss.lab.models.bracket_attention"
    sizes, default_size = BRACKET_SIZES, "m64"
    supports_fsdp = False  # the output layer is made of the weight at every step

    def reshaped(self, named: BracketShape, config: ModelConfig) -> BracketShape:
        """Return the shape of a config: `width` is k and `ffn` is m."""
        if config.layers is not None or config.heads is not None or config.directions != 2:
            raise IsolossError("bracket-attention has one layer and one head: leave out layers, heads and directions")
        shape = BracketShape(config.width or named.key_width, config.ffn or named.neurons)
        if min(shape.key_width, shape.neurons) < 1:
            raise IsolossError(
                f"width, the keys', is {shape.key_width} and ffn, the neurons, {shape.neurons}; both must be at least 1"
            )
        return shape

    def build(self, config: ModelConfig, language: Language, *, seed: int) -> PreTrainedModel:
        """Return a randomly initialized model; an `IsolossError` for another language than `hidden-bracket`."""
        from isoloss.lab.languages.hidden_bracket import HiddenBracket

        if not isinstance(language, HiddenBracket):
            raise IsolossError(f"bracket-attention reads the language hidden-bracket, not {type(language).__name__}")
        return super().build(config, language, seed=seed)

    def num_parameters(self, shape: BracketShape, vocab_size: int, max_length: int, *, pad_id: int = 0) -> int:
        """Return 4 T k of Q and K, 2 T m of V and m of u."""
        return 4 * (max_length - 1) * shape.key_width + (2 * (max_length - 1) + 1) * shape.neurons

    def settings(self, shape: BracketShape, dropout: float, *, max_length: int, **ids: Any) -> dict[str, Any]:
        return {
            "key_width": shape.key_width,
            "hidden_size": shape.neurons,
            "max_position_embeddings": max_length,
        }

    def predicted_states(self, model: Any, batch: Batch, predicted: torch.Tensor) -> torch.Tensor:
        # every token has the state of its sentence
        states: torch.Tensor = model.base_model.neurons(batch["input_ids"])
        counts = predicted.sum(dim=1)
        # at one predicted token a sentence, the usual case, nothing need be gathered and, backward, scattered
        return states if bool((counts == 1).all()) else states.repeat_interleave(counts, dim=0)


BERT, PRE_LAYER_NORM_BERT, LSTM, OPT = _BERT(), _PreLayerNormBERT(), _LSTM(), _OPT()
LLAMA, MODERN_BERT = _Llama(), _ModernBERT()
BRACKET_ATTENTION = _BracketAttention()
