"""What becomes of the folders of sandboxes: where are they, who counts what they hold, and who removes them?

To count and to remove may take long where a sandbox has made many files, and must hold up nothing: processes of their
own do it, which give way to all others. All are in one folder of this machine's user, whose name can be guessed; so it
is looked at before it is used.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from segue.aio import spawn
from segue.errors import Misconfigured
from segue.isolation.limits import remove_cgroups

log = logging.getLogger(__name__)

# Folders that wait for their removal; where more do, a new sandbox waits.
WAITING_MAX = 8
# How the name of a folder ends that is to be removed.
OLD = "-old"
# What a sandbox has closed to everybody is opened first. Links are removed and not followed.
REMOVE = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; exec rm -rf -- "$1"; }'
# What the smallest file takes of a disk.
BLOCK_BYTES = 4096


# --- a folder for one process -------------------------------------------------------------------------


def own_folder(base: Path, mode: int = 0o711) -> Path:
    """A folder for this process, locked while it lives; those of processes that are dead are to be removed."""
    all_folders = _open_base(base)
    try:
        # One that has made its lock and has not locked it yet would be taken for dead.
        fcntl.flock(all_folders, fcntl.LOCK_EX)
        for other in (each for each in base.iterdir() if not each.name.endswith(OLD)):
            with suppress(OSError), open(other / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_cgroups(group_name(other))
                other.rename(f"{other}{OLD}")
        folder = Path(tempfile.mkdtemp(dir=base))
        folder.chmod(mode)
        # Held open, and so locked, until the process ends.
        lock_fd = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
    finally:
        os.close(all_folders)
    return folder


def _open_base(base: Path) -> int:
    """The folder of all folders, open. Another user may have laid a link of this name: it is not followed."""
    with suppress(FileExistsError):
        base.mkdir(mode=0o711)
    fd = -1
    try:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        os.fchmod(fd, 0o711)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        message = f"environment: {base} is not a folder of this user ({error.strerror}). Remove it."
        raise Misconfigured(message) from None
    return fd


def group_name(folder: Path) -> str:
    """The name of a keeper's cgroups, by its folder."""
    return f"segue-{folder.name}"


# --- counting and removing ----------------------------------------------------------------------------


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


class UploadRoom:
    """What clients may still put into the folder of a sandbox: nobody else holds its limits while nothing runs."""

    def __init__(self, folders: Folders, folder: str, bytes_max: int, files_max: int) -> None:
        self._folders = folders
        self._folder = folder
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._beginning = asyncio.Lock()
        # Those that run; and what is free for all of them, as counted before the first.
        self._uploads = self._bytes = self._files = 0

    @asynccontextmanager
    async def upload(self, path: str) -> AsyncIterator[Callable[[int], None]]:
        """A file at this path that is written while inside; each piece is announced by its size before it is written.
        `OSError` where there is no room."""
        async with self._beginning:
            if not self._uploads:
                size, files = await self._folders.count(self._folder, self._files_max)
                self._bytes, self._files = self._bytes_max - size, self._files_max - files
            self._uploads += 1
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            self._bytes -= size
            if self._bytes < 0 or self._files < 0:
                raise OSError(errno.ENOSPC, "no room")

        new = 1 + path.count("/")
        self._files -= new
        try:
            take(new * BLOCK_BYTES)
            yield take
        except BaseException:
            # Nothing of it stays.
            self._bytes += taken
            self._files += new
            raise
        finally:
            self._uploads -= 1
