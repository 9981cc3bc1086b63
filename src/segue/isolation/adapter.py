"""What makes a sandbox of one kind, and what is a sandbox to the keeper?

An adapter starts a sandbox by a `SandboxSpec` and returns it when the supervisor inside is ready. Limits, folders,
commands and files are the keeper's and the same for all. Another adapter is a file and a row in `adapters.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from segue.isolation import channel
from segue.isolation.limits import MIB, Group, Limits, MemoryOf, cpu_seconds_of, memory_of

DATA = "/mnt/data"
# Folders in memory, and the share of the sandbox's memory that each may take; at least a little.
HOME = "/home/user"
# Where the folder of the sandbox's door is seen inside: a Unix socket in it leads to the proxy of the network.
DOOR = "/run/door"
IN_MEMORY = {"/tmp": 4, "/dev/shm": 8, HOME: 16}
FOLDER_BYTES_MIN = 16 * MIB
CLOSE_S_MAX = 1.0
# A group can be removed when its last process is gone.
GROUP_TRIES, GROUP_S = 50, 0.01


class SandboxFailed(Exception):
    """A sandbox could not be started, or has ended; the reason, and the remedy where one is known."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is to be."""

    # The folder for `/mnt/data`; None: in memory.
    data: str | None
    limits: Limits
    group: Group
    # The user as whom it runs; None: the keeper's own.
    uid: int | None
    # The folder for `DOOR`, read-only; a socket may appear in it later, to which programs inside can connect.
    door: str = ""


class Adapter(Protocol):
    """Makes sandboxes of one kind."""

    # The level of isolation, as docs/how-to/sandbox.md names it.
    @property
    def isolation(self) -> str: ...

    # Whether each sandbox is to run as a user of its own.
    @property
    def has_own_uids(self) -> bool: ...

    # Whether what is inside can connect to a socket in the folder of its door.
    @property
    def has_network(self) -> bool: ...

    # What a sandbox that holds says `held` to; run once when the keeper starts.
    @property
    def probe(self) -> str: ...

    # What the operator should know of what was found; empty: nothing.
    @property
    def warning(self) -> str: ...

    def around(self, limits: Limits) -> Limits:
        """What the host allows to all processes of a sandbox that may use so much inside."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox whose supervisor is ready for commands; refused with `SandboxFailed`."""
        ...


# Finds an adapter, by a folder of the keeper's, the root of sandboxes, and where the program of gVisor is;
# `Misconfigured` with the remedy where the machine does not have what it needs.
FindAdapter = Callable[[Path, str, str], Adapter]


@dataclass(slots=True)
class Sandbox:
    """A sandbox that runs: its first process as the host sees it, and the way to its supervisor."""

    process: asyncio.subprocess.Process
    pid: int
    pidfd: int
    # Its root folder, held open: a number of a process may come again, this does not.
    root: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    spec: SandboxSpec
    memory_of: MemoryOf = memory_of

    @property
    def data(self) -> str:
        """`/mnt/data` as the keeper sees it."""
        return self.spec.data or f"/proc/self/fd/{self.root}{DATA}"

    @property
    def home(self) -> str:
        """The home of the sandbox, which is in memory, as the keeper sees it."""
        return f"/proc/self/fd/{self.root}{HOME}"

    def memory_bytes(self) -> int:
        """What it holds in memory, its folders in memory included."""
        folders = (*IN_MEMORY, *([DATA] if self.spec.data is None else []))
        return self.memory_of(
            self.pid, tuple(f"/proc/self/fd/{self.root}{name}" for name in folders)
        )

    def cpu_seconds(self) -> float:
        """CPU time of all that has run in it; without a cgroup only of what was waited for."""
        found = self.spec.group.cpu_s()
        return cpu_seconds_of(self.pid) if found is None else found

    def send(self, kind: bytes, number: int, body: bytes = b"") -> None:
        """Put a frame for the supervisor into the buffer."""
        self.writer.write(channel.pack(kind, number, body))

    async def close(self) -> None:
        """Kill it with all its processes, and wait until they are gone."""
        # The first process inside; its parent then waits until all others are gone.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.close(self.pidfd)
        os.close(self.root)
        self.writer.close()
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        group = self.spec.group
        for _ in range(GROUP_TRIES):
            group.close()
            if not any(folder.exists() for folder in group.folders):
                return
            # The last processes are gone a moment after the first.
            await asyncio.sleep(GROUP_S)
