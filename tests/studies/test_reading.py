"""A study's results as data frames, from its folder and from exports, and as tables of text."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from markdown_it import MarkdownIt

import isoloss
from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies import load_study, reading
from isoloss.studies.export import MOST_ROWS, text_table
from isoloss.studies.results import COLUMNS, Results
from isoloss.studies.summary import SummaryTable
from studies_in_process import call

KEPT = Path(__file__).parents[2] / "results"
EXPORTS = sorted(path.parent for path in KEPT.glob("*/summary.json"))

# --- data frames


@pytest.fixture
def exported(exports):
    """The study, exported."""
    return exports[0]


def test_a_folder_and_its_export_are_read_alike(file, finished, exported):
    ours, theirs = isoloss.read_study(finished, study=file), isoloss.read_study(exported)
    assert ours.values.equals(theirs.values)
    assert ours.claims.equals(theirs.claims)
    assert ours.tables["means"].equals(theirs.tables["means"])
    assert ours.provenance == theirs.provenance == files.read_json(exported / "provenance.json")


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path):
    row = ("=1+1", "-arm", 0, "d16", 5, "+kl", -1.0, 0.5, "@nats")
    values = pl.DataFrame([row], schema=COLUMNS, orient="row")
    reading.as_csv(values).write_csv(tmp_path / "values.csv")
    written = (tmp_path / "values.csv").read_text().splitlines()[1]
    assert written == "'=1+1,'-arm,0,d16,5,'+kl,-1.0,0.5,'@nats"
    assert reading._values(tmp_path).equals(values)


def test_every_number_is_that_of_the_files(file, finished, exported):
    study, results = isoloss.read_study(exported), Results.read(finished, load_study(file).scale())
    assert study.values.height == 6 * 2 * 4
    wide = study.wide()
    assert wide.height == len(results.checkpoints)
    for row in wide.iter_rows(named=True):
        for key, one in results.checkpoints[row["run"], row["step"]].items():
            assert (row[key], row[f"{key}_stderr"]) == (one.value, one.stderr)
    summary = files.read_json(exported / "summary.json")
    for row, claim in zip(study.claims.iter_rows(named=True), summary["claims"], strict=True):
        (answer,) = claim["answers"]
        assert (row["claim"], row["verdict"]) == (claim["claim"], answer["verdict"])
        assert [row["low"], row["high"]] == answer["interval95"]
        assert (row["difference"], row["standard error"], row["unit"]) == tuple(
            answer["difference"][key] for key in ("value", "stderr", "unit")
        )
        assert (row["p"], row["adjusted p"]) == (answer["p_value"], answer["p_adjusted"])
    for row, entry in zip(study.wide("means").iter_rows(named=True), summary["means"], strict=True):
        assert row["group"] == entry["group"]
        for key, estimate in entry["estimates"].items():
            assert (row[key], row[f"{key}_stderr"]) == (estimate["value"], estimate["stderr"])
    with pytest.raises(IsolossError, match="the study has no table 'mean'; its tables are means"):
        study.wide("mean")


@pytest.mark.parametrize("path", EXPORTS, ids=lambda path: path.name)
def test_kept_exports_are_read(path):
    study, summary = isoloss.read_study(path), files.read_json(path / "summary.json")
    parquet = path / "values.parquet"
    text = None if parquet.is_file() else (path / "values.csv").read_text()
    assert study.values.height == (pl.read_parquet(parquet).height if text is None else len(text.splitlines()) - 1)
    assert study.values["value"].null_count() == study.values["standard error"].null_count() == 0
    assert study.wide().height == study.values.n_unique(["run", "step"])
    assert study.claims.height == sum(len(claim["answers"]) for claim in summary["claims"])
    for name in study.tables:
        assert study.wide(name).height == len(summary[name])


def test_no_label_of_a_table_has_the_name_of_a_column_of_estimates():
    with pytest.raises(IsolossError, match="a label of the table slopes is 'estimate', as a column of its estimates"):
        SummaryTable("slopes", "slopes", ("group", "estimate"), [])


def test_what_was_not_measured_is_null():
    study = isoloss.read_study(KEPT / "same-loss-27-grammars-repeated")
    for name, count in study.values.group_by("estimate").len().iter_rows():
        assert study.wide()[name].count() == count


def test_an_unfinished_study_has_its_complete_blocks_and_no_claims(file, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "runs" / "plain-3" / "evaluations")
    study = isoloss.read_study(tmp_path / "out", study=file)
    whole = isoloss.read_study(finished, study=file)
    assert study.values.equals(whole.values.filter(pl.col("block") < 2))
    assert (study.claims.height, study.claims.columns) == (0, whole.claims.columns)
    assert (study.provenance["blocks_done"], study.provenance["blocks"]) == (2, 3)
    for run in ("plain-1", "plain-2"):
        shutil.rmtree(tmp_path / "out" / "runs" / run / "evaluations")
    with pytest.raises(IsolossError, match="has no complete block yet: 3 of 12 units are not done"):
        isoloss.read_study(tmp_path / "out", study=file)


def test_what_cannot_be_read_is_refused(finished, tmp_path):
    with pytest.raises(IsolossError, match=r"by the study 'blocks', which is not registered.* study='blocks.py'"):
        isoloss.read_study(finished)
    with pytest.raises(IsolossError, match=r"another plan \(they differ in study"):
        isoloss.read_study(finished, study=_other(tmp_path))
    with pytest.raises(IsolossError, match=r"there is no folder .*optimisers; did you mean .*optimizers"):
        isoloss.read_study(f"{KEPT}/optimisers")
    kept = tmp_path / "kept"
    shutil.copytree(KEPT / "same-loss-pilot", kept)
    (kept / "values.parquet").unlink()
    (kept / "values.csv").write_text("run\n")
    with pytest.raises(IsolossError, match=r"values.csv cannot be read"):
        isoloss.read_study(kept)
    (kept / "values.csv").unlink()
    with pytest.raises(IsolossError, match=r"has neither values.csv nor values.parquet"):
        isoloss.read_study(kept)


def _other(folder):
    path = folder / "other.py"
    path.write_text(
        "from isoloss.lab.languages.config import PCFGConfig\n"
        "from isoloss.run_config import TrainConfig\n"
        "from isoloss.studies import Experiment, Measurement, Scale, Study\n"
        "run = Experiment(config=TrainConfig(language=PCFGConfig(levels=2), steps=9),\n"
        "                 measurements=(Measurement(measures=('loss',)),))\n"
        "STUDY = Study(name='other', scales={'tiny': Scale(description='', experiments={'run': run})})\n"
    )
    return path


def test_an_export_is_read_without_torch():
    code = (
        "import sys, isoloss; assert isoloss.read_study(sys.argv[1]).wide().height > 9; "
        "assert not {'torch', 'transformers', 'altair'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, KEPT / "same-loss-27-grammars-repeated"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# --- formats


def test_formats_are_chosen(capsys, file, finished, exported, tmp_path):
    where = file, "--folder", finished, "--output", tmp_path / "kept"
    call(capsys, "export", *where, "--formats", "parquet", "latex")
    kept = {str(path.relative_to(tmp_path / "kept")) for path in (tmp_path / "kept").rglob("*.*") if path.is_file()}
    assert kept - {path for path in kept if path.startswith("figures/")} == {
        *("values.parquet", "tables/means.tex", "tables/claims.tex", "summary.json", "provenance.json", "index.html"),
    }
    values = pl.read_parquet(tmp_path / "kept" / "values.parquet")
    assert values.schema == pl.Schema(COLUMNS)
    assert isoloss.read_study(tmp_path / "kept").values.equals(values)
    (tmp_path / "kept" / "values.parquet").unlink()
    shutil.copy(exported / "values.csv", tmp_path / "kept")
    assert isoloss.read_study(tmp_path / "kept").values.equals(values)


# --- tables of text

ODD = {
    "caption": "50 % of A_1 & {B}: #1 | $2 ~ ^ \\ [see] *this*.",
    "columns": ("arm", "trace (nats/token)", "accuracy, %"),
    "rows": (
        ("[SGD] a_b & c|d", "-51.49 ± 0.88", "< 0.001"),
        ("*x* <b> `y` d16-d32", "1.0e-16 ± 2.0e-15", "-4.8 to -1.2"),
    ),
    "left": 1,
}
PLAIN = {
    **{rf"\{character}": character for character in "&%$#_{}"},
    **{r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", "{[}": "[", "{*}": "*"},
    **{"$<$": "<", "$>$": ">", "$|$": "|", r"$\pm$": "±", "$-$": "-"},
}


def as_typeset(latex):
    """What LaTeX shows of a text; no character that LaTeX reads as a command or group may be left."""
    found = re.sub("|".join(map(re.escape, sorted(PLAIN, key=len, reverse=True))), lambda m: f"\0{PLAIN[m[0]]}", latex)
    assert not re.search(r"(?<!\0)[\\&%$#_{}~^<>|]", found), latex
    return found.replace("\0", "")


def cells(markdown):
    """The caption and the cells of a table, as a Markdown parser reads them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    caption, *texts = ("".join(part.content for part in one.children) for one in tokens if one.type == "inline")
    columns = sum(one.type == "th_open" for one in tokens)
    return caption, [tuple(texts[i : i + columns]) for i in range(0, len(texts), columns)]


