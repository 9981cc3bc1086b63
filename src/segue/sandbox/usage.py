"""What do containers use, and where is it written down? On /metrics, and in the ledger beside the tokens.

Every some seconds this server takes from the keeper what was used since somebody took it last. The ledger gets what
each owner has used on a day since this server started, in one row that replaces the one before: so a row that is
written twice counts once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from segue.aio import in_background
from segue.errors import ApiError
from segue.ids import new_id
from segue.sandbox.client import KeeperClient
from segue.sandbox.messages import OwnerUsage
from segue.seams.history import CONTAINERS, UsageEntry

log = logging.getLogger(__name__)

# How often what containers use is counted; a keeper that is killed loses as much.
COUNT_S = 10.0

NoteSandboxes = Callable[[int, tuple[str, str], Sequence[float]], None]
Settle = Callable[[Sequence[UsageEntry]], Awaitable[None]]


class ContainerCounts:
    """Counts what containers use."""

    def __init__(self, client: KeeperClient, note: NoteSandboxes, settle: Settle) -> None:
        self._client = client
        self._note = note
        self._settle = settle
        self._id = new_id("usage")
        # By day and owner, and those that the ledger has not taken yet.
        self._rows: dict[str, UsageEntry] = {}
        self._unwritten: set[str] = set()

    async def count_forever(self) -> None:
        """Count now and then."""
        while True:
            await asyncio.sleep(COUNT_S)
            await self.count()

    async def count(self) -> None:
        """Count and write down what was used since the last time."""
        found = await self._client.take_usage()
        sums = [0.0] * 4
        for used in found.usage:
            counts = (used.container_s, used.cpu_s, used.sent_bytes, used.received_bytes)
            sums = [before + more for before, more in zip(sums, counts, strict=True)]
            self._add(used, int(time.time()))
        self._note(found.alive, (found.isolation, found.held_by), sums)
        if self._unwritten:
            await self._settle([self._rows[key] for key in sorted(self._unwritten)])
            self._unwritten.clear()
            # Days that are over are not added to any more.
            today = _day(int(time.time()))
            self._rows = {
                key: row for key, row in self._rows.items() if _day(row.ended_at) == today
            }

    def _add(self, used: OwnerUsage, now: int) -> None:
        key = f"{self._id} {_day(now)} {used.owner}"
        row = self._rows.get(key)
        before = (0.0, 0.0, 0) if row is None else (row.container_s, row.cpu_s, row.egress_bytes)
        self._rows[key] = UsageEntry(
            *(key, used.owner, "", CONTAINERS, 0, 0, 0, now),
            container_s=before[0] + used.container_s,
            cpu_s=before[1] + used.cpu_s,
            egress_bytes=before[2] + used.sent_bytes,
        )
        self._unwritten.add(key)


def _day(now: int) -> int:
    """The day, of UTC."""
    return now // 86_400


@asynccontextmanager
async def counting(
    client: KeeperClient, note: NoteSandboxes, settle: Settle
) -> AsyncIterator[None]:
    """What containers use is counted while inside, and once more on the way out."""
    counts = ContainerCounts(client, note, settle)
    async with in_background("sandbox_usage", counts.count_forever):
        yield
    try:
        await counts.count()
    except ApiError as error:
        log.warning("the last use of containers was not counted: %s", error.message)
