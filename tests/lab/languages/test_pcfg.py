"""The language of a grammar: every exact number against enumeration, and every mistake in words."""

import math
import random
from collections import defaultdict

import nltk
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_grammar import SlowGrammar, random_rules

from isoloss import config as configs
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab import languages
from isoloss.lab.languages._pcfg.grammar import parse_grammar
from isoloss.lab.languages.base import ExactLanguage
from isoloss.lab.languages.config import GrammarConfig, PCFGConfig
from isoloss.lab.languages.pcfg import PCFG
from isoloss.seeds import generator

TINY = math.log(torch.finfo(torch.float64).tiny)

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


def rows(sentences):
    return [row[:length] for row, length in zip(sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)]


def acceptance(language, slow):
    """Pr(length <= max_length) by the probabilities of the lengths, by recursion."""
    table = defaultdict(float)
    for width in range(1, language.max_length + 1):
        for symbol in range(slow.size):
            table[symbol, width] = -1.0

    def yields(symbol, width):
        if symbol < 0:
            return float(width == 1)
        if table[symbol, width] < 0:
            table[symbol, width] = sum(
                p * yields(children[0], width)
                if len(children) == 1
                else p * sum(yields(children[0], u) * yields(children[1], width - u) for u in range(1, width))
                for p, children in slow.rules[symbol]
            )
        return table[symbol, width]

    return [0.0] + [yields(0, width) for width in range(1, language.max_length + 1)]


def assert_exact(language, sentences):
    slow = SlowGrammar(language.grammar)
    lengths = acceptance(language, slow)
    assert torch.allclose(
        language.length_probs, torch.tensor(lengths, dtype=torch.float64) / sum(lengths), rtol=1e-12, atol=0
    )
    log_prob = language.log_prob(sentences.tokens, sentences.lengths)
    log_conditionals = language.log_conditionals(sentences.tokens, sentences.lengths)
    entropy = language.conditional_entropy(sentences.tokens, sentences.lengths)
    for index, sentence in enumerate(rows(sentences)):
        expected = slow.inside(0, sentence) / sum(lengths)
        assert math.isclose(math.exp(log_prob[index]), expected, rel_tol=1e-10)
        for t in range(len(sentence)):
            truth = slow.conditional(sentence, t)
            found = log_conditionals[index, t]
            for c, p in enumerate(truth):
                assert math.isclose(math.exp(found[c]), p, rel_tol=1e-10) if p else found[c] == TINY
            assert math.isclose(
                entropy[index, t], -sum(p * math.log(p) for p in truth if p), rel_tol=1e-9, abs_tol=1e-12
            )
        assert (log_conditionals[index, len(sentence) :] == 0).all()
        assert (entropy[index, len(sentence) :] == 0).all()


@pytest.mark.parametrize("name", LANGUAGES)
def test_conditionals_are_those_of_substitution(name):
    assert isinstance(LANGUAGES[name], ExactLanguage)
    assert_exact(LANGUAGES[name], some(LANGUAGES[name]))


