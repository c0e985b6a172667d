"""The fenced blocks of a page, each with its language and with what the comment right above it says.

A comment is `<!-- no-run: WHY -->`, `<!-- slow: WHY -->` or `<!-- file: NAME -->`: the block is not run, is run by
`pytest -m slow` alone, or is the content of that file, which is there from then on.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page not in PAGES)
PAGES += sorted((ROOT / "docs" / "method").glob("*.md"))

_FENCE = re.compile(r"(`{3,}|~{3,})\s*(\S*)( .*)?$")
_MARK = re.compile(r"<!--\s*(no-run|slow|file)\b:?\s*(.*?)\s*-->$")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The file that it is in.
        line: Its first line, from 1.
        language: What its fence says.
        mark: `no-run`, `slow`, `file` or nothing.
        reason: The text of the mark.
        text: Its content.
    """

    page: Path
    line: int
    language: str
    mark: str
    reason: str
    text: str

    @property
    def place(self):
        """`page:line`, relative to the repository where it lies there."""
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{page}:{self.line}"

    @property
    def is_python(self):
        """Whether Python reads it."""
        return self.language == "python"


def blocks_of(page):
    """Return the blocks of a page in order."""
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if not fence:
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == fence[1])
        mark = _MARK.match(lines[number - 1]) if number else None
        kind, reason = mark.groups() if mark else ("", "")
        found.append(Block(page, number + 2, fence[2], kind, reason, "\n".join(lines[number + 1 : end]) + "\n"))
        number = end + 1
    return found
