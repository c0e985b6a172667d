"""What tests of executors share: a study with runs of some seconds, its files, and waiting for other processes."""

import hashlib
import json
import os
import subprocess
import sys
import time

import studies_in_process

STEPS = 1200
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TRAINING = ("--language", "pcfg-laptop", "--size", "d16", "--batch-size", "8", "--device", "cpu", "--threads", "1")
ENGINE = """
import json, sys
from pathlib import Path
from isoloss.runs import Run
from isoloss.studies.plan import Unit
from isoloss.studies.run import local
from isoloss.studies.run.loop import Loop, Options
units = []
for i, words in enumerate(json.loads(sys.argv[2])):
    path = Path(words[1])
    done = lambda path=path: Run(path).complete
    units.append(Unit(name=f"train {i}", arguments=tuple(words), done=done, outputs=(path,)))
options = Options(workers=2, expiry=6.0)
local.run(Loop(units, Path(sys.argv[1]), options, say=lambda line: print(line, flush=True)), options)
"""


def write(folder):
    """Write the study's file; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = studies_in_process.write(folder)
    text = file.read_text()
    assert text.count("steps=6") == 1
    file.write_text(text.replace("steps=6", f"steps={STEPS}").replace("(1, 2, 3)", "(1, 2)"))
    return file


def engine(folder, commands):
    """Start a process with the local executor that carries out these training commands."""
    words = [sys.executable, "-c", ENGINE, str(folder), json.dumps(commands)]
    return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def wait_for(condition, seconds=600.0):
    """Wait until a condition is true, on a loaded machine for minutes; return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def contents(folder, below="runs"):
    """SHA-256 of every file below a folder, by default of the runs, but for those that say when things happened."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / below).rglob("*"))
        if path.is_file() and path.name not in ("log.jsonl", ".lock")
    }


def ends(folder):
    """How often each kind of end is in the leases of a study's units."""
    leases = (json.loads(path.read_text()) for path in (folder / "units").glob("*/*.json"))
    kinds = [lease["end"] for lease in leases if "end" in lease]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def num_training(folder):
    """How many attempts at runs have a checkpoint and are not published yet."""
    return len({path.parents[1] for path in (folder / "runs").glob(".*.attempt-*/checkpoints/step-*")})


def command(file, folder, *options):
    """The command that carries out the study."""
    words = ("study", "run", str(file), "--folder", str(folder), *map(str, options))
    return [sys.executable, "-m", "isoloss", *words]


SPREAD = """
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Resources, Scale, Study

language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
model = ModelConfig(size="d16", dropout=0.0)
config = TrainConfig(language=language, model=model, steps={steps}, batch_size=8, checkpoints=(3,))
measured = Measurement(measures=("loss",), settings={{"loss_sentences": 16}})
run = Experiment(config=config, measurements=(measured,), needs=Resources(processes=2))
STUDY = Study(name="spread", scales={{"tiny": Scale(description="seconds", experiments={{"run": run}})}})
"""


def write_spread(folder, *, steps):
    """Write the file of a study of one run that two processes train; return it."""
    file = folder / "spread.py"
    file.write_text(SPREAD.format(steps=steps))
    return file
