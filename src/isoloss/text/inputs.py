"""Inputs to measure a checkpoint on: text or token ids from files, as the batches that the measures take.

Shapes: n sequences, T tokens in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from isoloss.errors import IsolossError, warn
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text import documents, hub_datasets, tokenizers
from isoloss.text.masking import IGNORED, Batch, Sentences, SpecialIds, mask
from isoloss.text.packing import boundary_token_ids, pack
from isoloss.text.token_files import MASKED, SUFFIXES, Ids, read_masked_ids, read_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["masked", "causal"]

FEWEST_DOCUMENTS = 10  # for an error that counts documents: with fewer the error itself is too uncertain

_LOGITS_BYTES = 1 << 28  # of the logits of a batch's predicted positions, in float32
_ACTIVATION_BYTES = 1 << 30  # of what a forward pass keeps for the backward pass, roughly
_LENGTH = 128  # tokens in a row, unless told
# of a longer text as much is read as this, or as holds four times the rows that are wanted at 5 bytes a token
_MOST_BYTES = 10_000_000
_BYTES_PER_TOKEN = 20
_KEPT_VECTORS = 20  # of the model's width, that a transformer layer keeps for a token
_ROWS_AT_ONCE = 1024  # of an auxiliary sample
_MOST_DOCUMENTS = 0.9  # of a file's documents, from which on further sequences are nearly all of the same ones
_FIRST_CHARACTERS = 40  # of a document, by which it is named


@dataclass(frozen=True, eq=False)
class Rows:
    """All sequences that a file holds, as batches of `input_ids`, `attention_mask` and, if known, `documents`."""

    ids: Ids  # (n, T) negative where there is none
    origins: Ids | None  # (n,) the document in which each row begins; None: errors do not count documents

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches of 1,024 sequences."""
        for start in range(0, len(self.ids), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            ids = torch.from_numpy(self.ids[rows])
            batch = {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
            if self.origins is not None:
                batch["documents"] = torch.from_numpy(self.origins[rows])
            yield batch


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a checkpoint is measured on.

    Attributes:
        batches: Mappings of `input_ids`, `attention_mask` and `labels`, each (n, T) int64; one sequence a row. Where
            the inputs are text of at least 10 documents, also `documents` (n,): the document in which each sequence
            begins, so that errors count documents as independent and not sequences.
        num_sequences: Rows of all batches.
        num_predicted: Positions that the model predicts: labels other than -100, for a causal model without the
            first column, which nothing comes before.
        description: One line: how many sequences of what length, and where they came from.
        auxiliary_sample: Of inputs from a file, all sequences that it holds, also the ones in `batches`.
        bytes_per_token: For text, the mean number of its bytes (UTF-8) per predicted token
            (`isoloss.text.tokenizers.encode_with_bytes`); None for token ids, as the text is not known.
        documents: For text, where each document is and how it begins, by its number in `documents` of the batches.
    """

    batches: list[Batch]
    num_sequences: int
    num_predicted: int
    description: str
    auxiliary_sample: Rows | None = None
    bytes_per_token: float | None = None
    documents: Sequence[str] = ()

    @property
    def num_held(self) -> int | None:
        """How many sequences the file holds; None: a language draws as many as are asked for."""
        return None if self.auxiliary_sample is None else len(self.auxiliary_sample.ids)

    @property
    def has_most_documents(self) -> bool:
        """Whether the sequences are of at least nine in ten of the file's documents: others would add few documents."""
        held = None if self.auxiliary_sample is None else self.auxiliary_sample.origins
        if held is None or "documents" not in self.batches[0]:
            return False
        taken = {int(each) for batch in self.batches for each in batch["documents"]}
        return len(taken) >= _MOST_DOCUMENTS * len(np.unique(held))

    @property
    def document_names(self) -> tuple[str, ...]:
        """Where each document is and how it begins, in the order of errors: as documents appear in the batches."""
        if not self.documents or "documents" not in self.batches[0]:
            return ()
        numbers = dict.fromkeys(int(each) for batch in self.batches for each in batch["documents"])
        return tuple(self.documents[each] for each in numbers)

    def shuffled(self, seed: int) -> Inputs:
        """Return the same sequences in random order, the sequences of a document together.

        A measurement that ends before its inputs do is of a random part of them only in such an order.
        """
        whole = self._whole()
        # without documents each sequence is a group of its own
        ids = whole.get("documents", torch.arange(self.num_sequences))
        groups = torch.unique_consecutive(ids, return_inverse=True)[1]
        order = torch.randperm(int(groups[-1]) + 1, generator=generator(seed, "order"))
        rows = order[groups].argsort(stable=True)
        shuffled = {name: value[rows] for name, value in whole.items()}
        return replace(self, batches=_cut(shuffled, len(self.batches[0]["labels"])))

    def some(self, number: int, seed: int) -> Inputs:
        """Return at most so many of the sequences, drawn at random and in their order, in batches of the same size."""
        chosen = drawn_rows(self.num_sequences, number, seed)
        few = {name: value[chosen] for name, value in self._whole().items()}
        batches = _cut(few, len(self.batches[0]["labels"]))
        return replace(self, batches=batches, num_sequences=int(chosen.sum()), bytes_per_token=None)

    def cut(self, batch_size: int) -> Inputs:
        """Return the same sequences in the same order, in batches of `batch_size`."""
        if batch_size < 1:
            raise IsolossError(f"the batch size is {batch_size}; it must be at least 1")
        return replace(self, batches=_cut(self._whole(), batch_size))

    def _whole(self) -> Batch:
        return {name: torch.cat([batch[name] for batch in self.batches]) for name in self.batches[0]}

    def fitting_batch_size(self, config: Any, *, most: int = 256) -> int:
        """Return how many sequences a forward and backward pass of a model takes in a bounded memory.

        The logits of a batch's predicted positions have at most 256 MiB in float32, and what a transformer's layers
        keep for the backward pass has about 1 GiB; at most `most` sequences, and at least one.
        """
        text = config.get_text_config()
        length = self.batches[0]["labels"].shape[1]
        logits = 4 * text.vocab_size * max(1.0, self.num_predicted / self.num_sequences)
        width, layers = getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0)
        kept = 4 * _KEPT_VECTORS * width * layers * length
        by_kept = most if kept == 0 else _ACTIVATION_BYTES // kept
        return max(1, min(most, int(_LOGITS_BYTES / logits), by_kept))


def read_inputs(
    data: Path,
    *,
    checkpoint: str,
    config: Any,
    kind: Kind,
    column: str | None = None,
    split: str | None = None,
    max_length: int | None = None,
    tokenizer: PreTrainedTokenizerFast | str | None = None,
    length: int | None = None,
    num_sequences: int | None = None,
    masking: ObjectiveConfig | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
) -> Inputs:
    """Return the inputs in `data`. They depend on nothing but the arguments, so that checkpoints compare on the same.

    - Token ids, `.npy` or `.bin` (see `isoloss.text.token_files.read_token_ids`), in rows or cut into rows of `length`.
      Negative ids are padding; they stand at a row's end.
    - Masked ids and their labels, `.hdf5` (see `read_masked_ids`), as they are: `masking` and `mask_id` have no effect.
    - Text (see `isoloss.text.documents.read_documents`): tokenized, put end to end and cut into rows of `length`.
      For a masked model each row is [CLS], length - 2 tokens, [SEP], where the tokenizer has these two; for a causal
      model each document has the special tokens that the tokenizer itself adds, such as a first bos.

    What is left at the end, less than one row, is dropped, and so is a row for a masked model that holds nothing but
    special and unknown tokens, in which nothing could be masked. Rows of text know the document they begin in; where
    these are at least 10, the batches have them, see `Inputs`. If there are more rows than asked for, the rows taken
    are drawn uniformly without replacement. Of a text of more than 10 MB, blocks of 64 KiB are drawn first, 10 MB in
    all or, for many rows, 20 bytes for each of their tokens, and only the documents that begin in them are read. So a
    long text costs no more than one of 10 MB.

    For a masked model, tokens are masked and predicted as `isoloss.text.masking.mask` does, but never the special
    ones of the tokenizer, if there is one. For a causal model the labels are the ids themselves, unshifted.

    Args:
        data: A `.npy`, `.bin`, `.txt` or `.jsonl` file, a folder of text, or a dataset (`hf:NAME`, `python:docs`).
        checkpoint: The model's folder or hub name, where its own tokenizer is looked for.
        config: The model's transformers config, for its vocabulary and its padding.
        kind: Whether the model predicts masked tokens or the next one.
        column: Field of JSON lines or column of a dataset that holds the text; None: `text`.
        split: Of a dataset; None: `train`.
        max_length: The most tokens that the model takes (`isoloss.model_checks.max_length`); None: any number.
        tokenizer: A tokenizer or what names one; None: the checkpoint's own, which token ids can do without.
        length: Tokens in a row, for text and for ids in one dimension; None: 128, or as many as the model takes.
        num_sequences: Sequences wanted, if there are so many; None: all.
        masking: How masked tokens are chosen; None: one per sequence.
        mask_id: The id that stands for a masked token; None: the tokenizer's.
        seed: Decides which sequences are taken and which tokens are masked.
        batch_size: Sequences in a batch; the last one may have fewer.
    """
    for name, value in (("number of sequences", num_sequences), ("batch size", batch_size), ("length", length)):
        if value is not None and value < 1:
            raise IsolossError(f"the {name} is {value}; it must be at least 1")
    hub_datasets.check_data(data)
    text_config = config.get_text_config()
    length = length or min(_LENGTH, max_length or _LENGTH)
    is_text, is_masked, labels = holds_text(data), data.suffix.lower() in MASKED, None
    blocks, most = None, 0
    if is_masked and kind == "causal":
        raise IsolossError(f"{data} holds masked token ids, and {checkpoint} predicts next tokens: give text or .npy")
    if not is_text and (column or split):
        raise IsolossError(f"{data} holds token ids, which have no column and no split: leave them out")
    # of token ids, only masking wants a tokenizer: to know which ids are special
    its_tokenizer = _tokenizer(tokenizer, checkpoint, needed=is_text, useful=kind == "masked" and not is_masked)
    if is_text:
        assert its_tokenizer is not None
        sources = documents.open_sources([data], column=column or "text", split=split)
        if num_sequences is not None:
            most = max(_MOST_BYTES, _BYTES_PER_TOKEN * num_sequences * length)
            blocks = documents.drawn_blocks(sources, most, seed)
        texts = documents.read(sources, blocks=blocks)
        rows, sizes, origins, unknown, names = _from_text(data, texts, its_tokenizer, kind, length)
    elif is_masked:
        (rows, labels), sizes, origins, unknown, names = read_masked_ids(data), None, None, "", []
    else:
        rows, sizes, origins, unknown, names = read_token_ids(data, length), None, None, "", []
    for each in (rows,) if labels is None else (rows, labels):
        _check_rows(each, data, text_config, max_length, checkpoint)

    wanted = len(rows) if num_sequences is None else num_sequences
    where = f"{data}" if blocks is None else f"a random {most / 1e6:,.0f} MB of {data}"
    drawn = f"{wanted:,} sequences of {rows.shape[1]} tokens drawn from the {len(rows):,} in {where}"
    asked = f" (up to {wanted:,} would be taken)" if wanted > len(rows) else ""
    every = f"all {len(rows):,} sequences of {rows.shape[1]} tokens in {where}{asked}"
    description = (drawn if wanted < len(rows) else every) + unknown
    # of all rows, whether they are drawn or not
    auxiliary_sample = Rows(rows, origins)
    if wanted < len(rows):
        chosen = torch.randperm(len(rows), generator=generator(seed, "inputs"))[:wanted]
        # sorted into the order of the text, which errors over neighbors rest on
        rows_taken = np.sort(chosen.numpy())
        rows, origins = rows[rows_taken], None if origins is None else origins[rows_taken]
        sizes = None if sizes is None else sizes[rows_taken]
        labels = None if labels is None else labels[rows_taken]
    of_config = getattr(text_config, "pad_token_id", None)
    pads = (None if its_tokenizer is None else its_tokenizer.pad_token_id, of_config, 0)
    masks = ""
    # of one token, a causal model predicts nothing
    sentences = _sentences(rows, data, next(int(i) for i in pads if i is not None), least=2 if kind == "causal" else 1)
    if is_masked or kind == "causal":
        present = sentences.present()
        targets = sentences.tokens.masked_fill(~present, IGNORED) if labels is None else torch.from_numpy(labels)
        whole = {"input_ids": sentences.tokens, "attention_mask": present.long(), "labels": targets}
    else:
        special = _special_ids(its_tokenizer, mask_id, text_config.vocab_size, checkpoint)
        objective = masking or ObjectiveConfig()
        whole = mask(sentences, special, objective, generator=generator(seed, "masks"))
        masked = "one token of each" if objective.masking == "one" else f"{100 * objective.fraction:g} % of the tokens"
        # said, as a Trainer's collator leaves some as they are, and its loss is lower
        masks = f"; {masked} masked, always by the mask token"
    if origins is not None:
        number = len(np.unique(origins))
        description += f", from {number:,} document{'s' if number > 1 else ''}"
        if number >= FEWEST_DOCUMENTS:
            whole["documents"] = torch.from_numpy(origins)
        else:
            # the auxiliary sample must count as independent what the measurement does
            auxiliary_sample = replace(auxiliary_sample, origins=None)
            description += ", too few to tell how texts differ (a folder of texts or a .jsonl file has more): "
            description += "errors are for these texts alone"
    description += masks
    inputs = make_inputs(_cut(whole, batch_size), kind, description)
    inputs = replace(inputs, auxiliary_sample=auxiliary_sample, documents=names)
    if sizes is None:
        return inputs
    is_predicted = whole["labels"].numpy() != IGNORED
    is_predicted[:, 0] &= kind == "masked"
    return replace(inputs, bytes_per_token=float(sizes[is_predicted].sum()) / max(1, inputs.num_predicted))


def holds_text(data: Path) -> bool:
    """Return whether data is text, by its name, and not token ids."""
    return hub_datasets.is_dataset(data) or data.suffix.lower() not in SUFFIXES


def check_model(inputs: Inputs, config: Any, max_length: int | None, checkpoint: str) -> None:
    """Raise an `IsolossError` where a model, called `checkpoint`, cannot take inputs that were read for another one."""
    for batch in inputs.batches:
        _check_rows(batch["input_ids"].numpy(), "the data", config.get_text_config(), max_length, checkpoint)


def _cut(whole: Batch, batch_size: int) -> list[Batch]:
    starts = range(0, len(whole["labels"]), batch_size)
    return [{name: tensor[start : start + batch_size] for name, tensor in whole.items()} for start in starts]


def drawn_rows(total: int, number: int, seed: int) -> torch.Tensor:
    """Return (total,) bool: which of the rows are drawn, `number` of them or all."""
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=generator(seed, "few"))[:number]] = True
    return chosen


