"""Which containers does the keeper hold, whose are they, and when do they end?

A container is an id with an owner, a sandbox that is started beside the first request for it, and a folder. It ends
when it has not been used for some time, when its owner deletes it, or when a limit is reached; its name is known for a
while after that. A spare sandbox is kept ready, of the kind that was asked for last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
from msgspec.structs import astuple

from segue.aio import spawn
from segue.egress.doors import FORWARDER, Door, Doors
from segue.isolation import channel
from segue.isolation.adapter import Adapter, Sandbox, SandboxFailed, SandboxSpec
from segue.isolation.limits import (
    MIB,
    WATCH_S,
    Cgroups,
    Limits,
    threads_of,
    unlinked_bytes,
)
from segue.isolation.users import uid_of
from segue.sandbox.folders import Folders, UploadRoom
from segue.sandbox.messages import (
    MEMORY_LIMITS,
    NAME_CHARS_MAX,
    CommandEnd,
    Container,
    ContainerSpec,
    KeeperFailure,
    MakeContainer,
    OwnerUsage,
    Printed,
    RunCommand,
    SkillEntry,
)
from segue.sandbox.output import Excerpt

log = logging.getLogger(__name__)

# An owner may not take all places of the machine.
OWNER_SHARE, OWNER_MIN = 4, 4
# How many names of ended containers are known, and how long.
ENDED_MAX, ENDED_S = 1_000, 86_400.0
# Whatever the client says of idle time.
LIFE_S_MAX = 86_400.0
# What is shown leaves at the latest after this time, or when it is so much.
SHOWN_S, SHOWN_CHARS = 0.05, 8_192
# How long a command may take to end after it was asked to.
TERMINATE_S = 1.0
DISK_S = 0.5
# The next sandbox is made a moment later, so that it does not slow down the first command of this one.
SPARE_S = 0.1
COMMANDS_MAX = 16
# Pictures of one piece of Python code that a model and its client are shown.
PICTURES_MAX = 16
INTERPRETER = Path(__file__).with_name("interpreter.py")
KEPT = "The variables are kept."
LOST = "The Python process ended: its variables are lost, and the next code starts with none."
KILLED = "It was killed, as code is that uses more memory than its container has."
COMMAND_BYTES_MAX = 120_000


UNUSED = OwnerUsage("")


class KeeperFault(Exception):
    """A request that cannot be done, in the words of the protocol."""

    def __init__(self, failure: KeeperFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def not_found(container_id: str) -> KeeperFault:
    """The same for a container that is absent and for another owner's."""
    message = f"Container with id '{container_id[:NAME_CHARS_MAX]}' not found."
    return KeeperFault(KeeperFailure(code="container_not_found", message=message))


@dataclass(slots=True)
class Command:
    """A command that runs: what it has printed that was not sent yet."""

    excerpts: dict[bytes, Excerpt]
    shown: dict[bytes, str] = field(
        default_factory=lambda: {channel.STDOUT: "", channel.STDERR: ""}
    )
    printed_bytes: int = 0
    exit_code: int | None = None
    # Of Python code that is done: its pictures. None where its process ended before, and its variables with it.
    pictures: list[str] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> Printed | None:
        """What may be sent now."""
        out, err = self.shown[channel.STDOUT], self.shown[channel.STDERR]
        self.shown = {channel.STDOUT: "", channel.STDERR: ""}
        return Printed(out, err) if out or err else None


