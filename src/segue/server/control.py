"""How does an operator's command reach a server that runs on this machine?

A server listens on a Unix socket that is named after its address, in a folder that only its user may enter. A
connection carries one order, a verb with a body, and its outcome. There is no key: the system lets in the server's own
user and root. The workers of a parent process have a socket each, for the parent. No process is found by its number, so
that no other process is stopped by mistake.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.errors import ApiError, Misconfigured
from segue.framing import CONNECTION_LOST, read_frame, write_frame
from segue.seams.engine_status import EngineStatus

log = logging.getLogger(__name__)

# An order is short and local; a client that sends none is dropped.
ORDER_S_MAX = 5.0
# A status asks engines and store, which may take their time to time out.
ANSWER_S_MAX = 15.0
# A check of new settings loads vocabularies, and perhaps weights.
RELOAD_S_MAX = 300.0

Answer = Callable[[bytes], Awaitable[bytes]]


class NotRunning(Misconfigured):
    """There is no server at this address, as far as this user can see."""


class Order(Struct, frozen=True):
    """What a command asks of a server."""

    verb: str
    body: bytes = b""


class Outcome(Struct, frozen=True):
    """The answer, or why there is none."""

    body: bytes = b""
    error: str = ""


class DrainOrder(Struct, frozen=True):
    """Take an engine out of service, or return it; `is_forced`: even if it is the last one of a model."""

    engine: str
    is_drained: bool
    is_forced: bool = False


class FleetStatus(Struct, frozen=True):
    """The engines with the load of all processes that share the store; how many processes there are, and answered."""

    engines: list[EngineStatus]
    workers: int
    answered: int
    # Those that the settings of the server that was asked take out of service.
    engine_drained: list[str] = []


class WorkerStatus(Struct, frozen=True):
    """One process that serves."""

    pid: int
    # What store and engines answered; `accepting` is false while it drains.
    checks: dict[str, bool]
    models: list[str]
    engines: list[EngineStatus]
    responses_running: int
    connections: int
    # Histories, caches and requests, and how much they may take.
    memory_bytes: int
    memory_bytes_max: int
    # What the system counts.
    resident_bytes: int


class ServerStatus(Struct, frozen=True):
    """A server, with all its workers."""

    pid: int
    version: str
    url: str
    store: str
    started_at: float
    reloaded_at: float | None
    grace_s: float
    workers_wanted: int
    workers: list[WorkerStatus]

    @property
    def is_ready(self) -> bool:
        """Whether every worker answers and can take requests."""
        are_ready = all(all(worker.checks.values()) for worker in self.workers)
        return are_ready and len(self.workers) == self.workers_wanted


class Reloaded(Struct, frozen=True):
    """The names of the settings that have changed: those in force now, and those that need a restart; and the engines
    that do not answer."""

    changed: list[str]
    needs_restart: list[str]
    silent_engines: list[str] = []


def control_path(host: str, port: int) -> Path:
    """The socket of a server with this address; its folder is made, and is safe."""
    folder = own_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is not a private folder of this user")
    return folder / f"{host}-{port}"


def is_private(folder: Path) -> bool:
    """Whether it is this user's, and no other user may enter it."""
    with suppress(OSError):
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        return is_own and not found.st_mode & 0o077
    return False


def own_folder() -> Path:
    # systemd names the first one of a service.
    given = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(given) if given else Path(tempfile.gettempdir()) / f"segue-{os.getuid()}"


@asynccontextmanager
async def open_control(path: Path, answers: Mapping[str, Answer]) -> AsyncIterator[None]:
    """Answer orders at this socket while inside."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with suppress(*CONNECTION_LOST, TimeoutError, asyncio.CancelledError), closing(writer):
            async with asyncio.timeout(ORDER_S_MAX):
                order = msgspec.msgpack.decode(await read_frame(reader), type=Order)
            write_frame(writer, await _outcome(order, answers))
            await writer.drain()
        tasks.discard(asyncio.current_task())

    server = await asyncio.start_unix_server(serve, sock=_bound(path))
    try:
        yield
    finally:
        os.unlink(path)
        server.close()
        left = [task for task in tasks if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _bound(path: Path) -> socket.socket:
    """A socket with this name, which a process that died may have left."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    path.chmod(0o600)
    return bound


async def _outcome(order: Order, answers: Mapping[str, Answer]) -> Outcome:
    if order.verb not in answers:
        return Outcome(error=f"the server does not know the order '{order.verb}'")
    try:
        return Outcome(await answers[order.verb](order.body))
    except (Misconfigured, ApiError) as error:
        return Outcome(error=str(error))
    except Exception as error:
        log.exception("the order '%s' failed", order.verb)
        return Outcome(error=f"{order.verb} failed: {type(error).__name__}: {error}")
