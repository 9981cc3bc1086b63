"""Two worker processes on one port, on SQLite and on PostgreSQL: what must hold for all workers together does."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import websockets

from segue.accounts.quota import AHEAD
from segue.process.idempotency import CLAIMS_MAX
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.cli import main
from segue_cli.commands.keys import create_key
from tests.support import (
    MODEL,
    TERMINAL,
    WAIT_S,
    Answer,
    ServedProcess,
    Wire,
    fetch,
    served_process,
)

pytestmark = pytest.mark.timeout(100)


@dataclass(frozen=True)
class Fleet:
    """A parent with two workers, and the store that they share."""

    served: ServedProcess
    settings: Settings
    # Of a key without limits.
    secret: str

    async def key(self, **limits: int) -> tuple[str, str]:
        """A fresh key: its id and its secret."""
        key, secret = await create_key(self.settings, "test", "ada", ["responses"], limits)
        return key.id, secret

    async def fetch(self, verb: str, path: str, body: Any = None, secret: str = "") -> Answer:
        """One request on a connection of its own."""
        return await fetch(self.served, verb, path, body, bearer(secret or self.secret))

    async def post(self, secret: str = "", **fields: Any) -> Answer:
        body = {"model": MODEL, "input": "x", **fields}
        return await self.fetch("POST", "/v1/responses", body, secret)

    async def cancel(self, begun: Iterable[Answer]) -> None:
        """End those that run."""
        for one in begun:
            if one.status == 200:
                await self.fetch("POST", f"/v1/responses/{one.json['id']}/cancel")

    async def open(self, secret: str) -> Wire:
        """A socket at whichever worker."""
        connecting = websockets.connect(
            self.served.ws_url, max_size=None, compression=None, additional_headers=bearer(secret)
        )
        return Wire(await connecting)

    async def open_some(self, count: int, secret: str) -> list[Wire]:
        """Those of so many sockets, opened at once, that were let in."""
        tries = [self.open(secret) for _ in range(count)]
        opened = await asyncio.gather(*tries, return_exceptions=True)
        refused = [one for one in opened if isinstance(one, websockets.InvalidStatus)]
        found = [one for one in opened if isinstance(one, Wire)]
        assert len(refused) + len(found) == count, opened
        assert {one.response.status_code for one in refused} <= {429}, refused
        return found


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def close(sockets: list[Wire]) -> None:
    await asyncio.gather(*(one.socket.close() for one in sockets))


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Turns talk for half a minute, unless they are told to stop."""
    folder = tmp_path_factory.mktemp("fleet")
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 3_000}]}))
    with ExitStack() as stack:
        if request.param == "sqlite":
            store = f"sqlite:///{folder / 'turns.db'}"
        else:
            server = request.getfixturevalue("postgres")
            store = asyncio.run(server.make_database())
            stack.callback(lambda: asyncio.run(server.drop_database(store)))
        settings = load_settings({"store": store}, environment={})
        _, secret = asyncio.run(create_key(settings, "test", "ada", ["responses"], {}))
        words = ["--workers", "2", "--store", store, "--script", str(script), "--tps", "100"]
        served = stack.enter_context(served_process(*words, cwd=folder))
        yield Fleet(served, settings, secret)
        assert served.stop() == 0
        assert "Traceback" not in "".join(served.printed)


async def test_one_response_at_a_time_speaks_in_a_conversation(fleet: Fleet) -> None:
    """Every request is a connection of its own, and the kernel spreads them over both workers."""
    name = (await fleet.fetch("POST", "/v1/conversations", {})).json["id"]

    begun = await asyncio.gather(
        *(fleet.post(conversation=name, background=True) for _ in range(12))
    )
    assert Counter(one.status for one in begun) == {200: 1, 409: 11}
    await fleet.cancel(begun)
    for _ in range(2):
        assert (await fleet.post(conversation=name, max_output_tokens=1)).status == 200
    path = f"/v1/conversations/{name}/items?order=asc"
    roles = [one["role"] for one in (await fleet.fetch("GET", path)).json["data"]]
    assert roles == ["user", "assistant"] * 2


async def test_limits_of_a_key_hold_for_both_workers_together(fleet: Fleet) -> None:
    _, secret = await fleet.key(connections_max=4, lanes_max=3)
    opened = await fleet.open_some(12, secret)
    assert len(opened) == 4
    begun = await asyncio.gather(*(fleet.post(secret, background=True) for _ in range(12)))
    assert Counter(one.status for one in begun) == {200: 3, 429: 9}
    await fleet.cancel(begun)
    await close(opened)
    # Those who have left make room, wherever the next ones come.
    async with asyncio.timeout(WAIT_S):
        while len(again := await fleet.open_some(4, secret)) < 4:
            await close(again)
    assert await fleet.open_some(6, secret) == []
    await close(again)


