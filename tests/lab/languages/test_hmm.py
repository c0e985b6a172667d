"""Hidden Markov models against the sum over all state sequences, against autograd, and against their own samples."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from isoloss import config as configs
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.config import HMMConfig
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.serialization import FileConfig
from isoloss.seeds import generator


def sparse(seed: int, size: int = 4, tokens: int = 5, length: int = 4) -> HMM:
    """An HMM with many zeros, impossible sentences and, among others, a state that cannot come first."""
    rng = np.random.default_rng(seed)

    def table(rows, columns):
        found = rng.dirichlet(np.ones(columns), size=rows) * (rng.random((rows, columns)) < 0.6)
        found[:, rng.integers(columns)] += 0.1
        return found / found.sum(axis=1, keepdims=True)

    return HMM(table(1, size)[0], table(size, size), table(size, tokens), length)


def scattered() -> HMM:
    """Two parts whose states and tokens are not consecutive, with a token in common and one that nothing emits."""
    transition = np.zeros((5, 5))
    transition[np.ix_([0, 2, 4], [0, 2, 4])] = [[0.2, 0.3, 0.5], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]
    transition[np.ix_([1, 3], [1, 3])] = [[0.5, 0.5], [0.1, 0.9]]
    emission = np.zeros((5, 6))
    emission[np.ix_([0, 2, 4], [0, 3, 5])] = [[0.2, 0.3, 0.5], [0.7, 0.3, 0.0], [0.1, 0.1, 0.8]]
    emission[np.ix_([1, 3], [1, 3])] = [[0.4, 0.6], [0.9, 0.1]]
    return HMM([0.1, 0.2, 0.3, 0.4, 0.0], transition, emission, 4)


def unreachable() -> HMM:
    """A part that no sentence starts in."""
    return HMM([1.0, 0.0], np.eye(2), [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], 3)


LANGUAGES = {
    "dense": HMMConfig(states=3, blocks=1, vocab_size=4, length=4, seed=1).build(),
    "blocks": HMMConfig(states=5, blocks=3, vocab_size=6, length=4).build(),
    "mixing_weight": HMMConfig(states=4, blocks=2, vocab_size=5, length=4, mixing_weight=0.2).build(),
    "sparse": sparse(0),
    "sparser": sparse(3, tokens=3),
    "scattered": scattered(),
    "unreachable": unreachable(),
}


def joint(language: HMM, length: int) -> np.ndarray:
    """Return Pr(states, tokens) over all state and token sequences of one length, axes z_1..z_T x_1..x_T."""
    size, vocab = language.emission.shape
    out = np.zeros([size] * length + [vocab] * length)
    for states in itertools.product(range(size), repeat=length):
        p = language.initial[states[0]]
        for a, b in itertools.pairwise(states):
            p *= language.transition[a, b]
        tokens = np.array(p)
        for state in states:
            tokens = np.multiply.outer(tokens, language.emission[state])
        out[states] = tokens
    return out


def truth(p: np.ndarray, tokens: list[int], known: list[bool]) -> tuple[float, np.ndarray, np.ndarray]:
    """Return Pr(known tokens), all conditionals (T, V) and all state posteriors (T, S) by summing the joint."""
    length = len(tokens)
    conditionals, posteriors = [], []
    for t in range(length):
        others = [slice(token) if not seen else token for token, seen in zip(tokens, known, strict=True)]
        index = [slice(None) if s == t or not known[s] else others[s] for s in range(length)]
        rest = p.sum(axis=tuple(range(length)))[tuple(index)]
        axis = sum(1 for s in range(t) if s == t or not known[s])
        kept = rest.sum(axis=tuple(a for a in range(rest.ndim) if a != axis))
        conditionals.append(kept / kept.sum())
        seen = tuple([slice(None)] * length + [tokens[s] if known[s] else slice(None) for s in range(length)])
        states = p[seen].reshape(*p.shape[:length], -1).sum(axis=-1)
        kept = states.sum(axis=tuple(s for s in range(length) if s != t))
        posteriors.append(kept / kept.sum())
    return float(states.sum()), np.array(conditionals), np.array(posteriors)


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("masked", [False, True])
def test_everything_against_enumeration(name, masked):
    """All sentences of some lengths together, padded with nonsense, under random masks."""
    language = LANGUAGES[name]
    rng = np.random.default_rng(5)
    rows = []
    for length in range(1, language.max_length + 1):
        p = joint(language, length)
        possible = np.argwhere(p.sum(axis=tuple(range(length))) > 0)
        for tokens in possible[rng.permutation(len(possible))[:40]].tolist():
            known = [True] * length if not masked else (rng.random(length) < 0.6).tolist()
            rows.append((tokens, known, *truth(p, tokens, known)))
    assert len(rows) >= 14
    rows = [rows[index] for index in rng.permutation(len(rows))]
    width = 5
    lengths = torch.tensor([len(row[0]) for row in rows])
    tokens = torch.full((len(rows), width), -7)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (sentence, known, *_) in enumerate(rows):
        tokens[index, : len(sentence)] = torch.tensor([x if k else 99 for x, k in zip(sentence, known, strict=True)])
        mask[index, : len(sentence)] = ~torch.tensor(known)
    assert bool(mask.any()) == masked
    options = {"mask": mask} if masked else {}
    log_prob = language.log_prob(tokens, lengths, **options)
    logs = language.log_conditionals(tokens, lengths, **options)
    entropy = language.conditional_entropy(tokens, lengths, **options)
    posterior = language.posterior(tokens, lengths, **options)
    assert logs.shape == (len(rows), width, language.vocab_size)
    floor = math.log(torch.finfo(torch.float64).tiny)
    for index, (sentence, _, p, conditionals, states) in enumerate(rows):
        length = len(sentence)
        assert math.isclose(log_prob[index].exp(), p, rel_tol=1e-10)
        expected = np.log(conditionals, where=conditionals > 0, out=np.full_like(conditionals, floor))
        np.testing.assert_allclose(logs[index, :length], expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(entropy[index, :length], -(conditionals * expected).sum(1), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(posterior[index, :length], states, rtol=1e-10, atol=1e-15)
        for padded in (logs, entropy, posterior):
            assert (padded[index, length:] == 0).all()
    for values in (log_prob, entropy):
        assert not (torch.signbit(values) & (values == 0)).any()


@pytest.mark.parametrize("name", ["dense", "blocks", "mixing_weight", "scattered"])
def test_probabilities_of_all_sentences_add_up_to_one(name):
    language = LANGUAGES[name]
    for length in (1, 3):
        p = joint(language, length).sum(axis=tuple(range(length)))
        tokens = torch.from_numpy(np.argwhere(p > 0))
        probs = language.log_prob(tokens, torch.full((len(tokens),), length)).exp()
        assert math.isclose(probs.sum(), 1, rel_tol=1e-12)


def test_conditionals_are_the_gradient_of_log_z():
    """d log Z / d log e_t(z), the emission factors free at each position, is the state's posterior."""
    language = HMMConfig(states=12, blocks=1, vocab_size=9, length=7, seed=3).build()
    tokens, lengths, _ = language.sample(20, generator=generator(0, "x"))
    transition, emission = torch.tensor(language.transition), torch.tensor(language.emission)
    factors = emission.T[tokens].clone().requires_grad_()
    alpha = torch.tensor(language.initial) * factors[:, 0]
    for t in range(1, 7):
        alpha = (alpha @ transition) * factors[:, t]
    z = alpha.sum(dim=1)
    torch.testing.assert_close(language.log_prob(tokens, lengths), z.detach().log(), rtol=1e-12, atol=0)
    (outside,) = torch.autograd.grad(z.sum(), factors)  # Pr(z_t, all other tokens)
    found = language.posterior(tokens, lengths)
    torch.testing.assert_close(found, (outside * factors / z[:, None, None]).detach(), rtol=1e-10, atol=1e-15)
    conditionals = outside @ emission
    conditionals /= conditionals.sum(dim=2, keepdim=True)
    torch.testing.assert_close(language.log_conditionals(tokens, lengths).exp(), conditionals, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(("length", "mixing_weight"), [(1, 0.0), (64, 0.0), (16, 0.1)])
def test_float32(length, mixing_weight):
    language = HMMConfig(states=40, blocks=4, vocab_size=80, length=length, mixing_weight=mixing_weight, seed=2).build()
    single = language.to(dtype=torch.float32)
    tokens, lengths, _ = language.sample(200, generator=generator(0, "float32"))
    for method in ("log_prob", "log_conditionals", "conditional_entropy", "posterior"):
        wide, narrow = (getattr(version, method)(tokens, lengths) for version in (language, single))
        assert narrow.dtype == torch.float32
        assert narrow.isfinite().all()
        if method == "log_conditionals":
            wide, narrow = wide.exp(), narrow.double().exp()
        else:
            narrow = narrow.double()
        large = wide.abs() > 1e-30
        assert ((narrow - wide).abs()[large] <= 2e-6 * wide.abs()[large]).all()
        assert (narrow[~large] <= 1e-30).all()


def test_what_float32_cannot_hold_is_computed_in_float64():
    """The sentence says state 1, the past says state 0, and between them stand factors of 1e-30."""
    e = 1e-30
    transition = [[1 - e, e, 0], [0, 1 - e, e], [0, 0, 1]]
    emission = [[0.5, 0.5 - e, e, 0], [0, 0.5, 0.5, 0], [0, 0, 0.25, 0.75]]
    language = HMM([1.0, 0, 0], transition, emission, 6)
    tokens = torch.tensor([[0, 0, 2, 2, 3, 3], [0, 0, 1, 1, 0, 1], [0, 3, 3, 2, 2, 2]])[:2]
    lengths = torch.tensor([6, 6])
    p = joint(language, 6)
    for index, sentence in enumerate(tokens.tolist()):
        expected, conditionals, posterior = truth(p, sentence, [True] * 6)
        for version in (language, language.to(dtype=torch.float32)):
            tolerance = 1e-10 if version.dtype == torch.float64 else 2e-6
            assert math.isclose(version.log_prob(tokens, lengths)[index], math.log(expected), rel_tol=tolerance)
            found = version.log_conditionals(tokens, lengths)[index].exp()
            np.testing.assert_allclose(found, conditionals, rtol=tolerance, atol=1e-37)
            found = version.posterior(tokens, lengths)[index]
            np.testing.assert_allclose(found, posterior, rtol=tolerance, atol=1e-37)


def test_a_posterior_that_float32_cannot_hold():
    """Each state explains the token with probability 1e-43 or so; a third, which cannot be, would emit it."""
    emission = [[1, 1e-43], [1, 3e-23], [0, 1]]
    language = HMM([1, 1e-20, 0], [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]], emission, 2)
    tokens, lengths = torch.tensor([[0], [1]]), torch.tensor([1, 1])
    for version in (language, language.to(dtype=torch.float32)):
        found = version.posterior(tokens, lengths)[:, 0]
        np.testing.assert_allclose(found, [[1, 1e-20, 0], [0.25, 0.75, 0]], rtol=2e-6)


