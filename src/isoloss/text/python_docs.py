"""A small real text that comes with every Python, and so needs no network: the language reference, in English."""

from __future__ import annotations

from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError


def python_docs() -> dict[str, str]:
    """Return the pages of Python's language reference by name, as `help("assert")` shows them.

    They are those of the Python that runs this, about 80 pages with half a million characters.

    Raises:
        IsolossError: This Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise IsolossError("this Python was installed without its module pydoc_data, which has the text") from error
    return dict(topics)


def write_python_docs(folder: Path) -> int:
    """Write each page of `python_docs` to a `.txt` file in `folder`, and return how many there are.

    A folder that holds just these files is left as it is.

    Raises:
        IsolossError: `folder` holds something else, or it cannot be written.
    """
    pages = python_docs()
    if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == {
        f"{name}.txt": text.encode() for name, text in pages.items()
    }:
        return len(pages)
    with files.new_output(folder) as unfinished:
        for name, text in pages.items():
            (unfinished / f"{name}.txt").write_text(text, encoding="utf-8")
    return len(pages)
