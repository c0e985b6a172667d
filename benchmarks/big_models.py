"""Operations and bytes of a trace of big Llama models, by part, from their shapes: a plan, in which nothing is timed.

It writes `results/big_models.md`. Operations are those of matrix products, 2 for each multiplication, as torch's
FlopCounterMode counts them; before the tables are written, they are compared with its counts of a small Llama.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from isoloss.flatness._ghost import controls
from isoloss.flatness._ghost.engine import GhostNorms

RESULT = Path(__file__).with_name("results") / "big_models.md"
LENGTHS = (128, 1024, 2048)
GOALS = {"1B": 60_000, "7B": 11_000}  # tokens a second on one H200
PEAK_BF16, PEAK_FP32, PEAK_BYTES = 989e12, 67e12, 4.8e12  # of an H200, dense, without TF32
RISES = 7  # forward passes of `isoloss.compare` for a model


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    width: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def maps(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of a layer's linear maps."""
        d, f, queries, keys = self.width, self.inner, self.heads * self.head, self.kv_heads * self.head
        before = {"q": (queries, d), "k": (keys, d), "v": (keys, d)}
        return before | {"o": (d, queries), "gate": (f, d), "up": (f, d), "down": (d, f)}

    @property
    def weights(self) -> int:
        """The parameters of a layer's linear maps."""
        return sum(a * b for a, b in self.maps.values())

    @property
    def parameters(self) -> int:
        """All parameters but the gains of norms."""
        return self.layers * self.weights + (1 if self.tied else 2) * self.width * self.vocabulary


SHAPES = {
    "1B": Shape(2048, 16, 8192, 32, 8, 64, 128_256, tied=True),  # Llama 3.2
    "7B": Shape(4096, 32, 11_008, 32, 32, 128, 32_000, tied=False),  # Llama 2
    "70B": Shape(8192, 80, 28_672, 64, 8, 128, 128_256, tied=False),  # Llama 3
}


def is_direct(a: int, b: int, length: int) -> bool:
    """Return whether a sequence's gradient (a, b) is formed: less work than the Gram matrices of both its factors."""
    return a * b < length * (a + b)  # as `isoloss.flatness._ghost.factors` decides


def operations(shape: Shape, length: int, predicted: int) -> dict[str, int]:
    """Return the operations of one sequence by part; behind the last attention only predicted positions count."""
    early = shape.layers * shape.weights - sum(a * b for a, b in list(shape.maps.values())[3:])
    late = shape.layers * shape.weights - early
    attention = shape.layers * 4 * length**2 * shape.heads * shape.head
    layers = 2 * (length * early + predicted * late) + attention
    vocabulary = 2 * predicted * shape.width * shape.vocabulary
    products = 0
    for layer in range(shape.layers):
        for name, (a, b) in shape.maps.items():
            if layer < shape.layers - 1 or name in "qkv":  # the norms of predicted positions' own gradients are lengths
                products += 2 * length * a * b if is_direct(a, b, length) else 2 * length**2 * (a + b)
    products += 2 * length**2 * shape.width  # the lookups of the embedding, and with the decoder's part if it is tied
    products += 2 * predicted * length * shape.width * shape.tied
    return {
        "forward, layers": layers,
        "forward, vocabulary": vocabulary,
        "backward to outputs, layers": layers + attention,
        "backward to outputs, vocabulary": vocabulary,
        "products for norms": products,
        "control variates, vocabulary": vocabulary,
    }


