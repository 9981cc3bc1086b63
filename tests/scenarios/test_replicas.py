"""What an operator sees of replicas that count their blocks: drained, returned, restarted, with the chains that move.

The replicas are real HTTP servers with a prefix cache and no model (`segue_fleet`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from segue.server.control import DrainOrder
from segue_dashboard.fleet import (
    ConversationRow,
    LostPrefixes,
    ReplicaRow,
    joined_rows,
    joined_visits,
)
from segue_fleet.blocks import ReplicaShape
from segue_fleet.replica import Replica, ReplicaConnection, Words
from tests.contracts.dialect import find_weights
from tests.engines.asking import STOP
from tests.postgres import PostgresServer
from tests.support import Served, fetch, serving, until

SHAPE = ReplicaShape(kv_tokens=50_000, slots=4, prefill_tps=1e6, decode_tps=1e5, block_tokens=16)
RULES = "Follow the rules of the house. " * 60


class Machine:
    """A replica that can be restarted, with an empty cache, at the same port."""

    def __init__(self) -> None:
        self._connections: list[ReplicaConnection] = []
        self._server: asyncio.Server | None = None
        self._port = 0

    async def start(self) -> None:
        replica = Replica(SHAPE, model="counted", time_factor=10, words=Words([50, 51], stop=STOP))

        def connected() -> ReplicaConnection:
            self._connections.append(ReplicaConnection(replica))
            return self._connections[-1]

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for one in self._connections:
            if one._transport is not None:
                one._transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


@asynccontextmanager
async def staged(
    count: int = 2, store: str = "memory"
) -> AsyncIterator[tuple[Served, dict[str, Machine]]]:
    """A server with so many replicas."""
    machines = [Machine() for _ in range(count)]
    for one in machines:
        await one.start()
    by_url = {one.url: one for one in machines}
    async with serving(**in_front_of(by_url), store=store) as served:
        yield served, by_url
    for one in machines:
        one.stop()


def in_front_of(machines: Iterable[str]) -> dict[str, Any]:
    flags = {"engine": "vllm", "engine_url": list(machines), "model": ["counted"]}
    return {**flags, "tokenizer": str(find_weights("smollm2"))}


@asynccontextmanager
async def second(first: Served, store: str, machines: Iterable[str]) -> AsyncIterator[Served]:
    """A server on another machine, with the same store and replicas."""
    async with serving(**in_front_of(machines), store=store) as served:
        await until(lambda: all(one.app.state.peers.others for one in (first, served)))
        yield served


async def restart(served: Served, machine: Machine) -> None:
    """Stop a replica and start it again; a health check in between notices it."""
    engine = served.app.runner.models["counted"].engine
    machine.stop()
    await engine.is_ready()
    await machine.start()
    await engine.is_ready()


async def ask(served: Served, parent: str | None = None, words: str = "x") -> tuple[str, Any]:
    """A turn: its id, and the report on its prompt."""
    body = {"model": "counted", "input": words, "instructions": RULES, "max_output_tokens": 4}
    answer = await fetch(served, "POST", "/v1/responses", {**body, "previous_response_id": parent})
    turn_id = str(answer.json["id"])
    return turn_id, (await fetch(served, "GET", f"/v1/responses/{turn_id}/cache")).json


async def fleet_of(served: Served) -> dict[str, Any]:
    """The replicas by name, when all turns are counted."""
    await fetch(served, "GET", "/metrics")
    view = (await fetch(served, "GET", "/dashboard/fleet")).json
    assert (view["object"], len(view["processes"]), view["processes_known"]) == ("fleet", 1, 1)
    return {one["name"]: one for one in view["replicas"]}


async def test_lost_prefixes_are_seen_by_reason_and_replica() -> None:
    async with staged() as (served, machines):
        first, report = await ask(served)
        assert report["verdict"] == "first"
        second, report = await ask(served, first)
        assert report["verdict"] == "hit"
        rows = await fleet_of(served)
        (home,) = (name for name, one in rows.items() if one["turns"])
        (other,) = machines.keys() - {home}
        assert (rows[home]["turns"], rows[home]["state"], rows[home]["lost"]) == (2, "up", [])
        assert rows[home]["cached_tokens"] > 300
        assert rows[home]["prefill_tokens_s"] > 0

        await served.app.drains.order(msgspec.json.encode(DrainOrder(home, is_drained=True)))
        third, report = await ask(served, second)
        assert (report["verdict"], report["reason"]) == ("engine_lost", "engine_drained")
        fourth, report = await ask(served, third)
        assert report["verdict"] == "hit", "it stays where it has moved to"
        await served.app.drains.order(msgspec.json.encode(DrainOrder(home, is_drained=False)))

        await restart(served, machines[other])
        _, report = await ask(served, fourth)
        assert report["reason"] == "engine_restarted"

        rows = await fleet_of(served)
        assert [one["reason"] for one in rows[other]["lost"]] in (
            ["engine_drained", "engine_restarted"],
            ["engine_restarted", "engine_drained"],
        )
        page = (await fetch(served, "GET", "/metrics")).body.decode()
        labels = f'model="counted",reason="engine_drained",replica="{other}"'
        assert f"segue_engine_surprises_total{{{labels}}} 1.0" in page
        assert f'segue_engine_drained{{replica="{home}"}} 0.0' in page


async def conversations_of(served: Served, *others: Served) -> dict[str, tuple[int, int, str]]:
    """Turns, moves and last replica of each, as a server knows them together with these others."""
    for one in (served, *others):
        await fetch(one, "GET", "/metrics")
    rows = (await fetch(served, "GET", "/dashboard/fleet")).json["conversations"]
    return {one["id"]: (one["turns"], one["moves"], one["replica"]) for one in rows}


async def test_operator_of_two_machines_sees_each_conversation_once(
    postgres: PostgresServer,
) -> None:
    """Turns alternate between the machines; one conversation moves, because its replica is drained before it ends."""
    store = await postgres.make_database()
    try:
        async with staged(store=store) as (here, machines), second(here, store, machines) as there:
            firsts = [(await ask(here, None, f"Question {at}"))[0] for at in range(5)]
            seconds = [(await ask(there, first))[0] for first in firsts]
            for parent in seconds[1:]:
                await ask(here, parent)
            *_, home = (await conversations_of(here, there))[firsts[0]]
            await here.app.drains.order(msgspec.json.encode(DrainOrder(home, is_drained=True)))
            await ask(here, seconds[0])

            seen = await conversations_of(here, there)
            moves = dict.fromkeys(firsts, 0) | {firsts[0]: 1}
            assert {name: one[:2] for name, one in seen.items()} == {
                first: (3, moves[first]) for first in firsts
            }
            assert seen[firsts[0]][2] != home
            assert await conversations_of(there, here) == seen
    finally:
        await postgres.drop_database(store)


async def test_history_that_is_resent_is_one_conversation() -> None:
    async with staged() as (served, _):
        history: list[Any] = []
        for words in ("one", "two", "three"):
            history.append({"role": "user", "content": words})
            body = {"model": "counted", "input": history, "max_output_tokens": 4}
            answer = (await fetch(served, "POST", "/v1/responses", body)).json
            history += answer["output"]
        assert [turns for turns, *_ in (await conversations_of(served)).values()] == [3]


def test_turns_of_a_conversation_are_joined_in_the_order_of_time() -> None:
    here = {"resp_a": {"r1": [3.0, 1.0]}, "resp_b": {"r1": [9.0]}}
    there = {"resp_a": {"r2": [2.0], "r1": [4.0]}}
    assert joined_visits([here, there]) == [
        ConversationRow("resp_b", 1, "r1", 0),
        ConversationRow("resp_a", 4, "r1", 2),
    ]


def test_rows_of_all_processes_become_one() -> None:
    def row(state: Any, lost: list[LostPrefixes], rate: float | None = None) -> ReplicaRow:
        fields: dict[str, Any] = {"state": state, "lost": lost, "prefill_tokens_s": rate}
        return ReplicaRow(model="m", name="r", running=1, waiting=2, input_tokens=10, **fields)

    here = row("drained", [LostPrefixes("engine_down", 1, 300)], 1_000.0)
    there = row("up", [LostPrefixes("engine_down", 1, 400), LostPrefixes("engine_busy", 1, 900)])
    (one,) = joined_rows([here, there])
    assert (one.state, one.running, one.waiting, one.input_tokens) == ("up", 2, 4, 20)
    assert one.lost == [LostPrefixes("engine_busy", 1, 900), LostPrefixes("engine_down", 2, 700)]
    assert one.prefill_tokens_s == 1_000.0
