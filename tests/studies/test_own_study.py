"""A study of one's own: a Python file, with the machinery's tables and page, run by any executor."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from isoloss.cli import study as command
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.registry import OPTIMIZERS
from isoloss.runs import Run
from isoloss.statistics.estimate import rounded
from isoloss.studies import load_study, page
from isoloss.studies.folder import StudyFolder
from isoloss.studies.page import report
from isoloss.studies.verify import verify
from pages import unpacked
from studies_in_process import call, carry_out

FILE = """
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, StageConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study

LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)

def run(dropout):
    config = TrainConfig(
        language=LANGUAGE, model=ModelConfig(size="d16", dropout=dropout), steps=6, batch_size=8, checkpoints=(3,)
    )
    settings = {"loss_sentences": 16, "num_sequences": 8}
    return Experiment(config=config, measurements=(Measurement(measures=("loss", "trace"), settings=settings),))

STUDY = Study(
    name="dropout",
    scales={"tiny": Scale(description="seconds", experiments={"without": run(0.0), "with": run(0.1)})},
)
"""

CLAIMS = """
import dataclasses
from isoloss.studies import Claim, Contrast

def dropout(results):
    '''The last checkpoints.'''
    pair = results.at("without", 6), results.at("with", 6)
    return Contrast(names=("without", "with"), pairs=[pair], needs_same_loss=False)

