"""Usage, events and idempotency keys in memory have a limit; the oldest go first."""

from segue.limits import Spent
from segue.seams.history import UsageEntry
from segue.seams.store import Claim
from segue.stores.memory import (
    CLAIM_BYTES,
    EVENT_BYTES,
    LOG_BYTES,
    MemoryEventLog,
    MemoryIdempotencyKeys,
    MemoryLedger,
)
from segue.wire.events import Event
from tests.contracts.turns import OWNER


async def test_ledger_lets_go_of_its_oldest_rows() -> None:
    ledger = MemoryLedger(entries_max=2)
    rows = [UsageEntry(name, OWNER, "tiny", "completed", 1, 0, 1, 0) for name in "abc"]
    await ledger.settle(rows)
    assert ledger.entries == rows[1:]


async def test_ledger_lets_go_of_what_was_spent_in_months_that_are_over() -> None:
    ledger = MemoryLedger(entries_max=2)
    for day in range(100):
        name = f"t{day}"
        row = UsageEntry(name, OWNER, "tiny", "completed", 1, 0, 1, day * 86_400, key_id="key")
        await ledger.settle([row])
    assert await ledger.spent(OWNER, "key", 99, 69) == Spent(2, 62, 2, 62)
    assert len(ledger._spent) <= 2 * 41


async def test_event_log_holds_its_budget_and_drops_the_quietest_log() -> None:
    one = EVENT_BYTES + 10
    log = MemoryEventLog(2 * LOG_BYTES + 4 * one)
    for number in range(2):
        for turn_id in ("a", "b"):
            await log.append(OWNER, turn_id, [Event("delta", number, b"0123456789")])
    assert log.bytes == 2 * LOG_BYTES + 4 * one
    await log.append(OWNER, "a", [Event("delta", 2, b"0123456789")])
    assert await log.read_after(OWNER, "b", -1) is None
    assert log.bytes == LOG_BYTES + 3 * one
    found = await log.read_after(OWNER, "a", -1)
    assert found is not None
    assert [event.number for event in found] == [0, 1, 2]


async def test_log_larger_than_the_budget_is_missing_and_never_cut() -> None:
    log = MemoryEventLog(1_000)
    for number in range(10):
        await log.append(OWNER, "t", [Event("delta", number, b"x" * 300)])
        assert log.bytes <= 1_000
    assert await log.read_after(OWNER, "t", -1) is None
    await log.delete(OWNER, "t")
    assert log.bytes == 0


async def test_oldest_keys_go_when_there_are_too_many() -> None:
    idempotency_keys = MemoryIdempotencyKeys(bytes_max=3 * CLAIM_BYTES)
    for number in range(5):
        await idempotency_keys.claim(Claim(OWNER, f"k{number}", f"t{number}", b"", is_stored=False))
    assert idempotency_keys.bytes == 3 * CLAIM_BYTES
    holders = [
        await idempotency_keys.claim(Claim(OWNER, f"k{number}", "new", b"", is_stored=False))
        for number in (4, 3, 2, 0)
    ]
    assert [holder.turn_id for holder in holders] == ["t4", "t3", "t2", "new"]
