"""What does each statement of `stores/sql/postgres_queries.sql` do to the tables?

One function for each name, with the statement's own parameters. It must follow the SQL, word for word: `get` and `rows`
see the snapshot of the statement, `lock` the newest version of a row. `tests/simulator/test_model.py` runs the same
operations on these and on PostgreSQL itself. Rows are never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from tests.simulator.database import Row, Transaction

Statement = Callable[..., object]
STATEMENTS: dict[str, Statement] = {}

TURN = ("id", "parent_id", "history", "response", "instructions", "tools")
USAGE = (
    "turn_id", "owner", "model", "status", "input_tokens", "cached_tokens", "output_tokens", "ended_at",
    "tool_calls", "container_s", "cpu_s", "egress_bytes", "key_id",
)  # fmt: skip
# Of a turn that used no container and was asked without a key.
NO_CONTAINERS, NO_KEY = (0.0, 0.0, 0), ""


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__] = function
    return function


def pick(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def touched(count: int) -> str:
    """What the server says of a statement that is not a query."""
    return f"DONE {count}"


# --- turns ---


@statement
def find(t: Transaction, owner: str, id: str) -> object:
    found = chain_of(t, owner, id)
    return [pick(row, TURN) for row in found] + parts_named(t, owner, found)


@statement
def read(t: Transaction, owner: str, id: str) -> object:
    found = chain_of(t, owner, id)[:1]
    return [pick(row, TURN) for row in found] + parts_named(t, owner, found)


@statement
def turn_bytes(t: Transaction, owner: str, id: str, with_chain: int) -> object:
    found = chain_of(t, owner, id)[: None if with_chain else 1]
    size = sum(len(row["history"]) + len(row["response"]) for row in found)
    return [(size + sum(len(part[3]) for part in parts_named(t, owner, found)),)]


def chain_of(t: Transaction, owner: str, id: str) -> list[Row]:
    """A turn and its ancestors."""
    found, above = [], id
    while (row := t.get("turns", owner, above)) is not None and row not in found:
        found.append(row)
        above = row["parent_id"]
    return found


def parts_named(t: Transaction, owner: str, found: list[Row]) -> list[tuple[Any, ...]]:
    """The second half of `find` and of `read`."""
    digests = {row[name] for row in found for name in ("instructions", "tools")} - {None}
    rows = [t.get("parts", owner, digest) for digest in sorted(digests)]
    return [(None, None, row["digest"], row["body"], None, None) for row in rows if row is not None]


def put_usage(t: Transaction, values: Sequence[Any], *, is_provisional: bool = False) -> None:
    """`ON CONFLICT (turn_id) DO NOTHING`."""
    if t.lock("usage", values[0]) is None:
        row = dict(zip(USAGE, values, strict=True))
        t.put("usage", (values[0],), {**row, "is_provisional": is_provisional})


@statement
def save(t: Transaction, owner: str, id: str, *rest: Any) -> object:
    parent_id, history, response, instructions, tools, worker, *usage = rest[:13]
    digests, bodies, me, is_keyed, key_id = rest[13:]
    if is_keyed and not holds_key(t, owner, id, me):
        return []
    new = dict(zip(digests, bodies, strict=True))
    for digest in (instructions, tools):
        if digest is not None and digest not in new and t.get("parts", owner, digest) is None:
            raise asyncpg.ForeignKeyViolationError("a part is gone")
    for digest, body in new.items():
        if t.get("parts", owner, digest) is None:
            t.put("parts", (owner, digest), {"owner": owner, "digest": digest, "body": body})
    before = t.lock("turns", owner, id)
    if before is not None and before["saved_by"] not in (None, me) and t.database.fences:
        return []
    if before is not None or t.database.tables["erased"].get((owner, id)) is None:
        t.database.sequence += 1
        row = {
            "owner": owner, "id": id, "parent_id": parent_id, "history": history, "response": response,
            "instructions": instructions, "tools": tools, "worker": worker, "saved_by": me,
            "saved_at": t.now, "seq": t.database.sequence if before is None else before["seq"],
        }  # fmt: skip
        t.put("turns", (owner, id), row)
    else:
        # The trigger `stay_erased` deletes it at once.
        drop_beside(t, owner, id)
    if usage[0] is not None:
        t.lock("usage", id)
        values = (id, owner, *usage, *NO_CONTAINERS, key_id)
        counted = dict(zip(USAGE, values, strict=True))
        t.put("usage", (id,), {**counted, "is_provisional": False})
    return [(1,)]


def holds_key(t: Transaction, owner: str, turn_id: str, me: str) -> bool:
    """`held`: the claim of this turn, still this worker's, locked."""
    for row in t.rows("claims"):
        if (row["owner"], row["turn_id"], row["worker"]) == (owner, turn_id, me):
            newest = t.lock("claims", owner, row["key"], mode="share")
            if newest is not None and (newest["turn_id"], newest["worker"]) == (turn_id, me):
                return True
    return not t.database.fences


