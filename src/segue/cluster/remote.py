"""How is a turn followed that runs in another worker?

    the worker that runs it (source)                  the worker that was asked (follower)
    Running --> EventForwarder --- topic events… ---> RemoteTurn, a `Running` too --> subscribers
        ^                                               |
        +---- cancel, leave, hold, go on ---------------+

A `RemoteTurn` is a `Running` like any other: transports attach to it, detach, and cancel it, and it sends that to the
source. When its reader is slow it asks the source to hold. It goes when it has ended or has no subscribers any more.
If the source is gone, or silent for too long, the follower asks once more and then reads the store: a turn that a dead
worker left running ends there as failed.

Whom to ask is in the id of a turn: the tag of the worker that began it. A turn that the store knows as running may have
been taken over by another worker since; only then are the others asked too, once: who answered is asked from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from msgspec import Struct

from segue.aio import run_forever, spawn
from segue.cluster.peers import Peers
from segue.errors import ApiError
from segue.ids import new_id, tag_of
from segue.seams.bus import Bus
from segue.seams.history import Owner
from segue.seams.store import EventLog, Turns
from segue.turn.assemble import Assembler
from segue.turn.notices import Cancel, Notice
from segue.turn.running import EventSink, Running, Subscriber
from segue.wire.codec import encode, terminal_event
from segue.wire.events import Event
from segue.wire.response import ENDED, Response

log = logging.getLogger(__name__)

# Events that wait to be forwarded: the bus takes them in milliseconds, or is lost.
FORWARD_BYTES_MAX = 1024 * 1024
# Events are gathered for this long, so that a fast model is not one message a token.
GATHER_S = 0.01
# A remote turn without subscribers goes after this.
IDLE_S = 5.0
# How long the events before the attach may take to arrive.
CATCH_UP_S = 2.0
# How often a follower that has lost its source looks again.
LOOK_S = 0.5
# Turns that run elsewhere than their ids say, about 200 bytes each; the oldest are found anew.
MOVED_MAX = 1_000

# Batches of events from the source; None: the source is gone.
EventQueue = asyncio.Queue[list[Event] | None]
FindRunning = Callable[[Owner, str], Running | None]


class TurnRef(Struct, frozen=True):
    """A turn by its owner and id."""

    owner: Owner
    turn_id: str


class FollowRequest(Struct, frozen=True):
    """A turn whose events after this number are wanted under this topic."""

    owner: Owner
    turn_id: str
    after: int
    topic: str


class FollowStart(Struct, frozen=True):
    """The source's answer: the response so far, the first event that it will forward, and the last one so far."""

    response: Response
    first: int
    last: int


class _TerminalEvent(Struct, frozen=True):
    response: Response


_decode_events = msgspec.msgpack.Decoder(list[Event]).decode
_decode_ref = msgspec.msgpack.Decoder(TurnRef).decode
_decode_request = msgspec.msgpack.Decoder(FollowRequest).decode
_decode_start = msgspec.json.Decoder(FollowStart).decode
_decode_terminal = msgspec.json.Decoder(_TerminalEvent).decode
_pack = msgspec.msgpack.encode


class EventForwarder:
    """At the source: a subscriber that sends events to another worker."""

    can_catch_up = False

    def __init__(
        self, bus: Bus, request: FollowRequest, follower: str, on_end: Callable[[str], None]
    ) -> None:
        self.follower = follower
        self.running: Running
        self.is_held = False
        self._bus = bus
        self._topic = request.topic
        self._after = request.after
        self._on_end = on_end
        self._waiting: list[Event] = []
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        return self.is_held or self._bytes > FORWARD_BYTES_MAX

    def attached(self, running: Running) -> None:
        self.running = running

    def deliver(self, events: Sequence[Event]) -> None:
        fresh = [event for event in events if event.number > self._after]
        self._waiting += fresh
        self._bytes += sum(len(event.data) for event in fresh)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(run_forever("event_forwarding", self._forward))

    def lose(self) -> None:
        self._on_end(self._topic)

    async def _forward(self) -> None:
        while self._waiting:
            if not self._waiting[-1].is_terminal:
                await asyncio.sleep(GATHER_S)
            batch = self._waiting
            self._waiting = []
            self._bytes = 0
            try:
                await self._bus.publish(self._topic, _pack(batch))
            except ApiError:
                # The follower notices the gap, or the silence.
                self._on_end(self._topic)
                return
            self.running.wake()
            if batch[-1].is_terminal:
                self._on_end(self._topic)