def test_rows_do_not_depend_on_their_neighbors():
    for language in (HMMConfig().build(), HMMConfig(mixing_weight=0.1).build().to(dtype=torch.float32)):
        tokens, lengths, _ = language.sample(600, generator=generator(0, "rows"))
        lengths = torch.randint(1, 17, (600,), generator=generator(0, "lengths"))
        together = language.log_conditionals(tokens, lengths)
        for row in (0, 7, 599):
            alone = language.log_conditionals(tokens[row : row + 1], lengths[row : row + 1])
            assert torch.allclose(together[row], alone[0], rtol=1e-6, atol=1e-6)
        entropy = language.conditional_entropy(tokens, lengths)
        assert torch.allclose(entropy, -(together * together.exp()).sum(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mixing_weight", torch.float64), ("scattered", torch.float64), ("paper", torch.float32)]
)
def test_positions_are_rows_of_the_conditionals(name, dtype):
    language = (HMMConfig().build() if name == "paper" else LANGUAGES[name]).to(dtype=dtype)
    n = 1500  # more than a chunk of the paper's model
    tokens, lengths, _ = language.sample(n, generator=generator(0, "some"))
    lengths = (torch.rand(n, generator=generator(0, "lengths")) * language.max_length).long() + 1
    draws = torch.rand(tokens.shape, generator=generator(0, "mask"))
    rows, close = (
        torch.arange(n),
        {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12},
    )
    for mask in (None, draws < 0.3):
        everywhere = language.log_conditionals(tokens, lengths, mask=mask)
        entropy = language.conditional_entropy(tokens, lengths, mask=mask)
        several = (torch.rand(n, 3, generator=generator(1, "positions")) * lengths[:, None]).long()
        for positions, index in ((several, (rows[:, None], several)), (several[:, 1], (rows, several[:, 1]))):
            found = language.log_conditionals(tokens, lengths, mask=mask, positions=positions)
            assert found.shape == (*positions.shape, language.vocab_size)
            torch.testing.assert_close(found, everywhere[index], **close)
            found = language.conditional_entropy(tokens, lengths, mask=mask, positions=positions)
            assert found.shape == positions.shape
            torch.testing.assert_close(found, entropy[index], **close)
    assert language.log_conditionals(tokens, lengths, positions=several[:, :0]).shape == (n, 0, language.vocab_size)
    assert language.conditional_entropy(tokens, lengths, positions=several[:, :0]).shape == (n, 0)


def test_closed_parts_are_found_and_used():
    language = HMMConfig(states=12, blocks=3, vocab_size=12, length=6).build()
    assert [(part.states, part.tokens) for part in language._engine.parts] == [
        (slice(4 * k, 4 * k + 4), slice(4 * k, 4 * k + 4)) for k in range(3)
    ]
    assert not HMMConfig(states=12, blocks=3, vocab_size=12, mixing_weight=0.1).build()._engine.parts
    tokens, _, _ = language.sample(50, generator=generator(0, "parts"))
    assert all(model is not language._engine.whole for _, model in language._engine.assign(tokens, spare=1))
    # the other tokens of a sentence of one leave every part open
    assert [model for _, model in language._engine.assign(tokens[:, :1], spare=1)] == [language._engine.whole]


# --- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks", "sparse", "scattered"])
def test_draws_follow_the_exact_distribution(name):
    language, n = LANGUAGES[name], 100_000
    tokens, lengths, states = language.sample(n, generator=generator(1, "draws"), latent=True)
    assert set(lengths.tolist()) == {4}
    expected = n * joint(language, 4).sum(axis=(0, 1, 2, 3)).ravel()
    counts = np.bincount(np.ravel_multi_index(tuple(tokens.T.numpy()), (language.vocab_size,) * 4))
    counts = np.pad(counts, (0, len(expected) - len(counts)))
    assert (counts[expected == 0] == 0).all()
    large = expected > 5
    chi2 = (((counts - expected) ** 2)[large] / expected[large]).sum()
    degrees = int(large.sum()) - 1
    assert degrees >= 20
    assert abs(chi2 - degrees) < 4 * math.sqrt(2 * degrees)
    # the states are those of the exact posterior: one-hot minus posterior has mean 0
    residual = torch.nn.functional.one_hot(states, len(language.states)) - language.posterior(tokens, lengths)
    z = residual.mean(0) / (residual.std(0) / n**0.5).clamp(min=1e-12)
    assert z.abs().max() < 4.5


def test_marginals_of_the_papers_shape():
    """Chi-square of each position's tokens against Pr(x_t), which is the conditional with all tokens unknown."""
    language, n = HMMConfig().build(), 100_000
    tokens, lengths, _ = language.sample(n, generator=generator(0, "marginals"))
    everything = torch.ones(1, 16, dtype=torch.bool)
    marginals = language.log_conditionals(tokens[:1], lengths[:1], mask=everything)[0].exp()
    assert language.log_prob(tokens[:1], lengths[:1], mask=everything).abs() < 1e-12
    chi2 = 0.0
    for t in range(16):
        expected = n * marginals[t]
        chi2 = float(((tokens[:, t].bincount(minlength=200) - expected) ** 2 / expected).sum())
        assert abs(chi2 - 199) < 4.5 * math.sqrt(2 * 199)


def test_a_draw_is_a_function_of_the_seed():
    language = HMMConfig(states=6, blocks=2, vocab_size=8, length=5).build()
    first = language.sample(40, generator=generator(3, "s"), latent=True)
    again = language.to(dtype=torch.float32).sample(400, generator=generator(3, "s"), latent=True)
    assert torch.equal(again.tokens[:40], first.tokens)
    assert torch.equal(again.latent[:40], first.latent)
    assert torch.equal(
        language.batch(5, 40, seed=1).tokens, language.sample(40, generator=generator(1, "sentences", 5))[0]
    )
    assert not torch.equal(language.batch(5, 40, seed=1).tokens, language.batch(6, 40, seed=1).tokens)
    assert not torch.equal(language.sample(50).tokens, language.sample(50).tokens)
    assert first.tokens.dtype == first.lengths.dtype == torch.int64
    assert language.batch(5, 40, seed=1).latent is None
    tokens, lengths, states = language.sample(0, latent=True)
    assert tokens.shape == states.shape == (0, 5)
    assert language.log_prob(tokens, lengths).shape == (0,)
    assert language.log_conditionals(tokens, lengths).shape == (0, 5, 8)
    assert language.posterior(tokens, lengths).shape == (0, 5, 6)


# --- configs and files -----------------------------------------------------------------------------------------------


def test_attributes():
    language = HMMConfig().build()
    assert (language.vocab_size, language.pad_id, language.mask_id, language.model_vocab_size) == (200, 200, 201, 202)
    assert (language.special_token_ids, language.max_length, len(language.states)) == ((), 16, 100)
    assert language.vocabulary[:2] == ("w0", "w1")
    assert isinstance(language, languages.ExactLanguage)
    assert repr(language) == "HMM(100 states, 200 tokens, 16 tokens per sentence, torch.float64 on cpu)"


@pytest.mark.parametrize("concentration", [0.2, 1.0, 5.0])
def test_rows_are_as_concentrated_as_their_distribution(concentration):
    # the sum of squares of a Dirichlet row of n entries is (c + 1) / (n c + 1) on average
    language = HMMConfig(states=400, blocks=1, vocab_size=50, concentration=concentration, mixing_weight=0.0).build()
    squares = (language.emission**2).sum(axis=1)
    stderr = squares.std(ddof=1) / 20
    assert abs(squares.mean() - (concentration + 1) / (50 * concentration + 1)) < 4 * stderr


@pytest.mark.parametrize("mixing_weight", [0.0, 0.25])
def test_random_blocks(mixing_weight):
    language = HMMConfig(states=7, blocks=3, vocab_size=8, mixing_weight=mixing_weight, seed=4).build()
    block = np.array([0, 0, 0, 1, 1, 2, 2])
    for table, columns in ((language.transition, block), (language.emission, np.array([0, 0, 0, 1, 1, 1, 2, 2]))):
        np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-14)
        outside = np.where(block[:, None] != columns, table, 0)
        assert outside.sum(axis=1).max() <= mixing_weight
        assert (outside.any(axis=1) == (mixing_weight > 0)).all()
        assert (table[block[:, None] == columns] > 0).all()
    np.testing.assert_allclose(language.initial, 1 / 7)
    assert not np.array_equal(
        language.transition, HMMConfig(states=7, blocks=3, vocab_size=8, seed=5).build().transition
    )