@statement
def delete(t: Transaction, owner: str, id: str) -> object:
    row = t.lock("turns", owner, id, mode="update")
    if row is None:
        return touched(0)
    t.drop("turns", owner, id)
    drop_beside(t, owner, id)
    return touched(1)


def drop_beside(t: Transaction, owner: str, id: str) -> None:
    """The trigger behind every deletion of a turn."""
    if t.get("erased", owner, id) is None:
        t.put("erased", (owner, id), {"owner": owner, "turn_id": id, "erased_at": t.now})
    delete_events(t, owner, id)
    for row in t.rows("claims"):
        if (row["owner"], row["turn_id"]) == (owner, id):
            t.drop("claims", owner, row["key"])


# --- usage ---


@statement
def settle(t: Transaction, *values: Any) -> object:
    before = t.lock("usage", values[0])
    if before is None:
        put_usage(t, values)
    elif before["is_provisional"] or before["status"] == "containers":
        counted = dict(zip(USAGE, values, strict=True))
        names = ("input_tokens", "cached_tokens", "output_tokens", *USAGE[8:])
        known = {name: counted[name] for name in names}
        t.put("usage", (values[0],), {**before, **known, "is_provisional": False})
    return touched(1)


@statement
def report(t: Transaction, owner: str | None, since: int, until: int) -> object:
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    names = ("input_tokens", "cached_tokens", "output_tokens", *USAGE[8:12])
    for row in t.rows("usage"):
        if since <= row["ended_at"] < until and owner in (None, row["owner"]):
            day = datetime.fromtimestamp(row["ended_at"], UTC).strftime("%Y-%m-%d")
            key = (day, row["owner"], row["model"], row["key_id"])
            sums = groups.setdefault(key, [0] * 8)
            sums[0] += row["status"] != "containers"
            for at, name in enumerate(names, 1):
                sums[at] += row[name]
    return [(*group[:3], *sums, group[3]) for group, sums in sorted(groups.items())]


@statement
def spent(t: Transaction, owner: str, key_id: str, day: int, month: int) -> object:
    """The trigger's sums, from the rows that it adds up."""
    counts = [0] * 4
    for row in t.rows("usage"):
        its_day, tokens = row["ended_at"] // 86_400, row["input_tokens"] + row["output_tokens"]
        is_key = key_id != "" and row["key_id"] == key_id
        for at, is_meant in ((0, is_key), (2, row["owner"] == owner)):
            counts[at] += tokens * (is_meant and its_day == day)
            counts[at + 1] += tokens * (is_meant and its_day >= month)
    return [tuple(counts)]


# --- events ---


def is_erased(t: Transaction, owner: str, id: str) -> bool:
    return t.get("erased", owner, id) is not None


@statement
def append(
    t: Transaction, owner: str, turn_id: str, first: int, last: int, body: bytes, me: str
) -> object:
    saved = t.get("turns", owner, turn_id) and t.lock("turns", owner, turn_id, mode="share")
    is_foreign = bool(saved) and saved["saved_by"] not in (None, me) and t.database.fences
    if is_foreign or is_erased(t, owner, turn_id):
        return touched(0)
    before = t.lock("events", owner, turn_id, first)
    if before is not None and last <= before["last"]:
        return touched(0)
    row = {"owner": owner, "turn_id": turn_id, "first": first, "last": last, "body": body}
    t.put("events", (owner, turn_id, first), {**row, "logged_at": t.now})
    return touched(1)


def events_of(t: Transaction, owner: str, turn_id: str) -> list[Row]:
    """In order."""
    rows = [row for row in t.rows("events") if (row["owner"], row["turn_id"]) == (owner, turn_id)]
    return sorted(rows, key=lambda row: row["first"])


