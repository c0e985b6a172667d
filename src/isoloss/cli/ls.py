"""`isoloss ls`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from isoloss.cli import common, options
from isoloss.errors import IsolossError, did_you_mean
from isoloss.lab.evaluation.measures.base import measure_class, name_fields
from isoloss.lab.languages.config import PRESETS as LANGUAGE_PRESETS
from isoloss.lab.presets import PRESETS
from isoloss.registry import (
    ALGORITHMS,
    EXECUTORS,
    LANGUAGES,
    MEASURES,
    MODELS,
    OPTIMIZERS,
    RESCALINGS,
    STUDIES,
    TASKS,
    Registry,
)
from isoloss.runs import Run, find_runs

if TYPE_CHECKING:
    from isoloss.config import LanguageConfig

EXAMPLES = [
    ("isoloss ls", "the kinds of things that can be named on the command line, and how many there are"),
    ("isoloss ls measures", "the measures"),
    ("isoloss ls measures minimal-trace", "one measure: what it is, and its settings"),
    ("isoloss ls models", "architectures, their numbers of parameters and the memory that training them takes"),
    ("isoloss ls sizes", "the same by size"),
    ("isoloss ls rescalings", "the families of models whose minimal trace can be measured"),
    ("isoloss ls runs --folder runs", "the runs below a folder"),
]

Row = dict[str, Any]
KINDS = {
    "measures": "what can be measured of a model: isoloss measure --measures",
    "languages": "what models learn: isoloss sample and isoloss train --language",
    "models": "architectures: isoloss train --architecture",
    "sizes": "shapes of a model: isoloss train --size",
    "tasks": "downstream tasks: isoloss transfer --task",
    "algorithms": "what a training step does: isoloss train --algorithm",
    "optimizers": "what turns a gradient into an update: isoloss train --optimizer",
    "rescalings": "families of models whose minimal trace is known",
    "presets": "the paper's settings: isoloss train --preset",
    "studies": "whole experiments: isoloss study run",
    "executors": "where a study runs: isoloss study run --executor",
    "runs": "trained here: isoloss show, isoloss measure",
}

VOCABULARY, LENGTH = 30_522, 128  # that sizes are given for: BERT's vocabulary, and its usual sequences
TRAINING_BYTES = 16  # a parameter's value, gradient and AdamW's two moments, in float32
HEADINGS = {  # of a table, where they are not the keys in JSON
    "ffn": "feed-forward",
    "scale_description": "size",
    "training_memory_bytes": "AdamW in float32",
}
FREE_SHAPES = (
    "For any other shape, give isoloss train a size and --layers, --width, --heads or --ffn (for an LSTM: --layers, "
    "--width or --directions 1)."
)
COUNTED = f"parameters for {VOCABULARY:,} tokens and a length of {LENGTH}"


@dataclass(frozen=True)
class Args:
    """List what can be named: languages, models, sizes, measures, runs and so on."""

    what: Annotated[
        options.Positional[Literal["kinds", "all", *KINDS]],  # type: ignore[valid-type]
        f"A kind: {', '.join(KINDS)}; all lists all.",
    ] = "kinds"
    name: options.Positional[str | None] = None
    """One of the kind, to be shown with its settings."""
    folder: Path = Path("runs")
    """Where runs are looked for."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "ls", arguments, examples=EXAMPLES)
    lists: dict[str, Callable[[], list[Row]]] = {
        "languages": _languages,
        "models": _models,
        "sizes": _sizes,
        "tasks": _tasks,
        "measures": lambda: _components(MEASURES, "measure"),
        "rescalings": lambda: _components(RESCALINGS, "family"),
        "algorithms": lambda: _components(ALGORITHMS, "algorithm"),
        "optimizers": lambda: _components(OPTIMIZERS, "optimizer"),
        "executors": lambda: _components(EXECUTORS, "executor"),
        "studies": _studies,
        "presets": lambda: [{"preset": name, "description": one.description} for name, one in PRESETS.items()],
        "runs": lambda: [_run(run) for run in (find_runs(args.folder) if args.folder.is_dir() else [])],
    }
    if args.name is not None:
        if args.what not in lists:
            raise IsolossError(
                f"give the kind of {args.name!r}: isoloss ls KIND NAME; the kinds are {', '.join(KINDS)}"
            )
        return _show_one(args, lists[args.what]())
    if args.what == "kinds":
        # by name: importing the studies takes seconds
        chosen = {"kinds": _kinds(lists | {"studies": lambda: [{"study": name} for name in STUDIES]})}
    else:
        chosen = {kind: lists[kind]() for kind in KINDS if args.what in ("all", kind)}
    if args.json:
        common.emit_json(chosen)
        return 0
    for name, rows in chosen.items():
        if not rows:
            common.say_wrapped(f"{name}: none in {args.folder}")
            continue
        title = f"{name} ({COUNTED})" if name in ("models", "sizes") else name
        shown = [_shown(row) for row in rows]
        # the title of the sizes says what the numbers below an architecture's name are
        headings = [heading.removesuffix(" parameters") for heading in shown[0]]
        common.print_table(
            title, headings, [list(row.values()) for row in shown], left=1 if name == "sizes" else len(headings)
        )
        if name == "kinds":
            common.say_wrapped("isoloss ls KIND lists one kind; isoloss ls KIND NAME shows one entry of it.")
        if name in ("models", "sizes"):
            common.say_wrapped(FREE_SHAPES)
        common.say("")
    return 0


