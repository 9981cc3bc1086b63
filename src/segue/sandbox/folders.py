"""What becomes of the folders of sandboxes: who counts what they hold, and who removes them?

Both may take long where a sandbox has made many files, and must hold up nothing: processes of their own do it, which
give way to all others.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from segue.aio import spawn

log = logging.getLogger(__name__)

# Folders that wait for their removal; where more do, a new sandbox waits.
WAITING_MAX = 8
# How the name of a folder ends that is to be removed.
OLD = "-old"
# What a sandbox has closed to everybody is opened first. Links are removed and not followed.
REMOVE = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; exec rm -rf -- "$1"; }'


def _removal(folder: Path) -> tuple[str, ...]:
    return ("nice", "-n", "19", "sh", "-c", REMOVE, "sh", str(folder))


def remove_folder(folder: Path) -> None:
    """Remove a folder, however deep."""
    removed = subprocess.run(_removal(folder), check=False, capture_output=True)
    _note(removed.returncode, removed.stderr)


def _note(status: int | None, said: bytes) -> None:
    if status:
        log.warning("the folder of a sandbox cannot be removed: %s", said.decode()[:1000])


class Folders:
    """The folders of a keeper."""

    def __init__(self) -> None:
        self._counter: asyncio.subprocess.Process | None = None
        self._counting, self._one = asyncio.Lock(), asyncio.Lock()
        self._removing: set[asyncio.Task[None]] = set()

    async def count(self, folder: str, files_max: int) -> tuple[int, int]:
        """The bytes and the files that a folder has; a few more files than this where it has more."""
        async with self._counting:
            if self._counter is None:
                self._counter = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-m", "segue.sandbox.counter"),
                    env={},
                    cwd="/",
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            process = self._counter
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(f"{files_max} {folder}\n".encode())
                size, count = map(int, (await process.stdout.readline()).split())
            except (OSError, ValueError):
                log.error("the counter of files has ended; starting it again")
                await self._end_counter()
                return 0, 0
            except BaseException:
                # Its answer would be taken for another's.
                await self._end_counter()
                raise
            return size, count

    async def _end_counter(self) -> None:
        process, self._counter = self._counter, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def remove(self, folder: Path) -> None:
        """Remove a folder soon; its name is free at once."""
        # Several keepers may remove what a dead one has left.
        old = folder if folder.name.endswith(OLD) else folder.rename(f"{folder}{OLD}")
        spawn(self._remove(old), self._removing)

    async def _remove(self, folder: Path) -> None:
        async with self._one:
            process = await asyncio.create_subprocess_exec(
                *_removal(folder), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            _, said = await process.communicate()
            _note(process.returncode, said)

    async def room(self) -> None:
        """Wait while many folders are still to be removed: nobody fills a disk faster than it is freed."""
        while len(self._removing) > WAITING_MAX:
            await asyncio.wait(self._removing, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Wait until all are removed."""
        await asyncio.gather(*self._removing)
        async with self._counting:
            await self._end_counter()
