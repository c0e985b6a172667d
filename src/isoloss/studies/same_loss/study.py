"""The study same-loss as the command line sees it: plan, report, summary, verify."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss import files
from isoloss.studies.same_loss.design import (
    NAME,
    SCALES,
    experiments,
    lookups_of,
    main_run,
    measures_of,
    plan,
    prepare,
    run_of,
    scale_of,
    steps_of,
)
from isoloss.studies.verification import Check

__all__ = ["NAME", "SCALES", "Summary", "plan", "prepare", "report", "scale_of", "summary", "verify"]


@dataclass(frozen=True)
class Summary:
    """What the study found, as text and as JSON types."""

    checkpoints: Sequence[tuple[str, int, dict[str, Any]]]
    verdicts: Sequence[tuple[str, str, str]]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the columns and rows of the table of checkpoints."""
        names = list(self.checkpoints[0][2])
        columns = ["run", "step", *(f"{name} ({_UNITS.get(name, 'accuracy, %')})" for name in names)]
        rows = [[run, f"{step:,}", *(_cell(found[n]) for n in names)] for run, step, found in self.checkpoints]
        return columns, rows

    def claims(self) -> Sequence[tuple[str, str, str]]:
        """Return a row a claim: its name, the verdict, what was found."""
        return self.verdicts

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        return {
            "checkpoints": [{"run": run, "step": step, "estimates": found} for run, step, found in self.checkpoints],
            "claims": [{"claim": c, "verdict": v, "found": f} for c, v, f in self.verdicts],
        }


_UNITS = {"kl": "nats/token", "trace": "nats/token"}


def _cell(estimate: dict[str, Any]) -> str:
    from isoloss.estimate import rounded

    scale = 100 if estimate["unit"] == "accuracy" else 1
    return rounded(scale * estimate["value"], scale * estimate["stderr"])


def summary(folder: Path, scale_name: str) -> Summary:
    """Return what the finished study in `folder` found."""
    from isoloss.studies.same_loss.claims import judge_all
    from isoloss.studies.same_loss.results import read

    results = read(folder, scale_of(scale_name))
    shown = ("kl", "trace", *results.scale.tasks)
    checkpoints = [
        (run, step, {name: {**found[name].to_dict(), "by_parameter": None} for name in shown})
        for (run, step), found in results.estimates.items()
    ]
    verdicts = [
        (r.claim.id, str(r.verdict), "; ".join(f"{name}: {text}" if name else text for name, text in r.lines))
        for r in judge_all(results)
    ]
    return Summary(checkpoints, verdicts)


def report(folder: Path, scale_name: str, *, force: bool = False) -> Path:
    """Write the report of the finished study in `folder`, unless it is there for the same results.

    Returns:
        The page.
    """
    page = folder / "report" / "index.html"
    stamp = folder / "report" / "made-from.sha256"
    made_from = _digest(folder, scale_name)
    if not force and page.is_file() and stamp.is_file() and stamp.read_text() == made_from:
        return page
    from isoloss.studies.same_loss import page as pages

    pages.write(folder, scale_name)
    files.write_text(stamp, made_from)
    return page


def verify(folder: Path, scale_name: str) -> Iterator[Check]:
    """Check every run of the study in `folder`; see `isoloss.studies.verification.verify_run`."""
    import torch

    from isoloss.studies.verification import verify_run

    torch.set_num_threads(1)  # as the study's workers have
    scale = scale_of(scale_name)
    for name, config in experiments(scale).items():
        run = run_of(folder, name)
        yield from verify_run(run, config, measures_of(scale), steps_of(config), scale.evaluation)
    main = run_of(folder, main_run(scale))
    config = experiments(scale)[main.name]
    yield from verify_run(main, config, lookups_of(scale), [config.steps], scale.evaluation)


def _digest(folder: Path, scale_name: str) -> str:
    """Return a SHA-256 over all that the report is made from: the evaluations, and the code that reads them."""
    from isoloss.runs import versions

    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    code = sorted(p for d in ("report", "studies") for p in (Path(__file__).parents[2] / d).rglob("*.*"))
    made = sorted(p for name in experiments(scale_of(scale_name)) for p in run_of(folder, name).path.rglob("*.json"))
    for path in [*(p for p in code if p.suffix in (".py", ".toml", ".j2")), *made]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
