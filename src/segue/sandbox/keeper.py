"""Who starts sandboxes? A process of its own, without secrets: `python -m segue.sandbox.keeper`.

The server starts it with an empty environment; it has no database, no key and no engine. Its orders come in one line on
standard input, its first answer on standard output says whether a sandbox can be made here. It serves all workers of a
machine over one Unix socket. When standard input ends, the server is gone: the keeper ends at once, and the kernel ends
all sandboxes with it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec

from segue.aio import in_background
from segue.egress.doors import Doors
from segue.errors import Misconfigured
from segue.framing import CONNECTION_LOST, read_frame, write_frame
from segue.isolation.adapter import SandboxFailed
from segue.isolation.adapters import ADAPTERS
from segue.isolation.limits import Cgroups, open_cgroups
from segue.sandbox.beneath import list_files, new_file, plain_file, remove_file
from segue.sandbox.containers import (
    COMMAND_BYTES_MAX,
    COMMANDS_MAX,
    Containers,
    Held,
    KeeperFault,
    LiveSandbox,
    run_command,
)
from segue.sandbox.folders import OLD, group_name, own_folder, remove_folder
from segue.sandbox.messages import (
    AddSkill,
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
    KeeperRequest,
    ListContainerFiles,
    ListContainers,
    MakeContainer,
    Printed,
    ReadContainerFile,
    RunCommand,
    TakeUsage,
    WriteContainerFile,
)

log = logging.getLogger(__name__)

SWEEP_S = 5.0
# After the server has gone: what closing everything in order may take.
CLOSE_S_MAX = 0.8
# What each container holds open here, commands and files included; and everything else.
CONTAINER_FDS, OTHER_FDS = 64, 256
# Files of a container that clients put in or take out at once. Each may be as slow as it likes.
TRANSFERS_MAX = 8
# A client may take its time for a piece of a file, and hold it for as long.
PIECE_BYTES = 64 * 1024
# Files that a list shows, and names that are known as uploaded.
FILES_MAX = UPLOADED_MAX = 10_000

_request: msgspec.msgpack.Decoder[KeeperRequest] = msgspec.msgpack.Decoder(KeeperRequest)


class Keeper:
    """Answers the requests of servers."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One request, until it is answered or its client is gone."""
        try:
            request = _request.decode(await read_frame(reader))
            try:
                if isinstance(request, RunCommand):
                    await self._run(request, reader, writer)
                elif isinstance(request, ReadContainerFile):
                    await self._read_file(request, writer)
                elif isinstance(request, WriteContainerFile):
                    await self._write_file(request, reader)
                    write_frame(writer, KeeperAnswer())
                else:
                    write_frame(writer, await self._answer(request))
            except KeeperFault as fault:
                write_frame(writer, fault.failure)
                await writer.drain()
                # What the client still sends is read: to close before would take the answer away from it.
                while await reader.read(PIECE_BYTES):
                    pass
            await writer.drain()
        except CONNECTION_LOST:
            pass
        finally:
            writer.close()

    async def _answer(
        self,
        request: MakeContainer
        | TakeUsage
        | FindContainer
        | ListContainers
        | DeleteContainer
        | ListContainerFiles
        | AddSkill
        | DeleteContainerFile,
    ) -> KeeperAnswer:
        containers = self._containers
        match request:
            case TakeUsage():
                used, alive = containers.take_usage()
                by = containers.held_by
                return KeeperAnswer(
                    usage=used, alive=alive, isolation=containers.isolation, held_by=by
                )
            case MakeContainer():
                return KeeperAnswer([containers.create(request)])
            case FindContainer(owner=owner, container_id=name, refreshes=refreshes):
                held = containers.find(owner, name, refreshes=refreshes)
                held.is_used = held.is_used or refreshes
                return KeeperAnswer([containers.about(held)])
            case ListContainers(owner=owner):
                return KeeperAnswer(containers.list(owner))
            case DeleteContainer(owner=owner, container_id=name, unless_used=unless_used):
                if not (unless_used and containers.find(owner, name, refreshes=False).is_used):
                    await containers.delete(owner, name)
                return KeeperAnswer()
            case ListContainerFiles(owner=owner, container_id=name):
                held, place = await containers.place(owner, name)
                held.is_used = True
                return KeeperAnswer(files=await asyncio.to_thread(_listed, held, place))
            case AddSkill(owner=owner, container_id=name, skill=skill):
                held, _ = await containers.place(owner, name)
                held.skills[skill.folder] = skill
                return KeeperAnswer()
            case DeleteContainerFile(owner=owner, container_id=name, path=path):
                held, place = await containers.place(owner, name)
                with _file_errors(path), _open_folder(place.sandbox.data) as folder:
                    remove_file(folder, path)
                held.uploaded.discard(path)
                return KeeperAnswer()

    async def _run(
        self, request: RunCommand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._containers.find(request.owner, request.container_id).is_used = True
        held, place = await self._containers.place(request.owner, request.container_id)
        if len(place.commands) >= COMMANDS_MAX:
            message = f"{COMMANDS_MAX} commands run in this container already."
            raise KeeperFault(KeeperFailure(code="too_many_containers", message=message))
        if "\0" in request.command or len(request.command.encode()) > COMMAND_BYTES_MAX:
            message = f"A command has at most {COMMAND_BYTES_MAX} bytes, and none of them is zero."
            raise KeeperFault(KeeperFailure(code="invalid_value", message=message))

        async def send(printed: Printed) -> None:
            write_frame(writer, printed)
            await writer.drain()

        running = asyncio.create_task(run_command(place, request, send))
        # Nothing follows a request: the end of the connection takes it back.
        leaving = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                write_frame(writer, KeeperAnswer(outcome=running.result()))
        finally:
            for task in (running, leaving):
                task.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)
            self._containers.refresh(held)

    async def _read_file(self, request: ReadContainerFile, writer: asyncio.StreamWriter) -> None:
        held, place = await self._containers.place(request.owner, request.container_id)
        with (
            _transfer(held),
            _file_errors(request.path),
            _open_folder(place.sandbox.data) as folder,
            plain_file(folder, request.path) as fd,
        ):
            # No more than it has now: it may grow faster than it is read.
            left = os.fstat(fd).st_size
            while left > 0 and (
                data := await asyncio.to_thread(os.read, fd, min(left, PIECE_BYTES))
            ):
                left -= len(data)
                self._containers.refresh(held)
                write_frame(writer, FilePiece(data))
                await writer.drain()
        write_frame(writer, KeeperAnswer())

    async def _write_file(self, request: WriteContainerFile, reader: asyncio.StreamReader) -> None:
        held, place = await self._containers.place(request.owner, request.container_id)
        is_held = request.is_skill or place.is_volatile
        folder_path = place.sandbox.home if request.is_skill else place.sandbox.data
        # The size of a folder in memory holds it.
        room = nullcontext(_take_nothing) if is_held else place.room.upload(request.path)
        with _transfer(held), _file_errors(request.path), _open_folder(folder_path) as folder:
            async with room as take:
                with new_file(folder, request.path, place.sandbox.spec.uid) as fd:
                    await self._receive(held, reader, fd, take)
        if not request.is_skill:
            while len(held.uploaded) >= UPLOADED_MAX:
                held.uploaded.pop()
            held.uploaded.add(request.path)

    async def _receive(
        self, held: Held, reader: asyncio.StreamReader, fd: int, take: Callable[[int], None]
    ) -> None:
        while data := msgspec.msgpack.decode(await read_frame(reader), type=FilePiece).data:
            take(len(data))
            self._containers.refresh(held)
            await asyncio.to_thread(_write, fd, data)