CLAIM = Claim(id="flatter", statement="Dropout flattens", direction="decrease", of=dropout, measures="flatness")
STUDY = dataclasses.replace(STUDY, claims=[CLAIM])
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_study.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The folder of the study with its claims, carried out without a page."""
    folder = tmp_path_factory.mktemp("once")
    (folder / "my_study.py").write_text(FILE + CLAIMS)
    made = StudyFolder(load_study(folder / "my_study.py"), folder / "out")
    made.prepare()
    carry_out(made.plan(), made.path)
    return made.path


@pytest.fixture
def done(once, tmp_path):
    """A copy of it."""
    return shutil.copytree(once, tmp_path / "out")


def test_a_setting_may_have_several_values(capsys, file, tmp_path, here):
    several = '"num_train": 64, "num_test": "all", "probe_solver": "convex", "probe_regularization": (1e-3, 1e-2)'
    text = FILE.replace('"num_sequences": 8', several).replace('"trace"', '"probe-prefix-4"')
    file.write_text(text.replace(', "with": run(0.1)', ""))
    call(capsys, "run", file, "--folder", tmp_path / "out", *here)
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "probe regularization 0.001 or 0.01" in page
    # those of the other solver are not told
    assert "probe epochs" not in page
    settings = json.loads(call(capsys, "show", file, "--json"))["settings"]
    assert {name for name in settings if "probe" in name} == {
        "measures.probe_solver",
        "measures.probe_regularization",
    }


def test_a_study_of_one_file_has_tables_a_page_and_a_status(capsys, file, tmp_path, here):
    where = ("--folder", tmp_path / "out")
    plan = json.loads(call(capsys, "plan", file, *where, "--json"))["units"]
    assert [(unit["unit"], unit["state"]) for unit in plan] == [
        (f"{verb} {name}", "to do") for name in ("without", "with") for verb in ("train", "measure")
    ]
    call(capsys, "run", file, *where, *here)
    document = json.loads(call(capsys, "report", file, *where, "--json"))
    assert (document["study"], document["scale"], document["claims"]) == ("dropout", "tiny", [])
    assert [(row["run"], row["step"], set(row["estimates"])) for row in document["checkpoints"]] == [
        (run, step, {"kl", "trace"}) for run in ("without", "with") for step in (3, 6)
    ]
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "<title>dropout</title>" in page
    assert "tiny (" in page  # the scale
    assert 'id="section-differences"' in page
    assert "claims" not in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL).lower()
    configs = json.loads(unpacked(page, "configs"))
    for name, lines in configs["runs"].items():  # what was trained
        text = "\n".join(configs["lines"][line] for line in lines) + "\n"
        assert text == (tmp_path / "out" / "configs" / f"{name}.toml").read_text()
    assert "loss sentences 16" in page
    figures = {path.name for path in (tmp_path / "out" / "report" / "figures").iterdir()}
    assert figures == {f"{name}.{kind}" for name in ("over-time", "against-loss") for kind in ("pdf", "png", "csv")}
    assert call(capsys, "verify", file, *where).endswith("0 failed\n")
    # half-done units are told from those that were not begun
    run = tmp_path / "out" / "runs" / "with"
    (run / "evaluations" / "trace@step-6.json").unlink()
    assert states(capsys, file, *where) == {
        "train without": ("done", ""),
        "measure without": ("done", ""),
        "train with": ("done", ""),
        "measure with": ("interrupted", "3 of 4 evaluations"),
    }
    (run / "result.json").unlink()
    assert states(capsys, file, *where)["train with"] == ("interrupted", "step 6 of 6")
    assert "step 6 of 6" in call(capsys, "status", file, *where)


def test_a_loss_summed_over_all_sentences_is_reported_and_verified(capsys, file, tmp_path, here):
    file.write_text(FILE.replace('"loss_sentences": 16', '"loss_sentences": "all"'))
    where = ("--folder", tmp_path / "out")
    call(capsys, "run", file, *where, *here)
    document = json.loads(call(capsys, "report", file, *where, "--json"))
    for row in document["checkpoints"]:
        assert row["estimates"]["kl"]["stderr"] == row["estimates"]["kl"]["samples"] == 0
    assert "exact" in call(capsys, "report", file, *where)
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "loss sentences all" in page
    assert call(capsys, "verify", file, *where).endswith("0 failed\n")
    shutil.rmtree(tmp_path / "out/runs/with/checkpoints/step-3")
    with pytest.raises(
        IsolossError, match="with is complete but has no checkpoint at step 3: delete the folder to tra"
    ):
        command.main(["run", str(file), *map(str, where)])


def states(capsys, *words):
    units = json.loads(call(capsys, "status", *words, "--json"))["units"]
    return {unit["unit"]: (unit["state"], unit["progress"]) for unit in units}


def test_a_function_may_return_the_study(file):
    file.write_text(FILE.replace("STUDY = Study(", "def study():\n  return Study("))
    assert load_study(file).name == "dropout"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no study: assign an isoloss.studies.Study to STUDY"),
        ("STUDY = 3", "is a int, not an isoloss.studies.Study"),
        ("import no_such_module", "cannot be run: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_file_without_a_study_is_refused(file, text, message):
    file.write_text(text)
    with pytest.raises(IsolossError, match=message):
        load_study(file)


def test_what_is_not_there_is_refused(file, tmp_path):
    with pytest.raises(IsolossError, match=r"my_studi\.py does not exist; did you mean .*my_study\.py"):
        load_study(tmp_path / "my_studi.py")
    with pytest.raises(IsolossError, match="no study 'same-los'; did you mean same-loss"):
        load_study("same-los")
    with pytest.raises(IsolossError, match="no executor 'cloud'; the executors are local"):
        command.main(["run", str(file), "--folder", str(tmp_path / "out"), "--executor", "cloud"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(IsolossError, match="the study dropout has no scale 'huge'; its scales are tiny"):
        command.main(["plan", str(file), "--scale", "huge"])


def test_the_last_checkpoint_of_every_stage_is_measured(file):
    file.write_text(FILE.replace("steps=6", "stages=(StageConfig(steps=4), StageConfig(steps=2))"))
    experiment = load_study(file).scale(None).experiments["without"]
    assert experiment.kept_steps == (3, 4, 6)


def test_the_last_checkpoint_is_measured_wherever_a_target_ends_the_run(file, tmp_path):
    text = FILE.replace("steps=6", "stages=(StageConfig(steps=4), StageConfig(steps=6, target_kl=9.0))")
    text = text.replace("checkpoints=(3,)", "log_every=2").replace("target_kl=9.0", "target_kl=9.0, validate_every=2")
    file.write_text(text.replace("settings=settings)", 'steps=(4, "last"), settings=settings)'))
    folder = StudyFolder(load_study(file), tmp_path / "out")
    folder.prepare()
    carry_out(folder.plan(), folder.path)
    results = folder.results()
    assert list(results.of_run("with")) == [4, 6]  # not 10
    assert results.last_step("with") == 6
    assert results.at("with") == results.at("with", 6) != results.at("with", 4)
    assert all(problem is None for _, problem in verify(folder))
    assert "measure with" not in [unit.name for unit in folder.plan() if not unit.done()]


def test_runs_that_miss_their_target_are_told_with_the_next_step(file, tmp_path):
    text = FILE.replace("steps=6", "stages=(StageConfig(steps=2, target_kl=1e-9, validate_every=2),), log_every=2")
    text = text.replace("checkpoints=(3,)", "measure_sentences=64").replace(', "with": run(0.1)', "")
    file.write_text(text.replace("settings=settings)", 'steps=("last",), settings=settings)'))
    folder = StudyFolder(load_study(file), tmp_path / "out")
    folder.prepare()
    carry_out(folder.plan(), folder.path)
    validated = folder.results().run("without").stages()[0]
    reached = rounded(validated["validation_kl_nats"], validated["validation_kl_stderr"])
    sentence = f"stage 1 ended after step 2 with a KL of {reached} nats per predicted token, above its target of 1e-09"
    summary = folder.summary()
    assert summary.warning == ""
    assert summary.missed.line == "1 of 1 runs missed a target: 1 of without"
    assert summary.missed.runs == {"without": [sentence]}
    assert summary.missed.next_step == (
        "To train all runs again, for longer, raise the steps of these stages in the study (the default warm-up grows "
        "with steps; warmup_steps sets it), and run isoloss study run my_study.py --scale tiny --folder out-longer"
    )
    page = report(folder)[0].read_text()
    assert 'class="banner"' not in page
    assert ", size d16, adamw with learning rate 0.001, " in page
    assert "until a KL of 1e-09, at most 2 steps; its runs took 2 to 2 (mean 2)" in page
    assert (
        f"<summary>{summary.missed.line}</summary>\n<p>without: {sentence}.</p>\n<p>{summary.missed.next_step}" in page
    )
    # as if the loss had been lower before: by less than two standard errors, then by more
    metrics, longer = folder.path / "runs" / "without" / "metrics.jsonl", summary.missed.next_step
    last, (value, error) = metrics.read_text(), (validated["validation_kl_nats"], validated["validation_kl_stderr"])
    for standard_errors in (1.9, 2.1):
        lowest = value - standard_errors * 2**0.5 * error
        line = {"step": 1, "loss_nats": 2.0, "stage": 1, "validation_kl_nats": lowest, "validation_kl_stderr": error}
        metrics.write_text(f"{json.dumps(line)}\n{last}")
        words = (
            f"(without was at {rounded(lowest, error)} nats at step 1 and at {reached} at the end): take a lower rate"
        )
        assert (words in folder.summary().missed.next_step) == (standard_errors > 2)
        assert folder.summary().missed.next_step.endswith(longer)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_target_that_is_met_before_a_decay_has_ended_is_told_where_schedules_are_compared(file, tmp_path, schedule):
    """Linear from the first step to 0 after the tenth: 0.9 of the highest rate in step 2."""
    changes = {
        "steps=6": "stages=(StageConfig(steps=10, target_kl=9.0, validate_every=2),), log_every=2",
        "checkpoints=(3,)": "measure_sentences=64, optimizer=OptimizerConfig(schedule=schedule, warmup_steps=0)",
        "import ModelConfig": "import ModelConfig, OptimizerConfig",
        "run(dropout)": "run(dropout, schedule)",
        "run(0.0)": f'run(0.0, "{schedule}")',
        "run(0.1)": 'run(0.1, "linear")',
        "settings=settings)": 'steps=("last",), settings=settings)',
    }
    text = FILE
    for old, new in changes.items():
        text = text.replace(old, new)
    file.write_text(text)
    folder = StudyFolder(load_study(file), tmp_path / "out")
    folder.prepare()
    carry_out(folder.plan(), folder.path)
    assert folder.results().run("with").unfinished_decays() == {1: pytest.approx(0.9)}
    page = report(folder)[0].read_text()
    way = "adamw with learning rate 0.001 (linear decay to 0), 8 sentences a step, until a KL of 9, at most 10 steps"
    at = "before the decay had ended, at 90 % of the highest rate"
    assert f"with, size d16, {way}; its runs took 2 to 2 (mean 2); 1 met a target {at}" in page
    warning = (
        f"The schedules of the learning rate differ, and these runs met their target {at}: 1 of with. They are no "
        "models at the end of a decay."
    )
    assert folder.summary().warning == (warning if schedule == "constant" else "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_sequences"', '"flatness_sentence"', "flatness_sentence"),
        ('"trace")', '"trice")', "no measure 'trice'"),
        ("steps=6", 'steps=6, precision="fp99"', "precision is 'fp99'"),
        (
            "steps=6",
            "stages=(StageConfig(steps=6, target_kl=1.0),)",
            r'the run without has a stage with a target, .* give its measurements steps up to 0, or "last"',
        ),
        ('"with"', '"/with"', "is called '/with': a name must be that of a folder inside"),
        ('"with"', '"../with"', "is called '../with'"),
        ('"with"', '".tmp-with"', r"is called '\.tmp-with'"),
        ('"with"', '""', "is called ''"),
        ("config=config", 'config=config, after=("base",)', "the run without comes after 'base', which is not in"),
        ("settings=settings", "steps=(3, 5), settings=settings", "measured at step 5, .* no checkpoint; it keeps 3, 6"),
        ('name="dropout",', 'name="dropout", lead="It is.",', r"lead .* is one text; give a tuple .* \('It is\.',\)"),
        ('{"without": run(0.0), "with": run(0.1)}', "{}", "the scale tiny of the study dropout has no experiments"),
        ('("loss", "trace")', "()", "the measurement 'measure' has no measures: name at least one"),
    ],
)
def test_what_could_not_be_carried_out_is_refused_before_anything_is_trained(file, tmp_path, old, new, message):
    text = FILE.replace("import Experiment, Measurement", "import Experiment, Measurement, Resources")
    assert old in text
    file.write_text("from dataclasses import replace\n" + text.replace(old, new))
    with pytest.raises(IsolossError, match=message):
        StudyFolder(load_study(file), tmp_path / "out").prepare()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def claiming(file):
    file.write_text(FILE + CLAIMS)
    return file


def test_claims_that_change_after_the_start_are_said_to_have_changed(capsys, claiming, done):
    def report(old="", new=""):
        claiming.write_text(FILE + CLAIMS.replace(old, new))
        return json.loads(call(capsys, "report", claiming, "--folder", done, "--json"))

    started = report()
    assert (started["warning"], started["claims"][0]["claim"]) == ("", "flatter")
    for old, new in (('"decrease"', '"increase"'), ('"without", 6)', '"without", 3)'), ("flattens", "makes flat")):
        changed = report(old, new)
        assert started["family"]["claims_sha256"] != changed["family"]["claims_sha256"]
        assert changed["warning"] == (
            "These claims were changed after this study was started, so that they are exploratory: flatter."
        )
    assert changed["warning"] in (done / "report" / "index.html").read_text()
    # comments and docstrings are no change, nor is a study that an earlier version started
    assert report("'''The last", "'''Of course the last")["warning"] == ""
    assert report("    pair =", "    # why these\n    pair =")["warning"] == ""
    document = json.loads((done / "study.json").read_text())
    del document["claims"]
    (done / "study.json").write_text(json.dumps(document))
    assert report('"decrease"', '"increase"')["warning"] == ""


def test_runs_of_other_code_are_refused_together_before_anything_is_run(capsys, file, done, monkeypatch):
    """That a code has changed, tests/test_extending.py shows on a package."""
    monkeypatch.setattr(Run, "changed_code", lambda self: ["optimizer own"])
    before = sorted(done.rglob("*"))
    assert main(["study", "run", str(file), "--folder", str(done)]) == 2
    assert capsys.readouterr().err == (
        f"isoloss study: the code of the optimizer own has changed since 2 runs began (first: {done}/runs/without): "
        "delete their folders to train them again, which keeps the other runs, choose another --folder, or bring the "
        "former code back\n"
    )
    assert sorted(done.rglob("*")) == before


def test_a_plan_names_a_wrong_claim_or_measure_and_not_only_that_the_plan_has_changed(
    capsys, file, claiming, tmp_path, here
):
    where = ("--folder", str(tmp_path / "out"))
    file.write_text(FILE + CLAIMS.replace('"flatness"', '"flattness"'))
    with pytest.raises(IsolossError, match=r"measures of the claim flatter is 'flattness'"):
        command.main(["plan", str(file), *where])
    file.write_text(FILE + CLAIMS)
    StudyFolder(load_study(file), tmp_path / "out").prepare()
    file.write_text(file.read_text().replace('"loss", "trace"', '"loss", "tracee"'))
    for words in (["plan"], ["run", *here]):
        with pytest.raises(IsolossError, match="no measure 'tracee'"):
            command.main([words[0], str(file), *where, *words[1:]])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("of=dropout", "of={}", "claim flatter: of is a dict; it must be a function"),
        ("claims=[CLAIM]", "answer='flatter'", "answer of the study dropout is of type str; it must be a function"),
        ("claims=[CLAIM]", "claims='claims.toml'", "claims of the study dropout is a file, claims.toml: state them in"),
        ("[CLAIM]", "[CLAIM], verdicts_at=['lapdog']", "verdicts_at of the study dropout has 'lapdog'; its scales"),
        ("[CLAIM]", "[CLAIM], loss_margin=0", "loss_margin of the study dropout is 0"),
    ],
)
def test_a_part_of_a_study_that_is_no_function_is_refused_at_once(file, claiming, old, new, message):
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(IsolossError, match=message):
        load_study(file)


def test_a_file_that_registers_a_component_is_refused_before_anything_runs(capsys, file, tmp_path, monkeypatch, here):
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
    text = "import isoloss\nimport torch\n" + FILE.replace(
        "steps=6", 'steps=6, optimizer=OptimizerConfig(name="mysign")'
    )
    text = text.replace("import ModelConfig,", "import ModelConfig, OptimizerConfig,")
    own = "def mysign(groups, config):\n    return torch.optim.SGD(groups)\n\n"
    file.write_text(text + own + 'isoloss.OPTIMIZERS.register("mysign", mysign)\n')
    assert main(["study", "run", str(file), "--folder", str(tmp_path / "out"), *here]) == 2
    told = capsys.readouterr().err
    assert "my_study.py registers the optimizer 'mysign', but the units of a study are commands" in " ".join(
        told.split()
    )
    assert "isoloss.optimizers" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('results.at("with", 6)', 'results.at("wiht", 6)', "the study has no run 'wiht'; did you mean with[?]"),
        ('results.at("with", 6)', 'results.at("with", 4)', "measured of the run with at step 4; its steps are 3, 6"),
        (
            "pairs=",
            "pair=",
            r"of of the claim flatter fails with TypeError: .*'pair'.* \(my_study.py, line 26\)",
        ),
    ],
)
def test_a_claim_that_fails_is_one_sentence(capsys, file, claiming, done, old, new, message):
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(IsolossError, match=message):
        call(capsys, "report", file, "--folder", done)


def test_an_interrupted_report_says_how_to_go_on(capsys, file, done, monkeypatch):
    words = ["study", "report", str(file), "--folder", str(done)]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "write", interrupted)
    assert main(words) == 130
    first, second = capsys.readouterr().err.splitlines()
    assert first == "isoloss study: interrupted; what was done is kept. The same command goes on:"
    assert shlex.split(second) == ["isoloss", *words]


def test_watching_ends_when_all_is_done_or_nothing_can_go_on(capsys, file, done, here, monkeypatch):
    monkeypatch.setattr(command, "LINE_SECONDS", 0.01)
    where = ("--folder", done)
    assert call(capsys, "status", file, *where, "--watch") == "4 of 4 units done; about 0 s left\n"
    shutil.rmtree(done / "runs" / "with")
    (done / "configs" / "with.toml").write_text("steps = -1\n")
    with pytest.raises(IsolossError, match="train with failed with status 2"):
        command.main(["run", str(file), *map(str, where), *here])
    capsys.readouterr()
    assert command.main(["status", str(file), *map(str, where), "--watch"]) == 1
    *lines, last = capsys.readouterr().out.strip().split("\n")
    assert [line.partition(";")[0] for line in lines] == ["2 of 4 units done, 1 failed"] * 2
    assert last == "Nothing is running, and what is left waits for failed units: train with."


def test_the_folder_of_a_study_names_it_and_other_paths_are_refused_in_a_sentence(capsys, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    StudyFolder(load_study("same-loss"), Path("begun"), "smoke", 1).prepare()
    assert json.loads(call(capsys, "plan", "begun", "--json"))["folder"] == "begun"
    with pytest.raises(IsolossError, match=r"; isoloss study run same-loss --scale smoke --seed-offset 1 --fo"):
        call(capsys, "report", "begun")
    StudyFolder(load_study(file), Path("own")).prepare()
    Path("other").mkdir()
    for words, message in (
        (("report", "begun", "--scale", "smoke"), "begun is a study's folder, which says its scale and seeds"),
        (("report", "own"), "own was made by the study 'dropout', which is not registered: name the file"),
        (("report", "other"), "other is a folder that holds no study"),
        (("report", "./begin"), r"there is no folder begin; did you mean begun"),
        (("export", file, "--output", "x"), "dropout-tiny holds no study: isoloss study run .* starts one"),
    ):
        with pytest.raises(IsolossError, match=message):
            call(capsys, *words)
