"""Does a file go when its time is over, and what a crash has left behind?"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue.errors import NotFound, Unavailable
from segue.files.depot import EXPIRY_S_MIN, ORPHANED_S, Depot, FileLimits
from segue.files.objects import FolderObjects
from segue.seams.files import FileQuota, StoredFile
from segue.stores.shelves import FileTable, MemoryTables
from tests.files.test_form import TYPE, form

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
    assert (await depot.read_whole("ada", long.id, 100))[1] == b"words"


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
    assert (await depot.read_whole("ada", kept.id, 100))[1] == b"words"
