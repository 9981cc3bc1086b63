"""What do the bytes of a file say? Text of any kind, Markdown, source code and PDF, as words.

In: bytes. Out: text, or None where there is none to be had.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from pypdf import PdfReader
from pypdf.errors import PyPdfError

PDF_PAGES_MAX = 2_000
_BROKEN = (
    PyPdfError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OSError,
)


def is_pdf(data: bytes) -> bool:
    """Whether these bytes claim to be a PDF."""
    return data.startswith(b"%PDF")


def text_of_bytes(data: bytes) -> str | None:
    """Plain text of whatever kind; what has NUL bytes or is not UTF-8 is not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


class Unreadable(ValueError):
    """A file that is not what it claims to be."""


def pages_of_pdf(data: bytes) -> Iterator[str]:
    """The text of each page in turn."""
    try:
        for page in PdfReader(io.BytesIO(data)).pages[:PDF_PAGES_MAX]:
            yield page.extract_text()
    except _BROKEN as error:
        raise Unreadable("a broken PDF") from error


def text_of_pdf(data: bytes) -> str | None:
    """The text of a whole PDF; None if any of it cannot be read."""
    try:
        return "\n\n".join(pages_of_pdf(data))
    except Unreadable:
        return None


def title_of_pdf(data: bytes) -> str:
    """The title that a PDF says of itself, if it does."""
    try:
        said = PdfReader(io.BytesIO(data)).metadata
        return (said.title or "").strip() if said is not None else ""
    except _BROKEN:
        return ""
