"""One limit for all that a process holds."""

from __future__ import annotations

import asyncio

import pytest

from segue.errors import InvalidRequest, Unavailable
from segue.memory.budget import UNREAD_BYTES_MIN, Memory, Unread, machine_bytes, memory_for

MIB = 1024 * 1024


class Part:
    def __init__(self, size: int) -> None:
        self.bytes = self.unread_bytes = size

    def shrink(self, size: int) -> None:
        self.bytes = max(0, self.bytes - size)


def test_caches_shrink_in_order_and_no_more_than_needed() -> None:
    memory, prompts, turns, running = (
        Memory(100 * MIB),
        Part(50 * MIB),
        Part(80 * MIB),
        Part(10 * MIB),
    )
    parts = {"prompts": prompts, "turns": turns, "running": running}
    memory.watch(
        {name: lambda part=part: part.bytes for name, part in parts.items()},
        (prompts.shrink, turns.shrink),
    )
    assert memory.bytes == 140 * MIB
    memory.enforce()
    assert (prompts.bytes, turns.bytes) == (10 * MIB, 80 * MIB)
    memory.check()

    running.bytes = 60 * MIB
    memory.enforce()
    assert (prompts.bytes, turns.bytes, memory.is_full) == (0, 40 * MIB, False)


def test_new_turns_are_refused_while_the_limit_is_reached_with_empty_caches() -> None:
    memory, running = Memory(100 * MIB), Part(200 * MIB)
    memory.watch({"running": lambda: running.bytes}, ())
    memory.intake.wake_soon = lambda: None  # type: ignore[method-assign]  # there is no loop here
    memory.enforce()
    with pytest.raises(Unavailable) as refused:
        memory.check()
    assert refused.value.wait_s
    assert memory.intake.pool.bytes_max == 0
    running.bytes = 0
    memory.enforce()
    memory.check()
    assert memory.intake.pool.bytes_max > 0


def test_much_that_comes_between_two_looks_is_seen_at_once() -> None:
    memory, running = Memory(100 * MIB), Part(0)
    memory.watch({"running": lambda: running.bytes}, ())
    memory.intake.wake_soon = lambda: None  # type: ignore[method-assign]  # there is no loop here
    memory.check(MIB)
    running.bytes = 200 * MIB
    # So little is not worth a look.
    memory.check(MIB)
    with pytest.raises(Unavailable):
        memory.check(2 * MIB)


def test_request_counts_while_it_is_prepared() -> None:
    memory = Memory(100 * MIB)
    memory.watch({}, ())
    with pytest.raises(KeyError), memory.preparing(MIB):
        assert memory.bytes == MIB
        raise KeyError
    assert memory.bytes == 0


async def test_reader_of_much_waits_until_another_lets_go() -> None:
    memory = Memory(100 * MIB)
    memory.watch({}, ())
    with memory.preparing(0) as first, memory.preparing(0) as second:
        await first.take(60 * MIB)
        taking = asyncio.create_task(second.take(60 * MIB))
        await asyncio.sleep(0)
        assert memory.bytes == 60 * MIB
        first.give(20 * MIB)
        await taking
        assert memory.bytes == 100 * MIB
    assert memory.bytes == 0


async def test_reader_of_much_lets_caches_give_way() -> None:
    memory, cache = Memory(100 * MIB), Part(80 * MIB)
    memory.watch({"cache": lambda: cache.bytes}, (cache.shrink,))
    async with memory.reading(60 * MIB):
        assert cache.bytes == 40 * MIB


async def test_reader_of_too_much_is_refused_at_once_and_one_that_waited_for_long_is_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, running = Memory(100 * MIB), Part(60 * MIB)
    memory.watch({"running": lambda: running.bytes}, ())
    with pytest.raises(InvalidRequest) as refused:
        async with memory.reading(101 * MIB):
            pass
    assert refused.value.code == "context_length_exceeded"
    monkeypatch.setattr("segue.memory.budget.ROOM_S", 0.01)
    with pytest.raises(Unavailable) as waited:
        async with memory.reading(60 * MIB):
            pass
    assert waited.value.wait_s
    assert memory.bytes == 60 * MIB


async def test_what_is_small_is_read_at_the_limit_too() -> None:
    memory, running = Memory(100 * MIB), Part(200 * MIB)
    memory.watch({"running": lambda: running.bytes}, ())
    memory.enforce()
    async with memory.reading(MIB // 4):
        pass


def test_unread_answers_share_a_limit() -> None:
    unread = Unread(8 * MIB)
    assert unread.share == 8 * MIB
    unread.writers |= {Part(MIB), Part(3 * MIB), Part(0), Part(0)}
    assert (unread.bytes, unread.share) == (4 * MIB, 2 * MIB)
    unread.writers |= {Part(0) for _ in range(1_000)}
    assert unread.share == UNREAD_BYTES_MIN


def test_default_is_half_of_the_memory_and_divided_by_the_workers() -> None:
    assert 0 < memory_for(0, 1) == machine_bytes() // 2
    assert memory_for(0, 4) == machine_bytes() // 8
    assert memory_for(1_000, 4) == 250


def test_limit_of_the_control_group_counts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path_factory.mktemp("group") / "memory.max"
    monkeypatch.setattr("segue.memory.budget.CGROUPS", (str(limit),))
    whole = machine_bytes()
    limit.write_text("max\n")
    assert machine_bytes() == whole
    limit.write_text("1048576\n")
    assert machine_bytes() == 1_048_576
