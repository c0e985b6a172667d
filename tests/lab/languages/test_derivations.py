"""Sampling: the right distribution over sentences and trees, valid trees, and the same draws for the same seed."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_grammar import SlowGrammar, random_rules
from small_languages import p_value

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg import sampler as samplers
from isoloss.lab.languages._pcfg.grammar import parse_grammar, random_grammar
from isoloss.lab.languages._pcfg.sampler import longest_yields
from isoloss.lab.languages.config import PCFGConfig


class Sampler(samplers.Sampler):
    """Draws the first n sentences."""

    def __call__(self, n, seed, **options):
        return super().__call__(torch.arange(n), seed, **options)


UNARY = (
    "S A 0.4\nS B 0.3\nS A S 0.3\nA B 0.5\nA C 0.2\nA S B 0.2\nA x 0.1\nB C 0.6\nB y 0.2\nB C C 0.2\nC x 0.5\nC z 0.5"
)
GRAMMARS = {
    "unary": (UNARY, 4),
    **{f"recursive {seed}": (random_rules(seed, tokens=2), 5) for seed in (2,)},
    "rare": ("S S S 0.99999\nS a 0.000004\nS b 0.000006", 5),
    "free": (random_rules(4, tokens=2, recursive=False), 8),
    "free unary": ("S A 0.4\nS B B 0.6\nA B 0.5\nA B C 0.3\nA x 0.2\nB C 0.5\nB y 0.3\nB C C 0.2\nC x 0.5\nC z 0.5", 8),
}
FREE = ("free", "free unary")  # no derivation is longer than these grammars' longest sentences


def sampler_of(name):
    grammar = parse_grammar(GRAMMARS[name][0])
    longest = min(GRAMMARS[name][1], int(longest_yields(grammar, 99)[0]))
    return Sampler(grammar, longest), SlowGrammar(grammar), longest


def p_value_of(found, truth, n):
    assert set(found) <= set(truth)
    total = sum(truth.values())
    return p_value(*zip(*((found[key], n * p / total) for key, p in truth.items()), strict=True))


def split_row(row, width):
    """A row of tokens, padding included, the length and the nodes, as ((tokens), (nodes))."""
    nodes = tuple(tuple(row[i : i + 3]) for i in range(width + 1, len(row), 3) if row[i] >= 0)
    return tuple(row[: row[width]]), nodes


def counted(drawn):
    """How often each sentence, or sentence and tree, was drawn."""
    width = drawn.tokens.shape[1]
    parts = [drawn.tokens, drawn.lengths[:, None], *([] if drawn.latent is None else [drawn.latent.flatten(1)])]
    rows, counts = np.unique(torch.cat(parts, dim=1).numpy(), axis=0, return_counts=True)
    keys = [split_row(row, width) for row in rows.tolist()]
    return Counter(
        dict(zip(keys if drawn.latent is not None else [key for key, _ in keys], counts.tolist(), strict=True))
    )


@pytest.mark.parametrize("name", GRAMMARS)
def test_sentences_follow_the_conditioned_distribution(name):
    (sampler, slow, longest), n = sampler_of(name), 20_000
    assert sampler._bounded == (name in FREE)
    truth = {sentence: p for sentence in slow.sentences(longest) if (p := slow.inside(0, sentence))}
    drawn = sampler(n, 1)
    assert drawn.tokens.shape == (n, int(drawn.lengths.max()))
    assert p_value_of(counted(drawn), truth, n) > 1e-3
    for length in range(1, longest + 1):
        own = {sentence: p for sentence, p in truth.items() if len(sentence) == length}
        if own:
            drawn = sampler(n, 2, length=length)
            assert drawn.tokens.shape == (n, length)
            assert (drawn.lengths == length).all()
            assert p_value_of(counted(drawn), own, n) > 1e-3
    assert len(truth) > 8


@pytest.mark.parametrize("name", ["unary", "free unary"])
def test_trees_follow_their_distribution(name):
    (sampler, slow, longest), n = sampler_of(name), 40_000
    longest = longest if name in FREE else 3
    truth = Counter()
    for sentence in slow.sentences(longest):
        for p, nodes in slow.trees(0, sentence):
            truth[sentence, nodes] += p
    draw = sampler if name in FREE else Sampler(parse_grammar(GRAMMARS[name][0]), longest)
    assert p_value_of(counted(draw(n, 3, trees=True)), truth, n) > 1e-3
    own = {key: p for key, p in truth.items() if len(key[0]) == 3}
    assert p_value_of(counted(draw(n, 4, trees=True, length=3)), own, n) > 1e-3
    assert len(truth) > 50


@given(seed=st.integers(0, 1000), recursive=st.booleans())
@settings(max_examples=8, deadline=None)
def test_every_tree_is_a_parse_in_preorder(seed, recursive):
    grammar = parse_grammar(random_rules(seed, recursive=recursive))
    slow = SlowGrammar(grammar)
    drawn = Sampler(grammar, min(4, int(longest_yields(grammar, 9)[0])))(20, seed, trees=True)
    assert drawn.latent.shape[0] == 20
    assert (drawn.latent[:, :, 0] >= 0).sum(dim=1).max() == drawn.latent.shape[1]
    for row, length, nodes in zip(drawn.tokens.tolist(), drawn.lengths.tolist(), drawn.latent.tolist(), strict=True):
        real = [tuple(node) for node in nodes if node[0] >= 0]
        assert nodes[len(real) :] == [[-1, -1, -1]] * (len(nodes) - len(real))
        assert tuple(real) in {below for _, below in slow.trees(0, tuple(row[:length]))}
        assert row[length:] == [slow.vocab_size] * (len(row) - length)


@pytest.mark.parametrize("options", [{}, {"length": 5}])
@pytest.mark.parametrize("max_length", [8, 6])
def test_sentences_depend_on_seed_and_index_alone(max_length, options):
    draw = Sampler(random_grammar(PCFGConfig(stop_probability=0.2)), max_length)
    assert draw._bounded == (max_length == 8)
    n, threads = 2 * (1 << 14) + 5, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw(n, 7, trees=True, **options)
        torch.set_num_threads(3)
        three = draw(n, 7, trees=True, **options)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, one, three))
    few, plain, other = draw(1000, 7, trees=True, **options), draw(n, 7, **options), draw(1000, 8, **options)
    for whole, part in zip(one, few, strict=True):
        width = part.shape[1:2]
        assert torch.equal(whole[:1000, : width[0]] if width else whole[:1000], part)
    assert torch.equal(plain.tokens, one.tokens)
    assert plain.latent is None
    assert not torch.equal(other.tokens[:, :5], one.tokens[:1000, :5])
    assert len(torch.unique(plain.tokens[:1000], dim=0)) > 600  # many of them have one token


@pytest.mark.parametrize("options", [{}, {"length": 3}])
@pytest.mark.parametrize("n", [0, 1, (1 << 14) + 1])
def test_any_number(n, options):
    drawn = Sampler(parse_grammar("S S S 0.45\nS a 0.55"), 4)(n, 0, trees=True, **options)
    assert len(drawn.tokens) == len(drawn.lengths) == len(drawn.latent) == n
    assert n == 0 or 1 <= drawn.lengths.min() <= drawn.lengths.max() <= 4
    assert {part.dtype for part in drawn} == {torch.int64}


def test_the_longest_sentences():
    """The root of a binary tree of 1024 tokens splits anywhere, by Catalan numbers."""
    drawn = Sampler(parse_grammar("S S S 0.5\nS a 0.5"), 1024)(1000, 0, length=1024, trees=True)
    assert drawn.latent.shape == (1000, 2047, 3)
    catalan = [1]
    for k in range(1023):
        catalan.append(catalan[-1] * 2 * (2 * k + 1) // (k + 2))
    splits = Counter(drawn.latent[:, 1, 1].tolist())
    expected = [1000 * catalan[u - 1] * catalan[1023 - u] / catalan[1023] for u in range(1, 1024)]
    assert p_value([splits[u] for u in range(1, 1024)], expected) > 1e-3


def test_memory_is_that_of_the_rules():
    """One symbol emits 5,000 tokens and 200 others one each: no table is symbols x 5,000."""
    rules = ["S A B0 0.9", "S S S 0.1", *(f"A t{i} {1 + i % 7}" for i in range(5_000))]
    rules += [f"B{i} B{i + 1} u{i} 1\nB{i} v{i} 1" for i in range(200)] + ["B200 w 1"]
    grammar = parse_grammar("\n".join(rules))
    sampler = Sampler(grammar, 6)
    drawn = sampler(40_000, 0)
    assert len(sampler._free.tables.kept) == len(grammar.binary) + len(grammar.emission)
    assert len(sampler._refined.tables.kept) <= 6 * len(grammar.binary) + len(grammar.emission) + 6
    names = grammar.vocabulary
    weights = torch.tensor([float(1 + int(name[1:]) % 7) if name[0] == "t" else 0.0 for name in names])
    weights /= weights.sum()
    counts = torch.bincount(drawn.tokens[:, 0], minlength=len(names)).view(-1)
    blocks = torch.arange(len(names)) % 97  # of tokens, whose sums are large enough for the test
    found, expected = (torch.zeros(97).double().index_add_(0, blocks, x.double()) for x in (counts, 4e4 * weights))
    assert p_value(found.tolist(), expected.tolist()) > 1e-3


def test_wrong_lengths():
    draw = Sampler(parse_grammar("S S T 1\nS a 2\nT a a 1"), 9)
    assert draw(5, 0, length=9).tokens.shape == (5, 9)
    for length in (-1, 0, 4, 10):
        message = f"no sentence of {length} tokens can be drawn; the possible lengths are 1, 3, 5, 7, 9"
        with pytest.raises(IsolossError, match=message):
            draw(1, 0, length=length)
    with pytest.raises(IsolossError, match=r"the possible lengths are 1, 2, 3, 4$"):
        Sampler(parse_grammar("S S S 1\nS a 2"), 4)(1, 0, length=5)
    with pytest.raises(IsolossError, match=r"the possible lengths are 1, 2, 4$"):
        Sampler(parse_grammar("S A A 1\nS a 2\nS B B 1\nA B B 1\nB b 1"), 4)(1, 0, length=3)


def test_sentences_that_are_too_improbable():
    text = "S A S 1\nS a 1e-300\nA a 1"
    with pytest.raises(IsolossError, match="those of at most 4 tokens have a probability of only 1e-300; raise"):
        Sampler(parse_grammar(text), 4)(1, 0)
    drawn = Sampler(parse_grammar(text.replace("300", "240")), 4)(40_000, 0)
    assert p_value(torch.bincount(drawn.lengths, minlength=5)[1:].tolist(), [10_000] * 4) > 1e-3


def test_long_yields():
    assert longest_yields(random_grammar(PCFGConfig()), 100).tolist() == [8] * 7 + [4] * 6 + [2] * 6 + [1] * 6
    assert longest_yields(parse_grammar("S S A 1\nS a 1\nA a 1"), 10).tolist() == [10, 1]
