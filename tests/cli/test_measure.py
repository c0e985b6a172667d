"""`isoloss measure` as a user meets it: runs, other checkpoints, stopping, interruptions, and what it refuses."""

import dataclasses
import json
import re
import shutil

import datasets
import numpy as np
import pytest
import speaking
import torch
from speaking import as_json, trace_of
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from isoloss.cli.main import main
from isoloss.flatness import InterruptedEstimate, fisher_trace
from isoloss.lab.evaluation import context as contexts
from isoloss.runs import Run, checkpoint_of
from isoloss.statistics.estimate import rounded
from isoloss.statistics.ratio import ClusteredRatio
from isoloss.text import inputs
from isoloss.text.tokenizers import load_tokenizer

VOCAB = 20
COMMON = ["the", "a", "of", "is", "in", "and", "to", "not", "if", "it", "with"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Causal checkpoints a, b (near to a) and c (wider), a masked one, and token ids."""
    path = tmp_path_factory.mktemp("checkpoints")
    for name, size in (("a", 16), ("c", 32)):
        llama(size).save_pretrained(path / name)
    near = llama(16)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter += 0.002
    near.save_pretrained(path / "b")
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    BertForMaskedLM(config).save_pretrained(path / "bert")
    np.save(path / "ids.npy", np.random.default_rng(0).integers(0, VOCAB, (200, 8)))
    return path


def llama(size, vocab=VOCAB):
    torch.manual_seed(0)
    sizes = {"hidden_size": size, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, max_position_embeddings=16, bos_token_id=None, eos_token_id=None, **sizes)
    ).eval()


SETTINGS = ("--loss-sentences", "64", "--num-sequences", "32", "--num-train", "64", "--num-test", "64")
MEASURES = ("--measures", "loss", "trace", "probe-root", *SETTINGS, "--probe-seeds", "2", "--probe-epochs", "2")


def estimates(document):
    return {(e["measure"], e["step"]): e["estimates"] for e in document["evaluations"]}


def kept(run):
    return sorted(path.name for path in run.joinpath("evaluations").glob("*.json"))


def call(capsys, *words, status=0):
    measures = () if "--measures" in words or "--control" in words else ("--measures", "trace")
    return speaking.call(capsys, "measure", *words, *measures, status=status)


def refusal(capsys, *words):
    measures = () if "--measures" in words else ("--measures", "trace")
    return speaking.refusal(capsys, "measure", *words, *measures)


# --- one model -------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(tmp_path):
    """A masked model with a tokenizer that knows a few words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *COMMON]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path / "bert")
    load_tokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_text_in_another_column_or_in_a_dataset_is_the_same_text(capsys, reader, tmp_path):
    texts = [" ".join(np.random.default_rng(i).choice(COMMON, 20)) for i in range(20)]
    rows = [*({"id": i, "body": text} for i, text in enumerate(texts)), {"id": 20, "body": None}]
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "body.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    how = ("--length", "10", "--json")
    wanted = trace_of(json.loads(call(capsys, reader, "--data", tmp_path / "plain.jsonl", *how).out))
    for data in (
        (tmp_path / "body.jsonl", "--column", "body"),
        (f"hf:{tmp_path / 'saved'}", "--column", "body", "--split", "test"),
    ):
        out, err = call(capsys, reader, "--data", *data, *how)
        found = trace_of(json.loads(out))
        assert (found["value"], found["stderr"]) == (wanted["value"], wanted["stderr"])
        assert err.count("1 null in place of a text left out (first: ") == 1
    saved = f"hf:{tmp_path / 'saved'}"
    assert "has no column 'text'; it has id, body" in refusal(capsys, reader, "--data", saved, "--split", "test")
    assert "has no split 'train'; it has test" in refusal(capsys, reader, "--data", saved, "--column", "body")
    np.save(tmp_path / "ids.npy", np.zeros((4, 8), dtype=int))
    ids = ("--data", tmp_path / "ids.npy", "--column", "body")
    assert "ids.npy holds token ids, which have no column and no split" in refusal(capsys, reader, *ids)


def test_an_exact_number_is_printed_to_five_digits_and_kept_whole_in_json(capsys, folder):
    words = (folder / "a", "--data", folder / "ids.npy", "--measures", "squared-norm")
    (evaluation,) = json.loads(call(capsys, *words, "--json").out)["evaluations"]
    value = evaluation["estimates"]["squared-norm"]
    parameters = LlamaForCausalLM.from_pretrained(folder / "a").parameters()
    assert value["value"] == pytest.approx(sum(float(p.detach().double().square().sum()) for p in parameters))
    assert len(str(value["value"]).replace(".", "")) > 8
    assert call(capsys, *words).out.startswith(f"squared-norm: {value['value']:.5g} ")


