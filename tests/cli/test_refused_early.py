"""A mistake in a command line is refused before torch is imported, which takes seconds: in one sentence."""

import json
import os
import shlex
import subprocess
import sys

import pytest

PROBE = """
import contextlib, io, json, sys, time

class NoTorch:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise ImportError("torch is imported")

sys.meta_path.insert(0, NoTorch)
from isoloss.cli.main import main
told = []
for words in json.load(sys.stdin):
    start = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()) as stdout:
        try:
            status = main(words)
        except ImportError:
            status = "imported torch"
    assert "torch" not in sys.modules
    told.append([status, stderr.getvalue(), stdout.getvalue(), time.process_time() - start])
print(json.dumps(told))
"""

REFUSED = {
    "measure checkpoint": "to measure any other checkpoint add --data or --language",
    "measure ./no --data text.txt": "there is no checkpoint ./no: it is not a folder",
    "measure ./chekpoint": "there is no checkpoint ./chekpoint: it is not a folder; did you mean checkpoint?",
    "measure chekpoint": "chekpoint is neither a run directory (it has no run.json) nor a checkpoint in one",
    "measure chekpoint --data text.txt": "does not answer; did you mean checkpoint?",
    "measure 'check*[x]'": "no folder matches 'check*[x]'",
    "measure owner/model@step*": "does not answer, and no revision of owner/model is on this machine",
    "measure": "no model is named",
    "measure checkpoint --dta text.txt": "there is no option --dta; did you mean --data?",
    "measure checkpoint --data": "--data needs 1 value",
    "measure checkpoint --data text.txt --dtype float8": "--dtype is 'float8'; did you mean float64? it must be",
    "measure checkpoint --data text.txt --num-sequences 5o": "--num-sequences is '5o'; it must be a whole number",
    "measure checkpoint --data text.txt --measures trce": "no measure 'trce'; did you mean trace?",
    "measur checkpoint": "no subcommand 'measur'; did you mean measure?",
    "measure other --data text.txt": "other is not a checkpoint: it has no config.json",
    "measure bare --data text.txt": "bare has no weights",
    "measure checkpoint --data tex.txt": "there is no data tex.txt; did you mean text.txt? give a .npy",
    "measure checkpoint --data text.txt --rtol 2": "rtol is 2.0; it must be above 0 and below 1",
    "measure checkpoint --data text.txt --seconds 0": "seconds is 0.0; it must be above 0",
    "measure checkpoint --data text.txt --num-probes 0": "num_probes is 0; it must be at least 1",
    "measure checkpoint --data text.txt --device gpu": "the device is 'gpu'; it must be auto, cpu",
    "measure checkpoint --data text.txt --length 0": "length is 0; it must be at least 1",
    "measure checkpoint --data text.txt --tokenizer ./no": "there is no tokenizer './no'",
    "measure checkpoint --data text.txt --threads 100000": "--threads is 100000; it must be at least 0",
    "compare ./no checkpoint": "there is no checkpoint ./no: it is not a folder",
    "compare chekpoint checkpoint": "does not answer; did you mean checkpoint?",
    "compare checkpoint": "checkpoint alone has nothing to be compared with",
    "compare checkpoint checkpoint": "named twice",
    "measure checkpoint --language pcfg-laptp": "no language 'pcfg-laptp'; did you mean pcfg-laptop?",
    "transfer ./no --task root --language pcfg-laptop": "there is no checkpoint ./no: it is not a folder",
    "transfer checkpoint --task root --language pcfg-laptp": "no language 'pcfg-laptp'",
    "transfer checkpoint --task sst2 --data glue": "there is no file or folder glue",
    "transfer checkpoint --task root --language pcfg-laptop --num-train 0": "num_train is 0; it must be at least 1",
    "transfer checkpoint --task root --language pcfg-laptop --device gpu": "the device is 'gpu'",
    "transfer checkpoint": "--task is missing",
    "expand chekpoint --into d32": "does not answer; did you mean checkpoint?",
    "expand checkpoint": "--into is missing",
    "expand checkpoint --into d33": "there is no model size 'd33'",
    "expand checkpoint --into d32 --data tex.txt": "there is no data tex.txt; did you mean text.txt?",
    "expand checkpoint --into d32 --device gpu": "the device is 'gpu'",
    "text pyton-docs out": "is 'pyton-docs'; did you mean python-docs?",
    "tokenizer tex.txt --output out": "did you mean text.txt?",
    "ls lanuages": "is 'lanuages'; did you mean languages?",
    "ls measures trce": "no measure 'trce'; did you mean trace?",
    "show chekpoint": "chekpoint is not a run directory: it has no run.json; did you mean checkpoint?",
    "study stauts same-loss": "no subcommand 'stauts'; did you mean status?",
    "study run same-los": "no study 'same-los'; did you mean same-loss?",
    "study run": "NAME is missing",
    "study new mine --checkpoints checkpoint --data tex.txt": "there is no data tex.txt; did you mean text.txt?",
    "theory bartlet": "did you mean bartlett?",
    "sample pcfg-laptp": "no language 'pcfg-laptp'; did you mean pcfg-laptop?",
    "sample text.txt --tokenizer ./no": "there is no tokenizer './no'",
    "sample pcfg-laptop --length 4": "the language pcfg-laptop is complete as it is: leave out --length",
    "sample pcfg-laptop --save language.bin": "the file of a language is called NAME.safetensors, not language.bin",
    "train run --language pcfg-laptp": "no language 'pcfg-laptp'; did you mean pcfg-laptop?",
    "train run --language pcfg-laptop --steps 0": "steps is 0; it must be at least 1",
    "train run --language pcfg-laptop --device gpu": "the device is 'gpu'",
    "train run --language pcfg-laptop --architecture brt": "no model 'brt'; did you mean bert?",
    "train run --language pcfg-laptop --threads 100000": "--threads is 100000; it must be at least 0",
    "train run --language pcfg-laptop --init-from no": "there is no run/no",
    "train run --language text.txt --tokenizer ./no": "there is no tokenizer './no'",
    "train run --language tex.txt --tokenizer vocab.txt": "no language 'tex.txt'; did you mean text.txt?",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    (folder / "text.txt").write_text("some text\n")
    for name in ("checkpoint", "bare", "other"):
        (folder / name).mkdir()
    for name in ("checkpoint", "bare"):
        (folder / name / "config.json").write_text("{}")
    (folder / "checkpoint/model.safetensors").touch()
    asked = json.dumps([shlex.split(command) for command in REFUSED])
    # nobody answers there
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(folder / "hub")}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, input=asked, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(REFUSED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", REFUSED)
def test_a_mistake_is_refused_before_torch_is_imported(told, command):
    status, message, output, seconds = told[command]
    assert status == 2, message
    assert REFUSED[command] in message
    assert message.count("\n") == 1
    assert output == ""
    # the first one imports what all need
    assert seconds < 2
