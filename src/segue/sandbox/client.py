"""How does a server reach its keeper? Starts it, asks it, and puts its answers into the words of the API.

The keeper is started with an empty environment and ends when this process does. Where it has ended by itself, it is
started again; the containers that it held are gone then. Workers of one parent share the parent's.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from segue.errors import (
    ApiError,
    InvalidRequest,
    Misconfigured,
    NotFound,
    Refused,
    TooMany,
    Unavailable,
)
from segue.framing import CONNECTION_LOST, read_frame, write_frame
from segue.sandbox.folders import own_folder
from segue.sandbox.messages import (
    AddSkill,
    CommandEnd,
    Container,
    ContainerSpec,
    DeleteContainer,
    DeleteContainerFile,
    FileEntry,
    FilePiece,
    FindContainer,
    KeeperAnswer,
    KeeperFailure,
    KeeperOrders,
    KeeperReady,
    KeeperReply,
    KeeperRequest,
    ListContainerFiles,
    ListContainers,
    MakeContainer,
    Printed,
    ReadContainerFile,
    RunCommand,
    SkillEntry,
    TakeUsage,
    WriteContainerFile,
)

log = logging.getLogger(__name__)

PAUSE_S = 1.0
# An attribute of a process (prctl(2)).
DUMPABLE = 4
# What the keeper may take to end in order.
CLOSE_S_MAX = 3.0
PIECE_BYTES = 1024 * 1024
_reply: msgspec.msgpack.Decoder[KeeperReply] = msgspec.msgpack.Decoder(KeeperReply)
_ready: msgspec.json.Decoder[KeeperReady] = msgspec.json.Decoder(KeeperReady)


# Writes some bytes of a file.
WritePiece = Callable[[bytes], Awaitable[None]]
NoteCommand = Callable[[str, str, int | None, int, float], None]


def close_to_same_user() -> None:
    """No other process of this user, the keeper among them, may look into this one from here on: not into its memory,
    its environment or its open files. Root still may."""
    ctypes.CDLL(None).prctl(DUMPABLE, 0, 0, 0, 0)


class KeeperProcess:
    """The keeper of this machine, as a child of this process."""

    def __init__(
        self,
        root: str,
        containers_max: int,
        *,
        adapter: str = "bwrap",
        runsc: str = "",
        domains: tuple[str, ...] = (),
        has_cgroups: bool = True,
    ) -> None:
        folder = Path(tempfile.gettempdir(), f"segue-sandboxes-{os.geteuid()}")
        # For this user alone; a keeper that starts later removes it, if this process is killed.
        self._folder = own_folder(folder, 0o700)
        self.socket = str(self._folder / "keeper")
        self._orders = KeeperOrders(
            socket=self.socket,
            folder=str(folder),
            root=root and str(Path(root).absolute()),
            containers_max=containers_max,
            adapter=adapter,
            # The keeper has another working directory.
            runsc=runsc and str(Path(runsc).absolute()),
            domains=domains,
            has_cgroups=has_cgroups,
        )
        self.adapter = adapter
        self.ready = KeeperReady()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it has tried a sandbox; refused with the reason where none can be made."""
        Path(self.socket).unlink(missing_ok=True)
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", "-m", "segue.sandbox.keeper"],
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the server, which then ends it.
            process_group=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        ready = _ready.decode(line) if line else KeeperReady("the keeper ended at its start")
        if ready.error:
            self._end()
            if ready.is_misconfigured:
                raise Misconfigured(ready.error)
            raise Misconfigured(f"environment: no sandbox can be made here: {ready.error}")
        self.ready = ready
        if ready.warning:
            log.warning("environment: %s", ready.warning)

    async def keep_running(self) -> None:
        """Start it again whenever it has ended."""
        while True:
            process = self._process
            if process is not None:
                status = await asyncio.to_thread(process.wait)
                if process is not self._process:
                    return
                _release(process)
                log.error("the keeper of sandboxes ended with status %d; starting it again", status)
            try:
                await asyncio.to_thread(self.start)
            except Misconfigured as error:
                log.error("%s; trying again in %g s", error, PAUSE_S)
                self._process = None
                await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """End it, and with it all sandboxes."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _release(process)
        try:
            process.wait(CLOSE_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _release(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes to a keeper; it ends when it notices."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


class KeeperClient:
    """Asks the keeper."""

    def __init__(self, socket: str, domains: tuple[str, ...] = ()) -> None:
        self.socket = socket
        # What the operator allows containers to reach.
        self.domains = domains
        # Called after each command with its owner, its container, its exit code, how much it printed and how long it
        # took; not with its text.
        self.note_command: NoteCommand = lambda owner, container_id, code, size, took_s: None

    async def create(self, owner: str, container_id: str, spec: ContainerSpec) -> Container:
        return (await self._ask(MakeContainer(owner, container_id, spec))).containers[0]

    async def find(self, owner: str, container_id: str, *, refreshes: bool = True) -> Container:
        return (await self._ask(FindContainer(owner, container_id, refreshes))).containers[0]

    async def list_all(self, owner: str) -> list[Container]:
        return (await self._ask(ListContainers(owner))).containers

    async def delete(self, owner: str, container_id: str, *, unless_used: bool = False) -> None:
        await self._ask(DeleteContainer(owner, container_id, unless_used))

    async def delete_all(self, owner: str) -> None:
        """Delete every container of this owner."""
        for container in await self.list_all(owner):
            await self.delete(owner, container.id)

    async def take_usage(self) -> KeeperAnswer:
        """What all owners have used since this was last asked, and how many containers are alive."""
        return await self._ask(TakeUsage())

    async def list_files(self, owner: str, container_id: str) -> list[FileEntry]:
        return (await self._ask(ListContainerFiles(owner, container_id))).files

    async def delete_file(self, owner: str, container_id: str, path: str) -> None:
        await self._ask(DeleteContainerFile(owner, container_id, path))

    async def add_skill(self, owner: str, container_id: str, skill: SkillEntry) -> None:
        await self._ask(AddSkill(owner, container_id, skill))

    async def run(self, request: RunCommand) -> AsyncGenerator[Printed | CommandEnd, None]:
        """What a command prints, and last how it has ended. Closing this stops the command."""
        async with aclosing(self._replies(request)) as replies:
            async for reply in replies:
                if isinstance(reply, Printed):
                    yield reply
                elif isinstance(reply, KeeperAnswer) and reply.outcome is not None:
                    yield reply.outcome

    async def read_file(
        self, owner: str, container_id: str, path: str
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a file."""
        async with aclosing(self._replies(ReadContainerFile(owner, container_id, path))) as replies:
            async for reply in replies:
                if isinstance(reply, FilePiece):
                    yield reply.data

    async def write_file(self, owner: str, container_id: str, path: str, data: bytes) -> None:
        """Put a file there."""
        async with self.writing(owner, container_id, path) as write:
            await write(data)

    @asynccontextmanager
    async def writing(
        self, owner: str, container_id: str, path: str, *, is_skill: bool = False
    ) -> AsyncIterator[WritePiece]:
        """A file that is written while inside; it is whole on the way out."""
        async with self._connected() as (reader, writer):
            write_frame(writer, WriteContainerFile(owner, container_id, path, is_skill))

            async def write(data: bytes) -> None:
                # A keeper that refuses says why and closes the connection: its answer is read at the end.
                with suppress(OSError):
                    for start in range(0, len(data), PIECE_BYTES):
                        write_frame(writer, FilePiece(data[start : start + PIECE_BYTES]))
                        await writer.drain()

            yield write
            with suppress(OSError):
                write_frame(writer, FilePiece(b""))
                await writer.drain()
            _checked(_reply.decode(await read_frame(reader)))

    async def _ask(self, request: KeeperRequest) -> KeeperAnswer:
        async with self._connected() as (reader, writer):
            write_frame(writer, request)
            await writer.drain()
            reply = _checked(_reply.decode(await read_frame(reader)))
            assert isinstance(reply, KeeperAnswer)
            return reply

    async def _replies(self, request: KeeperRequest) -> AsyncGenerator[KeeperReply, None]:
        async with self._connected() as (reader, writer):
            write_frame(writer, request)
            await writer.drain()
            while True:
                reply = _checked(_reply.decode(await read_frame(reader)))
                yield reply
                if isinstance(reply, KeeperAnswer):
                    return

    @asynccontextmanager
    async def _connected(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
            yield reader, writer
        except CONNECTION_LOST:
            message = "The keeper of sandboxes does not answer; it is being started again."
            raise Unavailable(message, code="container_failed") from None
        finally:
            if writer is not None:
                writer.close()


def _checked(reply: KeeperReply) -> KeeperReply:
    if isinstance(reply, KeeperFailure):
        _raise(reply)
    return reply


def _raise(failure: KeeperFailure) -> NoReturn:
    """A failure as clients of the API see it."""
    message, code = failure.message, failure.code
    error: ApiError
    match code:
        case "container_not_found" | "container_file_not_found":
            error = NotFound(message, code=code)
        case "container_expired" | "invalid_value":
            error = InvalidRequest(message, code=code)
        case "container_full":
            error = Refused(message, status=413, code=code)
        case "too_many_containers":
            error = TooMany(message, code=code, wait_s=60.0)
        case _:
            error = Unavailable(message, code=code)
    raise error
