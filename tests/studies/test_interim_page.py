"""Studies in blocks: the order of their units, and the page that grows with the blocks."""

import json
import re
import shutil

import pytest

from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import Unit, in_order
from isoloss.studies.run import interim_page, local
from isoloss.studies.run.loop import Loop, Options
from isoloss.studies.spec import load_study
from pages import unpacked
from studies_in_process import call, carry_out


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


# --- the order


def unit(name, *after, seconds=1.0, block=0):
    return Unit(name=name, arguments=("ls",), done=lambda: False, after=after, seconds=seconds, block=block)


def test_a_lower_block_comes_first_and_in_it_the_longest_chain():
    units = [
        unit("late long", seconds=100, block=2),
        unit("short", seconds=2),
        unit("then", "first", seconds=5),
        unit("first", seconds=1),
        unit("middle", "first", seconds=50, block=1),
    ]
    assert [each.name for each in in_order(units)] == ["first", "then", "short", "middle", "late long"]


def test_a_block_that_needs_a_later_one_is_refused():
    with pytest.raises(IsolossError, match=r"'a' of block 0 waits for 'b' of block 1: a unit cannot wait"):
        in_order([unit("a", "b"), unit("b", block=1)])


def test_a_worker_without_work_in_its_block_starts_the_next_one(tmp_path):
    """Two workers: the second unit of block 0 has to wait, so block 1 is begun beside the first; then it goes first."""

    def command(name, *after, block):
        done = (tmp_path / name).exists
        return Unit(
            name=name, arguments=("text", "python-docs", str(tmp_path / name)), done=done, after=after, block=block
        )

    few = ("--language", "pcfg-laptop", "--size", "d16", "--batch-size", "8", "--device", "cpu", "--threads", "1")
    slow = Unit(  # still running when the first has ended
        name="c",
        arguments=("train", str(tmp_path / "c"), *few, "--steps", "1500"),
        done=lambda: Run(tmp_path / "c").complete,
        block=1,
    )
    units = [slow, command("d", block=1), command("a", block=0), command("b", "a", block=0)]
    said, done = carry_out(in_order(units), tmp_path, local.run, workers=2)
    started = [line.split(":")[0] for line in said if "started" in line]
    assert started[:2] == ["a", "c"]
    assert started.index("b") < started.index("d")
    assert sorted(done) == ["a", "b", "c", "d"]


def test_the_hook_is_called_when_the_workers_have_work_again(tmp_path):
    events = []

    def command(name, *after):
        done = (tmp_path / name).exists
        return Unit(name=name, arguments=("text", "python-docs", str(tmp_path / name)), done=done, after=after)

    options = Options(workers=1)
    loop = Loop(
        [command("a"), command("b", "a")],
        tmp_path,
        options,
        say=lambda line: events.append(line.partition(" ")[0] + " " + line.split(": ")[-1][:4]),
        on_done=lambda unit: events.append(f"page after {unit.name}"),
    )
    local.run(loop, options)
    assert events[1:] == ["a: star", "a: done", "b: star", "page after a", "b: done", "page after b"]


# --- the page


def test_pages_grow_with_the_blocks_and_the_last_is_as_if_they_had_not(
    capsys, file, partly, here, finished, monkeypatch
):
    monkeypatch.setattr(interim_page, "INTERVAL_SECONDS", 0.0)
    seen = {}
    write = StudyFolder.report

    def watched(folder, complete=None):
        path = write(folder, complete)
        seen[complete] = text_of(folder.path)
        return path

    monkeypatch.setattr(StudyFolder, "report", watched)
    call(capsys, "run", file, "--folder", partly, *here)
    assert list(seen) == [(0, 1), None]
    interim, final = seen.values()
    assert "Interim: 2 of 3 blocks (grammars) are done. Verdicts follow when all are." in interim
    assert "plain-2" in interim
    assert "plain-3" not in interim
    assert "Dropout makes a model flatter" not in interim
    assert 'class="card' not in interim
    assert "Interim" not in final
    assert "Dropout makes a model flatter" in final
    assert report(partly) == report(finished)


