"""Without the extras: what the base is for works, and all else says in one sentence which extra it needs."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import base_alone
from isoloss.cli.main import SUBCOMMANDS
from isoloss.errors import EXTRAS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed(requirements):
    """The names of the distributions that these requirements bring, with all that they need themselves."""
    found, todo = set(), [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in found:
                found.add((name, extra))
                inner = map(Requirement, metadata.requires(name) or ())
                todo += [each for each in inner if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What was wrong with each case, where the interpreter sees the base's packages alone."""
    packages, folder = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("folder")
    for name in needed(PROJECT["dependencies"]):
        distribution = metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).is_symlink():  # several of CUDA's packages share a folder
                (packages / top).symlink_to(distribution.locate_file(top))
    own = next(path for path in metadata.files("isoloss") if path.name == "METADATA")
    (packages / "isoloss-0.dist-info").symlink_to(own.locate().parent)
    # -S: no site-packages
    command = [sys.executable, "-S", ROOT / "tests" / "base_alone.py", folder]
    environment = {"PYTHONPATH": f"{packages}:{ROOT / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"files": sorted(path.name for path in folder.iterdir())}


def check(told, extra, name):
    if extra:
        packages = "|".join(package for package, of in EXTRAS.items() if of == extra)
        sentence = rf"this needs ({packages}), which is not installed: pip install 'isoloss\[{extra}\]'"
        assert re.fullmatch(rf"(isoloss \w+: )?{sentence}\n?", told)
    else:
        assert told == "", name


@pytest.mark.parametrize("line", base_alone.COMMANDS)
def test_a_command(found, line):
    check(found[line], base_alone.COMMANDS[line], line)


def test_every_subcommand_is_tried():
    assert {line.split()[0] for line in base_alone.COMMANDS} == SUBCOMMANDS.keys()


def test_public_names(found):
    names = found.keys() - base_alone.COMMANDS.keys() - {"files"}
    assert len(names) > 70
    for name in names:
        check(found[name], base_alone.NAMES.get(name, ""), name)


def test_nothing_is_left_behind(found):
    assert found["files"] == ["a", "b", "c", "ids.npy", "mean", "own.py", "page.html", "run", "texts", "tokenizer"]


def test_an_extra_is_named_for_every_package_of_one():
    declared = {
        Requirement(text).name: extra
        for extra, texts in PROJECT["optional-dependencies"].items()
        for text in texts
        if extra not in ("all", "docs", "dev", "notebook") and not text.startswith("isoloss")
    }
    modules = {"vl-convert-python": "vl_convert", "pytorch-optimizer": "pytorch_optimizer", "lm-eval": "lm_eval"}
    assert {modules.get(name, name): extra for name, extra in declared.items()}.items() <= EXTRAS.items()
