"""What does the head of a GGUF file say?

In: a file, of which only the head is read. Out: its metadata, as plain values. Tensors are never touched. The format
is version 2 or 3, little-endian: magic, version, counts, then pairs of key and typed value.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from segue.errors import ServerFault

GgufValue = str | int | float | list[str] | list[int] | list[float] | list[object]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# GGUF's numbers for types, as `struct` writes them; 8 is a string, 9 an array.
SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9
PAIRS_MAX = 65_536  # Real files have some 30 to 60; more means that this is not a GGUF.


def is_gguf(path: Path) -> bool:
    """Whether a file is to be read as one: by its name or, where other programs keep it, by its first letters."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> dict[str, GgufValue]:
    """The metadata of a GGUF file, or of the first piece of one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _pairs(data)
    except OSError as error:
        raise ServerFault(f"{path.name} cannot be read: {error.strerror}.") from error
    except (ValueError, struct.error, KeyError) as error:
        raise ServerFault(_problem(path)) from error


def _problem(path: Path) -> str:
    """What is wrong with a file whose head cannot be read."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head.startswith(MAGIC):
        return f"{path.name} is not a GGUF file: it does not begin with the letters GGUF."
    version = int.from_bytes(head[4:], "little")
    if len(head) == 8 and version not in VERSIONS:
        return f"{path.name} is a GGUF file of version {version}. Versions 2 and 3 can be read."
    return f"{path.name} is a GGUF file that is damaged or not complete. Download it again."


def _pairs(data: mmap.mmap) -> dict[str, GgufValue]:
    magic, version, _, pairs = struct.unpack_from("<4sIQQ", data, 0)
    if magic != MAGIC or version not in VERSIONS or pairs > PAIRS_MAX:
        raise ValueError("unknown magic, version or size")
    found: dict[str, GgufValue] = {}
    at = 24
    for _ in range(pairs):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        found[key], at = _value(data, at + 4, kind)
    return found


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[GgufValue, int]:
    if kind == STRING:
        return _string(data, at)
    if kind == ARRAY:
        kind, count = struct.unpack_from("<IQ", data, at)
        return _array(data, at + 12, kind, count)
    return struct.unpack_from("<" + SCALARS[kind], data, at)[0], at + struct.calcsize(SCALARS[kind])


def _array(data: mmap.mmap, at: int, kind: int, count: int) -> tuple[GgufValue, int]:
    # Checked first, so that a wrong count is an error and not a long wait; a string is 8 bytes or more.
    size = struct.calcsize(SCALARS.get(kind, "Q"))
    if count * size > len(data) - at:
        raise ValueError("an array goes beyond the end")
    if kind in SCALARS:
        return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", data, at)), at + count * size
    if kind != STRING:
        raise ValueError("an array of arrays")
    strings: list[str] = []
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):
        end = at + 8 + length_at(data, at)[0]
        strings.append(data[at + 8 : end].decode())
        at = end
    if at > len(data):
        raise ValueError("a string goes beyond the end")
    return strings, at


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError("a string goes beyond the end")
    return data[at + 8 : end].decode(), end


def trained_tokens(head: Mapping[str, GgufValue]) -> int:
    """The context that the model was trained with, from its file."""
    length = head.get(f"{head.get('general.architecture')}.context_length")
    return length if isinstance(length, int) else 4_096
