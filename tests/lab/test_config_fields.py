"""Every field of every config refuses what is beyond its range and names itself, and so do rules between fields."""

import dataclasses
import math

import pytest

from isoloss.config import check, hints_of
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import (
    BracketsConfig,
    DyckConfig,
    HiddenBracketConfig,
    HMMConfig,
    PCFGConfig,
)
from isoloss.registry import ALGORITHMS, LANGUAGES
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig

REQUIRED = {"rules": "S a 1", "path": "none", "paths": (), "tokenizer": "none", "checkpoint": "none", "steps": 10}
REQUIRED |= {"language": BracketsConfig()}


def example(cls):
    """A config with the required fields, and defaults."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    missing = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    return cls(**{name: REQUIRED[name] for name in missing})


CLASSES = [
    *(LANGUAGES.load(name) for name in LANGUAGES),
    *(ALGORITHMS.load(name) for name in ALGORITHMS),
    *(TrainConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig),
]
CONFIGS = {cls.__name__: example(cls) for cls in CLASSES}


def beyond(bounds, is_whole):
    """The nearest numbers that a range leaves out."""
    step = 1 if is_whole else 0.25
    yield from () if bounds.minimum is None else (bounds.minimum - step,)
    yield from () if bounds.above is None else (bounds.above,)
    yield from () if bounds.maximum is None else (bounds.maximum + step,)
    yield from () if bounds.below is None else (bounds.below,)
    yield from () if is_whole else (math.nan, math.inf)


def cases():
    for name, config in CONFIGS.items():
        for field in dataclasses.fields(config):
            bounds, hint = field.metadata.get("range"), str(hints_of(type(config))[field.name])
            if bounds is None:
                continue
            is_many = hint.startswith("tuple")
            kind = int if "float" not in hint else float
            for value in beyond(bounds, kind is int):
                value = kind(value) if math.isfinite(value) else value
                given = (value,) if is_many else value
                yield pytest.param(config, field.name, given, value, str(bounds), id=f"{name}.{field.name}={value}")


def test_most_configs_have_ranges():
    assert len(list(cases())) > 100


@pytest.mark.parametrize(("config", "field", "given", "value", "bounds"), cases())
def test_a_number_beyond_its_range_is_named(config, field, given, value, bounds):
    check(config)
    wrong = dataclasses.replace(config, **{field: given})
    with pytest.raises(IsolossError) as error:
        check(wrong, "here")
    message = str(error.value)
    assert message.startswith(f"here.{field} is {value}; it must be ")
    assert bounds in message
    if hasattr(wrong, "build") and isinstance(config, type(config)) and type(config) in map(LANGUAGES.load, LANGUAGES):
        with pytest.raises(IsolossError, match=rf"^{field} is "):  # before anything is opened
            wrong.build()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_value_of_another_type_is_named(name):
    config = CONFIGS[name]
    for field in dataclasses.fields(config):
        hint = str(hints_of(type(config))[field.name])
        if field.name == "kind" or "Config" in hint or hint.startswith(("tuple", "collections", "<class 'str'>")):
            continue
        with pytest.raises(IsolossError, match=rf"^{field.name} is \['wrong'\]; it must be |^{field.name} is 'wrong'"):
            check(dataclasses.replace(config, **{field.name: ["wrong"]}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PCFGConfig(symbols_per_level=2, rules_per_symbol=5), "5, but 2 symbols per level make only 4 different pairs"),
        (BracketsConfig(length=7), "length is 7; it must be even"),
        (HiddenBracketConfig(length=5), "length is 5; it must be even"),
        (DyckConfig(max_length=7), "max_length is 7; it must be even"),
        (DyckConfig(max_depth=9), "max_depth is 9, but 16 brackets nest at most 8 deep"),
        (HMMConfig(states=3), "blocks is 4, more than the 3 states or the 200 tokens"),
        (HMMConfig(blocks=2, vocab_size=1), "blocks is 2, more than the 100 states or the 1 tokens"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(config, message):
    for refuse in (check, lambda config: config.build()):
        with pytest.raises(IsolossError, match=message):
            refuse(config)
