"""Sphinx configuration; the command-line and API references are generated from the code at every build."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import isoloss
from isoloss.cli.main import SUBCOMMANDS

project = "isoloss"
author = "the isoloss developers"
project_copyright = "the isoloss developers"
release = isoloss.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx.ext.mathjax", "sphinx-mathjax-offline"]  # formulas without a network
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"
html_theme = "furo"
html_title = f"isoloss {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

HERE = Path(__file__).parent
GENERATED = HERE / "_generated"


def write_cli_reference() -> None:
    """Write each subcommand's own help."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}

    def help_of(*words: str) -> str:
        command = [sys.executable, "-m", "isoloss", *words, "--help"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.rstrip()

    parts = [
        "# Command line",
        "What `isoloss SUBCOMMAND --help` prints, for every subcommand.",
        f"```text\n{help_of()}\n```",
    ]
    parts += [f"## isoloss {subcommand}\n\n```text\n{help_of(subcommand)}\n```" for subcommand in SUBCOMMANDS]
    (GENERATED / "cli.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def write_api_reference() -> None:
    """Write a page for each package, with the public members of all its modules."""
    modules = [m.name for m in pkgutil.walk_packages(isoloss.__path__, "isoloss.")]
    modules = [name for name in modules if not name.endswith("__main__") and ".cli" not in name]
    groups: dict[str, list[str]] = {}
    for name in modules:
        is_package = (Path(*isoloss.__path__) / name.split(".")[1]).is_dir()
        groups.setdefault(name.split(".")[1] if is_package else "ground", []).append(name)
    for group, names in groups.items():
        parts = [f"# isoloss.{group}" if group != "ground" else "# isoloss: configs, files, seeds, runs"]
        directive = "```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n   :ignore-module-all:\n```"
        parts += [f"## {name}\n\n{directive.format(name=name)}" for name in names]
        (GENERATED / f"api-{group}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    order = ["statistics", "text", "languages", "flatness", "models", "training", "transfer", "evaluation"]
    order += ["studies", "report", "paper", "ground"]
    assert sorted(order) == sorted(groups), f"packages without a place in the reference: {set(groups) ^ set(order)}"
    toctree = "\n".join(f"api-{group}" for group in order)
    (GENERATED / "api.md").write_text(
        f"# API reference\n\nGenerated from the docstrings.\n\n```{{toctree}}\n{toctree}\n```\n", encoding="utf-8"
    )


GENERATED.mkdir(exist_ok=True)
write_cli_reference()
write_api_reference()
