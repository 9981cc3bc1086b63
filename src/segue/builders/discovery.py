"""Where are the replicas of an engine now?

With `engine_discovery` the addresses behind `engine_url` are looked up at the start and every few seconds, by every
process on its own: replicas that are new take jobs, those that are gone finish what runs there. All processes call a
replica by its address, so that they agree on names. A lookup that fails or finds nothing changes nothing; it is logged
and counted. Until the first one has succeeded, `engine_url` itself is the only replica.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from segue.builders.kubernetes import LookupFailed, ready_endpoints
from segue.errors import Misconfigured
from segue.printable import shown_address
from segue.server.models import Closer, ServedModels
from segue.settings.values import ModelSettings

log = logging.getLogger(__name__)

# More addresses than this are a mistake in a name.
REPLICAS_MAX = 1_024


def look_up(settings: ModelSettings) -> dict[str, str]:
    """The URL of each replica of a model, and the host that they are replicas of. It waits for the network.

    Raises `Misconfigured` where other settings are needed, `LookupFailed` where a later lookup may succeed.
    """
    found: dict[str, str] = {}
    for url in settings.engine_url:
        parts = urlsplit(url)
        if settings.engine_discovery == "dns":
            addresses = _resolve(parts)
        else:
            addresses = ready_endpoints(parts, settings.kubernetes_account)
        for host, port in _of_one_family(addresses):
            found[_with_address(parts, host, port)] = parts.netloc.rpartition("@")[2]
    if not found:
        raise LookupFailed("nothing is ready there")
    if len(found) > REPLICAS_MAX:
        raise LookupFailed(f"{len(found)} addresses, and at most {REPLICAS_MAX} are used")
    return dict(sorted(found.items()))


def _resolve(parts: SplitResult) -> list[tuple[str, int]]:
    """All addresses of a name (A and AAAA records)."""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LookupFailed(f"{host}: {error.strerror or error}") from None
    return [(str(row[4][0]), port) for row in rows]


def _of_one_family(addresses: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """A replica may have an address of either family: the IPv4 addresses, or where there are none all."""
    return [one for one in addresses if ":" not in one[0]] or addresses


def _with_address(parts: SplitResult, host: str, port: int) -> str:
    user = parts.netloc.rpartition("@")[0]
    at = f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    return parts._replace(netloc=f"{user}@{at}" if user else at).geturl()


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
        built = self._served.built[settings.name]
        assert built.replicas is not None, "an engine with URLs"
        if found == built.found:
            return
        added = [shown_address(url) for url in found if url not in built.found]
        log.info(
            "model %s: engines found: %d%s",
            settings.name, len(found), f", new: {', '.join(added)}" if added else "",
        )  # fmt: skip
        closers = list(built.replicas(settings, found)())
        self._retire(closers)
