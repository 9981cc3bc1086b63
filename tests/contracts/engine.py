"""What every `Engine` must do: jobs to give it, and one function for each promise.

A `Bench` is an engine with the dialect that its jobs are written in. The promises are those of `seams/`: ids,
then one `Finish`; never more than was asked for; closing or cancelling at any moment leaves it free for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile

import msgspec

from segue.dialects.chatml import SMOLLM2
from segue.dialects.family import TokenDialect
from segue.seams.model import Dialect, Engine, Finish, Ids, Job, JobStarted, Piece, Sampling, Scene
from segue.seams.prompt import Head
from segue.vocabularies.load import vocabulary_from_gguf
from segue.wire.items import Item
from segue_embedded.weights import find_weights
from tests.contracts.turns import said

WAIT_S = 20
# Enough for any answer of these tests, and a bound for an engine that would never stop.
TOKENS_MAX = 4_096


@cache
def chatml() -> TokenDialect:
    """One dialect for all tests of a process: reading the vocabulary takes a moment."""
    path = find_weights("smollm2")
    return TokenDialect(SMOLLM2, vocabulary_from_gguf(path))


@dataclass(frozen=True)
class Bench:
    """An engine under test."""

    engine: Engine
    dialect: Dialect

    def job(
        self,
        *given: Item,
        head: Head = Head(),  # noqa: B008  # a value that nobody can change
        model_turns: int = 0,
        output_tokens_max: int | None = TOKENS_MAX,
    ) -> Job:
        """A job as a turn would make it."""
        scene = Scene(head, None, given or (said("Hello there"),))
        return Job(
            prompt=self.dialect.render(scene).prompt,
            scene=scene,
            sampling=Sampling(),
            stops=self.dialect.stops,
            output_tokens_max=output_tokens_max,
            model_turns=model_turns,
        )


async def sampled(engine: Engine, job: Job) -> list[Piece]:
    """All pieces of the answer."""
    async with asyncio.timeout(WAIT_S), aclosing(engine.sample(job)) as pieces:
        return [piece async for piece in pieces]


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    """The ids that were sampled, joined."""
    return [id for piece in pieces if isinstance(piece, Ids) for id in piece.ids]


async def streams_ids_then_one_finish(bench: Bench) -> None:
    """A `JobStarted` if there is one, pieces that are not empty, then one `Finish`."""
    pieces = await sampled(bench.engine, bench.job())

    assert isinstance(pieces[-1], Finish)
    spoken = list(dropwhile(lambda piece: isinstance(piece, JobStarted), pieces))
    assert all(isinstance(piece, Ids) and len(piece.ids) for piece in spoken[:-1])
    assert ids_of(pieces)


async def ends_its_turn_with_a_stop(bench: Bench) -> None:
    """A model that ends by itself reports `stop`, with its end mark as the last id and nowhere before."""
    job = bench.job()
    pieces = await sampled(bench.engine, job)

    ids = ids_of(pieces)
    assert msgspec.structs.asdict(pieces[-1])["reason"] == "stop"  # type: ignore[arg-type]
    assert ids[-1] in job.stops
    assert not job.stops & set(ids[:-1])


async def honours_the_limit(bench: Bench) -> None:
    """Never an id too many, at any limit, none at all for a warm-up; and `Finish` says whether that was the reason."""
    whole = ids_of(await sampled(bench.engine, bench.job()))

    for limit in sorted({0, 1, 2, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 1}):
        pieces = await sampled(bench.engine, bench.job(output_tokens_max=limit))
        assert ids_of(pieces) == whole[:limit]
        assert isinstance(pieces[-1], Finish)
        assert pieces[-1].reason == ("length" if limit < len(whole) else "stop")


async def knows_its_own_room(bench: Bench) -> None:
    """A job without a limit is answered in full, and what the engine says of itself it says once it is ready."""
    whole = ids_of(await sampled(bench.engine, bench.job()))

    assert await bench.engine.is_ready()
    facts = bench.engine.facts
    assert ids_of(await sampled(bench.engine, bench.job(output_tokens_max=None))) == whole
    assert bench.engine.facts == facts
    assert facts.context_tokens is None or facts.context_tokens > len(whole)


async def closing_frees_it(bench: Bench) -> None:
    """Closed before the first piece, after it, and at the end: the next job is answered as usual."""
    whole = ids_of(await sampled(bench.engine, bench.job()))
    before = asyncio.all_tasks()

    for taken in (0, 1, 2):
        async with asyncio.timeout(WAIT_S):
            pieces = bench.engine.sample(bench.job())
            for _ in range(taken):
                await anext(pieces)
            await pieces.aclose()
    assert asyncio.all_tasks() == before
    assert ids_of(await sampled(bench.engine, bench.job())) == whole


async def cancelling_frees_it(bench: Bench) -> None:
    """A turn that is cancelled while it waits for the engine leaves no task and no busy slot."""
    whole = ids_of(await sampled(bench.engine, bench.job()))
    heard = asyncio.Event()

    async def listen() -> None:
        async with aclosing(bench.engine.sample(bench.job())) as pieces:
            async for _ in pieces:
                heard.set()

    before = asyncio.all_tasks()
    listening = asyncio.create_task(listen())
    async with asyncio.timeout(WAIT_S):
        await heard.wait()
        listening.cancel()
        await asyncio.wait([listening])

    assert listening.cancelled() or listening.exception() is None
    assert asyncio.all_tasks() == before
    assert ids_of(await sampled(bench.engine, bench.job())) == whole


async def serves_jobs_beside_each_other(bench: Bench) -> None:
    """Answers to several jobs at once are each the answer to its own."""
    jobs = [bench.job(said(f"Number {n}")) for n in range(4)]
    alone = [ids_of(await sampled(bench.engine, job)) for job in jobs]

    together = await asyncio.gather(*(sampled(bench.engine, job) for job in jobs))

    assert [ids_of(pieces) for pieces in together] == alone


async def says_whether_it_is_ready(bench: Bench) -> None:
    """An engine that is ready takes a job."""
    async with asyncio.timeout(WAIT_S):
        assert await bench.engine.is_ready() is True
    assert isinstance(bench.engine.can_constrain, bool)
