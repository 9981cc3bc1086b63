"""How do the snapshots of several workers become one?

In: a snapshot of each worker. Out: one snapshot of all. Counts are added up; lists are joined, within the same limits.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from typing import TypeVar

from msgspec import structs

from segue.seams.engine_status import joined
from segue_dashboard import views
from segue_dashboard.views import CacheUse, Connections, Picture, RefusalCount, Totals

T = TypeVar("T")


def together(pictures: Sequence[Picture]) -> Picture:
    """One snapshot of all workers."""
    if len(pictures) == 1:
        return pictures[0]
    running = sorted((row for one in pictures for row in one.running), key=lambda r: r.created_at)
    memory = (row for one in pictures for row in one.memory)
    replicas = (row for one in pictures for row in one.replicas)
    refusals = (row for one in pictures for row in one.refusals)
    backlogs = [one.backlog for one in pictures if one.backlog is not None]
    lags = [one.lag_ms for one in pictures if one.lag_ms is not None]
    columns = zip(*(structs.astuple(one.totals) for one in pictures), strict=True)
    return Picture(
        totals=Totals(*map(sum, columns)),
        connections=_connections([one.connections for one in pictures]),
        running_count=sum(one.running_count for one in pictures),
        running=running[: views.RUNNING_LISTED_MAX],
        memory=_merged(memory, lambda row: row.name, _merge_caches),
        replicas=joined(replicas, is_up=any),
        refusals=_merged(refusals, lambda row: (row.transport, row.code), _merge_refusals),
        backlog=sum(backlogs) if backlogs else None,
        lag_ms=max(lags, default=None),
    )


def _connections(several: Sequence[Connections]) -> Connections:
    rows = (row for one in several for row in one.rows)
    return Connections(
        count=sum(one.count for one in several),
        lanes=sum(one.lanes for one in several),
        running=sum(one.running for one in several),
        waiting=sum(one.waiting for one in several),
        cells="".join(one.cells for one in several)[: views.CELLS_MAX],
        rows=nlargest(views.CONNECTIONS_LISTED_MAX, rows, key=views.load_of),
    )


def _merged(rows: Iterable[T], key: Callable[[T], object], merge: Callable[[T, T], T]) -> list[T]:
    """One row for each key, from the rows of all workers."""
    merged: dict[object, T] = {}
    for row in rows:
        known = merged.get(key(row))
        merged[key(row)] = row if known is None else merge(known, row)
    return list(merged.values())


def _merge_caches(one: CacheUse, other: CacheUse) -> CacheUse:
    if one.name == views.FULLEST:
        return max(one, other, key=lambda use: use.bytes)
    return CacheUse(one.name, one.bytes + other.bytes, one.bytes_max + other.bytes_max)


def _merge_refusals(one: RefusalCount, other: RefusalCount) -> RefusalCount:
    at_ms = max(one.at_ms, other.at_ms)
    return RefusalCount(one.transport, one.code, one.count + other.count, at_ms)
