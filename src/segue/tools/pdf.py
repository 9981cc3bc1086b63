"""What does a PDF say? Read by a process of its own, which is stopped when it takes too long.

In: the bytes of a file that claims to be one. Out: a `Paper`, with the pages as far as they were read. The loop is
never held up, and neither malice nor a mistake in a parser costs more than one process with little time and memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import OrderedDict
from hashlib import blake2b
from math import ceil
from typing import Literal

import msgspec
from msgspec import Struct

from segue.errors import InvalidRequest
from segue.wire.files import FILE_CHARS_MAX

# Files that are read at the same time; the others wait.
AT_ONCE = 4
# Texts of files that a client may send again with its whole history, and our own measure of one's other costs.
KEPT_BYTES_MAX = 32 * 1024 * 1024
ENTRY_BYTES = 200
# A page of text is a line, and a character of it at most two escapes.
LINE_BYTES_MAX = 12 * (FILE_CHARS_MAX + 1) + 64

_line = msgspec.json.Decoder(str | dict[str, bool])


class Paper(Struct, frozen=True):
    """What was read of a PDF: all of it, all but what is broken, or what could be read within the limits."""

    title: str
    pages: tuple[str, ...]
    end: Literal["whole", "broken", "late"]

    @property
    def text(self) -> str:
        """The pages as one text."""
        return "\n\n".join(self.pages)


async def read_paper(data: bytes, chars_max: int, s_max: float) -> Paper:
    """What this PDF says, up to so many characters and within so many seconds."""
    child = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "segue.tools.pdf_worker",
            str(chars_max),
            str(ceil(s_max) + 1),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=LINE_BYTES_MAX,
        env=_environment(),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    lines: list[str] = []
    end: Literal["whole", "broken", "late"] = "late"
    try:
        async with asyncio.timeout(s_max):
            child.stdin.write(data)
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
    return Paper(lines[0] if lines else "", tuple(lines[1:]), end)


def _environment() -> dict[str, str]:
    """It finds the modules that we find, and none of our secrets."""
    known = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**known, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Papers:
    """Reads the files of requests, a few at a time, and remembers what they said by their digests."""

    def __init__(self, s_max: float) -> None:
        self._s_max = s_max
        self._places = asyncio.Semaphore(AT_ONCE)
        self._kept: OrderedDict[bytes, str | None] = OrderedDict()
        self.bytes = 0

    async def read(self, data: bytes) -> str | None:
        """The text of a whole PDF; None if any of it is broken. Too slow or too large is the client's to know."""
        key = blake2b(data, digest_size=16).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            async with self._places:
                paper = await read_paper(data, FILE_CHARS_MAX + 1, self._s_max)
            if paper.end == "late":
                raise InvalidRequest(
                    "The PDF in this input_file could not be read in time, or takes too much memory: "
                    f"it may take {self._s_max:g} s.",
                    code="file_failed",
                )
            self._keep(key, paper.text if paper.end == "whole" else None)
        return self._kept[key]

    def _keep(self, key: bytes, text: str | None) -> None:
        if key in self._kept:
            # Two have read it at the same time.
            return
        self._kept[key] = text
        self.bytes += _measure(text)
        while self.bytes > KEPT_BYTES_MAX and len(self._kept) > 1:
            self.bytes -= _measure(self._kept.popitem(last=False)[1])


def _measure(text: str | None) -> int:
    return ENTRY_BYTES + 4 * len(text or "")
