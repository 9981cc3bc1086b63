"""Which turns can be followed here: those that run, those that have ended, those that run in another worker?

A running turn is found by its owner and id. Events of ended turns are kept as long as there is room, for a repeat of
the request or a client that comes back; older ones are read from the event log. Where there are other workers, a turn
that runs there is followed through `OtherWorkers`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, assert_never

from segue.errors import Unavailable
from segue.ids import new_turn_id
from segue.process.replay import decide_replay, end_after, goes_on
from segue.seams.history import Owner
from segue.seams.store import EventLog, Turns
from segue.turn.notices import Cancel
from segue.turn.running import Running, Subscriber
from segue.wire.codec import encode
from segue.wire.events import Event
from segue.wire.response import ENDED, Response

# Events of ended turns that a repeat may still ask for, where no log has them.
ENDED_BYTES_MAX = 16 * 1024 * 1024
# When to ask again for a response whose process does not answer.
LOST_S = 2.0
# A turn may be faster than its log for a while: when to look again.
LATE_LOG_PAUSES_S = (0.1, 0.5, 2.0, 5.0, 0.0)


class OtherWorkers(Protocol):
    """Turns that run in other processes."""

    @property
    def home(self) -> str:
        """The tag of this process in the ids of its turns."""

    @property
    def has_others(self) -> bool:
        """Whether there is any other process now."""

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn of another process that is followed here already."""

    async def reach(self, owner: Owner, turn_id: str, *, is_known: bool) -> Running | None:
        """A turn of another process, followed from now on. `is_known`: the store has it, and it has not ended."""

    async def snapshot(self, owner: Owner, turn_id: str, *, is_known: bool) -> bytes | None:
        """A stored turn of another process as it stands, encoded."""

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """What follows turns of other processes now."""