def counted(shape: Shape, length: int, sequences: int) -> dict[str, int]:
    """Return the operations of each sequence that torch counts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=length,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, shape.vocabulary, (sequences, length))
    batch = {"input_ids": ids, "labels": ids}
    in_place = {torch.ops.aten.addmm_: _of_product}
    counts = []
    with GhostNorms(model, causal=True) as predictor:
        predictor.forward(batch)  # with the checks of the first batch
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            predictions = predictor.forward(batch)
        counts.append(counter.get_total_flops())
        root_p = controls.root_probabilities(predictions.logits)
        assert predictions.hidden is not None
        assert predictions.decoder is not None
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            controls.Controls(root_p, predictions.hidden, predictions.decoder, predictions.rows, sequences)
        counts.append(counter.get_total_flops())
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            predictor.squared_norms(predictions, root_p, separate=True, keep=False)
        counts.append(counter.get_total_flops())
    names = ("forward", "control variates", "backward and products")
    return {name: count // sequences for name, count in zip(names, counts, strict=True)}


def _of_product(_total: torch.Size, left: torch.Size, right: torch.Size, **_: object) -> int:
    return 2 * left[0] * left[1] * right[1]


def check() -> str:
    """Return a sentence for the page; refuse to go on where torch counts other operations of a small Llama."""
    shape = Shape(64, 2, 160, 4, 2, 16, 300, tied=True)
    for each in (shape, replace(shape, tied=False)):
        for length in (24, 200):  # below and above the length from which most gradients are formed
            parts, found = operations(each, length, length - 1), counted(each, length, 2)
            expected = {
                "forward": parts["forward, layers"] + parts["forward, vocabulary"],
                "control variates": parts["control variates, vocabulary"],
                "backward and products": sum(parts[name] for name in parts if "backward" in name or "norms" in name),
            }
            if found != expected:
                raise SystemExit(f"{each}, {length} tokens: torch counts {found}, the plan has {expected}")
    return "Of a small Llama, tied or not, with 24 and 200 tokens, torch's FlopCounterMode counts the same operations."


def activations(shape: Shape) -> int:
    """Return the bytes of a token that a layer keeps for the backward pass, about: bfloat16, flash attention."""
    d, queries, keys = shape.width, shape.heads * shape.head, shape.kv_heads * shape.head
    # of two norms the input and the normalized input in float32 and the output; the residual stream; queries, keys and
    # values before and after the rotary embedding; the attention's output; four tensors of the feed-forward block
    return 2 * (4 + 4 + 2) * d + 4 * d + 4 * (queries + 2 * keys) + 2 * queries + 8 * shape.inner


def moved(shape: Shape, length: int) -> dict[str, float]:
    """Return about how many bytes a token moves, in batches of 8,192 tokens, if no buffer stays in a cache."""
    products = 0.0
    for a, b in shape.maps.values():
        products += shape.layers * 10 * (a + b)  # both factors are read, written in float32 and read
        products += shape.layers * (16 * a * b / length if is_direct(a, b, length) else 20 * length)
    return {
        "weights, read twice": 2 * 2 * shape.parameters / 8192,
        "activations, written and read": 3 * shape.layers * activations(shape),
        "products for norms": products,
        # written; widened; softmax and root; control variates; signs; S v; narrowed; read by the backward pass
        "logits and their cotangent": (2 + 6 + 16 + 20 + 10 + 32 + 6 + 4) * shape.vocabulary,
    }


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table, whose first row is its head."""
    head, *body = rows
    line = "|---" + "|--:" * (len(head) - 1) + "|"
    return "\n".join(f"| {' | '.join(row)} |" if row else line for row in [head, [], *body])


def of_operations() -> str:
    """Return the operations of a token by part."""
    rows = []
    for name, shape in SHAPES.items():
        for length in LENGTHS:
            parts = {part: value / length / 1e9 for part, value in operations(shape, length, length - 1).items()}
            step = 3 * (parts["forward, layers"] + parts["forward, vocabulary"])
            head = ["billion operations a token", *parts, "trace", "training step", "trace / step", f"{RISES} rises"]
            values = [*parts.values(), sum(parts.values()), step]
            cells = [f"{value:.2f}" for value in [*values, sum(parts.values()) / step]]
            rows += [] if rows else [head]
            rows.append([f"{name}, T = {length:,}", *cells, f"{RISES * step / 3:.0f}"])
    return table(rows)


def of_maps() -> str:
    """Return from which length on a sequence's gradient of each map is formed."""
    names = list(SHAPES["1B"].maps)
    rows = [["formed above T =", *names]]
    for name, shape in SHAPES.items():
        rows.append([name, *(f"{a * b / (a + b):,.0f}" for a, b in shape.maps.values())])
    return table(rows)


