"""Two versions on one store, side by side, up and down, under load.

    python -m tests.side_by_side --clients 64

Clients hold conversations over HTTP, over sockets, in the background and in `/v1/conversations`, each turn at any
server that is in service; and by Messages and Chat Completions at those that have them, which 0.3.0 has not. Meanwhile
a server of the older version gets one of the newer version beside it, is stopped, comes back, and the newer one is
stopped. Nothing may fail, not even once; each turn must read its whole history (its input tokens are those of the same
turn on a quiet server, or of the first client that sent it); and in the end one server knows every response. A request
that a stopping server has refused before it began goes to the other one, as with a balancer, and is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from segue.wire.response import ENDED
from tests.postgres import running_postgres
from tests.releases import Program, make_up, neighbour
from tests.support import ServedProcess, Wire, fetch, served_process, wire

STORES = ("sqlite", "postgresql")
WORKERS = {"sqlite": 2, "postgresql": 1}
# Turns of a chain; then the client begins a new one.
CHAIN_MAX = 6
# Turns of each client between two changes.
TURNS_EACH = 2
POLL_S = 0.05
# How a server that stops refuses; 529 is the word of Messages for it.
STOPPING = (503, 529)
# Of a client before each turn. Without it a few clients keep every core busy while a server starts.
THINK_S = 0.02
# A crowd on a busy machine.
WAIT_S = 300
GRACE_S = 60


class Wrong(AssertionError):
    """A client met something that may not be."""


def read_by(response: dict[str, Any]) -> int | None:
    """The tokens that a turn has read; None if it is not completed."""
    return response["usage"]["input_tokens"] if response["status"] == "completed" else None


@dataclass
class Service:
    """The servers that take new turns now, and what clients received."""

    servers: list[ServedProcess] = field(default_factory=list)
    # Those of them that have Messages and Chat Completions.
    complete: list[ServedProcess] = field(default_factory=list)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)
    # Input tokens of the first, second, … turn of a chain, as a quiet server counts them.
    expected: list[int] = field(default_factory=list)
    # The last response of each chain, and how many turns it has.
    chains: dict[str, int] = field(default_factory=dict)
    # By path and place in a conversation that is sent again: input tokens, as the first client has read them.
    resent: dict[tuple[str, int], int] = field(default_factory=dict)
    turns: int = 0
    # Requests that a stopping server has refused.
    moved: int = 0
    # Turns of each client.
    made: dict[int, int] = field(default_factory=dict)

    def any_server(self) -> ServedProcess:
        return random.choice(self.servers)

    async def any_with(self, path: str) -> ServedProcess:
        """A server in service that has this path; waits until there is one."""
        if path not in RESENT:
            return self.any_server()
        while not self.complete:
            await self.is_complete.wait()
        return random.choice(self.complete)

    async def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """What any server answers to a client that wants nothing unusual."""
        answer = await fetch(await self.any_with(path), method, f"/v1/{path}", body)
        if answer.status in STOPPING and b"shutting down" in answer.body:
            self.moved += 1
            return await self.ask(method, path, body)
        found: dict[str, Any] = answer.json
        if answer.status != 200:
            raise Wrong(f"{method} {path}: {answer.status} {found}")
        return found

    def note(self, response: dict[str, Any], before: str | None, turn: int) -> None:
        """Check a response that a client has; it is the turn of this number of its chain."""
        if read_by(response) != self.expected[turn]:
            raise Wrong(f"turn {turn} of a chain should read {self.expected[turn]}: {response}")
        if before is not None:
            del self.chains[before]
        self.chains[response["id"]] = turn + 1
        self.turns += 1

    def note_resent(self, path: str, turn: int, read: int) -> None:
        """Check the input tokens of a turn whose history was sent again."""
        if read != self.resent.setdefault((path, turn), read) or not read:
            raise Wrong(f"turn {turn} by {path} should read {self.resent[path, turn]}, not {read}")
        self.turns += 1


# --- clients ------------------------------------------------------------------------------------------------


def body(before: str | None, **fields: Any) -> dict[str, Any]:
    """A turn that says the same in every chain."""
    chained = {} if before is None else {"previous_response_id": before}
    return {"model": "scripted", "input": "Go on, please.", **chained, **fields}


async def by_http(service: Service, before: str | None) -> dict[str, Any]:
    return await service.ask("POST", "responses", body(before))


async def in_background(service: Service, before: str | None) -> dict[str, Any]:
    """Begun at one server, polled at any."""
    asked = body(before, background=True)
    response = await service.ask("POST", "responses", asked)
    while response["status"] not in ENDED:
        await asyncio.sleep(POLL_S)
        response = await service.ask("GET", f"responses/{response['id']}")
    return response


async def think() -> None:
    await asyncio.sleep(THINK_S)


Turn = Callable[[Service, str | None], Coroutine[None, None, dict[str, Any]]]


async def chat(service: Service, number: int, turn: Turn) -> None:
    """Chains of turns, one after the other, for ever."""
    while True:
        before: str | None = None
        for place in range(CHAIN_MAX):
            await think()
            response = await turn(service, before)
            service.note(response, before, place)
            before = response["id"]
            service.made[number] += 1


class Socket:
    """A socket that moves to another server when its own goes out of service."""

    def __init__(self) -> None:
        self._server: ServedProcess | None = None
        self._wire: Wire | None = None
        self._close: Callable[[], Coroutine[None, None, None]] | None = None

    async def turn(self, service: Service, before: str | None) -> dict[str, Any]:
        if self._server not in service.servers or self._wire is None:
            await self.close()
            self._server = service.any_server()
            opening = wire(self._server)
            self._wire = await opening.__aenter__()
            self._close = lambda: opening.__aexit__(None, None, None)  # type: ignore[assignment, return-value]
        event = await self._wire.turn(**body(before))
        if "shutting down" in str(event.get("error")):
            service.moved += 1
            return await self.turn(service, before)
        if event["type"] != "response.completed":
            raise Wrong(f"a socket got {event}")
        response: dict[str, Any] = event["response"]
        return response

    async def close(self) -> None:
        if self._close is not None:
            with suppress(Exception):
                await self._close()
        self._close = self._wire = None


async def on_socket(service: Service, number: int) -> None:
    socket = Socket()
    try:
        await chat(service, number, socket.turn)
    finally:
        await socket.close()


async def converse(service: Service, number: int) -> None:
    """Turns of a conversation, in which everything that was said stands."""
    while True:
        made = await service.ask("POST", "conversations", {})
        for place in range(CHAIN_MAX):
            await think()
            asked = body(None, conversation=made["id"])
            response = await service.ask("POST", "responses", asked)
            if read_by(response) != service.expected[place]:
                raise Wrong(f"turn {place} should read {service.expected[place]}: {response}")
            service.turns += 1
            service.made[number] += 1
        path = f"conversations/{made['id']}/items?limit=100"
        items = await service.ask("GET", path)
        if len(items["data"]) != 2 * CHAIN_MAX:
            raise Wrong(f"a conversation has {len(items['data'])} items, not {2 * CHAIN_MAX}")


def of_chat(answer: dict[str, Any]) -> tuple[str, int]:
    """What the model has said, and how many tokens it has read."""
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def of_messages(answer: dict[str, Any]) -> tuple[str, int]:
    usage = answer["usage"]
    return answer["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]


# The APIs that keep nothing: each turn sends all that was said.
RESENT = {"chat/completions": of_chat, "messages": of_messages}


async def resend(service: Service, number: int, path: str) -> None:
    """Conversations by one of these."""
    while True:
        said: list[dict[str, str]] = []
        for place in range(CHAIN_MAX):
            await think()
            said.append({"role": "user", "content": "Go on, please."})
            asked = {"model": "scripted", "messages": said, "max_tokens": 200}
            text, read = RESENT[path](await service.ask("POST", path, asked))
            service.note_resent(path, place, read)
            service.made[number] += 1
            said.append({"role": "assistant", "content": text})


Client = Callable[[Service, int], Coroutine[None, None, None]]
CLIENTS: Sequence[Client] = (
    lambda service, number: chat(service, number, by_http),
    on_socket,
    lambda service, number: chat(service, number, in_background),
    converse,
)
# Those that wait while no server has their API.
WAITING: Sequence[Client] = (
    lambda service, number: resend(service, number, "chat/completions"),
    lambda service, number: resend(service, number, "messages"),
)


@asynccontextmanager
async def crowd(
    service: Service, count: int
) -> AsyncIterator[Callable[[], Coroutine[None, None, None]]]:
    """That many clients; a call waits until each has made some more turns."""
    service.made = dict.fromkeys(range(count), 0)
    kinds = (*CLIENTS, *WAITING)
    chosen = {number: kinds[number % len(kinds)] for number in service.made}
    tasks = [asyncio.create_task(kind(service, number)) for number, kind in chosen.items()]

    async def some_turns() -> None:
        goals = {
            number: made + TURNS_EACH
            for number, made in service.made.items()
            if service.complete or chosen[number] in CLIENTS
        }
        async with asyncio.timeout(WAIT_S):
            while any(service.made[number] < goal for number, goal in goals.items()):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(POLL_S)

    try:
        yield some_turns
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    wrong = [one for one in results if not isinstance(one, asyncio.CancelledError)]
    assert not wrong, f"{len(wrong)} clients met something wrong, the first: {wrong[0]!r}"


# --- servers ------------------------------------------------------------------------------------------------


class Versions:
    """Starts and stops servers of several versions on one store."""

    def __init__(self, store: str, kind: str, folder: Path, service: Service) -> None:
        self._flags = ["--store", store, "--workers", str(WORKERS[kind]), "--grace-s", str(GRACE_S)]
        self._folder, self._service = folder, service
        self._stack = ExitStack()

    def __enter__(self) -> Versions:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    async def start(self, program: Program) -> ServedProcess:
        """A server of this version, in service."""
        opening = served_process(
            *self._flags,
            program=program.command,
            cwd=self._folder,
            environment=program.environment,
        )
        served = await asyncio.to_thread(self._stack.enter_context, opening)
        assert f"Segue {program.version} serves" in "".join(served.printed), served.printed
        self._service.servers.append(served)
        if (program.folder / "segue" / "messages").is_dir():
            self._service.complete.append(served)
            self._service.is_complete.set()
        return served

    async def stop(self, served: ServedProcess) -> None:
        """Out of service first, as a balancer does; what it still runs is finished."""
        for servers in (self._service.servers, self._service.complete):
            if served in servers:
                servers.remove(served)
        if not self._service.complete:
            self._service.is_complete.clear()
        status = await asyncio.to_thread(served.stop)
        assert status == 0, "".join(served.printed)
        said = "".join(served.printed)
        assert "Traceback" not in said, said


async def play(
    older: Program, newer: Program, store: str, kind: str, folder: Path, clients: int
) -> Service:
    """The older version alone, both, the newer alone, both, the older alone."""
    service = Service()
    with Versions(store, kind, folder, service) as versions:
        old = await versions.start(older)
        await measure(service)
        async with crowd(service, clients) as some_turns:
            await some_turns()
            new = await versions.start(newer)
            await some_turns()
            await versions.stop(old)
            await some_turns()
            old = await versions.start(older)
            await some_turns()
            await versions.stop(new)
            await some_turns()
        await check(service)
        await versions.stop(old)
    # Those that clients have left unfinished are counted too.
    assert await counted(store) >= service.turns, "each turn has a row of usage"
    return service


async def measure(service: Service) -> None:
    """What each turn of a chain reads, at a quiet server."""
    before = None
    for _ in range(CHAIN_MAX + 1):
        response = await by_http(service, before)
        service.expected.append(response["usage"]["input_tokens"])
        before = response["id"]
    assert service.expected == sorted(set(service.expected)), "each turn reads more than the last"


async def check(service: Service) -> None:
    """The server that is left knows every chain, and goes on with it."""
    for last, turns in tuple(service.chains.items()):
        found = await service.ask("GET", f"responses/{last}")
        assert found["status"] == "completed", found
        if turns <= CHAIN_MAX:
            service.note(await by_http(service, last), last, turns)


async def counted(store: str) -> int:
    """Rows of usage in the store."""
    query = "SELECT count(*) FROM usage"
    if store.startswith("sqlite"):
        with closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as database:
            return int(database.execute(query).fetchone()[0])
    connection = await asyncpg.connect(store)
    try:
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'shared.db'}"
        return
    with running_postgres() as server:
        yield server.url()


def refusal(program: Program, store: str, folder: Path) -> str:
    """What this version says that does not start on the store."""
    words = ["serve", "--port", "0", "--engine", "scripted", "--store", store]
    ended = subprocess.run(
        [*program.command, *words],
        cwd=folder, env={**os.environ, **program.environment}, text=True, timeout=WAIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert ended.returncode != 0, ended.stdout
    return ended.stdout


async def main(clients: int, kinds: Sequence[str]) -> None:
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name, store_of(kind, Path(name)) as store:
            older, newer = neighbour(), make_up(Path(name, "next"), writes_new_rows=False)
            began_at = time.monotonic()
            service = await play(older, newer, store, kind, Path(name), clients)
            took_s = time.monotonic() - began_at
            print(
                f"{kind}: {older.version} and {newer.version}, {clients} clients, {service.turns} turns on "
                f"{len(service.chains)} chains in {took_s:.0f} s: none failed, lost or wrong; "
                f"{service.moved} requests were sent again to the other server"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    options = parser.parse_args()
    asyncio.run(main(options.clients, options.stores))