def test_config_rebuilds_the_language(tmp_path):
    drawn = HMMConfig(states=4, blocks=2, vocab_size=5, length=3, seed=9).build()
    languages.save(scattered(), tmp_path / "h.safetensors")
    read = languages.load(tmp_path / "h.safetensors")
    for language in (drawn, read):
        config = configs.from_dict(LanguageConfig, configs.to_dict(language.config))
        assert config == language.config
        again = config.build()
        for name in ("initial", "transition", "emission"):
            assert np.array_equal(getattr(again, name), getattr(language, name))
        assert (again.max_length, again.vocabulary) == (language.max_length, language.vocabulary)
    assert isinstance(drawn.config, HMMConfig)
    assert isinstance(read.config, FileConfig)
    assert languages.resolve(str(tmp_path / "h.safetensors")) == read.config
    (tmp_path / "h.toml").write_text(configs.to_toml(FileConfig(path=str(tmp_path / "h.safetensors"))))
    assert languages.resolve(str(tmp_path / "h.toml")) == read.config  # the content is filled in
    with pytest.raises(IsolossError, match="leave out --length"):
        languages.resolve(str(tmp_path / "h.safetensors"), length=5)
    with pytest.raises(IsolossError, match="is only in memory"):
        _ = scattered().config


def test_any_matrices_keep_every_bit_in_a_file(tmp_path):
    rng = np.random.default_rng(0)
    matrices = [torch.tensor(rng.dirichlet(np.ones(9), size=n)).float() for n in (1, 9, 9)]  # sums off by 1e-7
    language = HMM(matrices[0][0], matrices[1], matrices[2], 3, vocabulary=tuple("ßbcdefghi"))
    languages.save(language, tmp_path / "h.safetensors")
    again = languages.load(tmp_path / "h.safetensors")
    languages.save(again, tmp_path / "i.safetensors")
    assert (tmp_path / "h.safetensors").read_bytes() == (tmp_path / "i.safetensors").read_bytes()
    assert again.vocabulary == language.vocabulary
    assert np.array_equal(again.emission, language.emission)
    np.testing.assert_allclose(language.emission.sum(axis=1), 1, rtol=1e-15)


