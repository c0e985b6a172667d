"""A suite of tiny checkpoints from a hub's cache, measured offline: resumed, with empty cells, and by command."""

import functools
import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from tiny_family import SEEDS, STEPS, family, text_in

from isoloss.cli.main import main
from isoloss.config import from_dict
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.suites.config import SuiteConfig, members
from isoloss.suites.outcomes import read_outcomes
from isoloss.suites.run import SuiteFolder
from isoloss.suites.table import SuiteTable
from small_checkpoints import llama, sentence_pieces

FEW = {"num_sequences": 12}
PATTERN = "lab/tiny-seed{seed}@step{step}"
pytestmark = pytest.mark.filterwarnings("ignore:the Hugging Face hub does not answer")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The home of a hub's cache, and a text."""
    home = tmp_path_factory.mktemp("home")
    family(home)
    return home, text_in(home / "docs")


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """The text, with the cache in its place and an empty folder as the current one."""
    home, text = made
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    return text


def suite(name, text, *patterns, **settings):
    document = {"texts": {"docs": str(text)}, "settings": FEW, "measures": ["trace", "int4-rise"], **settings}
    config = from_dict(SuiteConfig, {"checkpoints": list(patterns), **document})
    folder = SuiteFolder(Path(name).absolute(), config, tuple(members(config)), config.sources(), str(Path.cwd()))
    folder.write()
    return SuiteFolder.open(folder.path)


def measured(folder):
    """Measure all, and return the table."""
    for member in folder.members:
        try:
            folder.measure(member)
        except IsolossError:
            assert not next(unit for unit in folder.units() if unit.name == member.folder).done()
    folder.table().write(folder.path)
    return SuiteTable.read(folder.path)


def test_the_table_has_what_a_single_measurement_has(here):
    folder = suite("out", here, PATTERN)
    table = measured(folder)
    assert all(unit.done() for unit in folder.units())
    assert table.labels == ("seed", "step")
    wide = table.wide()
    assert list(zip(wide["seed"], wide["step"], strict=True)) == [(seed, step) for seed in SEEDS for step in STEPS]
    name = "lab/tiny-seed1@step2"
    for evaluation in evaluate(name, ["loss", "trace", "int4-rise"], data=here, settings=FEW):
        row = table.frame.row(by_predicate=(pl.col("checkpoint") == name) & (pl.col("measure") == evaluation.measure),
                              named=True)  # fmt: skip
        estimate = evaluation.estimates[evaluation.measure]
        assert (row["value"], row["stderr"], row["samples"]) == (estimate.value, estimate.stderr, estimate.samples)
        assert row["sha256"] == evaluation.weights
        assert row["problem"] is None
    assert table.roles() == ("loss", ["trace"], ["int4-rise"])
    (answer,) = table.associations()
    assert answer.pearson is None  # two seeds are too few
    assert answer.problem


def test_stopped_after_any_file_it_ends_with_the_same_bytes(here, monkeypatch):
    whole = suite("whole", here, "lab/tiny-seed0@step{step}")
    measured(whole)
    from isoloss import files

    write, left = files.write_bytes, 0

    def stopping(path, data):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        write(path, data)

    folder = suite("stopped", here, "lab/tiny-seed0@step{step}")
    monkeypatch.setattr(files, "write_bytes", stopping)
    for wait in (1, 2, 3, 4, 7):
        left = wait
        with pytest.raises(KeyboardInterrupt):
            measured(folder)
    left = 0
    measured(folder)
    assert (folder.path / "suite.parquet").read_bytes() == (whole.path / "suite.parquet").read_bytes()
    cells = sorted(path.name for path in (whole.path / "checkpoints").rglob("*.*"))
    assert sorted(path.name for path in (folder.path / "checkpoints").rglob("*.*")) == cells
    # a file that is damaged or whose influences are gone is made again
    monkeypatch.setattr(files, "write_bytes", write)
    cell = folder.cell(folder.members[0], "docs", "trace")
    before = cell.read_bytes()
    cell.with_suffix(".safetensors").unlink()
    assert not folder.units()[0].done()
    measured(folder)
    assert cell.read_bytes() == before


