"""Where the structure of a grammar's sentences is in a model: probes of symbols at their spans, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.measures.base import MeasureResult, digest
from isoloss.lab.evaluation.measures.transfer import Trained

if TYPE_CHECKING:
    import torch

    from isoloss.lab.evaluation.context import MeasureContext
    from isoloss.lab.languages.base import Sentences
    from isoloss.lab.languages.pcfg import PCFG


@dataclass(frozen=True, kw_only=True)
class Span(Trained):
    """Accuracy of convex probes of the symbols of a level, from the states at their spans, for each layer: span-1.

    The labels are the symbols of the trees that made the sentences. Beside the layers stand `bayes`, the accuracy of
    the Bayes-optimal classifier, and `majority`, that of the most common training symbol. The Bayes-optimal classifier
    knows where the span is; for a masked model it sees the whole sentence, for a causal model the sentence up to the
    span's end.
    """

    level: int = setting(minimum=0)
    num_test: int = setting(4096, minimum=2)
    """Test sentences."""
    span_state: Literal["last", "mean"] = "last"
    """What a probe reads: the state of the span's last token, or the mean of the states of all its tokens."""
    span_regularization: float = setting(1e-3, above=0)
    """Regularization strength of the convex probes."""

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there are no such spans: the language is no grammar of levels, or has no such level."""
        from isoloss.lab.languages.pcfg import PCFG, symbols_on_level

        if not isinstance(context.language, PCFG):
            return "spans are those of a grammar: choose one, such as pcfg-laptop"
        try:
            symbols_on_level(context.language, self.level)
        except IsolossError as error:
            return f"the grammar has no spans of level {self.level} ({error})"
        return None

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `layer-0` (the embeddings), `layer-1`, ..., `bayes` and `majority`, each an accuracy."""
        import torch

        from isoloss import seeds
        from isoloss.lab.languages.pcfg import symbols_on_level
        from isoloss.statistics.ratio import ratio_estimate
        from isoloss.transfer.config import ClassifierConfig
        from isoloss.transfer.probe import fit_each

        if reason := self.why_not_applicable(context):
            raise IsolossError(reason)
        if isinstance(self.num_train, str):
            raise IsolossError("num_train is all, and a language has no fixed training set for spans: give a number")
        language: PCFG = context.language
        symbols = symbols_on_level(language, self.level)
        drawn = {
            split: language.sample(number, generator=seeds.generator(self.seed, "span", split), latent=True)
            for split, number in (("train", self.num_train), ("test", self.num_test))
        }
        spans = {split: _spans(language, sentences, symbols) for split, sentences in drawn.items()}
        if not len(spans["train"].label) or len(set(spans["test"].sentence.tolist())) < 2:
            raise IsolossError(
                f"too few of the sentences have symbols of level {self.level}: raise num_train and num_test"
            )
        states = {split: self._states(model, context, drawn[split], spans[split]) for split in drawn}
        test = spans["test"]
        present = torch.bincount(test.sentence, minlength=self.num_test)
        has_any = present > 0
        rows = {"unit": "accuracy", "method": "convex probe at spans"}

        def accuracy(right: torch.Tensor, **about: str) -> Any:
            sums = torch.zeros(self.num_test, dtype=torch.float64).index_add_(0, test.sentence, right.double())
            return ratio_estimate(sums[has_any], present[has_any], **{**rows, **about})

        probe = ClassifierConfig(solver="convex", regularization=(self.span_regularization,), seeds=1, seed=self.seed)
        estimates = {}
        for layer, (train_x, test_x) in enumerate(zip(states["train"], states["test"], strict=True)):
            predictions, _ = fit_each([(train_x, spans["train"].label, test_x)], probe, classes=len(symbols))
            estimates[f"layer-{layer}"] = accuracy(predictions[0] == test.label)
        best = _best_rates(language, drawn["test"], test, symbols, causal=context.is_causal)
        known = "the sentence up to the span's end" if context.is_causal else "the whole sentence"
        estimates["bayes"] = accuracy(best, method=f"most likely symbol given {known}")
        common = int(torch.bincount(spans["train"].label).argmax())
        estimates["majority"] = accuracy(test.label == common, method="most common symbol")
        tensors = [sentences.tokens for sentences in drawn.values()]
        return MeasureResult(estimates=estimates, inputs=digest(*tensors, more=[self.level, self.span_state]))

    def _states(self, model: Any, context: MeasureContext, sentences: Sentences, spans: _Spans) -> list[torch.Tensor]:
        """Return for each layer the states (rows, d) at the spans."""
        import torch

        from isoloss.lab.languages.base import Sentences as Batch
        from isoloss.text.masking import with_start
        from isoloss.transfer.features import backbone_of, check_sentences

        plain = Batch(sentences.tokens, sentences.lengths)
        read = with_start(plain, context.language) if context.is_causal else plain
        shift = read.tokens.shape[1] - plain.tokens.shape[1]
        backbone, device = backbone_of(model), next(model.parameters()).device
        check_sentences(backbone, read)
        parts = []
        size = 512
        for first in range(0, len(read.tokens), size):
            tokens, lengths = (each[first : first + size].to(device) for each in (read.tokens, read.lengths))
            mask = Batch(tokens, lengths).present()
            with torch.no_grad():
                layers = backbone(input_ids=tokens, attention_mask=mask.long(), output_hidden_states=True).hidden_states
            here = (spans.sentence >= first) & (spans.sentence < first + size)
            row = (spans.sentence[here] - first).to(device)
            start, stop = spans.start[here].to(device) + shift, spans.stop[here].to(device) + shift
            parts.append([_at_spans(layer.float(), row, start, stop, self.span_state) for layer in layers])
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]