def test_presets():
    laptop = languages.resolve("hmm-laptop").build()
    assert (len(laptop.states), laptop.vocab_size, laptop.max_length) == (8, 32, 8)
    assert languages.resolve("hmm-paper").build().config == HMMConfig(concentration=0.25, seed=6)


GOOD = {"initial": [0.5, 0.5], "transition": np.eye(2), "emission": np.full((2, 3), 1 / 3)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": [0.5, 0.6]}, "the HMM: initial adds up to 1.1; it must add up to 1"),
        ({"initial": [1.5, -0.5]}, r"initial holds -0\.5; a probability is from 0 to 1"),
        ({"initial": []}, r"initial must be of shape \(states,\), not \(0,\)"),
        ({"initial": [[0.5, 0.5]]}, r"initial must be of shape \(states,\), not \(1, 2\)"),
        ({"initial": ["a", "b"]}, "initial must be numbers"),
        ({"transition": [[1, 0], [0.5, 0.4]]}, r"row 1 of transition adds up to 0\.9"),
        ({"transition": [[1, 0], [math.nan, 1]]}, "row 1 of transition holds nan"),
        ({"transition": [[math.inf, 0], [0, 1]]}, "row 0 of transition holds inf"),
        ({"transition": np.eye(3)}, r"transition must be of shape \(2, 2\), not \(3, 3\)"),
        ({"emission": np.eye(3)}, r"emission must be of shape \(2, tokens\), not \(3, 3\)"),
        ({"emission": np.zeros((2, 3))}, "row 0 of emission adds up to 0"),
        ({"emission": np.zeros((2, 0))}, r"not \(2, 0\)"),
        ({"emission": [[0.5, 0.5, 0.0], [1.0, 1e-5, 0.0]]}, r"row 1 of emission adds up to 1\.00001"),
        ({"length": 0}, "the length is 0; it must be from 1 to 1024"),
        ({"length": 1025}, "the length is 1025"),
        ({"vocabulary": ("a", "b")}, "the vocabulary must be 3 different strings"),
        ({"vocabulary": ("a", "b", "a")}, "the vocabulary must be 3 different strings"),
    ],
)
def test_broken_matrices(changes, message, tmp_path):
    with pytest.raises(IsolossError, match=message):
        HMM(**{**GOOD, "length": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": 0}, "states is 0; it must be at least 1"),
        ({"blocks": -1}, "blocks is -1"),
        ({"blocks": 5}, "blocks is 5, more than the 4 states or the 6 tokens"),
        ({"vocab_size": 1}, "blocks is 2, more than the 4 states or the 1 tokens"),
        ({"mixing_weight": -0.1}, r"mixing_weight is -0\.1; it must be at least 0"),
        ({"mixing_weight": math.nan}, "mixing_weight is nan"),
        ({"length": 0}, "length is 0"),
    ],
)
def test_wrong_configs(changes, message):
    with pytest.raises(IsolossError, match=message):
        HMMConfig(**{"states": 4, "blocks": 2, "vocab_size": 6, "length": 3, **changes}).build()


