"""The contract of every exact language: each of its numbers against enumeration, its draws, and what it refuses."""

import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_grammar import random_rules
from small_languages import (
    NAMES,
    TINY,
    as_batch,
    by_rules,
    drawn_truth_of,
    language_of,
    p_value,
    rows_of,
    tolerance_of,
    truth_of,
)

from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.base import ExactLanguage
from isoloss.lab.languages.config import (
    BracketsConfig,
    CorpusConfig,
    DyckConfig,
    HiddenBracketConfig,
    HMMConfig,
    PCFGConfig,
    TeacherConfig,
)
from isoloss.lab.languages.exact import all_sentences, masked_sentences
from isoloss.lab.languages.pcfg import PCFG
from isoloss.registry import LANGUAGES
from isoloss.seeds import generator

METHODS = ("log_prob", "log_conditionals", "conditional_entropy")


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def drawn(language, n=20, seed=0):
    return language.sample(n, generator=generator(seed, "test"))


def hidden_in(tokens, lengths, share, most, seed=0):
    """(n, T) bool: about a share of each sentence's tokens, at most `most`."""
    draws = torch.rand(tokens.shape, generator=generator(seed, "mask"))
    present = torch.arange(tokens.shape[1]) < lengths[:, None]
    rank = draws.masked_fill(~present, 2).argsort(dim=1).argsort(dim=1)
    return (draws < share) & present & (rank < most)


def test_every_kind_of_language_that_needs_no_files_is_here():
    kinds = {getattr(language_of(name)._config, "kind", None) for name in NAMES}
    assert set(LANGUAGES) - kinds <= {"corpus", "file", "teacher"}
    assert all(isinstance(language_of(name), ExactLanguage) for name in NAMES)


# --- probabilities


def test_probabilities_of_all_sentences(name):
    language, truth, tolerance = language_of(name), truth_of(name), tolerance_of(name)
    expected = torch.tensor(list(truth.values()), dtype=torch.float64)
    assert math.isclose(math.fsum(drawn_truth_of(name).values()), 1, rel_tol=1e-9)
    torch.testing.assert_close(language.log_prob(*as_batch(list(truth))).exp(), expected, rtol=tolerance, atol=0)
    # and of no other string
    widths = torch.randint(1, language.max_length + 1, (300,), generator=generator(0, "lengths"))
    # of other lengths than sentences have, too: of a teacher and an HMM these are first tokens, and no sentences
    strings = torch.randint(language.vocab_size, (300, language.max_length), generator=generator(0, "strings"))
    possible = language.is_possible(strings, widths).tolist()
    assert possible == [
        tuple(x[:n]) in drawn_truth_of(name) for x, n in zip(strings.tolist(), widths.tolist(), strict=True)
    ]
    probs = language.length_probs
    by_length = defaultdict(float)
    for x, p in drawn_truth_of(name).items():
        by_length[len(x)] += p
    assert probs.tolist() == pytest.approx([by_length[n] for n in range(len(probs))], rel=1e-9)


def test_all_sentences_are_found_and_those_with_one_masked_token(name):
    language, truth, tolerance = language_of(name), drawn_truth_of(name), tolerance_of(name)
    sentences, probabilities = all_sentences(language)
    assert probabilities.dtype == torch.float64
    found = dict(zip(rows_of(sentences), probabilities.tolist(), strict=True))
    assert len(found) == len(sentences.tokens)
    assert found == pytest.approx(truth, rel=tolerance)
    assert bool((sentences.tokens[~sentences.present()] == language.pad_id).all())
    weights = defaultdict(float)
    for x, p in truth.items():
        places = [t for t, token in enumerate(x) if token not in language.special_token_ids]
        for t in places:
            weights[x[:t], t, x[t + 1 :]] += p / len(places)
    sentences, positions, probabilities = masked_sentences(language)
    found = {}
    for x, t, p in zip(rows_of(sentences), positions.tolist(), probabilities.tolist(), strict=True):
        found[x[:t], t, x[t + 1 :]] = p
    assert len(found) == len(sentences.tokens)
    assert found == pytest.approx(dict(weights), rel=tolerance)


# --- conditionals


