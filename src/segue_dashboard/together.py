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
    running = sorted(
        (row for picture in pictures for row in picture.running), key=lambda r: r.created_at
    )
    memory = (row for picture in pictures for row in picture.memory)
    replicas = (row for picture in pictures for row in picture.replicas)
    refusals = (row for picture in pictures for row in picture.refusals)
    backlogs = [picture.backlog for picture in pictures if picture.backlog is not None]
    lags = [picture.lag_ms for picture in pictures if picture.lag_ms is not None]
    columns = zip(*(structs.astuple(picture.totals) for picture in pictures), strict=True)
    return Picture(
        totals=Totals(*map(sum, columns)),
        connections=_connections([picture.connections for picture in pictures]),
        running_count=sum(picture.running_count for picture in pictures),
        running=running[: views.RUNNING_LISTED_MAX],
        memory=_merged(memory, lambda row: row.name, _merge_caches),
        replicas=joined(replicas, is_up=any),
        refusals=_merged(refusals, lambda row: (row.transport, row.code), _merge_refusals),
        backlog=sum(backlogs) if backlogs else None,
        lag_ms=max(lags, default=None),
    )


def _connections(workers: Sequence[Connections]) -> Connections:
    rows = (row for worker in workers for row in worker.rows)
    return Connections(
        count=sum(worker.count for worker in workers),
        lanes=sum(worker.lanes for worker in workers),
        running=sum(worker.running for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
        cells="".join(worker.cells for worker in workers)[: views.CELLS_MAX],
        rows=nlargest(views.CONNECTIONS_LISTED_MAX, rows, key=views.load_of),
    )


def _merged(rows: Iterable[T], key: Callable[[T], object], merge: Callable[[T, T], T]) -> list[T]:
    """One row for each key, from the rows of all workers."""
    merged: dict[object, T] = {}
    for row in rows:
        before = merged.get(key(row))
        merged[key(row)] = row if before is None else merge(before, row)
    return list(merged.values())


def _merge_caches(first: CacheUse, second: CacheUse) -> CacheUse:
    if first.name == views.FULLEST:
        return max(first, second, key=lambda use: use.bytes)
    return CacheUse(first.name, first.bytes + second.bytes, first.bytes_max + second.bytes_max)


def _merge_refusals(first: RefusalCount, second: RefusalCount) -> RefusalCount:
    at_ms = max(first.at_ms, second.at_ms)
    return RefusalCount(first.transport, first.code, first.count + second.count, at_ms)
