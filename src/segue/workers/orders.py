"""How does another process of this machine give an order to a server: a command, or the parent of workers?"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from pathlib import Path

import msgspec

from segue.errors import Misconfigured
from segue.framing import CONNECTION_LOST, read_frame, write_frame
from segue.server.control import (
    ANSWER_S_MAX,
    NotRunning,
    Order,
    Outcome,
    is_private,
    own_folder,
)
from segue.settings.checks import is_loopback

# Where the unit file of docs/deploy.md puts it.
SERVICE_FOLDER = Path("/run/segue")
# Where a server may listen that a loopback address reaches.
NEAR_HOSTS = ("127.0.0.1", "::1", "0.0.0.0", "::")


def find_control(host: str, port: int) -> Path | None:
    """The socket of the server that listens there; on this machine, perhaps on all addresses."""
    hosts = (host, *NEAR_HOSTS) if is_loopback(host) else (host,)
    own = own_folder()
    # In a temporary folder another user may have made it, and would get the orders.
    folders = (own, SERVICE_FOLDER) if is_private(own) else (SERVICE_FOLDER,)
    paths = [folder / f"{name}-{port}" for folder in folders for name in hosts]
    for path in paths:
        with suppress(OSError):
            if path.is_socket():
                return path
    return None


async def give_order(
    path: Path, verb: str, body: bytes = b"", s_max: float = ANSWER_S_MAX
) -> bytes:
    """The answer to an order; an error of the server is raised as `Misconfigured`."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise NotRunning(f"no server answers at {path}: {error.strerror}.") from None
    try:
        write_frame(writer, Order(verb, body))
        async with asyncio.timeout(s_max):
            outcome = msgspec.msgpack.decode(await read_frame(reader), type=Outcome)
    except TimeoutError:
        pid = _process_at(writer)
        raise Misconfigured(
            f"the server (process {pid}) does not answer within {s_max:g} s. If it hangs: kill -KILL {pid}"
        ) from None
    except CONNECTION_LOST:
        raise NotRunning(f"the server at {path} ended before it answered.") from None
    finally:
        writer.close()
    if outcome.error:
        raise Misconfigured(outcome.error)
    return outcome.body


def _process_at(writer: asyncio.StreamWriter) -> int | str:
    """The process that listens at the other end, as the system says."""
    if not hasattr(socket, "SO_PEERCRED"):
        return "unknown"
    found = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", found)[0])