class RemoteTurn(Running):
    """A turn that runs in another worker, as it is followed here."""

    def __init__(self, owner: Owner, start: FollowStart, send: Callable[[str], None]) -> None:
        super().__init__(owner, Assembler.over(start.response, start.first), is_stored=True)
        self._send_to_source = send
        self._is_holding = False
        # Set after the terminal event, or when the last subscriber has left.
        self.is_over = asyncio.Event()

    @property
    def is_logged(self) -> bool:
        """Whether its source logs its events is not known here."""
        return False

    def feed(self, events: Sequence[Event]) -> bool:
        """Publish these events, each once; False if some before them are missing."""
        fresh = [event for event in events if event.number > self.last]
        if not fresh:
            return True
        if fresh[0].number > self.last + 1:
            return False
        if fresh[-1].is_terminal:
            self.assembler = Assembler.over(_decode_terminal(fresh[-1].data).response)
        self.publish(fresh)
        if self.is_ended:
            self.is_over.set()
        elif not self._is_holding and not self.has_room:
            self._is_holding = True
            self._send_to_source("hold")
        return True

    def wake(self) -> None:
        """A reader has caught up or left: the source may go on."""
        super().wake()
        if self._is_holding and self.has_room:
            self._is_holding = False
            self._send_to_source("go_on")

    def notify(self, notice: Notice) -> None:
        """Send a cancel to the source. From a subscriber that has left it counts only if the turn has no others."""
        if isinstance(notice, Cancel):
            self._send_to_source("cancel" if self.has_subscribers else "give_up")

    def detach(self, subscriber: Subscriber) -> None:
        """Detach. The last subscriber closes the turn here, once a cancel that follows has been sent."""
        super().detach(subscriber)
        if not self.has_subscribers:
            asyncio.get_running_loop().call_soon(self.close_if_unheard)

    def close_if_unheard(self) -> None:
        """Stop following if there are no subscribers."""
        if not self.has_subscribers:
            self.is_over.set()

    def log_events(self, event_writer: EventSink) -> None:
        """Nothing to do: the source logs the events."""