def check_conditionals(language, truth, rows, share, tolerance, seed=0):
    """Fail unless all exact numbers of some rows, tokens hidden, are sums over the sentences that agree."""
    tokens, lengths = as_batch(rows)
    mask = hidden_in(tokens, lengths, share, language.max_masked, seed)
    given = tokens.masked_fill(mask, 9999)  # what is hidden is not read
    options = {"mask": mask} if share else {}
    log_prob = language.log_prob(given, lengths, **options)
    logs = language.log_conditionals(given, lengths, **options)
    entropies = language.conditional_entropy(given, lengths, **options)
    known = defaultdict(list)
    for x, p in truth.items():
        known[len(x)].append((x, p))
    for i, x in enumerate(rows):
        n = len(x)
        strings = torch.tensor([y for y, _ in known[n]])
        weights = torch.tensor([p for _, p in known[n]], dtype=torch.float64)
        agrees = (strings == torch.tensor(x)) | mask[i, :n]
        assert math.isclose(log_prob[i].exp(), weights[agrees.all(dim=1)].sum(), rel_tol=tolerance)
        for t in range(n):
            others = torch.cat([agrees[:, :t], agrees[:, t + 1 :]], dim=1).all(dim=1)
            mass = torch.zeros(language.vocab_size).double().index_add_(0, strings[:, t], weights * others)
            mass /= mass.sum()
            torch.testing.assert_close(logs[i, t].exp(), mass, rtol=tolerance, atol=1e-300)
            assert (logs[i, t][mass == 0] == TINY).all()
            entropy = -float(torch.special.xlogy(mass, mass).sum())
            assert math.isclose(entropies[i, t], entropy, rel_tol=tolerance, abs_tol=1e-12)
    padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
    assert not logs[padding].any()
    assert not entropies[padding].any()
    for values in (log_prob, entropies):
        assert not (torch.signbit(values) & (values == 0)).any()
    # some positions are those of all
    several = (torch.rand(len(rows), 3, generator=generator(seed, "positions")) * lengths[:, None]).long()
    every, single = torch.arange(len(rows)), several[:, 1]
    close = {"rtol": 1e-10, "atol": 1e-12}
    for method, whole in ((language.log_conditionals, logs), (language.conditional_entropy, entropies)):
        found = method(given, lengths, **options, positions=several)
        torch.testing.assert_close(found, whole[every[:, None], several], **close)
        torch.testing.assert_close(method(given, lengths, **options, positions=single), whole[every, single], **close)
        for shape in ((len(rows), 0), (0,), (0, 3)):
            some = {name: hidden[: shape[0]] for name, hidden in options.items()}
            at = torch.zeros(shape, dtype=torch.int64)
            none = method(given[: shape[0]], lengths[: shape[0]], **some, positions=at)
            assert none.shape == (*shape, *whole.shape[2:])


def some_rows(truth, n=30):
    """Sentences of every length and probability."""
    rows = sorted(truth, key=lambda x: (len(x), x))
    order = torch.randperm(len(rows), generator=generator(0, "rows"))[:n]
    return [rows[i] for i in order.tolist()]


@pytest.mark.parametrize("share", [0, 0.4, 1])
def test_conditionals_are_sums_over_all_sentences_that_agree(name, share):
    truth = truth_of(name)
    check_conditionals(language_of(name), truth, some_rows(truth), share, tolerance_of(name))