def test_text_that_comes_with_python(capsys, reader):
    err = call(capsys, reader, "--data", "python:docs", "--num-sequences", "16", "--length", "32").err
    assert "16 sequences of 32 tokens drawn from" in err
    assert "in python:docs" in err
    assert "there is no dataset python:dos; did you mean docs?" in refusal(capsys, reader, "--data", "python:dos")


def test_the_output_says_what_was_measured(capsys, folder):
    out, err = call(capsys, folder / "a", "--data", folder / "ids.npy", "--by-parameter", "--batch-size", "30")
    assert "LlamaForCausalLM, causal, attention sdpa; all 200 sequences of 8 tokens" in err
    lines = out.splitlines()
    assert lines[0].startswith("trace: ")
    assert lines[1].endswith("over 200 sequences")
    assert "1,400 predicted tokens in 200 sequences" in lines[2]
    assert "Fisher, exact expectation over labels, 1 probe per token; cpu, float32, attention sdpa" in lines[3]
    assert "model.embed_tokens.weight" in out


def test_the_largest_shares_and_the_trace_without_embeddings_are_printed(capsys, folder):
    data = ("--data", folder / "ids.npy", "--mask-id", "19")
    trace = trace_of(json.loads(call(capsys, folder / "bert", *data, "--json").out))
    details = trace["details"]
    assert [name.split(".")[2] for name in details["embeddings"]] == [
        "word_embeddings",
        "position_embeddings",
        "token_type_embeddings",
    ]
    rest = sum(share for name, share in trace["by_parameter"].items() if name not in details["embeddings"])
    assert details["without_embeddings"] == pytest.approx(rest, rel=1e-9)
    lines = call(capsys, folder / "bert", *data).out.splitlines()
    table = lines[lines.index("largest parts by parameter") + 2 :]
    largest = sorted(trace["by_parameter"].items(), key=lambda item: -item[1])[:3]
    names, values = [name for name, _ in largest], [value for _, value in largest]
    errors = [trace["by_parameter_stderr"][name] for name in names]
    names.append("without embeddings")
    values.append(rest)
    errors.append(details["without_embeddings_stderr"])
    assert len(table) == 4
    for line, name, value, error in zip(table, names, values, errors, strict=True):
        share = f"{100 * value / trace['value']:.1f} %"
        assert line.split() == [*name.split(), *rounded(value, error).split(), *share.split()]


def test_what_is_not_measured_is_read_for_its_tokens(capsys, folder, tmp_path):
    loud = LlamaForCausalLM.from_pretrained(folder / "a")
    with torch.no_grad():  # less of a gradient comes to large embeddings
        loud.get_input_embeddings().weight[:4] = 20 * loud.get_input_embeddings().weight[4:8]
    loud.save_pretrained(tmp_path / "loud")
    draws = np.random.default_rng(1)  # sequences of loud words or of the others
    ids = np.where(draws.random((4000, 1)) < 0.5, draws.integers(0, 4, (4000, 8)), draws.integers(4, VOCAB, (4000, 8)))
    np.save(tmp_path / "ids.npy", ids)
    data = ("--data", tmp_path / "ids.npy", "--num-sequences", "400")
    details = trace_of(json.loads(call(capsys, tmp_path / "loud", *data, "--json").out))["details"]
    assert (details["sequences"], details["auxiliary_sequences"], details["auxiliary_directions"]) == (400, 4000, 16)
    assert details["auxiliary_bigrams"]
    sentence = (
        "adjusted with the tokens of all 4,000 sequences, to lower the error (control variates: how probable each is "
        "after the one before "
        "and 16 directions of their mean embedding"
    )
    assert sentence in " ".join(call(capsys, tmp_path / "loud", *data).out.split())
    masked = (folder / "bert", *data, "--mask-id", "19", "--masking", "one", "--json")
    assert trace_of(json.loads(call(capsys, *masked).out))["details"]["auxiliary_sequences"] == 4000
    assert "adjusted" not in call(capsys, folder / "a", "--data", folder / "ids.npy").out  # all that there is


