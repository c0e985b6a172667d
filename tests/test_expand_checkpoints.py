"""Names that stand for several checkpoints: a Trainer's output, patterns of the shell, revisions on the hub."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from isoloss.checkpoints.places import expand_checkpoints
from isoloss.errors import IsolossError, IsolossWarning


@pytest.fixture
def output(tmp_path, monkeypatch):
    """The output of a Trainer, with its log beside three checkpoints; relative names are below it."""
    monkeypatch.chdir(tmp_path)
    for step in (1000, 200, 400):
        saved(f"out/checkpoint-{step}")
    Path("out/runs").mkdir()
    Path("out/trainer_state.json").write_text("{}")
    return Path("out")


def saved(folder, weights="model.safetensors"):
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text("{}")
    if weights:
        Path(folder, weights).touch()


def expanded(*names):
    said = []
    return expand_checkpoints(map(str, names), said.append), said


SERIES = [f"out/checkpoint-{step}" for step in (200, 400, 1000)]
THREE = "3 checkpoints, out/checkpoint-200 to out/checkpoint-1000"


def test_a_trainers_output_is_its_checkpoints_by_step(output):
    assert expanded("gpt2", output) == (["gpt2", *SERIES], [f"out: {THREE}"])
    assert expanded(output.absolute())[0] == [str(Path(name).absolute()) for name in SERIES]
    saved("out", weights=None)  # without weights of its own it is no model
    assert expanded(output)[0] == SERIES


def test_a_folder_with_weights_of_its_own_is_itself(output):
    saved("out")
    told = "out: the model that it holds itself; 'out/checkpoint-*' names the checkpoints in it (3)"
    assert expanded(output) == (["out"], [told])
    assert expanded("out/checkpoint-*") == (SERIES, [f"out/checkpoint-*: {THREE}"])


def test_patterns_name_folders(output):
    saved("elsewhere")
    Path("notes.txt").touch()
    assert expanded("out/checkpoint-[24]00")[0] == SERIES[:2]
    Path("empty").mkdir()
    with pytest.warns(IsolossWarning, match="left out: empty is not a checkpoint: it has no config.json"):
        assert expanded("*")[0] == ["elsewhere", *SERIES]
    saved("odd[1]")  # a folder of this name is meant, whatever a shell would make of it
    assert expanded("odd[1]") == (["odd[1]"], [])
    with pytest.raises(IsolossError, match=r"^no folder matches 'out/step-\*'$"):
        expanded("out/step-*")


def test_a_checkpoint_that_is_not_whole_is_left_out(output):
    saved("out/checkpoint-1200", weights=None)
    with pytest.warns(IsolossWarning, match="left out: out/checkpoint-1200 has no weights: there is no model.safetens"):
        assert expanded(output)[0] == SERIES
    for name in SERIES:
        Path(name, "model.safetensors").unlink()
    with pytest.raises(IsolossError, match=r"^out/checkpoint-200 has no weights"):
        expanded(output)


def test_other_names_stand_for_themselves(output):
    names = ["no/such/folder", "owner/model@main", "out/checkpoint-200", "out/runs"]
    assert expanded(*names) == (names, [])


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, whose branches and tags are steps."""

    def do_GET(self):
        refs = [{"name": name, "ref": f"refs/{name}", "targetCommit": "0" * 40} for name in ("main", "step10", "step2")]
        is_known = self.path.startswith("/api/models/owner/model/refs")
        body = json.dumps({"branches": refs, "tags": refs[1:], "converts": []}).encode() if is_known else b""
        self.send_response(200 if is_known else 404)
        if not is_known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.list_models", lambda *_, **__: pytest.fail("it asks again and again"))
    with pytest.raises(IsolossError, match=r"no model on this machine, and the Hugging Face hub does not answer$"):
        expanded("owner/model-*")


def test_revisions_on_the_hub(monkeypatch, tmp_path):
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        names, said = expanded("owner/model@step*")
        assert names == ["owner/model@step2", "owner/model@step10"]
        assert said == ["owner/model@step*: 2 checkpoints, owner/model@step2 to owner/model@step10"]
        with pytest.raises(IsolossError, match=r"^owner/model has no revision 'x\*': they are main, step2, step10$"):
            expanded("owner/model@x*")
        with pytest.raises(IsolossError, match=r"^there is no checkpoint owner/other on the Hugging Face hub$"):
            expanded("owner/other@step*")
        server.shutdown()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(IsolossError, match=r"hub does not answer, and no revision of owner/model is on this machine$"):
        expanded("owner/model@step*")
    cache = tmp_path / "models--owner--model"
    saved(cache / "snapshots" / "1")
    (cache / "refs").mkdir()
    for ref, commit in (("main", "1"), ("step10", "1"), ("step2", "1"), ("step3", "gone")):
        (cache / "refs" / ref).write_text(commit)
    with pytest.warns(IsolossWarning, match="only the revisions of owner/model that were downloaded before are used$"):
        assert expanded("owner/model@step*")[0] == ["owner/model@step2", "owner/model@step10"]
