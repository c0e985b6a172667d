"""The public names: as announced, documented, with an example that runs, and loaded only when they are used."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import isoloss
from isoloss import registry
from public_api import lines

ANNOUNCED = Path(__file__).with_name("public_api.txt")
FUNCTIONS = [name for name in isoloss.__all__ if callable(getattr(isoloss, name))]


def test_the_public_api_is_the_announced_one():
    hint = "a change of the public API: write tests/public_api.txt anew with tests/public_api.py, and the changelog"
    assert list(lines()) == ANNOUNCED.read_text().splitlines(), hint


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_name_has_an_example(name):
    assert doctest.DocTestParser().get_examples(inspect.getdoc(getattr(isoloss, name)) or "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_example_runs_alone(name, monkeypatch):
    for each in vars(registry).values():
        if isinstance(each, registry.Registry):
            monkeypatch.setattr(each, "_entries", dict(each._entries))
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(isoloss, name)), {}, name, None, None)
    example.globs["__name__"] = "builtins"  # of the classes that an example makes
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


def test_names_are_loaded_on_first_use_and_listed_before():
    code = (
        "import sys, isoloss; assert set(isoloss.__all__) <= set(dir(isoloss)); assert isoloss.__version__; "
        "assert not {'torch', 'transformers', 'numpy', 'polars', 'scipy'} & set(sys.modules); "
        "from isoloss import fisher_trace; assert 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'isoloss' has no attribute 'flatness_of'"):
        _ = isoloss.flatness_of
