"""Which limits are those of an owner, and so of all its keys?

Each key has them beside its own. They are changed for all valid keys together, and a new key takes them over, also
where the last key of its owner has ended: who revokes it first has not taken the budget away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from segue.limits import Key, KeyLimits
from segue.seams.access import Keys
from segue.seams.history import Owner


def of_owner(limits: Mapping[str, object]) -> dict[str, object]:
    """Those of these limits that hold for all keys of an owner."""
    return {name: value for name, value in limits.items() if name.startswith("owner_")}


def inherited(keys: Iterable[Key], owner: Owner) -> dict[str, object]:
    """What a new key of this owner takes over: the limits of its valid keys, or of the one that has ended last."""
    latest = max((key for key in keys if key.owner == owner), key=_ends_at, default=None)
    return {} if latest is None else of_owner(msgspec.structs.asdict(latest.limits))


async def limit_key(store: Keys, key: Key, given: Mapping[str, object]) -> Sequence[Key]:
    """Change limits of a key; those of its owner for all of that owner. Returns what was changed."""
    changed = await _limit(store, [key], given)
    others = [other for other in await _valid(store, key.owner) if other.id != key.id]
    return [*changed, *await _limit(store, others, of_owner(given))]


async def limit_owner(store: Keys, owner: Owner, given: Mapping[str, object]) -> None:
    """Change the limits of an owner."""
    await _limit(store, await _valid(store, owner), of_owner(given))


async def _limit(store: Keys, keys: Sequence[Key], given: Mapping[str, object]) -> list[Key]:
    """These keys with these limits instead of those that they had."""
    changed = []
    for key in keys if given else ():
        values = msgspec.structs.asdict(key.limits) | {**given}
        limits = msgspec.convert(values, KeyLimits)
        if await store.limit(key.id, limits):
            changed.append(msgspec.structs.replace(key, limits=limits))
    return changed


async def _valid(store: Keys, owner: Owner) -> list[Key]:
    now = time.time()
    keys = await store.given_out()
    return [key for key in keys if key.owner == owner and key.state(now) == "valid"]


def _ends_at(key: Key) -> float:
    return min(key.revoked_at or math.inf, key.expires_at or math.inf)
