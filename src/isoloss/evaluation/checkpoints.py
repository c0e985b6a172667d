"""Evaluating checkpoints that are no run's, on text, token ids or a language."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isoloss import files
from isoloss.config import LanguageConfig, check
from isoloss.errors import IsolossError
from isoloss.evaluation.config import ReadingConfig
from isoloss.evaluation.context import MeasureContext
from isoloss.evaluation.data import ModelInfo, data_context, language_context
from isoloss.evaluation.evaluator import Progress, Settings, applying, measured
from isoloss.evaluation.results import Evaluations
from isoloss.loading import load_model
from isoloss.run_config import ObjectiveConfig
from isoloss.runs import Evaluation


def evaluate_checkpoints(
    names: Sequence[str],
    measures: Sequence[str] | None,
    *,
    data: str | Path | None,
    language: Any,
    objective: ObjectiveConfig | None,
    reading: ReadingConfig,
    settings: Settings | None,
    output: Path | None,
    load_options: dict[str, Any],
    progress: Progress | None,
) -> Evaluations:
    """Return the evaluations of checkpoints, one in memory at a time; arguments as for `evaluate`."""
    check(reading)
    options = {**load_options, "dtype": getattr(torch, load_options["dtype"])}
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise IsolossError(f"{twice} is named twice")
    models = [ModelInfo.of(load_model(name, **options)) for name in names]
    context = _context(models, data, language, objective, reading)
    chosen = applying(measures, settings, context, ", ".join(names))
    done: list[tuple[str, Evaluation]] = []
    for name in names:
        model = load_model(name, **options).model
        weights = weights_digest(model)
        for measure in chosen:
            if progress is not None:
                progress(len(done), len(names) * len(chosen), f"{measure} of {name}")
            evaluation, examples = measured(measure, settings, model, context, step=None, weights=weights)
            done.append((name, evaluation))
            if output is not None:
                path = output / re.sub(r"[^\w.-]+", "-", name).strip("-.") / f"{measure}.json"
                files.write_bytes(path.with_suffix(".safetensors"), examples)
                files.write_json(path, {"model": name, **evaluation.to_dict()})
    return Evaluations(tuple(name for name, _ in done), tuple(evaluation for _, evaluation in done))


def _context(
    models: Sequence[ModelInfo],
    data: str | Path | None,
    language: Any,
    objective: ObjectiveConfig | None,
    reading: ReadingConfig,
) -> MeasureContext:
    if data is not None and language is not None:
        raise IsolossError("data and a language are given: a model is measured on one of the two")
    if data is not None:
        return data_context(Path(data), models, reading, shuffled=False)
    from isoloss import languages

    config = language if isinstance(language, LanguageConfig) else languages.resolve(str(language))
    return language_context(config, objective or ObjectiveConfig(kind=models[0].kind), models, reading, shuffled=False)


def weights_digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers, by name."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha256.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha256.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()
