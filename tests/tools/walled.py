"""A world of its own for the fetcher: every address there is answers, and writes down who came.

Run as a program inside a fresh network namespace (`unshare --net`), where the whole of IPv4 and IPv6 is made local to
the loopback interface. Where that is impossible it takes addresses of 127.0.0.0/8 for the public and for the inside.
Prints what happened as JSON: for each URL the error's code, and each connection with where it arrived and what it
brought.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from ipaddress import ip_address

from segue.errors import ApiError
from segue.tools.fetch import Fetcher, Policy
from segue.tools.target import Address, is_public
from tests.tools.urls import (
    BAD_PORTS,
    METADATA,
    NAMES,
    OTHER,
    PUBLIC,
    REFUSED,
    START,
    THIRD,
)

CANARY = "Bearer canary-1b2f"
ALIASES = {START: "127.1.0.1", OTHER: "127.1.0.2", THIRD: "127.1.0.3", METADATA: "127.2.0.1"}


class World:
    """Listeners everywhere, and a resolver that lies."""

    def __init__(self, *, is_walled: bool) -> None:
        self.is_walled = is_walled
        self.hits: list[tuple[str, int, bool, str]] = []
        self.asked: dict[str, int] = {}
        self.port = 80

    def at(self, address: str) -> str:
        return address if self.is_walled else ALIASES.get(address, address)

    async def resolve(self, host: str) -> list[str]:
        self.asked[host] = count = self.asked.get(host, 0) + 1
        if host in NAMES:
            return NAMES[host]
        if host.startswith("rebind"):
            return [self.at(START if count == 1 else METADATA)]
        if host == "mixed.com":
            return [self.at(METADATA), "10.0.0.1", "::1", self.at(START)]
        return [self.at({"other.com": OTHER, "third.com": THIRD}.get(host, START))]

    def may_reach(self, address: Address) -> bool:
        return is_public(address) if self.is_walled else str(address).startswith("127.1.")

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = writer.get_extra_info("sockname")
        address = str(getattr(ip_address(place[0]), "ipv4_mapped", None) or place[0])
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            head = b""
        line, _, rest = head.partition(b"\r\n")
        path = [*line.split(b" "), b"", b""][1]
        self.hits.append((address, place[1], b"canary" in head.lower(), rest.decode("latin-1")))
        if path.startswith(b"/to/") and path[4:].isdigit():
            location = LOCATIONS[int(path[4:])]
            writer.write(b"HTTP/1.1 302 Found\r\nSet-Cookie: a=canary\r\nLocation: " + location)
            writer.write(b"\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
            )
        writer.close()


LOCATIONS: list[bytes] = []


def chained(*urls: str) -> str:
    """A URL on the first host that redirects to the next one, and so on."""
    last = urls[-1]
    for url in reversed(urls[:-1]):
        LOCATIONS.append(last.encode("utf-8", "surrogatepass"))
        last = f"{url}/to/{len(LOCATIONS) - 1}"
    return last


def build_wall() -> None:
    """Make every address local."""
    for command in (
        "link set lo up",
        "route add local 0.0.0.0/0 dev lo",
        "-6 route add local ::/0 dev lo",
    ):
        subprocess.run(["ip", *command.split()], check=True, timeout=10)


async def main() -> None:
    is_walled = sys.argv[1] == "walled"
    world = World(is_walled=is_walled)
    servers = []
    if is_walled:
        for host in ("0.0.0.0", "::"):
            for port in (80, 443, *BAD_PORTS):
                servers.append(await asyncio.start_server(world.answer, host, port))
    else:
        # One port on every alias, so that a URL without one leads there.
        first = await asyncio.start_server(world.answer, ALIASES[START], 0)
        world.port = first.sockets[0].getsockname()[1]
        servers.append(first)
        for host in (*list(ALIASES.values())[1:], "127.0.0.1"):
            servers.append(await asyncio.start_server(world.answer, host, world.port))
    policy = Policy("public", deny=("denied.com",), ports=(80, 443, world.port), s_max=5.0)
    fetcher = Fetcher(policy, world.resolve, world.may_reach)
    port = "" if is_walled else f":{world.port}"

    async def go(url: str) -> dict[str, object]:
        before = len(world.hits)
        world.asked.clear()
        try:
            found = await fetcher.fetch(url, headers={"authorization": CANARY})
            code = found.data.decode()
        except ApiError as error:
            code = error.code
        asked = dict(world.asked)
        return {
            "url": url[:200].encode("utf-8", "replace").decode(),
            "code": code,
            "hits": world.hits[before:],
            "asked": asked,
        }

    start = f"http://start.com{port}"
    told: dict[str, object] = {"is_walled": is_walled}
    told["refused"] = [await go(url) for url in REFUSED]
    # The end of a redirect; with a line break in it that would be another header.
    told["redirected"] = [
        await go(chained(start, url))
        for url in REFUSED
        if 0 < len(url) < 1_000 and url.startswith(("http:", "https:", "//")) and "\n" not in url
    ]
    told["public"] = (
        [await go(url.replace("start.com/", f"start.com{port}/")) for url in PUBLIC]
        if is_walled
        else []
    )
    hosts = [f"http://{name}.com{port}" for name in ("start", "other", "third")]
    told["chains"] = [
        await go(chained(*hosts, f"{hosts[0]}/page")),
        await go(chained(hosts[0], hosts[0], f"{hosts[0]}/page")),
        await go(chained(hosts[0], hosts[1], f"http://{METADATA}{port}/latest")),
        await go(chained(*[hosts[0]] * 5, f"{hosts[0]}/page")),
        await go(chained(*[hosts[0]] * 6, f"{hosts[0]}/page")),
    ]
    told["rebound"] = [
        await go(f"http://rebind-{number}.com{port}/page") for number in range(20)
    ] + [
        await go(chained(f"http://rebind-{number}.com{port}", "/page")) for number in range(20, 40)
    ]
    print(json.dumps(told))
    for server in servers:
        server.close()
    fetcher.close()


if __name__ == "__main__":
    if sys.argv[1] == "walled":
        build_wall()
    asyncio.run(main())
