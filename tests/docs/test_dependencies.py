"""The oldest versions of dependencies: the page has them all, and the tested versions are none of them too old."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    requirement.name: requirement
    for text in itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in [Requirement(text)]
    if requirement.name != PROJECT["name"]  # an extra that takes another one
}
TESTED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
TESTED = {name.replace("_", "-"): version for name, version in TESTED.items()}


def test_the_page_has_the_oldest_version_of_each_package():
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert len(rows) == len(REQUIREMENTS)
    assert {name: f">={oldest}" for name, oldest in rows} == {n: str(r.specifier) for n, r in REQUIREMENTS.items()}


@pytest.mark.parametrize("name", sorted(TESTED.keys() & REQUIREMENTS.keys()))
def test_the_tested_version_is_not_too_old(name):
    assert REQUIREMENTS[name].specifier.contains(TESTED[name])


def test_holes_that_are_known_are_not_allowed():
    holes = {"torch": "2.9.1", "jinja2": "3.1.5", "ray": "2.53.0", "pytest": "9.0.2"}
    holes["transformers"] = "5.2.0"
    assert not [name for name, version in holes.items() if REQUIREMENTS[name].specifier.contains(version)]
