"""Zips for tests: a good skill, and one of each kind that must be refused."""

from __future__ import annotations

import stat
import struct
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO

FRONT = b"---\nname: csv-insights\ndescription: Sums of CSV files.\n---\n"
GOOD = {"csv/SKILL.md": FRONT + b"Read.", "csv/scripts/a.py": b"print(1)"}
MIB = 1024 * 1024
_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def packed(files: Mapping[str, bytes], **changes: int) -> bytes:
    """A zip of these files; `changes` are fields of each entry."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)
            entry.compress_type = zipfile.ZIP_DEFLATED
            for name, value in changes.items():
                setattr(entry, name, value)
            archive.writestr(entry, data)
    return buffer.getvalue()


def skill_zip(files: Mapping[str, bytes], **changes: int) -> bytes:
    """A zip of these files beside a `SKILL.md`."""
    return packed({"SKILL.md": FRONT, **files}, **changes)


def manifest(text: bytes) -> bytes:
    return packed({"csv/SKILL.md": text})


def patched(data: bytes, local: int, central: int, value: int, size: int = 4) -> bytes:
    """A field of the last entry changed, in its own header and in the list."""
    changed = bytearray(data)
    for mark, place in ((_LOCAL, local), (_CENTRAL, central)):
        at = changed.rindex(mark) + place
        changed[at : at + size] = value.to_bytes(size, "little")
    return bytes(changed)


def twice(paths: list[str]) -> bytes:
    """A zip with these names, also where the library would warn of it."""
    names = [f"{index:0{len(path)}d}"[: len(path)] for index, path in enumerate(paths)]
    data = packed(dict.fromkeys(names, FRONT))
    for name, path in zip(names, paths, strict=True):
        data = data.replace(name.encode(), path.encode())
    return data


def many(count: int) -> bytes:
    """A list of so many entries; each says that it has no bytes."""
    header = struct.pack("<4s5H3L2H", _LOCAL, 20, 0, 0, 0, 0x21, 0, 0, 0, 1, 0) + b"a"
    entry = struct.pack(
        "<4s4B4H3L5H2L", _CENTRAL, 20, 3, 20, 0, 0, 0, 0, 0x21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0
    )
    entries = (entry + b"a") * count
    end = struct.pack(
        "<4s4H2LH",
        b"PK\x05\x06",
        0,
        0,
        count & 0xFFFF,
        count & 0xFFFF,
        len(entries),
        len(header),
        0,
    )
    return header + entries + end


def overlapping() -> bytes:
    """Two entries of which the second begins inside the first."""
    data = bytearray(skill_zip({"a.bin": b"", "b.txt": b"inside"}))
    # The list says that the last entry begins where the one before it does.
    last = data.rindex(_CENTRAL)
    before = data.rindex(_CENTRAL, 0, last)
    data[last + 42 : last + 46] = data[before + 42 : before + 46]
    return bytes(data)


LAUGHS = b"---\na: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (99 + n, 99 + n, b",".join([b"*%c" % (97 if n == 0 else 98 + n)] * 9))
    for n in range(9)
)
MERGES = b"---\na: &a {x: 1}\n" + b"".join(
    b"%c: &%c {<<: [%s]}\n" % (99 + n, 99 + n, b",".join([b"*%c" % (97 if n == 0 else 98 + n)] * 9))
    for n in range(9)
)

# Name -> how it is made, and a word of the reason. Made late: some are large.
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "no zip": (lambda: b"no zip", "not a zip"),
    "empty": (lambda: b"\0", "not a zip"),
    "cut off": (lambda: packed(GOOD)[:-30], "not a zip"),
    "no manifest": (lambda: packed({"a.md": b""}), "0 files SKILL.md"),
    "no file": (lambda: packed({}), "0 files SKILL.md"),
    "two manifests": (
        lambda: packed({"a/SKILL.md": FRONT, "a/b/skill.MD": FRONT}),
        "2 files SKILL.md",
    ),
    "case": (lambda: packed({"a/SKILL.md": FRONT, "A/skill.md": FRONT}), "same name"),
    "case of a folder": (lambda: skill_zip({"A": b"", "a/b": b""}), "same name"),
    "name twice": (lambda: twice(["SKILL.md", "a.txt", "a.txt"]), "same name"),
    "composed name": (lambda: skill_zip({"\u00e9": b"", "e\u0301": b""}), "same name"),
    "two folders": (lambda: packed({"a/SKILL.md": FRONT, "b/x": b""}), "one folder"),
    "deep": (lambda: packed({"a/b/SKILL.md": FRONT}), "one folder"),
    "up": (lambda: skill_zip({"../evil": b""}), "leads elsewhere"),
    "up inside": (lambda: skill_zip({"a/../../evil": b""}), "leads elsewhere"),
    "absolute": (lambda: skill_zip({"/etc/passwd": b""}), "leads elsewhere"),
    "empty part": (lambda: skill_zip({"a//b": b""}), "leads elsewhere"),
    "backslash": (lambda: skill_zip({"a\\b": b""}), "leads elsewhere"),
    "control": (lambda: skill_zip({"a\nb": b""}), "leads elsewhere"),
    "long path": (lambda: skill_zip({"a/" * 300 + "b": b""}), "leads elsewhere"),
    "long name": (lambda: skill_zip({"a" * 256: b""}), "more than 255 bytes"),
    "zero byte": (lambda: twice(["SKILL.md", "a\0b.txt"]), "leads elsewhere"),
    "symlink": (
        lambda: packed({"SKILL.md": b"/etc"}, external_attr=(stat.S_IFLNK | 0o777) << 16),
        "link",
    ),
    "fifo": (
        lambda: packed({"SKILL.md": b""}, external_attr=(stat.S_IFIFO | 0o777) << 16),
        "link",
    ),
    "501 files": (lambda: skill_zip({f"f{n}": b"" for n in range(500)}), "more than 500 files"),
    "100,000 entries": (lambda: many(100_000), "more than 500 files"),
    "a million entries": (lambda: many(1_000_000), "more than 500 files"),
    "bomb": (lambda: skill_zip({f"b{n}": bytes(20 * MIB) for n in range(3)}), "bytes together"),
    "large file": (lambda: skill_zip({"b": bytes(26 * MIB)}), "a file has more than"),
    "bomb that lies": (
        lambda: patched(skill_zip({"b": bytes(200 * MIB)}), 22, 24, 10),
        "not a zip",
    ),
    "size too large": (lambda: patched(skill_zip({"b": b"x"}), 22, 24, 10), "another size"),
    "packed size too large": (lambda: patched(skill_zip({"b": b"x"}), 18, 20, 999), "overlap"),
    "checksum": (lambda: patched(skill_zip({"b": b"x"}), 14, 16, 7), "not a zip"),
    "overlapping": (overlapping, "overlap"),
    "lzma": (lambda: packed({"SKILL.md": b""}, compress_type=zipfile.ZIP_LZMA), "another way"),
    "encrypted": (lambda: patched(skill_zip({"b": b"x"}), 6, 8, 1, 2), "encrypted"),
    "not UTF-8, says it is": (
        lambda: packed({"SKILL.md\u00e9": b""}).replace(b"\xc3\xa9", b"\xff\xfe"),
        "not a zip",
    ),
    "not UTF-8": (
        lambda: patched(skill_zip({"\u00e9": b""}).replace(b"\xc3\xa9", b"\xe9\xe8"), 6, 8, 0, 2),
        "not UTF-8",
    ),
    "zip64": (
        lambda: packed(GOOD)[:-22] + b"PK\x06\x07" + bytes(16) + packed(GOOD)[-22:],
        "4 GiB",
    ),
    "no end of the front": (lambda: manifest(b"---\nname: a\n"), "does not end"),
    "front too long": (
        lambda: manifest(b"---\n" + b"a: b\n" * 4_000 + b"---\n"),
        "does not end",
    ),
    "no YAML": (lambda: manifest(b"---\nname: [\n---\n"), "not YAML"),
    "no mapping": (lambda: manifest(b"---\n- a\n---\n"), "not a mapping"),
    "deep YAML": (lambda: manifest(b"---\na: " + b"[" * 15_000 + b"\n---\n"), "brackets"),
    "recursive YAML": (lambda: manifest(b"---\na: &a [*a]\n---\n"), "not YAML"),
    "deep YAML in lines": (lambda: manifest(b"---\na: " + b"- " * 8_000 + b"\n---\n"), "not YAML"),
    "deep YAML of keys": (lambda: manifest(b"---\n" + b"? " * 8_000 + b"\n---\n"), "not YAML"),
}
# Those that only what `SKILL.md` says of itself makes bad.
BAD_FRONT: dict[str, tuple[bytes, str]] = {
    "tagged YAML": (b"---\nname: !!python/object/apply:os.system ['true']\n---\n", "name"),
    "no front": (b"Read.", "front matter"),
    "no name": (b"---\ndescription: x\n---\n", "name"),
    "bad name": (b"---\nname: A b\ndescription: x\n---\n", "name"),
    "long name": (b"---\nname: %s\ndescription: x\n---\n" % (b"a" * 65), "name"),
    "no description": (b"---\nname: a\n---\n", "description"),
    "empty description": (b"---\nname: a\ndescription: ''\n---\n", "description"),
    "long description": (b"---\nname: a\ndescription: %s\n---\n" % (b"x" * 1025), "description"),
    "half a character": (b'---\nname: a\ndescription: "a\\ud800"\n---\n', "control"),
    "zero": (b'---\nname: a\ndescription: "a\\0b"\n---\n', "control"),
    "order to a terminal": (b'---\nname: a\ndescription: "\\x1b[2J"\n---\n', "control"),
    "description is a list": (b"---\nname: a\ndescription: [x]\n---\n", "description"),
    "billion laughs": (LAUGHS + b"---\n", "name"),
    "merges": (MERGES + b"---\n", "name"),
}
