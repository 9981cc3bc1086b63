"""How is a sandbox made with gVisor, and what is inside?

Inside is the same as with bubblewrap, but programs run on a kernel of their own: gVisor's, a process of the host
(`runsc`). Bubblewrap stands around that process, with the folders of the sandbox below `/sandbox`: so the kernel of
the host is reached by gVisor alone, without a network, without a right outside its namespaces, and everything ends with
its first process. Around the whole are the limits.

A process has one user id in namespaces that nobody with rights has made, and `runsc` must have the id 0 there. So files
belong to the user 0 of gVisor; the first process makes a user namespace of gVisor in which that is 1000, and gives up
what a root could do (`first.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from segue.errors import Misconfigured
from segue.isolation.adapter import DATA, DOOR, IN_MEMORY, Sandbox, SandboxSpec
from segue.isolation.bwrap import (
    ENVIRONMENT,
    OWN,
    PATH,
    HandedFiles,
    Launch,
    find_program,
    find_python,
    folder_words,
    launched,
    lay_out,
    root_words,
    supervised,
)
from segue.isolation.limits import MIB, Limits, held_in, processes_of, status_bytes
from segue.isolation.seccomp import load_filter
from segue.isolation.users import can_start_as_others

# The name of this level of isolation: programs run on a kernel that is a process of the host.
ISOLATION = "user-kernel"
INSIDE = "/sandbox"
FIRST, FILTER = f"{OWN}/first.py", f"{OWN}/filter"
RUNSC, BUNDLE, STATE = "/runsc", "/bundle", "/state"
# What gVisor itself needs: its memory, and threads of the host for each of a program's.
OWN_BYTES, OWN_PROCESSES, PROCESSES_EACH = 96 * MIB, 128, 8
STATE_BYTES = 4 * MIB
FLAGS = ("--rootless", "--network=none", "--ignore-cgroups", "--overlay2=none", "--host-uds=open")
NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
ISOLATES = ("--unshare-all", "--unshare-user")
# What no other process has with it, and its page tables.
_OWN = re.compile(rb"^(?:RssAnon|VmPTE):\s*(\d+)", re.MULTILINE)
# No right, a filter, no network but its own loopback, and another kernel than the host's.
PROBE = (
    "grep -q '^CapEff:.*0000000000000000' /proc/self/status && grep -q '^Seccomp:.*2' /proc/self/status && "
    "test -w /mnt/data && ! test -w /usr && test $(id -u) = 1000 && ! grep -q : /proc/net/route && "
    f"tail -n +3 /proc/net/dev | grep -qv '[^ lo]:' && test $(uname -r) != {os.uname().release} && echo held"
)
# Older ones do not know a flag with which `ls` asks for a file.
VERSION_MIN = 20230000
MISSING = (
    "environment: runsc, the program of gVisor, is not installed. Put the release of gvisor.dev into "
    "/usr/local/bin, or run: apt install runsc; or name it with --environment-runsc."
)


@dataclass(frozen=True, slots=True)
class Gvisor:
    """How gVisor is called on this machine; the parts that a test leaves out to see whether it is noticed."""

    bwrap: str
    runsc: str
    root: str
    # The folders that all sandboxes have alike.
    alike: str
    python: str
    seccomp: bytes | None
    has_own_uids: bool
    warning: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    isolates: tuple[str, ...] = ISOLATES
    flags: tuple[str, ...] = FLAGS
    namespaces: tuple[str, ...] = NAMESPACES
    # What root inside keeps of what it can do; none: there is no root inside.
    keeps: tuple[str, ...] = ()
    # Folders of the host that can be written, by their places inside.
    binds: tuple[tuple[str, str], ...] = ()
    has_network: bool = True
    isolation: str = ISOLATION
    probe: str = PROBE

    def around(self, limits: Limits) -> Limits:
        """Memory and threads of gVisor itself are not the sandbox's."""
        memory = limits.memory_bytes + OWN_BYTES
        processes = OWN_PROCESSES + PROCESSES_EACH * limits.processes
        return replace(limits, memory_bytes=memory, processes=processes)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox whose supervisor is ready for commands."""
        contents = HandedFiles()
        words = arguments(self, spec, contents)
        inner = [RUNSC, *self.flags, "--root", STATE, "run", "--bundle", BUNDLE, "sandbox"]
        launch = Launch(
            *(self.bwrap, words, contents, inner, self.environment),
            root=INSIDE,
            memory_of=memory_of,
        )
        return await launched(launch, spec)


def find_gvisor(folder: Path, root: str, named: str = "") -> Gvisor:
    """gVisor of the system, or the program that is named; and what stands around it."""
    found = shutil.which("runsc", path=PATH)
    if named:
        # Where the users of sandboxes may run it.
        found = str(folder / "runsc")
        try:
            shutil.copyfile(named, found)
        except OSError as error:
            message = f"environment_runsc: {named} cannot be read: {error.strerror}."
            raise Misconfigured(message) from None
        os.chmod(found, 0o755)
    if found is None:
        raise Misconfigured(MISSING)
    first = Path(__file__).with_name("first.py").read_bytes()
    return Gvisor(
        find_program(folder),
        found,
        root,
        lay_out(folder, root, {"first.py": first, "filter": b""}),
        find_python(root),
        load_filter(),
        has_own_uids=can_start_as_others(),
        warning=_warning(found),
    )


def _warning(runsc: str) -> str:
    """What the operator should know of this version."""
    try:
        said = subprocess.run([runsc, "--version"], capture_output=True, text=True, env={}).stdout
    except OSError as error:
        raise Misconfigured(f"environment: {runsc} cannot be run: {error.strerror}.") from None
    version = re.search(r"\d{8}", said)
    if version is None or int(version[0]) >= VERSION_MIN:
        return ""
    return f"runsc of {version[0]} is old: `ls` and `stat` of Debian 12 and newer fail in it. Install a newer one."


def arguments(gvisor: Gvisor, spec: SandboxSpec, contents: HandedFiles) -> list[str]:
    """What stands around gVisor, in the words of bubblewrap."""
    # All rights in namespaces of its own, where it makes more of them: none of the host's.
    words = [*gvisor.isolates, "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    words += ["--perms", "0755", "--dir", INSIDE]
    words += [*root_words(gvisor.root, gvisor.alike, INSIDE), *folder_words(spec, INSIDE)]
    for name in ("proc", "sys", "dev/shm"):
        words += ["--perms", "0755", "--dir", f"{INSIDE}/{name}"]
    if gvisor.seccomp is not None:
        words += ["--perms", "0644", "--ro-bind-data", contents.add(gvisor.seccomp)]
        words += [INSIDE + FILTER]
    for outer, inner in gvisor.binds:
        words += ["--bind", outer, INSIDE + inner]
    words += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", gvisor.runsc, RUNSC]
    bundle = contents.add(bundle_of(gvisor, spec))
    words += ["--ro-bind-data", bundle, f"{BUNDLE}/config.json"]
    for folder in ("/tmp", STATE):
        words += ["--size", str(STATE_BYTES), "--tmpfs", folder]
    return words


def bundle_of(gvisor: Gvisor, spec: SandboxSpec) -> bytes:
    """The sandbox as `config.json` of the OCI's runtime specification says it."""
    writable = (*IN_MEMORY, DATA, *(inner for _, inner in gvisor.binds))
    environment = {**ENVIRONMENT, **gvisor.environment}
    program = supervised(gvisor.python, spec, FIRST)
    mounts: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc"},
        # Not read-only: then no device could be written either, not even `/dev/null`.
        {"destination": "/dev", "type": "tmpfs"},
        {"destination": "/sys", "type": "tmpfs", "options": ["ro", "mode=0555"]},
    ]
    for folder in writable:
        mounts.append({"destination": folder, "type": "bind", "source": INSIDE + folder})
    if spec.door:
        mounts.append({"destination": DOOR, "type": "bind", "source": INSIDE + DOOR})
        mounts[-1]["options"] = ["ro"]
    config: dict[str, object] = {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": INSIDE, "readonly": True},
        "mounts": mounts,
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [*program, "root" if gvisor.keeps else "user"],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": DATA,
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), gvisor.keeps),
        },
        "linux": {"namespaces": [{"type": name} for name in gvisor.namespaces]},
    }
    return msgspec.json.encode(config)


