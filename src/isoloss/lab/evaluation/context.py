"""What measures are made on: inputs, exact targets and tasks, made once for all models and measures that share them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PretrainedConfig

from isoloss import files
from isoloss.checkpoints.loading import Kind, LoadedModel, header_of, load_model
from isoloss.comparison.traces import Model, Outline
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, warn
from isoloss.flatness._rescaling.symmetries import why_no_rescalings
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.languages.exact import all_sentences, why_not_enumerable
from isoloss.model_checks import input_embeddings, is_causal, run_on_ids, text_config
from isoloss.model_checks import max_length as most_positions
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.runs import Run
from isoloss.seeds import generator
from isoloss.text.inputs import Inputs, check_model, holds_text, make_inputs, read_inputs
from isoloss.text.masking import IGNORED, objective_batch
from isoloss.text.tokenizer_difference import difference
from isoloss.text.tokenizers import NoTokenizerError, files_key, load_tokenizer
from isoloss.transfer.features import why_no_features
from isoloss.transfer.tasks import TaskData
from isoloss.transfer.text_tasks import TextExamples, as_read_by

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class MeasureContext:
    """What a measure is made on, and when it may stop before the end of its inputs."""

    # returns the inputs to measure on, given how many sequences and a seed; `inputs` keeps what it returned
    read: Callable[[int, int], Inputs]
    objective: ObjectiveConfig  # which tokens are predicted, and from what
    # the same of another text, which is given first; None: the inputs are of a language
    read_text: Callable[[Path, int, int], Inputs] | None = None
    language: Any = None  # the language of the inputs, where it is known; None: text or token ids
    checkpoint: tuple[Run, int] | None = None  # the run and step of the model that is measured, where it is of a run
    load_tokenizer: Callable[[], Any] | None = None  # of the models, where there is no language that has one
    has_embeddings: bool = True  # whether the models have input embeddings, by which an auxiliary sample is read
    rtol: float | None = None  # stop when the standard error is at most this fraction of the value
    seconds: float | None = None  # stop after this time
    progress: Callable[[int], None] | None = None  # called with the number of sequences done
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _latest: tuple[weakref.ref[torch.nn.Module], tuple[str, Hashable], torch.Tensor] | None = field(
        default=None, repr=False
    )

    @property
    def is_causal(self) -> bool:
        """Whether each token is predicted from those before it."""
        return self.objective.kind == "causal"

    def once(self, make: Callable[..., T], *arguments: Hashable, **options: Hashable) -> T:
        """Return `make(*arguments, **options)`, made once for all measures and models of this context."""
        # the language, which one of your own need not make hashable, is the same throughout
        key = ("language" if each is self.language else each for each in arguments)
        return self._kept((make, *key, *options.items()), lambda: make(*arguments, **options))

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def inputs(self, num_sequences: int, seed: int) -> Inputs:
        """Return the inputs to measure on: at most `num_sequences`, `seed` decides which and their masks.

        Where they come from a file, `auxiliary_sample` of them is all that it holds.
        """
        return self.once(self.read, num_sequences, seed)

    def sentences(self, num_sentences: int, seed: int) -> Sentences:
        """Return the sentences of `inputs` with nothing masked; a language's have no start before them."""
        if self.language is not None:
            return self.once(_sentences, self.language, num_sentences, seed)
        batches = self.inputs(num_sequences=num_sentences, seed=seed).batches
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "attention_mask")}
        labels = torch.cat([batch["labels"] for batch in batches])
        # a label is the token that was there before the mask
        tokens = torch.where(labels == IGNORED, whole["input_ids"], labels)
        return Sentences(tokens, whole["attention_mask"].sum(dim=1))

    def tokenizer(self) -> Any:
        """Return the tokenizer that reads text for the models: the language's, else their own.

        Raises:
            IsolossError: There is none.
        """
        if self.language is not None:
            if self.language.tokenizer is None:
                raise IsolossError("the language has no tokenizer, so its models cannot read the text of a task")
            return self.language.tokenizer
        if self.load_tokenizer is None:
            raise IsolossError("the models have no tokenizer to read the text of a task with")
        return self.once(self.load_tokenizer)

    def text_task(
        self,
        examples: TextExamples,
        config: Any,
        positions: int | None,
        *,
        max_length: int | None,
        model: str = "the model",
    ) -> TaskData:
        """Return examples as a model reads them, by its config and positions (`as_read_by`)."""
        text = config.get_text_config()
        # models that agree in these read the same ids, whatever else differs
        reads = text.vocab_size, positions, getattr(text, "type_vocab_size", 1)
        return self._kept(
            ("text task", examples, max_length, *reads),
            lambda: as_read_by(text, positions, examples, self.tokenizer(), max_length=max_length, model=model),
        )

    def all_sentences(self) -> tuple[Sentences, torch.Tensor] | None:
        """Return all sentences of the language and their probabilities (n,); None if too many, or not known."""
        return None if why_not_enumerable(self.language) else self.once(all_sentences, self.language)

    def features(
        self,
        model: torch.nn.Module | None,
        make: Callable[..., torch.Tensor],
        *inputs: Any,
        states: Hashable = None,
    ) -> torch.Tensor:
        """Return `make(*inputs)`, the features of all sentences, cached for the other measures of the checkpoint.

        Only the last model's features are cached, and not the model; `states` says which of its states they are.
        Features without a model depend on the language alone and stay cached.
        """
        if model is None:
            return self.once(make, *inputs)
        # by the object, which the reference does not keep alive, and by its weights, which may have changed in place
        key = (files.tensors_sha256(sorted(model.state_dict().items())), states)
        if self._latest is None or self._latest[0]() is not model or self._latest[1] != key:
            self._latest = (weakref.ref(model), key, make(*inputs))
        return self._latest[2]


