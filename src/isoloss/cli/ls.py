"""`isoloss ls`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from isoloss.cli import common

EXAMPLES = [
    ("isoloss ls", "everything that can be named on the command line"),
    ("isoloss ls sizes", "model sizes and their numbers of parameters"),
    ("isoloss ls runs --folder runs", "the runs below a folder"),
]

Row = dict[str, Any]
What = Literal["all", "languages", "sizes", "tasks", "measures", "studies", "runs"]


@dataclass(frozen=True)
class Args:
    """List what can be named: languages, model sizes, tasks, measures, studies, and the runs in a folder."""

    what: tyro.conf.Positional[What] = "all"
    """all, languages, sizes, tasks, measures, studies or runs."""
    folder: Path = Path("runs")
    """Where runs are looked for."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "ls", arguments, examples=EXAMPLES)
    lists: dict[str, Callable[[], list[Row]]] = {
        "languages": _languages,
        "sizes": _sizes,
        "tasks": _tasks,
        "measures": _measures,
        "studies": _studies,
        "runs": lambda: _runs(args.folder),
    }
    chosen = {name: make() for name, make in lists.items() if args.what in ("all", name)}
    if args.json:
        common.emit_json(chosen)
        return 0
    for name, rows in chosen.items():
        if not rows:
            common.say(f"{name}: none in {args.folder}")
            continue
        common.print_table(name, list(rows[0]), [list(row.values()) for row in rows], left=len(rows[0]))
        common.say("")
    return 0


def _languages() -> list[Row]:
    from isoloss.config import PRESETS

    files = "a grammar (NLTK's PCFG text or rule lines), a hidden Markov model (.safetensors), or a config (.toml)"
    texts = "text (.txt, .jsonl or a folder) together with --tokenizer"
    rows: list[Row] = [{"language": name, "what": text} for name, (_, text) in PRESETS.items()]
    return [*rows, {"language": "FILE", "what": files}, {"language": "TEXT", "what": texts}]


def _sizes() -> list[Row]:
    from isoloss.models.sizes import SIZES, num_parameters

    return [
        {
            "size": name,
            "width": shape.d_model,
            "layers": shape.num_layers,
            "heads": shape.num_heads,
            "feed-forward": shape.intermediate,
            "parameters (200 tokens, length 32)": f"{num_parameters(shape, 202, 32):,}",
            "parameters (30,522 tokens, length 128)": f"{num_parameters(shape, 30_522, 128):,}",
        }
        for name, shape in SIZES.items()
    ]


def _tasks() -> list[Row]:
    return [
        {"task": "root", "what": "the most likely symbol below the start symbol, given the sentence (grammars)"},
        {"task": "prefix-L", "what": "the most likely symbol over the first L tokens (grammars; the paper's A, B, C)"},
        {"task": "state-k", "what": "the most likely k-th state, given the sentence (hidden Markov models)"},
    ]


def _measures() -> list[Row]:
    from isoloss.evaluation import MEASURES

    return [{"measure": name, "what": text} for name, text in MEASURES.items()]


def _studies() -> list[Row]:
    from isoloss.studies import STUDIES, find

    return [
        {"study": name, "what": text, "scale": scale, "size": find(name).SCALES[scale].text}
        for name, text in STUDIES.items()
        for scale in find(name).SCALES
    ]


def _runs(folder: Path) -> list[Row]:
    from isoloss.runs import find_runs

    return [
        {
            "run": str(run.path),
            "size": run.config.model.size,
            "language": run.config.language.kind,
            "steps": run.config.steps,
            "state": "complete" if run.complete else f"step {max(run.steps(), default=0)}",
            "evaluations": len(run.evaluations()),
        }
        for run in (find_runs(folder) if folder.is_dir() else [])
    ]
