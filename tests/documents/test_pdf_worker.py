"""Small files that unfold to much work are read no further than they are worth (docs/inside/hazards.md T7, T8)."""

from __future__ import annotations

import asyncio
import base64
import time
import zlib

import pytest

from segue.documents import pdf_worker as program
from segue.documents.pdf_worker import UNREAD_PAGE, UNREAD_REST, extract
from tests.support import MODEL, fetch, serving

FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
BEGIN, END = b"BT /F1 12 Tf ", b" ET"


def stream(head: bytes, data: bytes) -> bytes:
    packed = zlib.compress(data, 9)
    size = b"/Filter/FlateDecode/Length %d>>" % len(packed)
    return b"<<" + head + size + b"stream\n" + packed + b"\nendstream"


def pdf(*pages: bytes, form: bytes = b"") -> bytes:
    """A PDF with these drawing instructions; each page may draw the form `/X`."""
    names = b"<</Font<</F1 3 0 R>>/XObject<</X 4 0 R>>>>"
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", FONT]
    objects.append(stream(b"/Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources" + names, form))
    kids = []
    for page in pages:
        objects.append(stream(b"", page))
        place = b"/Parent 2 0 R/MediaBox[0 0 99 99]/Contents %d 0 R" % len(objects)
        objects.append(b"<</Type/Page" + place + b"/Resources" + names + b">>")
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<</Type/Pages/Kids[" + b" ".join(kids) + b"]/Count %d>>" % len(kids)
    body, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj" % number + one + b"endobj\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(body))
    return body + head + table + tail


def pages_of(data: bytes) -> str:
    """What is on the pages, of a file that is not broken."""
    title, *pages, end = extract(data, 1_000_000)
    assert (title, end) == ("", {"is_broken": False})
    return "\n\n".join(map(str, pages))


def words(text: bytes, times: int = 1) -> bytes:
    return BEGIN + (b"(" + text + b") Tj ") * times + END


def test_page_that_unfolds_to_megabytes_is_told_and_not_read() -> None:
    bomb = pdf(words(b"first"), words(b"a", 1_000_000), words(b"last"))
    assert len(bomb) < 20_000
    assert pages_of(bomb) == f"first\n\n{UNREAD_PAGE}\n\nlast"


def test_form_that_unfolds_to_megabytes_is_told_and_not_read() -> None:
    bomb = pdf(words(b"first"), b"/X Do", form=words(b"a", 1_000_000))
    assert pages_of(bomb) == f"{UNREAD_PAGE}\n\n{UNREAD_PAGE}"


def test_form_that_is_drawn_without_end_is_read_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "OPERATIONS_MAX", 2_000)
    endless = pdf(words(b"first"), b"/X Do " * 30_000, words(b"never"), form=words(b"a", 100))
    assert pages_of(endless) == f"first\n\n{UNREAD_REST}"


async def test_others_are_served_while_a_small_file_takes_its_time() -> None:
    """What counts is not how long a file is, but what it unfolds to."""
    small = base64.b64encode(pdf(words(b"a", 8_000))).decode()
    assert len(small) < 4_000
    part = {"type": "input_file", "filename": "a.pdf", "file_data": small}
    asked = {"model": MODEL, "input": [{"role": "user", "content": [part]}], "store": False}
    async with serving() as served:
        began = time.perf_counter()
        asking = asyncio.create_task(fetch(served, "POST", "/v1/responses", asked))
        waits = []
        while not asking.done():
            asked_at = time.perf_counter()
            await fetch(served, "GET", "/health")
            waits.append(time.perf_counter() - asked_at)
        assert (await asking).status == 200
        assert max(waits) < (time.perf_counter() - began) / 2
