"""Programs for tests of the minimal trace: exponents of rescalings as transformers have them, and random ones."""

import numpy as np
import scipy.sparse


def program_of(parts, *, seed=0, spread=1.0):
    """Shares and the arguments of `minimize` for parts given as {generator: exponent}, generators in order of use.

    All numbers that a model would decide are random: shares, log RMS, sizes.
    """
    names = list(dict.fromkeys(name for part in parts for name in part))
    entries = [(row, names.index(name), value) for row, part in enumerate(parts) for name, value in part.items()]
    rows, columns, values = np.array(entries).T if entries else np.zeros((3, 0), dtype=int)
    exponents = scipy.sparse.csr_array((values.astype(float), (rows, columns)), shape=(len(parts), len(names)))
    rng = np.random.default_rng(seed)
    shares = np.exp(spread * rng.normal(size=len(parts)))
    return (
        shares,
        {
            "exponents": exponents,
            "log_rms": rng.normal(size=len(parts)) - 2,
            "sizes": rng.integers(1, 1000, size=len(parts)),
            "writers": writers_of(exponents),
        },
        names,
    )


def writers_of(exponents):
    """For each generator the parts whose exponent is 1."""
    columns = scipy.sparse.csc_array(exponents)
    ends = zip(columns.indptr[:-1], columns.indptr[1:], strict=True)
    return [columns.indices[first:end][columns.data[first:end] == 1] for first, end in ends]


def pre_norm(layers, neurons=1, *, tied=False):
    """The parts of a pre-layer-norm transformer: residual stream, norms, queries, values, neurons (ReLU), decoder."""
    parts = [{"stream": 1}]
    for i in range(layers):
        parts += [{f"norm {i}": 1}, {f"norm {i}": -1, f"query {i}": 1}, {f"norm {i}": -1, f"query {i}": -1}]
        parts += [{f"norm {i}": -1, f"value {i}": 1}, {f"value {i}": -1, "stream": 1}, {f"second norm {i}": 1}]
        for j in range(neurons):
            parts += [{f"second norm {i}": -1, f"neuron {i}.{j}": 1}, {"stream": 1, f"neuron {i}.{j}": -1}]
    # a decoder that is the embedding grows with the stream, and the last norm must shrink
    return [*parts, {"stream": -1}] if tied else [*parts, {"last norm": 1}, {"last norm": -1}]


def rescaled(shares, program, z):
    """The shares and the arguments after a rescaling by z."""
    logs = program["exponents"] @ z
    return shares * np.exp(-2 * logs), {**program, "log_rms": program["log_rms"] + logs}


def coupled(generators, parts, seed=0):
    """A closed chain of parts, which has a minimum, and parts that are each acted on by two generators."""
    rng = np.random.default_rng(seed)
    exponents = np.zeros((parts, generators), dtype=int)
    exponents[: generators + 1] = np.eye(generators + 1, generators) - np.eye(generators + 1, generators, k=-1)
    for part in range(generators + 1, parts):
        exponents[part, rng.choice(generators, 2, replace=False)] = rng.choice([-1, 1], 2)
    program = {"log_rms": rng.normal(size=parts), "sizes": rng.integers(1, 100, parts)}
    return np.exp(0.3 * rng.normal(size=parts)), {"exponents": exponents, **program, "writers": writers_of(exponents)}


class Clusters:
    """Lognormal squared norms of clusters, correlated between parts: shares of the trace whose truth is known."""

    def __init__(self, shares, *, own, group=0.1, common=0.05):
        self.shares = shares
        same = np.arange(len(shares)) % 10
        self.covariance_of_logs = common**2 + group**2 * (same[:, None] == same) + own**2 * np.eye(len(shares))
        self.scales = np.sqrt([common**2, group**2, own**2])
        self.groups = same

    @property
    def covariance(self):
        """(K, K), of one cluster's."""
        return np.outer(self.shares, self.shares) * np.expm1(self.covariance_of_logs)

    def draw(self, rng, number):
        common, group, own = self.scales
        logs = common * rng.normal(size=(number, 1)) + group * rng.normal(size=(number, 10))[:, self.groups]
        logs += own * rng.normal(size=(number, len(self.shares))) - np.sum(self.scales**2) / 2
        return self.shares * np.exp(logs)
