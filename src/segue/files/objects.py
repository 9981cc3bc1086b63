"""Where are the bytes of files? In a folder of this machine, or one that several machines share.

In: the parts of a file as they arrive. Out: the same bytes, in parts. Under its name there is a whole file or none: it
is written beside, made durable, and renamed. A bucket is the other place (`files/bucket.py`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from io import FileIO
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from segue.errors import Unavailable

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# What is written at once, and what is read: a client may take its time for it, and hold it for as long.
PART_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024
# An upload that was not finished by then was cut off by a crash.
ABANDONED_S = 86_400
UPLOADS = "uploads"
# A temporary folder that has just been made may not be locked yet.
NEW_S = 60


class ObjectUpload(Protocol):
    """A file that is being written."""

    async def write(self, data: bytes) -> None:
        """Add these bytes."""

    async def finish(self) -> None:
        """The file is whole; it is durable and can be read when this returns."""

    async def abort(self) -> None:
        """Leave nothing behind; also after `finish`, which then holds."""


class Objects(Protocol):
    """The bytes of files by their ids."""

    async def begin(self, file_id: str) -> ObjectUpload:
        """Begin to write a file under an id that is new."""

    def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file, part by part."""

    async def delete(self, file_id: str) -> None:
        """Delete the bytes, if they are there."""

    async def ids(self, before: float) -> list[str]:
        """The ids of the files that were written before this time."""

    async def tidy(self) -> None:
        """Delete what crashes have left half written."""


async def exactly(size: int, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """These bytes, if they are so many; an error at the first that is too much, or where some are missing. Others write
    into the folder or the bucket, too."""
    left = size
    async with aclosing(parts):
        async for part in parts:
            left -= len(part)
            if left < 0:
                break
            yield part
    if left:
        log.warning("a kept file has %s bytes than its row says", "more" if left < 0 else "fewer")
        raise Unavailable("The bytes of this file are not those that were kept.")


def folder_path(folder: Path, file_id: str) -> Path:
    """Where a file is. Ids are ours, and plain; their last letters choose a folder: one of a million files is slow."""
    return folder / file_id[-2:] / file_id


def temporary_folder() -> Path:
    """A folder for the files of this process, locked while it lives; those of killed processes are removed."""
    own = f"segue-files-{os.geteuid()}-"
    base = Path(tempfile.gettempdir())
    for other in base.glob(f"{own}*"):
        with suppress(OSError):
            _remove_dead(other)
    folder = Path(tempfile.mkdtemp(prefix=own, dir=base))
    # Held open, and so locked, until the process ends.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_EX)
    return folder


def _remove_dead(folder: Path) -> None:
    """Remove a folder that nobody has locked; a link of somebody else is not followed."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(lock)
        is_new = found.st_mtime > time.time() - NEW_S
        if found.st_uid == os.geteuid() and not is_new:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)


class FolderObjects:
    """Files in a folder that only its owner may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uploads = folder / UPLOADS
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder, self._uploads):
            path.mkdir(mode=0o700, exist_ok=True)

    async def begin(self, file_id: str) -> ObjectUpload:
        path = folder_path(self._folder, file_id)
        return await _in_thread(_FolderUpload, self._uploads / file_id, path)

    async def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        source = await _in_thread(FileIO, folder_path(self._folder, file_id))
        try:
            while part := await _in_thread(source.read, READ_BYTES):
                yield part
        finally:
            source.close()

    async def delete(self, file_id: str) -> None:
        await _in_thread(_remove, folder_path(self._folder, file_id))

    async def ids(self, before: float) -> list[str]:
        return await _in_thread(lambda: [*self._older(before)])

    async def tidy(self) -> None:
        await _in_thread(self._tidy)

    def _older(self, before: float) -> Iterator[str]:
        for folder in self._folder.iterdir():
            if folder.name == UPLOADS or not folder.is_dir():
                continue
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < before:
                        yield path.name

    def _tidy(self) -> None:
        for path in self._uploads.iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - ABANDONED_S:
                    _remove(path)


class _FolderUpload:
    """A file beside its place until it is whole."""

    def __init__(self, temporary: Path, path: Path) -> None:
        self._temporary = temporary
        self._path = path
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._file = FileIO(descriptor, "wb")

    async def write(self, data: bytes) -> None:
        await _in_thread(self._write, data)

    async def finish(self) -> None:
        await _in_thread(self._finish)

    async def abort(self) -> None:
        self._file.close()
        await _in_thread(_remove, self._temporary)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _finish(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        folder = self._path.parent
        is_new = not folder.exists()
        folder.mkdir(mode=0o700, exist_ok=True)
        os.replace(self._temporary, self._path)
        # The name must outlive a power cut as well.
        for changed in (folder, folder.parent) if is_new else (folder,):
            _sync(changed)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work on the disk, beside the event loop. Nothing foreign leaves."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        log.warning("the folder of files cannot be used: %s", error)
        raise Unavailable("The files of this server cannot be reached at the moment.") from error
