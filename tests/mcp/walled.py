"""A world of its own for the fetcher, and for MCP servers by address: everything answers, and writes down who came.

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

from msgspec import Raw

import segue.mcp.sessions
from segue.errors import ApiError, InvalidRequest
from segue.mcp.definitions import with_secrets
from segue.mcp.hosts import McpHosts, policy_for
from segue.mcp.sessions import McpServers
from segue.seams.tools import HostedCall
from segue.web.fetch import Fetcher, Policy
from segue.web.url import Address, is_public, parse
from tests.web.urls import BAD_PORTS, METADATA, NAMES, OTHER, PUBLIC, REFUSED, START, THIRD

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
        kind, _, number = path[1:].partition(b"/")
        if kind in (b"to", b"via") and number.isdigit():
            status = b"302 Found" if kind == b"to" else b"307 Temporary Redirect"
            location = LOCATIONS[int(number)]
            writer.write(
                b"HTTP/1.1 " + status + b"\r\nSet-Cookie: a=canary\r\nLocation: " + location
            )
            writer.write(b"\r\nContent-Length: 0\r\n\r\n")
        elif kind == b"events":
            # The older transport of MCP: the first event says where messages go.
            place = LOCATIONS[int(number.split(b"/")[0])]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            writer.write(b"event: endpoint\ndata: " + place + b"\n\n")
            await writer.drain()
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


def named(url: str, path: str) -> str:
    """A path on the first host whose answer names this URL."""
    LOCATIONS.append(url.encode())
    return path.format(len(LOCATIONS) - 1)


def listed_names(urls: list[str], port: int) -> list[str]:
    """Every name among these, as an operator would list it who trusts names too much."""
    found = {"start.com", "mixed.com", *(f"rebind-{number}.com" for number in range(20))}
    for url in urls:
        try:
            target = parse(url)
        except InvalidRequest:
            continue
        if target.address is None:
            found.add(target.host)
    ports = {80, 443, port}
    return [f"{name}:{one}" for name in sorted(found) for one in ports]


class Callers:
    """MCP servers by address: each is asked for its tools, with a key that is for it alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        names = listed_names(REFUSED, world.port)
        self._fetcher = Fetcher(policy_for(names, ("denied.com",)), world.resolve, world.may_reach)
        self._servers = McpServers([], McpHosts(names, self._fetcher))
        # What names no good place for its messages is waited for until then.
        segue.mcp.sessions.CONNECT_S_MAX = 1.0

    async def go(self, url: str, *, is_again: bool = False) -> dict[str, object]:
        """What the item says, and who was connected to. `is_again`: the resolver remembers that it was asked."""
        before = len(self._world.hits)
        if not is_again:
            self._world.asked.clear()
        shown = url.encode("utf-8", "replace").decode()
        tool = {"type": "mcp", "server_label": "x", "server_url": shown, "authorization": CANARY}
        definition = with_secrets(Raw(json.dumps(tool).encode()))
        call = HostedCall("ada", "mcpl_1", definition, "", "")
        ran = await self._servers.lister.call(call)
        error = json.loads(ran.item.raw).get("error")
        hits, asked = self._world.hits[before:], dict(self._world.asked)
        return {"url": shown[:200], "error": error, "hits": hits, "asked": asked}

    async def close(self) -> None:
        await self._servers.aclose()
        self._fetcher.close()


async def call_servers(world: World, start: str, port: str) -> dict[str, object]:
    """The same vectors, as addresses of MCP servers."""
    callers = Callers(world)
    inside = f"http://{METADATA}{port}/latest"
    away = [f"http://other.com{port}/mcp", inside, "//third.com/mcp", f"{start}@{METADATA}/"]
    try:
        return {
            "refused": [await callers.go(url) for url in REFUSED],
            "rebound": [
                [
                    await callers.go(f"http://rebind-{number}.com{port}/mcp", is_again=is_again)
                    for is_again in (False, True)
                ]
                for number in range(20)
            ],
            "moved": [
                await callers.go(start + named(url, path))
                for url in away
                for path in ("/to/{}", "/via/{}", "/events/{}/sse")
            ],
            "mixed": [await callers.go(f"http://mixed.com{port}/mcp")],
        }
    finally:
        await callers.close()


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
    told["mcp"] = await call_servers(world, start, port)
    print(json.dumps(told))
    for server in servers:
        server.close()
    fetcher.close()


if __name__ == "__main__":
    if sys.argv[1] == "walled":
        build_wall()
    asyncio.run(main())