def test_what_cannot_be_measured_leaves_a_reason(here, made):
    plain = Path(made[0], "hub/models--lab--tiny-seed0/snapshots").glob("*")
    shutil.copytree(next(plain), "broken")
    Path("broken/model.safetensors").write_bytes(Path("broken/model.safetensors").read_bytes()[:-40])
    tokenizer = sentence_pieces()
    llama(len(tokenizer)).save_pretrained("other")
    tokenizer.save_pretrained("other")
    Path("short.txt").write_text("the house")
    patterns = ["broken", PATTERN, "other", "lab/tiny-seed0@step3", "lab/gone@step1", "no such folder"]
    folder = suite(
        "out", here, *patterns, texts={"docs": str(here), "short": "short.txt"}, measures=["trace", "bracket-parts"]
    )
    table = measured(folder)
    frame = table.frame
    assert len(frame) == (len(SEEDS) * len(STEPS) + 5) * 2 * 3

    def problem(checkpoint, measure="trace", text="docs"):
        found = frame.filter(checkpoint=checkpoint, measure=measure, text=text)
        assert found["value"].to_list() == [None]
        return found["problem"].item()

    good = frame.filter(pl.col("checkpoint").str.starts_with("lab/tiny-seed1"), text="docs", measure="trace")
    assert good["problem"].null_count() == len(good) == len(STEPS)
    assert "broken" in problem("broken")
    assert "vocabular" in problem("other") or "tokenizers" in problem("other")
    assert problem("lab/tiny-seed0@step3").startswith("there is no checkpoint lab/tiny-seed0@step3 on this machine, on")
    assert problem("lab/gone@step1").startswith("there is no checkpoint lab/gone@step1")
    assert problem("no such folder").startswith("there is no checkpoint no such folder")
    assert "short.txt" in problem("lab/tiny-seed0@step1", text="short")
    assert "bracket" in problem("lab/tiny-seed0@step1", measure="bracket-parts")
    # what failed to load is tried again
    shutil.copytree(next(Path(made[0], "hub/models--lab--tiny-seed0/snapshots").glob("*")), "no such folder")
    frame = measured(folder).frame
    assert frame.filter(checkpoint="no such folder", measure="trace", text="docs")["problem"].item() is None


def test_changed_texts_settings_and_weights_are_measured_again(here, made):
    shutil.copytree(next(Path(made[0], "hub/models--lab--tiny-seed0/snapshots").glob("*")), "mine")
    text = text_in(Path("text"))
    folder = suite("out", text, "mine", measures=[])
    (first,) = measured(folder).wide()["loss"]
    assert folder.units()[0].done()
    (text / "0.txt").write_text("the house of the blue house " * 20)
    folder = suite("out", text, "mine", measures=[])
    assert not folder.units()[0].done()
    (second,) = measured(folder).wide()["loss"]
    assert second != first
    folder = suite("out", text, "mine", measures=[], settings={"num_sequences": 14})
    assert not folder.units()[0].done()
    measured(folder)
    other = Path(made[0], "hub/models--lab--tiny-seed1/snapshots")
    shutil.copy(next(other.glob("*10")) / "model.safetensors", "mine/model.safetensors")
    assert not folder.units()[0].done()


def test_another_first_checkpoint_does_not_mix_inputs(here, made):
    """The tokenizer is that of the first checkpoint, so another first one is another suite."""
    tokenizer = sentence_pieces()
    llama(len(tokenizer)).save_pretrained("other")
    tokenizer.save_pretrained("other")
    alone = measured(suite("out", here, "other", measures=[]))
    mixed = suite("out", here, "lab/tiny-seed0@step1", "other", measures=[])
    measured(mixed)
    assert measured(mixed).wide()["loss"].is_null().to_list() == [False, True]  # it has other inputs
    # what was refused beside another one is measured alone
    again = measured(suite("out", here, "other", measures=[]))
    assert again.wide().equals(alone.wide())
    # a further checkpoint that is alike changes nothing
    before = suite("two", here, "lab/tiny-seed1@step1", measures=[])
    measured(before)
    after = suite("two", here, "lab/tiny-seed0@step1", "lab/tiny-seed1@step1", measures=[])
    after.measure(after.members[0])
    assert after.units()[1].done()


