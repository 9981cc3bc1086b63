"""Is a new engine one file and one row? A made-up one answers over all transports, and its row is all that names it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from segue.errors import Misconfigured
from segue.server import models
from segue.server.models import build_models
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from tests.doors.parrot_engine import parrot
from tests.support import MODEL, Served, fetch, serving_with, wire


def settings_of(engine: str) -> Settings:
    """As a server has them whose engine is called this; the settings know the names of the dictionary only."""
    flags = {"engine": "scripted", "store": "memory", "port": 0, "grace_s": 0}
    return structs.replace(load_settings(flags, environment={}), engine=engine)


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setitem(models.BUILDERS, "parrot", parrot)  # type: ignore[arg-type]
    async with serving_with(settings_of("parrot")) as found:
        yield found


async def test_client_gets_an_answer_from_a_made_up_engine(served: Served) -> None:
    answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello!"})
    assert answer.json["output"][0]["content"][0]["text"] == "Hello!"
    async with wire(served) as socket:
        first = await socket.turn(input="Pretty Polly.")
        second = await socket.turn(input="Good bye.", previous_response_id=first["response"]["id"])
    texts = [event["response"]["output"][0]["content"][0]["text"] for event in (first, second)]
    assert texts == ["Pretty Polly.", "Good bye."]


async def test_what_the_engine_says_of_itself_holds(served: Served) -> None:
    answer = await fetch(served, "GET", f"/v1/models/{MODEL}")
    assert answer.json["context_window"] == 2_048


def test_engine_without_a_row_is_refused_at_the_start() -> None:
    with pytest.raises(Misconfigured, match="'parrot' is not one of: embedded, scripted"):
        build_models(settings_of("parrot"))
