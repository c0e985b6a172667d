"""The one exception that users are meant to read: a sentence that names the value and the choices."""


class IsolossError(Exception):
    """An input, a file or a state that isoloss cannot work with.

    The message is one clear sentence: what was given, why it does not do, and what would. The command line prints it
    without a traceback and exits with status 2.
    """
