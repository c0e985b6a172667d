"""`isoloss.compare` against losses, bytes, rises and probes that are taken one by one."""

import contextlib
import dataclasses
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from tokenizers import normalizers
from torch.nn import functional as F

import small_checkpoints as small
from isoloss import compare, pretrain
from isoloss.comparison.models import TITLES
from isoloss.comparison.page import comparison_page
from isoloss.comparison.traces import ComparisonError, InterruptedComparison
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import loss_rises
from isoloss.flatness._rescaling.apply import rescaled_at_random
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.languages.config import BracketsConfig, PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.seeds import generator
from isoloss.statistics.comparison import times
from isoloss.statistics.estimate import rounded
from isoloss.statistics.ratio import ratio, ratio_estimate
from isoloss.text.inputs import read_inputs
from isoloss.transfer.probe import fit_linear_probe
from isoloss.transfer.text_sources import own_text_task
from isoloss.transfer.text_tasks import read_examples

pytestmark = pytest.mark.slow


def without_first_space():
    """Pieces of SentencePiece with no space put before a text, which would stand for no byte of it."""
    tokenizer = small.sentence_pieces()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


HOW = InputConfig(length=small.LENGTH)
KINDS = {
    "bytes, next tokens": (small.byte_level, small.gpt2),
    "pieces, next tokens": (without_first_space, small.llama),
    "bytes, masked": (small.byte_level, small.bert),
    "pieces, masked": (without_first_space, small.bert),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in small.documents(60)))
    return path


@pytest.fixture(scope="module", params=KINDS)
def measured(request, text):
    """Two models in memory, what they read, and their comparison."""
    of_tokenizer, of_model = KINDS[request.param]
    tokenizer = of_tokenizer()
    models = {name: of_model(len(tokenizer), seed) for seed, name in enumerate("ab")}
    comparison = compare(models, data=text, tokenizer=tokenizer, inputs=HOW, num_sequences=140)
    kind = "causal" if "next" in request.param else "masked"
    inputs = read_inputs(
        text,
        checkpoint="",
        config=models["a"].config,
        kind=kind,
        tokenizer=tokenizer,
        length=small.LENGTH,
        num_sequences=140,
        masking=HOW.objective("", is_causal=kind == "causal"),
        batch_size=140,
    )
    (batch,) = inputs.batches
    return models, tokenizer, kind, batch, comparison


def losses(model, kind, batch):
    """The nats of each sequence."""
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.transpose(1, 2).double(), labels, reduction="none", ignore_index=-100).sum(dim=1)


def predicted_bytes(tokenizer, kind, batch):
    """The bytes of text that the predicted tokens of each sequence stand for, by decoding with and without them."""

    single = tokenizer("☃").input_ids[-3:]  # a byte each, which a sequence may begin or end between

    def size(ids):
        decoded = tokenizer.decode([i for i in ids if i not in single], skip_special_tokens=True)
        assert "\ufffd" not in decoded
        return len(decoded.encode()) + sum(i in single for i in ids)

    whole = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    before = tokenizer("blue").input_ids  # a space at the start of a text is not shown
    sizes = []
    for ids, labels in zip(whole.tolist(), batch["labels"].tolist(), strict=True):
        if kind == "causal":
            sizes.append(size([*before, *ids[1:]]) - size(before))
        else:
            predicted = [i for i, label in zip(ids, labels, strict=True) if label != -100]
            sizes.append(sum(size([*before, i]) - size(before) for i in predicted))
    return torch.tensor(sizes)


def by_document(batch, values):
    numbers = torch.unique(batch["documents"], return_inverse=True)[1]
    return torch.zeros(int(numbers.max()) + 1, dtype=torch.float64).index_add_(0, numbers, values.double())


def test_losses_and_their_differences_are_over_documents(measured, text):
    models, _, kind, batch, comparison = measured
    labels = batch["labels"][:, 1:] if kind == "causal" else batch["labels"]
    counts = by_document(batch, (labels != -100).sum(dim=1))
    nats = {name: by_document(batch, losses(model, kind, batch)) for name, model in models.items()}
    for name, sums in nats.items():
        found = comparison.models[name]["loss"]
        assert (found.value, found.stderr) == pytest.approx(ratio(sums, counts), rel=1e-5)
        assert found.samples == len(counts)
        # samples are in the order of the documents' names
        above = (sums - found.value * counts).numpy()
        assert found.influence == pytest.approx(above * found.influence[0] / above[0], rel=0.05)
    texts = [" ".join(json.loads(line)["text"].split()) for line in text.read_text().splitlines()]
    numbers = sorted(set(batch["documents"].tolist()))
    assert list(comparison.documents) == [f'{text}:{i + 1}, "{texts[i][:40]}…"' for i in numbers]
    difference = comparison.difference("loss", "b", "a")
    assert (difference.value, difference.stderr) == pytest.approx(ratio(nats["b"] - nats["a"], counts), rel=1e-4)


