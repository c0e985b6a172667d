"""Results of lm-evaluation-harness 0.4.13, really run on two models, beside computations by hand."""

import json
import math
import shutil
from pathlib import Path

import pytest

from isoloss import read_lm_eval
from isoloss.errors import IsolossError, IsolossWarning

FOLDER = Path(__file__).parent / "data" / "lm_eval"
EARLY, LATE = "models/early", "models/late"


def lines(model, task):
    """The samples of a task as they are in the file, by filter."""
    (file,) = FOLDER.glob(f"{model.replace('/', '__')}/samples_{task}_*.jsonl")
    found = {}
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        found.setdefault(sample["filter"], []).append(sample)
    return found


def told(model):
    (file,) = FOLDER.glob(f"{model.replace('/', '__')}/results_*.json")
    return json.loads(file.read_text())["results"]


@pytest.fixture(scope="module")
def results():
    return read_lm_eval(FOLDER)


def test_values_and_errors_are_those_of_lm_eval(results):
    assert list(results.models) == [EARLY, LATE]
    for model in results.models:
        checked = set()
        for task, metrics in told(model).items():
            for key in (key for key in metrics if "," in key and "_stderr" not in key):
                metric, kind = key.split(",")
                name = f"{task}.{metric}" + f".{kind}" * (kind != "none")
                estimate = results.models[model][name]
                assert estimate.value == pytest.approx(metrics[key], rel=1e-6)
                stderr = metrics[f"{metric}_stderr,{kind}"]
                # one document of topics_choice is there twice; the error of the perplexity is bootstrapped there
                if stderr != "N/A" and task != "topics_choice" and metric != "perplexity":
                    assert estimate.stderr == pytest.approx(stderr, abs=1e-12)
                checked.add(name)
        assert checked == results.models[model].keys()
        assert len(checked) == 10


def test_an_error_where_lm_eval_has_none(results):
    """Of bits per byte, by the jackknife over documents, written out."""
    parts = [sample["bits_per_byte"] for sample in lines(LATE, "topics_rolling")["none"]]
    total, size = sum(part[0] for part in parts), sum(part[1] for part in parts)
    left_out = [-(total - a) / (size - b) / math.log(2) for a, b in parts]
    whole, n = -total / size / math.log(2), len(parts)
    estimate = results.models[LATE]["topics_rolling.bits_per_byte"]
    assert estimate.value == pytest.approx(whole)
    assert estimate.stderr == pytest.approx(math.sqrt((n - 1) / n * sum((each - whole) ** 2 for each in left_out)))
    assert (estimate.unit, estimate.samples) == ("bits per byte", n)
    perplexity = results.models[LATE]["topics_rolling.byte_perplexity"]
    assert perplexity.value == pytest.approx(2**whole)
    assert perplexity.stderr == pytest.approx(2**whole * math.log(2) * estimate.stderr)


def test_a_difference_is_paired_by_document(results):
    def brier(sample):
        gold, chances = sample["brier_score"]
        return sum((float(p) - (i == gold)) ** 2 for i, p in enumerate(chances.strip("[]").split()))

    early, late = ({}, {})
    for model, found in ((EARLY, early), (LATE, late)):
        for sample in lines(model, "topics_choice")["none"]:
            found.setdefault(sample["doc_hash"], []).append(brier(sample))
    changes = {key: [b - a for a, b in zip(early[key], late[key], strict=True)] for key in early}
    sums, sizes = [sum(each) for each in changes.values()], [len(each) for each in changes.values()]
    assert sorted(sizes)[-2:] == [1, 2]  # a document that is there twice is no two samples
    mean, n = sum(sums) / sum(sizes), len(sums)
    left_out = [(sum(sums) - a) / (sum(sizes) - b) for a, b in zip(sums, sizes, strict=True)]
    difference = results.difference("topics_choice.brier_score", LATE, EARLY)
    assert difference.value == pytest.approx(mean)
    assert difference.stderr == pytest.approx(math.sqrt((n - 1) / n * sum((each - mean) ** 2 for each in left_out)))
    name = "topics_rolling.bits_per_byte"
    unpaired = math.hypot(*(results.models[model][name].stderr for model in (EARLY, LATE)))
    assert results.difference(name, LATE, EARLY).stderr < 0.6 * unpaired


def test_the_table(results):
    table = str(results).splitlines()
    assert table[0].split() == ["metric", "model", "value", "minus", EARLY, "95", "%", "interval"]
    row = next(line for line in table if line.startswith("topics_word.exact_match.first-word  models/late"))
    assert "%" in row


def test_documents_that_only_one_has_are_left_out(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "copy")
    for results in copy.rglob("results_*"):
        results.unlink()
    (file,) = copy.glob("models__late/samples_topics_rolling_*")
    whole = file.read_text().splitlines()
    file.write_text("\n".join(reversed(whole[2:])))  # in another order, which does not matter
    metric = "topics_rolling.bits_per_byte"
    read = {"early": copy / "models__early", "late": file}  # samples alone, under names of one's own
    cut = read_lm_eval(read)
    assert cut.models.keys() == {"early", "late"}
    with pytest.warns(IsolossWarning, match="left out 2 documents that only one of late and early has"):
        difference = cut.difference(metric, "late", "early")
    assert difference.samples == len(whole) - 2
    (other,) = copy.glob("models__early/samples_topics_rolling_*")
    other.write_text("\n".join(other.read_text().splitlines()[2:]))
    same = read_lm_eval({"early": other, "late": file}).difference(metric, "late", "early")
    assert difference.value == pytest.approx(same.value)
    assert difference.stderr == pytest.approx(same.stderr)


