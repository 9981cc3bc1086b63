"""A new key of an owner takes over what holds for all of that owner's keys."""

from __future__ import annotations

from segue.accounts.owners import inherited
from segue.limits import Key, KeyLimits


def key(
    budget: int,
    *,
    owner: str = "team",
    revoked_at: int | None = None,
    expires_at: int | None = None,
) -> Key:
    limits = KeyLimits(lanes_max=1, owner_budget_tokens_day=budget)
    ends = {"revoked_at": revoked_at, "expires_at": expires_at}
    return Key(f"key_{budget}", "test", owner, (), limits, "", created_at=1, **ends)


def test_new_key_takes_over_what_holds_of_its_owner_last() -> None:
    ended = [key(1, revoked_at=10), key(2, revoked_at=90, expires_at=30), key(3, expires_at=20)]
    for keys, budget in (
        ([key(9, owner="other")], None),
        (ended, 2),
        ([key(4), *ended], 4),
        ([*ended, key(5, expires_at=1_000_000)], 5),
    ):
        wanted = {"owner_budget_tokens_day": budget, "owner_budget_tokens_month": 0}
        assert inherited(keys, "team") == ({} if budget is None else wanted)
