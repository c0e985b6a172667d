"""`isoloss ls`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from isoloss.cli import common
from isoloss.registry import ALGORITHMS, EXECUTORS, LANGUAGES, MEASURES, MODELS, STUDIES, TASKS, Registry

EXAMPLES = [
    ("isoloss ls", "everything that can be named on the command line"),
    ("isoloss ls models", "architectures, their numbers of parameters and the memory that training them takes"),
    ("isoloss ls sizes", "the same by size"),
    ("isoloss ls runs --folder runs", "the runs below a folder"),
]

Row = dict[str, Any]
What = Literal["all", "languages", "models", "sizes", "tasks", "measures", "algorithms", "executors", "studies", "runs"]

VOCABULARY, LENGTH = 30_522, 128  # that sizes are given for: BERT's vocabulary, and its usual sequences
TRAINING_BYTES = 16  # a parameter's value, gradient and AdamW's two moments, in float32
MEMORY = "AdamW in float32"
FREE_SHAPES = (
    "For any other shape, give isoloss train a size and --layers, --width, --heads or --ffn (for an LSTM: --layers, "
    "--width or --directions 1)."
)
COUNTED = f"parameters for {VOCABULARY:,} tokens and a length of {LENGTH}"


@dataclass(frozen=True)
class Args:
    """List what can be named: languages, models, tasks, measures, algorithms, executors, studies, and runs."""

    what: tyro.conf.Positional[What] = "all"
    """What to list."""
    folder: Path = Path("runs")
    """Where runs are looked for."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = common.parse(Args, "ls", arguments, examples=EXAMPLES)
    lists: dict[str, Callable[[], list[Row]]] = {
        "languages": _languages,
        "models": _models,
        "sizes": _sizes,
        "tasks": _tasks,
        "measures": lambda: _components(MEASURES),
        "algorithms": lambda: _components(ALGORITHMS),
        "executors": lambda: _components(EXECUTORS),
        "studies": _studies,
        "runs": lambda: _runs(args.folder),
    }
    chosen = {name: make() for name, make in lists.items() if args.what in ("all", name)}
    if args.json:
        common.emit_json(chosen)
        return 0
    for name, rows in chosen.items():
        if not rows:
            common.say_wrapped(f"{name}: none in {args.folder}")
            continue
        title = f"{name} ({COUNTED})" if name in ("models", "sizes") else name
        cells = [["" if value is None else value for value in row.values()] for row in rows]
        common.print_table(title, list(rows[0]), cells, left=1 if name == "sizes" else len(rows[0]))
        if name in ("models", "sizes"):
            common.say_wrapped(FREE_SHAPES)
        common.say("")
    return 0


def _languages() -> list[Row]:
    from isoloss.languages.config import PRESETS

    files = "a grammar (NLTK's PCFG text or rule lines), a stored language (.safetensors), or a config (.toml)"
    texts = "text (.txt, .jsonl or a folder) together with --tokenizer"
    rows: list[Row] = [{"language": name, "what": text} for name, (_, text) in PRESETS.items()]
    rows += [
        {"language": name, "what": f"{LANGUAGES.summary(name)}; with its defaults, or its settings in a .toml file"}
        for name in LANGUAGES
    ]
    return [*rows, {"language": "FILE", "what": files}, {"language": "TEXT", "what": texts}]


def _models() -> list[Row]:
    rows: list[Row] = []
    for name in MODELS:
        architecture = MODELS.load(name)
        sizes = architecture.sizes
        counts = [architecture.num_parameters(shape, VOCABULARY, LENGTH) for shape in sizes.values()]
        rows.append(
            {
                "architecture": name,
                "objective": architecture.objective,
                "sizes": "{} to {}".format(*(end(zip(counts, sizes, strict=True))[1] for end in (min, max))),
                "parameters": f"{min(counts):,} to {max(counts):,}",
                MEMORY: f"{_training_memory(min(counts))} to {_training_memory(max(counts))}",
                "what": MODELS.summary(name),
            }
        )
    return rows


def _sizes() -> list[Row]:
    rows: list[Row] = []
    architectures = {name: MODELS.load(name) for name in MODELS}
    shapes = {name: shape for architecture in architectures.values() for name, shape in architecture.sizes.items()}
    for name, shape in shapes.items():
        having = {a: architecture for a, architecture in architectures.items() if name in architecture.sizes}
        counts = {a: own.num_parameters(shape, VOCABULARY, LENGTH) for a, own in having.items()}
        rows.append(
            {
                "size": name,
                "width": getattr(shape, "d_model", None) or getattr(shape, "hidden", None),
                "layers": getattr(shape, "num_layers", None),
                "heads": getattr(shape, "num_heads", None),
                "feed-forward": getattr(shape, "intermediate", None),
                **{f"{a} parameters": f"{counts[a]:,}" if a in counts else None for a in architectures},
                MEMORY: _training_memory(max(counts.values())),
            }
        )
    return rows


def _training_memory(parameters: int) -> str:
    return f"{TRAINING_BYTES * parameters / 1e9:.2f} GB"


def _tasks() -> list[Row]:
    own: dict[str, str] = {}
    for kind in LANGUAGES:
        own |= LANGUAGES.load(kind).tasks
    own |= {name: TASKS.summary(name) for name in TASKS}
    return [
        *({"task": name, "what": text} for name, text in own.items()),
        {"task": "NAME", "what": "your own labeled text: --data FILE --text COLUMN [--pair COLUMN] [--label COLUMN]"},
    ]


def _components(registry: Registry) -> list[Row]:
    return [{registry.kind: name, "what": registry.summary(name)} for name in registry]


def _studies() -> list[Row]:
    from isoloss.studies.spec import load_study

    return [
        {"study": name, "scale": scale, "what": STUDIES.summary(name), "size": size.text}
        for name in STUDIES
        for scale, size in load_study(name).scales.items()
    ]


def _runs(folder: Path) -> list[Row]:
    from isoloss.runs import find_runs

    return [
        {
            "run": str(run.path),
            "model": str(run.config.model),
            "language": run.config.language.kind,
            "steps": run.config.steps,
            "state": "complete" if run.complete else f"step {max(run.steps(), default=0)}",
            "evaluations": len(run.evaluations()),
        }
        for run in (find_runs(folder) if folder.is_dir() else [])
    ]
