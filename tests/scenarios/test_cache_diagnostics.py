"""`prompt_cache_diagnostics`, by the official client: every reason, in every way to go on, over every transport."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

from segue.wire.cache import CacheMissReason
from tests.clients.outside import run_python
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.support import serving

PROMPT_TOKENS, CACHED_TOKENS = 5_000, 4_800
MODELS = """
[[models]]
name = "one"
engine = "chat"
engine_url = ["{url}"]
[[models]]
name = "two"
engine = "chat"
engine_url = ["{url}"]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client read, in one process: importing it is what takes time."""
    folder = tmp_path_factory.mktemp("cache")

    async def play() -> Any:
        answer = [delta(content="Yes."), end(), usage(PROMPT_TOKENS, 2, cached=CACHED_TOKENS)]
        async with FakeChat(events=answer) as fake:
            (folder / "segue.toml").write_text(MODELS.format(url=fake.url))
            async with serving(config=str(folder / "segue.toml"), engine="chat") as served:
                return await asyncio.to_thread(run_python, "python_cache.py", served, "one", "two")

    return asyncio.run(play())


@pytest.mark.parametrize("way", ["chained", "full", "socket"])
@pytest.mark.parametrize("reason", get_args(CacheMissReason))
def test_client_reads_the_reason(found: dict[str, Any], way: str, reason: str) -> None:
    said = found[way][reason]
    assert (said["type"], said.get("reason")) == ("cache_miss", reason)
    assert said["comparison_reusable_tokens"] > 0
    is_by_contract = reason in ("prompt_cache_key_changed", "service_tier_changed")
    assert said["cache_missed_tokens"] > 0 or is_by_contract


@pytest.mark.parametrize("way", ["chained", "full", "socket"])
def test_prompt_that_goes_on_is_a_hit(found: dict[str, Any], way: str) -> None:
    assert found[way]["nothing"] == {"type": "cache_hit"}


@pytest.mark.parametrize("way", ["sse", "helper", "background", "retrieved"])
def test_every_transport_has_the_field(found: dict[str, Any], way: str) -> None:
    assert found["transports"][way]["reason"] == "tools_changed"


def test_client_reads_the_other_fields(found: dict[str, Any]) -> None:
    said = found["transports"]
    assert said["unknown"] == {"type": "comparison_response_not_found"}
    assert said["absent"] is None
    assert said["echo"] == [{"mode": "explicit", "ttl": "12h"}, "24h"]
    assert said["usage"]["cached_tokens"] == CACHED_TOKENS
    assert said["usage"]["cache_write_tokens"] == PROMPT_TOKENS - CACHED_TOKENS