def of_memory() -> str:
    """Return the memory of a batch of one sequence."""
    rows = [
        ["GB", "weights", "activations", "logits and cotangent", "products", "trace", "training step", "with AdamW"]
    ]
    for name, shape in SHAPES.items():
        for length in LENGTHS:
            kept = length * shape.layers * activations(shape)
            # bfloat16 logits, float32 roots of probabilities, their bfloat16 copy; a training step's losses likewise
            logits = 8 * length * shape.vocabulary
            both = [(a, b, is_direct(a, b, length)) for a, b in shape.maps.values()]
            most = max(4 * (a * b if direct else 2 * length**2) + 4 * length * (a + b) for a, b, direct in both)
            weights = 2 * shape.parameters
            trace, step = weights + kept + logits + most, 2 * weights + kept + logits
            numbers = [weights, kept, logits, most, trace, step, step + 2 * 4 * shape.parameters]
            rows.append([f"{name}, T = {length:,}", *(f"{number / 1e9:.2f}" for number in numbers)])
    return table(rows)


def of_goals() -> str:
    """Return the shares of an H200's peaks that the goals need."""
    rows = [["goal", "bfloat16 products", "float32 products", "memory", "if all products were bfloat16"]]
    for name, rate in GOALS.items():
        for length in LENGTHS:
            parts = operations(SHAPES[name], length, length - 1)
            wide = (parts["products for norms"] + parts["control variates, vocabulary"]) / length * rate
            narrow = sum(parts.values()) / length * rate - wide
            bytes_moved = sum(moved(SHAPES[name], length).values()) * rate
            shares = narrow / PEAK_BF16, wide / PEAK_FP32, bytes_moved / PEAK_BYTES, (narrow + wide) / PEAK_BF16
            rows.append([f"{name}, T = {length:,}, {rate:,} tokens/s", *(f"{100 * share:.0f} %" for share in shares)])
    return table(rows)


def of_bytes() -> str:
    """Return the bytes that a token moves by part."""
    rows = []
    for name, shape in SHAPES.items():
        for length in LENGTHS:
            parts = moved(shape, length)
            rows += [] if rows else [["MB a token", *parts, "all"]]
            values = [*parts.values(), sum(parts.values())]
            rows.append([f"{name}, T = {length:,}", *(f"{value / 1e6:.1f}" for value in values)])
    return table(rows)


def page(checked: str) -> str:
    """Return the page."""
    shapes = "; ".join(
        f"{name}: width {s.width:,}, {s.layers} layers, feed-forward {s.inner:,}, {s.heads} heads of {s.head} "
        f"({s.kv_heads} of keys and values), vocabulary {s.vocabulary:,}, {'tied' if s.tied else 'untied'}, "
        f"{s.parameters / 1e9:.2f} billion parameters"
        for name, s in SHAPES.items()
    )
    paragraphs = [
        "# Traces of big models, on paper",
        "`python benchmarks/big_models.py`: operations and bytes by part, from the shapes of three Llamas in bfloat16. "
        f"Nothing is timed, and bytes are estimates. {checked}",
        f"{shapes}. All tokens but the first are predicted, with one probe.",
        of_operations(),
        "Operations are 2 for each multiplication of a matrix product; attention counts without regard to its mask. A "
        "training step is three forward passes. The minimal trace, at granularity `tensor`, takes no further product: "
        "its parts are the norms of whole parameters, 8 bytes for each part and sequence. The rises are the forward "
        "passes of `isoloss.compare` beside the trace. Further probes of the last layer are not taken here, as they "
        "would cost more than a tenth of a pass.",
        "The squared norm of a sequence's gradient (a, b) takes the Gram matrices of both factors, 2 T² (a + b) "
        "operations, or the gradient itself, 2 T a b, whichever is less:",
        of_maps(),
        f"Both are in float32, as are the control variates. An H200 has {PEAK_FP32 / 1e12:.0f} trillion operations a "
        f"second in float32 and {PEAK_BF16 / 1e12:.0f} in bfloat16, and moves {PEAK_BYTES / 1e12} TB/s. The shares of "
        "these peaks that the goals need:",
        of_goals(),
        "More than 100 % cannot be: for long sequences the goals need products of bfloat16 factors on tensor cores, "
        "with sums in float32.",
        "Memory of a batch of one sequence. A trace has no gradients of parameters; AdamW has two float32 moments:",
        of_memory(),
        "Bytes moved by a token, in batches of 8,192 tokens:",
        of_bytes(),
    ]
    return "\n\n".join(paragraphs) + "\n"


if __name__ == "__main__":
    RESULT.write_text(page(check()))
