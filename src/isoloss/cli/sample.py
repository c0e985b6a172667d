"""`isoloss sample`: sentences of a language and, where the truth is known, their exact probabilities and entropies."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.cli import common, options
from isoloss.cli.options import LanguageOptions
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import check_name
from isoloss.machine import check_fits

if TYPE_CHECKING:
    from isoloss.lab.languages import Entropy, ExactLanguage, Language, Sentences

EXAMPLES = [
    ("isoloss sample pcfg-laptop", "five sentences of a random grammar, with the entropy of every token"),
    ("isoloss sample dyck-2 --tree", "with the derivation of each sentence, for a grammar"),
    ("isoloss sample hmm-laptop --states", "with the hidden states, for a hidden Markov model"),
    ("isoloss sample dyck-2 --save dyck.safetensors", "writes the language to a file, which every subcommand reads"),
    ("isoloss sample grammar.pcfg --num-sentences 1000 --json", "a thousand sentences of your own grammar, as JSON"),
    ("isoloss sample text/ --tokenizer tokenizer --length 32", "packed sequences of real text"),
]
CONDITIONALS = 3  # masked tokens that are shown unasked
LIKELIEST = 5  # tokens shown of a conditional
ENTROPY_SENTENCES = 2000
BYTES_PER_SENTENCE = 300  # at least, in Python: a dictionary with two empty lists
IMPOSSIBLE = 1e-30  # probability; a language gives a token that cannot be the smallest normal number
MASKED = "___"


@dataclass(frozen=True)
class Args:
    """Draw sentences. Where the truth is known: their log-probability, the entropy of each token given all the others,
    what a few masked tokens can be, and the entropy of the language.
    """

    language: options.Positional[str]
    """A preset (isoloss ls languages), a file, the folder of a causal model, or, with --tokenizer, text or hf:NAME."""
    num_sentences: int = configs.setting(5, minimum=1)
    """Sentences to draw."""
    seed: int = 0
    """Decides the draw."""
    tree: bool = False
    """For a grammar: also print each sentence's derivation, (SYMBOL child child) or (SYMBOL token)."""
    states: bool = False
    """For a hidden Markov model: also print the hidden states behind each sentence."""
    conditionals: int | None = configs.setting(None, minimum=0, note="0: none")
    """How many tokens of the first sentence to mask, one at a time; the likeliest tokens are listed for each; default:
    3, or 1 for a causal model."""
    entropy_sentences: int | None = configs.setting(None, minimum=0, note="0: none")
    """Sentences to estimate the entropy on (0: leave it out); default: 2000; 0 for a causal model and for a grammar of
    over 5,000 rules, which are slow."""
    save: Path | None = None
    """Write the language to this file, NAME.safetensors; every subcommand takes it as a language."""
    overwrite: bool = False
    """Let --save replace a file of another content."""
    json: bool = False
    """Print one JSON document."""
    reading: LanguageOptions = field(default_factory=LanguageOptions)


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "sample", arguments, examples=EXAMPLES)
    _check_numbers(args)
    from isoloss import seeds
    from isoloss.lab import languages

    config = languages.resolve(args.language, **args.reading)
    language: Language = config.build()
    if language.is_exact and language.exact().has_slow_entropy and not language.exact().costs_forward_passes:
        common.note(f"{args.language} is {language.describe()}; drawing {args.num_sentences:,}")
    _check_effects(args, language)
    sentences = language.sample(
        args.num_sentences, generator=seeds.generator(args.seed, "sample"), latent=args.tree or args.states
    )
    drawn = zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)
    rows: list[dict[str, Any]] = [{"tokens": tokens[:length]} for tokens, length in drawn]
    for row in rows:
        row["words"] = [language.vocabulary[token] for token in row["tokens"]]
    if args.tree or args.states:
        for row, latent in zip(rows, language.describe_latent(sentences), strict=True):
            row[str(language.latent_name)] = latent
    conditionals, entropy = list[dict[str, Any]](), None
    if language.is_exact:
        conditionals, entropy = _truth(args, language.exact(), sentences, rows)
    if args.save is not None:
        languages.save(language, args.save, overwrite=args.overwrite)
    if args.json:
        common.emit_json(
            {
                "language": configs.to_dict(config),
                "description": language.describe(),
                "seed": args.seed,
                "sentences": rows,
                "conditionals": conditionals,
                "entropy": entropy.to_dict() if entropy else None,
                "saved": str(args.save) if args.save else None,
            }
        )
        return 0
    common.say(f"{args.language}: {language.describe()}\n")
    _say_sentences(rows)
    _say_conditionals(conditionals, rows[0]["words"])
    if entropy is not None:
        _say_entropy(entropy)
    if args.save is not None:
        common.say(f"\nthe language is in {args.save}")
    return 0


def _check_numbers(args: Args) -> None:
    configs.check(args)
    check_fits(args.num_sentences * BYTES_PER_SENTENCE, f"--num-sentences is {args.num_sentences:,}")
    if args.entropy_sentences == 1:
        raise IsolossError("--entropy-sentences is 1; an estimate with an error needs at least 2 (0: none)")
    if args.overwrite and args.save is None:
        raise IsolossError("--overwrite needs --save: nothing else is written")
    if args.save is not None:
        check_name(args.save)
        files.check_outputs({"--save": args.save}, [args.language, args.reading.get("tokenizer") or ""])


