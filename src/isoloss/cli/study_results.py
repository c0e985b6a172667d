"""`isoloss study export` and `isoloss study compare`: keep the results, and compare them with a repetition."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import number, rounded

if TYPE_CHECKING:
    from isoloss.studies.export import Format
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.repetition import Repeated


def export(folder: StudyFolder, output: Path, formats: Collection[Format], *, as_json: bool) -> int:
    """Write the results of a finished study, and print their size."""
    from isoloss.studies.export import export as write

    write(folder, output, formats)
    sizes = [path.stat().st_size for path in output.rglob("*") if path.is_file()]
    if as_json:
        common.emit_json({"output": str(output), "files": len(sizes), "bytes": sum(sizes)})
    else:
        common.say(f"{output}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")
    return 0


def compare(first: Path, second: Path | None, *, as_json: bool) -> int:
    """Compare two exports of a study with different seeds, number by number."""
    from isoloss.studies.repetition import compare as compared

    if second is None:
        raise IsolossError("study compare takes two exports: isoloss study compare RESULTS_A RESULTS_B")
    found = compared(first, second)
    if as_json:
        common.emit_json(found.to_dict())
        return 0
    a, b = found.seed_offsets
    title = f"{found.study} at scale {found.scale}: A with seed offset {a}, B with {b}"
    columns = ("what", "verdict of A", "verdict of B", "A", "B", "B − A", "95 % interval", "unit", "p (Holm)")
    common.print_table(title, columns, [_row(each) for each in found.numbers], left=3)
    common.say("")
    common.say_wrapped(found.conclusion)
    return 0


def _row(each: Repeated) -> tuple[str, ...]:
    from isoloss.studies.results import UNITS

    name = ", ".join(each.name)
    verdicts = each.verdicts or ("", "")
    numbers = tuple("" if one is None else number(one) for one in (each.first, each.second))
    if (d := each.difference) is None or each.p_holm is None:
        return name, *verdicts, *numbers, "", "", "", ""
    low, high = (rounded(end, d.stderr).split(" ±")[0] for end in d.ci95)
    difference = rounded(d.value, d.stderr)
    return name, *verdicts, *numbers, difference, f"{low} to {high}", UNITS.get(d.unit, d.unit), f"{each.p_holm:.2g}"