def make_inputs(batches: list[Batch], kind: Kind, description: str) -> Inputs:
    """Return inputs with their sequences and predicted positions counted."""
    first = 1 if kind == "causal" else 0
    return Inputs(
        batches=batches,
        num_sequences=sum(len(batch["labels"]) for batch in batches),
        num_predicted=sum(int((batch["labels"][:, first:] != IGNORED).sum()) for batch in batches),
        description=description,
    )


def _tokenizer(
    tokenizer: PreTrainedTokenizerFast | str | None, checkpoint: str, *, needed: bool, useful: bool
) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer that was given, else the checkpoint's own where it has one and it is of any use."""
    if isinstance(tokenizer, str):
        return tokenizers.load_tokenizer(tokenizer)
    if tokenizer is not None or not (needed or useful):
        return tokenizer
    try:
        return tokenizers.load_tokenizer(checkpoint)
    except IsolossError as error:
        if needed:
            raise IsolossError(f"{error}; give --tokenizer FOLDER, or token ids as a .npy file") from error
        if not isinstance(error, tokenizers.NoTokenizerError):
            warn(f"{error}; so it is not known which tokens are special")
        return None


def _special_ids(
    tokenizer: PreTrainedTokenizerFast | None, mask_id: int | None, vocab_size: int, checkpoint: str
) -> SpecialIds:
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise IsolossError(f"{checkpoint} is a masked model, and no id is known for masked tokens: give --mask-id")
    if not 0 <= mask_id < vocab_size:
        raise IsolossError(f"the mask's id is {mask_id}; {checkpoint} knows the ids 0 to {vocab_size - 1}")
    return SpecialIds(mask_id, () if tokenizer is None else tuple(tokenizer.all_special_ids))