@contextmanager
def _transfer(held: Held) -> Iterator[None]:
    """One more file goes in or out while inside."""
    if held.transfers >= TRANSFERS_MAX:
        message = f"{TRANSFERS_MAX} files of this container are read or written already."
        raise KeeperFault(KeeperFailure(code="too_many_containers", message=message))
    held.transfers += 1
    try:
        yield
    finally:
        held.transfers -= 1


def _take_nothing(size: int) -> None: ...


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _listed(held: Held, place: LiveSandbox) -> list[FileEntry]:
    with _open_folder(place.sandbox.data) as folder:
        found = list_files(folder, FILES_MAX)
    return [FileEntry(*entry, is_uploaded=entry.path in held.uploaded) for entry in found]


class _open_folder:
    """A folder of a sandbox, open while inside."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._fd

    def __exit__(self, *raised: object) -> None:
        os.close(self._fd)


class _file_errors:
    """What the system says of a file, in the words of the protocol."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                failure = KeeperFailure(code="container_full", message="The container is full.")
                raise KeeperFault(failure) from None
            if error.errno in (errno.ENAMETOOLONG, errno.EINVAL):
                message = (
                    "The name of a file in a container has at most 255 bytes, none of them zero."
                )
                raise KeeperFault(KeeperFailure(code="invalid_value", message=message)) from None
            message = f"The container has no file '{self._path[:256]}', or it is not a plain file."
            raise KeeperFault(
                KeeperFailure(code="container_file_not_found", message=message)
            ) from None


