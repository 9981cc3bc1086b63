"""How does a form become a zip? It has one, or its files are packed as they arrive: on the disk, not in memory."""

from __future__ import annotations

import asyncio
import shutil
import zipfile
from typing import IO

from segue.bundles.bundle import refused
from segue.bundles.zips import FILES_MAX, BadBundle, check_path, is_manifest

PARAM = "files"


class Packing:
    """The files of a form, in two temporary files."""

    def __init__(self, first: IO[bytes], made: IO[bytes]) -> None:
        # The first file as it came: it may be the zip.
        self._first = first
        self._made = made
        self._zip = zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED)
        self._paths: list[str] = []
        self._open = first

    async def begin(self, name: bytes) -> None:
        """A file with this name begins; with several files it is its path."""
        try:
            path = name.decode()
        except UnicodeDecodeError:
            raise refused("it has a name that is not UTF-8", PARAM) from None
        if path in self._paths:
            raise refused("it has two files of the same name", PARAM)
        self._paths.append(path)
        if len(self._paths) > FILES_MAX:
            raise refused(f"it has more than {FILES_MAX} files", PARAM)
        if len(self._paths) > 1:
            await asyncio.to_thread(self._begin_entry, path)

    async def write(self, data: bytes) -> None:
        """Some bytes of the file that has begun last."""
        await asyncio.to_thread(self._open.write, data)

    async def finish(self) -> IO[bytes]:
        """The zip."""
        return await asyncio.to_thread(self._finish)

    def _begin_entry(self, path: str) -> None:
        if self._open is self._first:
            self._pack_first()
        else:
            self._open.close()
        self._open = self._zip.open(_entry(path), "w")

    def _pack_first(self) -> None:
        self._first.seek(0)
        with self._zip.open(_entry(self._paths[0]), "w") as entry:
            shutil.copyfileobj(self._first, entry)

    def close(self) -> None:
        # An entry that is being written keeps the zip open.
        self._open.close()
        self._zip.close()

    def _finish(self) -> IO[bytes]:
        if len(self._paths) == 1:
            if not is_manifest(self._paths[0].rpartition("/")[2]):
                return self._first
            self._pack_first()
        else:
            self._open.close()
        self._zip.close()
        return self._made


def _entry(path: str) -> zipfile.ZipInfo:
    """An entry without a time: the same files make the same zip."""
    try:
        check_path(path)
    except BadBundle as bad:
        raise refused(bad, PARAM) from None
    entry = zipfile.ZipInfo(path)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
