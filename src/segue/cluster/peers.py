"""Who else works here, and how are they asked?

A `Peers` makes questions and answers out of a `Bus`. Every worker says every few seconds that it is there; one that
has not been heard of for a while is gone. A question goes to those who are known, and is over when all have answered or
time is up: somebody who has just died must not hold anybody up for long.

    topic all            beat, bye, tell, ask      to everybody
    topic to/WORKER      ask, answer               to one

Workers of one house share a machine and a parent. Cancelling and following go to everybody; counters are put together
within a house, because whoever reads them reads every house.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Literal

import msgspec
from msgspec import Struct

from segue.errors import ApiError
from segue.ids import new_id
from segue.turn.seams import Bus

log = logging.getLogger(__name__)

# Several beats may be lost before a worker is taken for gone.
BEAT_S = 2.0
GONE_S = 7.0
# A worker answers within milliseconds; one that is busy with a long prompt within a few tenths.
ANSWER_S = 2.0
# Questions of others that are worked on at once: more than all workers of a service ask.
ASKED_MAX = 1_024

Answer = Callable[[str, bytes], Awaitable[bytes | None]]
Gone = Callable[[str], None]


class Word(Struct, frozen=True, array_like=True):
    """Everything that workers say to each other."""

    kind: Literal["beat", "bye", "tell", "ask", "answer"]
    worker: str
    house: str
    # Of a question, and of its answer.
    number: int = 0
    subject: str = ""
    # Of an answer: nothing, if there is nothing to say.
    body: bytes | None = b""
    # Of a beat: whether the others should say at once who they are.
    is_new: bool = False


_decode = msgspec.msgpack.Decoder(Word).decode
_encode = msgspec.msgpack.encode


class Question:
    """A question that waits for its answers."""

    def __init__(self, of: Collection[str], *, is_first_enough: bool) -> None:
        self._waiting = set(of)
        self._is_first_enough = is_first_enough
        self.answers: dict[str, bytes] = {}
        self.over = asyncio.Event()
        self._look()

    def take(self, worker: str, body: bytes | None) -> None:
        """An answer."""
        self._waiting.discard(worker)
        if body is not None:
            self.answers[worker] = body
        self._look()

    def give_up(self, worker: str) -> None:
        """This one will not answer."""
        self.take(worker, None)

    def _look(self) -> None:
        if not self._waiting or (self.answers and self._is_first_enough):
            self.over.set()


class Peers:
    """This worker among the others."""

    def __init__(self, bus: Bus, house: str = "") -> None:
        self.worker = new_id("worker")
        self.house = house or self.worker
        self._bus = bus
        # When each was last heard of, and its house.
        self._peers: dict[str, tuple[float, str]] = {}
        self._answers: dict[str, Answer] = {}
        self._gone: list[Gone] = []
        self._questions: dict[int, Question] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def others(self) -> list[str]:
        """Everybody else."""
        return list(self._peers)

    @property
    def housemates(self) -> list[str]:
        """The others of this house."""
        return [worker for worker, (_, house) in self._peers.items() if house == self.house]

    def answer(self, subject: str, call: Answer) -> None:
        """From now on questions and news about this are taken by this call."""
        assert subject not in self._answers, "a subject has one who knows it"
        self._answers[subject] = call

    def when_gone(self, call: Gone) -> None:
        """From now on this is called when somebody has gone."""
        self._gone.append(call)

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Be one of them while inside."""
        async with (
            self._bus.subscribe("all", self._hear),
            self._bus.subscribe(f"to/{self.worker}", self._hear),
        ):
            await self._say("all", self._word("beat", is_new=True))
            beating = asyncio.create_task(self._beat())
            try:
                yield
            finally:
                beating.cancel()
                await self._say("all", self._word("bye"))
                for task in tuple(self._tasks):
                    task.cancel()
                await asyncio.gather(beating, *self._tasks, return_exceptions=True)

    # --- speaking ---

    async def tell(self, subject: str, body: bytes, to: str | None = None) -> None:
        """Say something that needs no answer, to everybody else or to one; whoever cannot be reached misses it."""
        if to is not None or self._peers:
            await self._say(_topic(to), self._word("tell", subject=subject, body=body))

    async def ask(self, subject: str, body: bytes, of: Collection[str]) -> Mapping[str, bytes]:
        """What these have to say, by worker."""
        return (await self._ask(subject, body, of, is_first_enough=False)).answers

    async def find(self, subject: str, body: bytes) -> tuple[str, bytes] | None:
        """The first one who has something to say, and what."""
        question = await self._ask(subject, body, self.others, is_first_enough=True)
        return next(iter(question.answers.items()), None)

    async def _ask(
        self, subject: str, body: bytes, of: Collection[str], *, is_first_enough: bool
    ) -> Question:
        question = Question(of, is_first_enough=is_first_enough)
        if question.over.is_set():
            return question
        self._number += 1
        number = self._number
        self._questions[number] = question
        word = self._word("ask", number=number, subject=subject, body=body)
        try:
            for topic in ["all"] if set(of) == set(self._peers) else [_topic(one) for one in of]:
                await self._say(topic, word)
            with suppress(TimeoutError):
                await asyncio.wait_for(question.over.wait(), ANSWER_S)
        finally:
            del self._questions[number]
        return question

    def _word(
        self,
        kind: Literal["beat", "bye", "tell", "ask", "answer"],
        *,
        number: int = 0,
        subject: str = "",
        body: bytes | None = b"",
        is_new: bool = False,
    ) -> Word:
        return Word(kind, self.worker, self.house, number, subject, body, is_new)

    async def _say(self, topic: str, word: Word) -> None:
        try:
            await self._bus.publish(topic, _encode(word))
        except ApiError:
            log.warning("the other workers could not be told: %s %s", word.kind, word.subject)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(BEAT_S)
            await self._say("all", self._word("beat"))
            for worker, (heard_at, _) in tuple(self._peers.items()):
                if loop.time() - heard_at > GONE_S:
                    self._lose(worker)

    # --- listening ---

    def _hear(self, data: bytes) -> None:
        word = _decode(data)
        if word.worker == self.worker:
            return
        if word.kind == "bye":
            self._lose(word.worker)
            return
        is_known = word.worker in self._peers
        self._peers[word.worker] = (asyncio.get_running_loop().time(), word.house)
        if word.kind == "answer":
            if (question := self._questions.get(word.number)) is not None:
                question.take(word.worker, word.body)
        elif word.kind == "beat":
            if word.is_new or not is_known:
                self._spawn(self._say(_topic(word.worker), self._word("beat")))
        elif len(self._tasks) < ASKED_MAX:
            self._spawn(self._take(word))

    def _lose(self, worker: str) -> None:
        if self._peers.pop(worker, None) is None:
            return
        for question in tuple(self._questions.values()):
            question.give_up(worker)
        for call in self._gone:
            call(worker)

    async def _take(self, word: Word) -> None:
        """Answer a question, or take a piece of news in."""
        call, said = self._answers.get(word.subject), None
        try:
            if call is not None and word.body is not None:
                said = await call(word.worker, word.body)
        except Exception:
            log.exception("a worker's word about %s could not be taken", word.subject)
        if word.kind == "ask":
            answer = self._word("answer", number=word.number, subject=word.subject, body=said)
            await self._say(_topic(word.worker), answer)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _topic(worker: str | None) -> str:
    return "all" if worker is None else f"to/{worker}"
