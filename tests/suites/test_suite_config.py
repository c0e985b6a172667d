"""Which checkpoints the patterns of a suite stand for, with their labels, and its table."""

from pathlib import Path

import pytest

from isoloss.config import from_dict, read_toml
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.statistics.estimate import Estimate
from isoloss.suites.config import Member, SuiteConfig, members
from isoloss.suites.table import SuiteTable, empty, number


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub's cache, offline, with two seeds at three steps each, and another model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("lab--tiny-seed10", "lab--tiny-seed2", "lab--other"):
        for step in ("step1", "step10", "step2", "main"):
            saved(tmp_path / "hub" / f"models--{name}" / "snapshots" / step)
            ref = tmp_path / "hub" / f"models--{name}" / "refs" / step
            ref.parent.mkdir(exist_ok=True)
            ref.write_text(step)
    return tmp_path


def saved(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()


def found(*patterns, **settings):
    config = from_dict(SuiteConfig, {"checkpoints": list(patterns), **settings})
    return {member.name: dict(member.labels) for member in members(config)}


@pytest.mark.filterwarnings("ignore:the Hugging Face hub does not answer")
def test_families_in_the_cache(cache):
    family = found("lab/tiny-seed{seed}@step{step}", cluster="seed", along="step")
    assert list(family.items())[:2] == [
        ("lab/tiny-seed2@step1", {"seed": 2, "step": 1}),
        ("lab/tiny-seed2@step2", {"seed": 2, "step": 2}),
    ]
    assert [each["seed"] for each in family.values()] == [2, 2, 2, 10, 10, 10]
    assert [each["step"] for each in family.values()] == [1, 2, 10] * 2
    assert found("lab/tiny-seed{seed}") == {"lab/tiny-seed2": {"seed": 2}, "lab/tiny-seed10": {"seed": 10}}
    # without braces, the number at the end is a step
    assert found("lab/other@step*")["lab/other@step10"] == {"series": "lab/other", "step": 10}
    assert found("lab/other@step2") == {"lab/other@step2": {}}
    with pytest.warns(IsolossWarning, match=r"left out: no folder matches 'lab/none-\*'"):
        assert list(found("lab/none-{x}@step{step}", "lab/other@step{step}")) == [
            f"lab/other@step{step}" for step in (1, 2, 10)
        ]
    with pytest.raises(IsolossError, match=r"lab/other has no revision 'epoch\*': they are main, step1, step2, step10"):
        found("lab/other@epoch{epoch}")


def test_labels_with_given_values(cache):
    # every combination, whether there is one or not
    given = found("big/model-{size}@step{step}", labels={"size": ["14m", "31m"], "step": [0, 512]})
    assert list(given) == [f"big/model-{size}@step{step}" for size in ("14m", "31m") for step in (0, 512)]
    assert given["big/model-31m@step512"] == {"size": "31m", "step": 512}
    with pytest.warns(IsolossWarning, match="hub does not answer"):
        some = found("lab/tiny-seed{seed}@step{step}", labels={"step": [10]})
    assert list(some) == ["lab/tiny-seed2@step10", "lab/tiny-seed10@step10"]
    with pytest.raises(IsolossError, match="the values of the label step are 10; they must be a list"):
        found("lab/tiny-seed2@step{step}", labels={"step": 10})


def test_folders_of_any_name(cache):
    names = ["sgd, lr=0.1/step 5", "sgd, lr=0.1/step 40", "sám {x} [1]/step 5"]
    for name in names:
        saved(Path("runs", name))
    assert found("runs/{recipe}/step {step}", levels="recipe") == {
        "runs/sgd, lr=0.1/step 5": {"recipe": "sgd, lr=0.1", "step": 5},
        "runs/sgd, lr=0.1/step 40": {"recipe": "sgd, lr=0.1", "step": 40},
        "runs/sám {x} [1]/step 5": {"recipe": "sám {x} [1]", "step": 5},
    }
    assert found("runs/sám {x} [1]/step 5") == {"runs/sám {x} [1]/step 5": {}}
    folders = {Member(name, {}).folder for name in ("a/b", "a-b", "a b", "é" * 300, "é" * 301)}
    assert len(folders) == 5
    assert all(len(folder) < 100 and folder.isascii() and "/" not in folder for folder in folders)
    # the same text in both places
    saved(Path("pairs/1/seed1"))
    saved(Path("pairs/1/seed2"))
    assert found("pairs/{seed}/seed{seed}") == {"pairs/1/seed1": {"seed": 1}}


def test_a_run_stands_for_its_last_checkpoint(cache):
    for step in (5, 40):
        saved(Path(f"runs/sgd/checkpoints/step-{step}"))
    Path("runs/sgd/run.json").write_text("{}")
    assert found("runs/sgd") == {"runs/sgd/checkpoints/step-40": {}}
    given = {"runs/sgd/checkpoints/step-40": {"recipe": "sgd"}}
    assert found("runs/{recipe}", labels={"recipe": ["sgd"]}) == given


def test_a_name_with_two_readings_is_refused(cache):
    for recipe in ("adamw", "adamw-4x"):
        saved(Path("runs", f"{recipe}-7"))
    told = "reads runs/adamw-4x-7 as recipe adamw and seed 4x-7, or as recipe adamw-4x and seed 7: list"
    with pytest.raises(IsolossError, match=told):
        found("runs/{recipe}-{seed}")
    with pytest.raises(IsolossError, match=r"as labels = \{seed = \[...\]\}"):
        found("runs/{recipe}-{seed}", labels={"recipe": ["adamw", "adamw-4x"]})
    both = found("runs/{recipe}-{seed}", labels={"seed": [7]})
    assert both == {f"runs/{recipe}-7": {"recipe": recipe, "seed": 7} for recipe in ("adamw", "adamw-4x")}
    assert found("runs/{recipe}-{seed}", labels={"recipe": ["adamw-4x"]})["runs/adamw-4x-7"]["seed"] == 7


def test_odd_and_unused_values_of_labels_are_told(cache):
    for seed in ("0", "1", "backup"):
        saved(Path("runs", seed))
    told = r"\{seed\} is 'backup' in runs/backup but an integer in other names: .* labels = \{seed = \[...\]\}"
    with pytest.warns(IsolossWarning, match=told):
        assert len(found("runs/{seed}")) == 3
    with pytest.warns(IsolossWarning, match="no checkpoint has the seed 7 or main that the table labels lists"):
        some = found("r{rest}/{seed}", labels={"seed": [0, 7, "1", "main"]})
    assert some == {f"runs/{seed}": {"rest": "uns", "seed": seed} for seed in (0, 1)}


def test_steps_that_are_named_one_by_one_are_a_series(cache):
    """As a shell passes them on, also where it names a folder twice."""
    for step in (10, 20, 100):
        saved(Path("run", f"step-{step}"))
    names = [
        "run/step-10",
        "run/step-20",
        "run/step-100",
        "run/step-10/",
        "./run/step-20",
        str(Path.cwd() / "run/step-10"),
    ]
    assert found(*names) == {f"run/step-{step}": {"series": "run", "step": step} for step in (10, 20, 100)}


def test_clusters_do_not_run_together_and_copies_count_once():
    labels = (("x, y", "z"), ("x", "y, z"), ("q", "r"), ("s", "t"), ("u", "v"), ("w", "x"))
    members = [Member(f"{a}/{b}", {"a": a, "b": b}) for a, b in labels]
    made = {"loss": [3, 2, 4, 1, 5, 5], "m": [1, 5, 2, 7, 3, 3], "int4-rise": [2, 4, 1, 6, 3, 3]}
    rows = []
    for place, member in enumerate(members):
        for name, values in made.items():
            rows.append((member, number("", name, estimate(float(values[place])), str(min(place, 4)))))
    table = SuiteTable.of(from_dict(SuiteConfig, {"checkpoints": ["x"]}), members, rows)
    assert len({*table.clusters()}) == 6
    assert table.copies() == {"u/v": ["w/x"]}
    (answer,) = table.associations()
    assert (answer.observations, answer.clusters) == (5, 5)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"checkpoints": []}, "checkpoints is empty"),
        ({}, "checkpoints is missing"),
        (
            {"checkpoints": ["runs/{seed}"], "cluster": "sed"},
            "cluster is 'sed', which is not a label of.*mean seed",
        ),
        ({"checkpoints": ["runs/{seed}"], "labels": {"sed": [1]}}, "table labels is 'sed', which is not .*mean seed"),
        ({"checkpoints": ["runs/{}"]}, r"'runs/\{\}' has \{\}: braces hold the name of a new column"),
        ({"checkpoints": ["runs/{value}"]}, r"has \{value\}: braces hold"),
        ({"checkpoints": ["runs/{loss}"]}, r"the label \{loss\} has the name of a measure"),
        ({"checkpoints": ["runs/{seed}"], "measures": ["tracee"]}, "no measure 'tracee'; did you mean trace"),
        ({"checkpoints": ["runs/{seed}"], "settings": {"num_sequence": 3}}, "did you mean num_sequences"),
        ({"checkpoints": ["runs/{seed}"], "texts": {"docs": "no.txt"}}, "there is no data no.txt"),
        ({"checkpoints": ["runs/{seed}"], "texts": "docs.txt"}, "texts is 'docs.txt'; it must be a table"),
        ({"checkpoints": ["runs/{seed}"], "clusters": "seed"}, "no setting 'clusters'; did you mean cluster"),
        ({"checkpoints": ["elsewhere/{seed}"]}, r"no folder matches 'elsewhere/\*'"),
    ],
)
@pytest.mark.filterwarnings("ignore:the Hugging Face hub does not answer")
def test_mistakes_are_one_sentence(cache, document, told):
    for seed in (1, 2):
        saved(Path("runs", str(seed)))
    with pytest.raises(IsolossError, match=told):
        found(*document.pop("checkpoints", ()), **document) if "checkpoints" in document else from_dict(SuiteConfig, {})
    Path("suite.toml").write_text("checkpoints = [1]")
    with pytest.raises(IsolossError, match=r"^suite.toml: checkpoints\[0\] is 1; it must be text$"):
        read_toml(SuiteConfig, Path("suite.toml"))


