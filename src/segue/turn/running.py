"""Who follows a running turn? A turn belongs to the process; transports attach to it and leave again.

A `Running` keeps an inbox for notices, a bounded ring of the events so far, and its subscribers. It delivers events at
once and in order. Here a slow reader slows the model down: `wait_for_room` waits while a subscriber's buffer is full.
Where others read and the events are logged, one that can catch up later is not waited for. A turn without subscribers
has no such back-pressure; it has a longest running time instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from segue.errors import ApiError
from segue.seams.history import Owner, Turn
from segue.turn.assemble import Assembler
from segue.turn.event_ring import EventRing
from segue.turn.notices import Append, Notice, Steer
from segue.turn.plan import Tally
from segue.wire.events import TERMINAL, Event
from segue.wire.items import Call, Item, Required, weigh
from segue.wire.response import Response

# Clients send a few; at the limit the first ones win.
INBOX_MAX = 64
# What a token id takes in memory.
ID_BYTES = 4


class Subscriber(Protocol):
    """Takes the events of a turn at once, and says when its buffer is full."""

    # Whether it drops events while it is full and others read, and follows again from there.
    can_catch_up: bool

    @property
    def is_full(self) -> bool:
        """Whether its buffer is over the limit."""

    def attached(self, running: Running) -> None:
        """It follows this turn from now on."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Take these events. Must not raise and must not wait."""

    def lose(self) -> None:
        """The turn goes on in another process: no more events come from here."""


class EventSink(Protocol):
    """Where the events of a turn are written as well, for clients that follow it later."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Take these events; they are written soon."""

    async def finish(self) -> None:
        """Everything is written when this returns."""


class Interrupted(Exception):
    """A notice has come for a turn that waited in an `interruptible` scope."""


# Checks items that come later, and counts the images and sounds among them that the model is not shown.
Check = Callable[[Sequence[Item]], int]


def check_nothing(items: Sequence[Item]) -> int:
    """For a turn that takes no more items."""
    return 0


