"""How does everything of an owner go away: responses, conversations, files, skills, and what servers keep in memory?

In: the tables of a store that servers may use, and who is to be erased. It is done in small steps, so that no turn
waits long, and a step that is tried again finds nothing to do. A mark in the store tells servers to let go of the
owner, which they do within seconds: they cancel what runs for it, close its connections and empty their caches. What
they save meanwhile goes in a second pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from segue.seams.history import Owner
from segue.stores.shelves import Tables

# Rows of one step; a turn may have megabytes.
BATCH = 100
# Servers look for marks every two seconds; what they run ends within another one.
SETTLE_S = 5.0
PASSES_MAX = 6
# What lies beside turns.
BESIDE = (
    "delete_owner_shelved",
    "delete_owner_conversations",
    "delete_owner_events",
    "delete_owner_claims",
    "delete_owner_parts",
)

# Called with a kind, how many are gone, and how many there were.
NoteErased = Callable[[str, int, int], None]
DeleteObject = Callable[[str], Awaitable[None]]


class OwnerCounts(NamedTuple):
    """What a store holds of an owner."""

    responses: int
    conversations: int
    files: int
    skill_versions: int
    idempotency_keys: int
    keys: int
    usage_rows: int
    # How often it was marked as erased, within a day.
    marks: int

    @property
    def is_known(self) -> bool:
        """Whether there is, or was within a day, anything of this owner."""
        return any(self)

    @property
    def contents(self) -> int:
        """What is always erased."""
        return sum(self[:5])


async def count_owner(tables: Tables, owner: Owner) -> OwnerCounts:
    """What there is now."""
    (counts,) = await tables.fetch("count_owner", OwnerCounts, owner)
    return counts


async def erase_owner(
    tables: Tables,
    owner: Owner,
    delete_object: DeleteObject | None,
    note: NoteErased,
    *,
    with_keys: bool = False,
    with_usage: bool = False,
    on_revoked: Callable[[], Awaitable[None]],
) -> None:
    """Erase everything. Keys are revoked first, so that nothing new comes, and name their owner until the end."""
    if with_keys:
        await tables.execute("delete_owner_key_names", owner)
        await on_revoked()
    await tables.execute("mark_owner_erased", owner)
    for _ in range(PASSES_MAX):
        found = await count_owner(tables, owner)
        await _erase_contents(tables, owner, delete_object, note, found)
        # What a server saved before it saw the mark.
        await asyncio.sleep(SETTLE_S)
        if not (await count_owner(tables, owner)).contents:
            break
    if with_usage:
        await tables.execute("delete_owner_spending", owner)
        await tables.execute("delete_owner_usage", owner)
    if with_keys:
        await tables.execute("delete_owner_of_keys", owner)


async def _erase_contents(
    tables: Tables,
    owner: Owner,
    delete_object: DeleteObject | None,
    note: NoteErased,
    found: OwnerCounts,
) -> None:
    done = 0
    while gone := await tables.execute("delete_owner_turns", owner, BATCH):
        done += gone
        note("Erasing responses", min(done, found.responses), found.responses)
    for statement in BESIDE:
        await tables.execute(statement, owner)
    ids = await tables.fetch("owner_objects", str, owner)
    for number, object_id in enumerate(ids, 1):
        # The row first: a file without a row is found by the sweep of any server.
        await tables.execute("delete_owner_object_file", owner, object_id)
        if delete_object is not None:
            await delete_object(object_id)
        note("Erasing files", number, len(ids))
    await tables.execute("delete_owner_skills", owner)
