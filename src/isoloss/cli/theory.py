"""`isoloss theory`: the paper's statements as programs, each with a table, a figure and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss.cli import common
from isoloss.errors import IsolossError, did_you_mean
from isoloss.statistics.estimate import rounded

if TYPE_CHECKING:
    from isoloss.paper.theory.bracket_language.study import Result
    from isoloss.paper.theory.sgd_flow.study import Result as FlowResult
    from isoloss.paper.theory.sgd_flow.study import Settings
    from isoloss.paper.theory.statements import Statement

HELP = """\
usage: isoloss theory STATEMENT [...]        isoloss theory STATEMENT --help tells more

The paper's statements as programs: a table, and a verdict on each statement.

statements:
  bartlett    the covariance of the gradient is the Hessian where the model is right (Lemma 3.2)
  sgd-flow    SGD on the minimizers follows the flow that lowers the Hessian's trace (Theorem 3.3)
  brackets    in a language of brackets the flattest solution is the one that transfers (Theorem 5.1)

examples:
  isoloss theory bartlett
      both sides exactly, at minimizers and away from them
  isoloss theory sgd-flow --figure flow.pdf
      two models, three step sizes, three batch sizes, and a control without label noise
  isoloss theory brackets
      two solutions at zero loss, the flattest by descent, and what a head on each learns downstream"""


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


@dataclass(frozen=True, kw_only=True)
class BartlettArgs(CommonArgs):
    """Compare the gradient's covariance with the Hessian of the loss (Lemma 3.2), on models small enough to enumerate:
    a softmax over a few contexts, and a tiny BERT on all bracket sentences of one length.
    """

    length: int = 4
    """Brackets in a sentence: 2, 4, 6 or 8."""
    directions: int = 4
    """Minimizers for each model, each left in a random direction."""


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
    """Examples a step."""
    trajectories: int = 0
    """For each step size and batch size; 0: 65536 for two-parameters, 1024 for masked-lm."""
    coefficient: float = 0.25
    """The coefficient to check."""


@dataclass(frozen=True, kw_only=True)
class BracketsArgs(CommonArgs):
    """Compare solutions of a language of brackets at zero loss: their traces of the Hessian by visiting every input,
    the flattest by descent on the trace, and heads on each downstream (Theorem 5.1, Lemmas G.1 to G.5, Theorem G.6).
    """

    lengths: tuple[int, ...] = (6, 8, 10)
    """Brackets in a sentence: of 4, 6, 8 and 10, increasing."""
    width: int = 16
    """Neurons of the descent from random weights."""
    steps: int = 1500
    """Steps of each descent."""
    samples: tuple[int, ...] = (2, 4, 8, 16)
    """Strings in a downstream training set."""
    trials: int = 4096
    """Training sets of each size."""
    draws: int = 3
    """Draws of random features for the width that they need."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    if not arguments or arguments[0] in ("--help", "-h"):
        common.say(HELP)
        return 0
    name, *rest = arguments
    if name not in STATEMENTS:
        meant = did_you_mean(name, STATEMENTS) or ";"
        raise IsolossError(f"there is no statement {name!r}{meant} the statements are {', '.join(STATEMENTS)}")
    return STATEMENTS[name](rest)


def _bartlett(arguments: list[str]) -> int:
    examples = [("isoloss theory bartlett --length 6", "sentences of six brackets")]
    args = common.parse(BartlettArgs, "theory bartlett", arguments, examples=examples)
    common.check_figure(args.figure)
    common.use_threads(args.threads)
    from isoloss.paper.theory import bartlett

    with common.Progress("bartlett", bartlett.num_points(max(args.directions, 0)), "points") as progress:
        result = bartlett.study(length=args.length, directions=args.directions, seed=args.seed, progress=progress)
    if args.figure is not None:
        from isoloss.paper.theory.figures import bartlett_gap

        common.save_figure(args.figure, bartlett_gap(result))
    if args.json:
        common.emit_json(_document(args, result.statements, rows=[dataclasses.asdict(row) for row in result.rows]))
        return 0
    columns = ("distance", "KL", "|Cov-H|/|H|", "|Tr Cov-Tr H|", "Tr Cov", "Tr H", "Tr Fisher")
    common.say("Lemma 3.2: KL and traces in nats per predicted token; means over the directions")
    for model in dict.fromkeys(row.model for row in result.rows):
        cells = [
            (
                f"{row.radius:g}",
                f"{row.kl_nats:.1e}",
                f"{row.gap:.1e} ± {row.gap_stderr:.0e}",
                f"{row.trace_gap:.1e} ± {row.trace_gap_stderr:.0e}",
                *(f"{trace:.5g}" for trace in (row.covariance_trace, row.hessian_trace, row.fisher_trace)),
            )
            for row in result.rows
            if row.model == model
        ]
        common.say("")
        common.print_table(model, columns, cells, left=0)
    common.say_statements(result.statements)
    return 0


def _sgd_flow(arguments: list[str]) -> int:
    examples = [
        ("isoloss theory sgd-flow --model masked-lm", "the model whose flow has no closed form"),
        ("isoloss theory sgd-flow --coefficient 0.5", "a coefficient that the simulation refutes"),
    ]
    args = common.parse(FlowArgs, "theory sgd-flow", arguments, examples=examples)
    common.check_figure(args.figure)
    common.use_threads(args.threads)
    from isoloss.paper.theory.sgd_flow.study import study

    results: list[tuple[Settings, FlowResult]] = []
    for settings in _flow_settings(args):
        with common.Progress(f"sgd-flow, {settings.model.name}", settings.num_steps, "steps") as progress:
            results.append((settings, study(settings, progress=progress)))
    statements = [statement for _, result in results for statement in result.statements]
    if args.figure is not None:
        from isoloss.paper.theory.figures import sgd_and_flow

        common.save_figure(args.figure, sgd_and_flow(results))
    if args.json:
        tables = {
            part: [
                {"model": settings.model.name, **dataclasses.asdict(row)}
                for settings, result in results
                for row in getattr(result, part)
            ]
            for part in ("rows", "limits")
        }
        control = {settings.model.name: result.control for settings, result in results}
        common.emit_json(_document(args, statements, **tables, control=control))
        return 0
    for index, (settings, result) in enumerate(results):
        if index:
            common.say("")
        _print_flow(settings, result)
    common.say("")
    common.say_wrapped(
        "-> 0: extrapolated from all step sizes. distance^2: of SGD's parameters from the flow's, as a fraction of the "
        "squared distance of the flow from the start. Other times: --json, or --figure."
    )
    common.say_statements(statements)
    return 0