def test_markdown_is_read_back_as_it_was():
    assert cells(text_table("md", **ODD)) == (ODD["caption"], [ODD["columns"], *ODD["rows"]])


def test_latex_shows_the_cells_as_they_were():
    begin, *lines = text_table("tex", **ODD, label="tab:odd").splitlines()
    assert begin == r"% needs \usepackage{booktabs}"
    assert lines[:2] == [r"\begin{table}", r"\centering"]
    caption, label = re.fullmatch(r"\\caption\{(.*)\}\\label\{(.*)\}", lines[2]).groups()
    assert (as_typeset(caption), label) == (ODD["caption"], "tab:odd")
    assert lines[3:5] == [r"\begin{tabular}{lrr}", r"\toprule"]
    rows = [line.removesuffix(r" \\") for line in (lines[5], *lines[7:9])]
    assert [tuple(as_typeset(text) for text in row.split(" & ")) for row in rows] == [ODD["columns"], *ODD["rows"]]
    assert lines[6] == r"\midrule"
    assert lines[9:] == [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    assert r"$-$51.49 $\pm$ 0.88 & $<$ 0.001" in lines[7]
    assert lines[7].startswith(r"{[}SGD] a\_b \& c$|$d & ")
    assert r"d16-d32 & 1.0e-16 $\pm$ 2.0e-15 & $-$4.8 to $-$1.2" in lines[8]


def test_a_long_table_may_break_across_pages():
    rows = [(str(i),) for i in range(MOST_ROWS + 1)]
    lines = text_table("tex", "Long.", ("n",), rows, 0, label="tab:long").splitlines()
    assert lines[:6] == [
        r"% needs \usepackage{booktabs, longtable}",
        r"\begin{longtable}{r}",
        r"\caption{Long.}\label{tab:long} \\",
        r"\toprule",
        r"n \\",
        r"\midrule",
    ]
    assert lines[6] == r"\endhead"
    assert lines[7:-2] == [rf"{i} \\" for i in range(MOST_ROWS + 1)]
    assert lines[-2:] == [r"\bottomrule", r"\end{longtable}"]


def test_the_tables_of_an_export(capsys, file, finished, exported):
    summary = files.read_json(exported / "summary.json")
    _, (columns, *rows) = cells((exported / "tables" / "means.md").read_text())
    assert columns == ("group", "KL (nats/token)", "trace (nats/token)")
    for row, entry in zip(rows, summary["means"], strict=True):
        assert row[0] == entry["group"]
        for text, key in zip(row[1:], ("kl", "trace"), strict=True):
            value, stderr = map(float, text.split(" ± "))
            assert stderr == pytest.approx(entry["estimates"][key]["stderr"], rel=0.05)
            assert value == pytest.approx(entry["estimates"][key]["value"], abs=stderr)
    text = (exported / "tables" / "claims.md").read_text()
    # Markdown drops cells beyond the header's, and LaTeX stops at them
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}) == 1
    _, (columns, *rows) = cells(text)
    for row, claim in zip(rows, summary["claims"], strict=True):
        found = dict(zip(columns, row, strict=True))
        assert (found["claim"], found["verdict"]) == (claim["claim"], claim["answers"][0]["words"])
        low, high = map(float, found["95 % interval"].split(" to "))
        stderr = claim["answers"][0]["difference"]["stderr"]
        assert [low, high] == pytest.approx(claim["answers"][0]["interval95"], abs=stderr)
        assert found["unit"] == "nats/token"
    for name in ("means", "claims"):
        assert rf"\label{{tab:blocks-{name}}}" in (exported / "tables" / f"{name}.tex").read_text()
