"""Write into README.md what its first command prints, and draw its figure: `make readme`, about two minutes.

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
RESCALINGS = 16


def demo(folder: Path) -> str:
    """Run the demo in a folder and return the table and the answers that it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ["sh", str(ROOT / "examples/demo/run.sh")]
    done = subprocess.run(
        script, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if "sequences of" in line)
    last = next(number for number, line in enumerate(lines) if line.startswith("The page"))
    return "\n".join(lines[first:last]).rstrip() + "\n"


def figure(folder: Path, file: Path) -> None:
    """Draw the traces of a model that is rescaled, and of two models of one loss."""
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
        each = [comparison.models[model][name] for model in ("plain", "penalized")]
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
            y=Axis(title="times the value before", log=True),
            series=left,
            title="The same function, other weights",
            rule=1.0,
        ),
        Panel(
            x=Axis(title="0: trained as usual, 1: trained to be flat", ticks=(0, 1)),
            y=Axis(title="times the value of the first"),
            series=right,
            title="Two models of one loss",
        ),
    ]
    save(draw(panels, note="bars: 95 % intervals"), file)


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
