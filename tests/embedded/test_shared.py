"""An engine that another process shares: its errors arrive as they are, and its absence is said in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from segue.errors import ApiError, EngineFailed, InvalidRequest, Unavailable, context_overflow
from segue.seams.model import EngineFacts, Finish, Ids, Job, Piece, Sampling, Scene, TokenLogprob
from segue.seams.prompt import Head, Tokens, id_array
from segue_embedded.shared import SharedEngine, sharing

WAIT_S = 10
LOGPROBS = [TokenLogprob(-0.25, ((5, -0.25), (6, -2.0))), None]


def job(*, schema: bytes | None = None) -> Job:
    ids = id_array([1, 2, 70_000])
    prompt = Tokens(None, ids[:1], 1).plus(ids[1:])
    return Job(
        prompt=prompt,
        scene=Scene(Head(), None, ()),
        sampling=Sampling(temperature=0.5, top_p=0.25),
        stops=frozenset({7, 9}),
        output_tokens_max=11,
        schema=schema,
        owner="anna",
        lane="1/2",
    )


class Recorder:
    """An engine that keeps its jobs, says something, and ends as it is told to."""

    can_constrain = True
    facts = EngineFacts()

    def __init__(self, end: Exception | None = None) -> None:
        self.jobs: list[Job] = []
        self.is_closed = asyncio.Event()
        self._end = end

    async def is_ready(self) -> bool:
        return self._end is None

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        self.jobs.append(job)
        try:
            yield Ids([5, 100_000], LOGPROBS)
            if self._end is not None:
                raise self._end
            yield Finish("stop", cached_tokens=3, output_tokens=2)
        finally:
            self.is_closed.set()


async def test_job_and_answer_arrive_as_they_are(tmp_path: Path) -> None:
    engine = Recorder()
    async with sharing(engine, tmp_path / "engine"):
        shared = SharedEngine(tmp_path / "engine")
        pieces = [piece async for piece in shared.sample(job(schema=b"{}"))]
        assert await shared.is_ready()
    ids, finish = pieces
    assert isinstance(ids, Ids)
    assert list(ids.ids) == [5, 100_000]
    assert list(ids.logprobs) == LOGPROBS
    assert finish == Finish("stop", cached_tokens=3, output_tokens=2)
    (heard,) = engine.jobs
    assert isinstance(heard.prompt, Tokens)
    assert list(heard.prompt.flat()) == [1, 2, 70_000]
    assert (heard.stops, heard.output_tokens_max, heard.schema) == (frozenset({7, 9}), 11, b"{}")
    assert (heard.sampling, heard.owner, heard.lane) == (job().sampling, "anna", "1/2")


@pytest.mark.parametrize(
    "end, kind",
    [
        (context_overflow(9, 8), InvalidRequest),
        (Unavailable("later", wait_s=3), Unavailable),
        (EngineFailed("broke"), EngineFailed),
        (RuntimeError("secret"), EngineFailed),
    ],
)
async def test_errors_arrive_by_their_kind(
    tmp_path: Path, end: Exception, kind: type[ApiError]
) -> None:
    async with sharing(Recorder(end), tmp_path / "engine"):
        shared = SharedEngine(tmp_path / "engine")
        assert not await shared.is_ready()
        with pytest.raises(kind) as raised:
            async for _ in shared.sample(job()):
                pass
    if isinstance(end, ApiError):
        assert (raised.value.code, raised.value.message) == (end.code, end.message)
        assert raised.value.wait_s == end.wait_s
    assert "secret" not in raised.value.message


async def test_leaving_early_frees_the_engine(tmp_path: Path) -> None:
    engine = Recorder()
    async with sharing(engine, tmp_path / "engine"):
        async with aclosing(SharedEngine(tmp_path / "engine").sample(job())) as pieces:
            await anext(pieces)
        async with asyncio.timeout(WAIT_S):
            await engine.is_closed.wait()


async def test_absent_engine_is_unavailable(tmp_path: Path) -> None:
    shared = SharedEngine(tmp_path / "nobody")
    assert not await shared.is_ready()
    with pytest.raises(Unavailable):
        async for _ in shared.sample(job()):
            pass