def _check_effects(args: Args, language: Language) -> None:
    """Refuse options that this language has no use for."""
    if args.tree and language.latent_name != "tree":
        raise IsolossError(f"--tree is for a grammar: the sentences of {args.language} have no derivation")
    if args.states and language.latent_name != "states":
        raise IsolossError(
            f"--states is for a hidden Markov model: the sentences of {args.language} have no hidden states"
        )
    if not language.is_exact:
        exact = {"--conditionals": args.conditionals, "--entropy-sentences": args.entropy_sentences}
        if chosen := [name for name, value in exact.items() if value is not None]:
            raise IsolossError(
                f"the probabilities of {args.language} are not known, for it is text: leave out {', '.join(chosen)}"
            )


def _truth(
    args: Args, language: ExactLanguage, sentences: Sentences, rows: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Entropy | None]:
    """Add to the rows what is exactly known of them; return conditionals of the first, and the language's entropy."""
    from isoloss.lab import languages

    is_slow = language.costs_forward_passes
    for row, log_prob in zip(rows, language.log_prob(sentences.tokens, sentences.lengths).tolist(), strict=True):
        row["log_prob_nats"] = log_prob
    if not is_slow:
        entropies = language.conditional_entropy(sentences.tokens, sentences.lengths).tolist()
        for row, padded in zip(rows, entropies, strict=True):
            row["conditional_entropy_nats"] = padded[: len(row["tokens"])]
    number = args.conditionals if args.conditionals is not None else 1 if is_slow else CONDITIONALS
    conditionals = _conditionals(language, sentences, number)
    draws = args.entropy_sentences
    if draws is None:
        draws = 0 if language.has_slow_entropy else ENTROPY_SENTENCES
        if not draws and not is_slow:
            common.note(
                f"the entropy of {args.language} is left out, as it takes minutes; ask by --entropy-sentences 200"
            )
    if draws == 0:
        return conditionals, None
    if language.has_slow_entropy and not is_slow:
        common.note(f"estimating the entropy of {args.language} on {draws:,} sentences, which takes minutes")
    entropy = languages.entropy(language, num_sentences=draws, seed=args.seed)
    if args.entropy_sentences and not entropy.masked_token.samples:
        raise IsolossError(f"the entropy of {args.language} has a closed form: leave out --entropy-sentences")
    return conditionals, entropy


def _conditionals(language: ExactLanguage, sentences: Sentences, number: int) -> list[dict[str, Any]]:
    """Return what tokens of the first sentence can be given all others, at positions spread evenly over it."""
    import torch

    length = int(sentences.lengths[0])
    wanted = min(number, length)
    if wanted == 0:
        return []
    # the middles of `wanted` equal parts of the sentence
    positions = [int((2 * index + 1) * length / (2 * wanted)) for index in range(wanted)]
    chosen = torch.tensor([positions])
    logs = language.log_conditionals(sentences.tokens[:1], sentences.lengths[:1], positions=chosen)

    def row(token: int, probs: list[float]) -> dict[str, Any]:
        return {"token": token, "word": language.vocabulary[token], "probability": probs[token]}

    conditionals = []
    for position, probs in zip(positions, logs[0].exp().tolist(), strict=True):
        order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
        conditionals.append(
            {
                "sentence": 0,
                "position": position,
                "masked": row(int(sentences.tokens[0, position]), probs),
                "likeliest": [row(token, probs) for token in order[:LIKELIEST] if probs[token] > IMPOSSIBLE],
            }
        )
    return conditionals


def _say_sentences(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        common.say(" ".join(row["words"]))
        if "tree" in row:
            common.say(f"    {row['tree']}")
        if "states" in row:
            common.say(f"    states {' '.join(row['states'])}")
        if "log_prob_nats" in row:
            # `z` turns -0.000, which is rounding, into 0.000
            entropies = " ".join(f"{h:z.3f}" for h in row.get("conditional_entropy_nats", []))
            after = f"; entropy of each token {entropies} nats" if entropies else ""
            common.say(f"    log-probability {row['log_prob_nats']:.4f} nats{after}")


def _say_conditionals(conditionals: list[dict[str, Any]], words: list[str]) -> None:
    if conditionals:
        common.say("\nthe first sentence with one token masked: the likeliest tokens there, and the true one")
    for one in conditionals:
        shown = [MASKED if position == one["position"] else word for position, word in enumerate(words)]
        likeliest = ", ".join(map(_with_probability, one["likeliest"]))
        common.say(f"    {' '.join(shown)}\n        {likeliest}; the true one: {_with_probability(one['masked'])}")


def _with_probability(row: dict[str, Any]) -> str:
    probability = row["probability"]
    return f"{row['word']} {probability:.3f}" if probability >= 0.001 else f"{row['word']} {probability:.1e}"


def _say_entropy(entropy: Entropy) -> None:
    from isoloss.statistics.estimate import Estimate, rounded

    def number(estimate: Estimate) -> str:
        return rounded(estimate.value, estimate.stderr)

    def source(estimate: Estimate) -> str:
        return f"mean over {estimate.samples:,} drawn sentences" if estimate.samples else estimate.method

    sentence = entropy.sentence
    common.say(f"\nentropy of a sentence: {number(sentence)} nats ({source(sentence)})")
    if entropy.length.value:
        parts = f"{number(entropy.length)} of its length + {number(entropy.given_length)} given its length"
        common.say(f"    = {parts}")
    masked = entropy.masked_token
    common.say(f"entropy of a masked token given all others: {number(masked)} nats ({source(masked)})")
    common.say("    the loss of a perfect model where one token of each sentence is masked")
