"""When are the replicas of an engine looked up, and what becomes of those that come and go?

With `engine_discovery` the addresses of the name in `engine_url` are looked up at the start and every few seconds, by
every process on its own: replicas that are new take jobs, those that are gone finish what runs there. Until the first
lookup has succeeded, `engine_url` itself is the only replica. Where no model has `engine_discovery`, nothing is looked
up, and nothing is loaded that could.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from segue.printable import shown_address
from segue.server.models import Closer, ServedModels
from segue.settings.values import ModelSettings

if TYPE_CHECKING:
    from segue.replicas.lookup import Lookup, Lookups

log = logging.getLogger(__name__)


def lookup_of(settings: ModelSettings) -> Lookup:
    """What is looked up for a model that asks for it."""
    from segue.replicas.lookup import Lookup

    assert settings.engine_discovery != "off", "asks for it"
    return Lookup(
        settings.name, settings.engine_url, settings.engine_discovery, settings.kubernetes_account
    )


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
        self._lookups: Lookups | None = None
        self._renewed = asyncio.Event()

    def renew(self) -> None:
        """There are other settings: look up at once."""
        self._renewed.set()

    async def look_up(self) -> None:
        """Look up everything once; raises `Misconfigured` where other settings are needed."""
        await asyncio.gather(*(self._look(model) for model in self._discovered()))

    async def look_up_forever(self) -> None:
        """Look up again and again, until cancelled."""
        while True:
            pause_s = min((model.engine_discovery_s for model in self._discovered()), default=None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._renewed.wait(), pause_s)
            self._renewed.clear()
            again = (self._look(model, is_repeated=True) for model in self._discovered())
            await asyncio.gather(*again)

    def _discovered(self) -> list[ModelSettings]:
        models = self._served.settings.values()
        return [model for model in models if model.engine_discovery != "off"]

    async def _look(self, settings: ModelSettings, *, is_repeated: bool = False) -> None:
        if self._lookups is None:
            # Imported here: most servers look nothing up.
            from segue.replicas.lookup import Lookups

            self._lookups = Lookups(self._note_failure)
        found = await self._lookups.look(lookup_of(settings), is_repeated=is_repeated)
        # Unless there are other settings meanwhile.
        if found is not None and self._served.settings.get(settings.name) is settings:
            self._change(settings, found)

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
