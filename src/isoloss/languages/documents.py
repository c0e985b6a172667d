"""Documents: the texts in files and folders, one by one, each with the place it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from isoloss.errors import IsolossError

SUFFIXES = (".txt", ".jsonl")
DOCUMENT_CHARACTERS = 10_000  # the least that a document cut out of a longer text file has

# where a long text is cut: preferably between paragraphs, else lines, else words
_BOUNDARIES = (re.compile(r"\n\s*\n"), re.compile(r"\n"), re.compile(r"\s"))


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the text files that `paths` name, in order; a folder stands for those in it, sorted, at any depth.

    In a folder only `.txt` and `.jsonl` files count, and names that begin with a dot do not.

    Raises:
        IsolossError: A path does not exist, has another suffix, is named twice, or is a folder without text; no path.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise IsolossError(f"there is no text file or folder {path}")
        if path.is_file() and path.suffix.lower() not in SUFFIXES:
            raise IsolossError(f"cannot read {path} as text: a text file ends in {' or '.join(SUFFIXES)}")
        files = [path] if path.is_file() else _in_folder(path)
        if not files:
            raise IsolossError(f"the folder {path} holds no {' or '.join(SUFFIXES)} file")
        for file in files:
            if file.resolve() in found:
                raise IsolossError(f"{file} is named twice among the text files: name each once")
            found[file.resolve()] = file
    if not found:
        raise IsolossError("no text: name at least one file or folder")
    return list(found.values())


def read_documents(paths: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    r"""Return the documents in text files as pairs of source (`file:line`) and text; blank ones are left out.

    - Each line of a `.jsonl` file is a document: the field `text` of its JSON object.
    - A `.txt` file of less than 30,000 characters is one document. A longer one, such as a book or a whole corpus, is
      cut into documents of 10,000 to 30,000 characters: at the first blank line after 10,000 characters or, where none
      comes within another 10,000, at the end of a line, else of a word.

    Files are UTF-8, with or without a byte order mark; all line ends are read as `\n`. Text is read as it is asked for,
    never a whole file at once.

    Args:
        paths: Files and folders (see `find_files`).

    Raises:
        IsolossError: As for `find_files`; a file that is not UTF-8; a line that is not a JSON object with a string
            `text`, named by its number; nothing but blanks in all the files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "two.jsonl")
        ...     _ = file.write_text('{"text": "One."}\n{"text": "Two.", "id": 7}\n')
        ...     [(source[-1:], text) for source, text in read_documents([file])]
        [('1', 'One.'), ('2', 'Two.')]
    """
    return _read(find_files(paths))


def _read(files: list[Path]) -> Iterator[tuple[str, str]]:
    empty = True
    for file in files:
        try:
            for line, text in _json_lines(file) if file.suffix.lower() == ".jsonl" else _text_parts(file):
                if text and not text.isspace():
                    empty = False
                    yield f"{file}:{line}", text
        except UnicodeDecodeError as error:
            raise IsolossError(f"{file} is not UTF-8 text ({error.reason}): convert it, e.g. with iconv") from error
        except OSError as error:
            raise IsolossError(f"cannot read {file}: {error.strerror or error}") from error
    if empty:
        names = ", ".join(map(str, files[:3])) + (" ..." if len(files) > 3 else "")
        raise IsolossError(f"there is no text in {names}")


def _in_folder(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _json_lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise IsolossError(f"{file}, line {number} is not JSON: {error}") from error
            text = document.get("text") if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise IsolossError(f'{file}, line {number} is not a JSON object with a string field "text"')
            if not _encodable(text):
                raise IsolossError(f"{file}, line {number} holds half a surrogate pair, which is not a character")
            yield number, text


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_parts(file: Path) -> Iterator[tuple[int, str]]:
    line, rest = 1, ""
    with file.open(encoding="utf-8-sig") as stream:
        while chunk := stream.read(1 << 20):
            rest += chunk
            while len(rest) >= 3 * DOCUMENT_CHARACTERS:
                end = _boundary(rest)
                yield line, rest[:end]
                line += rest.count("\n", 0, end)
                rest = rest[end:]
    yield line, rest


def _boundary(text: str) -> int:
    """Return where the first document of `text` ends: from 1 to 2 times `DOCUMENT_CHARACTERS`, at the best boundary."""
    for boundary in _BOUNDARIES:
        if match := boundary.search(text, DOCUMENT_CHARACTERS, 2 * DOCUMENT_CHARACTERS):
            return match.end()
    return 2 * DOCUMENT_CHARACTERS
