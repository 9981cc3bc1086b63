"""What can go wrong on the way: each story is one run of one agent on a stage where that thing happens.

Nothing here says what must come of it: that is in `test_stories.py`, per client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.clients.agents import Agent, Ran
from tests.clients.faulty import FaultyChat
from tests.clients.proxy import Proxy
from tests.clients.stage import Stage, scripted, staged
from tests.support import served_process

# Fast enough for a suite, slow enough for something to happen in the middle of a run.
SLOW_TPS = "60"
# Codex gives up on a stream that is silent for this long; we make the engine silent for longer.
IDLE_S = 1.5
SILENT_S = 4.0
BIG = "NOTES.md"


@dataclass(frozen=True)
class Told:
    """What came of a story."""

    ran: Ran
    is_fixed: bool
    proxy: Proxy

    @property
    def is_recovered(self) -> bool:
        """Whether the task was done all the same."""
        return self.ran.code == 0 and self.is_fixed


async def _told(stage: Stage, agent: Agent) -> Told:
    ran = await stage.play(agent)
    return Told(ran, stage.is_fixed, stage.proxy)


async def nothing(agent: Agent, folder: Path) -> Told:
    """The task itself."""
    async with staged(folder, *scripted(folder, agent.turns())) as stage:
        return await _told(stage, agent)


async def parent_not_found(agent: Agent, folder: Path) -> Told:
    """The server can hold no state at all: every parent is evicted, and unknown when it is named."""
    none = ("--connection-state-bytes-max", "1", "--process-state-bytes-max", "1")
    flags = (*scripted(folder, agent.turns()), *none, "--store", "memory")
    async with staged(folder, *flags) as stage:
        return await _told(stage, agent)


async def age_limit(agent: Agent, folder: Path) -> Told:
    """Sockets are old after a second, and the run takes longer."""
    flags = (*scripted(folder, agent.turns()), "--tps", SLOW_TPS, "--connection-age-s", "1")
    async with staged(folder, *flags) as stage:
        return await _told(stage, agent)


async def drop(agent: Agent, folder: Path) -> Told:
    """The connection breaks in the middle of the third response, or of the only one."""
    cut_at = frozenset({min(3, len(agent.turns()))})
    async with staged(folder, *scripted(folder, agent.turns()), cut_at=cut_at) as stage:
        return await _told(stage, agent)


async def restart(agent: Agent, folder: Path) -> Told:
    """The server is asked to stop while the third response runs; another one follows on the same store."""
    flags = (*scripted(folder, agent.turns()), "--tps", SLOW_TPS)
    is_asked = asyncio.Event()
    third = min(3, len(agent.turns()))
    async with staged(folder, *flags) as stage:
        stage.proxy.on_created = lambda number: is_asked.set() if number == third else None
        playing = asyncio.create_task(stage.play(agent))
        asking = asyncio.create_task(is_asked.wait())
        await asyncio.wait([playing, asking], return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        stage.proxy.point(None)
        assert await asyncio.to_thread(stage.served.stop) == 0
        store = f"sqlite:///{folder / 'turns.db'}"
        after = ("--model", stage.model, "--store", store, *flags)
        with served_process(*after, cwd=folder) as second:
            stage.proxy.point(second.port)
            ran = await playing
        return Told(ran, stage.is_fixed, stage.proxy)


async def no_websocket(agent: Agent, folder: Path) -> Told:
    """WebSocket mode is off: the upgrade is answered with 426."""
    async with staged(folder, *scripted(folder, agent.turns()), "--websocket", "false") as stage:
        return await _told(stage, agent)


async def engine_error(agent: Agent, folder: Path) -> Told:
    """The engine dies in the middle of its third answer."""
    third = min(3, len(agent.turns()))
    engine = FaultyChat(turns=agent.turns(), broken=frozenset({third}))
    return await _with_engine(agent, folder, engine)


async def overflow(agent: Agent, folder: Path) -> Told:
    """The agent reads a file that is larger than the model's context."""
    turns = [agent.read(BIG), *agent.turns()]
    flags = (*scripted(folder, turns), "--context-tokens", str(agent.context_tokens))
    async with staged(folder, *flags) as stage:
        (stage.repository / BIG).write_text("All prices are in cents, whatever they say.\n" * 2_000)
        return await _told(stage, agent)


async def silence(agent: Agent, folder: Path) -> Told:
    """The engine says nothing for longer than the client waits; Segue does."""
    if agent.name.startswith("Codex"):
        patience = {"stream_idle_timeout_ms": int(IDLE_S * 1000), "stream_max_retries": 0}
        agent = replace(agent, start=partial(agent.start, **patience))
    second = min(2, len(agent.turns()))
    engine = FaultyChat(turns=agent.turns(), silent_s={second: SILENT_S})
    return await _with_engine(agent, folder, engine, "--heartbeat-s", "0.3")


async def _with_engine(agent: Agent, folder: Path, engine: FaultyChat, *flags: str) -> Told:
    async with engine:
        address = ("--engine", "chat", "--engine-url", engine.url)
        async with staged(folder, *address, *flags) as stage:
            return await _told(stage, agent)


STORIES: dict[str, Callable[[Agent, Path], Awaitable[Told]]] = {
    "fixes the bug": nothing,
    "parent not found": parent_not_found,
    "age limit": age_limit,
    "drop in mid-response": drop,
    "restart with drain": restart,
    "no WebSocket (426)": no_websocket,
    "engine error": engine_error,
    "context overflow": overflow,
    "long silence": silence,
}
