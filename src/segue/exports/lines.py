"""How do lines get into a file that may be rotated at any time? In batches, in the background.

In: lines, without waiting. Out: the lines at the end of a file, which is opened for each batch and which only its owner
may read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from segue.errors import Misconfigured
from segue.exports.batches import Batches

log = logging.getLogger(__name__)

# The value of a setting that means the server's log instead of a file.
TO_LOG = "log"


class LineFile:
    """The file of one setting; a context manager that drains on the way out."""

    def __init__(self, setting: str, place: str) -> None:
        self._setting = setting
        self._path = Path(place)
        try:
            _append(self._path, b"")
        except OSError as error:
            raise Misconfigured(
                f"{setting}: {place} cannot be written: {error.strerror}."
            ) from None
        batches: Batches[bytes] = Batches(f"lines of the {setting}", self._write)
        self._batches = batches
        self.add = batches.add

    async def __aenter__(self) -> LineFile:
        await self._batches.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._batches.__aexit__()

    async def _write(self, lines: list[bytes]) -> bool:
        try:
            await asyncio.to_thread(_append, self._path, b"\n".join(lines) + b"\n")
        except OSError as error:
            reason = error.strerror
            log.warning("%s: %s cannot be written, retrying: %s", self._setting, self._path, reason)
            return False
        return True


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(file, "ab") as stream:
        stream.write(data)