@statement
def events_after(t: Transaction, owner: str, turn_id: str, number: int) -> object:
    rows = [] if is_erased(t, owner, turn_id) else events_of(t, owner, turn_id)
    return [(row["body"],) for row in rows if row["last"] > number or row is rows[-1]]


@statement
def delete_events(t: Transaction, owner: str, turn_id: str) -> object:
    rows = events_of(t, owner, turn_id)
    for row in rows:
        t.drop("events", owner, turn_id, row["first"])
    return touched(len(rows))


# --- idempotency keys ---


@statement
def claim(
    t: Transaction, owner: str, key: bytes, turn_id: str, digest: bytes, worker: str, age_s: int
) -> object:
    lease = t.get("workers", worker) and t.lock("workers", worker, mode="key share")
    if (not lease or lease["claimed_by"] is not None) and t.database.fences:
        return []
    row = {"owner": owner, "key": key, "turn_id": turn_id, "digest": digest, "worker": worker}
    held = t.lock("claims", owner, key)
    if held is None or held["claimed_at"] < t.now - age_s:
        held = {**row, "claimed_at": t.now}
        t.put("claims", (owner, key), held)
    return [(held["turn_id"], held["digest"])]


@statement
def release(t: Transaction, owner: str, key: bytes, turn_id: str, me: str) -> object:
    held = t.lock("claims", owner, key, mode="update")
    if held is None or (held["turn_id"], held["worker"]) != (turn_id, me):
        return touched(0)
    t.drop("claims", owner, key)
    return touched(1)


# --- workers ---


def put_worker(t: Transaction, worker: str, seen_at: int, claimed_by: str | None = None) -> None:
    t.put("workers", (worker,), {"id": worker, "seen_at": seen_at, "claimed_by": claimed_by})


@statement
def join(t: Transaction, worker: str, schema: int, rows: int, version: str) -> object:
    t.database.homes[worker] = t.session.client
    if t.lock("workers", worker) is None:
        put_worker(t, worker, t.now)
    return touched(1)


@statement
def beat(t: Transaction, worker: str) -> object:
    row = t.get("workers", worker) and t.lock("workers", worker)
    if (not row or row["claimed_by"] is not None) and t.database.fences:
        return touched(0)
    put_worker(t, worker, t.now)
    return touched(1)


@statement
def expire(t: Transaction, worker: str) -> object:
    row = t.lock("workers", worker)
    if row is not None:
        put_worker(t, worker, 0, row["claimed_by"])
    return touched(int(row is not None))


@statement
def claim_worker(t: Transaction, worker: str, me: str, lease_s: int) -> object:
    row = t.lock("workers", worker)
    if row is None:
        put_worker(t, worker, 0, me)
        return touched(1)
    alive = {
        one["id"]
        for one in t.rows("workers")
        if one["id"] != me and one["claimed_by"] is None and one["seen_at"] >= t.now - lease_s
    }
    if row["seen_at"] >= t.now - lease_s or (row["claimed_by"] or me) in alive:
        return touched(0)
    put_worker(t, worker, row["seen_at"], me)
    return touched(1)


@statement
def lock_lease(t: Transaction, worker: str) -> object:
    return [] if t.lock("workers", worker, mode="update") is None else [(1,)]


@statement
def lock_claims(t: Transaction, worker: str) -> object:
    rows = [row for row in t.rows("claims") if row["worker"] == worker]
    for row in sorted(rows, key=lambda row: (row["owner"], row["key"])):
        t.lock("claims", row["owner"], row["key"], mode="update")
    return [(1,)] * len(rows)


@statement
def leave(t: Transaction, worker: str) -> object:
    row = t.lock("workers", worker, mode="update")
    t.drop("workers", worker)
    return touched(int(row is not None))


@statement
def dead(t: Transaction, me: str, lease_s: int) -> object:
    found = {row["id"] for row in t.rows("workers") if row["seen_at"] < t.now - lease_s}
    for table in ("turns", "conversations", "places"):
        workers = {row["worker"] for row in t.rows(table)} - {None}
        found |= {worker for worker in workers if t.get("workers", worker) is None}
    return [(worker,) for worker in sorted(found - {me, ""})]


