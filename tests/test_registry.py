"""Registries: names without imports, other packages' entry points, and what is said where something is wrong."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from isoloss.cli.main import main
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.evaluation.measures.base import Measure, make_measure
from isoloss.lab.languages.config import DyckConfig
from isoloss.registry import (
    ALGORITHMS,
    EXECUTORS,
    LANGUAGES,
    MEASURES,
    MODELS,
    STUDIES,
    TASKS,
    Entry,
    Registry,
    _entry_points,
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with entry points, on the path but not installed."""
    info = tmp_path / "fruit-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fruit\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[isoloss.fruits]\napple = fruit:Apple\nsqrt = fruit:Apple\npear = fruit:Pear\nplum-STONE = fruit:Apple\n"
    )
    (tmp_path / "fruit.py").write_text('class Apple:\n    """A fruit.\n\n    It is round.\n    """\n')
    monkeypatch.syspath_prepend(tmp_path)
    _entry_points.cache_clear()
    yield "fruits"
    _entry_points.cache_clear()
    sys.modules.pop("fruit", None)


def test_entry_points_are_names_before_they_are_imported(package):
    registry = Registry("fruit", package, {"math": {"root": ("sqrt", "a root")}}, function="a fruit")
    assert list(registry) == ["root", "apple", "sqrt", "pear", "plum-STONE"]
    assert "fruit" not in sys.modules
    assert registry.load("apple").__name__ == "Apple"
    assert registry.summary("apple") == "A fruit."
    assert registry.summary("root") == "a root"
    assert registry.match("plum-big-one") == ("plum-STONE", {"STONE": "big-one"})


def test_a_name_that_is_taken_stays_with_isoloss_and_that_is_said(package):
    registry = Registry("fruit", package, {"math": {"sqrt": "sqrt"}}, function="a fruit")
    with pytest.warns(IsolossWarning, match="fruit has a fruit 'sqrt', which is not used: the name is taken"):
        assert registry.load("sqrt")(4.0) == 2.0


def test_what_cannot_be_loaded_is_an_error_only_when_it_is_asked_for(package):
    registry = Registry("fruit", package, {}, function="a fruit")
    assert "pear" in registry
    with pytest.raises(IsolossError, match=r"fruit 'pear' cannot be loaded from fruit:Pear: .*has no attribute 'Pear'"):
        registry.load("pear")


def test_an_unknown_name_gets_the_choices():
    registry = Registry(
        "fruit", "no-such-fruits", {"builtins": {"apple": "int", "fig-SIZE": "int"}}, function="a fruit"
    )
    for call in (registry.load, registry.match):
        with pytest.raises(IsolossError, match=r"no fruit 'aple'; did you mean apple\? the .* are apple, fig-SIZE"):
            call("aple")
    with pytest.raises(IsolossError, match="no fruit 'fig-'"):
        registry.match("fig-")


def test_what_is_registered_is_there_and_may_be_registered_again_but_not_replaced():
    registry = Registry("fruit", "no-such-fruits", {}, function="a fruit")
    registry.register("one", int, summary="a number")
    registry.register("one", int)
    assert registry.load("one") is int
    with pytest.raises(IsolossError, match="there is a fruit 'one' already"):
        registry.register("one", float)


def test_several_parts_of_a_pattern_are_read_from_the_end():
    registry = Registry(
        "measure", "no-such-measures", {"builtins": {"trace-in-SIZE-SCALE": "int"}}, function="a measure"
    )
    assert registry.match("trace-in-d64-paper")[1] == {"SIZE": "d64", "SCALE": "paper"}
    with pytest.raises(IsolossError):
        registry.match("trace-in-d64")


def test_reading_names_costs_no_import_of_torch():
    names = "list(r.LANGUAGES), list(r.MODELS), list(r.ALGORITHMS)"
    code = f"import sys, isoloss.registry as r; {names}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