# --- the process --------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(orders: KeeperOrders) -> AsyncIterator[tuple[Containers, Cgroups]]:
    """The containers of a keeper, with a sandbox tried."""
    folder = own_folder(Path(orders.folder))
    adapter = ADAPTERS[orders.adapter](folder, orders.root, orders.runsc)
    cgroups = open_cgroups(group_name(folder)) if orders.has_cgroups else Cgroups()
    doors = None if not orders.domains else Doors(orders.domains)
    if doors is not None and not adapter.has_network:
        message = f"environment_domains: a sandbox of the kind {orders.adapter} has no network."
        raise Misconfigured(message)
    containers = Containers(
        adapter,
        cgroups,
        folder,
        containers_max=orders.containers_max,
        idle_s=orders.idle_s,
        doors=doors,
    )
    for old in folder.parent.glob(f"*{OLD}"):
        containers.remove_later(old)
    try:
        await _probe(containers, adapter.probe)
        async with AsyncExitStack() as stack:
            if doors is not None:
                running = in_background("sandbox_proxy", doors.keep_running)
                await stack.enter_async_context(running)
            yield containers, cgroups
    finally:
        await containers.close()
        cgroups.close()
        remove_folder(folder)


async def _probe(containers: Containers, program: str) -> None:
    """Make a sandbox and see that it holds."""
    containers.create(MakeContainer("", "probe", ContainerSpec()))
    try:
        _, place = await containers.place("", "probe", shows_reason=True)
        seen: list[str] = []

        async def send(printed: Printed) -> None:
            seen.append(printed.stdout + printed.stderr)

        outcome = await run_command(place, RunCommand("", "probe", program, 10.0, 4096), send)
        said = "".join(seen) + outcome.stdout + outcome.stderr
        if said.strip() != "held":
            raise SandboxFailed(f"the sandbox does not hold what it must: {said.strip()!r}")
    finally:
        await containers.delete("", "probe")


async def serve(orders: KeeperOrders) -> None:
    """Keep sandboxes until the server is gone."""
    try:
        async with opened(orders) as (containers, cgroups):
            keeper = Keeper(containers)
            server = await asyncio.start_unix_server(keeper.on_connection, orders.socket)
            ready = KeeperReady(
                isolation=containers.isolation,
                held_by=cgroups.held_by,
                warning=containers.warning,
            )
            _say(ready)
            async with server, in_background("sandbox_expiry", partial(_sweep, containers)):
                await _server_gone()
    except SandboxFailed as error:
        _say(KeeperReady(str(error)))
    except Misconfigured as error:
        _say(KeeperReady(str(error), is_misconfigured=True))


async def _sweep(containers: Containers) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        await containers.sweep()


def _say(ready: KeeperReady) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.buffer.flush()


async def _server_gone() -> None:
    """Wait until standard input ends: then the server has gone, or wants this process to go."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        loop.call_soon_threadsafe(gone.set)
        # Whatever holds the loop: the kernel ends the sandboxes with this process.
        time.sleep(CLOSE_S_MAX)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    await gone.wait()


def _confine(containers_max: int) -> None:
    """Let this process open what its containers need, as far as the system allows. What it and all sandboxes hold goes
    to nobody if one of them crashes: at 0 the kernel would still start a program of the host for that, at 1 none."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OTHER_FDS + CONTAINER_FDS * containers_max
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """Read the orders and follow them."""
    os.umask(0o022)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=KeeperOrders)
    logging.basicConfig(format="sandbox keeper: %(message)s", level=logging.INFO)
    _confine(orders.containers_max)
    asyncio.run(serve(orders))


if __name__ == "__main__":
    main()
