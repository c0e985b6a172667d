"""A comparison that is killed goes on where it was, and holds no more of each model than its influences."""

import gc
import itertools
import json
import re
import signal
import subprocess
import sys
import weakref

import pytest
import torch

import small_checkpoints as small
from isoloss import compare, compare_traces, files
from isoloss.comparison import traces
from isoloss.comparison.kept import Kept
from isoloss.errors import IsolossError
from isoloss.flatness import robustness
from isoloss.lab.evaluation import compare as lab_compare
from isoloss.lab.evaluation.compare import _contents
from isoloss.lab.evaluation.input_config import InputConfig

HOW = {"inputs": InputConfig(length=small.LENGTH), "num_sequences": 200, "rtol": 0.5, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    tokenizer = small.byte_level()
    for seed, name in enumerate("abc"):
        small.gpt2(len(tokenizer), seed).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in small.documents(150)))
    return path


def document(comparison):
    """What a comparison prints as JSON, without the time that it took."""
    return re.sub(r'seconds": [^,}]+', "", json.dumps(comparison.to_dict()))


KILLED = """
import os, signal
from isoloss import compare
from isoloss.lab.evaluation.input_config import InputConfig

def kill(model, done):
    if model == "c":
        os.kill(os.getpid(), signal.SIGKILL)

how = {"inputs": InputConfig(length=%d), "num_sequences": 200, "rtol": 0.5, "seed": 3}
compare(["a", "b", "c"], data="text.jsonl", output="kept", progress=kill, **how)
"""


@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on_and_ends_with_the_same_bytes(folder, monkeypatch):
    monkeypatch.chdir(folder)
    whole = compare(["a", "b", "c"], data="text.jsonl", **HOW)
    killed = subprocess.run([sys.executable, "-c", KILLED % small.LENGTH], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # of the comparison; of a and of b, the traces and all else
    assert len(list((folder / "kept").glob("*.json"))) == 5
    measured = set()
    options = {"data": "text.jsonl", "output": "kept", "progress": lambda model, _: measured.add(model)}
    resumed = compare(["a", "b", "c"], **options, **HOW)
    assert measured == {"c"}
    # a decided where the others stop, and still does
    assert [resumed.models[name]["trace"].details["ended"] for name in "ac"] == ["rtol", "num_sequences"]
    assert document(resumed) == document(whole)
    for name in whole.models["c"]:
        assert (resumed.models["b"][name].influence == whole.models["b"][name].influence).all()

    measured.clear()
    small.gpt2(len(small.byte_level()), 7).save_pretrained(folder / "b")
    compare(["a", "b", "c"], **options, **HOW)
    assert measured == {"b"}  # its weights are others
    measured.clear()
    config = json.loads((folder / "c" / "config.json").read_text())
    (folder / "c" / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.1}))
    compare(["a", "b", "c"], **options, **HOW)
    assert measured == {"c"}  # the same weights, and another function of them
    with pytest.raises(IsolossError, match="kept has a comparison with different inputs and settings: choose"):
        compare(["a", "b"], **options, **HOW | {"seed": 4})
    with pytest.raises(IsolossError, match="a exists and is not an empty folder"):
        compare(["a", "b"], **options | {"output": "a"}, **HOW)
    next((folder / "kept").glob("[0-9a-f]*.json")).write_text("{}")
    assert len(compare(["a", "b", "c"], **options, **HOW).models) == 3


def test_without_the_first_model_the_traces_alone_are_measured_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    measured, rises = [], []

    def loss_rises(*given, **options):
        rises.append(given)
        return robustness.loss_rises(*given, **options)

    monkeypatch.setattr(lab_compare, "loss_rises", loss_rises)
    options = {"data": "text.jsonl", "output": "without", "progress": lambda model, _: measured.append(model)}
    whole = compare(["a", "b", "c"], **options, **HOW)
    measured.clear()
    rest = compare(["b", "c"], **options, **HOW)
    assert (set(measured), len(rises)) == ({"b", "c"}, 3)
    measured.clear()
    assert document(compare(["a", "b", "c"], **options, **HOW)) == document(whole)
    assert (measured, len(rises)) == ([], 3)
    assert document(rest) == document(compare(["b", "c"], data="text.jsonl", **HOW))


def test_the_files_of_tasks_and_modules_count_by_their_content(tmp_path):
    (tmp_path / "task").mkdir()
    known = []
    for text in ("text,label", "text,label,pair"):
        (tmp_path / "task" / "train.csv").write_text(text)
        (tmp_path / "mine.py").write_text(f"# {text}")
        known.append(_contents(("root", f"mine={tmp_path / 'task'}"), f"{tmp_path / 'mine.py'}:Model"))
    assert len({*known[0], *known[1]}) == 4


def test_a_kill_while_the_folder_is_made_leaves_it_usable(tmp_path):
    (tmp_path / f"{files.TEMPORARY}comparison.json").write_text("{")
    assert Kept(tmp_path, {"seed": 1}).read("a", {}) is None


def test_minimal_traces_are_left_out_just_where_a_model_among_them_has_none(tmp_path, monkeypatch):
    ids = torch.randint(0, 8, (24, 6), generator=torch.Generator().manual_seed(0))
    models = {name: small.gpt2(8, seed) for seed, name in enumerate("abcd")}
    measure = traces.minimal_trace

    def minimal_trace(model, *rest):
        if model is models["b"]:
            raise IsolossError("its rescalings are not known")
        return measure(model, *rest)

    monkeypatch.setattr(traces, "minimal_trace", minimal_trace)
    for names in ("ac", "abc", "abd", "ad"):
        chosen = {name: models[name] for name in names}
        found = compare_traces(chosen, [{"input_ids": ids, "labels": ids}], kept=Kept(tmp_path / "kept", {}))
        assert found.no_minimal == ("b: its rescalings are not known" if "b" in names else "")
        assert ("minimal-trace" in found.names) == ("b" not in names)


def test_of_each_model_only_its_influences_stay():
    ids = torch.randint(0, 8, (24, 6), generator=torch.Generator().manual_seed(0))
    models, tensors = [], []

    def load():
        gc.collect()
        tensors.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
        assert not any(model() for model in models[:-1])
        model = small.gpt2(8, len(models))
        models.append(weakref.ref(model))
        return model

    found = compare({str(i): load for i in range(6)}, [{"input_ids": ids, "labels": ids}])
    kept = sum(each.influence is not None for each in found.models["0"].values())
    grown = [after - before for before, after in itertools.pairwise(tensors[1:])]
    assert max(grown) <= kept
