"""How does the keeper let a sandbox reach the network? It opens a door.

A door is a Unix socket in a folder that only this sandbox sees; the proxy serves it. The keeper makes the listening
socket and keeps it, so that a door outlasts a proxy that has ended: the next one serves it. The keeper itself reads
nothing of what goes through.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from segue.egress.messages import (
    CloseProxyDoor,
    OpenProxyDoor,
    ProxyCounts,
    ProxyOrder,
    StartProxy,
)

log = logging.getLogger(__name__)

# The name of the socket in the folder of a door.
SOCKET = "proxy"
MESSAGE_BYTES_MAX = 64 * 1024
# A proxy that ends at once is not started again at once.
PAUSE_S = 1.0
BACKLOG = 128
# Sent to the supervisor of a sandbox that has a door.
FORWARDER = Path(__file__).with_name("inside.py")

_counts = msgspec.json.Decoder(ProxyCounts)


@dataclass(slots=True)
class Door:
    """The way of one sandbox to the proxy, and what went through."""

    doors: Doors
    number: int
    container_id: str
    domains: tuple[str, ...]
    listener: socket.socket
    sent_bytes: int = 0
    received_bytes: int = 0

    def close(self) -> None:
        """Nothing goes through any more."""
        self.doors.close_door(self)


@dataclass(slots=True)
class Doors:
    """All doors of a keeper, and the proxy process that serves them."""

    # What the operator allows.
    domains: tuple[str, ...]
    # The proxy: a test has one whose names lead to this machine.
    program: tuple[str, ...] = (sys.executable, "-I", "-m", "segue.egress.child")
    pid: int = 0
    # Refused requests of all doors since the start.
    refused: int = 0
    _open: dict[int, Door] = field(default_factory=dict)
    _control: socket.socket | None = None
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def open(
        self, folder: Path, container_id: str, domains: tuple[str, ...], uid: int | None
    ) -> Door:
        """A door in this folder, for the sandbox of this user."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = folder / SOCKET
        # Below the folder, whose path may be longer than the address of a socket.
        held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{held}/{SOCKET}")
        finally:
            os.close(held)
        path.chmod(0o600)
        if uid is not None:
            os.chown(path, uid, uid)
        listener.listen(BACKLOG)
        door = Door(self, next(self._numbers), container_id, domains, listener)
        self._open[door.number] = door
        self._send_door(door)
        return door

    def close_door(self, door: Door) -> None:
        """End a door, with what goes through it."""
        if self._open.pop(door.number, None) is not None:
            self._send(CloseProxyDoor(door.number))
            door.listener.close()

    async def keep_running(self) -> None:
        """Keep a proxy running."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            status = await self._run_once()
            log.error("the proxy of sandboxes ended with status %d; starting it again", status)
            if loop.time() - began < PAUSE_S:
                await asyncio.sleep(PAUSE_S)

    async def _run_once(self) -> int:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with near:
            with far:
                process = await asyncio.create_subprocess_exec(
                    *(*self.program, str(far.fileno())),
                    env={},
                    cwd="/",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    pass_fds=(far.fileno(),),
                )
            near.setblocking(False)
            self.pid, self._control = process.pid, near
            loop.add_reader(near, self._on_counts)
            try:
                self._send(StartProxy(self.domains))
                for door in self._open.values():
                    self._send_door(door)
                return await process.wait()
            finally:
                loop.remove_reader(near)
                self.pid, self._control = 0, None
                # It ends when the control socket closes; asked for here, it must not be waited for.
                with suppress(ProcessLookupError):
                    process.kill()

    def _on_counts(self) -> None:
        try:
            data = b"" if self._control is None else self._control.recv(MESSAGE_BYTES_MAX)
            counts = _counts.decode(data) if data else None
        except (OSError, msgspec.MsgspecError):
            return
        if counts is None:
            # The proxy has ended; who waits for the process says so.
            if self._control is not None:
                asyncio.get_running_loop().remove_reader(self._control)
            return
        self.refused += counts.refused
        if (door := self._open.get(counts.number)) is not None:
            door.sent_bytes += counts.sent_bytes
            door.received_bytes += counts.received_bytes

    def _send_door(self, door: Door) -> None:
        order = OpenProxyDoor(door.number, door.container_id, door.domains)
        self._send(order, [door.listener.fileno()])

    def _send(self, order: ProxyOrder, fds: list[int] | None = None) -> None:
        """Tell the proxy; one that does not listen is ended, and the next one is told everything."""
        if self._control is None:
            return
        try:
            socket.send_fds(self._control, [msgspec.json.encode(order)], fds or [])
        except OSError:
            with suppress(ProcessLookupError):
                os.kill(self.pid, 9)
