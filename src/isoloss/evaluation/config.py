"""How much a checkpoint is measured on. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How much a checkpoint is measured on."""

    loss_sentences: int = 4096
    """Sentences for the pre-training loss; for a corpus, held-out sequences at most."""
    trace_sentences: int = 2048
    """Sentences for the trace."""
    probe_train: int = 4096
    """Sentences that a linear probe is fitted on."""
    probe_test: int = 4096
    """Sentences that it is scored on."""
    probe_seeds: int = 5
    """Probes, each with its own initial weights and order."""
    probe_epochs: int = 100
    """Passes of a probe over its training sentences."""
    seed: int = 0
    """Decides the sentences, masks, random signs and probes; checkpoints compare best under the same."""
