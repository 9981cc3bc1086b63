"""Which process runs the proxy? One of its own: `python -m segue.egress.child FD`, started by the keeper of sandboxes.

It has an empty environment, no secret and no file; where it was root it gives that up before it reads a byte. Doors
come over a control socket, each with its listening socket; what went through them goes back. When the control socket
closes, the keeper is gone, and this process ends.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401  Loaded before root is given up: looking a name up needs it.
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable

import msgspec

from segue.aio import in_background
from segue.egress.messages import OpenProxyDoor, ProxyCounts, ProxyOrder, StartProxy
from segue.egress.proxy import CONNECTIONS_MAX, Dial, EgressProxy, dial
from segue.isolation.users import PROXY, can_start_as_others
from segue.web.fetch import Fetcher, Policy, Resolve

REPORT_S = 0.2
MESSAGE_BYTES_MAX = 64 * 1024
# What it does is for sandboxes: it gives way to the server, and less than they do.
NICE = 3
# Beside two for each connection: doors, threads that look names up.
OTHER_FDS = 512


_order: msgspec.json.Decoder[ProxyOrder] = msgspec.json.Decoder(ProxyOrder)


class ProxyChild:
    """Follows the keeper's orders."""

    def __init__(
        self, control: socket.socket, make_proxy: Callable[[tuple[str, ...]], EgressProxy]
    ) -> None:
        self._control = control
        self._make_proxy = make_proxy
        self._proxy: EgressProxy | None = None

    async def run(self) -> None:
        """Serve doors until the control socket closes."""
        self._control.setblocking(False)
        async with in_background("proxy_counts", self._report):
            while order := await self._next():
                await self._follow(*order)

    async def _next(self) -> tuple[ProxyOrder, list[int]] | None:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._control)
        data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 1)
        return (_order.decode(data), fds) if data else None

    async def _follow(self, order: ProxyOrder, fds: list[int]) -> None:
        if isinstance(order, StartProxy):
            self._proxy = self._make_proxy(order.domains)
            return
        assert self._proxy is not None
        if isinstance(order, OpenProxyDoor):
            listener = socket.socket(fileno=fds[0])
            await self._proxy.open(order.number, order.container_id, order.domains, listener)
        else:
            await self._proxy.close(order.number)

    async def _report(self) -> None:
        """Say what went through the doors, now and then."""
        while True:
            await asyncio.sleep(REPORT_S)
            for door in () if self._proxy is None else self._proxy.doors.values():
                found = (door.sent_bytes, door.received_bytes, door.requests, door.refused)
                if any(found):
                    try:
                        self._control.send(msgspec.json.encode(ProxyCounts(door.number, *found)))
                    except BlockingIOError:
                        break
                    door.sent_bytes = door.received_bytes = door.requests = door.refused = 0


def confine() -> int:
    """Give up what a proxy does not need; how many connections it may have then. Crashes are the keeper's matter."""
    os.nice(NICE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS_MAX + OTHER_FDS
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    if can_start_as_others():
        os.setgroups([])
        os.setresgid(PROXY, PROXY, PROXY)
        os.setresuid(PROXY, PROXY, PROXY)
    return max(1, (soft - OTHER_FDS) // 2)


def main(dial: Dial = dial, resolve: Resolve | None = None) -> None:
    """Serve until the keeper is gone."""
    logging.basicConfig(format="sandbox network: %(message)s", level=logging.INFO)
    control = socket.socket(fileno=int(sys.argv[-1]))
    connections_max = confine()

    def make_proxy(domains: tuple[str, ...]) -> EgressProxy:
        fetcher = Fetcher(Policy("public"), resolve)
        return EgressProxy(domains, fetcher, dial=dial, connections_max=connections_max)

    asyncio.run(ProxyChild(control, make_proxy).run())
    # Threads that still look names up are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
