"""What is the text of a page? HTML, Markdown, plain text and PDF as a title and text for a model.

In: bytes and their content type. Out: a `Page`, or None where there is nothing to read. Pages come from strangers: work
and length are bounded, and nothing in a page is run, followed or trusted. `read_page` is slow work, for a thread;
`open_page` runs it in one, and a PDF in a process.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from html.parser import HTMLParser
from urllib.parse import urljoin

from msgspec import Struct

from segue.documents.pdf import read_pdf
from segue.rests import Rests
from segue.wire.files import is_pdf, text_of_bytes

# What is kept of a page; more than a model is shown of it.
TEXT_CHARS_MAX = 400_000
TITLE_CHARS_MAX = 200
LINKS_MAX = 50
# A page that takes longer to parse is shown as far as it was parsed.
PARSE_S_MAX = 3.0
# The same for a PDF, with the start of the process that reads it.
PDF_S_MAX = 10.0
SLICE_CHARS = 16 * 1024
# What may be open at the end of a slice, as a tag or a comment. The parser reads it again with each slice, in one step
# that nothing interrupts; what is longer is left out.
OPEN_CHARS_MAX = 64 * 1024
# Of a script that is left out: enough to see where it ends.
SCRIPT_END_CHARS = 64

# Elements that are shown elsewhere, or not meant for readers.
_SKIPPED = frozenset(
    {"script", "style", "noscript", "template", "svg", "math", "iframe", "object", "select", "head"}
)
_BLOCK_NAMES = """
    address article aside blockquote br dd div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 header hr
    li main nav ol p pre section table tbody td tfoot th thead tr ul
