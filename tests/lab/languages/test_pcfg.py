"""The language of a grammar: trees and spans, files, lengths, and every mistake in words; the contract has the rest."""

import math
import random
from collections import defaultdict

import nltk
import numpy as np
import pytest
import torch
from slow_grammar import SlowGrammar, random_rules
from small_languages import TINY, by_rules, rows_of

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab import languages
from isoloss.lab.languages.config import GrammarConfig, PCFGConfig
from isoloss.lab.languages.pcfg import PCFG
from isoloss.seeds import generator

LANGUAGES = {
    "random": PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=5).build(),
    "stops": PCFGConfig(levels=3, symbols_per_level=2, rules_per_symbol=3, vocab_size=4, stop_probability=0.3).build(),
    "laptop": PCFGConfig(symbols_per_level=4, vocab_size=8).build(),
    "recursive": PCFG.from_text(random_rules(7), max_length=7),
    "unary": PCFG.from_text(random_rules(21, symbols=5), max_length=6),
    "nltk": PCFG.from_text(
        "S -> NP VP [0.8] | 'go' [0.2]\nNP -> 'dogs' [0.3] | NP PP [0.3] | N [0.4]\nN -> 'dogs' [0.5] | 'cats' [0.5]\n"
        "VP -> V NP [0.7] | VP PP [0.3]\nV -> 'see' [1.0]\nPP -> 'with' NP [1.0]",
        max_length=8,
    ),
}


def some(language, n=20, seed=0):
    return language.sample(n, generator=generator(seed, "test"))


def test_log_prob_is_nltks():
    language = PCFG.from_text(LANGUAGES["nltk"].to_text(), max_length=5)
    parser = nltk.InsideChartParser(nltk.PCFG.fromstring(language.to_text("nltk")))
    truth = by_rules(language)
    found = {
        x: math.fsum(tree.prob() for tree in parser.parse([language.vocabulary[token] for token in x])) for x in truth
    }
    total = math.fsum(found.values())
    for x, p in truth.items():
        log_prob = float(language.log_prob(torch.tensor([x]), torch.tensor([len(x)])))
        assert (math.exp(log_prob), p) == (pytest.approx(found[x] / total, rel=1e-6),) * 2


@pytest.mark.parametrize("name", [name for name in LANGUAGES if name != "laptop"])
def test_spans_are_those_of_all_trees(name):
    language = LANGUAGES[name]
    slow = SlowGrammar(language.grammar)
    sentences = some(language, 60)
    keep = (sentences.lengths >= 2) & (sentences.lengths <= 4)
    tokens, lengths = sentences.tokens[keep][:8], sentences.lengths[keep][:8]
    rows = rows_of(sentences._replace(tokens=tokens, lengths=lengths))
    truth = []
    for sentence in rows:
        mass = defaultdict(float)
        for p, nodes in slow.trees(0, sentence):
            for node in nodes:
                mass[node] += p
        truth.append({node: p / slow.inside(0, sentence) for node, p in mass.items()})
    longest = int(lengths.min())
    spans = [(0, 1), (0, 2), (1, 2), *((start, longest) for start in range(longest)), (0, None)]
    for start, stop in spans:
        found = language.span_posterior(tokens, lengths, start=start, stop=stop)
        single = language.to(dtype=torch.float32).span_posterior(tokens, lengths, start=start, stop=stop)
        torch.testing.assert_close(single.double(), found, rtol=2e-6, atol=2e-6)
        inside = language.inside(tokens, lengths, start=start, stop=stop or longest)
        for index, sentence in enumerate(rows):
            end = len(sentence) if stop is None else stop
            for symbol in range(slow.size):
                expected = truth[index].get((start, end, symbol), 0.0)
                assert math.isclose(found[index, symbol], expected, rel_tol=1e-10, abs_tol=1e-15)
                expected = slow.inside(symbol, sentence[start : stop or longest])
                value = float(inside[index, symbol])
                assert math.isclose(math.exp(value), expected, rel_tol=1e-10) if expected else value <= TINY


def test_a_prefix_that_no_symbol_yields():
    language = LANGUAGES["random"]  # 4 tokens, always
    sentences = some(language)
    scores = language.inside(sentences.tokens, sentences.lengths, stop=3)
    assert (scores <= TINY).all()
    assert torch.isfinite(scores).all()
    assert (language.span_posterior(sentences.tokens, sentences.lengths, stop=3) == 0).all()