class RemoteTurns:
    """Turns of other workers that are followed here, and turns of this worker that are followed elsewhere."""

    def __init__(
        self,
        bus: Bus,
        peers: Peers,
        find: FindRunning,
        turns: Turns,
        events: EventLog,
        silence_s: float,
    ) -> None:
        self._bus = bus
        self._peers = peers
        # Finds a turn that runs in this worker.
        self._find = find
        # Where the end of a turn is read when its worker is gone.
        self._turns = turns
        self._log = events
        self._silence_s = silence_s
        self._remote: dict[str, RemoteTurn] = {}
        self._reaching: dict[TurnRef, asyncio.Lock] = {}
        # By turn: the worker that has taken it over.
        self._moved: OrderedDict[str, str] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._forwarders: dict[str, EventForwarder] = {}
        # By topic: the worker that runs a remote turn, and the events that it has sent.
        self._sources: dict[str, tuple[str, EventQueue]] = {}
        peers.on_message("look", self._on_look)
        peers.on_message("follow", self._on_follow)
        peers.on_message("cancel", self._on_cancel)
        for subject in ("give_up", "leave", "hold", "go_on"):
            peers.on_message(subject, partial(self._on_follower_message, subject))
        peers.when_gone(self._on_worker_gone)

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """One for each remote turn, done when it is over."""
        return tuple(self._tasks)

    @property
    def home(self) -> str:
        """The tag of this worker in the ids of its turns."""
        return tag_of(self._peers.worker)

    @property
    def has_others(self) -> bool:
        """Whether there are other workers."""
        return bool(self._peers.others)

    # --- in the follower ---

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn of another worker that is followed here already."""
        remote = self._remote.get(turn_id)
        return remote if remote is not None and remote.owner == owner else None

    async def snapshot(self, owner: Owner, turn_id: str, *, is_known: bool) -> bytes | None:
        """The encoded response so far of a turn that runs in another worker; None if there is none."""
        ref = TurnRef(owner, turn_id)
        answer = await self._ask_worker("look", ref, _pack(ref), is_known=is_known)
        return None if answer is None else answer[1]

    async def reach(self, owner: Owner, turn_id: str, *, is_known: bool) -> Running | None:
        """A turn that runs in another worker, or has just ended there; None if there is none."""
        ref = TurnRef(owner, turn_id)
        lock = self._reaching.setdefault(ref, asyncio.Lock())
        try:
            async with lock:
                if (running := self.find(owner, turn_id)) is not None:
                    return running
                started: asyncio.Future[Running | None] = asyncio.Future()
                spawn(self._follow(ref, started, is_known=is_known), self._tasks)
                return await started
        finally:
            if not lock.locked():
                self._reaching.pop(ref, None)

    async def _follow(
        self, ref: TurnRef, started: asyncio.Future[Running | None], *, is_known: bool
    ) -> None:
        """Follow one turn from its first event to its last."""
        topic = new_id("events")
        events: EventQueue = asyncio.Queue()
        try:
            async with self._bus.subscribe(
                topic, lambda body: events.put_nowait(_decode_events(body))
            ):
                answer = await self._request_events(ref, -1, topic, is_known=is_known)
                if answer is None:
                    return
                source, start = answer
                remote = RemoteTurn(ref.owner, start, partial(self._send, source, topic, ref))
                self._remote[ref.turn_id] = remote
                self._sources[topic] = (source, events)
                asyncio.get_running_loop().call_later(IDLE_S, remote.close_if_unheard)
                try:
                    await self._catch_up(remote, start.last, events)
                    if not started.done():
                        started.set_result(remote)
                    await self._receive_events(ref, remote, topic, events)
                finally:
                    del self._remote[ref.turn_id], self._sources[topic]
                    await self._peers.send("leave", topic.encode(), source)
        finally:
            if not started.done():
                started.set_result(None)

    async def _request_events(
        self, ref: TurnRef, after: int, topic: str, *, is_known: bool
    ) -> tuple[str, FollowStart] | None:
        """The worker that runs the turn, and its answer."""
        request = FollowRequest(ref.owner, ref.turn_id, after, topic)
        answer = await self._ask_worker("follow", ref, _pack(request), is_known=is_known)
        return None if answer is None else (answer[0], _decode_start(answer[1]))

    async def _ask_worker(
        self, subject: str, ref: TurnRef, body: bytes, *, is_known: bool
    ) -> tuple[str, bytes] | None:
        """The answer of the worker that began the turn. `is_known`: the store has the turn, and it has not ended: then
        any other worker may have taken it over."""
        tag = tag_of(self._moved.get(ref.turn_id, ref.turn_id))
        home = [worker for worker in self._peers.others if tag_of(worker) == tag]
        answer = await self._peers.find(subject, body, home)
        if answer is None and is_known:
            others = [worker for worker in self._peers.others if worker not in home]
            answer = await self._peers.find(subject, body, others)
            if answer is not None:
                self._moved[ref.turn_id] = answer[0]
                if len(self._moved) > MOVED_MAX:
                    self._moved.popitem(last=False)
        return answer

    def _send(self, source: str, topic: str, ref: TurnRef, subject: str) -> None:
        body = _pack(ref) if subject == "cancel" else topic.encode()
        spawn(self._peers.send(subject, body, source), self._tasks)

    async def _catch_up(self, remote: RemoteTurn, last: int, events: EventQueue) -> None:
        """Take the events so far first, so that a subscriber that attaches after a number gets none before it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                while remote.last < last:
                    batch = await events.get()
                    if batch is None or not remote.feed(batch):
                        events.put_nowait(None)
                        return

    async def _receive_events(
        self, ref: TurnRef, remote: RemoteTurn, topic: str, events: EventQueue
    ) -> None:
        over = asyncio.create_task(remote.is_over.wait())
        try:
            while not remote.is_over.is_set():
                getting = asyncio.create_task(events.get())
                either = asyncio.FIRST_COMPLETED
                await asyncio.wait([over, getting], timeout=self._silence_s, return_when=either)
                batch = getting.result() if getting.done() else None
                getting.cancel()
                is_sound = batch is not None and remote.feed(batch)
                if not is_sound and not remote.is_over.is_set():
                    await self._recover(ref, remote, topic)
        finally:
            over.cancel()

    async def _recover(self, ref: TurnRef, remote: RemoteTurn, topic: str) -> None:
        """The source was silent, or events were missed: follow the turn again, or read how it ended."""
        while not remote.is_over.is_set():
            answer = await self._request_events(ref, remote.last, topic, is_known=True)
            if answer is not None and answer[1].first <= remote.last + 1:
                return
            try:
                turn = await self._turns.read(ref.owner, ref.turn_id)
                written = await self._log.read_after(ref.owner, ref.turn_id, remote.last)
            except ApiError:
                log.warning("turn %s: neither its worker nor the store answers", ref.turn_id)
            else:
                if written:
                    remote.feed(written)
                elif turn is None or turn.response.status in ENDED:
                    response = remote.response if turn is None else turn.response
                    remote.feed([terminal_event(response, remote.last + 1)])
            await asyncio.sleep(LOOK_S)

    def _on_worker_gone(self, worker: str) -> None:
        for source, events in tuple(self._sources.values()):
            if source == worker:
                events.put_nowait(None)
        for topic, forwarder in tuple(self._forwarders.items()):
            if forwarder.follower == worker:
                self._stop_forwarding(topic)

    # --- at the source ---

    async def _on_look(self, _: str, body: bytes) -> bytes | None:
        ref = _decode_ref(body)
        running = self._find(ref.owner, ref.turn_id)
        return encode(running.visible) if running is not None and running.is_stored else None

    async def _on_follow(self, follower: str, body: bytes) -> bytes | None:
        request = _decode_request(body)
        running = self._find(request.owner, request.turn_id)
        if running is None or not running.is_stored:
            return None
        self._stop_forwarding(request.topic)
        forwarder = EventForwarder(self._bus, request, follower, self._stop_forwarding)
        self._forwarders[request.topic] = forwarder
        first = running.attach_from_oldest(forwarder)
        return encode(FollowStart(running.visible, max(first, request.after + 1), running.last))

    async def _on_cancel(self, _: str, body: bytes) -> None:
        ref = _decode_ref(body)
        running = self._find(ref.owner, ref.turn_id)
        if running is not None:
            running.notify(Cancel())

    async def _on_follower_message(self, subject: str, _: str, body: bytes) -> None:
        forwarder = self._forwarders.get(body.decode())
        if forwarder is None:
            return
        running = forwarder.running
        forwarder.is_held = subject == "hold"
        if subject == "go_on":
            running.wake()
        elif subject != "hold":
            self._stop_forwarding(body.decode())
            is_wanted = running.is_ended or running.has_subscribers or running.is_background
            if subject == "give_up" and not is_wanted:
                running.notify(Cancel())

    def _stop_forwarding(self, topic: str) -> None:
        forwarder = self._forwarders.pop(topic, None)
        if forwarder is not None:
            forwarder.running.detach(forwarder)
