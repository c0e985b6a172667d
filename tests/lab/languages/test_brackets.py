"""Bracket languages: every exact number against enumeration of all strings, samples against uniformity and nesting."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from slow_grammar import SlowGrammar

from isoloss import config as configs
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages import resolve
from isoloss.lab.languages._pcfg.grammar import dyck_grammar
from isoloss.lab.languages.base import ExactLanguage
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.config import PRESETS, BracketsConfig, DyckConfig
from isoloss.lab.languages.pcfg import PCFG
from isoloss.seeds import generator

TINY = math.log(torch.finfo(torch.float64).tiny)


def sentences_of(length):
    """All strings with as many 0 as 1, by counting."""
    return [s for s in itertools.product((0, 1), repeat=length) if s.count(0) == s.count(1)]


def conditional(sentence, position, hidden):
    """Pr(the token | the visible others), by counting the sentences that agree with them."""
    seen = [t for t in range(len(sentence)) if t != position and not hidden[t]]
    agreeing = Counter(s[position] for s in sentences_of(len(sentence)) if all(s[t] == sentence[t] for t in seen))
    return [agreeing[c] / agreeing.total() for c in (0, 1)]


def assert_drawn(counts, expected):
    """Pearson's chi-square within four standard deviations of its mean, at thousands of draws."""
    statistic = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
    freedom = len(expected) - 1
    assert min(expected) > 5
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def lengths_of(tokens, length):
    return torch.full((len(tokens),), length)


# --- the paper's language --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 4, 6, 8])
def test_conditionals_are_those_of_counting(length):
    language = Brackets(length)
    assert isinstance(language, ExactLanguage)
    tokens = torch.tensor(sentences_of(length))
    lengths = lengths_of(tokens, length)
    rng = np.random.default_rng(length)
    share = rng.choice([0.0, 0.2, 0.5, 1.0], size=(len(tokens), 1))
    mask = torch.from_numpy(rng.random(tokens.shape) < share)
    given = tokens.masked_fill(mask, language.mask_id)
    found = language.log_conditionals(given, lengths, mask=mask)
    entropy = language.conditional_entropy(given, lengths, mask=mask)
    log_prob = language.log_prob(given, lengths, mask=mask)
    for row, hidden in enumerate(mask.tolist()):
        for t in range(length):
            truth = conditional(tokens[row].tolist(), t, hidden)
            for c, p in enumerate(truth):
                assert math.isclose(math.exp(found[row, t, c]), p, rel_tol=1e-10) if p else found[row, t, c] == TINY
            expected = -sum(p * math.log(p) for p in truth if p)
            assert math.isclose(entropy[row, t], expected, rel_tol=1e-10, abs_tol=1e-14)
        seen = torch.tensor(hidden).logical_not()
        share = (tokens[:, seen] == tokens[row, seen]).all(dim=1).double().mean()
        assert math.isclose(log_prob[row].exp(), share, rel_tol=1e-10)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3)])
def test_some_positions_are_those_of_all(shape):
    language = Brackets(6)
    tokens, lengths, _ = language.sample(40, generator=generator(0, "test"))
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.4
    positions = torch.randint(6, shape, generator=generator(0, "positions"))
    wide, rows = positions.view(40, -1), torch.arange(40)[:, None]
    every = language.log_conditionals(tokens, lengths, mask=mask)
    some = language.log_conditionals(tokens, lengths, mask=mask, positions=positions)
    assert torch.equal(some, every[rows, wide].view(*shape, 2))
    every = language.conditional_entropy(tokens, lengths, mask=mask)
    some = language.conditional_entropy(tokens, lengths, mask=mask, positions=positions)
    assert torch.equal(some, every[rows, wide].view(shape))


def test_the_ids_of_hidden_tokens_are_not_looked_at():
    language = Brackets(6)
    tokens, lengths, _ = language.sample(300, generator=generator(0, "test"))
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.5
    expected = language.log_conditionals(tokens, lengths, mask=mask)
    for anything in (0, 1, -9, language.mask_id):
        given = tokens.masked_fill(mask, anything)
        assert torch.equal(language.log_conditionals(given, lengths, mask=mask), expected)
        assert torch.equal(language.mismatch(given, mask), language.mismatch(tokens, mask))


