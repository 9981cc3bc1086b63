"""Two servers on one PostgreSQL: what fails for how long when one of the three does? The figures of
docs/availability.md.

    python -m tests.availability

A client of each server writes stored turns all the time; a chain goes on at whichever server answers. Then, one after
the other: a server is killed, PostgreSQL is killed and started again after three seconds, a server is cut off from
PostgreSQL for twenty. It prints for how long each client had no answer, with which statuses, and checks that every turn
that was acknowledged is there in the end.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.pauses import Line
from tests.postgres import PostgresServer, running_postgres
from tests.support import MODEL, ServedProcess, fetch, served_process, until

EVERY_S = 0.1
# A client that hears nothing for this long tries again.
PATIENCE_S = 8.0
DOWN_S = 3.0
CUT_S = 20.0


@dataclass
class Client:
    """Writes stored turns at one server, again and again."""

    served: ServedProcess
    acknowledged: list[str] = field(default_factory=list)
    # When it had an answer, and what it had instead.
    answered_at: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    async def write(self) -> None:
        """Until cancelled."""
        while True:
            status, body = await ask(
                self.served, "POST", "/v1/responses", {"model": MODEL, "input": "x"}
            )
            if status == "200":
                self.acknowledged.append(body["id"])
                self.answered_at.append(time.monotonic())
            else:
                self.refused[status] += 1
            await asyncio.sleep(EVERY_S)

    def gap_s(self, since: float) -> float:
        """The longest time without an answer since then."""
        times = [since, *(at for at in self.answered_at if at > since), time.monotonic()]
        return max(b - a for a, b in pairwise(times))


async def ask(served: ServedProcess, verb: str, path: str, body: Any = None) -> tuple[str, Any]:
    """The status and the body, or what went wrong."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await fetch(served, verb, path, body)
    except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        return type(error).__name__, None
    return str(answer.status), answer.json


@asynccontextmanager
async def writing(*clients: Client) -> AsyncIterator[float]:
    """Clients that write while inside; since when."""
    tasks = [asyncio.create_task(client.write()) for client in clients]
    await asyncio.sleep(1)
    for client in clients:
        client.refused.clear()
    try:
        yield time.monotonic()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_status(served: ServedProcess, path: str, wanted: str, key: str = "") -> float:
    """How long until this answers so; with a key, until that field of the body has it."""
    began = time.monotonic()
    while True:
        status, body = await ask(served, "GET", path)
        if (status if not key else (body or {}).get(key)) == wanted:
            return time.monotonic() - began
        await asyncio.sleep(EVERY_S)


async def kill_server(a: ServedProcess, b: ServedProcess) -> None:
    chain = (await ask(a, "POST", "/v1/responses", {"model": MODEL, "input": "x"}))[1]["id"]
    slow = {"model": MODEL, "input": "x", "background": True, "previous_response_id": chain}
    runs = (await ask(a, "POST", "/v1/responses", slow))[1]["id"]
    await until_status(a, f"/v1/responses/{runs}", "in_progress", "status")
    client = Client(b)
    async with writing(client) as since:
        a.process.kill()
        began = time.monotonic()
        more = {"model": MODEL, "input": "x", "previous_response_id": chain, "max_output_tokens": 9}
        status, _ = await ask(b, "POST", "/v1/responses", more)
        took = time.monotonic() - began
        print(f"  a chain of the killed server goes on at the other: {status} after {took:.2f} s")
        await until_status(b, f"/v1/responses/{runs}", "failed", "status")
        print(f"  its running background turn reads failed after {time.monotonic() - began:.1f} s")
        gap = client.gap_s(since)
    print(f"  clients of the other server: longest gap {gap:.2f} s, refused {dict(client.refused)}")


async def kill_postgres(a: ServedProcess, b: ServedProcess, database: PostgresServer) -> None:
    clients = (Client(a), Client(b))
    async with writing(*clients) as since:
        await asyncio.to_thread(database.stop)
        await asyncio.sleep(DOWN_S)
        await asyncio.to_thread(database.start)
        back = time.monotonic()
        await until(lambda: all(client.answered_at[-1] > back for client in clients))
        print(
            f"  both servers answer {time.monotonic() - back:.2f} s after PostgreSQL takes connections again"
        )
        gaps = [client.gap_s(since) for client in clients]
    refused = [dict(client.refused) for client in clients]
    print(f"  longest gap {max(gaps):.2f} s, refused {refused}")
    await check(a, clients)


async def cut_off(a: ServedProcess, b: ServedProcess, line: Line) -> None:
    clients = (Client(a), Client(b))
    async with writing(*clients) as since:
        line.is_open.clear()
        unready = await until_status(a, "/ready", "503")
        print(
            f"  /ready of the server that is cut off says 503 after {unready:.1f} s: load balancers leave it"
        )
        await asyncio.sleep(CUT_S - unready)
        line.is_open.set()
        back = time.monotonic()
        ready = await until_status(a, "/ready", "200")
        await until(lambda: clients[0].answered_at[-1] > back)
        print(
            f"  after the cut it is ready in {ready:.1f} s, and answers in {time.monotonic() - back:.1f} s"
        )
        gaps = [client.gap_s(since) for client in clients]
    refused = [dict(client.refused) for client in clients]
    print(f"  longest gap: cut off {gaps[0]:.1f} s, the other {gaps[1]:.2f} s; refused {refused}")
    await check(b, clients)


async def check(served: ServedProcess, clients: tuple[Client, ...]) -> None:
    """Everything that was acknowledged is there."""
    ids = [name for client in clients for name in client.acknowledged]
    lost = [name for name in ids if (await ask(served, "GET", f"/v1/responses/{name}"))[0] != "200"]
    print(f"  {len(ids)} acknowledged, {len(lost)} lost")
    assert not lost


async def run(database: PostgresServer, folder: Path) -> None:
    url = await database.make_database()
    line = Line(folder / "line", database.folder)
    line.folder.mkdir()
    # The second turn of a chain is long.
    script = folder / "script.json"
    script.write_text('{"turns": [{"text": "short"}, {"text": "long", "pad_tokens": 20000}]}')
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(line.opened())

        async def start(store: str) -> ServedProcess:
            flags = ("--store", store, "--tps", "200", "--grace-s", "1", "--script", str(script))
            return await asyncio.to_thread(stack.enter_context, served_process(*flags, cwd=folder))

        through = url.replace(str(database.folder), str(line.folder))
        b = await start(url)
        print("a server is killed")
        await kill_server(await start(url), b)
        print(f"PostgreSQL is killed, and started again after {DOWN_S:g} s")
        a = await start(through)
        await kill_postgres(a, b, database)
        print(f"a server is cut off from PostgreSQL for {CUT_S:g} s")
        await cut_off(a, b, line)
        # Beside the event loop, on which its way to the database runs.
        await asyncio.to_thread(a.stop)
    await database.drop_database(url)


def main() -> None:
    with running_postgres() as database, tempfile.TemporaryDirectory() as name:
        asyncio.run(run(database, Path(name)))


if __name__ == "__main__":
    main()
