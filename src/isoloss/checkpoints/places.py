"""What names and files alone tell of checkpoints, before torch is imported, which takes seconds."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from isoloss import files
from isoloss.errors import IsolossError, warn

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MAGIC = re.compile(r"[*?]|\[[^]]+\]")  # in a pattern, what stands for other text
_STEP = re.compile(r"step-\d+")  # the checkpoints of a run
_IN_SERIES = re.compile(r"(checkpoint|step|epoch)[-_]?(\d+)")  # the checkpoints of a Trainer, and of other trainers
CONFIG, ADAPTER = "config.json", "adapter_config.json"
TRAINER = "trainer.json"  # in a checkpoint of isoloss: where training stood, and the SHA-256 of the other files
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ACADEMIC, PICKLE = "encoder_ln_mode", "pytorch_model.bin"  # a field of Academic Budget BERT's config; its weights
WEIGHTS_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_UNREACHABLE = "the Hugging Face hub does not answer"
FROM_CACHE = f"cannot be loaded from earlier downloads, and {HUB_UNREACHABLE}"
_POINTER = b"version https://git-lfs"


def may_be_hub_name(name: str) -> bool:
    """Return whether `name` may be `model` or `owner/model` on the Hugging Face hub; otherwise it is a path.

    A path is what lies in a folder that exists, or is named like a run's checkpoint.

    Example:
        >>> from isoloss.checkpoints.places import may_be_hub_name
        >>> may_be_hub_name("google-bert/bert-base-uncased"), may_be_hub_name("runs/first/checkpoints/step-100")
        (True, False)
    """
    folder, _, last = name.rpartition("/")
    is_path = (bool(folder) and Path(folder).is_dir()) or _STEP.fullmatch(last) is not None
    return _HUB_NAME.fullmatch(name) is not None and not is_path


def expand_checkpoints(names: Iterable[str], say: Callable[[str], None] = lambda text: None) -> list[str]:
    """Return the checkpoints that names stand for, each series in the order of its steps.

    A folder of checkpoints, such as the `output_dir` of a Trainer, stands for the checkpoints in it, unless it holds
    weights of its own. A pattern of the shell stands for the folders that match it. `NAME@step*` stands for revisions
    of a model on the Hugging Face hub, and `owner/model-*@step*` for those of each model that matches. Any other name
    stands for itself, whether there is such a checkpoint or not. Checkpoints of a series that are not whole, as after a
    crash, are left out with a warning.

    `say` is called with a line for each name that does not stand for itself alone.
    """
    found: list[str] = []
    for name in names:
        folder = Path(name).expanduser()
        on_hub, _, revisions = name.partition("@")
        if folder.is_dir():
            found += _in_folder(folder, say) or [name]
        elif not glob.has_magic(name):
            found.append(name)
        elif matching := sorted(filter(Path.is_dir, map(Path, glob.glob(str(folder)))), key=_by_numbers):
            found += _announced(name, _whole(matching, say), say)
        elif may_be_hub_name(_MAGIC.sub("x", on_hub)) and not glob.has_magic(on_hub.rpartition("/")[0] or on_hub):
            found += _announced(name, _on_hub(on_hub, revisions), say)
        else:
            raise IsolossError(f"no folder matches {name!r}")
    return found


def series_of(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return series of checkpoints by the part of their names before the step, each in the order of steps.

    A name without a step is a series of its own. The result is empty for fewer than three names, if no two belong to
    one series, or if two have the same series and step.

    Example:
        >>> from isoloss.checkpoints.places import series_of
        >>> series_of(["a/checkpoint-20", "a/checkpoint-10", "b"])
        {'a': {10: 'a/checkpoint-10', 20: 'a/checkpoint-20'}, 'b': {0: 'b'}}
    """
    found: dict[tuple[str, bool], dict[int, str]] = {}
    names = list(names)
    for name in names:
        start = max(name.rfind("/"), name.rfind("@")) + 1
        *_, last = [None, *_IN_SERIES.finditer(name, start)]
        key, step = (name, 0) if last is None else (name[: last.start()].rstrip("/@-_") or "checkpoints", int(last[2]))
        if step in found.setdefault((key, last is not None), {}):
            return {}  # the step is not all that tells them apart
        found[key, last is not None][step] = name
    if len(names) < 3 or len(found) == len(names):
        return {}
    return {
        # a Trainer's last model, or the main branch on the hub, is no step 0 of its checkpoints
        key if has_steps or (key, True) not in found else f"{key} itself": dict(sorted(series.items()))
        for (key, has_steps), series in found.items()
    }


