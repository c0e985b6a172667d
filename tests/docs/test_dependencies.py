"""The oldest versions of dependencies: the page has them all, and the tested versions are none of them too old."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    requirement.name: requirement
    for text in itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in [Requirement(text)]
    if requirement.name != PROJECT["name"]  # an extra that takes another one
}


def locked(name):
    """Each package's versions in a file of `make lock`, which may differ between platforms."""
    found = {}
    for package, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


TESTED = locked("constraints.txt")


def test_the_page_has_the_oldest_version_of_each_package():
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert len(rows) == len(REQUIREMENTS)
    assert {name: f">={oldest}" for name, oldest in rows} == {n: str(r.specifier) for n, r in REQUIREMENTS.items()}


@pytest.mark.parametrize("name", sorted(REQUIREMENTS))
def test_the_tested_version_is_not_too_old(name):
    assert all(REQUIREMENTS[name].specifier.contains(version) for version in TESTED[name])


@pytest.mark.parametrize("name", sorted(REQUIREMENTS))
def test_the_floors_are_the_oldest_versions(name):
    (oldest,) = REQUIREMENTS[name].specifier
    # ">=1.1" may mean 1.1.1, if there is no 1.1
    assert all(f"{version}.".startswith(f"{oldest.version}.") for version in locked("constraints-floors.txt")[name])


def test_the_licenses_are_those_of_what_is_installed():
    rows = re.findall(r"^\| (\S+) +\| (\d\S*) +\|", (ROOT / "THIRD_PARTY_LICENSES.md").read_text(), re.MULTILINE)
    assert all(version in TESTED[canonicalize_name(name)] for name, version in rows)
    ours = {"browser", "dev", "docs", "real"}
    extras = [texts for extra, texts in PROJECT["optional-dependencies"].items() if extra not in ours]
    needed = {Requirement(text).name for text in itertools.chain(PROJECT["dependencies"], *extras)}
    assert needed - {PROJECT["name"]} <= {canonicalize_name(name) for name, _ in rows}


def test_no_file_of_versions_names_an_index():
    for name in ("constraints.txt", "constraints-floors.txt"):
        assert not re.findall(r"://|^-", (ROOT / name).read_text(), re.MULTILINE)


def test_holes_that_are_known_are_not_allowed():
    holes = {"torch": "2.9.1", "jinja2": "3.1.5", "ray": "2.53.0", "pytest": "9.0.2"}
    holes["transformers"] = "5.2.0"
    assert not [name for name, version in holes.items() if REQUIREMENTS[name].specifier.contains(version)]
