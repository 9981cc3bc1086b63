"""How much may one sandbox use, and how is that held?

In a cgroup of its own where one may be made below the keeper's own (v2, else v1): memory, processes and CPU are then
limited by the kernel. Elsewhere a watcher adds up what the processes of the sandbox have resident and what its
memory-backed folders hold, often enough to kill within 200 ms; processes are limited by a resource limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MIB = 1024 * 1024
# How often a watcher looks: a limit is noticed, and the sandbox killed, within 200 ms.
WATCH_S = 0.1
# Microseconds of CPU time in a period: one core.
CPU_QUOTA_US, CPU_PERIOD_US = 100_000, 100_000
# A sandbox gives way to the server: of CPU time, where both want it, and of the disk. As the kernel counts priorities
# of processes, and shares of groups (v2 of 100, v1 of 1024).
NICE, NICE_MAX, WEIGHT, SHARES = 5, 19, 33, 335
# What the kernel needs for a file that is in memory, besides its contents; and what it may keep in a socket, whose size
# the filter lets nobody set. TCP has more, and says how much: it is looked at where there are so many sockets.
INODE_BYTES, SOCKET_BYTES, SOCKETS = 1024, 208 * 1024, 8
# The part of its memory that a sandbox may have for TCP besides, where the kernel counts that by itself.
TCP_SHARE = 8
# Not every kernel has these.
WITH_SWAP, SWAP, TCP = (
    "memory.memsw.limit_in_bytes",
    "memory.swap.max",
    "memory.kmem.tcp.limit_in_bytes",
)

_RESIDENT = re.compile(rb"^Vm(?:RSS|PTE|Swap):\s*(\d+)", re.MULTILINE)
# A mapping of a file that has no name any more: its place, its device and its number.
_UNLINKED = re.compile(rb"^(\w+)-(\w+) \S+ (\w+) (\w+):(\w+) (\d+) .* \(deleted\)$", re.MULTILINE)

_USED_US = re.compile(r"^usage_usec (\d+)", re.MULTILINE)
_SOCKETS = re.compile(rb"^sockets: used (\d+)")
# Of a TCP connection what waits to be sent and to be read.
_QUEUES = re.compile(rb" ([0-9A-F]{8}):([0-9A-F]{8}) \d\d:")

HeldBy = Literal["cgroup", "watcher"]
# Adds up what a sandbox has in memory: by its first process, and by its folders in memory as the keeper sees them.
MemoryOf = Callable[[int, tuple[str, ...]], int]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use."""

    memory_bytes: int
    disk_bytes: int = 1024 * MIB
    files: int = 100_000
    processes: int = 256
    open_files: int = 1024
    # A command is stopped when it has printed so much.
    printed_bytes: int = 64 * MIB


@dataclass(slots=True)
class Group:
    """The cgroups of one sandbox: folders, of which v1 has one for each controller."""

    folders: tuple[Path, ...] = ()

    def add(self, pid: int) -> None:
        """Put a process there, with all that it starts from now on."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def cpu_s(self) -> float | None:
        """CPU time of all that ran there; None where it is not counted."""
        for folder in self.folders:
            with suppress(OSError):
                return int((folder / "cpuacct.usage").read_text()) / 1e9
            with suppress(OSError):
                if found := _USED_US.search((folder / "cpu.stat").read_text()):
                    return int(found[1]) / 1e6
        return None

    def close(self) -> None:
        """Remove it; its processes are gone."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()


@dataclass(slots=True)
class Cgroups:
    """Where groups can be made: the folder of v2, or one for each controller of v1."""

    parents: dict[str, Path] = field(default_factory=dict)

    @property
    def held_by(self) -> HeldBy:
        return "cgroup" if "memory" in self.parents or "" in self.parents else "watcher"

    def make(self, name: str, limits: Limits) -> Group:
        """A group with these limits; without folders where none can be made."""
        made: list[Path] = []
        for controller, parent in self.parents.items():
            folder = parent / name
            folder.mkdir()
            made.append(folder)
            for file, value in _values(controller, limits):
                if file not in (WITH_SWAP, SWAP, TCP) or (folder / file).exists():
                    (folder / file).write_text(value)
        return Group(tuple(made))

    def close(self) -> None:
        """Remove the groups above those of the sandboxes."""
        Group(tuple(self.parents.values())).close()


