"""Sphinx configuration; the command-line and API references are generated from the code at every build."""

import contextlib
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import runpy
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch
from sphinx.application import Sphinx

from isoloss import __version__
from isoloss.cli import study, theory
from isoloss.cli.main import SUBCOMMANDS, main

project = "isoloss"
author = "the isoloss developers"
project_copyright = "the isoloss developers"
release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx.ext.mathjax", "sphinx-mathjax-offline"]  # formulas without a network
exclude_patterns = ["_build"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds a cell, on a busy machine too
nb_output_stderr = "remove-warn"
# of the notebooks: a warning would end the build
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
suppress_warnings = ["ref.python"]  # internal classes of one name in several modules, in annotations
html_theme = "furo"
html_title = f"isoloss {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

HERE = Path(__file__).parent
GENERATED = HERE / "_generated"


def write_cli_reference() -> None:
    """Write each subcommand's own help, and that of the subcommands below it."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}

    def help_of(*words: str) -> str:
        with contextlib.redirect_stdout(
            io.TextIOWrapper(io.BytesIO(), "utf-8")
        ) as text:  # its encoding decides the frames
            assert main([*words, "--help-all" if words else "--help"]) == 0
            text.seek(0)
            return text.read().rstrip()

    parts = [
        "# Command line",
        "What `isoloss SUBCOMMAND --help` prints, and `isoloss train --help-all`.",
        f"```text\n{help_of()}\n```",
    ]
    nested = {"study": study.SUBCOMMANDS, "theory": theory.SUBCOMMANDS}
    for name in SUBCOMMANDS:
        for words in [(name,), *((name, below) for below in nested.get(name, ()))]:
            parts.append(
                f"{'##' if len(words) == 1 else '###'} isoloss {' '.join(words)}\n\n```text\n{help_of(*words)}\n```"
            )
    (GENERATED / "cli.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def run_gallery() -> None:
    """Run the scripts that gallery.md shows, and write what each prints.

    Each has a folder of its own, and a process that is forked from this one: half of the time of a script on its own
    is that of its imports. Two run at a time.
    """

    def run(script: str) -> None:
        torch.set_num_threads(1)
        sys.path.insert(0, str(HERE.parent / "examples"))
        text = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(text):
            runpy.run_path(str(HERE.parent / f"{script}.py"), run_name="__main__")
        (GENERATED / f"{Path(script).name}.txt").write_text(text.getvalue().rstrip() + "\n", encoding="utf-8")

    scripts = re.findall(r"\.\./(examples/\w+)\.py", (HERE / "gallery.md").read_text(encoding="utf-8"))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(script,), name=script) for script in scripts]
    for number, process in enumerate(processes):
        while sum(earlier.is_alive() for earlier in processes[:number]) == 2:
            time.sleep(0.1)
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"{process.name}.py fails"


PUBLIC = ("isoloss", "isoloss.flatness", "isoloss.transfer", "isoloss.lab.languages", "isoloss.studies")  # by `__all__`
RESULTS = (  # what the functions of `isoloss` take and return
    "isoloss.comparison.models.ModelComparison",
    "isoloss.comparison.verdict.TraceComparison",
    "isoloss.runs.Run",
    "isoloss.lab.evaluation.evaluator.Evaluations",
    "isoloss.checkpoints.loading.LoadedModel",
    "isoloss.transfer.compare.AccuracyComparison",
    "isoloss.suites.lm_eval.TaskResults",
    "isoloss.registry.Registry",
)
NOT_FOR_USERS = ("design.md", "errata.md")  # these pages also name internal modules
NAMED = re.compile(r"^ *from (isoloss[\w.]*) import ([\w, ]+)$|`(isoloss(?:\.\w+)+)", re.MULTILINE)


def directive(kind: str, name: str, *options: str) -> str:
    """Return an autodoc directive as MyST."""
    lines = "".join(f"   {option}\n" for option in options)
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{lines}```"


def reference(name: str) -> str:
    """Return the entry of a public name."""
    member = pkgutil.resolve_name(name)
    if isinstance(member, types.ModuleType):
        return f"## {name}\n\n{directive('module', name, ':members:', ':ignore-module-all:')}"
    if isinstance(member, type):
        return directive("class", name, ":members:")
    return directive("function", name) if callable(member) else f"`{name}`: a {type(member).__name__}"


def named_on_pages() -> set[str]:
    """Return what the pages for users import from isoloss, and what they name with its module."""
    texts = [page.read_text(encoding="utf-8") for page in HERE.glob("*.md") if page.name not in NOT_FOR_USERS]
    found = set()
    for module, names, name in (match for text in texts for match in NAMED.findall(text)):
        found |= {name} if name else {f"{module}.{each.strip()}" for each in names.split(",")}
    return found


def write_api_reference() -> None:
    """Write a page for each public package, one for the modules of statistics, and one for what else the pages name."""
    pages = {package: [f"{package}.{name}" for name in importlib.import_module(package).__all__] for package in PUBLIC}
    pages["isoloss"] += RESULTS
    named = named_on_pages()
    of_statistics = (name for name in named if name.startswith("isoloss.statistics."))
    pages["isoloss.statistics"] = sorted({name.rpartition(".")[0] for name in of_statistics})
    known = [pkgutil.resolve_name(name) for names in pages.values() for name in (*names, *pages)]
    others = {name: pkgutil.resolve_name(name) for name in named}
    # members of a module or class that has an entry have none of their own
    modules = {each.__name__ for each in (*known, *others.values()) if isinstance(each, types.ModuleType)}
    whole = modules - pages.keys() | set(pages["isoloss"])
    others = {
        name: member
        for name, member in others.items()
        if not any(member is each for each in known) and name.rpartition(".")[0] not in whole
    }
    pages["others"] = sorted(others, key=lambda name: (isinstance(others[name], types.ModuleType), name))
    for page, names in pages.items():
        title = page if page != "others" else "Other names on these pages"
        (GENERATED / f"api-{page}.md").write_text("\n\n".join([f"# {title}", *map(reference, names)]) + "\n", "utf-8")
    listed = "\n".join(f"api-{page}" for page in pages)
    (GENERATED / "api.md").write_text(
        "# API reference\n\nEverything on these pages is public; everything else may change at any time.\n\n"
        f"```{{toctree}}\n{listed}\n```\n",
        encoding="utf-8",
    )


def as_rst(app: object, what: str, name: str, member: object, options: object, lines: list[str]) -> None:
    """Let docstrings say `Rule`s, and indent an example below a line that ends with a colon."""
    del app, name, member, options
    lines[:] = [re.sub(r"(?<!`)(`[^`]+`)(?=[a-z])", r"\1\\ ", line) for line in lines]
    if what == "module":
        for number, line in enumerate(lines[:-2]):
            is_above_example = not lines[number + 1] and lines[number + 2].startswith("    ")
            if re.search("[^:]:$", line) and is_above_example:
                lines[number] += ":"


def without_back_links(app: object, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Take the links back to the reference off pages of source: a name that is public in two packages has dead ones."""
    del app, template, doctree
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def setup(app: Sphinx) -> None:
    """Register the changes of docstrings and of pages of source."""
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("html-page-context", without_back_links)


GENERATED.mkdir(exist_ok=True)
write_cli_reference()
write_api_reference()
run_gallery()