def _from_text(
    data: Path, located: Iterable[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, kind: Kind, length: int
) -> tuple[Ids, tokenizers.Floats, Ids, str, list[str]]:
    """Return rows, bytes of text of each token, the document in which each begins, a note of unknown tokens, names."""
    around = boundary_token_ids(tokenizer) if kind == "masked" else {}
    body = length - len([i for i in around.values() if i is not None])
    if body < 1:
        raise IsolossError(f"the length is {length}; with [CLS] and [SEP] it must be at least 3")
    # by part of the text, and filled while `pack` reads, so that a long text goes by once: tokens, the bytes of each,
    # tokens that are not known, and the document
    sizes: list[int] = []
    num_bytes: list[tokenizers.Floats] = []
    unknown: list[int] = []
    numbers: list[int] = []
    names: list[str] = []
    is_causal = kind == "causal"
    # what the tokenizer puts around a text: the unknown token may be among these, and does not count
    (added,) = tokenizers.encode(tokenizer, [""], add_special_tokens=is_causal)

    def texts() -> Iterator[str]:
        file, known = "", dict[str, int]()
        for location, text in located:
            # a long file comes in parts, and is one document; so are equal texts
            before, file = file, location.rpartition(":")[0]
            if file == before and file.lower().endswith(".txt"):
                numbers.append(numbers[-1])
            else:
                numbers.append(known.setdefault(text, len(known)))
            if numbers[-1] == len(names):
                first = " ".join(text[: 10 * _FIRST_CHARACTERS].split())
                names.append(f'{location}, "{first[:_FIRST_CHARACTERS]}{"…" * (len(first) > _FIRST_CHARACTERS)}"')
            yield text

    def counted() -> Iterator[np.ndarray]:
        for ids, bytes_of in tokenizers.encode_with_bytes(tokenizer, texts(), add_special_tokens=is_causal):
            sizes.append(len(ids))
            num_bytes.append(bytes_of)
            unknown.append(int((ids == tokenizer.unk_token_id).sum() - (added == tokenizer.unk_token_id).sum()))
            yield ids

    packed = list(pack(counted(), length, **around))
    if not packed:
        raise IsolossError(f"the text in {data} is shorter than one sequence of {length} tokens")
    rows = np.concatenate(packed)
    no_bytes = {name: None if index is None else 0 for name, index in around.items()}
    row_bytes = np.concatenate(list(pack(num_bytes, length, **no_bytes)))
    # the place in the stream of the token that each row begins with
    firsts = body * np.arange(len(rows))
    # "right": a row that begins where a document ends is of the next one
    origins = np.array(numbers)[np.searchsorted(np.cumsum(sizes), firsts, side="right")]
    fraction = sum(unknown) / max(1, sum(sizes) - len(sizes) * len(added))
    note = f", {100 * fraction:.1f} % of the tokens unknown to the tokenizer" if fraction else ""
    if kind == "masked":
        is_maskable = ~np.isin(rows, tokenizer.all_special_ids).all(axis=1)
        if not is_maskable.any():
            raise IsolossError(f"{data} holds no token that the tokenizer knows and that could be masked")
        rows, row_bytes, origins = rows[is_maskable], row_bytes[is_maskable], origins[is_maskable]
        left_out = (~is_maskable).sum()
        note += f", {left_out:,} sequences of unknown tokens alone left out" if left_out else ""
    return rows, row_bytes, origins, note, names


def _check_rows(rows: Ids, data: Path | str, config: Any, max_length: int | None, checkpoint: str) -> None:
    if max_length is not None and rows.shape[1] > max_length:
        raise IsolossError(
            f"the sequences have {rows.shape[1]} tokens and {checkpoint} takes {max_length} at most: "
            "give a smaller --length, or shorter rows"
        )
    largest = int(rows.max())
    if largest >= config.vocab_size:
        raise IsolossError(
            f"{data} has the token id {largest}, and {checkpoint} knows {config.vocab_size} ids, 0 to "
            f"{config.vocab_size - 1}: are the data and the tokenizer this model's?"
        )


def _sentences(rows: Ids, data: Path, pad_id: int, *, least: int) -> Sentences:
    """Return rows as sentences; each must have `least` tokens, and its padding at the end."""
    present = rows >= 0
    lengths = present.sum(axis=1)
    gaps = (present != (np.arange(rows.shape[1]) < lengths[:, None])).any(axis=1)
    if gaps.any():
        raise IsolossError(
            f"row {int(gaps.argmax())} of {data} has a token after a negative id: padding stands at a row's end"
        )
    if lengths.min() < least:
        raise IsolossError(f"{data} has a row of {lengths.min()} tokens, in which there is nothing to predict")
    return Sentences(torch.from_numpy(np.where(present, rows, pad_id)), torch.from_numpy(lengths))
