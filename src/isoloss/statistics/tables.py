"""Small tables as plain text, for what `print` shows of a result."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table as lines of text; the first `left` columns are aligned on the left, the others on the right.

    Example:
        >>> print(text_table(["model", "accuracy"], [["a", "81 %"], ["larger", "9 %"]]))
        model   accuracy
        a           81 %
        larger       9 %
    """
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    cells = (
        [
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in cells)
