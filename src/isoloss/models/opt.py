"""OPT, a causal language model, at a named size: how one is made."""

from __future__ import annotations

from transformers import OPTConfig, OPTForCausalLM

from isoloss.models.architectures import OPT
from isoloss.models.initial import check_padding, seeded_weights
from isoloss.run_config import ModelConfig


def build(
    config: ModelConfig,
    *,
    vocab_size: int,
    max_length: int,
    pad_id: int,
    start_id: int,
    end_id: int | None,
    seed: int,
) -> OPTForCausalLM:
    """Return a randomly initialized OPT: pre-layer-norm blocks, ReLU, learned positions, tied decoder without bias.

    The blocks are those of OPT-125M (Zhang et al., 2022). The weights are a pure function of the arguments (normal with
    standard deviation 0.02, biases 0, layer norms 1 and 0), and the caller's random state is left alone. Attention is
    transformers' eager kernel, for the reasons given in `isoloss.models.bert.build`.

    Args:
        config: Shape and dropout.
        vocab_size: Token ids that the model knows, the special ones included.
        max_length: Longest sentence, in tokens, the start included.
        pad_id: Id of the padding; its embedding starts at 0.
        start_id: Id that a sentence starts from: the checkpoint's bos.
        end_id: Id that ends a sentence, the checkpoint's eos, or None.
        seed: The experiment's seed; the stream is `"weights"`.

    Returns:
        The model in float32 on the CPU, in training mode.

    Raises:
        IsolossError: An unknown size, a shape that cannot be, or a `pad_id` outside the vocabulary.

    Example:
        >>> settings = ModelConfig(architecture="opt", size="d16")
        >>> model = build(settings, vocab_size=34, max_length=9, pad_id=32, start_id=33, end_id=None, seed=0)
        >>> model.num_parameters()
        4032
    """
    check_padding(pad_id, vocab_size)
    sizes = OPT.shape(config)
    opt_config = OPTConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.d_model,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        ffn_dim=sizes.intermediate,
        dropout=config.dropout,
        attention_dropout=config.dropout,
        max_position_embeddings=max_length,
        pad_token_id=pad_id,
        bos_token_id=start_id,
        eos_token_id=end_id,
        attn_implementation="eager",
    )
    with seeded_weights(seed):
        return OPTForCausalLM(opt_config).train()
