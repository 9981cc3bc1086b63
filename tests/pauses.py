"""Three processes on one PostgreSQL: one is killed, one paused, one cut off from the database. What do clients hear?

    python -m tests.pauses --turns 1000

Background turns are created at all three and wait for an engine that takes a few at a time. Then, one after the other:
the first process is killed, the second stands still for longer than a lease, and when it is back the third loses the
database for as long, its connections silent and not closed. Meanwhile every turn is polled, at all processes in turn,
and after its end as well. It prints what the pollers heard, and checks that each turn has one ending for all of them,
that nothing acknowledged is lost, and that usage is counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from segue.wire.response import ENDED
from tests.engines.fakes.chat import delta, end, usage
from tests.engines.fakes.server import DONE, Fake, event
from tests.postgres import PostgresServer, running_postgres
from tests.support import ServedProcess, fetch, served_process

# Longer than a lease.
FAULT_S = 20.0
# How long one job takes, how many a process gives the engine at once, and the tokens of an answer.
JOB_S = 0.8
PARALLEL = 5
TOKENS = 7
# A poll at a process that stands still is given up; so many are made at once.
POLL_S = 2.0
POLLS_MAX = 12
# How long the rest may take after the last fault, and how long is polled after the last ending.
REST_S = 240.0
AFTER_S = 6.0
NAMES = ("killed", "paused", "cut off")


@dataclass
class SlowChat(Fake):
    """An engine that answers after a while, and remembers what it was asked."""

    asked: Counter[str] = field(default_factory=Counter)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._completions),
            web.get("/v1/models", self._models),
        ]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "gpt"}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: Any = json.loads(await request.read())
        self.asked[body["messages"][-1]["content"]] += 1
        response = await self.begin(request)
        await response.write(event(delta(content="Well,")))
        await asyncio.sleep(JOB_S)
        for one in (delta(content=" done."), end(), usage(9, TOKENS)):
            await response.write(event(one))
        await response.write(DONE)
        return response


class Line:
    """The way of one process to the database; it can fall silent, and what was on its way comes later."""

    def __init__(self, folder: Path, database: Path) -> None:
        self.folder = folder
        self._database = database / ".s.PGSQL.5432"
        self.is_open = asyncio.Event()
        self.is_open.set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        path = self.folder / ".s.PGSQL.5432"
        server = await asyncio.start_unix_server(self._serve, path)
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_unix_connection(self._database)
        except OSError:
            # The database is away.
            writer.close()
            return
        there = asyncio.create_task(self._forward(reader, to_writer))
        await self._forward(to_reader, writer)
        there.cancel()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass
class Heard:
    """What the pollers of one turn have heard, each change once."""

    home: str
    statuses: list[str] = field(default_factory=list)

    def note(self, status: str) -> None:
        if not self.statuses or self.statuses[-1] != status:
            self.statuses.append(status)

    @property
    def endings(self) -> list[str]:
        return [status for status in self.statuses if status in ENDED]

    @property
    def has_ended(self) -> bool:
        return bool(self.endings)


@dataclass
class Crowd:
    """The clients: they create turns, and poll them at all processes in turn."""

    servers: dict[str, ServedProcess]
    turns: dict[str, Heard] = field(default_factory=dict)
    answers: Counter[str] = field(default_factory=Counter)

    async def create(self, count: int) -> None:
        limit = asyncio.Semaphore(POLLS_MAX)

        async def one(number: int) -> None:
            home = NAMES[number % len(NAMES)]
            body = {"model": "gpt", "input": f"turn {number}", "background": True}
            async with limit:
                answer = await fetch(self.servers[home], "POST", "/v1/responses", body)
            assert answer.status == 200, answer.body
            self.turns[answer.json["id"]] = Heard(home, [answer.json["status"]])

        await asyncio.gather(*(one(number) for number in range(count)))

    async def poll(self, is_over: asyncio.Event) -> None:
        """Sweep after sweep, until told to stop."""
        shift = 0
        while not is_over.is_set():
            shift += 1
            limit = asyncio.Semaphore(POLLS_MAX)
            polls = (self._ask(turn_id, at + shift, limit) for at, turn_id in enumerate(self.turns))
            await asyncio.gather(*polls)
            await asyncio.sleep(0.5)

    async def _ask(self, turn_id: str, at: int, limit: asyncio.Semaphore) -> None:
        alive = [one for one in self.servers.values() if one.process.poll() is None]
        async with limit:
            try:
                async with asyncio.timeout(POLL_S):
                    path = f"/v1/responses/{turn_id}"
                    answer = await fetch(alive[at % len(alive)], "GET", path)
            except (OSError, TimeoutError, IndexError, ValueError):
                self.answers["none"] += 1
                return
        self.answers[str(answer.status)] += 1
        # 503 is no word about the turn.
        if answer.status != 503:
            found = answer.json["status"] if answer.status == 200 else f"HTTP {answer.status}"
            self.turns[turn_id].note(found)


def flags(fake: SlowChat, store: str) -> list[str]:
    return [
        *("--engine", "chat", "--engine-url", fake.url, "--model", "gpt"),
        *("--engine-parallel", str(PARALLEL), "--store", store, "--grace-s", "1"),
    ]


async def run(count: int, database: PostgresServer, folder: Path) -> list[str]:
    """The whole story; what is wrong with it."""
    url = await database.make_database()
    lines = {name: Line(folder / name.replace(" ", "_"), database.folder) for name in NAMES}
    async with AsyncExitStack() as stack:
        fake = SlowChat()
        await stack.enter_async_context(fake)
        processes = stack.enter_context(ExitStack())
        servers: dict[str, ServedProcess] = {}
        for name, line in lines.items():
            line.folder.mkdir()
            await stack.enter_async_context(line.opened())
            store = url.replace(str(database.folder), str(line.folder))
            server = served_process(*flags(fake, store), cwd=folder)
            servers[name] = await asyncio.to_thread(processes.enter_context, server)
        crowd = Crowd(servers)
        began = time.monotonic()
        await crowd.create(count)
        said(began, f"{count} background turns are queued at three processes")
        is_over = asyncio.Event()
        polling = asyncio.create_task(crowd.poll(is_over))
        await break_all(servers, lines, began)
        await until_ended(crowd)
        said(began, "every turn has ended; polling goes on for a while")
        await asyncio.sleep(AFTER_S)
        is_over.set()
        await polling
        for name in ("paused", "cut off"):
            await asyncio.to_thread(servers[name].stop)
    rows = await database.ask("SELECT turn_id, status, output_tokens FROM usage", url)
    await database.drop_database(url)
    entered = {row[0]: (row[1], row[2]) for row in rows}
    table(crowd)
    return wrong_with(crowd, fake, entered, len(rows))


def said(began: float, words: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {words}", flush=True)


async def break_all(
    servers: dict[str, ServedProcess], lines: dict[str, Line], began: float
) -> None:
    await asyncio.sleep(2)
    servers["killed"].process.kill()
    said(began, "the first process is killed")
    await asyncio.sleep(2)
    servers["paused"].process.send_signal(signal.SIGSTOP)
    said(began, f"the second process stands still for {FAULT_S:g} s")
    await asyncio.sleep(FAULT_S)
    servers["paused"].process.send_signal(signal.SIGCONT)
    said(began, "the second process goes on")
    await asyncio.sleep(2)
    lines["cut off"].is_open.clear()
    said(began, f"the third process is cut off from the database for {FAULT_S:g} s")
    await asyncio.sleep(FAULT_S)
    lines["cut off"].is_open.set()
    said(began, "the third process reaches the database again")


async def until_ended(crowd: Crowd) -> None:
    until = time.monotonic() + REST_S
    while not all(heard.has_ended for heard in crowd.turns.values()):
        if time.monotonic() > until:
            print("not all turns have ended")
            return
        await asyncio.sleep(0.5)


def table(crowd: Crowd) -> None:
    """How often the pollers of a turn of each process heard what, in its order."""
    print("\nwhat the pollers of a turn heard, by the process that had accepted it")
    paths: dict[str, Counter[str]] = defaultdict(Counter)
    for heard in crowd.turns.values():
        paths[" > ".join(heard.statuses)][heard.home] += 1
    width = max(map(len, paths))
    print(f"{'':{width}}  " + "  ".join(f"{name:>8}" for name in NAMES))
    for path, homes in sorted(paths.items(), key=lambda row: -sum(row[1].values())):
        print(f"{path:{width}}  " + "  ".join(f"{homes[name]:8}" for name in NAMES))
    print("answers to polls:", ", ".join(f"{k}: {n}" for k, n in sorted(crowd.answers.items())))


def wrong_with(
    crowd: Crowd, fake: SlowChat, entered: dict[str, tuple[str, int]], rows: int
) -> list[str]:
    found: list[str] = []
    for turn_id, heard in crowd.turns.items():
        if len(set(heard.endings)) != 1:
            found.append(f"{turn_id} ({heard.home}) ended as {heard.endings}: {heard.statuses}")
        elif (row := entered.get(turn_id)) is None or row[0] != heard.endings[0]:
            found.append(f"{turn_id} ended as {heard.endings[0]}, its usage says {row}")
        elif row[0] == "completed" and row[1] != TOKENS:
            found.append(f"{turn_id} used {TOKENS} tokens, its usage says {row}")
        if any(status.startswith("HTTP") for status in heard.statuses):
            found.append(f"{turn_id} was lost meanwhile: {heard.statuses}")
    ends = Counter(heard.endings[-1] for heard in crowd.turns.values() if heard.has_ended)
    twice = sum(number > 1 for number in fake.asked.values())
    print(f"endings: {dict(ends)}; usage rows: {rows}; asked of the engine more than once: {twice}")
    if rows != len(crowd.turns):
        found.append(f"{len(crowd.turns)} turns, {rows} rows of usage")
    if twice:
        found.append(f"{twice} turns were asked of the engine more than once")
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=1_000)
    count = parser.parse_args(words).turns
    with running_postgres() as database, tempfile.TemporaryDirectory(prefix="segue-") as folder:
        found = asyncio.run(run(count, database, Path(folder)))
    print("\n".join(found[:20]) or "one ending for each turn, nothing lost, usage once")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
