"""Does Segue keep conversations warm through a real Dynamo? Its own front and router, four simulated workers.

Run by `make test-dynamo`, in a network namespace. The workers play given answers, so that their caches hold prompt and
answer; what was found is what they report. Figures of a run are printed with `-s` and stand in docs/engines/dynamo.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from segue.engines.dynamo import DYNAMO
from segue.engines.token_engine import TokenRequest
from segue.seams.model import Job
from segue.server import models
from tests.dynamo.rig import AFFINITY, MODEL, SCRIPT, SCRIPT_TURNS, Rig, dynamo, write_answers
from tests.dynamo.sessions import TURNS, Client, Found, sessions
from tests.support import Served, fetch, metric, serving, wire

pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(300)]

KEPT = ("--migration-limit", "3")
WAYS = ("socket", "http")


@contextmanager
def rig(
    folder: Path, *, router: str = "kv", front: tuple[str, ...] = (), **flags: int
) -> Iterator[Rig]:
    """A front whose workers play the script."""
    answers = write_answers(folder / "answers.jsonl")
    mock = ("--response-replay-trace-path", str(answers))
    with dynamo(folder, router=router, front=front, mock=mock, **flags) as started:
        yield started


@asynccontextmanager
async def served(started: Rig, engine: str = "dynamo", **flags: object) -> AsyncIterator[Served]:
    """Segue in front of it."""
    where = {"engine": engine, "engine_url": [started.url], "model": [MODEL]}
    async with serving(**where, tokenizer=str(started.model), **flags) as found:
        yield found


@pytest.fixture(autouse=True)
def plays_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated workers are told which answer to play; nothing else of a request is changed."""

    def request(job: Job, model: str, known: None) -> TokenRequest:
        made = DYNAMO.request(job, model, known)
        played = f"output_replay_id:{SCRIPT}:{job.model_turns % SCRIPT_TURNS}"
        nvext = made.fields["nvext"] | {"annotations": [played]}  # type: ignore[operator]
        return structs.replace(made, fields=made.fields | {"nvext": nvext})

    played = models._tokens_over_http(structs.replace(DYNAMO, request=request))
    monkeypatch.setitem(models.BUILDERS, "dynamo", played)  # type: ignore[arg-type]


def say(name: str, found: Found) -> None:
    print(f"{name}: {found.turns} turns, {100 * found.share:.1f} % of {found.held} tokens")


async def test_header_keeps_every_chain_on_its_worker(tmp_path: Path) -> None:
    """At least 99 % of what parents held, over sockets and HTTP; a fork finds its parent; and a worker process that is
    killed fails no turn."""
    with rig(tmp_path, front=(*AFFINITY, *KEPT), processes=2) as started:
        async with served(started) as server:
            for way in WAYS:
                found = await Client(server, way, MODEL).play(sessions(8))
                say(f"kv and header, {way}", found)
                assert not found.failed
                assert found.share >= 0.99
            await forks_find_their_parent(server)
            await killed_worker_fails_no_turn(started, server)


async def forks_find_their_parent(server: Served) -> None:
    """Eight children of one turn at once, and a child of each."""
    async with wire(server) as socket:
        text = " ".join(["parser"] * 2_000)
        root = (await socket.turn(model=MODEL, input=text, max_output_tokens=400))["response"]
    held = root["usage"]["total_tokens"]

    async def child(n: int, parent: str) -> dict[str, object]:
        body = {"model": MODEL, "input": f"fork {n}", "previous_response_id": parent}
        answer = await fetch(server, "POST", "/v1/responses", body)
        assert answer.status == 200
        return dict(answer.json)

    first = await asyncio.gather(*(child(n, root["id"]) for n in range(8)))
    second = await asyncio.gather(*(child(n, str(one["id"])) for n, one in enumerate(first)))
    cached = [one["usage"]["input_tokens_details"]["cached_tokens"] for one in (*first, *second)]  # type: ignore[index]
    print(f"forks: {held} tokens of the parent, found {cached}")
    assert min(cached) >= 0.99 * held


async def killed_worker_fails_no_turn(started: Rig, server: Served) -> None:
    """Two of four workers end in the middle of it: their chains go on elsewhere."""
    client = Client(server, "socket", MODEL, seed=2)
    playing = asyncio.create_task(client.play(sessions(8)))
    await client.found.reached.wait()
    started.kill_workers()
    found = await playing
    say("one process of two killed", found)
    assert found.turns == 8 * TURNS
    assert found.failed == []


@pytest.mark.parametrize("router, least, most", [("round-robin", 0.0, 0.75), ("kv", 0.75, 0.99)])
async def test_router_without_the_header_finds_less(
    tmp_path: Path, router: str, least: float, most: float
) -> None:
    """Without affinity the header means nothing to it."""
    with rig(tmp_path, router=router) as started:
        async with served(started) as server:
            found = await Client(server, "socket", MODEL).play(sessions(8))
            say(router, found)
            assert not found.failed
            assert least <= found.share < most


async def test_priority_overtakes_in_the_router(tmp_path: Path) -> None:
    """One slow worker: twenty requests wait in the router's queue, and the one that comes last overtakes."""
    flags = ("--router-queue-threshold", "0.5")
    with rig(tmp_path, front=flags, workers=1, speedup=2) as started:
        async with served(started) as server:
            done: list[str] = []
            is_first_done = asyncio.Event()

            async def ask(name: str, tier: str) -> None:
                text = " ".join([name, *["parser"] * 4_000])
                body = {"model": MODEL, "input": text, "service_tier": tier, "store": False}
                # It is done as soon as its prompt is read.
                body |= {"max_output_tokens": 1}
                answer = await fetch(server, "POST", "/v1/responses", body)
                assert answer.json["service_tier"] == tier
                done.append(name)
                is_first_done.set()

            asking = [asyncio.create_task(ask(f"n{n}", "default")) for n in range(20)]
            await is_first_done.wait()
            await asyncio.gather(ask("urgent", "priority"), *asking)
            overtaken = len(done) - 1 - done.index("urgent")
            print(f"priority: the last of {len(done)} overtook {overtaken}")
            assert overtaken >= 5


async def test_sglang_codec_against_a_server_that_we_did_not_write(tmp_path: Path) -> None:
    """Dynamo's SGLang mode does not report cached tokens: its router's own counters say what was found."""
    with dynamo(tmp_path, engine="sglang", front=(*AFFINITY, *KEPT)) as started:
        async with served(started, "sglang") as server:
            found = await Client(server, "http", MODEL).play(sessions(4))
            assert not found.failed
            assert found.cached == 0
            prefix = "dynamo_component_router_kv"
            chosen = started.counted(f"{prefix}_selected_cached_prefix_tokens_total")
            best = started.counted(f"{prefix}_best_eligible_cached_prefix_tokens_total")
            print(f"sglang: {found.turns} turns, router found {chosen:.0f} of at best {best:.0f}")
            assert chosen >= 0.95 * best > 0


async def test_no_worker_is_503_until_one_comes(tmp_path: Path) -> None:
    with dynamo(tmp_path, workers=0, processes=0) as started:
        async with served(started) as server:
            answer = await fetch(server, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert json.loads(answer.body)["error"]["code"] == "server_is_overloaded"
            assert (await fetch(server, "GET", "/ready")).status == 503
            assert await metric(server, f'segue_engine_up{{replica="{started.url}"}}') == 0
