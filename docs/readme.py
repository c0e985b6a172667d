"""Write into README.md the comparison that `make demo` ends with, and draw its figure: `make readme`, six minutes.

The models are those of `make demo`. The figure has the traces of one of them after random rescalings, which change no
prediction, and the traces of both with 95 % intervals.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from isoloss import compare, fisher_trace, load_model
from isoloss.flatness import rescaled_at_random
from isoloss.report.data import COLORS
from isoloss.report.panels import Axis, Panel, Series, draw
from isoloss.report.save import save
from isoloss.text.inputs import read_inputs

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- output of make demo -->\n```text\n).*?(```\n)", re.DOTALL)
DATA = "python:docs"
ROWS = ("loss  ", "trace  ", "minimal trace  ", "rise with 4-bit weights", "rise with 10 % noise")
RESCALINGS = 16


def demo(folder: Path) -> str:
    """Run the demo in a folder; return rows of the table that it prints, and the verdict."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ["sh", str(ROOT / "examples/demo/run.sh")]
    done = subprocess.run(
        script, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    paragraphs = done.stdout.split("\n\n")
    table = next(each for each in paragraphs if "second minus first" in each).splitlines()
    rows = [line for line in table if line.startswith(("    ", *ROWS))]
    verdict = next(each for each in paragraphs if "is flatter" in each)
    return "\n".join([*rows, "...", "", verdict]) + "\n"


def figure(folder: Path, file: Path) -> None:
    """Draw the traces of a model that is rescaled, and of two models with the same loss."""
    runs = {name: folder / f"runs/demo/{name}/checkpoints" for name in ("plain", "penalized")}
    paths = {name: str(max(run.iterdir(), key=lambda path: int(path.name.split("-")[1]))) for name, run in runs.items()}
    comparison = compare(paths, data=DATA, robustness=False)
    loaded = load_model(paths["plain"])
    model = loaded.model
    inputs = read_inputs(
        Path(DATA), checkpoint=paths["plain"], config=model.config, kind="masked", length=64, num_sequences=128
    )
    batches = inputs.batches
    ratios = []
    for seed in range(RESCALINGS):
        other = rescaled_at_random(model, granularity="tensor", seed=seed)
        ratios.append([fisher_trace(other, batches, rescaling=r).value for r in (None, "minimal")])
    plain = [fisher_trace(model, batches, rescaling=r).value for r in (None, "minimal")]
    names = {"trace": "trace", "minimal-trace": "minimal trace"}
    left = [
        Series(
            name=title,
            color=COLORS[place],
            points=[(seed + 1, both[place] / plain[place]) for seed, both in enumerate(ratios)],
        )
        for place, title in enumerate(names.values())
    ]
    print(
        "trace after rescaling over trace:", min(r[0] for r in ratios) / plain[0], max(r[0] for r in ratios) / plain[0]
    )
    print("the same of the minimal trace:", max(abs(r[1] / plain[1] - 1) for r in ratios))
    right = []
    for place, (name, title) in enumerate(names.items()):
        each = [comparison.models[model][name] for model in paths]
        scale = each[0].value
        right.append(
            Series(
                name=title,
                color=COLORS[place],
                points=[(x + 0.05 * place, e.value / scale) for x, e in enumerate(each)],
                errors=[(e.ci95[1] - e.value) / scale for e in each],
            )
        )
    panels = [
        Panel(
            x=Axis(title="random rescaling of one model"),
            y=Axis(title="relative to before the rescaling", log=True),
            series=left,
            title="Same predictions, different weights",
            rule=1.0,
        ),
        Panel(
            x=Axis(title="two BERTs", ticks=(0, 1)),
            y=Axis(title="relative to the usual BERT"),
            series=right,
            title="Same loss, different training",
        ),
    ]
    chart = draw(panels, note="bars: 95 % intervals")
    for layer in chart["concat"][1]["layer"]:
        x, y = layer["encoding"]["x"], layer["encoding"]["y"]
        x["axis"]["labelExpr"] = "datum.value ? 'trained to be flat' : 'trained as usual'"
        x["scale"]["domain"], y["scale"]["domain"] = (-0.5, 1.5), (0, y["scale"]["domain"][1])
    save(chart, file)


def main() -> None:
    """Write both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = demo(folder)
        readme = ROOT / "README.md"
        text, number = BLOCK.subn(lambda found: found[1] + output + found[2], readme.read_text())
        if number != 1:
            raise SystemExit("README.md has no block for the output of make demo")
        readme.write_text(text)
        figure(folder, ROOT / "docs/_static/readme.svg")


if __name__ == "__main__":
    main()
