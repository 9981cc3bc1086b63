"""What is in a skill that a request brings? A zip of instructions and files, looked at before a byte is written.

In: the definition of an inline skill. Out: its files by path, and the folder where they go; or a refusal. Pure. A zip
that is too large, unpacked or packed, or has a path that leads elsewhere, a link, a name twice, an encrypted entry, no
`SKILL.md` or several of them, is refused as a whole.
"""

from __future__ import annotations

import re
import stat
import zipfile
from base64 import b64decode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from io import BytesIO
from zlib import error as BadDeflate

from msgspec import Struct

from segue.errors import InvalidRequest

# Below the home of the sandbox, which is in memory.
FOLDER = "/home/user/skills"
SKILLS_MAX = 16
FILES_MAX = 500
ZIP_BYTES_MAX = 50 * 1024 * 1024
FILE_BYTES_MAX = 25 * 1024 * 1024
# All files of all skills of a container.
UNPACKED_BYTES_MAX = 48 * 1024 * 1024
PATH_CHARS_MAX = 512
DESCRIPTION_CHARS_MAX = 1024
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_ENCRYPTED = 1


class Bundle(Struct, frozen=True):
    """A skill: what it is for, where it goes, and its files by their paths there."""

    name: str
    description: str
    # Below the folder of all skills.
    folder: str
    files: dict[str, bytes]

    @property
    def path(self) -> str:
        """Where its instructions are."""
        own = next(path for path in self.files if path.lower() == "skill.md")
        return f"{FOLDER}/{self.folder}/{own}"


class _Bad(Exception):
    """Why a zip is no skill."""


def unpack(name: str, description: str, data: str, param: str) -> Bundle:
    """The skill in a base64 zip; refused where anything about it is not as it must be."""
    try:
        if not _NAME.fullmatch(name) or len(name) > 64:
            raise _Bad("its name is 1 to 64 of a-z, 0-9 and single hyphens between them")
        if not 1 <= len(description) <= DESCRIPTION_CHARS_MAX:
            raise _Bad(f"its description has 1 to {DESCRIPTION_CHARS_MAX} characters")
        if len(data) > ZIP_BYTES_MAX * 4 // 3 + 4:
            raise _Bad(f"it is larger than {ZIP_BYTES_MAX} bytes")
        packed = b64decode(data, validate=True)
        files = _without_top(dict(_files(packed)))
    except _Bad as bad:
        raise _refused(f"{bad}", param) from None
    except (
        ValueError,
        OSError,
        zipfile.BadZipFile,
        BadDeflate,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ):
        raise _refused("it is not a zip in base64 that can be read", param) from None
    return Bundle(name, description, folder_of(name, data), files)


def folder_of(name: str, data: str) -> str:
    """The folder of a skill: always the same for the same skill."""
    return f"{name}-{sha256(data.encode()).hexdigest()[:8]}"


def note(bundles: Sequence[Bundle]) -> str:
    """What the model reads of the skills of its container."""
    lines = [f"- {each.name}: {each.description} (read {each.path} first)" for each in bundles]
    return "\n".join(["Skills in the container of the shell:", *lines])


def _refused(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"The skill is refused: {why}.", code="invalid_skill", param=param)


def _files(packed: bytes) -> Iterator[tuple[str, bytes]]:
    """The files of a zip, unpacked within the limits."""
    with zipfile.ZipFile(BytesIO(packed)) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        if len(archive.infolist()) > 2 * FILES_MAX or len(entries) > FILES_MAX:
            raise _Bad(f"it has more than {FILES_MAX} files")
        names = [entry.filename.casefold() for entry in entries]
        if len(set(names)) < len(names):
            raise _Bad("it has two files of the same name")
        if sum(entry.file_size for entry in entries) > UNPACKED_BYTES_MAX:
            raise _Bad(f"its files have more than {UNPACKED_BYTES_MAX} bytes together")
        left = UNPACKED_BYTES_MAX
        for entry in entries:
            _check_entry(entry)
            with archive.open(entry) as file:
                # What an entry says of its size may be wrong.
                data = file.read(min(left, FILE_BYTES_MAX) + 1)
            left -= len(data)
            if len(data) > FILE_BYTES_MAX or left < 0:
                raise _Bad(f"a file has more than {FILE_BYTES_MAX} bytes")
            yield entry.filename, data


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path, mode = entry.filename, entry.external_attr >> 16
    if entry.flag_bits & _ENCRYPTED:
        raise _Bad("it is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _Bad("it is packed in another way than by deflate")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise _Bad("it has a link, or something else that is no file")
    is_plain = path.isprintable() and len(path) <= PATH_CHARS_MAX and "\\" not in path
    if not is_plain or any(part in ("", ".", "..") for part in path.split("/")):
        raise _Bad("it has a path that leads elsewhere")


def _without_top(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files without the one folder around them, if there is one; exactly one `SKILL.md` is at the top."""
    manifests = [path for path in files if path.lower().rpartition("/")[2] == "skill.md"]
    if len(manifests) != 1:
        raise _Bad(f"it has {len(manifests)} files SKILL.md, and must have one")
    top = manifests[0].rpartition("/")[0]
    if top.count("/") or not all(path.startswith(f"{top}/") for path in files if top):
        raise _Bad("SKILL.md is not in the one folder around all files")
    return {path.removeprefix(f"{top}/") if top else path: data for path, data in files.items()}
