"""Who asked for what, when, and with what outcome? One JSON line for each turn and each refused request; never content.

In: turns that ended, and refused requests. Out: lines, appended to a file in the background or written to the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct

from segue.exports.lines import AddLine, open_lines
from segue.process.afterwards import EndedTurn

# The documented name of the logger, for operators who route it (docs/observability.md).
log = logging.getLogger("segue.audit")
# An operator who asks for these lines gets them at every `log_level`.
log.setLevel(logging.INFO)


class AuditLine(Struct, frozen=True, omit_defaults=True):
    """One line of the audit log."""

    at: float
    event: str
    transport: str
    outcome: str
    code: str | None = None
    owner: str | None = None
    model: str | None = None
    request_id: str | None = None
    response_id: str | None = None
    previous_response_id: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    took_s: float | None = None
    # Of an operation: the API key that was changed.
    key_id: str | None = None
    # Of a command: where it ran, and how much it printed.
    container_id: str | None = None
    printed_bytes: int | None = None


class Audit:
    """Writes the audit log: to the server's log where there is no file to add lines to."""

    def __init__(self, add_line: AddLine | None) -> None:
        self._add_line = add_line

    def observe(self, turn: EndedTurn) -> None:
        """Add a turn that ended."""
        entry, marks = turn.entry, turn.marks
        line = AuditLine(
            at=round(time.time(), 3),
            event="turn",
            transport=turn.receipt.transport,
            outcome=turn.outcome,
            code=turn.error,
            owner=entry.owner,
            model=entry.model,
            request_id=turn.receipt.request_id or None,
            response_id=turn.shown_id,
            previous_response_id=turn.shown_parent,
            input_tokens=entry.input_tokens,
            cached_tokens=entry.cached_tokens,
            output_tokens=entry.output_tokens,
            took_s=round(marks["sent"] - marks["received"], 6),
        )
        self._write(line)

    def note_refusal(self, transport: str, code: str, request_id: str) -> None:
        """Add a request that was refused before it became a turn."""
        now = round(time.time(), 3)
        line = AuditLine(now, "refusal", transport, "refused", code, request_id=request_id)
        self._write(line)

    def note_operation(self, event: str, owner: str, key_id: str, request_id: str) -> None:
        """Add a change of an API key by an operator."""
        line = AuditLine(
            at=round(time.time(), 3),
            event=event,
            transport="http",
            outcome="done",
            owner=owner,
            request_id=request_id,
            key_id=key_id,
        )
        self._write(line)

    def note_command(
        self,
        owner: str,
        container_id: str,
        exit_code: int | None,
        printed_bytes: int,
        took_s: float,
    ) -> None:
        """Add a command that a model has run in a container; its text is nowhere."""
        line = AuditLine(
            at=round(time.time(), 3),
            event="command",
            transport="shell",
            outcome="timeout" if exit_code is None else "exited",
            code=None if exit_code is None else str(exit_code),
            owner=owner,
            took_s=round(took_s, 6),
            container_id=container_id,
            printed_bytes=printed_bytes,
        )
        self._write(line)

    def _write(self, line: AuditLine) -> None:
        data = msgspec.json.encode(line)
        if self._add_line is not None:
            self._add_line(data)
            return
        extra = {"fields": msgspec.to_builtins(line), "request_id": line.request_id or ""}
        log.info("%s", data.decode(), extra=extra)


@asynccontextmanager
async def open_audit(place: str) -> AsyncIterator[Audit]:
    """The audit log at this place while inside; what is left is written on the way out."""
    async with open_lines("audit_log", place) as add_line:
        yield Audit(add_line)
