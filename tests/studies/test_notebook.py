"""The example notebook, run without a browser."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

# found, not imported: with marimo imported, transformers takes the test process for a notebook, and its Trainer
# wants IPython
pytestmark = pytest.mark.skipif(importlib.util.find_spec("marimo") is None, reason="needs marimo")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "study_notebook.py"


def run(*arguments):
    """Run the notebook as a script, with warnings as errors; then print what its charts hold."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; _, found = runpy.run_path(sys.argv[0])['app'].run(); "
        "print(len(found['checkpoints']), len(found['study'].claims), found['table'].value); "
        "found['scatter'].to_dict(), found['claims'].to_dict()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, NOTEBOOK, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_it_shows_the_kept_results():
    values = pl.read_parquet(ROOT / "results" / "same-loss-27-grammars-repeated" / "values.parquet")
    points = [
        set(values.filter(pl.col("estimate") == key).select("run", "step").rows())
        for key in ("trace", "probe-prefix-4")
    ]
    assert run() == [str(len(points[0] & points[1])), "54", "arms"]


def test_it_shows_other_results():
    assert run("--study", ROOT / "results" / "brackets")[1:] == ["56", "arms-attention-6"]


def test_a_script_names_what_is_wrong():
    done = subprocess.run([sys.executable, NOTEBOOK, "--study", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "there is no folder nowhere" in done.stderr
