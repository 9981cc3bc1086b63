"""How does an app get a port? uvicorn and our own WebSocket class serve it until a signal comes; then it drains."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import uvicorn
import uvloop
from msgspec import structs

from segue.aio import in_background
from segue.errors import Misconfigured
from segue.listener.fd_limit import fit_connections
from segue.listener.protocol import LISTENERS, http_class, set_tcp_options
from segue.listener.socket import socket_class
from segue.listener.tls import Certificate
from segue.memory.heap import keep_trimmed, tune_heap
from segue.server.announce import announce, count, start_lines
from segue.server.app import ALONE, App, WorkerPlace, edge_limits, open_app
from segue.server.control import Answer, control_path, open_control
from segue.server.operator import Operator, ReadSettings
from segue.settings.values import Settings

log = logging.getLogger(__name__)

# The listener closes last: clients that are left then have got their close frames already.
SERVER_STOP_S = 2
# Connections that wait to be accepted: many clients that reconnect at once are not refused.
BACKLOG = 2_048
# More than the busiest socket sends in a tick; without it the kernel buffers megabytes for each stalled client.
UNSENT_BYTES_MAX = 128 * 1024
# While a thread decodes a large request, the event loop waits this long each time that it has something to do; Python's
# own choice is ten times as long.
THREAD_SWITCH_S = 0.0005
# The exit status of a process that could not go on without one of its background loops.
BROKEN = 1


class UvicornServer(uvicorn.Server):
    """uvicorn without its own signal handling: it goes on answering while the app drains."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve_on`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then report the URL."""
        if sockets is not None:
            # uvloop accepts one connection for each of them in a pass.
            sockets += [port.dup() for port in tuple(sockets) for _ in range(LISTENERS - 1)]
        await super().startup(sockets)
        for listening in self.servers if self.started else ():
            for port in listening.sockets:
                set_tcp_options(port)
        if self.started:
            host, number = self.servers[0].sockets[0].getsockname()[:2]
            self._on_listening(url_of(host, number, is_secure=self.config.is_ssl))


def url_of(host: str, number: int, *, is_secure: bool) -> str:
    """The URL of a host and port."""
    scheme = "https" if is_secure else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"


def build_server(
    app: App,
    settings: Settings,
    on_listening: Callable[[str], None],
    certificate: Certificate | None = None,
) -> UvicornServer:
    """The port in front of an app: HTTP by uvicorn, WebSocket by our own socket class."""
    limits = edge_limits(settings)
    http = http_class(limits, app.state.memory.unread, has_addresses=bool(settings.access_log))
    config = uvicorn.Config(
        app.http,
        host=settings.host,
        port=settings.port,
        http=cast("type[asyncio.Protocol]", http),
        ws=socket_class(app.upgrades.accept, limits, app.state.memory.unread),
        ssl_context_factory=(
            None if certificate is None else lambda config, usual: certificate.context
        ),
        loop="uvloop",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SERVER_STOP_S,
    )
    return UvicornServer(config, on_listening)


def listen(settings: Settings) -> socket.socket:
    """A listening socket on the configured port."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"port {settings.port} is in use on {settings.host}"
        else:
            problem = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        raise Misconfigured(f"port: {problem}. Choose another one with --port.") from None


def _limit_send_buffer(port: socket.socket) -> None:
    """Keep the unsent bytes of slow clients in this process, where they are counted, and not in the kernel.

    Connections inherit this from their port. Bytes in flight are not limited by it, so that long lines stay fast.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        port.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)


