"""An LSTM masked language model in transformers' form; importing this file makes it known to Auto classes.

Shapes: n sentences, T tokens, h the width of each of k directions, V token ids.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from isoloss.errors import IsolossError


class LSTMConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of an LSTM; the decoder's weight may be the token embedding."""

    model_type = "isoloss-lstm"

    vocab_size: int = 30522
    hidden_size: int = 128  # h, the width of each direction's states; tokens are embedded in k h dimensions
    num_hidden_layers: int = 4  # each of all directions
    num_directions: int = 2  # k; 2: from left to right and from right to left, 1: from left to right only
    hidden_dropout_prob: float = 0.1  # between the layers
    initializer_range: float = 0.02  # standard deviation of the initial token embeddings
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


class LSTMPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What the model with a head and the one without share."""

    config_class = LSTMConfig
    base_model_prefix = "lstm"
    # by this name, get_input_embeddings of transformers finds them
    _input_embed_layer = "embeddings"
    _supports_sdpa = True  # there is no attention: any kernel will do, see LSTMModel


class LSTMModel(LSTMPreTrainedModel):
    """Token states from both sides: layers of two LSTMs, one from left to right and one from right to left.

    With one direction the second is left out, and a token's states know nothing of what follows it. Else a layer reads
    the states of both directions of the layer before it, as `torch.nn.LSTM(bidirectional=True)` does.
    Tokens are moved to the front of their rows and, for the direction from right to left, reversed within the length of
    the row, so that padding comes last for both directions and reaches no token, wherever it stands. Without `eager`
    attention the LSTMs may use cuDNN's kernel, which is faster and has no second derivatives.

    Example:
        >>> import torch
        >>> from isoloss.lab.models.lstm import LSTMConfig, LSTMModel
        >>> config = LSTMConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, pad_token_id=8)
        >>> model = LSTMModel(config).eval()
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        h, layers = config.hidden_size, range(config.num_hidden_layers)
        width, reads_back = config.num_directions * h, config.num_directions == 2
        self.embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        # not one `nn.LSTM(bidirectional=True)`: its backward direction would begin with the padding
        self.forwards = nn.ModuleList(nn.LSTM(width, h, batch_first=True) for _ in layers)
        self.backwards = nn.ModuleList(nn.LSTM(width, h, batch_first=True) for _ in layers if reads_back)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the states of every token, `last_hidden_state` (n, T, k h); what it holds at padding means nothing.

        Without an attention mask (n, T) there is no padding. `output_hidden_states` asks for the embeddings and every
        layer's states as `hidden_states`. Autocast to bfloat16 is refused on a CPU that has no LSTM in it.
        """
        on_cpu = input_ids.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if on_cpu and torch.get_autocast_dtype("cpu") == torch.bfloat16 and not has_bfloat16_lstm():
            raise IsolossError("this CPU has no LSTM in bfloat16, which takes AVX-512: the precision must be float32")
        order, reverse = _orders(input_ids, attention_mask)
        states = self.embeddings(_rows(input_ids, order))
        collected = [states]
        # cuDNN's LSTM has no second derivatives
        is_eager = self.config._attn_implementation == "eager"
        with torch.backends.cudnn.flags(enabled=False) if is_eager else contextlib.nullcontext():
            for number, ahead in enumerate(self.forwards):
                if number:
                    states = self.dropout(states)
                sides = [ahead(states)[0]]
                if self.backwards:
                    sides.append(_rows(self.backwards[number](_rows(states, reverse))[0], reverse))
                states = torch.cat(sides, dim=-1)
                collected.append(states)
        # the inverse of a permutation is its argsort
        home = None if order is None else order.argsort(dim=1)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutput(
            last_hidden_state=_rows(states, home),
            hidden_states=tuple(_rows(layer, home) for layer in collected) if wanted else None,
        )


class LSTMForMaskedLM(LSTMPreTrainedModel):
    """`LSTMModel` and a linear decoder with a bias, its weight the token embedding."""

    _tied_weights_keys = {"decoder.weight": "lstm.embeddings.weight"}  # noqa: RUF012  (transformers' own form)

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.lstm = LSTMModel(config)
        self.decoder = nn.Linear(config.num_directions * config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the decoder."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder."""
        self.decoder = new_embeddings

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        """Return the `logits` (n, T, V) and, with labels (n, T; -100: not scored), their mean `loss` in nats."""
        output = self.lstm(input_ids, attention_mask, output_hidden_states)
        logits = self.decoder(output.last_hidden_state)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=output.hidden_states)


def _orders(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return two (n, T) of indices: which token comes t-th with padding moved to the end, and a reversal of the tokens.

    The reversal is of rows that are already in that order, and its own inverse. The first is None where nothing moves.
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    if attention_mask is None:
        return None, positions.flip(1)
    present = attention_mask.bool()
    lengths = present.sum(dim=1, keepdim=True)
    # stable, so that the tokens of a row keep their order
    order = (~present).long().argsort(dim=1, stable=True)
    # token t goes to lengths - 1 - t; padding stays in place, which makes the reversal its own inverse
    return order, torch.where(positions < lengths, lengths - 1 - positions, positions)


def has_bfloat16_lstm() -> bool:
    """Return whether this CPU can run an LSTM under autocast to bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _rows(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return values (n, T) or (n, T, d) with each row's tokens in another order (n, T)."""
    if order is None:
        return values
    return values.gather(1, order if values.ndim == 2 else order[:, :, None].expand(values.shape))


AutoConfig.register(LSTMConfig.model_type, LSTMConfig, exist_ok=True)
AutoModel.register(LSTMConfig, LSTMModel, exist_ok=True)
AutoModelForMaskedLM.register(LSTMConfig, LSTMForMaskedLM, exist_ok=True)
