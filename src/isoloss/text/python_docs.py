"""Real English text that comes with every Python, and so needs no network: its language reference and its docstrings.

`write_python_docs` writes the reference to files. `rows` has the datasets that are named `python:NAME`, four of them
with labels: stand-ins for a corpus and for downstream tasks where there is no network.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from isoloss import files
from isoloss.errors import IsolossError, did_you_mean

# labels of a task
MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
_FORMAT = 1  # of the kept docstrings: raise it whenever the same files would give other ones
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_LEAST_CHARACTERS = 60  # of a docstring
_HELD_OUT = 5  # one labeled docstring of so many is for testing
_HALF = 4  # words of either half of a sentence
_SPLITS = ("train", "validation")

Columns = Mapping[str, list[str]]
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """The docstring of a function, class or module of the standard library."""

    module: str  # the top-level one
    kind: str  # module, class, method or function
    name: str  # E.g. `Thread.is_alive`
    text: str


def write_python_docs(folder: Path) -> int:
    """Write Python's language reference, as `help("assert")` shows it, to `.txt` files, and return how many there are.

    A folder that holds just these files is left as it is.
    """
    pages = {f"{name}.txt": text.encode() for name, text in _reference().items()}
    if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == pages:
        return len(pages)
    with files.new_output(folder) as unfinished:
        for name, data in pages.items():
            (unfinished / name).write_bytes(data)
    return len(pages)


def rows(name: str, split: str) -> Columns:
    """Return the columns of a split of one of the datasets that come with Python.

    They depend on the version of the Python that runs this. Labeled datasets have the splits `train` and `validation`
    (one example in five), the others only `train`. The split depends only on the text of each docstring.

    - `docs` (column text): the language reference, a row for each page.
    - `docstrings` (text): the docstrings of the standard library, about 1.5 million characters.
    - `docstring-module` (text, label): which of eight modules a docstring is from.
    - `docstring-kind` (text, label): whether a docstring is of a class, a function or a method.
    - `sentence-source` (text, label): whether a sentence is of the reference or of a docstring, as many of each.
    - `sentence-order` (text, pair, label): whether the first four words of a sentence and the next four are in this
      order, which half of them are.
    """
    if name not in DATASETS:
        raise IsolossError(f"there is no dataset python:{name}{did_you_mean(name, DATASETS)}; available: {_names()}")
    splits = _SPLITS if name in _LABELED else _SPLITS[:1]
    if split not in splits:
        raise IsolossError(f"python:{name} has no split {split!r}; it has {' and '.join(splits)}")
    return DATASETS[name](split)


def docstrings() -> list[Docstring]:
    """Return the distinct docstrings of the standard library of at least 60 characters, in the order of its files.

    Reading all the files takes seconds, so what was found is kept in the cache (`ISOLOSS_CACHE`, else
    `~/.cache/isoloss`) for as long as the files stay as they are.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_modules_below(root))
    if not paths:
        raise IsolossError(f"this Python was installed without the source of its standard library in {root}")
    state = [(str(path), stat.st_size, stat.st_mtime_ns) for path in paths for stat in (path.stat(),)]
    key = hashlib.sha256(json.dumps([_FORMAT, state]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("ISOLOSS_CACHE") or "~/.cache/isoloss").expanduser() / "python" / f"{key}.json"
    # not there yet, or damaged
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [Docstring(*each) for each in json.loads(cache.read_text(encoding="utf-8"))]
    by_text: dict[str, Docstring] = {}
    for path in paths:
        for each in _docstrings_of(path, module=path.relative_to(root).parts[0].removesuffix(".py")):
            # equal docstrings with two labels would be an example that no classifier can get right
            by_text.setdefault(each.text, each)
    # a cache that cannot be written only costs time
    with contextlib.suppress(IsolossError, OSError):
        files.write_text(cache, json.dumps(list(by_text.values())))
    return list(by_text.values())


def _modules_below(root: Path) -> Iterator[Path]:
    # not by rglob, which would look through all packages that are installed
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _reference() -> Mapping[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise IsolossError("this Python was installed without its module pydoc_data, which has the text") from error
    pages: Mapping[str, str] = topics
    return pages


def _docstrings_of(path: Path, module: str) -> Iterator[Docstring]:
    try:
        with warnings.catch_warnings():
            # old modules have escapes in strings of which the parser warns
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        # a template rather than a module
        return
    todo: list[tuple[str, str, _Documented]] = [("module", path.stem, tree)]
    while todo:
        kind, name, node = todo.pop(0)
        text = ast.get_docstring(node)
        if text is not None and len(text) >= _LEAST_CHARACTERS:
            yield Docstring(module, kind, name, text)
        if isinstance(node, ast.Module | ast.ClassDef):
            is_class = isinstance(node, ast.ClassDef)
            for each in node.body:
                if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    of = "class" if isinstance(each, ast.ClassDef) else "method" if is_class else "function"
                    todo.append((of, f"{name}.{each.name}" if is_class else each.name, each))


def _is_in(text: str, split: str) -> bool:
    return (_hash(text) % _HELD_OUT == 0) == (split == "validation")


def _hash(text: str) -> int:
    # not the built-in hash, which differs from process to process
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _labeled(split: str, label: str, counts: Callable[[Docstring], bool]) -> Columns:
    """Return the docstrings of a split that count, with one of their fields as the label."""
    part = [each for each in docstrings() if _is_in(each.text, split) and counts(each)]
    return {"text": [each.text for each in part], "label": [getattr(each, label) for each in part]}


def _sentences(texts: Iterable[str], split: str) -> list[str]:
    """Return the distinct sentences of a split with at least eight words, in an order that tells nothing."""
    found = {" ".join(each.split()) for text in texts for each in re.split(r"(?<=[.:])\s+|\n\s*\n", text)}
    part = (each for each in found if _is_in(each, split) and len(each.split()) >= 2 * _HALF)
    return sorted(part, key=lambda each: _hash(f"place {each}"))


def _sources(split: str) -> Columns:
    reference = _sentences(_reference().values(), split)
    known = {*reference}
    of_docstrings = [each for each in _sentences((one.text for one in docstrings()), split) if each not in known]
    number = min(len(reference), len(of_docstrings))
    labels = ["reference"] * number + ["docstring"] * number
    return {"text": reference[:number] + of_docstrings[:number], "label": labels}


def _orders(split: str) -> Columns:
    columns: dict[str, list[str]] = {"text": [], "pair": [], "label": []}
    for each in _sentences((*_reference().values(), *(one.text for one in docstrings())), split):
        words = each.split()
        halves = [" ".join(words[:_HALF]), " ".join(words[_HALF : 2 * _HALF])]
        is_right = _hash(f"order {each}") % 2 == 0
        row = [*halves, "right"] if is_right else [*halves[::-1], "swapped"]
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return columns


DATASETS: Mapping[str, Callable[[str], Columns]] = {
    "docs": lambda split: {"text": list(_reference().values())},
    "docstrings": lambda split: {"text": [each.text for each in docstrings()]},
    "docstring-module": lambda split: _labeled(split, "module", lambda each: each.module in MODULES),
    "docstring-kind": lambda split: _labeled(split, "kind", lambda each: each.kind != "module"),
    "sentence-source": _sources,
    "sentence-order": _orders,
}
_LABELED = ("docstring-module", "docstring-kind", "sentence-source", "sentence-order")


def _names() -> str:
    return ", ".join(f"python:{name}" for name in DATASETS)