def _flow_settings(args: FlowArgs) -> list[Settings]:
    from isoloss.paper.theory.sgd_flow.study import masked_lm, two_parameters

    own = {"probability": args.probability, "start": args.start}
    if args.model == "masked-lm" and own != {"probability": FlowArgs.probability, "start": FlowArgs.start}:
        raise IsolossError("--probability and --start are of the model two-parameters, not of masked-lm")
    given: dict[str, Any] = {name: getattr(args, name) for name in ("times", "batch_sizes", "coefficient", "seed")}
    if args.step_sizes:
        given["step_sizes"] = args.step_sizes
    if args.trajectories:
        given["trajectories"] = args.trajectories
    settings = [] if args.model == "masked-lm" else [two_parameters(**own, **given)]
    return settings if args.model == "two-parameters" else [*settings, masked_lm(**given)]


def _print_flow(settings: Settings, result: FlowResult) -> None:
    """Print the rows of the last time; those of the others are in the JSON document."""
    at_end = {
        (row.batch_size, row.step_size): row for row in [*result.rows, *result.limits]
    }  # a later time replaces one
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
    columns = ("B", "eta", "flow's trace", "SGD less flow", "coefficient x B", "distance^2")
    common.print_table(title, columns, cells, left=0)


def _brackets(arguments: list[str]) -> int:
    examples = [
        ("isoloss theory brackets --lengths 6 --figure brackets.pdf", "the shortest sentences alone, and a figure")
    ]
    args = common.parse(BracketsArgs, "theory brackets", arguments, examples=examples)
    common.check_figure(args.figure)
    common.use_threads(args.threads)
    from isoloss.paper.theory.bracket_language import study, verdicts

    names = [field.name for field in dataclasses.fields(study.Settings)]
    settings = study.Settings(**{name: getattr(args, name) for name in names})
    with common.Progress("brackets", settings.num_steps, "steps") as progress:
        result = study.study(settings, progress=progress)
    statements = verdicts.judge(result)
    if args.figure is not None:
        from isoloss.paper.theory.figures import bracket_solutions

        common.save_figure(args.figure, bracket_solutions(result))
    if args.json:
        common.emit_json(_document(args, statements, **dataclasses.asdict(result)))
        return 0
    _print_brackets(result)
    common.say_statements(statements)
    return 0


def _print_brackets(result: Result) -> None:
    from isoloss.paper.theory.bracket_language.heads import ZERO
    from isoloss.paper.theory.bracket_language.study import LOSSES

    columns: tuple[str, ...] = ("solution", "T", "m", "loss", "trace", "/ bound", "(3)", "(4)", "(5)")
    cells: list[tuple[object, ...]] = [
        (
            row.solution,
            row.length,
            row.width,
            f"{row.flatness.loss:.1e}",
            f"{row.flatness.trace:.4g}",
            *(f"{value:.3f}" for value in (row.flatness.ratio, row.flatness.balance)),
            *(f"{value:.3f}" for value in (row.flatness.cancellation, row.flatness.evenness)),
        )
        for row in result.solutions
    ]
    title = "Solutions: loss, trace of the Hessian (squared answers), excess by condition"
    common.print_table(title, columns, cells)
    columns = ("head on", "T", "n", "fail (%)", "2^-n (%)", "expect (%)", "mean loss")
    cells = [
        (
            row.solution,
            row.length,
            row.samples,
            rounded(100 * row.failures, 100 * row.failures_stderr),
            f"{100 * row.claimed:.3g}",
            f"{100 * row.expected:.3g}",
            rounded(row.loss, row.loss_stderr) if row.loss > ZERO else f"{row.loss:.0e}",
        )
        for row in result.heads
    ]
    common.say("")
    common.print_table(
        f"Heads on n strings: share with a population loss above {ZERO:g} squared answers", columns, cells
    )
    columns = ("T", "inputs", "predicted", *(f"loss {loss:g}" for loss in LOSSES))
    cells = [
        (
            row.length,
            row.inputs,
            row.predicted,
            *(rounded(value, stderr) for value, stderr in zip(row.widths, row.widths_stderr, strict=True)),
        )
        for row in result.widths
    ]
    common.say("")
    common.print_table("Random features needed for a loss", columns, cells, left=0)
    common.say("")
    common.say_wrapped(
        "(3) to (5): factors of the trace over its bound, 1 where the paper's condition holds. expect: probability "
        "that n strings lack positive or negative answers. predicted: features that fit every input exactly."
    )


STATEMENTS: dict[str, Callable[[list[str]], int]] = {
    "bartlett": _bartlett,
    "sgd-flow": _sgd_flow,
    "brackets": _brackets,
}


def _document(args: Any, statements: Iterable[Statement], **extra: Any) -> dict[str, Any]:
    given = {name: value for name, value in dataclasses.asdict(args).items() if name not in ("figure", "json")}
    return {"settings": given, "statements": [statement.to_dict() for statement in statements], **extra}