CALLS = [
    ([[0, 1, 1], [0, 2, 1]], [3, 3], "sentence 1 has probability 0"),
    ([[0, 3]], [2], "sentence 0 holds the token id 3; ids are from 0 to 2"),
    ([[0, 1], [-1, 0]], [1, 2], "sentence 1 holds the token id -1"),
    ([[0, 1], [0, 1]], [2, 0], "sentence 1 has length 0; a length here is from 1 to 2"),
    ([[0, 1, 0, 1]], [4], "sentence 0 has length 4; a length here is from 1 to 3"),
    ([0, 1], [2], "tokens must be"),
    ([[0.0, 1.0]], [2], "tokens must be integers, not torch.float32"),
    ([[0, 1]], [2.0], "lengths must be integers"),
]


@pytest.mark.parametrize(("tokens", "lengths", "message"), CALLS)
@pytest.mark.parametrize("method", ["log_prob", "log_conditionals", "conditional_entropy", "posterior"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wrong_sentences(method, tokens, lengths, message, dtype):
    with pytest.raises(IsolossError, match=message):
        getattr(unreachable().to(dtype=dtype), method)(torch.tensor(tokens), torch.tensor(lengths))


def test_wrong_masks():
    language = unreachable()
    tokens, lengths = torch.tensor([[0, 2, 1]]), torch.tensor([3])
    for mask in (torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.bool)):
        with pytest.raises(IsolossError, match="mask must be"):
            language.log_prob(tokens, lengths, mask=mask)
    hidden = torch.tensor([[False, True, False]])  # what makes the sentence impossible is not read
    assert math.isclose(language.log_prob(tokens, lengths, mask=hidden).exp(), 0.25)
    tokens[0, 0] = 2
    for method in ("log_prob", "log_conditionals", "posterior"):
        with pytest.raises(IsolossError, match="sentence 0 has probability 0"):
            getattr(language, method)(tokens, lengths, mask=hidden)


def test_wrong_positions():
    language = unreachable()
    tokens, lengths = torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 1])
    cases = [
        ([0], r"positions must be \(2,\) or \(2, k\), not \(1,\)"),
        ([0.0, 0.0], r"positions must be integers, not torch\.float32"),
        ([0, 1], "sentence 1 has no position 1; its positions are from 0 to 0"),
        ([[0, -1], [0, 0]], "sentence 0 has no position -1; its positions are from 0 to 1"),
    ]
    for method in (language.log_conditionals, language.conditional_entropy):
        for positions, message in cases:
            with pytest.raises(IsolossError, match=message):
                method(tokens, lengths, positions=torch.tensor(positions))
        with pytest.raises(IsolossError, match="sentence 0 has probability 0"):
            method(torch.tensor([[2, 0]]), lengths[:1], positions=torch.tensor([0]))


def test_wrong_places_and_draws():
    language = unreachable()
    with pytest.raises(IsolossError, match=r"torch.float64 or torch.float32, not in torch.float16"):
        language.to(dtype=torch.float16)
    with pytest.raises(IsolossError, match=r"cannot compute in torch\.float64 on device 'nowhere'"):
        language.to("nowhere")
    with pytest.raises(IsolossError, match="cannot draw -1 sentences"):
        language.sample(-1)
