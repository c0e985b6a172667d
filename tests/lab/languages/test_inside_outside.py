"""The exact algorithms against a recursion in plain Python, and against themselves in other numbers."""

import math

import pytest
import torch
from slow_grammar import random_rules

from isoloss.errors import IsolossError
from isoloss.lab.languages._pcfg.charts import FoldedRules, Planner
from isoloss.lab.languages._pcfg.grammar import parse_grammar, random_grammar
from isoloss.lab.languages._pcfg.inside_outside import InsideOutside
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.languages.pcfg import PCFG

CPU = torch.device("cpu")
CATALAN = "S S S 0.4\nS a 0.36\nS b 0.24"  # Pr(x) = C(T-1) 0.4^(T-1) times the tokens' probabilities


def emitted(rules, exact):
    """(E, V): what each symbol that emits yields, given that it does."""
    table = torch.from_numpy(rules.emission[exact.emitting])
    return table / table.sum(dim=1, keepdim=True)


def engine(grammar, max_length, dtype=torch.float64, backend=None):
    return InsideOutside(FoldedRules(grammar, max_length), CPU, dtype, backend)


def catalan_log_prob(tokens):
    n = len(tokens)
    trees = math.log(math.comb(2 * n - 2, n - 1) // n) + (n - 1) * math.log(0.4)
    return trees + sum(math.log(0.36 if token == 0 else 0.24) for token in tokens)


def test_levels_are_found_and_only_the_tree_is_computed():
    rules = FoldedRules(random_grammar(PCFGConfig()), 8)
    planner = Planner(rules)
    plan = planner.plan(8)
    assert len(planner.members) == 4  # lengths 8 (with S), 4, 2, 1
    assert sorted((width, len(starts)) for (_, width), starts in plan.starts.items()) == [
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    ]
    assert planner.plan(7).starts == {}  # a length that no sentence has


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_closed_form_at_every_length(backend):
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 2e-7)):
        exact = engine(parse_grammar(CATALAN), 64, dtype, backend)
        for length in (1, 2, 3, 7, 20, 64):
            tokens = torch.randint(2, (5, length), generator=generator)
            truth = torch.tensor([catalan_log_prob(row) for row in tokens.tolist()], dtype=torch.float64)
            assert torch.allclose(exact.log_partition(tokens), truth, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("grammar", "lengths"),
    [
        (random_grammar(PCFGConfig(levels=6)), (64,)),
        (random_grammar(PCFGConfig(levels=6, stop_probability=0.05, vocab_size=100)), (17, 40, 64)),
        (parse_grammar(random_rules(3, symbols=6, tokens=5)), (1, 33, 64)),
    ],
)
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_float32_to_length_64(grammar, lengths, backend):
    rules = FoldedRules(grammar, 64)
    double, single = (InsideOutside(rules, CPU, dtype, backend) for dtype in (torch.float64, torch.float32))
    emission = emitted(rules, double)
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        tokens = torch.randint(len(grammar.vocabulary), (300, length), generator=generator)
        tokens = tokens[double.log_partition(tokens) > -math.inf][:40]
        assert len(tokens) >= 5
        tokens[torch.rand(tokens.shape, generator=generator) < 0.15] = double.unknown
        wide, log_z = double.leaf_outside(tokens)
        narrow, log_z32 = single.leaf_outside(tokens)
        assert narrow.dtype == torch.float32
        truth, found = wide @ emission, (narrow @ emission.float()).double()
        assert ((found - truth).abs() <= 2e-6 * truth).all()
        assert torch.allclose(log_z, log_z32, rtol=2e-6, atol=2e-6)


# a row of As, in which `a` is rare though it is frequent elsewhere, so that no scale per token foresees it
RARE = "R S 0.5\nR B B 0.5\nS A S 0.9\nS A A 0.1\nA a 1e-20\nA c 0.5\nA d 0.5\nB a 1"


