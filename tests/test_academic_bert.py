"""Checkpoints of Academic Budget BERT, the code that the paper trains with."""

import json

import pytest
import torch
from safetensors.torch import save_file

import academic_models
from academic_models import WORDS, make_config, random_weights, save
from isoloss import evaluate, load_language, load_model
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.languages.exact import all_sentences
from isoloss.text.inputs import read_inputs

IDS = torch.tensor([[2, 7, 4, 9, 3, 0], [2, 11, 6, 4, 5, 3]])
MASK = (IDS != 0).long()
TYPES = {"post-ln": "bert", "pre-ln": "roberta-prelayernorm"}


@pytest.mark.parametrize("mode", ["pre-ln", "post-ln"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_the_logits_are_those_of_the_definition(tmp_path, mode, is_fused):
    config = make_config(mode, fused_linear_layer=is_fused)
    weights = random_weights(config)
    folder = save(tmp_path / "model", config, weights)
    loaded = load_model(folder, device="cpu")
    assert (loaded.kind, loaded.model.config.model_type) == ("masked", TYPES[mode])
    with torch.no_grad():
        found = loaded.model(input_ids=IDS, attention_mask=MASK).logits
    expected = academic_models.logits(weights, config, IDS, MASK)
    present = MASK.bool()
    torch.testing.assert_close(found[present], expected[present], rtol=0, atol=1e-5)
    # the stored bias is not part of the function, and so not of its flatness
    fixed = {name for name, value in loaded.model.named_parameters() if not value.requires_grad}
    assert fixed == {"lm_head.bias" if mode == "pre-ln" else "cls.predictions.bias"}


def test_safetensors_are_read_like_a_bin_file(tmp_path):
    config = make_config("pre-ln")
    weights = random_weights(config)
    one = load_model(save(tmp_path / "one", config, weights), device="cpu").model
    other = save(tmp_path / "other", config, weights)
    (other / "pytorch_model.bin").unlink()
    save_file({key: value.clone() for key, value in weights.items()}, other / "model.safetensors")
    for name, value in load_model(other, device="cpu").model.state_dict().items():
        assert torch.equal(value, one.state_dict()[name])


@pytest.mark.parametrize("name", ["cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"])
def test_shared_weights_may_be_stored_once_and_names_have_prefixes(tmp_path, name):
    config = make_config("pre-ln", pad_token_id=None)
    weights = random_weights(config)
    once = {f"module.{key}": value for key, value in weights.items() if key != name}
    with pytest.warns(IsolossWarning, match="prefixes of torch.compile or DataParallel"):
        model = load_model(save(tmp_path / "model", config, once), device="cpu").model
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=MASK).logits
    expected = academic_models.logits(weights, config, IDS, MASK)
    torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()], rtol=0, atol=1e-5)


def missing(folder, weights):
    del weights["bert.encoder.layer.1.PreAttentionLayerNorm.bias"]


def unexpected(folder, weights):
    weights["bert.encoder.layer.1.attention.gate"] = torch.zeros(3)


def of_another_shape(folder, weights):
    weights["bert.embeddings.LayerNorm.bias"] = torch.zeros(3)


def untied(folder, weights):
    weights["cls.predictions.decoder.weight"] = torch.zeros(16, 12)


def codes(folder, weights):
    weights["bert.embeddings.LayerNorm.bias"] = torch.zeros(12, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_ln_mode": "deep-norm"}, "encoder_ln_mode 'deep-norm'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type 'rms_norm'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"sparse_mask_prediction": False}, "sparse_mask_prediction False"),
        (missing, "cannot be loaded: .*Missing key.*layer.1.attention.LayerNorm.bias"),
        (unexpected, "cannot be loaded: .*Unexpected key.*attention.gate"),
        (of_another_shape, "cannot be loaded: .*size mismatch for roberta_prelayernorm.embeddings.LayerNorm.bias"),
        (untied, r"word_embeddings.weight and another cls\.predictions\.decoder\.weight"),
        (codes, r"LayerNorm\.bias in torch\.int8, not in floating-point"),
        ({"num_attention_heads": None}, "lacks num_attention_heads in its config.json"),
    ],
)
def test_what_would_be_another_function_is_refused(tmp_path, change, message):
    config = make_config("pre-ln")
    weights = random_weights(config)
    if isinstance(change, dict):
        config = {name: value for name, value in {**config, **change}.items() if value is not None}
    else:
        change(tmp_path, weights)
    with pytest.raises(IsolossError, match=message):
        load_model(save(tmp_path / "model", config, weights), device="cpu")


