"""Compare models on one text: loss, traces, robustness to small changes of the weights, tasks; and one verdict.

A model's estimates have the names that `isoloss.flatness.comparison` and `isoloss.flatness.robustness.ROBUSTNESS` give
them, and `probe-TASK` for each task.
"""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isoloss.errors import IsolossError
from isoloss.flatness._batches import as_tensors
from isoloss.flatness.comparison import (
    ComparisonError,
    InterruptedComparison,
    Model,
    TraceComparison,
    compare_traces,
    named_models,
)
from isoloss.flatness.robustness import ROBUSTNESS, loss_rises
from isoloss.flatness.verdict import Verdict, verdict
from isoloss.lab.evaluation.context import MeasureContext, ModelInfo, data_context
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.base import Measure, MeasureResult, make_measure
from isoloss.loading import LoadedModel, load_model
from isoloss.model_checks import is_causal
from isoloss.statistics.checking import positive
from isoloss.statistics.estimate import Estimate, accuracy_bounds, html_table, interval, number, samples_of
from isoloss.statistics.ratio import ratio_estimate
from isoloss.statistics.significance import SAME_LOSS_NATS, equivalence
from isoloss.statistics.tables import short_names, text_table
from isoloss.text.inputs import drawn_rows
from isoloss.text.tokenizers import load_tokenizer, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA = "python:docs"  # a text that comes with Python
_ROBUSTNESS_SEQUENCES = 64  # 15 losses of these cost less than a trace of eight times as many