@statement
def abandoned(t: Transaction, worker: str, limit: int) -> object:
    found = []
    for seen in sorted(t.rows("turns"), key=lambda row: row["seq"]):
        key = (seen["owner"], seen["id"])
        if seen["worker"] == worker and t.can_lock("turns", *key, mode="update"):
            row = t.lock("turns", *key, mode="update")
            if row is not None and row["worker"] == worker:
                last = max((one["last"] for one in events_of(t, *key)), default=None)
                found.append((row["owner"], last, *pick(row, TURN)))
        if len(found) == limit:
            break
    return found


@statement
def parts_of(t: Transaction, owners: list[str], digests: list[bytes]) -> object:
    rows = [t.get("parts", *key) for key in zip(owners, digests, strict=True)]
    return [(row["owner"], row["digest"], row["body"]) for row in rows if row is not None]


@statement
def give_up(t: Transaction, owners: list[str], ids: list[str], me: str) -> object:
    for key in zip(owners, ids, strict=True):
        row = t.lock("turns", *key)
        if row is not None:
            t.put("turns", key, {**row, "worker": None, "saved_by": me})
    return touched(len(ids))


@statement
def end_turns(t: Transaction, me: str, *columns: list[Any]) -> object:
    for owner, id, response, model, *tokens, ended_at, tool_calls in zip(*columns, strict=True):
        row = t.lock("turns", owner, id)
        if row is not None:
            ended = {"response": response, "worker": None, "saved_by": me, "saved_at": t.now}
            t.put("turns", (owner, id), {**row, **ended})
        known = (id, owner, model, "failed", *tokens, ended_at, tool_calls)
        usage = (*known, *NO_CONTAINERS, NO_KEY)
        put_usage(t, usage, is_provisional=True)
    return touched(len(columns[0]))


@statement
def left(t: Transaction, limit: int) -> object:
    return [(row[0], row[2]) for row in abandoned(t, "", limit)]


@statement
def taken(t: Transaction, owners: list[str], ids: list[str], worker: str) -> object:
    named = set(zip(owners, ids, strict=True))
    turns = [row for row in t.rows("turns") if (row["owner"], row["id"]) in named]
    return [(row["owner"], row["id"]) for row in turns if row["worker"] == worker]


@statement
def hand_over(t: Transaction, owners: list[str], ids: list[str], worker: str, other: str) -> object:
    for key in zip(owners, ids, strict=True):
        for seen in t.rows("claims"):
            if (seen["owner"], seen["turn_id"]) == key:
                row = t.lock("claims", seen["owner"], seen["key"])
                if row is not None:
                    t.put("claims", (seen["owner"], seen["key"]), {**row, "worker": other})
        for seen in t.rows("conversations"):
            if (seen["owner"], seen["speaker"]) == key and seen["worker"] == worker:
                row = t.lock("conversations", seen["owner"], seen["id"])
                if row is not None and (row["worker"], row["speaker"]) == (worker, key[1]):
                    t.put("conversations", (seen["owner"], seen["id"]), {**row, "worker": other})
        row = t.lock("turns", *key)
        if row is not None:
            t.put("turns", key, {**row, "worker": other, "saved_by": other})
    return touched(len(ids))


@statement
def append_last(t: Transaction, *columns: list[Any]) -> object:
    for owner, turn_id, number, body in zip(*columns, strict=True):
        if t.lock("events", owner, turn_id, number) is None:
            row = {
                "owner": owner,
                "turn_id": turn_id,
                "first": number,
                "last": number,
                "body": body,
            }
            t.put("events", (owner, turn_id, number), {**row, "logged_at": t.now})
    return touched(len(columns[0]))


@statement
def release_claims(t: Transaction, worker: str) -> object:
    count = 0
    for row in t.rows("claims"):
        if row["worker"] == worker and t.get("turns", row["owner"], row["turn_id"]) is None:
            newest = t.lock("claims", row["owner"], row["key"], mode="update")
            if newest is None or newest["worker"] != worker:
                continue
            t.drop("claims", row["owner"], row["key"])
            count += 1
    return touched(count)


@statement
def erasures(t: Transaction, age_s: int) -> object:
    rows = t.rows("erased")
    return [(row["owner"], row["turn_id"]) for row in rows if row["erased_at"] >= t.now - age_s]


# --- sweeping: nothing gets old in the time of a simulation ---


@statement
def sweep_turns(t: Transaction, *values: Any) -> object:
    return []


def _nothing_old(t: Transaction, *values: Any) -> object:
    return touched(0)


