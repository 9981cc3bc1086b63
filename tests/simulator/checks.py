"""What must be true, while things go wrong and after they have?

As clients see it: one ending for every response, at most one success for every idempotency key, nothing acknowledged is
lost, every stream ends with a terminal event. As the operator sees it: the usage of every turn that sampled is counted,
once; no healthy process is taken for dead; nothing that a dead process held stays locked.
"""

from __future__ import annotations

from collections import defaultdict

from segue.stores.maintenance import BEAT_S
from segue.stores.postgres_database import LEASE_S
from tests.simulator.clients import ENDED, Heard, Sighting
from tests.simulator.clock import World
from tests.simulator.database import Database
from tests.simulator.process import Process, Said

# From a death to the last of its locks, if a healthy process is there: the lease, two heartbeats, and work.
FREE_S = LEASE_S + 2 * BEAT_S + 8.0
ROUND_TRIPS = 40
# No transaction of ours keeps a row locked for longer, whatever becomes of its client.
ROW_LOCK_S = float(LEASE_S)


class Watch:
    """Looks on, every second of the simulation."""

    def __init__(
        self, world: World, database: Database, processes: list[Process], round_trip_s: float
    ) -> None:
        self._world = world
        # The survivors end what two dead processes left, one after the other.
        self.free_s = FREE_S + ROUND_TRIPS * round_trip_s
        self._database = database
        self._processes = processes
        self._locked_since: dict[object, float] = {}

    def look(self) -> None:
        for process in self._processes:
            process.look()
        self._check_leases()
        self._check_left_behind()
        self._check_row_locks()
        self._world.after(1.0, self.look)

    def _check_leases(self) -> None:
        now, seen = round(self._world.wall()), {}
        for row in self._database.all("workers"):
            home = self._database.homes.get(row["id"], "")
            seen[home] = max(seen.get(home, 0), row["seen_at"])
        for process in self._processes:
            since = process.well_since
            if since is None or self._world.now - since < LEASE_S + 5:
                continue
            age = now - seen.get(process.name, 0)
            if age > LEASE_S:
                self._world.fail(f"{process.name} is healthy, and its lease has run out")

    def _check_left_behind(self) -> None:
        """What dead processes held is free once a healthy one has had the time."""
        wells = [one.well_since for one in self._processes if one.well_since is not None]
        if not wells:
            return
        for process in self._processes:
            died_at = process.died_at
            if died_at is None or self._world.now - max(died_at, min(wells)) < self.free_s:
                continue
            for table in ("turns", "conversations", "places", "claims"):
                for row in self._database.all(table):
                    worker = row["worker"]
                    if worker and self._database.homes.get(worker) == process.name:
                        if table == "claims" and self._is_saved(row["owner"], row["turn_id"]):
                            continue
                        self._world.fail(
                            f"{table}: {process.name} is dead and still holds {row_name(row)}"
                        )
                        return

    def _is_saved(self, owner: str, turn_id: str) -> bool:
        return (owner, turn_id) in self._database.tables["turns"]

    def _check_row_locks(self) -> None:
        now = self._world.now
        held = {one for holders in self._database.locks.values() for one in holders}
        self._locked_since = {one: self._locked_since.get(one, now) for one in held}
        for transaction, since in self._locked_since.items():
            if now - since > ROW_LOCK_S:
                session = transaction.session
                self._world.fail(
                    f"{session.client} has kept {list(transaction.locks)[:3]} locked for {now - since:.0f} s"
                )


def row_name(row: dict[str, object]) -> str:
    return str(row.get("id") or row.get("turn_id") or row.get("key_id"))


def check_endings(world: World, heard: Heard) -> None:
    """One ending for every response; one success for every key."""
    by_turn: dict[str, list[Sighting]] = defaultdict(list)
    by_key: dict[str, set[str]] = defaultdict(set)
    for one in heard.sightings:
        by_turn[one.turn_id].append(one)
        if one.key and one.status in ("completed", "incomplete"):
            by_key[one.key].add(one.turn_id)
    for turn_id, seen in by_turn.items():
        ends = {one.status for one in seen} & ENDED
        if len(ends) > 1:
            world.fail(f"{turn_id} has ended as {sorted(ends)}")
        ended_at = min((one.heard_at for one in seen if one.status in ENDED), default=world.now)
        for one in seen:
            if one.status not in ENDED and one.asked_at > ended_at and one.was_well:
                world.fail(f"{turn_id} had ended, and is {one.status} again at {one.process}")
    for key, turns in by_key.items():
        if len(turns) > 1:
            world.fail(
                f"the idempotency key {key} has become {len(turns)} responses: {sorted(turns)}"
            )


def check_kept(world: World, heard: Heard, database: Database) -> None:
    """What was acknowledged has ended; what has ended well is kept, and is in its conversation once."""
    turns = {id: row for (_, id), row in database.tables["turns"].items()}
    shelved: dict[str, list[str]] = defaultdict(list)
    for row in database.all("shelved"):
        shelved[row["conversation_id"]].append(row["item_id"])
    for turn_id in sorted(heard.acknowledged):
        if turn_id not in turns:
            world.fail(f"{turn_id} was acknowledged and is lost")
        elif turns[turn_id]["worker"] is not None:
            world.fail(f"{turn_id} was acknowledged and has never ended")
    for one in heard.sightings:
        if one.status in ("completed", "incomplete") and one.turn_id not in turns:
            world.fail(f"{one.turn_id} was {one.status} and is lost")
    for conversation, spoken in heard.conversations.items():
        items = shelved[conversation]
        if len(items) != len(set(items)):
            world.fail(f"{conversation} has an item twice")
        for turn_id in spoken:
            if not any(turn_id.removeprefix("resp_") in item for item in items):
                world.fail(f"{turn_id} was completed and is not in {conversation}")


def check_usage(world: World, said: Said, database: Database, processes: list[Process]) -> None:
    """What was sampled is counted, once; but for what died with its process."""
    alive = {one.name for one in processes if one.is_alive}
    usage = {id: row for (id,), row in database.tables["usage"].items()}
    for turn_id, said_in in said.tokens.items():
        row, homes = usage.get(turn_id), [home for home, _ in said_in if home in alive]
        if row is None:
            if homes:
                world.fail(f"{turn_id} sampled {dict(said_in)} and has no usage row")
            continue
        # What died with its process may be counted as nothing, and so may a first token that nobody could be told of.
        is_first = row["status"] == "failed" and max(said_in.values(), default=0) <= 1
        known = {*said_in.values(), *(() if homes and not is_first else (0,))}
        if row["output_tokens"] not in known:
            world.fail(
                f"{turn_id} sampled {dict(said_in)}; its usage row says {row['output_tokens']}"
            )
    for (_, id), row in database.tables["turns"].items():
        if row["worker"] is None and id not in usage:
            world.fail(f"{id} has ended and has no usage row")
