"""Does Segue work in front of SGLang's router, and behind it? The real router (`smg`), in a network namespace.

Run by `make test-routers`. In front of it: the router's workers are two Dynamo fronts in SGLang mode, each with one
simulated worker, whose own counters say which prompts they had. Behind it: two Segue servers that share a store.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest
import websockets
from websockets.asyncio.client import connect

from tests.dynamo.rig import MODEL, START_S, STOP_S, dynamo
from tests.dynamo.sessions import Client, sessions
from tests.haproxy import ROOT, free_port
from tests.support import MODEL as SCRIPTED
from tests.support import Served, fetch, serving

pytestmark = [pytest.mark.routers, pytest.mark.timeout(300)]

SMG = ROOT / ".cache" / "routers-env" / "bin" / "smg"
FOUND = "dynamo_component_router_kv_selected_cached_prefix_tokens_total"
TURNS_SERVED = "dynamo_frontend_requests_total"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Router:
    """A router that takes requests."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def router(folder: Path, workers: Sequence[str], *flags: str) -> AsyncIterator[Router]:
    """SGLang's router in front of these addresses, until it knows all of them."""
    assert SMG.is_file(), f"there is no router at {SMG}: run `make test-routers`"
    started = Router(free_port())
    own = ["--host", "127.0.0.1", "--port", str(started.port), "--log-level", "warn"]
    own += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    process = _started([SMG, "launch", "--worker-urls", *workers, *own, *flags], folder)
    try:
        # Its workers may be servers of this event loop.
        await asyncio.to_thread(_await, started, process, len(workers))
        yield started
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, STOP_S)


def _started(command: Sequence[str | Path], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "router.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _await(started: Router, process: subprocess.Popen[bytes], count: int) -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "the router has ended: see its log"
        assert time.monotonic() < until, "the router does not know its workers: see its log"
        try:
            with urllib.request.urlopen(f"{started.url}/readiness", timeout=5) as answer:
                if f'"healthy_workers":{count}' in answer.read().decode():
                    return
        except (URLError, OSError):
            pass
        time.sleep(0.1)


async def test_segue_in_front_of_the_router(tmp_path: Path) -> None:
    """By the header every chain stays at its worker; the other policies see no text to go by."""
    shares: dict[str, float] = {}
    with (
        dynamo(tmp_path, engine="sglang", workers=1) as one,
        dynamo(tmp_path, engine="sglang", workers=1) as other,
    ):
        both = (one, other)
        for seed, policy in enumerate(("round_robin", "cache_aware", "manual")):
            before = [(rig.counted(FOUND), rig.counted(TURNS_SERVED)) for rig in both]
            async with router(tmp_path, [one.url, other.url], "--policy", policy) as started:
                where = {"engine": "sglang", "engine_url": [started.url], "model": [MODEL]}
                async with serving(**where, tokenizer=str(one.model)) as server:
                    found = await Client(server, "http", MODEL, seed).play(sessions(6))
            after = [(rig.counted(FOUND), rig.counted(TURNS_SERVED)) for rig in both]
            cached, turns = zip(
                *(
                    (now[0] - was[0], now[1] - was[1])
                    for was, now in zip(before, after, strict=True)
                ),
                strict=True,
            )
            shares[policy] = sum(cached) / found.prompts
            print(f"{policy}: {100 * shares[policy]:.1f} % of parents' prompts, turns {turns}")
            assert found.failed == []
            assert sum(turns) == found.turns
    assert shares["manual"] > 0.97
    assert shares["manual"] > shares["round_robin"]


async def test_segue_servers_behind_the_router(tmp_path: Path) -> None:
    """It passes what is sent to `/v1/responses`, to any server, and all know all responses. It answers requests by
    id itself, and opens no socket."""
    store = f"sqlite:///{tmp_path / 'segue.db'}"
    async with (
        serving(store=store) as one,
        serving(store=store) as other,
        router(tmp_path, [one.url, other.url], "--policy", "round_robin") as started,
    ):
        behind = Served(started.url, one.app)
        previous, at = None, set()
        for _ in range(6):
            body = {"model": SCRIPTED, "input": "Go on.", "previous_response_id": previous}
            answer = await fetch(behind, "POST", "/v1/responses", body, JSON)
            assert answer.status == 200, answer.body
            at.add(answer.headers["x-smg-routed-worker-id"])
            previous = answer.json["id"]
        assert at == {one.url, other.url}
        body |= {"stream": True, "previous_response_id": previous}
        events = (await fetch(behind, "POST", "/v1/responses", body, JSON)).events
        assert events[-1]["type"] == "response.completed"
        missing = await fetch(behind, "POST", "/v1/responses", body | {"input": 5}, JSON)
        assert missing.status == 400
        by_id = await fetch(behind, "GET", f"/v1/responses/{previous}")
        assert by_id.status == 404
        assert (await fetch(one, "GET", f"/v1/responses/{previous}")).status == 200
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with asyncio.timeout(10), connect(behind.ws_url):
                pass
        assert refused.value.response.status_code == 405
