"""Who finds pages? The one small seam behind a web search, and the adapter for search engines that answer in JSON.

In: what is asked. Out: hits. An engine's address is the operator's, so it may be anywhere, and it alone is told the
operator's key: it is not followed when it redirects. SearXNG is the case in which nothing but the address is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

import msgspec
from msgspec import Struct

from segue.errors import ApiError, Misconfigured, Unavailable
from segue.tools.fetch import Fetcher, Policy
from segue.tools.html import Page
from segue.tools.url import is_within, parse
from segue.wire.tools import WebLocation

# What an engine may answer, and how long it may take.
ANSWER_BYTES_MAX = 4 * 1024 * 1024
ANSWER_S_MAX = 15.0
JSON_KINDS = ("application/json", "text/", "application/vnd.api+json")
# More of them in a query are more than engines take.
SITES_MAX = 8
TITLE_CHARS_MAX, SNIPPET_CHARS_MAX = 200, 1_000

SEARXNG = "/search?q={query}&format=json"
_HOLE = re.compile(r"\{([a-z]+)\}")
_TAG = re.compile(r"<[^<>]{0,200}>")


class Asked(Struct, frozen=True):
    """A search: what for, how many hits, where they may be, and where the user is."""

    query: str
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
    """Where pages are found and read. To find words in a page is a function on top of it."""

    async def search(self, asked: Asked) -> Sequence[Hit]:
        """The pages that fit best, best first; only those that are allowed."""

    async def open_page(self, url: str) -> Page | None:
        """The page; None if there is none here. What goes wrong is an `ApiError`."""


def is_allowed(url: str, asked: Asked) -> bool:
    """Whether a page may be shown, by its host; an address without a host is of no domain."""
    if not asked.allowed and not asked.blocked:
        return True
    host = host_of(url)
    is_wanted = not asked.allowed or is_within(host, asked.allowed)
    return is_wanted and not is_within(host, asked.blocked)


def host_of(url: str) -> str:
    """The host of an address, by the parser that everything goes by; nothing where it has none."""
    try:
        return parse(url).host
    except ApiError:
        return ""


class JsonEngine(Struct, frozen=True):
    """A search engine as the operator describes it.

    `url` has holes: `{query}`, `{count}`, `{country}`, `{region}`, `{city}`, `{timezone}`. Without any it is the
    address of a SearXNG. `results` is the path to the list of hits, `fields` are the names of address,
    title and words in each.
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
        self._template = template
        self._engine = engine
        _check_template(template)
        policy = Policy("own", bytes_max=ANSWER_BYTES_MAX, s_max=ANSWER_S_MAX, redirects_max=0)
        self._fetcher = Fetcher(policy)

    def close(self) -> None:
        """Let go of what asking needs."""
        self._fetcher.close()

    async def search(self, asked: Asked) -> Sequence[Hit]:
        """What the engine finds, without what is not allowed."""
        try:
            found = await self._fetcher.fetch(
                fill(self._template, asked), JSON_KINDS, dict(self._engine.headers)
            )
            answer: object = msgspec.json.decode(found.data)
        except ApiError as error:
            # Its words may hold the operator's address.
            raise Unavailable("The search engine does not answer.") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unavailable("The search engine did not answer in JSON.") from error
        hits = read_hits(answer, self._engine)
        return [hit for hit in hits if is_allowed(hit.url, asked)][: asked.hits_max]


def fill(template: str, asked: Asked) -> str:
    """The address to ask, with every hole filled."""
    location = asked.location
    values: Mapping[str, str | None] = {
        "query": with_sites(asked),
        "count": str(asked.hits_max),
        "country": location.country,
        "region": location.region,
        "city": location.city,
        "timezone": location.timezone,
    }
    return _HOLE.sub(lambda hole: quote(values.get(hole[1]) or "", safe=""), template)


def with_sites(asked: Asked) -> str:
    """The query; a few domains are named in it, as most engines understand. They are checked afterwards in any case."""
    if not 0 < len(asked.allowed) <= SITES_MAX:
        return asked.query
    sites = " OR ".join(f"site:{one}" for one in asked.allowed)
    return f"{asked.query} {sites}" if len(asked.allowed) == 1 else f"{asked.query} ({sites})"


def read_hits(answer: object, engine: JsonEngine) -> list[Hit]:
    """The hits in an answer; those without an address that can be cited are left out."""
    rows = _at(answer, engine.results)
    hits: dict[str, Hit] = {}
    for row in rows if isinstance(rows, list) else []:
        url, title, text = (_at(row, name) for name in engine.fields)
        if isinstance(url, str) and host_of(url):
            hits.setdefault(url, Hit(url, _words(title, TITLE_CHARS_MAX) or url, _words(text)))
    return list(hits.values())


def _words(value: object, chars_max: int = SNIPPET_CHARS_MAX) -> str:
    """Plain words: engines mark the words that fit with tags."""
    if not isinstance(value, str):
        return ""
    return " ".join(_TAG.sub("", value).split())[:chars_max]


def _at(value: object, path: str) -> object:
    """What stands at a path such as `web.results`; an empty path is the value itself."""
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _check_template(template: str) -> None:
    unknown = {hole[1] for hole in _HOLE.finditer(template)} - {
        "query",
        "count",
        "country",
        "region",
        "city",
        "timezone",
    }
    if unknown:
        raise Misconfigured(f"search_url: there is nothing to put for {{{unknown.pop()}}}.")
    try:
        parse(_HOLE.sub("x", template))
    except ApiError as error:
        raise Misconfigured(f"search_url: {error}") from None
