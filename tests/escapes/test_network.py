"""Does the network hold? Hostile programs against the proxy, from inside a sandbox; what is allowed works, with TLS."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from segue.aio import in_background
from segue.egress.doors import Doors
from segue.ids import new_id
from segue.isolation.limits import processes_of
from segue.sandbox.beneath import new_file
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.containers import Containers, run_command
from segue.sandbox.messages import ContainerSpec, Printed, RunCommand
from tests.escapes import programs
from tests.escapes.places import ADAPTERS, WATCHED, Canaries, Shell, canaries_in, containers_with
from tests.listener.test_tls import write_pair
from tests.support import until

ALLOWED = "allowed.example.com"
# Names of the operator that lead inside are in the list too: the address decides.
DOMAINS = (
    ALLOWED,
    *(f"{name}.example.com" for name in ("mixed", "loopback", "private", "metadata", "mapped")),
    "nowhere.example.com",
    "rebound.example.com",
)
BIG = b"0123456789abcdef" * 65536 * 3


@dataclass
class Outer:
    """Servers outside that the proxy can reach: what they were asked for."""

    certificate: Path
    asked: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    # Set: `/slow` is answered.
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.asked.append(path)
            if found := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
                await reader.readexactly(int(found[1]))
            if "chunked" in head.partition("\r\n")[2].lower():
                await reader.readuntil(b"0\r\n\r\n")
            if path == "/slow":
                await self.may_answer.wait()
            if path == "/redirect":
                writer.write(
                    b"HTTP/1.1 302 Found\r\nLocation: http://other.example.com/from-redirect\r\n"
                    b"Content-Length: 0\r\n\r\n"
                )
            else:
                body = BIG if path == "/big" else f"SERVED {path}".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def outer_in(folder: Path) -> AsyncIterator[Outer]:
    os.mkdir(folder)
    certificate, key = write_pair(folder, ALLOWED, ALLOWED)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    outer = Outer(certificate)
    async with AsyncExitStack() as stack:
        for tls in (None, context):
            server = await asyncio.start_server(outer.on_connection, "127.0.0.1", 0, ssl=tls)
            await stack.enter_async_context(server)
            outer.ports.append(server.sockets[0].getsockname()[1])
        yield outer


@dataclass
class World:
    outer: Outer
    doors: Doors
    containers: Containers
    canaries: Canaries

    async def shell(self, domains: tuple[str, ...] = DOMAINS) -> Shell:
        """A container with this network, and the certificate of the server outside."""
        shell = Shell(self.containers, domains=domains)
        _, place = await self.containers.place("me", shell.id)
        fd = os.open(place.sandbox.data, os.O_RDONLY | os.O_DIRECTORY)
        with new_file(fd, "ca.pem", place.sandbox.spec.uid) as file:
            os.write(file, self.outer.certificate.read_bytes())
        os.close(fd)
        return shell


@asynccontextmanager
async def world_in(outside: Path, adapter: str = ADAPTERS[1]) -> AsyncIterator[World]:
    async with outer_in(outside / "outer") as outer, canaries_in(outside) as canaries:
        script = str(Path(__file__).with_name("loopback_proxy.py"))
        doors = Doors(DOMAINS, (sys.executable, script, *map(str, outer.ports)))
        async with (
            containers_with(outside / "own", adapter, doors=doors) as containers,
            in_background("proxy", doors.keep_running),
        ):
            yield World(outer, doors, containers, canaries)


@pytest.mark.parametrize("adapter", WATCHED)
async def test_hostile_programs_reach_only_what_is_allowed(adapter: str, outside: Path) -> None:
    async with world_in(outside, adapter) as world:
        shell = await world.shell()
        said, _ = await shell.play(programs.PROXY, s_max=60.0)
        lines = said.splitlines()
        # What may be sent on is one request each: a chunked one without what was smuggled after it, one whose folded
        # header is one line now, and the redirect itself, whose target is not followed by the proxy.
        # A name that leads elsewhere each time is looked up each time, once.
        assert world.outer.asked == ["/rebound", "/chunked", "/folded", "/redirect"], said
        got = [line for line in lines if line.startswith("GOT")]
        assert got == ["GOT rebound", "GOT smuggle-chunk", "GOT folded"], said
        assert not world.canaries.reached
        statuses: dict[str, set[str]] = {}
        for name, *rest in map(str.split, lines):
            if rest and rest[0].isdigit():
                statuses.setdefault(name, set()).add(" ".join(rest[:3])[:14])
        refused = {"1 HTTP/1.1 403"}
        for name in ("other", "other-tls", "literal", "literal-tls", "inside", "inside-tls"):
            assert statuses[name] == refused, (name, said)
        for name in ("port", "port-plain", "no-port", "user", "user-2", "suffix", "prefix", "dot"):
            assert statuses[name] <= refused, (name, said)
        for name in ("odd-name", "rebound-later"):
            assert statuses[name] <= {*refused, "1 HTTP/1.1 400"}, (name, said)
        for name in ("host", "host-twice", "host-tls", "smuggle-both", "smuggle-cl"):
            assert statuses[name] == {"1 HTTP/1.1 400"}, (name, said)
        assert statuses["smuggle-chunk"] == {"1 HTTP/1.1 200"}
        for name in ("sni-other", "sni-none", "sni-below"):
            assert f"{name} HTTP/1.1 200 Connection established then" in said
        assert "redirect HTTP Error 403" in said
        # Nothing that cannot be read is an error of the proxy itself.
        assert world.doors.pid
        assert (await shell.run("echo next"))[0] == "next\n"


@pytest.mark.parametrize("adapter", WATCHED)
async def test_allowed_host_is_reached_with_tls_and_without_and_counted(
    adapter: str, outside: Path
) -> None:
    async with world_in(outside, adapter) as world:
        shell = await world.shell()
        for url in (f"https://{ALLOWED}/tls", f"http://{ALLOWED}/plain"):
            said, outcome = await shell.run(f"curl -sS --cacert ca.pem {url}")
            assert (said, outcome.exit_code) == (f"SERVED /{url.rpartition('/')[2]}", 0)
        program = f"""
