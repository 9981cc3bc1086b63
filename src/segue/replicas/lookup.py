"""Where are the servers of an engine now?

In: what a model's `engine_url` and `engine_discovery` say. Out: the URL of each server there. All processes call a
server by its address, so that they agree on names. A lookup that fails or finds nothing changes nothing; it is logged
and counted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from segue.errors import Misconfigured
from segue.printable import shown_address
from segue.replicas.kubernetes import LookupFailed, ready_endpoints

log = logging.getLogger(__name__)

# More addresses than this are a mistake in a name.
REPLICAS_MAX = 1_024


class Lookup(Struct, frozen=True):
    """What is looked up for a model, and how."""

    model: str
    urls: tuple[str, ...]
    kind: Literal["dns", "kubernetes"]
    # The folder of the service account, in Kubernetes.
    account: str


def look_up(lookup: Lookup) -> dict[str, str]:
    """The URL of each replica of a model, and the host that they are replicas of. It waits for the network.

    Raises `Misconfigured` where other settings are needed, `LookupFailed` where a later lookup may succeed.
    """
    found: dict[str, str] = {}
    for url in lookup.urls:
        parts = urlsplit(url)
        is_dns = lookup.kind == "dns"
        addresses = _resolve(parts) if is_dns else ready_endpoints(parts, lookup.account)
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
    return [address for address in addresses if ":" not in address[0]] or addresses


def _with_address(parts: SplitResult, host: str, port: int) -> str:
    user = parts.netloc.rpartition("@")[0]
    at = f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    return parts._replace(netloc=f"{user}@{at}" if user else at).geturl()


class Lookups:
    """Looks up the servers of models, and notes what fails."""

    def __init__(self, note_failure: Callable[[str], None]) -> None:
        """`note_failure` is called with the model of a failed lookup."""
        self._note_failure = note_failure
        # Models whose last lookup failed.
        self._failing: set[str] = set()

    async def look(self, lookup: Lookup, *, is_repeated: bool = False) -> dict[str, str] | None:
        """As `look_up`; None where it failed, which is noted. The first time, where other settings are needed,
        `Misconfigured` is raised."""
        try:
            found = await asyncio.to_thread(look_up, lookup)
        except (LookupFailed, Misconfigured) as error:
            # While a server runs, other settings may be needed too: as when rights were taken away.
            if isinstance(error, Misconfigured) and not is_repeated:
                raise
            self._note_failed(lookup, error)
            return None
        if lookup.model in self._failing:
            self._failing.discard(lookup.model)
            log.info("model %s: the lookup of its engines succeeds again", lookup.model)
        return found

    def _note_failed(self, lookup: Lookup, error: Exception) -> None:
        self._note_failure(lookup.model)
        if lookup.model not in self._failing:
            self._failing.add(lookup.model)
            urls = ", ".join(map(shown_address, lookup.urls))
            log.warning(
                "model %s: the lookup of its engines at %s failed, those known so far are kept: %s",
                lookup.model, urls, error,
            )  # fmt: skip
