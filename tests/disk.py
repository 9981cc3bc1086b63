"""What does this process ask of its disk, and in which order?

`recorded` writes down everything that SQLite does to the files of one folder (writes, truncations, syncs, deletions,
syncs of the folder), and what our own code does there by `os`. SQLite is asked by its own interface for file systems: a
copy of the system's, registered as the default, whose opened files get a table of functions of which a few are ours and
the rest are the system's. So the real writer on its real connection is seen, with no compiler, no mount and no root.
What was written down is a list of steps; `tests.cuts` makes of it what a power cut would have left.

A file is a number here, because its name may change; a name belongs to the folder.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes went into a file; nobody knows when they reach the disk."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A file was made this long."""

    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """What the file had at that step is on the disk."""

    file: int
    since: int


@dataclass(frozen=True, slots=True)
class Named:
    """A name stands for this file from now on; for none, if it was removed."""

    name: str
    file: int | None


@dataclass(frozen=True, slots=True)
class FolderSynced:
    """The names that the folder had at that step are on the disk."""

    since: int


@dataclass(frozen=True, slots=True)
class Told:
    """A client has been told something; what, its own list says."""

    number: int


Step = Wrote | Cut | Synced | Named | FolderSynced | Told


@dataclass
class Recording:
    """The steps so far, in the order in which they happened."""

    folder: Path
    # What a sync takes here: long enough that an acknowledgement which does not wait for it comes first.
    sync_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    files: int = 0

    def add(self, step: Step) -> None:
        with self.lock:
            self.steps.append(step)

    def tell(self, number: int) -> None:
        """A client has heard of this."""
        self.add(Told(number))

    def name_of(self, path: str | bytes | os.PathLike[str]) -> str | None:
        """The name of a file of the folder; None for files elsewhere."""
        found = Path(os.fsdecode(path))
        return found.name if found.parent == self.folder else None

    def made(self, name: str) -> int:
        """The number of the file of this name; a new one if there is none yet."""
        with self.lock:
            if name not in self.names:
                self.names[name] = self.files
                self.steps.append(Named(name, self.files))
                self.files += 1
            return self.names[name]

    def removed(self, name: str) -> None:
        with self.lock:
            if self.names.pop(name, None) is not None:
                self.steps.append(Named(name, None))

    def moved(self, name: str, to: str, *, is_kept: bool) -> None:
        """A file has another name now, or one more."""
        with self.lock:
            self.names[to] = self.names[name]
            self.steps.append(Named(to, self.names[to]))
            if not is_kept:
                self.removed(name)

    @contextmanager
    def syncing(self, file: int | None) -> Iterator[None]:
        """A sync of a file, or of the folder, that covers what was there when it began."""
        since = len(self.steps)
        time.sleep(self.sync_s)
        yield
        self.add(FolderSynced(since) if file is None else Synced(file, since))


# --- SQLite's side ------------------------------------------------------------------------------------------

P, N, L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
WRITE = ctypes.CFUNCTYPE(N, P, P, N, L)
TRUNCATE = ctypes.CFUNCTYPE(N, P, L)
SYNC = ctypes.CFUNCTYPE(N, P, N)
CLOSE = ctypes.CFUNCTYPE(N, P)
OPEN = ctypes.CFUNCTYPE(N, P, P, P, N, P)
DELETE = ctypes.CFUNCTYPE(N, P, ctypes.c_char_p, N)
SET_CALL = ctypes.CFUNCTYPE(N, P, ctypes.c_char_p, P)
GET_CALL = ctypes.CFUNCTYPE(P, P, ctypes.c_char_p)
OPEN_FOLDER = ctypes.CFUNCTYPE(N, ctypes.c_char_p, P)

OK, IOERR = 0, 10


class Methods(ctypes.Structure):
    """`sqlite3_io_methods`, version 3: what can be done to an open file."""

    _fields_ = [("version", N)] + [
        (name, P)
        for name in (
            "close", "read", "write", "truncate", "sync", "size", "lock", "unlock", "is_locked",
            "control", "sector", "device", "shm_map", "shm_lock", "shm_barrier", "shm_unmap",
            "fetch", "unfetch",
        )
    ]  # fmt: skip


