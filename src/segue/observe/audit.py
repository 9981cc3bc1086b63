"""Who asked for what, when, and with what outcome? One JSON line for each turn and each refused request; never content.

In: turns that ended, and refused requests. Out: lines, appended to a file in the background or written to the log. The
file is opened for each batch, so that it can be rotated at any time, and only its owner may read it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured
from segue.observe.batches import Batches
from segue.process.afterwards import EndedTurn

# The documented name of the logger, for operators who route it (docs/observability.md).
log = logging.getLogger("segue.audit")

# The value of the setting that means the server's log instead of a file.
TO_LOG = "log"


class AuditLine(Struct, frozen=True, omit_defaults=True):
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
    """Writes the audit log; a context manager that drains on the way out."""

    def __init__(self, place: str) -> None:
        self._path = None if place == TO_LOG else Path(place)
        try:
            if self._path is not None:
                _append(self._path, b"")
        except OSError as error:
            raise Misconfigured(
                f"audit_log: {place} cannot be written: {error.strerror}."
            ) from None
        self._batches: Batches[bytes] = Batches("audit log lines", self._write)

    def observe(self, turn: EndedTurn) -> None:
        """Add a turn that ended."""
        entry, marks = turn.entry, turn.marks
        line = AuditLine(
            at=round(time.time(), 3),
            event="turn",
            transport=turn.transport,
            outcome=entry.status,
            code=turn.error,
            owner=entry.owner,
            model=entry.model,
            response_id=entry.turn_id,
            previous_response_id=turn.parent_id,
            input_tokens=entry.input_tokens,
            cached_tokens=entry.cached_tokens,
            output_tokens=entry.output_tokens,
            took_s=round(marks["sent"] - marks["received"], 6),
        )
        self._batches.add(msgspec.json.encode(line))

    def note_refusal(self, transport: str, code: str) -> None:
        """Add a request that was refused before it became a turn."""
        line = AuditLine(round(time.time(), 3), "refusal", transport, "refused", code)
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
            log.warning("audit log %s cannot be written, retrying: %s", self._path, error.strerror)
            return False
        return True


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(file, "ab") as stream:
        stream.write(data)
