"""`isoloss.compare`: models on one text, on token ids or on the language of their runs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from isoloss import files
from isoloss.checkpoints.places import split_module
from isoloss.comparison.kept import Kept
from isoloss.comparison.models import PROBE, ModelComparison
from isoloss.comparison.traces import Incomplete, Model, compare_traces, named_models
from isoloss.comparison.verdict import TraceComparison
from isoloss.errors import IsolossError
from isoloss.flatness._batches import as_tensors
from isoloss.flatness.robustness import ROBUSTNESS, Noise, loss_rises
from isoloss.lab.evaluation.context import Checkpoints, MeasureContext, ModelInfo, data_context, language_context
from isoloss.lab.evaluation.input_config import InputConfig, language_of_runs
from isoloss.lab.evaluation.measures.base import Measure, MeasureResult
from isoloss.lab.evaluation.measures.flatness import flatness_measure
from isoloss.lab.evaluation.measures.transfer import Probe, task_probes
from isoloss.machine import resolve_device
from isoloss.runs import last_checkpoint, versions
from isoloss.statistics.checking import at_least, positive
from isoloss.statistics.comparison import times
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate
from isoloss.statistics.significance import LOSS_MARGIN, MIN_RATIO
from isoloss.statistics.tables import label
from isoloss.text.inputs import Inputs, drawn_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA = "python:docs"  # a text that comes with Python
_ROBUSTNESS_SHARE = 8  # one sequence of so many: 7 losses of these cost less than the trace of all
_LEAST_ROBUSTNESS = 64  # sequences


def compare(
    models: Mapping[str, Model | str] | Sequence[str],
    batches: Iterable[Mapping[str, Any]] | None = None,
    *,
    data: str | Path | None = None,
    tokenizer: PreTrainedTokenizerFast | str | None = None,
    tasks: Sequence[str] = (),
    measures: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    pooling: Literal["auto", "last", "mean", "first", "concatenate"] = "auto",
    num_sequences: int = 512,
    seed: int = 0,
    causal: bool | None = None,
    robustness: bool = True,
    rtol: float | None = None,
    seconds: float | None = None,
    loss_margin: float = LOSS_MARGIN,
    min_ratio: float = MIN_RATIO,
    inputs: InputConfig | None = None,
    output: str | Path | None = None,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    attention: Any = "auto",
    trust_remote_code: bool = False,
    ignore_unexpected_weights: bool = False,
    module: str | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> ModelComparison:
    """Compare models: are their losses the same, which is the flattest, the most robust, the best at a task?

    All models are measured on the same inputs, with the same random probes and the same noise, so differences are
    paired. The result has for each model: the loss (for text, also in bits per byte of the original text), the trace of
    the Fisher information with and without embeddings, the minimal trace (if the rescalings of all models are known),
    and how far the loss rises under `ROBUSTNESS`: weights of 8 and 4 bits, with the loss that this leads to, and noise
    of 10 % of each tensor's root mean square, with errors that cover the draws. The rises are measured on a
    part of the sequences: on an eighth, and at least 64.

    Args:
        models: A mapping from names to language models, functions that load them, or checkpoints; or a list of
            checkpoints: folders, runs (their last checkpoint) or names on the Hugging Face hub. A model that is loaded
            here is dropped before the next one is loaded.
        batches: As for `isoloss.fisher_trace`, in place of `data`.
        data: Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs) or token ids (.npy); None, without
            `batches`: for runs of a language without a tokenizer, sentences of that language; else `python:docs`, the
            language reference that comes with Python.
        tokenizer: The tokenizer of all models, or its folder or name; None: the checkpoints' own, which must be alike.
        tasks: Tasks (`isoloss ls tasks`): the accuracy of a linear probe on the last hidden states of each model. With
            NAME=PATH, its examples are read from a file, a folder or hf:NAME. A task of your own is NAME=PATH, too: a
            file (.csv, .tsv, .jsonl, .json) with the columns `text` and `label`, and `pair` where an example is two
            texts; one example in five, which `seed` draws, is for testing.
        measures: Further measures of flatness (`isoloss ls measures`), on the same inputs, each a row of the table.
        settings: Settings of the measures, by the names of their fields; `num_probes` and `rescaling_granularity` are
            those of the traces too.
        pooling: Which token states the probes of tasks read, as for `isoloss.linear_probe`; `auto`: the last
            token of causal models, the mean over tokens of masked ones. The ranking of models may depend on it.
        num_sequences: The most sequences of `data` to measure on.
        seed: Decides which sequences are taken, their masks, and all random draws.
        causal: For `batches`: whether position t predicts token t + 1; None: by the models' class, then their config.
        robustness: Whether to measure how far the loss rises under small changes of the weights.
        rtol: Stop measuring the traces as soon as the first model's standard error is at most this fraction of its
            trace; the others get as many sequences.
        seconds: Stop after this time, in the same way.
        loss_margin: Margin in nats per predicted token within which two losses count as the same.
        min_ratio: The smallest ratio of two traces that counts: the flattest model's are smaller by this factor.
        inputs: How `data` is read: length, masking, and so on. The tokenizer is an argument of its own.
        output: A folder that keeps the estimates of each model that is done. The same call goes on there after it was
            killed, and ends with the same numbers. Models may be added or left out; behind another first model, traces
            are measured again, as it decides how they are adjusted.
        device: For checkpoints: auto, cpu, cuda, cuda:1, mps.
        dtype: For checkpoints: the type of the weights.
        attention: For checkpoints: the kernel, as for `isoloss.load_model`.
        trust_remote_code: Whether code that comes with a checkpoint may run.
        ignore_unexpected_weights: As for `isoloss.load_model`.
        module: For files of weights: `FILE.py:NAME`, as for `isoloss.load_model`.
        progress: Called with a model's name and how many of its sequences are done.

    Raises:
        IsolossError: No models, or models or data that do not fit each other; nothing was measured.
        ComparisonError: A model failed after others were measured; its `complete` is the comparison of those.
        InterruptedComparison: Ctrl-C; its `complete` is the comparison of the models that were done, or None.

    Example:
        >>> import torch
        >>> from isoloss import compare
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> models = {}
        >>> for name, number in (("a", 0), ("b", 1)):
        ...     _ = torch.manual_seed(number)
        ...     models[name] = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (64, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(64, 4)
        >>> comparison = compare(models, [{"input_ids": input_ids, "labels": labels}])
        >>> [answer.question for answer in comparison.answers()]
        ['Same loss?', 'Flatter?', 'More robust at 4 bits?', 'More robust to noise?']
        >>> comparison.difference("int4-rise", "b", "a").unit
        'nats per predicted token'
    """
    own = {} if pooling == "auto" else {"probe_pooling": pooling}
    probes = task_probes(tasks, {"probe_solver": "convex", "seed": seed} | own)
    settings = {"num_sequences": num_sequences, "seed": seed} | dict(settings or {})
    # these are rows in any case
    usual = ["trace", "minimal-trace", *(["int8-rise", "int4-rise", "noise-rise"] if robustness else [])]
    others = {name: flatness_measure(name, settings) for name in measures if name not in usual}
    positive("loss_margin", loss_margin)
    at_least("min_ratio", min_ratio, 1)
    named = {
        name: last_checkpoint(given) if isinstance(given, str | Path) else given
        for name, given in named_models(models).items()
    }
    checkpoints = Checkpoints(
        named,
        device=device,
        dtype=dtype,
        attention=attention,
        trust_remote_code=trust_remote_code,
        ignore_unexpected_weights=ignore_unexpected_weights,
        module=module,
    )

    # 1. the inputs that all models are measured on, and the few of them on which the weights are changed
    read: Inputs | None = None
    if batches is None:
        # a measurement that may stop early takes its inputs in random order, or it would be of the start of the data
        is_shuffled = rtol is not None or seconds is not None
        context = shared_context(
            named, checkpoints.infos, data, tokenizer, inputs or InputConfig(), shuffled=is_shuffled
        )
        probes = _fitting(probes, others, pooling, context, checkpoints.infos)
        read, causal = context.inputs(num_sequences, seed), context.is_causal
        batches, few = read.batches, read.some(_num_changed(read.num_sequences), seed).batches
        auxiliary_sample = read.auxiliary_sample if context.has_embeddings else None
    else:
        for_text: dict[str, Any] = {"data": data, "tokenizer": tokenizer, "inputs": inputs}
        for_text |= {"tasks": tasks or None, "measures": measures or None}
        if unused := [name for name, value in for_text.items() if value is not None]:
            raise IsolossError(f"batches are given: leave out {' and '.join(unused)}, for reading text, or the batches")
        if not isinstance(batches, Mapping):  # that one is refused by the measurement
            batches = list(as_tensors(batches))
        few, auxiliary_sample = _some(batches, seed), None

    # 2. of each model, while it is loaded: trace and minimal trace, then robustness, further measures and tasks
    changes = {
        name: dataclasses.replace(change, seed=seed) if isinstance(change, Noise) else change
        for name, change in ROBUSTNESS.items()
    }

    def extra_estimates(model: nn.Module) -> dict[str, Estimate]:
        found = loss_rises(model, few, changes, causal=causal) if robustness else {}
        for name, measure in others.items():
            estimates = MeasureResult.of(name, measure.run(model, context)).estimates
            found |= {label(name, each, tuple(estimates)): estimate for each, estimate in estimates.items()}
        return found | {f"{PROBE}{task}": _accuracy(probe, model, context) for task, probe in probes.items()}

    kept = None
    if output is not None:
        chosen = [
            *(settings, sorted(others), robustness, causal, rtol, seconds, str(dtype), str(resolve_device(device))),
            *(str(attention), tasks, pooling, module, _contents(tasks, module)),
        ]
        held = batches if isinstance(batches, list) else []
        read_by_all = [_sha256(each) for each in (held, few, auxiliary_sample or ())]
        kept = Kept(Path(output), {"versions": versions(), "inputs": read_by_all, "settings": chosen})

    # 3. one table, which judges itself
    def judged(compared: TraceComparison) -> ModelComparison:
        fields = {field.name: getattr(compared, field.name) for field in dataclasses.fields(TraceComparison)}
        if read is not None and read.bytes_per_token:
            fields["models"] = _with_bits_per_byte(compared.models, read.bytes_per_token)
        about: dict[str, Any] = {}
        if read is not None:
            fields["documents"] = read.document_names
            about = {"inputs": read.description, "num_held": read.num_held}
            about["has_most_documents"] = read.has_most_documents
        return ModelComparison(**fields, **about, loss_margin=loss_margin, min_ratio=min_ratio, measures=tuple(others))

    try:
        compared = compare_traces(
            {name: functools.partial(checkpoints.model, name) for name in named},
            batches,
            seed=seed,
            num_probes=settings.get("num_probes"),
            rtol=rtol,
            seconds=seconds,
            causal=causal,
            auxiliary_sample=auxiliary_sample,
            granularity=settings.get("rescaling_granularity", "tensor"),
            extra_estimates=extra_estimates,
            kept=kept,
            progress=progress,
        )
    except Incomplete as stop:
        if stop.complete is not None:
            stop.complete = judged(stop.complete)
        raise
    return judged(compared)


def shared_context(
    named: Mapping[str, Model | str | Path],
    infos: Sequence[ModelInfo],
    data: str | Path | None,
    tokenizer: PreTrainedTokenizerFast | str | None,
    config: InputConfig,
    *,
    shuffled: bool,
) -> MeasureContext:
    """Return what models are measured on: text or token ids; without any, the language of their runs, or `DATA`."""
    if isinstance(tokenizer, str):
        config, tokenizer = dataclasses.replace(config, tokenizer=tokenizer), None
    has_tokenizer = tokenizer is not None or config.tokenizer is not None
    if data is None and not has_tokenizer:
        names = [str(given) if isinstance(given, str | Path) else name for name, given in named.items()]
        if (run := language_of_runs(names)) is not None:
            config.check_run(infos[0].name)
            return language_context(run.language, run.objective, infos, config, shuffled=shuffled)
    if not has_tokenizer and not any(info.has_tokenizer for info in infos):
        raise IsolossError(f"{infos[0].name} is a model in memory, which has no tokenizer: give tokenizer")
    return data_context(Path(data or DATA), infos, config, shuffled=shuffled, tokenizer=tokenizer)


def _fitting(
    probes: Mapping[str, Probe],
    others: Mapping[str, Measure],
    pooling: Any,
    context: MeasureContext,
    infos: Sequence[ModelInfo],
) -> dict[str, Probe]:
    """Return the probes of tasks with their pooling; refuse a task or measure that a model cannot be measured on."""
    for name, measure in others.items():
        if (reason := measure.why_not_applicable(context)) is not None:
            raise IsolossError(f"{name} cannot be measured: {reason}")
    if probes and pooling == "first" and context.is_causal:
        raise IsolossError(
            "pooling is first, but the first token of a causal model has seen no other: choose last or mean"
        )
    if pooling == "auto":
        pooling = "last" if context.is_causal else "mean"
    fitting = {task: dataclasses.replace(probe, probe_pooling=pooling) for task, probe in probes.items()}
    for task, probe in fitting.items():
        if (reason := probe.why_not_applicable(context)) is not None:
            files_of = f"; to read its examples from files, name it as {task}=PATH"
            from_files = "" if probe.task_data else files_of
            raise IsolossError(f"the task {task} cannot be measured: {reason}{from_files}")
        try:
            for info in infos:
                probe.check_model(info, context)
        except IsolossError as error:
            raise IsolossError(f"the task {task} cannot be measured: {error}") from error
    return fitting


def _contents(named: Sequence[str], module: str | None) -> list[str]:
    """Return the SHA-256 of each file that tasks, as NAME=PATH, and a module are read from: a path tells little."""
    paths = [Path(path).expanduser() for _, _, path in (each.partition("=") for each in named) if path]
    paths += [] if module is None else [split_module(module)[0]]
    found = (file for path in paths for file in sorted((path, *path.rglob("*"))) if file.is_file())
    return [files.sha256(file) for file in found]


def _with_bits_per_byte(
    models: Mapping[str, Mapping[str, Estimate]], bytes_per_token: float
) -> dict[str, dict[str, Estimate]]:
    """Add the loss in bits per byte. The bytes are taken as exact, so a difference is as certain as in nats."""
    bits = {name: times(estimates["loss"], 1 / (bytes_per_token * math.log(2))) for name, estimates in models.items()}
    return {
        name: {**estimates, "bits-per-byte": dataclasses.replace(bits[name], unit="bits per byte")}
        for name, estimates in models.items()
    }


def _sha256(batches: Iterable[Mapping[str, Any]]) -> str:
    """Return the SHA-256 of inputs."""
    digest = hashlib.sha256()
    for batch in batches:
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in batch.items() if name not in tensors}
        digest.update(f"{files.tensors_sha256(tensors.items())} {others}".encode())
    return digest.hexdigest()


def _num_changed(num_sequences: int) -> int:
    """Return on how many of the sequences the rises of the loss are measured."""
    return max(_LEAST_ROBUSTNESS, num_sequences // _ROBUSTNESS_SHARE)


def _some(batches: Iterable[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return a few of the sequences, drawn at random; none of batches that the measurement will refuse."""
    if not all(isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor) for batch in batches):
        return []
    sizes = [len(batch["labels"]) for batch in batches]
    few = []
    drawn = torch.split(drawn_rows(sum(sizes), _num_changed(sum(sizes)), seed), sizes)
    for batch, rows in zip(batches, drawn, strict=True):
        chosen = rows.nonzero()[:, 0]
        if len(chosen):
            few.append(dict(batch))
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    few[-1][name] = value[chosen.to(value.device)] if len(value) == len(rows) else value
                elif name == "documents":
                    few[-1][name] = [value[row] for row in chosen.tolist()]
    return few


def _accuracy(measure: Probe, model: nn.Module, context: MeasureContext) -> Estimate:
    """Return the accuracy of a probe with what each test example adds to it."""
    result = MeasureResult.of("probe", measure.run(model, context))
    correct = result.more["accuracy.predictions"] == result.more["accuracy.labels"]
    accuracy = result.estimates["accuracy"]
    paired = ratio_estimate(correct.mean(axis=0), unit=accuracy.unit, method=accuracy.method)
    details = {**accuracy.details, "clusters": "test examples", "pooling": measure.probe_pooling}
    return dataclasses.replace(paired, details=details)
