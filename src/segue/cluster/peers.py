"""Which other workers are there, and how are they asked?

`Peers` makes questions and answers out of a `Bus`. Every worker sends a heartbeat every two seconds; a worker without
one for a while is gone. A question goes to the known workers and is over when all have answered or time is up: a worker
that has just died must not hold up a request for long.

    topic all            beat, bye, tell, ask      to all workers
    topic to/WORKER      ask, answer               to one worker

Workers of one group share a machine and a parent process. Cancelling and following go to all workers; counters are
added up within a group, because the metrics of every group are scraped separately.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct

from segue.aio import cancel_all, in_background, spawn
from segue.errors import ApiError
from segue.ids import new_id
from segue.seams.bus import Bus

log = logging.getLogger(__name__)

# Several heartbeats may be lost before a worker counts as gone.
HEARTBEAT_S = 2.0
GONE_S = 7.0
# A worker answers within milliseconds; one that is busy with a long prompt within a few tenths of a second.
ANSWER_S = 2.0
# Questions of other workers that are answered at once: more than all workers of a service ask.
HANDLED_MAX = 1_024

PeerHandler = Callable[[str, bytes], Awaitable[bytes | None]]
OnGone = Callable[[str], None]


class PeerMessage(Struct, frozen=True, array_like=True):
    """A message between workers."""

    kind: Literal["beat", "bye", "tell", "ask", "answer"]
    worker: str
    group: str
    # Of a question, and of its answer.
    number: int = 0
    subject: str = ""
    # None in an answer: this worker has nothing about the subject.
    body: bytes | None = b""
    # In a heartbeat: whether the others should send theirs at once.
    is_new: bool = False


_decode = msgspec.msgpack.Decoder(PeerMessage).decode
_encode = msgspec.msgpack.encode


class PendingQuestion:
    """A question that waits for its answers."""

    def __init__(self, of: Collection[str], *, is_first_enough: bool) -> None:
        self._waiting = set(of)
        self._is_first_enough = is_first_enough
        self.answers: dict[str, bytes] = {}
        self.over = asyncio.Event()
        self._check()

    def on_answer(self, worker: str, body: bytes | None) -> None:
        """A worker's answer; None if it has none, or is gone."""
        self._waiting.discard(worker)
        if body is not None:
            self.answers[worker] = body
        self._check()

    def _check(self) -> None:
        if not self._waiting or (self.answers and self._is_first_enough):
            self.over.set()


class Peers:
    """This worker among the others."""

    def __init__(self, bus: Bus, group: str = "") -> None:
        self.worker = new_id("worker")
        self.group = group or self.worker
        self._bus = bus
        self._message = partial(PeerMessage, worker=self.worker, group=self.group)
        # The time of each worker's last message, and its group.
        self._peers: dict[str, tuple[float, str]] = {}
        self._handlers: dict[str, PeerHandler] = {}
        self._on_gone: list[OnGone] = []
        self._questions: dict[int, PendingQuestion] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def others(self) -> list[str]:
        """All other workers."""
        return list(self._peers)

    @property
    def siblings(self) -> list[str]:
        """The other workers of this group."""
        return [worker for worker, (_, group) in self._peers.items() if group == self.group]

    def on_message(self, subject: str, call: PeerHandler) -> None:
        """From now on `call` handles questions and messages about this subject."""
        assert subject not in self._handlers, "a subject has one handler"
        self._handlers[subject] = call

    def when_gone(self, call: OnGone) -> None:
        """From now on `call` is called with each worker that is gone."""
        self._on_gone.append(call)

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Be one of the workers while inside."""
        async with (
            self._bus.subscribe("all", self._receive),
            self._bus.subscribe(f"to/{self.worker}", self._receive),
        ):
            await self._publish("all", self._message("beat", is_new=True))
            try:
                async with in_background("cluster_heartbeat", self._send_heartbeats):
                    yield
            finally:
                await self._publish("all", self._message("bye"))
                await cancel_all(self._tasks)

    # --- sending ---

    async def send(self, subject: str, body: bytes, to: str | None = None) -> None:
        """Send a message that needs no answer, to all other workers or to one; an unreachable worker misses it."""
        if to is not None or self._peers:
            await self._publish(_topic(to), self._message("tell", subject=subject, body=body))

    async def ask(self, subject: str, body: bytes, of: Collection[str]) -> Mapping[str, bytes]:
        """The answers of these workers, by worker."""
        return (await self._ask(subject, body, of, is_first_enough=False)).answers

    async def find(
        self, subject: str, body: bytes, of: Collection[str]
    ) -> tuple[str, bytes] | None:
        """The first of these workers that has an answer, and the answer."""
        question = await self._ask(subject, body, of, is_first_enough=True)
        return next(iter(question.answers.items()), None)

    async def _ask(
        self, subject: str, body: bytes, of: Collection[str], *, is_first_enough: bool
    ) -> PendingQuestion:
        question = PendingQuestion(of, is_first_enough=is_first_enough)
        if question.over.is_set():
            return question
        self._number += 1
        number = self._number
        self._questions[number] = question
        message = self._message("ask", number=number, subject=subject, body=body)
        is_for_all = len(of) > 1 and set(of) == set(self._peers)
        try:
            for topic in ["all"] if is_for_all else map(_topic, of):
                await self._publish(topic, message)
            with suppress(TimeoutError):
                await asyncio.wait_for(question.over.wait(), ANSWER_S)
        finally:
            del self._questions[number]
        return question

    async def _publish(self, topic: str, message: PeerMessage) -> None:
        try:
            await self._bus.publish(topic, _encode(message))
        except ApiError:
            log.warning("cluster message not sent: %s %s", message.kind, message.subject)

    async def _send_heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._publish("all", self._message("beat"))
            for worker, (heard_at, _) in tuple(self._peers.items()):
                if loop.time() - heard_at > GONE_S:
                    self._remove(worker)

    # --- receiving ---

    def _receive(self, data: bytes) -> None:
        message = _decode(data)
        if message.worker == self.worker:
            return
        if message.kind == "bye":
            self._remove(message.worker)
            return
        is_known = message.worker in self._peers
        self._peers[message.worker] = (asyncio.get_running_loop().time(), message.group)
        if message.kind == "answer":
            if (question := self._questions.get(message.number)) is not None:
                question.on_answer(message.worker, message.body)
        elif message.kind == "beat":
            if message.is_new or not is_known:
                spawn(self._publish(_topic(message.worker), self._message("beat")), self._tasks)
        elif len(self._tasks) < HANDLED_MAX:
            spawn(self._handle(message), self._tasks)

    def _remove(self, worker: str) -> None:
        if self._peers.pop(worker, None) is None:
            return
        for question in tuple(self._questions.values()):
            question.on_answer(worker, None)
        for call in self._on_gone:
            call(worker)

    async def _handle(self, message: PeerMessage) -> None:
        """Call the handler of a message, and send its result if it was a question."""
        call = self._handlers.get(message.subject)
        body = None
        try:
            if call is not None and message.body is not None:
                body = await call(message.worker, message.body)
        except Exception:
            log.exception("handler for cluster message %s failed", message.subject)
        if message.kind == "ask":
            answer = self._message(
                "answer", number=message.number, subject=message.subject, body=body
            )
            await self._publish(_topic(message.worker), answer)


def _topic(worker: str | None) -> str:
    return "all" if worker is None else f"to/{worker}"
