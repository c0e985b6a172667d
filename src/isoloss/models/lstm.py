"""The LSTM masked language model of a config's shape: how one is made."""

from __future__ import annotations

from isoloss.lstm import LSTMConfig, LSTMForMaskedLM
from isoloss.models.architectures import LSTM
from isoloss.models.initial import check_padding, seeded_weights
from isoloss.run_config import ModelConfig


def build(config: ModelConfig, *, vocab_size: int, pad_id: int, seed: int) -> LSTMForMaskedLM:
    """Return a randomly initialized LSTM whose decoder's weight is the token embedding; by default it reads both ways.

    The weights are a pure function of the arguments (embeddings normal with standard deviation 0.02, LSTM weights by
    Glorot's uniform rule, biases 0), and the caller's random state is left alone. Dropout lies between the layers. The
    paper (appendix A.4) names widths and numbers of layers; that both sides are read, it leaves unsaid.

    Args:
        config: Shape and dropout.
        vocab_size: Token ids that the model knows, the special ones included.
        pad_id: Id of the padding; its embedding starts at 0.
        seed: The experiment's seed; the stream is `"weights"`.

    Returns:
        The model in float32 on the CPU, in training mode, with second derivatives on every device.

    Raises:
        IsolossError: An unknown size, a shape that cannot be, or a `pad_id` outside the vocabulary.

    Example:
        >>> model = build(ModelConfig(architecture="lstm", size="h16"), vocab_size=34, pad_id=32, seed=0)
        >>> model.num_parameters()
        7522
    """
    check_padding(pad_id, vocab_size)
    sizes = LSTM.shape(config)
    lstm_config = LSTMConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.num_layers,
        num_directions=sizes.directions,
        hidden_dropout_prob=config.dropout,
        pad_token_id=pad_id,
        attn_implementation="eager",
    )
    with seeded_weights(seed):
        model: LSTMForMaskedLM = LSTMForMaskedLM(lstm_config).train()
    return model
