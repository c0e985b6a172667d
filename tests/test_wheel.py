"""What is built for those who install isoloss: a wheel with all that it reads, and a source archive that makes one."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig, BertForMaskedLM

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("dist")
    # the backend of this environment: a fresh one would be downloaded
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_what_is_in_them(built):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "isoloss").rglob("*") if p.is_file()}
    source = {name for name in source if not name.endswith((".pyc", ".nbi", ".nbc"))}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == source
    with tarfile.open(archive) as file:
        tops = {Path(name).parts[1] for name in file.getnames() if "/" in name}
    assert tops == {
        "src",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "PKG-INFO",
        ".gitignore",
    }


def test_its_version_is_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


@pytest.mark.slow
def test_the_wheel_in_a_clean_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "clean"], check=True)
    binaries = tmp_path / "clean" / "bin"
    pip = [binaries / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, wheel], check=True)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(vocab_size=12, **sizes)).save_pretrained(tmp_path / "checkpoint")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(2, 12, (16, 6)))
    command = [binaries / "isoloss", "measure", "checkpoint", "--data", "ids.npy", "--mask-id", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nats per predicted token" in done.stdout
