"""Exact inference and sampling of the languages against torch-struct, hmmlearn, dynamax and nltk, on one thread.

Every peer's numbers are compared with ours before anything is timed. All contenders of a task take turns in rounds, so
that what else the machine does meets all of them: the ratios within a round count, not the absolute figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One thread each, and one core for all: both before the libraries are loaded.
for _name in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from timing import OURS, Contender, Task, machine, measure, summary, table, versions  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.lab.languages.config import HMMConfig, PCFGConfig  # noqa: E402
from isoloss.lab.languages.hmm import HMM  # noqa: E402
from isoloss.lab.languages.pcfg import PCFG  # noqa: E402
from isoloss.seeds import generator  # noqa: E402

RESULTS = Path(__file__).parent / "results"
PEERS = {"torch_struct": "torch-struct", "hmmlearn": "hmmlearn", "dynamax": "dynamax", "nltk": "nltk"}
LIBRARIES = ("isoloss", "torch", "numpy", "numba", "torch-struct", "hmmlearn", "dynamax", "jax", "nltk")
GRAMMAR = PCFGConfig(levels=4, symbols_per_level=10, rules_per_symbol=14, vocab_size=200, stop_probability=0.1)
LOG_ZERO = -1e5  # what torch-struct takes for log 0: its gradient is NaN where a potential is -inf
AGREEMENT = 1e-5  # of log-probabilities and probabilities


class DisagreementError(Exception):
    """A peer's numbers are not ours."""


def agree(what: str, theirs: object, ours: object) -> None:
    """Raise DisagreementError unless two arrays are equal to 1e-5, absolutely or relatively."""
    left, right = np.asarray(theirs, dtype=np.float64), np.asarray(ours, dtype=np.float64)
    if left.shape != right.shape or not np.allclose(left, right, rtol=AGREEMENT, atol=AGREEMENT):
        worst = np.abs(left - right).max() if left.shape == right.shape else f"{left.shape} against {right.shape}"
        raise DisagreementError(f"{what} is not what isoloss computes: they differ by {worst}")
    print(f"agrees: {what}", flush=True)


def installed(module: str) -> bool:
    """Return whether a peer is installed, by its distribution."""
    try:
        importlib.metadata.version(PEERS[module])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- grammars --------------------------------------------------------------------------------------------------------


