"""Which replica of an engine should take a job? Values in, a name out: who knows the same chooses the same.

A job whose history a replica has read (`route`) goes there, unless that one has more than its part of the jobs and the
job would wait there for longer than another replica needs to read everything again. Any other job is placed by how it
begins:

    head        instructions and tools. It has as many replicas as its share of the work asks for, so that a rare head
                is read by one replica and a popular one does not fill it
    beginning   the head and what was said before the model first spoke: its own order among those replicas

and takes the first replica in that order which has no more than its part of the jobs and has not worked much more than
the others lately. Orders are by rendezvous hashing: a replica that comes or goes moves only what it gets or had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from msgspec import Struct

# How many times its fair part of all jobs a replica may have before first turns go elsewhere.
JOBS_FACTOR = 1.25
# The same for its work, against the replica that has worked least; and the job's own length, or so many tokens, more.
WORK_FACTOR = 1.15
WORK_TOKENS_MIN = 4_096
# A replica with so few jobs, and half of its slots free, is never left.
QUIET_JOBS = 4
# Another replica must be better by this factor before a history is read again there.
LEAVE_FACTOR = 1.25
# Where nothing was measured yet: a small model on one GPU.
PREFILL_TOKENS_S = 5_000.0
SERVICE_S = 2.0

# It has the history; its turn by how the job begins; that one has too many jobs, or too much work; the replica with the
# history has a long queue; the replica with the history is down, drained or removed.
Reason = Literal["parent", "beginning", "load", "queue", "down"]


class ReplicaLoad(Struct, frozen=True):
    """What is known of a replica that may take the job, over all processes."""

    name: str
    running: int = 0
    waiting: int = 0
    slots: int = 256
    # Tokens that it has computed lately.
    work: float = 0.0
    # Measured; 0: not yet. Tokens of a prompt that it reads in a second, how long a job holds a slot, and how long it
    # takes to the first token beside reading.
    prefill_tokens_s: float = 0.0
    service_s: float = 0.0
    delay_s: float = 0.0

    @property
    def jobs(self) -> int:
        """Those that it works on, and those that wait for it."""
        return self.running + self.waiting

    @property
    def wait_s(self) -> float:
        """How long a job that comes now waits before it is read."""
        if self.running < self.slots:
            return self.delay_s
        return self.delay_s + (self.waiting + 1) * (self.service_s or SERVICE_S) / self.slots

    def read_s(self, tokens: int) -> float:
        """How long it takes to read so many tokens."""
        return tokens / (self.prefill_tokens_s or PREFILL_TOKENS_S)


class Asked(Struct, frozen=True):
    """What is known of the job."""

    head: bytes = b""
    beginning: bytes = b""
    # The replica that has read its history, and how many of its tokens.
    route: str | None = None
    held_tokens: int = 0
    prompt_tokens: int = 0
    # Which part of the work of all replicas had this head lately.
    head_share: float = 1.0


class Choice(NamedTuple):
    """The name of a replica, and why it was chosen."""

    name: str
    reason: Reason


def choose(replicas: Sequence[ReplicaLoad], asked: Asked) -> Choice:
    """One of these replicas, all of which may take the job."""
    home = next((replica for replica in replicas if replica.name == asked.route), None)
    if len(replicas) == 1:
        return Choice(replicas[0].name, _reason(asked, home))
    if home is None:
        name, reason = _place(replicas, asked)
        return Choice(name, reason if asked.route is None else "down")
    is_quiet = home.jobs <= min(QUIET_JOBS, home.slots // 2)
    if is_quiet or _has_room(home, _jobs_per_slot(replicas)):
        return Choice(home.name, "parent")
    costs = [
        (replica.wait_s + replica.read_s(asked.held_tokens), replica)
        for replica in replicas
        if replica is not home
    ]
    least = min(cost for cost, _ in costs)
    if home.wait_s <= LEAVE_FACTOR * least:
        return Choice(home.name, "parent")
    # Between equals the beginning decides.
    best = [replica.name for cost, replica in costs if cost == least]
    return Choice(min(best, key=lambda name: rank(asked.beginning, name)), "queue")


def _reason(asked: Asked, home: ReplicaLoad | None) -> Reason:
    if home is not None:
        return "parent"
    return "beginning" if asked.route is None else "down"


def _jobs_per_slot(replicas: Sequence[ReplicaLoad]) -> float:
    """How many jobs there are for each slot, with this one."""
    return (sum(replica.jobs for replica in replicas) + 1) / sum(
        replica.slots for replica in replicas
    )


def _has_room(replica: ReplicaLoad, jobs_per_slot: float) -> bool:
    """Whether it has less than its part of the jobs. Of all replicas at least one has."""
    return replica.jobs + 1 <= math.ceil(JOBS_FACTOR * jobs_per_slot * replica.slots)


def _place(replicas: Sequence[ReplicaLoad], asked: Asked) -> Choice:
    """The first in order that has room for it."""
    order, jobs_per_slot = ordered(replicas, asked), _jobs_per_slot(replicas)
    roomy = [replica for replica in order if _has_room(replica, jobs_per_slot)]
    # As long as one of them has a free slot, no first turn waits for another.
    roomy = [replica for replica in roomy if replica.running < replica.slots] or roomy
    work = WORK_FACTOR * min(replica.work for replica in roomy)
    work += max(asked.prompt_tokens, WORK_TOKENS_MIN)
    chosen = next(replica for replica in roomy if replica.work <= work)
    return Choice(chosen.name, "beginning" if chosen is order[0] else "load")


def ordered(replicas: Sequence[ReplicaLoad], asked: Asked) -> list[ReplicaLoad]:
    """The replicas of this head in the order of this beginning, and then the others."""
    by_head = sorted(replicas, key=lambda replica: rank(asked.head, replica.name))
    count = max(1, math.ceil(JOBS_FACTOR * asked.head_share * len(by_head)))
    own = sorted(by_head[:count], key=lambda replica: rank(asked.beginning, replica.name))
    return own + by_head[count:]


def rank(key: bytes, name: str) -> bytes:
    """Where this replica stands in the order of this key; the smallest is the first."""
    return blake2b(key + name.encode(), digest_size=8).digest()