def test_results_without_samples(tmp_path):
    document = {
        "results": {"mmlu": {"alias": "mmlu", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.3}},
        "config": {"model_args": "pretrained=lab/tiny,revision=step10,dtype=float32"},
        "model_name": "lab/tiny",
    }
    file = tmp_path / "results_2026-11-29T10-03-26.449767.json"
    file.write_text(json.dumps(document))
    with pytest.warns(IsolossWarning, match="mmlu.f1 is not a mean over its samples, and the results give no error"):
        results = read_lm_eval(str(file))
    estimate = results.models["lab/tiny@step10"]["mmlu.acc"]
    assert (estimate.value, estimate.stderr, estimate.unit) == (0.5, 0.1, "accuracy")
    assert estimate.ci95[0] == pytest.approx(0.5 - 1.96 * 0.1, abs=1e-4)
    with pytest.raises(IsolossError, match=r"lab/tiny@step10 has no samples of 'mmlu\.acc'"):
        results.difference("mmlu.acc", "lab/tiny@step10", "lab/tiny@step10")
    later = dict(document, results={"mmlu": {"acc,none": 0.6, "acc_stderr,none": 0.1}})
    (tmp_path / "results_2026-12-01T00-00-00.1.json").write_text(json.dumps(later))
    with pytest.warns(IsolossWarning) as told:
        latest = read_lm_eval([tmp_path])
    assert "lab/tiny@step10 has several results for mmlu.acc: the latest counts" in [str(each.message) for each in told]
    assert latest.models["lab/tiny@step10"]["mmlu.acc"].value == 0.6


def sample(value, metric="acc", name="a"):
    return {"doc_hash": name, "filter": "none", "metrics": [metric], metric: value}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([sample(1.0)], "an error bar needs at least 2 independent samples, not 1"),
        ([sample(["a", "b"], "bleu"), sample(["a", "b"], "bleu", "b")], "quiz.bleu is not a mean over its samples"),
        (
            [sample(-800.0, "perplexity"), sample(-900.0, "perplexity", "b")],
            r"perplexity is above 2e\+130, where it is not a finite number",
        ),
    ],
)
def test_what_has_no_error_is_left_out(tmp_path, samples, message):
    file = tmp_path / "samples_quiz_2026-01-01T12-00-00.0.jsonl"
    file.write_text("\n".join(map(json.dumps, [each | {"also": 1} for each in samples])))
    with pytest.warns(IsolossWarning, match=message):
        assert not read_lm_eval(file).models[tmp_path.name]


def put(folder, answers, **results):
    """Write the answers to documents, by hash, and perhaps results beside them."""
    folder.mkdir()
    lines = [json.dumps(sample(value, name=name)) for name, value in answers.items()]
    (folder / "samples_quiz_2026-01-01T12-00-00.0.jsonl").write_text("\n".join(lines))
    if results:
        document = {"model_name": folder.name, "results": {"quiz": results}}
        (folder / "results_2026-01-01T12-00-00.0.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(("others", "common"), [("xyz", 0), ("axy", 1)])
def test_too_few_documents_in_common_have_no_difference(tmp_path, others, common):
    first = put(tmp_path / "first", {"a": 1, "b": 0, "c": 1})
    second = put(tmp_path / "second", dict.fromkeys(others, 1) | {"y": 0})
    results = read_lm_eval([first, second])
    row = str(results).splitlines()[-1]
    assert row.split() == ["quiz.acc", "second", "67", "±", "33", "%"]
    with pytest.raises(IsolossError, match=rf"second and first have too few documents in common \({common}\)"):
        results.difference("quiz.acc", "second", "first")


def test_samples_that_do_not_count_are_told(tmp_path):
    answers = {"a": 1, "b": 0, "c": 1}
    with pytest.warns(IsolossWarning, match=r"none/samples_quiz_.*\.jsonl has no samples"):
        assert not read_lm_eval(put(tmp_path / "none", {})).models["none"]
    other = put(tmp_path / "other", answers, **{"acc,none": 0.9, "acc_stderr,none": 0.1})
    with pytest.warns(IsolossWarning, match=r"quiz.acc is 0.9 in the results and 0.66667 over its samples"):
        results = read_lm_eval(other)
    assert results.models["other"]["quiz.acc"].value == 0.9
    assert not results.items["other"]
    read_lm_eval(put(tmp_path / "same", answers, **{"acc,none": 2 / 3, "acc_stderr,none": 0.1}))  # no warning


def test_refused(tmp_path):
    with pytest.raises(IsolossError, match=r"has no results of lm-evaluation-harness .*; did you mean .*lm_eval\?"):
        read_lm_eval(FOLDER.with_name("lm_evil"))
    with pytest.raises(IsolossError, match="has no results of lm-evaluation-harness"):
        read_lm_eval(tmp_path)
    file = tmp_path / "samples_quiz_2026-01-01T12-00-00.0.jsonl"
    file.write_text('{"doc_hash": "a", "filter": "none"}')
    with pytest.raises(IsolossError, match="line 1 is not a sample of lm-evaluation-harness: it has no 'metrics'"):
        read_lm_eval(file)
    (tmp_path / "results_2026-01-01T12-00-00.0.json").write_text("{}")
    with pytest.raises(IsolossError, match="it has no table 'results'"):
        read_lm_eval(tmp_path)


def test_other_examples_in_the_prompts_are_told(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "both")
    (file,) = tmp_path.glob("both/models__late/results_*.json")
    document = json.loads(file.read_text())
    document["n-shot"]["topics_word"] = 5
    file.write_text(json.dumps(document))
    with pytest.warns(IsolossWarning, match="topics_word have different.*: 0 for models/early, 5 for models"):
        read_lm_eval(tmp_path / "both")
