"""One call of the model: which pieces are taken where they arrive, and when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from segue.ids import item_ids
from segue.seams.model import (
    Delta,
    Deltas,
    Finish,
    ItemOpened,
    ItemText,
    Job,
    JobStarted,
    Parsed,
    Piece,
    Sampling,
    Scene,
)
from segue.seams.prompt import NO_IDS, NO_TOKENS
from segue.turn.assemble import Assembler
from segue.turn.compose import NO_HEAD
from segue.turn.notices import Cancel
from segue.turn.plan import Tally
from segue.turn.resources import Filter
from segue.turn.running import Running
from segue.turn.sampling import OVER_PIECES_MAX, ModelCall
from tests.contracts.turns import response_of
from tests.turn.test_loop import Ear

WORD = Deltas((Delta(text="word"),))


class WordReader:
    """Reads each piece as a word of one message."""

    def __init__(self) -> None:
        self.is_over = False
        self._is_open = False

    def feed(self, piece: Piece) -> list[Parsed]:
        opened: list[Parsed] = [] if self._is_open else [ItemOpened("message")]
        self._is_open = True
        return [*opened, ItemText("word")]

    def close(self, *, is_cut: bool) -> list[Parsed]:
        return []


class Shut:
    """A filter through which nothing passes."""

    is_shut = True

    async def feed(self, parsed: list[Parsed]) -> list[Parsed]:
        return []

    close = feed


class PushingEngine:
    """Yields a piece and pushes three more, of which it yields those that are not taken; then it goes on for ever."""

    def __init__(self, before: Callable[[int], object]) -> None:
        self.taken: list[bool] = []
        self._before = before

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        yield JobStarted(route="a")
        yield WORD
        for number in range(3):
            self._before(number)
            self.taken.append(job.take is not None and job.take(WORD))
            if not self.taken[-1]:
                yield WORD
        while True:
            await asyncio.sleep(0)
            yield WORD


class Stage:
    """A call of the model, and who hears it."""

    def __init__(self, *filters: Filter) -> None:
        first = response_of("resp_1", status="in_progress")
        self.running = Running("ada", Assembler(first, item_ids("resp_1")), is_stored=False)
        self.running.publish(self.running.assembler.start())
        self.ear, self.reader, self.tally = Ear(), WordReader(), Tally()
        self.running.attach(self.ear, after=self.running.last)
        self.call = ModelCall(self.running, self.tally, self.reader, filters, NO_IDS)

    async def run(self, before: Callable[[int], object] = lambda number: None) -> list[bool]:
        """Which of the pushed pieces were taken, once the call is over."""
        engine = PushingEngine(before)
        job = Job(NO_TOKENS, Scene(NO_HEAD, None, ()), Sampling(), frozenset(), None)
        self.finish = await self.call.run(cast(Any, engine), job)
        return engine.taken

    def end(self, number: int) -> None:
        """The model has said all that it may."""
        self.reader.is_over = True

    @property
    def words(self) -> int:
        return self.ear.types.count("output_text.delta")


async def test_pieces_after_the_first_are_taken_where_they_arrive() -> None:
    stage = Stage()
    assert await stage.run(lambda number: number == 2 and stage.end(number)) == [True, True, False]
    # Those that follow are read for what the engine has still to say, up to a limit.
    assert stage.words == stage.call.tokens == 3 + OVER_PIECES_MAX + 1
    assert stage.finish == Finish("stop")
    assert stage.tally.started.route == "a"
    assert [span.stage for span in stage.tally.spans] == ["first_token"]


async def test_piece_waits_while_a_subscriber_is_full() -> None:
    stage = Stage()

    def fill(number: int) -> None:
        stage.ear.is_full = number == 0
        if number == 0:
            asyncio.get_running_loop().call_soon(drain)
        if number == 2:
            stage.end(number)

    def drain() -> None:
        stage.ear.is_full = False
        stage.running.wake()

    assert await stage.run(fill) == [False, True, False]


async def test_notice_stops_the_call_and_nothing_more_is_taken() -> None:
    stage = Stage()
    assert not any(await stage.run(lambda number: stage.running.notify(Cancel())))
    assert stage.finish is None
    assert stage.call.tokens >= 1


async def test_nothing_is_taken_past_a_filter_and_one_that_is_shut_ends_the_call() -> None:
    stage = Stage(Shut())
    assert await stage.run() == []
    assert (stage.finish, stage.words, stage.call.tokens) == (Finish("stop"), 0, 1)
