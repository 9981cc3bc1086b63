"""What does one of several processes do? It follows the orders of its parent.

It reads them from standard input, so that no secret shows in the process list; when standard input ends, the parent is
gone, and the process shuts down as after a signal. Through a pipe it reports that it is ready, and then again and again
that its event loop turns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Literal

import msgspec
import uvloop
from msgspec import Struct

from segue.errors import ApiError, Misconfigured
from segue.observe.logs import set_up_logging
from segue.printable import say
from segue.server.app import WorkerPlace
from segue.server.models import shared_engines
from segue.server.serve import serve_on
from segue.settings.values import Settings

# How often a worker reports that its event loop turns.
TURN_S = 0.25
# What a pipe takes as a whole, and the byte that says that the loop turns.
PIPE_BYTES = 4_096
TURN = b"\0"
# The exit status for wrong settings.
MISCONFIGURED = 2


class Orders(Struct, frozen=True):
    """The instructions for a process."""

    role: Literal["worker", "engine"]
    settings: Settings
    group: str
    hub: str
    engines: str
    control: str
    keeper: str
    # The file descriptors of its port, and of the pipe where it reports that it is ready and that its loop turns.
    port: int
    ready: int
    # How often the worker in this place has been replaced because it hung.
    replaced: int


def main() -> int:
    """Follow the instructions of the parent."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    settings = orders.settings
    set_up_logging(settings.log_level, settings.log_format, workers=settings.workers)
    threading.Thread(target=_stop_without_parent, daemon=True).start()
    try:
        return uvloop.run(_run_worker(orders) if orders.role == "worker" else _run_engines(orders))
    except (Misconfigured, ApiError) as error:
        say(f"segue: {error}", file=sys.stderr)
        return MISCONFIGURED


def _stop_without_parent() -> None:
    """When the parent is gone, shut down as after a signal."""
    # Not through `sys.stdin`, whose lock the end of the interpreter would wait for.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _report_ready(descriptor: int) -> None:
    with suppress(OSError):
        os.write(descriptor, TURN)
    os.close(descriptor)


def _report_turns(descriptor: int, lines: bytes = TURN) -> None:
    """Report that this worker is ready, with what it says of itself, and from now on that its event loop turns."""
    os.set_blocking(descriptor, False)
    # The pipe is full if the parent stands still.
    with suppress(OSError):
        os.write(descriptor, lines[:PIPE_BYTES])
    asyncio.get_running_loop().call_later(TURN_S, _report_turns, descriptor)


async def _run_worker(orders: Orders) -> int:
    place = WorkerPlace(
        group=orders.group,
        hub=orders.hub,
        engines=orders.engines,
        control=orders.control,
        keeper=orders.keeper,
        replaced=orders.replaced,
    )
    with socket.socket(fileno=orders.port) as port:
        return await serve_on(
            port,
            orders.settings,
            lambda url, lines: _report_turns(orders.ready, "\n".join(lines).encode()),
            place,
        )


async def _run_engines(orders: Orders) -> int:
    """Share the embedded engines with the workers until a signal comes."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with shared_engines(orders.settings, orders.engines):
        _report_ready(orders.ready)
        await stopping.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
