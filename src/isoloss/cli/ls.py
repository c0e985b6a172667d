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
    ("isoloss ls sizes", "model sizes, their numbers of parameters and the memory that training them takes"),
    ("isoloss ls runs --folder runs", "the runs below a folder"),
]

Row = dict[str, Any]
What = Literal["all", "languages", "models", "sizes", "tasks", "measures", "studies", "runs"]

VOCABULARY, LENGTH = 30_522, 128  # that sizes are given for: BERT's vocabulary, and its usual sequences
TRAINING_BYTES = 16  # a parameter's value, gradient and AdamW's two moments, in float32


@dataclass(frozen=True)
class Args:
    """List what can be named: languages, models and their sizes, tasks, measures, studies, and the runs in a folder."""

    what: tyro.conf.Positional[What] = "all"
    """all, languages, models, sizes, tasks, measures, studies or runs."""
    folder: Path = Path("runs")
    """Where runs are looked for."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "ls", arguments, examples=EXAMPLES)
    lists: dict[str, Callable[[], list[Row]]] = {
        "languages": _languages,
        "models": _models,
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

    files = "a grammar (NLTK's PCFG text or rule lines), a stored language (.safetensors), or a config (.toml)"
    texts = "text (.txt, .jsonl or a folder) together with --tokenizer"
    rows: list[Row] = [{"language": name, "what": text} for name, (_, text) in PRESETS.items()]
    return [*rows, {"language": "FILE", "what": files}, {"language": "TEXT", "what": texts}]


def _models() -> list[Row]:
    from isoloss.models.sizes import ARCHITECTURES

    return [
        {"architecture": name, "objective": architecture.objective, "what": architecture.text}
        for name, architecture in ARCHITECTURES.items()
    ]


def _sizes() -> list[Row]:
    from isoloss.models.sizes import ARCHITECTURES, SIZES, num_parameters

    rows: list[Row] = []
    for name, shape in SIZES.items():
        counts = {a: num_parameters(shape, VOCABULARY, LENGTH, a) for a in ARCHITECTURES}
        text = f"parameters ({VOCABULARY:,} tokens, length {LENGTH})"
        rows.append(
            {
                "size": name,
                "width": shape.d_model,
                "layers": shape.num_layers,
                "heads": shape.num_heads,
                "feed-forward": shape.intermediate,
                **{f"{a} {text}": f"{count:,}" for a, count in counts.items()},
                "AdamW in float32": f"{TRAINING_BYTES * max(counts.values()) / 1e9:.2f} GB",
            }
        )
    return rows


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
            "model": f"{run.config.model.architecture} {run.config.model.size}",
            "language": run.config.language.kind,
            "steps": run.config.steps,
            "state": "complete" if run.complete else f"step {max(run.steps(), default=0)}",
            "evaluations": len(run.evaluations()),
        }
        for run in (find_runs(folder) if folder.is_dir() else [])
    ]