def test_a_bin_file_of_another_model_is_still_refused(tmp_path):
    config = make_config("post-ln")
    folder = save(tmp_path / "model", config, random_weights(config))
    del config["encoder_ln_mode"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(IsolossError, match="only as a pickle"):
        load_model(folder, device="cpu")


RULES = "S A C 2\nS B D 1\nA x 1\nA y 2\nB y 1\nC z 3\nC w 1\nD w 1\n"


@pytest.fixture
def framed(tmp_path):
    """A grammar between [CLS] and [SEP], and a checkpoint whose vocabulary has its words in another order."""
    (tmp_path / "rules.txt").write_text(RULES)
    language = load_language(f"framed:{tmp_path / 'rules.txt'}")
    words = ("zebra", "z", "y", "x", "w", "apple")
    assert set(language.vocabulary) <= {*words, "[CLS]", "[SEP]"}
    config = make_config("pre-ln")
    weights = random_weights(config)
    return language, (*WORDS, *words), config, weights, save(tmp_path / "model", config, weights, words)


def test_a_language_whose_words_it_knows(framed, tmp_path):
    language, vocabulary, config, weights, folder = framed
    renamed = load_model(folder, device="cpu", words=language.vocabulary).model
    sentences = language.sample(6, generator=torch.Generator().manual_seed(0))
    tokens, present = sentences.tokens.clone(), sentences.present()
    tokens[:, 1] = language.mask_id
    names = [*language.vocabulary, "[PAD]", "[MASK]"]
    ids = torch.tensor([vocabulary.index(name) for name in names])
    with torch.no_grad():
        found = renamed(input_ids=tokens, attention_mask=present.long()).logits[..., : len(names)]
    expected = academic_models.logits(weights, config, ids[tokens], present.long())[..., ids]
    torch.testing.assert_close(found[present], expected[present], rtol=0, atol=1e-5)
    with pytest.raises(IsolossError, match=r"vocab\.txt lacks words of the language: unheard"):
        load_model(folder, device="cpu", words=["unheard"])
    # a line ends at \n alone
    (folder / "vocab.txt").write_text("\n".join(["\u2028", *vocabulary]))
    moved = load_model(folder, device="cpu", words=language.vocabulary).model.get_input_embeddings().weight
    stored = weights["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(moved[0], stored[1 + vocabulary.index(language.vocabulary[0])])
    (folder / "vocab.txt").write_text("\n".join([*map(str, range(9)), *vocabulary]))
    with pytest.raises(IsolossError, match=r"more words in its vocab\.txt than the vocab_size"):
        load_model(folder, device="cpu", words=language.vocabulary)
    save(folder, config, weights, vocabulary[len(WORDS) :])

    settings = {"loss_sentences": "all", "num_sequences": 200}
    (loss, trace) = evaluate(folder, ["loss", "trace"], language=f"framed:{tmp_path / 'rules.txt'}", settings=settings)
    every, probabilities = all_sentences(language)
    by_hand = 0.0
    for position in (1, 2):  # of [CLS] a b [SEP]
        originals = ids[every.tokens]
        read = originals.clone()
        read[:, position] = vocabulary.index("[MASK]")
        logs = academic_models.logits(weights, config, read, torch.ones_like(read))[:, position].log_softmax(dim=-1)
        by_hand -= 0.5 * float(probabilities @ logs.gather(1, originals[:, position, None])[:, 0].double())
    assert loss.estimates["loss"].value == pytest.approx(by_hand, abs=1e-5)
    assert trace.estimates["trace"].value > 0


def shard(path, **changes):
    """Write a shard as the data code of Academic Budget BERT does: compressed, padded with zeros."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'isoloss[hdf5]'")
    columns = {
        "input_ids": [[2, 4, 7, 3, 0, 0], [2, 8, 4, 4, 3, 0], [2, 9, 10, 11, 4, 3]],
        "input_mask": [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1] * 6],
        "segment_ids": [[0] * 6] * 3,
        "masked_lm_positions": [[1, 0], [2, 3], [4, 0]],
        "masked_lm_ids": [[5, 0], [6, 9], [12, 0]],
        **changes,
    }
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values, dtype="i4", compression="gzip")
    return path


def test_masked_ids_of_hdf5_files(tmp_path):
    config = make_config("pre-ln")
    folder = save(tmp_path / "model", config, random_weights(config))
    model = load_model(folder, device="cpu").model
    options = {"checkpoint": str(folder), "config": model.config, "kind": "masked"}
    (batch,) = read_inputs(shard(tmp_path / "train.hdf5"), **options).batches
    assert batch["input_ids"].tolist()[1] == [2, 8, 4, 4, 3, 0]
    assert batch["attention_mask"].sum(dim=1).tolist() == [4, 5, 6]
    some = -100
    assert batch["labels"].tolist() == [
        [some, 5, some, some, some, some],
        [some, some, 6, 9, some, some],
        [some, some, some, some, 12, some],
    ]
    found = evaluate(folder, "hessian-trace", data=tmp_path / "train.hdf5", settings={"hessian_group_size": 1})
    assert found[0].estimates["hessian-trace"].num_predictions == 4
    drawn = read_inputs(tmp_path / "train.hdf5", num_sequences=2, **options)
    assert drawn.num_predicted in (2, 3)
    with pytest.raises(IsolossError, match=r"masked token ids, and .* predicts next tokens"):
        read_inputs(tmp_path / "train.hdf5", **{**options, "kind": "causal"})
    for changes, message in (
        ({"segment_ids": [[0, 0, 0, 1, 0, 0]] * 3}, "pairs of sentences"),
        ({"masked_lm_positions": [[1, 0], [2, 9], [4, 0]]}, "not a readable HDF5 file .*out of bounds"),
        ({"masked_lm_positions": [[1, -1], [2, 3], [4, 0]]}, "a masked position in the padding, or a negative number"),
        ({"masked_lm_positions": [[5, 0], [2, 3], [4, 0]]}, "a masked position in the padding"),
        ({"masked_lm_ids": [[16, 0], [6, 9], [12, 0]]}, "has the token id 16"),
        ({"input_mask": [[1] * 6]}, r"its shapes are \(3, 6\), \(1, 6\)"),
    ):
        with pytest.raises(IsolossError, match=message):
            read_inputs(shard(tmp_path / "wrong.h5", **changes), **options)
