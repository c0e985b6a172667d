"""What is public, one name a line with its signature; `python tests/public_api.py` prints the list."""

import inspect
from collections.abc import Iterator
from typing import Any

import isoloss


def lines() -> Iterator[str]:
    """Each public name of isoloss with its signature, and each public member of its classes."""
    for name in isoloss.__all__:
        found = getattr(isoloss, name)
        if inspect.isclass(found):
            yield f"class {name}{inspect.signature(found)}"
            yield from sorted(f"    {line}" for line in _members(found))
        elif callable(found):
            yield f"{name}{inspect.signature(found)}"
        else:
            yield name


def _members(cls: type) -> Iterator[str]:
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") and name != "_repr_html_":
            continue
        if isinstance(member, property) or not callable(member):
            yield name
        else:
            yield f"{name}{_signature(member)}"


def _signature(member: Any) -> str:
    return str(inspect.signature(member))


if __name__ == "__main__":
    print("\n".join(lines()))
