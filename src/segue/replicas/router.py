"""How does a job reach one of the servers of an engine, and another one if that fails?

`placement.py` chooses, from what a `RouteBook` knows of servers and chains. Each server has a queue and its health
(`engines/queued.py`); one that does not take a job now, or fails before its first token, is left for another one. A job
moves only before its first token; where no server is up, it waits a moment and is then refused.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import structs

from segue.engines.fair_queue import QueueFull
from segue.engines.queued import (
    ALL_DRAINED,
    DOWN_S_MAX,
    PAUSE_S_MAX,
    QueuedEngine,
    refusal,
)
from segue.errors import ApiError, EngineFailed, TooMany, Unavailable
from segue.replicas.book import RouteBook, Visit
from segue.replicas.placement import choose
from segue.seams.model import EngineFacts, Finish, Job, JobStarted, Moved, Piece

# How many servers may fail with one job: it may be the job that breaks them.
FAILURES_MAX = 2


class RoutedEngine:
    """An `Engine` in front of its servers."""

    def __init__(self, servers: Sequence[QueuedEngine], down_s_max: float = DOWN_S_MAX) -> None:
        self._servers: dict[str, QueuedEngine] = {}
        self._down_s_max = down_s_max
        self.book = RouteBook()
        self.can_constrain = True
        self.grammars: frozenset[str] = frozenset()
        self.set_servers(servers)

    def set_servers(self, servers: Sequence[QueuedEngine]) -> None:
        """These take jobs from now on. Jobs that run at a server that goes are finished there; once that is removed,
        those that wait for it go to another one."""
        assert servers, "at least one server"
        self._servers = {server.name: server for server in servers}
        self.can_constrain = all(server.can_constrain for server in servers)
        self.grammars = frozenset.intersection(*(server.grammars for server in servers))

    @property
    def servers(self) -> Sequence[QueuedEngine]:
        """Those that take jobs now."""
        return list(self._servers.values())

    @property
    def facts(self) -> EngineFacts:
        """What holds for all servers; where they differ, the one with the smallest context."""
        known: list[EngineFacts] = [server.facts for server in self._servers.values()]
        facts = min(known, key=lambda facts: facts.context_tokens or sys.maxsize)
        is_poorer = facts.ids_alone and any(each.ids_alone is False for each in known)
        return structs.replace(facts, ids_alone=False) if is_poorer else facts

    async def is_ready(self) -> bool:
        """Ask all servers; one is enough."""
        return any(await asyncio.gather(*(server.is_ready() for server in self.servers)))

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The name of the chosen server, so that the next turn may come back to it, and then its pieces."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + self._down_s_max
        # Servers that failed with this job: they do not get it again.
        failed: set[QueuedEngine] = set()
        # Whether the client has a piece of the answer, so that no other server can begin again.
        has_pieces = False
        while True:
            server, visit = await self._choose(job, failed, give_up_at)
            moved = self._why_moved(job, server, failed)
            has_slot = False
            try:
                async with aclosing(server.sample(job, may_wait=False)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, JobStarted):
                            if not has_slot:
                                has_slot = True
                                visit.begin(clock())
                            piece = structs.replace(piece, moved=moved)
                        elif not has_pieces:
                            has_pieces = True
                            visit.note_first(clock())
                        if isinstance(piece, JobStarted | Finish):
                            visit.note_cached(piece.cached_tokens)
                        yield piece
                return
            except QueueFull:
                raise
            except ApiError as error:
                if has_pieces or not self._may_move(error, job, server, failed):
                    raise
            finally:
                visit.end(clock())
                if visit.found_little and server.recovered_at:
                    self.book.note_forgot(server.name, server.recovered_at)

    async def _choose(
        self, job: Job, failed: set[QueuedEngine], give_up_at: float
    ) -> tuple[QueuedEngine, Visit]:
        """A server that is up. Where none is, wait until one can be tried, if that is soon."""
        route = await self.book.route(job) if len(self._servers) > 1 else job.route
        while True:
            now = asyncio.get_running_loop().time()
            others = self._takers(failed)
            up = [server for server in others if now >= server.usable_at(job.owner)]
            if up:
                return self._place(up, job, route, now)
            wait_s = min(
                (server.usable_at(job.owner) - now for server in others), default=PAUSE_S_MAX
            )
            if now + wait_s > give_up_at:
                if not any(server.is_open for server in self._servers.values()):
                    raise Unavailable(ALL_DRAINED, wait_s=wait_s)
                raise refusal(others, wait_s)
            await asyncio.sleep(wait_s)

    def _place(
        self, up: list[QueuedEngine], job: Job, route: str | None, now: float
    ) -> tuple[QueuedEngine, Visit]:
        """One of these that are up."""
        by_name = {server.name: server for server in up}
        # One that has left the settings is as if it had never been.
        is_known = route in self._servers and not self.book.has_forgotten(route, job)
        route = route if is_known else None
        is_there = route in by_name or len(self._servers) == 1
        asked = self.book.asked(job, route, now, is_there=is_there)
        choice = choose([self.book.load(server, now) for server in up], asked)
        chosen = by_name[choice.name]
        chosen.choices[choice.reason] += 1
        return chosen, self.book.chose(job, choice, asked, now)

    def _may_move(
        self, error: ApiError, job: Job, server: QueuedEngine, failed: set[QueuedEngine]
    ) -> bool:
        """Whether another server may take a job that failed so at this one."""
        if isinstance(error, Unavailable):
            return True
        if not isinstance(error, TooMany | EngineFailed):
            return False
        # Of a limit of the key that we have there: another server may have another.
        failed.add(server)
        now = asyncio.get_running_loop().time()
        is_another_up = any(now >= other.usable_at(job.owner) for other in self._takers(failed))
        return is_another_up and (isinstance(error, TooMany) or len(failed) < FAILURES_MAX)

    def _takers(self, failed: set[QueuedEngine]) -> list[QueuedEngine]:
        """The servers that may get a job which has failed at these."""
        known = self._servers.values()
        return [server for server in known if server.is_open and server not in failed]

    def _why_moved(self, job: Job, to: QueuedEngine, failed: set[QueuedEngine]) -> Moved:
        """Why a job is not at the server of its parent."""
        if job.route is None or job.route == to.name:
            return ""
        home = self._servers.get(job.route)
        if home is None:
            return "removed"
        if home.is_drained:
            return "drained"
        now = asyncio.get_running_loop().time()
        is_down = home in failed or now < home.usable_at(job.owner)
        return "down" if is_down else "busy"