# what the tables call an estimate; those that are not here are shown under their own names or not at all
TITLES = {
    "loss": "loss",
    "bits_per_byte": "loss, bits per byte",
    "trace": "trace",
    "minimal-trace": "minimal trace",
    "without_embeddings": "trace without embeddings",
    "int8_rise": "rise with 8-bit weights",
    "int4_rise": "rise with 4-bit weights",
    **{name: f"rise with {name.split('_')[1].removesuffix('%')} % noise" for name in ROBUSTNESS if "noise" in name},
}
_PROBE = "probe-"  # before the name of a task
_BRIEF = ("loss", "trace", "minimal-trace", "int4_rise", "noise_10%_rise")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of the measurements to one question.

    Attributes:
        question: Two or three words.
        answer: A few words, with the number.
        detail: The numbers behind the answer, with errors.
        holds: True: yes; False: no; None: not shown either way.
    """

    question: str
    answer: str
    detail: str
    holds: bool | None

    def __str__(self) -> str:
        return f"{self.question} {self.answer}{f' ({self.detail})' * bool(self.detail)}"


@dataclass(frozen=True, repr=False, kw_only=True)
class ModelComparison(TraceComparison):
    """The result of `isoloss.compare`: it prints as one table with the answers below it.

    The others are compared with the first model.

    Attributes:
        same_loss: The margin in nats per predicted token within which two losses count as the same.
        inputs: The inputs that the models were measured on, in words.
    """

    same_loss: float = SAME_LOSS_NATS
    inputs: str = ""

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """The title of each estimate that is shown, in the order of the table."""
        titles = TITLES | {name: f"accuracy on {task}, %" for name, task in self.tasks.items()}
        if not any(each.details["embeddings"] for each in self.of("trace").values()):
            del titles["without_embeddings"]  # it is the trace
        return {name: title for name, title in titles.items() if name in self.names}

    @property
    def tasks(self) -> dict[str, str]:
        """The task of each estimate that is an accuracy."""
        return {name: name.removeprefix(_PROBE) for name in self.names if name.startswith(_PROBE)}

    @functools.cached_property
    def short(self) -> dict[str, str]:
        """The models' names as they are printed, without the folders that all have in common."""
        return short_names(list(self.models))

    def verdict(self, *, same_loss: float | None = None, more: str = "more inputs") -> Verdict:
        """Return which model is the flattest, or why that cannot be said, and the next step.

        Args:
            same_loss: Another margin within which two losses count as the same.
            more: What would make the errors smaller.
        """
        return verdict(
            self,
            same_loss=self.same_loss if same_loss is None else same_loss,
            names=self.short,
            more=more,
        )

    def answers(self) -> list[Answer]:
        """Return an answer to each question: same loss? flatter? more robust at 4 bits? better at each task?"""
        if len(self.models) == 1:
            return []
        answers = [self._same_loss(), self._flatter()]
        if "int4_rise" in self.names:
            answers.append(
                self._best("int4_rise", "More robust at 4 bits?", "'s loss rises least", "nats/token", largest=False)
            )
        for name, task in self.tasks.items():
            answers.append(self._best(name, f"Better at {task}?", "", "%", largest=True))
        return answers

    def _same_loss(self) -> Answer:
        # of more than two models, against the model that the verdict is about
        first = next(iter(self.models)) if len(self.models) == 2 else self.ranking("trace")[0]
        names = self.short
        differences = {other: self.difference("loss", other, first) for other in self.models if other != first}
        widest = max(differences, key=lambda other: abs(differences[other].value))
        most = differences[widest]
        detail = f"{names[widest]} minus {names[first]}: {number(most)} nats/token, 95 % {interval(most)}"
        low, high = most.ci95
        if all(equivalence(each, self.same_loss).shown for each in differences.values()):
            answer, holds = f"Yes, within ± {self.same_loss:g} nats", True
        elif low > self.same_loss or high < -self.same_loss:
            answer, holds = f"No, {abs(most.value):.3g} nats apart", False
        else:
            answer, holds = f"Not shown within ± {self.same_loss:g} nats", None
        return Answer(question="Same loss?", answer=answer, detail=detail, holds=holds)

    def _flatter(self) -> Answer:
        found, names = self.verdict(), self.short
        parts = []
        for trace in self.traces:
            one, other, *_ = self._ordered(self.ranking(trace))
            times, (low, high) = self.ratio(trace, one, other)
            beside = f"{names[other]}'s" if len(self.models) == 2 else "the next one"
            ends = f"95 % {in_digits(low)} to {in_digits(high)}"
            parts.append(f"{TITLES[trace]} of {names[one]} {in_digits(times)} times {beside}, {ends}")
        if found.flattest is not None:
            return Answer(question="Flatter?", answer=names[found.flattest], detail="; ".join(parts), holds=True)
        reason = _REASONS[found.reasons[0]]
        return Answer(question="Flatter?", answer=f"No verdict: {reason}", detail="; ".join(parts), holds=None)

    def _best(self, name: str, question: str, rises: str, unit: str, *, largest: bool) -> Answer:
        names, ranked = self.short, self.ranking(name)
        best, other, *_ = reversed(ranked) if largest else ranked
        first, second = self._ordered((best, other))
        difference = self.difference(name, first, second)
        low, high = difference.ci95
        values = ", ".join(f"{names[model]} {number(self.models[model][name])}" for model in (best, other)) + f" {unit}"
        unit = "points" if largest else unit
        minus = f"{names[first]} minus {names[second]} {number(difference)} {unit}"
        detail = f"{values}; {minus}, 95 % {interval(difference)}"
        if low > 0 or high < 0:
            return Answer(question=question, answer=f"{names[best]}{rises}", detail=detail, holds=True)
        return Answer(question=question, answer="No difference shown", detail=detail, holds=None)

    def _ordered(self, ranked: Sequence[str]) -> Sequence[str]:
        """Return the models of a difference, the first one minus the second: of two, as in the table."""
        return list(self.models)[::-1] if len(self.models) == 2 else ranked

    def __repr__(self) -> str:
        return f"ModelComparison({len(self.models)} models; flattest: {self.verdict().flattest or 'no verdict'})"

    def __str__(self) -> str:
        header, rows, left = self.table()
        return "\n\n".join([text_table(header, rows, left=left), *self.texts()])

    def _repr_html_(self) -> str:
        header, rows, _ = self.table()
        return html_table(rows, header) + "".join(f"<p>{html.escape(text)}</p>" for text in self.texts())

    def texts(self, more: str = "more inputs") -> list[str]:
        """Return the sentences below the table: units and errors, the verdict, and the other answers."""
        if len(self.models) == 1:
            return [self.rests_on()]
        # the verdict has the answers to the first two questions in it
        return [self.rests_on(), str(self.verdict(more=more)), *map(str, self.answers()[2:])]

    def rests_on(self) -> str:
        """Return the units of the numbers and the samples behind their errors, in words."""
        trace = next(iter(self.of("trace").values()))
        text = f"In nats per predicted token unless a unit is named; ± is the standard error over {samples_of(trace)}"
        if "int4_rise" in self.names:
            rise = next(iter(self.of("int4_rise").values()))
            if rise.details["sequences"] < trace.details["sequences"]:
                text += f" (of the rises: {samples_of(rise)} in {rise.details['sequences']:,} of the sequences)"
        bounds = [
            f"{task}: {accuracy_bounds(next(iter(self.of(name).values())).details)}"
            for name, task in self.tasks.items()
        ]
        return "; ".join([text, *bounds])

    def table(self, *, brief: bool = False) -> tuple[list[str], list[list[str]], int]:
        """Return one table as text: header, rows, and how many columns are text.

        Of two models, a row is a measure, with the second minus the first; of more, a row is a model, and a `brief`
        table has the measures that fit a terminal.
        """
        names = self.short
        if len(self.models) == 2:
            first, second = self.models
            rows = []
            for name, title in self.titles.items():
                difference = self.difference(name, second, first)
                values = (number(each) for each in self.of(name).values())
                rows.append([title, *values, number(difference), interval(difference)])
            return ["", *names.values(), "second minus first", "95 % interval"], rows, 1
        shown = {name: title for name, title in self.titles.items() if not brief or name in (*_BRIEF, *self.tasks)}
        cells = {model: [number(estimates[name]) for name in shown] for model, estimates in self.models.items()}
        return ["model", *shown.values()], [[names[model], *row] for model, row in cells.items()], 1

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        about = {"inputs": self.inputs, "same_loss_nats": self.same_loss}
        answers = {"answers": [dataclasses.asdict(answer) for answer in self.answers()]}
        judged = {"verdict": dataclasses.asdict(self.verdict())} if len(self.models) > 1 else {}
        return {**about, **super().to_dict(), **judged, **answers}


