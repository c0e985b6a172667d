"""Sphinx configuration; the command-line and API references are generated from the code at every build."""

import contextlib
import io
import multiprocessing
import os
import pkgutil
import re
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch
from sphinx.application import Sphinx

import isoloss
from isoloss.cli import study, theory
from isoloss.cli.main import SUBCOMMANDS, main
from isoloss.registry import Registry

project = "isoloss"
author = "the isoloss developers"
project_copyright = "the isoloss developers"
release = isoloss.__version__
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


PACKAGES = [
    "statistics",
    "checkpoints",
    "text",
    "flatness",
    "comparison",
    "lab.languages",
    "lab.models",
    "lab.training",
]
PACKAGES += ["transfer", "lab.tasks", "lab.lookup", "lab.finetuning", "lab.finetune_config"]
PACKAGES += ["lab.evaluation", "lab.presets", "lab.jit", "studies", "suites", "report", "paper", "ground"]
RESULTS = {  # what the public functions take and return
    "isoloss.comparison.verdict": "TraceComparison",
    "isoloss.runs": "Run",
    "isoloss.lab.evaluation.evaluator": "Evaluations",
    "isoloss.checkpoints.loading": "LoadedModel",
    "isoloss.transfer.tasks": "TaskData",
    "isoloss.transfer.results": "TransferResult",
    "isoloss.transfer.compare": "AccuracyComparison",
    "isoloss.suites.lm_eval": "TaskResults",
}


def directive(kind: str, name: str, *options: str) -> str:
    """Return an autodoc directive as MyST."""
    lines = "".join(f"   {option}\n" for option in options)
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{lines}```"


def write_public_reference() -> None:
    """Write the page of the public names, from `isoloss.__all__`."""
    names = [name for name in isoloss.__all__ if name != "__version__"]
    registries = [name for name in names if isinstance(getattr(isoloss, name), Registry)]
    parts = ["# Public names", "`import isoloss` offers these names, and `__version__`."]
    for name in (name for name in names if name not in registries):
        member = getattr(isoloss, name)
        kind, options = ("class", (":members:",)) if isinstance(member, type) else ("function", ())
        parts.append(directive(kind, f"isoloss.{name}", *options))
    listed = ", ".join(f"`{name}`" for name in registries)
    parts.append(f"## Registries\n\n{listed}: components by name. Each is a registry, with these methods.")
    parts.append(directive("class", "isoloss.registry.Registry", ":members:"))
    parts.append("## Results\n\nThe classes of what these functions take and return, where not above.")
    parts += [directive("class", f"{module}.{name}", ":members:") for module, name in RESULTS.items()]
    (GENERATED / "api-public.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_api_reference() -> None:
    """Write the page of public names, then a page for each internal package, with the other members of its modules."""
    write_public_reference()
    elsewhere = {(getattr(isoloss, name).__module__, name) for name in isoloss.__all__ if name != "__version__"}
    elsewhere |= {*RESULTS.items(), ("isoloss.registry", "Registry")}
    modules = [m.name for m in pkgutil.walk_packages(isoloss.__path__, "isoloss.")]
    modules = [
        name for name in modules if not name.endswith("__main__") and ".cli" not in name and name != "isoloss.lab"
    ]
    groups: dict[str, list[str]] = {}
    for name in modules:
        parts = name.split(".")[1:]
        is_package = (Path(*isoloss.__path__) / parts[0]).is_dir()
        group = ".".join(parts[: 2 if parts[0] == "lab" else 1]) if is_package else "ground"
        groups.setdefault(group, []).append(name)
    assert sorted(PACKAGES) == sorted(groups), f"packages missing in the reference: {set(groups) ^ set(PACKAGES)}"
    for group, names in groups.items():
        title = f"isoloss.{group}" if group != "ground" else "isoloss: configs, files, seeds, runs"
        parts = [
            f"# {title} (internal)",
            "Internal, and may change at any time, unless a page of the documentation names it.",
        ]
        for name in names:
            excluded = ", ".join(sorted(member for module, member in elsewhere if module == name))
            options = [":members:", ":ignore-module-all:", *([f":exclude-members: {excluded}"] if excluded else [])]
            parts.append(f"## {name}\n\n{directive('module', name, *options)}")
        (GENERATED / f"api-{group}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    internal = "\n".join(f"api-{group}" for group in PACKAGES)
    (GENERATED / "api.md").write_text(
        "# API reference\n\nGenerated from the docstrings.\n\n```{toctree}\napi-public\n```\n\n"
        f"```{{toctree}}\n:caption: Internal packages\n\n{internal}\n```\n",
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


def setup(app: Sphinx) -> None:
    """Register the change of docstrings."""
    app.connect("autodoc-process-docstring", as_rst)


GENERATED.mkdir(exist_ok=True)
write_cli_reference()
write_api_reference()
run_gallery()
