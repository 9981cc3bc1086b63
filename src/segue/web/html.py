"""What is the text of a page? HTML, Markdown, plain text and PDF as a title and text for a model.

In: bytes and their content type. Out: a `Page`, or None where there is nothing to read. Pages come from strangers: work
and length are bounded, and nothing in a page is run, followed or trusted. `read_page` is slow work, for a thread;
`open_page` runs it in one, and a PDF in a process.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from urllib.parse import urljoin

from msgspec import Struct

from segue.documents.pdf import read_pdf
from segue.rests import Rests
from segue.wire.files import is_pdf

# What is kept of a page; more than a model is shown of it.
TEXT_CHARS_MAX = 400_000
TITLE_CHARS_MAX = 200
LINKS_MAX = 50
# A page that takes longer to parse is shown as far as it was parsed.
PARSE_S_MAX = 3.0
# The same for a PDF, with the start of the process that reads it.
PDF_S_MAX = 10.0
# What is decoded at once, given to the parser at once, and tidied at once: each of them is one step that nothing
# interrupts.
SLICE_BYTES = 4 * 1024
SLICE_CHARS = 16 * 1024
# What may be open at the end of a slice, as a tag or a comment. The parser reads it again with each slice; what is
# longer is left out.
OPEN_CHARS_MAX = 16 * 1024
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
# Values of attributes; the last of a tag that is cut off may have no end.
_VALUE = re.compile(r"""=\s*(?:"[^"]*(?P<double>"?)|'[^']*(?P<single>'?))""")
_WHITE = " \t\r\f\v\xa0\n"
# How pages are encoded: what browsers read (WHATWG Encoding Standard, 4.2), by Python's names. Other decoders of Python
# are not made for strangers.
_CHARSETS = frozenset(
    f"""
    utf-8 ascii cp866 cp874 cp932 cp949 tis-620 {" ".join(f"cp{1250 + n}" for n in range(9))}
    {" ".join(f"iso8859-{n}" for n in range(1, 17))} koi8-r koi8-u mac-roman mac-cyrillic gb2312 gbk gb18030 big5
    big5hkscs euc_jp iso2022_jp shift_jis euc_kr
    """.split()
)
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
    pdf = await read_pdf((data,), TEXT_CHARS_MAX, PDF_S_MAX)
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
    if b"\0" in data or is_pdf(data):
        return None
    title = ""
    links: tuple[Link, ...] = ()
    if is_html:
        text, title, links = _read_html(_decoded(data, charset or _declared(data)), url)
    else:
        try:
            text = _beginning(_decoded(data, charset, "strict" if charset is None else "replace"))
        except UnicodeDecodeError:
            return None
        if kind in ("text/markdown", "application/markdown") or ending in ("md", "markdown"):
            heading = re.search(r"^ {0,3}#{1,6}[ \t]+(\S[^\n]{0,300})", text, re.MULTILINE)
            title = heading[1].strip(" #\t\r") if heading else ""
    title = title or _last_name(name or url)
    return Page(url, title[:TITLE_CHARS_MAX], text[:TEXT_CHARS_MAX], links)


def _last_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _read_html(slices: Iterator[str], url: str) -> tuple[str, str, tuple[Link, ...]]:
    reader = _TextReader(url)
    ends_at = time.thread_time() + PARSE_S_MAX
    # What the parser raises for a declaration that it cannot read.
    with suppress(AssertionError):
        for text in slices:
            reader.read(text)
            if time.thread_time() > ends_at or reader.length > TEXT_CHARS_MAX:
                break
    # Never closed: the parser would search through what is half open at the end again and again, without a use.
    return tidied("".join(reader.pieces)), reader.title, tuple(reader.links.values())


def _declared(data: bytes) -> str | None:
    """The charset that a page names itself."""
    found = _CHARSET.search(data[:2_048])
    return None if found is None else found[1].decode("ascii")


def _decoded(data: bytes, charset: str | None, errors: str = "replace") -> Iterator[str]:
    """The text in slices, by a charset of the web; by UTF-8 where it is another one, or none."""
    name = "utf-8"
    with suppress(LookupError, ValueError):
        name = codecs.lookup(charset or name).name
    # A mark at the beginning says UTF-8 too.
    is_plain = name == "utf-8" or name not in _CHARSETS
    decoder = codecs.getincrementaldecoder("utf-8-sig" if is_plain else name)(errors)
    rests = Rests()
    for at in range(0, len(data), SLICE_BYTES):
        yield decoder.decode(data[at : at + SLICE_BYTES], at + SLICE_BYTES >= len(data))
        rests.take()


def _beginning(slices: Iterator[str]) -> str:
    """As much of a text as is kept. All of it is decoded: what is wrong in its end is no text."""
    kept: list[str] = []
    room = TEXT_CHARS_MAX
    for text in slices:
        if room > 0:
            kept.append(text[:room])
            room -= len(text)
    return "".join(kept)


def tidied(text: str) -> str:
    """Without white space that no reader sees: one blank, or at most one empty line. In slices, with rests."""
    pieces: list[str] = []
    rests = Rests()
    white = ""
    for at in range(0, len(text), SLICE_CHARS):
        taken = white + text[at : at + SLICE_CHARS]
        # White space at the end belongs to what follows it.
        words = taken.rstrip(_WHITE)
        white = _without_blanks(taken[len(words) :])
        pieces.append(_without_blanks(words))
        rests.take()
    return "".join(pieces).strip()


def _without_blanks(text: str) -> str:
    joined = re.sub(r"[ \t\r\f\v\xa0]+", " ", text)
    return re.sub(r" ?\n[ \n]*\n ?", "\n\n", re.sub(r" *\n *", "\n", joined))


class _TextReader(HTMLParser):
    """Collects the text that a person would read."""

    def __init__(self, url: str) -> None:
        super().__init__(convert_charrefs=True)
        self._url = url
        self.pieces: list[str] = []
        # What ends that which is left out, and its last characters so far.
        self._ends: list[str] = []
        self._last = ""
        self._title: list[str] = []
        self._skipping: list[str] = []
        self._is_title = False
        self._href: str | None = None
        self._link_words: list[str] = []
        self.length = 0
        self.links: dict[str, Link] = {}

    @property
    def title(self) -> str:
        return " ".join("".join(self._title).split())

    def read(self, text: str) -> None:
        """Read a slice, but for what is left out of it."""
        text, self._last = self._last + text, ""
        while self._ends:
            before, end, after = text.partition(self._ends[0])
            if not end:
                # It may begin here.
                self._last = before[len(before) - len(self._ends[0]) + 1 :]
                return
            del self._ends[0]
            text = after
        if len(self.rawdata) >= SLICE_BYTES and self.rawdata[0] == "<" and ">" not in text:
            # Still open: the parser would look through all of it again.
            self.rawdata += text
        else:
            self.feed(text)
        if len(self.rawdata) > OPEN_CHARS_MAX:
            self._leave_out()

    def _leave_out(self) -> None:
        """Forget what is open, and all up to its end."""
        opened, self.rawdata = self.rawdata, ""
        if self.cdata_elem is not None:
            self.rawdata = opened[-SCRIPT_END_CHARS:]
        elif opened.startswith("<!--"):
            self._ends, self._last = ["-->"], opened[-2:]
        elif opened.startswith("<"):
            self._ends = [">"]
            for value in _VALUE.finditer(opened):
                if value.end() == len(opened) and not (value["double"] or value["single"]):
                    self._ends = ['"' if value["single"] is None else "'", ">"]
        else:
            # Text that ends like an entity.
            self.handle_data(opened)

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
        self.pieces.append(text)
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
