"""Configs: TOML and JSON both ways, strictness, and what the fingerprint is over."""

import copy
import dataclasses
import json
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoloss import config as configs
from isoloss.cli.main import main
from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.languages.config import CorpusConfig, GrammarConfig, PCFGConfig
from isoloss.registry import ALGORITHMS, LANGUAGES
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.schema import json_schema

text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)
languages = st.one_of(
    st.builds(PCFGConfig, levels=st.integers(1, 6), stop_probability=st.floats(0, 0.9), seed=st.integers(0, 2**40)),
    st.builds(GrammarConfig, rules=text, max_length=st.integers(1, 99)),
    st.builds(CorpusConfig, paths=st.lists(text, max_size=3).map(tuple), tokenizer=text),
)
trainings = st.builds(
    TrainConfig,
    language=languages,
    optimizer=st.builds(OptimizerConfig, learning_rate=st.floats(1e-12, 1e3)),
    steps=st.just(10**9),
    checkpoints=st.lists(st.integers(0, 10**9)).map(tuple),
    init_from=st.none() | text,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first text makes tables of Unicode
@given(trainings)
def test_toml_and_json_round_trip(config):
    assert configs.from_dict(TrainConfig, tomllib.loads(configs.to_toml(config))) == config
    assert configs.from_dict(TrainConfig, configs.to_dict(config)) == config


def document(**changes):
    return {**configs.to_dict(TrainConfig(language=PCFGConfig())), **changes}


UNFIT = {  # changes of a document, and what is said of each; none of them fits the schema either
    "no setting 'stepz'; did you mean steps?": {"stepz": 3},
    "steps is '100'; it must be a whole number, at least 1": {"steps": "100"},
    "steps is 0; it must be at least 1": {"steps": 0},
    "steps is 1.5; it must be a whole number, at least 1": {"steps": 1.5},
    "steps is True; it must be at least 1": {"steps": True},
    "checkpoints is 3; it must be a list, each a whole number": {"checkpoints": 3},
    "model is 3; it must be a table of settings": {"model": 3},
    "precision is 'float16'; it must be one of float32, bfloat16": {"precision": "float16"},
    "language: no setting 'level'; did you mean levels?": {"language": {"kind": "pcfg", "level": 3}},
    "language: paths is missing": {"language": {"kind": "corpus"}},
    "language: the kind of a language is one of pcfg, grammar,": {"language": {"kind": "ngram"}},
    "optimizer.betas[1] is 1.0; it must be at least 0 and below 1": {"optimizer": {"betas": [0.5, 1.0]}},
    "optimizer.warmup_steps is 'x'; it must be a whole number, at least 0": {"optimizer": {"warmup_steps": "x"}},
}
AGAINST_RULES = {
    "optimizer.learning_rate is inf; it must be finite, above 0": {"optimizer": {"learning_rate": math.inf}},
    "no optimizer 'adam'": {"optimizer": {"name": "adam"}},
    "no model 'gpt'; did you mean opt? the models are bert, bert-pre-ln": {"model": {"architecture": "gpt"}},
    "batch_size is 7; sam's halves need a multiple of 2": {"algorithm": {"kind": "sam"}, "batch_size": 7},
}


@pytest.mark.parametrize("message", [*UNFIT, *AGAINST_RULES])
def test_what_is_wrong_is_named(message):
    with pytest.raises(IsolossError, match=f"^{re.escape(message)}"):
        configs.from_dict(TrainConfig, document(**(UNFIT | AGAINST_RULES)[message]))


@dataclass(frozen=True, kw_only=True)
class Draws:
    number: int | Literal["all"] | None = configs.setting(4, minimum=1)
    word: Literal["one", "two"] | None = None
    pair: tuple[float, float] = configs.setting((0.5, 0.5), below=1)
    path: Path | None = None


@pytest.mark.parametrize("value", [1, 70, "all"])
def test_a_number_or_a_word(value):
    assert configs.from_dict(Draws, tomllib.loads(configs.to_toml(Draws(number=value)))) == Draws(number=value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": "al"}, "number is 'al'; it must be a whole number, at least 1, or all"),
        ({"number": 0}, "number is 0; it must be at least 1, or all"),
        ({"number": 2.5}, "number is 2.5; it must be a whole number, at least 1, or all"),
        ({"word": "al"}, "word is 'al'; it must be one of one, two"),
        ({"pair": (0.5,)}, "pair is of the type tuple; it must be 2 values, each a number, below 1"),
        ({"pair": (0.5, 1.0)}, "pair[1] is 1.0; it must be below 1"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_alike_in_a_config_and_in_a_document(changes, message):
    with pytest.raises(IsolossError) as checked:
        configs.check(Draws(**changes))
    with pytest.raises(IsolossError) as read:
        configs.from_dict(Draws, configs.to_dict(Draws(**changes)))
    assert str(checked.value) == message
    assert str(read.value).replace("list;", "tuple;") == message


def test_a_type_that_no_document_has_is_not_looked_at():
    configs.check(Draws(path=Path("here")))
    configs.check(Draws())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("steps = = 3", "is not a readable TOML file"),
        ("steps = " + 20_000 * "[" + 20_000 * "]", "is not a readable TOML file"),
        ('stepz = 3\n[language]\nkind = "brackets"\n', "no setting 'stepz'; did you mean steps?"),
    ],
    ids=["absent", "broken", "deep", "misspelt"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, message):
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(IsolossError, match=rf"run\.toml:? {re.escape(message)}"):
        configs.read_toml(TrainConfig, path)


def test_the_fingerprint_is_over_what_decides_a_result():
    base = TrainConfig(language=PCFGConfig())
    same = dataclasses.replace(base, device="cuda", threads=7, save_every_seconds=1.0)
    assert configs.fingerprint(same) == configs.fingerprint(base)
    for field in dataclasses.fields(TrainConfig):
        if field.metadata.get("exclude_from_fingerprint"):
            continue
        other = dataclasses.replace(base, **{field.name: {"language": PCFGConfig(seed=9)}.get(field.name, "other")})
        assert configs.fingerprint(other) != configs.fingerprint(base), field.name


def test_a_field_that_is_omitted_at_its_default_decides_otherwise():
    lstm = TrainConfig(language=PCFGConfig(seed=4), model=ModelConfig(architecture="lstm", size="h64"))
    assert configs.identity(lstm.model) == {"architecture": "lstm", "size": "h64", "dropout": 0.1}
    for change in ({"layers": 2}, {"width": 32}, {"directions": 1}):
        free = dataclasses.replace(lstm, model=dataclasses.replace(lstm.model, **change))
        assert configs.fingerprint(free) != configs.fingerprint(lstm)
        assert configs.from_dict(TrainConfig, tomllib.loads(configs.to_toml(free))) == free


def test_differences_name_the_fields():
    a = TrainConfig(language=PCFGConfig(), steps=10)
    b = TrainConfig(language=PCFGConfig(levels=4), steps=20, threads=3)
    assert configs.differences(a, b) == ["language.levels is 3 here and 4 there", "steps is 10 here and 20 there"]


def test_a_setting_of_an_earlier_version_is_left_out_where_it_decides_nothing():
    config = TrainConfig(language=PCFGConfig())
    assert configs.from_dict(TrainConfig, document(ema=0.0, loggers=[], prefetch=False)) == config
    with pytest.warns(IsolossWarning, match=r"^loggers is \['wandb'\]: isoloss no longer has this setting"):
        assert configs.from_dict(TrainConfig, document(loggers=["wandb"])) == config
    with pytest.raises(IsolossError, match=r"^ema is 0\.9, and isoloss no longer has this setting: leave it out$"):
        configs.from_dict(TrainConfig, document(ema=0.9))


# --- the schema


ROOT = Path(__file__).parents[1]
LISTED = {  # configs, and a TOML file of each that is in the documentation or the paper
    TrainConfig: [configs.to_toml(TrainConfig(language=PCFGConfig(seed=4), stages=(StageConfig(steps=5),)))],
    LanguageConfig: re.findall(r"```toml\n(kind = .*?)```", (ROOT / "docs" / "languages.md").read_text(), re.DOTALL),
}


@pytest.mark.parametrize(("cls", "text"), [(cls, text) for cls, texts in LISTED.items() for text in texts])
def test_files_that_are_read_fit_the_schema(cls, text):
    schema = json_schema(cls)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(tomllib.loads(text), schema)


@pytest.mark.parametrize("changes", UNFIT.values(), ids=str)
def test_what_is_refused_does_not_fit_the_schema(changes):
    whole = {key: value for key, value in document().items() if value is not None}
    fits = jsonschema.Draft202012Validator(json_schema(TrainConfig)).is_valid
    assert fits({**tomllib.loads(configs.to_toml(whole))})
    assert not fits({**tomllib.loads(configs.to_toml(whole)), **changes})


def test_the_command_line_prints_the_schema(capsys):
    assert main(["train", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(TrainConfig)


def test_every_field_of_a_schema_is_described():
    for name, schema in json_schema(TrainConfig)["$defs"].items():
        for field, one in schema.get("properties", {}).items():
            is_told = "description" in one or field == "kind" or "$ref" in one
            assert is_told, f"{name}.{field}"


# --- every field of every config


NEEDED = {
    "rules": "S a 1",
    "language": PCFGConfig(),
    "path": "a.safetensors",
    "checkpoint": "a",
    "paths": ("a.txt",),
    "tokenizer": "a",
}
CONFIGS = [
    *(ModelConfig(), ObjectiveConfig(), OptimizerConfig(), StageConfig(steps=1), TrainConfig(language=PCFGConfig())),
    *(kind() for kind in ALGORITHMS.loaded().values()),
    *(
        kind(**{name: NEEDED[name] for name in kind.required_fields()})
        for kind in LANGUAGES.loaded().values()
        if kind.__module__.startswith("isoloss.")
    ),
]


def beyond(form, bounds):
    """Values that a field cannot have, and what is said of each."""
    if form.config is not None:
        yield 3, f"it must be an isoloss config, {form.config.__name__}"
    elif form.items is not None:
        yield 3, "it must be (a list|[0-9]+ values), each"
        for value, told in beyond(configs.form_of(form.items), bounds):
            yield (value,) * (form.length or 1), told
    elif form.kinds:
        yield object(), f"it must be {configs._WORDS[form.kinds[0]]}"
    elif form.choices:
        yield "no such word", f"it must be one of {form.choices[0]}"
    if bounds is not None and form.kinds:
        if bounds.minimum is not None:
            yield bounds.minimum - 1, f"it must be at least {bounds.minimum:g}"
        if bounds.above is not None:
            yield bounds.above, f"it must be above {bounds.above:g}"
        if bounds.maximum is not None:
            yield bounds.maximum + 1, f"it must be .*at most {bounds.maximum:g}"
        if bounds.below is not None and math.isfinite(bounds.below):
            yield bounds.below, f"it must be .*below {bounds.below:g}"
        if float in form.kinds:
            yield math.nan, "it must be finite, "


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_each_field_refuses_what_is_beyond_its_range_and_names_itself(config):
    configs.check(config)
    hints = configs.hints_of(type(config))
    for field in dataclasses.fields(config):
        for value, told in beyond(configs.form_of(hints[field.name]), field.metadata.get("range")):
            # set behind the back of `__post_init__`, which may rely on types
            other = copy.copy(config)
            object.__setattr__(other, field.name, value)
            with pytest.raises(IsolossError, match=rf"^here\.{field.name}(\[0\])? is .*{told}"):
                configs.check(other, "here")