class OpenFile(ctypes.Structure):
    """`sqlite3_file`: the table of functions, then whatever the system keeps behind it."""

    _fields_ = [("methods", ctypes.POINTER(Methods))]


class System(ctypes.Structure):
    """`sqlite3_vfs`, version 3: what can be done to a file system."""

    _fields_ = [
        ("version", N), ("file_size", N), ("path_max", N), ("next", P), ("name", ctypes.c_char_p),
        ("data", P),
    ] + [
        (name, P)
        for name in (
            "open", "delete", "access", "full_path", "dl_open", "dl_error", "dl_sym", "dl_close",
            "randomness", "sleep", "time", "last_error", "time_64", "set_call", "get_call",
            "next_call",
        )
    ]  # fmt: skip


def library() -> ctypes.CDLL:
    """The very SQLite that Python's `sqlite3` runs on: its module leads to it, or has it inside."""
    found = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    if not hasattr(found, "sqlite3_vfs_find"):
        pytest.skip("the SQLite inside this Python cannot be called from outside, nor watched")
    found.sqlite3_vfs_find.restype = ctypes.POINTER(System)
    found.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
    found.sqlite3_vfs_register.argtypes = [ctypes.POINTER(System), N]
    found.sqlite3_vfs_unregister.argtypes = [ctypes.POINTER(System)]
    return found


# Functions that C has the address of must stay for as long as the process.
KEPT: list[object] = []


class RecordingSystem:
    """A file system for SQLite that does as the default one does, and writes it down."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._library = library()
        self._under = self._library.sqlite3_vfs_find(None)
        self._here = System.from_buffer_copy(self._under.contents)
        self._here.name = b"segue-recording-%d" % id(self)
        self._here.open = self._address(OPEN(self._open))
        self._here.delete = self._address(DELETE(self._delete))
        self._tables: dict[int, Methods] = {}
        self._files: dict[int, int] = {}
        KEPT.append(self)

    def register(self) -> None:
        """Every connection that is opened from now on is written down."""
        assert self._library.sqlite3_vfs_register(ctypes.byref(self._here), 1) == OK
        under = self._under.contents
        # SQLite opens a folder for one reason: to sync it.
        self._open_folder = OPEN_FOLDER(GET_CALL(under.get_call)(self._at_under, b"openDirectory"))
        ours = self._address(OPEN_FOLDER(self._folder_opened))
        SET_CALL(under.set_call)(self._at_under, b"openDirectory", ours)

    def unregister(self) -> None:
        SET_CALL(self._under.contents.set_call)(self._at_under, b"openDirectory", None)
        self._library.sqlite3_vfs_unregister(ctypes.byref(self._here))
        assert not self._files, "a connection outlives its recording"

    @property
    def _at_under(self) -> int | None:
        return ctypes.cast(self._under, P).value

    def _address(self, function: Any) -> int | None:
        KEPT.append(function)
        return ctypes.cast(function, P).value

    def _guarded(self, work: Callable[[], int]) -> int:
        """Nothing may be raised into C."""
        try:
            return work()
        except BaseException as error:
            self._recording.failures.append(error)
            return IOERR

    def _open(self, _: int, name: int | None, file: int, flags: int, out: int | None) -> int:
        """Open as the system does; a file of the folder gets our table."""
        return self._guarded(lambda: self._opened(name, file, flags, out))

    def _opened(self, name: int | None, file: int, flags: int, out: int | None) -> int:
        here = ctypes.addressof(self._here)
        result = OPEN(self._under.contents.open)(here, name, file, flags, out)
        path = ctypes.string_at(name) if name else b""
        found = self._recording.name_of(path)
        if result == OK and found is not None:
            opened = OpenFile.from_address(file)
            opened.methods = ctypes.pointer(self._table(opened.methods))
            self._files[file] = self._recording.made(found)
        return int(result)

    def _table(self, under: Any) -> Methods:
        """The system's table with our functions in it, made once for each of its kinds."""
        address = ctypes.addressof(under.contents)
        if address not in self._tables:
            theirs = under.contents
            table = Methods.from_buffer_copy(theirs)
            table.write = self._address(self._write_after(WRITE(theirs.write)))
            table.truncate = self._address(self._truncate_after(TRUNCATE(theirs.truncate)))
            table.sync = self._address(self._sync_after(SYNC(theirs.sync)))
            table.close = self._address(self._close_after(CLOSE(theirs.close)))
            self._tables[address] = table
        return self._tables[address]

    def _write_after(self, theirs: Any) -> Any:
        def write(file: int, data: int, size: int, offset: int) -> int:
            def work() -> int:
                step = Wrote(self._files[file], offset, ctypes.string_at(data, size))
                self._recording.add(step)
                return int(theirs(file, data, size, offset))

            return self._guarded(work)

        return WRITE(write)

    def _truncate_after(self, theirs: Any) -> Any:
        def truncate(file: int, size: int) -> int:
            def work() -> int:
                self._recording.add(Cut(self._files[file], size))
                return int(theirs(file, size))

            return self._guarded(work)

        return TRUNCATE(truncate)

    def _sync_after(self, theirs: Any) -> Any:
        def sync(file: int, flags: int) -> int:
            def work() -> int:
                with self._recording.syncing(self._files[file]):
                    return int(theirs(file, flags))

            return self._guarded(work)

        return SYNC(sync)

    def _close_after(self, theirs: Any) -> Any:
        def close(file: int) -> int:
            self._files.pop(file, None)
            return int(theirs(file))

        return CLOSE(close)

    def _delete(self, _: int, name: bytes, is_synced: int) -> int:
        def work() -> int:
            found = self._recording.name_of(name)
            if found is not None:
                self._recording.removed(found)
            here = ctypes.addressof(self._here)
            return int(DELETE(self._under.contents.delete)(here, name, is_synced))

        return self._guarded(work)

    def _folder_opened(self, path: bytes, out: int) -> int:
        def work() -> int:
            if Path(os.fsdecode(path)).parent != self._recording.folder:
                return int(self._open_folder(path, out))
            with self._recording.syncing(None):
                return int(self._open_folder(path, out))

        return self._guarded(work)


