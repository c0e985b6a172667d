"""Compare models on one text: loss, traces, robustness to small changes of the weights, tasks; and one verdict.

A model's estimates have the names that `isoloss.flatness.comparison` and `isoloss.flatness.robustness.ROBUSTNESS` give
them, and `probe-TASK` for each task.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from isoloss.flatness.robustness import ROBUSTNESS, Noise, loss_rises
from isoloss.flatness.verdict import Verdict, in_digits, verdict
from isoloss.lab.evaluation.context import Checkpoints, MeasureContext, data_context, language_context
from isoloss.lab.evaluation.input_config import InputConfig, language_of_runs
from isoloss.lab.evaluation.measures.base import MeasureResult
from isoloss.lab.evaluation.measures.transfer import Probe, task_probes
from isoloss.runs import last_checkpoint
from isoloss.statistics.checking import at_least, positive
from isoloss.statistics.comparison import times
from isoloss.statistics.estimate import Estimate, accuracy_bounds, html_table, interval, number, samples_of
from isoloss.statistics.ratio import ratio_estimate
from isoloss.statistics.significance import MIN_RATIO, SAME_LOSS_NATS, all_within, p_value
from isoloss.statistics.tables import short_names, text_table
from isoloss.text.inputs import drawn_rows
from isoloss.transfer.compare import mcnemar

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
    "int8_loss": "loss with 8-bit weights",
    "int4_rise": "rise with 4-bit weights",
    "int4_loss": "loss with 4-bit weights",
    **{name: f"rise with {name.split('_')[1].removesuffix('%')} % noise" for name in ROBUSTNESS if "noise" in name},
}
_PROBE = "probe-"  # before the name of a task
_LEAST_ROUNDED = 0.9  # of the weights of linear maps; with fewer, the rise says little about the model at few bits
_LEAST_TEST = 20  # examples: the error of an accuracy over fewer is often far off, and 0 where all agree
_STATES = {
    "last": "the last token",
    "first": "the first token",
    "mean": "the mean over tokens",
    "concatenate": "all tokens",
}
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
        min_ratio: The smallest ratio of two traces that counts.
        inputs: The inputs that the models were measured on, in words.
    """

    same_loss: float = SAME_LOSS_NATS
    min_ratio: float = MIN_RATIO
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

    def verdict(
        self, *, same_loss: float | None = None, min_ratio: float | None = None, more: str = "more inputs"
    ) -> Verdict:
        """Return which model is the flattest, or why that cannot be said, and the next step.

        Args:
            same_loss: Another margin within which two losses count as the same.
            min_ratio: Another smallest ratio of two traces that counts.
            more: What would make the errors smaller.
        """
        return verdict(
            self,
            same_loss=self.same_loss if same_loss is None else same_loss,
            min_ratio=self.min_ratio if min_ratio is None else min_ratio,
            names=self.short,
            more=more,
            with_tasks=bool(self.tasks),
        )

    def answers(self) -> list[Answer]:
        """Return an answer to each question: same loss? flatter? more robust at 4 bits? better at each task?"""
        if len(self.models) == 1:
            return []
        answers = [self._same_loss(), self._flatter()]
        if "int4_rise" in self.names:
            answers.append(self._more_robust())
        for name, task in self.tasks.items():
            best = self._best(name, f"Better at {task}?", "", "%", largest=True)
            answers.append(dataclasses.replace(best, answer=f"{best.answer}, by a probe of {self._states(name)}"))
        return answers

    def _states(self, task: str) -> str:
        """Return which token states the probe of a task reads, in words."""
        return _STATES[next(iter(self.of(task).values())).details["pooling"]]

    def _same_loss(self) -> Answer:
        # of more than two models, against the model that the verdict is about
        first = next(iter(self.models)) if len(self.models) == 2 else self.ranking("trace")[0]
        names = self.short
        differences = {other: self.difference("loss", other, first) for other in self.models if other != first}
        holds, decisive = all_within(differences, self.same_loss)
        most = differences[decisive]
        detail = f"{names[decisive]} minus {names[first]}: {number(most)} nats/token, 95 % {interval(most)}"
        answer = {
            True: f"Yes, within ± {self.same_loss:g} nats",
            False: f"No, {abs(most.value):.3g} nats apart",
            None: f"Not shown within ± {self.same_loss:g} nats",
        }[holds]
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

    def _more_robust(self) -> Answer:
        question, shares = "More robust at 4 bits?", {name: n / total for name, (n, total) in self._rounded().items()}
        least = min(shares, key=shares.__getitem__)
        if shares[least] < _LEAST_ROUNDED:
            share = f"{100 * shares[least]:.0f} %"
            answer = f"No answer: {share} of the weights of {self.short[least]}'s linear maps are rounded"
            return Answer(question=question, answer=answer, detail="", holds=None)
        best = self._best("int4_rise", question, "'s loss rises least", "nats/token", largest=False)
        if self._same_loss().holds:
            return best
        # a smaller rise is no advantage at a larger loss
        losses = [f"{self.short[model]} {number(loss)}" for model, loss in self.of("int4_loss").items()]
        answer = "Not judged: the losses are not shown to be the same"
        detail = f"with 4-bit weights, the loss is {', '.join(losses)}; it rises by {best.detail}"
        return dataclasses.replace(best, answer=answer, detail=detail, holds=None)

    def _rounded(self) -> dict[str, tuple[int, int]]:
        """Return for each model how many weights of its linear maps are rounded, and how many there are."""
        details = {model: rise.details for model, rise in self.of("int4_rise").items()}
        return {model: (about["rounded_weights"], about["map_weights"]) for model, about in details.items()}

    def _best(self, name: str, question: str, rises: str, unit: str, *, largest: bool) -> Answer:
        names, ranked = self.short, self.ranking(name)
        best, *others = reversed(ranked) if largest else ranked
        # the one that it is least surely better than, which need not be the next
        other = max(others, key=lambda other: p_value(self.difference(name, best, other)))
        first, second = self._ordered((best, other))
        difference = self.difference(name, first, second)
        low, high = difference.ci95
        values = ", ".join(f"{names[model]} {number(self.models[model][name])}" for model in (best, other)) + f" {unit}"
        unit = "points" if largest else unit
        minus = f"{names[first]} minus {names[second]} {number(difference)} {unit}"
        detail = f"{values}; {minus}, 95 % {interval(difference)}"
        is_shown = low > 0 or high < 0
        if name in self.tasks:
            # the interval is too narrow where few test examples, or no two of them, differ: this test is exact
            exact = mcnemar(*(self._correct(name, model) for model in (first, second)))
            detail += f", p {exact.p_value:.2g} by McNemar's test"
            is_shown &= exact.p_value < 0.05
        if is_shown:
            return Answer(question=question, answer=f"{names[best]}{rises}", detail=detail, holds=True)
        return Answer(question=question, answer="No difference shown", detail=detail, holds=None)

    def _correct(self, task: str, model: str) -> torch.Tensor:
        """Return (n,) bool: which test examples the probe of a model classifies correctly."""
        accuracy = self.models[model][task]
        assert accuracy.influence is not None
        # the influence of an example on a mean is its value minus the mean
        return torch.as_tensor(accuracy.value + accuracy.influence) > 0.5

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
        notes = []
        if "int4_rise" in self.names:
            rise, noisy = (next(iter(self.of(name).values())) for name in ("int4_rise", "noise_10%_rise"))
            if (sequences := rise.details["sequences"]) < trace.details["sequences"]:
                clusters = "" if rise.details["clusters"] == "sequences" else f"{samples_of(rise)} in "
                text += f" (with changed weights: over {clusters}{sequences:,} of the sequences)"
            notes.append(
                f"noise: over {samples_of(noisy)} and {noisy.details['draws']} draws, each added and subtracted"
            )
            counts = {f"{n:,} of {of:,} weights of linear maps": model for model, (n, of) in self._rounded().items()}
            beside = len(counts) > 1
            notes.append(
                "rounded: " + ", ".join(share + f" of {self.short[model]}" * beside for share, model in counts.items())
            )
        for name, task in self.tasks.items():
            details = next(iter(self.of(name).values())).details
            few = ", too few for errors to be right" * (details["num_test"] < _LEAST_TEST)
            notes.append(f"{task}: {accuracy_bounds(details)}, {details['num_test']:,} test examples{few}")
        if self.tasks:
            states = self._states(next(iter(self.tasks)))
            notes.append(
                f"accuracies are of a linear probe of {states}: another pooling may rank the models differently"
            )
        return "; ".join([text, *notes])

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
        about = {"inputs": self.inputs, "same_loss_nats": self.same_loss, "min_ratio": self.min_ratio}
        answers = {"answers": [dataclasses.asdict(answer) for answer in self.answers()]}
        judged = {"verdict": dataclasses.asdict(self.verdict())} if len(self.models) > 1 else {}
        return {**about, **super().to_dict(), **judged, **answers}


