"""`isoloss theory`: the paper's statements as programs, each with a table, a figure and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.estimate import rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from isoloss.theory.statements import Statement

HELP = """\
usage: isoloss theory STATEMENT [...]        isoloss theory STATEMENT --help tells more

The paper's statements as programs: a table, and a verdict on each statement.

statements:
  bartlett    the covariance of the gradient is the Hessian where the model is right (Lemma 3.2)
  sgd-flow    SGD on the minimisers follows the flow that lowers the Hessian's trace (Theorem 3.3)

examples:
  isoloss theory bartlett
      both sides exactly, at minimisers and away from them
  isoloss theory sgd-flow --figure flow.pdf
      two parameters, three step sizes, three batch sizes, and the control without label noise"""

FIGURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class BartlettArgs:
    """Compare the gradient's covariance with the Hessian of the loss (Lemma 3.2), on models small enough to enumerate:
    a softmax over a few contexts, and a tiny BERT on all bracket sentences of one length.
    """

    length: int = 4
    """Brackets in a sentence: 2, 4, 6 or 8."""
    directions: int = 4
    """Minimisers for each model, each left in a random direction."""
    seed: int = 0
    """Decides minimisers and directions."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    figure: Path | None = None
    """Draw to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True)
class FlowArgs:
    """Simulate SGD on the loss of one answer with logit a * b, from a minimiser, against the flow -(1/(4B)) grad Tr
    along the minimisers (Theorem 3.3).
    """

    probability: float = 0.7
    """Of the first of the two answers."""
    start: float = 2.0
    """a at the start; b is such that the start is a minimiser."""
    step_sizes: tuple[float, ...] = (0.1, 0.05, 0.025)
    """From large to small."""
    times: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Steps times the square of the step size."""
    batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Examples a step."""
    trajectories: int = 65536
    """For each step size and batch size."""
    coefficient: float = 0.25
    """The coefficient to check."""
    seed: int = 0
    """Decides the answers that are drawn."""
    figure: Path | None = None
    """Draw to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    if not arguments or arguments[0] in ("--help", "-h"):
        common.say(HELP)
        return 0
    name, *rest = arguments
    if name not in STATEMENTS:
        raise IsolossError(f"there is no statement {name!r}; the statements are {', '.join(STATEMENTS)}")
    return STATEMENTS[name](rest)


def _bartlett(arguments: list[str]) -> int:
    examples = [("isoloss theory bartlett --length 6", "sentences of six brackets")]
    args = common.parse(BartlettArgs, "theory bartlett", arguments, examples=examples)
    _check_figure(args.figure)
    common.use_threads(args.threads)
    from isoloss.theory import bartlett

    with common.Progress("bartlett", bartlett.num_points(max(args.directions, 0)), "points") as progress:
        found = bartlett.study(length=args.length, directions=args.directions, seed=args.seed, progress=progress)
    if args.figure is not None:
        from isoloss.report.theory import bartlett_gap

        _draw(args.figure, bartlett_gap(found))
    if args.json:
        common.emit_json(_document(args, found.statements, rows=[dataclasses.asdict(row) for row in found.rows]))
        return 0
    columns = ("model", "distance", "KL", "|Cov - H| / |H|", "|Tr Cov - Tr H|", "Tr Cov", "Tr H", "Tr Fisher")
    cells = [
        (
            row.model,
            f"{row.radius:g}",
            f"{row.kl_nats:.2e}",
            f"{row.gap:.1e} ± {row.gap_stderr:.0e}",
            f"{row.trace_gap:.1e} ± {row.trace_gap_stderr:.0e}",
            *(f"{trace:.5g}" for trace in (row.covariance_trace, row.hessian_trace, row.fisher_trace)),
        )
        for row in found.rows
    ]
    common.print_table(
        "Lemma 3.2: KL and traces in nats per predicted token; means over the directions", columns, cells
    )
    _print_statements(found.statements)
    return 0


def _sgd_flow(arguments: list[str]) -> int:
    examples = [("isoloss theory sgd-flow --coefficient 0.5", "a coefficient that the simulation refutes")]
    args = common.parse(FlowArgs, "theory sgd-flow", arguments, examples=examples)
    _check_figure(args.figure)
    from isoloss.theory import sgd_flow

    names = [field.name for field in dataclasses.fields(sgd_flow.Settings)]
    settings = sgd_flow.Settings(**{name: getattr(args, name) for name in names})
    with common.Progress("sgd-flow", settings.num_steps, "steps") as progress:
        found = sgd_flow.study(settings, progress=progress)
    if args.figure is not None:
        from isoloss.report.theory import sgd_and_flow

        _draw(args.figure, sgd_and_flow(settings, found))
    if args.json:
        coefficients = {str(size): value.to_dict() for size, value in found.coefficients.items()}
        rows = [dataclasses.asdict(row) for row in found.rows]
        extra = {"rows": rows, "coefficients": coefficients, "control": found.control}
        common.emit_json(_document(args, found.statements, **extra))
        return 0
    columns = ("B", "eta", "K", "trace of SGD", "back on minimisers", "flow", "SGD less flow", "coefficient x B")
    cells = [
        (
            row.batch_size,
            f"{row.step_size:g}",
            f"{row.time:g}",
            rounded(row.trace.value, row.trace.stderr),
            rounded(row.retracted_trace.value, row.retracted_trace.stderr),
            f"{row.flow_trace:.5f}",
            sgd_flow.percent(row.trace, row.flow_trace),
            rounded(-row.coefficient.value, row.coefficient.stderr),
        )
        for row in found.rows
    ]
    common.print_table(f"Theorem 3.3: traces of the Hessian in {sgd_flow.UNIT}", columns, cells, left=0)
    control = [f"{trace:.10f} (K = {time:g})" for time, trace in zip(settings.times, found.control, strict=True)]
    common.say(f"without label noise, eta = {settings.step_sizes[-1]:g}, from off the minimisers: {', '.join(control)}")
    _print_statements(found.statements)
    return 0


STATEMENTS: dict[str, Callable[[list[str]], int]] = {"bartlett": _bartlett, "sgd-flow": _sgd_flow}


def _check_figure(file: Path | None) -> None:
    if file is not None and file.suffix.lower() not in FIGURES:
        raise IsolossError(f"--figure is {file}; its name must end in {', '.join(FIGURES)}")


def _draw(file: Path, figure: Figure) -> None:
    from isoloss.report.flatness import save

    save(figure, file)
    common.note(f"figure: {file}")


def _document(args: Any, statements: Iterable[Statement], **extra: Any) -> dict[str, Any]:
    given = {name: value for name, value in dataclasses.asdict(args).items() if name not in ("figure", "json")}
    return {"settings": given, "statements": [statement.to_dict() for statement in statements], **extra}


def _print_statements(statements: Sequence[Statement]) -> None:
    for statement in statements:
        common.say(f"\n{statement.verdict}: {statement.text}\n  {statement.found}")
