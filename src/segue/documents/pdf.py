"""What is the text of a PDF? Read by a process of its own, which is stopped when it takes too long.

In: the bytes of a file that claims to be a PDF. Out: a `PdfText`, with the pages as far as they were read. The event
loop is never blocked, and neither malice nor a fault in a parser costs more than one process with little time and
memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from importlib.util import find_spec
from math import ceil
from typing import Literal

import msgspec
from msgspec import Struct

from segue.aio import off_loop
from segue.errors import InvalidRequest
from segue.wire.files import FILE_CHARS_MAX, SLICE_CHARS, slices_of

# Files that are read at the same time; the others wait.
AT_ONCE = 4
# Texts of files that a client may send again with its whole history, and an estimate of the other costs of each.
KEPT_BYTES_MAX = 32 * 1024 * 1024
ENTRY_BYTES = 200
# A page of text is a line, and a character of it at most two escapes.
LINE_BYTES_MAX = 12 * (FILE_CHARS_MAX + 1) + 64

_End = Literal["whole", "broken", "late"]
_line = msgspec.json.Decoder(str | dict[str, bool])


class PdfText(Struct, frozen=True):
    """What was read of a PDF: all of it, all but what is broken, or what could be read within the limits."""

    title: str
    pages: tuple[str, ...]
    end: _End

    @property
    def text(self) -> str:
        """The pages as one text."""
        return "\n\n".join(self.pages)


async def read_pdf(data: Iterable[bytes], chars_max: int, s_max: float) -> PdfText:
    """The text of the PDF that these slices are, up to so many characters and within so many seconds."""
    if find_spec("pypdf") is None:
        raise InvalidRequest(
            "PDF files cannot be read here: the package 'pypdf' is not installed. "
            "To install it: pip install 'segue-server[pdf]'",
            code="file_failed",
        )
    limits = (str(chars_max), str(ceil(s_max) + 1))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "segue.documents.pdf_worker", *limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=LINE_BYTES_MAX,
        env=_environment(),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    lines: list[str] = []
    end: _End = "late"
    try:
        async with asyncio.timeout(s_max):
            for slice in data:
                child.stdin.write(slice)
                await child.stdin.drain()
            child.stdin.close()
            async for line in child.stdout:
                match _line.decode(line):
                    case str() as text:
                        lines.append(text)
                    case ended:
                        end = "broken" if ended["is_broken"] else "whole"
    except (TimeoutError, ValueError, OSError):
        # Too slow, or it has died and its last line is half a line: what came before is still worth reading.
        pass
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    return PdfText(lines[0] if lines else "", tuple(lines[1:]), end)


def _environment() -> dict[str, str]:
    """It finds the modules that this process finds, and gets no secrets."""
    environment = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class PdfTexts:
    """Reads the files of requests, a few at a time, and caches their texts by digest."""

    def __init__(self, s_max: float) -> None:
        self._s_max = s_max
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._kept: OrderedDict[bytes, str | None] = OrderedDict()
        self.bytes = 0

    async def read(self, file_data: str) -> str | None:
        """The text of a whole PDF, which is here in base64; None if any of it is broken. A PDF that is too slow or too
        large is an error."""
        key = await off_loop(len(file_data) > SLICE_CHARS, _digest, file_data)
        if key is None:
            return None
        if key not in self._kept:
            async with self._slots:
                pdf = await read_pdf(slices_of(file_data), FILE_CHARS_MAX + 1, self._s_max)
            if pdf.end == "late":
                message = f"This PDF could not be read in time ({self._s_max:g} s) and memory."
                raise InvalidRequest(message, code="file_failed")
            self._add(key, pdf.text if pdf.end == "whole" else None)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _add(self, key: bytes, text: str | None) -> None:
        if key in self._kept:
            # Two turns have read it at the same time.
            return
        self._kept[key] = text
        self.bytes += _bytes_of(text)
        while self.bytes > KEPT_BYTES_MAX and len(self._kept) > 1:
            self.bytes -= _bytes_of(self._kept.popitem(last=False)[1])


def _digest(file_data: str) -> bytes | None:
    """What a file is known by; None where it is no base64."""
    digest = blake2b(digest_size=16)
    try:
        for slice in slices_of(file_data):
            digest.update(slice)
    except ValueError:
        return None
    return digest.digest()


def _bytes_of(text: str | None) -> int:
    return ENTRY_BYTES + 4 * len(text or "")
