"""What do the bytes of a file say? Text of any kind, Markdown, source code and PDF, as words.

In: bytes. Out: text, or None where there is none to be had.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from pypdf import PageObject, PdfReader
from pypdf.errors import PyPdfError
from pypdf.generic import DictionaryObject, StreamObject

PDF_PAGES_MAX = 2_000
# A few kilobytes can unfold to minutes of work (hazards.md T8). A page of text is drawn by some thousand operations
# in less than 100 KiB; each costs some 20 us.
PDF_PAGE_BYTES_MAX = 1024 * 1024
PDF_OPERATIONS_MAX = 1_000_000
UNREAD_PAGE = "[a page that is too large to read]"
UNREAD_REST = "[the rest is too long to read]"
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


class _Exhausted(Exception):
    """All the work that a file is worth has been done."""


class _Effort:
    """How many operations have been read of a file."""

    def __init__(self) -> None:
        self.spent = 0

    def __call__(self, *_: object) -> None:
        self.spent += 1
        if self.spent > PDF_OPERATIONS_MAX:
            raise _Exhausted


def pages_of_pdf(data: bytes) -> Iterator[str]:
    """The text of each page in turn; what is too much to read is told in its place."""
    effort = _Effort()
    try:
        for page in PdfReader(io.BytesIO(data)).pages[:PDF_PAGES_MAX]:
            is_small = _drawn_bytes(page, PDF_PAGE_BYTES_MAX) <= PDF_PAGE_BYTES_MAX
            yield page.extract_text(visitor_operand_before=effort) if is_small else UNREAD_PAGE
    except _Exhausted:
        yield UNREAD_REST
    except _BROKEN as error:
        raise Unreadable("a broken PDF") from error


def _drawn_bytes(page: PageObject, enough: int) -> int:
    """How long the instructions of a page are, with those of the forms in it; no more is counted than `enough`."""
    contents = page.get_contents()
    size = 0 if contents is None else len(contents.get_data())
    seen: set[int] = set()
    todo: list[DictionaryObject] = [page]
    while todo and size <= enough:
        resources = todo.pop().get("/Resources")
        named = resources.get_object() if resources is not None else None
        forms = named.get("/XObject") if isinstance(named, DictionaryObject) else None
        found = forms.get_object() if forms is not None else None
        for one in found.values() if isinstance(found, DictionaryObject) else ():
            form = one.get_object()
            if not isinstance(form, StreamObject) or form.get("/Subtype") != "/Form":
                continue
            if id(form) not in seen and size <= enough:
                seen.add(id(form))
                size += len(form.get_data())
                todo.append(form)
    return size


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
