"""isoloss: tell apart language models that the pre-training loss cannot."""

from importlib.metadata import version

__version__ = version("isoloss")
