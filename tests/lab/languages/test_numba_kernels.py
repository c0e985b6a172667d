"""The compiled kernels against the torch engine, bit for bit against themselves, and where nothing can be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_grammar import random_rules

import isoloss
from isoloss.lab.languages._pcfg.charts import FoldedRules
from isoloss.lab.languages._pcfg.grammar import parse_grammar, random_grammar
from isoloss.lab.languages._pcfg.inside_outside import InsideOutside
from isoloss.lab.languages.batches import choose_backend, describe_backend
from isoloss.lab.languages.config import PCFGConfig

CPU = torch.device("cpu")
LEVELLED = PCFGConfig(levels=3, symbols_per_level=5, rules_per_symbol=6, vocab_size=20, stop_probability=0.2)


def sentences(exact, vocab_size, length, n, seed=0, hidden=0.2):
    """Random tokens, some unknown, possible and not."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (n, length), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < hidden] = exact.unknown
    return tokens


def both(grammar, max_length, dtype=torch.float64):
    rules = FoldedRules(grammar, max_length)
    return [InsideOutside(rules, CPU, dtype, backend) for backend in ("numba", "torch")]


@given(seed=st.integers(0, 10_000), recursive=st.booleans(), length=st.integers(1, 7), n=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_the_two_back_ends_agree(seed, recursive, length, n):
    grammar = parse_grammar(random_rules(seed, symbols=5, recursive=recursive))
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        numba, torch_ = both(grammar, 7, dtype)
        tokens = sentences(numba, len(grammar.vocabulary), length, n, seed)
        (found, log_z), (scores, truth) = numba.leaf_outside(tokens), torch_.leaf_outside(tokens)
        assert found.dtype == dtype
        assert torch.equal(truth.isneginf(), log_z.isneginf())
        possible = ~truth.isneginf()
        assert torch.allclose(log_z[possible], truth[possible], rtol=tolerance, atol=tolerance)
        assert torch.allclose(found[possible], scores[possible], rtol=tolerance, atol=0)
        assert torch.allclose(numba.log_partition(tokens)[possible], truth[possible], rtol=tolerance, atol=tolerance)


@given(seed=st.integers(0, 10_000), recursive=st.booleans(), length=st.integers(1, 7), n=st.integers(1, 300))
@settings(max_examples=20, deadline=None)
def test_the_two_back_ends_agree_on_spans(seed, recursive, length, n):
    grammar = parse_grammar(random_rules(seed, symbols=5, recursive=recursive))
    start = seed % length
    stop = start + 1 + seed // 7 % (length - start)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 4e-6)):
        engines = both(grammar, 7, dtype)
        tokens = sentences(engines[0], len(grammar.vocabulary), length, n, seed)
        (found, log_z), (expected, truth) = (engine.span_posterior(tokens, start, stop) for engine in engines)
        assert found.dtype == dtype
        assert torch.allclose(log_z, truth, rtol=tolerance, atol=tolerance)
        possible = ~truth.isneginf()
        assert torch.allclose(found[possible], expected[possible], rtol=tolerance, atol=1e-30)
        (found, log_z), (expected, truth) = (engine.inside(tokens) for engine in engines)
        assert torch.allclose(log_z, truth, rtol=1e-13, atol=1e-13)
        assert torch.allclose(found[~truth.isneginf()], expected[~truth.isneginf()], rtol=1e-13, atol=1e-13)


def test_every_plan_shape_of_sparse_lengths():
    """Starts in steps of two and more: sentences of odd length only, of 1 + 3k tokens, and of a tree's levels."""
    texts = (
        "S S T 0.6\nS a 1\nS b 1\nT S S 0.5\nT b b 1\nT a b 1",
        "S A T 1\nT A U 1\nU A S 1\nS a 1\nA a 1\nA b 2",
    )
    for grammar in (*map(parse_grammar, texts), random_grammar(LEVELLED)):
        numba, torch_ = both(grammar, 13)
        for length in range(1, 14):
            tokens = sentences(numba, len(grammar.vocabulary), length, 140, length)
            (found, log_z), (scores, truth) = numba.leaf_outside(tokens), torch_.leaf_outside(tokens)
            possible = ~truth.isneginf()
            assert torch.allclose(log_z, truth, rtol=1e-12, atol=1e-12)
            assert torch.allclose(found[possible], scores[possible], rtol=1e-12, atol=0)
            for start, stop in ((0, length), (0, 1), (length // 2, length)):
                found, scores = (engine.span_posterior(tokens, start, stop)[0] for engine in (numba, torch_))
                assert torch.allclose(found[possible], scores[possible], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_sentence_depends_on_its_neighbors(dtype):
    exact = both(random_grammar(LEVELLED), 8, dtype)[0]
    tokens = sentences(exact, 20, 8, 1500, hidden=0.6)
    tokens = tokens[~exact.log_partition(tokens).isneginf()]
    assert len(tokens) > 300
    scores, log_z = exact.leaf_outside(tokens)
    for rows in (slice(0, 1), slice(3, 130), slice(127, 257), slice(299, 300)):
        part, part_z = exact.leaf_outside(tokens[rows])
        assert torch.equal(part, scores[rows])
        assert torch.equal(part_z, log_z[rows])
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    assert torch.equal(exact.leaf_outside(tokens[order])[0], scores[order])


def test_the_back_end_follows_the_device(monkeypatch):
    assert choose_backend(CPU) == "numba"
    assert choose_backend(torch.device("cuda")) == choose_backend(torch.device("mps")) == "torch"
    assert "numba" in describe_backend(CPU)
    monkeypatch.setitem(sys.modules, "numba", None)  # an import of it fails
    assert choose_backend(CPU) == "torch"
    assert "numba" not in describe_backend(CPU)
    exact = InsideOutside(FoldedRules(random_grammar(LEVELLED), 8), CPU, torch.float64)
    assert exact.backend == "torch"


PROBE = """
import torch
from isoloss.lab.languages.pcfg import PCFG
language = PCFG.from_text("S -> 'a' [0.25] | 'b' [0.75]")
found = language.log_conditionals(torch.tensor([[1]]), torch.tensor([1])).exp()
assert torch.allclose(found, torch.tensor([0.25, 0.75]).double()), found
from isoloss.lab.languages._pcfg import kernels
print(kernels.fill_inside.stats.cache_path)
"""


@pytest.mark.slow
def test_an_installation_that_cannot_be_written(tmp_path):
    """No folder for compiled code: the kernels are compiled for the process, without a warning."""
    import shutil

    package = tmp_path / "isoloss"
    shutil.copytree(Path(isoloss.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "lab" / "languages" / "_pcfg" / "__pycache__").write_text("a file where the folder would be")
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    environment |= {"HOME": str(nowhere), "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
