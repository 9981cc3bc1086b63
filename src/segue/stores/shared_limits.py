"""What is left of the limits of keys, for all processes that share a store? In memory and in a SQLite file.

In: what a process has used of a key and would hold. Out: its part. What is given is decided by `share_out`; here it is
seen to that nobody comes between the question and the answer. A process that has died holds nothing any more.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence

from segue.limits import Draw, Grant, HeldPlaces, Level, share_out
from segue.stores.database import QUERIES, SqliteDatabase


class MemorySharedLimits:
    """The meters of a process that is alone."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._levels: dict[str, Level] = {}

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Grant]:
        """What this process is given."""
        return [self._draw(draw) for draw in draws]

    def _draw(self, draw: Draw) -> Grant:
        level = self._levels.get(draw.key_id)
        self._levels[draw.key_id], grant = share_out(draw, level, HeldPlaces(), self._clock())
        return grant


class SqliteSharedLimits:
    """The meters of all processes that share a SQLite file."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Grant]:
        """What this process is given, in one transaction."""
        worker = self._database.lease.worker
        return await self._database.write(
            lambda writer: [_draw(writer, draw, worker) for draw in draws]
        )


def _draw(writer: sqlite3.Connection, draw: Draw, worker: str) -> Grant:
    """One process writes at a time, so nobody comes between."""
    key = {"key_id": draw.key_id, "worker": worker}
    row = writer.execute(QUERIES["level"], key).fetchone()
    others = HeldPlaces(*writer.execute(QUERIES["held_by_others"], key).fetchone())
    level, grant = share_out(draw, None if row is None else Level(*row), others, time.time())
    if row is None or draw.requests or draw.tokens:
        values = {"requests": level.requests, "tokens": level.tokens, "at": level.at}
        writer.execute(QUERIES["save_level"], key | values)
    held = {"connections": grant.held.connections, "lanes": grant.held.lanes}
    writer.execute(QUERIES["save_held" if grant.held != HeldPlaces() else "drop_held"], key | held)
    return grant
