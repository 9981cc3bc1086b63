"""Who asks the store what a key may still use, and when?

In: the quotas of this process. They draw through here when they need more, and are looked at every second: what they
have used is told, and what they hold and do not need is given back. A process that is short of places asks the others
to give back theirs at once; where nobody hears that, they do so by themselves soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from segue.accounts.quota import KeyQuota
from segue.cluster.peers import Peers
from segue.errors import ApiError
from segue.limits import Draw, Grant
from segue.turn.seams import SharedLimits

log = logging.getLogger(__name__)

# So long may others not know what was used here.
TELL_S = 1.0
# What is asked of others must not hold a refusal up for longer.
RECLAIM_S = 0.5


class Meter:
    """The quotas of this process that have limits."""

    def __init__(
        self,
        shared_limits: SharedLimits,
        peers: Peers,
        on_told: Callable[[str], None] = lambda key_id: None,
    ) -> None:
        self._meters = shared_limits
        self._peers = peers
        # Called with the id of a key whose part may be another one now.
        self._on_told = on_told
        self._quotas: dict[str, KeyQuota] = {}
        peers.answer("short", self._ease)

    def watch(self, quota: KeyQuota) -> None:
        """From now on this one holds something."""
        self._quotas[quota.key_id] = quota

    async def draw(self, draw: Draw) -> Grant:
        """What the store gives."""
        return (await self._meters.draw([draw]))[0]

    async def reclaim(self, key_id: str) -> None:
        """Ask the others for what they do not need of this key."""
        if self._peers.others:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECLAIM_S):
                    await self._peers.ask("short", key_id.encode(), self._peers.others)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Tell the store in time while inside; everything is given back at the end."""
        telling = asyncio.create_task(self._keep_telling())
        try:
            yield
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
            for quota in tuple(self._quotas.values()):
                with suppress(ApiError):
                    await quota.ease()

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            try:
                await self.tell()
            except ApiError:
                log.warning("the store could not be told what keys have used")

    async def tell(self) -> None:
        """Tell the store what is new, and forget those who hold nothing any more."""
        for key_id, quota in tuple(self._quotas.items()):
            if quota.has_news:
                await quota.tell()
                self._on_told(key_id)
            if quota.is_idle:
                del self._quotas[key_id]

    async def _ease(self, _: str, body: bytes) -> bytes:
        """Somebody else is short of what we may have kept."""
        quota = self._quotas.get(body.decode())
        if quota is not None:
            await quota.ease()
        return b""
