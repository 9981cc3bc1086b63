"""How do the snapshots of several workers become one?

In: a snapshot of each worker. Out: one snapshot of all. Counts are added up; lists are joined, within the same limits.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest

import msgspec

from segue.dashboard.views import (
    CELLS_MAX,
    CONNECTIONS_LISTED_MAX,
    FULLEST,
    RUNNING_LISTED_MAX,
    CacheUse,
    Connections,
    Picture,
    RefusalCount,
    ReplicaView,
    Totals,
)


def together(pictures: Sequence[Picture]) -> Picture:
    """One snapshot of all workers."""
    if len(pictures) == 1:
        return pictures[0]
    running = sorted((row for one in pictures for row in one.running), key=lambda r: r.created_at)
    backlogs = [one.backlog for one in pictures if one.backlog is not None]
    return Picture(
        totals=_totals(one.totals for one in pictures),
        connections=_connections([one.connections for one in pictures]),
        running_count=sum(one.running_count for one in pictures),
        running=running[:RUNNING_LISTED_MAX],
        memory=_memory(row for one in pictures for row in one.memory),
        replicas=_replicas(row for one in pictures for row in one.replicas),
        refusals=_refusals(row for one in pictures for row in one.refusals),
        backlog=sum(backlogs) if backlogs else None,
    )


def _totals(all_totals: Iterable[Totals]) -> Totals:
    summed = Totals()
    for totals in all_totals:
        for name in Totals.__struct_fields__:
            setattr(summed, name, getattr(summed, name) + getattr(totals, name))
    return summed


def _connections(several: Sequence[Connections]) -> Connections:
    rows = (row for one in several for row in one.rows)
    return Connections(
        count=sum(one.count for one in several),
        lanes=sum(one.lanes for one in several),
        running=sum(one.running for one in several),
        waiting=sum(one.waiting for one in several),
        cells="".join(one.cells for one in several)[:CELLS_MAX],
        rows=nlargest(
            CONNECTIONS_LISTED_MAX, rows, key=lambda one: (one.running + one.waiting, one.turns)
        ),
    )


def _memory(rows: Iterable[CacheUse]) -> list[CacheUse]:
    found: dict[str, CacheUse] = {}
    for row in rows:
        known = found.get(row.name)
        if known is None:
            found[row.name] = row
        elif row.name == FULLEST:
            found[row.name] = max(known, row, key=lambda one: one.bytes)
        else:
            found[row.name] = CacheUse(
                row.name, known.bytes + row.bytes, known.bytes_max + row.bytes_max
            )
    return list(found.values())


def _replicas(rows: Iterable[ReplicaView]) -> list[ReplicaView]:
    found: dict[tuple[str, str], ReplicaView] = {}
    for row in rows:
        known = found.get((row.model, row.name))
        if known is not None:
            row = msgspec.structs.replace(
                row,
                is_up=known.is_up or row.is_up,
                running=_added(known.running, row.running),
                waiting=_added(known.waiting, row.waiting),
            )
        found[row.model, row.name] = row
    return list(found.values())


def _added(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _refusals(rows: Iterable[RefusalCount]) -> list[RefusalCount]:
    found: dict[tuple[str, str], RefusalCount] = {}
    for row in rows:
        known = found.get((row.transport, row.code))
        if known is not None:
            row = RefusalCount(
                row.transport, row.code, known.count + row.count, max(known.at_ms, row.at_ms)
            )
        found[row.transport, row.code] = row
    return list(found.values())
