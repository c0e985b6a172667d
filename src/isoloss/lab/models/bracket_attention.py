"""The paper's model of brackets (section 5) in transformers' form; importing this file makes it known to Auto classes.

Shapes: n sentences of T + 1 tokens (a context and an answer), m neurons, k the width of queries and keys, V token ids.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

_IMPOSSIBLE = -100.0  # logit of the ids that are no answer


class BracketAttentionConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of the model, and how it reads token ids.

    Attributes:
        vocab_size: Token ids that the model knows.
        max_position_embeddings: T + 1: the T brackets of the context and the answer.
        key_width: k.
        hidden_size: m, the number of neurons.
        value_std: Standard deviation of the initial V. A large one makes features that cancel.
        signs: Of each id the sign of a visible bracket and the sign of a hidden one; (0, 0): no token of a context. Ids
            beyond the list have none either. The default is that of `isoloss.lab.languages.hidden_bracket`.
        pad_token_id: Id of the padding.
    """

    model_type = "isoloss-bracket-attention"

    vocab_size: int = 8
    max_position_embeddings: int = 7
    key_width: int = 2
    hidden_size: int = 64
    value_std: float = 0.7
    signs: tuple[tuple[int, int], ...] = ((0, 0), (0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    pad_token_id: int | None = 6
    tie_word_embeddings: bool = False


class BracketAttentionPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What the model with a head and the one without share."""

    config_class = BracketAttentionConfig
    base_model_prefix = "brackets"
    # by this name, get_input_embeddings of transformers finds them
    _input_embed_layer = "signs"
    _supports_sdpa = True  # the attention is written out: any kernel's name will do

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw V with `value_std`, and Q, K and u with variance one over the number of their inputs."""
        if isinstance(module, nn.Linear):
            is_value = module.out_features == self.config.hidden_size
            nn.init.normal_(module.weight, std=self.config.value_std if is_value else module.in_features**-0.5)


class Signs(nn.Module):
    """Of each token id two numbers, which are not trained: the sign of a visible bracket, and of a hidden one."""

    def __init__(self, config: BracketAttentionConfig) -> None:
        super().__init__()
        self.num_embeddings, self.signs = config.vocab_size, tuple(map(tuple, config.signs))

    def forward(self, input_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return (n, T, 2 T): a signed basis vector of each token, number j where it is visible, else j + T."""
        signs = nn.functional.embedding(input_ids, _padded(self.signs, self.num_embeddings, input_ids.device, dtype))
        identity = torch.eye(input_ids.shape[1], dtype=dtype, device=signs.device)
        return (signs[..., None] * identity[:, None]).flatten(2)


# constants are made once, not kept as buffers, which would be part of a checkpoint
@functools.cache
def _padded(rows: tuple[tuple[float, ...], ...], length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return (length, d): the rows, then zeros."""
    return nn.functional.pad(torch.tensor(rows, dtype=dtype, device=device), (0, 0, 0, length - len(rows)))


class BracketAttentionModel(BracketAttentionPreTrainedModel):
    """relu(V h), what the neurons say of a context; it is the state of every token, the answer's among them.

    The model reads T tokens and leaves out the answer. It has no masks: a context is always T tokens long.

    Example:
        >>> model = BracketAttentionModel(BracketAttentionConfig(max_position_embeddings=3, hidden_size=4)).eval()
        >>> model(torch.tensor([[2, 4, 7]])).last_hidden_state.shape
        torch.Size([1, 3, 4])
    """

    def __init__(self, config: BracketAttentionConfig) -> None:
        super().__init__(config)
        width = 2 * (config.max_position_embeddings - 1)
        self.signs = Signs(config)
        self.query = nn.Linear(width, config.key_width, bias=False)
        self.key = nn.Linear(width, config.key_width, bias=False)
        self.value = nn.Linear(width, config.hidden_size, bias=False)
        self.post_init()

    def neurons(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (n, m): relu(V h) of sentences (n, T + 1)."""
        x = self.signs(input_ids[:, :-1], self.value.weight.dtype)
        scores = (self.key(x) * self.query(x[:, :1])).sum(dim=-1, keepdim=True)
        attended = (scores.softmax(dim=1) * x).sum(dim=1)
        values: torch.Tensor = self.value(attended).relu()
        return values

    def forward(self, input_ids: torch.Tensor, **_: Any) -> BaseModelOutput:
        """Return the `last_hidden_state` (n, T + 1, m)."""
        states = self.neurons(input_ids)[:, None].expand(-1, input_ids.shape[1], -1)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,))


class Answers(nn.Module):
    """The output layer: f = u^T relu(V h) as logits f/2 and -f/2 of the two answers, and one far below of other ids.

    Attributes:
        read: u, a linear map to f.
    """

    def __init__(self, config: BracketAttentionConfig) -> None:
        super().__init__()
        self.num_ids = config.vocab_size
        self.read = nn.Linear(config.hidden_size, 1, bias=False)

    @property
    def sides(self) -> torch.Tensor:
        """(V, 1): the logit of each id as a multiple of f."""
        return _padded(((0.5,), (-0.5,)), self.num_ids, self.read.weight.device, self.read.weight.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """(V, m): the matrix whose product with the neurons, plus the bias, is the logits."""
        return self.sides * self.read.weight

    @property
    def bias(self) -> torch.Tensor:
        """(V,): the logit of each id where f is 0."""
        return (self.sides[:, 0] == 0).to(self.sides.dtype) * _IMPOSSIBLE

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of states (..., m)."""
        return nn.functional.linear(self.read(states), self.sides, self.bias)


class BracketAttentionForMaskedLM(BracketAttentionPreTrainedModel):
    """`BracketAttentionModel` and its output layer: p(`=<`) = sigmoid(f).

    Example:
        >>> model = BracketAttentionForMaskedLM(BracketAttentionConfig(max_position_embeddings=3, hidden_size=4)).eval()
        >>> logits = model(torch.tensor([[2, 4, 7]])).logits
        >>> logits.shape, bool(logits[0, 2, 0] == -logits[0, 2, 1])
        (torch.Size([1, 3, 8]), True)
    """

    def __init__(self, config: BracketAttentionConfig) -> None:
        super().__init__(config)
        self.brackets = BracketAttentionModel(config)
        self.answers = Answers(config)
        self.post_init()

    def get_output_embeddings(self) -> Answers:
        """Return the output layer."""
        return self.answers

    def set_output_embeddings(self, new_embeddings: Answers) -> None:
        """Replace the output layer."""
        self.answers = new_embeddings

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> MaskedLMOutput:
        """Return the `logits` (n, T + 1, V) and, with labels (n, T + 1; -100: not scored), their mean `loss`."""
        output = self.brackets(input_ids)
        logits = self.answers(output.last_hidden_state)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=output.hidden_states)


AutoConfig.register(BracketAttentionConfig.model_type, BracketAttentionConfig, exist_ok=True)
AutoModel.register(BracketAttentionConfig, BracketAttentionModel, exist_ok=True)
AutoModelForMaskedLM.register(BracketAttentionConfig, BracketAttentionForMaskedLM, exist_ok=True)
