"""The canaries outside, and the judgement: what a hostile program has reached."""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from segue.egress.doors import Doors
from segue.isolation.adapter import Adapter
from segue.isolation.bwrap import find_bwrap
from segue.isolation.gvisor import find_gvisor
from segue.isolation.limits import MIB, NICE_MAX, Cgroups, Limits, open_cgroups, processes_of
from segue.sandbox.beneath import new_file
from segue.sandbox.containers import Containers, run_command
from segue.sandbox.folders import own_folder
from segue.sandbox.messages import CommandEnd, ContainerSpec, MakeContainer, Printed, RunCommand
from tests.escapes import programs

# Small, so that a bomb is over soon; and what is held by whom.
SMALL = Limits(
    *(96 * MIB, 24 * MIB),
    files=2_000,
    processes=48,
    open_files=256,
    printed_bytes=4 * MIB,
)
ADAPTERS = (
    "bwrap with cgroups",
    "bwrap with a watcher",
    "gvisor with cgroups",
    "gvisor with a watcher",
)
KINDS = (ADAPTERS[0], ADAPTERS[2])
WATCHED = (ADAPTERS[1], ADAPTERS[3])
RUNSC = Path(__file__).parents[2] / ".cache/gvisor/runsc"


def runsc() -> str:
    """The program of gVisor: one that is named, or what `make test` has unpacked; empty where there is none."""
    named = os.environ.get("SEGUE_TEST_RUNSC", "")
    return named or (str(RUNSC) if RUNSC.exists() else "")


@dataclass
class Canaries:
    """Things outside that nothing inside may reach."""

    folder: Path
    secret: str = field(default_factory=lambda: f"canary-{secrets.token_hex(12)}")
    reached: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    abstract: str = field(default_factory=lambda: f"canary-{secrets.token_hex(6)}")

    @property
    def file(self) -> Path:
        return self.folder / "secret.txt"

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    def fill(self, program: str) -> str:
        places = {
            "secret": str(self.file),
            "canary_folder": str(self.folder),
            "host": self.host,
            "port": str(self.port),
            "unix": str(self.folder / "unix"),
            "abstract": self.abstract,
        }
        for name, value in places.items():
            program = program.replace(f"@{name}@", value)
        return program


def host_address() -> str:
    """An address of this machine that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the system only says which address it would use.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def laid_out(folder: Path) -> Canaries:
    """A secret that every user may read, and a folder that every user may write."""
    canaries = Canaries(folder, host=host_address())
    canaries.shared.mkdir(parents=True)
    canaries.shared.chmod(0o777)
    canaries.file.write_text(canaries.secret)
    canaries.file.chmod(0o644)
    return canaries


@asynccontextmanager
async def canaries_in(outside: Path) -> AsyncIterator[Canaries]:
    """Canaries that listen on loopback, on the host's address, at a Unix and at an abstract socket."""
    canaries = laid_out(outside / "canaries")
    folder = canaries.folder

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        canaries.reached.append(str(writer.get_extra_info("sockname")))
        writer.close()

    async with AsyncExitStack() as stack:
        tcp = await asyncio.start_server(on_connection, "0.0.0.0", 0)
        await stack.enter_async_context(tcp)
        canaries.port = tcp.sockets[0].getsockname()[1]
        unix = await asyncio.start_unix_server(on_connection, folder / "unix")
        os.chmod(folder / "unix", 0o777)
        await stack.enter_async_context(unix)
        abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        abstract.bind("\0" + canaries.abstract)
        await stack.enter_async_context(
            await asyncio.start_unix_server(on_connection, sock=abstract)
        )
        yield canaries


@cache
def found_here(kind: str) -> Adapter:
    """An adapter, with what all sandboxes have alike: laid out once for all tests of this process."""
    place = TemporaryDirectory()
    atexit.register(place.cleanup)
    folder = Path(place.name)
    folder.chmod(0o755)
    return find_bwrap(folder, "") if kind == "bwrap" else find_gvisor(folder, "", runsc())


@asynccontextmanager
async def containers_with(
    folder: Path,
    adapter: str,
    change: Callable[[Adapter], Adapter] = lambda found: found,
    limits: Limits | None = None,
    doors: Doors | None = None,
) -> AsyncIterator[Containers]:
    """Containers by one of the adapters; `change` plants a hole."""
    own = own_folder(folder)
    found = found_here("bwrap" if "bwrap" in adapter else "gvisor")
    cgroups = open_cgroups(f"segue-{own.name}") if "cgroups" in adapter else Cgroups()
    containers = Containers(
        change(found),
        cgroups,
        own,
        containers_max=64,
        idle_s=1_200,
        doors=doors,
        limits_of=(lambda memory: limits) if limits is not None else Limits,
    )
    try:
        yield containers
    finally:
        await containers.close()
        cgroups.close()