class LiveSandbox:
    """A sandbox with its folder, limits and commands."""

    def __init__(
        self,
        sandbox: Sandbox,
        limits: Limits,
        folder: Path,
        folders: Folders,
        *,
        is_volatile: bool,
    ) -> None:
        self.sandbox = sandbox
        self.folder = folder
        self._folders = folders
        self.is_volatile = is_volatile
        self.limits = limits
        # For files that clients put there.
        self.room = UploadRoom(folders, sandbox.data, limits.disk_bytes, limits.files)
        self.ended = asyncio.Event()
        self.reason = "The sandbox has ended."
        self.cpu_s = 0.0
        # The way to the network, if it has one.
        self.door: Door | None = None
        self._numbers = count(1)
        self.commands: dict[int, Command] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching = self._counting = False
        # The last command, and whether nothing runs inside since it has ended.
        self._last = 0
        self._is_idle = True
        # Code runs one after the other in the one interpreter, whose source is sent with the first.
        self.coding = asyncio.Lock()
        self._has_source = False
        self._closing: asyncio.Task[None] | None = None
        spawn(self._read(), self._tasks)

    @property
    def is_busy(self) -> bool:
        return bool(self.commands)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs inside, not even in the background."""
        return self._is_idle and not self.commands

    def start(self, request: RunCommand) -> tuple[int, Command]:
        """Begin a command."""
        excerpts = {kind: Excerpt(request.chars_max) for kind in (channel.STDOUT, channel.STDERR)}
        number, command = next(self._numbers), Command(excerpts)
        self.commands[number] = command
        self._last, self._is_idle = number, False
        kind = channel.RUN
        if request.kind == "python":
            kind = channel.CODE
            if not self._has_source:
                self._has_source = True
                self.sandbox.send(channel.SOURCE, 0, INTERPRETER.read_bytes())
        self.sandbox.send(kind, number, request.command.encode())
        if not self._watching:
            self._watching = True
            spawn(self._hold_limits(), self._tasks)
        if not self._counting and not self.is_volatile:
            self._counting = True
            spawn(self._hold_disk(), self._tasks)
        return number, command

    async def stop(self, number: int) -> None:
        """End a command that runs: asked, then killed; the sandbox with it, if it does not end."""
        for how in (channel.TERMINATE, channel.KILL):
            if number not in self.commands or self.ended.is_set():
                return
            command = self.commands[number]
            self.sandbox.send(how, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(TERMINATE_S):
                    while number in self.commands and not self.ended.is_set():
                        command.changed.clear()
                        await command.changed.wait()
        if number in self.commands:
            await self.close("A command could not be stopped, and its container was closed.")

    async def close(self, reason: str = "The container was deleted.") -> None:
        """Kill everything and remove the folder; the first reason counts."""
        if self._closing is None:
            self.reason = reason
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def connect(self, door: Door) -> None:
        """Let programs inside reach the network through a door."""
        self.door = door
        self.sandbox.send(channel.NETWORK, 0, FORWARDER.read_bytes())

    def cpu_seconds(self) -> float:
        """CPU time of all that has run in it."""
        if self._watching and not self.ended.is_set():
            self.cpu_s = max(self.cpu_s, self.sandbox.cpu_seconds())
        return self.cpu_s

    async def _close(self) -> None:
        if self.door is not None:
            self.door.close()
        self.cpu_s = max(self.cpu_s, self.sandbox.cpu_seconds())
        self.ended.set()
        for command in self.commands.values():
            command.changed.set()
        await self.sandbox.close()
        self._folders.remove(self.folder)

    async def _read(self) -> None:
        pace = channel.ReadingPace()
        try:
            while not self.ended.is_set():
                frame = await channel.read_frame(self.sandbox.reader)
                self._on_frame(frame)
                await pace.hold(len(frame.body))
        except channel.BadFrame as error:
            await self.close(f"The sandbox was closed: {error}.")
        except (OSError, asyncio.IncompleteReadError):
            await self.close(
                "The sandbox ended: it used more memory than it may, or a process ended it."
            )

    def _on_frame(self, frame: channel.SandboxFrame) -> None:
        if frame.kind == channel.IDLE:
            self._is_idle = frame.number == self._last
            return
        command = self.commands.get(frame.number)
        if command is None:
            return
        if frame.kind == channel.EXITED:
            command.exit_code = frame.exit_code
            del self.commands[frame.number]
        elif frame.kind == channel.DONE:
            command.pictures = _names(frame.body)
        elif frame.kind in command.excerpts:
            command.printed_bytes += len(frame.body)
            command.shown[frame.kind] += command.excerpts[frame.kind].feed(frame.body)
        command.changed.set()

    async def _hold_limits(self) -> None:
        """While something runs inside: hold the limits that the kernel does not hold."""
        try:
            while not self.ended.is_set():
                pid = self.sandbox.pid
                is_watched = not self.sandbox.spec.group.folders
                if is_watched and self.sandbox.memory_bytes() > self.limits.memory_bytes:
                    await self.close("The container used more memory than it may, and was closed.")
                    return
                if is_watched and threads_of(pid) > self.limits.processes:
                    await self.close(
                        "The container had more processes than it may, and was closed."
                    )
                    return
                if self.is_idle:
                    return
                await asyncio.sleep(WATCH_S)
        finally:
            self._watching = False
            if not self.ended.is_set():
                self.cpu_s = self.sandbox.cpu_seconds()

    async def _hold_disk(self) -> None:
        """While something runs inside, and once more: hold what is on the disk."""
        data, pid = self.sandbox.data, self.sandbox.pid
        try:
            while not self.ended.is_set():
                began = time.monotonic()
                size, files = await self._folders.count(data, self.limits.files)
                size += await asyncio.to_thread(unlinked_bytes, pid, data)
                if size > self.limits.disk_bytes or files > self.limits.files:
                    await self.close(
                        "The container used more disk space than it may, and was closed."
                    )
                if self.is_idle:
                    return
                await asyncio.sleep(DISK_S + 4 * (time.monotonic() - began))
        finally:
            self._counting = False


def _names(body: bytes) -> list[str]:
    """The names of pictures, as the sandbox says: nothing else is taken from there."""
    try:
        return msgspec.json.decode(body, type=list[str])[:PICTURES_MAX]
    except msgspec.MsgspecError:
        return []


@dataclass(slots=True)
class Held:
    """A container: whose it is, and its place once it is there."""

    owner: str
    id: str
    spec: ContainerSpec
    created_at: float
    last_active_at: float
    starting: asyncio.Task[LiveSandbox]
    # Paths that the client has uploaded.
    uploaded: set[str] = field(default_factory=set)
    # How many of its files are on their way in or out.
    transfers: int = 0
    # By their folders.
    skills: dict[str, SkillEntry] = field(default_factory=dict)
    # Whether a command was run in it, or somebody has asked for it since it was made.
    is_used: bool = False
    ended_at: float | None = None
    reason: str = ""
    # What of its use was taken already.
    used: OwnerUsage = UNUSED

    @property
    def place(self) -> LiveSandbox | None:
        """Where it runs, if it does."""
        task = self.starting
        is_there = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_there else None


class Containers:
    """All containers of a keeper."""

    def __init__(
        self,
        adapter: Adapter,
        cgroups: Cgroups,
        folder: Path,
        *,
        containers_max: int,
        idle_s: float,
        doors: Doors | None = None,
        limits_of: Callable[[int], Limits] = Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._adapter = adapter
        self.isolation, self.warning = adapter.isolation, adapter.warning
        self.held_by = cgroups.held_by
        self._cgroups = cgroups
        self._folder = folder
        self._max = containers_max
        self._owner_max = max(OWNER_MIN, containers_max // OWNER_SHARE)
        self._idle_s = idle_s
        self._doors = doors
        # The limits of a sandbox, by its memory in bytes.
        self._limits_of = limits_of
        self._clock = clock
        self._folders = Folders()
        self._numbers = count(1)
        self._held: dict[str, Held] = {}
        # Of containers that were deleted since the use was last taken.
        self._used: list[OwnerUsage] = []
        self._spare: tuple[tuple[str, bool], asyncio.Task[LiveSandbox]] | None = None

    # --- finding and making ---

    def create(self, request: MakeContainer) -> Container:
        """A new container; its sandbox is started beside."""
        spec, owner = request.spec, request.owner
        # One that could not be started says so where it is used, and takes no place.
        alive = [
            each
            for each in self._held.values()
            if self._is_alive(each) and not (each.starting.done() and _has_failed(each.starting))
        ]
        own = sum(each.owner == owner for each in alive)
        if len(alive) >= self._max or own >= self._owner_max:
            whose = "This machine has" if len(alive) >= self._max else "You have"
            message = f"{whose} {len(alive) if len(alive) >= self._max else own} containers, which is the limit."
            message += " Delete a container, or wait until one expires."
            raise KeeperFault(KeeperFailure(code="too_many_containers", message=message))
        if MEMORY_LIMITS[spec.memory_limit] > memory_max():
            fitting = [name for name, size in MEMORY_LIMITS.items() if size <= memory_max()]
            most = fitting[-1] if fitting else "none"
            message = f"'memory_limit' is {spec.memory_limit}; this server has room for {most}."
            raise KeeperFault(KeeperFailure(code="invalid_value", message=message))
        now = self._clock()
        starting = self._place_for(spec)
        if spec.domains:
            starting = asyncio.create_task(self._connected(starting, request))
        held = Held(owner, request.container_id, spec, now, now, starting)
        self._held[request.container_id] = held
        return self.about(held)

    def _place_for(self, spec: ContainerSpec) -> asyncio.Task[LiveSandbox]:
        kind = (spec.memory_limit, spec.is_volatile)
        found, is_fitting = self._spare, False
        if found is not None:
            is_fitting = found[0] == kind
            if is_fitting and found[1].done() and not _has_failed(found[1]):
                self._spare = kind, asyncio.create_task(self._start(*kind, after_s=SPARE_S))
                return found[1]
            if not is_fitting or found[1].done():
                spawn(_close(found[1]), _closing)
                is_fitting = False
        if not is_fitting:
            self._spare = kind, asyncio.create_task(self._start(*kind, after_s=SPARE_S))
        return asyncio.create_task(self._start(*kind))

    async def _connected(
        self, starting: asyncio.Task[LiveSandbox], request: MakeContainer
    ) -> LiveSandbox:
        """The sandbox with a door to the network."""
        place = await starting
        try:
            if self._doors is None:
                raise SandboxFailed("containers of this server have no network")
            folder, uid = place.folder / "door", place.sandbox.spec.uid
            place.connect(self._doors.open(folder, request.container_id, request.spec.domains, uid))
        except (SandboxFailed, OSError) as error:
            await place.close()
            raise SandboxFailed(f"no way to the network: {error}") from error
        return place

    async def _start(
        self, memory_limit: str, is_volatile: bool, after_s: float = 0.0
    ) -> LiveSandbox:
        await asyncio.sleep(after_s)
        await self._folders.room()
        number = next(self._numbers)
        limits = self._limits_of(MEMORY_LIMITS[memory_limit])
        held = self._adapter.around(limits)
        folder = self._folder / str(number)
        uid = uid_of(number) if self._adapter.has_own_uids else None
        try:
            data, door = _folders(folder, uid)
            group = self._cgroups.make(str(number), held)
            place = None if is_volatile else data
            # One mount less for those that never need it.
            door = "" if self._doors is None else door
            sandbox = await self._adapter.start(SandboxSpec(place, limits, group, uid, door))
        except BaseException as error:
            with suppress(FileNotFoundError):
                self._folders.remove(folder)
            if isinstance(error, OSError):
                raise SandboxFailed(f"no place for a sandbox: {error}") from error
            raise
        return LiveSandbox(sandbox, held, folder, self._folders, is_volatile=is_volatile)

    def find(self, owner: str, container_id: str, *, refreshes: bool = True) -> Held:
        """The owner's container, alive or not."""
        held = self._held.get(container_id)
        if held is None or held.owner != owner:
            raise not_found(container_id)
        if self._is_alive(held) and refreshes:
            held.last_active_at = self._clock()
        return held

    def refresh(self, held: Held) -> None:
        """The container was in use until now."""
        held.last_active_at = self._clock()

    async def place(
        self, owner: str, container_id: str, *, shows_reason: bool = False
    ) -> tuple[Held, LiveSandbox]:
        """The sandbox of a container that is alive."""
        held = self.find(owner, container_id)
        if self._is_alive(held):
            try:
                place = await asyncio.shield(held.starting)
            except SandboxFailed as error:
                if shows_reason:
                    raise
                held.ended_at, held.reason = self._clock(), str(error)
                log.warning("container %s could not be started: %s", container_id, error)
                failure = KeeperFailure(
                    code="container_failed", message="The container could not be started."
                )
                raise KeeperFault(failure) from None
            if not place.ended.is_set():
                return held, place
        name = container_id[:NAME_CHARS_MAX]
        message = f"Container with id '{name}' has expired. {held.reason}".strip()
        raise KeeperFault(KeeperFailure(code="container_expired", message=message))

    def _take(self, held: Held) -> OwnerUsage:
        """What a container has used since this was last asked."""
        now = self._clock() if self._is_alive(held) else held.ended_at or self._clock()
        place = held.place
        door = None if place is None else place.door
        total = OwnerUsage(
            held.owner,
            now - held.created_at,
            0.0 if place is None else place.cpu_seconds(),
            0 if door is None else door.sent_bytes,
            0 if door is None else door.received_bytes,
        )
        before, held.used = held.used, total
        return OwnerUsage(
            held.owner,
            max(0.0, total.container_s - before.container_s),
            max(0.0, total.cpu_s - before.cpu_s),
            total.sent_bytes - before.sent_bytes,
            total.received_bytes - before.received_bytes,
        )

    def take_usage(self) -> tuple[list[OwnerUsage], int]:
        """What all containers have used since this was last asked; and how many are alive."""
        parts, self._used = self._used, []
        parts += map(self._take, self._held.values())
        # The container that was tried at the start has no owner.
        used = [part for part in parts if part.owner and any(astuple(part)[1:])]
        return used, sum(map(self._is_alive, self._held.values()))

    def list(self, owner: str) -> list[Container]:
        """The owner's containers, the newest first."""
        own = [self.about(held) for held in self._held.values() if held.owner == owner]
        return own[::-1]

    async def delete(self, owner: str, container_id: str) -> None:
        """End a container; its name is forgotten."""
        held = self.find(owner, container_id)
        del self._held[container_id]
        await _close(held.starting)
        self._used.append(self._take(held))

    def about(self, held: Held) -> Container:
        """What its owner may see of it."""
        is_alive = self._is_alive(held)
        door = None if held.place is None else held.place.door
        return Container(
            id=held.id,
            name=held.spec.name,
            created_at=held.created_at,
            last_active_at=held.last_active_at,
            idle_s=self._idle(held),
            status="active" if is_alive else "expired",
            memory_limit=held.spec.memory_limit,
            isolation=self.isolation,
            held_by=self._cgroups.held_by,
            is_volatile=held.spec.is_volatile,
            cpu_s=0.0 if held.place is None else held.place.cpu_seconds(),
            memory_bytes=held.place.sandbox.memory_bytes() if is_alive and held.place else 0,
            domains=held.spec.domains,
            sent_bytes=0 if door is None else door.sent_bytes,
            received_bytes=0 if door is None else door.received_bytes,
            skills=list(held.skills.values()),
        )

    # --- ending ---

    def _idle(self, held: Held) -> float:
        return self._idle_s if held.spec.idle_s is None else min(held.spec.idle_s, LIFE_S_MAX)

    def _is_alive(self, held: Held) -> bool:
        if held.ended_at is not None:
            return False
        if held.place is not None and held.place.ended.is_set():
            held.ended_at, held.reason = self._clock(), held.place.reason
            return False
        return True

    async def sweep(self) -> None:
        """End what was not used for too long, and forget what ended long ago."""
        now = self._clock()
        for held in list(self._held.values()):
            is_busy = held.place is not None and held.place.is_busy
            is_idle = now - held.last_active_at > self._idle(held) and not is_busy
            if self._is_alive(held) and (is_idle or now - held.created_at > LIFE_S_MAX):
                held.ended_at, held.reason = now, "It was not used for too long."
                await _close(held.starting, held.reason)
        ended = [held for held in self._held.values() if held.ended_at is not None]
        for held in ended:
            is_old = now - (held.ended_at or now) > ENDED_S
            if is_old or len(ended) - ENDED_MAX > 0:
                del self._held[held.id]
                ended = ended[1:]

    def remove_later(self, folder: Path) -> None:
        """Remove what dead containers have left."""
        self._folders.remove(folder)

    async def close(self) -> None:
        """End everything."""
        tasks = [held.starting for held in self._held.values()]
        tasks += [] if self._spare is None else [self._spare[1]]
        await asyncio.gather(*map(_close, tasks))
        await self._folders.close()


