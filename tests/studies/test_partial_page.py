"""The page of an unfinished study in blocks, from those that are complete."""

import json
import re
import shutil

import pytest

from isoloss.errors import IsolossError
from pages import unpacked
from studies_in_process import call


@pytest.fixture
def partly(finished, tmp_path):
    """A copy in which the last block is not measured, and which has no page."""
    shutil.copytree(finished, tmp_path / "out")
    for name in ("plain-3", "dropped-3"):
        shutil.rmtree(tmp_path / "out" / "runs" / name / "evaluations")
    shutil.rmtree(tmp_path / "out" / "report")
    return tmp_path / "out"


def report(folder):
    return {path.relative_to(folder): path.read_bytes() for path in (folder / "report").rglob("*") if path.is_file()}


def text_of(folder):
    """The page with the rows of its table, without its scripts."""
    document = (folder / "report" / "index.html").read_text()
    return re.sub(r"<script.*?</script>", "", document, flags=re.DOTALL) + unpacked(document, "rows")


def test_the_page_of_complete_blocks_has_no_verdicts_and_the_last_is_as_if_it_had_not_been(
    capsys, file, partly, finished, here
):
    where = ("--folder", partly)
    document = json.loads(call(capsys, "report", file, *where, "--partial", "--json"))
    assert (document["blocks_done"], document["blocks"], document["claims"]) == (2, 3, [])
    assert "Partial: 2 of 3 blocks are done. Verdicts follow when all are done." in call(
        capsys, "report", file, *where, "--partial"
    )
    text = text_of(partly)
    assert "Partial: 2 of 3 blocks (grammars) are done. Verdicts follow when all are done." in text
    assert "plain-2" in text
    assert 'href="#top"' not in text  # there is no answer yet
    assert not any(each in text for each in ("plain-3", "Dropout makes a model flatter", 'class="card'))
    (partly / "report" / "figures" / "no-longer-drawn.png").write_text("")
    (partly / "report" / ".tmp-1-index.html").write_text("")
    call(capsys, "run", file, *where, *here)
    assert "Partial" not in text_of(partly)
    assert "Dropout makes a model flatter" in text_of(partly)
    assert report(partly) == report(finished)


def test_an_unfinished_study_needs_partial_and_a_complete_block(capsys, file, partly):
    with pytest.raises(IsolossError, match=r"2 units are not done .* and 2 of 3 blocks are complete; .*study run"):
        call(capsys, "report", file, "--folder", partly)
    for name in ("plain-1", "plain-2"):
        shutil.rmtree(partly / "runs" / name / "evaluations")
    with pytest.raises(IsolossError, match=r"4 units are not done .* and 0 of 3 blocks are complete"):
        call(capsys, "report", file, "--folder", partly, "--partial")
    assert not (partly / "report").exists()
