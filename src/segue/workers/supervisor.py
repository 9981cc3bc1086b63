"""How do several processes serve one port?

    parent    owns the ports, the hub where workers meet, and the processes; it only supervises
    worker    a whole server, as a single process is, on a socket of its own with the same port number
    engine    the embedded models, loaded once; workers use them over a Unix socket

A process that dies is started again, after a
pause that grows; so is a worker whose event loop stands still, which is killed first. Signals go to the parent, which
passes them on: the first drains, the second ends the grace period.

Each worker's port is a socket of its own with `SO_REUSEPORT`, so that the kernel spreads connections evenly. The parent
holds them all: connections for a worker that has died wait for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from segue.aio import in_background
from segue.cluster.hub import Hub
from segue.ids import new_id
from segue.server.announce import announce, count
from segue.server.environment import open_environment
from segue.server.operator import Member, Operator, ReadSettings
from segue.server.serve import BACKLOG, listen, operated, url_of
from segue.server.served import has_engines_inside
from segue.settings.values import Settings
from segue.workers.orders import give_order
from segue.workers.worker import PIPE_BYTES, Orders

log = logging.getLogger(__name__)

# Pause before a dead process is started again; doubled each time, reset once a process has lived for a while.
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 5.0
LIVED_S = 30.0
# After the grace period: what a worker may take to end itself.
END_S_MAX = 15.0
# How often the parent looks whether the event loops of its workers turn.
LOOK_S = 1.0


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
    """One process: started, restarted when it dies, stopped on request."""

    def __init__(
        self, name: str, orders: Callable[[int], Orders], port: socket.socket | None
    ) -> None:
        self.name = name
        self._orders = orders
        self._port = port
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        # Set when it serves, or has failed to start.
        self.is_ready = asyncio.Event()
        # What it says of itself when it is ready.
        self.lines: list[str] = []
        # The exit status of a process that never became ready.
        self.failed: int | None = None
        # When its event loop last turned, by the clock of the parent's loop; None while it starts.
        self.turned_at: float | None = None
        # The pipe where it says so.
        self._readable = -1
        self.replaced = 0

    async def keep(self) -> int:
        """Run the process until `stop`; returns its exit status."""
        pause_s = PAUSE_MIN_S
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            process = self._process = await self._start()
            if self._stopping.is_set():
                # `stop` was called while it was being started.
                self.signal(signal.SIGTERM)
            status = await process.wait()
            self.turned_at = None
            if self._stopping.is_set():
                # One that was just starting does not listen for the signal yet, and has nothing to finish.
                return 0 if status == -signal.SIGTERM else status
            if not self.is_ready.is_set():
                self.failed = status
                self.is_ready.set()
                return status
            if loop.time() - began_at > LIVED_S:
                pause_s = PAUSE_MIN_S
            log.error("%s exited with status %d, restarting in %.1f s", self.name, status, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return status
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)

    @property
    def pid(self) -> int | None:
        """The process that runs now, or ran last."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """Ask the process to stop."""
        self._stopping.set()
        self.signal(signal.SIGTERM)

    def hurry(self) -> None:
        """End its grace period. By another signal: of two equal ones a busy process would get one."""
        self.signal(signal.SIGINT)

    def replace_if_hung(self, now: float, hang_s: float) -> None:
        """Kill the process if its event loop has stood still for too long; `keep` starts the next one."""
        if self.turned_at is None or self._stopping.is_set() or now - self.turned_at <= hang_s:
            return
        log.error(
            "%s hangs: its event loop has been blocked for %.1f s (hang_s is %g); killing and replacing it",
            self.name,
            now - self.turned_at,
            hang_s,
        )
        self.turned_at = None
        self.replaced += 1
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _start(self) -> Process:
        readable, writable = os.pipe()
        descriptors = [writable, *([self._port.fileno()] if self._port is not None else [])]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "segue.workers.worker"),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=descriptors,
                # Ctrl-C is for the parent, which passes it on: from the terminal as well it would count twice.
                process_group=0,
            )
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        log.debug("%s has process id %d", self.name, process.pid)
        assert process.stdin is not None
        # Standard input stays open: its end tells the process that the parent is gone.
        process.stdin.write(msgspec.json.encode(self._orders(writable)) + b"\n")
        self._readable = readable
        asyncio.get_running_loop().add_reader(readable, self._on_readable, readable)
        return process

    def _on_readable(self, readable: int) -> None:
        """The process is ready and its event loop turns (bytes), or it is gone (the end of the pipe)."""
        loop = asyncio.get_running_loop()
        if told := os.read(readable, PIPE_BYTES):
            if not self.is_ready.is_set():
                self.lines = told.decode(errors="replace").strip("\0").splitlines()
            self.is_ready.set()
            if readable == self._readable:
                self.turned_at = loop.time()
            return
        loop.remove_reader(readable)
        os.close(readable)


class Supervisor:
    """The parent: starts all processes, keeps them running, and stops them after a signal."""

    def __init__(
        self,
        settings: Settings,
        ports: list[socket.socket],
        folder: str,
        read_settings: ReadSettings,
        keeper: str = "",
    ) -> None:
        self._settings = settings
        self._keeper = keeper
        self._read_settings = read_settings
        self._ports = ports
        self._folder = folder
        self._group = new_id("group")
        self._tasks = asyncio.TaskGroup()
        self._children: dict[Child, asyncio.Task[int]] = {}
        self._engine: Child | None = None
        # Set by the first signal, and by the second.
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()

    async def run(self) -> int:
        """Start everything and keep it running until a signal comes; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        async with self._tasks:
            try:
                return await self._run()
            finally:
                if engine := self._engine:
                    engine.stop()
                    await asyncio.wait([self._children[engine]], timeout=END_S_MAX)
                    engine.signal(signal.SIGKILL)

    async def _run(self) -> int:
        host, number = self._ports[0].getsockname()[:2]
        url = url_of(host, number, is_secure=bool(self._settings.tls_cert))
        workers: list[Child] = []
        async with operated(self._operator(url, workers), host, number):
            if has_engines_inside(self._settings):
                engine = self._engine = self._child("engine", None)
                if not await self._is_up(engine):
                    return engine.failed or 0
            # One worker first: it creates or upgrades the database that the others then find.
            workers.append(self._child("worker 1", self._ports[0]))
            if await self._is_up(workers[0]):
                others = enumerate(self._ports[1:], 2)
                workers += [self._child(f"worker {number}", port) for number, port in others]
                for worker in workers:
                    await self._is_up(worker)
            failed = [worker.failed for worker in workers if worker.failed is not None]
            if not failed and not self._stopping.is_set():
                announce(self._settings, url, workers[0].lines)
                async with in_background("hung_workers", partial(self._watch, workers)):
                    await self._stopping.wait()
            status = await self._stop(workers)
            return failed[0] if failed else status

    def _operator(self, url: str, workers: list[Child]) -> Operator:
        def members() -> dict[str, Member]:
            serving = [worker for worker in workers if worker.turned_at is not None]
            return {
                f"{worker.name}, process {worker.pid}": partial(
                    give_order, self._control(worker.name)
                )
                for worker in serving
            }

        def on_reload(settings: Settings) -> None:
            self._settings = settings
            logging.getLogger().setLevel(settings.log_level.upper())

        return Operator(
            self._settings, url, members, self._on_signal, self._read_settings, on_reload
        )

    def _control(self, name: str) -> Path:
        return Path(self._folder, name.replace(" ", "-"))

    async def _watch(self, workers: list[Child]) -> None:
        """Replace workers that hang. Where this process stood still itself, nothing is known of the others."""
        loop, hang_s = asyncio.get_running_loop(), self._settings.hang_s
        while True:
            due_at = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            is_late = loop.time() - due_at > LOOK_S
            for worker in workers if hang_s else ():
                if is_late and worker.turned_at is not None:
                    worker.turned_at = loop.time()
                worker.replace_if_hung(loop.time(), hang_s)

    def _child(self, name: str, port: socket.socket | None) -> Child:
        def orders(ready: int) -> Orders:
            return Orders(
                role="engine" if port is None else "worker",
                settings=self._settings,
                group=self._group,
                hub=f"{self._folder}/hub",
                engines=self._folder if has_engines_inside(self._settings) else "",
                control=str(self._control(name)),
                keeper=self._keeper,
                port=-1 if port is None else port.fileno(),
                ready=ready,
                replaced=child.replaced,
            )

        child = Child(name, orders, port)
        self._children[child] = self._tasks.create_task(child.keep())
        return child

    def _on_signal(self) -> None:
        (self._hurrying if self._stopping.is_set() else self._stopping).set()

    async def _is_up(self, child: Child) -> bool:
        """Wait until the child serves or has failed, or a signal comes."""
        await _first(child.is_ready.wait(), self._stopping.wait())
        return child.is_ready.is_set() and child.failed is None

    async def _stop(self, workers: list[Child]) -> int:
        """Let all workers drain; a second signal ends the grace period, and a worker that outlives it is killed."""
        grace_s = self._settings.grace_s
        log.info("stopping %s, waiting up to %g s", count(len(workers), "worker"), grace_s)
        tasks = [self._children[worker] for worker in workers]
        for worker, port in zip(workers, self._ports, strict=False):
            worker.stop()
            # Connections to a worker that has ended are refused, instead of waiting without a result.
            if is_spread():
                self._children[worker].add_done_callback(partial(_close, port))
        left_s = grace_s + END_S_MAX
        await _first(asyncio.wait(tasks, timeout=left_s), self._hurry(workers))
        for worker in workers:
            worker.signal(signal.SIGKILL)
        await asyncio.wait(tasks)
        return max(abs(task.result()) for task in tasks)

    async def _hurry(self, workers: list[Child]) -> None:
        await self._hurrying.wait()
        for worker in workers:
            worker.hurry()
        await asyncio.sleep(END_S_MAX)


async def _first(*works: Coroutine[None, None, object]) -> None:
    """Run these until the first one is done."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()


def _close(port: socket.socket, _: asyncio.Task[int]) -> None:
    port.close()


async def _supervise(settings: Settings, read_settings: ReadSettings) -> int:
    ports = open_ports(settings)
    try:
        with tempfile.TemporaryDirectory(prefix="segue-") as folder:
            async with Hub().opened(f"{folder}/hub"), open_environment(settings) as environment:
                keeper = "" if environment is None else environment.socket
                return await Supervisor(settings, ports, folder, read_settings, keeper).run()
    finally:
        for port in ports:
            port.close()


def serve_workers(settings: Settings, read_settings: ReadSettings) -> int:
    """Serve with several processes until a signal comes; returns the exit status."""
    status = asyncio.run(_supervise(settings, read_settings))
    log.info("stopped")
    return status
