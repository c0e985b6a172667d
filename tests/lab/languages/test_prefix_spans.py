"""What the beginning of a sentence says of a node, against sums over all sentences that begin so."""

import pytest
import torch

from isoloss.lab.languages.config import DyckConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.languages.pcfg import PCFG

SHAPE = {"levels": 2, "symbols_per_level": 2, "rules_per_symbol": 3, "vocab_size": 3}
LANGUAGES = {
    "one length": PCFGConfig(**SHAPE, seed=1).build(),
    "three levels": PCFGConfig(**{**SHAPE, "levels": 3, "vocab_size": 2}, seed=1).build(),
    "lengths": PCFGConfig(**SHAPE, stop_probability=0.3, seed=2).build(),
    "chains": PCFG.from_text("S A B 1\nA a 0.5\nA b 0.5\nB A 0.25\nB A C 0.75\nC A A 0.4\nC A 0.6"),
    "cut": PCFG.from_text("S -> S S [0.4] | A S [0.2] | 'a' [0.4]\nA -> 'a' [0.5] | 'b' [0.5]", max_length=6),
    "brackets": DyckConfig(kinds=2, max_depth=2, max_length=6, continue_probability=0.0).build(),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_posterior_is_the_sum_over_all_ends(name):
    language = LANGUAGES[name]
    every = list(range(len(language.symbols)))
    whole, probabilities = all_sentences(language)
    drawn = language.sample(8, generator=torch.Generator().manual_seed(0), latent=True)
    checked = 0
    for row, tokens in enumerate(drawn.tokens):
        for start, stop, symbol in drawn.latent[row].tolist():
            if start < 0:
                continue
            got = language.prefix_span_posterior(
                tokens[None], drawn.lengths[row : row + 1], symbols=every, start=start, stop=stop
            )[0]
            begins = (whole.lengths >= stop) & (whole.tokens[:, :stop] == tokens[:stop]).all(dim=1)
            parts = language.span_posterior(whole.tokens[begins], whole.lengths[begins], start=start, stop=stop)
            wanted = (probabilities[begins, None] * parts).sum(dim=0)
            torch.testing.assert_close(got, wanted / wanted.sum(), rtol=1e-9, atol=1e-12)
            assert got[symbol] > 0
            checked += 1
    assert checked > 20


def test_sentences_of_a_probability_below_the_smallest_number():
    rare = "C a 1e-120\nC b 1\nD a 1e-120\nD b 1\nE a 1e-110\nE b 1"
    language = PCFG.from_text(f"S A B 0.9\nS B A 0.1\nA C D 1\nB D C 0.5\nB E C 0.5\n{rare}")
    tokens = torch.full((1, 4), language.vocabulary.index("a"))
    symbols = [language.symbols.index(name) for name in "AB"]
    span = {"symbols": symbols, "start": 2, "stop": 4}
    found = language.prefix_span_posterior(tokens, torch.tensor([4]), **span)
    # both orders of A and B give the four tokens the same probability, and A comes first in 0.9 of all sentences
    torch.testing.assert_close(found, torch.tensor([[0.1, 0.9]], dtype=torch.float64))