def config_of(model: Any) -> Any:
    """Return a model's transformers config; for your own module, the logits give the size of its vocabulary."""
    if text_config(model) is not None:
        return model.config
    return PretrainedConfig(vocab_size=run_on_ids(model, torch.zeros(1, 2, dtype=torch.int64)).shape[-1])


@dataclass(frozen=True)
class ModelInfo:
    """What inputs must fit: facts about a checkpoint, kept after it is unloaded."""

    name: str  # the checkpoint's folder, or its name on the hub, NAME or NAME@REVISION
    architecture: str  # the class that it names
    outline: Outline  # what it predicts, of how many tokens
    config: Any  # the model's transformers config
    max_length: int | None  # the most tokens it takes; None: any number
    has_embeddings: bool  # whether it embeds token ids, as an auxiliary sample needs
    has_tokenizer: bool = True  # whether its own tokenizer may be where it was loaded from
    no_features: str | None = None  # why a probe cannot read its states; None: it can
    no_rescalings: str | None = None  # why it has no minimal trace; None: it may have one

    @property
    def kind(self) -> Kind:
        """Whether it predicts masked or next tokens: masked, or causal."""
        return "causal" if self.outline.causal else "masked"

    @classmethod
    def of(cls, loaded: LoadedModel) -> ModelInfo:
        """Return what there is to know of a loaded checkpoint."""
        model, is_causal = loaded.model, loaded.kind == "causal"
        return cls(
            name=loaded.name,
            architecture=loaded.architecture,
            outline=Outline.of(loaded.name, model, is_causal),
            config=config_of(model),
            max_length=most_positions(model),
            has_embeddings=input_embeddings(model) is not None,
            no_features=why_no_features(model, causal=is_causal),
            no_rescalings=why_no_rescalings(model),
        )

    def named(self, name: str) -> ModelInfo:
        """Return the same for a checkpoint with another name."""
        return replace(self, name=name, outline=replace(self.outline, name=name))


