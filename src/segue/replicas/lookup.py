"""Where are the servers of an engine now?

In: the settings of a model with `engine_discovery`. Out: the URL of each server behind `engine_url`. All processes call
a server by its address, so that they agree on names. A lookup that fails or finds nothing changes nothing; it is logged
and counted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from segue.errors import Misconfigured
from segue.printable import shown_address
from segue.replicas.kubernetes import LookupFailed, ready_endpoints
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


class Lookups:
    """Looks up the servers of models, and notes what fails."""

    def __init__(
        self,
        on_found: Callable[[ModelSettings, Mapping[str, str]], None],
        note_failure: Callable[[str], None],
    ) -> None:
        """`on_found` is called with what was looked up, `note_failure` with the model of a failed lookup."""
        self._on_found = on_found
        self._note_failure = note_failure
        # Models whose last lookup failed.
        self._failing: set[str] = set()

    async def look(self, settings: ModelSettings) -> None:
        """Look up once; raises `Misconfigured` where other settings are needed."""
        try:
            found = await asyncio.to_thread(look_up, settings)
        except LookupFailed as error:
            self._failed(settings, error)
            return
        if settings.name in self._failing:
            self._failing.discard(settings.name)
            log.info("model %s: the lookup of its engines succeeds again", settings.name)
        self._on_found(settings, found)

    async def look_again(self, settings: ModelSettings) -> None:
        """The same while the server runs: where other settings are needed, that is noted, as other failures are."""
        try:
            await self.look(settings)
        except Misconfigured as error:
            # As when rights were taken away.
            self._failed(settings, error)

    def _failed(self, settings: ModelSettings, error: Exception) -> None:
        self._note_failure(settings.name)
        if settings.name not in self._failing:
            self._failing.add(settings.name)
            urls = ", ".join(map(shown_address, settings.engine_url))
            log.warning(
                "model %s: the lookup of its engines at %s failed, those known so far are kept: %s",
                settings.name, urls, error,
            )  # fmt: skip