def _values(controller: str, limits: Limits) -> Iterator[tuple[str, str]]:
    """The files of a group and what they say; `controller` is empty for v2."""
    if controller == "":
        yield "memory.max", str(limits.memory_bytes)
        yield "memory.oom.group", "1"
        yield SWAP, "0"
        yield "pids.max", str(limits.processes)
        yield "cpu.max", f"{CPU_QUOTA_US} {CPU_PERIOD_US}"
        yield "cpu.weight", str(WEIGHT)
    elif controller == "memory":
        yield "memory.limit_in_bytes", str(limits.memory_bytes)
        yield WITH_SWAP, str(limits.memory_bytes)
        yield TCP, str(limits.memory_bytes // TCP_SHARE)
    elif controller == "pids":
        yield "pids.max", str(limits.processes)
    elif controller == "cpu":
        yield "cpu.cfs_period_us", str(CPU_PERIOD_US)
        yield "cpu.cfs_quota_us", str(CPU_QUOTA_US)
        yield "cpu.shares", str(SHARES)


def open_cgroups(name: str, own: str | None = None, mounts: str = "/sys/fs/cgroup") -> Cgroups:
    """Groups below the keeper's own, where they can be made and have what is needed; else none."""
    lines = Path("/proc/self/cgroup").read_text() if own is None else own
    places = _places(name, lines, mounts)
    if "" in places:
        return _open_v2(places[""])
    made: dict[str, Path] = {}
    for controller, folder in places.items():
        with suppress(OSError):
            folder.mkdir()
            made[controller] = folder
    if "memory" not in made:
        Cgroups(made).close()
        return Cgroups()
    return Cgroups(made)


def _places(name: str, lines: str, mounts: str) -> dict[str, Path]:
    """Where the groups of a keeper are, by controller; by an empty name where all controllers have one folder."""
    paths = dict(line.split(":", 2)[1:] for line in lines.splitlines() if line.count(":") >= 2)
    wanted = ("memory", "pids", "cpu", "cpuacct")
    found = {
        each: Path(f"{mounts}/{controllers}{path}") / name
        for controllers, path in paths.items()
        for each in controllers.split(",")
        if each in wanted
    }
    return found or {"": Path(mounts + paths.get("", "/")) / name}


def remove_cgroups(name: str) -> None:
    """Remove the groups of a keeper that is dead."""
    lines = Path("/proc/self/cgroup").read_text()
    for folder in _places(name, lines, "/sys/fs/cgroup").values():
        if folder.is_dir():
            Group((*(each for each in folder.iterdir() if each.is_dir()), folder)).close()


def _open_v2(folder: Path) -> Cgroups:
    try:
        folder.mkdir()
        # Fails where the keeper's own group does not hand these on, or holds processes itself.
        (folder / "cgroup.subtree_control").write_text("+memory +pids +cpu")
    except OSError:
        Cgroups({"": folder}).close()
        return Cgroups()
    return Cgroups({"": folder})


def give_way(pid: int) -> None:
    """Let a process, with all that it starts, wait for what runs as this one does."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, pid, min(own + NICE, NICE_MAX))
    # The first to go where memory ends; nobody inside can change it.
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


# --- the watcher ------------------------------------------------------------------------------------


def processes_of(first: int) -> list[int]:
    """The first process of a sandbox and all that it has: orphans belong to it too."""
    found, todo = [], [first]
    while todo:
        pid = todo.pop()
        found.append(pid)
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for task in tasks:
            with suppress(OSError):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                todo += map(int, children.split())
    return found


def threads_of(first: int) -> int:
    """How many threads the processes of a sandbox have, which is what the kernel counts as processes."""
    count = 0
    for pid in processes_of(first):
        with suppress(OSError):
            count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def memory_of(first: int, folders: tuple[str, ...]) -> int:
    """What the processes of a sandbox have resident, their page tables, its sockets, and what its memory-backed folders
    hold."""
    size = sum(status_bytes(pid, _RESIDENT) for pid in processes_of(first)) + sockets_of(first)
    for folder in folders:
        with suppress(OSError):
            size += held_in(folder)
    return size


def sockets_of(first: int) -> int:
    """What may be in the sockets of a sandbox, its own network's: of TCP what there is."""
    net = Path(f"/proc/{first}/net")
    with suppress(OSError):
        found = _SOCKETS.match((net / "sockstat").read_bytes())
        count = int(found[1]) if found else 0
        if count < SOCKETS:
            return 0
        waiting = [_QUEUES.findall((net / name).read_bytes()) for name in ("tcp", "tcp6")]
        queued = sum(int(size, 16) for rows in waiting for row in rows for size in row)
        return count * SOCKET_BYTES + queued
    return 0


def status_bytes(pid: int, wanted: re.Pattern[bytes]) -> int:
    """The sum of these lines of the status of a process; 0 where it has ended."""
    with suppress(OSError):
        return sum(map(int, wanted.findall(Path(f"/proc/{pid}/status").read_bytes()))) * 1024
    return 0


def held_in(folder: str) -> int:
    """What a folder in memory holds."""
    there = os.statvfs(folder)
    contents = (there.f_blocks - there.f_bfree) * there.f_frsize
    return contents + (there.f_files - there.f_ffree) * INODE_BYTES


def cpu_seconds_of(first: int) -> float:
    """CPU time of the living processes of a sandbox and of those that ended and were waited for."""
    ticks = 0
    for pid in processes_of(first):
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def unlinked_bytes(first: int, folder: str) -> int:
    """What the processes of a sandbox hold, open or mapped, of files that have no name any more, on the disk of this
    folder; nothing where it is gone."""
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return 0
    sizes: dict[int, int] = {}
    for pid in processes_of(first):
        with suppress(OSError):
            for line in _UNLINKED.findall(Path(f"/proc/{pid}/maps").read_bytes()):
                start, end, offset, major, minor = (int(word, 16) for word in line[:5])
                if os.makedev(major, minor) == device:
                    sizes.setdefault(int(line[5]), offset + end - start)
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{pid}/fd/{fd}")
                    if file.st_nlink == 0 and file.st_dev == device:
                        sizes[file.st_ino] = file.st_blocks * 512
    return sum(sizes.values())
