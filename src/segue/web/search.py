"""How are pages found? The small seam of a web search, and the adapter for search engines that answer in JSON.

In: a query. Out: hits. An engine's URL is the operator's, so it may lead anywhere, and only the engine gets the
operator's key: its redirects are not followed. A SearXNG needs nothing but its URL.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct, structs

from segue.aio import off_loop
from segue.errors import ApiError, Misconfigured, Unavailable
from segue.web.fetch import Fetcher, Policy
from segue.web.html import Page
from segue.web.url import is_within, parse
from segue.wire.inner_json import has_more_marks
from segue.wire.slow_numbers import SLOW_NUMBERS_MAX, slow_numbers
from segue.wire.tools import WebLocation

# What an engine may answer, and how long it may take.
ANSWER_BYTES_MAX = 4 * 1024 * 1024
# Less is read at once.
SMALL_BYTES = 64 * 1024
ANSWER_S_MAX = 15.0
JSON_KINDS = ("application/json", "text/", "application/vnd.api+json")
# More of them in a query are more than engines take.
SITES_MAX = 8
TITLE_CHARS_MAX = 200
SNIPPET_CHARS_MAX = 1_000
# What of an answer is looked at: its brackets and commas, its hits, and the text of one with its tags.
BRACKETS_MAX, COMMAS_MAX = 65_536, 1_000_000
ROWS_MAX = 3_000
TEXT_CHARS_MAX = 64 * 1024

SEARXNG = "/search?q={query}&format=json"
_PLACEHOLDER = re.compile(r"\{([a-z]+)\}")
_TAG = re.compile(r"<[^<>]{0,200}>")


class WebQuery(Struct, frozen=True):
    """A search: the words, how many hits, of which domains, and where the user is."""

    words: str
    hits_max: int
    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    location: WebLocation = WebLocation()


class Hit(Struct, frozen=True):
    """A page that was found, with a few words of it."""

    url: str
    title: str
    text: str


class Web(Protocol):
    """Where pages are found and read."""

    async def search(self, query: WebQuery) -> Sequence[Hit]:
        """The pages that fit best, best first; only those that are allowed."""

    async def open_page(self, url: str) -> Page | None:
        """The page; None if it is not here. What goes wrong is an `ApiError`."""


def is_allowed(url: str, query: WebQuery) -> bool:
    """Whether a page may be shown, by its host; a URL without a host belongs to no domain."""
    if not query.allowed and not query.blocked:
        return True
    host = host_of(url)
    is_listed = not query.allowed or is_within(host, query.allowed)
    return is_listed and not is_within(host, query.blocked)


def host_of(url: str) -> str:
    """The host of a URL, by the parser of all URLs from outside; empty where it has none."""
    try:
        return parse(url).host
    except ApiError:
        return ""


class JsonEngine(Struct, frozen=True):
    """A search engine as the operator describes it.

    `url` has placeholders: `{query}`, `{count}`, `{country}`, `{region}`, `{city}`, `{timezone}`. Without `{query}` it
    is the URL of a SearXNG. `results` is the path to the list of hits, `fields` are the names of URL, title and text in
    each.
    """

    url: str
    results: str = "results"
    fields: tuple[str, str, str] = ("url", "title", "content")
    headers: tuple[tuple[str, str], ...] = ()


class JsonSearch:
    """Asks a search engine over HTTP."""

    def __init__(self, engine: JsonEngine) -> None:
        template = engine.url
        if "{query}" not in template:
            template = template.rstrip("/").removesuffix("/search") + SEARXNG
        _check_template(template)
        self._template = template
        self._engine = engine
        self._fetcher = Fetcher(
            Policy("own", bytes_max=ANSWER_BYTES_MAX, s_max=ANSWER_S_MAX, redirects_max=0)
        )

    def close(self) -> None:
        self._fetcher.close()

    async def search(self, query: WebQuery) -> Sequence[Hit]:
        url = fill(self._template, query)
        headers = dict(self._engine.headers)
        try:
            fetched = await self._fetcher.fetch(url, JSON_KINDS, headers)
            answer = await off_loop(len(fetched.data) > SMALL_BYTES, read_answer, fetched.data)
        except ApiError as error:
            # Its message may contain the operator's URL.
            raise Unavailable("The search engine does not answer.") from error
        except (ValueError, RecursionError) as error:
            raise Unavailable(
                "The search engine did not answer in JSON that can be read."
            ) from error
        hits = read_hits(answer, self._engine)
        return [hit for hit in hits if is_allowed(hit.url, query)][: query.hits_max]


def fill(template: str, query: WebQuery) -> str:
    """The URL of this search, with every placeholder filled."""
    values: dict[str, str | None] = {
        "query": with_sites(query),
        "count": str(query.hits_max),
        **structs.asdict(query.location),
    }
    return _PLACEHOLDER.sub(
        lambda placeholder: quote(values.get(placeholder[1]) or "", safe=""), template
    )


def with_sites(query: WebQuery) -> str:
    """The words, with a few domains as most engines understand them. Domains are checked afterwards in any case."""
    if not 0 < len(query.allowed) <= SITES_MAX:
        return query.words
    sites = " OR ".join(f"site:{domain}" for domain in query.allowed)
    return f"{query.words} {sites}" if len(query.allowed) == 1 else f"{query.words} ({sites})"


def read_answer(data: bytes) -> object:
    """What an engine has answered; `ValueError` where that is more than is read. Slow work for a large answer."""
    is_full = len(data) > SMALL_BYTES and has_more_marks(data, b"{[", BRACKETS_MAX)
    if is_full or (len(data) > SMALL_BYTES and has_more_marks(data, b",", COMMAS_MAX)):
        raise ValueError("more values than are read")
    if slow_numbers(data) > SLOW_NUMBERS_MAX:
        raise ValueError("more numbers of three-digit exponents than are read")
    return msgspec.json.decode(data)


def read_hits(answer: object, engine: JsonEngine) -> list[Hit]:
    """The hits in an answer; a hit without a URL that can be cited is left out."""
    rows = _at(answer, engine.results)
    hits: dict[str, Hit] = {}
    for row in rows[:ROWS_MAX] if isinstance(rows, list) else []:
        url, title, text = (_at(row, name) for name in engine.fields)
        if isinstance(url, str) and host_of(url):
            hits.setdefault(url, Hit(url, _words(title, TITLE_CHARS_MAX) or url, _words(text)))
    return list(hits.values())


def _words(value: object, chars_max: int = SNIPPET_CHARS_MAX) -> str:
    """Plain text: engines mark the words that fit with tags."""
    if not isinstance(value, str):
        return ""
    return " ".join(_TAG.sub("", value[:TEXT_CHARS_MAX]).split())[:chars_max]


def _at(value: object, path: str) -> object:
    """What stands at a path such as `web.results`; an empty path is the value itself."""
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _check_template(template: str) -> None:
    parameters = {"query", "count", *WebLocation.__struct_fields__}
    unknown = set(_PLACEHOLDER.findall(template)) - parameters
    if unknown:
        raise Misconfigured(f"search_url: the placeholder {{{unknown.pop()}}} is unknown.")
    try:
        parse(_PLACEHOLDER.sub("x", template))
    except ApiError as error:
        raise Misconfigured(f"search_url: {error}") from None