def grammar_tasks(chunk: int) -> Iterator[Task]:
    """Yield the tasks of a grammar of the paper's shape."""
    language = GRAMMAR.build().to(dtype=torch.float32)
    tokens, lengths, _ = language.sample(40 * chunk, generator=generator(0, "benchmark"))
    natural, natural_lengths = tokens[:chunk], lengths[:chunk]
    yield Task(
        "PCFG, natural lengths",
        [
            ours("all log-conditionals, float32", chunk, lambda: language.log_conditionals(natural, natural_lengths)),
            ours(
                "entropy of every conditional, float32",
                chunk,
                lambda: language.conditional_entropy(natural, natural_lengths),
            ),
            ours("next-token log-conditionals, float32", chunk, bind(language.log_next, natural, natural_lengths)),
            ours("log Z, float32", chunk, lambda: language.log_prob(natural, natural_lengths)),
            ours("all log-conditionals, float64", chunk, wide(language, "log_conditionals", natural, natural_lengths)),
        ],
    )
    yield Task("PCFG, sampling", [ours("sentences", 100_000, sampler(language, 100_000)), *plain_sampling(language)])
    for length in (8, 12, 16):
        rows = torch.nonzero(lengths == length)[:, 0][: chunk // 2]
        batch, same = tokens[rows, :length].contiguous(), lengths[rows]
        task = Task(
            f"PCFG, length {length}",
            [
                ours("all log-conditionals, float32", len(rows), bind(language.log_conditionals, batch, same)),
                ours("log Z, float32", len(rows), bind(language.log_prob, batch, same)),
                *grammar_floors(language, len(rows), length),
            ],
        )
        if installed("torch_struct"):
            task.contenders += torch_struct(language, batch[:2])
        else:
            task.missing.append("torch-struct")
        if not installed("nltk"):
            task.missing.append("nltk")
        elif length == 8:
            task.contenders.append(nltk_viterbi(language, batch[0]))
        yield task


def torch_struct(language: PCFG, batch: torch.Tensor) -> list[Contender]:
    """Return torch-struct's SentCFG: rules in one dense table a sentence, symbols that also emit present twice."""
    from torch_struct import SentCFG

    rules = language._rules
    emits = np.flatnonzero(rules.emission.sum(axis=1) > 0)
    expands = np.unique(rules.binary[:, 0])
    size, places = len(expands), len(expands) + len(emits)
    dense = torch.zeros(size, places, places, dtype=torch.float64)
    where = {symbol: [] for symbol in range(len(language.symbols))}
    for place, symbol in enumerate([*expands.tolist(), *emits.tolist()]):
        where[symbol].append(place)
    parents = {symbol: index for index, symbol in enumerate(expands.tolist())}
    for (a, b, c), p in zip(rules.binary.tolist(), rules.binary_probs.tolist(), strict=True):
        for left in where[b]:
            for right in where[c]:
                dense[parents[a], left, right] += p
    roots = torch.full((len(batch), size), LOG_ZERO)
    roots[:, parents[0]] = 0
    n, length = batch.shape
    terms = torch.as_tensor(rules.emission[emits]).log().clamp(min=LOG_ZERO).float().T[batch]
    tables = dense.log().clamp(min=LOG_ZERO).float().expand(n, -1, -1, -1).contiguous()
    same = torch.full((n,), length)

    def log_z(*, gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        leaves = terms.clone().requires_grad_()
        with torch.set_grad_enabled(gradient):
            z = SentCFG((leaves, tables.detach(), roots.clone()), lengths=same).partition
        return z.detach(), torch.autograd.grad(z.sum(), leaves)[0] if gradient else None

    z, gradient = log_z(gradient=True)
    assert gradient is not None
    log_accepted = float(np.log(language._acceptance))
    agree(f"torch-struct's log Z at length {length}", z - log_accepted, language.log_prob(batch, same))
    # the gradient of log Z by a leaf is the posterior of the symbol there: it is what ours gives for spans of one token
    posterior = language.span_posterior(batch, same, start=1, stop=2)[:, torch.as_tensor(emits)]
    agree(f"torch-struct's posteriors at length {length}", gradient[:, 1], posterior)
    return [
        Contender("torch-struct", "log Z, float32", n, log_z),
        Contender("torch-struct", "log Z and its gradient, float32", n, lambda: log_z(gradient=True)),
    ]


def nltk_viterbi(language: PCFG, tokens: torch.Tensor) -> Contender:
    """Return nltk's search for the one best tree: it has no sum over trees that ends within a minute."""
    import nltk

    parser = nltk.ViterbiParser(nltk.PCFG.fromstring(language.to_text("nltk")), max_time=None)  # 5 s by default
    words = [language.vocabulary[token] for token in tokens.tolist()]
    best = max(tree.logprob() for tree in parser.parse(words)) * float(np.log(2))
    total = float(language.log_prob(tokens[None], torch.tensor([len(words)]))) + float(np.log(language._acceptance))
    if not best <= total + AGREEMENT:
        raise DisagreementError(f"nltk's best tree has log-probability {best}, more than the {total} of all trees")
    print("agrees: nltk's best tree is no more probable than all trees together", flush=True)
    return Contender("nltk", "the one best tree", 1, lambda: list(parser.parse(words)))


def plain_sampling(language: PCFG) -> list[Contender]:
    """Return the loop over `random.choices` that most research code samples with."""
    import random

    grammar = language.grammar
    rules: dict[int, list[tuple[tuple[int, ...], float]]] = {a: [] for a in range(len(grammar.symbols))}
    for (a, b, c), p in zip(grammar.binary.tolist(), grammar.binary_probs.tolist(), strict=True):
        rules[a].append(((b, c), p))
    for (a, b), p in zip(grammar.unary.tolist(), grammar.unary_probs.tolist(), strict=True):
        rules[a].append(((b,), p))
    for (a, token), p in zip(grammar.emission.tolist(), grammar.emission_probs.tolist(), strict=True):
        rules[a].append(((~token,), p))
    choices = {a: tuple(zip(*found, strict=True)) for a, found in rules.items() if found}
    draw = random.Random(0)

    def run() -> None:
        for _ in range(500):
            sentence, stack = [], [0]
            while stack:
                if (symbol := stack.pop()) < 0:
                    sentence.append(~symbol)
                else:
                    stack.extend(reversed(draw.choices(*choices[symbol])[0]))

    return [Contender("python loop", "sentences", 500, run)]


def grammar_floors(language: PCFG, n: int, length: int) -> list[Contender]:
    """Return the two parts of the log-conditionals that no algorithm avoids."""
    size = language._emission.shape[0]
    scores, out = torch.rand(n * length, size), torch.empty(n * length, language.vocab_size)
    return [
        log_floor(n, length, language.vocab_size),
        Contender("floor", "the emission product alone", n, lambda: torch.mm(scores, language._emission, out=out)),
    ]


def log_floor(n: int, length: int, vocab_size: int) -> Contender:
    """Return the writing of the result, which takes its log on the way."""
    values = np.full((n * length, vocab_size), 0.5, dtype=np.float32)
    return Contender("floor", "log of (n, T, V) float32, written to fresh memory", n, lambda: np.log(values))


# --- hidden Markov models --------------------------------------------------------------------------------------------


def hmm_tasks(chunk: int) -> Iterator[Task]:
    """Yield the tasks of the paper's HMM, 100 states in 4 blocks, and of one that no block structure helps."""
    for about, config in (("closed blocks", HMMConfig()), ("mixing weight 0.1, dense", HMMConfig(mixing_weight=0.1))):
        wide_hmm = config.build()
        drawn, all_lengths, _ = wide_hmm.sample(chunk, generator=generator(0, "benchmark"))
        if about == "closed blocks":
            yield Task(
                "HMM, sampling", [ours("sentences", 100_000, sampler(wide_hmm, 100_000)), *hmmlearn_sampling(wide_hmm)]
            )
        for name, n in (("float32", chunk), ("float64", chunk // 2)):  # results of as many bytes
            language, tokens, lengths = wide_hmm.to(dtype=getattr(torch, name)), drawn[:n], all_lengths[:n]
            task = Task(
                f"HMM, {about}, {name}",
                [
                    ours("all log-conditionals", n, bind(language.log_conditionals, tokens, lengths)),
                    ours("next-token log-conditionals", n, bind(language.log_next, tokens, lengths)),
                    ours("log-probability", n, bind(language.log_prob, tokens, lengths)),
                    ours("posteriors", n, bind(language.posterior, tokens, lengths)),
                ],
            )
            if name == "float32":
                task.contenders.append(log_floor(n, tokens.shape[1], language.vocab_size))
            for module, peer in (("dynamax", dynamax), ("hmmlearn", hmmlearn)):
                if not installed(module):
                    task.missing.append(module)
                elif module == "dynamax" or name == "float64":  # hmmlearn has float64 only
                    task.contenders += peer(language, tokens, lengths)
            yield task


def hmmlearn_model(language: HMM) -> Any:
    """Return the model as hmmlearn's, in the faster of its two implementations."""
    from hmmlearn.hmm import CategoricalHMM

    model = CategoricalHMM(n_components=len(language.states), implementation="scaling")
    model.n_features = language.vocab_size
    model.startprob_, model.transmat_, model.emissionprob_ = language.initial, language.transition, language.emission
    return model


def hmmlearn(language: HMM, tokens: torch.Tensor, lengths: torch.Tensor) -> list[Contender]:
    """Return hmmlearn's smoothed posteriors, in its faster implementation: it has no conditionals of the tokens."""
    n = 1000
    model, sequence, sizes = hmmlearn_model(language), tokens[:n].reshape(-1, 1).numpy(), lengths[:n].tolist()
    total, posteriors = model.score_samples(sequence, sizes)
    agree("hmmlearn's log-probability", total / n, language.log_prob(tokens[:n], lengths[:n]).mean())
    agree(
        "hmmlearn's posteriors",
        posteriors.reshape(n, -1, len(language.states)),
        language.posterior(tokens[:n], lengths[:n]),
    )
    return [Contender("hmmlearn", "posteriors and log-probability", n, lambda: model.score_samples(sequence, sizes))]


def hmmlearn_sampling(language: HMM) -> list[Contender]:
    """Return hmmlearn's sampling: one sequence a call, here as long as 100 sentences."""
    if not installed("hmmlearn"):
        return []
    model = hmmlearn_model(language)
    return [
        Contender(
            "hmmlearn", "one long sentence of 1,600 tokens, as 100", 100, lambda: model.sample(1600, random_state=0)
        )
    ]


def dynamax(language: HMM, tokens: torch.Tensor, lengths: torch.Tensor) -> list[Contender]:
    """Return dynamax, compiled for a batch: conditionals put together from its two filters, and its smoother.

    A batch of 128 sentences is the fastest for it; its results are let go a batch at a time, ours are one array.
    """
    import jax

    # with 64 bits enabled it computes in float64 whatever it is given; a task is timed before the next one is made
    jax.config.update("jax_enable_x64", language.dtype == torch.float64)
    import jax.numpy as jnp
    from dynamax.hidden_markov_model import hmm_filter, hmm_smoother
    from dynamax.hidden_markov_model.inference import hmm_backward_filter

    dtype = jnp.float32 if language.dtype == torch.float32 else jnp.float64
    tiny = np.finfo(dtype).tiny
    initial, transition, emission = (
        jnp.asarray(table, dtype) for table in (language.initial, language.transition, language.emission)
    )
    logs = jnp.log(jnp.maximum(emission.T, tiny))

    def conditionals(ids: Any) -> Any:
        likelihoods = logs[ids]
        forward = hmm_filter(initial, transition, likelihoods).predicted_probs
        states = forward * hmm_backward_filter(transition, likelihoods)[1]
        return jnp.log(jnp.maximum(states / states.sum(axis=1, keepdims=True) @ emission, tiny))

    def next_tokens(ids: Any) -> Any:
        states = hmm_filter(initial, transition, logs[ids]).predicted_probs
        return jnp.log(jnp.maximum(states @ emission, tiny))

    def smoother(ids: Any) -> Any:
        return hmm_smoother(initial, transition, logs[ids]).smoothed_probs

    def log_prob(ids: Any) -> Any:
        return hmm_filter(initial, transition, logs[ids]).marginal_loglik

    batches = [jnp.asarray(tokens[first : first + 128].numpy()) for first in range(0, len(tokens) - 127, 128)]
    some, same = tokens[:128], lengths[:128]
    contenders = []
    for computes, function, expected in (
        ("all log-conditionals", conditionals, language.log_conditionals(some, same)),
        ("next-token log-conditionals", next_tokens, language.log_next(some, same)),
        ("posteriors", smoother, language.posterior(some, same)),
        ("log-probability", log_prob, language.log_prob(some, same)),
    ):
        compiled = jax.jit(jax.vmap(function))
        found, numbers = np.asarray(compiled(batches[0])), expected.numpy()
        if found.dtype != numbers.dtype:
            raise DisagreementError(f"dynamax computes in {found.dtype} where {numbers.dtype} is asked for")
        if computes.endswith("log-conditionals"):  # 0 is not the same small number in both
            found, numbers = np.exp(found), np.exp(numbers)
        agree(f"dynamax's {computes} in {language.dtype}", found, numbers)
        contenders.append(Contender("dynamax", computes, 128 * len(batches), all_of(compiled, batches)))
    return contenders


def all_of(compiled: Callable[[Any], Any], batches: list[Any]) -> Callable[[], None]:
    """Return the work of all batches, one after another."""

    def run() -> None:
        for batch in batches:
            compiled(batch).block_until_ready()

    return run


def ours(computes: str, sentences: int, run: Callable[[], object]) -> Contender:
    """Return isoloss as a contender."""
    return Contender(OURS, computes, sentences, run)


def bind(method: Callable[..., object], *arguments: torch.Tensor) -> Callable[[], object]:
    """Return the call of a method."""
    return lambda: method(*arguments)


def wide(language: PCFG, method: str, *arguments: torch.Tensor) -> Callable[[], object]:
    """Return the call of a method in float64."""
    return bind(getattr(language.to(dtype=torch.float64), method), *arguments)


def sampler(language: PCFG | HMM, n: int) -> Callable[[], object]:
    """Return the drawing of n sentences."""
    draws = generator(1, "benchmark")
    return lambda: language.sample(n, generator=draws)


def main() -> None:
    """Check, time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=0.5, help="processor time of each turn, at least one call")
    parser.add_argument(
        "--chunk", type=int, default=4096, help="sentences of a call; of the HMM in float64 half as many"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "languages.json", help="and the table next to it, .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    for module, name in PEERS.items():
        if not installed(module):
            print(
                f"{name} is not installed: pip install -r benchmarks/requirements-languages.txt brings it", flush=True
            )
    results: list[dict[str, object]] = []
    try:
        for task in itertools.chain(grammar_tasks(options.chunk), hmm_tasks(options.chunk)):
            print(f"timing: {task.title}", flush=True)
            measure(task, options.rounds, options.seconds)
            results += summary(task)
    except DisagreementError as error:
        sys.exit(f"nothing is reported: {error}")
    record = {
        "command": " ".join(["python", "benchmarks/languages.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": load,
        "versions": versions(LIBRARIES),
        "results": results,
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    page = table(record)
    write_text(options.output.with_suffix(".md"), page)
    print(page)


if __name__ == "__main__":
    main()
