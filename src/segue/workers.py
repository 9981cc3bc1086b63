"""How do several processes serve one port?

    parent    owns the ports, the hub where workers meet, and the processes; serves nobody itself
    worker    a whole server, as one process is, on a port of its own with the same number
    engine    the models inside, loaded once; workers ask it over a local socket

A process is told by its standard input what to do, so that no secret is seen in a list of processes; when that ends the
parent is gone, and the process stops as if asked to. One that dies is started again, after a pause that grows. Signals
go to the parent, which passes them on: the first drains, the second ends the grace.

Each worker's port is a socket of its own with `SO_REUSEPORT`, so that the kernel spreads connections evenly. The parent
holds them all: what arrives for a worker that has died waits for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import msgspec
import uvloop
from msgspec import Struct

from segue.app import Place
from segue.cluster.hub import Hub
from segue.errors import ApiError, Misconfigured
from segue.ids import new_id
from segue.models import has_engines_inside, shared_engines
from segue.observe.logs import set_up_logging
from segue.server import BACKLOG, announce, listen, serve_on, url_of
from segue.settings import Settings

log = logging.getLogger(__name__)

# Between the death of a process and the next try; doubled each time, forgotten once one has lived for a while.
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 5.0
LIVED_S = 30.0
# Beyond the grace: what a worker may take to end itself.
END_S_MAX = 15.0
# The exit status of a process that was not told what it needs.
MISCONFIGURED = 2


class Orders(Struct, frozen=True):
    """What a process is told to do."""

    role: Literal["worker", "engine"]
    settings: Settings
    house: str
    hub: str
    engines: str
    # The descriptors of its port, and of the pipe where it says that it is ready.
    port: int
    ready: int


def is_spread() -> bool:
    """Whether the kernel spreads connections over sockets with the same port. Elsewhere workers share one socket."""
    return sys.platform == "linux"


def open_ports(settings: Settings) -> list[socket.socket]:
    """A socket for each worker, all with the same port."""
    # Without sharing first: otherwise another server on this port would go unnoticed.
    first = listen(settings)
    if not is_spread():
        return [first] * settings.workers
    host, port = first.getsockname()[:2]
    family = first.family
    first.close()
    return [
        socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
        for _ in range(settings.workers)
    ]


class Child:
    """One process: started, started again when it dies, stopped when asked."""

    def __init__(
        self, name: str, orders: Callable[[int], Orders], port: socket.socket | None
    ) -> None:
        self.name = name
        self._orders = orders
        self._port = port
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self.is_ready = asyncio.Event()
        # Why it never became ready.
        self.failed: int | None = None

    async def keep(self) -> int:
        """Until it is asked to stop: its exit status."""
        pause_s = PAUSE_MIN_S
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            process = self._process = await self._start()
            status = await self._wait(process)
            if self.is_stopping:
                return status
            if not self.is_ready.is_set():
                self.failed = status
                self.is_ready.set()
                return status
            if loop.time() - began_at > LIVED_S:
                pause_s = PAUSE_MIN_S
            log.error("%s ended with %d; started again in %.1f s", self.name, status, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return status
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    async def _wait(self, process: Process) -> int:
        if self.is_stopping:
            # It was asked while it was being started.
            self.signal(signal.SIGTERM)
        return await process.wait()

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ask it to stop; a second time, to hurry."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _start(self) -> Process:
        readable, writable = os.pipe()
        descriptors = [writable, *([self._port.fileno()] if self._port is not None else [])]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "segue.workers"),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=descriptors,
                # Ctrl-C is for the parent, who passes it on: from the terminal as well it would count twice.
                process_group=0,
            )
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        log.debug("%s is process %d", self.name, process.pid)
        assert process.stdin is not None
        # Its standard input stays open: when it ends, we are gone.
        process.stdin.write(msgspec.json.encode(self._orders(writable)) + b"\n")
        asyncio.get_running_loop().add_reader(readable, self._heard, readable)
        return process

    def _heard(self, readable: int) -> None:
        """It is ready, or gone."""
        if os.read(readable, 1):
            self.is_ready.set()
        asyncio.get_running_loop().remove_reader(readable)
        os.close(readable)


class Parent:
    """All the processes of a service."""

    def __init__(self, settings: Settings, ports: list[socket.socket], folder: str) -> None:
        self._settings = settings
        self._ports = ports
        self._folder = folder
        self._house = new_id("house")
        self._children: dict[Child, asyncio.Task[int]] = {}
        self._engine: Child | None = None
        self._asked: asyncio.Queue[None] = asyncio.Queue()

    async def run(self) -> int:
        """Start everything, say so, and keep it until a signal comes."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked.put_nowait, None)
        if self._settings.tls_cert:
            # Workers load the certificate again; without one the signal means what it always does.
            loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        try:
            if has_engines_inside(self._settings):
                engine = self._engine = self._child("engine", None)
                if not await self._is_up(engine):
                    return engine.failed or 0
            # One alone first: it makes or upgrades what the others then find.
            workers = [self._child("worker 1", self._ports[0])]
            if await self._is_up(workers[0]):
                workers += [
                    self._child(f"worker {number}", port)
                    for number, port in enumerate(self._ports[1:], 2)
                ]
                for worker in workers:
                    await self._is_up(worker)
            failed = [one.failed for one in workers if one.failed is not None]
            if not failed and self._asked.empty():
                host, number = self._ports[0].getsockname()[:2]
                url = url_of(host, number, is_secure=bool(self._settings.tls_cert))
                announce(self._settings, url)
                await self._asked.get()
            status = await self._stop(workers)
            return failed[0] if failed else status
        finally:
            await self._end(self._engine)

    def _child(self, name: str, port: socket.socket | None) -> Child:
        def orders(ready: int) -> Orders:
            return Orders(
                role="engine" if port is None else "worker",
                settings=self._settings,
                house=self._house,
                hub=f"{self._folder}/hub",
                engines=self._folder if has_engines_inside(self._settings) else "",
                port=-1 if port is None else port.fileno(),
                ready=ready,
            )

        child = Child(name, orders, port)
        self._children[child] = asyncio.create_task(child.keep())
        return child

    async def _is_up(self, child: Child) -> bool:
        """Wait until it serves, it has failed, or somebody wants to stop."""
        ready = asyncio.create_task(child.is_ready.wait())
        asked = asyncio.create_task(self._asked.get())
        await asyncio.wait([ready, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            self._asked.put_nowait(None)
        for task in (ready, asked):
            task.cancel()
        return child.is_ready.is_set() and child.failed is None

    def _pass_on(self, number: signal.Signals) -> None:
        for child in self._children:
            if child is not self._engine:
                child.signal(number)

    async def _stop(self, workers: list[Child]) -> int:
        """Let all workers drain; a second signal ends the grace, and none outlives it by much."""
        log.info("stopping %d workers", len(workers))
        tasks = [self._children[one] for one in workers]
        for worker, port in zip(workers, self._ports, strict=False):
            worker.stop()
            # Who comes for one that has ended is refused, instead of waiting for nobody.
            if is_spread():
                self._children[worker].add_done_callback(partial(_close, port))
        hurrying = asyncio.create_task(self._asked.get())
        left_s = self._settings.grace_s + END_S_MAX
        ending = asyncio.create_task(_all(tasks))
        await asyncio.wait([ending, hurrying], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if hurrying.done() and not ending.done():
            for worker in workers:
                worker.stop()
            await asyncio.wait([ending], timeout=END_S_MAX)
        hurrying.cancel()
        for worker in workers:
            worker.signal(signal.SIGKILL)
        await ending
        return max(abs(task.result()) for task in tasks)

    async def _end(self, engine: Child | None) -> None:
        if engine is not None:
            engine.stop()
            await asyncio.wait([self._children[engine]], timeout=END_S_MAX)
            engine.signal(signal.SIGKILL)
        await asyncio.gather(*self._children.values())


async def _all(tasks: Sequence[asyncio.Task[int]]) -> None:
    await asyncio.wait(tasks)


def _close(port: socket.socket, _: asyncio.Task[int]) -> None:
    port.close()


async def run_parent(settings: Settings) -> int:
    """Serve with several processes until a signal comes; the exit status."""
    ports = open_ports(settings)
    try:
        with tempfile.TemporaryDirectory(prefix="segue-") as folder:
            async with Hub().opened(f"{folder}/hub"):
                return await Parent(settings, ports, folder).run()
    finally:
        for port in ports:
            port.close()


def serve_workers(settings: Settings) -> int:
    """Serve with several processes; the exit status says whether all of them could."""
    return asyncio.run(run_parent(settings))


# --- in a process of its own ---


def main() -> int:
    """Do what the parent says."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    set_up_logging(orders.settings)
    threading.Thread(target=_outlive_nobody, daemon=True).start()
    try:
        uvloop.run(_work(orders) if orders.role == "worker" else _lend(orders))
    except (Misconfigured, ApiError) as error:
        print(f"segue: {error}", file=sys.stderr)
        return MISCONFIGURED
    return 0


def _outlive_nobody() -> None:
    """When the parent is gone, stop as if it had asked."""
    # Not by way of `sys.stdin`, whose lock the end of the interpreter would wait for.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say_ready(descriptor: int) -> None:
    with suppress(OSError):
        os.write(descriptor, b"1")
    os.close(descriptor)


async def _work(orders: Orders) -> None:
    place = Place(orders.house, orders.hub, orders.engines)
    with socket.socket(fileno=orders.port) as port:
        await serve_on(port, orders.settings, lambda url: _say_ready(orders.ready), place)


async def _lend(orders: Orders) -> None:
    """Share the engines inside until asked to stop."""
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with shared_engines(orders.settings, orders.engines):
        _say_ready(orders.ready)
        await asked.wait()


if __name__ == "__main__":
    sys.exit(main())
