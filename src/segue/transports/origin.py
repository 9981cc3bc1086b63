"""From where? The `Host` that was asked for and the `Origin` of the page that asks.

A browser sends requests for any page that a person has open, also to a loopback address, and under any name that the
page's owner points there (DNS rebinding). So a server that asks for no keys answers only to names that it knows to be
its own, and every server refuses pages of other origins unless the operator has listed them. Programs that are no
browsers send no `Origin` and are not concerned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from segue.errors import Forbidden

Headers = list[tuple[bytes, bytes]]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
ANY = "*"

# What a page may ask for once its origin is listed, and for how long a browser need not ask again.
METHODS = b"GET, POST, DELETE"
EXPOSED = b"x-request-id, retry-after"
FRESH_S = b"600"
HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")


@dataclass(frozen=True, slots=True)
class Gate:
    """Which names are ours, and which pages may ask."""

    hosts: frozenset[str]
    origins: frozenset[str]
    # Whether the operator has listed names.
    has_list: bool
    # Without keys the name is all that tells a person's own program from somebody's page.
    is_open: Callable[[], bool]

    def check(self, host: str, origin: str) -> None:
        """Refuse a name that is not ours, and a page of another origin."""
        named = _parse_host(host)
        if self._is_strict and (named is None or named[0] not in self.hosts):
            raise Forbidden(
                f"This server does not answer to the host '{host[:256]}'. "
                "List the name in the setting 'allowed_hosts'.",
                code="host_not_allowed",
            )
        if origin and not self.is_listed(origin) and not _is_same(origin, named):
            raise Forbidden(
                f"Pages of the origin '{origin[:256]}' may not use this server. "
                "List it in the setting 'cors_origins'.",
                code="origin_not_allowed",
            )

    @property
    def _is_strict(self) -> bool:
        return ANY not in self.hosts and (self.has_list or self.is_open())

    def is_listed(self, origin: str) -> bool:
        """Whether the operator lets pages of this origin in."""
        return bool(origin) and (origin.lower() in self.origins or ANY in self.origins)

    def answer_headers(self, origin: str) -> Headers:
        """What an answer tells the browser of a listed page."""
        if not self.is_listed(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight_headers(self, origin: str, asked: str) -> Headers:
        """What the browser of a listed page is told before it asks."""
        headers = self.answer_headers(origin)
        headers += [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", FRESH_S),
        ]
        if HEADER_NAMES.fullmatch(asked):
            headers.append((b"access-control-allow-headers", asked.encode("latin-1")))
        return headers


def gate(
    host: str, allowed: Sequence[str], origins: Sequence[str], is_open: Callable[[], bool]
) -> Gate:
    """A gate for a server that listens on this address."""
    hosts = LOOPBACK | {name.lower().strip("[]") for name in (host, *allowed)}
    # An address that stands for all addresses is nobody's name.
    hosts -= {"0.0.0.0", "::"}
    listed = frozenset(one.lower().rstrip("/") for one in origins)
    return Gate(hosts, listed, bool(allowed), is_open)


def _parse_host(host: str) -> tuple[str, int | None] | None:
    """Name and port; None if it is neither."""
    found = HOST.fullmatch(host)
    if found is None:
        return None
    name = (found[1] or found[2]).lower().rstrip(".")
    return name, int(found[3]) if found[3] else None


def _is_same(origin: str, named: tuple[str, int | None] | None) -> bool:
    """Whether the page came from where it asks. A proxy may have taken TLS off, so the scheme is not compared."""
    try:
        parts = urlsplit(origin)
        usual = PORTS.get(parts.scheme)
        port = parts.port or usual
    except ValueError:
        return False
    if named is None or usual is None:
        return False
    return (parts.hostname, port) == (named[0], named[1] or usual)