def test_a_model_without_input_embeddings_is_measured_alone(capsys, folder, tmp_path, monkeypatch):
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, VOCAB, (4000, 8)))
    data = ("--data", tmp_path / "ids.npy", "--num-sequences", "100", "--json")
    monkeypatch.setattr(contexts, "input_embeddings", lambda model: None)
    details = trace_of(json.loads(call(capsys, folder / "a", *data).out))["details"]
    assert (details["sequences"], details["auxiliary_sequences"]) == (100, 0)
    found = json.loads(call(capsys, folder / "a", folder / "b", *data).out)
    assert [trace_of(found, model)["details"]["auxiliary_sequences"] for model in (0, 1)] == [0, 0]


def test_sequences_unlike_the_rest_are_said(capsys, folder, tmp_path, monkeypatch):
    ids = np.random.default_rng(1).integers(0, VOCAB // 2, (4000, 8))
    np.save(tmp_path / "ids.npy", ids)
    monkeypatch.setattr(inputs.Rows, "__iter__", lambda rows: iter([{"input_ids": torch.from_numpy(ids) + VOCAB // 2}]))
    sentence = "not adjusted to the rest of the data by its tokens: those that were measured differ from them"
    out = call(capsys, folder / "a", "--data", tmp_path / "ids.npy", "--num-sequences", "400").out
    assert sentence in " ".join(out.split())


def test_a_tolerance_stops_early_or_says_that_it_was_not_reached(capsys, folder):
    words = (folder / "a", "--data", folder / "ids.npy", "--batch-size", "16")
    stopped = trace_of(json.loads(call(capsys, *words, "--rtol", "0.5", "--json").out))
    assert stopped["details"]["ended"] == "rtol"
    assert stopped["details"]["sequences"] == 64
    above = "the error is above --rtol 1e-06: it takes more sequences"
    assert f"{above} in --data" in " ".join(call(capsys, *words, "--rtol", "1e-6").out.split())  # there are no others
    fewer = call(capsys, *words, "--rtol", "1e-6", "--num-sequences", "100").out
    assert f"{above}, with --num-sequences" in " ".join(fewer.split())
    held = len(np.load(folder / "ids.npy"))
    assert fewer.endswith(f"--batch-size 16 --rtol 1e-6 --measures trace --num-sequences {held}\n")
    timed = trace_of(json.loads(call(capsys, *words, "--seconds", "1e-9", "--json").out))
    assert (timed["details"]["ended"], timed["samples"]) == ("seconds", 64)


def test_more_documents_are_what_helps_once_all_are_measured(capsys, reader, tmp_path):
    drawn = np.random.default_rng(0).choice(COMMON, (12, 44))
    documents = [{"text": " ".join(words)} for words in drawn]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, documents)))
    words = (reader, "--data", tmp_path / "text.jsonl", "--length", "8", "--rtol", "1e-6")
    for number, helps in ((60, "more documents in --data"), (11, "more sequences, with --num-sequences")):
        out = call(capsys, *words, "--num-sequences", number).out
        assert f"it takes {helps}" in " ".join(out.split())


def test_inputs_come_in_random_order_where_it_may_stop_early(capsys, folder, tmp_path):
    ids = np.load(folder / "ids.npy")
    np.save(tmp_path / "ids.npy", np.concatenate([ids % 5, ids]))  # the first half is of five tokens alone
    words = (folder / "a", "--data", tmp_path / "ids.npy", "--batch-size", "64", "--json")
    whole = trace_of(json.loads(call(capsys, *words).out))
    part = trace_of(json.loads(call(capsys, *words, "--seconds", "1e-9").out))
    assert part["details"]["sequences"] == 64
    assert abs(part["value"] - whole["value"]) < 3 * part["stderr"]
    order = json.loads(
        call(capsys, folder / "a", "--data", tmp_path / "ids.npy", "--num-sequences", "400", "--json").out
    )
    assert trace_of(order)["value"] == whole["value"]


def test_an_interruption_prints_what_is_done_and_the_estimate_so_far(capsys, folder, monkeypatch):
    def stopped(model, batches, rtol=None, **_):
        raise InterruptedEstimate(fisher_trace(model, batches[:1], causal=True))

    import isoloss.flatness as package

    monkeypatch.setattr(package, "fisher_trace", stopped)
    words = (folder / "a", "--data", folder / "ids.npy", "--batch-size", "50", "--measures", "squared-norm", "trace")
    out, err = call(capsys, *words, status=130)
    assert f"interrupted while trace of {folder / 'a'} was measured" in err
    assert out.startswith("squared-norm: ")
    assert f"trace of {folder / 'a'} so far: " in out
    assert "over 50 sequences" in out
    document = json.loads(call(capsys, *words, "--json", status=130).out)
    assert [evaluation["measure"] for evaluation in document["evaluations"]] == ["squared-norm"]
    assert document["interrupted"]["estimate"]["samples"] == 50


def test_each_measure_says_what_makes_its_error_smaller(capsys, folder):
    words = (folder / "a", "--data", folder / "ids.npy", "--rtol", "1e-6", "--num-probes", "2", "--measures")

    def remark(*names):
        return " ".join(call(capsys, *words, *names).out.split())

    above = "the error is above --rtol 1e-06: it takes more"
    inputs = "more sequences in --data for the part of the inputs"
    assert f"{above} probes, with --num-probes, and {inputs}" in remark("noise-sharpness")
    assert f"{above} probes, with --num-probes " in remark("spectral-density", "--spectrum-steps", "2") + " "
    assert f"{above} sequences in --data" in remark("largest-eigenvalue")
    assert "it takes no rtol" in refusal(capsys, *words, "squared-norm")


def test_a_negative_value_can_reach_its_tolerance(capsys, folder, monkeypatch):
    import isoloss.flatness as package

    ids = torch.randint(0, VOCAB, (8, 4))
    found = fisher_trace(llama(16), [{"input_ids": ids, "labels": ids}], causal=True)
    negative = dataclasses.replace(found, value=-found.value, stderr=0.01 * found.value)
    monkeypatch.setattr(package, "hessian_trace", lambda *_, rtol=None, **__: negative)
    words = (folder / "a", "--data", folder / "ids.npy", "--measures", "hessian-trace", "--rtol")
    assert "above --rtol" not in call(capsys, *words, "0.02").out
    assert "above --rtol" in call(capsys, *words, "0.005").out


def test_every_model_has_the_time_for_its_eigenvalues(capsys, folder):
    words = (folder / "a", folder / "b", "--data", folder / "ids.npy", "--measures", "largest-eigenvalue", "--json")
    out, err = call(capsys, *words, "--seconds", "1e-9")
    assert "ended with product 1 with the matrix, before it converged: the values are too small" in err
    evaluations = json.loads(out)["evaluations"]
    details = [evaluation["estimates"]["largest-eigenvalue"]["details"] for evaluation in evaluations]
    assert [(one["ended"], one["iterations"], one["converged"]) for one in details] == [("seconds", 1, False)] * 2


@pytest.mark.slow
def test_a_trained_llama_agrees_with_plain_gradients_of_every_label(capsys, tmp_path, shared_data):
    checkpoint = shared_data / "stories260K" / "hf"
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 512, (4, 4)))
    np.save(tmp_path / "ids.npy", ids.numpy())
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    parameters = list(model.parameters())
    exact = []
    for row in ids:
        for log_p in model(row[None]).logits[0, :-1].log_softmax(dim=-1):
            norms = [
                sum(float((g * g).sum()) for g in torch.autograd.grad(value, parameters, retain_graph=True))
                for value in log_p
            ]
            exact.append(float((log_p.detach().double().exp() * torch.tensor(norms, dtype=torch.float64)).sum()))
    words = (checkpoint, "--data", tmp_path / "ids.npy", "--num-probes", "100", "--json")
    values = [trace_of(json.loads(call(capsys, *words, "--seed", seed).out))["value"] for seed in range(8)]
    # the inputs are fixed, so the seeds differ by their signs alone; 5.4 is the 99.9 % point of Student's t with 7
    assert abs(np.mean(values) - np.mean(exact)) < 5.4 * np.std(values, ddof=1) / 8**0.5
    assert np.std(values, ddof=1) < 0.1 * np.mean(exact)