for _name in (
    "delete_old_events",
    "delete_erased_events",
    "delete_old_claims",
    "delete_old_erased",
    "delete_old_spending",
):
    STATEMENTS[_name] = _nothing_old


# --- keys and ring ---

KEY = ("digest", "id", "name", "owner", "scopes", "limits", "ring", "created_at", "revoked_at")
KEY += ("secret_start", "expires_at", "used_at")


@statement
def add_key(t: Transaction, *values: Any) -> object:
    row = dict(zip(KEY, values, strict=True))
    t.put("keys", (row["id"],), row)
    return touched(1)


@statement
def expired_key(t: Transaction, digests: list[str]) -> object:
    return [
        (row["expires_at"],)
        for row in t.rows("keys")
        if row["digest"] in digests
        and row["revoked_at"] is None
        and row["expires_at"] is not None
        and row["expires_at"] <= t.now
    ]


@statement
def find_keys(t: Transaction, digests: list[str]) -> object:
    rows = t.rows("keys")
    is_found = [row for row in rows if row["digest"] in digests and row["revoked_at"] is None]
    return [pick(row, KEY) for row in is_found if (row["expires_at"] or t.now + 1) > t.now]


@statement
def list_keys(t: Transaction) -> object:
    return [pick(row, KEY) for row in sorted(t.rows("keys"), key=lambda row: row["created_at"])]


@statement
def note_key_use(t: Transaction, ids: list[str]) -> object:
    free = [one for one in sorted(ids) if t.can_lock("keys", one, mode="update")]
    for key_id in free:
        if (row := t.lock("keys", key_id, mode="update")) is not None:
            t.put("keys", (key_id,), {**row, "used_at": t.now})
    return touched(len(free))


@statement
def begin_ring(t: Transaction, name: bytes, secret: bytes) -> object:
    if t.lock("ring", 1) is None:
        t.put("ring", (1,), {"place": 1, "name": name, "secret": secret})
    return touched(1)


@statement
def ring(t: Transaction) -> object:
    return [(row["name"], row["secret"]) for row in t.rows("ring")]


# --- migrations: the tables of the model are up to date, and all processes are of one version ---


@statement
def lock_migrations(t: Transaction) -> object:
    return []


@statement
def make_migrations(t: Transaction) -> object:
    return touched(0)


@statement
def version(t: Transaction) -> object:
    from segue.stores.sql_files import load_migrations

    return [(load_migrations("postgres")[-1][0],)]


@statement
def says_needs(t: Transaction) -> object:
    return [(True,)]


@statement
def needs(t: Transaction) -> object:
    return [(0, 0)]


@statement
def need_rows(t: Transaction, rows: int) -> object:
    return touched(0)


@statement
def older(t: Transaction, lease_s: int) -> object:
    return []


@statement
def room(t: Transaction, lease_s: int) -> object:
    return [(97, sum(row["seen_at"] >= t.now - lease_s for row in t.rows("workers")))]


@statement
def ready(t: Transaction) -> object:
    return [(1,)]


# --- conversations ---

CONVERSATION = ("created_at", "metadata", "tip_id", "tip_items", "count", "version", "speaker")


@statement
def find_conversation(t: Transaction, owner: str, id: str) -> object:
    row = t.get("conversations", owner, id)
    return [] if row is None else [pick(row, CONVERSATION)]


def shelve(
    t: Transaction, key: tuple[str, str], at: int, ids: list[str], bodies: list[bytes]
) -> None:
    for place, (item_id, body) in enumerate(zip(ids, bodies, strict=True), at):
        row = {"owner": key[0], "conversation_id": key[1], "position": place}
        t.put("shelved", (*key, place), {**row, "item_id": item_id, "body": body})


@statement
def create_conversation(
    t: Transaction, owner: str, id: str, created_at: int, metadata: bytes, tip_id: str | None,
    tip_items: int, ids: list[str], bodies: list[bytes],
) -> object:  # fmt: skip
    if t.lock("conversations", owner, id) is not None:
        return touched(0)
    row = {
        "owner": owner,
        "id": id,
        "created_at": created_at,
        "metadata": metadata,
        "tip_id": tip_id,
    }
    row |= {
        "tip_items": tip_items,
        "count": len(ids),
        "version": 1,
        "speaker": None,
        "worker": None,
    }
    t.put("conversations", (owner, id), row)
    shelve(t, (owner, id), 0, ids, bodies)
    return touched(len(ids))


