"""One run of one agent: a real Segue process, the proxy in front of it, the client, and what all three saw."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents import MODEL, Agent, Ran, run
from tests.clients.proxy import Proxy, proxied
from tests.clients.task import Turns, make_repository, passes, write_script
from tests.support import ServedProcess, metric, served_process


@dataclass(frozen=True)
class Stage:
    """A server with its proxy, a broken repository, and a folder for whatever else is needed."""

    served: ServedProcess
    proxy: Proxy
    repository: Path
    scratch: Path
    model: str = MODEL

    async def play(self, agent: Agent, **options: Any) -> Ran:
        """Let the agent work."""
        command, environment = agent.start(
            self.proxy.url, self.repository, self.scratch, self.model
        )
        return await run(command, environment, cwd=self.repository, **options)

    @property
    def is_fixed(self) -> bool:
        return passes(self.repository)

    async def count(self, name: str) -> float:
        """One of Segue's own counters."""
        return await metric(self.served, f"segue_{name}")


def scripted(folder: Path, turns: Turns) -> list[str]:
    """The flags of a server that plays these turns."""
    return ["--engine", "scripted", "--script", str(write_script(folder / "script.json", turns))]


@asynccontextmanager
async def staged(
    folder: Path, *flags: str, model: str = MODEL, **options: Any
) -> AsyncIterator[Stage]:
    """Everything set up; whatever the server complained about is an error."""
    store = ("--store", f"sqlite:///{folder / 'turns.db'}")
    if "--store" in flags:
        store = ()
    with served_process("--model", model, *store, *flags, cwd=folder) as served:
        async with proxied(served.port, **options) as proxy:
            yield Stage(served, proxy, make_repository(folder / "repository"), folder, model)
        # The process ends inside: what is still open is closed by the proxy's end.
        await asyncio.to_thread(served.stop)
    assert not [line for line in served.printed if "Traceback" in line], "".join(served.printed)
