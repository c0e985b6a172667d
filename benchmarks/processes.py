"""Contenders in processes of their own, which take turns: none has the settings or the memory of another."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any


@contextlib.contextmanager
def processes(
    places: Mapping[str, str], make: Callable[..., Mapping[str, Callable[..., Any]]], *arguments: Any
) -> Iterator[Callable[..., Any]]:
    """Yield a function that lets a contender run in its process, with arguments for it, while all others wait.

    Args:
        places: The name of the process of each contender.
        make: Makes the contenders by name, once in each process.
        arguments: What it takes.
    """
    context, lines = multiprocessing.get_context("spawn"), {}
    with contextlib.ExitStack() as stack:
        for process in dict.fromkeys(places.values()):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, make, arguments), daemon=True).start()
            theirs.close()
            lines[process] = stack.enter_context(ours)

        def run(name: str, *given: Any) -> Any:
            line = lines[places[name]]
            line.send((name, given))
            return line.recv()

        yield run


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Run the contenders that are asked for until the other side closes."""
    contenders = make(*arguments)
    with contextlib.suppress(EOFError):
        while True:
            name, given = connection.recv()
            connection.send(contenders[name](*given))
