"""Who sends a request, and from where? What its headers say: the API key, the `Host`, the `Origin` of the page.

A key is in the Authorization header or, from a browser, among the subprotocols of an upgrade.

A browser sends requests for any page that a person has open, also to a loopback address, and under any name that the
page's owner points there (DNS rebinding). So a server without keys answers only to names that are known to be its own,
and every server refuses pages of other origins unless the operator has listed them. Programs other than browsers send
no `Origin` and are not concerned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from segue.accounts.account import Accounts
from segue.errors import Forbidden
from segue.listener.exchange import Exchange, ReadHeader, text_header

BEARER = re.compile(r"(?i:bearer) +(\S+) *")
# A browser cannot set headers on a WebSocket. It offers our protocol and its key; only the protocol is ever answered.
PROTOCOL = "segue.v1"
KEY_PROTOCOL = "segue-key."

# The first product of a User-Agent, up to its version: "codex_cli_rs/0.1 (…)", "OpenAI/Python 3.49".
AGENT = re.compile(r"[A-Za-z][A-Za-z_. -]{0,63}(?:/[A-Za-z][A-Za-z_.-]{0,31})?")

CorsHeaders = list[tuple[bytes, bytes]]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
ANY = "*"

# What a page of a listed origin may use, and for how long a browser may cache that.
METHODS = b"GET, POST, DELETE"
EXPOSED = b"x-request-id, retry-after"
FRESH_S = b"600"
HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")


def bearer_key(header: ReadHeader) -> str | None:
    """The secret in the Authorization header; None without a header, "" if the header holds no secret."""
    text = header(b"authorization")
    if not text:
        return None
    match = BEARER.fullmatch(text)
    return match[1] if match else ""


async def authenticate(
    exchange: Exchange, accounts: Accounts, secret: str | None, scope: str
) -> None:
    """Find out who sends a request, and refuse a key without this scope."""
    account = await accounts.find(secret)
    account.check_scope(scope)
    exchange.account = account
    exchange.owner = account.owner
    exchange.key_name = account.key_name


def offered(protocols: Sequence[str]) -> str | None:
    """The secret among the subprotocols that a browser offers."""
    names = [name.strip() for line in protocols for name in line.split(",")]
    secrets = [name for name in names if name.startswith(KEY_PROTOCOL)]
    return secrets[0].removeprefix(KEY_PROTOCOL) if secrets else None


def client_name(agent: str) -> str:
    """The name of a client as its User-Agent header gives it, without versions."""
    match = AGENT.match(agent)
    return match[0].rstrip("/") if match else ""


@dataclass(frozen=True, slots=True)
class OriginPolicy:
    """Which host names are ours, and pages of which origins may use this server."""

    hosts: frozenset[str]
    origins: frozenset[str]
    # Whether the operator has listed host names.
    has_list: bool
    # Whether no keys are required: then only the name tells a person's own program from a foreign page.
    is_open: Callable[[], bool]

    def check(self, host: str, origin: str) -> None:
        """Refuse a host name that is not ours, and a page of another origin."""
        named = _parse_host(host)
        if self._is_strict and (named is None or named[0] not in self.hosts):
            hint = "List the name in the setting 'allowed_hosts'."
            message = f"This server does not answer to the host '{host[:256]}'. {hint}"
            raise Forbidden(message, code="host_not_allowed")
        if origin and not self.is_listed(origin) and not _is_same(origin, named):
            hint = "List it in the setting 'cors_origins'."
            message = f"Pages of the origin '{origin[:256]}' may not use this server. {hint}"
            raise Forbidden(message, code="origin_not_allowed")

    def check_own(self, host: str, origin: str) -> None:
        """Refuse a page of any other origin, listed ones too: for what only the operator may do."""
        if origin and not _is_same(origin, _parse_host(host)):
            message = f"Pages of the origin '{origin[:256]}' may not manage this server."
            raise Forbidden(message, code="origin_not_allowed")

    @property
    def _is_strict(self) -> bool:
        return ANY not in self.hosts and (self.has_list or self.is_open())

    def is_listed(self, origin: str) -> bool:
        """Whether the operator has listed this origin."""
        return bool(origin) and (origin.lower() in self.origins or ANY in self.origins)

    def answer_headers(self, origin: str) -> CorsHeaders:
        """The CORS headers of an answer to a listed page."""
        if not self.is_listed(origin):
            return []
        return [
            text_header(b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight_headers(self, origin: str, wanted: str) -> CorsHeaders:
        """The headers of an answer to a preflight of a listed page that wants to send these headers."""
        headers = self.answer_headers(origin)
        headers += [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", FRESH_S),
        ]
        if HEADER_NAMES.fullmatch(wanted):
            headers.append(text_header(b"access-control-allow-headers", wanted))
        return headers


def origin_policy(
    host: str, allowed: Sequence[str], origins: Sequence[str], is_open: Callable[[], bool]
) -> OriginPolicy:
    """The policy of a server that listens on this address."""
    hosts = LOOPBACK | {name.lower().strip("[]") for name in (host, *allowed)}
    # An address that stands for all addresses is not a name.
    hosts -= {"0.0.0.0", "::"}
    listed = frozenset(origin.lower().rstrip("/") for origin in origins)
    return OriginPolicy(hosts, listed, bool(allowed), is_open)


def _parse_host(host: str) -> tuple[str, int | None] | None:
    """Name and port; None if the header is malformed."""
    match = HOST.fullmatch(host)
    if match is None:
        return None
    name = (match[1] or match[2]).lower().rstrip(".")
    return name, int(match[3]) if match[3] else None


def _is_same(origin: str, named: tuple[str, int | None] | None) -> bool:
    """Whether the page comes from this server. A proxy may have terminated TLS, so the scheme is not compared."""
    try:
        parts = urlsplit(origin)
        default_port = PORTS.get(parts.scheme)
        port = parts.port or default_port
    except ValueError:
        return False
    if named is None or default_port is None:
        return False
    return (parts.hostname, port) == (named[0], named[1] or default_port)