def siblings_of(name: str) -> str | None:
    """Return the pattern of the checkpoints beside one, at other steps; None where there are none."""
    path = Path(name)
    if not _IN_SERIES.fullmatch(path.name):
        return None
    pattern = re.sub(r"\d+", "*", path.name)
    count = sum(1 for _ in path.expanduser().parent.glob(pattern))
    return str(path.parent / pattern) if count > 1 else None


def _in_folder(folder: Path, say: Callable[[str], None]) -> list[str]:
    """Return the checkpoints in a folder that is none itself."""
    series = sorted((path for path in folder.iterdir() if _IN_SERIES.fullmatch(path.name)), key=_by_numbers)
    if not any((path / file).is_file() for path in series for file in (CONFIG, ADAPTER)):
        return []
    if any((folder / file).is_file() for file in (WEIGHTS, INDEX, ADAPTER)):
        pattern = folder / re.sub(r"\d+", "*", series[0].name)
        say(f"{folder}: the model that it holds itself; '{pattern}' names the checkpoints in it ({len(series)})")
        return []
    return _announced(str(folder), _whole(series, say), say)


def _whole(folders: list[Path], say: Callable[[str], None]) -> list[str]:
    """Return the folders that are checkpoints, and the checkpoints in the others."""
    found, problems = list[str](), list[IsolossError]()
    for folder in folders:
        try:
            inside = _in_folder(folder, say)
            if not inside:
                check_folder(folder)
            found += inside or [str(folder)]
        except IsolossError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    for problem in problems:
        warn(f"left out: {problem}")
    return found


def _on_hub(pattern: str, revisions: str) -> list[str]:
    """Return the models on the hub that match, at each branch and tag that matches; without `revisions`, at none."""
    models, ask = _family(pattern) if glob.has_magic(pattern) else ([pattern], True)
    if not revisions:
        return models
    known = {name: sorted(_revisions(name, ask=ask), key=_by_numbers) for name in models}
    found = [f"{name}@{revision}" for name in models for revision in fnmatch.filter(known[name], revisions)]
    if not found:
        raise IsolossError(f"{models[0]} has no revision {revisions!r}: they are {', '.join(known[models[0]])}")
    return found


def _family(pattern: str) -> tuple[list[str], bool]:
    """Return the models that match, on the hub or, if it does not answer, in its cache; and whether it answers."""
    from huggingface_hub import HfApi, constants, get_session

    owner, _, model = pattern.rpartition("/")
    try:
        word = max(_MAGIC.split(model), key=len)
        get_session().head(constants.ENDPOINT, timeout=20)  # asked once; the listing would ask again and again
        listed = [found.id for found in HfApi().list_models(author=owner or None, search=word or None)]
        answers = True
    except Exception:  # whatever the network or its library can raise
        # the name of a folder in the cache is models--OWNER--MODEL
        found = _cache("any").parent.glob("models--*")
        listed, answers = [path.name.removeprefix("models--").replace("--", "/", 1) for path in found], False
    matching = sorted(fnmatch.filter(listed, pattern), key=_by_numbers)
    if not matching:
        where = "on the Hugging Face hub" if answers else f"on this machine, and {HUB_UNREACHABLE}"
        raise IsolossError(f"no folder matches {pattern!r}, and no model {where}")
    if not answers:
        warn(f"{HUB_UNREACHABLE}: only the models {pattern} that were downloaded before are used")
    return matching, answers


def _revisions(name: str, *, ask: bool) -> set[str]:
    """Return the branches and tags of a model on the hub; with `ask` false, the downloaded ones."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    if not ask:
        return set(_downloaded_revisions(name))
    try:
        refs = HfApi().list_repo_refs(name)
        return {ref.name for ref in (*refs.branches, *refs.tags)}
    except RepositoryNotFoundError as error:
        raise IsolossError(f"there is no checkpoint {name} on the Hugging Face hub") from error
    except Exception as error:  # whatever the network or its library can raise
        known = set(_downloaded_revisions(name))
        if not known:
            raise IsolossError(f"{HUB_UNREACHABLE}, and no revision of {name} is on this machine") from error
        warn(f"{HUB_UNREACHABLE}: only the revisions of {name} that were downloaded before are used")
        return known


def _announced(name: str, checkpoints: list[str], say: Callable[[str], None]) -> list[str]:
    ends = dict.fromkeys([checkpoints[0], checkpoints[-1]])
    say(f"{name}: {len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}, {' to '.join(ends)}")
    return checkpoints


def _by_numbers(name: str | Path) -> list[str | int]:
    """Return a key by which checkpoint-1000 comes after checkpoint-200."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(name))]


