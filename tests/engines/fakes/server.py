"""FAKE engines for tests: real HTTP on loopback, with no model behind it.

A `Fake` says ids that a function of the prompt gives, one event each, and behaves around them as the server that it
stands in for: it stops at stop ids and limits, keeps prefixes, refuses what is too long. A test can hold it in the
middle, let it die there, and see whether its client has left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from aiohttp import web

Body = dict[str, object]
Answer = Callable[[Sequence[int]], Sequence[int]]


@dataclass
class Fake:
    """What all fakes share. `block`: how many ids its prefix cache keeps together."""

    answer: Answer = lambda ids: [7, 8, 9]
    context_tokens: int = 100_000
    block: int = 16
    key: str | None = None
    # It waits for `gate` before the id with this number, dies before it, or complains instead of it.
    hold_at: int | None = None
    break_at: int | None = None
    fault_at: int | None = None
    is_healthy: bool = True
    # It takes no jobs, in these words.
    limited: str = ""
    requests: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    running: int = 0
    running_max: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.held = asyncio.Event()
        self.left = asyncio.Event()
        self._seen: list[tuple[object, list[int]]] = []
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Fake:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; again on the same port after a stop."""
        app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[self._guard])
        app.add_routes([web.get("/health", self._health), *self.routes()])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        host, self._port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{self._port}"

    async def stop(self) -> None:
        """Go away: connections are refused from now on."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            # The server closes the connections that it knows, which are those accepted some passes of the loop before.
            for _ in range(5):
                await asyncio.sleep(0)
            await self._runner.cleanup()
            self._runner = None
            # A connection that was closed ends with the next pass of the loop, which may be the last one of a test.
            await asyncio.sleep(0)

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], object]
    ) -> web.StreamResponse:
        self.paths.append(request.path)
        self.connections.add(request.transport)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return self.refusal(401, "Unauthorized")
        if self.limited and request.method == "POST":
            refused = self.refusal(429, self.limited)
            refused.headers["retry-after"] = "7"
            return refused
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            return await handler(request)  # type: ignore[no-any-return, misc]
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.running -= 1

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    def refusal(self, status: int, message: str) -> web.Response:
        """The shape of an OpenAI-style refusal."""
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    async def body_of(self, request: web.Request) -> Body:
        body: Body = json.loads(await request.read())
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return body

    def cached(self, prompt: Sequence[int], salt: object = None) -> int:
        """How many leading ids it has computed before under this salt, in whole blocks."""
        best = max((_common(prompt, seen) for one, seen in self._seen if one == salt), default=0)
        # The last id is always computed: its logits are needed.
        best = min(best, len(prompt) - 1)
        return best - best % self.block

    def remember(self, ids: Sequence[int], salt: object = None) -> None:
        self._seen.append((salt, list(ids)))

    async def begin(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
            }
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        return response

    async def pause(self, request: web.Request, n: int) -> None:
        """Where a test has put something in the way of the n-th id."""
        if n == self.hold_at:
            self.held.set()
            await self.gate.wait()
        if n == self.break_at:
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def spoken(ids: Sequence[int], stops: Sequence[int], limit: int) -> tuple[list[int], str]:
    """As many of these ids as an engine would say, and why it stops there."""
    said: list[int] = []
    for id in ids[:limit]:
        said.append(id)
        if id in stops:
            return said, "stop"
    return said, "length" if len(said) == limit else "stop"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
