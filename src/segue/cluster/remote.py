"""How is a turn heard that runs in another worker?

    its own worker (home)                         the worker that was asked (guest)
    Running --> Forwarder --- topic events/… ---> Guest, a `Running` too --> sinks
        ^                                           |
        +---- cancel, leave, hold, go on -----------+

A `Guest` is a `Running` like any other: transports attach to it, detach, and tell it to stop. It says so to the turn's
home. When its reader is slow it asks home to hold; when nobody hears it any more, or it has ended, it goes. A guest
whose home is gone, or has been silent for too long, asks around once more, and then the store: what a dead worker left
running ends there as failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from segue.cluster.peers import Peers
from segue.errors import ApiError
from segue.ids import new_id
from segue.turn.assemble import Assembler
from segue.turn.running import EventSink, Running, Subscriber
from segue.turn.seams import Bus, EventLog, Turns
from segue.turn.values import Cancel, Notice, Owner
from segue.wire.codec import encode, encode_event, encode_response
from segue.wire.events import Completed, Event, Failed, Incomplete
from segue.wire.response import ENDED, Response

log = logging.getLogger(__name__)

# What may wait to be forwarded: the bus takes it in milliseconds, or is lost.
FORWARD_BYTES_MAX = 1024 * 1024
# Events gather this long, so that a fast model is not one message a token.
GATHER_S = 0.01
# A guest that nobody has attached to goes after this.
IDLE_S = 5.0
# How long what was said before may take to arrive.
CATCH_UP_S = 2.0
# How often a guest that has lost its home looks again.
LOOK_S = 0.5

Heard = asyncio.Queue[list[Event] | None]
Find = Callable[[Owner, str], Running | None]


class Named(Struct, frozen=True):
    """A turn, by whose it is."""

    owner: Owner
    turn_id: str


class Wanted(Struct, frozen=True):
    """A turn that somebody wants to hear behind this number, under this topic."""

    owner: Owner
    turn_id: str
    after: int
    topic: str


class Begun(Struct, frozen=True):
    """What home says of a turn: as it stands, the first event that it will tell, and the last one so far."""

    response: Response
    first: int
    last: int


class Ended(Struct, frozen=True):
    """What we read in a terminal event."""

    response: Response


_events = msgspec.msgpack.Decoder(list[Event]).decode
_named = msgspec.msgpack.Decoder(Named).decode
_wanted = msgspec.msgpack.Decoder(Wanted).decode
_begun = msgspec.json.Decoder(Begun).decode
_ended = msgspec.json.Decoder(Ended).decode
_pack = msgspec.msgpack.encode


@dataclass(frozen=True, slots=True)
class Kept:
    """Where it is read how a turn ended, when nobody says it."""

    turns: Turns
    log: EventLog


class Forwarder:
    """At home: a sink that tells another worker what it hears."""

    def __init__(self, bus: Bus, wanted: Wanted, guest: str, on_end: Callable[[str], None]) -> None:
        self.guest = guest
        self.running: Running
        self.is_held = False
        self._bus = bus
        self._topic = wanted.topic
        self._after = wanted.after
        self._on_end = on_end
        self._waiting: list[Event] = []
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether the reader over there is too far behind."""
        return self.is_held or self._bytes > FORWARD_BYTES_MAX

    def attached(self, running: Running) -> None:
        """This is the turn."""
        self.running = running

    def deliver(self, events: Sequence[Event]) -> None:
        """Tell these soon."""
        fresh = [event for event in events if event.number > self._after]
        self._waiting += fresh
        self._bytes += sum(len(event.data) for event in fresh)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._forward())

    async def _forward(self) -> None:
        while self._waiting:
            if not self._waiting[-1].is_terminal:
                await asyncio.sleep(GATHER_S)
            batch, self._waiting, self._bytes = self._waiting, [], 0
            try:
                await self._bus.publish(self._topic, _pack(batch))
            except ApiError:
                # The guest notices the gap, or the silence.
                self._on_end(self._topic)
                return
            self.running.wake()
            if batch[-1].is_terminal:
                self._on_end(self._topic)


