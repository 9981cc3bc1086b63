"""Who asked for what, when, and with what outcome? One line of JSON for each turn and each refusal; never content.

In: turns that are over, and refusals. Out: lines, appended to a file in the background or told to the log. The file is
opened for each batch, so that it may be moved away at any time, and only its owner may read it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.batches import Batches
from segue.errors import Misconfigured
from segue.process.afterwards import EndedTurn

log = logging.getLogger(__name__)

# The name that means the server's own log instead of a file.
TO_LOG = "log"


class Line(Struct, frozen=True, omit_defaults=True):
    """One line of the audit log."""

    at: float
    event: str
    transport: str
    outcome: str
    code: str | None = None
    owner: str | None = None
    model: str | None = None
    response_id: str | None = None
    previous_response_id: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    took_s: float | None = None


class Audit:
    """The way of lines into the audit log; a context that drains at its end."""

    def __init__(self, place: str) -> None:
        self._path = None if place == TO_LOG else Path(place)
        if self._path is not None:
            _try(self._path)
        self._batches: Batches[bytes] = Batches("lines of the audit log", self._write)

    def observe(self, settled: EndedTurn) -> None:
        """A turn is over."""
        entry, marks = settled.entry, settled.tally.marks
        self._add(
            Line(
                at=round(time.time(), 3),
                event="turn",
                transport=settled.transport,
                outcome=entry.status,
                code=settled.error,
                owner=entry.owner,
                model=entry.model,
                response_id=entry.turn_id,
                previous_response_id=settled.parent_id,
                input_tokens=entry.input_tokens,
                cached_tokens=entry.cached_tokens,
                output_tokens=entry.output_tokens,
                took_s=round(marks["sent"] - marks["received"], 6),
            )
        )

    def note_refusal(self, transport: str, code: str) -> None:
        """A request was refused before it became a turn."""
        self._add(Line(round(time.time(), 3), "refusal", transport, "refused", code))

    def _add(self, line: Line) -> None:
        self._batches.add(msgspec.json.encode(line))

    async def __aenter__(self) -> Audit:
        await self._batches.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._batches.__aexit__()

    async def _write(self, lines: list[bytes]) -> bool:
        if self._path is None:
            for line in lines:
                log.info("%s", line.decode())
            return True
        try:
            await asyncio.to_thread(_append, self._path, b"\n".join(lines) + b"\n")
        except OSError as error:
            log.warning("the audit log cannot be written: %s", error.strerror)
            return False
        return True


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(file, "ab") as stream:
        stream.write(data)


def _try(path: Path) -> None:
    try:
        _append(path, b"")
    except OSError as error:
        raise Misconfigured(f"audit_log: {path} cannot be written: {error.strerror}.") from None