class Shell:
    """One container, for the tests."""

    def __init__(
        self, containers: Containers, *, is_volatile: bool = False, domains: tuple[str, ...] = ()
    ) -> None:
        self.containers = containers
        self.id = f"cntr_{secrets.token_hex(8)}"
        spec = ContainerSpec(is_volatile=is_volatile, domains=domains)
        containers.create(MakeContainer("me", self.id, spec))

    async def run(
        self, command: str, s_max: float = 30.0, chars_max: int = 60_000
    ) -> tuple[str, CommandEnd]:
        """What a command printed on both streams, and how it ended."""
        seen: list[str] = []

        async def send(printed: Printed) -> None:
            seen.append(printed.stdout + printed.stderr)

        _, place = await self.containers.place("me", self.id)
        outcome = await run_command(
            place, RunCommand("me", self.id, command, s_max, chars_max), send
        )
        return "".join(seen) + outcome.stdout + outcome.stderr, outcome

    async def play(self, program: str, s_max: float = 30.0) -> tuple[str, CommandEnd]:
        """A program in Python, from its own file."""
        _, place = await self.containers.place("me", self.id)
        fd = os.open(place.sandbox.data, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with new_file(fd, "hostile.py", place.sandbox.spec.uid) as file:
                os.write(file, program.encode())
        finally:
            os.close(fd)
        return await self.run("python3 /mnt/data/hostile.py", s_max)


# What a kernel that is not the host's lets its programs do to itself.
HARMLESS = {
    "kernel-shared": (),
    "user-kernel": ("WROTE /proc/sysrq-trigger 1", "WROTE /proc/sys/.*", "NICE -5"),
}


def seen_outside(first: int, secret: str, isolation: str) -> set[str]:
    """What the host itself shows of the processes of a sandbox."""
    found, filtered = set[str](), 0
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for pid in processes_of(first):
        folder = Path(f"/proc/{pid}")
        if os.readlink(folder / "ns/net") == os.readlink("/proc/self/ns/net"):
            found.add("network of the host")
        if secret.encode() in (folder / "environ").read_bytes():
            found.add("secret in an environment")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        filtered += status["Seccomp"].strip() == "2"
        if os.getpriority(os.PRIO_PROCESS, pid) < min(own + 1, NICE_MAX):
            found.add("priority")
        if (folder / "oom_score_adj").read_text().strip() != "1000":
            found.add("not the first to end")
    # The kernel of gVisor and what serves its files: both are under filters of their own.
    if isolation == "user-kernel" and filtered < 2:
        found.add("no filter around gVisor")
    return found


async def findings(containers: Containers, canaries: Canaries) -> set[str]:
    """What the hostile programs have reached, as names of holes; empty where the sandbox holds."""
    shell, said = Shell(containers), {}
    _, place = await containers.place("me", shell.id)
    found = seen_outside(place.sandbox.pid, canaries.secret, containers.isolation)
    for name in ("PROC", "NETWORK", "CALLS", "FILES"):
        said[name], _ = await shell.play(canaries.fill(getattr(programs, name)))
        if canaries.secret in said[name]:
            found.add("secret read")
    if canaries.reached or "REACHED" in said["NETWORK"]:
        found.add("canary reached")
    if "DEVICES ['lo']" not in said["NETWORK"]:
        found.add("network")
    if "FAMILY" in said["NETWORK"]:
        found.add("socket family")
    if "CALL " in said["CALLS"]:
        found.add("call allowed")
    for line in said["CALLS"].splitlines():
        match line.split():
            case ["STATUS", "Seccomp:", mode] if mode != "2":
                found.add("no filter")
            case ["STATUS", "NoNewPrivs:", flag] if flag != "1":
                found.add("new privileges")
            case ["STATUS", name, bits] if name.startswith("Cap") and int(bits, 16):
                found.add("capabilities")
            case _:
                pass
    if "FDS [0, 1, 2]" not in said["PROC"]:
        found.add("descriptors")
    for harmless in HARMLESS[containers.isolation]:
        said["FILES"] = re.sub(harmless, "", said["FILES"])
    if any(word in said["FILES"] for word in ("WROTE", "MKNOD", "SETUID", "CHOWN", "NICE", "READ")):
        found.add("files: " + said["FILES"][:400])
    if containers.isolation == "kernel-shared" and "LAST-TO-END 0" in said["FILES"]:
        found.add("not the first to end")
    if list(canaries.folder.rglob("escaped")):
        found.add("host folder written")
    return found
