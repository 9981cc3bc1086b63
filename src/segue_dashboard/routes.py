"""Which routes does the dashboard have? A page at `/`, one for the API at `/docs`, their parts under `/dashboard/`, and
one stream.

A page loads nothing from other servers, and its Content-Security-Policy forbids it. It has no data: the stream
needs an API key wherever requests need one. Clients that do not accept HTML get one line of text at `/`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from segue.errors import NotFound, Unavailable
from segue.listener.api import Route
from segue.listener.exchange import ClientGone, Exchange, text_header
from segue.listener.services import Services
from segue.listener.subscribers import SSE_HEADERS
from segue.server.pages import ServerPages
from segue_dashboard.feed import Feed, Watcher
from segue_dashboard.views import Viewer

KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
PAGE = "index.html"
API_PAGE = "docs.html"

# Nothing from other servers, nothing inline, no frames. `{sockets}` names our own WebSocket URLs: not every browser
# counts them as 'self'.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'{sockets}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?|\[[0-9A-Fa-f:.]+\](:[0-9]+)?")

# A comment keeps proxies from closing an idle stream.
PING = b": still here\n\n"
PING_S = 15.0


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page, from the package."""

    kind: bytes
    body: bytes
    etag: bytes


def read_assets() -> dict[str, Asset]:
    """All files of the page by name."""
    assets = {}
    for file in files("segue_dashboard").iterdir():
        if kind := KINDS.get("." + file.name.rpartition(".")[2]):
            body = file.read_bytes()
            etag = f'"{hashlib.blake2s(body, digest_size=12).hexdigest()}"'
            assets[file.name] = Asset(kind, body, etag.encode())
    return assets


class Dashboard:
    """The routes of the dashboard."""

    def __init__(self, services: Services, feed: Feed, pages: ServerPages) -> None:
        self._pages = pages
        self._services = services
        self._feed = feed
        self._assets = read_assets()

    @property
    def routes(self) -> Sequence[Route]:
        return (
            Route("GET", "/", self._welcome, None),
            Route("GET", "/docs", self._api_page, None),
            Route("GET", "/dashboard/feed", self._stream, "dashboard"),
            Route("GET", r"/dashboard/{name:[a-z]+\.[a-z]+}", self._asset, None),
        )

    async def _welcome(self, exchange: Exchange) -> None:
        if "text/html" in exchange.header(b"accept"):
            await self._send(exchange, self._assets[PAGE])
            return
        text = f"{self._pages.greeting}. See /docs, /health, /ready and /metrics.\n"
        kind = (b"content-type", b"text/plain; charset=utf-8")
        await exchange.answer(200, text.encode(), [kind, (b"vary", b"accept")])

    async def _api_page(self, exchange: Exchange) -> None:
        await self._send(exchange, self._assets[API_PAGE])

    async def _asset(self, exchange: Exchange) -> None:
        name = exchange.arguments["name"]
        asset = self._assets.get(name)
        if asset is None or name in (PAGE, API_PAGE):
            raise NotFound(f"Unknown request URL: GET /dashboard/{name[:128]}.", code="unknown_url")
        await self._send(exchange, asset)

    async def _send(self, exchange: Exchange, asset: Asset) -> None:
        headers = [
            (b"content-type", asset.kind),
            (b"etag", asset.etag),
            (b"vary", b"accept"),
            # A new version of the server has a new page: browsers revalidate, and mostly get a 304.
            (b"cache-control", b"no-cache"),
            text_header(b"content-security-policy", policy(exchange.header(b"host"))),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]
        if exchange.header(b"if-none-match") == asset.etag.decode():
            await exchange.start(304, headers)
            await exchange.write(b"", is_last=True)
        else:
            await exchange.answer(200, asset.body, headers)

    async def _stream(self, exchange: Exchange) -> None:
        # On a server without keys the one owner is the operator too.
        viewer = Viewer(exchange.owner, is_operator=exchange.account.is_operator)
        if self._services.runner.is_draining:
            raise Unavailable("The server is shutting down. Please retry.")
        if exchange.scope["method"] == "HEAD":
            await exchange.answer(200, b"", SSE_HEADERS)
            return
        with self._feed.watching(viewer) as watcher:
            leaving = asyncio.create_task(exchange.disconnected())
            try:
                await self._send_updates(exchange, watcher, leaving)
            except TimeoutError:
                leaving.cancel()
                await exchange.cut()
                raise ClientGone from None
            finally:
                leaving.cancel()

    async def _send_updates(
        self, exchange: Exchange, watcher: Watcher, leaving: asyncio.Task[None]
    ) -> None:
        """Send everything new until the client leaves or the process stops."""
        loop = asyncio.get_running_loop()
        await exchange.start(200, SSE_HEADERS)
        await self._write(exchange, _event(watcher.hello()))
        wrote_at = loop.time()
        runner = self._services.runner
        may_stay = self._services.accounts.may_stay
        while not (leaving.done() or runner.is_draining) and may_stay(exchange.account):
            update = await watcher.update()
            if update is not None or loop.time() - wrote_at > PING_S:
                await self._write(exchange, PING if update is None else _event(update))
                wrote_at = loop.time()
            await asyncio.wait([leaving], timeout=self._feed.pause_s)
        if not leaving.done():
            await exchange.write(b"", is_last=True)

    async def _write(self, exchange: Exchange, data: bytes) -> None:
        async with asyncio.timeout(self._services.limits.write_s_max):
            await exchange.write(data, is_last=False)


def policy(host: str) -> str:
    """The Content-Security-Policy; its WebSocket URLs have the host that the browser used."""
    sockets = f" ws://{host} wss://{host}" if HOST.fullmatch(host) else ""
    return POLICY.format(sockets=sockets)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
