"""Hours of mixed load on two workers and PostgreSQL, which are killed now and then: what grows, what is lost?

    make soak                           # two hours
    make soak ARGS="--minutes 30 --folder /tmp/soak"

The folder gets `soak.svg`, `soak.json` with every sample, `soak.txt` with the verdict, and the server's log. The exit
status is 1 if something grew or was lost. It takes about a quarter of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from segue.isolation.bwrap import NO_NAMESPACES
from segue.process.chains import PARENTS_MAX
from segue.web.index import build
from tests import shapes
from tests.crashes import GONE
from tests.escapes.conftest import forbidden
from tests.mcp_server import remote
from tests.postgres import PostgresServer, programs, reachable, temporary_folder
from tests.soak import figures, stories
from tests.soak.book import Book, Wrong
from tests.soak.picture import picture
from tests.support import ServedProcess, Wire, metric, served_process, wire

WARM_S = 1200.0
SAMPLE_S = 10.0
REST_S = 300.0
REST_AFTER_S = 3.0
STORY_S_MAX = 150.0
AT_ONCE_MAX = 30
# Sockets land at workers by chance: one may get more than its share.
FILLED_PART, FILLED_CHAINS = 2, 200
WORKERS = 2
POSTGRES_DOWN_S = 4.0
# Sandboxes come and go.
DRAWN_S_MIN = 120.0
# Small, so that all that may be kept is kept before the figures count.
LIMITS = {
    "process_state_bytes_max": 4 << 20,
    "connections_state_bytes_max": 3 << 20,
    "render_cache_bytes_max": 4 << 20,
    "reuse_bytes_max": 2 << 20,
    "events_retention_s": 600,
    "retention_s": 3600,
}


async def continued_once(socket: Wire, said: str) -> None:
    """A short chain."""
    await socket.create(model="short", input=said, store=False)
    parent = (await stories.heard(socket))["id"]
    await socket.create(model="short", input=said, store=False, previous_response_id=parent)
    await stories.heard(socket)


@dataclass
class Soak:
    """One run."""

    book: Book
    postgres: PostgresServer
    minutes: float
    rate: float
    chance: random.Random
    has_shell: bool
    began: float = field(default_factory=time.monotonic)
    samples: list[figures.Sample] = field(default_factory=list)
    tasks: list[tuple[float, float]] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    telling: set[asyncio.Task[None]] = field(default_factory=set)
    may_tell: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def at_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        return self.minutes * 60 - self.at_s

    # --- load ---

    async def load(self) -> None:
        """Stories at a steady rate until the time is over."""
        kinds = [one for one in stories.STORIES if one is not stories.shell or self.has_shell]
        weights = [stories.STORIES[one] for one in kinds]
        while self.left_s > 0:
            await self.may_tell.wait()
            if len(self.telling) < AT_ONCE_MAX:
                (story,) = self.chance.choices(kinds, weights)
                task = asyncio.create_task(self.tell(story))
                self.telling.add(task)
                task.add_done_callback(self.telling.discard)
            else:
                self.book.counts["stories left out"] += 1
            await asyncio.sleep(self.chance.expovariate(self.rate))

    async def tell(self, story: stories.Story) -> None:
        began = time.monotonic()
        self.book.counts["stories"] += 1
        try:
            async with asyncio.timeout(STORY_S_MAX):
                await story(self.book, random.Random(self.chance.random()))
        except Wrong as error:
            self.book.blame(f"{story.__name__}: {error}")
        except (TimeoutError, LookupError, *GONE) as error:
            if self.book.is_excused(began):
                self.book.counts["errors beside a kill"] += 1
            else:
                self.book.blame(f"{story.__name__}: {error!r:.600}")

    async def fill(self) -> None:
        """What a process remembers up to a number is remembered before the figures count: the beginnings of chains, and
        the parents that were continued."""
        chains = iter(range(FILLED_PART * WORKERS * PARENTS_MAX // FILLED_CHAINS))

        async def fill_by_turns() -> None:
            for _ in chains:
                async with wire(self.book.served) as socket:
                    for _ in range(FILLED_CHAINS):
                        await continued_once(socket, f"{self.chance.random()}")

        await asyncio.gather(fill_by_turns(), fill_by_turns())

    # --- kills ---

    async def kill(self) -> None:
        """Now the younger worker, now PostgreSQL, every few minutes; the elder worker lives as long as the run."""
        every_s = min(420.0, self.minutes * 60 / 6)
        while self.left_s > every_s:
            await asyncio.sleep(every_s * self.chance.uniform(0.8, 1.2))
            if self.left_s < 120.0 and self.minutes > 10:
                return
            what = "PostgreSQL" if len(self.kills) % 2 else "worker"
            self.book.begin_trouble()
            self.kills.append((self.at_s, what))
            if what == "worker":
                os.kill(self.workers()[-1], signal.SIGKILL)
            else:
                await asyncio.to_thread(self.postgres.stop)
                await asyncio.sleep(POSTGRES_DOWN_S)
                await asyncio.to_thread(self.postgres.start)
                self.book.begin_trouble()

    def workers(self) -> list[int]:
        """The worker processes, by age."""
        found = figures.descendants(self.book.served.process.pid)
        workers = [pid for pid in found if figures.name_of(pid) == "worker"]
        return sorted(workers, key=figures.began_at)

    # --- figures ---

    async def watch(self) -> None:
        while self.left_s > 0:
            self.take()
            shapes.noted.clear()
            await asyncio.sleep(SAMPLE_S)

    def take(self, *, is_rest: bool = False) -> None:
        for pid in figures.descendants(self.book.served.process.pid):
            name = "main" if pid == self.book.served.process.pid else ""
            if (one := figures.sample(pid, self.at_s, is_rest=is_rest, name=name)) is not None:
                self.samples.append(one)

    async def rest(self) -> None:
        """From time to time everybody is gone for a moment: what is open then, nobody uses."""
        while self.left_s > 0:
            await asyncio.sleep(min(REST_S, self.minutes * 60 / 5))
            await self.stand_still()
            self.may_tell.set()

    async def stand_still(self) -> None:
        self.may_tell.clear()
        if self.telling:
            await asyncio.wait(self.telling)
        await asyncio.sleep(REST_AFTER_S)
        self.take(is_rest=True)
        try:
            # While a worker is replaced, its tasks are missing.
            if await metric(self.book.served, "segue_workers") == WORKERS:
                self.tasks.append((self.at_s, await metric(self.book.served, "segue_tasks")))
        except (TimeoutError, *GONE):
            self.book.counts["no figure of tasks"] += 1

    async def report(self) -> None:
        """A line each minute."""
        while self.left_s > 0:
            now = {one.pid: one for one in self.samples[-12:]}
            memory = " ".join(f"{one.name} {one.rss / figures.MIB:.0f}" for one in now.values())
            print(
                f"{self.left_s / 60:5.0f} min left; {self.book.counts['stories']} stories, "
                f"{self.book.counts['faults']} faults, {len(self.kills)} kills; MiB: {memory}",
                flush=True,
            )
            await asyncio.sleep(60)

    async def run(self) -> None:
        """All of it, and at the end a look at everything that was promised."""
        self.may_tell.set()
        tasks = [
            asyncio.create_task(one())
            for one in (self.load, self.kill, self.watch, self.rest, self.report)
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=self.minutes * 60)
        early = [one for one in tasks if one.done() and one.exception() is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.stand_still()
        for turn_id in list(self.book.kept):
            try:
                await self.book.check(turn_id)
            except (Wrong, TimeoutError, *GONE) as error:
                self.book.blame(f"at the end: {error!r}")
        for task in early:
            task.result()

    # --- the end ---

    def summary(self) -> list[str]:
        """The figures and the verdict."""
        warm_s = min(WARM_S, self.minutes * 60 / 4)
        lines = [f"{self.at_s / 60:.0f} minutes, {len(self.kills)} kills"]
        lines += [f"  {count:8} {name}" for name, count in sorted(self.book.counts.items())]
        last = {one.pid: one.cpu_s for one in self.samples}
        lines.append(f"  {sum(last.values()) / self.at_s:.0%} of a core for the server")
        rest = [one for one in self.samples if one.is_rest]
        for figure in ("rss", "anonymous", "pss", "files"):
            unit = 1 if figure == "files" else figures.MIB
            found = figures.slopes(rest if figure == "files" else self.samples, figure, warm_s)
            lines += [
                f"  {figure} of {one.name} ({one.pid}) over {one.hours:.2f} h: {one.first / unit:.1f} -> "
                f"{one.last / unit:.1f}, {one.an_hour / unit:+.2f} an hour"
                for one in found
            ]
        late = [point for point in self.tasks if point[0] >= warm_s]
        lines.append(
            f"  tasks at rest: {[round(value) for _, value in self.tasks]}, {figures.slope(late):+.2f} an hour"
        )
        wrong = figures.verdicts(self.samples, self.tasks, warm_s) + self.book.faults
        lines += ["FAIL", *(f"  {one}" for one in wrong)] if wrong else ["PASS"]
        return lines

    def panels(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        names = {one.pid: f"{one.name} {one.pid}" for one in self.samples}
        lines = {
            figure: {
                names[pid]: [(at_s, value / unit) for at_s, value in points]
                for pid, points in figures.series(self.samples, figure).items()
                if points[-1][0] - points[0][0] > DRAWN_S_MIN
            }
            for figure, unit in (("rss", figures.MIB), ("files", 1))
        }
        return {
            "resident memory, MiB (dashed: a kill)": lines["rss"],
            "open files": lines["files"],
            "tasks of all workers, at rest": {"tasks": self.tasks},
        }


def settings_file(folder: Path, mcp_url: str) -> Path:
    """A model for each kind of story, an index to search, an MCP server."""
    papers = folder / "papers"
    papers.mkdir()
    (papers / "rain.md").write_text("# About rain\n\nClouds bring rain.\n")
    build(papers, folder / "index.db", stories.PAGES)
    lines = [f"{key} = {value}" for key, value in LIMITS.items()]
    lines += [f"search_index = {json.dumps(str(folder / 'index.db'))}", 'engine = "scripted"']
    for name, turns in stories.SCRIPTS.items():
        script = folder / f"{name}.json"
        script.write_text(json.dumps({"turns": turns}))
        lines += ["[[models]]", f'name = "{name}"', f"script = {json.dumps(str(script))}"]
        lines += [f"tps = {stories.SLOW_TPS}"] if name == "slow" else []
    lines += ["[[mcp]]", 'label = "own"', f"url = {json.dumps(mcp_url)}"]
    path = folder / "segue.toml"
    path.write_text("\n".join(lines))
    return path


@asynccontextmanager
async def installation(
    folder: Path, has_shell: bool
) -> AsyncIterator[tuple[ServedProcess, PostgresServer]]:
    """Two workers, PostgreSQL on a disk, an MCP server."""
    with temporary_folder() as name:
        postgres = PostgresServer(Path(name), reachable(programs(), Path(name)))
        postgres.make()
        postgres.start()
        try:
            async with remote() as mcp:
                config = settings_file(folder, mcp.url)
                flags = [
                    "--config",
                    str(config),
                    "--workers",
                    str(WORKERS),
                    "--store",
                    postgres.url(),
                ]
                flags += ["--files-dir", str(folder / "files")]
                flags += ["--environment", "bwrap"] if has_shell else []
                with served_process(*flags, cwd=folder) as served:
                    try:
                        yield served, postgres
                    finally:
                        (folder / "server.log").write_text("".join(served.printed))
        finally:
            postgres.stop()


async def run(minutes: float, rate: float, seed: int, folder: Path) -> int:
    has_shell = NO_NAMESPACES not in await asyncio.to_thread(forbidden)
    print(
        f"folder {folder}, seed {seed}, shell {'on' if has_shell else 'off: no namespaces here'}",
        flush=True,
    )
    async with installation(folder, has_shell) as (served, postgres):
        soak = Soak(Book(served), postgres, minutes, rate, random.Random(seed), has_shell)
        await soak.fill()
        soak.began = time.monotonic()
        try:
            await soak.run()
        finally:
            lines = soak.summary()
            (folder / "soak.txt").write_text("\n".join(lines) + "\n")
            marks = [at_s for at_s, _ in soak.kills]
            (folder / "soak.svg").write_text(picture(soak.panels(), marks, soak.at_s))
            figures.write(
                folder / "soak.json", soak.samples, {"tasks": soak.tasks, "kills": soak.kills}
            )
    print("\n".join(lines))
    return 0 if lines[-1] == "PASS" else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=2.0, help="stories a second")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = (given.folder or Path(mkdtemp(prefix="segue-soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # The MCP server of the tests prints every request.
    logging.disable(logging.INFO)
    return asyncio.run(run(given.minutes, given.rate, given.seed, folder))


if __name__ == "__main__":
    sys.exit(main())
