"""Search engines that answer in JSON, on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from segue.errors import Misconfigured, Unavailable
from segue.web.search import Hit, JsonEngine, JsonSearch, WebQuery, fill, is_allowed, read_hits
from segue.wire.tools import WebLocation

RESULTS = {
    "results": [
        {"url": "https://a.com/1", "title": "One", "content": "about <b>rain</b>\n here"},
        {"url": "https://b.org/2", "title": "", "content": None},
        {"url": "https://a.com/1", "title": "One again"},
        {"url": "javascript:alert(1)", "title": "No"},
        {"url": 7},
        "nonsense",
    ]
}
ONE, TWO = (
    Hit("https://a.com/1", "One", "about rain here"),
    Hit("https://b.org/2", "https://b.org/2", ""),
)


@asynccontextmanager
async def engine(answer: Any, **options: Any) -> AsyncIterator[tuple[str, list[web.Request]]]:
    asked: list[web.Request] = []

    async def reply(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.Response(
            text=answer if isinstance(answer, str) else json.dumps(answer), **options
        )

    app = web.Application()
    app.router.add_get("/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://localhost:{site._server.sockets[0].getsockname()[1]}", asked  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


async def test_searxng_needs_nothing_but_its_address() -> None:
    async with engine(RESULTS, content_type="application/json") as (url, asked):
        search = JsonSearch(JsonEngine(url + "/"))
        assert await search.search(WebQuery("rain & snow?", 5)) == [ONE, TWO]
        search.close()
    assert asked[0].path == "/search"
    assert dict(asked[0].query) == {"q": "rain & snow?", "format": "json"}


async def test_any_json_search_is_described_by_a_template() -> None:
    answer = {"web": {"hits": [{"link": "https://a.com/1", "name": "One", "about": {"text": "x"}}]}}
    async with engine(answer) as (url, asked):
        search = JsonSearch(
            JsonEngine(
                url + "/find?q={query}&n={count}&cc={country}&city={city}",
                "web.hits",
                ("link", "name", "about.text"),
                (("X-Key", "secret"),),
            )
        )
        location = WebLocation(country="UA", city="Kyiv")
        assert await search.search(WebQuery("a b", 3, location=location)) == [
            Hit("https://a.com/1", "One", "x")
        ]
        search.close()
    assert dict(asked[0].query) == {"q": "a b", "n": "3", "cc": "UA", "city": "Kyiv"}
    assert asked[0].headers["X-Key"] == "secret"


async def test_domains_are_asked_for_and_checked() -> None:
    async with engine(RESULTS) as (url, asked):
        search = JsonSearch(JsonEngine(url))
        assert await search.search(WebQuery("rain", 5, allowed=("b.org",))) == [TWO]
        assert await search.search(WebQuery("rain", 5, blocked=("b.org",))) == [ONE]
        assert await search.search(WebQuery("rain", 1)) == [ONE]
        search.close()
    assert asked[0].query["q"] == "rain site:b.org"


@pytest.mark.parametrize(
    "answer",
    [
        "<html>",
        "",
        "[" * 100_000,
        web.Response(status=500),
        web.Response(status=403),
        web.Response(status=302, headers={"location": "/again"}),
    ],
)
async def test_engine_that_cannot_be_understood_is_unavailable(answer: Any) -> None:
    async with engine(answer) as (url, asked):
        search = JsonSearch(JsonEngine(url, headers=(("X-Key", "secret"),)))
        with pytest.raises(Unavailable) as error:
            await search.search(WebQuery("rain", 5))
        assert "localhost" not in error.value.message
        search.close()
    assert len(asked) == 1


async def test_engine_that_is_away_is_unavailable() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    search = JsonSearch(JsonEngine(f"http://127.0.0.1:{port}"))
    with pytest.raises(Unavailable):
        await search.search(WebQuery("rain", 5))
    search.close()


@pytest.mark.parametrize(
    "answer", [None, [], {"results": None}, {"results": {"url": "x"}}, "x", {"results": [{}]}]
)
def test_answers_of_another_shape_have_no_hits(answer: object) -> None:
    assert read_hits(answer, JsonEngine("http://a.com")) == []


@pytest.mark.parametrize("url", ["ftp://a.com/{query}", "http://a.com/{query}&{secret}", "a.com"])
def test_template_that_cannot_be_asked_is_told_at_the_start(url: str) -> None:
    with pytest.raises(Misconfigured, match="search_url"):
        JsonSearch(JsonEngine(url))


def test_holes_are_filled_with_what_cannot_break_out() -> None:
    filled = fill(
        "http://a.com/?q={query}&c={city}",
        WebQuery("a&b=c#d/{city}", 3, location=WebLocation(city="x&y")),
    )
    assert filled == "http://a.com/?q=a%26b%3Dc%23d%2F%7Bcity%7D&c=x%26y"


@pytest.mark.parametrize(
    "url, is_fine",
    [
        ("https://a.com/x", True),
        ("https://sub.a.com/x", True),
        ("https://A.com./x", True),
        ("https://nota.com/", False),
        ("https://a.com.evil.org/", False),
        ("https://a.com@evil.org/", False),
        ("https://bad.a.com/", False),
        ("file:///docs/x", False),
        ("", False),
    ],
)
def test_domains_are_whole_labels(url: str, is_fine: bool) -> None:
    assert is_allowed(url, WebQuery("", 1, allowed=("a.com",), blocked=("bad.a.com",))) is is_fine
