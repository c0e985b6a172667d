"""Whether two tokenizers read texts alike, so that an id is the same token to the models of both."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isoloss.text.tokenizers import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ROLES = ("cls", "sep", "mask")  # special tokens that inputs are made with, whatever the tokenizer puts around a text
_READING = ("lstrip", "rstrip", "single_word", "normalized")  # how an added token is found in a text
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}  # and what holds the steps of a sequence
_Token = tuple[Any, ...]
_Document = dict[str, Any]  # a tokenizer.json


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
    reason, special = _different_tokens(names, *map(_tokens, documents))
    others = itertools.chain(_different_parts(names, *documents), _different_surroundings(names, first, second))
    return Difference(reason or next(others, ""), tuple(special))


def _backend(tokenizer: PreTrainedTokenizerFast) -> Any:
    from isoloss.text.kept_tokens import KeptTokensTokenizer

    return tokenizer.source if isinstance(tokenizer, KeptTokensTokenizer) else tokenizer.backend_tokenizer


def _tokens(document: _Document) -> dict[str, _Token]:
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


def _different_parts(names: tuple[str, str], first: _Document, second: _Document) -> Iterator[str]:
    """Yield how settings and merges of the two models, and then the steps before these, differ."""
    models = first["model"], second["model"]
    for name in sorted({*models[0], *models[1]} - {"vocab", "merges"}):
        # a missing prefix may be written as null or as an empty string
        a, b = (None if model.get(name) == "" else model.get(name) for model in models)
        if a != b:
            yield f"the {name} of the model is {a} in {names[0]} and {b} in {names[1]}"
    merges = [model.get("merges") or [] for model in models]
    if len(merges[0]) != len(merges[1]):
        yield f"{names[0]} has {len(merges[0]):,} merges and {names[1]} {len(merges[1]):,}"
    else:
        for place, pair in enumerate(zip(*merges, strict=True)):
            if pair[0] != pair[1]:
                a, b = map("+".join, pair)
                yield f"merge {place} is {a} in {names[0]} and {b} in {names[1]}"
    for part, inner in _STEPS.items():
        steps = [_steps(document[part], inner) for document in (first, second)]
        a, b = (" + ".join(step["type"] for step in each) or "nothing" for each in steps)
        name = part.replace("_", "-")
        if a != b:
            yield f"the {name} is {a} in {names[0]} and {b} in {names[1]}"
        elif steps[0] != steps[1]:
            yield f"the {name}s have different settings"


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
) -> Iterator[str]:
    a, b = (next(encode(tokenizer, [""], add_special_tokens=True)).tolist() for tokenizer in (first, second))
    if a != b:
        yield f"{names[0]} puts the ids {a} around a text and {names[1]} {b}"
    for role in _ROLES:
        a, b = (getattr(tokenizer, f"{role}_token_id") for tokenizer in (first, second))
        if None not in (a, b) and a != b:
            yield f"the {role} token is {a} in {names[0]} and {b} in {names[1]}"
    if getattr(first, "kept_tokens", None) != getattr(second, "kept_tokens", None):
        yield "they keep different tokens"