def test_bits_per_byte_are_of_the_bytes_that_predicted_tokens_stand_for(measured):
    models, tokenizer, kind, batch, comparison = measured
    sizes = by_document(batch, predicted_bytes(tokenizer, kind, batch))
    for name, model in models.items():
        bits = by_document(batch, losses(model, kind, batch)) / math.log(2)
        found = comparison.models[name]["bits-per-byte"]
        assert found.value == pytest.approx(ratio(bits, sizes)[0], rel=1e-5)
        assert found.unit == "bits per byte"
        # the bytes are given: a difference is as sure as in nats
        loss = comparison.models[name]["loss"]
        assert found.stderr / found.value == pytest.approx(loss.stderr / loss.value)


def test_rises_are_of_64_sequences_drawn_at_random(measured):
    models, _, _, batch, comparison = measured
    rows = torch.randperm(140, generator=generator(0, "few"))[:64].sort().values
    half = {name: value[rows] for name, value in batch.items()}
    for name, model in models.items():
        for rise, expected in loss_rises(model, [half]).items():
            found = comparison.models[name][rise]
            assert found.details["sequences"] == 64
            assert (found.value, found.stderr) == pytest.approx((expected.value, expected.stderr), rel=1e-3, abs=1e-7)


def test_the_seed_decides_the_noise_and_an_eighth_of_many_sequences_has_it():
    ids = torch.randint(0, 64, (640, 8), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids}]
    rises = [compare({"a": small.gpt2(64, 0)}, batches, seed=seed).of("noise-rise")["a"] for seed in (3, 4)]
    assert rises[0].value != rises[1].value
    assert [(rise.details["seed"], rise.details["sequences"]) for rise in rises] == [(3, 80), (4, 80)]


def test_there_is_no_answer_where_much_of_a_model_was_not_rounded():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.known = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8, bias=False)
            self.hidden = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, ids):
            h = self.known(self.table(ids))
            return (h[..., None] * torch.stack(list(self.hidden))).sum(dim=-2)  # a product that nothing shows

    models = {name: Half() for name in "ab"}
    ids = torch.randint(0, 8, (32, 6), generator=torch.Generator().manual_seed(0))
    comparison = compare(models, [{"input_ids": ids, "labels": ids}], causal=True)
    *_, answer, _ = comparison.answers()
    assert (answer.question, answer.holds) == ("More robust at 4 bits?", None)
    assert answer.answer == "No answer: only 50 % of the weights of a's linear maps are rounded"
    assert "Rounded: 64 of 128 weights of linear maps" in str(comparison)