def check_checkpoint(name: str, module: str | None = None) -> None:
    """Refuse what is neither a folder with a model or an adapter nor what may be `NAME@REVISION` on the hub.

    With the `module` that `FILE.py:NAME` builds, a checkpoint is a file of weights.
    """
    if module is not None:
        split_module(module)
        check_weights_file(Path(name).expanduser())
        return
    folder = Path(name).expanduser()
    if folder.is_file():
        raise IsolossError(
            f"{name} is a file, and a checkpoint is a folder: if it is what models read, put --data before it; if it "
            "has the weights of a module of your own, add --module FILE.py:NAME"
        )
    if not folder.is_dir():
        if not may_be_hub_name(name.partition("@")[0]):
            raise IsolossError(f"there is no checkpoint {name}: it is not a folder{files.nearest(folder)}")
        return
    check_folder(folder)


def split_module(module: str) -> tuple[Path, str]:
    """Return the file and the function that `FILE.py:NAME` names."""
    file, _, name = module.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not name.isidentifier():
        raise IsolossError(f"the module is {module!r}; it must be FILE.py:NAME, a file and a function in it")
    if not path.is_file():
        raise IsolossError(f"{path} does not exist{files.nearest(path)}")
    return path, name


def check_weights_file(path: Path) -> None:
    """Refuse what is no file of a module's weights."""
    if not path.is_file():
        weights = sorted(str(file) for file in path.glob("*") if file.suffix in WEIGHTS_FILES)
        instead = f"; its files are {', '.join(weights)}" if weights else files.nearest(path)
        raise IsolossError(f"{path} is not a file: with --module, a checkpoint is a file of weights{instead}")
    if path.suffix not in WEIGHTS_FILES:
        raise IsolossError(f"{path} is no file of weights: its name must end in {', '.join(WEIGHTS_FILES)}")
    check_content(path)


def hub_answers(name: str, *, what: str = "checkpoint", revision: str | None = None) -> bool:
    """Return whether the Hugging Face hub can be reached.

    It is asked once; transformers and datasets would go on asking.

    Raises:
        IsolossError: It can, and has no repository of this name, or not this revision. `what` says what is wanted:
            `dataset`, or something of a model.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        ask = huggingface_hub.dataset_info if what == "dataset" else huggingface_hub.model_info
        ask(name, revision=revision, timeout=20)
    except RevisionNotFoundError as error:
        raise IsolossError(f"there is no revision {revision} of {name} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise IsolossError(
            f"there is no {what} {name}, neither a folder here nor on the Hugging Face hub{files.nearest(name)}"
        ) from error
    except Exception:  # whatever the network or its library can raise
        return False
    return True


def downloaded(name: str, revision: str | None) -> Path:
    """Return the folder of a checkpoint in the hub's cache, if it is whole, for when the hub does not answer."""
    full_name = name if revision is None else f"{name}@{revision}"
    folder = _snapshot(name, revision or "main")
    if not folder.is_dir():
        known = _downloaded_revisions(name)
        only, meant = (f", only {', '.join(known)}", "") if known else ("", files.nearest(name))
        raise IsolossError(f"there is no checkpoint {full_name} on this machine{only}, and {HUB_UNREACHABLE}{meant}")
    try:
        check_folder(folder)
    except IsolossError as error:
        raise IsolossError(f"{full_name} {FROM_CACHE}: {error}") from error
    return folder


def _snapshot(name: str, revision: str) -> Path:
    ref = _cache(name) / "refs" / revision
    return _cache(name) / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)


def _cache(name: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))


def _downloaded_revisions(name: str) -> list[str]:
    """Return the branches and tags of a model that are in the hub's cache."""
    refs = _cache(name) / "refs"
    known = [str(path.relative_to(refs)) for path in refs.rglob("*") if path.is_file()]
    return sorted((each for each in known if _snapshot(name, each).is_dir()), key=_by_numbers)


