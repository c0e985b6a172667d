"""The tokenizer of a teacher's language: the teacher's own, with new ids for the kept tokens and one for all others.

Importing this file makes it known to transformers' `AutoTokenizer`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizer
from transformers.configuration_utils import PreTrainedConfig

Ids = npt.NDArray[np.int64]


class KeptTokensTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    r"""A tokenizer with K of another's tokens: text is read by the other, and each id that it gives is replaced.

    The k-th kept token has the id k, padding K, and everything else K + 1: the mask. Where a text has a token that is
    not kept, a model of the language therefore reads what stands in pre-training for a masked token. The mask
    stands before each text as well, `<mask> a` or `<mask> a <mask> b`, as causal models of the language begin with it.
    Ids are replaced after the other tokenizer's work, so that they are right for every kind of it. What a text spells
    is never one of the other's special tokens.

    It is saved as `tokenizer_config.json` and `source_tokenizer.json`, the other tokenizer. The latter is not called
    `tokenizer.json`, so that where this class is not known nobody takes the other's ids for these.

    Attributes:
        source: The other tokenizer, of the library tokenizers.
        kept_tokens: K ids of its tokens.

    Example:
        >>> from tokenizers import Tokenizer
        >>> from tokenizers.models import WordLevel
        >>> from tokenizers.pre_tokenizers import Whitespace
        >>> from isoloss.text.kept_tokens import KeptTokensTokenizer
        >>> source = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "the": 2, "film": 3, "good": 4}, unk_token="[UNK]"))
        >>> source.pre_tokenizer = Whitespace()
        >>> tokenizer = KeptTokensTokenizer(source, kept_tokens=[4, 1, 3])
        >>> tokenizer("a very good film")["input_ids"], tokenizer.unk_token_id, tokenizer.pad_token_id
        ([4, 1, 4, 0, 2], 4, 3)
    """

    vocab_files_names = {"source_file": "source_tokenizer.json"}  # noqa: RUF012  as transformers has it
    model_input_names = ["input_ids", "token_type_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, source_file: Tokenizer | str | Path, *, kept_tokens: Sequence[int], **options: Any) -> None:
        if isinstance(source_file, str | Path):
            source_file = Tokenizer.from_file(str(source_file))
        # a copy, so that the caller's keeps its truncation, padding and special tokens
        self.source = copy.deepcopy(source_file)
        self.source.no_truncation()
        self.source.no_padding()
        self.source.encode_special_tokens = True
        self.kept_tokens = list(kept_tokens)
        # models have more ids than their tokenizer has tokens where the size of the embedding is rounded up
        words = [self.source.id_to_token(index) or f"t{index}" for index in self.kept_tokens]
        for special in ("<pad>", "<mask>"):
            # the other tokenizer's special token of this name is an ordinary one here
            while special in words:
                special += "_"
            words.append(special)
        self._words, self._ids = words, {word: index for index, word in enumerate(words)}
        size = 1 + max(*self.kept_tokens, *self.source.get_vocab().values())
        # what is not kept becomes the mask
        self._table = np.full(size, len(words) - 1)
        self._table[self.kept_tokens] = np.arange(len(self.kept_tokens))
        pad, mask = words[-2:]
        # what the base class is given is what `save_pretrained` writes to tokenizer_config.json
        options |= {"pad_token": pad, "mask_token": mask, "unk_token": mask, "bos_token": mask}
        super().__init__(kept_tokens=self.kept_tokens, **{**options, "special_tokens_pattern": "bos"})

    def from_source(self, ids: Sequence[int] | Ids) -> Ids:
        """Return the ids that stand here for those that `source` gives."""
        return self._table[np.asarray(ids, dtype=np.int64)]

    @property
    def vocab_size(self) -> int:
        """K + 2."""
        return len(self._words)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by token."""
        return dict(self._ids)

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [
            self._words[index] for index in self.from_source(self.source.encode(text, add_special_tokens=False).ids)
        ]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, len(self._words) - 1)

    def _convert_id_to_token(self, index: int) -> str:
        return self._words[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text that tokens spell."""
        decoder = self.source.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def truncate_sequences(
        self,
        ids: list[int],
        pair_ids: list[int] | None = None,
        num_tokens_to_remove: int = 0,
        truncation_strategy: Any = "longest_first",
        stride: int = 0,
    ) -> tuple[list[int], list[int] | None, list[int]]:
        """Cut a pair as fast tokenizers do, one token of the longer text at a time; else as the base class does."""
        if pair_ids is None or getattr(truncation_strategy, "value", truncation_strategy) != "longest_first":
            cut: tuple[list[int], list[int] | None, list[int]] = super().truncate_sequences(
                ids, pair_ids, num_tokens_to_remove, truncation_strategy, stride
            )
            return cut
        first, second = len(ids), len(pair_ids)
        # of two that have become equally long, the one that was shorter at first is cut
        cuts_first = first <= second
        for _ in range(num_tokens_to_remove):
            if first > second or (first == second and cuts_first):
                first -= 1
            else:
                second -= 1
        if self.truncation_side == "left":
            return ids[len(ids) - first :], pair_ids[len(pair_ids) - second :], []
        return ids[:first], pair_ids[:second], []

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Write `source` to a folder, and return the file's name."""
        name = self.vocab_files_names["source_file"]
        path = Path(save_directory, f"{filename_prefix}-{name}" if filename_prefix else name)
        path.write_text(self.source.to_str(), encoding="utf-8")
        return (str(path),)


class _NoModel(PreTrainedConfig):  # type: ignore[misc]
    """`AutoTokenizer` takes a class together with a model's config; this tokenizer belongs to no one model."""

    model_type = "isoloss-kept-tokens"


AutoTokenizer.register(_NoModel, tokenizer_class=KeptTokensTokenizer, exist_ok=True)