def test_an_unfinished_study_is_reported_from_its_complete_blocks(capsys, file, partly, finished, here):
    where = ("--folder", partly)
    document = json.loads(call(capsys, "report", file, *where, "--json"))
    assert (document["blocks_done"], document["blocks"], document["claims"]) == (2, 3, [])
    assert "Interim: 2 of 3" in text_of(partly)
    assert "interim: 2 of 3 blocks are done; verdicts follow when all are" in call(capsys, "report", file, *where)
    (partly / "report" / "figures" / "no-longer-drawn.png").write_text("")
    (partly / "report" / ".tmp-1-index.html").write_text("")
    call(capsys, "run", file, *where, *here)
    assert report(partly) == report(finished)


def test_too_few_blocks_are_refused(capsys, file, partly):
    shutil.rmtree(partly / "runs" / "plain-2" / "evaluations")
    with pytest.raises(IsolossError, match=r"3 units are not done .* and 1 of 3 blocks are complete; .*study run"):
        call(capsys, "report", file, "--folder", partly)
    file.write_text(file.read_text().replace("first_page_blocks=2,", ""))
    with pytest.raises(IsolossError, match="3 units are not done"):
        call(capsys, "report", file, "--folder", partly)
    assert not (partly / "report").exists()


def test_a_page_that_fails_is_told_in_a_line_and_the_last_one_is_an_error(capsys, file, partly, here, finished):
    text = file.read_text()
    broken = "def tables(results):\n    if results.blocks_done < results.blocks: raise ValueError('too\\nfew')\n"
    file.write_text(text.replace("def tables(results):\n", broken))
    call(capsys, "run", file, "--folder", partly, *here)
    assert report(partly) == report(finished)
    shutil.rmtree(partly / "runs" / "plain-3" / "evaluations")
    shutil.rmtree(partly / "runs" / "dropped-3" / "evaluations")
    (partly / "report" / "index.html").unlink()
    capsys.readouterr()
    folder = StudyFolder(load_study(file), partly)
    said = []
    page = interim_page.InterimPage(folder, folder.plan(), said.append)
    page(folder.plan()[0])
    page(folder.plan()[0])  # not tried again before there is another block
    why = "tables of the study blocks fails with ValueError: too few (blocks.py, line 51)"
    assert said == [f"the page of 2 of 3 blocks could not be written: {why}"]
    file.write_text(text.replace("def tables(results):\n", "def tables(results):\n    raise ValueError('never')\n"))
    with pytest.raises(IsolossError, match="tables of the study blocks fails with ValueError: never"):
        call(capsys, "run", file, "--folder", partly, *here)


def test_pages_keep_their_distance(file, tmp_path, monkeypatch):
    file.write_text(file.read_text().replace("first_page_blocks=2", "first_page_blocks=1"))
    folder = StudyFolder(load_study(file), tmp_path / "out")
    written, now = [], [1000.0]
    monkeypatch.setattr(StudyFolder, "report", lambda _, complete: written.append(complete))
    monkeypatch.setattr(interim_page.time, "monotonic", lambda: now[0])
    units = [unit(name, block=i // 2) for i, name in enumerate("abcdef")]
    page = interim_page.InterimPage(folder, units, lambda _: None)
    for name, seconds in (("a", 0), ("b", 0), ("c", 60), ("d", 60), ("e", 119), ("f", 1)):
        now[0] += seconds
        page(next(each for each in units if each.name == name))
    assert written == [(0,)]  # 239 s after it there is a second block, and then all are done
    page = interim_page.InterimPage(folder, units, lambda _: None)
    for name, seconds in (("a", 0), ("b", 0), ("c", 60), ("d", 60), ("e", 120)):
        now[0] += seconds
        page(next(each for each in units if each.name == name))
    assert written == [(0,), (0,), (0, 1)]  # when the next unit is done after 240 s
    page = interim_page.InterimPage(folder, units, lambda _: None)
    for name, seconds in (("a", 0), ("b", 0), ("c", 300), ("e", 300)):
        now[0] += seconds
        page(next(each for each in units if each.name == name))
    assert written[3:] == [(0,)]  # there is no other block


def test_blocks_are_counted_from_one(file, tmp_path):
    file.write_text(file.read_text().replace("first_page_blocks=2", "first_page_blocks=0"))
    with pytest.raises(IsolossError, match="first_page_blocks of the study blocks is 0; it must be at least 1"):
        StudyFolder(load_study(file), tmp_path / "out").prepare()
