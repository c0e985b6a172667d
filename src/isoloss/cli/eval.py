"""`isoloss eval`: measure checkpoints; what is measured already of a run is not measured again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss.cli import common, options
from isoloss.cli.options import Loading
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.base import measure_class
from isoloss.lab.presets import load_preset
from isoloss.registry import MEASURES

if TYPE_CHECKING:
    from isoloss.lab.evaluation.evaluator import Evaluations

EXAMPLES = [
    ("isoloss eval runs/first", "loss and trace of every checkpoint"),
    ("isoloss eval runs/first --measures loss trace probe-root --steps 1000 2000", "chosen measures and steps"),
    ("isoloss eval runs/first --measures few-shot-root-100 --num-test 10000", "probes on 100 sentences each"),
    ("isoloss eval runs/first/checkpoints/step-2000", "one checkpoint"),
    ("isoloss eval runs/first runs/second --steps 2000", "two runs in one table"),
    ("isoloss eval runs/first --preset paper", "on as many sentences as the paper, by its estimators"),
    ("isoloss eval CHECKPOINT --data text.txt --measures loss fisher-rao --output out", "any checkpoint, on your text"),
    ("isoloss eval CHECKPOINT --language pcfg-laptop --measures loss probe-root", "and on a language"),
]
# what `--help` shows; `--help-all` shows the rest
COMMON = (
    "models",
    "measures",
    "preset",
    "steps",
    "data",
    "language",
    "tokenizer",
    "length",
    "num_sequences",
    "output",
    "device",
    "json",
)


def _say_below_majority(evaluations: Evaluations) -> None:
    """Say which accuracies are below the majority class's, and why; a row of the table looks like any other."""
    from isoloss.transfer.results import below_majority

    for model, evaluation in zip(evaluations.models, evaluations, strict=True):
        accuracy = evaluation.estimates.get("accuracy")
        if accuracy is not None and (problem := below_majority(accuracy.details)) is not None:
            step = "" if evaluation.step is None else f" at step {evaluation.step}"
            common.say_wrapped(f"{evaluation.measure} of {model}{step}: {problem}")


@dataclass(frozen=True)
class Args:
    """Measure checkpoints: loss, flatness, downstream accuracy. Those of runs are measured on the run's own language.

    The evaluations of a run are kept in its folder, and what is there is not measured again.
    """

    models: options.Positional[tuple[str, ...]]
    """Run directories, checkpoint folders (RUN/checkpoints/step-N), or, with --data
    or --language, any checkpoint folder or name on the Hugging Face hub (NAME@REVISION)."""
    measures: tuple[str, ...] | None = None
    """Names of measures (isoloss ls measures lists them, isoloss ls measures NAME the settings of one); default:
    loss, where it can be had, and trace."""
    preset: str | None = None
    """Settings of the paper (paper or authors), for what no option gives: 1,000,000 sentences for the loss, the trace
    from 10,000 and 50 sampled labels for each, and its probe."""
    steps: tuple[int | Literal["last"], ...] = ()
    """Of runs: steps to measure, last for the last one; default: all that have a checkpoint."""
    data: Path | None = None
    """Measure on text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs) or token ids (.npy), instead of a
    run's own language."""
    language: str | None = None
    """Measure on a language: a preset (isoloss ls languages) or a file."""
    output: Path | None = None
    """With --data or --language: a folder for the results, as files."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """With --data or --language: type of the weights."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """Print one JSON document."""
    loading: Loading = field(default_factory=Loading)


def arguments_class() -> type:
    """Return the arguments with the settings of all measures."""
    return options.with_measures(Args, MEASURES.loaded(measure_class))


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args: Any = options.parse(arguments_class(), "eval", arguments, examples=EXAMPLES, common=COMMON)
    preset = {} if args.preset is None else load_preset(args.preset).measures
    common.use_threads(args.threads)
    from isoloss.lab.evaluation.evaluator import evaluate

    with common.Progress("measuring", None, "evaluations") as bar:

        def show(done: int, total: int, note: str) -> None:
            # how many evaluations there are is known only once all models were opened
            if bar.total is None:
                bar.begin(bar.label, total, bar.unit)
            bar(done, note)

        evaluations = evaluate(
            args.models,
            args.measures,
            data=args.data,
            language=args.language,
            inputs=InputConfig(**args.inputs),
            steps=args.steps,
            settings={**preset, **args.measure},
            output=args.output,
            dtype=args.dtype,
            **vars(args.loading),
            progress=show,
        )
    if args.json:
        common.emit_json({"evaluations": evaluations.to_dict()})
    else:
        columns, rows, num_text = evaluations.table()
        common.print_table(", ".join(args.models), columns, rows, left=num_text)
        _say_below_majority(evaluations)
    return 0
