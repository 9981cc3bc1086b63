"""How does an app get a port? uvicorn and our own socket class in front of it, until a signal comes; then it drains."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import cast

import uvicorn
import uvloop
from msgspec import structs

from segue import __version__
from segue.app import ALONE, App, Place, open_app
from segue.errors import Misconfigured
from segue.listener.fd_limit import fit_connections
from segue.listener.protocol import HttpLimits, http_class
from segue.listener.tls import Certificate
from segue.settings import Settings
from segue.transports.socket import SocketLimits, socket_class

log = logging.getLogger(__name__)

# The listener closes last: what is left then has been told already.
SERVER_STOP_S = 2
# So that health can be asked for, and a refusal heard, when all sockets are taken.
SPARE_CONNECTIONS = 100
# Connections that wait to be accepted: a herd that comes back at once is not refused.
BACKLOG = 2_048
# More than a tick of the busiest socket; without it the kernel takes megabytes for each reader that has gone quiet.
UNSENT_BYTES_MAX = 128 * 1024


class Server(uvicorn.Server):
    """uvicorn, with the stop in our hands: it goes on answering while we drain."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `serve`'s."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_listening(url_of(host, port, is_secure=self.config.is_ssl))


def url_of(host: str, number: int, *, is_secure: bool) -> str:
    """Where a port can be reached."""
    scheme = "https" if is_secure else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"


def open_certificate(settings: Settings) -> Certificate | None:
    """The certificate of the port, where there is one."""
    if not settings.tls_cert:
        return None
    return Certificate(Path(settings.tls_cert), Path(settings.tls_key))


def build_server(
    app: App,
    settings: Settings,
    on_listening: Callable[[str], None],
    certificate: Certificate | None = None,
) -> Server:
    """The port in front of an app: HTTP by uvicorn, WebSocket by our own socket class."""
    limits = SocketLimits(
        message_bytes_max=settings.body_bytes_max,
        outbox_bytes_max=settings.outbox_bytes_max,
        write_s_max=settings.write_s_max,
        close_s_max=SERVER_STOP_S / 2,
        message_s_max=settings.body_s_max,
        handshake_s_max=settings.handshake_s_max,
        frames_per_s=settings.frames_per_s,
        frames_burst_max=settings.frames_burst_max,
    )
    http_limits = HttpLimits(
        head_s_max=settings.handshake_s_max,
        write_s_max=settings.write_s_max,
        connections_max=settings.connections_max + SPARE_CONNECTIONS,
    )
    config = uvicorn.Config(
        app.http,
        host=settings.host,
        port=settings.port,
        http=cast("type[asyncio.Protocol]", http_class(http_limits)),
        ws=socket_class(app.upgrades.accept, limits),
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
    return Server(config, on_listening)


def listen(settings: Settings) -> socket.socket:
    """The port, or why it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Misconfigured(
            f"port: {settings.host}:{settings.port} cannot be had: {error.strerror}. "
            "Name another one with --port."
        ) from None


def _hold_little(port: socket.socket) -> None:
    """Let the kernel hold little of what a slow reader has not taken: it waits with us, where it is counted.

    Connections have this from their port. What is on its way is not limited by it, so that long lines stay fast.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        port.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)


async def run_server(settings: Settings) -> None:
    """Serve until a signal comes, then drain; a second signal ends the grace."""
    with listen(settings) as port:
        await serve_on(port, settings, lambda url: announce(settings, url))


async def serve_on(
    port: socket.socket,
    settings: Settings,
    on_listening: Callable[[str], None],
    place: Place = ALONE,
) -> None:
    """Serve on this port, which is somebody else's to close."""
    _hold_little(port)
    fitting = fit_connections(settings.connections_max)
    settings = structs.replace(settings, connections_max=fitting)
    certificate = open_certificate(settings)
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(open_app(settings, place))
        server = build_server(app, settings, on_listening, certificate)
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked.put_nowait, None)
        if certificate is not None:
            loop.add_signal_handler(signal.SIGHUP, certificate.reload)
            await stack.enter_async_context(certificate.watched())
        serving = asyncio.create_task(server.serve([port]))
        asking = asyncio.create_task(asked.get())
        await asyncio.wait([serving, asking], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            log.info(
                "stopping: %d turns run, up to %g s", app.runner.running_count, settings.grace_s
            )
            draining = asyncio.create_task(app.drain(settings.grace_s))
            hurrying = asyncio.create_task(asked.get())
            await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                await app.drain(0)
            await draining
            hurrying.cancel()
        server.should_exit = True
        asking.cancel()
        await serving


def announce(settings: Settings, url: str) -> None:
    """What a person needs to see first."""
    names = ", ".join(f"{model.name} ({model.engine})" for model in settings.served())
    print(f"Segue {__version__} serves {names} at {url}/v1 (store: {settings.shown_store})")
    if any(model.engine == "scripted" for model in settings.served()):
        print("The scripted engine plays a script at a given speed: it is not a model.")
    print("Stop with Ctrl-C.", flush=True)


def serve(settings: Settings) -> int:
    """Serve; the exit status says whether the port could be had."""
    uvloop.run(run_server(settings))
    return 0