BAD = {
    "languages": {"raises": "bad_raising:Config", "wrong-kind": "isoloss.lab.languages.config:DyckConfig"},
    "measures": {"int": "builtins:int", "other-default": "bad:Other", "loss": "bad:Other"},
    "algorithms": {"no-config": "bad:NO_CONFIG"},
    "models": {"no-model": "bad:NO_CONFIG"},
    "tasks": {"no-task": "bad:NO_CONFIG"},
    "executors": {"no-executor": "bad:NO_CONFIG"},
    "studies": {"no-study": "bad:NO_CONFIG", "raises": "bad:study"},
}
MODULE = """
from dataclasses import dataclass
from isoloss.lab.evaluation.measures.base import Measure

NO_CONFIG = 3

@dataclass(frozen=True, kw_only=True)
class Other(Measure):
    num_eigenvalues: int = 7

def study():
    raise ValueError("no")
"""


@pytest.fixture
def bad_package(tmp_path, monkeypatch):
    """A package whose entry points are all wrong."""
    info = tmp_path / "bad-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    lines = [
        line
        for group, points in BAD.items()
        for line in (f"[isoloss.{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "bad.py").write_text(MODULE)
    (tmp_path / "bad_raising.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    _entry_points.cache_clear()
    yield
    _entry_points.cache_clear()
    for name in ("bad", "bad_raising", "isoloss.cli.train"):  # which makes its options when it is imported
        sys.modules.pop(name, None)


WHY = {
    (LANGUAGES, "raises"): "language 'raises' cannot be loaded from bad_raising:Config: ZeroDivisionError",
    (LANGUAGES, "wrong-kind"): "DyckConfig, whose kind is 'dyck'; it must be 'wrong-kind'",
    (MEASURES, "int"): "measure 'int' of builtins:int is int; it must be a dataclass that is a subclass of .*Measure",
    (ALGORITHMS, "no-config"): "of bad:NO_CONFIG is of the type int; it must be a dataclass .*AlgorithmConfig",
    (MODELS, "no-model"): "it must be an isoloss.lab.models.architectures.Architecture",
    (TASKS, "no-task"): "it must be an isoloss.transfer.text_sources.TextTask or a function",
    (EXECUTORS, "no-executor"): "it must be a function like isoloss.studies.run.local.run",
    (STUDIES, "no-study"): "it must be an isoloss.studies.Study or a function that returns one",
}


@pytest.mark.parametrize(("registry", "name"), WHY)
@pytest.mark.filterwarnings("ignore::isoloss.errors.IsolossWarning")
def test_what_is_no_component_is_refused_where_it_is_named_and_left_out_of_lists(bad_package, registry, name):
    with pytest.raises(IsolossError, match=WHY[registry, name]):
        registry.load(name)
    with pytest.warns(IsolossWarning, match="left out: .*" + WHY[registry, name]):
        loaded = registry.loaded()
    assert name not in loaded
    assert len(loaded) > 0


def test_bad_entry_points_disable_no_other_command(bad_package, capsys):
    assert main(["ls", "all"]) == 0
    said = capsys.readouterr().err
    for text in ("cannot be loaded from bad_raising", "the study raises cannot be made: ValueError: no", "the name is"):
        assert text in said
    assert main(["train", "out", "--language", "brackets", "--print-config"]) == 0
    capsys.readouterr()
    assert main(["measure", "--help-all"]) == 0
    assert "(default: largest-eigenvalue: 1, other-default: 7)" in " ".join(
        capsys.readouterr().out.replace("│", "").split()
    )
    for words, text in (
        (["measure", "x", "--measures", "int"], "measure 'int' of builtins:int is int"),
        (["sample", "wrong-kind"], "whose kind is 'dyck'"),
    ):
        assert main(words) == 2
        assert text in capsys.readouterr().err


def test_a_setting_without_a_default_must_be_given(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Needs(Measure):
        needed: int

    monkeypatch.setitem(MEASURES._entries, "needs", Entry(Needs, "a measure"))
    with pytest.raises(IsolossError, match="the measure needs has no default for needed"):
        make_measure("needs")
    assert make_measure("needs", {"needed": 3}).needed == 3


def test_what_is_registered_is_checked_at_once():
    for registry, name, target, text in (
        (MEASURES, "new", int, "measure 'new' is int; it must be a dataclass"),
        (LANGUAGES, "a b", DyckConfig, "'a b' is no name of a language"),
        (LANGUAGES, "my-dyck", DyckConfig, "whose kind is 'dyck'; it must be 'my-dyck'"),
        (TASKS, "x-TOKEN", 3, "task 'x-TOKEN' is of the type int"),
    ):
        with pytest.raises(IsolossError, match=text):
            registry.register(name, target)
