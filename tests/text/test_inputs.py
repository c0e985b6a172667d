import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
    RobertaForMaskedLM,
)

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.evaluation.context import language_inputs
from isoloss.lab.languages import resolve
from isoloss.lab.languages.config import CorpusConfig, PCFGConfig
from isoloss.lab.models.lstm import LSTMConfig
from isoloss.model_checks import max_length
from isoloss.run_config import ObjectiveConfig, TrainConfig
from isoloss.text.inputs import check_model, read_inputs
from isoloss.text.tokenizers import load_tokenizer

BERT = BertConfig(vocab_size=66, max_position_embeddings=32)
GPT = GPT2Config(vocab_size=66, n_positions=32, bos_token_id=0, eos_token_id=0)
HALF = ObjectiveConfig(masking="fraction", fraction=0.5)
CLS, SEP, MASK = 3, 4, 64
NO_CHECKPOINT = "no/check/point"


def read(data, *, config=BERT, kind="masked", **options):
    named = {"checkpoint": NO_CHECKPOINT, "max_length": getattr(config, "max_position_embeddings", None)}
    return read_inputs(data, config=config, kind=kind, **{**named, **options})


def whole(inputs):
    return {name: torch.cat([batch[name] for batch in inputs.batches]) for name in inputs.batches[0]}


@pytest.fixture
def save(tmp_path):
    def to_file(array, name="ids.npy"):
        np.save(tmp_path / name, array)
        return tmp_path / name

    return to_file


