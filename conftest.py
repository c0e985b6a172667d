"""What the examples in docstrings may use without making them: `model` and `batches`, a tiny BERT and its inputs."""

import copy

import pytest


@pytest.fixture(autouse=True)
def _tiny_model(request, doctest_namespace):
    if not isinstance(request.node, pytest.DoctestItem) or "flatness" not in request.node.name:
        return
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    doctest_namespace["model"] = BertForMaskedLM(BertConfig(vocab_size=8, max_position_embeddings=8, **sizes)).eval()
    labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
    input_ids = torch.randint(0, 8, (64, 4))
    doctest_namespace["batches"] = [{"input_ids": part, "labels": labels} for part in input_ids.split(16)]


@pytest.fixture(autouse=True)
def _own_registries(request, monkeypatch):
    """Let what an example registers be there for that example only."""
    if isinstance(request.node, pytest.DoctestItem) and "registry" in request.node.name:
        from isoloss import registry

        for known in (each for each in vars(registry).values() if isinstance(each, registry.Registry)):
            monkeypatch.setattr(known, "_entries", copy.copy(known._entries))
