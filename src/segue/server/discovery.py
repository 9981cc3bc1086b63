"""When are the replicas of an engine looked up, and what becomes of those that come and go?

With `engine_discovery` the addresses behind `engine_url` are looked up at the start and every few seconds, by every
process on its own: replicas that are new take jobs, those that are gone finish what runs there. A lookup that fails or
finds nothing changes nothing; it is logged and counted. Until the first one has succeeded, `engine_url` itself is the
only replica. Where no model has `engine_discovery`, nothing is looked up, and nothing is loaded that could.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from segue.errors import Misconfigured
from segue.server.models import Closer, ServedModels
from segue.settings import ModelSettings, shown_address

log = logging.getLogger(__name__)


class Discovery:
    """Keeps the replicas of the models of this process up to date."""

    def __init__(
        self,
        served: ServedModels,
        retire: Callable[[list[Closer]], None],
        note_failure: Callable[[str], None],
    ) -> None:
        """`retire` closes what is no longer used, `note_failure` counts a failed lookup by the name of its model."""
        self._served = served
        self._retire = retire
        self._note_failure = note_failure
        # Models whose last lookup failed.
        self._failing: set[str] = set()
        self._renewed = asyncio.Event()

    def renew(self) -> None:
        """There are other settings: look up at once."""
        self._renewed.set()

    async def look(self) -> None:
        """Look up everything once; raises `Misconfigured` where other settings are needed."""
        await asyncio.gather(*(self._look(one) for one in self._discovered()))

    async def keep(self) -> None:
        """Look up again and again, until cancelled."""
        while True:
            pause_s = min((one.engine_discovery_s for one in self._discovered()), default=None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._renewed.wait(), pause_s)
            self._renewed.clear()
            await asyncio.gather(*(self._look_again(one) for one in self._discovered()))

    def _discovered(self) -> list[ModelSettings]:
        return [one for one in self._served.settings.values() if one.engine_discovery != "off"]

    async def _look_again(self, settings: ModelSettings) -> None:
        try:
            await self._look(settings)
        except Misconfigured as error:
            # As when rights were taken away.
            self._failed(settings, error)

    async def _look(self, settings: ModelSettings) -> None:
        # Imported here: most servers look nothing up.
        from segue.replicas.kubernetes import LookupFailed
        from segue.replicas.lookup import look_up

        try:
            found = await asyncio.to_thread(look_up, settings)
        except LookupFailed as error:
            self._failed(settings, error)
            return
        if settings.name in self._failing:
            self._failing.discard(settings.name)
            log.info("model %s: the lookup of its engines succeeds again", settings.name)
        # Unless there are other settings meanwhile.
        if self._served.settings.get(settings.name) is settings:
            self._change(settings, found)

    def _failed(self, settings: ModelSettings, error: Exception) -> None:
        self._note_failure(settings.name)
        if settings.name not in self._failing:
            self._failing.add(settings.name)
            urls = ", ".join(map(shown_address, settings.engine_url))
            log.warning(
                "model %s: the lookup of its engines at %s failed, those known so far are kept: %s",
                settings.name, urls, error,
            )  # fmt: skip

    def _change(self, settings: ModelSettings, found: Mapping[str, str]) -> None:
        known = self._served.built[settings.name].found
        if found == known:
            return
        added = [shown_address(url) for url in found if url not in known]
        log.info(
            "model %s: engines found: %d%s",
            settings.name, len(found), f", new: {', '.join(added)}" if added else "",
        )  # fmt: skip
        self._retire(self._served.set_found(settings, found))