@pytest.fixture
def text(tmp_path, words):
    draw = np.random.default_rng(0)
    documents = [" ".join(draw.choice(words, size)) for size in draw.integers(1, 30, 50)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


@pytest.fixture
def bos(tmp_path, words):
    """A tokenizer folder as causal models have: words by white space, a bos before each text, no mask, no padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({"<s>": 0, "<unk>": 1} | {w: i for i, w in enumerate(words, 2)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "bos"
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)
    return str(folder)


# --- token ids


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, ">i4"])
def test_causal_rows_of_ids(save, dtype):
    rows = np.arange(60).reshape(12, 5)
    inputs = read(save(rows.astype(dtype)), config=GPT, kind="causal", batch_size=5)
    assert [len(batch["labels"]) for batch in inputs.batches] == [5, 5, 2]
    found = whole(inputs)
    assert set(found) == {"input_ids", "attention_mask", "labels"}
    assert all(tensor.dtype == torch.int64 for tensor in found.values())
    assert found["input_ids"].tolist() == found["labels"].tolist() == rows.tolist()
    assert found["attention_mask"].all()
    assert (inputs.num_sequences, inputs.num_predicted) == (12, 48)
    assert inputs.description.startswith("all 12 sequences of 5 tokens in ")


def test_negative_ids_are_padding(save):
    rows = np.array([[5, 6, 7, 8], [5, 6, -1, -100], [9, 8, 7, -1]])
    for pad in (None, 9):
        config = GPT2Config(vocab_size=66, n_positions=32, pad_token_id=pad, bos_token_id=0, eos_token_id=0)
        found = whole(inputs := read(save(rows), config=config, kind="causal"))
        assert found["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
        assert found["input_ids"].tolist() == np.where(rows < 0, pad or 0, rows).tolist()
        assert found["labels"].tolist() == np.where(rows < 0, -100, rows).tolist()
        assert inputs.num_predicted == 3 + 1 + 2


def test_masked_rows_of_ids(save):
    rows = np.random.default_rng(0).integers(5, 60, (400, 10))
    rows[::2, 7:] = -1
    inputs = read(save(rows), mask_id=MASK, masking=HALF, batch_size=7)
    found = whole(inputs)
    predicted = found["labels"] != -100
    ids = torch.from_numpy(rows)
    assert (found["input_ids"] == MASK).equal(predicted)
    assert found["labels"][predicted].equal(ids[predicted])
    assert found["input_ids"][~predicted & (ids >= 0)].equal(ids[~predicted & (ids >= 0)])
    assert found["attention_mask"].equal((ids >= 0).long())
    assert not predicted[ids < 0].any()
    assert predicted.any(dim=1).all()
    n = int((ids >= 0).sum())
    assert inputs.num_predicted == int(predicted.sum())
    assert (
        abs(inputs.num_predicted / n - 0.5) < 4 * 0.5 / n**0.5 + 0.008
    )  # + at least one in each row: 2^-7 / 7 at most
    assert int((whole(read(save(rows), mask_id=MASK))["labels"] != -100).sum()) == 400  # one a sequence


def test_a_stream_of_ids_is_cut_to_length(save):
    found = whole(inputs := read(save(np.arange(50)), config=GPT, kind="causal", length=8))
    assert found["input_ids"].tolist() == np.arange(48).reshape(6, 8).tolist()
    assert inputs.num_sequences == 6
    assert whole(read(save(np.arange(48).reshape(8, 6)), config=GPT, kind="causal", length=9))["labels"].shape == (8, 6)


def test_rows_are_drawn_uniformly_and_by_the_seed(save):
    rows = np.repeat(np.arange(50)[:, None], 4, axis=1)
    path = save(rows)
    counts = np.zeros(50)
    for seed in range(400):
        inputs = read(path, config=GPT, kind="causal", num_sequences=10, seed=seed)
        drawn = whole(inputs)["input_ids"][:, 0].numpy()
        assert len(set(drawn)) == inputs.num_sequences == 10
        counts[drawn] += 1
    # counts of each row are binomial with p = 1/5, and negatively correlated
    statistic = ((counts - 80) ** 2 / (80 * 0.8)).sum() * 49 / 50
    assert abs(statistic - 49) < 4 * np.sqrt(2 * 49)
    assert inputs.description == f"10 sequences of 4 tokens drawn from the 50 in {path}"
    again = read(path, config=GPT, kind="causal", num_sequences=10, seed=399, batch_size=3)
    assert whole(again)["input_ids"].equal(whole(inputs)["input_ids"])


def test_fewer_rows_than_asked_for_are_said(save):
    inputs = read(save(np.ones((3, 4), int)), config=GPT, kind="causal", num_sequences=10)
    assert inputs.num_sequences == 3
    assert "all 3 sequences of 4 tokens" in inputs.description
    assert inputs.description.endswith("(up to 10 would be taken)")
    exactly = read(save(np.ones((3, 4), int)), config=GPT, kind="causal", num_sequences=3)
    assert exactly.num_sequences == 3
    assert "asked for" not in exactly.description


def test_masks_follow_the_seed_and_not_the_batches(save):
    path = save(np.random.default_rng(0).integers(5, 60, (100, 12)))
    first = whole(read(path, mask_id=MASK, masking=HALF, seed=3, batch_size=100))
    for batch_size, seed, same in ((7, 3, True), (7, 4, False)):
        other = whole(read(path, mask_id=MASK, masking=HALF, seed=seed, batch_size=batch_size))
        assert other["labels"].equal(first["labels"]) == same


# --- text


def test_masked_text_is_packed_between_cls_and_sep(text, vocab):
    tokenizer = load_tokenizer(str(vocab))
    stream = [i for line in text.read_text().splitlines() for i in tokenizer(json.loads(line)["text"]).input_ids[1:-1]]
    expected = [[CLS, *stream[i : i + 8], SEP] for i in range(0, len(stream) - 7, 8)]
    for given in (str(vocab), tokenizer):
        found = whole(read(text, tokenizer=given, length=10, masking=HALF))
        shown = torch.where(found["labels"] == -100, found["input_ids"], found["labels"])
        assert shown.tolist() == expected
        assert (found["labels"][:, [0, -1]] == -100).all()  # [CLS] and [SEP] are never predicted
        assert (found["input_ids"][found["labels"] != -100] == MASK).all()


def test_special_ids_of_the_tokenizer_hold_for_arrays_too(save, vocab):
    rows = np.tile([CLS, 5, 2, 6, SEP, 0], (300, 1))  # 2 is [UNK], 0 is [PAD]
    with_tokenizer = whole(read(save(rows), tokenizer=str(vocab), masking=HALF))["labels"] != -100
    assert with_tokenizer.any(dim=0).tolist() == [False, True, False, True, False, False]
    assert (whole(read(save(rows), mask_id=MASK, masking=HALF))["labels"] != -100).any(dim=0).all()


def test_causal_text_has_what_the_tokenizer_adds(text, bos):
    tokenizer = load_tokenizer(bos)
    stream = [i for line in text.read_text().splitlines() for i in tokenizer(json.loads(line)["text"]).input_ids]
    assert stream.count(0) == 50
    found = whole(read(text, tokenizer=bos, config=GPT, kind="causal", length=16))
    n = len(stream) // 16
    assert found["input_ids"].tolist() == np.array(stream[: 16 * n]).reshape(n, 16).tolist()


def test_the_checkpoints_own_tokenizer_is_used(text, bos, vocab, save, tmp_path):
    folder = tmp_path / "checkpoint"
    load_tokenizer(str(vocab)).save_pretrained(folder)
    own = whole(read(text, checkpoint=str(folder), length=8))
    assert own["labels"].equal(whole(read(text, tokenizer=str(vocab), length=8))["labels"])
    assert (whole(read(save(np.full((4, 3), 9)), checkpoint=str(folder)))["input_ids"] == MASK).sum() == 4
    assert (whole(read(save(np.full((4, 3), 9)), checkpoint=str(folder), mask_id=60))["input_ids"] == 60).sum() == 4


def test_a_damaged_tokenizer_is_not_taken_for_none(text, vocab, save, tmp_path):
    folder = tmp_path / "checkpoint"
    load_tokenizer(str(vocab)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")
    message = r"checkpoint/tokenizer.json is not a readable JSON file: .*"
    with pytest.raises(IsolossError, match=f"{message}; give --tokenizer FOLDER, or token ids as a .npy file"):
        read(text, checkpoint=str(folder))
    with pytest.warns(IsolossWarning, match=f"{message}; so it is not known which tokens are special"):
        read(save(np.full((4, 3), 9)), checkpoint=str(folder), mask_id=60)


# --- refusals


def test_arrays_that_will_not_do(save, tmp_path):
    def fails(message, array, **options):
        with pytest.raises(IsolossError, match=message):
            read(save(array), **{"config": GPT, "kind": "causal", "length": 4} | options)

    good = np.ones((3, 4), int)
    fails(r"ids.npy holds float64, not integers", np.ones((3, 4)))
    fails(r"not integers", np.ones((3, 4), bool))
    fails(r"3 dimensions", np.ones((3, 4, 5), int))
    fails(r"0 dimensions", np.array(3))
    fails(r"shape \(3,\)\) does not hold one sequence of 4 tokens", np.ones(3, int))
    fails(r"shape \(0, 4\)\) does not hold one", np.ones((0, 4), int))
    fails(r"shape \(4, 0\)\) does not hold one", np.ones((4, 0), int))
    fails(r"token id 66, and no/check/point knows 66 ids, 0 to 65", good * 66)
    fails(r"token id 9223372036854775807", np.full((3, 4), 2**63 - 1))
    fails(r"holds 9223372036854775808, which is not a token id", np.full((3, 4), 2**63, np.uint64))
    fails(r"row 1 of .* has a token after a negative id", np.array([[1, 2, 3], [1, -1, 3]]))
    fails(r"row of 1 tokens, in which there is nothing to predict", np.array([[1, 2, 3], [1, -1, -1]]))
    fails(r"row of 0 tokens", np.array([[1, 2], [-1, -1]]), kind="masked", config=BERT, mask_id=MASK)
    fails(r"have 33 tokens and no/check/point takes 32 at most", np.ones((3, 33), int))
    fails(r"number of sequences is 0", good, num_sequences=0)
    fails(r"batch size is 0", good, batch_size=0)
    fails(r"length is 0", good, length=0)
    (tmp_path / "bad.npy").write_bytes(b"nonsense")
    with pytest.raises(IsolossError, match=r"bad.npy is not a readable .npy file"):
        read(tmp_path / "bad.npy", config=GPT, kind="causal")
    np.save(tmp_path / "objects.npy", np.array([[1], "x"], dtype=object))
    with pytest.raises(IsolossError, match=r"objects.npy is not a readable"):
        read(tmp_path / "objects.npy", config=GPT, kind="causal")


def test_masked_models_need_a_mask(save, text, bos, tmp_path):
    path = save(np.ones((3, 4), int))
    with pytest.raises(IsolossError, match=r"no/check/point is a masked model, .* give --mask-id"):
        read(path)
    with pytest.raises(IsolossError, match="give --mask-id"):
        read(text, tokenizer=bos, length=8)
    assert read(text, tokenizer=bos, length=8, mask_id=65).num_sequences > 9
    for mask_id in (66, -1):
        with pytest.raises(IsolossError, match=rf"mask's id is {mask_id}; .* knows the ids 0 to 65"):
            read(path, mask_id=mask_id)


def test_text_that_will_not_do(text, vocab, tmp_path):
    with pytest.raises(IsolossError, match=r"no tokenizer 'no/check/point': .*; give --tokenizer FOLDER, or token ids"):
        read(text)
    with pytest.raises(IsolossError, match="there is no tokenizer"):
        read(text, tokenizer="no/such/tokenizer")
    with pytest.raises(IsolossError, match=r"there is no data .*nowhere"):
        read(tmp_path / "nowhere", tokenizer=str(vocab))
    with pytest.raises(IsolossError, match="length is 2; with"):
        read(text, tokenizer=str(vocab), length=2)
    with pytest.raises(IsolossError, match=r"have 33 tokens and .* takes 32 at most: give a smaller --length"):
        read(text, tokenizer=str(vocab), length=33)
    with pytest.raises(IsolossError, match="shorter than one sequence of 9999 tokens"):
        read(text, tokenizer=str(vocab), length=9999)
    with pytest.raises(IsolossError, match=r"token id 6., and .* are the data and the tokenizer this model's"):
        read(text, tokenizer=str(vocab), config=BertConfig(vocab_size=50), length=8, mask_id=3)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(IsolossError, match="there is no text"):
        read(tmp_path / "empty.txt", tokenizer=str(vocab))


@pytest.mark.parametrize(("positions", "length"), [(32, 32), (20, 20), (128, 128), (512, 128)])
def test_rows_are_as_long_as_the_model_takes_but_no_longer_than_128(save, positions, length):
    config = BertConfig(vocab_size=66, max_position_embeddings=positions)
    found = read(save(np.arange(1000) % 60), config=config, mask_id=MASK)
    assert whole(found)["input_ids"].shape == (1000 // length, length)


def test_a_model_without_a_longest_sequence_gets_rows_of_128(save):
    found = read(save(np.arange(1000) % 60), config=LSTMConfig(vocab_size=66), mask_id=MASK)
    assert whole(found)["input_ids"].shape == (7, 128)


def test_longest_sequence_of_a_roberta(save):
    config = RobertaConfig(
        vocab_size=66, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=20, pad_token_id=1,
    )  # fmt: skip
    model = RobertaForMaskedLM(config).eval()
    options = {"config": config, "mask_id": MASK, "max_length": max_length(model)}
    longest = read(save(np.full((2, 18), 9)), **options)
    assert torch.isfinite(model(**longest.batches[0]).loss)
    with pytest.raises(IsolossError, match="takes 18 at most"):
        read(save(np.full((2, 19), 9)), **options)
    with pytest.raises((IndexError, RuntimeError), match="out of"):  # as the model itself has no room for it
        model(torch.full((1, 19), 9))


# --- a run's own language


def test_inputs_of_a_grammar(save):
    config = TrainConfig(language=PCFGConfig(levels=2, stop_probability=0.3), objective=HALF)
    inputs = language_inputs(config.language.build(), config.objective, num_sequences=50, seed=1, batch_size=20)
    assert [len(batch["labels"]) for batch in inputs.batches] == [20, 20, 10]
    found, language = whole(inputs), config.language.build()
    predicted = found["labels"] != -100
    assert (inputs.num_sequences, inputs.num_predicted) == (50, int(predicted.sum()))
    assert (found["input_ids"] == language.mask_id).equal(predicted)
    tokens = torch.where(predicted, found["labels"], found["input_ids"])
    lengths = found["attention_mask"].sum(dim=1)
    assert torch.isfinite(language.log_prob(tokens, lengths)).all()  # sentences of the language
    again, other = (
        whole(language_inputs(config.language.build(), config.objective, num_sequences=50, seed=seed, batch_size=20))
        for seed in (1, 2)
    )
    assert again["labels"].equal(found["labels"])
    assert not other["labels"].equal(found["labels"])
    with pytest.raises(IsolossError, match="number of sequences is 0"):
        language_inputs(config.language.build(), config.objective, num_sequences=0, seed=1)


def test_inputs_of_a_corpus_are_held_out(text, vocab, monkeypatch, tmp_path):
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    language = resolve(str(text), tokenizer=str(vocab), length=8)
    assert isinstance(language, CorpusConfig)
    corpus = language.build()
    inputs = language_inputs(language.build(), ObjectiveConfig(), num_sequences=1000, seed=0)
    found = whole(inputs)
    assert torch.where(found["labels"] == -100, found["input_ids"], found["labels"]).equal(corpus.held_out().tokens)
    total = corpus.num_held_out
    assert inputs.description == f"all {total} held-out sequences of the run's corpus (up to 1,000 would be taken)"
    few = language_inputs(language.build(), ObjectiveConfig(), num_sequences=2, seed=0)
    assert (few.num_sequences, few.description) == (2, f"2 of the {total} held-out sequences of the run's corpus")


# --- the real thing


def test_a_trained_llama_predicts_what_it_writes(shared_data, tmp_path):
    folder = shared_data / "stories260K" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        drawn = model.generate(torch.full((4, 1), 1), max_new_tokens=63, do_sample=False)
        np.save(tmp_path / "story.npy", drawn.numpy())
        inputs = read(tmp_path / "story.npy", config=model.config, kind="causal", checkpoint=str(folder))
        assert 0 < float(model(**inputs.batches[0]).loss) < 1.5  # a uniform guess has 6.2
    with pytest.raises(IsolossError, match="hf holds no tokenizer that transformers can load; give --tokenizer FOLDER"):
        read(shared_data / "wikitext-2", config=LlamaConfig(), kind="causal", checkpoint=str(folder))


# --- documents and batches


def test_rows_of_text_know_the_document_they_begin_in(text, vocab):
    tokenizer = load_tokenizer(str(vocab))
    lines = text.read_text().splitlines()
    known = list(dict.fromkeys(lines))  # equal texts are one document
    of_token = [known.index(line) for line in lines for _ in tokenizer(json.loads(line)["text"]).input_ids[1:-1]]
    expected = [of_token[i] for i in range(0, len(of_token) - 7, 8)]
    inputs = read(text, tokenizer=str(vocab), length=10, masking=HALF, batch_size=7)
    assert whole(inputs)["documents"].tolist() == expected
    masked = "; 50 % of the tokens masked, always by the mask token"
    assert inputs.description.endswith(f"in {text}, from {len(set(expected))} documents{masked}")
    drawn = read(text, tokenizer=str(vocab), length=10, masking=HALF, num_sequences=60, seed=1)
    assert set(whole(drawn)["documents"].tolist()) <= set(expected)
    shown = whole(drawn)
    tokens = torch.where(shown["labels"] == -100, shown["input_ids"], shown["labels"]).tolist()
    everything = whole(inputs)
    every_row = torch.where(everything["labels"] == -100, everything["input_ids"], everything["labels"]).tolist()
    assert [expected[every_row.index(row)] for row in tokens] == shown["documents"].tolist()


def test_few_documents_are_no_clusters_and_that_is_said(text, bos, save, tmp_path):
    lines = text.read_text().splitlines()
    short = tmp_path / "few.jsonl"
    short.write_text("\n".join(lines[:9]))
    few = read(short, tokenizer=bos, config=GPT, kind="causal", length=8)
    assert "documents" not in few.batches[0]
    assert few.description.endswith(": errors are for these texts alone")
    short.write_text("\n".join(lines[:14]))
    assert "documents" in read(short, tokenizer=bos, config=GPT, kind="causal", length=8).batches[0]
    short.write_text("\n".join([*lines[:9], *lines[:9]]))  # copies tell nothing new
    assert "documents" not in read(short, tokenizer=bos, config=GPT, kind="causal", length=8).batches[0]
    ids = read(save(np.full((30, 4), 9)), config=GPT, kind="causal")
    assert "documents" not in ids.batches[0]


def test_the_pool_has_all_rows_as_they_are(text, vocab, save):
    ids = np.random.default_rng(0).integers(0, 60, (2500, 6))
    ids[ids[:, 3] < 5, 3:] = -1
    inputs = read(save(ids), config=GPT, kind="causal", num_sequences=100)
    batches = list(inputs.auxiliary_sample)
    assert [len(batch["input_ids"]) for batch in batches] == [1024, 1024, 452]
    found = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    assert torch.equal(torch.where(found["attention_mask"] == 1, found["input_ids"], -1), torch.from_numpy(ids))
    assert set(found) == {"input_ids", "attention_mask"}
    assert inputs.shuffled(0).cut(7).auxiliary_sample is inputs.auxiliary_sample

    inputs = read(text, tokenizer=str(vocab), length=10, masking=HALF, num_sequences=40)
    (batch,) = inputs.auxiliary_sample
    shown = whole(inputs)
    tokens = torch.where(shown["labels"] == -100, shown["input_ids"], shown["labels"])
    rows = torch.cat([batch["input_ids"], batch["documents"][:, None]], dim=1).tolist()
    assert all(row in rows for row in torch.cat([tokens, shown["documents"][:, None]], dim=1).tolist())
    assert len(rows) == int(inputs.description.split(" drawn from the ")[1].split(" ")[0])

    few = read(text, tokenizer=str(vocab), length=10, masking=HALF, num_sequences=10)  # of less than 20 documents
    assert "documents" not in few.batches[0]
    assert "documents" not in next(iter(few.auxiliary_sample))


def test_cutting_changes_only_the_batches(text, vocab):
    inputs = read(text, tokenizer=str(vocab), length=10, masking=HALF, batch_size=7)
    cut = inputs.cut(4)
    assert [len(batch["labels"]) for batch in cut.batches[:-1]] == [4] * (len(cut.batches) - 1)
    for name, value in whole(inputs).items():
        assert whole(cut)[name].equal(value)
    with pytest.raises(IsolossError, match="batch size is 0"):
        inputs.cut(0)


def test_shuffling_keeps_documents_together_and_their_rows_in_order(text, vocab):
    inputs = read(text, tokenizer=str(vocab), length=5, masking=HALF, batch_size=7)
    before, after = whole(inputs), whole(inputs.shuffled(1))
    order = after["documents"].unique_consecutive().tolist()
    assert sorted(order) == before["documents"].unique().tolist()
    assert order != sorted(order)
    for name, value in before.items():
        expected = torch.cat([value[before["documents"] == document] for document in order])
        assert after[name].equal(expected)
    assert not whole(inputs.shuffled(2))["documents"].equal(after["documents"])


def test_batches_fit_the_logits_and_the_activations(save):
    ids = np.random.default_rng(0).integers(0, 60, (20, 11))  # 10 predicted tokens a row
    inputs = read(save(ids), config=GPT2Config(vocab_size=66, n_positions=32), kind="causal")
    wide = GPT2Config(vocab_size=2**20, n_embd=8, n_layer=1, n_head=1)
    assert inputs.fitting_batch_size(wide) == 2**28 // (4 * 2**20 * 10)  # 256 MiB of float32
    deep = GPT2Config(vocab_size=66, n_embd=2**10, n_layer=64, n_head=1)
    assert inputs.fitting_batch_size(deep) == 2**30 // (4 * 20 * 2**10 * 64 * 11)
    assert inputs.fitting_batch_size(GPT2Config(vocab_size=66, n_embd=8, n_layer=1, n_head=1)) == 256
    assert inputs.fitting_batch_size(GPT2Config(vocab_size=2**28, n_embd=8, n_layer=1, n_head=1)) == 1


def test_inputs_are_checked_for_other_models(save):
    inputs = read(save(np.full((3, 8), 50)), config=GPT, kind="causal")
    check_model(inputs, GPT, 32, "same")
    with pytest.raises(IsolossError, match="the data has the token id 50, and small knows 40 ids"):
        check_model(inputs, GPT2Config(vocab_size=40, bos_token_id=0, eos_token_id=0), None, "small")
    with pytest.raises(IsolossError, match="8 tokens and short takes 4 at most"):
        check_model(inputs, GPT, 4, "short")


def test_text_that_the_tokenizer_does_not_know_is_told_and_never_all_of_a_row(tmp_path, vocab, bos):
    path = tmp_path / "text.txt"
    path.write_text("zz " * 12 + "av bv zz " * 4)  # rows of [CLS], six tokens, [SEP]: two without a word
    found = read(path, tokenizer=str(vocab), length=8)
    assert found.num_sequences == 2
    assert found.description.startswith("all 2 sequences of 8 tokens in ")
    assert (
        "66.7 % of the tokens unknown to the tokenizer, 2 sequences of unknown tokens alone left out"
        in found.description
    )
    assert (whole(found)["input_ids"][:, 1:7] != 2).any(dim=1).all()
    causal = read(path, config=GPT, kind="causal", tokenizer=bos, length=8)
    assert ", 66.7 % of the tokens unknown to the tokenizer" in causal.description
    assert causal.num_sequences == 3  # <s> and 24 tokens, all of them predicted
    path.write_text("zz " * 40)
    with pytest.raises(IsolossError, match="holds no token that the tokenizer knows and that could be masked"):
        read(path, tokenizer=str(vocab), length=8)


@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_bytes_per_predicted_token(tmp_path, bos, vocab, words, kind):
    """Five rows of one text each: a causal model predicts all but the bos, and spaces go with the words after them."""
    documents = [" ".join(words[i : i + 4]).upper() + " \N{SNOWMAN}" for i in range(0, 20, 4)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    if kind == "causal":
        inputs = read(tmp_path / "text.jsonl", config=GPT, kind=kind, tokenizer=bos, length=6)
        assert inputs.num_predicted == 25
        assert inputs.bytes_per_token == pytest.approx(sum(len(text.encode()) for text in documents) / 25)
        assert inputs.cut(2).shuffled(0).bytes_per_token == inputs.bytes_per_token
    else:
        every = ObjectiveConfig(masking="fraction", fraction=1.0)
        inputs = read(tmp_path / "text.jsonl", tokenizer=str(vocab), length=7, masking=every)
        assert inputs.num_predicted == 20  # unknown tokens are special, and no model is asked for them
        known = [text.removesuffix(" \N{SNOWMAN}") for text in documents]
        assert inputs.bytes_per_token == pytest.approx(sum(map(len, known)) / 20)


def test_of_token_ids_the_text_is_not_known(save):
    assert read(save(np.ones((3, 4), int)), config=GPT, kind="causal").bytes_per_token is None


def test_of_a_long_text_only_a_part_is_read(tmp_path, words, bos, monkeypatch):
    monkeypatch.setattr("isoloss.text.inputs._MOST_BYTES", 20_000)
    monkeypatch.setattr("isoloss.text.documents.BLOCK_BYTES", 1000)
    # a word for each part of the file
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"text": f"{word} " * 20}) + "\n" for word in words for _ in range(40)))

    def some(seed, number=20):
        return read(file, config=GPT, kind="causal", tokenizer=bos, length=16, num_sequences=number, seed=seed)

    of_all = read(file, config=GPT, kind="causal", tokenizer=bos, length=16)
    found, again, other = some(0), some(0), some(1)
    assert found.description.startswith("20 sequences of 16 tokens drawn from the ")
    assert "MB of" in found.description and "MB of" not in of_all.description  # noqa: PT018
    assert found.num_held == pytest.approx(of_all.num_held * 20_000 / file.stat().st_size, rel=0.1)
    assert whole(found)["input_ids"].equal(whole(again)["input_ids"])
    assert not whole(found)["input_ids"].equal(whole(other)["input_ids"])
    # the parts are drawn from all over the file
    first, last = (whole(found)["input_ids"][row, 8] - 2 for row in (0, -1))
    assert last - first > 30
    # many rows need more of it
    assert some(0, 200).num_held > 2 * found.num_held
