"""Which MCP servers may a request name by URL, and where are they?

In: a `server_url`, and the operator's list of hosts. Out: the parts of the URL, and later the addresses that may be
connected to, or an error. The list says which names a request may use, not where a name leads: the fetcher's rules hold
for that (docs/inside/hazards.md T10), so it is looked up once, and only public addresses count. An address that the
operator has listed itself may be anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from segue.errors import InvalidRequest, Misconfigured
from segue.web.fetch import Fetcher, Policy
from segue.web.url import DEFAULT_PORTS, Target, parse

# What a host without a port stands for.
USUAL_PORTS = tuple(DEFAULT_PORTS.values())
_PORT = re.compile(r":[0-9]+\Z", re.ASCII)


class McpHosts:
    """The hosts of the operator's list, each with its ports; `fetcher` knows where names may lead."""

    def __init__(self, listed: Sequence[str], fetcher: Fetcher) -> None:
        self._places = frozenset(place for entry in listed for place in places_of(entry))
        self._fetcher = fetcher

    def check(self, url: str) -> Target:
        """The parts of a URL that a request may name; nothing is looked up yet."""
        try:
            target = parse(url)
        except InvalidRequest:
            target = None
        if target is None or (target.host, target.port) not in self._places:
            message = "'server_url' names a host that this server may not call."
            raise InvalidRequest(message, code="mcp_server_not_allowed", param="tools")
        return target

    async def addresses(self, url: str) -> tuple[str, ...]:
        """Where that server may be connected to, looked up now; connect to these addresses and to no others."""
        target = self.check(url)
        if target.address is not None:
            return (target.host,)
        return (await self._fetcher.check(target.url))[1]


def places_of(entry: str) -> list[tuple[str, int]]:
    """What an entry of the list stands for: a host and each of its ports."""
    try:
        target = parse(f"http://{entry}")
    except InvalidRequest:
        raise Misconfigured(f"mcp_hosts: '{entry[:200]}' is not HOST or HOST:PORT.") from None
    ports = (target.port,) if _PORT.search(entry) else USUAL_PORTS
    return [(target.host, port) for port in ports]


def policy_for(listed: Sequence[str], deny: Sequence[str]) -> Policy:
    """How the names of this list are looked up: to public addresses, on the ports that it names."""
    ports = {port for entry in listed for _, port in places_of(entry)}
    return Policy("public", deny=tuple(deny), ports=tuple(sorted(ports)))
