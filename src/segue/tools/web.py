"""How does a model search the web and read pages?

In: a call of one of the three functions that the model was told of. Out: words for the model, the `web_search_call`
that the client sees, and the sources that the answer may cite. Pages and hits are data, whatever stands in them.

Two sources of pages stand behind it, either of which may be missing: the operator's index, and the live web (an engine
that finds, a fetcher that reads). With `external_web_access: false` the live one is not asked at all. What goes wrong
is told to the model and shown as a failed item; the turn goes on.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, assert_never

from msgspec import Raw, Struct

from segue.errors import ApiError, InvalidRequest
from segue.tools.fetch import Fetcher, failed
from segue.tools.html import Page, open_page
from segue.tools.search import Asked, Hit, JsonSearch, Web, is_allowed
from segue.tools.url import parse, shown
from segue.turn.values import HostedCall, Owner, Source, ToolResult
from segue.wire.codec import as_item, encode
from segue.wire.items import Item, WebSearchCall
from segue.wire.tools import WebLocation, WebSearchTool
from segue.wire.web import (
    FindInPageAction,
    OpenPageAction,
    SearchAction,
    UrlSource,
    WebAction,
    domains_of,
    read_action,
    read_definition,
)

# Pages that were read, for those who look into them again: all of the process together, and for how long.
CACHE_BYTES_MAX = 32 * 1024 * 1024
CACHE_S_MAX = 600.0
# Places that are told of one page, and how much stands around each.
PLACES_MAX = 20
AROUND_CHARS = 200


class Size(NamedTuple):
    """How much the model is told."""

    hits: int
    page_chars: int


# By `search_context_size`.
SIZES = {"low": Size(4, 4_000), "medium": Size(8, 12_000), "high": Size(12, 40_000)}


class LiveWeb:
    """The web itself: an engine that finds pages, where there is one, and the fetcher that reads them."""

    def __init__(self, engine: JsonSearch | None, fetcher: Fetcher) -> None:
        self._engine = engine
        self._fetcher = fetcher

    async def search(self, asked: Asked) -> Sequence[Hit]:
        """What the engine finds; nothing without one."""
        return await self._engine.search(asked) if self._engine is not None else []

    async def open_page(self, url: str) -> Page | None:
        """The page as it is now."""
        found = await self._fetcher.fetch(url)
        page = await open_page(found.url, found.data, found.kind, found.charset)
        if page is None or not page.text.strip():
            raise failed(url, "there is no text in it.")
        return page


class WebTool:
    """The web search of the contract."""

    def __init__(self, index: Web | None, live: Web | None) -> None:
        self._index = index
        self._live = live
        self._cache = _PageCache()

    async def call(self, call: HostedCall) -> ToolResult:
        """Search, read a page, or find words in one."""
        action = read_action(call.name, call.arguments)
        wanted = _Wanted.of(call)
        try:
            match action:
                case SearchAction():
                    return await self._search(call, action, wanted)
                case OpenPageAction():
                    page = await self._open(call.owner, action.url, wanted)
                    told = tell_page(page, wanted.size.page_chars)
                case FindInPageAction():
                    page = await self._open(call.owner, action.url, wanted)
                    told = tell_places(page, action.pattern)
                case _:
                    assert_never(action)
        except ApiError as error:
            return ToolResult(error.message, _item(call, action, "failed"))
        number = call.sources_before + 1
        text = f"[{number}] {page.title}\n{page.url}\n\n{told}"
        source = Source(page.url, page.title)
        return ToolResult(text, _item(call, action, "completed"), (source,))

    async def _search(self, call: HostedCall, action: SearchAction, wanted: _Wanted) -> ToolResult:
        if not action.query:
            raise InvalidRequest("A search needs a query.")
        hits = await self._hits(wanted.asked(action.query), is_live=wanted.is_live)
        found = [UrlSource(hit.url) for hit in hits]
        shown_action = SearchAction(query=action.query, queries=action.queries, sources=found)
        return ToolResult(
            tell_hits(hits, call.sources_before + 1),
            _item(call, shown_action, "completed"),
            tuple(Source(hit.url, hit.title) for hit in hits),
        )

    async def _hits(self, asked: Asked, *, is_live: bool) -> list[Hit]:
        """The operator's own documents first, no more than half where there is a web beside them."""
        live = self._live if is_live else None
        own = await self._index.search(asked) if self._index is not None else []
        if live is None:
            return list(own)
        try:
            others = await live.search(asked)
        except ApiError:
            if not own:
                raise
            others = []
        half = max(asked.hits_max // 2, asked.hits_max - len(others))
        by_url = {hit.url: hit for hit in (*own[:half], *others)}
        return list(by_url.values())[: asked.hits_max]

    async def _open(self, owner: Owner, url: str, wanted: _Wanted) -> Page:
        asked = wanted.asked("")
        if not url:
            raise InvalidRequest("A page needs a url.")
        if not is_allowed(url, asked):
            raise InvalidRequest(f"The page {shown(url)} is of a domain that is not allowed.")
        page = await self._index.open_page(url) if self._index is not None else None
        page = page or self._cache.find(owner, url)
        if page is None and wanted.is_live and self._live is not None:
            page = await self._live.open_page(parse(url).url)
            if page is not None:
                self._cache.keep(owner, url, page)
        if page is None:
            raise InvalidRequest(f"The page {shown(url)} is not at hand.")
        if not is_allowed(page.url, asked):
            # It has redirected to somewhere else.
            raise InvalidRequest(f"The page {shown(page.url)} is of a domain that is not allowed.")
        return page


class _Wanted(Struct, frozen=True):
    """The request's own wishes."""

    size: Size
    is_live: bool
    allowed: tuple[str, ...]
    blocked: tuple[str, ...]
    location: WebLocation

    @staticmethod
    def of(call: HostedCall) -> _Wanted:
        tool: WebSearchTool = read_definition(call.definition)
        allowed, blocked = domains_of(tool)
        return _Wanted(
            size=SIZES[tool.search_context_size or "medium"],
            is_live=tool.external_web_access is not False,
            allowed=tuple(allowed),
            blocked=tuple(blocked),
            location=tool.user_location or WebLocation(),
        )

    def asked(self, query: str) -> Asked:
        return Asked(query, self.size.hits, self.allowed, self.blocked, self.location)


class _PageCache:
    """Pages that were read a while ago, each for whom it was read. In memory only."""

    def __init__(self) -> None:
        self._pages: OrderedDict[tuple[Owner, str], tuple[float, Page]] = OrderedDict()
        self._bytes = 0

    def find(self, owner: Owner, url: str) -> Page | None:
        kept = self._pages.get((owner, url))
        if kept is None or kept[0] < time.monotonic():
            return None
        self._pages.move_to_end((owner, url))
        return kept[1]

    def keep(self, owner: Owner, url: str, page: Page) -> None:
        self._drop((owner, url))
        self._pages[owner, url] = (time.monotonic() + CACHE_S_MAX, page)
        self._bytes += page.bytes
        while self._bytes > CACHE_BYTES_MAX:
            self._drop(next(iter(self._pages)))

    def _drop(self, key: tuple[Owner, str]) -> None:
        kept = self._pages.pop(key, None)
        if kept is not None:
            self._bytes -= kept[1].bytes


# --- what the model is told ------------------------------------------------------------------------


def tell_hits(hits: Sequence[Hit], number: int) -> str:
    """Hits as the model reads them, numbered from here on."""
    if not hits:
        return "Nothing was found."
    return "\n\n".join(
        f"[{number + place}] {hit.title}\n{hit.url}\n{hit.text}".rstrip()
        for place, hit in enumerate(hits)
    )


def tell_page(page: Page, chars_max: int) -> str:
    """A page as the model reads it: its beginning, and where it leads."""
    told = page.text[:chars_max]
    if len(page.text) > chars_max:
        told += (
            f"\n[cut after {chars_max} of {len(page.text)} characters; find_in_page sees all of it]"
        )
    links = "\n".join(f"- {one.words}: {one.url}" for one in page.links)
    return f"{told}\n\nLinks:\n{links}" if links else told


def tell_places(page: Page, pattern: str) -> str:
    """Where the words of a pattern stand in a page, with what stands around them. Case and white space do not count."""
    words = pattern.split()
    if not words:
        raise InvalidRequest("What is to be found needs a pattern.")
    wanted = re.compile(r"\s+".join(map(re.escape, words)), re.IGNORECASE)
    told: list[str] = []
    count = 0
    told_to = 0
    for found in wanted.finditer(page.text):
        count += 1
        # What was told around the place before is not told again.
        if found.end() <= told_to or len(told) >= PLACES_MAX:
            continue
        start = max(found.start() - AROUND_CHARS, 0)
        told_to = found.end() + AROUND_CHARS
        told.append(" ".join(page.text[start:told_to].split()))
    if not told:
        return f"The page does not contain: {pattern}"
    return f"{count} found:\n\n" + "\n\n".join(f"… {one} …" for one in told)


def _item(call: HostedCall, action: WebAction, status: str) -> Item:
    return as_item(WebSearchCall(id=call.item_id, status=status, action=Raw(encode(action))))
