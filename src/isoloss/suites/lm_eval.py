"""Tasks of lm-evaluation-harness, from its files or run here: an estimate of each metric, paired between models."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from isoloss import files
from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean, require_package, warn
from isoloss.lab.evaluation.measures.base import FunctionMeasure, MeasureResult, digest, requires
from isoloss.statistics.comparison import paired_difference, times
from isoloss.statistics.estimate import Estimate, interval, number
from isoloss.statistics.tables import text_table
from isoloss.text import documents

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext

_FILE = re.compile(r"(?:samples_(?P<task>.+)|.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl?")
_WEIGHTED = ("word_perplexity", "byte_perplexity", "bits_per_byte")  # by the words or bytes of each document
_ROUNDING = 1e-6  # of a value: the probabilities in a Brier score have 8 digits
_LARGEST = 300.0  # logarithm of a perplexity: its error is finite then
UNKNOWN = 1_000_000  # samples, if a file gives an error without their number: the interval is normal


@dataclass(frozen=True)
class Items:
    """The contributions of documents to a metric."""

    metric: str
    by_hash: dict[str, tuple[float, float]]  # the sum and the weight of each document, by `doc_hash`

    def estimate(self) -> Estimate:
        """Return the metric with its error over documents."""
        from isoloss.statistics.ratio import ratio_estimate  # needs torch, which help does without

        amounts, sizes = zip(*self.by_hash.values(), strict=True)
        weights = None if set(sizes) == {1.0} else sizes
        found = ratio_estimate(amounts, weights, unit=_unit(self.metric), method=f"{self.metric} over documents")
        found = dataclasses.replace(found, details={"clusters": "documents"})
        if self.metric == "bits_per_byte":
            return times(found, -1 / math.log(2))
        if self.metric == "perplexity" or self.metric in _WEIGHTED:
            if -found.value > _LARGEST:
                raise IsolossError(f"{self.metric} is above {math.exp(_LARGEST):.0e}, where it is not a finite number")
            value = math.exp(-found.value)
            return dataclasses.replace(times(found, -value), value=value)
        return found


@dataclass(frozen=True, repr=False)
class TaskResults:
    """Results of models on tasks of lm-evaluation-harness; it prints as a table.

    Attributes:
        models: The estimates by model and metric. Metrics are called `TASK.METRIC`, or `TASK.METRIC.FILTER` if
            responses are filtered.
        items: The contributions of documents by model and metric, if there are samples.
    """

    models: Mapping[str, Mapping[str, Estimate]]
    items: Mapping[str, Mapping[str, Items]]

    def difference(self, metric: str, first: str, second: str) -> Estimate:
        """Return the paired difference of a metric, first model minus second, on their common documents.

        Raises:
            IsolossError: A model has no samples of the metric, or they have too few documents in common.
        """
        for model in (first, second):
            if metric not in (known := self.items.get(model, {})):
                raise IsolossError(f"{model} has no samples of {metric!r}{did_you_mean(metric, known)}")
        own, *both = self.items[first][metric], *(self.items[each][metric].by_hash for each in (first, second))
        common = [key for key in both[0] if key in both[1]]
        if len(common) < 2:
            raise IsolossError(f"{metric}: {first} and {second} have too few documents in common ({len(common)})")
        if more := sum(len(documents) - len(common) for documents in both):
            warn(f"{metric}: left out {more:,} documents that only one of {first} and {second} has")
        one, other = (Items(own.metric, {key: documents[key] for key in common}).estimate() for documents in both)
        return paired_difference(one, other)

    def __str__(self) -> str:
        first, rows = next(iter(self.models)), []
        for metric in dict.fromkeys(name for metrics in self.models.values() for name in metrics):
            for model in (model for model, metrics in self.models.items() if metric in metrics):
                row = [metric, model, str(self.models[model][metric]), "", ""]
                if model != first and all(metric in self.items[each] for each in (first, model)):
                    with contextlib.suppress(IsolossError):  # too few documents in common: there is none
                        difference = self.difference(metric, model, first)
                        row[3:] = number(difference), interval(difference)
                rows.append(row)
        return text_table(["metric", "model", "value", f"minus {first}", "95 % interval"], rows, left=2)


def read_lm_eval(paths: str | Path | Sequence[str | Path] | Mapping[str, str | Path]) -> TaskResults:
    r"""Return results of lm-evaluation-harness from files, with errors and paired differences of models.

    A metric is a mean over documents, or a ratio or perplexity weighted by words or bytes. Its error is over documents
    (`isoloss.statistics.ratio`), even where lm-evaluation-harness prints N/A: bits per byte, perplexities of texts, the
    Brier score. Differences are paired by `doc_hash`. A repeated document counts every time in the value, but once in
    the error.

    Args:
        paths: The output of `lm_eval --output_path FOLDER --log_samples`: folders, searched at any depth, and files,
            `samples_TASK_DATE.jsonl` and `results_DATE.json`. A model's name is its `pretrained`, as `NAME` or
            `NAME@REVISION`. In a mapping from names to paths, each path has the results of one model.

    Returns:
        Estimates from samples. A metric that is not such a mean, such as F1, or that has no samples, has the value and
        error in `results_DATE.json`. If a task has several results, the latest counts.

    Raises:
        IsolossError: A path holds no results, or a file is damaged.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from isoloss import read_lm_eval
        >>> def sample(item, correct):
        ...     return json.dumps({"doc_hash": item, "filter": "none", "metrics": ["acc"], "acc": correct})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for model, answers in {"early": [0, 0, 1, 1], "late": [1, 0, 1, 1]}.items():
        ...         file = Path(folder, model, "samples_quiz_2026-01-01T12-00-00.0.jsonl")
        ...         file.parent.mkdir()
        ...         _ = file.write_text("\n".join(sample(f"item {i}", answer) for i, answer in enumerate(answers)))
        ...     results = read_lm_eval([f"{folder}/early", f"{folder}/late"])
        >>> print(results)
        metric    model      value  minus early  95 % interval
        quiz.acc  early  50 ± 29 %
        quiz.acc  late   75 ± 25 %      25 ± 25     -55 to 100
        >>> results.difference("quiz.acc", "late", "early").samples
        4
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    named = [(name, [path]) for name, path in paths.items()] if isinstance(paths, Mapping) else [("", paths)]
    models: dict[str, dict[str, Estimate]] = {}
    items: dict[str, dict[str, Items]] = {}
    shots: dict[str, dict[str, int]] = {}  # by task and model, the examples in a prompt
    for name, places in named:
        for results, samples in _runs(list(map(Path, places))):
            model = name or _model(results)
            estimates, of_documents = estimates_of(samples, results["results"])
            if again := models.get(model, {}).keys() & estimates.keys():
                warn(f"{model} has several results for {min(again)}: the latest counts")
            items[model] = {k: v for k, v in items.get(model, {}).items() if k not in estimates} | of_documents
            models[model] = models.get(model, {}) | estimates
            for task, examples in results.get("n-shot", {}).items():
                shots.setdefault(task, {})[model] = examples
    for task, of_models in shots.items():
        if len({*of_models.values()}) > 1:
            told = ", ".join(f"{examples} for {model}" for model, examples in of_models.items())
            warn(f"the prompts of {task} have different numbers of examples, which makes them different tasks: {told}")
    return TaskResults(models=models, items=items)


