"""The JSON schema of config files, by which editors complete them, and the text about each field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

from isoloss.config import REGISTRIES, Form, Range, form_of, hints_of


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON schema of the TOML files that `read_toml` reads as `cls`, by which an editor completes them.

    Example:
        >>> from isoloss.run_config import StageConfig
        >>> from isoloss.schema import json_schema
        >>> json_schema(StageConfig)["$defs"]["StageConfig"]["properties"]["batch_size"]
        {'type': 'integer', 'minimum': 1, 'description': 'Sentences in a step; default: as the run has it.'}
    """
    definitions: dict[str, Any] = {}
    schema = _config_schema(cls, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": definitions}


def _config_schema(cls: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of a config, which is added to the definitions with all that it names."""
    schema: dict[str, Any] = {}
    reference = {"$ref": f"#/$defs/{cls.__name__}"}
    # before its fields are looked at: a config may hold another of its own kind
    if definitions.setdefault(cls.__name__, schema) is not schema:
        return reference
    if registry := REGISTRIES.get(cls):
        schema["oneOf"] = [_config_schema(config, definitions) for config in registry.loaded().values()]
    else:
        hints, texts = hints_of(cls), descriptions(cls)
        schema |= {"type": "object", "additionalProperties": False, "properties": {}}
        schema["required"] = ["kind"] * ("kind" in hints)
        for field in dataclasses.fields(cls):
            has_default = {field.default, field.default_factory} != {dataclasses.MISSING}
            one = _value_schema(form_of(hints[field.name]), field.metadata.get("range"), definitions)
            if field.name == "kind" and "enum" not in one:
                one["const"] = field.default
            if isinstance(field.default, bool | int | float | str) and field.default != "":
                one["default"] = field.default
            if text := texts.get(field.name):
                one["description"] = text
            schema["properties"][field.name] = one
            if not has_default and field.name != "kind":
                schema["required"].append(field.name)
    return reference


def _value_schema(form: Form, bounds: Range | None, definitions: dict[str, Any]) -> dict[str, Any]:
    if form.config is not None:
        return _config_schema(form.config, definitions)
    if form.items is not None:
        items = _value_schema(form_of(form.items), bounds, definitions)
        ends = {} if form.length is None else {"minItems": form.length, "maxItems": form.length}
        return {"type": "array", "items": items, **ends}
    # TOML has no word for None
    words = [choice for choice in form.choices if choice is not None]
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    found: list[dict[str, Any]] = [{"type": kinds[kind]} for kind in form.kinds]
    if bounds is not None and found:
        names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        values = (bounds.minimum, bounds.above, bounds.maximum, bounds.below)
        finite = {name: end for name, end in zip(names, values, strict=True) if end is not None and math.isfinite(end)}
        found[0] |= finite
    found += [{"enum": words}] * bool(words)
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


@functools.cache
def descriptions(config: type) -> Mapping[str, str]:
    """Return the docstring of each field of a config, inherited ones too; the source is read, so for help alone."""
    texts: dict[str, str] = {}
    # a subclass may describe a field anew, so it comes after its bases
    for cls in reversed(config.__mro__[:-1]):
        texts |= _docstrings(cls.__module__).get(cls.__name__, {})
    # a setting that is the argument of a function has its text with it
    own = {field.name: field.metadata["help"] for field in dataclasses.fields(config) if "help" in field.metadata}
    return texts | own


@functools.cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the strings below the fields of each class of a module."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in itertools.pairwise(node.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found.setdefault(node.name, {})[name] = " ".join(text.split())
    return found
