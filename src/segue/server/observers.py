"""Who learns of a turn that has ended, and of a request that was refused?"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.aio import in_background
from segue.errors import need_package
from segue.listener.access_line import AccessLine
from segue.observe.metrics import Metrics
from segue.process.afterwards import Afterwards, EndedTurn, Observer
from segue.seams.history import Owner
from segue.server.state import State

if TYPE_CHECKING:
    from segue.exports.audit import Audit

log = logging.getLogger(__name__)

# Settings that bound what a process uses.
LIMITS = (
    "body_bytes_max",
    "body_s_max",
    "connection_age_s",
    "connection_state_bytes_max",
    "connections_max",
    "connections_state_bytes_max",
    "frames_burst_max",
    "frames_per_s",
    "handshake_s_max",
    "memory_bytes_max",
    "outbox_bytes_max",
    "process_state_bytes_max",
    "render_cache_bytes_max",
    "reuse_bytes_max",
    "write_s_max",
)

UNSEEN = (
    "model '%s' cannot take in images or audio: they were replaced by a description; "
    "set sees_images = true if it sees images, or unseen = 'refuse' to refuse such requests"
)
NOT_SET_UP = (
    "tool '%s' is not set up: requests that list it beside other tools are answered without it; set it up "
    "(docs/tools.md), or set unknown_tools = 'refuse' to refuse such requests"
)

# Learns of a request that was refused: its transport, the code of the error, the id of the request.
NoteRefusal = Callable[[str, str, str], None]


@dataclass(frozen=True, slots=True)
class Observers:
    """Metrics, all others that learn of turns and refusals, and the queue that feeds them with ended turns."""

    metrics: Metrics
    turns: list[Observer]
    refusals: list[NoteRefusal]
    afterwards: Afterwards
    write_access: Callable[[AccessLine], None] | None
    audit: Audit | None

    def add(self, observe: Observer, note_refusal: NoteRefusal) -> None:
        """One more learns of turns and refusals from now on."""
        self.turns.append(observe)
        self.refusals.append(note_refusal)

    def note_refusal(self, transport: str, code: str, request_id: str) -> None:
        """A request was refused before it became a turn."""
        for note in self.refusals:
            note(transport, code, request_id)

    def note_operation(self, event: str, owner: Owner, key_id: str, request_id: str) -> None:
        """An operator has changed an API key."""
        if self.audit is not None:
            self.audit.note_operation(event, owner, key_id, request_id)


@asynccontextmanager
async def open_observers(state: State) -> AsyncIterator[Observers]:
    """Metrics always, traces and audit log where they are configured; both drain on the way out."""
    settings, metrics = state.settings, Metrics()
    metrics.note_limits({name: getattr(settings, name) for name in LIMITS})
    observers: list[Observer] = [metrics.observe, Remarks().observe, log_failure]
    if settings.reuse_bytes_max:
        # The others count what it finds.
        observers.insert(0, state.reuse.observe)
    # Needed only where a key limits what is kept in memory.
    state.accounts.on_bounded = lambda: observers.append(state.trim)
    refusals: list[NoteRefusal] = [metrics.note_refusal]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(in_background("loop_lag", metrics.watch_loop))
        # What follows is imported where it is asked for.
        if settings.otel_endpoint:
            need_package("otel_endpoint", "aiohttp", "web")
            from segue.exports.traces import open_traces

            traces = open_traces(settings.otel_endpoint, settings.otel_headers)
            observers.append((await stack.enter_async_context(traces)).observe)
        audit = None
        if settings.audit_log:
            from segue.exports.audit import open_audit

            audit = await stack.enter_async_context(open_audit(settings.audit_log))
            observers.append(audit.observe)
            refusals.append(audit.note_refusal)
        write_access = None
        if settings.access_log:
            from segue.exports.access import open_access_log

            opened = open_access_log(
                settings.access_log, settings.log_format, workers=settings.workers
            )
            access = await stack.enter_async_context(opened)
            write_access = access.write
        afterwards = Afterwards(state.store.ledger, observers)
        yield Observers(metrics, observers, refusals, afterwards, write_access, audit)


def log_failure(turn: EndedTurn) -> None:
    """A turn that failed is in the log by its ids; one that failed by a mistake of its caller only at `debug`, as every
    refused request."""
    if turn.error is not None:
        level = logging.DEBUG if turn.is_callers_fault else logging.INFO
        what = (turn.shown_id, turn.outcome, turn.error_status, turn.error)
        extra = {"request_id": turn.receipt.request_id}
        log.log(level, "turn %s %s: %d %s", *what, extra=extra)


class Remarks:
    """Says once of each model that it was sent what it cannot see or hear, and of each tool that it is not set up."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def observe(self, turn: EndedTurn) -> None:
        if turn.tally.media_told:
            self._warn(UNSEEN, turn.entry.model, turn)
        for kind in turn.tally.unserved_tools:
            self._warn(NOT_SET_UP, kind, turn)

    def _warn(self, remark: str, name: str, turn: EndedTurn) -> None:
        if (remark, name) not in self._said:
            self._said.add((remark, name))
            log.warning(remark, name, extra={"request_id": turn.receipt.request_id})
