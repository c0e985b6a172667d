"""Token ids in the `.bin` files of four programs, written here byte by byte as these write them."""

import struct

import numpy as np
import pytest

from isoloss.errors import IsolossError
from isoloss.text.token_files import read_token_ids

IDS = np.random.default_rng(0).integers(0, 1000, 60)
LARGE = np.random.default_rng(0).integers(0, 128_256, 60)  # as Llama 3's: more than 16 bits


def llmc(magic, version, ids, number=60):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, number
    return header.tobytes() + ids.tobytes()


def litgpt(code, ids, number=60):
    return b"LITPKDS" + struct.pack("<QBQ", 1, code, number) + ids.tobytes()


def megatron_index(code, lengths):
    start = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    pointers = np.zeros(len(lengths), "<i8").tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    return start + np.array(lengths, "<i4").tobytes() + pointers


FILES = {
    "nanoGPT": (IDS, IDS.astype("<u2").tobytes(), None),
    "nanoGPT, a small vocabulary": (IDS % 5, (IDS % 5).astype("<u2").tobytes(), None),
    "llm.c, 16 bits": (IDS, llmc(20240520, 1, IDS.astype("<u2")), None),
    "llm.c, 32 bits": (LARGE, llmc(20240801, 7, LARGE.astype("<u4")), None),
    "lit-gpt, 16 bits": (IDS, litgpt(8, IDS.astype("<u2")), None),
    "lit-gpt, 32 bits": (LARGE, litgpt(4, LARGE.astype("<i4")), None),
    "Megatron, 32 bits": (LARGE, LARGE.astype("<i4").tobytes(), megatron_index(4, [20, 40])),
    "Megatron, 16 bits": (IDS, IDS.astype("<u2").tobytes(), megatron_index(8, [60])),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_four_programs(tmp_path, name):
    ids, content, index = FILES[name]
    (tmp_path / "tokens.bin").write_bytes(content)
    if index is not None:
        (tmp_path / "tokens.idx").write_bytes(index)
    assert read_token_ids(tmp_path / "tokens.bin", 12).tolist() == ids.reshape(5, 12).tolist()


@pytest.mark.parametrize(
    ("content", "index", "message"),
    [
        (IDS.astype("<i4").tobytes(), None, r"number in it is 0, as in ids of 32 or 64 bits: .*np.save"),
        (IDS.astype("<i8").tobytes(), None, r"every second 16-bit number in it is 0"),
        ((IDS % 5).astype("<i4").tobytes(), None, r"every second 16-bit number in it is 0"),
        (LARGE.astype("<u4").tobytes(), None, r"every second 16-bit number in it is at most 1, as in"),
        (llmc(20240520, 1, IDS.astype("<u2"), 61), None, r"should have 61 tokens of 2 bytes and has 120 bytes"),
        (llmc(20240801, 7, LARGE.astype("<u4"))[:-4], None, r"should have 60 tokens of 4 bytes and has 236 bytes"),
        (llmc(20240801, 8, LARGE.astype("<u4")), None, r"is an llm.c file \(number 20240801, version 8\)"),
        (llmc(20240326, 3, IDS.astype("<u2")), None, r"is an llm.c file \(number 20240326, version 3\)"),
        (litgpt(6, IDS.astype("<f4")), None, r"type code 6, which is not an integer type"),
        (litgpt(8, IDS.astype("<u2"), 6), None, r"should have 6 tokens of 2 bytes"),
        (LARGE.astype("<i4").tobytes(), megatron_index(4, [20, 39]), r"tokens.bin should have 59 tokens of 4 bytes"),
        (LARGE.astype("<i4").tobytes(), megatron_index(7, [60]), r"tokens.idx has the type code 7"),
        (LARGE.astype("<i4").tobytes(), megatron_index(4, [60])[:36], r"tokens.idx is cut off: it should have 1 seq"),
        (LARGE.astype("<i4").tobytes(), b"TNTIDX\x00\x00" + bytes(40), r"tokens.idx is not a Megatron-LM index"),
        (b"PK\x03\x04" + bytes(40), None, r"is a file of torch.save"),
        (b"", None, r"is not a readable .bin file"),
        (b"abc", None, r"is not a readable .bin file"),
    ],
)  # fmt: skip
def test_what_is_no_file_of_16_bit_ids_is_refused(tmp_path, content, index, message):
    (tmp_path / "tokens.bin").write_bytes(content)
    if index is not None:
        (tmp_path / "tokens.idx").write_bytes(index)
    with pytest.raises(IsolossError, match=message):
        read_token_ids(tmp_path / "tokens.bin", 4)
