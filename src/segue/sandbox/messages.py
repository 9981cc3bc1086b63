"""What do a server and its keeper say to each other?

A connection has one request; closing it takes the request back. Frames are those of `segue.framing`. A request is
answered by an `Answer` or a `Failure`; a command first by any number of `Printed`, a file by any number of `Piece`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from segue.isolation.limits import HeldBy

ContainerStatus = Literal["active", "expired"]
# How the contract writes them; in bytes.
MEMORY_LIMITS = {f"{size}g": size << 30 for size in (1, 4, 16, 64)}
IDLE_MINUTES = 20
NAME_CHARS_MAX = 256


class KeeperOrders(Struct, frozen=True):
    """What the keeper is started with; there is no secret in it."""

    socket: str
    # Below it are the folders of all sandboxes of this machine's user.
    folder: str
    root: str
    containers_max: int
    # A row of `adapters.py`.
    adapter: str = "bwrap"
    # Where the program of gVisor is; empty: where programs of the system are.
    runsc: str = ""
    has_cgroups: bool = True
    # What containers may reach of the network; nothing: there is none.
    domains: tuple[str, ...] = ()
    # How long a container may be idle, where a request does not say.
    idle_s: float = IDLE_MINUTES * 60.0


class KeeperReady(Struct, frozen=True):
    """The keeper's first line: a reason where it cannot make a sandbox."""

    error: str = ""
    isolation: str = ""
    held_by: HeldBy = "watcher"
    is_misconfigured: bool = False
    # What the operator should know, though sandboxes can be made.
    warning: str = ""


class ContainerSpec(Struct, frozen=True):
    """What a new container is to be."""

    name: str = ""
    memory_limit: str = "1g"
    idle_s: float | None = None
    # Whether `/mnt/data` is in memory, because no content of the turn may touch a disk.
    is_volatile: bool = False
    # What it may reach of the network: hosts, and `*.` with a name for all below it.
    domains: tuple[str, ...] = ()


class SkillEntry(Struct, frozen=True):
    """A skill of a container: its folder, what it is for, and where its instructions are."""

    folder: str
    name: str
    description: str
    path: str


class MakeContainer(Struct, frozen=True, tag=True):
    """Make a container with this id; it is there at once, and its sandbox soon."""

    owner: str
    container_id: str
    spec: ContainerSpec


class FindContainer(Struct, frozen=True, tag=True):
    owner: str
    container_id: str
    # Whether being asked for keeps it alive.
    refreshes: bool = True


class ListContainers(Struct, frozen=True, tag=True):
    owner: str


class DeleteContainer(Struct, frozen=True, tag=True):
    owner: str
    container_id: str
    # Only if no command has run in it, and nobody has asked for it since it was made.
    unless_used: bool = False


class RunCommand(Struct, frozen=True, tag=True):
    """Run a command of the shell, or Python code in the one interpreter of the container."""

    owner: str
    container_id: str
    command: str
    s_max: float
    chars_max: int
    kind: Literal["shell", "python"] = "shell"


class ListContainerFiles(Struct, frozen=True, tag=True):
    owner: str
    container_id: str


class ReadContainerFile(Struct, frozen=True, tag=True):
    owner: str
    container_id: str
    path: str


class WriteContainerFile(Struct, frozen=True, tag=True):
    """Followed by any number of `Piece` from the client, an empty one last."""

    owner: str
    container_id: str
    path: str
    # Whether it belongs to a skill: then it is not in `/mnt/data`.
    is_skill: bool = False


class AddSkill(Struct, frozen=True, tag=True):
    """All files of a skill are written: from now on the container has it."""

    owner: str
    container_id: str
    skill: SkillEntry


class DeleteContainerFile(Struct, frozen=True, tag=True):
    owner: str
    container_id: str
    path: str


class TakeUsage(Struct, frozen=True, tag=True):
    """What all owners have used since it was last taken; whoever takes it writes it down."""


KeeperRequest = (
    MakeContainer
    | TakeUsage
    | FindContainer
    | ListContainers
    | DeleteContainer
    | RunCommand
    | ListContainerFiles
    | ReadContainerFile
    | WriteContainerFile
    | AddSkill
    | DeleteContainerFile
)


class Container(Struct, frozen=True):
    """A container as its owner may see it."""

    id: str
    name: str
    created_at: float
    last_active_at: float
    idle_s: float
    status: ContainerStatus
    memory_limit: str
    isolation: str
    held_by: HeldBy
    is_volatile: bool
    cpu_s: float = 0.0
    domains: tuple[str, ...] = ()
    # What went to the network, and came from there.
    sent_bytes: int = 0
    received_bytes: int = 0
    # What it holds in memory now, where it runs.
    memory_bytes: int = 0
    skills: list[SkillEntry] = []


class OwnerUsage(Struct, frozen=True):
    """What the containers of an owner have used."""

    owner: str
    container_s: float = 0.0
    cpu_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0


class FileEntry(Struct, frozen=True):
    """A file below `/mnt/data`."""

    path: str
    size: int
    changed_at: float
    # Whether the client has put it there.
    is_uploaded: bool = False


class CommandEnd(Struct, frozen=True):
    """How a command has ended; no code: it took too long."""

    exit_code: int | None
    # What is shown of its output after the deltas: a note and the end.
    stdout: str = ""
    stderr: str = ""
    # All that it printed.
    printed_bytes: int = 0
    # Why it was stopped, where it did not end by itself in time.
    note: str = ""
    # The pictures that Python code has made, by their names below `/mnt/data`; as the sandbox says.
    pictures: list[str] = []


class Printed(Struct, frozen=True, tag=True):
    """What a command has printed since the last one."""

    stdout: str = ""
    stderr: str = ""


class FilePiece(Struct, frozen=True, tag=True):
    """Some bytes of a file."""

    data: bytes


class KeeperAnswer(Struct, frozen=True, tag=True):
    """What was asked for."""

    containers: list[Container] = []
    files: list[FileEntry] = []
    outcome: CommandEnd | None = None
    usage: list[OwnerUsage] = []
    # How many containers are alive, and what they are.
    alive: int = 0
    isolation: str = ""
    held_by: str = ""


class KeeperFailure(Struct, frozen=True, tag=True):
    """Why it could not be done: a code of docs/errors.md, and words."""

    code: Literal[
        "container_not_found",
        "container_expired",
        "container_failed",
        "too_many_containers",
        "container_file_not_found",
        "invalid_value",
        "container_full",
    ]
    message: str


KeeperReply = Printed | FilePiece | KeeperAnswer | KeeperFailure
