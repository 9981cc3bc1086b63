"""How much of what prompts share could have been found? The same arrivals, placed by someone who knows everything.

In: the jobs that replicas were sent, as block digests with their times (`/arrivals` of `segue_fleet.replica`). Out:
what of them was shared with any earlier job, what the replicas found, and what one replica with the KV room of all
would have found: no placement on several replicas can do better with the same rule for what is forgotten. Where a
replica was replaced, this one forgets what only that replica had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from segue_fleet.blocks import BlockCache, ReplicaShape
from segue_fleet.replica import Arrival, percentile


@dataclass(frozen=True)
class Placed:
    """A job and the replica that got it."""

    replica: str
    arrival: Arrival


@dataclass(frozen=True)
class Replaced:
    """From this time on a replica has forgotten everything."""

    replica: str
    at_s: float


@dataclass(frozen=True)
class Judged:
    """What came of one part of a run; times are simulated."""

    jobs: int
    prompt_tokens: int
    shared_tokens: int
    found_tokens: int
    oracle_tokens: int
    computed: dict[str, int]
    wait_s_p50: float
    wait_s_p95: float
    first_s_p95: float

    @property
    def share(self) -> float:
        """Of the tokens that an earlier prompt had too, how many the replicas found."""
        return self.found_tokens / max(1, self.shared_tokens)

    @property
    def oracle_share(self) -> float:
        return self.oracle_tokens / max(1, self.shared_tokens)

    @property
    def of_oracle(self) -> float:
        return self.found_tokens / max(1, self.oracle_tokens)

    @property
    def spread(self) -> float:
        """The most that a replica computed, by the least."""
        values = self.computed.values()
        return max(values, default=0) / max(1, min(values, default=0))


def in_order(arrivals: Mapping[str, Sequence[Arrival]]) -> list[Placed]:
    """The jobs of all replicas, as they came."""
    placed = [Placed(name, one) for name, jobs in arrivals.items() for one in jobs]
    return sorted(placed, key=lambda one: one.arrival.at_s)


def judge(
    jobs: Sequence[Placed],
    shape: ReplicaShape,
    names: Iterable[str],
    replaced: Sequence[Replaced] = (),
    edges: Sequence[float] = (),
) -> list[Judged]:
    """One result for each part between two edges; everything before a part is known in it."""
    size = shape.block_tokens
    room = shape.kv_tokens // size
    caches = {name: BlockCache(room) for name in names}
    oracle = BlockCache(room * len(caches))
    seen: set[int] = set()
    parts: list[list[tuple[Placed, int, int]]] = [[] for _ in range(len(edges) + 1)]
    lost = sorted(replaced, key=lambda one: one.at_s)
    for job in jobs:
        arrival = job.arrival
        while lost and lost[0].at_s <= arrival.at_s:
            caches[lost.pop(0).replica] = BlockCache(room)
            oracle = _union(caches.values(), room * len(caches))
        whole = arrival.digests[: max(0, arrival.prompt_tokens - 1) // size]
        shared = next((n for n, one in enumerate(whole) if one not in seen), len(whole))
        at = sum(edge <= arrival.at_s for edge in edges)
        parts[at].append((job, shared * size, oracle.found(whole) * size))
        seen.update(arrival.digests)
        oracle.use(arrival.digests)
        caches[job.replica].use(arrival.digests)
    return [_judged(part, list(caches)) for part in parts]


def _union(caches: Iterable[BlockCache], room: int) -> BlockCache:
    whole = BlockCache(room)
    for cache in caches:
        whole.merge(cache)
    return whole


def _judged(part: Sequence[tuple[Placed, int, int]], names: Sequence[str]) -> Judged:
    arrivals = [job.arrival for job, _, _ in part]
    computed = dict.fromkeys(names, 0)
    for job, _, _ in part:
        computed[job.replica] += job.arrival.prompt_tokens - job.arrival.found_tokens
    waits = [one.wait_s for one in arrivals]
    return Judged(
        jobs=len(part),
        prompt_tokens=sum(one.prompt_tokens for one in arrivals),
        shared_tokens=sum(shared for _, shared, _ in part),
        found_tokens=sum(one.found_tokens for one in arrivals),
        oracle_tokens=sum(known for _, _, known in part),
        computed=computed,
        wait_s_p50=percentile(waits, 0.5),
        wait_s_p95=percentile(waits, 0.95),
        first_s_p95=percentile([one.first_s for one in arrivals], 0.95),
    )
