"""Stored languages: every bit comes back, the tables decide, and a broken file is one clear sentence."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from isoloss import config as configs
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab import languages
from isoloss.lab.languages.config import (
    PRESETS,
    BracketsConfig,
    CorpusConfig,
    DyckConfig,
    GrammarConfig,
    HiddenBracketConfig,
    WithSpecialTokensConfig,
)
from isoloss.lab.languages.hmm import HMM
from isoloss.lab.languages.pcfg import PCFG
from isoloss.lab.languages.serialization import FileConfig
from isoloss.lab.languages.text import Corpus
from isoloss.seeds import generator

# only sentences of odd length, while a symbol that is on the way yields even ones
ODD = "S X A 0.3\nS A 0.7\nX A S 1\nA a 0.123456789\nA b 0.2\nA c 0.676543211"


def made(name: str) -> languages.Language:
    return PRESETS[name][0].build()


def matrices(**options) -> HMM:
    rng = np.random.default_rng(0)
    tables = [rng.dirichlet(np.ones(size), size=rows) for rows, size in ((1, 3), (3, 3), (3, 4))]
    return HMM(tables[0][0], tables[1], tables[2], 5, **options)


LANGUAGES = {
    **{name: lambda name=name: made(name) for name in PRESETS},
    "dyck-tokens": lambda: DyckConfig(kinds=3, tokens_per_bracket=3, max_length=12, seed=5).build(),
    "odd": lambda: PCFG.from_text(ODD),
    "recursive": lambda: PCFG.from_text("S S S 0.3\nS A 0.7\nA B 0.5\nA x 0.5\nB y 1", max_length=9),
    "names": lambda: PCFG.from_text("S -> 'S' T [0.5] | 'ß w' [0.5]\nT -> '\"' [0.25] | 'w10' [0.25] | 'w9' [0.5]"),
    "hidden bracket": lambda: HiddenBracketConfig(length=4, flip=0.2).build(),
    "framed brackets": lambda: WithSpecialTokensConfig(language=BracketsConfig()).build(),
    "framed": lambda: WithSpecialTokensConfig(language=PRESETS["pcfg-varied"][0]).build(),
    "matrices": matrices,
    "words": lambda: matrices(vocabulary=("d", "ö", "b c", "")),
}


def assert_same(language, again):
    """Every number of both languages has the same bits."""
    assert isinstance(language, type(again))  # a Dyck grammar whose config is lost is a grammar
    assert (again.vocabulary, again.max_length) == (language.vocabulary, language.max_length)
    ours, theirs = (each.sample(300, generator=generator(3, "storage"), latent=True) for each in (language, again))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.lengths, theirs.lengths)
    assert ours.latent is theirs.latent is None or torch.equal(ours.latent, theirs.latent)
    for method in ("log_prob", "log_conditionals", "conditional_entropy"):
        assert torch.equal(*(getattr(each, method)(ours.tokens, ours.lengths) for each in (language, again)))
    if isinstance(language, PCFG):
        assert again.symbols == language.symbols
        assert torch.equal(language.length_probs, again.length_probs)
    elif isinstance(language, HMM):
        for table in ("initial", "transition", "emission"):
            assert np.array_equal(getattr(language, table), getattr(again, table))


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_bit_comes_back(tmp_path, name):
    language = LANGUAGES[name]()
    path, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    languages.save(language, path)
    again = languages.load(path)
    assert_same(language, again)
    languages.save(again, second)
    assert path.read_bytes() == second.read_bytes()
    # the config of a run makes the same language
    config = configs.from_dict(LanguageConfig, configs.to_dict(again.config))
    assert languages.resolve(str(path)) == config
    assert_same(language, config.build())
    if name in PRESETS:
        assert config == PRESETS[name][0]


def test_a_language_on_its_way_in_float32_is_stored_in_float64(tmp_path):
    language = made("pcfg-varied")
    languages.save(language.to(dtype=torch.float32), tmp_path / "a.safetensors")
    assert_same(language, languages.load(tmp_path / "a.safetensors"))


def rewritten(path, changes=None, tables=None):
    """Write a stored language again with other entries in its header and other tensors."""
    with safe_open(path, framework="numpy") as file:
        header = json.loads(file.metadata()["isoloss"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, table in (tables or {}).items():
        if table is None:
            del kept[name]
        else:
            kept[name] = np.asarray(table)
    header |= changes or {}
    save_file(kept, path, metadata={"isoloss": json.dumps(header)})


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 99},  # the file's tables are what another generator drew
        {"levels": 40},
        {"kind": "hierarchy"},
        {"temperature": 0.5},
        None,
    ],
)
@pytest.mark.parametrize("name", ["pcfg-laptop", "hmm-laptop", "dyck-tokens"])
def test_the_tables_win_over_the_config(tmp_path, name, change):
    language, path = LANGUAGES[name](), tmp_path / "a.safetensors"
    languages.save(language, path)
    document = configs.to_dict(language.config) | change if change else [1]
    rewritten(path, {"config": document})
    again = languages.load(path)
    assert_same(language, again)
    if name == "hmm-laptop":
        assert isinstance(again.config, FileConfig)
        assert again.config.path == str(path.resolve())
    else:
        assert isinstance(again.config, GrammarConfig)
    assert_same(language, again.config.build())


def test_a_config_that_is_cut_elsewhere_is_not_kept(tmp_path):
    """The same rules with another longest sentence are another language."""
    language, path = DyckConfig(max_length=8).build(), tmp_path / "a.safetensors"
    languages.save(language, path)
    rewritten(path, {"config": configs.to_dict(DyckConfig(max_length=10))})
    assert_same(language, languages.load(path))


def test_the_header_says_what_the_file_is(tmp_path):
    languages.save(made("pcfg-laptop"), tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="numpy") as file:
        header = json.loads(file.metadata()["isoloss"])
        assert file.get_tensor("binary").dtype == np.int64
        assert file.get_tensor("binary_probs").dtype == np.float64
    assert (header["format"], header["kind"], header["max_length"]) == ("language", "pcfg", 8)
    assert header["config"] == configs.to_dict(PRESETS["pcfg-laptop"][0])
    assert len(header["vocabulary"]) == 32


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    languages.save(matrices(), path)
    config = languages.load(path).config
    assert FileConfig(path=str(path)).build().config == config
    languages.save(matrices(vocabulary=tuple("wxyz")), path, overwrite=True)
    with pytest.raises(IsolossError, match=r"a\.safetensors has changed since the run began"):
        config.build()


def test_a_toml_file_gets_the_content_filled_in(tmp_path):
    path = tmp_path / "a.safetensors"
    languages.save(matrices(), path)
    (tmp_path / "a.toml").write_text(configs.to_toml(FileConfig(path=str(path))))
    assert languages.resolve(str(tmp_path / "a.toml")) == languages.load(path).config
    assert len(languages.load(path).config.content) == 64


# --- writing ---------------------------------------------------------------------------------------------------------


def test_another_content_is_not_replaced_unasked(tmp_path):
    path = tmp_path / "a.safetensors"
    languages.save(made("brackets-8"), path)
    before = path.stat()
    languages.save(made("brackets-8"), path)  # the same: nothing to do
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(IsolossError, match="exists and holds something else"):
        languages.save(made("dyck-2"), path)
    assert languages.load(path).max_length == 8
    languages.save(made("dyck-2"), path, overwrite=True)
    assert languages.load(path).max_length == 16
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_where_nothing_can_be_written(tmp_path):
    language = made("brackets-8")
    with pytest.raises(IsolossError, match=r"called NAME\.safetensors, not a\.json"):
        languages.save(language, tmp_path / "a.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(IsolossError, match="cannot write"):
        languages.save(language, tmp_path / "file" / "a.safetensors")
    (tmp_path / "b.safetensors").mkdir()
    with pytest.raises(IsolossError, match="exists and holds something else"):
        languages.save(language, tmp_path / "b.safetensors")


def test_a_corpus_is_its_files(tmp_path, vocab, words):
    lines = [json.dumps({"text": " ".join(words[i:] + words[:i])}) for i in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    config = CorpusConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer=str(vocab), length=8, held_out=0.2)
    corpus = Corpus.from_config(config, cache=tmp_path / "cache")
    with pytest.raises(IsolossError, match=r"keep its text \(.*text\.jsonl\) and its tokenizer \(.*vocab\.txt\)"):
        languages.save(corpus, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


# --- broken files ----------------------------------------------------------------------------------------------------

RULES = {"binary": [[0, 1, 1]], "binary_probs": [1.0], "unary": [[1, 2]], "unary_probs": [0.25]}
RULES |= {"emission": [[1, 0], [2, 1]], "emission_probs": [0.75, 1.0]}


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "g.safetensors"
    languages.save(PCFG.from_text("S A A 1\nA B 0.25\nA a 0.75\nB b 1"), path)
    with safe_open(path, framework="numpy") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == RULES  # noqa: SIM118
    return path


@pytest.mark.parametrize(
    ("changes", "tables", "message"),
    [
        ({}, {"unary": None}, "must hold the tensors binary, binary_probs, unary, .* and holds"),
        ({}, {"extra": [1.0]}, "must hold the tensors"),
        ({}, {"binary": [[0.0, 1.0, 1.0]]}, r"binary must be int64 of shape \(1, 3\), not float64"),
        ({}, {"binary": [[0, 1]]}, r"binary must be int64 of shape \(1, 3\), not int64 of shape \(1, 2\)"),
        ({}, {"emission": [[1, 0]]}, r"emission must be int64 of shape \(2, 2\), not int64 of shape \(1, 2\)"),
        ({}, {"binary_probs": [1]}, "binary_probs must be float64"),
        ({}, {"binary_probs": 1.0}, "binary_probs must be float64"),
        ({}, {"binary_probs": [[1.0]]}, "binary_probs must be float64"),
        ({}, {"binary": [[0, 1, 3]]}, r"row 0 of binary is \[0, 1, 3\]; ids there are below \[3, 3, 3\]"),
        ({}, {"emission": [[1, 0], [2, 2]]}, r"row 1 of emission is \[2, 2\]; ids there are below \[3, 2\]"),
        ({}, {"emission": [[1, 0], [-1, 1]]}, r"row 1 of emission is \[-1, 1\]"),
        ({}, {"unary_probs": [float("nan")]}, "row 0 of unary_probs is nan"),
        ({}, {"unary_probs": [-0.25]}, r"row 0 of unary_probs is -0\.25"),
        ({}, {"unary_probs": [0.0]}, r"row 0 of unary_probs is 0\.0"),
        ({}, {"unary_probs": [float("inf")]}, "row 0 of unary_probs is inf"),
        ({}, {"unary_probs": [0.2501]}, r"the rules of A add up to 1\.0001; they must add up to 1"),
        ({}, {"emission": [[1, 0], [1, 1]], "emission_probs": [0.5, 0.25]}, "the rules of B add up to 0"),
        ({}, {"unary": [[1, 1]]}, r"g\.safetensors: the unary rules run in a cycle: A -> A"),
        ({}, {"binary": [[0, 0, 1]]}, r"g\.safetensors: the start symbol S derives no sentence"),
        ({"symbols": ["S", "A", "A"]}, {}, "the symbols must be different names"),
        ({"symbols": []}, {}, "the symbols must be different names, at least one, not ''"),
        ({"vocabulary": ["b", "a"]}, {}, "the vocabulary must be those of the rules"),
        ({"vocabulary": ["a", "b", "c"]}, {}, "the vocabulary must be those of the rules"),
        ({"vocabulary": "ab"}, {}, "must have max_length, a number, and vocabulary and symbols"),
        ({"symbols": [1, 2, 3]}, {}, "must have max_length, a number, and vocabulary and symbols"),
        ({"max_length": "8"}, {}, "must have max_length, a number"),
        ({"max_length": 1}, {}, "no sentence of at most 1 tokens"),
        ({"max_length": 0}, {}, "max_length is 0"),
        ({"kind": "lstm", "isoloss": "7.1"}, {}, "holds a 'lstm' of the format 'language', written by isoloss 7.1"),
        ({"format": "model"}, {}, "of the format 'model'"),
    ],
)
def test_a_broken_grammar(stored, changes, tables, message):
    rewritten(stored, changes, tables)
    with pytest.raises(IsolossError, match=message) as caught:
        languages.load(stored)
    assert "line 0" not in str(caught.value)
    if "max_length" not in str(caught.value) and "derives" not in message:
        assert str(stored) in str(caught.value)


def test_a_symbol_of_the_tables_that_cannot_be_reached_is_left_out(stored):
    rewritten(
        stored, {"symbols": ["S", "B", "A"]}, {"binary": [[0, 2, 2]], "unary": [[1, 2]], "emission": [[2, 0], [1, 1]]}
    )
    rewritten(stored, tables={"unary_probs": [0.75], "emission_probs": [1.0, 0.25]})
    with pytest.warns(
        IsolossWarning, match="1 symbol that cannot be reached from S: B; and 1 token .* emits: b"
    ) as caught:
        language = languages.load(stored)
    assert len(caught) == 1
    assert_same(language, PCFG.from_text("S A A 1\nA a 1"))
    languages.save(language, stored, overwrite=True)
    assert_same(languages.load(stored), language)  # and no warning


def test_rules_in_any_order_are_the_same_grammar(stored):
    language = languages.load(stored)
    rewritten(stored, tables={"emission": [[2, 1], [1, 0]], "emission_probs": [1.0, 0.75]})
    assert_same(language, languages.load(stored))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"transition": None}, "must hold the tensors initial, transition, emission"),
        ({"transition": np.eye(3)[:2]}, r"transition must be of shape \(3, 3\), not \(2, 3\)"),
        ({"initial": [0.5, 0.5, 0.5]}, r"a\.safetensors: initial adds up to 1\.5"),
        ({"emission": np.full((3, 4), np.nan)}, "row 0 of emission holds nan"),
        ({"transition": [[1.5, -0.5, 0], [0, 1, 0], [0, 0, 1]]}, r"row 0 of transition holds -0\.5"),
    ],
)
def test_a_broken_hidden_markov_model(tmp_path, tables, message):
    path = tmp_path / "a.safetensors"
    languages.save(matrices(), path)
    rewritten(path, tables=tables)
    with pytest.raises(IsolossError, match=message):
        languages.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 7}, "length is 7; it must be even"),
        ({"vocabulary": ["(", ")"]}, r"the vocabulary of brackets is < and >, not \(, \)"),
    ],
)
def test_broken_brackets(tmp_path, changes, message):
    path = tmp_path / "a.safetensors"
    languages.save(made("brackets-8"), path)
    rewritten(path, changes)
    with pytest.raises(IsolossError, match=message):
        languages.load(path)
    rewritten(path, {"max_length": 8, "vocabulary": ["<", ">"]}, {"table": [1.0]})
    with pytest.raises(IsolossError, match=r"must hold the tensors \(none\), and holds table"):
        languages.load(path)


def test_files_that_hold_no_language(tmp_path, stored):
    path = tmp_path / "a.safetensors"
    with pytest.raises(IsolossError, match=r"a\.safetensors does not exist"):
        languages.load(path)
    with pytest.raises(IsolossError, match="is not a file"):
        languages.load(tmp_path)
    path.write_bytes(stored.read_bytes()[:-3])
    with pytest.raises(IsolossError, match="is not a readable safetensors file"):
        languages.load(path)
    path.write_text("S A A 1")
    with pytest.raises(IsolossError, match="is not a readable safetensors file"):
        languages.load(path)
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(IsolossError, match="holds no language: there is no 'isoloss'"):
        languages.load(path)
    for text in ("{", "[]", '{"kind": "pcfg"}', '{"format": "language"}'):
        save_file({}, stored, metadata={"isoloss": text})
        with pytest.raises(IsolossError, match="must be a JSON object with format and kind"):
            languages.load(stored)


def test_the_longest_sentence_that_was_asked_for_leaves_no_trace():
    """A grammar whose longest sentence is shorter than asked for is the one that its own length gives."""
    asked = PCFG.from_text(ODD, max_length=64)
    assert asked.max_length == 63
    assert_same(asked, dataclasses.replace(asked.config).build())
