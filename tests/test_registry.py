"""Registries: names without imports, other packages' entry points, and what is said where something is wrong."""

import subprocess
import sys

import pytest

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.registry import Entry, Registry, _entry_points


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
    registry = Registry("fruit", package, {"root": Entry("math:sqrt", "a root")})
    assert registry.names() == ["root", "apple", "sqrt", "pear", "plum-STONE"]
    assert "fruit" not in sys.modules
    assert registry.load("apple").__name__ == "Apple"
    assert registry.summary("apple") == "A fruit."
    assert registry.summary("root") == "a root"
    assert registry.match("plum-big-one") == ("plum-STONE", {"STONE": "big-one"})


def test_a_name_that_is_taken_stays_with_isoloss_and_that_is_said(package):
    registry = Registry("fruit", package, {"sqrt": Entry("math:sqrt")})
    with pytest.warns(IsolossWarning, match="fruit has a fruit 'sqrt', which is not used: the name is taken"):
        assert registry.load("sqrt")(4.0) == 2.0


def test_what_cannot_be_loaded_is_an_error_only_when_it_is_asked_for(package):
    registry = Registry("fruit", package, {})
    assert "pear" in registry
    with pytest.raises(IsolossError, match=r"fruit 'pear' cannot be loaded from fruit:Pear: .*has no attribute 'Pear'"):
        registry.load("pear")


def test_an_unknown_name_gets_the_choices():
    registry = Registry("fruit", "no-such-fruits", {"apple": Entry(int), "fig-SIZE": Entry(int)})
    for call in (registry.load, registry.match):
        with pytest.raises(IsolossError, match=r"no fruit 'aple'; did you mean apple\? the .* are apple, fig-SIZE"):
            call("aple")
    with pytest.raises(IsolossError, match="no fruit 'fig-'"):
        registry.match("fig-")


def test_what_is_registered_is_there_and_may_be_registered_again_but_not_replaced():
    registry = Registry("fruit", "no-such-fruits", {})
    registry.register("one", int, summary="a number")
    registry.register("one", int)
    assert registry.load("one") is int
    with pytest.raises(IsolossError, match="there is a fruit 'one' already"):
        registry.register("one", float)


def test_several_parts_of_a_pattern_are_read_from_the_end():
    registry = Registry("measure", "no-such-measures", {"trace-in-SIZE-SCALE": Entry(int)})
    assert registry.match("trace-in-d64-paper")[1] == {"SIZE": "d64", "SCALE": "paper"}
    with pytest.raises(IsolossError):
        registry.match("trace-in-d64")


def test_reading_names_costs_no_import_of_torch():
    names = "r.LANGUAGES.names(), r.ALGORITHMS.names()"
    code = f"import sys, isoloss.registry as r; {names}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
