"""Finding a study: registered by name, or a Python file given by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from isoloss.errors import IsolossError
from isoloss.files import nearest
from isoloss.registry import STUDIES
from isoloss.studies.spec import Study


def load_study(name: str | Path) -> Study:
    """Return a registered study, or the one in a Python file: its `STUDY`, or what its function `study()` returns.

    A name that ends in `.py` is a path. The file is run; registered components of its own (languages, measures) must be
    in an installed package, as the units of a study are processes that do not read the file.

    Args:
        name: The study's name, or the path of a file.

    Raises:
        IsolossError: There is no such study or file, the file fails, or it has no study.

    Example:
        >>> list(load_study("same-loss").scales)
        ['laptop', 'smoke']
    """
    study = _from_file(Path(name)) if Path(name).suffix == ".py" else STUDIES.load(str(name))
    if not isinstance(study, Study) and callable(study):
        study = study()
    if not isinstance(study, Study):
        raise IsolossError(f"{name} is a {type(study).__name__}, not an isoloss.studies.Study")
    return study


def _from_file(path: Path) -> object:
    if not path.is_file():
        raise IsolossError(f"{path} does not exist{nearest(path)}")
    spec = importlib.util.spec_from_file_location(f"isoloss_study_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look up their module
    try:
        spec.loader.exec_module(module)
    except IsolossError:
        raise
    except Exception as error:
        raise IsolossError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    for attribute in ("STUDY", "study"):
        if hasattr(module, attribute):
            found: object = getattr(module, attribute)
            return found
    raise IsolossError(f"{path} has no study: assign an isoloss.studies.Study to STUDY, or define study()")
