"""The executor of the studies' tests."""

import pytest

import studies_in_process
from isoloss import registry


@pytest.fixture
def here(monkeypatch):
    """The options of `isoloss study run` for units in this process."""
    monkeypatch.setattr(registry.EXECUTORS, "_entries", dict(registry.EXECUTORS._entries))
    registry.EXECUTORS.register("here", studies_in_process.run)
    return "--executor", "here"
