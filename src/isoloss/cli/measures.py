"""Options from the settings of measures, as groups of a subcommand's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import tyro

from isoloss.cli.options import options_of
from isoloss.evaluation.measures.base import name_fields
from isoloss.registry import MEASURES

T = TypeVar("T")


def with_options(cls: type[T], *, exclude: Iterable[str] = (), **groups: Iterable[type]) -> type[T]:
    """Return `cls` with further fields, each a group of options.

    Args:
        cls: The dataclass of a subcommand's arguments.
        exclude: Fields of the configs that are no options.
        groups: By the field's name, the configs whose fields are its options.
    """
    fields: list[Any] = []
    excluded = {*exclude, *(field for each in MEASURES for field in name_fields(each))}
    for name, configs in groups.items():
        group = options_of(name, *configs, exclude=excluded)
        group.__doc__ = ""
        marked = tyro.conf.OmitArgPrefixes[group]  # type: ignore[valid-type]
        fields.append((name, marked, dataclasses.field(default_factory=group)))
    made: Any = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True)
    made.__doc__ = cls.__doc__
    return made  # type: ignore[no-any-return]


def measure_configs() -> list[type]:
    """Return the classes of all registered measures."""
    return [MEASURES.load(name) for name in MEASURES]
