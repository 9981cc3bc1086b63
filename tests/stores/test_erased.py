"""A deletion is remembered as long as something runs that could undo it, and no longer."""

from __future__ import annotations

from segue.stores.erased import KEPT_S_MIN, MARKS_MAX, ErasedTurns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def names(erased: ErasedTurns, count: int) -> list[str]:
    return [name for name in map(str, range(count)) if ("ada", name) in erased]


def test_deletion_is_remembered_for_its_owner() -> None:
    erased = ErasedTurns()
    erased.add(("ada", "0"))
    assert ("ada", "0") in erased
    assert ("bob", "0") not in erased


def test_deletion_is_forgotten_once_all_that_ran_then_has_ended() -> None:
    clock = Clock()
    erased = ErasedTurns(clock)
    erased.oldest_at = lambda: 5.0
    for at in range(10):
        clock.now = float(at)
        erased.add(("ada", str(at)))
    # A turn that was received at 5 still runs.
    clock.now = 9.0 + KEPT_S_MIN
    erased.add(("ada", "10"))
    assert names(erased, 11) == ["5", "6", "7", "8", "9", "10"]
    # Now none does; what is being prepared takes less time.
    erased.oldest_at = clock
    clock.now += 1.0
    erased.add(("ada", "11"))
    assert names(erased, 12) == ["10", "11"]


def test_deletions_beside_a_turn_that_runs_for_hours_are_bounded() -> None:
    erased = ErasedTurns()
    erased.oldest_at = float
    for number in range(MARKS_MAX + 3):
        erased.add(("ada", str(number)))
    assert len(names(erased, MARKS_MAX + 3)) == MARKS_MAX