def test_several_models_stand_in_one_table(capsys, folder, tmp_path):
    for name, step in (("a", 1000), ("b", 200)):
        shutil.copytree(folder / name, tmp_path / "out" / f"checkpoint-{step}")
    words = (tmp_path / "out", "--data", folder / "ids.npy", "--measures", "loss", "trace")
    out, err = call(capsys, *words, "--by-layer")
    early, late = (str(tmp_path / "out" / f"checkpoint-{step}") for step in (200, 1000))
    assert f"out: 2 checkpoints, {early} to {late}\n" in err
    assert [line.split()[0] for line in out.splitlines()[2:6]] == [late, early] * 2
    assert out.count("by layer") == 2
    document = json.loads(call(capsys, *words, "--json").out)
    assert [(each["model"], each["measure"]) for each in document["evaluations"]] == [
        (model, measure) for model in (early, late) for measure in ("loss", "trace")
    ]


def test_a_control_says_what_rescaling_changes(capsys, folder):
    out = call(capsys, folder / "a", "--data", folder / "ids.npy", "--num-sequences", "32", "--control").out
    assert f"control of {folder / 'a'}: a random exact rescaling multiplies the trace by" in " ".join(out.split())


def test_a_checkpoint_of_a_run_may_be_measured_otherwise_on_its_language(capsys, run):
    checkpoint = run / "checkpoints" / "step-10"
    words = (checkpoint, "--num-sequences", "256", "--batch-size", "32")
    trace = trace_of(json.loads(call(capsys, *words, "--rtol", "0.9", "--json").out))
    assert (trace["details"]["ended"], trace["details"]["sequences"]) == ("rtol", 64)
    assert kept(run) == []
    assert "is a run" in refusal(capsys, run, "--rtol", "0.9")
    assert "leave out steps" in refusal(capsys, checkpoint, "--steps", "10")


