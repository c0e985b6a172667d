"""`isoloss sample` as a user sees it: what is printed, what the JSON holds, and stored languages."""

import json
import math

import pytest
import speaking
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab import languages
from isoloss.lab.languages.config import PRESETS


def output(capsys, *words):
    capsys.readouterr()
    assert main(["sample", *map(str, words)]) == 0
    return capsys.readouterr().out


def document(capsys, *words):
    return json.loads(output(capsys, *words, "--json"))


def refusal(capsys, *words):
    return speaking.refusal(capsys, "sample", *words, alone=True)


# --- what is printed


def test_brackets(capsys):
    lines = output(capsys, "brackets-8", "--num-sentences", "1", "--conditionals", "2").splitlines()
    sentence = lines[2]
    assert sorted(sentence.split()) == ["<"] * 4 + [">"] * 4
    words = sentence.split()
    hidden = [" ".join([*words[:i], "___", *words[i + 1 :]]) for i in (2, 6)]
    zeros = " ".join(["0.000"] * 8)
    assert lines == [
        "brackets-8: as many < as >, in any order; sentences of 8 tokens",
        "",
        sentence,
        f"    log-probability -4.2485 nats; entropy of each token {zeros} nats",
        "",
        "the first sentence with one token masked: the likeliest tokens there, and the true one",
        f"    {hidden[0]}",
        f"        {words[2]} 1.000; the true one: {words[2]} 1.000",
        f"    {hidden[1]}",
        f"        {words[6]} 1.000; the true one: {words[6]} 1.000",
        "",
        "entropy of a sentence: 4.2485 nats (exact)",
        "entropy of a masked token given all others: 0 nats (exact)",
        "    the loss of a perfect model where one token of each sentence is masked",
    ]


def test_the_entropy_of_varying_lengths_is_that_of_the_length_and_of_the_rest(capsys):
    out = output(capsys, "dyck-2", "--num-sentences", "1", "--conditionals", "0")
    found = languages.entropy(PRESETS["dyck-2"][0].build())
    assert out.startswith("dyck-2: a grammar of 14 symbols over 4 tokens; sentences of 2 to 16 tokens\n")
    assert "masked:" not in out
    assert f"entropy of a sentence: {found.sentence.value:.5g} nats (exact)\n" in out
    parts = f"{found.length.value:.5g} of its length + {found.given_length.value:.5g} given its length"
    assert f"    = {parts}\n" in out


def test_an_estimate_has_its_error(capsys):
    out = output(capsys, "pcfg-varied", "--num-sentences", "1", "--entropy-sentences", "300")
    assert out.count("(mean over 300 drawn sentences)") == 2
    assert out.count("±") == 3  # of a sentence, given its length, of a masked token
    assert (
        "entropy of"
        not in output(capsys, "pcfg-varied", "--num-sentences", "1", "--entropy-sentences", "0").splitlines()[-1]
    )


def test_states(capsys):
    out = output(capsys, "hmm-laptop", "--states", "--num-sentences", "3")
    rows = document(capsys, "hmm-laptop", "--states", "--num-sentences", "3")["sentences"]
    language = PRESETS["hmm-laptop"][0].build()
    for row in rows:
        states = [language.states.index(state) for state in row["states"]]
        for token, state in zip(row["tokens"], states, strict=True):
            assert language.emission[state, token] > 0
        assert f"    states {' '.join(row['states'])}\n" in out
    assert "states" not in document(capsys, "hmm-laptop", "--num-sentences", "3")["sentences"][0]


# --- the JSON


@pytest.mark.parametrize("name", ["pcfg-varied", "hmm-laptop", "dyck-2"])
def test_conditionals_are_those_of_every_substitution(capsys, name):
    found = document(capsys, name, "--num-sentences", "2", "--conditionals", "4")
    language = PRESETS[name][0].build()
    first = found["sentences"][0]["tokens"]
    number = min(4, len(first))
    assert number > 1
    positions = [row["position"] for row in found["conditionals"]]
    assert positions == sorted(set(positions))
    assert len(positions) == number
    for row in found["conditionals"]:
        joint = {}
        for token in range(language.vocab_size):
            changed = [*first[: row["position"]], token, *first[row["position"] + 1 :]]
            try:
                joint[token] = math.exp(language.log_prob(torch.tensor([changed]), torch.tensor([len(first)])))
            except IsolossError:
                joint[token] = 0.0
        expected = sorted((p / sum(joint.values()) for p in joint.values() if p), reverse=True)[:5]
        assert [entry["probability"] for entry in row["likeliest"]] == pytest.approx(expected, rel=1e-9)
        for entry in (*row["likeliest"], row["masked"]):
            share = joint[entry["token"]] / sum(joint.values())
            assert entry["probability"] == pytest.approx(share, rel=1e-9)
            assert entry["word"] == language.vocabulary[entry["token"]]
        assert row["masked"]["token"] == first[row["position"]]


