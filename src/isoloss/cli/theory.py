"""`isoloss theory`: the paper's statements as programs, each with a table, a figure and a verdict."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from isoloss import files
from isoloss.cli import common, options
from isoloss.errors import IsolossError
from isoloss.paper.theory.bracket_settings import Settings as BracketsSettings
from isoloss.statistics.estimate import rounded

if TYPE_CHECKING:
    from isoloss.paper.theory.sgd_flow import Result, Settings
    from isoloss.paper.theory.statements import Statement
    from isoloss.report.charts import Spec

EXAMPLES = [
    ("isoloss theory 3.3", "by its number in the paper: 3.2 is bartlett, 3.3 sgd-flow, 5.1 brackets"),
    ("isoloss theory bartlett --length 6", "both sides exactly, on sentences of six brackets"),
    ("isoloss theory sgd-flow --model two-parameters", "a minute: the model whose flow has a closed form"),
    ("isoloss theory sgd-flow --trajectories 256 --batch-sizes 1 2", "a minute: both models, with larger errors"),
    ("isoloss theory sgd-flow --figure flow.png", "two models, three step sizes, three batch sizes, and a control"),
    ("isoloss theory sgd-flow --coefficient 0.5", "a coefficient that the simulation contradicts"),
    ("isoloss theory brackets --lengths 6 --figure brackets.pdf", "the shortest sentences alone, and a figure"),
]
FLOW_NOTE = (
    "-> 0: extrapolated from all step sizes. distance^2: of SGD's parameters from the flow's, as a fraction of the "
    "squared distance of the flow from the start. Other times: --json, or --figure."
)


class Table(NamedTuple):
    """What `common.print_table` takes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    left: int = 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the program of a statement prints, draws, or gives as JSON; of sgd-flow, once a model is done."""

    statements: Sequence[Statement]
    document: dict[str, Any]  # beside settings and statements; with those of the models before it
    tables: Sequence[Table]
    figure: Callable[[], Spec]  # also of the models before it
    heading: str = ""  # before the tables
    note: str = ""  # after them


@dataclass(frozen=True, kw_only=True)
class CommonArgs:
    """What every statement takes."""

    seed: int = 0
    """Decides all random numbers."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    figure: Path | None = None
    """Draw to this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON document."""

    def reports(self) -> Iterator[Report]:
        """Run the program."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BartlettArgs(CommonArgs):
    """Compare the gradient's covariance with the Hessian of the loss (Lemma 3.2), on models small enough to enumerate:
    a softmax over a few contexts, and a tiny BERT on all bracket sentences of one length.
    """

    length: int = 4
    """Brackets in a sentence: 2, 4, 6 or 8."""
    directions: int = 4
    """Minimizers per model; from each, one random direction is followed."""

    def reports(self) -> Iterator[Report]:
        """Run the program."""
        from isoloss.paper.theory import bartlett

        with common.Progress("bartlett", bartlett.num_points(max(self.directions, 0)), "points") as progress:
            result = bartlett.study(length=self.length, directions=self.directions, seed=self.seed, progress=progress)
        columns = ("distance", "KL", "|Cov-H|/|H|", "|Tr Cov-Tr H|", "Tr Cov", "Tr H", "Tr Fisher")
        cells: dict[str, list[Sequence[object]]] = {}
        for row in result.rows:
            gaps = (f"{row.gap:.1e} ± {row.gap_stderr:.0e}", f"{row.trace_gap:.1e} ± {row.trace_gap_stderr:.0e}")
            traces = (f"{trace:.5g}" for trace in (row.covariance_trace, row.hessian_trace, row.fisher_trace))
            cells.setdefault(row.model, []).append((f"{row.radius:g}", f"{row.kl_nats:.1e}", *gaps, *traces))
        yield Report(
            statements=result.statements,
            document={"rows": [dataclasses.asdict(row) for row in result.rows]},
            tables=[Table(model, columns, rows) for model, rows in cells.items()],
            figure=lambda: _figures().bartlett_gap(result),
            heading="Lemma 3.2: KL and traces in nats per predicted token; means over the directions",
        )


@dataclass(frozen=True, kw_only=True)
class FlowArgs(CommonArgs):
    """Simulate SGD from a minimizer of a loss that has many, against the flow -(1/(4B)) grad Tr along the minimizers
    (Theorem 3.3): one answer with logit a * b, and a masked language model of 88 parameters on nine sentences.
    """

    model: Literal["both", "two-parameters", "masked-lm"] = "both"
    """The model."""
    probability: float = 0.7
    """two-parameters: of the first of the two answers."""
    start: float = 2.0
    """two-parameters: a at the start; b is such that the start is a minimizer."""
    step_sizes: tuple[float, ...] = ()
    """From large to small; none: 0.1 0.05 0.025 for two-parameters, 0.05 0.025 0.0125 for masked-lm."""
    times: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Steps times the square of the step size."""
    batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Examples per step."""
    trajectories: int = 0
    """For each step size and batch size; 0: 65536 for two-parameters, 1024 for masked-lm."""
    coefficient: float = 0.25
    """The coefficient to check."""

    def reports(self) -> Iterator[Report]:
        """Run the program for each model."""
        from isoloss.paper.theory.sgd_flow import study

        results: list[tuple[Settings, Result]] = []
        document: dict[str, Any] = {"rows": [], "limits": [], "control": {}}
        for settings in self._settings():
            name = settings.model.name
            common.note(f"sgd-flow, {name}: {settings.num_steps:,} steps of SGD, then the control")
            with common.Progress(f"sgd-flow, {name}", settings.num_steps, "steps") as progress:
                result = study(settings, progress=progress)
            results.append((settings, result))
            document["rows"] += [{"model": name, **dataclasses.asdict(row)} for row in result.rows]
            document["limits"] += [{"model": name, **dataclasses.asdict(row)} for row in result.limits]
            document["control"][name] = result.control
            yield Report(
                statements=result.statements,
                document=document,
                tables=[_flow_table(settings, result)],
                figure=lambda: _figures().sgd_and_flow(results),
                note=FLOW_NOTE if len(results) == 1 else "",
            )

    def _settings(self) -> list[Settings]:
        from isoloss.paper.theory.sgd_flow import masked_lm, two_parameters

        of_two = {"probability": self.probability, "start": self.start}  # settings of the model two-parameters alone
        if self.model == "masked-lm" and of_two != {"probability": FlowArgs.probability, "start": FlowArgs.start}:
            raise IsolossError("--probability and --start are of the model two-parameters, not of masked-lm")
        shared: dict[str, Any] = {name: getattr(self, name) for name in ("times", "batch_sizes", "coefficient", "seed")}
        # each model has defaults of its own for these two
        by_model = {"step_sizes": self.step_sizes, "trajectories": self.trajectories}
        shared |= {name: value for name, value in by_model.items() if value}
        settings = [] if self.model == "masked-lm" else [two_parameters(**of_two, **shared)]
        return settings if self.model == "two-parameters" else [*settings, masked_lm(**shared)]


def _flow_table(settings: Settings, result: Result) -> Table:
    """Return the rows of the last time; the JSON document has the others."""
    # a later time replaces an earlier one
    at_end = {(row.batch_size, row.step_size): row for row in [*result.rows, *result.limits]}
    cells = [
        (
            size,
            f"{eta:g}" if eta else "-> 0",
            f"{row.flow_trace:.5f}",
            row.error_percent,
            rounded(-row.coefficient.value, row.coefficient.stderr),
            rounded(row.distance.value, row.distance.stderr),
        )
        for (size, eta), row in sorted(at_end.items(), key=lambda item: item[0][0])  # which keeps their order otherwise
    ]
    title = (
        f"Theorem 3.3, {settings.model.name}: at K = {settings.times[-1]:g}, "
        f"from a trace of {settings.flow_trace(0.0, 1):.5g} {settings.model.unit}"
    )
    return Table(title, ("B", "eta", "flow's trace", "SGD minus flow", "coefficient x B", "distance^2"), cells)


@dataclass(frozen=True, kw_only=True)
class BracketsArgs(CommonArgs, BracketsSettings):
    """Compare solutions of a language of brackets at zero loss: their traces of the Hessian by visiting every input,
    the flattest by descent on the trace, and heads fitted on each for
    the downstream task (Theorem 5.1, Lemmas G.1 to G.5, Theorem G.6).
    """

    def reports(self) -> Iterator[Report]:
        """Run the program."""
        from isoloss.paper.theory import brackets

        with common.Progress("brackets", self.num_steps, "steps") as progress:
            result = brackets.study(self, progress=progress)
        traces = [
            (
                *(row.solution, row.length, row.width, f"{found.loss:.1e}", f"{found.trace:.4g}"),
                *(f"{value:.3f}" for value in (found.ratio, found.balance, found.cancellation, found.evenness)),
            )
            for row in result.solutions
            for found in [row.flatness]
        ]
        heads = [
            (
                *(row.solution, row.length, row.samples, rounded(100 * row.failures, 100 * row.failures_stderr)),
                *(f"{100 * probability:.3g}" for probability in (row.claimed, row.expected)),
                rounded(row.loss, row.loss_stderr) if row.loss > brackets.ZERO else f"{row.loss:.0e}",
            )
            for row in result.heads
        ]
        widths = [
            (row.length, row.inputs, row.predicted, *map(rounded, row.widths, row.widths_stderr))
            for row in result.widths
        ]
        yield Report(
            statements=brackets.judge(result),
            document=dataclasses.asdict(result),
            tables=[
                Table(
                    "Solutions: loss, trace of the Hessian (squared answers), excess by condition",
                    ("solution", "T", "m", "loss", "trace", "/ bound", "(3)", "(4)", "(5)"),
                    traces,
                    left=1,
                ),
                Table(
                    f"Heads on n strings: fraction with a population loss above {brackets.ZERO:g} squared answers",
                    ("head on", "T", "n", "fail (%)", "2^-n (%)", "expect (%)", "mean loss"),
                    heads,
                    left=1,
                ),
                Table(
                    "Random features needed for a loss",
                    ("T", "inputs", "predicted", *(f"loss {loss:g}" for loss in brackets.LOSSES)),
                    widths,
                ),
            ],
            figure=lambda: _figures().bracket_solutions(result),
            note="(3) to (5): factors of the trace over its bound, 1 where the paper's condition holds. expect: "
            "probability that n strings lack positive or negative answers. predicted: features that fit every input "
            "exactly.",
        )


def _figures() -> ModuleType:
    """Return the module of figures, which takes the extra `study`; the programs themselves do not."""
    from isoloss.paper.theory import figures

    return figures


SUBCOMMANDS = {"bartlett": BartlettArgs, "sgd-flow": FlowArgs, "brackets": BracketsArgs}
NUMBERS = {"3.2": "bartlett", "3.3": "sgd-flow", "5.1": "brackets"}  # in the paper


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    arguments = [NUMBERS.get(word, word) for word in arguments[:1]] + arguments[1:]
    args: CommonArgs = options.parse(SUBCOMMANDS, "theory", arguments, examples=EXAMPLES)
    common.check_figure(args.figure)
    files.check_outputs({"--figure": args.figure})
    common.use_threads(args.threads)
    done: list[Report] = []
    try:
        for report in args.reports():
            if not args.json:
                _say(report, is_first=not done)
            done.append(report)
    finally:
        # of what is done, if the rest is interrupted or fails
        if done and args.figure is not None:
            common.save_figure(args.figure, done[-1].figure())
    if args.json:
        settings = {key: value for key, value in dataclasses.asdict(args).items() if key not in ("figure", "json")}
        judged = [statement.to_dict() for report in done for statement in report.statements]
        common.emit_json({"settings": settings, "statements": judged, **done[-1].document})
    return 0


def _say(report: Report, *, is_first: bool) -> None:
    if report.heading:
        common.say(report.heading)
    for index, table in enumerate(report.tables):
        if index or report.heading or not is_first:
            common.say("")
        common.print_table(table.title, table.columns, table.rows, left=table.left)
    if report.note:
        common.say("")
        common.say_wrapped(report.note)
    common.say_statements(report.statements)
    # now: where Ctrl-C also ends the reader of a pipe, such as `tee`, it would be lost
    sys.stdout.flush()
