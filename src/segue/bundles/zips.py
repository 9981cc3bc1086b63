"""What is in a zip that somebody has sent, and can it be unpacked without harm?

In: an open file. Out: the paths of its files, and their bytes piece by piece; or `BadBundle` with the reason. Every
entry is looked at before any is used, and what an entry says of itself is held against what it is: a zip that is too
large, packed or unpacked, a path that leads elsewhere, a link, a name that exists twice, entries that overlap or are
encrypted make the whole of it bad. Memory and time are bounded, whatever is in it.
"""

from __future__ import annotations

import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import IO
from unicodedata import normalize
from zlib import error as BadDeflate

from msgspec import Struct

ZIP_BYTES_MAX = 50 * 1024 * 1024
FILES_MAX = 500
FILE_BYTES_MAX = 25 * 1024 * 1024
# All files of all skills of a container: they are in its memory.
UNPACKED_BYTES_MAX = 48 * 1024 * 1024
PATH_CHARS_MAX, NAME_BYTES_MAX = 512, 255
PIECE_BYTES = 64 * 1024
# The list of entries at the end of a zip; the library reads it as a whole.
DIRECTORY_BYTES_MAX = 1024 * 1024
# The record after that list, and how far from the end it may be: a comment follows it.
END, END_BYTES, END_AWAY_MAX = b"PK\x05\x06", 22, 22 + 65_535
# Its older brother, for what is larger than we take.
END_64, END_64_BYTES = b"PK\x06\x07", 20
LOCAL_BYTES = 30
ENCRYPTED, IS_UTF8 = 0x1, 0x800
# What a Mac adds to a zip.
LEFT_OUT = "__MACOSX/"
_UNREADABLE = (
    ValueError,
    LookupError,
    OSError,
    zipfile.BadZipFile,
    BadDeflate,
    EOFError,
    NotImplementedError,
    RuntimeError,
    struct.error,
)


class BadBundle(Exception):
    """Why a zip is no skill."""


class ZippedFile(Struct, frozen=True):
    """A file in a zip: where it is to go, its name there, and its size."""

    path: str
    entry: str
    size: int


def list_zip(file: IO[bytes]) -> list[ZippedFile]:
    """The files of a zip without the one folder around them, if there is one. Everything in it was read once."""
    with _readable(), _opened(file) as archive:
        entries = [one for one in archive.infolist() if not one.filename.startswith(LEFT_OUT)]
        files = [one for one in entries if not one.is_dir()]
        if len(files) > FILES_MAX or len(archive.infolist()) > 2 * FILES_MAX:
            raise BadBundle(f"it has more than {FILES_MAX} files")
        for entry in files:
            _check_entry(entry)
        _check_names([entry.filename for entry in files])
        _check_places(archive)
        if sum(entry.file_size for entry in files) > UNPACKED_BYTES_MAX:
            raise BadBundle(f"its files have more than {UNPACKED_BYTES_MAX} bytes together")
        for entry in files:
            # What an entry says of its size and its checksum is compared with what comes out of it.
            if sum(map(len, _pieces(archive, entry.filename))) != entry.file_size:
                raise BadBundle("a file has another size than it says")
        top = _top([entry.filename for entry in files])
        return [
            ZippedFile(entry.filename.removeprefix(top), entry.filename, entry.file_size)
            for entry in files
        ]


@contextmanager
def zip_reader(file: IO[bytes]) -> Iterator[Callable[[str], Iterator[bytes]]]:
    """Reads the bytes of an entry of a zip that was listed, while inside."""
    with _readable(), _opened(file) as archive:
        yield partial(_pieces, archive)


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except _UNREADABLE:
        raise BadBundle("it is not a zip that can be read") from None


@contextmanager
def _opened(file: IO[bytes]) -> Iterator[zipfile.ZipFile]:
    _check_end(file)
    with zipfile.ZipFile(file) as archive:
        yield archive