def test_wrong_names_of_outcomes_are_told_before_anything_is_measured(here):
    folder = suite("out", here, PATTERN, measures=["trace", "int4-rise", "features"], outcomes=["probe-sst2", "chess"])
    Path("results.csv").write_text("seed,step,loss,qa\n0,1,2.5,0.5\n")
    with pytest.raises(IsolossError, match="the imported column 'loss' has the name of a measure of the suite"):
        folder.check_outcomes(read_outcomes(["results.csv"], folder.members), ())
    Path("results.csv").write_text("seed,step,qa,quiz.acc,chess\n0,1,0.5,1,1500\n")
    outcomes = read_outcomes(["results.csv"], folder.members)
    names = ["qa", "quiz", "quiz.acc", "trace", "effective-rank", "features"]
    folder.check_outcomes(outcomes, names)
    folder.keep(outcomes)
    folder.check_outcomes(outcomes, names)  # a later value of the same
    for wrong, told in {
        "int4-rize": "'int4-rize' is neither a measure of the suite nor an imported outcome; did you mean int4-rise",
        "quiz.ac": "did you mean quiz.acc",
        "int4-rise (docs)": "did you mean int4-rise",  # there is only one text
        "?": "choose from .*effective-rank",
    }.items():
        with pytest.raises(IsolossError, match=told):
            folder.check_outcomes((), [wrong])
    with pytest.raises(IsolossError, match=r"'int4-rize' is neither a measure .*; did you mean int4-rise\?"):
        suite("new", here, PATTERN, outcomes=["int4-rize"]).check_outcomes((), ())
    with pytest.warns(IsolossWarning, match="'go' is neither .*: its cells stay empty until you import it"):
        suite("new", here, PATTERN, outcomes=["go"]).check_outcomes((), ())
    tasks = suite("tasks", here, PATTERN, measures=["lm-eval-quiz"])
    tasks.check_outcomes((), ["quiz", "lm-eval-quiz", "quiz.acc"])
    two = {"docs": str(here), "code": str(here)}
    suite("two", here, PATTERN, texts=two, measures=["spectral-density"]).check_outcomes(
        (), ["loss (code)", "spectral-density, trace"]
    )


def test_outcomes_of_others_are_kept(here):
    folder = suite("out", here, PATTERN, measures=["trace", "int4-rise"], outcomes=["chess"])
    table = folder.table()
    assert set(table.frame.filter(measure="chess")["problem"]) == {"no outcome with this name was imported"}
    Path("results.csv").write_text("seed,step,chess,chess_stderr,go\n0,1,1480,25,3\n1,10,1520,24,4\n")
    folder.keep(read_outcomes(["results.csv"], folder.members))
    Path("later.csv").write_text("checkpoint,go\nlab/tiny-seed0@step1,5\n")
    folder.keep(read_outcomes(["later.csv"], folder.members))
    table = folder.table()
    wide = table.wide()
    assert wide["chess"].to_list() == [1480, None, None, None, None, 1520]
    assert wide["chess_stderr"].to_list() == [25, None, None, None, None, 24]
    chess = table.frame.filter(measure="chess").row(0, named=True)
    assert (chess["high"], chess["samples"]) == (pytest.approx(1480 + 1.96 * 25, abs=0.01), None)  # a normal interval
    assert wide["go"].to_list() == [5, None, None, None, None, 4]
    assert wide["go_stderr"].null_count() == 6  # no error is known
    assert (
        table.frame.filter(measure="go")["problem"].to_list()[1] == "this outcome was not imported for the checkpoint"
    )
    # what is imported is no measure, and an outcome unless others are named
    assert table.roles()[2] == ["chess"]
    assert table.roles(["go"])[1:] == ([], ["chess", "go"])
    with pytest.raises(IsolossError, match="the table has no column 'ches'; did you mean chess"):
        table.roles(["ches"])


