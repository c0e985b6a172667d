"""The paper's model of brackets (section 5) in transformers' form; importing this file makes it known to Auto classes.

Its squared gradients are here too, in closed form.

Shapes: n sentences of T + 1 tokens (a context and an answer), 2 T the width of an encoding, m neurons, k the width of
queries and keys, V token ids.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

_IMPOSSIBLE = -100.0  # logit of the ids that are no answer
KINK = 1e-9  # cosine of a neuron and its input below which the input lies on the neuron's kink


class BracketAttentionConfig(PreTrainedConfig):  # type: ignore[misc]
    """The shape of the model, and how it reads token ids: by default as `isoloss.lab.languages.hidden_bracket` does."""

    model_type = "isoloss-bracket-attention"

    vocab_size: int = 8
    max_position_embeddings: int = 7  # T + 1: the T brackets of the context and the answer
    key_width: int = 2  # k
    hidden_size: int = 64  # m, the number of neurons
    value_std: float = 0.7  # of the initial V; a large one makes features that cancel
    # of each id the sign of a visible bracket and of a hidden one; no token of a context has (0, 0), as further ids do
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
    """The output layer: f = u^T relu(V h) as logits f/2 and -f/2 of the two answers, and one far below of other ids."""

    def __init__(self, config: BracketAttentionConfig) -> None:
        super().__init__()
        self.num_ids = config.vocab_size
        # u
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
        >>> import torch
        >>> from isoloss.lab.models.bracket_attention import BracketAttentionConfig, BracketAttentionForMaskedLM
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


# --- squared gradients, in closed form ---
class Weights(NamedTuple):
    """The weights of f = u^T relu(V h), h = sum_j a_j x_j, a = softmax_j <Q x_1, K x_j>, without the factor 1 / m."""

    query: torch.Tensor  # (k, 2 T) Q
    key: torch.Tensor  # (k, 2 T) K
    value: torch.Tensor  # (m, 2 T) V
    output: torch.Tensor  # (m,) u


class Squares(NamedTuple):
    """The squared gradients of f at n inputs, by rows of the weights, and what the bound on their sum is made of."""

    outputs: torch.Tensor  # (n,) f
    query: torch.Tensor  # (n, k) `|grad f|^2` by each row of Q
    key: torch.Tensor  # (n, k) of K
    value: torch.Tensor  # (n, m) of V
    output: torch.Tensor  # (n, m) by each entry of u
    terms: torch.Tensor  # (n, m) |u_i| relu(V_i h); a neuron's share of `value + output` is 2 |h| times this or more
    norms: torch.Tensor  # (n,) |h|
    on_kink: torch.Tensor  # (n,) whether V_i h = 0 for a neuron with V_i and u_i not 0: the Hessian does not exist


def attend(weights: Weights, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, T) the attention a and (n, 2 T) h, what it gives, from z (n, 2 T), the sum of the encoded tokens."""
    scores = _by_token(z * (_queries(weights, z) @ weights.key))
    attention = scores.softmax(dim=1)
    # coordinates j and j + T are of one token
    return attention, z * attention.repeat(1, 2)


def squares(weights: Weights, z: torch.Tensor, *, count_kink: bool = False) -> Squares:
    r"""Return the squared gradients of f, differentiable by the weights almost everywhere.

    With s = V h and 1[.] the indicator of an active neuron: `|grad_u_i f|^2 = relu(s_i)^2` and `|grad_V_i f|^2 = |h|^2
    u_i^2 1[s_i]`; with g the gradient by h, `c_j = a_j <x_j - h, g>` that by the score of token j and `p = sum_j c_j
    x_j`: `|grad_Q_d f|^2 = <K_d, p>^2` and `|grad_K_d f|^2 = <Q_d, x_1>^2 |p|^2`, as x_1 has length 1.
    """
    attention, h = attend(weights, z)
    norms = h.norm(dim=1)
    reads = h @ weights.value.T
    # on a kink rounding decides the sign of V_i h; so kinks are found first, and count as active by choice alone
    kinks = reads.abs() <= KINK * norms[:, None] * weights.value.norm(dim=1)
    used = (weights.value != 0).any(dim=1) & (weights.output != 0)
    active = kinks | (reads > 0) if count_kink else ~kinks & (reads > 0)
    indicator = active.to(z.dtype)
    # relu(V h), (n, m), which a descent differentiates with the indicator as a constant
    values = reads * indicator
    # g, (n, 2 T); then c, (n, T), by the Jacobian of the softmax; then p, (n, 2 T)
    by_h = (indicator * weights.output) @ weights.value
    by_score = attention * (_by_token(z * by_h) - (h * by_h).sum(dim=1, keepdim=True))
    pulled = z * by_score.repeat(1, 2)
    return Squares(
        outputs=values @ weights.output,
        query=(pulled @ weights.key.T).square(),
        key=_queries(weights, z).square() * pulled.square().sum(dim=1, keepdim=True),
        value=norms.square()[:, None] * indicator * weights.output.square(),
        output=values.square(),
        terms=values * weights.output.abs(),
        norms=norms,
        on_kink=(kinks & used).any(dim=1),
    )


def _by_token(coordinates: torch.Tensor) -> torch.Tensor:
    """Return (n, T): the sum over the two coordinates of each token, of which one is 0."""
    length = coordinates.shape[1] // 2
    return coordinates[:, :length] + coordinates[:, length:]


def _queries(weights: Weights, z: torch.Tensor) -> torch.Tensor:
    """Return (n, k): Q x_1."""
    first = [0, z.shape[1] // 2]
    return z[:, first] @ weights.query[:, first].T


AutoConfig.register(BracketAttentionConfig.model_type, BracketAttentionConfig, exist_ok=True)
AutoModel.register(BracketAttentionConfig, BracketAttentionModel, exist_ok=True)
AutoModelForMaskedLM.register(BracketAttentionConfig, BracketAttentionForMaskedLM, exist_ok=True)
