"""Is a form the same however it is cut, and is a broken one refused in words?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import InvalidRequest
from segue.files.form import NAME_CHARS_MAX, FileForm, clean_name

TYPE = "multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes], end: bytes = b"--xyz--\r\n") -> bytes:
    """A body with these parts: the rest of the disposition, and the contents."""
    head = b'--xyz\r\nContent-Disposition: form-data; name="%b\r\n\r\n%b\r\n'
    return b"".join(head % (name.encode(), data) for name, data in parts) + end


FILE = ('file"; filename="a.bin"', b"\r\n--xy\0\xff--xyz")
WHOLE = form(('purpose"', b"user_data"), FILE)


async def cut(body: bytes, places: Sequence[int]) -> AsyncIterator[bytes]:
    ends = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    for start, end in pairwise(ends):
        yield body[start:end]


async def read(body: bytes, places: Sequence[int] = (), kind: str = TYPE) -> tuple[FileForm, bytes]:
    read_form, written = FileForm(kind), bytearray()

    async def write(data: bytes) -> None:
        written.extend(data)

    await read_form.read(cut(body, places), write)
    return read_form, bytes(written)


async def test_form_is_the_same_cut_at_every_byte() -> None:
    for place in range(len(WHOLE)):
        read_form, data = await read(WHOLE, [place])
        assert (read_form.fields, read_form.filename) == ({"purpose": "user_data"}, "a.bin")
        assert data == FILE[1]


@given(data=st.binary(max_size=300), places=st.lists(st.integers(0, 1_000), max_size=8))
async def test_any_bytes_come_through_cut_anywhere(data: bytes, places: list[int]) -> None:
    if b"\r\n--xyz" in data:
        return
    _, written = await read(form((FILE[0], data)), places)
    assert written == data


@pytest.mark.parametrize(
    "kind, body, words",
    [
        ("application/json", b"{}", "multipart/form-data"),
        ("multipart/form-data", WHOLE, "multipart/form-data"),
        ("multipart/form-data; boundary=" + "x" * 257, WHOLE, "Send the file as a form"),
        (TYPE, b"", "ends before its last boundary"),
        (TYPE, WHOLE[:-9], "ends before its last boundary"),
        (TYPE, form(('purpose"', b"x")), "Missing required parameter: 'file'"),
        (TYPE, form(FILE, FILE), "one file at a time"),
        (TYPE, form(('purpose"', b"x" * 2_000), FILE), "more than 1024 bytes"),
        (TYPE, form(*((f'f{n}"', b"") for n in range(20)), FILE), "more than 16 fields"),
        (TYPE, b"not a form", "cannot be read"),
    ],
)
async def test_broken_form_is_refused_in_words(kind: str, body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await read(body, kind=kind)


@pytest.mark.parametrize(
    "given_name, kept",
    [
        ("report.pdf", "report.pdf"),
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\a b.txt", "a b.txt"),
        ("a\r\nX-Evil: 1.txt", "aX-Evil: 1.txt"),
        ("..", "file"),
        ("", "file"),
        ("Отчёт 📎.md", "Отчёт 📎.md"),
        ("x" * 400 + ".png", "x" * (NAME_CHARS_MAX - 4) + ".png"),
        ("x" * 400, "x" * NAME_CHARS_MAX),
    ],
)
def test_name_of_a_file_is_its_own_and_short(given_name: str, kept: str) -> None:
    assert clean_name(given_name) == kept