@given(seed=st.integers(0, 10_000), recursive=st.booleans(), max_length=st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_conditionals_of_any_grammar(seed, recursive, max_length):
    language = PCFG.from_text(random_rules(seed, recursive=recursive), max_length=max_length)
    truth = by_rules(language)
    check_conditionals(language, truth, some_rows(truth, 8), seed % 3 / 2, 1e-9, seed)


@pytest.mark.parametrize("given_length", [False, True])
def test_next_tokens_are_sums_over_all_sentences(name, given_length):
    language, truth = language_of(name), drawn_truth_of(name)
    sums = defaultdict(lambda: torch.zeros(language.vocab_size, dtype=torch.float64))
    for x, p in truth.items():
        for t, token in enumerate(x):
            sums[x[:t], len(x) if given_length else 0][token] += p
    rows = some_rows(truth, 60)
    found, ordinary = (
        language.log_next(*as_batch(rows), given_length=given_length, without_special=without)
        for without in (False, True)
    )
    close = {"rtol": max(1e-6, tolerance_of(name)), "atol": 1e-10}
    special = list(language.special_token_ids)
    for i, x in enumerate(rows):
        for t, token in enumerate(x):
            expected = sums[x[:t], len(x) if given_length else 0].clone()
            torch.testing.assert_close(found[i, t].exp(), expected / expected.sum(), **close)
            expected[special] = 0
            if token not in special and expected.sum() > 0:
                torch.testing.assert_close(ordinary[i, t].exp(), expected / expected.sum(), **close)
        assert not found[i, len(x) :].any()


def test_entropies_are_those_of_all_sentences(name):
    """H(sentence), H(length), and the mean entropy of a hidden token."""
    language, truth = language_of(name), drawn_truth_of(name)
    by_length, masked, hidden = defaultdict(float), 0.0, defaultdict(lambda: defaultdict(float))
    for x, p in truth.items():
        by_length[len(x)] += p
        places = [t for t, token in enumerate(x) if token not in language.special_token_ids]
        for t in places:
            hidden[x[:t], t, x[t + 1 :]][x[t]] += p / len(places)
    for tokens in hidden.values():
        total = sum(tokens.values())
        masked -= sum(p * math.log(p / total) for p in tokens.values())
    length = -math.fsum(p * math.log(p) for p in by_length.values())
    sentence = -math.fsum(p * math.log(p) for p in truth.values())
    found = languages.entropy(language, num_sentences=2000)
    assert found.length.value == pytest.approx(length, rel=1e-9, abs=1e-12)
    assert found.sentence.value == pytest.approx(found.length.value + found.given_length.value, rel=1e-12)
    for estimate, wanted in (
        (found.sentence, sentence),
        (found.given_length, sentence - length),
        (found.masked_token, masked),
    ):
        if estimate.stderr == 0:
            assert estimate.value == pytest.approx(wanted, rel=max(1e-10, tolerance_of(name)), abs=1e-12)
        else:
            assert "Monte Carlo" in estimate.method
            assert abs(estimate.value - wanted) < 4 * estimate.stderr < 0.2 * wanted


# --- draws


def test_sentences_are_drawn_with_their_probabilities(name):
    language, truth, n = language_of(name), drawn_truth_of(name), 10_000
    sentences = drawn(language, n)
    assert sentences.latent is None
    assert {sentences.tokens.dtype, sentences.lengths.dtype} == {torch.int64}
    assert sentences.tokens.shape[1] == sentences.lengths.max()
    assert (sentences.tokens[~sentences.present()] == language.pad_id).all()
    counts = Counter(rows_of(sentences))
    assert set(counts) <= set(truth)
    assert p_value(*zip(*((counts[x], n * p) for x, p in truth.items()), strict=True)) > 1e-3


def test_a_batch_is_a_function_of_its_step_and_a_draw_of_its_seed(name):
    language = language_of(name)
    batch = language.batch(5, 40, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = language.to(dtype=torch.float32).sample(40, generator=generator(1, "sentences", 5))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.lengths, again.lengths)
    for other in (language.batch(6, 40, seed=1), language.batch(5, 40, seed=2), language.sample(40)):
        assert rows_of(other) != rows_of(batch)
    assert language.sample(0).lengths.shape == (0,)
    if language.has_numbered_sentences:
        row = language.sentences_at(torch.arange(40), seed=1)
        assert rows_of(language.sentences_at(torch.tensor([17, 3, 17]), seed=1)) == [
            rows_of(row)[i] for i in (17, 3, 17)
        ]


# --- of other numbers, neighbors, threads and places


def test_single_precision_is_close(name):
    language = language_of(name)
    single = language.to(dtype=torch.float32)
    assert (language.dtype, language.to().dtype, single.dtype) == (torch.float64, torch.float64, torch.float32)
    tokens, lengths, _ = drawn(language, 200)
    for method in (*METHODS, "log_next"):
        wide, narrow = (getattr(version, method)(tokens, lengths) for version in (language, single))
        assert narrow.dtype == torch.float32
        if method in ("log_conditionals", "log_next"):
            assert narrow.min() >= math.log(torch.finfo(torch.float32).tiny)
            wide, narrow = wide.exp(), narrow.exp()
        torch.testing.assert_close(narrow.double(), wide, rtol=5e-5, atol=5e-6)


def test_no_sentence_depends_on_its_neighbors_or_the_threads(name):
    language = language_of(name)
    tokens, lengths, _ = drawn(language, 400)
    order = torch.randperm(400, generator=generator(0, "order"))
    close = {"rtol": tolerance_of(name), "atol": 1e-5 if tolerance_of(name) > 1e-6 else 1e-10}
    threads = torch.get_num_threads()
    for method in METHODS:
        together = getattr(language, method)(tokens, lengths)
        try:
            torch.set_num_threads(3)
            torch.testing.assert_close(getattr(language, method)(tokens, lengths), together, **close)
        finally:
            torch.set_num_threads(threads)
        for rows in (slice(7, 8), order):
            torch.testing.assert_close(getattr(language, method)(tokens[rows], lengths[rows]), together[rows], **close)
        padded = torch.nn.functional.pad(tokens, (0, 2), value=-5)
        padded[:, : tokens.shape[1]][torch.arange(tokens.shape[1]) >= lengths[:, None]] = 99
        wide = getattr(language, method)(padded, lengths.int())
        torch.testing.assert_close(wide if wide.dim() == 1 else wide[:, : tokens.shape[1]], together, **close)


@pytest.mark.gpu
def test_on_cuda(name):
    language, moved = language_of(name), language_of(name).to("cuda")
    tokens, lengths, _ = drawn(language, 200)
    assert torch.equal(drawn(moved, 200).tokens.cpu(), tokens)
    for method in METHODS:
        expected, found = (getattr(version, method)(tokens, lengths) for version in (language, moved))
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), expected, rtol=max(1e-12, tolerance_of(name)), atol=1e-12)


