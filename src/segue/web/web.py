"""How does a model search the web and read pages?

In: a call of one of the three functions that the model is offered. Out: text for the model, the `web_search_call` that
the client sees, and the sources that the answer may cite. Pages and hits are data, whatever stands in them.

Pages come from two places, either of which may be missing: the operator's index, and the live web (an engine that
finds, a fetcher that reads). With `external_web_access: false` the live web is not requested at all. What goes wrong is
an output for the model and a failed item; the turn goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, assert_never

from msgspec import Raw, structs

from segue.errors import ApiError, InvalidRequest
from segue.seams.history import Owner
from segue.seams.tools import HostedCall, Source, ToolResult
from segue.web.fetch import Fetcher
from segue.web.html import Page, open_page
from segue.web.search import Hit, JsonSearch, Web, WebQuery, is_allowed
from segue.web.url import failed, parse, shown
from segue.wire.calls import web_action
from segue.wire.codec import as_item, encode
from segue.wire.items import (
    FindInPageAction,
    Item,
    OpenPageAction,
    SearchAction,
    UrlSource,
    WebAction,
    WebSearchCall,
)
from segue.wire.tools import WebFilters, WebLocation, WebSearchTool

# Pages that were read, for calls that read them again: all of the process together, and for how long.
CACHE_BYTES_MAX = 32 * 1024 * 1024
CACHE_S_MAX = 600.0
# Longer patterns are no search for words.
PATTERN_WORDS_MAX = 32
PATTERN_CHARS_MAX = 1_000
# Matches that are shown of one page, and how much text around each.
MATCHES_MAX = 20
AROUND_CHARS = 200


class _ContextSize(NamedTuple):
    """How much the model is shown."""

    hits: int
    page_chars: int


# By `search_context_size`.
SIZES = {
    "low": _ContextSize(4, 4_000),
    "medium": _ContextSize(8, 12_000),
    "high": _ContextSize(12, 40_000),
}


class LiveWeb:
    """The web itself: an engine that finds pages, where there is one, and the fetcher that reads them."""

    def __init__(self, engine: JsonSearch | None, fetcher: Fetcher) -> None:
        self._engine = engine
        self._fetcher = fetcher

    async def search(self, query: WebQuery) -> Sequence[Hit]:
        return await self._engine.search(query) if self._engine is not None else []

    async def open_page(self, url: str) -> Page | None:
        fetched = await self._fetcher.fetch(url)
        page = await open_page(fetched.url, fetched.data, fetched.kind, fetched.charset)
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
        action, tool = web_action(call.name, call.arguments), call.definition
        assert isinstance(tool, WebSearchTool)
        size = SIZES[tool.search_context_size or "medium"]
        live = self._live if tool.external_web_access is not False else None
        filters = tool.filters or WebFilters()
        allowed = tuple(filters.allowed_domains or ())
        blocked = tuple(filters.blocked_domains or ())
        words = action.query if isinstance(action, SearchAction) else ""
        location = tool.user_location or WebLocation()
        query = WebQuery(words, size.hits, allowed, blocked, location)
        try:
            if isinstance(action, SearchAction):
                return await self._search(call, action, query, live)
            page = await self._open(call.owner, action.url, query, live)
            match action:
                case OpenPageAction():
                    text = page_text(page, size.page_chars)
                case FindInPageAction():
                    # A page is long, and every place in it is tried.
                    text = await asyncio.to_thread(matches_text, page, action.pattern)
                case _:
                    assert_never(action)
        except ApiError as error:
            return ToolResult(error.message, _item(call, action, "failed"))
        text = f"[{call.sources_before + 1}] {page.title}\n{page.url}\n\n{text}"
        source = Source(page.url, page.title)
        return ToolResult(text, _item(call, action, "completed"), (source,))

    async def _search(
        self, call: HostedCall, action: SearchAction, query: WebQuery, live: Web | None
    ) -> ToolResult:
        if not query.words:
            raise InvalidRequest("A search needs a query.")
        hits = await self._hits(query, live)
        shown_action = structs.replace(action, sources=[UrlSource(hit.url) for hit in hits])
        return ToolResult(
            hits_text(hits, call.sources_before + 1),
            _item(call, shown_action, "completed"),
            tuple(Source(hit.url, hit.title) for hit in hits),
        )

    async def _hits(self, query: WebQuery, live: Web | None) -> list[Hit]:
        """The operator's own documents first, at most half where the live web has others."""
        own = await self._index.search(query) if self._index is not None else []
        if live is None:
            return list(own)
        try:
            others = await live.search(query)
        except ApiError:
            if not own:
                raise
            others = []
        half = max(query.hits_max // 2, query.hits_max - len(others))
        by_url = {hit.url: hit for hit in (*own[:half], *others)}
        return list(by_url.values())[: query.hits_max]

    async def _open(self, owner: Owner, url: str, query: WebQuery, live: Web | None) -> Page:
        if not url:
            raise InvalidRequest("A page needs a url.")
        _check_domain(url, query)
        page = await self._index.open_page(url) if self._index is not None else None
        page = page or self._cache.find(owner, url)
        if page is None and live is not None:
            page = await live.open_page(parse(url).url)
            if page is not None:
                self._cache.keep(owner, url, page)
        if page is None:
            raise InvalidRequest(f"The page {shown(url)} is not available.")
        # It may have redirected to another domain.
        _check_domain(page.url, query)
        return page


def _check_domain(url: str, query: WebQuery) -> None:
    if not is_allowed(url, query):
        raise InvalidRequest(f"The page {shown(url)} is of a domain that is not allowed.")


class _PageCache:
    """Pages that were read a while ago, each for the owner that it was read for. In memory only."""

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
        _, before = self._pages.pop((owner, url), (0.0, None))
        self._pages[owner, url] = (time.monotonic() + CACHE_S_MAX, page)
        self._bytes += page.bytes - (before.bytes if before is not None else 0)
        while self._bytes > CACHE_BYTES_MAX:
            self._bytes -= self._pages.popitem(last=False)[1][1].bytes


# --- what the model reads ---------------------------------------------------------------------------


def hits_text(hits: Sequence[Hit], number: int) -> str:
    """Hits as the model reads them, numbered from here on."""
    if not hits:
        return "Nothing was found."
    return "\n\n".join(
        f"[{number + place}] {hit.title}\n{hit.url}\n{hit.text}".rstrip()
        for place, hit in enumerate(hits)
    )


def page_text(page: Page, chars_max: int) -> str:
    """A page as the model reads it: its beginning, and where it leads."""
    text, length = page.text[:chars_max], len(page.text)
    if length > chars_max:
        text += f"\n[cut after {chars_max} of {length} characters; find_in_page sees all of it]"
    links = "\n".join(f"- {link.words}: {link.url}" for link in page.links)
    return f"{text}\n\nLinks:\n{links}" if links else text


def matches_text(page: Page, pattern: str) -> str:
    """Where the words of a pattern stand in a page, with the text around them. Case and white space do not count."""
    words = pattern.split()
    if not 0 < len(words) <= PATTERN_WORDS_MAX or len(pattern) > PATTERN_CHARS_MAX:
        most = f"1 to {PATTERN_WORDS_MAX} words and at most {PATTERN_CHARS_MAX:,} characters"
        raise InvalidRequest(f"find_in_page needs a pattern of {most}.")
    text, wanted = " ".join(page.text.split()), _without_case(" ".join(words))
    # Not by a regular expression: a word that is nearly everywhere would cost its length at each place, in one step.
    searched = _without_case(text)
    shown_texts: list[str] = []
    count = shown_to = end = 0
    while (found := searched.find(wanted, end)) >= 0:
        count += 1
        end = found + len(wanted)
        # What was shown around the match before is not shown again.
        if end > shown_to and len(shown_texts) < MATCHES_MAX:
            shown_to = end + AROUND_CHARS
            shown_texts.append(text[max(found - AROUND_CHARS, 0) : shown_to].strip())
    if not shown_texts:
        return f"The page does not contain: {pattern}"
    return f"{count} found:\n\n" + "\n\n".join(f"… {text} …" for text in shown_texts)


def _without_case(text: str) -> str:
    """As many characters, all of them small. One letter would become two, and one has two small forms."""
    return text.replace("\u0130", "i").lower().replace("\u03c2", "\u03c3")


def _item(call: HostedCall, action: WebAction, status: str) -> Item:
    return as_item(WebSearchCall(id=call.item_id, status=status, action=Raw(encode(action))))
