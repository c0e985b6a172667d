"""The linear probe: a softmax regression on frozen features, for several seeds at once (paper, section 2.1 and A.5).

Shape letters: D features, C classes, n examples.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from isoloss.config import replaced
from isoloss.errors import IsolossError, require
from isoloss.languages.api import ExactLanguage, Language, Sentences
from isoloss.statistics.estimate import Estimate
from isoloss.transfer.config import ClassifierConfig, LinearProbeConfig
from isoloss.transfer.features import extract, lookup_features
from isoloss.transfer.fits.probe import fit_probe, refuse_nonfinite
from isoloss.transfer.results import TransferResult, check_labels, score
from isoloss.transfer.stored_features import StoredFeatures
from isoloss.transfer.tasks import TaskData

MEMORY_BYTES = 2**31  # of the features of a split that stay in memory


def linear_probe(
    model: torch.nn.Module,
    task: TaskData,
    config: LinearProbeConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    memory_bytes: int = MEMORY_BYTES,
    **settings: Any,
) -> TransferResult:
    """Return the test accuracy of a linear classifier on the frozen states of `model`.

    Features of more than `memory_bytes` are kept in a temporary file (in the environment's `TMPDIR`) meanwhile.

    Args:
        model: A Hugging Face model in eval mode.
        task: Labeled sentences, from `make_task` or `make_text_task`.
        config: The settings; None: those of `ClassifierConfig`.
        dtype: Type of the features, float32 or bfloat16.
        memory_bytes: The largest features of a split that are held in memory, in bytes.
        settings: Fields of `LinearProbeConfig` that replace those of `config`, e.g. `solver="convex"`.

    Returns:
        The accuracy with its error, and the predictions of each seed, (seeds, n_test).

    Raises:
        IsolossError: A setting out of range, labels or tokens that do not fit the model, or a feature that is not
            finite.

    Example:
        >>> from isoloss import linear_probe, load_language
        >>> from isoloss.models.make import make_model
        >>> from isoloss.run_config import ModelConfig
        >>> from isoloss.transfer.tasks import make_task
        >>> language = load_language("pcfg-laptop")
        >>> model = make_model(ModelConfig(size="d16"), language, seed=0).eval()
        >>> task = make_task(language, "prefix-4", num_train=64, num_test=32)
        >>> linear_probe(model, task, epochs=3, seeds=2).predictions.shape
        torch.Size([2, 32])
    """
    config = replaced(config or LinearProbeConfig(), settings)
    require("model", model, torch.nn.Module, "a model, such as load_model(CHECKPOINT).model")
    require("task", task, TaskData, "a task, which make_task returns")
    with tempfile.TemporaryDirectory(prefix="isoloss-") as folder:
        train_x, test_x = (
            extract(
                model,
                sentences,
                types=types,
                pooling=config.pooling,
                layer=config.layer,
                projection=config.projection,
                dtype=dtype,
                path=Path(folder, f"{split}.safetensors"),
                memory_bytes=memory_bytes,
            )
            for split, sentences, types in (
                ("train", task.train, task.train_types),
                ("test", task.test, task.test_types),
            )
        )
        return _fit_on_task(task, train_x, test_x, config, device=next(model.parameters()).device)


def lookup_probe(
    language: ExactLanguage, task: TaskData, config: ClassifierConfig | None = None, **settings: Any
) -> TransferResult:
    r"""Return the test accuracy of a linear probe on the true conditionals (paper, section 2.3 and appendix A.5).

    A model of the best pre-training loss has these probabilities as its outputs, whatever its token states are.

    Args:
        language: The language of the task's sentences.
        task: Labeled sentences, from `make_task`.
        config: The settings; None: those of `ClassifierConfig`.
        settings: Fields of `ClassifierConfig` that replace those of `config`.

    Raises:
        IsolossError: As `fit_linear_probe`; or a sentence is not one of the language.

    Example:
        >>> from isoloss.languages.pcfg.language import PCFG
        >>> from isoloss.transfer.tasks import make_task
        >>> language = PCFG.from_text("S A 1\nS B 1\nA C D 1\nB D C 1\nC c 1\nD d 1")
        >>> task = make_task(language, "root", num_train=100, num_test=50)
        >>> print(lookup_probe(language, task, solver="convex").accuracy)
        100 %
    """
    return language_probe(lookup_features, language, task, config, **settings)


def language_probe(
    features: Callable[[Language, Sentences], torch.Tensor],
    language: Language,
    task: TaskData,
    config: ClassifierConfig | None = None,
    **settings: Any,
) -> TransferResult:
    """Return the test accuracy of a linear probe on what `features` makes of sentences, without a model.

    The other arguments and the errors are those of `lookup_probe`.
    """
    try:
        train_x, test_x = (features(language, sentences) for sentences in (task.train, task.test))
    except IsolossError as error:
        raise IsolossError(f"task {task.name} cannot be probed without a model: {error}") from error
    return _fit_on_task(task, train_x, test_x, config, **settings)


def _fit_on_task(
    task: TaskData,
    train_x: torch.Tensor | StoredFeatures,
    test_x: torch.Tensor | StoredFeatures,
    config: ClassifierConfig | None,
    **settings: Any,
) -> TransferResult:
    return fit_linear_probe(
        train_x, task.train_labels, test_x, task.test_labels, config, classes=task.classes, bayes=task.bayes, **settings
    )


def fit_linear_probe(
    train_x: torch.Tensor | StoredFeatures,
    train_y: torch.Tensor,
    test_x: torch.Tensor | StoredFeatures,
    test_y: torch.Tensor,
    config: ClassifierConfig | None = None,
    *,
    classes: int | Sequence[str],
    bayes: Estimate | None = None,
    device: torch.device | str | None = None,
    **settings: Any,
) -> TransferResult:
    """Fit a linear classifier to features and return its test accuracy.

    AdamW's steps have a fixed size, so small features are learned slowly: after 100 epochs the probe would compare the
    scales of two models' features more than their content. With `standardize`, the default, the features are therefore
    centered at their training mean and divided by one number, the root mean square of what remains, which leaves their
    proportions alone. (With 4,000 sentences of the language `pcfg-laptop` and task `prefix-4`, the look-up table
    reaches 0.537; on raw features it reaches 0.442, and after 400 epochs 0.502, each ± 0.008.)

    With `solver="convex"` the probe is the minimum of the mean cross-entropy plus `regularization / 2 |W|^2`, to 1e-6
    of it (`isoloss.transfer.fits.convex.fit`). It depends on no seed: its predictions are repeated for every seed, and
    the seeds' standard deviation is 0. Of several regularization strengths the one with the highest accuracy on
    held-out training examples, in five folds, is chosen (the largest where several are equal).

    Args:
        train_x: (n_train, D) features, in memory or in a file; the probe runs in float32.
        train_y: (n_train,) labels in 0..C - 1.
        test_x: (n_test, D) features.
        test_y: (n_test,) labels.
        config: The settings; None: those of `ClassifierConfig`.
        classes: The C names, or their number.
        bayes: The Bayes-optimal accuracy, where it is known.
        device: Where the probe runs; None: where the training features are.
        settings: Fields of `ClassifierConfig` that replace those of `config`.

    Returns:
        The accuracy in `[0, 1]` (unit "accuracy") with `accuracies` (one per seed), `seed_std`, `binomial_stderr`,
        `train_accuracy`, `majority_rate`, `num_train` and `num_test` among its details (and, of the convex probe,
        `regularization`, `objective_nats` and the bound `gap_nats` on its excess over the minimum), and the
        predictions; see `isoloss.transfer.results.score` for the error. On a CPU, the same arguments and number of
        threads give the same bits.

    Raises:
        IsolossError: A split is empty; shapes or widths do not fit; a feature is not finite; a label is out of range; a
            setting is out of range.

    Warns:
        IsolossWarning: Test examples of a class that no training example has, which count as errors, as such a class is
            never predicted; training examples of a single class, which is then the prediction for all.

    Example:
        >>> x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]])
        >>> y = torch.tensor([0, 0, 1, 1])
        >>> fit_linear_probe(x, y, x, y, classes=("low", "high"), learning_rate=0.1, seeds=3)
        TransferResult(accuracy 100 %, 4 test examples, 2 classes, seeds 3, linear probe, AdamW)
    """
    began = time.perf_counter()
    config = replaced(config or ClassifierConfig(), settings)
    where = torch.device(device) if device else train_x.device if isinstance(train_x, torch.Tensor) else "cpu"
    train_y, test_y = train_y.to(where), test_y.to(where)
    names = [str(index) for index in range(classes)] if isinstance(classes, int) else classes
    _check_splits(train_x, train_y, test_x, test_y, names)
    probe = fit_probe(train_x, train_y, len(names), config)
    return score(
        probe.predict(test_x),
        test_y,
        names,
        method=probe_method(config),
        settings=probe.details,
        bayes=bayes,
        seconds=time.perf_counter() - began,
    )


def probe_method(config: ClassifierConfig) -> str:
    """Return what made the predictions of a probe, as results say it."""
    return f"linear probe, {'AdamW' if config.solver == 'adamw' else 'convex'}"


def _check_splits(
    train_x: torch.Tensor | StoredFeatures,
    train_y: torch.Tensor,
    test_x: torch.Tensor | StoredFeatures,
    test_y: torch.Tensor,
    classes: Sequence[str],
) -> None:
    for split, x, y in (("training", train_x, train_y), ("test", test_x, test_y)):
        if x.ndim != 2 or y.ndim != 1 or len(x) != len(y):
            raise IsolossError(
                f"the {split} split needs features (n, D) and labels (n,), not {tuple(x.shape)} and {tuple(y.shape)}"
            )
        if math.prod(x.shape) == 0:
            raise IsolossError(f"the {split} split is empty: its features are {tuple(x.shape)}")
        refuse_nonfinite(x, split, y.device)
    if train_x.shape[1] != test_x.shape[1]:
        raise IsolossError(
            f"training features are {train_x.shape[1]} wide and test features {test_x.shape[1]}: both must come from "
            "the same model and be padded to one length"
        )
    check_labels(train_y, test_y, classes)
