"""`isoloss measure --module`: a module of one's own, its weights from files, and what is refused of both."""

import collections
import inspect
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from speaking import as_json, trace_of
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.registry import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_gpt.py"
MODULE = f"{EXAMPLE}:build"
IDS = np.random.default_rng(0).integers(0, 32, 12 * 8).astype(np.uint16)


@pytest.fixture(scope="module")
def built():
    """The example's model, not as it is built."""
    model = run_python(EXAMPLE, "test").build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.eval()


@pytest.fixture
def folder(tmp_path, built):
    """Weights of two models and token ids as nanoGPT writes them."""
    torch.save({"model": built.state_dict(), "optimizer": {"step": 3}, "config": {"lr": 0.1}}, tmp_path / "a.pt")
    save_file({name: 0.9 * value for name, value in built.state_dict().items()}, tmp_path / "b.safetensors")
    IDS.tofile(tmp_path / "ids.bin")
    return tmp_path


def test_a_module_is_measured_with_the_weights_in_a_file(capsys, folder, built):
    data = ("--module", MODULE, "--data", folder / "ids.bin", "--length", 8, "--device", "cpu")
    words = (folder / "a.pt", folder / "b.safetensors", *data, "--measures", "trace", "minimal-trace")
    document = as_json(capsys, "measure", *words)
    ids = torch.from_numpy(IDS.astype(np.int64)).view(12, 8)
    expected = fisher_trace(built, [{"input_ids": ids, "labels": ids}], causal=True)
    assert trace_of(document)["value"] == pytest.approx(expected.value, rel=1e-5)
    assert trace_of(document)["by_parameter"].keys() == expected.by_parameter.keys()
    assert set(document["architectures"].values()) == {"MyGPT"}
    least = [each["estimates"]["minimal-trace"]["value"] for each in document["evaluations"][1::2]]
    assert all(value < trace_of(document, place)["value"] for place, value in enumerate(least))


@pytest.mark.parametrize("where", ["model", "state_dict", None])
def test_weights_of_a_compiled_or_parallel_module_lose_their_prefix(tmp_path, built, where):
    state = collections.OrderedDict((f"module._orig_mod.{name}", value) for name, value in built.state_dict().items())
    torch.save(state if where is None else {where: state}, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match=r"prefixes of torch.compile or DataParallel"):
        loaded = load_model(tmp_path / "a.pt", module=MODULE, device="cpu", dtype=torch.float64)
    assert (loaded.kind, loaded.architecture, loaded.name) == ("causal", "MyGPT", str(tmp_path / "a.pt"))
    for name, value in loaded.model.named_parameters():
        assert torch.equal(value, built.get_parameter(name).double())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("head.weight"), "lacks weights of MyGPT: head.weight"),
        (lambda state: state.update(extra=torch.ones(2)), "has weights that MyGPT does not have: extra"),
        (lambda state: state.update({"head.weight": torch.ones(2)}), "of another shape than MyGPT has: head.weight"),
        (lambda state: state.update({"head.weight": state["head.weight"].char()}), r"head.weight in torch.int8"),
        (lambda state: state.update(step=3), "holds no state dict"),
        (lambda state: state.update(code=Path("x")), "holds more than tensors and plain values"),
    ],
)
def test_weights_that_are_not_the_modules_are_refused(tmp_path, built, change, why):
    state = dict(built.state_dict())
    change(state)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(IsolossError, match=why):
        load_model(tmp_path / "a.pt", module=MODULE, device="cpu")


def test_ids_after_a_header_are_read_without_it(folder, capsys):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(IDS)
    (folder / "llm.bin").write_bytes(header.tobytes() + IDS.tobytes())
    words = ("measure", folder / "a.pt", "--module", MODULE, "--length", 8, "--device", "cpu", "--data")
    plain, behind = (trace_of(as_json(capsys, *words, folder / name)) for name in ("ids.bin", "llm.bin"))
    assert behind["value"] == plain["value"]


class Tied(torch.nn.Module):
    """A module whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).cumsum(1))


class Shared(Tied):
    """The same, with its embedding under a second name."""

    def __init__(self):
        super().__init__()
        self.again = self.embed


TIED = f"import torch\n{inspect.getsource(Tied)}\n{inspect.getsource(Shared)}"


@pytest.fixture
def tied(tmp_path):
    (tmp_path / "tied.py").write_text(TIED)
    return tmp_path / "tied.py"


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_tied_weights_of_which_a_file_has_two_are_two(tied, suffix):
    torch.manual_seed(0)
    state = {"embed.weight": torch.randn(7, 4), "head.weight": torch.randn(7, 4)}
    path = tied.with_suffix(f".{suffix}")
    (save_file if suffix == "safetensors" else torch.save)(state, path)
    with pytest.warns(UserWarning, match="has different tensors for embed.weight and head.weight, which Tied ties"):
        model = load_model(path, module=f"{tied}:Tied", device="cpu").model
    ids = torch.arange(7)[None]
    expected = state["embed.weight"][ids].cumsum(1) @ state["head.weight"].T
    torch.testing.assert_close(model(ids), expected)
    # one tensor under both names, or under one of them, stays one
    for names in (("embed.weight", "head.weight"), ("head.weight",)):
        torch.save(dict.fromkeys(names, state["embed.weight"]), tied.with_suffix(".pt"))
        model = load_model(tied.with_suffix(".pt"), module=f"{tied}:Tied", device="cpu").model
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.head.weight, state["embed.weight"])


def test_one_part_of_which_a_file_has_two_is_refused(tied):
    state = {name: torch.randn(7, 4) for name in ("embed.weight", "head.weight", "again.weight")}
    torch.save(state, tied.with_suffix(".pt"))
    with pytest.raises(IsolossError, match=r"for embed\.weight and .*again\.weight, which are one part of Shared$"):
        load_model(tied.with_suffix(".pt"), module=f"{tied}:Shared", device="cpu")


def test_a_zip_bomb_is_refused_by_its_headers(tied):
    torch.save({"embed.weight": torch.zeros(1000, 1000)}, tied.with_suffix(".pt"))
    with zipfile.ZipFile(tied.with_suffix(".pt")) as saved, zipfile.ZipFile(tied.parent / "bomb.pt", "w", 8) as bomb:
        for entry in saved.namelist():
            bomb.writestr(entry, saved.read(entry))
    with pytest.raises(
        IsolossError, match=r"bomb\.pt is not a file of torch\.save, .*: it claims 4,0.* bytes and has [0-9,]+$"
    ):
        load_model(tied.parent / "bomb.pt", module=f"{tied}:Tied", device="cpu")


def test_a_module_is_compared_on_a_task(capsys, folder):
    rows = "".join(f"the {word},{'yes' if word in 'aceg' else 'no'}\n" for word in "abcdefgh" * 5)
    (folder / "mine.csv").write_text("text,label\n" + rows)
    letters = {letter: 1 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    backend = Tokenizer(models.BPE(letters | {"<unk>": 0}, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("a cat sees the big red dog " * 20)
    words = ("compare", folder / "a.pt", folder / "b.safetensors", "--module", MODULE, "--data", folder / "text.txt")
    words += ("--tokenizer", folder / "tokenizer", "--length", 8, "--device", "cpu", "--num-sequences", 12)
    document = as_json(capsys, *words, "--task", f"mine={folder / 'mine.csv'}")
    for estimates in document["models"].values():
        accuracy = estimates["probe-mine"]
        assert accuracy["value"] == 1  # by the last letter
        assert {"pooling": "last", "num_features": 32, "num_test": 8}.items() <= accuracy["details"].items()