def test_one_hidden_token_is_implied():
    language = Brackets(6)
    tokens = torch.tensor(sentences_of(6))
    lengths = lengths_of(tokens, 6)
    found = language.log_conditionals(tokens, lengths)
    assert torch.equal(found.argmax(dim=-1), tokens)
    assert (found.amax(dim=-1) == 0).all()
    assert (language.conditional_entropy(tokens, lengths) == 0).all()
    for t in range(6):
        mask = (torch.arange(6) == t).expand_as(tokens)
        one = language.log_conditionals(tokens.masked_fill(mask, 3), lengths, mask=mask)
        assert torch.equal(one[:, t], found[:, t])


@pytest.mark.parametrize("length", [2, 4, 6, 8, 12])
def test_probabilities_add_up_to_one(length):
    language = Brackets(length)
    tokens = torch.tensor(sentences_of(length))
    probs = language.log_prob(tokens, lengths_of(tokens, length)).exp()
    assert torch.allclose(probs, torch.full_like(probs, 1 / len(tokens)), rtol=1e-12, atol=0)
    assert math.isclose(probs.sum(), 1, rel_tol=1e-12)


@pytest.mark.parametrize("length", [64, 4096])
def test_log_prob_of_long_sentences(length):
    language = Brackets(length)
    tokens, lengths, _ = language.sample(3, generator=generator(0, "test"))
    half = length // 2
    # Stirling's series: C(2m, m) = 4^m / sqrt(pi m) (1 - 1/(8m) + 1/(128 m^2) + 5/(1024 m^3) + O(m^-4))
    series = 1 - 1 / (8 * half) + 1 / (128 * half**2) + 5 / (1024 * half**3)
    expected = 0.5 * math.log(math.pi * half) - length * math.log(2) - math.log(series)
    assert language.log_prob(tokens, lengths).tolist() == pytest.approx([expected] * 3, rel=1e-9)


def test_single_precision_is_close():
    wide = Brackets(8)
    narrow = wide.to(dtype=torch.float32)
    tokens, lengths, _ = wide.sample(200, generator=generator(0, "test"))
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.4
    for method in ("log_conditionals", "conditional_entropy"):
        ours = getattr(narrow, method)(tokens, lengths, mask=mask)
        truth = getattr(wide, method)(tokens, lengths, mask=mask)
        assert ours.dtype == torch.float32
        possible = truth > TINY
        assert torch.allclose(ours.double()[possible], truth[possible], rtol=2e-6, atol=2e-6)
        assert not method.startswith("log") or (ours[~possible] == math.log(torch.finfo(torch.float32).tiny)).all()
    assert torch.equal(narrow.log_prob(tokens, lengths), wide.log_prob(tokens, lengths).float())
    assert (wide.dtype, narrow.to().dtype) == (torch.float64, torch.float32)


def test_padding_is_anything_and_holds_nothing():
    language = Brackets(4)
    tokens, lengths = torch.tensor([[0, 1, 1, 0, 7, -2]]), torch.tensor([4])
    mask = torch.tensor([[True, False, False, True, True, False]])
    found = language.log_conditionals(tokens, lengths, mask=mask)
    assert found.shape == (1, 6, 2)
    assert (found[:, 4:] == 0).all()
    assert torch.equal(found[:, :4], language.log_conditionals(tokens[:, :4], lengths, mask=mask[:, :4]))
    assert (language.conditional_entropy(tokens, lengths, mask=mask)[:, 4:] == 0).all()
    assert language.log_prob(tokens, lengths).exp().item() == pytest.approx(1 / 6)


def test_samples_are_uniform():
    n = 70_000
    tokens, lengths, latent = Brackets(8).sample(n, generator=generator(0, "test"))
    assert latent is None
    assert (lengths == 8).all()
    counts = Counter(map(tuple, tokens.tolist()))
    assert counts.keys() == set(sentences_of(8))
    assert_drawn(counts.values(), [n / 70] * 70)


def test_sampling_is_a_function_of_the_generator():
    language = Brackets(8)
    tokens = language.batch(5, 10, seed=1).tokens
    assert torch.equal(tokens, language.sample(10, generator=generator(1, "sentences", 5)).tokens)
    assert not torch.equal(tokens, language.batch(6, 10, seed=1).tokens)
    assert not torch.equal(language.sample(50).tokens, language.sample(50).tokens)
    assert language.sample(0, latent=True).tokens.shape == (0, 8)