@dataclass(frozen=True)
class _Spans:
    """The nodes with symbols of one level: a row for each, (rows,) int64."""

    sentence: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    label: torch.Tensor  # index into the level's symbols


def _spans(language: PCFG, sentences: Sentences, symbols: list[int]) -> _Spans:
    import torch

    assert sentences.latent is not None  # they were drawn with their trees
    nodes = sentences.latent.cpu()
    place = torch.full((len(language.symbols) + 1,), -1)  # the last is for padding, -1
    place[symbols] = torch.arange(len(symbols))
    label = place[nodes[:, :, 2]]
    sentence, node = torch.nonzero(label >= 0, as_tuple=True)
    start, stop, _ = nodes[sentence, node].unbind(dim=1)
    return _Spans(sentence, start, stop, label[sentence, node])


def _at_spans(
    states: torch.Tensor, row: torch.Tensor, start: torch.Tensor, stop: torch.Tensor, which: str
) -> torch.Tensor:
    """Return (rows, d) of states (n, T, d): of the last token of each span, or their mean over it."""
    import torch

    if which == "last":
        return states[row, stop - 1]
    sums = torch.nn.functional.pad(states.double().cumsum(dim=1), (0, 0, 1, 0))
    return ((sums[row, stop] - sums[row, start]) / (stop - start)[:, None]).to(states.dtype)


def _best_rates(
    language: PCFG, sentences: Sentences, spans: _Spans, symbols: list[int], *, causal: bool
) -> torch.Tensor:
    """Return (rows,): the probability of the likeliest symbol at each span, for a reader who is told where it is."""
    import torch

    best = torch.zeros(len(spans.label), dtype=torch.float64)
    places = torch.stack([spans.start, spans.stop], dim=1)
    for start, stop in sorted(set(zip(spans.start.tolist(), spans.stop.tolist(), strict=True))):
        rows = torch.nonzero((places == torch.tensor([start, stop])).all(dim=1)).flatten()
        of = spans.sentence[rows]
        read = {"tokens": sentences.tokens[of], "lengths": sentences.lengths[of], "start": start, "stop": stop}
        if causal:
            posterior = language.prefix_span_posterior(**read, symbols=symbols)
        else:
            posterior = language.to(dtype=torch.float64).span_posterior(**read)[:, symbols].cpu()
            posterior = posterior / posterior.sum(dim=1, keepdim=True)
        best[rows] = posterior.amax(dim=1)
    return best