class Checkpoints:
    """Models that are measured one after another, with information on all before the first is measured.

    The models are checkpoints, models or functions that load them, by name; options are those of `isoloss.load_model`.
    A checkpoint with the same header (`isoloss.checkpoints.loading.header_of`) as an earlier one is loaded only when it
    is measured. The first model is kept in memory until it is measured. No other two are in memory at a time.
    """

    def __init__(self, models: Mapping[str, Model | str | Path], **options: Any) -> None:
        self._models, self._options = models, options
        self._kept: dict[str, Any] = {}

    @functools.cached_property
    def infos(self) -> list[ModelInfo]:
        """Information on each model; as few as possible are loaded for it."""
        # missing or damaged files are reported before any model is loaded
        keys = {name: self._header(given) or name for name, given in self._models.items()}
        first_of = {key: name for name, key in reversed(keys.items())}
        known: dict[Hashable, ModelInfo] = {}
        for name, key in reversed(keys.items()):
            if first_of[key] == name:
                self._kept.clear()  # in the end it has the first model
                known[key] = self._info(name)
        return [
            known[key] if first_of[key] == name else known[key].named(str(Path(str(self._models[name])).expanduser()))
            for name, key in keys.items()
        ]

    def model(self, name: str) -> Any:
        """Return a model to be measured, which the caller drops before the next one."""
        if name in self._kept:
            return self._kept.pop(name)
        given = self._models[name]
        # parameters that are loaded in a caller's inference mode would have no gradients
        with torch.inference_mode(False):
            if isinstance(given, str | Path):
                return load_model(given, **self._options).model
            return given if isinstance(given, torch.nn.Module) else given()

    def _header(self, given: Model | str | Path) -> Hashable | None:
        if not isinstance(given, str | Path):
            return None
        trusted, module = self._options.get("trust_remote_code", False), self._options.get("module")
        return header_of(given, trust_remote_code=trusted, module=module)

    def _info(self, name: str) -> ModelInfo:
        given = self._models[name]
        if isinstance(given, str | Path):
            with torch.inference_mode(False):
                loaded = load_model(given, **self._options)
        else:
            model = self.model(name)
            kind: Kind = "causal" if is_causal(model) else "masked"
            loaded = LoadedModel(model=model, kind=kind, name=name, architecture=type(model).__name__)
        self._kept[name] = loaded.model
        return replace(ModelInfo.of(loaded), has_tokenizer=isinstance(given, str | Path))