def rare_log_prob(tokens):
    return (len(tokens) - 2) * math.log(0.9) + math.log(0.05) + sum(math.log((1e-20, 0.5, 0.5)[c]) for c in tokens)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_beyond_the_range_of_the_numbers(dtype, backend):
    exact = engine(parse_grammar(RARE), 40, dtype, backend)
    tokens = torch.tensor([[0] * 40, [1] * 40, [0] * 20 + [2] * 20, [2] * 39 + [0], [1, 0] * 20])
    truth = torch.tensor([rare_log_prob(row) for row in tokens.tolist()], dtype=torch.float64)
    assert truth[0] < -1800  # float64 ends at -708
    emission = emitted(FoldedRules(parse_grammar(RARE), 40), exact)
    scores, log_z = exact.leaf_outside(tokens)
    assert torch.allclose(log_z, truth, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)
    expected = torch.tensor([1e-20, 0.5, 0.5], dtype=torch.float64).expand(5, 40, 3)
    assert torch.allclose(scores.double() @ emission, expected, rtol=2e-6 if dtype == torch.float32 else 1e-12, atol=0)
    assert torch.allclose(exact.log_partition(tokens), log_z, rtol=1e-12, atol=0)
    inside, best = exact.inside(tokens)
    assert torch.allclose(inside[:, 0], truth, rtol=1e-13, atol=0)
    assert torch.allclose(inside.amax(dim=1), best, rtol=1e-14, atol=0)
    assert torch.allclose(inside[:, 1], truth + math.log(2), rtol=1e-13, atol=0)
    assert (inside[:, 2:] < inside[:, :1] - 200).all()
    assert (inside[:, 2:] <= math.log(torch.finfo(dtype).tiny)).all()
    assert torch.isfinite(inside).all()


def halves(kinds=32, further=0.98, longest=128):
    """Of each sentence a left half of `kinds` tokens in turn, and a right half of one: one scale fits neither."""
    names = range(kinds)
    left = [f"A{k} L [{further / kinds!r}] | A{k} A0 [{(1 - further) / kinds!r}]" for k in names]
    lines = ["S -> L R [1.0]", f"L -> {' | '.join(left)}", *(f"A{k} -> 'a{k}' [1.0]" for k in names)]
    lines += [f"R -> B R [{further}] | B B [{1 - further!r}]", "B -> 'b' [1.0]"]
    return PCFG.from_text("\n".join(lines), max_length=longest)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_halves_of_unlike_scale_in_float32(backend):
    """The left half underflows, and the right one brings the sentence back to where nothing shows it."""
    language = halves()
    tokens, lengths, _ = language.sample(1000, generator=torch.Generator().manual_seed(0))
    single = InsideOutside(language._rules, CPU, torch.float32, backend)
    for length in (92, 102, 119):
        rows = tokens[lengths == length][:, :length]
        assert len(rows) >= 2
        # one derivation each: left and right half stop once, and go on otherwise
        words = [[language.vocabulary[token] for token in row] for row in rows.tolist()]
        kinds = [sum(word != "b" for word in row) for row in words]
        truth = [(length - 4) * math.log(0.98) + 2 * math.log(0.02) - (number - 1) * math.log(32) for number in kinds]
        found = single.log_partition(rows)
        assert torch.allclose(found, torch.tensor(truth, dtype=torch.float64), rtol=1e-6, atol=0)
        assert torch.allclose(single.leaf_outside(rows)[1], found, rtol=1e-6, atol=0)


def test_a_symbol_that_hardly_emits():
    """Its emissions are below float32, and its share of a position is not."""
    language = PCFG.from_text("S -> A S [1.0] | 't0' [1e-50]\nA -> 't0' [0.5] | 't1' [0.5]", max_length=3)
    single = language.to(dtype=torch.float32)
    tokens, lengths = torch.tensor([[0, 1, 0]]), torch.tensor([3])
    for method in ("log_next", "log_conditionals", "conditional_entropy"):
        found, truth = (getattr(one, method)(tokens, lengths).double().exp() for one in (single, language))
        torch.testing.assert_close(found, truth, rtol=2e-6, atol=1e-30)
    assert language.log_conditionals(tokens, lengths)[0, 2].exp().tolist() == pytest.approx([1, 0], abs=1e-300)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_range_that_no_number_holds_is_an_error(backend):
    exact = engine(parse_grammar(RARE), 80, backend=backend)
    with pytest.raises(IsolossError, match="wider range than float64 holds"):
        exact.leaf_outside(torch.tensor([[0] * 40 + [2] * 40]))


def test_chunks_are_bounded():
    for levels, stop in ((3, 0.0), (6, 0.2)):
        rules = FoldedRules(random_grammar(PCFGConfig(levels=levels, stop_probability=stop)), 2**levels)
        exact = InsideOutside(rules, CPU, torch.float64, "torch")
        numbers = Planner(rules).plan(2**levels).numbers
        assert exact.chunk(2**levels) >= 1
        assert exact.chunk(2**levels) * numbers * 8 <= max(2**23, numbers * 8)
        lanes = InsideOutside(rules, CPU, torch.float64, "numba")
        scores = 8 * 2**levels * len(lanes.emitting)
        assert lanes.chunk(2**levels) % 128 == 0
        assert 0 < lanes.chunk(2**levels) * scores <= max(2**23, 128 * scores)