def test_a_checkpoint_is_the_run_at_its_step(capsys, run):
    checkpoint = run / "checkpoints" / "step-10"
    alone = as_json(capsys, "measure", checkpoint, *MEASURES)
    assert {e["model"] for e in alone["evaluations"]} == {str(checkpoint)}
    assert kept(run) == ["loss@step-10.json", "probe-root@step-10.json", "trace@step-10.json"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.json")}
    of_run = as_json(capsys, "measure", run, "--steps", "10", *MEASURES)
    assert of_run["evaluations"] == [{**e, "model": str(run)} for e in alone["evaluations"]]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.json")} == before


def test_a_trace_is_printed_with_and_without_embeddings(capsys, run):
    capsys.readouterr()
    assert main(["measure", str(run), "--steps", "30", "--measures", "trace", *SETTINGS]) == 0
    printed = capsys.readouterr().out
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    trace = Run(run).evaluation("trace", 30).estimates["trace"]
    rest = [value for name, value in trace.by_parameter.items() if name not in trace.details["embeddings"]]
    assert 0 < len(rest) < len(trace.by_parameter)
    expected = f"{trace} ({rounded(sum(rest), trace.details['without_embeddings_stderr'])} without embeddings)"
    assert expected in printed
    assert expected in shown


def test_a_run_knows_its_checkpoints(run):
    assert checkpoint_of(run / "checkpoints" / "step-10") == (Run(run), 10)
    for path in (run, run / "checkpoints", run / "checkpoints" / "step-20"):
        assert checkpoint_of(path) is None


# --- refusals --------------------------------------------------------------------------------------------------------


def test_bad_models_get_one_sentence(capsys, folder, tmp_path):
    data = ("--data", folder / "ids.npy")
    broken = llama(16)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "nan")
    assert "NaN or infinite" in refusal(capsys, tmp_path / "nan", *data)
    config = BertConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    assert "language-modeling head" in refusal(capsys, tmp_path / "classifier", *data)


def test_a_sequence_that_decides_the_error_is_told(capsys, folder, monkeypatch):
    words = (folder / "a", "--data", folder / "ids.npy", "--num-sequences", 64)
    assert "squared error" not in call(capsys, *words).out
    monkeypatch.setattr(ClusteredRatio, "leading", 0.92)
    assert "one of the sequences makes up 92 % of the squared error" in call(capsys, *words).out
    both = " ".join(call(capsys, folder / "b", *words).out.split())
    assert "makes up 92 % of the squared error of the trace of " in both
    assert "So is that of the trace of " in both
    assert "squared error" not in call(capsys, *words[:-1], 31).out  # of so few, one may


def test_the_document_that_decides_the_error_is_named(capsys, reader, tmp_path):
    texts = [" ".join(np.random.default_rng(i).choice(COMMON, 20)) for i in range(40)]
    texts[22] = " ".join(["the"] * 400)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = (reader, "--data", tmp_path / "text.jsonl", "--length", "10")
    for early in ((), ("--rtol", "1e-6")):  # in the order of the text, and in random order
        out = " ".join(call(capsys, *words, *early).out.split())
        assert re.search(r'one of the documents \([^,]*text\.jsonl:23, "the the [^"]*"\) makes up', out)


def test_shares_by_layer_add_up(capsys, folder):
    words = (folder / "a", "--data", folder / "ids.npy", "--num-sequences", 64)
    document = trace_of(json.loads(call(capsys, *words, "--json").out))
    assert sum(document["by_layer"].values()) == pytest.approx(document["value"], rel=1e-12)
    table = call(capsys, *words, "--by-layer").out
    assert all(layer in table for layer in ("by layer", "model.layers.0", "model.embed_tokens", "model.norm"))
