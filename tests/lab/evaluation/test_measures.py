"""Every registered measure, found by name: its settings, its error, and that it is what the library function gives."""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import shutil
from typing import Annotated

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import isoloss.flatness
from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.cli.main import main
from isoloss.config import LanguageConfig, setting
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.flatness._rescaling.apply import rescaled_at_random
from isoloss.lab.evaluation.context import MeasureContext
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures import flatness as measures_of_flatness
from isoloss.lab.evaluation.measures.base import (
    FunctionMeasure,
    Measure,
    MeasureResult,
    make_measure,
    measure_class,
    name_fields,
    settings_of,
)
from isoloss.lab.evaluation.measures.flatness import flatness_measures
from isoloss.lab.languages.base import Language
from isoloss.lab.languages.config import PCFGConfig, load_language
from isoloss.lab.models.make import make_model
from isoloss.registry import MEASURES
from isoloss.run_config import ModelConfig, ObjectiveConfig
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import ratio_estimate
from isoloss.text.inputs import read_inputs

NAMED = {
    "trace-in-SIZE-EMBEDDING_SCALE": "trace-in-d32-exact",
    "minimal-trace-in-SIZE": "minimal-trace-in-d32",
    **{f"{how}-TASK": f"{how}-root" for how in ("probe", "lookup", "log-lookup", "one-hot", "finetune")},
    **{f"{how}-TASK": f"{how}-root" for how in ("raw-lookup", "standardized-lookup")},
    "few-shot-TASK-NUMBER": "few-shot-root-20",
    "invariant-few-shot-TASK-NUMBER": "invariant-few-shot-root-20",
    "projected-TASK-WIDTH": "projected-root-8",
    "span-LEVEL": "span-1",
    "lm-eval-TASK": "lm-eval-lastword",
}
SMALL = {
    "loss_sentences": 40,
    "num_sequences": 40,
    "num_train": 48,
    "num_test": 32,
    "probe_seeds": 2,
    "probe_epochs": 2,
    "finetune_seeds": 2,
    "finetune_epochs": 1,
    "finetune_warmup_steps": 1,
    "spectrum_steps": 4,
    "sharpness_batch_size": 8,
}
LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
# with tests of their own: of two checkpoints, of two texts, of chains that are to converge
FLATNESS = [name for name in flatness_measures() if name not in ("barrier", "gradient-agreement", "frontier", "llc")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two models of one small language, and token ids."""
    path = tmp_path_factory.mktemp("measures")
    language = LANGUAGE.build()
    for seed, name in enumerate("ab"):
        make_model(ModelConfig(size="d16"), language, seed=seed).save_pretrained(path / name)
    np.save(path / "ids.npy", np.random.default_rng(0).integers(0, LANGUAGE.vocab_size, (48, 4)))
    return path


def as_json(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words), "--threads", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def inputs_of(checkpoints, **options):
    """The token ids as a command reads them."""
    model, masking = load_model(checkpoints / "a", device="cpu").model, ObjectiveConfig(masking="fraction")
    options |= {"checkpoint": str(checkpoints / "a"), "config": model.config, "kind": "masked", "mask_id": 9}
    return read_inputs(checkpoints / "ids.npy", masking=masking, **options)


def has_error(estimate):
    return estimate["stderr"] > 0 or "(exact)" in str(Estimate.from_dict(estimate))


def options(names):
    """The small settings that one of these measures has, as words of a command."""
    fields = {field.name for name in names for field in dataclasses.fields(measure_class(name))}
    return [word for key, value in SMALL.items() if key in fields for word in (f"--{key.replace('_', '-')}", value)]


def test_the_loss_is_measured_on_as_many_sequences_as_flatness():
    assert settings_of("loss") == {"loss_sentences": 512, "seed": 0}
    assert settings_of("trace")["num_sequences"] == 512
    assert settings_of("loss", {"num_sequences": 64}) == settings_of("loss", {"loss_sentences": 64, "num_sequences": 9})


@pytest.mark.parametrize("name", list(MEASURES))
def test_the_settings_of_a_measure_are_recorded_with_its_results(name):
    cls = measure_class(name)
    assert issubclass(cls, Measure)
    assert cls.__dataclass_params__.frozen
    measure = make_measure(NAMED.get(name, name), SMALL)
    left_out = ("omit_default", "exclude_from_fingerprint")
    kept = [f.name for f in dataclasses.fields(measure) if not any(map(f.metadata.get, left_out))]
    given = set(kept) - name_fields(name)
    assert set(settings_of(NAMED.get(name, name), SMALL)) == given


def test_isoloss_eval_takes_every_measure_of_a_language(capsys, checkpoints, tmp_path):
    # those of brackets, of runs, of text, of another package and of chains that are to converge have tests of their own
    others = ("generalization-gap", "barrier", "directional-sharpness", "gradient-agreement", "lm-eval-TASK")
    others = (*others, "frontier", "llc")
    names = [name for name in MEASURES if not name.startswith("bracket-") and name not in others]
    asked = [NAMED.get(name, name) for name in names]
    words = ("measure", checkpoints / "a", "--language", config_file(tmp_path), "--measures", *asked, *options(names))
    evaluations = as_json(capsys, *words, "--output", tmp_path / "out")["evaluations"]
    assert [found["measure"] for found in evaluations] == asked
    kept = {path.stem: path for path in (tmp_path / "out").rglob("*.json")}
    again = {name: asked[names.index(name)] for name in ("loss", "trace", "probe-TASK", "span-LEVEL")}
    others = evaluate(checkpoints / "a", [*again.values()], language=LANGUAGE, settings=SMALL, device="cpu")
    same = {other.measure: json.loads(json.dumps(other.to_dict())) for other in others}
    for found in evaluations:
        name = found["measure"]
        assert found["settings"] == settings_of(name, SMALL)
        assert all(has_error(estimate) for estimate in found["estimates"].values()), name
        assert files.read_sealed(kept[name], "") == found
        assert kept[name].with_suffix(".safetensors").exists()
        assert same.get(name) in (None, {key: value for key, value in found.items() if key != "model"})
    assert set(same) == set(again.values())


@pytest.mark.parametrize(
    ("measures", "said"), [(("loss",), "all sentences of the language"), (("loss", "trace"), "8 sentences sampled")]
)
def test_it_is_said_what_is_measured_on(checkpoints, tmp_path, capsys, measures, said):
    words = ("measure", checkpoints / "a", "--language", config_file(tmp_path), "--measures", *measures)
    assert main([*map(str, words), "--loss-sentences", "all", "--num-sequences", "8"]) == 0
    assert said in " ".join(capsys.readouterr().err.split())


def config_file(folder):
    from isoloss import config as configs

    path = folder / "language.toml"
    path.write_text(configs.to_toml(LANGUAGE))
    return path


@pytest.fixture(scope="module")
def of_flatness(checkpoints):
    """What is said of one model by `isoloss measure` and of two by `isoloss compare`, by every measure at once."""
    asked = [NAMED.get(name, name) for name in FLATNESS]
    words = ("--data", checkpoints / "ids.npy", "--mask-id", "9", "--measures", *asked, *options(FLATNESS))
    documents = []
    for command, models in (("measure", "a"), ("compare", "ab")):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            line = [command, *(checkpoints / model for model in models), *words, "--threads", "1", "--json"]
            assert main([*map(str, line)]) == 0
        documents.append(json.loads(out.getvalue()))
    return documents


@pytest.mark.parametrize("name", FLATNESS)
def test_isoloss_measure_takes_every_measure_of_flatness_and_gives_what_the_function_gives(
    of_flatness, checkpoints, name
):
    asked, document = NAMED.get(name, name), of_flatness[0]
    (estimates,) = (each["estimates"] for each in document["evaluations"] if each["measure"] == asked)
    assert all(has_error(estimate) for estimate in estimates.values())
    measure = make_measure(asked, SMALL)
    loaded = load_model(checkpoints / "a", device="cpu")
    inputs = inputs_of(checkpoints, num_sequences=40)
    given = {"auxiliary_sample": inputs.auxiliary_sample} if "auxiliary_sample" in measure.taken else {}
    if name == "rescaling-control":  # both traces, of another model
        loaded = dataclasses.replace(loaded, model=rescaled_at_random(loaded.model, seed=measure.seed))
        minimal = fisher_trace(loaded.model, inputs.batches, rescaling="minimal", seed=measure.seed, **given)
        found = {key: estimate["value"] for key, estimate in estimates.items()}
        plain = pytest.approx(minimal.details["trace"], rel=0.05)
        assert found == {
            "trace-rescaled-at-random": plain,
            "minimal-trace-rescaled-at-random": pytest.approx(minimal.value, rel=1e-4),
        }
        return
    expected = measure(loaded.model, inputs.batches, **given)
    for key, estimate in expected.estimates.items():
        found = estimates[key]
        assert (found["value"], found["stderr"]) == pytest.approx((estimate.value, estimate.stderr), rel=1e-4)


@pytest.mark.parametrize("name", FLATNESS)
def test_two_models_are_compared_by_every_measure_that_can_be_paired(of_flatness, name):
    asked, document = NAMED.get(name, name), of_flatness[1]
    first, second = document["models"].values()
    names = [key for key in first if key.partition(",")[0] == asked]
    pairs = [pair for pair in document["pairs"] if pair["estimate"] in names]
    for pair in pairs:
        key, difference = pair["estimate"], pair["difference"]
        assert difference["value"] == pytest.approx(first[key]["value"] - second[key]["value"], rel=1e-9)
        assert 0 < difference["stderr"] < 2 * np.hypot(first[key]["stderr"], second[key]["stderr"])
    assert names
    assert bool(pairs) == (name not in ("squared-norm", "unembedding-rank"))  # which are exact


def test_the_unembedding_rank_is_the_entropy_of_its_singular_values(checkpoints, capsys):
    words = ("--data", checkpoints / "ids.npy", "--mask-id", "9", "--measures", "unembedding-rank")
    (evaluation,) = as_json(capsys, "measure", checkpoints / "a", *words)["evaluations"]
    weights = load_model(checkpoints / "a").model.get_output_embeddings().weight.detach().double()
    eigenvalues = torch.linalg.eigvalsh(weights.T @ weights)
    p = eigenvalues[eigenvalues > 1e-10].sqrt()
    rank = float(torch.special.entr(p / p.sum()).sum().exp())
    found = evaluation["estimates"]["unembedding-rank"]
    assert (found["value"], found["stderr"]) == (pytest.approx(rank), 0)


def test_the_diagonal_fisher_is_a_file_with_the_names_of_the_checkpoint(checkpoints, tmp_path, capsys):
    words = ("--data", checkpoints / "ids.npy", "--mask-id", "9", "--measures", "diagonal-fisher", "--num-sequences", 8)
    (evaluation,) = as_json(capsys, "measure", checkpoints / "a", *words, "--output", tmp_path / "out")["evaluations"]
    (path,) = (tmp_path / "out").rglob("diagonal-fisher.safetensors")
    weights, found = load_file(checkpoints / "a" / "model.safetensors"), load_file(path)
    assert found.keys() == {*weights, "diagonal-fisher.influence"}
    assert all(found[name].shape == weights[name].shape for name in weights)
    total = sum(float(found[name].sum()) for name in weights)
    assert total == pytest.approx(evaluation["estimates"]["diagonal-fisher"]["value"], rel=1e-5)


def test_every_function_of_flatness_that_returns_an_estimate_has_a_measure():
    functions = {
        name
        for name in dir(isoloss.flatness)
        if "Estimate" in str(getattr(getattr(isoloss.flatness, name), "__annotations__", {}).get("return", ""))
    }
    made = [function for function in vars(measures_of_flatness).values() if inspect.isfunction(function)]
    called = {name for function in made for name in function.__code__.co_names}
    assert functions <= called, functions - called


def test_progress_says_what_it_counts(checkpoints):
    said = []
    names = ["loss", "trace", "int4-rise", "largest-eigenvalue", "spectral-density"]
    folder = checkpoints / "a"
    evaluate(
        folder, names, language=LANGUAGE, settings=SMALL, device="cpu", progress=lambda *state: said.append(state[-1])
    )
    for note in (
        "loss of {}, 40 of at most 40 sequences",
        "trace of {}, 40 of at most 40 sequences",
        "int4-rise of {}, 2 passes over the inputs",
        "largest-eigenvalue of {}, 1 Lanczos steps",
        "spectral-density of {}, 1 probes",
    ):
        assert note.format(folder) in said


def test_a_measure_of_ones_own_is_found_by_its_pattern(checkpoints, monkeypatch):
    def parameter_count(model, *, word: str):
        """Number of parameters whose name has a word in it."""
        count = sum(p.numel() for name, p in model.named_parameters() if word in name)
        return {"count": Estimate(value=count, stderr=0.0, samples=0, unit="", num_predictions=0, method="count")}

    monkeypatch.setattr(MEASURES, "_entries", dict(MEASURES._entries))
    MEASURES.register("parameters-WORD", parameter_count)
    (found,) = evaluate(checkpoints / "a", "parameters-bias", language=LANGUAGE)
    bias = sum(
        p.numel() for name, p in load_model(checkpoints / "a", device="cpu").model.named_parameters() if "bias" in name
    )
    assert (found.estimates["count"].value, found.settings) == (bias, {})


def test_a_measure_is_one_function_whose_annotated_arguments_are_its_settings(checkpoints, monkeypatch):
    seen = []

    def mean_length(model, batches, *, scale: Annotated[float, setting(above=0), "A factor."] = 2.0, causal=None):
        """Mean number of tokens."""
        seen.append((len(batches), causal))
        lengths = torch.cat([batch["attention_mask"].sum(dim=1) for batch in batches])
        return ratio_estimate(scale * lengths, unit="tokens", method="count")

    monkeypatch.setattr(MEASURES, "_entries", dict(MEASURES._entries))
    MEASURES.register("mean-length", mean_length)
    assert settings_of("mean-length", {"seed": 4}) == {"num_sequences": 512, "scale": 2.0, "seed": 4}
    with pytest.raises(IsolossError, match="scale is 0; it must be above 0"):
        make_measure("mean-length", {"scale": 0})
    (found,) = evaluate(
        checkpoints / "a", "mean-length", language=LANGUAGE, settings={"num_sequences": 10, "scale": 3.0}
    )
    assert found.estimates["mean-length"].value == 3 * LANGUAGE.build().max_length
    assert found.settings == {"num_sequences": 10, "scale": 3.0, "seed": 0}
    assert (seen, found.inputs != "") == ([(1, False)], True)
    measure = make_measure("mean-length")
    assert isinstance(measure, FunctionMeasure)
    limited = MeasureContext(read=None, objective=ObjectiveConfig(), rtol=0.1)
    assert measure.why_not_applicable(limited) == "it takes no rtol"
    assert "mean-length" in flatness_measures()


def test_an_argument_of_a_measure_that_nothing_fills_is_named(monkeypatch):
    monkeypatch.setattr(MEASURES, "_entries", dict(MEASURES._entries))
    MEASURES.register("wrong", lambda model, *, depth: None)
    with pytest.raises(IsolossError, match="the measure wrong takes depth, which is neither a setting"):
        make_measure("wrong")


@pytest.mark.parametrize("result", [3.0, {"x": 3.0}, None])
def test_a_measure_that_returns_no_estimate_is_named(checkpoints, monkeypatch, result):
    def wrong(model):
        return result

    monkeypatch.setattr(MEASURES, "_entries", dict(MEASURES._entries))
    MEASURES.register("wrong", wrong)
    with pytest.raises(IsolossError, match=f"measure wrong returned {result}; it must be estimates by name"):
        evaluate(checkpoints / "a", "wrong", language=LANGUAGE)


def test_mistakes_are_told_before_anything_is_loaded():
    for measures, settings, sentence in (
        (["los"], {}, "did you mean loss"),
        (["probe-TASK"], {}, "probe-TASK is a pattern: replace TASK"),
        (
            ["loss"],
            {"loss_sentences": "many"},
            "loss_sentences is 'many'; it must be a whole number, at least 1, or all",
        ),
        (["loss"], {"loss_sentences": 2.5}, "loss_sentences is 2.5; it must be a whole number, at least 1"),
        (
            ["loss"],
            {"nothing_alike": 3},
            "'nothing_alike'; those of loss are loss_sentences, num_sequences, seed",
        ),
        (["loss"], {"loss_sentence": 3}, "no measure has a setting 'loss_sentence'; did you mean loss_sentences"),
        (["trace"], {"num_sequences": 0}, "num_sequences is 0; it must be at least 2"),
        ([], {}, "no measure is named"),
    ):
        with pytest.raises(IsolossError, match=sentence):
            evaluate("absent", measures, language=LANGUAGE, settings=settings)


def test_what_does_not_apply_is_refused_where_it_was_asked_for(checkpoints):
    with pytest.raises(IsolossError, match="root is no task of text, and no language is given whose task it could be"):
        evaluate(checkpoints / "a", ["probe-root"], data=checkpoints / "ids.npy", inputs=InputConfig(mask_id=9))


def test_sentences_of_a_language_are_masked_as_asked(checkpoints):
    def masked(**inputs):
        found = evaluate(checkpoints / "a", ["loss"], language=LANGUAGE, settings=SMALL, inputs=InputConfig(**inputs))
        return found[0].estimates["loss"].num_predictions

    assert masked() == masked(masking="one") == 40  # one token of each sentence
    assert masked(masking="fraction", fraction=1.0) == 40 * 4
    assert 40 <= masked(masking="fraction") < 80
    with pytest.raises(IsolossError, match=r"fraction is 0.3, but masking is 'one'"):
        masked(fraction=0.3)
    with pytest.raises(IsolossError, match=r"is measured on a language: leave out --length"):
        masked(length=3)


def test_a_recursive_grammar_is_measured_at_the_length_that_is_asked_for(tmp_path):
    """Tokens are `a` two times in three, at every length, and of one or two tokens there are six sentences."""
    grammar = tmp_path / "grammar.pcfg"
    grammar.write_text("S -> S S [0.25] | 'a' [0.5] | 'b' [0.25]\n")
    language = load_language(grammar, length=2)
    make_model(ModelConfig(size="d16"), language, seed=0).save_pretrained(tmp_path / "model")

    def measured(language, **inputs):
        settings = {"loss_sentences": "all"}
        return evaluate(
            tmp_path / "model", ["loss"], language=language, settings=settings, inputs=InputConfig(**inputs)
        )[0].estimates

    found = measured(grammar, length=2)
    assert found["loss"].num_predictions == 1 + 2 * 2  # masked inputs: of two tokens, either may be the masked one
    assert found["entropy"].value == pytest.approx(-(2 * math.log(2 / 3) + math.log(1 / 3)) / 3, abs=1e-12)
    with pytest.raises(IsolossError, match="give a number of sentences to draw or, for a grammar file, a smaller"):
        measured(grammar)
    with pytest.raises(IsolossError, match="the language pcfg-laptop is complete as it is: leave out --length"):
        measured("pcfg-laptop", length=2)


def test_two_checkpoints_never_share_a_folder_of_the_output(checkpoints, tmp_path):
    options = {"language": LANGUAGE, "settings": SMALL}
    with pytest.raises(IsolossError, match="is named twice, the other time as"):
        evaluate([checkpoints / "a", f"{checkpoints}/../{checkpoints.name}/a"], ["loss"], **options)
    shutil.copytree(checkpoints / "b", tmp_path / "x-a")
    shutil.copytree(checkpoints / "a", tmp_path / "x" / "a")
    with pytest.raises(IsolossError, match=r"would both be kept in .*: measure them one after another"):
        evaluate([tmp_path / "x" / "a", tmp_path / "x-a"], ["loss"], output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_evaluations_print_as_a_table(checkpoints):
    found = evaluate(
        [checkpoints / "a", checkpoints / "b"], ["loss", "squared-norm"], language=LANGUAGE, settings=SMALL
    )
    assert len(found) == 4
    lines = str(found).splitlines()
    assert lines[0].split()[:4] == ["model", "measure", "estimate", "value"]
    assert [line.split()[2] for line in lines[1:]] == ["entropy", "entropy", "kl", "kl", "loss", "loss"] + [
        "squared-norm"
    ] * 2
    assert "<table>" in found._repr_html_()
    assert found.to_dict()[0]["model"] == str(checkpoints / "a")


def test_results_of_estimates_alone_have_their_influences():
    estimate = Estimate(
        value=1.0, stderr=1.0, samples=2, unit="", num_predictions=2, method="", influence=np.array([1.0, -1.0])
    )
    result = MeasureResult.of("mine", {"x": estimate, "y": dataclasses.replace(estimate, influence=None)})
    assert list(result.arrays()) == ["x.influence"]
    assert result.arrays()["x.influence"].dtype == np.float32


@pytest.mark.parametrize("rule", [("--rtol", 0.5), ("--seconds", 1e-9)])
def test_the_first_model_decides_where_a_measurement_stops_and_pairs_stay(capsys, checkpoints, tmp_path, rule):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, LANGUAGE.vocab_size, (200, 4)))
    data = ("--data", tmp_path / "ids.npy", "--mask-id", "9", "--batch-size", "16", *rule)
    document = as_json(capsys, "compare", checkpoints / "a", checkpoints / "b", *data)
    first, second = (estimates["trace"] for estimates in document["models"].values())
    assert (first["samples"], first["num_predictions"]) == (second["samples"], second["num_predictions"])
    assert first["samples"] < 200


def test_a_rule_that_a_measure_has_no_use_for_is_refused(checkpoints):
    words = ["measure", str(checkpoints / "a"), "--data", str(checkpoints / "ids.npy"), "--mask-id", "9"]
    assert main([*words, "--measures", "squared-norm", "--rtol", "0.1"]) == 2


def test_the_loss_on_token_ids_is_their_cross_entropy(checkpoints):
    inputs = InputConfig(mask_id=9)
    (found,) = evaluate(checkpoints / "a", ["loss"], data=checkpoints / "ids.npy", inputs=inputs)
    loaded = load_model(checkpoints / "a", device="cpu")
    (batch,) = inputs_of(checkpoints).cut(48).batches
    with torch.no_grad():
        logits = loaded.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), batch["labels"].flatten())
    assert found.estimates["loss"].value == pytest.approx(float(expected), rel=1e-5)
    assert found.estimates["loss"].samples == 48


def test_a_model_that_does_not_know_the_language_is_refused(checkpoints):
    with pytest.raises(IsolossError, match="knows 10 ids, and a model of the language 34"):
        evaluate(checkpoints / "a", ["loss"], language="pcfg-laptop")


class Blind(Language):
    """The sentences of a language, and nothing of their probabilities."""

    __hash__ = None  # as a dataclass has it

    def __init__(self):
        self._language = LANGUAGE.build()
        self.max_length = self._language.max_length
        self.set_vocabulary(self._language.vocabulary)

    def sample(self, n, *, generator=None, latent=False):
        return self._language.sample(n, generator=generator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlindConfig(LanguageConfig):
    kind: str = "blind"

    def build(self, progress=None):
        return Blind()


def test_the_loss_of_a_language_without_truth_is_a_cross_entropy_of_its_sentences(checkpoints):
    settings = {"loss_sentences": 4000}
    known, found = (
        evaluate(checkpoints / "a", "loss", language=language, settings=settings)[0].estimates
        for language in (LANGUAGE, BlindConfig())
    )
    assert set(found) == {"loss"}
    assert found["loss"].method == "fresh sentences"
    assert abs(found["loss"].value - known["loss"].value) < 4 * found["loss"].stderr
