"""PDFs are read by a process of their own, within limits; what came before a limit is not lost."""

from __future__ import annotations

import asyncio
from base64 import b64encode

import pytest

from segue.documents.pdf import PdfText, PdfTexts, read_pdf
from segue.errors import InvalidRequest
from segue.web.html import open_page
from tests.documents.papers import TEDIOUS, drawn, pdf


def sent(data: bytes) -> str:
    """A file as clients send it."""
    return b64encode(data).decode()


PLAIN = b"BT /F1 12 Tf 72 720 Td (Before) Tj ET"


async def test_pages_and_title_are_read() -> None:
    paper = await read_pdf((pdf("One", "Two", title="Numbers"),), 1_000, 20)
    assert paper == PdfText("Numbers", ("One", "Two"), "whole")


async def test_no_more_is_read_than_is_wanted() -> None:
    paper = await read_pdf((pdf("abc", "def", "ghi"),), 5, 20)
    assert paper == PdfText("", ("abc", "de"), "whole")


@pytest.mark.parametrize("data", [b"%PDF-1.4 and nothing more", b"%PDF" * 9])
async def test_broken_file_is_told_from_a_slow_one(data: bytes) -> None:
    assert (await read_pdf((data,), 1_000, 20)).end == "broken"


async def test_slow_page_ends_the_reading_and_what_came_before_it_is_kept() -> None:
    paper = await read_pdf((drawn(PLAIN, TEDIOUS),), 1_000, 0.8)
    assert paper.end == "late"
    assert paper.pages in ((), ("Before",))


async def test_reading_that_nobody_waits_for_any_more_is_stopped() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await read_pdf((drawn(TEDIOUS),), 1_000, 60)


async def test_text_is_read_once_and_too_slow_is_an_error() -> None:
    papers = PdfTexts(20)
    data = pdf("Hello")
    assert await papers.read(sent(data)) == "Hello"
    held = papers.bytes
    assert held > 0
    again = asyncio.create_task(papers.read(sent(data)))
    await asyncio.sleep(0)
    assert again.result() == "Hello"
    assert papers.bytes == held
    assert await papers.read(sent(b"%PDF nonsense")) is None
    with pytest.raises(InvalidRequest, match=r"could not be read in time"):
        await PdfTexts(0.5).read(sent(drawn(TEDIOUS)))


async def test_page_that_is_a_pdf_has_a_title_and_words() -> None:
    page = await open_page("https://a.com/x.pdf", pdf("Rain.", title="Weather"))
    assert page is not None
    assert (page.title, page.text) == ("Weather", "Rain.")
    assert await open_page("https://a.com/x.pdf", b"%PDF-1.7 nonsense") is None
