"""What does a page say? HTML, Markdown, plain text and PDF as a title and words for a model.

In: bytes and what they are said to be. Out: a `Page`, or None where there is nothing to read. Pages come from
strangers: work and length are bounded, and nothing in a page is run, followed or believed. `read_page` is slow work,
for a thread; `open_page` sees to that, and to a process for a PDF.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from html.parser import HTMLParser
from typing import Literal
from urllib.parse import urljoin

from msgspec import Struct

from segue.tools.pdf import read_paper
from segue.wire.files import is_pdf, text_of_bytes

# What is kept of a page; more than a model can be told of it.
TEXT_CHARS_MAX = 400_000
TITLE_CHARS_MAX = 200
LINKS_MAX = 50
# A page that takes longer to take apart is told as far as it was read.
PARSE_S_MAX = 3.0
# The same for a PDF, with the start of the process that reads it.
PDF_S_MAX = 10.0
SLICE_CHARS = 16 * 1024

# Said elsewhere, or not meant for readers.
_SKIPPED = frozenset(
    {"script", "style", "noscript", "template", "svg", "math", "iframe", "object", "select", "head"}
)
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote br dd div dl dt fieldset figcaption figure footer form "
        "h1 h2 h3 h4 h5 h6 header hr li main nav ol p pre section table tbody td tfoot th thead tr ul",
    )
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_-]{1,40})", re.IGNORECASE)

Form = Literal["html", "markdown", "text", "pdf"]


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
        """Our own measure of what it holds in memory."""
        words = len(self.text) + len(self.url) + len(self.title)
        return 4 * words + sum(4 * (len(one.url) + len(one.words)) for one in self.links)


def form_of(kind: str, name: str, data: bytes) -> Form:
    """What a file is, by what it says of itself, its type or its name."""
    ending = name.lower().partition("?")[0].rpartition(".")[2]
    if is_pdf(data):
        return "pdf"
    if "html" in kind or ending in ("html", "htm", "xhtml"):
        return "html"
    is_markdown = kind in ("text/markdown", "application/markdown") or ending in ("md", "markdown")
    return "markdown" if is_markdown else "text"


async def open_page(
    url: str, data: bytes, kind: str = "", charset: str | None = None, name: str = ""
) -> Page | None:
    """The page that these bytes are, of whatever form; None if there is no text in them."""
    if not is_pdf(data):
        return await asyncio.to_thread(read_page, url, data, kind, charset, name)
    paper = await read_paper(data, TEXT_CHARS_MAX, PDF_S_MAX)
    # What came before a broken or a slow page is still worth reading.
    if not any(paper.pages):
        return None
    title = paper.title or _last_name(name or url)
    return Page(url, title[:TITLE_CHARS_MAX], paper.text[:TEXT_CHARS_MAX])


def read_page(
    url: str, data: bytes, kind: str = "", charset: str | None = None, name: str = ""
) -> Page | None:
    """The page that these bytes are; None if they are no text, as a PDF is none."""
    form = form_of(kind, name or url, data)
    text = None if form == "pdf" else _decoded(data, charset, is_html=form == "html")
    if text is None:
        return None
    title = ""
    links: tuple[Link, ...] = ()
    match form:
        case "html":
            text, title, links = _read_html(text, url)
        case "markdown":
            title = _title_of_markdown(text)
        case _:
            pass
    title = title or _last_name(name or url)
    return Page(url, title[:TITLE_CHARS_MAX], text[:TEXT_CHARS_MAX], links)


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _title_of_markdown(text: str) -> str:
    found = re.search(r"^ {0,3}#{1,6}[ \t]+(\S[^\n]{0,300})", text, re.MULTILINE)
    return found[1].strip(" #\t\r") if found else ""


def _read_html(text: str, url: str) -> tuple[str, str, tuple[Link, ...]]:
    words = _Words(url)
    ends_at = time.monotonic() + PARSE_S_MAX
    # The parser has no other word for a declaration that it cannot read than this error.
    with suppress(AssertionError):
        for start in range(0, len(text), SLICE_CHARS):
            words.feed(text[start : start + SLICE_CHARS])
            if time.monotonic() > ends_at or words.length > TEXT_CHARS_MAX:
                break
    # Never closed: what is half open at the end would be looked through again and again by the parser, and is rubbish.
    return words.text, words.title, tuple(words.links.values())


def _decoded(data: bytes, charset: str | None, *, is_html: bool) -> str | None:
    """The text by the charset that was said, in the header or in the page; else it must be UTF-8."""
    if charset is None and is_html and (said := _CHARSET.search(data[:2_048])):
        charset = said[1].decode("ascii")
    if charset is not None and charset.lower() not in ("utf-8", "utf8") and b"\0" not in data:
        try:
            return data.decode(charset, errors="replace")
        except (LookupError, ValueError):
            pass
    if is_html or charset is not None:
        return None if b"\0" in data else data.decode("utf-8-sig", errors="replace")
    return text_of_bytes(data)


class _Words(HTMLParser):
    """Collects what a reader would read."""

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

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and not self._title:
            self._is_title = True
        if tag == "body":
            # A head that nobody closed.
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
            self._keep_link(self._href)
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

    def _keep_link(self, href: str) -> None:
        words = " ".join("".join(self._link_words).split())[:TITLE_CHARS_MAX]
        if not words or len(self.links) >= LINKS_MAX or len(href) > 2_000:
            return
        try:
            url = urljoin(self._url, href.strip()).partition("#")[0]
        except ValueError:
            return
        if url.startswith(("http://", "https://", "file://")) and url != self._url:
            self.links.setdefault(url, Link(url, words))
