"""What is measured of checkpoints that are no run's: which inputs they all take in the same meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.evaluation.config import ReadingConfig
from isoloss.evaluation.context import MeasureContext
from isoloss.evaluation.inputs import language_inputs
from isoloss.flatness.compare import Outline
from isoloss.flatness.engine.auxiliary_sample import input_embeddings
from isoloss.languages.api import Language
from isoloss.loading import Kind, Loaded
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.runs import checkpoint_of
from isoloss.text.inputs import Inputs, check_model, read_inputs
from isoloss.text.tokenizers import load_tokenizer


@dataclass(frozen=True)
class ModelInfo:
    """What inputs must fit, of a checkpoint that need not be in memory."""

    name: str  # the checkpoint's folder or name
    architecture: str  # the class that it names
    outline: Outline  # what it predicts, of how many tokens
    config: Any  # the model's transformers config
    has_embeddings: bool  # whether it embeds token ids, as an auxiliary sample needs

    @property
    def kind(self) -> Kind:
        """Whether it predicts masked or next tokens: masked, or causal."""
        return "causal" if self.outline.causal else "masked"

    @classmethod
    def of(cls, loaded: Loaded) -> ModelInfo:
        """Return what there is to know of a loaded checkpoint."""
        outline = Outline.of(loaded.name, loaded.model, loaded.kind == "causal")
        has_embeddings = input_embeddings(loaded.model) is not None
        return cls(loaded.name, loaded.architecture, outline, loaded.model.config, has_embeddings)


def data_context(data: Path, models: Sequence[ModelInfo], config: ReadingConfig, *, shuffled: bool) -> MeasureContext:
    """Return the context of measuring models on text or token ids that all take in the same meaning."""
    first = models[0]
    _check_together(models)
    _check_tokenizers([model.name for model in models])
    objective = config.objective(first.name, is_causal=first.outline.causal)

    def read(num_inputs: int, seed: int) -> Inputs:
        inputs = read_inputs(
            data,
            checkpoint=first.name.partition("@")[0],
            tokenizer=config.tokenizer,
            config=first.config,
            kind=objective.kind,
            length=config.length,
            num_inputs=num_inputs,
            masking=objective,
            mask_id=config.mask_id,
            seed=seed,
        )
        for other in models[1:]:
            check_model(inputs, other.config, other.name)
        return _fitting(inputs, models, config, seed if shuffled else None)

    return MeasureContext(read=read, objective=objective, has_embeddings=first.has_embeddings)


def language_context(
    language: LanguageConfig,
    objective: ObjectiveConfig,
    models: Sequence[ModelInfo],
    config: ReadingConfig,
    *,
    shuffled: bool,
) -> MeasureContext:
    """Return the context of measuring models on sentences of a language."""
    _check_together(models)
    config.check_language(models[0].name)
    made: Language = language.build()
    for model in models:
        _check_fits(model, made, language_inputs(made, objective, num_inputs=1, seed=0))

    def read(num_inputs: int, seed: int) -> Inputs:
        inputs = language_inputs(made, objective, num_inputs=num_inputs, seed=seed)
        return _fitting(inputs, models, config, seed if shuffled else None)

    return MeasureContext(read=read, objective=objective, language=made)


def run_context(config: TrainConfig) -> MeasureContext:
    """Return the context of measuring the checkpoints of a run on its own language."""
    language: Language = config.language.build()
    return MeasureContext(
        read=lambda num_inputs, seed: language_inputs(language, config.objective, num_inputs=num_inputs, seed=seed),
        objective=config.objective,
        language=language,
    )


def common_run_config(names: Sequence[str]) -> TrainConfig:
    """Return the config of the first of some checkpoints of runs on one language with one objective."""
    known: tuple[str, TrainConfig] | None = None
    for name in names:
        checkpoint = checkpoint_of(Path(name))
        if checkpoint is None:
            raise IsolossError(
                f"{name} is not a checkpoint of a run, so there is no language to measure it on: add --data with "
                "text or a .npy file of token ids"
            )
        config = checkpoint[0].config
        if known is not None and (known[1].language, known[1].objective) != (config.language, config.objective):
            raise IsolossError(
                f"{known[0]} and {name} are of runs with different languages or objectives: add --data to compare them"
            )
        known = known or (name, config)
    assert known is not None
    return known[1]


def _fitting(inputs: Inputs, models: Sequence[ModelInfo], config: ReadingConfig, order: int | None) -> Inputs:
    """Return inputs in batches that fit all models, in random order where there is a seed of it."""
    size = config.batch_size or min(inputs.fitting_batch_size(model.config) for model in models)
    return (inputs if order is None else inputs.shuffled(order)).cut(size)


def _check_fits(model: ModelInfo, language: Language, inputs: Inputs) -> None:
    """Refuse a model that does not know the ids of a language, or not as many positions as its sentences have."""
    text = model.config.get_text_config()
    if text.vocab_size < language.model_vocab_size:
        raise IsolossError(
            f"{model.name} knows {text.vocab_size} ids, and a model of the language {language.model_vocab_size}"
        )
    check_model(inputs, model.config, model.name)


def _check_together(models: Sequence[ModelInfo]) -> None:
    for other in models[1:]:
        models[0].outline.check(other.outline)


def _check_tokenizers(names: Sequence[str]) -> None:
    """Refuse checkpoints that bring tokenizers in which an id is not the same token."""
    known: tuple[str, dict[str, int]] | None = None
    for name in names:
        try:
            vocabulary = load_tokenizer(name.partition("@")[0]).get_vocab()
        except IsolossError:
            continue  # it has none of its own: token ids, or a tokenizer that is given, say what it reads
        if known is not None and known[1] != vocabulary:
            raise IsolossError(
                f"{known[0]} and {name} have different tokenizers, so their losses per token are not of the same thing"
            )
        known = known or (name, vocabulary)
