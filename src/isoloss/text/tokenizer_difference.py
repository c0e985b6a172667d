"""Whether two tokenizers read texts alike, so that an id is the same token to the models of both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isoloss.text.tokenizers import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROLES = ("cls", "sep", "mask")  # special tokens that inputs are made with, whatever the tokenizer puts around a text
_READING = ("lstrip", "rstrip", "single_word", "normalized")  # how an added token is found in a text
_Token = tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """What differs between two tokenizers, called `first` and `second`.

    Attributes:
        reason: The first difference in how they read a text or number its tokens, in words; empty where they are alike.
        special: Special tokens, which are never read in a text, that one of them alone has or has under another id.
    """

    reason: str
    special: tuple[str, ...]


def difference(first: PreTrainedTokenizerFast, second: PreTrainedTokenizerFast, names: tuple[str, str]) -> Difference:
    """Return what differs between two tokenizers, whichever is the first.

    They are alike if they have the same tokens with the same ids, the same merges or scores, normalizer and
    pre-tokenizer, and put the same ids around a text. Their decoders, truncation and padding are not compared.
    """
    documents = [json.loads(_backend(tokenizer).to_str()) for tokenizer in (first, second)]
    models = [document["model"] for document in documents]
    tokens = [_tokens(document) for document in documents]
    reason, special = _different_tokens(names, *tokens)
    return Difference(
        reason
        or _different_settings(names, *models)
        or _different_merges(names, *(model.get("merges") or [] for model in models))
        or _different_steps(names, documents, "normalizer", "normalizers")
        or _different_steps(names, documents, "pre_tokenizer", "pretokenizers")
        or _different_surroundings(names, first, second),
        tuple(special),
    )


def _backend(tokenizer: PreTrainedTokenizerFast) -> Any:
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    return tokenizer.source if isinstance(tokenizer, KeptTokensTokenizer) else tokenizer.backend_tokenizer


def _tokens(document: dict[str, Any]) -> dict[str, _Token]:
    """Return each token's kind, its id, and the settings that decide where it is matched."""
    vocabulary = document["model"]["vocab"]
    # a unigram model has a list of pieces and scores
    of_model: dict[str, _Token] = (
        {token: ("token", index) for token, index in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else {token: ("token", index, score) for index, (token, score) in enumerate(vocabulary)}
    )
    added = {
        token["content"]: ("special", token["id"])
        if token["special"]
        else ("added", token["id"], *(token[name] for name in _READING))
        for token in document["added_tokens"]
    }
    return {**of_model, **added}


def _different_tokens(
    names: tuple[str, str], first: dict[str, _Token], second: dict[str, _Token]
) -> tuple[str, list[str]]:
    special = []
    differing = {token for token, _ in first.items() ^ second.items()}
    for token in sorted(differing, key=lambda token: (min(t[token][1] for t in (first, second) if token in t), token)):
        a, b = first.get(token), second.get(token)
        kinds = {found[0] for found in (a, b) if found is not None}
        if kinds == {"special"}:
            special.append(token)
        elif a is None or b is None:
            return f"{token!r} is a token of {names[a is None]} alone", special
        elif a[1] != b[1]:
            return f"{token!r} is token {a[1]} of {names[0]} and token {b[1]} of {names[1]}", special
        # a token of the vocabulary may also be listed as a special one, which does not change how text is read
        elif kinds != {"special", "token"}:
            return f"they match {token!r} in a text by different rules", special
    return "", special


def _different_settings(names: tuple[str, str], first: dict[str, Any], second: dict[str, Any]) -> str:
    for name in sorted({*first, *second} - {"vocab", "merges"}):
        # a missing prefix may be written as null or as an empty string
        a, b = (None if model.get(name) == "" else model.get(name) for model in (first, second))
        if a != b:
            return f"the {name} of the model is {a} in {names[0]} and {b} in {names[1]}"
    return ""


def _different_merges(names: tuple[str, str], first: list[Any], second: list[Any]) -> str:
    if first == second:
        return ""
    if len(first) != len(second):
        return f"{names[0]} has {len(first):,} merges and {names[1]} {len(second):,}"
    place = next(place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    a, b = ("+".join(merges[place]) for merges in (first, second))
    return f"merge {place} is {a} in {names[0]} and {b} in {names[1]}"


def _different_steps(names: tuple[str, str], documents: list[dict[str, Any]], name: str, inner: str) -> str:
    first, second = (_steps(document[name], inner) for document in documents)
    if first == second:
        return ""
    part = name.replace("_", "-")
    a, b = (" + ".join(step["type"] for step in steps) or "nothing" for steps in (first, second))
    if a != b:
        return f"the {part} is {a} in {names[0]} and {b} in {names[1]}"
    return f"the {part}s have different settings"


def _steps(component: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [step for part in component[inner] for step in _steps(part, inner)]
    # offsets in the text do not change ids
    return [{name: value for name, value in component.items() if name != "trim_offsets"}]


def _different_surroundings(
    names: tuple[str, str], first: PreTrainedTokenizerFast, second: PreTrainedTokenizerFast
) -> str:
    a, b = (next(encode(tokenizer, [""], add_special_tokens=True)).tolist() for tokenizer in (first, second))
    if a != b:
        return f"{names[0]} puts the ids {a} around a text and {names[1]} {b}"
    for role in _ROLES:
        a, b = (getattr(tokenizer, f"{role}_token_id") for tokenizer in (first, second))
        if None not in (a, b) and a != b:
            return f"the {role} token is {a} in {names[0]} and {b} in {names[1]}"
    kept = [getattr(tokenizer, "kept_tokens", None) for tokenizer in (first, second)]
    return "they keep different tokens" if kept[0] != kept[1] else ""