class Running:
    """A turn while it runs."""

    def __init__(
        self,
        owner: Owner,
        assembler: Assembler,
        *,
        is_stored: bool,
        is_rollout: bool = False,
        can_be_steered: bool = False,
        check: Check = check_nothing,
        input_bytes: int = 0,
        turn: Turn | None = None,
        tally: Tally | None = None,
        transport: str = "",
        received_at: float = 0.0,
    ) -> None:
        """`turn`: as it was saved before; `input_bytes`: what its request holds in memory."""
        self.id = assembler.response.id
        self.owner = owner
        self.assembler = assembler
        self.is_stored = is_stored
        self.is_rollout = is_rollout
        self.can_be_steered = can_be_steered
        self.tally = tally or Tally()
        self.transport = transport
        self.received_at = received_at
        self.is_ended = False
        self.check = check
        # The saved turn.
        self.turn = turn
        # Writes its events to the log, where they may be asked for later.
        self.event_writer: EventSink | None = None
        # Called when a turn that is queued begins.
        self.on_begin: Callable[[], Awaitable[None]] | None = None
        # The calls that a waiting rollout asks the client to answer; None while it does not wait.
        self.awaited_calls: dict[str, Call] | None = None
        self.published_at = 0.0
        # What its request and the items and ids of its rounds hold in memory.
        self.input_bytes = input_bytes
        self._subscribers: list[Subscriber] = []
        # One long answer with its reasoning; beyond it a late subscriber asks the store.
        self._ring = EventRing(assembler.first)
        # Notices that were not yet acted on, oldest first.
        self.inbox: deque[Notice] = deque()
        self._scope: asyncio.Timeout | None = None
        # Whether a steer may end what the turn waits for.
        self._heeds_steers = True
        self._has_room: asyncio.Future[None] | None = None

    @property
    def required(self) -> list[Required]:
        """What the client has to send for the calls of this turn."""
        return self.assembler.required

    @property
    def response(self) -> Response:
        """The response as it stands."""
        return self.assembler.response

    @property
    def visible(self) -> Response:
        """The response as clients may see it: it has not ended before it is saved."""
        return self.assembler.visible

    @property
    def error(self) -> ApiError | None:
        """Why it failed, once it has ended so; plain JSON answers with its status."""
        return self.assembler.error

    @property
    def bytes(self) -> int:
        """What its rounds and its events hold in memory."""
        return self._ring.bytes + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """What its rounds hold in memory."""
        return self.input_bytes if self.turn is None else self.turn.bytes

    @property
    def is_background(self) -> bool:
        """Whether it runs for a client that does not wait."""
        return self.response.background

    def enqueue(self, on_begin: Callable[[], Awaitable[None]]) -> None:
        """It is queued; before anything is sampled or done for it, this is called."""
        self.on_begin = on_begin

    async def begin(self) -> None:
        """Leave the queue, if it is there."""
        if self.on_begin is not None:
            on_begin, self.on_begin = self.on_begin, None
            await on_begin()

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscribers)

    @property
    def is_stalled(self) -> bool:
        """Whether the buffers of all its subscribers are full."""
        return bool(self._subscribers) and all(each.is_full for each in self._subscribers)

    @property
    def is_logged(self) -> bool:
        """Whether its events can be followed later from any number."""
        return self.event_writer is not None

    def attach(self, subscriber: Subscriber, *, after: int = -1) -> bool:
        """Send every event with a number above `after`; False if some are gone, or the turn has not come that far."""
        if self._ring.oldest > after + 1 or after > self._ring.last:
            return False
        self._subscribe(subscriber)
        if missed := self._ring.after(after):
            subscriber.deliver(missed)
        return True

    @property
    def last(self) -> int:
        """The number of the last event so far."""
        return self._ring.last

    def attach_from_oldest(self, subscriber: Subscriber) -> int:
        """Send everything that is still known, and then the rest; returns the number of the first event."""
        oldest = self._ring.oldest
        self.attach(subscriber, after=oldest - 1)
        return oldest

    def attach_after(self, subscriber: Subscriber, written: Sequence[Event]) -> bool:
        """Send these events from the log and then the rest; False if there is a gap between them."""
        last = written[-1].number
        if self._ring.oldest > last + 1:
            return False
        self._subscribe(subscriber)
        subscriber.deliver([*written, *self._ring.after(last)])
        return True

    def attach_to_rest(self, subscriber: Subscriber) -> None:
        """Send what is still to come; the terminal event, if it has come already."""
        last = [event for event in self._ring.after(self._ring.last - 1) if event.is_terminal]
        self._subscribe(subscriber)
        if last:
            subscriber.deliver(last)

    def _subscribe(self, subscriber: Subscriber) -> None:
        subscriber.attached(self)
        # A turn that is over may be kept for its events, and must not keep its subscribers: they hold connections.
        if not self.is_ended and subscriber not in self._subscribers:
            self._subscribers.append(subscriber)

    def detach(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        self.wake()

    def publish(self, events: Sequence[Event]) -> None:
        """Deliver to all subscribers, now and in order."""
        if not events:
            return
        self.published_at = asyncio.get_running_loop().time()
        self._ring.extend(events)
        if events[-1].type in TERMINAL:
            self.is_ended = True
        if self.event_writer is not None:
            self.event_writer.deliver(events)
        for subscriber in tuple(self._subscribers):
            subscriber.deliver(events)
        if self.is_ended:
            self._subscribers.clear()

    def abandon(self) -> None:
        """It goes on in another process."""
        for subscriber in self._subscribers:
            subscriber.lose()
        self._subscribers.clear()

    def hold(self, items: Sequence[Item] = (), size: int = 0) -> None:
        """It was given these items, or has written them; and so many bytes beside."""
        self.input_bytes += weigh(items) + size

    def saved(self, turn: Turn) -> None:
        """It is saved as this."""
        self.turn = turn

    def release(self) -> None:
        """The turn is over and kept for its events alone: free the rest. What is stored can be read again."""
        self.check = check_nothing
        self.inbox.clear()
        self.input_bytes = 0
        if self.is_stored:
            self.turn = None

    def log_events(self, event_writer: EventSink) -> None:
        """From now on, and as far back as is known, its events are written to the log."""
        if self.event_writer is None:
            self.event_writer = event_writer
            event_writer.deliver(self._ring.after(-1))

    @property
    def has_room(self) -> bool:
        """Whether no subscriber is full that has to be waited for."""
        full = [subscriber for subscriber in self._subscribers if subscriber.is_full]
        return not full or (
            len(full) < len(self._subscribers)
            and self.is_logged
            and all(subscriber.can_catch_up for subscriber in full)
        )

    def goes_on_without(self, subscriber: Subscriber) -> bool:
        """Whether others read, so that one that is full gets no more events until it attaches again."""
        others = (each for each in self._subscribers if each is not subscriber)
        return self.is_logged and not all(each.is_full for each in others)

    async def wait_for_room(self) -> None:
        """Wait until there is room."""
        while not self.has_room:
            self._has_room = asyncio.get_running_loop().create_future()
            await self._has_room

    def wake(self) -> None:
        """A subscriber has drained or left: check again for room."""
        if self._has_room is not None and not self._has_room.done():
            self._has_room.set_result(None)

    def notify(self, notice: Notice) -> None:
        """Put a notice into the inbox. It interrupts what the turn waits for, a steer only at a safe boundary."""
        if len(self.inbox) < INBOX_MAX:
            self.inbox.append(notice)
        if not isinstance(notice, Steer) or (self._heeds_steers and self.assembler.is_at_boundary):
            self._interrupt()

    def steer(self, steer: Steer) -> None:
        """Accept a steer, and send the event that says so."""
        self.publish([self.assembler.accept(steer)])
        self.notify(steer)

    def _interrupt(self) -> None:
        # A scope that has a deadline is ending already, and may not be rescheduled.
        if self._scope is not None and self._scope.when() is None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    @property
    def is_waiting(self) -> bool:
        return self.awaited_calls is not None

    def wait_for(self, calls: dict[str, Call]) -> None:
        """A rollout waits for its client to answer these calls."""
        self.awaited_calls = calls

    def stop_waiting(self) -> None:
        """Nothing has come in time, or the turn goes on."""
        self.awaited_calls = None

    def accept_append(self, items: tuple[Item, ...], size: int) -> Append:
        """What it waited for has come, and holds so many bytes; `notify` brings it once the turn has a slot."""
        self.tally.media_told += self.check(items)
        self.awaited_calls = None
        self.input_bytes += size
        return Append(items, size)

    @property
    def steers(self) -> list[Steer]:
        """The steers that wait to be applied, in the order in which they came."""
        return [notice for notice in self.inbox if isinstance(notice, Steer)]

    def remove_appends(self) -> None:
        """The appended items are given to the model, and count from now on as all others do."""
        appends = [notice for notice in self.inbox if isinstance(notice, Append)]
        self.input_bytes -= sum(append.bytes for append in appends)
        for append in appends:
            self.inbox.remove(append)

    @asynccontextmanager
    async def interruptible(self, *, heeds_steers: bool = True) -> AsyncIterator[None]:
        """A scope that ends with `Interrupted` as soon as a notice comes, or at once if one is there."""
        is_told = len(self.inbox) > (0 if heeds_steers else len(self.steers))
        scope = asyncio.timeout_at(asyncio.get_running_loop().time() if is_told else None)
        try:
            async with scope:
                self._scope = scope
                self._heeds_steers = heeds_steers
                try:
                    yield
                finally:
                    self._scope = None
        except TimeoutError:
            # One that the work inside has raised is no notice.
            if scope.expired():
                raise Interrupted from None
            raise
