"""A browser, and a page of every kind: of small models, of a small study, and of a kept suite."""

import dataclasses
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

import small_checkpoints as small
import studies_in_process
from isoloss import compare
from isoloss.cli import study as command
from isoloss.comparison.page import comparison_page
from isoloss.studies import load_study
from isoloss.studies.folder import StudyFolder
from isoloss.studies.page import report
from isoloss.suites.page import suite_page
from isoloss.suites.table import SuiteTable

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COMPARED = {
    "two models": ["plain", "penalized"],
    "three models": ["seed-0/plain-with-a-long-name", "seed-0/penalized", "b"],
    "two series": [f"{name}/checkpoint-{step}" for name in ("plain", "penalized") for step in (10, 20)],
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests of this folder."""
    lacking = [name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None]
    lacking += [] if CHROMIUM else ["Chromium"]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.skipif(bool(lacking), reason=f"needs {' and '.join(lacking)}"))


@pytest.fixture(scope="session")
def chromium():
    """A browser that makes no requests of its own."""
    from playwright.sync_api import sync_playwright

    quiet = ("background-networking", "component-update", "sync", "gpu")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", *(f"--disable-{each}" for each in quiet)]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens a page, with all its sections open and its figures drawn; at the end, it must have had no error."""
    contexts, errors = [], []

    def told(message):
        if message.type in ("error", "warning"):
            errors.append(message.text)

    def open_page(file, *, width=1280, scheme="light"):
        size = {"width": width, "height": 900}
        contexts.append(chromium.new_context(viewport=size, color_scheme=scheme, offline=True))
        page = contexts[-1].new_page()
        page.on("console", told)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.wait_for_function("[...document.querySelectorAll('.chart')].every((each) => each.querySelector('svg'))")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []


@pytest.fixture(scope="session")
def finished(tmp_path_factory, quick_figures):
    """The study in blocks, carried out."""
    folder = tmp_path_factory.mktemp("study")
    studies_in_process.finish(folder)
    return StudyFolder(load_study(folder / "blocks.py"), folder / "out")


@pytest.fixture(scope="session")
def suite():
    """A kept suite, with half of its measures and outcomes, as drawing its page takes the most time here."""
    table = SuiteTable.read(HERE.parents[1] / "results" / "suite-laptop-grammar")
    outcomes = ("few-shot-prefix-4-30", "int3-rise")
    part = table.frame["measure"].is_in(["loss", "trace", "minimal-trace", "noise-rise", *outcomes])
    config = dataclasses.replace(table.config, outcomes=outcomes)
    return dataclasses.replace(table, frame=table.frame.filter(part), config=config)


@pytest.fixture(scope="session")
def pages(tmp_path_factory, finished, suite):
    """The file of a page of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    ids = torch.randint(0, 60, (48, small.LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "labels": ids, "documents": torch.arange(48) // 2}]
    documents = {}
    for kind, names in COMPARED.items():
        models = {name: small.gpt2(60, seed) for seed, name in enumerate(names)}
        compared = compare(models, batches, robustness=len(models) < 4)  # as the rises take most of the time
        documents[kind] = comparison_page(compared, command=f"isoloss compare {' '.join(names)} --data text.txt")
    documents["suite"] = suite_page(suite, suite.associations(()), command="isoloss suite laptop-grammar.toml")
    made = {}
    for kind, document in documents.items():
        made[kind] = folder / f"{kind}.html"
        made[kind].write_text(document)
    made["study"] = finished.path / "report" / "index.html"
    partly = folder / "partly"
    shutil.copytree(finished.path, partly)
    for name in ("plain-3", "dropped-3"):
        shutil.rmtree(partly / "runs" / name / "evaluations")
    assert command.main(["report", str(finished.path.parent / "blocks.py"), "--folder", str(partly), "--partial"]) == 0
    made["partial study"] = partly / "report" / "index.html"
    # a row for each difference, and a warning that the claims were changed
    shutil.copytree(finished.path, folder / "changed")
    changed = StudyFolder(dataclasses.replace(finished.study, claims=()), folder / "changed")
    made["study without claims"], *_ = report(changed)
    return made
