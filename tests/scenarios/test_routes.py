"""Workers in front of three replicas that count blocks: every way to continue finds its history, and limits hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from segue.cluster.hub import Hub
from segue.server.app import WorkerPlace
from segue_fleet.blocks import ReplicaShape
from segue_fleet.replica import Replica, serve
from segue_fleet.words import known_words, tokenizer_path
from tests.support import Answer, Served, fetch, serving, until, wire

MODEL = "counted"
PARALLEL = 4
SESSIONS_MAX = 20
# Slots enough for whatever comes: the limit is ours.
SHAPE = ReplicaShape(
    kv_tokens=200_000, slots=64, prefill_tps=50_000, decode_tps=1_000, block_tokens=16
)
# Long enough that a history that is not found is noticed.
LONG = "word " * 400


@dataclass
class Crew:
    """Two workers that know each other, and their replicas."""

    workers: list[Served]
    replicas: list[Replica]
    place: WorkerPlace
    flags: dict[str, Any]
    stack: AsyncExitStack

    @property
    def jobs(self) -> int:
        return sum(len(one.arrivals) for one in self.replicas)

    async def start(self) -> Served:
        """One more worker, as after a restart."""
        served = await self.stack.enter_async_context(serving(self.place, **self.flags))
        await until(
            lambda: served.app.state.peers is not None and len(served.app.state.peers.others) >= 1
        )
        return served

    def lost(self, since: int) -> int:
        """Tokens of the prompts after the first so many that were computed although they had been sent before."""
        arrivals = [one for replica in self.replicas for one in replica.arrivals]
        arrivals.sort(key=lambda one: one.at_s)
        known: set[int] = set()
        lost = 0
        for number, one in enumerate(arrivals):
            had = next((n for n, digest in enumerate(one.digests) if digest not in known), 0)
            had = min(had * SHAPE.block_tokens, one.prompt_tokens - 1)
            lost += max(0, had - one.found_tokens) if number >= since else 0
            known |= set(one.digests)
        return lost // SHAPE.block_tokens

    def most_at_once(self) -> int:
        """How many jobs a replica had at the same time."""
        most = 0
        for replica in self.replicas:
            times = [(one.at_s, 1) for one in replica._served]
            times += [(one.end_at_s, -1) for one in replica._served]
            count = 0
            for _, change in sorted(times):
                count += change
                most = max(most, count)
        return most


@pytest.fixture(params=["hub", "postgres"])
async def crew(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Crew]:
    async with AsyncExitStack() as stack:
        replicas, urls = [], []
        for _ in range(3):
            replica = Replica(SHAPE, model=MODEL, words=known_words().words, time_factor=2)
            server = await serve(replica, 0)
            stack.callback(server.close)
            replicas.append(replica)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        flags: dict[str, Any] = {
            "engine": "vllm",
            "model": [MODEL],
            "tokenizer": str(tokenizer_path()),
            "engine_url": urls,
            "engine_parallel": PARALLEL,
            "seal_keys": str(tmp_path / "seals"),
        }
        place = WorkerPlace(group="here", hub=str(tmp_path / "hub"))
        if request.param == "hub":
            flags["store"] = f"sqlite:///{tmp_path / 'shared.db'}"
            await stack.enter_async_context(Hub().opened(place.hub))
        else:
            database = request.getfixturevalue("postgres")
            flags["store"] = await database.make_database()
            stack.push_async_callback(database.drop_database, flags["store"])
        crew = Crew([], replicas, place, flags, stack)
        for _ in range(2):
            crew.workers.append(await stack.enter_async_context(serving(place, **flags)))
        await until(lambda: all(one.app.state.peers.others for one in crew.workers))
        yield crew


async def post(served: Served, **fields: Any) -> Answer:
    body = {"model": MODEL, "max_output_tokens": 20, "instructions": LONG, **fields}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 200, answer.json
    return answer


async def resend(served: Served, history: list[Any], text: str) -> None:
    """A client that sends its whole history."""
    history.append({"role": "user", "content": f"{text} {LONG}"})
    answer = await post(served, input=history)
    history.extend(answer.json["output"])


async def test_every_worker_finds_a_history_and_all_of_them_keep_a_limit(crew: Crew) -> None:
    here, there = crew.workers
    histories: list[list[Any]] = []
    # Where a session begins depends on the addresses of the replicas; all of the first four may meet.
    while len(histories) < 4 or sum(bool(one.arrivals) for one in crew.replicas) < 2:
        assert len(histories) < SESSIONS_MAX, "all sessions begin at one replica"
        histories.append([])
        await resend(here, histories[-1], f"Session {len(histories)}.")
    first = crew.jobs
    for history in histories:
        await resend(there, history, "Then?")
        await resend(here, history, "And then?")
    fresh = await crew.start()
    for history in histories:
        await resend(fresh, history, "At last?")
    assert crew.lost(first) == 0

    # The same for turns that name their parent, forks included, and on a socket.
    chains = [await post(here, input=f"Chain {number}. {LONG}") for number in range(2)]
    first = crew.jobs
    for chain in chains:
        parent = chain.json["id"]
        second = await post(there, input=LONG, previous_response_id=parent)
        await post(fresh, input="Fork.", previous_response_id=parent)
        async with wire(fresh) as socket:
            await socket.create(
                model=MODEL,
                instructions=LONG,
                input="On.",
                max_output_tokens=20,
                previous_response_id=second.json["id"],
            )
            assert (await socket.events())[-1]["type"] == "response.completed"
    assert crew.lost(first) == 0

    # What a compaction leaves stays where the history was.
    before = [len(one.arrivals) for one in crew.replicas]
    parent = second.json["id"]
    manage = [{"type": "compaction", "compact_threshold": 1_000}]
    compacted = await post(
        here, input="More.", previous_response_id=parent, context_management=manage
    )
    assert "compaction" in {item["type"] for item in compacted.json["output"]}
    new = [len(one.arrivals) - was for one, was in zip(crew.replicas, before, strict=True)]
    assert sorted(new) == [0, 0, 2]
    assert crew.lost(first) == 0
    page = (await fetch(there, "GET", "/metrics")).body.decode()
    assert 'reason="parent"' in page
    assert 'reason="beginning"' in page

    # Many at once, at all workers and then at one that had none: never more than the limit, and all are answered.
    await asyncio.gather(
        *(post(one, input=f"At once {n}.") for n in range(10) for one in (here, there))
    )
    await asyncio.gather(*(post(fresh, input=f"Alone {n}.") for n in range(14)))
    assert crew.most_at_once() <= PARALLEL