def memory_of(first: int, folders: tuple[str, ...]) -> int:
    """What gVisor and its programs have in memory. The memory of all programs is one file of gVisor's, which is mapped
    by several processes: its size counts, and not how often it is mapped."""
    size, files = 0, set[tuple[int, int]]()
    for pid in processes_of(first):
        size += status_bytes(pid, _OWN)
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                size += _file_size(f"/proc/{pid}/fd/{fd}", files)
    for folder in folders:
        with suppress(OSError):
            size += held_in(folder)
    return size


def _file_size(path: str, seen: set[tuple[int, int]]) -> int:
    """What a file that has no name holds in memory; 0 where it was seen already."""
    with suppress(OSError):
        if os.readlink(path).startswith("/memfd:"):
            file = os.stat(path)
            if (file.st_dev, file.st_ino) not in seen:
                seen.add((file.st_dev, file.st_ino))
                return file.st_blocks * 512
    return 0


def without(gvisor: Gvisor, hole: str, secret: str = "") -> Gvisor:
    """The same with a hole, for the suite that must find it."""
    holes = {
        "seccomp": {"seccomp": None},
        "network": {
            "isolates": (*ISOLATES, "--share-net"),
            "namespaces": NAMESPACES[:-1],
            "flags": (*(flag for flag in FLAGS if "network" not in flag), "--network=host"),
        },
        "environment": {"environment": {"SECRET": secret}},
        "capabilities": {"keeps": ("CAP_SYS_ADMIN", "CAP_CHOWN")},
        "bind": {"binds": ((secret, "/mnt/host"),)},
    }
    return replace(gvisor, **holes[hole])  # type: ignore[arg-type]
