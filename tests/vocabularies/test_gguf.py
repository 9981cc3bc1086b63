"""The head of a GGUF file is read, and anything else is refused in words."""

import struct
from pathlib import Path

import pytest

from segue.errors import ServerFault
from segue.vocabularies.gguf import read_gguf


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


PAIRS = [
    string("name") + struct.pack("<I", 8) + string("tiny"),
    string("count") + struct.pack("<II", 4, 7),
    string("is_small") + struct.pack("<I?", 7, True),
    string("rate") + struct.pack("<Id", 12, 0.5),
    string("kinds") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
    string("tokens") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("漢"),
]
WHOLE = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(PAIRS)) + b"".join(PAIRS)


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_head_is_read_and_the_tensors_behind_it_are_not(tmp_path: Path) -> None:
    assert read_gguf(written(tmp_path, WHOLE + b"tensors")) == {
        "name": "tiny",
        "count": 7,
        "is_small": True,
        "rate": 0.5,
        "kinds": [1, -2, 3],
        "tokens": ["a", "漢"],
    }


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_head_cut_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ServerFault, match=r"model\.gguf"):
        read_gguf(written(tmp_path, WHOLE[:length]))


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04" + WHOLE[4:],
        struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("a") + struct.pack("<I", 99),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 4, 1 << 62),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 8, 1 << 62),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 62),
    ],
)
def test_strange_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ServerFault):
        read_gguf(written(tmp_path, data))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerFault, match=r"nothing\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "nothing.gguf")


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "is not a GGUF file"),
        (b"hello\n", "is not a GGUF file: it does not begin with the letters GGUF"),
        (WHOLE[:5], "is damaged or not complete"),
        (WHOLE[:-1], "is damaged or not complete. Download it again"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "is a GGUF file of version 1"),
    ],
)
def test_person_reads_what_is_wrong_with_a_file(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ServerFault) as refused:
        read_gguf(written(tmp_path, data))
    assert words in str(refused.value)
    assert "unpack" not in str(refused.value)
