"""Two worker processes on one port, on SQLite and on PostgreSQL: what must hold for all workers together does."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import MODEL, ServedProcess, fetch, served_process

pytestmark = pytest.mark.timeout(100)


@dataclass(frozen=True)
class Fleet:
    """A parent with two workers, and the store that they share."""

    served: ServedProcess
    store: str
    folder: Path


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """Turns talk for half a second."""
    folder = tmp_path_factory.mktemp("fleet")
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 50}]}))
    with ExitStack() as stack:
        if request.param == "sqlite":
            store = f"sqlite:///{folder / 'turns.db'}"
        else:
            server = request.getfixturevalue("postgres")
            store = asyncio.run(server.make_database())
            stack.callback(lambda: asyncio.run(server.drop_database(store)))
        words = ["--workers", "2", "--store", store, "--script", str(script), "--tps", "100"]
        served = stack.enter_context(served_process(*words, cwd=folder))
        yield Fleet(served, store, folder)
        assert served.stop() == 0
        assert "Traceback" not in "".join(served.printed)


async def test_one_response_at_a_time_speaks_in_a_conversation(fleet: Fleet) -> None:
    """Every request is a connection of its own, and the kernel spreads them over both workers."""
    made = await fetch(fleet.served, "POST", "/v1/conversations", {})
    name = made.json["id"]

    async def speak(number: int) -> int:
        body: dict[str, Any] = {"model": MODEL, "input": f"{number}", "conversation": name}
        return (await fetch(fleet.served, "POST", "/v1/responses", body)).status

    statuses = Counter(await asyncio.gather(*map(speak, range(12))))
    assert statuses == {200: 1, 409: 11}
    assert await speak(12) == 200
    path = f"/v1/conversations/{name}/items?order=asc"
    roles = [one["role"] for one in (await fetch(fleet.served, "GET", path)).json["data"]]
    assert roles == ["user", "assistant"] * 2