def estimate(value):
    return Estimate(value=value, stderr=0.1, samples=4, unit="nats", num_predictions=9, method="mean")


def test_one_long_table_and_a_wide_one(tmp_path):
    config = from_dict(SuiteConfig, {"checkpoints": ["x"]})
    first, second = Member("a/1", {"seed": 1, "step": 10}), Member("b", {"seed": 1, "step": "last"})
    rows = [
        (first, number("docs", "loss", estimate(1.0), "f0")),
        (first, number("code", "loss", estimate(2.0), "f0")),
        (first, number("", "task.acc", estimate(0.5))),
        (second, empty("docs", "loss", "too short")),
        (second, empty("code", "loss", "too short")),
    ]
    table = SuiteTable.of(config, [first, second], rows)
    table.write(tmp_path)
    (tmp_path / "suite.json").write_text('{"config": {"checkpoints": ["x"]}}')
    again = SuiteTable.read(tmp_path)
    assert again.frame.equals(table.frame)
    assert again.labels == ("seed", "step")
    assert table.frame["step"].to_list() == ["10", "10", "10", "last", "last"]  # a label with words is text
    assert table.frame["low"][0] < 1.0 < table.frame["high"][0]
    wide = table.wide()
    assert wide["loss (docs)"].to_list() == [1.0, None]
    assert wide["task.acc_stderr"].to_list() == [0.1, None]
    assert wide["seed"].to_list() == [1, 1]
    assert table.problems() == ["loss of b and 1 more: too short"]
    assert table.clusters() == ["1", "1"]
    assert table.roles(["task.acc"]) == ("loss (docs)", [], ["task.acc"])
