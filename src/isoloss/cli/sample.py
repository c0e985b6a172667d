"""`isoloss sample`: sentences of a language and, where the truth is known, their exact probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tyro

from isoloss import config as configs
from isoloss.cli import common
from isoloss.errors import IsolossError

if TYPE_CHECKING:
    from isoloss.estimate import Estimate
    from isoloss.languages import ExactLanguage, Language, Sentences

EXAMPLES = [
    ("isoloss sample pcfg-laptop", "five sentences of a random grammar, with the entropy of every token"),
    ("isoloss sample dyck-2 --tree", "with the derivation of each sentence, for a grammar"),
    ("isoloss sample grammar.pcfg --n 1000 --json", "a thousand of your own grammar's, as JSON"),
    ("isoloss sample novels/ --tokenizer vocab.txt --length 32", "packed sequences of real text"),
]


@dataclass(frozen=True)
class Args:
    """Draw sentences. For a grammar: log-probability, and the entropy of each token given all the others, in nats."""

    language: tyro.conf.Positional[str]
    """A preset (isoloss ls languages), a grammar file, a .toml file, or text together with --tokenizer."""
    n: int = 5
    """Sentences to draw."""
    seed: int = 0
    """Decides the draw."""
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt."""
    length: int | None = None
    """For text: tokens in a packed sequence. For a grammar file: the longest sentence."""
    tree: bool = False
    """For a grammar: also give the tree that each sentence was derived by, (SYMBOL child child) or (SYMBOL token)."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "sample", arguments, examples=EXAMPLES)
    if args.n < 1:
        raise IsolossError(f"--n is {args.n}; draw at least 1 sentence")
    from isoloss import languages, seeds
    from isoloss.languages.pcfg import PCFG

    config = languages.resolve(args.language, tokenizer=args.tokenizer, length=args.length)
    language = languages.make(config)
    if args.tree and not isinstance(language, PCFG):
        raise IsolossError(f"--tree is for a grammar: the sentences of {args.language} have no derivation")
    sentences = language.sample(args.n, generator=seeds.generator(args.seed, "sample"), latent=args.tree)
    rows = _rows(language, sentences)
    if isinstance(language, PCFG) and args.tree:
        for row, nodes in zip(rows, sentences.latent.tolist(), strict=True):
            row["tree"] = _tree([node for node in nodes if node[0] >= 0], language.symbols, row["words"])
    mean = _mean_entropy(rows) if isinstance(language, languages.ExactLanguage) else None
    if args.json:
        common.emit_json(
            {
                "language": configs.to_dict(config),
                "seed": args.seed,
                "mean_conditional_entropy": mean.to_dict() if mean else None,
                "sentences": rows,
            }
        )
        return 0
    for row in rows:
        common.say(" ".join(row["words"]))
        if "tree" in row:
            common.say(f"    {row['tree']}")
        if "log_prob_nats" in row:
            entropies = " ".join(f"{h:z.3f}" for h in row["conditional_entropy_nats"])
            common.say(f"    log-probability {row['log_prob_nats']:.4f} nats; entropy of each token {entropies} nats")
    if mean is not None:
        common.say(f"\nmean entropy of a token given the others, over these sentences: {mean}")
    return 0


def _rows(language: Language, sentences: Sentences) -> list[dict[str, Any]]:
    from isoloss.languages import ExactLanguage

    rows: list[dict[str, Any]] = []
    for tokens, length in zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True):
        kept = tokens[:length]
        rows.append({"tokens": kept, "words": [language.vocabulary[token] for token in kept]})
    if isinstance(language, ExactLanguage):
        _add_truth(language, sentences, rows)
    return rows


def _tree(nodes: list[list[int]], symbols: tuple[str, ...], words: list[str]) -> str:
    """Return the rows (start, stop, symbol) of a tree's nodes, in preorder, as nested brackets."""
    text, open_until = "", list[int]()
    for index, (start, stop, symbol) in enumerate(nodes):
        while open_until and open_until[-1] <= start:
            text += ")"
            open_until.pop()
        text += f" ({_name(symbols[symbol])}"
        open_until.append(stop)
        if index + 1 == len(nodes) or nodes[index + 1][0] >= stop:
            text += f" {_name(words[start])}"
    return text.strip() + ")" * len(open_until)


def _name(name: str) -> str:
    """Return a symbol or a token, in quotes where it could be taken for a part of the tree."""
    return repr(name) if any(c in "()'\"" or c.isspace() for c in name) else name


def _add_truth(language: ExactLanguage, sentences: Sentences, rows: list[dict[str, Any]]) -> None:
    log_probs = language.log_prob(sentences.tokens, sentences.lengths).tolist()
    entropies = language.conditional_entropy(sentences.tokens, sentences.lengths).tolist()
    for row, log_prob, entropy in zip(rows, log_probs, entropies, strict=True):
        row["log_prob_nats"] = log_prob
        row["conditional_entropy_nats"] = entropy[: len(row["tokens"])]


def _mean_entropy(rows: list[dict[str, Any]]) -> Estimate | None:
    """The mean over sentences of a sentence's mean entropy: what one masked token a sentence costs at least."""
    from statistics import fmean, stdev

    from isoloss.estimate import Estimate

    means = [fmean(row["conditional_entropy_nats"]) for row in rows]
    if len(means) < 2:
        return None
    return Estimate(
        value=fmean(means),
        stderr=stdev(means) / len(means) ** 0.5,
        samples=len(means),
        unit="nats per masked token",
        num_inputs=len(means),
        method="exact conditionals, mean over sampled sentences",
    )
