"""The proxy process with names of its own: public addresses that are servers of the test, and addresses inside.

Started by its path: `python loopback_proxy.py PLAIN_PORT TLS_PORT FD`. Only where a name leads and where a public
address is are a test's; whether an address may be reached is decided as in production.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from segue.egress.child import main
from segue.egress.proxy import dial

PUBLIC = "93.184.216.34"
NAMES = {
    "allowed.example.com": [PUBLIC],
    "other.example.com": [PUBLIC],
    # A name may have addresses of both kinds.
    "mixed.example.com": ["10.0.0.1", PUBLIC],
    "loopback.example.com": ["127.0.0.1", "::1"],
    "private.example.com": ["10.0.0.1", "192.168.0.1", "fd00::1"],
    "metadata.example.com": ["169.254.169.254", "fd00:ec2::254"],
    "mapped.example.com": ["::ffff:127.0.0.1", "64:ff9b::7f00:1", "0.0.0.0"],
}


# Each time another address: the first time a public one.
TURNS = {"rebound.example.com": [PUBLIC, "127.0.0.1", "::1"]}


async def resolve(host: str) -> Sequence[str]:
    if host in TURNS:
        return [TURNS[host].pop(0)]
    return NAMES.get(host, [])


async def dial_here(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert address == PUBLIC, address
    return await dial("127.0.0.1", {80: int(sys.argv[1]), 443: int(sys.argv[2])}[port])


if __name__ == "__main__":
    main(dial_here, resolve)