def data_context(
    data: Path,
    models: Sequence[ModelInfo],
    config: InputConfig,
    *,
    shuffled: bool,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> MeasureContext:
    """Return the context of measuring models on text or token ids, which must mean the same to all of them.

    A measurement that `rtol` or `seconds` ends early is of a random part of the inputs only where these are `shuffled`.
    Without a `tokenizer` it is the one that `config` names, else the models' own, which must be alike.
    """
    first = models[0]
    for other in models[1:]:
        first.outline.check(other.outline)
    given = tokenizer or config.tokenizer
    if given is None and len(models) > 1:
        given = _common_tokenizer(models, is_text=holds_text(data))
    objective = config.objective(first.name, is_causal=first.outline.causal)

    def read_text(path: Path, num_sequences: int, seed: int) -> Inputs:
        inputs = read_inputs(
            path,
            column=config.column,
            split=config.split,
            checkpoint=first.name,
            tokenizer=given,
            config=first.config,
            kind=objective.kind,
            max_length=first.max_length,
            length=config.length,
            num_sequences=num_sequences,
            masking=objective,
            mask_id=config.mask_id,
            seed=seed,
        )
        for other in models[1:]:
            check_model(inputs, other.config, other.max_length, other.name)
        return _fitting(inputs, models, config, seed if shuffled else None)

    def load() -> Any:
        return load_tokenizer(given or first.name) if given is None or isinstance(given, str) else given

    return MeasureContext(
        read=functools.partial(read_text, data),
        objective=objective,
        read_text=read_text,
        load_tokenizer=load,
        has_embeddings=first.has_embeddings,
    )


def language_context(
    language: LanguageConfig,
    objective: ObjectiveConfig,
    models: Sequence[ModelInfo],
    config: InputConfig,
    *,
    shuffled: bool,
) -> MeasureContext:
    """Return the context of measuring models on sentences of a language; `shuffled` as for `data_context`."""
    for other in models[1:]:
        models[0].outline.check(other.outline)
    config.check_language(models[0].name)
    made: Language = language.build()
    # a single one first: a model that does not fit is refused before all are drawn
    one = language_inputs(made, objective, num_sequences=1, seed=0)
    for model in models:
        _check_fits(model, made, one)

    def read(num_sequences: int, seed: int) -> Inputs:
        inputs = language_inputs(made, objective, num_sequences=num_sequences, seed=seed)
        return _fitting(inputs, models, config, seed if shuffled else None)

    return MeasureContext(read=read, objective=objective, language=made)


def run_context(config: TrainConfig) -> MeasureContext:
    """Return the context of measuring the checkpoints of a run on its own language."""
    language: Language = config.language.build()

    def read(num_sequences: int, seed: int) -> Inputs:
        return language_inputs(language, config.objective, num_sequences=num_sequences, seed=seed)

    return MeasureContext(read=read, objective=config.objective, language=language)


def _fitting(inputs: Inputs, models: Sequence[ModelInfo], config: InputConfig, order: int | None) -> Inputs:
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
    is_renumbered = getattr(text, "pad_token_id", None) == language.pad_id
    if language.tokenizer is None and text.vocab_size > language.model_vocab_size and not is_renumbered:
        warn(
            f"{model.name} knows {text.vocab_size:,} ids, and a model of the language {language.model_vocab_size:,}: "
            "the numbers mean nothing unless it was trained on this language"
        )
    check_model(inputs, model.config, model.max_length, model.name)


def _common_tokenizer(models: Sequence[ModelInfo], *, is_text: bool) -> PreTrainedTokenizerFast | None:
    """Return the common tokenizer of checkpoints, None where none has one; refuse different tokenizers.

    A checkpoint without a tokenizer gets the same tokens as the others.
    """
    known: tuple[str, PreTrainedTokenizerFast] | None = None
    alike = set()
    for model in (model for model in models if model.has_tokenizer):
        # equal files need no reading
        if (key := files_key(Path(model.name))) is not None:
            if key in alike:
                continue
            alike.add(key)
        try:
            tokenizer = load_tokenizer(model.name)
        except NoTokenizerError:
            continue
        except IsolossError as error:
            unknown = f"{error}; so it is not known whether {model.name} reads text as the others do"
            if is_text:
                raise IsolossError(
                    f"{unknown}: repair it, or give one tokenizer for all models with --tokenizer FOLDER"
                ) from error
            warn(unknown)
            continue
        if known is None:
            known = model.name, tokenizer
            continue
        found = difference(known[1], tokenizer, (known[0], model.name))
        if found.reason:
            raise IsolossError(
                f"{known[0]} and {model.name} have different tokenizers ({found.reason}), so their losses per token "
                "are not comparable; with --tokenizer FOLDER both read the text through that tokenizer"
            )
        if found.special:
            more = f" and {len(found.special) - 3:,} more" if len(found.special) > 3 else ""
            warn(
                f"{known[0]} and {model.name} have different special tokens ({', '.join(found.special[:3])}{more}); "
                "no text is read as these tokens, so the models are compared all the same"
            )
    return None if known is None else known[1]


def _sentences(language: Language, number: int, seed: int) -> Sentences:
    """Return the first held-out sentences of a language, if it has any, else fresh ones."""
    if language.num_held_out:
        return language.held_out(number)
    return language.sample(number, generator=generator(seed, "trace sentences"))


def language_inputs(
    language: Language, objective: ObjectiveConfig, *, num_sequences: int, seed: int, batch_size: int = 256
) -> Inputs:
    """Return inputs from a language under an objective: held-out ones if it has any, else fresh ones."""
    if num_sequences < 1:
        raise IsolossError(f"the number of sequences is {num_sequences}; it must be at least 1")
    sentences = _sentences(language, num_sequences, seed)
    if language.num_held_out:
        available, of = language.num_held_out, "held-out sequences of the run's corpus"
        source = f"{num_sequences:,} of the {available:,} {of}"
        if available < num_sequences:
            source = f"all {available:,} {of} (up to {num_sequences:,} would be taken)"
    else:
        source = f"{num_sequences:,} sentences sampled from the language"
    masks = generator(seed, "trace masks")
    batches = []
    for start in range(0, len(sentences.tokens), batch_size):
        rows = slice(start, start + batch_size)
        part = Sentences(sentences.tokens[rows], sentences.lengths[rows])
        batch = objective_batch(part, language, objective, generator=masks)
        # sentences are drawn one by one: equal ones are no copies, and each is a document
        if not language.num_held_out:
            batch["documents"] = torch.arange(start, start + len(part.tokens))
        batches.append(batch)
    return make_inputs(batches, objective.kind, source)
