"""A GPT of your own, as in nanochat: QK-norm, squared ReLU, soft-capped logits, and norms without gains.

`isoloss measure weights.pt --module examples/my_gpt.py:build --data tokens.npy` measures it.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 32, 32, 4, 2, 64


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values, self.mix = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = [m(norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.queries, self.keys, self.values)]
        mixed = F.scaled_dot_product_attention(norm(heads[0]), norm(heads[1]), heads[2], is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class MyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return 15 * torch.tanh(self.head(norm(x)) / 15)

    def rescalings(self, signals):
        """Declare which signals each layer reads and writes. The rescalings that change no logit follow from this."""
        stream = signals.channels("residual stream", WIDTH)
        normed = signals.fixed(WIDTH)  # the output of a norm without a gain has the factor 1
        signals.lookup(self.tokens, stream)
        signals.lookup(self.positions, stream)
        for number, block in enumerate(self.blocks):
            where = f"layer {number}"
            signals.norm(None, stream, normed)
            for part in ("queries", "keys"):  # each head has its own norm, so each may be scaled
                read = signals.heads(f"{where}: {part} before their norm", HEADS, WIDTH // HEADS)
                for head in read.reshape(HEADS, -1):
                    signals.norm(None, head, signals.fixed(len(head)))
                signals.linear(getattr(block, part), normed, read)
            *_, values, mixed = signals.attention(where, heads=HEADS, key_value_heads=HEADS, size=WIDTH // HEADS)
            signals.linear(block.values, normed, values)
            signals.linear(block.mix, mixed, stream)
            hidden = signals.neurons(f"{where}: hidden units", 4 * WIDTH)
            signals.linear(block.up, normed, hidden)
            signals.linear(block.down, signals.product(hidden, hidden), stream)  # a square has the factor twice
        signals.linear(self.head, normed, signals.fixed(VOCABULARY))  # soft-capped logits may not change
        return normed


def build():
    torch.manual_seed(0)
    return MyGPT()
