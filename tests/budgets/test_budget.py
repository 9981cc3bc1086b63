"""When does a key with a budget wait for the ledger?"""

from __future__ import annotations

import asyncio
from itertools import count

from segue.budgets.budget import SETTLE_S_MAX, BudgetSources, KeyBudget
from segue.limits import KeyLimits, Spent
from segue.seams.history import Owner

LIMITS = KeyLimits(budget_tokens_day=100)


async def test_turns_that_end_while_the_ledger_is_asked_hold_up_no_other() -> None:
    """A busy owner has turns that end all the time."""
    asked = []

    async def spent(owner: Owner, key_id: str, day: int, month: int) -> Spent:
        asked.append(set(sources.unsettled["ada"]))
        return Spent()

    async def settle() -> None:
        for turn_id in tuple(sources.unsettled["ada"]):
            sources.settled("ada", turn_id)
        budget.add(f"t{next(numbers)}", 1)

    numbers = count(1)
    sources = BudgetSources(spent, settle)
    budget = KeyBudget(LIMITS, "ada", "key", sources)
    budget.add("t0", 1)
    async with asyncio.timeout(SETTLE_S_MAX / 2):
        await budget.check()
    assert asked == [{"t1"}], "what ended before is written"


async def test_turn_that_is_never_written_is_waited_for_once() -> None:
    async def spent(owner: Owner, key_id: str, day: int, month: int) -> Spent:
        return Spent()

    async def settle() -> None:
        await asyncio.sleep(0)

    sources = BudgetSources(spent, settle)
    budget = KeyBudget(LIMITS, "ada", "key", sources)
    budget.add("lost", 1)
    async with asyncio.timeout(2 * SETTLE_S_MAX):
        await budget.check()
    async with asyncio.timeout(SETTLE_S_MAX / 2):
        await budget.check()
    assert not sources.unsettled, "nothing is kept of an owner whose turns are written"
