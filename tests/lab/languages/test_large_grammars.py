"""Grammars of a treebank's size are read, drawn from and computed with in seconds; far larger ones are refused."""

import random

import numpy as np
import pytest
import torch
from slow_grammar import random_rules

from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg import kernels
from isoloss.lab.languages._pcfg.charts import FoldedRules
from isoloss.lab.languages._pcfg.grammar import parse_grammar
from isoloss.lab.languages.pcfg import PCFG


def treebank(symbols=3900, rules=25_000, tokens=11_000):
    """Rule lines of random counts, of the shape of a treebank's grammar: few tags and phrases, many halves of rules."""
    rng = random.Random(0)
    tags, phrases = [f"T{i}" for i in range(45)], [f"P{i}" for i in range(60)]
    halves = [f"{rng.choice(phrases)}|<{i}>" for i in range(symbols - 105)]

    def pick(names):
        return names[int(len(names) * rng.random() ** 3)]

    table = {(rng.choice(tags), f"w{i}"): int(rng.paretovariate(0.7)) for i in range(tokens)}
    table |= {(tag, f"w{i}"): 1 for i, tag in enumerate(tags)}
    for half in halves:
        table[half, pick(tags), pick(tags)] = rng.randint(1, 3)
        table[pick(phrases), pick(tags + phrases), half] = int(min(rng.paretovariate(1), 100))
    for phrase in phrases:
        table[phrase, pick(tags), pick(tags)], table[phrase, pick(tags)] = 400, 200
    while len(table) < rules:
        table[pick(phrases), pick(tags + phrases), pick(tags + phrases + halves)] = 1
    order = sorted(table, key=lambda rule: rule[0] != "P0")
    return "\n".join(f"{' '.join(rule)} {table[rule]}" for rule in order)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*left out:isoloss.errors.IsolossWarning")
def test_a_treebanks_grammar(capsys, tmp_path):
    path = tmp_path / "treebank.txt"
    path.write_text(treebank())
    assert main(["sample", str(path), "--num-sentences", "2"]) == 0
    out, err = capsys.readouterr()
    assert "log-probability" in out
    assert "entropy of a sentence" not in out
    assert "drawing 2" in err
    assert "is left out, as it takes minutes; ask by --entropy-sentences 200" in err
    # few sentences are computed in a narrow chart, many in a wide one, with the same bits
    language = PCFG.from_file(path, max_length=12)
    tokens, lengths, _ = language.sample(40, length=6)
    assert torch.equal(language.log_prob(tokens, lengths)[:3], language.log_prob(tokens[:3], lengths[:3]))
    # a table over the symbols of unary rules, not over all
    rules = FoldedRules(language.grammar, 6)
    assert len(rules.chained) <= 105
    assert len(rules.closure) == len(rules.chained)


@pytest.mark.parametrize("seed", range(2))
def test_chains_of_a_large_grammar_are_those_of_a_small_one(seed, monkeypatch):
    grammar = parse_grammar(random_rules(seed, symbols=8))
    small = FoldedRules(grammar, 6)
    monkeypatch.setattr("isoloss.lab.languages._pcfg.charts._SMALL", 0)
    large = FoldedRules(grammar, 6)
    unary = np.zeros((8, 8))
    unary[tuple(grammar.unary.T)] = grammar.unary_probs
    np.testing.assert_allclose(small.closure, np.linalg.inv(np.eye(8) - unary), rtol=0, atol=1e-14)
    np.testing.assert_allclose(large.emission, small.emission, rtol=1e-14)
    np.testing.assert_array_equal(large.binary, small.binary)
    np.testing.assert_allclose(large.binary_probs, small.binary_probs, rtol=1e-14)
    assert sorted(large.chains.tolist()) == sorted(small.chains.tolist())


@pytest.mark.parametrize("method", ["log_conditionals", "log_next", "log_prob"])
def test_a_narrow_chart_gives_the_bits_of_a_wide_one(method, monkeypatch):
    language = PCFG(parse_grammar(random_rules(3)), max_length=9)
    tokens, lengths, _ = language.sample(20, length=7)
    monkeypatch.setattr(kernels, "_CHART_BYTES", 1)
    narrow = getattr(language, method)(tokens, lengths)
    monkeypatch.setattr(kernels, "_FEWEST_LANES", kernels.LANES)
    assert torch.equal(getattr(language, method)(tokens, lengths), narrow)


@pytest.mark.parametrize(
    ("rules", "ends", "message"),
    [
        ("A{i} A{j} 1", "A900 a 1", "in rules A -> B would hold 811,801 "),
        ("A{i} A{j} B 1\nA{i} a 1", "A900 a 1\nB b 1", "A -> B C would hold"),
        ("A{i} A{j} B 1\nA{i} a{i} 1", "A900 a 1\nB b 1", "its table of symbols and tokens would hold 813,"),
    ],
)
def test_a_grammar_whose_tables_would_fill_the_memory_is_refused_in_a_sentence(rules, ends, message, monkeypatch):
    monkeypatch.setattr(
        "isoloss.lab.languages._pcfg.charts._LARGEST_TABLE", 700_000
    )  # of 2^27, for a test that is fast
    text = "\n".join([*(rules.format(i=i, j=i + 1) for i in range(900)), ends])
    with pytest.raises(IsolossError, match=f"too large to be computed with exactly: .*{message}"):
        PCFG.from_text(text)