def in_digits(ratio: float) -> str:
    """Return a ratio in three digits.

    Example:
        >>> in_digits(1.2), in_digits(123.4)
        ('1.20', '123')
    """
    return f"{ratio:#.3g}".rstrip(".")


_REASONS = {
    "weights": "identical weights",
    "function": "one function with different weights",
    "parameters": "different architectures",
    "loss": "the losses are not shown to be the same",
    "no minimal trace": "there is no minimal trace",
    "bounded": "the eps of norms limits the rescaling",
    "gauges": "the minimal traces have different conventions",
    "rare": "one input makes up much of the error",
    "open": "the errors are too large",
    "near": "the minimal traces are too near to each other",
    "disagree": "trace and minimal trace disagree",
}


def compare(
    models: Mapping[str, Model | str] | Sequence[str],
    batches: Iterable[Mapping[str, Any]] | None = None,
    *,
    data: str | Path | None = None,
    tokenizer: PreTrainedTokenizerFast | str | None = None,
    tasks: Sequence[str] = (),
    task_data: Sequence[str] = (),
    num_sequences: int = 512,
    seed: int = 0,
    causal: bool | None = None,
    robustness: bool = True,
    same_loss: float = SAME_LOSS_NATS,
    inputs: InputConfig | None = None,
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
    paired. The result has for each model: the loss (also in bits per byte of the text, if the tokenizer says how many
    bytes each token stands for), the trace of the Fisher information with and without embeddings, the minimal trace
    (if the rescalings of all models are known), and how far the loss rises under `ROBUSTNESS`: weights of 8 and 4 bits,
    and noise of 2, 5 and 10 % of each tensor's root mean square. The rises are measured on a part of the sequences: on
    64 of 512.

    Args:
        models: A mapping from names to language models, functions that load them, or checkpoints; or a list of
            checkpoints: folders or names on the Hugging Face hub. A model that is loaded here is dropped before the
            next one is loaded.
        batches: As for `isoloss.fisher_trace`, in place of `data`.
        data: Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs) or token ids (.npy); None, without
            `batches`: `python:docs`, the language reference that comes with Python.
        tokenizer: The tokenizer of all models, or its folder or name; None: the first checkpoint's own.
        tasks: Text tasks (`isoloss ls tasks`): the accuracy of a linear probe on the last hidden states of each model.
        task_data: Where the examples of tasks are, as NAME=PATH.
        num_sequences: The most sequences of `data` to measure on.
        seed: Decides which sequences are taken, their masks, and all random draws.
        causal: For `batches`: whether position t predicts token t + 1; None: by the models' class, then their config.
        robustness: Whether to measure how far the loss rises under small changes of the weights.
        same_loss: Margin in nats per predicted token within which two losses count as the same.
        inputs: How `data` is read: length, masking, and so on. The tokenizer is an argument of its own.
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
        ['Same loss?', 'Flatter?', 'More robust at 4 bits?']
        >>> comparison.difference("int4_rise", "b", "a").unit
        'nats per predicted token'
    """
    options = {"device": device, "dtype": dtype, "attention": attention, "trust_remote_code": trust_remote_code}
    options |= {"ignore_unexpected_weights": ignore_unexpected_weights, "module": module}
    load: Callable[..., LoadedModel] = functools.partial(load_model, **options)
    settings = {"probe_solver": "convex", "task_data": tuple(task_data), "seed": seed}
    measures = {task: make_measure(f"{_PROBE}{task}", settings) for task in tasks}
    named = named_models(models)
    positive("same_loss", same_loss)
    if batches is not None:
        given = {"data": data, "tokenizer": tokenizer, "inputs": inputs, "tasks": tasks or None}
        if unused := [name for name, value in given.items() if value is not None]:
            raise IsolossError(f"batches are given: leave out {' and '.join(unused)}, for reading text, or the batches")
    context: MeasureContext | None = None
    read, sizes = "", None
    if batches is None:
        infos = [_info(name, given, load) for name, given in named.items()]
        if tokenizer is None and not infos[0].has_tokenizer:
            raise IsolossError(f"{infos[0].name} is a model in memory, which has no tokenizer: give tokenizer")
        config = inputs or InputConfig()
        if isinstance(tokenizer, str):
            config, tokenizer = dataclasses.replace(config, tokenizer=tokenizer), None
        context = data_context(Path(data or DATA), infos, config, shuffled=False, tokenizer=tokenizer)
        made, causal = context.inputs(num_sequences, seed), context.is_causal
        batches, read, sizes = made.batches, made.description, _sizes(tokenizer or config.tokenizer, infos[0])
    if not isinstance(batches, Mapping):  # that one is refused by the measurement
        batches = list(as_tensors(batches))
    for task, measure in measures.items():
        assert context is not None
        if (reason := measure.why_not_applicable(context)) is not None:
            files = "" if task_data else f"; with task_data, {task}=PATH, its examples are read from files"
            raise IsolossError(f"the task {task} cannot be measured: {reason}{files}")
    few = _some(batches, seed) if context is None else made.some(_ROBUSTNESS_SEQUENCES, seed).batches

    def further(model: nn.Module) -> dict[str, Estimate]:
        found = loss_rises(model, few, causal=causal) if robustness else {}
        if context is not None:
            found |= {f"{_PROBE}{task}": _accuracy(measure, model, context) for task, measure in measures.items()}
        return found

    loaders = {name: given if isinstance(given, nn.Module) else _loader(given, load) for name, given in named.items()}
    try:
        compared = compare_traces(
            loaders,
            batches,
            seed=seed,
            causal=causal,
            auxiliary_sample=made.auxiliary_sample if context is not None and context.has_embeddings else None,
            token_bytes=sizes,
            further=further,
            progress=progress,
        )
    except (ComparisonError, InterruptedComparison) as stop:
        if stop.complete is not None:
            stop.complete = _judged(stop.complete, same_loss, read)
        raise
    return _judged(compared, same_loss, read)


def _judged(compared: TraceComparison, same_loss: float, inputs: str) -> ModelComparison:
    fields = {field.name: getattr(compared, field.name) for field in dataclasses.fields(TraceComparison)}
    return ModelComparison(**fields, same_loss=same_loss, inputs=inputs)


def _info(name: str, given: Model | str, load: Callable[..., LoadedModel]) -> ModelInfo:
    if isinstance(given, str | Path):
        return ModelInfo.of(load(given))
    model = given if isinstance(given, nn.Module) else given()
    loaded = LoadedModel(
        model=model, kind="causal" if is_causal(model) else "masked", name=name, architecture=type(model).__name__
    )
    return dataclasses.replace(ModelInfo.of(loaded), has_tokenizer=False)


def _loader(given: Callable[[], nn.Module] | str, load: Callable[..., LoadedModel]) -> Callable[[], nn.Module]:
    return (lambda: load(given).model) if isinstance(given, str | Path) else given


def _sizes(tokenizer: PreTrainedTokenizerFast | str | None, model: ModelInfo) -> torch.Tensor | None:
    """Return (V,) the bytes of each token id; None where there is no tokenizer, or its kind is not known."""
    try:
        named = tokenizer or model.name
        sizes = token_bytes(load_tokenizer(named) if isinstance(named, str) else named)
    except IsolossError:
        return None
    if sizes is None:
        return None
    known = torch.from_numpy(sizes)
    return nn.functional.pad(known, (0, max(0, (model.outline.vocabulary or 0) - len(known))))


def _some(batches: Iterable[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return a few of the sequences, drawn at random; none of batches that the measurement will refuse."""
    if not all(isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor) for batch in batches):
        return []
    sizes = [len(batch["labels"]) for batch in batches]
    few = []
    for batch, rows in zip(
        batches, torch.split(drawn_rows(sum(sizes), _ROBUSTNESS_SEQUENCES, seed), sizes), strict=True
    ):
        chosen = rows.nonzero()[:, 0]
        if len(chosen):
            few.append({name: _rows(name, value, chosen, len(rows)) for name, value in batch.items()})
    return few


def _rows(name: str, value: Any, chosen: torch.Tensor, size: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[chosen.to(value.device)] if len(value) == size else value
    return [value[row] for row in chosen.tolist()] if name == "documents" else value


def _accuracy(measure: Measure, model: nn.Module, context: MeasureContext) -> Estimate:
    """Return the accuracy of a probe with what each test example adds to it."""
    result = MeasureResult.of("probe", measure.run(model, context))
    correct = result.more["accuracy.predictions"] == result.more["accuracy.labels"]
    accuracy = result.estimates["accuracy"]
    paired = ratio_estimate(correct.mean(axis=0), unit=accuracy.unit, method=accuracy.method)
    return dataclasses.replace(paired, details={**accuracy.details, "clusters": "test examples"})