def _folders(folder: Path, uid: int | None) -> tuple[str, str]:
    """The folders of a new sandbox: for its data, and for its door. They are in one that nobody but this user may
    enter, because the sandbox may open that of its data to everybody."""
    data, door = folder / "data", folder / "door"
    for each in (folder, data):
        each.mkdir(mode=0o700)
        if uid is not None:
            os.chown(each, uid, uid)
    door.mkdir(mode=0o711)
    return str(data), str(door)


def _has_failed(task: asyncio.Task[LiveSandbox]) -> bool:
    return task.cancelled() or task.exception() is not None or task.result().ended.is_set()


async def _close(
    task: asyncio.Task[LiveSandbox], reason: str = "The container was deleted."
) -> None:
    """End a sandbox; one that is being started, when it is there."""
    with suppress(SandboxFailed):
        await (await task).close(reason)


_closing: set[asyncio.Task[None]] = set()


def memory_max() -> int:
    """The largest memory limit of a container: half of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# --- commands ---------------------------------------------------------------------------------------


async def run_command(
    place: LiveSandbox, request: RunCommand, send: Callable[[Printed], Awaitable[None]]
) -> CommandEnd:
    """Run a command to its end, its time or its limit; what it prints is handed over meanwhile."""
    if request.kind == "python":
        async with place.coding:
            return await _run_command(place, request, send)
    return await _run_command(place, request, send)


async def _run_command(
    place: LiveSandbox, request: RunCommand, send: Callable[[Printed], Awaitable[None]]
) -> CommandEnd:
    number, command = place.start(request)
    loop = asyncio.get_running_loop()
    until = loop.time() + request.s_max
    note, is_late = "", False
    try:
        while command.exit_code is None and not place.ended.is_set():
            if command.printed_bytes > place.limits.printed_bytes:
                most = place.limits.printed_bytes // MIB
                note = f"It was stopped because it printed more than {most} MiB."
                break
            is_late = loop.time() >= until
            if is_late:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await command.changed.wait()
            command.changed.clear()
            if (printed := command.take()) is not None:
                await send(printed)
                # A moment, so that many short writes are one event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(SHOWN_S):
                        while command.exit_code is None and not place.ended.is_set():
                            if sum(map(len, command.shown.values())) >= SHOWN_CHARS:
                                break
                            await command.changed.wait()
                            command.changed.clear()
    finally:
        await asyncio.shield(place.stop(number))
    rest = command.take() or Printed()
    if place.ended.is_set() and command.exit_code is None:
        note = place.reason
    elif request.kind == "python" and (is_late or note or command.pictures is None):
        why = f"It was interrupted after {request.s_max:g} s." if is_late else note
        why = why or (KILLED if command.exit_code == 137 else "")
        note = f"{why} {LOST if command.pictures is None else KEPT}".strip()
    code = command.exit_code if command.exit_code is not None else 137
    stdout = rest.stdout + command.excerpts[channel.STDOUT].close()
    stderr = rest.stderr + command.excerpts[channel.STDERR].close()
    return CommandEnd(
        None if is_late else code,
        stdout,
        stderr,
        command.printed_bytes,
        note,
        command.pictures or [],
    )
