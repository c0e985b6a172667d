"""Grammars as text: both formats, what they mean, the way there and back, and every mistake with its line."""

import math
import warnings

import nltk
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_grammar import SlowGrammar, error_of, random_rules

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.languages._pcfg.grammar import parse_grammar, random_grammar
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.languages.pcfg import PCFG

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


ERRORS = [
    ("", "g holds no rules"),
    ("# only\n\n", "g holds no rules"),
    ("%start S ->", "line 1: expected `%start SYMBOL`"),
    ("\nS a\n", "line 2: a rule is LHS RHS ... weight, 3 or more fields; this line has 2"),
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
    ("%start B\nB -> C [1]\nS -> 'b' [1]", "line 2: the symbol C has no rule (a token stands in quotes)"),
    ("S -> [1.0]", "line 1: a right side of S is empty; it must hold symbols or tokens"),
    ("S -> A '' [1.0]", "line 1: a right side of S has an empty token"),
    ("S -> 'a' [1.0]\nS -> A [0.0]\nS -> 'b'", "line 3: the right side `S -> 'b'` has no weight; write"),
    ("S -> 'b' [0.5]\nS -> 'a [0.5]", "line 2: the symbol 'a has no rule"),
    ("S -> 'a' [x]", "line 1: the right side `S -> 'a' [x]` has no weight"),
    ("S -> 'a' [-1]", "line 1: the weight is -1"),
    ("S -> 'a' [0.5] 'b' [0.5]", "line 1: the right side `S -> 'a' [0.5] 'b' [0.5]` has two weights"),
    ("S -> 'a' [1.0]\nS b 1", "line 2: expected `SYMBOL -> ...`"),
    (
        "S -> 'a' [0.7]\nS -> 'b' [0.2]",
        "line 1: the probabilities of S add up to 0.9; in brackets they must add up to 1",
    ),
    ("S -> A [0.5] | 'a' [0.5]", "line 1: the symbol A has no rule"),
    # what could mean two things, and the ways out
    ("1 2 3\n2 3 1", "line 1: the rules begin and end with a number, and either could be the weight; write them with"),
    ("0.5 S -> 'a' 7", "line 1: the rule has a weight in front, 0.5, and a number at its end, 7; leave one out"),
    ("[0.5] S -> 'a' | 'b'", "line 1: the weight [0.5] stands in front of 2 right sides"),
    ("S -> A 7 # 0.5\nA -> 'a' # 1", "line 1: two numbers could be the weight, 7 and the one after #"),
    ("S -> A B 1\nA -> a 1\nB b 1", "line 3: expected `SYMBOL -> ...`, found 'B b 1'"),
    ("S -> CC 'a' [1]\nCC -> CC [1]", "in a cycle: CC -> CC; if CC is a token, too, write rules with an arrow and"),
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
    assert same(parse_grammar(grammar.config_text()), grammar)


@given(st.lists(st.floats(0, 1e100), min_size=1, max_size=8).filter(lambda w: sum(w) > 0))
def test_weights_round_trip_to_the_last_digit(weights):
    grammar = parse_grammar("\n".join(f"S t{i} {w!r}" for i, w in enumerate(weights)))
    assert abs(grammar.emission_probs.sum() - 1) < 1e-12
    for form in ("rules", "nltk"):
        assert same(parse_grammar(grammar.to_text(form)), grammar)


DOG = {
    ("S", "NP", "VP"): 0.75,
    ("S", "VP"): 0.25,
    ("NP", "D", "N"): 1.0,
    ("VP", "V", "NP"): 1.0,
    ("D", "'the'"): 1.0,
    ("N", "'dog'"): 0.5,
    ("N", "':'"): 0.5,
    ("V", "'sees'"): 1.0,
}
# the same grammar as people write it, and what the note on reading it says
FORMS = {
    "weights after #": (
        "S\nS -> NP VP # 0.75\nS -> VP # 0.25\nNP -> D N # 1\nVP -> V NP # 1.0 # of the verb\nD -> the # 1\n"
        "N -> dog # 0.5\nN -> : # .5\nV -> sees # 1\n",
        "nothing stands in quotes, so that names without a rule are tokens: the, dog, :, sees; weights stand after #",
    ),
    "weights last": (
        "S -> NP VP 0.75|VP 0.25\nNP -> D N 1\nVP -> V NP 1\nD -> 'the' 1\nN -> 'dog' 0.5 | \":\" 5e-1\nV -> 'sees' 1",
        "weights stand as the last word",
    ),
    "weights in front of arrows": (
        "[0.75] S -> NP VP\n[.25] S -> VP\n[1.0] NP -> D N\n[1] VP -> V NP\nD -> the [1]\nN -> dog [0.5] | : [0.5]\n"
        "V -> sees [1.0]",
        "without a rule are tokens: the, dog, :, sees; weights stand in front or",
    ),
    "counts in front of arrows": (
        "3 S -> NP VP\n1 S -> VP\n1 NP -> D N\n1 VP -> V NP\n1 D -> the\n2 N -> dog\n2 N -> :\n1 V -> sees",
        "weights stand in front; weights that do not add up to 1 are divided by their sum: of S (4), N (4)",
    ),
    "weights in front": (
        "# Sentences.\n3\tS\tNP VP   # a comment\n1\tS\tVP\n1\tNP\tD N\n1\tVP\tV NP\n1\tD\tthe\n7\tN\tdog\n7\tN\t:\n"
        "1\tV\tsees",
        "a line is weight LHS RHS ..., and names without a rule of their own are tokens",
    ),
    "no spaces": (
        "S->NP VP[0.75]|VP[0.25]\nNP->D N[1]\nVP->V NP[1]\nD->'the'[1]\nN->'dog'[.5]|':'[.5]\nV->'sees'[1]",
        None,
    ),
    "arrows of Unicode": (
        "S → NP VP (0.75) | VP (0.25)\nNP→D N (1)\nVP → V NP (1)\nD → the (1)\nN → dog (.5) | : (.5)\nV → sees (1)",
        "nothing stands in quotes",
    ),
    "weights last, with a comment": (
        "S NP VP 3 # counts\nS VP 1\nNP D N 1\nVP V NP 1\nD the 1\nN dog 1\nN : 1\nV sees 1",
        None,
    ),
}


def read(text, note):
    """The grammar in a text that is read with a warning that says `note`; with none, for None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IsolossWarning)
        grammar = parse_grammar(text, source="g")
    assert (note is None) == (not caught)
    for warning in caught:
        assert note in str(warning.message)
    return grammar


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_people_write(form):
    text, note = FORMS[form]
    assert rules(read(text, note)) == DOG


@pytest.mark.parametrize("arrow", ["->", "-->", "→"])
def test_an_arrow_is_no_token(arrow):
    grammar = read(f"S {arrow} A 1\nA {arrow} a 0.5\nA {arrow} b 0.5", "tokens: a, b")
    assert rules(grammar) == {("S", "A"): 1.0, ("A", "'a'"): 0.5, ("A", "'b'"): 0.5}


@pytest.mark.parametrize("token", ["::=", ":", "=", "=>", "|||", "#"])
def test_what_looks_like_an_arrow_can_be_a_token_of_plain_rule_lines(token):
    assert rules(parse_grammar(f"S A B 1\nA {token} 0.5\nA x 0.5\nB {token} 1")) == {
        ("S", "A", "B"): 1.0,
        ("A", f"'{token}'"): 0.5,
        ("A", "'x'"): 0.5,
        ("B", f"'{token}'"): 1.0,
    }


def test_long_right_sides_are_split_without_a_change_of_probabilities():
    text = "ROOT is it S ? 1\nROOT S ? 1\nROOT S ! 2\nS it is S 1\nS it 3"
    grammar = read(text, "2 longer right sides are split in two with symbols such as ROOT|<it-S-?>")
    theirs = nltk.PCFG.fromstring(
        "ROOT -> 'is' 'it' S '?' [.25] | S '?' [.25] | S '!' [.5]\nS -> 'it' 'is' S [.25] | 'it' [.75]"
    )
    for sentence in ("is it it is it ?", "it is it !", "it ?", "is it it ?"):
        slow = SlowGrammar(grammar)
        words = sentence.split()
        expected = sum(tree.prob() for tree in nltk.InsideChartParser(theirs).parse(words))
        assert expected > 0
        assert slow.inside(0, [grammar.vocabulary.index(word) for word in words]) == pytest.approx(expected, rel=1e-12)


TREES = [
    "(S (NP-SBJ (NP (NNP Mr.) (NNP Smith)) (, ,) (ADJP (CD 61) (JJ old)) (, ,)) (VP (VBD said) (NP (PRP$ its) "
    "(NN cat))) (. .))",
    "(S (`` ``) (NP-SBJ (PRP$ our) (NN dog)) (VP (VBZ is) (ADJP (JJ old))) ('' '') (. .))",
    "(S (NP-SBJ (NP (NN dog) (POS 's)) (NN cat)) (PRN (-LRB- -LRB-) (NP (# #) (CD 61)) (-RRB- -RRB-)) (VP (VBZ is)) "
    " (. .))",
    "(S (NP-SBJ (-NONE- *-1)) (VP (VBD said) (NP ($ $) (CD 61))) (: --) (VP (VBZ is)) (. .))",
]


def induced():
    """NLTK's grammar of a few trees, made by its own steps, and the rules' probabilities."""
    productions = []
    for text in TREES:
        tree = nltk.Tree.fromstring(text)
        tree.collapse_unary(collapsePOS=False)
        tree.chomsky_normal_form(horzMarkov=2)
        productions += tree.productions()
    grammar = nltk.induce_pcfg(nltk.Nonterminal("S"), productions)
    table = {
        (str(rule.lhs()), *(f"'{x}'" if isinstance(x, str) else str(x) for x in rule.rhs())): rule.prob()
        for rule in grammar.productions()
    }
    return grammar, table


def test_nltks_printed_grammar():
    theirs, table = induced()
    printed = str(theirs)
    assert printed.startswith("Grammar with ")
    names = {name for name, *_ in table}
    assert {"S|<VP-.>", "PRP$", ",", ".", "''", "``", "-LRB-", "#", "$", ":", "-NONE-", "PRN|<NP--RRB->"} <= names
    for text in (printed, printed.split("\n", 1)[1], "\n".join(map(str, theirs.productions()))):
        grammar = parse_grammar(text)
        ours = rules(grammar)
        assert ours.keys() == table.keys()
        assert all(ours[rule] == pytest.approx(table[rule], abs=1e-6) for rule in table)  # printed with six digits
    language = PCFG(grammar, max_length=20)
    words = nltk.Tree.fromstring(TREES[1]).leaves()
    ids = torch.tensor([[grammar.vocabulary.index(word) for word in words]])
    parses = list(nltk.InsideChartParser(theirs).parse(words))
    expected = math.fsum(tree.prob() for tree in parses)
    assert len(parses) >= 1
    log_prob = language.log_prob(ids, torch.tensor([len(words)])) + math.log(language._acceptance)
    assert float(log_prob) == pytest.approx(math.log(expected), abs=1e-5)
    again = parse_grammar(language.config.rules)
    assert again.symbols == grammar.symbols
    assert rules(again) == ours


def test_quotes_without_spaces():
    assert rules(parse_grammar("NP->'the'N[0.5]|N'!'[0.5]\nN->'dog'[1]")) == {
        ("NP", "T/the", "N"): 0.5,
        ("NP", "N", "T/_"): 0.5,
        ("N", "'dog'"): 1.0,
        ("T/the", "'the'"): 1.0,
        ("T/_", "'!'"): 1.0,
    }
    primes = read("N' -> D' N' # 0.5\nN' -> 's # 0.5\nD' -> 'twas # 1", "tokens: 's, 'twas")
    assert rules(primes) == {("N'", "D'", "N'"): 0.5, ("N'", "''s'"): 0.5, ("D'", "''twas'"): 1.0}
