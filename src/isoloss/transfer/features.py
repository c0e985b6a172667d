"""What a linear probe reads: a model's token states, or the look-up table's true probabilities, one row a sentence."""

from __future__ import annotations

from typing import Any, Literal

import torch

from isoloss.errors import IsolossError
from isoloss.languages.base import ExactLanguage, Sentences

Pooling = Literal["concatenate", "mean"]

_LOOKUP_CHUNK = 4096  # sentences whose conditionals are computed at once


def extract(
    model: torch.nn.Module,
    sentences: Sentences,
    *,
    pooling: Pooling = "concatenate",
    layer: int = -1,
    batch_size: int = 512,
) -> torch.Tensor:
    """Return the model's representation of each unmasked sentence (paper, section 2.1 and appendix A.5).

    The sentences go through the model without its prediction head, nothing masked. `"concatenate"`, the paper's choice,
    lays the states of all T positions side by side, with zeros at padding; `"mean"` averages them over the tokens.

    Args:
        model: A Hugging Face model in eval mode; it stays where it is.
        sentences: n sentences padded to T tokens; pad the training and the test split to the same T.
        pooling: How the (n, T, d) states become rows.
        layer: Index into the model's hidden states, 0 being the embeddings; -1 is the model's own last hidden state,
            after a final layer norm where it has one.
        batch_size: Sentences in a forward pass.

    Returns:
        (n, T * d) or, for `"mean"`, (n, d), float32 on the model's device.

    Raises:
        IsolossError: The model is in training mode or has no `base_model`, the layer does not exist, the pooling is
            unknown, a token is unknown to the model, a sentence is empty, or there are none.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> model = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
        ...                                    intermediate_size=8, max_position_embeddings=3)).eval()
        >>> sentences = Sentences(torch.tensor([[5, 6, 7], [8, 1, 0]]), torch.tensor([3, 2]))
        >>> features = extract(model, sentences)
        >>> tuple(features.shape), features[1, 8:].tolist()
        ((2, 12), [0.0, 0.0, 0.0, 0.0])
    """
    backbone = _backbone(model)
    if pooling not in ("concatenate", "mean"):
        raise IsolossError(f"no pooling {pooling!r}: choose concatenate or mean")
    if batch_size < 1:
        raise IsolossError(f"batch_size is {batch_size}; it must be at least 1")
    if len(sentences.lengths) == 0 or int(sentences.lengths.min()) < 1:
        raise IsolossError("features need at least one sentence, and at least one token in each")
    device = next(model.parameters()).device
    known = backbone.get_input_embeddings().num_embeddings
    if int(sentences.tokens.max()) >= known:
        raise IsolossError(
            f"the sentences hold the token id {int(sentences.tokens.max())}, and the model knows 0 to {known - 1}: "
            "it is a model of another language"
        )
    rows = []
    with torch.no_grad():
        for first in range(0, len(sentences.tokens), batch_size):
            tokens, lengths = (part[first : first + batch_size].to(device) for part in sentences[:2])
            present = Sentences(tokens, lengths).present()
            states = _states(backbone, tokens, present, layer).float().masked_fill(~present[:, :, None], 0.0)
            rows.append(states.flatten(1) if pooling == "concatenate" else states.sum(1) / lengths[:, None])
    return torch.cat(rows)


def lookup_features(language: ExactLanguage, sentences: Sentences) -> torch.Tensor:
    """Return the look-up table's representation: all true conditionals of a sentence, side by side (appendix A.5).

    The look-up table is the model whose token states are the true conditional probabilities `Pr(x_t = c | x_-t)`. Its
    pre-training loss is the best possible, and a probe on it tells how much the probabilities alone give away.

    Args:
        language: Whose sentences they are.
        sentences: n sentences padded to T tokens.

    Returns:
        (n, T * vocab_size) float32 probabilities, zeros at padding.

    Raises:
        IsolossError: There are no sentences, or one that the language cannot produce.
    """
    if len(sentences.lengths) == 0:
        raise IsolossError("features need at least one sentence")
    rows = []
    for first in range(0, len(sentences.tokens), _LOOKUP_CHUNK):
        tokens, lengths = (part[first : first + _LOOKUP_CHUNK] for part in sentences[:2])
        # the log of an impossible token is that of a tiny number, whose exponential is 0 for every purpose here
        probs = language.log_conditionals(tokens, lengths).exp().float()
        present = Sentences(tokens, lengths).present().to(probs.device)
        rows.append(probs.masked_fill(~present[:, :, None], 0.0).flatten(1))
    return torch.cat(rows)


def _backbone(model: torch.nn.Module) -> Any:
    if any(module.training for module in model.modules()):
        raise IsolossError(
            "the model is in training mode, where dropout makes features random: call model.eval() first"
        )
    backbone = getattr(model, "base_model", None)
    if backbone is None:
        raise IsolossError(f"{type(model).__name__} has no base_model: features are read from a Hugging Face model")
    return backbone


def _states(backbone: Any, tokens: torch.Tensor, present: torch.Tensor, layer: int) -> torch.Tensor:
    """Return (n, T, d): the hidden states of `layer`."""
    if layer == -1:
        last: torch.Tensor = backbone(input_ids=tokens, attention_mask=present.long()).last_hidden_state
        return last
    output = backbone(input_ids=tokens, attention_mask=present.long(), output_hidden_states=True)
    states: tuple[torch.Tensor, ...] = output.hidden_states
    if not -len(states) <= layer < len(states):
        raise IsolossError(f"no layer {layer}: the model has hidden states 0 to {len(states) - 1}")
    return states[layer]
