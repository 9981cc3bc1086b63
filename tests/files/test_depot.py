"""Does a file go when its time is over, and what a crash has left behind?"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from segue.errors import NotFound, TooMany, Unavailable
from segue.files.depot import (
    EXPIRY_S_MIN,
    ORPHANED_S,
    OWNER_UPLOADS_MAX,
    WAITING_BYTES_MAX,
    Depot,
    FileLimits,
    Uploads,
)
from segue.files.objects import PART_BYTES, FolderObjects
from segue.listener.exchange import ClientGone
from segue.seams.files import FileQuota, StoredFile
from segue.stores.shelves import FileTable, MemoryTables
from tests.files.test_form import TYPE, form
from tests.support import WAIT_S

LIMITS = FileLimits(1 << 20, FileQuota(10, 1 << 20))


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


async def one_part(data: bytes) -> AsyncIterator[bytes]:
    yield data


def upload(lifetime_s: int | None = None) -> AsyncIterator[bytes]:
    fields = [('purpose"', b"user_data"), ('file"; filename="a.txt"', b"words")]
    if lifetime_s is not None:
        fields += [
            ('expires_after[anchor]"', b"created_at"),
            ('expires_after[seconds]"', str(lifetime_s).encode()),
        ]
    return one_part(form(*fields))


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_file_expires_on_time_and_its_bytes_go_with_the_sweep(tmp_path: Path) -> None:
    clock = Clock()
    depot = Depot(FileTable(MemoryTables()), FolderObjects(tmp_path), LIMITS, clock)
    short = await depot.receive("ada", TYPE, upload(EXPIRY_S_MIN))
    long = await depot.receive("ada", TYPE, upload())
    assert short.expires_at == short.created_at + EXPIRY_S_MIN
    clock.now += EXPIRY_S_MIN + 1
    with pytest.raises(NotFound):
        await depot.find("ada", short.id)
    assert len(files_in(tmp_path)) == 2
    await depot.sweep()
    assert [path.name for path in files_in(tmp_path)] == [long.id]
    assert b"".join([part async for part in depot.read(long)]) == b"words"


async def test_bytes_without_a_row_go_after_a_while_and_never_those_with_one(
    tmp_path: Path,
) -> None:
    rows, objects = FileTable(MemoryTables()), FolderObjects(tmp_path)
    depot = Depot(rows, objects, LIMITS)
    kept = await depot.receive("ada", TYPE, upload())
    for name in ("file-" + "0" * 32, "not-ours.txt"):
        await (await objects.begin(name)).finish()
    await depot.sweep()
    assert len(files_in(tmp_path)) == 3, "an upload that is being answered has no row yet"
    old = time.time() - ORPHANED_S - 1
    for path in files_in(tmp_path):
        os.utime(path, (old, old))
    await depot.sweep()
    assert {path.name for path in files_in(tmp_path)} == {kept.id, "not-ours.txt"}


class BrokenRows(FileTable):
    """A store that cannot be reached."""

    async def add(self, file: StoredFile, quota: FileQuota) -> bool:
        raise Unavailable("away")


async def test_upload_that_the_store_does_not_take_leaves_no_bytes(tmp_path: Path) -> None:
    depot = Depot(BrokenRows(MemoryTables()), FolderObjects(tmp_path), LIMITS)
    with pytest.raises(Unavailable):
        await depot.receive("ada", TYPE, upload())
    assert files_in(tmp_path) == []


class LostRows(FileTable):
    """A store that has written the row, and whose answer is lost."""

    async def add(self, file: StoredFile, quota: FileQuota) -> bool:
        await FileTable.add(self, file, quota)
        raise Unavailable("The store is away.")


async def test_row_whose_answer_was_lost_has_its_bytes(tmp_path: Path) -> None:
    depot = Depot(LostRows(MemoryTables()), FolderObjects(tmp_path), LIMITS)
    with pytest.raises(Unavailable):
        await depot.receive("ada", TYPE, upload())
    (kept,) = await depot.newest("ada", None)
    assert b"".join([part async for part in depot.read(kept)]) == b"words"


class SlowRows(FileTable):
    """A store that has written the row, and answers late."""

    has_written, may_answer = asyncio.Event(), asyncio.Event()

    async def add(self, file: StoredFile, quota: FileQuota) -> bool:
        is_kept = await FileTable.add(self, file, quota)
        self.has_written.set()
        await self.may_answer.wait()
        return is_kept


async def test_row_has_its_bytes_when_the_client_leaves_in_the_last_moment(tmp_path: Path) -> None:
    rows = SlowRows(MemoryTables())
    depot = Depot(rows, FolderObjects(tmp_path), LIMITS)
    receiving = asyncio.create_task(depot.receive("ada", TYPE, upload()))
    await rows.has_written.wait()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    rows.may_answer.set()
    (kept,) = await depot.newest("ada", None)
    assert b"".join([part async for part in depot.read(kept)]) == b"words"


@dataclass
class Stalled:
    """An upload whose client says nothing more after so many bytes, until it leaves."""

    bytes: int
    left: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def body(self) -> AsyncIterator[bytes]:
        whole = form(('purpose"', b"user_data"), ('file"; filename="a"', b"x" * 2 * self.bytes))
        for at in range(0, self.bytes, PIECE):
            yield whole[at : at + PIECE]
        self.asked.set()
        await self.left.wait()
        raise ClientGone


PIECE = 64 * 1024


async def test_uploads_that_stall_hold_little_memory_which_is_counted(tmp_path: Path) -> None:
    limits = FileLimits(1 << 30, FileQuota(1_000, 1 << 40))
    uploads = Uploads()
    depot = Depot(FileTable(MemoryTables()), FolderObjects(tmp_path), limits, uploads=uploads)
    stalled = [Stalled(PART_BYTES - PIECE) for _ in range(64)]
    tasks = [
        asyncio.create_task(depot.receive(f"owner_{number // 8}", TYPE, one.body()))
        for number, one in enumerate(stalled)
    ]
    for one in stalled:
        await one.asked.wait()
    # Those that began while there were few of them may have kept a larger part.
    assert 0 < uploads.waiting_bytes <= 2 * WAITING_BYTES_MAX <= 64 * PART_BYTES // 2
    for one in stalled:
        one.left.set()
    assert {type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)} == {
        ClientGone
    }
    assert (uploads.waiting_bytes, uploads.part_bytes, files_in(tmp_path)) == (0, PART_BYTES, [])


async def test_owner_has_so_many_uploads_at_once_and_others_have_theirs(tmp_path: Path) -> None:
    depot = Depot(FileTable(MemoryTables()), FolderObjects(tmp_path), LIMITS)
    stalled = [Stalled(PIECE) for _ in range(OWNER_UPLOADS_MAX)]
    tasks = [asyncio.create_task(depot.receive("ada", TYPE, one.body())) for one in stalled]
    for one in stalled:
        await one.asked.wait()
    with pytest.raises(TooMany):
        await depot.receive("ada", TYPE, upload())
    assert await depot.receive("eve", TYPE, upload())
    stalled[0].left.set()
    with pytest.raises(ClientGone):
        await tasks[0]
    assert await depot.receive("ada", TYPE, upload())
    for one in stalled:
        one.left.set()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("size", [0, 4, 6, 1 << 40])
async def test_file_whose_bytes_somebody_has_changed_is_not_read(tmp_path: Path, size: int) -> None:
    depot = Depot(FileTable(MemoryTables()), FolderObjects(tmp_path), LIMITS)
    kept = await depot.receive("ada", TYPE, upload())
    (path,) = files_in(tmp_path)
    os.truncate(path, size)
    with pytest.raises(Unavailable, match="not those that were kept"):
        async with asyncio.timeout(WAIT_S):
            async for _ in depot.read(kept):
                pass