@given(seed=st.integers(0, 10_000), recursive=st.booleans(), max_length=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_conditionals_of_any_grammar(seed, recursive, max_length):
    language = PCFG.from_text(random_rules(seed, recursive=recursive), max_length=max_length)
    assert_exact(language, some(language, 8, seed))


@given(
    levels=st.integers(1, 3),
    size=st.integers(1, 4),
    vocab_size=st.integers(1, 9),
    stop=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
def test_conditionals_of_any_random_grammar(levels, size, vocab_size, stop, seed):
    language = PCFGConfig(
        levels=levels,
        symbols_per_level=size,
        rules_per_symbol=min(3, size**2),
        vocab_size=vocab_size,
        stop_probability=stop,
        seed=seed,
    ).build()
    assert language.max_length == 2**levels
    assert_exact(language, some(language, 5, seed))


@pytest.mark.parametrize("text", [random_rules(1, tokens=2), random_rules(4, tokens=2, recursive=False)])
def test_probabilities_of_all_sentences_add_up_to_one(text):
    language = PCFG.from_text(text, max_length=6)
    slow = SlowGrammar(language.grammar)
    possible = [s for s in slow.sentences(language.max_length) if slow.inside(0, s)]
    tokens = torch.tensor([[*s, *[99] * (language.max_length - len(s))] for s in possible])
    lengths = torch.tensor([len(s) for s in possible])
    probs = language.log_prob(tokens, lengths).exp()
    assert math.isclose(probs.sum(), 1, rel_tol=1e-12)
    by_length = torch.zeros(language.max_length + 1, dtype=torch.float64).index_add_(0, lengths, probs)
    assert torch.allclose(by_length, language.length_probs, rtol=1e-12, atol=0)


def test_log_prob_is_nltks():
    language = LANGUAGES["nltk"]
    parser = nltk.InsideChartParser(nltk.PCFG.fromstring(language.to_text("nltk")))
    short = PCFG.from_text(language.to_text(), max_length=5)
    sentences = some(short, 12)
    total = float(torch.tensor(acceptance(short, SlowGrammar(short.grammar))).sum())
    found = short.log_prob(sentences.tokens, sentences.lengths)
    for sentence, log_prob in zip(rows(sentences), found.tolist(), strict=True):
        trees = parser.parse([short.vocabulary[token] for token in sentence])
        assert math.isclose(math.fsum(tree.prob() for tree in trees), math.exp(log_prob) * total, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["stops", "recursive", "unary", "nltk", "random"])
def test_spans_are_those_of_all_trees(name):
    language = LANGUAGES[name]
    slow = SlowGrammar(language.grammar)
    sentences = some(language, 60)
    keep = (sentences.lengths >= 2) & (sentences.lengths <= 4)
    tokens, lengths = sentences.tokens[keep][:8], sentences.lengths[keep][:8]
    truth = []
    for sentence in rows(sentences._replace(tokens=tokens, lengths=lengths)):
        mass = defaultdict(float)
        for p, nodes in slow.trees(0, sentence):
            for node in nodes:
                mass[node] += p
        truth.append({node: p / slow.inside(0, sentence) for node, p in mass.items()})
    spans = [(start, stop) for stop in (1, 2) for start in range(stop)]
    longest = int(lengths.min())
    spans += [(start, longest) for start in range(longest)] + [(0, None)]
    for start, stop in spans:
        found = language.span_posterior(tokens, lengths, start=start, stop=stop)
        inside = language.inside(tokens, lengths, start=start, stop=stop or longest)
        for index, sentence in enumerate(rows(sentences._replace(tokens=tokens, lengths=lengths))):
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


@pytest.mark.parametrize("name", LANGUAGES)
def test_float32(name):
    language, single = LANGUAGES[name], LANGUAGES[name].to(dtype=torch.float32)
    tokens, lengths, _ = some(language, 300)
    assert language.dtype == torch.float64
    for method in ("log_prob", "log_conditionals", "conditional_entropy", "span_posterior"):
        wide, narrow = (getattr(version, method)(tokens, lengths) for version in (language, single))
        assert narrow.dtype == torch.float32
        if method == "log_conditionals":
            assert narrow.min() >= math.log(torch.finfo(torch.float32).tiny)
            wide, narrow = wide.exp(), narrow.double().exp()
        assert torch.allclose(narrow.double(), wide, rtol=2e-6, atol=2e-6)


def test_rows_do_not_depend_on_their_neighbors():
    for language in (LANGUAGES["stops"], LANGUAGES["nltk"].to(dtype=torch.float32)):
        tokens, lengths, _ = some(language, 3000)
        together = language.log_conditionals(tokens, lengths)
        for row in (0, 7, 2999):
            alone = language.log_conditionals(tokens[row : row + 1], lengths[row : row + 1])
            assert torch.allclose(together[row], alone[0], rtol=1e-6, atol=1e-6)
        order = torch.randperm(3000, generator=generator(0, "order"))
        shuffled = language.log_conditionals(tokens[order], lengths[order])
        assert torch.allclose(together[order], shuffled, rtol=1e-6, atol=1e-6)
        padded = torch.where(torch.arange(tokens.shape[1]) < lengths[:, None], tokens, -5)
        assert torch.equal(language.log_conditionals(padded, lengths), together)
        assert torch.equal(language.log_prob(padded, lengths.int()), language.log_prob(tokens, lengths))


def test_empty_batches():
    language = LANGUAGES["stops"]
    tokens, lengths, nodes = language.sample(0, latent=True)
    assert len(tokens) == len(lengths) == len(nodes) == 0
    assert language.log_prob(tokens, lengths).shape == (0,)
    assert language.log_conditionals(torch.zeros(0, 8).long(), lengths).shape == (0, 8, 4)


def test_draws_follow_the_conditionals():
    """At every position, the mean conditional of a token is the share of sentences that have it there."""
    language = LANGUAGES["laptop"]
    n = 20_000
    tokens, lengths, _ = some(language, n)
    residual = (
        torch.nn.functional.one_hot(tokens, language.vocab_size) - language.log_conditionals(tokens, lengths).exp()
    )
    z = residual.mean(0) / (residual.std(0) / n**0.5)
    assert z.abs().max() < 4.5  # the largest of 64 standard normals


def test_attributes():
    language = PCFGConfig(stop_probability=0.1, seed=3).build()
    assert (language.vocab_size, language.pad_id, language.mask_id, language.model_vocab_size) == (32, 32, 33, 34)
    assert (language.special_token_ids, language.max_length, language.start_symbol) == ((), 8, "S")
    assert language.symbols[:2] == ("S", "L0.0")
    assert language.vocabulary == tuple(f"w{i}" for i in range(32))
    assert math.isclose(language.length_probs.sum(), 1, rel_tol=1e-14)
    assert repr(language) == "PCFG(25 symbols, 32 tokens, at most 8 tokens per sentence, torch.float64 on cpu)"
    sentences = language.batch(5, 10, seed=1)
    assert torch.equal(sentences.tokens, language.sample(10, generator=generator(1, "sentences", 5)).tokens)
    assert not torch.equal(language.sample(50).tokens, language.sample(50).tokens)
    assert sentences.latent is None


@pytest.mark.parametrize("name", LANGUAGES)
def test_config_rebuilds_the_language(name):
    language = LANGUAGES[name]
    again = configs.from_dict(LanguageConfig, configs.to_dict(language.config)).build()
    assert again.config == language.config
    assert isinstance(again.config, PCFGConfig if name in ("random", "stops", "laptop") else GrammarConfig)
    assert (again.symbols, again.vocabulary, again.max_length) == (
        language.symbols,
        language.vocabulary,
        language.max_length,
    )
    one, two = some(language, 50), some(again, 50)
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(language.log_prob(*one[:2]), again.log_prob(*two[:2]))


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


CALLS = [
    ([[0, 1], [1, 2]], [2, 2], "sentence 1 has probability 0"),
    ([[0, 3]], [2], "sentence 0 holds the token id 3; ids are from 0 to 2"),
    ([[0, 2], [-1, 2]], [1, 2], "sentence 1 holds the token id -1"),
    ([[0, 1], [0, 1]], [2, 0], "sentence 1 has length 0; a length here is from 1 to 2"),
    ([[0, 1, 0]], [3], "sentence 0 has length 3; a length here is from 1 to 2"),
    ([[0]], [2], "sentence 0 has length 2; a length here is from 1 to 1"),
    ([0, 1], [2], "tokens must be"),
    ([[0, 1]], [2, 2], "tokens must be"),
    ([[0.0, 1.0]], [2], "tokens must be integers, not torch.float32"),
    ([[0, 1]], [2.0], "lengths must be integers"),
]


@pytest.mark.parametrize(("tokens", "lengths", "message"), CALLS)
@pytest.mark.parametrize("method", ["log_prob", "log_conditionals", "conditional_entropy", "span_posterior"])
def test_wrong_sentences(method, tokens, lengths, message):
    language = PCFG.from_text("S A B 1\nS a 1\nA a 1\nB b 1\nB c 1")
    with pytest.raises(IsolossError, match=message):
        getattr(language, method)(torch.tensor(tokens), torch.tensor(lengths))


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


def test_wrong_places_and_draws():
    language = LANGUAGES["random"]
    with pytest.raises(IsolossError, match=r"float64 or torch.float32, not in torch.float16"):
        language.to(dtype=torch.float16)
    for device in ("nowhere", "cuda:99"):
        with pytest.raises(IsolossError, match=r"cannot compute in torch.float64 on device"):
            language.to(device)
    with pytest.raises(IsolossError, match="cannot draw -1 sentences"):
        language.sample(-1)
    with pytest.raises(IsolossError, match=r"no sentence of 3 tokens can be drawn; the possible lengths are 4$"):
        language.sample(1, length=3)


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", LANGUAGES)
def test_cuda(name):
    language, moved = LANGUAGES[name], LANGUAGES[name].to("cuda")
    tokens, lengths, _ = some(language, 200)
    assert torch.equal(some(moved, 200).tokens.cpu(), tokens)
    for method in ("log_prob", "log_conditionals", "conditional_entropy", "span_posterior"):
        expected, found = (getattr(version, method)(tokens, lengths) for version in (language, moved))
        assert found.device.type == "cuda"
        assert torch.allclose(found.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_speed_and_memory():
    """The targets with room to spare: what a slow shared core reaches several times over."""
    import resource
    import time

    language = PCFGConfig(stop_probability=0.1).build()
    begun = time.perf_counter()
    tokens, lengths, _ = language.sample(100_000, generator=generator(0, "x"))
    assert time.perf_counter() - begun < 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    language.conditional_entropy(tokens, lengths)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


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


def test_a_published_grammar_with_a_symbol_that_no_rule_reaches(tmp_path):
    text = layered(unreached=True)
    (tmp_path / "rules.txt").write_text(text)
    with pytest.warns(
        IsolossWarning, match=r"rules.txt: left out 1 symbol .* A1_9 \(line 29\); and 1 token .*: rare"
    ) as found:
        language = PCFG.from_file(tmp_path / "rules.txt", max_length=4)
    assert len(found) == 1
    slow = SlowGrammar(parse_grammar(layered(unreached=False)))
    assert language.vocabulary == ("bird", "enter", "height", "korean", "poetry", "snow")
    sentences = some(language, 40)
    whole = sum(acceptance(language, slow))
    logs, truth = language.log_prob(*sentences[:2]), language.log_conditionals(*sentences[:2]).exp()
    for row, sentence in enumerate(rows(sentences)):
        assert logs[row].exp().item() == pytest.approx(slow.inside(0, sentence) / whole, rel=1e-13)
        for position in range(len(sentence)):
            exact = torch.tensor(slow.conditional(sentence, position), dtype=torch.float64)
            assert (truth[row, position] - exact).abs().max() < 1e-14


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