_REASONS = {
    "weights": "identical weights",
    "function": "one function with different weights",
    "parameters": "different architectures",
    "loss": "the losses differ",
    "loss open": "the losses are not shown to be the same",
    "no minimal trace": "there is no minimal trace",
    "gauges": "the minimal traces have different conventions",
    "rare": "one input makes up much of the error",
    "open": "the errors are too large",
    "near": "the traces are too near to each other",
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
    pooling: Literal["auto", "last", "mean", "first", "concatenate"] = "auto",
    num_sequences: int = 512,
    seed: int = 0,
    causal: bool | None = None,
    robustness: bool = True,
    same_loss: float = SAME_LOSS_NATS,
    min_ratio: float = MIN_RATIO,
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
    paired. The result has for each model: the loss (for text, also in bits per byte of the original text), the trace of
    the Fisher information with and without embeddings, the minimal trace (if the rescalings of all models are known),
    and how far the loss rises under `ROBUSTNESS`: weights of 8 and 4 bits, with the loss that this leads to, and noise
    of 2, 5 and 10 % of each tensor's root mean square, with errors that cover the draws. The rises are measured on a
    part of the sequences: on 64 of 512.

    Args:
        models: A mapping from names to language models, functions that load them, or checkpoints; or a list of
            checkpoints: folders, runs (their last checkpoint) or names on the Hugging Face hub. A model that is loaded
            here is dropped before the next one is loaded.
        batches: As for `isoloss.fisher_trace`, in place of `data`.
        data: Text (.txt, .jsonl, a folder, or a dataset hf:NAME or python:docs) or token ids (.npy); None, without
            `batches`: for runs of a language without a tokenizer, sentences of that language; else `python:docs`, the
            language reference that comes with Python.
        tokenizer: The tokenizer of all models, or its folder or name; None: the checkpoints' own, which must be alike.
        tasks: Tasks (`isoloss ls tasks`): the accuracy of a linear probe on the last hidden states of each model. A
            task of your own is NAME=PATH: a file (.csv, .tsv, .jsonl, .json) with the columns `text` and `label`, and
            `pair` where an example is two texts; one example in five, which `seed` draws, is for testing.
        task_data: Where the examples of tasks are, as NAME=PATH.
        pooling: Which token states the probes of tasks read, as for `isoloss.linear_probe`; `auto`: the last
            token of causal models, the mean over tokens of masked ones. The ranking of models may depend on it.
        num_sequences: The most sequences of `data` to measure on.
        seed: Decides which sequences are taken, their masks, and all random draws.
        causal: For `batches`: whether position t predicts token t + 1; None: by the models' class, then their config.
        robustness: Whether to measure how far the loss rises under small changes of the weights.
        same_loss: Margin in nats per predicted token within which two losses count as the same.
        min_ratio: The smallest ratio of two traces that counts: the flattest model's are smaller by this factor.
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
    settings = {"probe_solver": "convex", "seed": seed} | ({} if pooling == "auto" else {"probe_pooling": pooling})
    measures = task_probes(tasks, task_data, settings)
    named = {
        name: last_checkpoint(given) if isinstance(given, str | Path) else given
        for name, given in named_models(models).items()
    }
    positive("same_loss", same_loss)
    at_least("min_ratio", min_ratio, 1)
    if batches is not None:
        given = {"data": data, "tokenizer": tokenizer, "inputs": inputs, "tasks": tasks or None}
        if unused := [name for name, value in given.items() if value is not None]:
            raise IsolossError(f"batches are given: leave out {' and '.join(unused)}, for reading text, or the batches")
    context: MeasureContext | None = None
    read, bytes_per_token = "", None
    checkpoints = Checkpoints(named, **options)
    if batches is None:
        config = inputs or InputConfig()
        if isinstance(tokenizer, str):
            config, tokenizer = dataclasses.replace(config, tokenizer=tokenizer), None
        run = None
        if data is None and tokenizer is None and config.tokenizer is None:
            names = [given if isinstance(given, str) else name for name, given in named.items()]
            run = language_of_runs(names)
        infos = checkpoints.infos
        if run is not None:
            config.check_run(infos[0].name)
            context = language_context(run.language, run.objective, infos, config, shuffled=False)
        elif tokenizer is None and config.tokenizer is None and not any(info.has_tokenizer for info in infos):
            raise IsolossError(f"{infos[0].name} is a model in memory, which has no tokenizer: give tokenizer")
        else:
            context = data_context(Path(data or DATA), infos, config, shuffled=False, tokenizer=tokenizer)
        made, causal = context.inputs(num_sequences, seed), context.is_causal
        batches, read, bytes_per_token = made.batches, made.description, made.bytes_per_token
    if not isinstance(batches, Mapping):  # that one is refused by the measurement
        batches = list(as_tensors(batches))
    if measures and pooling == "first" and context is not None and context.is_causal:
        raise IsolossError(
            "pooling is first, but the first token of a causal model has seen no other: choose last or mean"
        )
    for task, measure in measures.items():
        assert context is not None
        if pooling == "auto":
            reads: Any = "last" if context.is_causal else "mean"
            measures[task] = measure = dataclasses.replace(measure, probe_pooling=reads)
        if (reason := measure.why_not_applicable(context)) is not None:
            files = "" if measure.task_data else f"; with task_data, {task}=PATH, its examples are read from files"
            raise IsolossError(f"the task {task} cannot be measured: {reason}{files}")
        try:
            for info in infos:
                measure.check_model(info, context)
        except IsolossError as error:
            raise IsolossError(f"the task {task} cannot be measured: {error}") from error
    changes = {
        name: dataclasses.replace(change, seed=seed) if isinstance(change, Noise) else change
        for name, change in ROBUSTNESS.items()
    }
    few = _some(batches, seed) if context is None else made.some(_ROBUSTNESS_SEQUENCES, seed).batches

    def further(model: nn.Module) -> dict[str, Estimate]:
        found = loss_rises(model, few, changes, causal=causal) if robustness else {}
        if context is not None:
            found |= {f"{_PROBE}{task}": _accuracy(measure, model, context) for task, measure in measures.items()}
        return found

    def judged(compared: TraceComparison) -> ModelComparison:
        fields = {field.name: getattr(compared, field.name) for field in dataclasses.fields(TraceComparison)}
        if bytes_per_token:
            fields["models"] = {
                name: {**estimates, "bits_per_byte": _bits_per_byte(estimates["loss"], bytes_per_token)}
                for name, estimates in compared.models.items()
            }
        return ModelComparison(**fields, same_loss=same_loss, min_ratio=min_ratio, inputs=read)

    try:
        compared = compare_traces(
            {name: functools.partial(checkpoints.model, name) for name in named},
            batches,
            seed=seed,
            causal=causal,
            auxiliary_sample=made.auxiliary_sample if context is not None and context.has_embeddings else None,
            further=further,
            progress=progress,
        )
    except (ComparisonError, InterruptedComparison) as stop:
        if stop.complete is not None:
            stop.complete = judged(stop.complete)
        raise
    return judged(compared)


def _bits_per_byte(loss: Estimate, bytes_per_token: float) -> Estimate:
    """Return the loss in bits over the bytes of text that the predicted tokens stand for.

    The number of bytes is taken as exact, so a difference of two models is as certain as in nats.
    """
    return dataclasses.replace(times(loss, 1 / (bytes_per_token * math.log(2))), unit="bits per byte")


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


def _accuracy(measure: Probe, model: nn.Module, context: MeasureContext) -> Estimate:
    """Return the accuracy of a probe with what each test example adds to it."""
    result = MeasureResult.of("probe", measure.run(model, context))
    correct = result.more["accuracy.predictions"] == result.more["accuracy.labels"]
    accuracy = result.estimates["accuracy"]
    paired = ratio_estimate(correct.mean(axis=0), unit=accuracy.unit, method=accuracy.method)
    details = {**accuracy.details, "clusters": "test examples", "pooling": measure.probe_pooling}
    return dataclasses.replace(paired, details=details)