def _kinds(lists: dict[str, Callable[[], list[Row]]]) -> list[Row]:
    """Return the kinds with the number of names of each; words in capital letters stand for names of one's own."""
    names = {kind: [str(next(iter(row.values()))) for row in make()] for kind, make in lists.items()}
    return [
        {"kind": kind, "number": sum(not name.isupper() for name in names[kind]), "description": text}
        for kind, text in KINDS.items()
    ]


def _show_one(args: Args, rows: list[Row]) -> int:
    """Show what is listed of one name of a kind, and its settings where it is made from some.

    Raises:
        IsolossError: The kind has no such name.
    """
    assert args.name is not None
    registry = {"measures": MEASURES, "algorithms": ALGORITHMS, "languages": LANGUAGES}.get(args.what)
    # probe-root is the measure probe-TASK
    name = MEASURES.match(args.name)[0] if registry is MEASURES else args.name
    names = [str(next(iter(row.values()))) for row in rows]
    if name not in names:
        guess = did_you_mean(name, names) or ";"
        raise IsolossError(f"there is no {name!r} among the {args.what}{guess} they are {', '.join(names) or 'none'}")
    settings: list[Row] = []
    if registry is not None and name in registry:
        prefix = f"{name}-" if registry is ALGORITHMS else ""
        load = measure_class if registry is MEASURES else registry.load
        settings = options.settings(load(name), exclude={"kind", *name_fields(name)}, prefix=prefix)
    chosen = [row for row, other in zip(rows, names, strict=True) if other == name]
    if args.json:
        common.emit_json({args.what: [row | {"settings": settings} for row in chosen]})
        return 0
    for row in chosen:
        shown = _shown(row)
        common.say_wrapped(f"{name}: {shown.pop('description', '')}")
        for heading, text in list(shown.items())[1:]:
            common.say_wrapped(f"{heading}: {text}", indent=2)
    for row in settings:
        default = f" (default: {row['default']})" * (row["default"] is not None)
        # a language has its settings in a file
        setting = row["setting"] if registry is LANGUAGES else options.option_name(row["setting"])
        common.say_wrapped(f"{setting}{default}: {row['description']}", indent=2)
    return 0