class Guest(Running):
    """A turn that runs elsewhere, as this worker hears it."""

    def __init__(self, owner: Owner, begun: Begun, tell: Callable[[str], None]) -> None:
        super().__init__(owner, Assembler.over(begun.response), is_stored=True)
        self._first = begun.first
        self._tell_home = tell
        self._is_holding = False
        # Whatever may be the end of it: the last event, or the last one who heard it.
        self.is_over = asyncio.Event()

    def take(self, events: Sequence[Event]) -> bool:
        """Pass these on, each once; False if some are missing before them."""
        fresh = [event for event in events if event.number > self.last]
        if not fresh:
            return True
        if fresh[0].number > self.last + 1:
            return False
        if fresh[-1].is_terminal:
            self.assembler = Assembler.over(_ended(fresh[-1].data).response)
        self.publish(fresh)
        if self.is_ended:
            self.is_over.set()
        elif not self._is_holding and any(subscriber.is_full for subscriber in self._subscribers):
            self._is_holding = True
            self._tell_home("hold")
        return True

    def wake(self) -> None:
        """A reader has caught up or left: home may go on."""
        super().wake()
        if self._is_holding and not any(subscriber.is_full for subscriber in self._subscribers):
            self._is_holding = False
            self._tell_home("go_on")

    def notify(self, notice: Notice) -> None:
        """A cancel is home's to act upon. From one who has left it counts only if nobody else hears the turn."""
        if isinstance(notice, Cancel):
            self._tell_home("cancel" if self.has_subscribers else "give_up")

    def detach(self, subscriber: Subscriber) -> None:
        """Hear no more; the last one who leaves closes the door, once it is known whether that was a cancel."""
        super().detach(subscriber)
        if not self.has_subscribers:
            asyncio.get_running_loop().call_soon(self.close_if_unheard)

    def close_if_unheard(self) -> None:
        """Nobody needs it any more."""
        if not self.has_subscribers:
            self.is_over.set()

    def log_events(self, event_writer: EventSink) -> None:
        """Home does."""


