"""Inputs to measure models on, from a language."""

from __future__ import annotations

from isoloss.errors import IsolossError
from isoloss.languages.api import Language, Sentences
from isoloss.run_config import ObjectiveConfig
from isoloss.seeds import generator
from isoloss.text.inputs import Inputs, make_inputs
from isoloss.text.masking import objective_batch


def language_inputs(
    language: Language, objective: ObjectiveConfig, *, num_inputs: int, seed: int, batch_size: int = 256
) -> Inputs:
    """Return inputs from a language under an objective: held-out ones if it has any, else fresh ones.

    Args:
        language: The language.
        objective: What is predicted.
        num_inputs: Sentences; of a corpus, at most as many as are held out.
        seed: Decides the sentences of a synthetic language, and the masks.
        batch_size: Sentences in a batch.

    Raises:
        IsolossError: `num_inputs` is below 1.
    """
    if num_inputs < 1:
        raise IsolossError(f"the number of inputs is {num_inputs}; it must be at least 1")
    if language.num_held_out:
        sentences = language.held_out(num_inputs)
        available, of = language.num_held_out, "held-out sequences of the run's corpus"
        source = f"{num_inputs:,} of the {available:,} {of}"
        if available < num_inputs:
            source = f"all {available:,} {of} (up to {num_inputs:,} would be taken)"
    else:
        sentences = language.sample(num_inputs, generator=generator(seed, "trace sentences"))
        source = f"{num_inputs:,} sentences sampled from the run's language"
    masks = generator(seed, "trace masks")
    batches = []
    for start in range(0, len(sentences.tokens), batch_size):
        rows = slice(start, start + batch_size)
        part = Sentences(sentences.tokens[rows], sentences.lengths[rows])
        batches.append(objective_batch(part, language, objective, generator=masks))
    return make_inputs(batches, objective.kind, source)