def check_reachable(name: str, module: str | None = None) -> None:
    """Refuse what `check_checkpoint` refuses, and a name that neither this machine nor the Hugging Face hub has."""
    check_checkpoint(name, module)
    if module is not None or Path(name).expanduser().is_dir():
        return
    on_hub, _, revision = name.partition("@")
    if not hub_answers(on_hub, revision=revision or None):
        downloaded(on_hub, revision or None)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds neither a model nor an adapter, in a sentence that says what it is instead."""
    # first of all: read as JSON, the pointer would only seem damaged
    for path in (folder / CONFIG, folder / ADAPTER, *sorted(folder.glob("*.safetensors"))):
        check_content(path)
    if (folder / ADAPTER).is_file():
        return
    if not (folder / CONFIG).is_file():
        instead = _instead(folder)
        raise IsolossError(f"{folder} is not a checkpoint: it has no config.json{instead and f'; {instead}'}")
    named = (WEIGHTS, INDEX, *[PICKLE] * (ACADEMIC in (folder / CONFIG).read_text(errors="replace")))
    if not any((folder / name).is_file() for name in named):
        raise IsolossError(f"{folder} has no weights: {_instead(folder) or 'there is no model.safetensors in it'}")


def check_content(path: Path) -> None:
    """Refuse the pointer that Git leaves in the place of a large file."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise IsolossError(
                    f"{path} is a pointer of Git LFS, not the file itself: git -C {path.parent} lfs pull gets it"
                )


def _instead(folder: Path) -> str:
    """Return what a folder without a model or its weights holds, and what makes that a checkpoint."""
    inside = [path.parent for name in (CONFIG, ADAPTER) for path in _below(folder, name)]
    shards = next(iter([*folder.glob("*.distcp"), *_below(folder, "*.distcp")]), None)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    safetensors = sorted(path.name for path in folder.glob("*.safetensors"))
    # DeepSpeed and FSDP come before pickles: beside their parts lie scheduler.pt and the like, which are no weights
    if (folder / "zero_to_fp32.py").is_file():
        return (
            "DeepSpeed saves weights in parts; merge them with: "
            f"python {folder}/zero_to_fp32.py {folder} {folder} --safe_serialization"
        )
    if any(folder.glob("global_step*")):
        return "DeepSpeed saves weights in parts, and its zero_to_fp32.py, which puts them together, is not there"
    if shards is not None:
        return f"FSDP saves weights in parts; merge them with: accelerate merge-weights {shards.parent} {folder}"
    if inside:
        last = max(inside, key=lambda path: _by_numbers(path.name))
        return f"name a checkpoint in it, such as {last}"
    if any("-of-" in name for name in safetensors):
        return f"{safetensors[0]} is one shard, and {INDEX}, which maps weights to shards, is missing"
    if safetensors and WEIGHTS not in safetensors:
        return f"there is no {WEIGHTS} in it, but {', '.join(safetensors)}"
    if pickles:
        return (
            f"they are there only as a pickle ({', '.join(pickles)}), and loading a pickle can run any code; read it "
            f"with torch.load and weights_only=True, and write its tensors by safetensors.torch.save_file as {WEIGHTS}"
        )
    return ""


def _below(folder: Path, pattern: str) -> list[Path]:
    return sorted([*folder.glob(f"*/{pattern}"), *folder.glob(f"*/*/{pattern}")])


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint of a run whose weights, config or tokenizer are not those that training wrote."""
    for problem in checkpoint_damage(folder, lambda name: name != "trainer.safetensors"):
        raise IsolossError(problem)


def checkpoint_damage(folder: Path, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield a sentence for each wanted file of a checkpoint that does not have the SHA-256 in trainer.json."""
    record = folder / TRAINER
    remedy = (
        f"restore the file, or delete {folder} and all later checkpoints of the run, and its result.json, and train "
        "again"
    )
    recorded = files.read_sealed(record, remedy).get("sha256") if record.is_file() else None
    for name, sha256 in recorded.items() if isinstance(recorded, dict) else ():
        if is_wanted(name) and (not (folder / name).is_file() or files.sha256(folder / name) != sha256):
            yield (
                f"{folder / name} is damaged: its SHA-256 is not the one that training recorded in {record}; {remedy}"
            )