class RemoteTurns:
    """Turns of other workers as guests here, and ours as guests there."""

    def __init__(self, bus: Bus, peers: Peers, find: Find, kept: Kept, silence_s: float) -> None:
        self._bus = bus
        self._peers = peers
        self._find = find
        self._turns, self._log = kept.turns, kept.log
        self._silence_s = silence_s
        self._guests: dict[str, Guest] = {}
        self._reaching: dict[Named, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._forwarders: dict[str, Forwarder] = {}
        # By topic: where a guest's turn runs, and what is heard of it.
        self._homes: dict[str, tuple[str, Heard]] = {}
        peers.answer("look", self._look)
        peers.answer("follow", self._follow)
        peers.answer("cancel", self._cancel)
        for word in ("give_up", "leave", "hold", "go_on"):
            peers.answer(word, self._from_guest(word))
        peers.when_gone(self._gone)

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """One for each guest, done when it is over."""
        return tuple(self._tasks)

    @property
    def has_others(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._peers.others)

    # --- where a turn is heard ---

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn of another worker that is heard here already."""
        guest = self._guests.get(turn_id)
        return guest if guest is not None and guest.owner == owner else None

    async def look(self, owner: Owner, turn_id: str) -> bytes | None:
        """A turn that runs in another worker, as it stands, encoded; None if none does."""
        found = await self._peers.find("look", _pack(Named(owner, turn_id)))
        return None if found is None else found[1]

    async def reach(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn that runs in another worker, or has just ended there, to be heard here; None if none does."""
        named = Named(owner, turn_id)
        lock = self._reaching.setdefault(named, asyncio.Lock())
        try:
            async with lock:
                return self.find(owner, turn_id) or await self._invite(named)
        finally:
            if not lock.locked():
                self._reaching.pop(named, None)

    async def _invite(self, named: Named) -> Guest | None:
        began: asyncio.Future[Guest | None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._attend(named, began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await began

    async def _attend(self, named: Named, began: asyncio.Future[Guest | None]) -> None:
        """One guest from its first event to its last."""
        topic = new_id("events")
        # Nothing instead of events: home has gone.
        heard: Heard = asyncio.Queue()
        try:
            async with self._bus.subscribe(topic, lambda body: heard.put_nowait(_events(body))):
                found = await self._ask_home(named, -1, topic)
                if found is None:
                    return
                home, begun = found
                guest = Guest(named.owner, begun, self._teller(home, topic, named))
                self._guests[named.turn_id] = guest
                self._homes[topic] = (home, heard)
                asyncio.get_running_loop().call_later(IDLE_S, guest.close_if_unheard)
                try:
                    await self._catch_up(guest, begun.last, heard)
                    if not began.done():
                        began.set_result(guest)
                    await self._listen(named, guest, topic, heard)
                finally:
                    del self._guests[named.turn_id], self._homes[topic]
                    await self._peers.tell("leave", topic.encode(), home)
        finally:
            if not began.done():
                began.set_result(None)

    async def _ask_home(self, named: Named, after: int, topic: str) -> tuple[str, Begun] | None:
        wanted = Wanted(named.owner, named.turn_id, after, topic)
        found = await self._peers.find("follow", _pack(wanted))
        return None if found is None else (found[0], _begun(found[1]))

    def _teller(self, home: str, topic: str, named: Named) -> Callable[[str], None]:
        def tell(word: str) -> None:
            body = _pack(named) if word == "cancel" else topic.encode()
            task = asyncio.create_task(self._peers.tell(word, body, home))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return tell

    async def _catch_up(self, guest: Guest, last: int, heard: Heard) -> None:
        """Hear what has been said already, so that whoever attaches behind some number is told nothing before it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while guest.last < last:
                    events = await heard.get()
                    if events is None or not guest.take(events):
                        heard.put_nowait(None)
                        return

    async def _listen(
        self,
        named: Named,
        guest: Guest,
        topic: str,
        heard: Heard,
    ) -> None:
        over = asyncio.create_task(guest.is_over.wait())
        try:
            while not guest.is_over.is_set():
                fresh = asyncio.create_task(heard.get())
                await asyncio.wait(
                    [over, fresh],
                    timeout=self._silence_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                events = fresh.result() if fresh.done() else None
                fresh.cancel()
                is_sound = events is not None and guest.take(events)
                if not is_sound and not guest.is_over.is_set():
                    await self._look_again(named, guest, topic)
        finally:
            over.cancel()

    async def _look_again(self, named: Named, guest: Guest, topic: str) -> None:
        """Home was silent, or something was missed: hear it again from there, or read how it ended."""
        while not guest.is_over.is_set():
            found = await self._ask_home(named, guest.last, topic)
            if found is not None and found[1].first <= guest.last + 1:
                return
            try:
                turn = await self._turns.read(named.owner, named.turn_id)
                written = await self._log.read_after(named.owner, named.turn_id, guest.last)
            except ApiError:
                log.warning("turn %s: neither its worker nor the store answers", named.turn_id)
            else:
                if written:
                    guest.take(written)
                elif turn is None or turn.response.status in ENDED:
                    response = guest.response if turn is None else turn.response
                    guest.take([_last_word(response, guest.last + 1)])
            await asyncio.sleep(LOOK_S)

    def _gone(self, worker: str) -> None:
        for home, heard in tuple(self._homes.values()):
            if home == worker:
                heard.put_nowait(None)
        for topic, forwarder in tuple(self._forwarders.items()):
            if forwarder.guest == worker:
                self._let_go(topic)

    # --- where it runs ---

    async def _look(self, _: str, body: bytes) -> bytes | None:
        named = _named(body)
        running = self._find(named.owner, named.turn_id)
        return encode(running.visible) if running is not None and running.is_stored else None

    async def _follow(self, guest: str, body: bytes) -> bytes | None:
        wanted = _wanted(body)
        running = self._find(wanted.owner, wanted.turn_id)
        if running is None or not running.is_stored:
            return None
        self._let_go(wanted.topic)
        forwarder = Forwarder(self._bus, wanted, guest, self._let_go)
        self._forwarders[wanted.topic] = forwarder
        first = running.attach_from_oldest(forwarder)
        return encode(Begun(running.visible, max(first, wanted.after + 1), running.last))

    async def _cancel(self, _: str, body: bytes) -> None:
        named = _named(body)
        running = self._find(named.owner, named.turn_id)
        if running is not None:
            running.notify(Cancel())

    def _from_guest(self, word: str) -> Callable[[str, bytes], asyncio.Future[None]]:
        def take(_: str, body: bytes) -> asyncio.Future[None]:
            topic = body.decode()
            forwarder = self._forwarders.get(topic)
            if forwarder is not None:
                self._mind(word, topic, forwarder)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

        return take

    def _mind(self, word: str, topic: str, forwarder: Forwarder) -> None:
        running = forwarder.running
        match word:
            case "hold":
                forwarder.is_held = True
            case "go_on":
                forwarder.is_held = False
                running.wake()
            case _:
                self._let_go(topic)
                is_wanted = running.is_ended or running.has_subscribers or running.is_background
                if word == "give_up" and not is_wanted:
                    running.notify(Cancel())

    def _let_go(self, topic: str) -> None:
        forwarder = self._forwarders.pop(topic, None)
        if forwarder is not None:
            forwarder.running.detach(forwarder)


def _last_word(response: Response, number: int) -> Event:
    """The terminal event of a response whose own one is not to be had."""
    if response.status not in ENDED:
        response = msgspec.structs.replace(response, status="failed")
    kind = {"completed": Completed, "failed": Failed}.get(response.status, Incomplete)
    return encode_event(kind(sequence_number=number, response=encode_response(response)))