# --- ids, and what is refused


def test_ids_and_places(name):
    language = language_of(name)
    assert language.vocab_size == len(language.vocabulary) == len(set(language.vocabulary))
    ids = {language.pad_id, language.mask_id}
    assert len(ids) == 2
    assert ids <= set(range(language.vocab_size, language.model_vocab_size))
    assert f"torch.float64 on {language.device}" in repr(language)
    with pytest.raises(IsolossError, match=r"torch\.float64 or torch\.float32, not in torch\.float16"):
        language.to(dtype=torch.float16)
    with pytest.raises(IsolossError, match=r"cannot compute in torch\.float64 on device 'nowhere'"):
        language.to("nowhere")
    with pytest.raises(IsolossError, match="cannot draw -1 sentences"):
        language.sample(-1)
    with pytest.raises(IsolossError, match="drawn on the CPU, but the generator is on meta"):
        language.sample(1, generator=OnAnotherDevice())


class OnAnotherDevice(torch.Generator):
    """A CPU generator that says it is not: a second device is needed for a real one."""

    device = torch.device("meta")


def test_sentences_that_are_wrong(name):
    """Each is refused by every method, and the row is named."""
    language = language_of(name)
    tokens, lengths, _ = drawn(language, 2)
    width, size = tokens.shape[1], language.vocab_size

    def with_first(token):
        changed = tokens.clone()
        changed[1, 0] = token
        return changed

    cases = [
        (tokens[0], lengths, None, r"tokens must be \(n, T\) and lengths \(n,\)"),
        (tokens, torch.ones(3).long(), None, r"tokens must be \(n, T\) and lengths \(n,\)"),
        (tokens.float(), lengths, None, r"tokens must be integers, not torch\.float32"),
        (tokens, lengths.float(), None, r"lengths must be integers, not torch\.float32"),
        (with_first(size), lengths, None, f"sentence 1 holds the token id {size}; ids are from 0 to {size - 1}"),
        (with_first(-1), lengths, None, "sentence 1 holds the token id -1"),
        (tokens, torch.tensor([int(lengths[0]), 0]), None, "sentence 1 has length 0; a length here is from 1 to"),
        (tokens, torch.tensor([width + 1, 1]), None, f"sentence 0 has length {width + 1}; a length here is from 1 to"),
        (tokens, lengths, torch.zeros(2, width + 1).bool(), rf"the mask must be \(2, {width}\) bool like the tokens"),
        (tokens, lengths, torch.zeros(2, width).long(), r"the mask must be .* torch\.int64"),
    ]
    for wrong_tokens, wrong_lengths, mask, message in cases:
        for method in METHODS if mask is not None else (*METHODS, "log_next"):
            with pytest.raises(IsolossError, match=message):
                getattr(language, method)(wrong_tokens, wrong_lengths, **({} if mask is None else {"mask": mask}))
    last = int(lengths[1])
    for positions, message in (
        (torch.tensor([0]), r"positions must be \(2,\) or \(2, k\), not \(1,\)"),
        (torch.tensor([0.0, 0.0]), r"positions must be integers, not torch\.float32"),
        (torch.tensor([0, last]), f"sentence 1 has no position {last}; its positions are from 0 to {last - 1}"),
        (torch.tensor([[0, -1], [0, 0]]), "sentence 0 has no position -1"),
    ):
        for method in METHODS[1:]:
            with pytest.raises(IsolossError, match=message):
                getattr(language, method)(tokens, lengths, positions=positions)