async def test_requests_of_a_key_are_counted_for_both_workers_together(fleet: Fleet) -> None:
    _, secret = await fleet.key(requests_per_min=40)
    began = time.monotonic()
    answers = [await fleet.post(secret, max_output_tokens=1) for _ in range(10)]
    answers += await asyncio.gather(*(fleet.post(secret, max_output_tokens=1) for _ in range(60)))
    filled = (time.monotonic() - began) * 40 / 60
    passed = sum(one.status == 200 for one in answers)
    assert 40 - 40 // AHEAD <= passed <= 40 + filled + 1
    assert {one.status for one in answers} == {200, 429}


async def test_tokens_of_a_key_are_paid_at_both_workers(fleet: Fleet) -> None:
    _, secret = await fleet.key(tokens_per_min=10)
    assert (await fleet.post(secret, max_output_tokens=1)).status == 200
    async with asyncio.timeout(WAIT_S):
        while {(await fleet.post(secret, max_output_tokens=1)).status for _ in range(8)} != {429}:
            pass


async def test_key_whose_connection_is_at_one_worker_has_its_whole_limit_there(
    fleet: Fleet,
) -> None:
    """And what one worker keeps ready does not keep the other from using it."""
    _, secret = await fleet.key(connections_max=8, lanes_max=6, requests_per_min=1_000)
    sockets = await fleet.open_some(8, secret)
    assert len(sockets) == 8
    for socket in sockets:
        for lane in range(6):
            await socket.create(input="x", stream_id=str(lane), max_output_tokens=4, store=False)
        ends = []
        while len(ends) < 6:
            event = await socket.next()
            if event["type"] in TERMINAL:
                ends.append(event["type"])
        assert ends == ["response.incomplete"] * 6
    await close(sockets)


async def test_revoked_key_loses_its_sockets_at_both_workers(fleet: Fleet) -> None:
    """The first worker that notices tells the other; with PostgreSQL the command tells both."""
    key_id, secret = await fleet.key(connections_max=12)
    sockets = await fleet.open_some(12, secret)
    assert len(sockets) == 12
    for socket in sockets:
        assert (await socket.turn(input="x", max_output_tokens=1))["type"] == "response.incomplete"
    store = ["--store", fleet.settings.store]
    revoked_at = time.monotonic()
    assert await asyncio.to_thread(main, ["keys", "revoke", key_id, *store]) == 0

    async def closed(socket: Wire) -> float:
        assert (await socket.next())["error"]["code"] == "invalid_api_key"
        async with asyncio.timeout(WAIT_S):
            await socket.socket.wait_closed()
        assert socket.socket.close_code == 1008
        return time.monotonic()

    ends = await asyncio.gather(*map(closed, sockets))
    assert max(ends) - revoked_at < 5
    assert max(ends) - min(ends) < 1.5, "less than it takes to look"
    statuses = {(await fleet.post(secret)).status for _ in range(6)}
    assert statuses == {401}


async def test_requests_with_one_idempotency_key_are_one_response_at_both_workers(
    fleet: Fleet,
) -> None:
    for number, is_stored in enumerate((True, False)):
        key, fields = f"one {number}", {"store": is_stored, "max_output_tokens": 20}
        answers = await asyncio.gather(
            *(fleet.post(idempotency_key=key, **fields) for _ in range(12))
        )
        done = [one.json["id"] for one in answers if one.status == 200]
        assert len(set(done)) == 1
        # Whoever came to the other worker cannot hear what was not to be stored, and starts nothing.
        rest = [one.json["error"]["code"] for one in answers if one.status != 200]
        assert set(rest) <= (set() if is_stored else {"idempotency_key_spent"})


async def test_key_of_a_refused_request_is_free_at_both_workers(fleet: Fleet) -> None:
    for is_stored in (True, False):
        fields = {"store": is_stored, "model": "nobody's", "idempotency_key": f"two {is_stored}"}
        # Fewer than may get in each other's way.
        answers = await asyncio.gather(*(fleet.post(**fields) for _ in range(CLAIMS_MAX - 1)))
        assert {one.status for one in answers} == {404}