async def serve_on(
    port: socket.socket,
    settings: Settings,
    on_listening: Callable[[str, list[str]], None],
    place: WorkerPlace = ALONE,
    read_settings: ReadSettings | None = None,
) -> int:
    """Serve on this socket, which the caller closes; returns the exit status. `on_listening` gets the URL and what the
    app says of itself. With `read_settings` this process answers its operator itself; a worker answers its parent."""
    _limit_send_buffer(port)
    asked, fitting = settings, fit_connections(settings.connections_max)
    settings = structs.replace(settings, connections_max=fitting)
    paths = (Path(settings.tls_cert), Path(settings.tls_key))
    certificate = Certificate(*paths) if settings.tls_cert else None
    signals: asyncio.Queue[None] = asyncio.Queue()
    status = 0

    def give_up() -> None:
        nonlocal status
        if not status:
            # As the first signal does; a second one would end the grace period.
            status = BROKEN
            signals.put_nowait(None)

    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(open_app(settings, place, give_up))
        lines = start_lines(app, settings)
        server = build_server(app, settings, lambda url: on_listening(url, lines), certificate)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, signals.put_nowait, None)
        process = ServingProcess(app, certificate, settings.grace_s)
        if certificate is not None:
            loop.add_signal_handler(signal.SIGHUP, certificate.reload)
            await stack.enter_async_context(certificate.watched())
        if place.control:
            await stack.enter_async_context(open_control(Path(place.control), process.orders))
        if read_settings is not None:
            operator = Operator(
                asked,
                url_of(*port.getsockname()[:2], is_secure=certificate is not None),
                lambda: {"the server": process.answer},
                partial(signals.put_nowait, None),
                read_settings,
            )
            await stack.enter_async_context(operated(operator, *port.getsockname()[:2]))
        tune_heap()
        sys.setswitchinterval(THREAD_SWITCH_S)
        async with (
            in_background("stop", partial(_stop_at_signal, signals, app, server, process)),
            in_background("memory_trim", keep_trimmed),
        ):
            await server.serve([port])
    return status


async def _stop_at_signal(
    signals: asyncio.Queue[None], app: App, server: UvicornServer, process: ServingProcess
) -> None:
    await signals.get()
    grace_s = process.grace_s
    if running := app.runner.running_count:
        log.info("stopping: %s running, waiting up to %g s", count(running, "turn"), grace_s)
    try:
        async with asyncio.TaskGroup() as tasks:
            hurrying = tasks.create_task(_drain_at_signal(signals, app))
            await app.drain(grace_s)
            hurrying.cancel()
    finally:
        server.should_exit = True


async def _drain_at_signal(signals: asyncio.Queue[None], app: App) -> None:
    await signals.get()
    await app.drain(0)


class ServingProcess:
    """What a process that serves does for its operator, or for the parent that asks it."""

    def __init__(self, app: App, certificate: Certificate | None, grace_s: float) -> None:
        self.grace_s = grace_s
        self._app = app
        self._certificate = certificate
        self.orders: dict[str, Answer] = {
            "status": self._status,
            "check": self._check,
            "apply": self._apply,
            "drop": self._drop,
            "engines": app.drains.status,
            "drain": app.drains.order,
        }

    async def answer(self, verb: str, body: bytes, s_max: float) -> bytes:
        """The answer to an order, without a socket in between."""
        return await self.orders[verb](body)

    async def _status(self, body: bytes) -> bytes:
        return msgspec.json.encode(await self._app.status())

    async def _check(self, body: bytes) -> bytes:
        await self._app.reload.check(msgspec.json.decode(body, type=Settings))
        return b""

    async def _drop(self, body: bytes) -> bytes:
        await self._app.reload.drop()
        return b""

    async def _apply(self, body: bytes) -> bytes:
        self.grace_s = self._app.reload.apply().grace_s
        self._app.drains.reloaded()
        self._app.health.renew()
        self._app.discovery.renew()
        if self._certificate is not None:
            self._certificate.reload()
        return b""


@asynccontextmanager
async def operated(operator: Operator, host: str, port: int) -> AsyncIterator[None]:
    """While inside, `segue status`, `engines`, `stop` and `reload` reach this process; SIGHUP reloads its settings."""
    async with AsyncExitStack() as stack:
        try:
            control = open_control(control_path(host, port), operator.answers)
            await stack.enter_async_context(control)
        except OSError as error:
            log.warning("`segue status`, `stop` and `reload` cannot reach this server: %s", error)
        if sys.stdin is None or not sys.stdin.isatty():
            # On a terminal the signal means that the terminal is gone, and ends the server.
            hangup = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
            await stack.enter_async_context(
                in_background("reload_signal", partial(operator.reload_at, hangup))
            )
        await stack.enter_async_context(in_background("model_name", operator.name_model))
        yield


def serve(settings: Settings, read_settings: ReadSettings) -> int:
    """Serve with one process, which can read its settings again, until a signal comes, then drain; a second signal ends
    the grace period. Returns the exit status."""
    on_listening = partial(announce, settings)
    with listen(settings) as port:
        status = uvloop.run(serve_on(port, settings, on_listening, ALONE, read_settings))
    log.info("stopped")
    return status
