"""When does this process draw on the shared limits of its keys, and report what they have used?

The quotas of this process draw through a `Meter` when they need more. It looks at them every second: tokens that were
used are reported to the store, and places that are held and not needed are given back. A process that is short of
places asks the other processes to give back theirs at once; without an answer they do so by themselves soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from segue.accounts.quota import KeyQuota
from segue.aio import in_background
from segue.errors import ApiError
from segue.limits import Draw, Grant
from segue.seams.access import SharedLimits
from segue.seams.bus import OtherProcesses

log = logging.getLogger(__name__)

# For this long the other processes may not know what was used here.
REPORT_S = 1.0
# A refusal waits no longer than this for the other processes to give places back.
RECLAIM_S = 0.5


class Meter:
    """The quotas of this process that have limits; `others` is None where one process serves alone."""

    def __init__(
        self,
        shared_limits: SharedLimits,
        others: OtherProcesses | None = None,
        on_report: Callable[[str], None] = lambda key_id: None,
    ) -> None:
        self._shared_limits = shared_limits
        self._others = others
        # Called with the id of a key whose part of the limits may have changed.
        self._on_report = on_report
        self._quotas: dict[str, KeyQuota] = {}
        if others is not None:
            others.answer("short", self._give_back)

    def watch(self, quota: KeyQuota) -> None:
        """Look at this quota regularly from now on."""
        self._quotas[quota.key_id] = quota

    async def draw(self, draw: Draw) -> Grant:
        """What the store grants."""
        return await self._shared_limits.draw(draw)

    async def reclaim(self, key_id: str) -> None:
        """Ask the other processes to give back the places of this key that they do not need."""
        if self._others is not None and self._others.others:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECLAIM_S):
                    await self._others.ask("short", key_id.encode(), self._others.others)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report to the store every second while inside; give everything back at the end."""
        try:
            async with in_background("key_usage_reports", self._keep_reporting):
                yield
        finally:
            for quota in tuple(self._quotas.values()):
                with suppress(ApiError):
                    await quota.give_back()

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if failed := await self.report():
                log.warning("the usage of %d API keys could not be written to the store", failed)

    async def report(self) -> int:
        """Report to the store what has changed, each key by itself, and forget the quotas that hold nothing any more;
        how many reports failed."""
        failed = 0
        for key_id, quota in tuple(self._quotas.items()):
            if quota.has_changes:
                try:
                    await quota.report()
                except ApiError:
                    failed += 1
                    continue
                self._on_report(key_id)
            if quota.is_idle:
                del self._quotas[key_id]
        return failed

    async def _give_back(self, _: str, body: bytes) -> bytes:
        """Another process is short of places of this key."""
        quota = self._quotas.get(body.decode())
        if quota is not None:
            with suppress(ApiError):
                await quota.give_back()
        return b""
