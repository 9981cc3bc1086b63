"""What was every client promised, and does the server still know it?

Clients note what they were told. A *trouble* is a time in which something was down because it was killed: an error is
excused where one overlaps the life of the client that met it, and is a fault everywhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.support import Answer, ServedProcess, fetch

Body = dict[str, Any]
# Older ones are looked at a last time and deleted, so that what the server must keep has a bound.
KEPT_MAX = 600
# A process that is killed is known to be dead after its lease; then its turns are ended, and everything is back.
TROUBLE_S = 60.0
END_S_MAX = 90.0
# A worker hears of a deletion at another one a moment later.
GONE_S_MAX = 5.0
FAULTS_MAX = 200


class Wrong(Exception):
    """A promise that was not kept."""


@dataclass
class Book:
    """All that clients were promised and that is not yet settled."""

    served: ServedProcess
    kept: dict[str, Body] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    troubles: list[float] = field(default_factory=list)

    def begin_trouble(self) -> None:
        self.troubles.append(time.monotonic())

    def is_excused(self, began: float) -> bool:
        """Whether something was down since then."""
        return any(began < trouble + TROUBLE_S for trouble in self.troubles)

    def blame(self, what: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(f"{time.strftime('%H:%M:%S')} {what}")
            print(self.faults[-1], flush=True)

    def keep(self, response: Body) -> None:
        """A client has this stored response, whole."""
        if response["id"] in self.kept and self.kept[response["id"]] != response:
            self.blame(f"two endings: {response['id']}")
        self.kept[response["id"]] = response
        self.counts["acknowledged"] += 1

    async def ask(self, method: str, path: str, body: object = None) -> Answer:
        return await fetch(self.served, method, f"/v1/{path}", body)

    async def check(self, turn_id: str) -> None:
        """A promised response reads as it was told."""
        answer = await self.ask("GET", f"responses/{turn_id}")
        if turn_id not in self.kept:
            # Another client has deleted it meanwhile.
            return
        if answer.status == 404:
            raise Wrong(f"lost: {turn_id}")
        if answer.status != 200:
            raise ValueError(answer.body)
        if answer.json != self.kept[turn_id]:
            raise Wrong(f"changed: {turn_id}: {answer.body[:300]!r}")
        self.counts["checked"] += 1

    async def erase(self, turn_id: str) -> None:
        """A response is deleted, and gone."""
        self.kept.pop(turn_id, None)
        answer = await self.ask("DELETE", f"responses/{turn_id}")
        if answer.status not in (200, 404):
            raise ValueError(answer.body)
        began = time.monotonic()
        while (await self.ask("GET", f"responses/{turn_id}")).status == 200:
            if time.monotonic() > began + GONE_S_MAX:
                raise Wrong(f"deleted ({answer.status}) and still there: {turn_id}")
            self.counts["read after their deletion"] += 1
            await asyncio.sleep(0.2)
        self.counts["deleted"] += 1

    async def ended(self, turn_id: str) -> Body:
        """A response that its client has left, when it has come to its end. That it is there was promised only for a
        turn in the background: a process that dies has not yet written the others."""
        async with asyncio.timeout(END_S_MAX):
            while True:
                answer = await self.ask("GET", f"responses/{turn_id}")
                if answer.status == 404:
                    raise LookupError(f"lost while it ran: {turn_id}")
                if answer.status == 200 and answer.json["status"] not in ("queued", "in_progress"):
                    return dict(answer.json)
                await asyncio.sleep(0.5)

    async def settle(self) -> None:
        """Look at the oldest a last time while there are too many."""
        while len(self.kept) > KEPT_MAX:
            oldest = next(iter(self.kept))
            await self.check(oldest)
            await self.erase(oldest)