"""
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_-]{1,40})", re.IGNORECASE)


class Link(Struct, frozen=True):
    """Where a page leads."""

    url: str
    words: str


class Page(Struct, frozen=True):
    """A page as a model may read it."""

    url: str
    title: str
    text: str
    links: tuple[Link, ...] = ()

    @property
    def bytes(self) -> int:
        """An estimate of its memory."""
        chars = len(self.text) + len(self.url) + len(self.title)
        return 4 * (chars + sum(len(link.url) + len(link.words) for link in self.links))


async def open_page(
    url: str, data: bytes, kind: str = "", charset: str | None = None, name: str = ""
) -> Page | None:
    """The page that these bytes are, of whatever form; None if there is no text in them."""
    if not is_pdf(data):
        return await asyncio.to_thread(read_page, url, data, kind, charset, name)
    pdf = await read_pdf(data, TEXT_CHARS_MAX, PDF_S_MAX)
    # What came before a broken or a slow page is still worth reading.
    if not any(pdf.pages):
        return None
    title = pdf.title or _last_name(name or url)
    return Page(url, title[:TITLE_CHARS_MAX], pdf.text[:TEXT_CHARS_MAX])


def read_page(
    url: str, data: bytes, kind: str = "", charset: str | None = None, name: str = ""
) -> Page | None:
    """The page that these bytes are, by their content type or the name; None if they are not text, as a PDF."""
    ending = (name or url).lower().partition("?")[0].rpartition(".")[2]
    is_html = "html" in kind or ending in ("html", "htm", "xhtml")
    text = None if is_pdf(data) else _decoded(data, charset, is_html=is_html)
    if text is None:
        return None
    title = ""
    links: tuple[Link, ...] = ()
    if is_html:
        text, title, links = _read_html(text, url)
    elif kind in ("text/markdown", "application/markdown") or ending in ("md", "markdown"):
        heading = re.search(r"^ {0,3}#{1,6}[ \t]+(\S[^\n]{0,300})", text, re.MULTILINE)
        title = heading[1].strip(" #\t\r") if heading else ""
    title = title or _last_name(name or url)
    return Page(url, title[:TITLE_CHARS_MAX], text[:TEXT_CHARS_MAX], links)


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _read_html(text: str, url: str) -> tuple[str, str, tuple[Link, ...]]:
    reader = _TextReader(url)
    ends_at = time.thread_time() + PARSE_S_MAX
    rests = Rests()
    # What the parser raises for a declaration that it cannot read.
    with suppress(AssertionError):
        start = 0
        while start < len(text):
            reader.feed(text[start : start + SLICE_CHARS])
            start += SLICE_CHARS
            if len(reader.rawdata) > OPEN_CHARS_MAX and (end := reader.leave_out()):
                found = text.find(end, start)
                start = found + len(end) if found >= 0 else len(text)
            if time.thread_time() > ends_at or reader.length > TEXT_CHARS_MAX:
                break
            rests.take()
    # Never closed: the parser would search through what is half open at the end again and again, without a use.
    return reader.text, reader.title, tuple(reader.links.values())


def _decoded(data: bytes, charset: str | None, *, is_html: bool) -> str | None:
    """The text by the charset of the header or of the page; else it must be UTF-8."""
    if charset is None and is_html and (declared := _CHARSET.search(data[:2_048])):
        charset = declared[1].decode("ascii")
    if b"\0" in data or (charset is None and not is_html):
        return text_of_bytes(data)
    if charset is not None and charset.lower() not in ("utf-8", "utf8"):
        with suppress(LookupError, ValueError):
            return data.decode(charset, errors="replace")
    return data.decode("utf-8-sig", errors="replace")


class _TextReader(HTMLParser):
    """Collects the text that a person would read."""

    def __init__(self, url: str) -> None:
        super().__init__(convert_charrefs=True)
        self._url = url
        self._pieces: list[str] = []
        self._title: list[str] = []
        self._skipping: list[str] = []
        self._is_title = False
        self._href: str | None = None
        self._link_words: list[str] = []
        self.length = 0
        self.links: dict[str, Link] = {}

    @property
    def text(self) -> str:
        joined = re.sub(r"[ \t\r\f\v\xa0]+", " ", "".join(self._pieces))
        return re.sub(r" ?\n[ \n]*\n ?", "\n\n", re.sub(r" *\n *", "\n", joined)).strip()

    @property
    def title(self) -> str:
        return " ".join("".join(self._title).split())

    def leave_out(self) -> str:
        """Forget what is open. Returns what ends it, up to which the page is not to be read; empty for none."""
        opened = self.rawdata
        if self.cdata_elem is not None:
            self.rawdata = opened[-SCRIPT_END_CHARS:]
            return ""
        self.rawdata = ""
        if not opened.startswith("<"):
            # Text that ends like an entity.
            self.handle_data(opened)
            return ""
        return "-->" if opened.startswith("<!--") else ">"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and not self._title:
            self._is_title = True
        if tag == "body":
            # A head that was never closed.
            self._skipping.clear()
        if tag in _SKIPPED:
            self._skipping.append(tag)
        if self._skipping:
            return
        if tag == "a":
            self._href = dict(attrs).get("href")
            self._link_words = []
        if tag in _BLOCKS:
            self._add("\n" + _HEADINGS.get(tag, "- " if tag == "li" else ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._is_title = False
        if tag in self._skipping:
            while self._skipping.pop() != tag:
                pass
            return
        if self._skipping:
            return
        if tag == "a" and self._href:
            self._add_link(self._href)
            self._href = None
        if tag in _BLOCKS:
            self._add("\n")

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self._title.append(data[:TITLE_CHARS_MAX])
        elif not self._skipping:
            # In HTML a line break is a space.
            self._add(data.replace("\n", " "))
            if self._href is not None and len(self._link_words) < 20:
                self._link_words.append(data[:TITLE_CHARS_MAX])

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self.length += len(text)

    def _add_link(self, href: str) -> None:
        words = " ".join("".join(self._link_words).split())[:TITLE_CHARS_MAX]
        if not words or len(self.links) >= LINKS_MAX or len(href) > 2_000:
            return
        try:
            url = urljoin(self._url, href.strip()).partition("#")[0]
        except ValueError:
            return
        if url.startswith(("http://", "https://", "file://")) and url != self._url:
            self.links.setdefault(url, Link(url, words))