def test_downstream_is_independent_tokens_and_their_mismatch():
    n, length = 64_000, 6
    tokens, g_star = Brackets(length).downstream(n, generator=generator(0, "test"))
    assert g_star.tolist() == [row.count(1) - row.count(0) for row in tokens.tolist()]
    assert set(g_star.tolist()) == {-6, -4, -2, 0, 2, 4, 6}  # every even value, not only -1 and 1
    counts = Counter(map(tuple, tokens.tolist()))
    assert len(counts) == 2**length
    assert_drawn(counts.values(), [n / 2**length] * 2**length)


def slow_encoding(sentence, hidden, signs):
    """One signed basis vector for each position, by the paper's words."""
    length = len(sentence)
    vectors = []
    for t, token in enumerate(sentence):
        vector = [0.0] * (2 * length)
        if hidden[t]:
            vector[t + length] = float(signs[t])
        else:
            vector[t] = 1.0 if token == 0 else -1.0
        vectors.append(vector)
    return vectors


def test_encoding_is_the_papers():
    language = Brackets(6)
    tokens, _ = language.downstream(500, generator=generator(0, "test"))
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.3
    given = tokens.masked_fill(mask, language.mask_id)
    single = language.encode(given, mask, generator=generator(1, "test"), summed=False)
    z = language.encode(given, mask, generator=generator(1, "test"))
    assert (single.shape, z.shape, z.dtype) == ((500, 6, 12), (500, 12), torch.float64)
    signs = z[:, 6:].long()
    assert torch.equal(signs != 0, mask)
    expected = [slow_encoding(*row) for row in zip(tokens.tolist(), mask.tolist(), signs.tolist(), strict=True)]
    assert single.tolist() == expected
    assert torch.equal(single.sum(dim=1), z)
    assert torch.equal(language.mismatch(given, mask), -z[:, :6].sum(dim=1).long())
    drawn = signs[mask]
    assert abs(drawn.double().mean()) < 4 / len(drawn) ** 0.5  # as many + as -
    assert torch.equal(language.encode(tokens)[:, :6], (1 - 2 * tokens).double())
    assert (language.encode(tokens)[:, 6:] == 0).all()


def test_the_mismatch_of_the_others_tells_the_hidden_token():
    language = Brackets(8)
    tokens, _, _ = language.sample(200, generator=generator(0, "test"))
    assert (language.mismatch(tokens) == 0).all()
    mask = torch.arange(8) == torch.randint(8, (200, 1), generator=generator(0, "mask"))
    assert torch.equal(language.mismatch(tokens, mask), torch.where(tokens[mask] == 0, 1, -1))


def test_attributes():
    language = Brackets(8)
    assert (language.vocab_size, language.pad_id, language.mask_id, language.model_vocab_size) == (2, 2, 3, 4)
    assert (language.vocabulary, language.special_token_ids, language.max_length) == (("<", ">"), (), 8)
    assert repr(language) == "Brackets(8, torch.float64 on cpu)"


@pytest.mark.parametrize("length", [-2, 0, 7, 4098])
def test_a_length_that_is_none(length):
    with pytest.raises(IsolossError, match=rf"length is {length}; it must be (even|at least 2 and at most 4096)"):
        Brackets(length)


