"""Grammars as text: both formats, what they mean, the way there and back, and every mistake with its line."""

import warnings

import nltk
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_grammar import error_of, random_rules

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.languages.config import PCFGConfig
from isoloss.languages.pcfg.grammar import parse_grammar
from isoloss.languages.pcfg.random_grammar import random_grammar

NLTK = """
# a comment
S -> NP VP [0.8] | 'go' [0.2]   # another
NP -> "John's" [0.5] | Det N \\
   [0.5]
VP -> V NP [1.0]
Det -> 'the' [1.0]
N -> 'dog' [.25] | 'N' [.75]
V -> 'sees' [1]
"""


def rules(grammar):
    """The probabilities by (symbol, right side), tokens in quotes."""
    symbol, token = grammar.symbols, grammar.vocabulary
    table = {}
    for (a, b, c), p in zip(grammar.binary.tolist(), grammar.binary_probs.tolist(), strict=True):
        table[symbol[a], symbol[b], symbol[c]] = p
    for (a, b), p in zip(grammar.unary.tolist(), grammar.unary_probs.tolist(), strict=True):
        table[symbol[a], symbol[b]] = p
    for (a, c), p in zip(grammar.emission.tolist(), grammar.emission_probs.tolist(), strict=True):
        table[symbol[a], f"'{token[c]}'"] = p
    return table


def same(a, b):
    return (
        a.symbols == b.symbols
        and a.vocabulary == b.vocabulary
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in ("binary", "binary_probs", "unary", "unary_probs", "emission", "emission_probs")
        )
    )


def test_nltk_format():
    grammar = parse_grammar(NLTK)
    assert grammar.symbols == ("S", "NP", "VP", "Det", "N", "V")
    assert grammar.vocabulary == ("John's", "N", "dog", "go", "sees", "the")
    assert rules(grammar) == {
        ("S", "NP", "VP"): 0.8,
        ("S", "'go'"): 0.2,
        ("NP", "'John's'"): 0.5,
        ("NP", "Det", "N"): 0.5,
        ("VP", "V", "NP"): 1.0,
        ("Det", "'the'"): 1.0,
        ("N", "'dog'"): 0.25,
        ("N", "'N'"): 0.75,
        ("V", "'sees'"): 1.0,
    }


def test_rule_lines():
    grammar = parse_grammar("# counts\nS A A 3\nS A 1\n\n  A x10 2 \nA x2 1e0\nA x10 1\nA gone 0\n")
    assert grammar.symbols == ("S", "A")
    assert grammar.vocabulary == ("x2", "x10")  # natural order, and no token that cannot occur
    assert rules(grammar) == {("S", "A", "A"): 0.75, ("S", "A"): 0.25, ("A", "'x10'"): 0.75, ("A", "'x2'"): 0.25}


def test_start_directive():
    assert parse_grammar("%start B\nA -> 'a' [1]\nB -> A A [1]").symbols == ("B", "A")


def test_tokens_in_pairs_get_symbols_of_their_own():
    assert rules(parse_grammar("S a B 1\nS a a 1\nB b 1")) == {
        ("S", "T/a", "B"): 0.5,
        ("S", "T/a", "T/a"): 0.5,
        ("B", "'b'"): 1.0,
        ("T/a", "'a'"): 1.0,
    }
    assert rules(parse_grammar("S -> 'a' T/a [1.0]\nT/a -> 'b' [1]")) == {
        ("S", "T/a_", "T/a"): 1.0,
        ("T/a", "'b'"): 1.0,
        ("T/a_", "'a'"): 1.0,
    }


@pytest.mark.parametrize("form", ["rules", "nltk"])
def test_written_and_read_again(form):
    for seed in range(30):
        grammar = parse_grammar(random_rules(seed))
        assert same(parse_grammar(grammar.to_text(form)), grammar)
    grammar = random_grammar(PCFGConfig(stop_probability=0.3))
    again = parse_grammar(grammar.to_text(form))
    assert again.vocabulary == grammar.vocabulary
    assert again.symbols == (
        grammar.symbols if form == "rules" else tuple(s.replace(".", "_") for s in grammar.symbols)
    )
    assert np.array_equal(again.binary, grammar.binary)
    assert np.array_equal(again.binary_probs, grammar.binary_probs)