def test_an_impossible_sentence_is_named_by_its_row(name):
    language, truth = language_of(name), truth_of(name)
    (good, n) = max((x, len(x)) for x in drawn_truth_of(name))
    strings = torch.randint(language.vocab_size, (2000, n), generator=generator(0, "strings")).tolist()
    wrong = next((x for x in strings if tuple(x) not in truth), None)
    if wrong is None:
        pytest.skip("every string is a sentence")
    tokens, lengths = torch.tensor([good, wrong]), torch.tensor([n, n])
    for method in METHODS:
        for options in ({}, {"mask": torch.zeros(2, n, dtype=torch.bool)}):
            with pytest.raises(
                IsolossError, match=r"sentence 1 (has probability 0|must have .CLS. as its first token)"
            ):
                getattr(language, method)(tokens, lengths, **options)


class Coins(ExactLanguage):
    """One to three tosses of a coin, from `_probabilities` alone."""

    def __init__(self):
        self.max_length, self.device, self.dtype = 3, torch.device("cpu"), torch.float64
        self.set_vocabulary(("heads", "tails"))

    def sample(self, n, *, generator=None, latent=False):
        raise NotImplementedError

    def _probabilities(self, ids, positions):
        return torch.tensor([0.25, 0.75], dtype=self.dtype).expand(*positions.shape, 2).clone()


def test_probabilities_alone_give_0_at_padding():
    tokens, lengths = torch.zeros(3, 5).long(), torch.tensor([1, 3, 2])
    is_token = torch.arange(5) < lengths[:, None]
    logs = Coins().log_conditionals(tokens, lengths)
    assert torch.equal(logs, is_token[..., None] * torch.tensor([0.25, 0.75], dtype=torch.float64).log())
    entropy = 2 * math.log(2) - 0.75 * math.log(3)
    torch.testing.assert_close(Coins().conditional_entropy(tokens, lengths), is_token * entropy, check_dtype=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PCFGConfig(symbols_per_level=2, rules_per_symbol=5), "5, but 2 symbols per level make only 4 different pairs"),
        (BracketsConfig(length=7), "length is 7; it must be even"),
        (HiddenBracketConfig(length=5), "length is 5; it must be even"),
        (DyckConfig(max_length=7), "max_length is 7; it must be even"),
        (DyckConfig(max_depth=9), "max_depth is 9, but 16 brackets nest at most 8 deep"),
        (HMMConfig(states=3), "blocks is 4, more than the 3 states or the 200 tokens"),
        (HMMConfig(blocks=2, vocab_size=1), "blocks is 2, more than the 100 states or the 1 tokens"),
        (TeacherConfig(checkpoint="none", samples=0), "samples is 0; it must be at least 1"),
        (CorpusConfig(paths=(), tokenizer="none", held_out=1.0), "held_out is 1.0; it must be above 0 and below 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_opened(config, message):
    for refuse in (check, lambda config: config.build()):
        with pytest.raises(IsolossError, match=message):
            refuse(config)