class TurnRegistry:
    """The turns of this process, and a way to those of others."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        # The turns that run, by id, the oldest first.
        self.running: dict[str, Running] = {}
        # Those that other processes end, because this one was taken for dead: what the store says of them is true.
        self.fenced: set[str] = set()
        self._ended: OrderedDict[str, tuple[Running, int]] = OrderedDict()
        # What ended turns that may be followed again hold in memory.
        self.ended_bytes = 0
        self.others: OtherWorkers | None = None
        # A long answer is many events: one at a time is read from the log.
        self.replaying = asyncio.Lock()

    def oldest_at(self) -> float:
        """When the turn was received that runs for longest; the present, if none runs."""
        received = (running.received_at for running in self.running.values())
        return min(received, default=perf_counter())

    def new_id(self) -> str:
        """An id for a turn that begins in this process."""
        return new_turn_id("" if self.others is None else self.others.home)

    # --- finding ---

    def find_here(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn that runs in this process, if it is this owner's."""
        running = self.running.get(turn_id)
        return running if running is not None and running.owner == owner else None

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn that runs or is followed here, if it is this owner's."""
        here = self.find_here(owner, turn_id)
        if here is None and self.others is not None:
            return self.others.find(owner, turn_id)
        return here

    def find_any(self, turn_id: str) -> Running | None:
        """A turn that runs or has ended here, of any owner."""
        running = self.running.get(turn_id)
        return running or self._ended.get(turn_id, (None, 0))[0]

    async def reach(self, owner: Owner, turn_id: str, turns: Turns) -> Running | None:
        """A turn while it runs, in this process or in another one."""
        running = self.find(owner, turn_id)
        if running is not None or self.others is None or not self.others.has_others:
            return running
        turn = await turns.read(owner, turn_id)
        if turn is not None and turn.response.status in ENDED:
            return None
        return await self.others.reach(owner, turn_id, is_known=turn is not None)

    async def snapshot(self, owner: Owner, turn_id: str, *, is_known: bool) -> bytes | None:
        """A stored turn while it runs, in this process or in another one, as it stands, encoded."""
        here = self.find_here(owner, turn_id)
        if here is not None:
            return encode(here.visible) if here.is_stored else None
        if self.others is None:
            return None
        return await self.others.snapshot(owner, turn_id, is_known=is_known)

    # --- following again ---

    async def follow(
        self,
        owner: Owner,
        turn_id: str,
        subscriber: Subscriber,
        after: int,
        stored: Response | None = None,
    ) -> bool:
        """Send a turn's events after this number: those in the log, and those still to come.

        False if some of them are not there any more, or never were. `stored`: the response as it is stored, if it does
        not run here. When a process dies, its clients may have had more events than the log: they get the terminal
        event all the same, once it is known to be dead.
        """
        for pause_s in LATE_LOG_PAUSES_S:
            running = self.find(owner, turn_id)
            if _attach(running, subscriber, after):
                return True
            async with self.replaying:
                if await self._follow_once(owner, turn_id, subscriber, after, stored):
                    return True
            if running is None or not running.is_logged or after >= running.last:
                return False
            await asyncio.sleep(pause_s)
        return False

    async def _follow_once(
        self,
        owner: Owner,
        turn_id: str,
        subscriber: Subscriber,
        after: int,
        stored: Response | None,
    ) -> bool:
        running = self.find(owner, turn_id) or self._find_ended(owner, turn_id)
        if _attach(running, subscriber, after):
            return True
        logged = await self._log.read_after(owner, turn_id, after)
        running = self.find(owner, turn_id)
        if running is None and (others := self._elsewhere(logged)) is not None:
            running = await others.reach(owner, turn_id, is_known=goes_on(stored))
            if _attach(running, subscriber, after):
                return True
            logged = await self._log.read_after(owner, turn_id, after)
        replay = decide_replay(None if running is None else running.last, logged, stored)
        match replay:
            case "unreachable":
                message = "The process that runs this response cannot be reached."
                raise Unavailable(message, wait_s=LOST_S)
            case "not_kept":
                return False
            case "logged_then_live":
                assert running is not None, "only a turn that runs has more to come"
                written = list(logged or ())
                while not running.attach_after(subscriber, written):
                    # A fast turn has gone on while this was read.
                    more = await self._log.read_after(owner, turn_id, written[-1].number)
                    if not more:
                        return False
                    written += more
                return True
            case "end":
                assert stored is not None, "only a stored response says how it ended"
                before = await self._log.read_after(owner, turn_id, after - 1)
                logged = end_after(before, stored, after + 1)
            case "logged":
                pass
            case _:
                assert_never(replay)
        if logged:
            subscriber.deliver(logged)
        return True

    def _elsewhere(self, logged: Sequence[Event] | None) -> OtherWorkers | None:
        """The other workers, where one of them may have a turn of which the log has this: also one that has ended there
        a moment ago, and is not logged to its end yet."""
        is_whole = logged and logged[-1].is_terminal
        return (
            None if is_whole or self.others is None or not self.others.has_others else self.others
        )

    def _find_ended(self, owner: Owner, turn_id: str) -> Running | None:
        running, _ = self._ended.get(turn_id, (None, 0))
        return running if running is not None and running.owner == owner else None

    def keep_ended(self, running: Running) -> None:
        """Keep the events of a turn that is over, as long as there is room."""
        running.release()
        self._ended[running.id] = (running, running.bytes)
        self.ended_bytes += running.bytes
        while len(self._ended) > 1 and self.ended_bytes > ENDED_BYTES_MAX:
            self._drop(next(iter(self._ended)))

    def remove_ended(self, owner: Owner, turn_id: str) -> None:
        """A turn was deleted."""
        if self._find_ended(owner, turn_id) is not None:
            self._drop(turn_id)

    def forget_owner(self, owner: Owner) -> None:
        """Everything of the owner was erased: what runs for it ends, and what has ended is forgotten."""
        for running in tuple(self.running.values()):
            if running.owner == owner:
                running.notify(Cancel())
        for turn_id in [name for name, (ended, _) in self._ended.items() if ended.owner == owner]:
            self._drop(turn_id)

    def _drop(self, turn_id: str) -> None:
        self.ended_bytes -= self._ended.pop(turn_id)[1]


def _attach(running: Running | None, subscriber: Subscriber, after: int) -> bool:
    """Whether this turn still has the events after this number, and sends them."""
    return running is not None and running.attach(subscriber, after=after)
