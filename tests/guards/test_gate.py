"""The gate by itself: whatever the pieces and the windows, what passes is the beginning of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from segue.guards.gate import HELD_CHARS_MAX, GuardGate
from segue.turn.plan import Guards, Tally
from segue.turn.values import (
    PASSED,
    Blocked,
    Filtered,
    ItemClosed,
    ItemOpened,
    ItemText,
    Notice,
    Parsed,
    TurnClosed,
    Verdict,
    id_array,
)
from segue.wire.items import Logprob

BAD = "<bad>"


class WordGuard:
    """Blocks one word, and remembers what it was shown."""

    name = "word"

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def check(self, texts: Sequence[str]) -> Verdict:
        return PASSED

    async def watch(self, text: str) -> Verdict:
        self.seen.append(text)
        await asyncio.sleep(0)
        return Verdict("the word") if BAD in text else PASSED


class Ear:
    """The part of a running turn that hears notices."""

    def __init__(self) -> None:
        self.visible: list[Notice] = []

    def notify(self, notice: Notice) -> None:
        self.visible.append(notice)


def gate_for(guard: object, window: int) -> tuple[GuardGate, Ear, Tally]:
    tally, ear = Tally(), Ear()
    guards = Guards(outputs=(cast(Any, guard),), window_chars=window)
    plan = SimpleNamespace(guards=guards, tally=tally, id="resp_1")
    return GuardGate(cast(Any, plan), cast(Any, ear)), ear, tally


def items(texts: list[list[str]]) -> list[list[Parsed]]:
    """What a reader would say: items with their text in pieces, then the end."""
    parsed: list[list[Parsed]] = []
    for pieces in texts:
        parsed.append([ItemOpened("message")])
        parsed += [[ItemText(piece)] for piece in pieces]
        parsed.append([ItemClosed(id_array([1, 2]))])
    parsed.append([TurnClosed(id_array([3]))])
    return parsed


async def passed_of(gate: GuardGate, parsed: list[list[Parsed]]) -> tuple[list[Parsed], int]:
    """What passes in the end, and how many characters were held back at most on the way."""
    passed: list[Parsed] = []
    most = given = 0
    for some in parsed[:-1]:
        given += sum(len(one.text) for one in some if isinstance(one, ItemText))
        passed += await gate.feed(some)
        out = sum(len(one.text) for one in passed if isinstance(one, ItemText))
        most = max(most, given - out)
        if gate.is_shut:
            break
    passed += gate.drop() if gate.is_shut else await gate.close(parsed[-1])
    return passed, most


def written(parsed: Sequence[Parsed]) -> list[str]:
    found: list[str] = []
    for one in parsed:
        if isinstance(one, ItemOpened):
            found.append("")
        elif isinstance(one, ItemText):
            found[-1] += one.text
    return found


pieces = st.lists(st.sampled_from(["a", "bc ", "d" * 40, "<", "bad>", "<b", "ad", ">", "é…"]))


@given(st.lists(pieces, max_size=3), st.sampled_from([64, 80, 200]))
@settings(max_examples=150, deadline=None)
def test_what_passes_is_what_was_said_up_to_the_last_window_that_is_fine(
    texts: list[list[str]], window: int
) -> None:
    whole = ["".join(text) for text in texts]
    guard = WordGuard()
    gate, ear, tally = gate_for(guard, window)
    passed, most = asyncio.run(passed_of(gate, items(texts)))
    told = written(passed)
    is_bad = any(BAD in text for text in whole)
    assert gate.is_shut == is_bad
    assert ear.visible == ([Filtered()] if is_bad else [])
    assert not any(BAD in text for text in told)
    if is_bad:
        assert all(text.startswith(part) for text, part in zip(whole, told, strict=False))
        assert sum(isinstance(one, ItemOpened) for one in passed) == sum(
            isinstance(one, ItemClosed) for one in passed
        )
    else:
        assert told == whole
        assert [one for one in passed if not isinstance(one, ItemText)] == [
            one for some in items(texts) for one in some if not isinstance(one, ItemText)
        ]
        assert tally.guard_chars_watched == sum(map(len, whole))
    # A window, and the piece that filled it.
    assert most <= window + 40


async def test_text_with_likelihoods_is_never_cut_in_the_middle() -> None:
    gate, _, _ = gate_for(WordGuard(), 64)
    likely = Logprob(token="t", logprob=-1.0, bytes=[], top_logprobs=[])
    parsed: list[Parsed] = [
        ItemOpened("message"),
        *(ItemText("x" * 30, (likely,)) for _ in range(9)),
    ]
    passed = await gate.feed(parsed)
    assert {one.text for one in passed if isinstance(one, ItemText)} == {"x" * 30}
    assert all(one.logprobs for one in passed if isinstance(one, ItemText))


async def test_guard_that_breaks_shuts_the_gate() -> None:
    class Broken(WordGuard):
        async def watch(self, text: str) -> Verdict:
            raise ValueError("no")

    gate, ear, _ = gate_for(Broken(), 64)
    passed = await gate.feed([ItemOpened("message"), ItemText("x" * 100)])
    assert passed == []
    assert [type(one) for one in ear.visible] == [Blocked]


async def test_engine_waits_when_too_much_is_held_for_a_verdict() -> None:
    guards = Guards(outputs=(), inputs=(cast(Any, WordGuard()),))
    plan = SimpleNamespace(guards=guards, tally=Tally(), id="resp_1")
    gate = GuardGate(cast(Any, plan), cast(Any, Ear()))
    verdict = asyncio.Event()
    gate._asking = asyncio.create_task(cast(Any, verdict.wait()))
    assert await gate.feed([ItemOpened("message"), ItemText("x" * HELD_CHARS_MAX)]) == []
    more = asyncio.create_task(gate.feed([ItemText("y")]))
    done, _ = await asyncio.wait([more], timeout=0.05)
    assert not done
    verdict.set()
    assert written(await more) == ["x" * HELD_CHARS_MAX + "y"]
    await gate.leave()
