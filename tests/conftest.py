"""What several test files need: a terminal's width, the real data beside the checkout, and a small tokenizer."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore = ["plugin"]  # a package from outside, which only some commands see
# If one of these is set, pytest explains an inequality by a diff of all lines: an hour for the bytes of two pages.
for variable in ("CI", "BUILD_NUMBER"):
    os.environ.pop(variable, None)
# A shell that starts the tests in the background lets them ignore Ctrl-C. What they start would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
WORDS = [f"{first}{second}" for first in "abcdefghij" for second in "uvwxyz"]


def pytest_collection_finish() -> None:
    """Let every later collection of garbage pass over the thousands of tests and modules that stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def wide_terminal() -> Iterator[None]:
    """Let lines be as wide as they get, wherever the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real public data, or a skip."""
    named = os.environ.get("ISOLOSS_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not there and ISOLOSS_DATA names no other folder")
    return folder


@pytest.fixture(scope="session")
def quick_figures() -> Iterator[None]:
    """Let pages of studies made in this process have their figures' specifications as files.

    That these are drawn, and the same way every time, is shown in tests/report.
    """
    from isoloss import files
    from isoloss.report.save import printed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isoloss.studies.page.save", lambda chart, file: files.write_json(file, printed(chart)))
        yield


@pytest.fixture(scope="session")
def words() -> list[str]:
    """The sixty words that `vocab` knows, each one token."""
    return WORDS


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    """A WordPiece vocabulary: the special tokens, not all at the front, and sixty lower-case words."""
    path = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "au", "[UNK]", "[CLS]", "[SEP]", *WORDS[1:], "[MASK]", "##u"]
    path.write_text("\n".join(tokens) + "\n")
    return path
