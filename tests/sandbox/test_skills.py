"""A skill is looked at before a byte is written; what is bad is refused as a whole, in bounded memory and time."""

from __future__ import annotations

import stat
import time
import tracemalloc
import zipfile
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO

import pytest

from segue.errors import InvalidRequest
from segue.sandbox.skills import Bundle, note, unpack

GOOD = {"csv/SKILL.md": b"Read.", "csv/scripts/a.py": b"print(1)"}


def packed(files: Mapping[str, bytes], **changes: int) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)
            entry.compress_type = zipfile.ZIP_DEFLATED
            for name, value in changes.items():
                setattr(entry, name, value)
            archive.writestr(entry, data)
    return buffer.getvalue()


def skill(data: bytes, name: str = "csv-insights", description: str = "Sums.") -> Bundle:
    return unpack(name, description, b64encode(data).decode(), "tools[0]")


def test_skill_is_unpacked_without_its_top_folder() -> None:
    bundle = skill(packed(GOOD))
    assert bundle.files == {"SKILL.md": b"Read.", "scripts/a.py": b"print(1)"}
    assert bundle.path.startswith("/home/user/skills/csv-insights-")
    assert "csv-insights: Sums. (read /home/user/skills/csv-insights-" in note([bundle])
    assert skill(packed({"skill.md": b"x"})).path.endswith("/skill.md")


BOMB = {"SKILL.md": b"x", "bomb": bytes(60 * 1024 * 1024)}


@pytest.mark.parametrize(
    "data, words",
    [
        (b"no zip", "not a zip"),
        (packed(GOOD)[:-30], "not a zip"),
        (packed({"a.md": b""}), "0 files SKILL.md"),
        (packed({"a/SKILL.md": b"", "a/b/skill.MD": b""}), "2 files SKILL.md"),
        (packed({"a/SKILL.md": b"", "A/skill.md": b""}), "same name"),
        (packed({"a/SKILL.md": b"", "b/x": b""}), "one folder"),
        (packed({"a/b/SKILL.md": b""}), "one folder"),
        (packed({"SKILL.md": b"", "../evil": b""}), "leads elsewhere"),
        (packed({"SKILL.md": b"", "a/../../evil": b""}), "leads elsewhere"),
        (packed({"SKILL.md": b"", "/etc/passwd": b""}), "leads elsewhere"),
        (packed({"SKILL.md": b"", "a//b": b""}), "leads elsewhere"),
        (packed({"SKILL.md": b"", "a\\b": b""}), "leads elsewhere"),
        (packed({"SKILL.md": b"/etc"}, external_attr=(stat.S_IFLNK | 0o777) << 16), "link"),
        (packed({"SKILL.md": b""}, external_attr=(stat.S_IFIFO | 0o777) << 16), "link"),
        (packed({"SKILL.md": b"", **{f"f{n}": b"" for n in range(501)}}), "more than 500 files"),
        (packed(BOMB), "bytes together"),
        (packed({"SKILL.md": b""}, compress_type=zipfile.ZIP_LZMA), "another way"),
        # A name that says it is UTF-8, and is not.
        (packed({"SKILL.md\u00e9": b""}).replace(b"\xc3\xa9", b"\xff\xfe"), "not a zip"),
    ],
)
def test_bad_bundle_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match="skill") as refused:
        skill(data)
    assert words in refused.value.message
    assert (refused.value.code, refused.value.param) == ("invalid_skill", "tools[0]")


def test_encrypted_bundle_is_refused() -> None:
    data = bytearray(packed({"SKILL.md": b"x"}))
    # The flag in the header of the entry, and in the directory.
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + place] |= 1
    with pytest.raises(InvalidRequest, match="encrypted"):
        skill(bytes(data))


def test_entry_that_lies_about_its_size_is_refused_in_little_memory() -> None:
    data = bytearray(packed({"SKILL.md": b"x", "bomb": bytes(200 * 1024 * 1024)}))
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.rindex(mark) + place
        data[at : at + 4] = (10).to_bytes(4, "little")
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="skill"):
        skill(bytes(data))
    assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    tracemalloc.stop()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a--b", "a" * 65, "a/b", "ä"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        skill(packed(GOOD), name)


@pytest.mark.parametrize("description", ["", "x" * 1025])
def test_bad_description_is_refused(description: str) -> None:
    with pytest.raises(InvalidRequest, match="description"):
        skill(packed(GOOD), description=description)


def test_what_is_no_base64_is_refused() -> None:
    for data in ("\u00e9", "=", "!!!!"):
        with pytest.raises(InvalidRequest, match="not a zip"):
            unpack("csv", "Sums.", data, "tools[0]")
