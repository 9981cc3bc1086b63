"""What happens after a response, beside the next turn?

Usage of unstored turns, metrics and whatever else observes turns. It is one bounded queue of the process, worked off
beside the next turn and drained at shutdown; when it is full the *ending* turn waits, never a starting one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import perf_counter

from msgspec import Struct

from segue.ids import shown_id
from segue.seams.history import UsageEntry
from segue.seams.store import Ledger
from segue.turn.plan import Receipt, Span, Tally

log = logging.getLogger(__name__)

# A second of very fast turns; each entry is a few hundred bytes.
BACKLOG_MAX = 10_000
BATCH_MAX = 500
# How long turns gather before they are settled together.
GATHER_S = 0.25

# The end of which stage a mark of the timeline is.
MARKS = {
    "validated": "validate",
    "resolved": "resolve",
    "rendered": "render",
    "first_token": "first_token",
    "last_token": "sample",
    "saved": "save",
    "sent": "send",
    "settled": "settle",
}
# Of a turn with several rounds the last of these counts, of the others the first.
LAST_MARKS = ("last_token",)


class EndedTurn(Struct, frozen=True):
    """A turn that is over: its usage, what it cost, and where it came from."""

    entry: UsageEntry
    tally: Tally
    receipt: Receipt
    # When the terminal event was sent, in seconds of `perf_counter`.
    sent_at: float = 0.0
    parent_id: str | None = None
    lane: str = ""
    # Of the error, if it failed: its code, its status over HTTP, and whether the caller must change something. Not the
    # error itself: its traceback holds the whole turn.
    error: str | None = None
    error_status: int = 0
    is_callers_fault: bool = False
    # The name of its chain: the same at every worker and machine.
    chain: str = ""

    @property
    def shown_id(self) -> str:
        """Its id as its client has read it."""
        return shown_id(self.entry.turn_id, self.receipt.transport)

    @property
    def shown_parent(self) -> str | None:
        """The id of its parent, spelled in the same way."""
        return self.parent_id and shown_id(self.parent_id, self.receipt.transport)

    @property
    def outcome(self) -> str:
        """The status of the response; `refused` where a mistake of the caller was found after the response had begun,
        as when the prompt is too long."""
        return "refused" if self.is_callers_fault else self.entry.status

    @property
    def marks(self) -> dict[str, float]:
        """When the stages ended, by the names of the timeline."""
        marks = {"received": self.receipt.received_at}
        for name, stage in MARKS.items():
            ends = [span.ended for span in self.tally.spans if span.stage == stage]
            if ends:
                marks[name] = ends[-1 if name in LAST_MARKS else 0]
        return marks

    @property
    def pauses(self) -> list[tuple[float, float]]:
        """When sampling paused for our own tools."""
        return [(span.began, span.ended) for span in self.tally.spans if span.stage == "tools"]


# One that has more to do than count returns what is awaited, before the next observer learns of the turn.
Observer = Callable[[EndedTurn], Awaitable[None] | None]


class Afterwards:
    """The queue of ended turns.

    Turns gather for a moment, so that they share a commit. A process that dies in that moment loses the usage of
    unstored turns only; a clean stop loses nothing.
    """

    def __init__(self, ledger: Ledger, observers: Sequence[Observer]) -> None:
        self._ledger = ledger
        self._observers = observers
        self._queue: asyncio.Queue[EndedTurn] = asyncio.Queue(BACKLOG_MAX)
        # Usage that the ledger has not taken yet.
        self._owed: list[UsageEntry] = []
        self._is_hurried = asyncio.Event()
        self._progress = asyncio.Condition()
        self._put_count = self._done_count = self._waiter_count = 0

    @property
    def backlog(self) -> int:
        """How many turns wait to be settled."""
        return self._queue.qsize()

    async def put(self, ended: EndedTurn) -> None:
        """Add a turn that is over."""
        await self._queue.put(ended)
        self._put_count += 1

    async def drained(self) -> None:
        """Wait until everything added so far is done."""
        target = self._put_count
        self._waiter_count += 1
        self._is_hurried.set()
        try:
            async with self._progress:
                await self._progress.wait_for(lambda: self._done_count >= target)
        finally:
            self._waiter_count -= 1
            if not self._waiter_count:
                self._is_hurried.clear()

    async def work(self) -> None:
        """Work until cancelled, which happens after `drained` when the process ends."""
        while True:
            batch = [await self._queue.get()]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_hurried.wait(), GATHER_S)
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                await self._settle(batch)
            finally:
                self._done_count += len(batch)
                async with self._progress:
                    self._progress.notify_all()

    async def _settle(self, batch: Sequence[EndedTurn]) -> None:
        # A saved turn's row was written with the turn itself.
        self._owed += [ended.entry for ended in batch if not ended.tally.is_recorded]
        try:
            if self._owed:
                await self._ledger.settle(self._owed)
                self._owed = []
        except Exception:
            # Retried with the next batch; the ledger takes each only once.
            log.exception(
                "could not record the usage of %d turns; retrying with the next batch",
                len(self._owed),
            )
            del self._owed[:-BACKLOG_MAX]
        for ended in batch:
            ended.tally.spans.append(Span("settle", ended.sent_at, perf_counter()))
            for observe in self._observers:
                try:
                    if (awaited := observe(ended)) is not None:
                        await awaited
                except Exception:
                    extra = {"request_id": ended.receipt.request_id}
                    log.exception(
                        "an observer failed for turn %s", ended.entry.turn_id, extra=extra
                    )