def estimates_of(
    samples: Mapping[str, Iterable[Mapping[str, Any]]], results: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Estimate], dict[str, Items]]:
    """Return the estimates and the contributions of documents, by metric.

    Args:
        samples: The samples of lm-evaluation-harness, by task.
        results: Its values and errors, by task.
    """
    estimates: dict[str, Estimate] = {}
    kept: dict[str, Items] = {}
    for task in dict.fromkeys([*samples, *results]):
        found, told = _by_document(samples.get(task, ())), results.get(task, {})
        for key in dict.fromkeys([*found, *(key for key in told if "," in key and "_stderr," not in key)]):
            metric, _, kind = key.partition(",")
            name = f"{task}.{metric}" + f".{kind}" * (kind != "none")
            value, stderr = told.get(key), told.get(f"{metric}_stderr,{kind}")
            try:
                if (own := found.get(key)) and own.by_hash:
                    estimate = own.estimate()
                    if value is None or math.isclose(estimate.value, value, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
                        estimates[name], kept[name] = estimate, own
                        continue
                if not isinstance(value, int | float) or not isinstance(stderr, int | float):
                    raise IsolossError(f"{name} is not a mean over its samples, and the results give no error for it")
                if own and own.by_hash:
                    warn(
                        f"{name} is {value:.5g} in the results and {estimate.value:.5g} over its samples: the results' "
                        "value counts, and has no paired difference"
                    )
                number_of = {"samples": told.get("sample_len", UNKNOWN), "num_predictions": told.get("sample_len", 0)}
                method = "value and error of lm-evaluation-harness"
                estimates[name] = Estimate(value=value, stderr=stderr, unit=_unit(metric), method=method, **number_of)
            except IsolossError as error:
                warn(f"left out: {error}")
    return estimates, kept


def _by_document(samples: Iterable[Mapping[str, Any]]) -> dict[str, Items]:
    """Return the contributions of documents by metric and filter; none for metrics that are not such means."""
    found: dict[str, Items] = {}
    others = {}
    for sample in samples:
        for metric in sample["metrics"]:
            key = f"{metric},{sample['filter']}"
            if (part := _part(metric, sample.get(metric))) is None:
                others[key] = Items(metric, {})
                continue
            documents = found.setdefault(key, Items(metric, {})).by_hash
            amount, size = documents.get(sample["doc_hash"], (0.0, 0.0))
            documents[sample["doc_hash"]] = amount + part[0], size + part[1]
    return found | others


def _part(metric: str, value: Any) -> tuple[float, float] | None:
    """Return the sum and the weight of a document in a metric; None: the metric is not a mean over documents."""
    if isinstance(value, int | float):
        return float(value), 1.0
    try:
        first, second = value
        if metric in _WEIGHTED:
            return float(first), float(second)
        if metric == "brier_score":
            # probabilities as numpy prints them, in the files
            chances = second.strip("[]").split() if isinstance(second, str) else second
            return sum((float(chance) - (i == first)) ** 2 for i, chance in enumerate(chances)), 1.0
    except (TypeError, ValueError):
        pass
    return None


def _unit(metric: str) -> str:
    return "accuracy" if metric.startswith("acc") or metric == "exact_match" else metric.replace("_", " ")


def _runs(paths: Sequence[Path]) -> Iterator[tuple[Mapping[str, Any], dict[str, Iterator[Mapping[str, Any]]]]]:
    """Yield the results of each run of lm-evaluation-harness and its samples by task, the earliest first."""
    runs: dict[tuple[str, Path], dict[str, Path]] = {}
    for path in paths:
        inside = [path] if path.is_file() else sorted(path.rglob("*.json*"))
        found = {file: match for file in inside if (match := _FILE.fullmatch(file.name))}
        if not found:
            names = "results_DATE.json and samples_TASK_DATE.jsonl"
            raise IsolossError(f"{path} has no results of lm-evaluation-harness ({names}){files.nearest(path)}")
        for file, match in found.items():
            runs.setdefault((match["date"], file.parent), {})[match["task"] or ""] = file
    for (date, folder), of_run in sorted(runs.items()):
        own = of_run.pop("", None)
        about = own or next(folder.glob(f"*_{date}.json"), None)
        results = {} if about is None else files.read_json(about)
        if not isinstance(results, dict) or (about and not isinstance(results.get("results"), dict)):
            raise IsolossError(f"{about} is not a results file of lm-evaluation-harness: it has no table 'results'")
        told = results.get("results", {})
        # if only samples are named, their tasks alone count
        told = told if own else {task: told[task] for task in of_run if task in told}
        model = {"model_name": folder.name, **results, "results": told}
        yield model, {task: _samples(file) for task, file in of_run.items()}


def _samples(file: Path) -> Iterator[Mapping[str, Any]]:
    line = 0
    with documents.reading(file):
        for line, sample in documents.json_lines(file):
            names = {"doc_hash", "filter", "metrics"}
            if lacking := names - sample.keys() if isinstance(sample, dict) else names:
                place = f"{file}, line {line}"
                raise IsolossError(f"{place} is not a sample of lm-evaluation-harness: it has no {min(lacking)!r}")
            yield sample
    if not line:
        warn(f"{file} has no samples")


def _model(results: Mapping[str, Any]) -> str:
    """Return the model of results, NAME or NAME@REVISION."""
    arguments = results.get("config", {}).get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(part.partition("=")[::2] for part in arguments.split(","))
    revision = arguments.get("revision") or "main"
    return str(results["model_name"]) + f"@{revision}" * (revision != "main")


# --- run on a model --------------------------------------------------------------------------------------------------

IncludePath = Annotated[str | None, setting(), "lm-eval-TASK: folder with YAML files of your own tasks."]
Limit = Annotated[int | None, setting(minimum=2), "lm-eval-TASK: first documents of each task to take; default: all."]
NumFewshot = Annotated[int | None, setting(minimum=0), "lm-eval-TASK: examples in a prompt; default: the task's own."]
_BATCH = 16  # documents at a time


def _why_not(measure: FunctionMeasure, context: MeasureContext) -> str | None:
    require_package("lm_eval")
    return None if context.is_causal else "lm-evaluation-harness takes only causal models"


@requires(_why_not)
def lm_eval_task(
    model: Any,
    *,
    task: str,
    context: Any,
    lm_eval_include_path: IncludePath = None,
    lm_eval_limit: Limit = None,
    lm_eval_num_fewshot: NumFewshot = None,
) -> MeasureResult:
    """Metrics of a task, or of a group of tasks, of lm-evaluation-harness, run on the loaded model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        try:
            manager = context.once(TaskManager, include_path=lm_eval_include_path)
            if task not in (known := manager.all_tasks):
                raise IsolossError(f"lm-evaluation-harness has no task {task!r}{did_you_mean(task, known)}")
            # a copy, which is given a token for padding
            lm = HFLM(pretrained=model, tokenizer=copy.deepcopy(context.tokenizer()), batch_size=_BATCH)
            options = {"limit": lm_eval_limit, "num_fewshot": lm_eval_num_fewshot, "task_manager": manager}
            # errors are ours: none is bootstrapped
            done = simple_evaluate(lm, tasks=[task], bootstrap_iters=0, **options)
        except IsolossError:
            raise
        except Exception as error:  # whatever a task or its data can raise
            raise IsolossError(f"lm-evaluation-harness cannot run {task}: {type(error).__name__}: {error}") from error
    samples = json.loads(json.dumps(done["samples"], default=handle_non_serializable))  # as in its files
    estimates, items = estimates_of(samples, done["results"])
    return MeasureResult(
        estimates=estimates, inputs=digest(more={name: list(each.by_hash) for name, each in items.items()})
    )
