"""`isoloss study new`: write the file of a study to start from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from isoloss import files
from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.registry import STUDIES
from isoloss.text import hub_datasets

_TRAINED = '''\
"""{name}: does dropout change how flat a model is, and how well it transfers?"""

from isoloss.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study

LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)  # isoloss ls languages
MEASURED = Measurement(
    measures=("loss", "trace", "minimal-trace", "probe-root"),  # isoloss ls measures
    settings={{"loss_sentences": 256, "num_train": 256, "num_test": 256, "probe_seeds": 2}},
)


def run(dropout, seed):
    model = ModelConfig(size="d16", dropout=dropout)  # isoloss ls models
    config = TrainConfig(language=LANGUAGE, model=model, steps=400, batch_size=64, checkpoints=(200,), seed=seed)
    return Experiment(config=config, measurements=(MEASURED,), group=f"dropout {{dropout}}")


# A model trained elsewhere: Experiment(config=ExternalCheckpoint(checkpoint="FOLDER", data="text.txt"), ...),
# with isoloss.studies.ExternalCheckpoint
RUNS = {{f"dropout-{{rate}}-seed-{{seed}}": run(rate, seed) for rate in (0.0, 0.2) for seed in (1, 2)}}

# Claims, written before the runs: Study(claims=..., contrasts=...); docs/studies.md has an example
STUDY = Study(name="{name}", scales={{"laptop": Scale(description="a minute", experiments=RUNS)}})
'''

_EXTERNAL = '''\
"""{name}: how flat are these checkpoints, and what is their loss?"""

from isoloss.studies import Experiment, ExternalCheckpoint, Measurement, Scale, Study

DATA = {data}
CHECKPOINTS = {{  # what each is called in tables: its folder, or its name on the Hugging Face hub
{checkpoints}
}}
MEASURED = Measurement(measures=("loss", "trace", "minimal-trace"))  # isoloss ls measures
RUNS = {{
    name: Experiment(config=ExternalCheckpoint(checkpoint=checkpoint, data=DATA), measurements=(MEASURED,))
    for name, checkpoint in CHECKPOINTS.items()
}}

# Claims, written before the runs: Study(claims=..., contrasts=...); docs/studies.md has an example
STUDY = Study(name="{name}", scales={{"all": Scale(description="a minute for small models", experiments=RUNS)}})
'''


def write(name: str, checkpoints: Sequence[str], data: Path | None, *, as_json: bool) -> int:
    """Write NAME.py into the current folder; it must not be there yet."""
    stem = name.removesuffix(".py")
    if not re.fullmatch(r"[A-Za-z][\w-]*", stem, re.ASCII):
        raise IsolossError(
            f"the study's name is {name!r}; it must begin with a letter and have letters, digits, - and _"
        )
    if stem in STUDIES:
        raise IsolossError(f"there is a study {stem} already (isoloss ls studies): choose another name")
    if bool(checkpoints) != (data is not None):
        missing = "--data, the text that they are measured on" if checkpoints else "--checkpoints"
        raise IsolossError(f"--checkpoints and --data go together: add {missing}")
    path = Path(f"{stem}.py")
    if path.exists():
        raise IsolossError(f"{path} is there already: choose another name")
    text = _given(stem, checkpoints, data) if data is not None else _TRAINED.format(name=stem)
    files.write_text(path, text)
    if as_json:
        common.emit_json({"file": str(path)})
    else:
        common.say(f"{path} written. To run it:")
        common.say(f"  {common.command('study', 'run', path)}")
    return 0


def _given(name: str, checkpoints: Sequence[str], data: Path) -> str:
    if not (hub_datasets.is_dataset(data) or data.exists()):
        raise IsolossError(f"there is no data {data}{files.nearest(data)}")
    called: dict[str, str] = {}
    for checkpoint in checkpoints:
        folder = Path(checkpoint).expanduser()
        plain = re.sub(r"[^\w.-]+", "-", folder.resolve().name if folder.is_dir() else checkpoint).strip("-.")
        if plain in called or not plain:
            plain = f"{plain or 'checkpoint'}-{len(called) + 1}"
        called[plain] = checkpoint
    return _EXTERNAL.format(
        name=name,
        data=_quoted(str(data)),
        checkpoints="\n".join(f"    {_quoted(key)}: {_quoted(value)}," for key, value in called.items()),
    )


def _quoted(text: str) -> str:
    """Return a Python string in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
