"""What does the engine sample in one call of the model? Its pieces, read, filtered and sent, until it stops or has to.

A piece arrives in one of two ways. The first one, and whatever has to wait, comes through the engine's iterator. All
others are taken where they arrive (`take`): then no task wakes for a token. This is the hottest code of the house
(docs/decisions/0023-hot-path.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, suppress
from time import perf_counter

from msgspec import structs

from segue.seams.model import Engine, Finish, Ids, Job, JobStarted, Parsed, Reader, Written
from segue.seams.prompt import NO_IDS, IdArray
from segue.turn.notices import Steer
from segue.turn.plan import Span, Tally
from segue.turn.resources import Filter
from segue.turn.running import Interrupted, Running

# How many more pieces a text may take to come to the end of a sentence once a steer waits.
STEER_PIECES_MAX = 64
# How many more pieces are read once the reader is done: mostly the model stops by itself, and then the engine reports
# what it counted.
OVER_PIECES_MAX = 8


class ModelCall:
    """One call of the model, from the job to the last piece."""

    def __init__(
        self,
        running: Running,
        tally: Tally,
        reader: Reader | None,
        filters: Sequence[Filter],
        lead: IdArray[int],
    ) -> None:
        """`lead`: ids that stand at the end of the prompt, and belong to the answer."""
        self.running = running
        self._assembler = running.assembler
        self._tally = tally
        self._reader = reader
        self._filters = filters
        self._lead = lead
        # When the engine was asked, and when its first piece came.
        self.began_at = self.first_at = perf_counter()
        self._has_begun = False
        self._pieces_after_steer = 0
        self._pieces_when_over = 0
        # How many were sampled; what the engine said at its end, if it came to that.
        self.tokens = 0
        self.finish: Finish | None = None

    async def run(self, engine: Engine, job: Job) -> Finish | None:
        """How the answer of this round ended; None if a notice has stopped it, or the engine broke off."""
        running, reader = self.running, self._reader
        if not self._filters:
            job = structs.replace(job, take=self.take)
        with suppress(Interrupted):
            async with running.interruptible(), aclosing(engine.sample(job)) as pieces:
                async for piece in pieces:
                    if running.on_begin is not None:
                        await running.begin()
                    if isinstance(piece, JobStarted):
                        self._tally.started = piece
                        continue
                    if reader is not None and self._lead:
                        await self._send(reader.feed(Ids(self._lead)))
                        self._lead = NO_IDS
                    if isinstance(piece, Finish):
                        self.finish = piece
                        self._tally.stop_string = piece.stop_string or self._tally.stop_string
                        is_over = reader is not None and reader.is_over
                        return structs.replace(piece, reason="stop") if is_over else piece
                    if await self._read(piece):
                        return Finish("stop")
                    if running.inbox and self._may_stop():
                        return None
        return None

    def take(self, piece: Written) -> bool:
        """Read and send this piece now; False if it has to come through the iterator."""
        reader, running = self._reader, self.running
        if reader is None or reader.is_over or not self._has_begun:
            return False
        if running.inbox or not running.has_room:
            return False
        self.tokens += len(piece.ids if isinstance(piece, Ids) else piece.deltas)
        running.publish(self._assembler.feed(reader.feed(piece)))
        return True

    async def _read(self, piece: Written) -> bool:
        """Read and send this piece, once there is room; True if the answer is whole, whatever the engine has still to
        say."""
        if not self._has_begun:
            self._has_begun = True
            self.first_at = perf_counter()
            self._tally.spans.append(Span("first_token", self.began_at, self.first_at))
        # A delta of a chat endpoint is a token as a rule; its own count comes with its last piece.
        self.tokens += len(piece.ids if isinstance(piece, Ids) else piece.deltas)
        reader = self._reader
        if reader is None:
            return False
        await self._send(reader.feed(piece))
        if any(each.is_shut for each in self._filters):
            return True
        await self.running.wait_for_room()
        self._pieces_when_over += reader.is_over
        return self._pieces_when_over > OVER_PIECES_MAX

    async def _send(self, parsed: list[Parsed]) -> None:
        for each in self._filters:
            parsed = await each.feed(parsed)
        self.running.publish(self._assembler.feed(parsed))

    def _may_stop(self) -> bool:
        """Whether a steer waits, and the answer may be cut here."""
        if not isinstance(self.running.inbox[0], Steer):
            return False
        self._pieces_after_steer += 1
        assembler = self._assembler
        is_long = self._pieces_after_steer > STEER_PIECES_MAX and assembler.is_in_text
        return is_long or assembler.is_at_boundary