def test_more_conditionals_than_tokens_are_all_of_them(capsys):
    found = document(capsys, "brackets-8", "--conditionals", "100")["conditionals"]
    assert [row["position"] for row in found] == list(range(8))


def test_the_entropy_is_that_of_the_language(capsys):
    found = document(capsys, "hmm-laptop", "--num-sentences", "1", "--seed", "7", "--entropy-sentences", "200")
    expected = languages.entropy(PRESETS["hmm-laptop"][0].build(), num_sentences=200, seed=7)
    assert found["entropy"] == json.loads(json.dumps(expected.to_dict()))
    assert document(capsys, "hmm-laptop", "--num-sentences", "1", "--entropy-sentences", "0")["entropy"] is None


def test_text_has_no_truth(capsys, tmp_path, vocab, words, monkeypatch):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    lines = [json.dumps({"body": " ".join(words[i:] + words[:i])}) for i in range(20)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    text = (tmp_path / "text.jsonl", "--tokenizer", vocab, "--column", "body", "--length", "8", "--num-sentences", "2")
    found = document(capsys, *text)
    assert [len(row["words"]) for row in found["sentences"]] == [8, 8]
    assert (found["conditionals"], found["entropy"]) == ([], None)
    lines = output(capsys, *text).splitlines()
    assert "text in 66 token ids; sequences of 8 tokens, " in lines[0]
    assert len(lines) == 4
    for options, name in (
        (["--conditionals", "2"], "--conditionals"),
        (["--entropy-sentences", "50"], "--entropy-sentences"),
    ):
        assert f"leave out {name}" in refusal(capsys, *text, *options)
    assert "keep its text" in refusal(capsys, *text, "--save", tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_causal_model_is_asked_for_no_more_than_wanted(capsys, tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 12}
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, **sizes)).save_pretrained(tmp_path / "gpt")
    words = (tmp_path / "gpt", "--length", "4", "--num-sentences", "2")
    found = document(capsys, *words)
    assert (len(found["conditionals"]), found["entropy"]) == (1, None)
    assert "conditional_entropy_nats" not in found["sentences"][0]
    lines = output(capsys, *words, "--entropy-sentences", "20").splitlines()
    assert lines[3] == f"    log-probability {found['sentences'][0]['log_prob_nats']:.4f} nats"
    assert lines[-2].endswith("(mean over 20 drawn sentences)")
    assert "keep its checkpoint" in refusal(capsys, *words, "--save", tmp_path / "a.safetensors")


# --- stored languages


@pytest.mark.parametrize("name", ["dyck-2", "hmm-laptop"])
def test_a_stored_language_samples_and_trains_as_the_language_itself(capsys, tmp_path, name):
    path = tmp_path / "my.safetensors"
    out = output(capsys, name, "--num-sentences", "3", "--save", path)
    assert out.endswith(f"\nthe language is in {path}\n")
    again = output(capsys, path, "--num-sentences", "3")
    assert out.split("\n", 1)[1].startswith(again.split("\n", 1)[1])
    assert document(capsys, name, "--save", path)["saved"] == str(path)
    losses = []
    for language in (name, path):
        run = tmp_path / f"run-{len(losses)}"
        small = ["--size", "d16", "--steps", "3", "--batch-size", "8", "--threads", "1", "--json"]
        assert main(["train", str(run), "--language", str(language), *small]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss_nats"])
    assert losses[0] == losses[1]


def test_another_file_is_not_replaced_unasked(capsys, tmp_path):
    path = tmp_path / "my.safetensors"
    output(capsys, "brackets-8", "--save", path)
    before = path.read_bytes()
    assert "exists and holds something else" in refusal(capsys, "dyck-2", "--save", path)
    assert path.read_bytes() == before
    output(capsys, "dyck-2", "--save", path, "--overwrite")
    assert path.read_bytes() != before


def test_a_symbol_that_is_left_out_is_one_line_on_stderr(capsys, tmp_path):
    path = tmp_path / "g.txt"
    path.write_text("S A A 1\nA a 1\nA b 1\nX rare 1\n")
    assert main(["sample", str(path), "--num-sentences", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {word for sentence in json.loads(out)["sentences"] for word in sentence["words"]} <= {"a", "b"}
    message = "left out 1 symbol that cannot be reached from S: X (line 4); and 1 token that nothing else emits: rare"
    assert err.splitlines() == [f"isoloss sample: warning: {path}: {message}"]