def test_nltk_reads_what_we_write():
    tiny = "S -> A A [0.99999]\nS -> A [0.00001]\nA -> \"it's\" [0.5] | 'x y' [0.5]"
    for grammar in (parse_grammar(NLTK), parse_grammar(tiny), random_grammar(PCFGConfig(stop_probability=0.1))):
        theirs = nltk.PCFG.fromstring(grammar.to_text("nltk"))
        ours = {
            (a.replace(".", "_"), *(b.replace(".", "_") for b in rhs)): p for (a, *rhs), p in rules(grammar).items()
        }
        table = {
            (str(rule.lhs()), *(f"'{x}'" if isinstance(x, str) else str(x) for x in rule.rhs())): rule.prob()
            for rule in theirs.productions()
        }
        assert table == ours
        assert str(theirs.start()) == grammar.symbols[0]


def test_we_read_nltks_own_example():
    grammar = parse_grammar(NLTK)
    theirs = nltk.PCFG.fromstring("\n".join(line.split("   #")[0] for line in NLTK.split("\n")))
    assert len(theirs.productions()) == len(rules(grammar))


ERRORS = [
    ("", "g holds no rules"),
    ("# only\n\n", "g holds no rules"),
    ("%start S ->", "line 1: expected `%start SYMBOL`"),
    ("S a 1\nA b c d 1\n", "line 2: a rule is LHS RHS [RHS] weight, 3 or 4 fields; this line has 5"),
    ("\nS a\n", "line 2: a rule is LHS RHS [RHS] weight, 3 or 4 fields; this line has 2"),
    ("S a x\n", "line 1: the weight 'x' is not a number"),
    ("S a -1\n", "line 1: the weight is -1; it must be at least 0"),
    ("S a 1\nS b nan", "line 2: the weight is nan"),
    ("S a inf", "line 1: the weight is inf"),
    ("S a 1\nS A 1\nA b 0\nA c 0", "line 3: all weights of the symbol A are 0"),
    ("S A 1\nA B 1\nB C 1\nC A 1\nC c 1", "line 2: the unary rules run in a cycle: A -> B -> C -> A"),
    ("S S 1\nS a 1", "line 1: the unary rules run in a cycle: S -> S"),
    ("S a 1\nS A A 1\nA A A 1", "line 3: the symbol A derives no sentence"),
    ("S S S 1", "line 1: the start symbol S derives no sentence"),
    ("S a 1\nS A A 1\nA A A 1\nX x 1", "line 3: the symbol A derives no sentence"),
    ("%start B\nB -> C [1]\nS -> B [1]", "line 2: the symbol C has no rule"),
    ("S -> A B C [1.0]", "line 1: a right side of S has 3 symbols and tokens; it must have one or two"),
    ("S -> [1.0]", "line 1: a right side of S has 0 symbols and tokens"),
    (
        "S -> '' [1.0]",
        "line 1: a right side of S has 1 symbols and tokens; it must have one or two, none of them empty",
    ),
    (
        "S -> 'a' [1.0]\nS -> A [0.0]\nS -> 'b'",
        "line 3: expected a symbol, a quoted token or a [probability], found the end",
    ),
    ("S -> 'a' 0.5", "line 1: expected a symbol, a quoted token or a [probability], found '.5'"),
    ("S -> 'a [0.5]", 'line 1: expected a symbol, a quoted token or a [probability], found "\'a [0.5]"'),
    ("S -> 'a' [x]", "line 1: the weight 'x' is not a number"),
    ("S -> 'a' [-1]", "line 1: the weight is -1"),
    ("S -> 'a' [0.5] 'b' [0.5]", "line 1: expected `|` or the end of the line, found \"'b' [0.5]\""),
    ("S->'a' [1.0]", "line 1: expected `SYMBOL -> ...` with spaces around the arrow"),
    ("S -> 'a' [1.0]\nS b 1", "line 2: expected `SYMBOL -> ...`"),
    ("S -> 'a' [0.7]\nS -> 'b' [0.2]", "line 1: the probabilities of S add up to 0.9; NLTK's format wants 1"),
    ("S -> A [1.0]", "line 1: the symbol A has no rule"),
    ("%start X\nS -> 'a' [1.0]", "the start symbol X has no rule"),
    ("%begin S\nS -> 'a' [1.0]", "line 1: expected `%start SYMBOL`, found '%begin S'"),
    ("S -> 'a' [1.0] \\", "line 1: the line is continued by a backslash, but nothing follows"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_errors_name_the_line(text, message):
    error = error_of(text, source="g")
    assert error is not None
    assert error.startswith("g")
    assert message in error


UNREACHED = [
    ("S a 1\nB b 1", "S a 1", "left out 1 symbol that cannot be reached from S: B (line 2); and 1 token that nothing"),
    ("S a 1\nB a 1", "S a 1", "left out 1 symbol that cannot be reached from S: B (line 2)"),
    ("S a 1\nS B 0\nB b 1", "S a 1", "1 symbol that cannot be reached from S: B (line 3); and 1 token that nothing"),
    # reached through each other only, from rules that never end, in a cycle, of weights that are all 0
    (
        "S a 1\nX Y Y 1\nY S y 1",
        "S a 1",
        "2 symbols that cannot be reached from S: X (line 2), Y (line 3); and 1 token",
    ),
    ("S a 1\nX X X 1", "S a 1", "X (line 2)"),
    ("S a 1\nX Y 1\nY X 1\nX b 1", "S a 1", "X (line 2), Y (line 3)"),
    ("S a 1\nX b 0", "S a 1", "X (line 2)"),
    ("S -> 'a' [1]\nX -> Typo 'b' [1]", "S -> 'a' [1]", "X (line 2); and 1 token that nothing else emits: b"),
    ("%start B\nS -> 'a' B [1]\nB -> 'b' [1]", "B -> 'b' [1]", "cannot be reached from B: S (line 2); and 1 token"),
    # what a symbol of its own for a token in a pair is called does not depend on what is left out
    ("S a S 1\nS b 1\nT/a c 1", "S a S 1\nS b 1", "T/a (line 3); and 1 token that nothing else emits: c"),
]


@pytest.mark.parametrize(("text", "without", "message"), UNREACHED)
def test_symbols_that_cannot_be_reached_are_left_out(text, without, message):
    with pytest.warns(IsolossWarning) as caught:
        grammar = parse_grammar(text, source="g")
    (warning,) = caught
    assert str(warning.message).startswith("g: left out ")
    assert message in str(warning.message)
    assert same(grammar, parse_grammar(without))


def test_of_many_symbols_the_first_are_named():
    lines = [f"X{i} x{i} 1" for i in range(12)]
    with pytest.warns(IsolossWarning) as caught:
        parse_grammar("\n".join(["S x3 1", *lines]), source="g")
    (warning,) = caught
    assert str(warning.message) == (
        "g: left out 12 symbols that cannot be reached from S: X0 (line 2), X1 (line 3), X2 (line 4), X3 (line 5), "
        "X4 (line 6) and 7 more; and 11 tokens that nothing else emits: x0, x1, x2, x4, x5 and 6 more"
    )


def test_names_that_a_format_cannot_hold():
    spaced = parse_grammar("S -> 'x y' [1.0]")
    with pytest.raises(IsolossError, match="'x y' has a space"):
        spaced.to_text()
    with pytest.raises(IsolossError, match="'S' is a symbol and a token"):
        parse_grammar("S -> 'S' [1.0]").to_text()
    with pytest.raises(IsolossError, match="both kinds of quotes"):
        parse_grammar("S a\"'b 1").to_text("nltk")
    with pytest.raises(IsolossError, match="'A\\.1' and 'A:1' are both 'A_1'"):
        parse_grammar("S A.1 A:1 1\nA.1 a 1\nA:1 a 1").to_text("nltk")
    with pytest.raises(IsolossError, match="rules or nltk, not 'json'"):
        spaced.to_text("json")


@given(st.text(alphabet="SA ab1.-[]'|>#\\%\n\"", max_size=60))
def test_any_text_is_a_grammar_or_an_error_in_words(text):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IsolossWarning)  # of symbols that are left out
            grammar = parse_grammar(text)
    except IsolossError:
        return
    assert same(parse_grammar(grammar.to_text("nltk" if grammar.rules_obstacle() else "rules")), grammar)


@given(st.lists(st.floats(0, 1e100), min_size=1, max_size=8).filter(lambda w: sum(w) > 0))
def test_weights_round_trip_to_the_last_digit(weights):
    grammar = parse_grammar("\n".join(f"S t{i} {w!r}" for i, w in enumerate(weights)))
    assert abs(grammar.emission_probs.sum() - 1) < 1e-12
    for form in ("rules", "nltk"):
        assert same(parse_grammar(grammar.to_text(form)), grammar)
