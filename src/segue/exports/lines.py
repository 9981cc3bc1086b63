"""How do lines get into a file that may be rotated at any time? In batches, in the background.

In: lines, without waiting. Out: the lines at the end of a file, which is opened for each batch and which only its owner
may read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from segue.errors import Misconfigured
from segue.exports.batches import Batches

log = logging.getLogger(__name__)

# The value of a setting that means the server's log instead of a file.
TO_LOG = "log"

AddLine = Callable[[bytes], None]


@asynccontextmanager
async def open_lines(setting: str, place: str) -> AsyncIterator[AddLine | None]:
    """Adds lines to the file of this setting, and writes the rest on the way out; None: they go to the server's log."""
    if place == TO_LOG:
        yield None
        return
    path = Path(place)
    try:
        _append(path, b"")
    except OSError as error:
        raise Misconfigured(f"{setting}: {place} cannot be written: {error.strerror}.") from None
    async with Batches(f"lines of the {setting}", partial(_write, setting, path)) as batches:
        yield batches.add


async def _write(setting: str, path: Path, lines: list[bytes]) -> bool:
    try:
        await asyncio.to_thread(_append, path, b"\n".join(lines) + b"\n")
    except OSError as error:
        log.warning("%s: %s cannot be written, retrying: %s", setting, path, error.strerror)
        return False
    return True


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(file, "ab") as stream:
        stream.write(data)