@pytest.mark.parametrize(
    ("tokens", "lengths", "mask", "words"),
    [
        ([[0, 1, 0, 0]], [4], None, "sentence 0 has probability 0: it has 3 '<', and a sentence of 4 brackets has 2"),
        ([[0, 1, 0, 1], [1, 1, 1, 0]], [4, 4], None, "sentence 1 has probability 0: it has 3 '>'"),
        ([[1, 1, 1, 3]], [4], [[False, False, False, True]], "sentence 0 has probability 0: it has 3 '>'"),
        ([[0, 1, 0, 2]], [4], None, "sentence 0 holds the token id 2; ids are from 0 to 1"),
        ([[0, 1, -1, 1]], [4], None, "sentence 0 holds the token id -1"),
        ([[0, 1, 0, 1]], [3], None, "sentence 0 has length 3; every sentence here has 4 brackets"),
        ([[0, 1, 0]], [4], None, "sentence 0 has length 4; a length here is from 1 to 3"),
        ([[0, 1, 0, 1]], [5], None, "sentence 0 has length 5; a length here is from 1 to 4"),
        ([0, 1, 0, 1], [4], None, r"tokens must be \(n, T\) and lengths \(n,\), not \(4,\) and \(1,\)"),
        ([[0, 1, 0, 1]], [4, 4], None, r"not \(1, 4\) and \(2,\)"),
        ([[0.0, 1.0, 0.0, 1.0]], [4], None, "tokens must be integers, not torch.float32"),
        ([[0, 1, 0, 1]], [4.0], None, "lengths must be integers, not torch.float32"),
        ([[0, 1, 0, 1]], [4], [[True, False, False]], r"the mask must be \(1, 4\) bool like the tokens, not \(1, 3\)"),
        (
            [[0, 1, 0, 1]],
            [4],
            [[1, 0, 0, 0]],
            r"the mask must be \(1, 4\) bool like the tokens, not \(1, 4\) torch\.int64",
        ),
    ],
)
def test_sentences_that_are_wrong(tokens, lengths, mask, words):
    language, tokens, lengths = Brackets(4), torch.tensor(tokens), torch.tensor(lengths)
    options = {} if mask is None else {"mask": torch.tensor(mask)}
    with pytest.raises(IsolossError, match=words):
        language.log_conditionals(tokens, lengths, **options)
    with pytest.raises(IsolossError, match=words):
        language.conditional_entropy(tokens, lengths, **options)
    with pytest.raises(IsolossError, match=words):
        language.log_prob(tokens, lengths, **options)


def test_positions_that_are_wrong():
    language, tokens, lengths = Brackets(4), torch.tensor([[0, 1, 0, 1, 9]]), torch.tensor([4])
    for method in (language.log_conditionals, language.conditional_entropy):
        with pytest.raises(IsolossError, match="sentence 0 has no position 4; its positions are from 0 to 3"):
            method(tokens, lengths, positions=torch.tensor([4]))


class OnAnotherDevice(torch.Generator):
    """A CPU generator that says it is not: a second device is needed for a real one."""

    device = torch.device("meta")


def test_draws_that_are_wrong():
    language = Brackets(4)
    for draw in (language.sample, language.downstream):
        with pytest.raises(IsolossError, match="cannot draw -1 sentences"):
            draw(-1)
        with pytest.raises(IsolossError, match="drawn on the CPU, but the generator is on meta"):
            draw(1, generator=OnAnotherDevice())
    with pytest.raises(IsolossError, match=r"tokens must be \(n, 4\), not \(1, 2\)"):
        language.encode(torch.tensor([[0, 1]]))
    with pytest.raises(IsolossError, match="holds the token id 3"):
        language.encode(torch.tensor([[0, 1, 3, 0]]))
    with pytest.raises(IsolossError, match=r"the mask must be \(1, 4\) bool"):
        language.mismatch(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[True]]))
    with pytest.raises(IsolossError, match=r"not in torch\.float16"):
        language.to(dtype=torch.float16)
    with pytest.raises(IsolossError, match="device 'nowhere'"):
        language.to("nowhere")


@pytest.mark.gpu
def test_brackets_on_cuda():
    language, moved = Brackets(8), Brackets(8).to("cuda")
    tokens, lengths, _ = language.sample(200, generator=generator(0, "test"))
    assert torch.equal(moved.sample(200, generator=generator(0, "test")).tokens.cpu(), tokens)
    for method in ("log_prob", "log_conditionals", "conditional_entropy"):
        expected, found = (getattr(version, method)(tokens, lengths) for version in (language, moved))
        assert found.device.type == "cuda"
        assert torch.allclose(found.cpu(), expected, rtol=1e-12, atol=1e-12)
    expected, found = (version.encode(tokens, generator=generator(0, "signs")) for version in (language, moved))
    assert torch.equal(found.cpu(), expected)


# --- Dyck ------------------------------------------------------------------------------------------------------------

SHALLOW = DyckConfig(kinds=1, max_depth=2, max_length=8)
DYCK = {
    "one kind": SHALLOW,
    "two kinds": DyckConfig(kinds=2, max_depth=2, max_length=6, continue_probability=0.3, nest_probability=0.7),
    "flat": DyckConfig(kinds=2, max_depth=1, max_length=6),
    "deep": DyckConfig(kinds=1, max_depth=4, max_length=8, continue_probability=0.2),
    "always nested": DyckConfig(kinds=1, max_depth=2, max_length=8, nest_probability=1.0),
    "one group": DyckConfig(kinds=2, max_depth=3, max_length=6, continue_probability=0.0),
    "words": DyckConfig(kinds=1, max_depth=2, max_length=4, tokens_per_bracket=2, seed=3),
}
CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}


