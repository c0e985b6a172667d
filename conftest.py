"""Examples in docstrings run as they would if they were pasted: each brings its own imports."""

import copy

import pytest


@pytest.fixture(autouse=True)
def _as_pasted(request, monkeypatch):
    if not isinstance(request.node, pytest.DoctestItem):
        return
    request.node.dtest.globs.clear()
    if "registry" in request.node.name:  # what the example registers is there for this example only
        from isoloss import registry

        for known in (each for each in vars(registry).values() if isinstance(each, registry.Registry)):
            monkeypatch.setattr(known, "_entries", copy.copy(known._entries))
