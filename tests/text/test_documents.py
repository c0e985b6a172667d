import json
import random
import re

import datasets
import pytest

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.text import documents
from isoloss.text.documents import find_files, read_documents


def texts(*paths):
    return [text for _, text in read_documents(paths)]


def cut(text):
    """The documented rule on a whole text: the slow reference."""
    parts = []
    while len(text) >= 30_000:
        window = text[:20_000]
        for pattern in (r"\n\s*\n", r"\n", r"\s"):
            ends = [m.end() for m in re.finditer(pattern, window[10_000:])]
            if ends:
                end = 10_000 + ends[0]
                break
        else:
            end = 20_000
        parts.append(text[:end])
        text = text[end:]
    return [*parts, text]


def test_short_text_is_one_document_without_mark_and_with_plain_line_ends(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfOne line.\r\nTwo \xc3\xa9.\rThree.\n")
    assert list(read_documents([file])) == [(f"{file}:1", "One line.\nTwo é.\nThree.\n")]


@pytest.mark.parametrize(
    ("every", "blank"), [(50, 0.0), (50, 0.01), (50, 0.5), (15_000, 0.5), (25_000, 0.0), (25_000, 0.5), (10**9, 0.0)]
)
def test_long_text_is_cut_at_the_best_boundary(tmp_path, every, blank):
    draw = random.Random(every + blank)
    pieces, size = [], 0
    while size < 1_300_000:  # more than what is read at once
        line = " ".join("x" * draw.randint(1, 9) for _ in range(max(1, min(every, 2_000_000) // 6)))
        pieces.append(line + ("\n \n\n" if draw.random() < blank else "\n"))
        size += len(pieces[-1])
    text = "".join(pieces)
    (tmp_path / "a.txt").write_text(text)
    found = list(read_documents([tmp_path / "a.txt"]))
    assert [part for _, part in found] == cut(text)
    assert all(10_000 <= len(part) <= 30_000 for _, part in found[:-1])
    assert len(found[-1][1]) < 30_000
    before = 0
    for source, part in found:
        assert source == f"{tmp_path / 'a.txt'}:{before + 1}"
        before += part.count("\n")


def test_cut_prefers_blank_line_then_line_then_word_then_anywhere(tmp_path):
    def first(text):
        (tmp_path / "a.txt").write_text(text)
        return len(texts(tmp_path / "a.txt")[0])

    x = "x" * 40_000
    assert first(x[:11_000] + " " + x[:1000] + "\n" + x[:1000] + "\n\n" + x) == 11_000 + 1 + 1000 + 1 + 1000 + 2
    assert first(x[:11_000] + " " + x[:1000] + "\n" + x) == 12_002
    assert first(x[:11_000] + " " + x) == 11_001
    assert first(x) == 20_000
    assert first(x[:29_999]) == 29_999
    assert documents.DOCUMENT_CHARACTERS == 10_000


def test_json_lines_give_their_text_field(tmp_path):
    file = tmp_path / "a.jsonl"
    long = "word " * 20_000  # a document however long it is
    lines = [{"text": "One\ntwo", "id": 1}, {"text": "  "}, {"text": long}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    assert list(read_documents([file])) == [(f"{file}:1", "One\ntwo"), (f"{file}:5", long)]


def test_folders_are_read_in_order_and_to_the_bottom(tmp_path):
    for name in ("b.txt", "a/z.TXT", "a/y.jsonl", "README.md", ".hidden/h.txt", "a/.h.txt", "c.txt/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "y"}' if name.endswith("jsonl") else name)
    assert texts(tmp_path) == ["y", "a/z.TXT", "b.txt", "c.txt/d.txt"]
    assert texts(tmp_path / "b.txt", str(tmp_path / "a")) == ["b.txt", "y", "a/z.TXT"]
    assert find_files([tmp_path / "b.txt"]) == [tmp_path / "b.txt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.md", b"text", "a.md as text: a text file ends in .txt or .jsonl"),
        ("a.txt", b"caf\xe9 \n", "a.txt is not UTF-8 text"),
        ("a.txt", "text".encode("utf-16-le"), "a.txt is not UTF-8 text .many of its bytes are 0, as in UTF-16"),
        ("a.txt", b" \n\t\n", "no text in .*a.txt"),
        ("a.txt", b"", "no text in .*a.txt"),
        ("a.jsonl", b'{"text": "x"}\n{"content": "x"}\n', 'line 2 is not a JSON object with a string field "text"'),
        ("a.jsonl", b'{"text": 3}\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'["text"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 holds half a surrogate pair"),
        ("a.jsonl", b'{"text": ""}\n', "no text in .*a.jsonl"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(IsolossError, match=message):
        texts(tmp_path / name)


def test_a_folder_with_text_of_other_kinds_says_so(tmp_path):
    for name in ("a.txt", "b.jsonl.gz", "c.parquet"):
        (tmp_path / name).write_text("text")
    with pytest.warns(IsolossWarning, match=r"also holds 2 files that are not read, such as b.jsonl.gz: a text file"):
        assert texts(tmp_path) == ["text"]


def test_nulls_are_left_out_and_counted(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x"}\n{"text": null}\n{"text": ""}\n{"text": null}\n{"text": "y"}\n{"text": "z"}\n')
    said = r"2 nulls in place of a text left out \(first: .*a.jsonl:2\)"
    with pytest.warns(IsolossWarning, match=said):
        assert texts(file) == ["x", "y", "z"]
    with pytest.warns(IsolossWarning, match=said):  # also where the end is not read
        assert [text for _, text in read_documents([file], max_documents=2)] == ["x", "y"]
    file.write_text('{"text": null}\n')
    with pytest.warns(IsolossWarning), pytest.raises(IsolossError, match=r"no text in .*a.jsonl"):
        texts(file)


def test_paths_are_checked_before_anything_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsolossError, match=r"no text file or folder .*nowhere"):
        read_documents([tmp_path / "nowhere"])
    with pytest.raises(IsolossError, match=r"empty holds no .txt or .jsonl file"):
        read_documents([tmp_path / "empty"])
    with pytest.raises(IsolossError, match=r"a.txt is named twice"):
        read_documents([tmp_path, tmp_path / "a.txt"])
    with pytest.raises(IsolossError, match="at least one file or folder"):
        read_documents([])


def test_datasets_and_other_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = {"text": ["a", " ", "b"], "body": ["c", "d", None], "id": [1, 2, 3]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "saved")
    name = f"hf:{tmp_path / 'saved'}"
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    (tmp_path / "a.txt").write_text("z")
    paths = [tmp_path / "a.txt", name, tmp_path / "a.jsonl"]
    assert list(read_documents(paths))[1:3] == [(f"{name}:0", "a"), (f"{name}:2", "b")]
    assert texts(*paths) == ["z", "a", "b", "y"]
    assert [text for _, text in read_documents(paths, max_documents=2)] == ["z", "a"]
    assert [text for _, text in read_documents([paths[0], paths[2]], column="body")] == ["z", "x"]
    with pytest.warns(IsolossWarning, match=r"1 null in place of a text left out \(first: .*saved:2\)"):
        assert [text for _, text in read_documents([name], column="body")] == ["c", "d"]
    with pytest.raises(IsolossError, match=r"row 0: the column 'id' holds no text but 1"):
        list(read_documents([name], column="id"))
    with pytest.raises(IsolossError, match="no split 'test'; it has train"):
        read_documents([name], split="test")
    with pytest.raises(IsolossError, match=r"saved is named twice"):
        read_documents([name, name])
    with pytest.raises(IsolossError, match="the split 'train' is for datasets"):
        read_documents([tmp_path / "a.txt"], split="train")
    with pytest.raises(IsolossError, match="the column 'body' is for JSON lines and datasets"):
        read_documents([tmp_path / "a.txt"], column="body")
    with pytest.raises(IsolossError, match="the number of documents is 0; it must be at least 1"):
        read_documents([tmp_path / "a.txt"], max_documents=0)


def test_content_is_that_of_the_text_and_not_of_what_it_is_kept_in(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()

    def content(rows, first=None, *, as_parquet=False, **options):
        data = datasets.Dataset.from_dict({"text": rows, "other": ["o"] * len(rows)})
        if as_parquet:
            data.to_parquet(tmp_path / "folder" / "train.parquet")
        else:
            data.save_to_disk(tmp_path / "saved")
        name = tmp_path / ("folder" if as_parquet else "saved")
        (source,) = documents.open_sources([f"hf:{name}"], **options)
        return source.content(first)

    rows = ["ab", "c", "d"]
    assert content(rows) == content(rows, as_parquet=True) == content(rows, 3) == content(["ab", "", "c", "d"])
    others = [content(["a", "bc", "d"]), content(rows[::-1]), content(rows, 2), content(rows, column="other")]
    assert len({content(rows), *others}) == 5


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)


def in_blocks(blocks, *paths):
    return [text for _, text in documents.read(documents.open_sources(paths), blocks=blocks)]


def test_every_line_is_of_one_block_whatever_its_length(tmp_path, small_blocks):
    draw = random.Random(0)
    # some are longer than a block, some end with one, and é takes two bytes
    lines = ["é" * draw.choice((1, 20, 26, 100)) + str(i) for i in range(60)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines), encoding="utf-8")
    (source,) = documents.open_sources([file])
    each = [in_blocks([[block]], file) if block in _begin(file) else [] for block in range(source.num_blocks)]
    assert [line for some in each for line in some] == lines == texts(file)
    file.write_text('{"text": "good"}\n' * 10 + "bad\n")
    with pytest.raises(IsolossError, match="the line that ends at byte 174 is not JSON"):
        in_blocks([[2]], file)


def _begin(file):
    """The blocks in which lines begin, counted over the whole file."""
    starts = [0]
    for line in file.read_bytes().splitlines(keepends=True)[:-1]:
        starts.append(starts[-1] + len(line))
    return {start // 64 for start in starts}


def test_blocks_of_plain_text_have_whole_words(tmp_path, small_blocks):
    file = tmp_path / "a.txt"
    words = [f"é{i}" for i in range(500)]
    file.write_text(" ".join(words), encoding="utf-8")
    (source,) = documents.open_sources([file])
    found = [in_blocks([[block]], file)[0].split() for block in range(source.num_blocks)]
    cut = set(words) - {word for some in found for word in some}
    assert all(set(some) <= set(words) for some in found)
    # at most the one word at each end of a block
    assert len(cut) < source.num_blocks
    assert [word for some in found for word in some] == [word for word in words if word not in cut]


def test_blocks_are_drawn_uniformly_over_all_sources(tmp_path, small_blocks):
    files = [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.jsonl"]
    for file, blocks in zip(files, (3, 1, 6), strict=True):
        file.write_text("x" * 64 * blocks)
    sources = documents.open_sources(files)
    assert documents.drawn_blocks(sources, 640, 0) is None
    counts = dict.fromkeys([(i, block) for i, n in enumerate((3, 1, 6)) for block in range(n)], 0)
    for seed in range(300):
        drawn = documents.drawn_blocks(sources, 256, seed)
        assert sum(map(len, drawn)) == 4
        for i, blocks in enumerate(drawn):
            assert blocks == sorted(set(blocks))
            for block in blocks:
                counts[i, block] += 1
    # each is drawn in 0.4 of the draws
    assert all(abs(count - 120) < 4 * (300 * 0.4 * 0.6) ** 0.5 for count in counts.values())


def test_rows_of_a_dataset_come_in_blocks(tmp_path, small_blocks):
    rows = [f"row {i}" for i in range(50)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "set")
    (source,) = documents.open_sources([f"hf:{tmp_path / 'set'}"])
    blocks = range(source.num_blocks)
    assert source.num_blocks > 3
    each = [list(source.read([block])) for block in blocks]
    assert [text for some in each for _, text in some] == rows
    assert [location for some in each for location, _ in some] == [location for location, _ in source.read()]