def probability(words, config):
    """Pr(the brackets) without the limit on their number, by a walk with a stack; 0 where they do not nest."""
    opened, result, previous_open = [], 1.0, True
    for word in words:
        room = len(opened) < config.max_depth
        if word in list(CLOSING)[: config.kinds]:
            if not room:
                return 0.0
            if previous_open and opened:  # the group holds others
                result *= config.nest_probability
            elif not previous_open:  # a group follows another
                result *= config.continue_probability
            opened.append(word)
            result /= config.kinds
            previous_open = True
        else:
            if not opened or CLOSING[opened[-1]] != word:
                return 0.0
            if previous_open:
                result *= 1.0 if not room else 1 - config.nest_probability
            else:
                result *= 1 - config.continue_probability  # the last group of its row
            opened.pop()
            previous_open = False
    return 0.0 if opened else result * (1 - config.continue_probability)


def all_strings(language, config):
    for length in range(1, config.max_length + 1):
        yield from itertools.product(range(language.vocab_size), repeat=length)


@pytest.mark.parametrize("name", [name for name in DYCK if name != "words"])
def test_dyck_is_nested_brackets_with_a_depth_limit(name):
    config = DYCK[name]
    language = config.build()
    truth = {}
    for s in all_strings(language, config):
        p = probability([language.vocabulary[c] for c in s], config)
        if p:
            truth[s] = p
    total = sum(truth.values())
    tokens = torch.tensor([[*s, *[99] * (config.max_length - len(s))] for s in truth])
    lengths = torch.tensor([len(s) for s in truth])
    found = language.log_prob(tokens, lengths).exp()
    expected = torch.tensor(list(truth.values()), dtype=torch.float64) / total
    assert torch.allclose(found, expected, rtol=1e-10, atol=0)
    assert math.isclose(found.sum(), 1, rel_tol=1e-12)  # so no other string has a probability
    entropy = language.conditional_entropy(tokens, lengths)
    assert entropy.abs().max() < 1e-12  # one hidden bracket is implied


@pytest.mark.parametrize("name", ["one kind", "two kinds", "deep"])
def test_dyck_with_hidden_brackets(name):
    config = DYCK[name]
    language = config.build()
    truth = [(s, probability([language.vocabulary[c] for c in s], config)) for s in all_strings(language, config)]
    truth = [(s, p) for s, p in truth if p]
    tokens, lengths, _ = language.sample(30, generator=generator(0, "test"))
    mask = torch.rand(tokens.shape, generator=generator(0, "mask")) < 0.5
    found = language.log_conditionals(tokens, lengths, mask=mask).exp()
    for row, length in enumerate(lengths.tolist()):
        for t in range(length):
            seen = [i for i in range(length) if i != t and not mask[row, i]]
            joint = [0.0] * language.vocab_size
            for s, p in truth:
                if len(s) == length and all(s[i] == tokens[row, i] for i in seen):
                    joint[s[t]] += p
            expected = [p / sum(joint) for p in joint]
            assert found[row, t].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-300)


@pytest.mark.parametrize("words", ["(()", ")(", "((()))", "([)]", "(]"])
def test_what_is_not_nested_is_impossible(words):
    language = DyckConfig(kinds=2, max_depth=2, max_length=6).build()
    tokens = torch.tensor([[language.vocabulary.index(word) for word in words]])
    with pytest.raises(IsolossError, match="sentence 0 has probability 0"):
        language.log_prob(tokens, torch.tensor([len(words)]))