# --- our own code's side --------------------------------------------------------------------------------------


def watch_os(recording: Recording, patch: pytest.MonkeyPatch) -> None:
    """Write down what is done to the folder by `os`. What a file holds is looked at when it is synced; without a
    sync nothing of it is on the disk."""
    real_open, real_fsync, real_link = os.open, os.fsync, os.link
    real_replace, real_unlink = os.replace, os.unlink

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        descriptor = real_open(path, flags, *more, **named)
        if flags & os.O_CREAT and (name := recording.name_of(path)) is not None:
            file = recording.made(name)
            if flags & os.O_TRUNC:
                recording.add(Cut(file, 0))
        return descriptor

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if os.path.samestat(found, os.stat(recording.folder)):
            with recording.syncing(None):
                return real_fsync(descriptor)
        for name, file in list(recording.names.items()):
            path = recording.folder / name
            if path.exists() and os.path.samestat(found, path.stat()):
                recording.add(Wrote(file, 0, path.read_bytes()))
                with recording.syncing(file):
                    return real_fsync(descriptor)
        return real_fsync(descriptor)

    def link(source: Any, target: Any, **named: Any) -> None:
        real_link(source, target, **named)
        if (name := recording.name_of(target)) is not None:
            recording.moved(Path(source).name, name, is_kept=True)

    def replace(source: Any, target: Any, **named: Any) -> None:
        real_replace(source, target, **named)
        if (name := recording.name_of(target)) is not None:
            recording.moved(Path(source).name, name, is_kept=False)

    def unlink(path: Any, **named: Any) -> None:
        real_unlink(path, **named)
        if (name := recording.name_of(path)) is not None:
            recording.removed(name)

    for function in (open_, fsync, link, replace, unlink):
        patch.setattr(os, function.__name__.rstrip("_"), function)


@contextmanager
def recorded(folder: Path, sync_s: float = 0.0) -> Iterator[Recording]:
    """Write down what happens to the files of this folder for as long as this lasts."""
    recording = Recording(folder.resolve(), sync_s)
    system = RecordingSystem(recording)
    with pytest.MonkeyPatch.context() as patch:
        watch_os(recording, patch)
        system.register()
        try:
            yield recording
        finally:
            system.unregister()
    assert not recording.failures, recording.failures