def _check_end(file: IO[bytes]) -> None:
    """Refuse a long list of entries before the library reads it. The record at the end is found as the library does."""
    size = file.seek(0, 2)
    if size > ZIP_BYTES_MAX:
        raise BadBundle(f"it is larger than {ZIP_BYTES_MAX} bytes")
    file.seek(max(0, size - END_AWAY_MAX - END_64_BYTES))
    tail = file.read()
    at = len(tail) - END_BYTES
    if not (tail[at:].startswith(END) and tail.endswith(b"\0\0")):
        at = tail.rfind(END)
    if at < 0:
        raise ValueError("no end")
    (directory_bytes,) = struct.unpack_from("<L", tail, at + 12)
    if tail[max(0, at - END_64_BYTES) : at].startswith(END_64):
        raise BadBundle("it is a zip for files that are larger than 4 GiB")
    if directory_bytes > DIRECTORY_BYTES_MAX:
        raise BadBundle(f"it has more than {FILES_MAX} files")


def _pieces(archive: zipfile.ZipFile, entry: str) -> Iterator[bytes]:
    left = FILE_BYTES_MAX
    with archive.open(entry) as file:
        while piece := file.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise BadBundle(f"a file has more than {FILE_BYTES_MAX} bytes")
            yield piece


def _check_entry(entry: zipfile.ZipInfo) -> None:
    mode = entry.external_attr >> 16
    if entry.flag_bits & ENCRYPTED:
        raise BadBundle("it is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadBundle("it is packed in another way than by deflate")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise BadBundle("it has a link, or something else that is no file")
    if not entry.flag_bits & IS_UTF8 and not entry.orig_filename.isascii():
        raise BadBundle("it has a name that is not UTF-8")
    if entry.file_size > FILE_BYTES_MAX:
        raise BadBundle(f"a file has more than {FILE_BYTES_MAX} bytes")
    # The library cuts a name at a zero byte.
    check_path(entry.orig_filename)


def check_path(path: str) -> None:
    """Refuse a path that does not lead to a place below its folder."""
    is_plain = path.isprintable() and len(path) <= PATH_CHARS_MAX and "\\" not in path
    parts = path.split("/")
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise BadBundle("it has a path that leads elsewhere")
    if any(len(part.encode()) > NAME_BYTES_MAX for part in parts):
        raise BadBundle(f"it has a name of more than {NAME_BYTES_MAX} bytes")


def _check_names(paths: Sequence[str]) -> None:
    """No file has the name of another one, or of a folder, whatever the case of its letters."""
    names = [normalize("NFC", path).casefold() for path in paths]
    folders = {name[:place] for name in names for place, letter in enumerate(name) if letter == "/"}
    if len(set(names)) < len(names) or folders & set(names):
        raise BadBundle("it has two files of the same name")


def _check_places(archive: zipfile.ZipFile) -> None:
    """No entry lies over another one, or over the list of entries."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    starts = [*(entry.header_offset for entry in entries), archive.start_dir]
    for entry, (start, after) in zip(entries, pairwise(starts), strict=True):
        if start + LOCAL_BYTES + len(entry.orig_filename) + entry.compress_size > after:
            raise BadBundle("it has entries that overlap")


def _top(paths: Sequence[str]) -> str:
    """The one folder around all files, with its slash; exactly one `SKILL.md` is at the top."""
    manifests = [path for path in paths if is_manifest(path.rpartition("/")[2])]
    if len(manifests) != 1:
        raise BadBundle(f"it has {len(manifests)} files SKILL.md, and must have one")
    folder = manifests[0].rpartition("/")[0]
    top = f"{folder}/" if folder else ""
    if folder.count("/") or not all(path.startswith(top) for path in paths):
        raise BadBundle("SKILL.md is not in the one folder around all files")
    return top


def is_manifest(name: str) -> bool:
    """Whether this is the name of the instructions of a skill."""
    return name.casefold() == "skill.md"