@statement
def update_conversation(
    t: Transaction, owner: str, id: str, metadata: bytes, tip_id: str | None, tip_items: int, version: int,
    ids: list[str], bodies: list[bytes], speaker: str | None, worker: str,
) -> object:  # fmt: skip
    seen = t.get("conversations", owner, id)
    row = None if seen is None else t.lock("conversations", owner, id)
    if row is None or row["version"] != version:
        return []
    if speaker is None:
        worker = None  # type: ignore[assignment]
    elif speaker == row["speaker"]:
        worker = row["worker"]
    place = row["count"]
    moved = {
        **row,
        "metadata": metadata,
        "tip_id": tip_id,
        "tip_items": tip_items,
        "worker": worker,
    }
    moved |= {"count": place + len(ids), "version": version + 1, "speaker": speaker}
    t.put("conversations", (owner, id), moved)
    shelve(t, (owner, id), place, ids, bodies)
    return [(place,)]


@statement
def release_speakers(t: Transaction, worker: str) -> object:
    rows = [row for row in t.rows("conversations") if row["worker"] == worker]
    for seen in rows:
        row = t.lock("conversations", seen["owner"], seen["id"])
        if row is not None and row["worker"] == worker:
            free = {"speaker": None, "worker": None, "version": row["version"] + 1}
            t.put("conversations", (row["owner"], row["id"]), {**row, **free})
    return touched(len(rows))


def shelved(t: Transaction, owner: str, id: str) -> list[Row]:
    """In order."""
    rows = [
        row for row in t.rows("shelved") if (row["owner"], row["conversation_id"]) == (owner, id)
    ]
    return sorted(rows, key=lambda row: row["position"])


@statement
def read_shelved(t: Transaction, owner: str, id: str, since: int, until: int) -> object:
    rows = [row for row in shelved(t, owner, id) if since <= row["position"] < until]
    return [(row["item_id"], row["body"]) for row in rows]


@statement
def name_shelved(t: Transaction, owner: str, id: str) -> object:
    return [(row["position"], row["item_id"], len(row["body"])) for row in shelved(t, owner, id)]


@statement
def delete_conversation(t: Transaction, owner: str, id: str) -> object:
    row = t.lock("conversations", owner, id, mode="update")
    if row is None:
        return touched(0)
    t.drop("conversations", owner, id)
    for one in t.rows("shelved"):
        if (one["owner"], one["conversation_id"]) == (owner, id):
            t.drop("shelved", owner, id, one["position"])
    return touched(1)


# --- limits ---


@statement
def level(t: Transaction, key_id: str, worker: str) -> object:
    rows = [row for row in t.rows("places") if row["key_id"] == key_id and row["worker"] != worker]
    held = (sum(row["connections"] for row in rows), sum(row["lanes"] for row in rows))
    row = t.get("meters", key_id)
    if row is None:
        return [(t.clock, 0, *held, None, None, None)]
    return [(t.clock, row["version"], *held, row["requests"], row["tokens"], row["filled_at"])]


@statement
def save_level(
    t: Transaction, key_id: str, requests: float, tokens: float, at: float, version: int, worker: str,
    connections: int, lanes: int,
) -> object:  # fmt: skip
    before = t.lock("meters", key_id)
    if before is not None and before["version"] != version:
        return []
    row = {"key_id": key_id, "requests": requests, "tokens": tokens, "filled_at": at}
    t.put("meters", (key_id,), {**row, "version": version + 1})
    if (connections, lanes) != (0, 0):
        t.lock("places", key_id, worker)
        place = {"key_id": key_id, "worker": worker, "connections": connections, "lanes": lanes}
        t.put("places", (key_id, worker), place)
    else:
        t.lock("places", key_id, worker, mode="update")
        t.drop("places", key_id, worker)
    return [(1,)]


@statement
def release_places(t: Transaction, worker: str) -> object:
    rows = [row for row in t.rows("places") if row["worker"] == worker]
    for row in rows:
        t.lock("places", row["key_id"], worker, mode="update")
        t.drop("places", row["key_id"], worker)
    return touched(len(rows))


# --- messages ---


@statement
def notify(t: Transaction, channel: str, payloads: list[str]) -> object:
    for payload in payloads:
        t.notify(channel, payload)
    return [("",)] * len(payloads)
