"""A study with other seeds, its results in a folder of their own, and two of them compared."""

import json
import math
import re
import shutil

import pytest
from scipy import stats

from isoloss import config as configs
from isoloss import files
from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.statistics.significance import p_value
from isoloss.studies import load_study
from isoloss.studies.folder import StudyFolder
from isoloss.studies.repetition import compare
from studies_in_process import call

# --- other seeds


def test_other_seeds_and_nothing_else(file):
    study = load_study(file)
    assert study.scale("tiny", seed_offset=0) is study.scale("tiny")
    ours, theirs = (study.scale("tiny", seed_offset=n).experiments for n in (0, 2))
    for (name, a), (other, b) in zip(ours.items(), theirs.items(), strict=True):
        assert other == name.replace("-", "-20")
        changed = {line.partition(" is ")[0] for line in configs.differences(a.config, b.config)}
        assert changed == {"seed", "language.seed"}
        assert b.measurements[0].settings == a.measurements[0].settings | {
            "seed": a.measurements[0].settings["seed"] + 200
        }


def test_a_study_without_other_seeds_is_refused(tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text(
        "from isoloss.studies import Scale, Study\n"
        "STUDY = Study(name='plain', scales={'tiny': Scale(description='', experiments={})})\n"
    )
    study = load_study(plain)
    assert StudyFolder(study, tmp_path).scale is study.scale()
    with pytest.raises(IsolossError, match=r"the study plain cannot be made with other seeds.* must be 0, not 1"):
        StudyFolder(study, tmp_path, seed_offset=1)
    with pytest.raises(IsolossError, match="the seed offset is -1; it must be at least 0"):
        StudyFolder(study, tmp_path, seed_offset=-1)


def test_the_offset_is_in_the_folder_and_on_the_page(capsys, file, tmp_path, monkeypatch, finished, repeated):
    monkeypatch.chdir(tmp_path)
    plan = json.loads(call(capsys, "plan", file, "--seed-offset", "1", "--json"))
    assert plan["folder"] == "runs/blocks-tiny-seeds-1"
    assert json.loads(call(capsys, "plan", file, "--json"))["folder"] == "runs/blocks-tiny"
    assert files.read_json(repeated / "study.json")["seed_offset"] == 1
    page = (repeated / "report" / "index.html").read_text()
    assert "<dt>Seeds</dt><dd>offset 1</dd>" in page
    assert "isoloss study run blocks.py --scale tiny --seed-offset 1" in page
    assert "<dt>Seeds</dt>" not in (finished / "report" / "index.html").read_text()
    with pytest.raises(IsolossError, match=r"another plan .they differ in seed_offset, runs, measured"):
        call(capsys, "status", file, "--folder", repeated)
    with pytest.raises(IsolossError, match="study status blocks --scale tiny --seed-offset 1 --folder"):
        Run(repeated).record  # noqa: B018 - it is read


def test_a_folder_that_names_no_offset_has_none(file, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out", ignore=shutil.ignore_patterns("runs"))
    document = files.read_json(tmp_path / "out" / "study.json")
    del document["seed_offset"]
    files.write_json(tmp_path / "out" / "study.json", document)
    assert StudyFolder(load_study(file), tmp_path / "out").exists()


# --- exports


def test_an_export_has_the_numbers_and_how_they_were_made(capsys, file, exports, finished):
    a, _ = exports
    kept = {str(path.relative_to(a)) for path in a.rglob("*") if path.is_file()}
    figures = {f"figures/{name}.png" for name in ("over-time", "against-loss")}
    tables = {f"tables/{name}.{kind}" for name in ("means", "claims") for kind in ("md", "tex")}
    values = {"values.csv", "values.parquet"}
    assert kept == {*values, "summary.json", "provenance.json", "index.html", *tables, *figures}
    summary = files.read_json(a / "summary.json")
    printed = json.loads(call(capsys, "report", file, "--folder", finished, "--json"))
    assert {key: summary[key] for key in ("means", "claims")} == {key: printed[key] for key in ("means", "claims")}
    provenance = files.read_json(a / "provenance.json")
    assert (provenance["study"], provenance["scale"], provenance["seed_offset"]) == ("blocks", "tiny", 0)
    assert provenance["runs"] == files.read_json(finished / "study.json")["runs"]
    (made,) = provenance["made_with"]
    record = Run(finished / "runs" / "plain-1").record
    assert (made["versions"], made["commit"]) == (record["versions"], record["commit"])
    assert len(made["runs"]) == 6
    assert provenance["units"] == 12
    leases = [files.read_json(path) for path in (finished / "units").glob("*/*.json")]
    assert provenance["began"] == min(lease["began"] for lease in leases)
    logs = (finished / "runs").glob("*/log.jsonl")
    seconds = [json.loads(line).get("seconds", 0) for log in logs for line in log.read_text().splitlines()]
    assert len([each for each in seconds if each]) == 6 + 6 * 4
    assert provenance["unit_seconds"] == pytest.approx(sum(seconds), abs=0.06)


def test_an_export_names_no_place_of_this_machine(exports, finished, repeated):
    for folder in exports:
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                for place in (finished.parent, repeated.parent, finished.parents[1]):
                    assert str(place).encode() not in content, path
        page = (folder / "index.html").read_text()
        assert "../" not in page.partition("<main>")[2].partition("<script>")[0]
        assert not re.search(r'(href|src)="(?!#|data:)', page.partition("<main>")[2].partition("<script>")[0])
        assert ".pdf" not in page.partition("<main>")[2].partition("</main>")[0]


def test_the_same_study_is_exported_again_and_nothing_else_is_replaced(capsys, file, exports, finished, tmp_path):
    a, b = (shutil.copytree(each, tmp_path / each.name) for each in exports)
    before = {path.name: path.read_bytes() for path in a.rglob("*") if path.is_file()}
    (a / "values.csv").write_text("")
    printed = call(capsys, "export", file, "--folder", finished, "--output", a)
    assert printed == f"{a}: 11 files, {sum(map(len, before.values())) / 1e6:.1f} MB\n"
    assert {path.name: path.read_bytes() for path in a.rglob("*") if path.is_file()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for place, why in ((b, r"seed offset 1.* seed offset 0"), (other, "is not an empty folder")):
        kept = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        with pytest.raises(IsolossError, match=why):
            call(capsys, "export", file, "--folder", finished, "--output", place)
        assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == kept


def test_what_is_not_finished_or_fails_exports_nothing(capsys, file, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    broken = file.read_text().replace("def tables(results):\n", "def tables(results):\n    raise ValueError('no')\n")
    kept = file.read_text()
    file.write_text(broken)
    with pytest.raises(IsolossError, match="tables of the study blocks fails with ValueError: no"):
        call(capsys, "export", file, "--folder", tmp_path / "out", "--output", tmp_path / "results" / "a")
    file.write_text(kept)
    shutil.rmtree(tmp_path / "out" / "runs" / "plain-3" / "evaluations")
    with pytest.raises(IsolossError, match=r"1 unit is not done .first: measure plain-3., and 2 of 3 blocks are"):
        call(capsys, "export", file, "--folder", tmp_path / "out", "--output", tmp_path / "results" / "a")
    assert list((tmp_path / "results").iterdir()) == []


def test_a_line_of_the_log_that_was_cut_short_is_passed_over(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "a", "seconds": 2.0}\n{"event": "b", "sec{"event": "c"}\n')
    assert Run(tmp_path).log_lines() == [{"event": "a", "seconds": 2.0}]


# --- comparisons


def estimate(value, stderr, samples, unit="points", *, method="mean over pre-training seeds", **details):
    known = {"num_predictions": 9, "num_probes": 0, "seconds": None, "details": details}
    return {"value": value, "stderr": stderr, "samples": samples, "unit": unit, "method": method, **known}


def answer(verdict, difference, case=""):
    return {"case": case, "verdict": verdict, "difference": difference, "of": "the rest is not read"}


def save(folder, offset, answers, rows=(), **provenance):
    """Write an export by hand: the answers to each claim, and the rows of a table."""
    claims = [{"claim": name, "answers": some} for name, some in answers.items()]
    about = {"study": "s", "scale": "laptop", "seed_offset": offset}
    files.write_json(folder / "summary.json", {**about, "table": list(rows), "claims": claims, "answer": ["It does."]})
    files.write_json(
        folder / "provenance.json", {**about, "runs": {"a": str(offset)}, "claims_sha256": "0", **provenance}
    )
    return folder


def test_numbers_by_hand(tmp_path):
    untested = answer("not tested", None)
    ours = {
        "flatter": [
            answer("shown", estimate(-3.0, 0.3, 4), "trace"),
            answer("not shown", estimate(-1.0, 1, 4), "minimal"),
        ],
        "better": [untested],
        "never": [untested],
    }
    # in another order: claims are compared by name
    theirs = {
        "never": [untested],
        "flatter": [answer("shown", estimate(-2.0, 0.4, 6), "trace"), answer("shown", estimate(-9.0, 1, 4), "minimal")],
        "better": [answer("shown", estimate(2.0, 0.5, 4), "root")],
    }
    rows = [
        {
            "run": "a",
            "step": 5,
            "estimates": {
                "kl": estimate(0.5, 0.05, 3, "accuracy"),
                "by cluster": estimate(1.0, 0.5, 3, method="cluster mean", clusters="clusters", labels=["g"]),
                "one run": estimate(1.0, 0.1, 99, method="trace", clusters="sequences"),
            },
        },
        {"run": "only here", "step": 5, "estimates": {"kl": estimate(0.5, 0.1, 3)}},
    ]
    found = compare(save(tmp_path / "a", 0, ours, rows), save(tmp_path / "b", 3, theirs, rows[:1]))
    names = [each.name for each in found.numbers]
    assert names == [
        ("flatter", "trace"),
        ("flatter", "minimal"),
        ("better", "root"),
        ("table", "a", "5", "kl"),
        ("table", "a", "5", "by cluster"),
    ]
    trace, minimal, root, kl, _ = found.numbers
    assert (trace.difference.value, trace.difference.stderr) == (pytest.approx(1), pytest.approx(0.5))
    freedom = 0.25**2 / (0.09**2 / 3 + 0.16**2 / 5)
    half = stats.t.ppf(0.975, freedom) * 0.5
    assert trace.difference.ci95 == pytest.approx((1 - half, 1 + half))
    p = 2 * stats.t.sf(2, freedom), 2 * stats.t.sf(8 / math.sqrt(2), 6)
    assert (p_value(trace.difference), p_value(minimal.difference)) == pytest.approx(p)
    assert minimal.p_holm == pytest.approx(4 * p[1])
    assert trace.p_holm == pytest.approx(3 * p[0])
    assert (trace.agree, minimal.agree, root.agree, kl.agree) == (True, False, False, None)
    assert root.verdicts == ("not tested", "shown")
    assert (root.difference, root.p_holm) == (None, None)
    assert (kl.difference.unit, kl.difference.stderr) == ("percentage points", pytest.approx(5 * math.sqrt(2)))
    assert found.conclusion == (
        "1 of 3 verdicts agree, all but flatter, minimal (not shown / shown); better, root (not tested / shown). The "
        "95 % interval of 1 of 4 differences excludes 0 (expected: 5 %)."
    )
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("offset", "other", "message"),
    [
        (1, {"study": "t"}, "different studies: s and t"),
        (1, {"scale": "smoke"}, "different scales: laptop and smoke"),
        (1, {"claims_sha256": "1"}, "different claims, which"),
        (0, {}, "both have the seed offset 0: a replication needs a different one"),
        (1, {"runs": {"a": "0", "b": "1"}}, "have the same run a: a replication needs runs of its own"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, offset, other, message):
    with pytest.raises(IsolossError, match=message):
        compare(save(tmp_path / "a", 0, {}), save(tmp_path / "b", offset, {}, **other))


def test_a_study_and_its_repetition(capsys, exports, tmp_path):
    printed = call(capsys, "compare", *exports)
    assert printed.splitlines()[0] == "blocks at scale tiny: A with seed offset 0, B with 1"
    assert "of 2 verdicts agree" in printed
    assert "of 6 differences excludes 0" in " ".join(printed.split())
    document = json.loads(call(capsys, "compare", *exports, "--json"))
    a, b = (files.read_json(each / "summary.json") for each in exports)
    for number, ours, theirs in zip(document["numbers"][:2], a["claims"], b["claims"], strict=True):
        first, second = (claim["answers"][0] for claim in (ours, theirs))
        assert number["first"]["value"] == first["difference"]["value"]
        assert number["verdicts"] == [first["verdict"], second["verdict"]]
        moved = second["difference"]["value"] - first["difference"]["value"]
        assert number["difference"]["value"] == pytest.approx(moved)
    assert [number["name"] for number in document["numbers"][2:]] == [
        ["means", group, key] for group in ("plain", "dropped") for key in ("kl", "trace")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "no-such", "b"), "there is no folder no-such$"),
        (("plan", "same-loss", "--workers", "0"), "--workers is 0; it must be at least 1"),
        (("run", "same-loss", "--address", "auto"), "--address is for --executor ray; the executor is local"),
        (("run", "same-loss", "--submit", "a=1"), "--submit is for --executor slurm; the executor is local"),
        (("run", "same-loss", "--executor", "slurm", "--submit", "a"), "--submit takes NAME=VALUE"),
    ],
)
def test_wrong_words_are_refused(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsolossError, match=message):
        call(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "a"), "SECOND is missing"),
        (("compare", "a", "b", "--scale", "tiny"), "--scale is an option of isoloss study show,"),
        (("report", "same-loss", "b"), "there is no argument: b"),
        (("export", "same-loss"), "--output is missing"),
        (
            ("run", "x", "--output", "b"),
            "--output is an option of isoloss study export; isoloss study run --help lists",
        ),
        (("export", "x", "--output", "b", "--formats", "xlsx"), "--formats is 'xlsx'; it must be one of csv"),
        (("verfy", "same-loss"), "no subcommand 'verfy'; did you mean verify?"),
    ],
)
def test_each_subcommand_has_its_own_options(capsys, words, message):
    assert main(["study", *words]) == 2
    assert message in capsys.readouterr().err
