"""What users are meant to read: an error, and a warning, of one sentence that names the value and the choices."""

from __future__ import annotations

import warnings


class IsolossError(Exception):
    """An input, a file or a state that isoloss cannot work with.

    The message is one clear sentence: what was given, why it does not do, and what would. The command line prints it
    without a traceback and exits with status 2.
    """


class IsolossWarning(UserWarning):
    """Something that isoloss does with an input that whoever gave it should know.

    The message is one clear sentence. The command line prints it once, as a line on stderr, and goes on.
    """


def warn(message: str) -> None:
    """Issue an `IsolossWarning`."""
    warnings.warn(message, IsolossWarning, stacklevel=3)
