"""Is a new engine one file and one row? A made-up one answers over all transports, and its row is all that names it.

A name without a row, and a row without a name, is seen by tests/server/test_models.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from segue.server import models
from tests.doors.parrot_engine import ROW, parrot
from tests.support import MODEL, Served, fetch, serving, wire


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setitem(models.BUILDERS, ROW, parrot)  # type: ignore[arg-type]
    async with serving(engine=ROW) as found:
        yield found


async def test_client_gets_an_answer_from_a_made_up_engine(served: Served) -> None:
    answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello!"})
    assert answer.json["output"][0]["content"][0]["text"] == "Hello!"


async def test_client_chains_turns_of_a_made_up_engine_on_a_socket(served: Served) -> None:
    async with wire(served) as socket:
        first = await socket.turn(input="Pretty Polly.")
        second = await socket.turn(input="Bye.", previous_response_id=first["response"]["id"])
    texts = [event["response"]["output"][0]["content"][0]["text"] for event in (first, second)]
    assert texts == ["Pretty Polly.", "Bye."]


async def test_what_a_made_up_engine_says_of_itself_holds(served: Served) -> None:
    answer = await fetch(served, "GET", f"/v1/models/{MODEL}")
    assert answer.json["context_window"] == 2_048
