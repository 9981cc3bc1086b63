"""Does a server load what it needs for several engine servers only where there are several?"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.engines.fakes.chat import FakeChat, delta, end
from tests.support import WAIT_S

ROOT = Path(__file__).parents[2]
# A turn, and then what is loaded.
TURN = """
import asyncio, json, sys
from tests.support import fetch, serving

async def turn(flags):
    async with serving(engine="chat", model=["m"], **flags) as served:
        answer = await fetch(served, "POST", "/v1/responses", {"model": "m", "input": "Hi"})
        assert answer.status == 200, answer.body
        print(json.dumps([name for name in sys.modules if name.startswith("segue.")]))

asyncio.run(turn(json.loads(sys.argv[1])))
"""


async def loaded(**flags: object) -> set[str]:
    """The modules of a process that has served a turn with these settings."""
    arguments = (sys.executable, "-c", TURN, json.dumps(flags))
    child = await asyncio.create_subprocess_exec(*arguments, stdout=-1, stderr=-1, cwd=ROOT)
    async with asyncio.timeout(6 * WAIT_S):
        out, err = await child.communicate()
    assert child.returncode == 0, err.decode()
    return set(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize("urls, is_loaded", [(1, False), (2, True)])
async def test_replicas_are_loaded_where_there_are_several(urls: int, is_loaded: bool) -> None:
    events = [delta(content="Hi"), end()]
    async with FakeChat(events=events) as one, FakeChat(events=events) as other:
        modules = await loaded(engine_url=[one.url, other.url][:urls])
        assert "segue.engines.queued" in modules
        assert ("segue.replicas.router" in modules) is is_loaded
        if not is_loaded:
            assert not [name for name in modules if name.startswith("segue.replicas")]


async def test_discovery_loads_them_for_one_url_too() -> None:
    async with FakeChat(events=[delta(content="Hi"), end()]) as one:
        url = one.url.replace("127.0.0.1", "localhost")
        modules = await loaded(engine_url=[url], engine_discovery="dns")
        assert {"segue.replicas.router", "segue.replicas.lookup"} <= modules
