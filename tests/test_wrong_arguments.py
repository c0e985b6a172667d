"""Arguments that are something else than a function or a command takes: each is refused in a sentence."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import isoloss
from isoloss.errors import IsolossError
from isoloss.flatness import hessian_trace, largest_eigenvalues
from isoloss.run_config import TrainConfig
from isoloss.transfer.probe import LinearProbeConfig


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=8, max_position_embeddings=8, **sizes)).eval()


@pytest.fixture
def batches():
    ids = torch.randint(0, 8, (64, 4))
    return [{"input_ids": ids, "labels": ids.clone()}]


def refused(call, text):
    with pytest.raises(IsolossError) as error:
        call()
    assert text in str(error.value)
    assert len(str(error.value)) < 400


def test_models_are_models_or_names_of_checkpoints(model, batches, tmp_path):
    refused(
        lambda: isoloss.compare([model, model], batches), "model 0 is of the type BertForMaskedLM; it must be the name"
    )
    refused(lambda: isoloss.compare({"a": 3}, batches), "model a is 3; it must be a model, or the name of a checkpoint")
    for measure in (isoloss.fisher_trace, hessian_trace, largest_eigenvalues):
        refused(
            lambda call=measure: call("PATH", batches),
            "model is 'PATH'; it must be a model, such as isoloss.load_model",
        )
    model.save_pretrained(tmp_path / "b")
    found = isoloss.compare({"a": model, "b": str(tmp_path / "b")}, batches)
    assert list(found.models) == ["a", "b"]
    refused(
        lambda: isoloss.load_model(tmp_path / "b", dtype="float32"), "dtype is 'float32'; it must be a type of torch"
    )


@pytest.mark.parametrize("wrong", [8, -1])
def test_ids_that_the_model_does_not_know_are_told(model, batches, wrong):
    batches[0]["input_ids"][3, 2] = wrong
    refused(lambda: isoloss.fisher_trace(model, batches), "the model knows ids 0 to 7")
    refused(lambda: hessian_trace(model, batches), "the model knows ids 0 to 7")


def test_tasks_settings_and_results_are_checked(model):
    task = isoloss.make_task("brackets-8", "mismatch", num_train=20, num_test=10)
    for call in (isoloss.linear_probe, isoloss.finetune):
        refused(lambda call=call: call(model, "root"), "task is 'root'; it must be a task, which make_task returns")
        refused(lambda call=call: call("PATH", task), "model is 'PATH'; it must be a model")
        refused(lambda call=call: call(model, task, batchsize=3), "no setting 'batchsize'; did you mean batch_size?")
        refused(lambda call=call: call(model, task, epochs="3"), "epochs is '3'; it must be a whole number")
    refused(lambda: isoloss.linear_probe(model, task, zzz=3), "they are ")
    refused(
        lambda: isoloss.compare_accuracy({"a": 1, "b": 2}), "result a is 1; it must be what linear_probe or finetune"
    )
    refused(lambda: isoloss.linear_probe(model, task, LinearProbeConfig, epochs=1), "it must be a config")


def test_configs_languages_and_estimates_are_checked(tmp_path):
    refused(
        lambda: isoloss.pretrain(tmp_path / "run", "config.toml"), "the config is 'config.toml'; it must be a config"
    )
    refused(
        lambda: isoloss.pretrain(tmp_path / "run", TrainConfig(language="brackets-8")),
        "language is 'brackets-8'; it must be an isoloss config, LanguageConfig",
    )
    refused(lambda: isoloss.load_language(3), "spec is 3; it must be a name, a path or the config of a language")
    values = {"value": 1.0, "samples": 9, "unit": "", "num_predictions": 9, "method": "mine"}
    refused(lambda: isoloss.Estimate(stderr=-1, **values), "mine: stderr is -1; it must be at least 0")