def _shown(row: Row) -> dict[str, str]:
    """Return a row of JSON as headings and cells."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            cells |= {f"{name} {key}": _text(key, one) for name, one in value.items()}
        else:
            ends = [value[0], value[-1]] if isinstance(value, list) else [value]
            cells[HEADINGS.get(key, key)] = " to ".join(_text(key, end) for end in ends)
    return cells


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key == "training_memory_bytes":
        return f"{value / 1e9:.2f} GB"
    return f"{value:,}" if key == "parameters" else str(value)


def _languages() -> list[Row]:
    files = "a grammar (NLTK's PCFG text or rule lines), a stored language (.safetensors), or a config (.toml)"
    texts = "text (.txt, .jsonl or a folder) together with --tokenizer"
    rows: list[Row] = [{"language": name, "description": text} for name, (_, text) in LANGUAGE_PRESETS.items()]
    rows += [
        {"language": name, "description": f"{LANGUAGES.summary(name).rstrip('.')}; {_settings(config)}"}
        for name, config in LANGUAGES.loaded().items()
    ]
    return [*rows, {"language": "FILE", "description": files}, {"language": "TEXT", "description": texts}]


def _settings(config: type[LanguageConfig]) -> str:
    """Return where the settings of a kind of language come from."""
    if required := config.required_fields():
        return f"needs a .toml file with {', '.join(required)}"
    return "its defaults, or settings in a .toml file"


def _models() -> list[Row]:
    rows: list[Row] = []
    for name, architecture in MODELS.loaded().items():
        counts = {
            name: architecture.num_parameters(shape, VOCABULARY, LENGTH) for name, shape in architecture.sizes.items()
        }
        sizes = sorted(counts, key=counts.__getitem__)
        ends = [counts[size] for size in (sizes[0], sizes[-1])]
        rows.append(
            {
                "architecture": name,
                "objective": architecture.objective,
                "sizes": sizes,
                "parameters": ends,
                "training_memory_bytes": [TRAINING_BYTES * count for count in ends],
                "description": MODELS.summary(name),
            }
        )
    return rows


def _sizes() -> list[Row]:
    rows: list[Row] = []
    architectures = MODELS.loaded()
    shapes = {name: shape for architecture in architectures.values() for name, shape in architecture.sizes.items()}
    for name, shape in shapes.items():
        having = {a: architecture for a, architecture in architectures.items() if name in architecture.sizes}
        counts = {a: each.num_parameters(shape, VOCABULARY, LENGTH) for a, each in having.items()}
        rows.append(
            {
                "size": name,
                "width": getattr(shape, "d_model", None) or getattr(shape, "hidden", None),
                "layers": getattr(shape, "num_layers", None),
                "heads": getattr(shape, "num_heads", None),
                "ffn": getattr(shape, "intermediate", None),
                "parameters": {a: counts.get(a) for a in architectures},
                "training_memory_bytes": TRAINING_BYTES * max(counts.values()),
            }
        )
    return rows


def _tasks() -> list[Row]:
    tasks: dict[str, str] = {}
    for config in LANGUAGES.loaded().values():
        for name, text in config.task_patterns.items():
            # a task that several kinds have comes after the others of all of them
            tasks.pop(name, None)
            tasks[name] = text
    tasks |= {name: TASKS.summary(name) for name in TASKS.loaded()}
    return [
        *({"task": name, "description": text} for name, text in tasks.items()),
        {
            "task": "NAME",
            "description": "your own labeled text: --data FILE --text COLUMN [--pair COLUMN] [--label COLUMN]",
        },
    ]


def _components(registry: Registry, heading: str) -> list[Row]:
    # what has a line about it is not loaded: rescalings and optimizers need torch
    return [{heading: name, "description": text} for name, text in registry.loaded(registry.summary).items()]


def _studies() -> list[Row]:
    from isoloss.studies import load_study

    return [
        {"study": name, "scale": scale, "description": STUDIES.summary(name), "scale_description": size.description}
        for name, study in STUDIES.loaded(load_study).items()
        for scale, size in study.scales.items()
    ]


def _run(run: Run) -> Row:
    row: Row = {"run": str(run.path), "model": None, "language": None, "steps": None, "state": "", "evaluations": None}
    try:
        config, done = run.config, f"step {max(run.steps(), default=0)}"
        return row | {
            "model": str(config.model),
            "language": config.language.kind,
            "steps": config.steps,
            "state": "complete" if run.complete else done,
            "evaluations": len(run.evaluations()),
        }
    except IsolossError as error:  # the others are listed all the same
        return row | {"state": f"unreadable: {error}"}
