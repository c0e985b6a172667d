"""The structure: imports point only downwards, and what must be instant does not load torch."""

import ast
import functools
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "isoloss"

# from the ground up; a module may import its own layer and those before it
LAYERS = [
    ("builtin_components", "errors", "examples", "files", "interrupts", "lazy", "machine", "seeds"),
    ("model_checks", "same_function"),
    ("registry", "config", "schema", "statistics"),
    ("checkpoints",),
    ("run_config",),
    ("runs",),
    ("text",),
    ("transfer",),
    ("lab.jit",),
    ("lab.languages", "flatness", "report"),
    ("comparison",),
    ("lab.models",),
    ("lab.training",),
    ("lab.tasks", "lab.lookup", "lab.finetune_config"),
    ("lab.finetuning",),
    ("lab.evaluation", "lab.presets"),
    ("studies",),
    ("suites",),
    ("paper",),
    ("cli",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OUTSIDE = {"__init__.py", "__main__.py", "lab/__init__.py"}  # the public names, the way into cli, and a docstring

MODULES = sorted(
    path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in OUTSIDE
)


NAMES = {  # by dotted name; a package's __init__ only hands names on
    ".".join(("isoloss", *path.with_suffix("").parts)): SOURCE / path for path in MODULES if path.name != "__init__.py"
}


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module, given by its path below `isoloss`: a folder or file of the package, or of its `lab`."""
    return ".".join(parts[:2]) if parts[0] == "lab" else parts[0]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_layers(path: Path) -> set[str]:
    """The layers of isoloss that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {layer_of(tuple(name.split(".")[1:])) for name in names if name.startswith("isoloss.")}
    return found - {"__version__"}


def imported_modules(path: Path) -> set[str]:
    """The modules of isoloss that a file imports when it runs, also inside functions; not for annotations alone."""
    tree = tree_of(path)
    unused = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in unused:
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & NAMES.keys()


def test_no_module_imports_itself_through_others():
    graph = {name: imported_modules(path) for name, path in NAMES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_point_downwards():
    upwards = {}
    for module in MODULES:
        layer = layer_of(module.with_suffix("").parts)
        above = {other for other in imported_layers(SOURCE / module) if LEVEL[other] > LEVEL[layer]}
        if above:
            upwards[f"{module} in layer {layer}"] = above
    assert not upwards


@pytest.mark.parametrize(
    "code",
    [
        "import isoloss",
        "import isoloss.config, isoloss.runs, isoloss.statistics.estimate, isoloss.lab.models.architectures",
        "import sys; from isoloss.cli.main import main; assert main(['--help']) == 0",
        "import sys; from isoloss.cli.main import main; assert main(['nonsense']) == 2",
    ],
)
def test_what_must_be_instant_loads_no_torch_and_takes_under_half_a_second(code):
    # processor time, not wall-clock time: other processes on the machine do not count
    probe = (
        f"{code}\nimport sys, time\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'datasets', 'safetensors'}\n"
        "heavy = (heavy | {'numpy', 'scipy', 'polars', 'altair'}) & set(sys.modules)\n"
        "assert not heavy, heavy\nassert time.process_time() < 0.5, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "subcommand",
    [
        *("ls", "sample", "text", "tokenizer", "train", "measure"),
        *("compare", "expand", "transfer", "show", "study", "suite", "theory", "doctor"),
    ],
)
def test_help_of_a_subcommand_loads_no_torch(subcommand):
    probe = (
        "import sys\nfrom isoloss.cli.main import main\n"
        f"assert main([{subcommand!r}, '--help']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