@pytest.mark.slow
def test_the_command(here, made, monkeypatch, capfd):
    monkeypatch.setenv("HF_HOME", str(made[0]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("suite.toml").write_text(
        f"""
        checkpoints = ["{PATTERN}", "lab/tiny-seed7@step1"]
        cluster = "seed"
        texts = {{docs = {json.dumps(str(here))}}}
        measures = ["trace", "int4-rise"]
        settings = {{num_sequences = 12}}
        """
    )
    assert main(["suite", "suite.toml", "--plan"]) == 0
    assert "7 checkpoints" in (told := capfd.readouterr().out)
    assert "so their size and time are unknown (first: lab/tiny-seed7@step1)" in " ".join(told.split())
    assert not Path("suite").exists()
    assert main(["suite", "suite.toml", "--predict", "int4-rize"]) == 2
    assert "did you mean int4-rise?" in capfd.readouterr().err
    assert not Path("suite").exists()
    assert main(["suite", "suite.toml"]) == 2
    out, said = capfd.readouterr()
    assert "the folder of the suite is suite" in said
    assert "suite.parquet: 7 checkpoints, 21 rows" in out
    assert "lab-tiny-seed7-step1" in said
    assert "there is no checkpoint lab/tiny-seed7@step1" in " ".join(out.split())
    before = Path("suite/suite.parquet").read_bytes()
    table = SuiteTable.read(Path("suite"))
    assert [each for each in table.problems() if "lab/tiny-seed7@step1" not in each] == []
    assert table.wide().drop_nulls().height == 6
    page = Path("suite/index.html").read_text()
    assert "what predicts int4-rise?" in page
    assert "there is no checkpoint lab/tiny-seed7@step1" in page
    # by the folder alone; only what failed is tried again
    assert main(["suite", "suite", "--json"]) == 2
    out, said = capfd.readouterr()
    assert "done in" not in said
    assert [each["measure"] for each in json.loads(out)["answers"]] == ["trace"]
    assert Path("suite/suite.parquet").read_bytes() == before


def test_an_executor_that_ends_with_an_error_on_what_cannot_be_loaded_leaves_the_table(here, monkeypatch, capsys):
    def carry_out(loop, options, *, any_unit=True):
        for attempt in loop if any_unit else ():
            loop.finish(attempt, main([*attempt.arguments]))
        raise IsolossError("no unit was done")  # as of Slurm's workers

    words = ("lab/tiny-seed0@step1", "none", "--data", str(here), "--measures", "trace", "--num-sequences", "12")
    monkeypatch.setattr("isoloss.cli.suite.executor_of", lambda args: functools.partial(carry_out, any_unit=False))
    assert main(["suite", *words, "--output", "out"]) == 2
    assert not Path("out/suite.parquet").exists()
    monkeypatch.setattr("isoloss.cli.suite.executor_of", lambda args: carry_out)
    assert main(["suite", *words, "--output", "out"]) == 2
    assert "no unit was done" in capsys.readouterr().err
    assert SuiteTable.read(Path("out")).wide()["trace"].is_null().to_list() == [False, True]


def test_the_mean_of_revisions_in_the_cache(here):
    assert main(["average", "lab/tiny-seed0@step1*", "lab/tiny-seed1@step2", "--output", "mean"]) == 0
    assert Path("mean/model.safetensors").is_file()


def test_a_plan_without_files_and_hub(here, capsys):
    Path("big.toml").write_text(
        """
        checkpoints = ["big/model-{size}@step{step}"]
        labels = {size = ["14m", "2.8b"], step = [0, 512]}
        parameters = {size = {14m = 14_067_712, "2.8b" = 2_775_208_960}}
        texts = {docs = "python:docs"}
        """
    )
    assert main(["suite", "big.toml", "--plan", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["download_bytes"] == 2 * 2 * (2_775_208_960 + 14_067_712)
    assert document["sizes"]["2,775,208,960 parameters"]["memory_bytes"] == 2**29 + 24 * 2_775_208_960
    assert document["sizes_from"] == ["the suite's table of parameters"]
    assert document["clusters"] == 2
    assert main(["suite", "big.toml", "--plan"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "To download: 11 GB" in out
    assert (
        "2 trainings: the suite will have the numbers, but which measure predicts which outcome takes at least 4; to"
        in out
    )
    Path("big.toml").write_text(Path("big.toml").read_text().replace("parameters", "# parameters"))
    assert main(["suite", "big.toml", "--plan"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 checkpoints, 0 done, to be kept in" in out
    assert "Not on this machine: 4 of the checkpoints" in out
    assert "Time" not in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no checkpoint is named"),
        (("lab/tiny-seed{seed}@step{step}",), "--output is missing: name a folder for the suite"),
        (
            ("lab/tiny-seed{seed}@step{step}", "--output", "taken"),
            "taken exists and is not an empty folder: choose another name",
        ),
        (("taken",), "name a folder for the suite; taken is not the folder of a suite"),
        (("suite.toml",), "suite.toml does not exist"),
        (("none/{seed}", "--output", "out"), "no folder matches"),
    ],
)
def test_mistakes_on_the_command_line(here, words, told, capsys):
    Path("taken").mkdir()
    Path("taken/file").touch()
    assert main(["suite", *words]) == 2
    assert told in capsys.readouterr().err
    assert not Path("out").exists()