def test_with_several_tokens_a_bracket_is_drawn_by_its_weights():
    config = DYCK["words"]
    language = config.build()
    slow = SlowGrammar(language.grammar)
    assert language.vocabulary == ("(.0", "(.1", ").0", ").1")
    emitted = {
        language.vocabulary[token]: p
        for (_, token), p in zip(
            language.grammar.emission.tolist(), language.grammar.emission_probs.tolist(), strict=True
        )
    }
    assert emitted["(.0"] + emitted["(.1"] == pytest.approx(1, rel=1e-14)
    assert len(set(emitted.values())) == 4
    tokens, lengths, _ = language.sample(50, generator=generator(0, "test"))
    found = language.log_conditionals(tokens, lengths)
    entropy = language.conditional_entropy(tokens, lengths)
    for row, length in enumerate(lengths.tolist()):
        sentence = tokens[row, :length].tolist()
        for t, token in enumerate(sentence):
            side = language.vocabulary[token][0]
            weights = [emitted[word] if word[0] == side else 0.0 for word in language.vocabulary]
            assert slow.conditional(sentence, t) == pytest.approx(weights, rel=1e-10)
            assert found[row, t].exp().tolist() == pytest.approx(weights, rel=1e-10, abs=1e-300)
            assert entropy[row, t].item() == pytest.approx(-sum(p * math.log(p) for p in weights if p), rel=1e-10)
    other = dyck_grammar(DyckConfig(kinds=1, max_depth=2, max_length=4, tokens_per_bracket=2, seed=4))
    assert not np.allclose(other.emission_probs, language.grammar.emission_probs)


def test_dyck_samples_nest_and_follow_the_probabilities():
    n = 20_000
    language = SHALLOW.build()
    tokens, lengths, _ = language.sample(n, generator=generator(0, "test"))
    sampled = [
        tuple(language.vocabulary[token] for token in row[:length])
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)
    ]
    possible = {
        words: p
        for length in range(2, 9, 2)
        for words in itertools.product("()", repeat=length)
        if (p := probability(words, SHALLOW))
    }
    counts = Counter(sampled)
    assert counts.keys() <= possible.keys()
    total = sum(possible.values())
    assert_drawn([counts[words] for words in possible], [n * p / total for p in possible.values()])


def test_the_preset_nests_three_deep():
    config, text = PRESETS["dyck-2"]
    language = config.build()
    assert isinstance(language, PCFG)
    assert "2 kinds, at most 3 deep; sentences of 2 to 16 tokens" in text
    tokens, lengths, _ = language.sample(3000, generator=generator(0, "test"))
    depths = set()
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        words = [language.vocabulary[token] for token in row[:length]]
        assert probability(words, config) > 0
        depths.add(max(itertools.accumulate(1 if word in CLOSING else -1 for word in words)))
    assert depths == {1, 2, 3}
    assert (min(lengths), max(lengths)) == (2, 16)


def test_more_kinds_than_characters():
    language = DyckConfig(kinds=6, max_depth=1, max_length=2).build()
    assert set(language.vocabulary) == {*"()[]{}<>", "(4", ")4", "(5", ")5"}
    assert language.config.build().vocabulary == language.vocabulary


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kinds": 0}, "kinds is 0; it must be at least 1"),
        ({"max_depth": 0}, "max_depth is 0; it must be at least 1"),
        ({"tokens_per_bracket": 0}, "tokens_per_bracket is 0; it must be at least 1"),
        ({"max_length": 7}, "max_length is 7; it must be even"),
        ({"max_length": 0}, "max_length is 0; it must be at least 2"),
        ({"max_depth": 5, "max_length": 8}, "max_depth is 5, but 8 brackets nest at most 4 deep"),
        ({"continue_probability": 1.0}, "continue_probability is 1.0; it must be at least 0 and below 1"),
        ({"continue_probability": math.nan}, "continue_probability is nan"),
        ({"nest_probability": 0.0}, "nest_probability is 0.0; it must be above 0 and at most 1"),
        ({"nest_probability": 1.5}, "nest_probability is 1.5"),
    ],
)
def test_numbers_of_no_dyck_language(options, words):
    with pytest.raises(IsolossError, match=words):
        DyckConfig(**options).build()


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [BracketsConfig(length=12), DYCK["words"]])
def test_configs_make_the_language_they_say(config, tmp_path):
    assert configs.from_dict(LanguageConfig, configs.to_dict(config)) == config
    path = tmp_path / "language.toml"
    path.write_text(configs.to_toml(config))
    assert resolve(str(path)) == config
    language = config.build()
    assert language.max_length == getattr(config, "length", None) or config.max_length
    again = language.config.build()
    sentences = language.sample(20, generator=generator(0, "test"))
    assert torch.equal(again.sample(20, generator=generator(0, "test")).tokens, sentences.tokens)
    assert torch.equal(again.log_prob(*sentences[:2]), language.log_prob(*sentences[:2]))
    assert BracketsConfig().build().length == PRESETS["brackets-8"][0].length == 8