def test_it_says_what_it_is_over_and_is_one_table(measured):
    *_, comparison = measured
    assert comparison.inputs.startswith("140 sequences of 12 tokens drawn from the ")
    out = str(comparison)
    assert out.splitlines()[0].split() == ["a", "b", "second", "minus", "first", "95", "%", "interval"]
    assert [line for line in TITLES.values() if not re.search(rf"^{re.escape(line)}[ ,]", out, re.M)] == []
    assert " documents, not over trainings. Rises, and losses with rounded weights, are over " in out
    assert " documents in 64 of the sequences" in out
    draws = comparison.models["a"]["noise-rise"].details["draws"]
    assert draws >= 40
    assert (
        f". Errors with noise are over 20 groups of documents and {draws} draws, each added and subtracted. Rounded: "
        in out
    )
    rounded = comparison.models["a"]["int4-rise"].details
    assert rounded["rounded_weights"] == rounded["map_weights"] > 0
    assert f". Rounded: {rounded['map_weights']:,} of {rounded['map_weights']:,} weights of linear maps" in out
    assert "<table>" in comparison._repr_html_()
    assert repr(comparison) == "ModelComparison(2 models; flattest: no verdict)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints a and b of GPT-2 with a tokenizer, and SST-2 in small."""
    path, tokenizer = tmp_path_factory.mktemp("checkpoints"), small.byte_level()
    for seed, name in enumerate("ab"):
        small.gpt2(len(tokenizer), seed).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    (path / "sst2").mkdir()
    for split, number in (("train", 60), ("dev", 30)):
        texts = small.documents(2 * number)[number * (split == "dev") :][:number]
        lines = [f"{' '.join(text.split()[:6])}\t{'house' in text.split()[:6]:d}" for text in texts]
        (path / "sst2" / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def unlike(folder, tmp_path_factory):
    """Copies of checkpoint b that differ in their tokenizers alone."""
    path = tmp_path_factory.mktemp("unlike")
    changed = json.loads((folder / "b" / "tokenizer.json").read_text())
    changed["model"]["merges"].reverse()
    more = small.byte_level()
    more.add_tokens(["<more>"], special_tokens=True)
    for name in ("merges", "damaged", "more", "none"):
        shutil.copytree(folder / "b", path / name)
    (path / "merges" / "tokenizer.json").write_text(json.dumps(changed))
    (path / "damaged" / "tokenizer.json").write_text("{")
    more.save_pretrained(path / "more")
    for file in (path / "none").glob("tokenizer*"):
        file.unlink()
    return path


def compared(first, second, data, **options):
    about = {"inputs": HOW, "device": "cpu", "robustness": False, "num_sequences": 12, **options}
    return compare([str(first), str(second)], data=data, **about)


def test_a_rise_alone_is_asked_about(folder, text):
    found = compared(folder / "a", folder / "b", text, measures=["int4-rise"])
    assert [answer.question for answer in found.answers()] == ["Same loss?", "Flatter?", "More robust at 4 bits?"]
    assert found.table()[1][-1][0] == "int4-rise"


def test_tokenizers_that_read_a_text_differently_are_refused_in_both_orders(folder, unlike, text):
    for pair in ((folder / "a", unlike / "merges"), (unlike / "merges", folder / "a")):
        with pytest.raises(IsolossError, match=rf"{pair[0]} and {pair[1]} have different tokenizers \(merge 0 is "):
            compared(*pair, text)
    told = compared(folder / "a", unlike / "merges", text, tokenizer=str(folder / "a"))
    same = compared(folder / "a", folder / "b", text)
    assert [e["loss"].value for e in told.models.values()] == [e["loss"].value for e in same.models.values()]


def test_a_damaged_tokenizer_is_noticed_wherever_it_is(folder, unlike, text, tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(5, 200, (12, 8)))
    for pair in ((folder / "a", unlike / "damaged"), (unlike / "damaged", folder / "a")):
        with pytest.raises(
            IsolossError, match=r"damaged/tokenizer.json is not a readable .*, or give one tokenizer for all"
        ):
            compared(*pair, text)
        with pytest.warns(IsolossWarning, match="so it is not known whether .*damaged reads text as the others do"):
            compared(*pair, tmp_path / "ids.npy")


def test_other_special_tokens_and_none_at_all_do_not_matter(folder, unlike, text):
    expected = compared(folder / "a", folder / "b", text).models[str(folder / "a")]["loss"].value
    for name in ("more", "none"):
        for pair in ((folder / "a", unlike / name), (unlike / name, folder / "a")):
            with (
                pytest.warns(IsolossWarning, match=r"have different special tokens \(<more>\)")
                if name == "more"
                else contextlib.nullcontext()
            ):
                found = compared(*pair, text)
            assert found.models[str(folder / "a")]["loss"].value == expected


def test_the_accuracy_of_a_task_is_the_probe_of_evaluate_and_paired_by_example(folder, text, tmp_path):
    names, where = [str(folder / name) for name in "ab"], (f"sst2={folder / 'sst2'}",)
    about = {"data": text, "inputs": HOW, "device": "cpu"}
    comparison = compare(names, tasks=where, num_sequences=30, robustness=False, **about)
    settings = {"probe_solver": "convex", "probe_pooling": "last", "task_data": where}
    expected = evaluate(names, ["probe-sst2"], settings=settings, output=tmp_path, **about)
    frame = expected.to_pandas()
    accuracies = [evaluation.estimates["accuracy"] for evaluation in expected]
    assert list(frame["model"]) == list(expected.models)
    assert list(frame["value"]) == [accuracy.value for accuracy in accuracies]
    assert list(frame["high95"]) == [accuracy.ci95[1] for accuracy in accuracies]
    for name, evaluations in zip(names, expected, strict=True):
        accuracy = evaluations.estimates["accuracy"]
        found = comparison.models[name]["probe-sst2"]
        assert found.value == pytest.approx(accuracy.value, abs=1e-12)
        assert (found.samples, found.details["majority_rate"]) == (30, accuracy.details["majority_rate"])
        assert found.details["pooling"] == "last"
    assert "sst2: majority class " in str(comparison)
    assert "another pooling, or other training examples, may rank the" in " ".join(str(comparison).split())
    *others, task = comparison.answers()
    assert [answer.question for answer in (*others, task)] == ["Same loss?", "Flatter?", "Better at sst2?"]
    assert task.answer.endswith(", by a probe of the last token")


def test_documents_have_their_names_in_any_order(folder, text):
    influences = []
    for options in ({}, {"seconds": 1e9}):  # the second is of shuffled inputs
        found = compared(folder / "a", folder / "b", text, num_sequences=140, **options)
        loss = found.models[str(folder / "a")]["loss"]
        influences.append(dict(zip(found.documents, loss.influence[: loss.samples], strict=True)))
    plain, shuffled = influences
    assert list(plain) != list(shuffled)
    assert shuffled == pytest.approx(plain, rel=1e-3)


LITTLE = {"inputs": HOW, "num_sequences": 12, "robustness": False}


@pytest.fixture
def reviews(tmp_path):
    """A task of one's own, whose label is in the last word or, of a pair, in the second text."""
    one = [f"the {word} of blue {'vu' if i % 3 else 'und'}\t{i % 3 > 0}" for i, word in enumerate(small.WORDS[:4] * 15)]
    two = [line.replace(" blue ", "\t") for line in one]
    for name, header, lines in (("one", "text\tlabel", one), ("two", "text\tpair\tlabel", two)):
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n")
    return tmp_path


@pytest.mark.parametrize(("right", "wrong"), [(2, 0), (5, 0), (6, 0), (11, 2), (10, 3), (40, 10)])
def test_a_model_is_better_at_a_task_where_an_exact_test_says_so(text, reviews, right, wrong):
    """Of so many test examples, only a's probe is right, and only b's; McNemar's test is a binomial one."""
    tokenizer = small.byte_level()
    models = {name: small.gpt2(len(tokenizer), seed) for seed, name in enumerate("ab")}
    task = [f"mine={reviews / 'one.tsv'}"]
    found = compare(models, data=text, tokenizer=tokenizer, tasks=task, **LITTLE)
    for model, counts in (("a", (right, wrong)), ("b", (wrong, right))):
        correct = [1.0] * counts[0] + [0.0] * counts[1]
        accuracy = ratio_estimate(correct if model == "a" else correct[::-1], unit="accuracy", method="probe")
        details = found.models[model]["probe-mine"].details | {"num_test": right + wrong}
        found.models[model]["probe-mine"] = dataclasses.replace(accuracy, details=details)
    *_, answer = found.answers()
    p_value = binomtest(right, right + wrong).pvalue
    assert f", p {p_value:.2g} by McNemar's test" in answer.detail
    assert answer.holds is (True if p_value < 0.05 else None)
    assert answer.answer.startswith("a, by" if p_value < 0.05 else "No difference shown, by")
    assert ("too few for reliable errors" in found.caption()) is (right + wrong < 20)


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize(("of_model", "pooling"), [(small.gpt2, "last"), (small.bert, "mean")])
def test_a_task_of_ones_own_is_read_by_any_tokenizer(reviews, text, name, of_model, pooling):
    """Pooled states of each text alone, without padding, and a logistic regression on them."""
    tokenizer = small.byte_level()
    tokenizer.pad_token = None  # as GPT-2's
    models = {seed: of_model(len(tokenizer), int(seed)) for seed in "01"}
    path = reviews / f"{name}.tsv"
    found = compare(models, data=text, tokenizer=tokenizer, tasks=[f"mine={path}"], **LITTLE)
    chosen = compare(models, data=text, tokenizer=tokenizer, tasks=[f"mine={path}"], pooling="concatenate", **LITTLE)
    examples = read_examples(own_text_task("mine", str(path)))
    for seed, model in models.items():
        features = []
        for part in (examples.train, examples.test):
            joined = part.texts if part.pairs is None else map("\n".join, zip(part.texts, part.pairs, strict=True))
            with torch.no_grad():
                states = [
                    model.base_model(torch.tensor([tokenizer(each).input_ids])).last_hidden_state for each in joined
                ]
            features.append(torch.cat([state[:, -1] if pooling == "last" else state.mean(dim=1) for state in states]))
        labels = [torch.tensor(part.labels) for part in (examples.train, examples.test)]
        x, y = zip(features, labels, strict=True)
        expected = fit_linear_probe(*x, *y, solver="convex", classes=("False", "True")).accuracy
        accuracy = found.models[seed]["probe-mine"]
        assert (accuracy.value, accuracy.samples) == (pytest.approx(expected.value), 12)
        assert accuracy.details["pooling"] == pooling
        assert accuracy.details["num_features"] == 8
        assert chosen.models[seed]["probe-mine"].details["num_features"] > 8
    assert chosen.answers()[-1].answer.endswith(", by a probe of all tokens")
    words = {"last": "the last token", "mean": "the mean over tokens"}[pooling]
    assert found.answers()[-1].answer.endswith(f", by a probe of {words}")


WRONG = {
    "no label": ("text,class\na,1\n", "mine.csv has no column 'label'; it has text, class"),
    "one label": ("text,label\n" + "a,1\n" * 20, "mine.csv: all 20 examples have the label 1; a task needs two labels"),
    "four examples": ("text,label\na,1\nb,0\nc,1\nd,1\n", "mine.csv has 4 examples, too few to keep one in five"),
    "five examples": ("text,label\na,1\nb,0\nc,1\nd,1\nd,0\n", "mine.csv gives 1 test example; an accuracy with"),
    "no file": (None, "there is no file or folder .*mine.csv"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_is_refused_before_anything_is_measured(folder, text, tmp_path, case):
    content, sentence = WRONG[case]
    if content is not None:
        (tmp_path / "mine.csv").write_text(content)
    names, done = [str(folder / name) for name in "ab"], []
    with pytest.raises(IsolossError, match=f"the task mine cannot be measured: .*{sentence}"):
        compare(names, data=text, tasks=[f"mine={tmp_path / 'mine.csv'}"], progress=lambda *_: done.append(1), **LITTLE)
    assert not done


def test_examples_of_several_tasks_do_not_mix(folder, text, reviews):
    names, where = [str(folder / name) for name in "ab"], (f"sst2={folder / 'sst2'}", f"mine={reviews / 'one.tsv'}")
    found = compare(names, data=text, tasks=where, **LITTLE)
    assert [found.models[names[0]][f"probe-{task}"].samples for task in ("mine", "sst2")] == [12, 30]
    with pytest.raises(IsolossError, match="the task sst2 is named twice"):
        compare(names, data=text, tasks=["sst2", f"sst2={folder / 'sst2'}"])
    with pytest.raises(IsolossError, match="probe_pooling is 'max'; it must be one of"):
        compare(names, data=text, tasks=["sst2"], pooling="max")
    with pytest.raises(IsolossError, match="the first token of a causal model has seen no other"):
        compare(names, data=text, tasks=where[:1], pooling="first")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one language, and one of another."""
    path = tmp_path_factory.mktemp("runs")
    for name, kind, seed in (("a", PCFGConfig, 0), ("b", PCFGConfig, 1), ("other", BracketsConfig, 0)):
        language = kind(levels=2, vocab_size=8) if kind is PCFGConfig else kind(length=4)
        config = TrainConfig(language=language, model=ModelConfig(size="d16"), steps=4, seed=seed)
        pretrain(path / name, config)
    return path


def test_runs_of_a_language_are_compared_on_it(runs):
    names = [str(runs / name) for name in "ab"]
    found = compare(names, tasks=["root"], num_sequences=64, robustness=False)
    assert found.inputs == "64 sentences sampled from the language"
    settings = {"num_sequences": 64, "probe_solver": "convex", "probe_pooling": "mean"}
    expected = {(each.measure, name): each for name, each in _by_model(names, settings)}
    for name in names:
        for mine, (measure, theirs) in {"trace": ("trace", "trace"), "probe-root": ("probe-root", "accuracy")}.items():
            wanted = expected[measure, name].estimates[theirs]
            assert found.models[name][mine].value == pytest.approx(wanted.value, rel=1e-5)


def _by_model(names, settings):
    found = evaluate(names, ["trace", "probe-root"], settings=settings, steps="last")
    return zip(found.models, found, strict=True)


def test_runs_of_other_languages_are_refused(runs, folder):
    for other, sentence in (
        (runs / "other", "are of runs with different languages or objectives: add --data"),
        (folder / "a", "is not a checkpoint of a run, so there is no language to measure it on: add --data"),
    ):
        with pytest.raises(IsolossError, match=sentence):
            compare([str(runs / "a"), str(other)])
    with pytest.raises(IsolossError, match="is measured on its run's language, masked as in its training: leave out"):
        compare([str(runs / name) for name in "ab"], inputs=InputConfig(length=8))
    with pytest.raises(IsolossError, match="the task sst2 cannot be measured: the language has no tokenizer"):
        compare([str(runs / name) for name in "ab"], tasks=["sst2"])


def batches(vocabulary=8):
    ids = torch.randint(0, vocabulary, (20, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids[:10], "labels": ids[:10]}, {"input_ids": ids[10:], "labels": ids[10:]}]


def test_a_model_that_fails_leaves_the_others_measured():
    models = {name: small.gpt2(8, seed) for seed, name in enumerate("abc")}
    with torch.no_grad():
        models["b"].transformer.wpe.weight[0, 0] = math.nan
    with pytest.raises(ComparisonError, match="b: batch 0: the model's logits are NaN or infinite") as failed:
        compare(models, batches())
    assert failed.value.name == "b"
    assert list(failed.value.complete.models) == ["a"]
    alone = failed.value.complete
    assert alone.answers() == []
    assert "int4-rise" in alone.names
    assert "verdict" not in alone.to_dict()


def test_ctrl_c_leaves_the_others_measured():
    def interrupted():
        raise KeyboardInterrupt

    models = {"a": small.gpt2(8, 0), "b": small.gpt2(8, 1), "c": interrupted}
    with pytest.raises(InterruptedComparison) as stop:
        compare(models, batches(), loss_margin=10.0, robustness=False)
    assert list(stop.value.complete.models) == ["a", "b"]
    same_loss, *_ = stop.value.complete.answers()
    assert same_loss.answer.startswith("Yes, within ± 10 nats")


def test_differences_are_in_the_order_of_the_table_whichever_model_is_better():
    models = {"a": small.gpt2(8, 0), "b": small.gpt2(8, 1)}
    for order in ("ab", "ba"):
        comparison = compare({name: models[name] for name in order}, batches(), loss_margin=10.0)
        first, second = order
        same_loss, flatter, robust, quiet = comparison.answers()
        for answer in (same_loss, robust, quiet):
            assert f"{second} minus {first} " in answer.detail.replace(":", "")
        assert flatter.detail.startswith(f"{second}'s trace is ")
        assert f" {first}'s; {second}'s minimal trace is " in flatter.detail


def test_at_different_losses_no_model_is_called_more_robust():
    comparison = compare({"a": small.gpt2(8, 0), "b": small.gpt2(8, 1)}, batches())
    answers = {answer.question: answer for answer in comparison.answers()}
    reason = {False: "the losses differ", None: "the losses are not shown to be the same"}[answers["Same loss?"].holds]
    at_ten = dataclasses.replace(comparison, loss_margin=10.0)
    half = times(comparison.models["a"]["int4-rise"], 1e-4 / comparison.models["a"]["int4-rise"].stderr)
    cases = (  # rises of a and b, ± 1e-4, with the same influences, so that their difference is exact
        (-5e-4, 7e-4, "No difference that matters: no loss rises by more than 0.001 nats"),
        (-9e-2, 7e-4, "No difference that matters: no loss rises by more than 0.001 nats"),
        (-5e-4, 9e-4, "No difference that matters is shown: b's loss is not shown to rise by more than 0.001 nats"),
        (-5e-4, 2e-3, "a, whose loss rises less, by 0.0025 nats/token"),
        (9e-3, 9.9e-3, "No difference that matters: the rises are within 0.001 nats of each other"),
        (9e-3, 1.1e-2, "a, whose loss rises less, by 0.002 nats/token"),
    )
    for low, high, told in cases:
        rises = {"a": dataclasses.replace(half, value=low), "b": dataclasses.replace(half, value=high)}
        known = {model: each | {"int4-rise": rises[model]} for model, each in comparison.models.items()}
        robust = dataclasses.replace(comparison, models=known).answers()[2]
        first = "No loss rises by more than 0.001 nats; which is more robust is not judged"
        assert robust.answer == f"{first if high == 7e-4 else 'Not judged'}: {reason}"
        robust = dataclasses.replace(at_ten, models=known).answers()[2]
        assert robust.answer == told
        assert robust.holds is (True if told.startswith("a, ") else None)
    # the last of these, beside other formats
    assert "; other formats of 4 bits may order models in another way (--measures nf4-rise)" in robust.detail
    swapped = {"a": rises["b"], "b": rises["a"]}
    for nf4, answer in (
        (rises, f"{told}; also by nf4-rise"),
        (swapped, "That depends on the format: a by int4-rise, b by nf4-rise"),
    ):
        beside = {model: each | {"nf4-rise": nf4[model]} for model, each in known.items()}
        found = dataclasses.replace(at_ten, models=beside).answers()[2]
        assert (found.answer, found.holds) == (answer, None if nf4 is swapped else True)
        assert "may order models" not in found.detail
        assert "; nf4-rise: b " in found.detail
    little = {model: dataclasses.replace(half, value=5e-4) for model in "ab"}
    for int4, answer in (
        (rises, "That depends on the format: a by int4-rise, no difference that matters by nf4-rise"),
        (little, "No difference that matters, by int4-rise and nf4-rise"),
    ):
        beside = {model: each | {"int4-rise": int4[model], "nf4-rise": little[model]} for model, each in known.items()}
        found = dataclasses.replace(at_ten, models=beside).answers()[2]
        assert (found.answer, found.holds) == (answer, None)
    for place, name in ((2, "int4-rise"), (3, "noise-rise")):
        robust, judged = comparison.answers()[place], at_ten.answers()[place]
        assert (robust.answer, robust.holds) == (f"Not judged: {reason}", None)
        b_less_a = comparison.difference(name, "b", "a")
        low, high = b_less_a.ci95
        better, by = ("b", b_less_a) if high < 0 else ("a", b_less_a)
        size = rounded(abs(by.value), by.stderr)
        assert judged.answer == (
            f"{better}, whose loss rises less, by {size} nats/token" if low > 0 or high < 0 else "No difference shown"
        )


def test_values_below_a_thousandth_of_a_nat_are_shown_in_millinats():
    models = {name: small.gpt2(8, seed) for seed, name in enumerate("ab")}
    found = compare(models, batches())
    scaled = {
        model: each | {"int8-rise": times(each["int8-rise"], 1e-4), "int4-rise": times(each["int4-rise"], 1.0)}
        for model, each in found.models.items()
    }
    milli = dataclasses.replace(found, models=scaled)
    rows = {row[0]: row[1:] for row in milli.table()[1]}
    one = str(times(scaled["a"]["int8-rise"], 1e3)).partition(" nats")[0]
    assert rows["rise with 8-bit weights, millinats"][0] == one
    assert "rise with 4-bit weights" in rows
    page = comparison_page(milli)
    one = one.replace("± ", "±\xa0")
    assert page.count(one) == 1  # both values, the difference and its bar are one row
    assert 'id="section-differences' not in page


def test_the_same_weights_are_identical_and_no_model_is_better():
    comparison = compare({"a": small.gpt2(8), "copy": small.gpt2(8)}, batches())
    assert str(comparison.verdict()) == "a and copy have identical weights. There is nothing to compare."
    for name in comparison.names:
        assert comparison.difference(name, "a", "copy").ci95 == (0, 0)
    assert [str(answer) for answer in comparison.answers()] == ["Same model? Yes, the weights are identical"]
    assert str(comparison).count("identical") == 1
    assert "?" not in str(comparison)


def test_of_a_rescaled_copy_only_that_is_asked_which_rescaling_changes():
    """Of whole tensors it changes no rounding, and no noise in proportion; of channels it changes both."""
    found = {}
    for granularity in ("tensor", "channel"):
        torch.manual_seed(0)
        model = small.llama(8)
        copy = rescaled_at_random(model, granularity=granularity)
        comparison = compare({"a": model, "rescaled": copy}, batches())
        assert comparison.verdict().reasons == ("function",)
        found[granularity] = [answer.question for answer in comparison.answers()]
    assert found["tensor"] == ["Same loss?", "Flatter?"]
    assert "More robust at 4 bits?" in found["channel"]


def test_a_copy_of_the_most_robust_model_is_no_rival():
    models = {"a": small.gpt2(8), "copy": small.gpt2(8), "b": small.gpt2(8, 1)}
    for order in (["a", "copy", "b"], ["b", "copy", "a"]):
        *_, robust, _ = compare({name: models[name] for name in order}, batches(), loss_margin=10.0).answers()
        named = robust.detail.partition("/token; ")[0]
        assert "b " in named
        assert ("a " in named) != ("copy " in named)


def test_other_architectures_are_compared_without_a_flattest():
    with pytest.warns(match="a and b have different parameters"):
        comparison = compare({"a": small.gpt2(8), "b": small.llama(8)}, batches(), loss_margin=100.0)
    assert comparison.verdict().reasons == ("parameters",)
    assert comparison.answers()[1].answer == "No verdict: different architectures"
    assert "flattest:" not in str(comparison)
    assert math.isfinite(comparison.difference("int8-rise", "a", "b").value)


def test_models_that_end_texts_otherwise_are_not_paired_where_that_counts():
    models = {"a": small.llama(8), "b": small.llama(8, 1, eos_token_id=5), "c": small.llama(8, 2)}
    sentence = "b: .* over 17 documents found by their separators and the error of a over 18 .*: give `documents`"
    with pytest.raises(ComparisonError, match=sentence) as failed:
        compare(models, batches(), robustness=False)
    assert list(failed.value.complete.models) == ["a"]
    documents = torch.arange(10)
    given = [{**batch, "documents": documents + 10 * i} for i, batch in enumerate(batches())]
    comparison = compare(models, given, robustness=False)
    assert comparison.difference("loss", "a", "b").samples == 20


@pytest.mark.parametrize(
    ("models", "options", "sentence"),
    [
        ({"a": 8, "b": 9}, {}, "a has a vocabulary of 8 tokens and b of 9"),
        (
            {"a": 8},
            {"data": "a", "tokenizer": "b"},
            "batches are given: leave out data and tokenizer, for reading text",
        ),
        ({"a": 8}, {"tasks": ["sst2"]}, "batches are given: leave out tasks"),
        ({}, {}, "it is a mapping of names to models, or several names of checkpoints"),
    ],
)
def test_models_and_batches_that_do_not_fit_are_refused(models, options, sentence):
    made = {name: small.gpt2(vocabulary) for name, vocabulary in models.items()}
    with pytest.raises(IsolossError, match=sentence):
        compare(made, batches(), **options)


def test_models_in_memory_need_a_tokenizer_for_text(text):
    with pytest.raises(IsolossError, match="a is a model in memory, which has no tokenizer: give tokenizer"):
        compare({"a": small.gpt2(8), "b": small.gpt2(8, 1)}, data=text)


def test_rows_are_every_estimate_and_every_difference():
    comparison = compare({"a": small.gpt2(8), "b": small.gpt2(8, 1), "c": small.gpt2(8, 2)}, batches())
    rows = comparison.rows()
    assert len(rows) == 5 * len(comparison.names)
    for row in rows:
        estimate = comparison.models[row["model"]][row["measure"]]
        if row["minus"]:
            assert row["minus"] == "a"
            estimate = comparison.difference(row["measure"], row["model"], "a")
        assert (row["value"], row["low95"], row["high95"]) == (estimate.value, *estimate.ci95)
    frame = comparison.to_polars()
    assert frame.height == len(rows)
    assert np.array_equal(frame["stderr"].to_numpy(), [row["stderr"] for row in rows])


def test_documents_that_return_in_turn_are_all_in_the_rises():
    model, ids = small.gpt2(20, 0), torch.randint(0, 20, (256, 6))
    batches = [{"input_ids": ids, "labels": ids, "documents": torch.arange(256) % 8}]
    found = compare({"a": model, "b": small.gpt2(20, 1)}, batches)
    assert found.models["a"]["int4-rise"].samples == 8


@pytest.mark.parametrize(
    "wrong", [{"loss_margin": 0}, {"loss_margin": -1}, {"loss_margin": math.nan}, {"min_ratio": 0.9}]
)
def test_a_margin_that_is_none_is_refused_before_anything_is_measured(wrong):
    with pytest.raises(IsolossError, match=f"{next(iter(wrong))} is"):
        compare({"a": small.gpt2(20, 0)}, [], **wrong)


def test_a_model_in_training_mode_is_named():
    ids = torch.randint(0, 20, (8, 6))
    with pytest.raises(IsolossError, match="a: the model is in training mode"):
        compare({"a": small.gpt2(20, 0).train()}, [{"input_ids": ids, "labels": ids}])
