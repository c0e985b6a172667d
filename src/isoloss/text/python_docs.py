"""A small real text that comes with every Python, and so needs no network: the language reference, in English."""

from __future__ import annotations

from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError


def write_python_docs(folder: Path) -> int:
    """Write Python's language reference, as `help("assert")` shows it, to `.txt` files, and return how many there are.

    They are the pages of the Python that runs this, about 80 with half a million characters. A folder that holds just
    these files is left as it is.

    Raises:
        IsolossError: This Python was installed without them, `folder` holds something else or cannot be written.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise IsolossError("this Python was installed without its module pydoc_data, which has the text") from error
    pages = {f"{name}.txt": text.encode() for name, text in topics.items()}
    if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == pages:
        return len(pages)
    with files.new_output(folder) as unfinished:
        for name, data in pages.items():
            (unfinished / name).write_bytes(data)
    return len(pages)