import ssl, urllib.request
context = ssl.create_default_context(cafile="/mnt/data/ca.pem")
sent = bytes(2 << 20)
for scheme in ("http", "https"):
    got = urllib.request.urlopen(f"{{scheme}}://{ALLOWED}/big", data=sent, context=context).read()
    print(scheme, len(got), got[:16] == b"0123456789abcdef")
"""
        said, _ = await shell.play(program)
        assert said == f"http {len(BIG)} True\nhttps {len(BIG)} True\n"
        # A name with addresses of both kinds is reached by the public one.
        said, _ = await shell.run("curl -sS http://mixed.example.com/mixed")
        assert said == "SERVED /mixed"
        held, _ = await world.containers.place("me", shell.id)
        await until(lambda: world.containers.about(held).received_bytes > 2 * len(BIG))
        assert world.containers.about(held).sent_bytes > 4 << 20
        # The one Python of the container finds the proxy too.
        _, place = await world.containers.place("me", shell.id)
        code = f"import urllib.request as u; print(u.urlopen('http://{ALLOWED}/code').read())"
        command = RunCommand("me", shell.id, code, 20, 1_000, "python")
        seen: list[str] = []

        async def see(printed: Printed) -> None:
            seen.append(printed.stdout)

        end = await run_command(place, command, see)
        assert "".join(seen) + end.stdout == "b'SERVED /code'\n"


async def test_each_container_reaches_its_own_domains(outside: Path) -> None:
    async with world_in(outside) as world:
        wide, narrow = await world.shell(), await world.shell(("mixed.example.com",))
        offline = Shell(world.containers)
        ask = f"curl -s -o /dev/null -w '%{{http_code}}' -m 5 http://{ALLOWED}/; echo"
        assert (await wide.run(ask))[0] == "200\n"
        assert (await narrow.run(ask))[0] == "403\n"
        assert (await offline.run(ask))[0] == "000\n"
        # Without a network there is no door, and none appears.
        said, _ = await offline.run("env | grep -ic proxy; cat /run/door/proxy 2>&1")
        assert said.startswith("0\n"), said


async def test_ten_thousand_connections_harm_only_their_container(outside: Path) -> None:
    async with world_in(outside) as world:
        crowd, neighbour = await world.shell(), await world.shell()
        said, _ = await crowd.play(programs.CROWD, s_max=60)
        assert "tried 10000" in said
        ask = f"curl -sS -m 10 http://{ALLOWED}/"
        assert (await neighbour.run(ask))[0] == "SERVED /"
        assert len(os.listdir(f"/proc/{world.doors.pid}/fd")) < 1_000
        # Its own connections are free again when those of the crowd are gone.
        await until_said(crowd, ask, "SERVED /")


async def until_said(shell: Shell, command: str, wanted: str) -> None:
    async with asyncio.timeout(30):
        while (await shell.run(command))[0] != wanted:
            pass


async def test_proxy_that_is_killed_is_started_again_and_its_container_lives(outside: Path) -> None:
    async with world_in(outside) as world:
        shell = await world.shell()
        slow = asyncio.create_task(shell.run(f"curl -sS -m 20 http://{ALLOWED}/slow"))
        await until(lambda: "/slow" in world.outer.asked)
        os.kill(killed := world.doors.pid, signal.SIGKILL)
        # The connection is gone, the container is not, and the next connection is served by the next proxy.
        said, outcome = await slow
        assert outcome.exit_code not in (0, None), said
        assert (await shell.run(f"curl -sS -m 20 http://{ALLOWED}/again"))[0] == "SERVED /again"
        assert world.doors.pid not in (0, killed)


async def test_nothing_is_left_of_a_keeper_that_is_killed() -> None:
    process = KeeperProcess("", 4, domains=DOMAINS)
    process.start()
    try:
        client = KeeperClient(process.socket, DOMAINS)
        name = new_id("cntr")
        await client.create("me", name, ContainerSpec(domains=DOMAINS))
        async for _ in client.run(RunCommand("me", name, "sleep 60 & true", 10, 100)):
            pass
        # But what removes the folders of dead keepers, which no sandbox is in.
        found = [pid for pid in processes_of(process.pid) if pid != process.pid]
        alive = [pid for pid in found if b"rm\0-rf" not in about(pid, "cmdline")]
        (proxy,) = [pid for pid in alive if b"egress" in about(pid, "cmdline")]
        assert about(proxy, "environ") == b""
        await until(lambda: os.getpriority(os.PRIO_PROCESS, proxy) > os.nice(0))
        if os.geteuid() == 0:
            await until(lambda: b"Uid:\t1999999999" in about(proxy, "status"))
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(1.0):
            await until(lambda: not any(map(is_running, alive)))
    finally:
        process.close()


def is_running(pid: int) -> bool:
    return about(pid, "status") != b"" and b"State:\tZ" not in about(pid, "status")


def about(pid: int, name: str) -> bytes:
    """A file of a process; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
