"""How are files of a sandbox opened from outside, where everything in it may be a trap?

`openat2` resolves a path below a folder and never through a link, another mount or upwards; what is opened must be a
regular file with one name. So no path leads to a byte from outside, and nothing that would block is opened. Where the
kernel has no `openat2` (before Linux 5.6), nothing is opened.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_SAFELY = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
# Deeper folders are not looked into, and longer paths not shown.
DEPTH_MAX = 64
PATH_CHARS_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class FoundFile(NamedTuple):
    """A file of a sandbox: its path below the folder, its size, when it was changed."""

    path: str
    size: int
    changed_at: float


def open_beneath(folder: int, path: str, flags: int, mode: int = 0) -> int:
    """A descriptor of what is at this path below a folder; `OSError` if anything on the way is not plain."""
    how = _How(flags | os.O_CLOEXEC, mode, _SAFELY)
    name = _encoded(path)
    fd = _libc.syscall(_OPENAT2, folder, name, ctypes.byref(how), ctypes.sizeof(how))
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(fd)


def _encoded(path: str) -> bytes:
    """A path as the kernel reads it, which ends at a zero byte."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "a zero byte in a path")
    return os.fsencode(path)


@contextmanager
def plain_file(folder: int, path: str) -> Iterator[int]:
    """A regular file with one name, open for reading; `OSError` if it is something else."""
    fd = open_beneath(folder, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise FileNotFoundError(path)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def new_file(folder: int, path: str, owner: int | None) -> Iterator[int]:
    """A new file of this user at this path, in folders that are made. It takes the place of what was there once it is
    written to its end; if it is not, nothing of it stays, and what was there does."""
    _encoded(path)
    *folders, name = path.split("/")
    beside = f".{secrets.token_hex(8)}.new"
    with _as_user(owner), _made_folder(folder, folders) as at:
        fd = open_beneath(at, beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        at = os.dup(at)
    try:
        yield fd
        if not os.path.samestat(os.lstat(beside, dir_fd=at), os.fstat(fd)):
            raise FileNotFoundError(path)
        with _as_user(owner):
            os.rename(beside, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside, dir_fd=at)
        raise
    finally:
        os.close(at)
        os.close(fd)


@contextmanager
def _made_folder(folder: int, names: Sequence[str]) -> Iterator[int]:
    """A folder below this one, which is made where it is missing."""
    at = os.dup(folder)
    try:
        for name in names:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=at)
            inner = open_beneath(at, name, os.O_RDONLY | os.O_DIRECTORY)
            os.close(at)
            at = inner
        yield at
    finally:
        os.close(at)


@contextmanager
def _as_user(uid: int | None) -> Iterator[None]:
    """Files are made and named as this user, in this thread; a folder in memory of a sandbox knows no other user."""
    if uid is None:
        yield
        return
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def remove_file(folder: int, path: str) -> None:
    """Remove a file, not what a link points to."""
    above, _, name = path.rpartition("/")
    at = open_beneath(folder, above or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.unlink(name, dir_fd=at)
    finally:
        os.close(at)


def list_files(folder: int, count_max: int) -> list[FoundFile]:
    """The regular files below a folder, at most so many of them; names that are not text are left out."""
    found: list[FoundFile] = []
    seen, todo = 0, [""]
    while todo and seen < count_max:
        place = todo.pop()
        try:
            at = open_beneath(folder, place or ".", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            with os.scandir(at) as entries:
                for entry in entries:
                    seen += 1
                    if seen >= count_max:
                        break
                    path = f"{place}/{entry.name}" if place else entry.name
                    if len(path) > PATH_CHARS_MAX or not _is_text(path):
                        continue
                    with suppress(OSError):
                        about = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(about.st_mode) and path.count("/") < DEPTH_MAX:
                            todo.append(path)
                        elif stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                            found.append(FoundFile(path, about.st_size, about.st_mtime))
        finally:
            os.close(at)
    return sorted(found)


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return path.isprintable()