def test_files(tmp_path):
    language = LANGUAGES["laptop"]
    for form in ("rules", "nltk"):
        language.to_file(tmp_path / "g", form)
        again = PCFG.from_file(tmp_path / "g")
        assert again.max_length == 8
        tokens, lengths, _ = some(language)
        assert torch.equal(again.log_conditionals(tokens, lengths), language.log_conditionals(tokens, lengths))
    with pytest.raises(IsolossError, match=r"cannot read .*missing: No such file"):
        PCFG.from_file(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(IsolossError, match="binary is not UTF-8 text"):
        PCFG.from_file(tmp_path / "binary")
    (tmp_path / "bad").write_text("S a")
    with pytest.raises(IsolossError, match=r"bad, line 1: a rule is LHS"):
        PCFG.from_file(tmp_path / "bad")


def test_tokens_that_rule_lines_cannot_hold_are_kept_in_the_config():
    language = PCFG.from_text("S -> 'New York' [0.5] | 'S' [0.5]")
    assert language.config.build().vocabulary == ("New York", "S")


def test_max_length():
    assert PCFG.from_text("S A A 1\nS a 1\nA a 1").max_length == 2
    assert PCFG.from_text("S S S 1\nS a 2", max_length=9).max_length == 9
    assert PCFG.from_text("S S T 1\nS a 2\nT a a 1", max_length=10).max_length == 9  # odd lengths only
    with pytest.raises(IsolossError, match="no sentence of at most 1 tokens"):
        PCFG.from_text("S A A 1\nA a 1", max_length=1)
    for wrong in (0, 1025):
        with pytest.raises(IsolossError, match=f"max_length is {wrong}; it must be from 1 to 1024"):
            PCFG.from_text("S a 1", max_length=wrong)


def test_impossible_among_many_names_its_row():
    language = LANGUAGES["nltk"]
    tokens, lengths, _ = some(language, 9000)
    tokens[4321, 0], lengths[4321] = language.vocabulary.index("cats"), 1
    with pytest.raises(IsolossError, match="sentence 4321 has probability 0"):
        language.log_conditionals(tokens, lengths)


def test_what_is_too_improbable_for_float64_is_possible():
    language = PCFG.from_text("S A A 1\nS b 1\nA a 1e-200\nA b 1")
    tokens, lengths = torch.tensor([[0, 0], [1, 1], [0, 0]]), torch.tensor([2, 2, 1])
    assert language.is_possible(tokens, lengths).tolist() == [True, True, False]
    assert language.log_prob(tokens[:1], lengths[:1]).item() == pytest.approx(2 * math.log(1e-200) + math.log(0.5))


def test_wrong_spans():
    language = LANGUAGES["stops"]
    tokens, lengths = torch.zeros(2, 4).long(), torch.tensor([4, 2])
    for method in (language.inside, language.span_posterior):
        with pytest.raises(IsolossError, match="sentence 1 has 2 tokens; the span from 0 to 3 needs at least 3"):
            method(tokens, lengths, stop=3)
        for start, stop in ((-1, 2), (2, 2), (0, 0)):
            with pytest.raises(IsolossError, match=f"a span from {start} to {stop} holds no tokens"):
                method(tokens, lengths, start=start, stop=stop)
    with pytest.raises(IsolossError, match="sentence 1 has 2 tokens; the span from 2 to its end needs at least 3"):
        language.span_posterior(tokens, lengths, start=2)


def test_lengths():
    language = PCFG.from_text("S A S 0.99999\nS a 0.00001\nA a 1", max_length=4)  # nearly all derivations are longer
    assert math.isclose(language.length_probs[1], 0.25, rel_tol=1e-4)
    lengths = some(language, 20_000).lengths
    counts = lengths.bincount(minlength=5)[1:]
    assert ((counts - 5000) ** 2 / 5000).sum() < 3 + 4 * math.sqrt(6)
    tokens, lengths, nodes = language.sample(7, generator=generator(0, "x"), length=3, latent=True)
    assert tokens.tolist() == [[0, 0, 0]] * 7
    assert lengths.tolist() == [3] * 7
    assert nodes[0].tolist() == [[0, 3, 0], [0, 1, 1], [1, 3, 0], [1, 2, 1], [2, 3, 0]]
    few, many = (language.sample(n, generator=generator(0, "x")).tokens for n in (7, 900))
    assert torch.equal(many[:7, : few.shape[1]], few)


# --- a symbol that no rule reaches


def layered(*, unreached):
    """Rule lines of the form that the paper's authors published: layers, repeated rules, words, and a stray symbol."""
    rng = random.Random(3)
    lines = [f"S S{i} {rng.random():.6f}" for i in range(1, 4)]
    lines += [f"S{i} A1_{rng.randrange(3)} A1_{rng.randrange(2)} 1.0" for i in range(1, 4)] + ["S3 A1_2 A1_2 1.0"]
    words = iter(["korean", "enter", "snow", "rare", "bird", "height", "korean", "poetry"])
    for symbol in ["A1_0", "A1_1", "A1_2", *(["A1_9"] if unreached else [])]:
        lines += [f"{symbol} A2_{rng.randrange(2)} A2_{rng.randrange(2)} {rng.random()}" for _ in range(6)]
        lines.append(f"{symbol} {next(words)} {rng.random()}")
    if not unreached:
        next(words)
    rng = random.Random(4)
    return "\n".join(lines + [f"A2_{i} {next(words)} {rng.random()}" for i in range(2) for _ in range(2)]) + "\n"


def test_however_a_grammar_comes_in_it_is_the_same(tmp_path):
    text = layered(unreached=True)
    without = PCFG.from_text(layered(unreached=False), max_length=4)
    (tmp_path / "g.txt").write_text(text)
    (tmp_path / "g.pcfg").write_text(without.to_text("nltk") + "X -> 'x' [0.5] | Y X [0.5]\n")
    (tmp_path / "g.toml").write_text(f'kind = "grammar"\nmax_length = 4\nrules = """\n{text}"""\n')
    ways = {
        "grammar file": lambda: languages.resolve(str(tmp_path / "g.txt"), length=4).build(),
        "NLTK's format": lambda: languages.resolve(str(tmp_path / "g.pcfg"), length=4).build(),
        "TOML": lambda: languages.resolve(str(tmp_path / "g.toml")).build(),
        "config": lambda: GrammarConfig(rules=text, max_length=4).build(),
        "rules": lambda: PCFG.from_text(text, max_length=4),
    }
    for name, way in ways.items():
        with pytest.warns(IsolossWarning, match="left out 1 symbol") as found:
            language = way()
        assert len(found) == 1, name
        assert (language.symbols, language.vocabulary) == (without.symbols, without.vocabulary), name
        for table in ("binary", "binary_probs", "unary", "unary_probs", "emission", "emission_probs"):
            ours, theirs = getattr(language.grammar, table), getattr(without.grammar, table)
            assert np.array_equal(ours, theirs), (name, table)
        assert language.config.build().vocabulary == without.vocabulary  # and no warning
