"""Derivations as text: `(SYMBOL child child)` or `(SYMBOL token)`."""

from __future__ import annotations

from collections.abc import Sequence

from isoloss.text.sentences import Sentences


def derivations(sentences: Sentences, symbols: Sequence[str], vocabulary: Sequence[str]) -> list[str]:
    """Return the derivation of each sentence of a grammar, drawn with its tree.

    Args:
        sentences: n sentences, whose latent is (n, M, 3) as `PCFG.sample` gives it.
        symbols: Names by id.
        vocabulary: Token strings by id.
    """
    rows = zip(sentences.latent.tolist(), sentences.tokens.tolist(), sentences.lengths.tolist(), strict=True)
    return [
        bracketed([node for node in nodes if node[0] >= 0], symbols, [vocabulary[token] for token in tokens[:length]])
        for nodes, tokens, length in rows
    ]


def bracketed(nodes: Sequence[Sequence[int]], symbols: Sequence[str], words: Sequence[str]) -> str:
    """Return a tree as nested brackets; a name with a bracket, a quote or a space in it stands in quotes.

    Args:
        nodes: Rows (start, stop, symbol id) of the nodes in preorder, each over the words start to stop - 1.
        symbols: Names by id.
        words: The sentence.

    Example:
        >>> bracketed([(0, 2, 0), (0, 1, 1), (1, 2, 1)], ("S", "A"), ("the", "end"))
        '(S (A the) (A end))'
    """
    text, open_until = "", list[int]()
    for index, (start, stop, symbol) in enumerate(nodes):
        while open_until and open_until[-1] <= start:
            text += ")"
            open_until.pop()
        text += f" ({_quoted(symbols[symbol])}"
        open_until.append(stop)
        if index + 1 == len(nodes) or nodes[index + 1][0] >= stop:
            text += f" {_quoted(words[start])}"
    return text.strip() + ")" * len(open_until)


def _quoted(name: str) -> str:
    return repr(name) if any(c in "()'\"" or c.isspace() for c in name) else name
