"""The gate by itself: whatever the pieces and the windows, what passes is the beginning of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from segue.turn.admit import Guards
from segue.turn.gate import HELD_CHARS_MAX, Gate
from segue.turn.values import (
    PASSED,
    Blocked,
    Closed,
    Filtered,
    Notice,
    Opened,
    Said,
    Sealed,
    Tally,
    Verdict,
    Wrote,
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
        self.told: list[Notice] = []

    def tell(self, notice: Notice) -> None:
        self.told.append(notice)


def gate_for(guard: object, window: int) -> tuple[Gate, Ear, Tally]:
    tally, ear = Tally(), Ear()
    guards = Guards(outputs=(cast(Any, guard),), window_chars=window)
    plan = SimpleNamespace(guards=guards, tally=tally, id="resp_1")
    return Gate(cast(Any, plan), cast(Any, ear)), ear, tally


def items(texts: list[list[str]]) -> list[list[Said]]:
    """What a reader would say: items with their text in pieces, then the end."""
    said: list[list[Said]] = []
    for pieces in texts:
        said.append([Opened("message")])
        said += [[Wrote(piece)] for piece in pieces]
        said.append([Closed(id_array([1, 2]))])
    said.append([Sealed(id_array([3]))])
    return said


async def passed_of(gate: Gate, said: list[list[Said]]) -> tuple[list[Said], int]:
    """What passes in the end, and how many characters were held back at most on the way."""
    passed: list[Said] = []
    most = given = 0
    for some in said[:-1]:
        given += sum(len(one.text) for one in some if isinstance(one, Wrote))
        passed += await gate.sift(some)
        out = sum(len(one.text) for one in passed if isinstance(one, Wrote))
        most = max(most, given - out)
        if gate.is_shut:
            break
    passed += gate.drop() if gate.is_shut else await gate.last(said[-1])
    return passed, most


def written(said: Sequence[Said]) -> list[str]:
    found: list[str] = []
    for one in said:
        if isinstance(one, Opened):
            found.append("")
        elif isinstance(one, Wrote):
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
    assert ear.told == ([Filtered()] if is_bad else [])
    assert not any(BAD in text for text in told)
    if is_bad:
        assert all(text.startswith(part) for text, part in zip(whole, told, strict=False))
        assert sum(isinstance(one, Opened) for one in passed) == sum(
            isinstance(one, Closed) for one in passed
        )
    else:
        assert told == whole
        assert [one for one in passed if not isinstance(one, Wrote)] == [
            one for some in items(texts) for one in some if not isinstance(one, Wrote)
        ]
        assert tally.guard_chars_watched == sum(map(len, whole))
    # A window, and the piece that filled it.
    assert most <= window + 40


async def test_text_with_likelihoods_is_never_cut_in_the_middle() -> None:
    gate, _, _ = gate_for(WordGuard(), 64)
    likely = Logprob(token="t", logprob=-1.0, bytes=[], top_logprobs=[])
    said: list[Said] = [Opened("message"), *(Wrote("x" * 30, (likely,)) for _ in range(9))]
    passed = await gate.sift(said)
    assert {one.text for one in passed if isinstance(one, Wrote)} == {"x" * 30}
    assert all(one.logprobs for one in passed if isinstance(one, Wrote))


async def test_guard_that_breaks_shuts_the_gate() -> None:
    class Broken(WordGuard):
        async def watch(self, text: str) -> Verdict:
            raise ValueError("no")

    gate, ear, _ = gate_for(Broken(), 64)
    passed = await gate.sift([Opened("message"), Wrote("x" * 100)])
    assert passed == []
    assert [type(one) for one in ear.told] == [Blocked]


async def test_engine_waits_when_too_much_is_held_for_a_verdict() -> None:
    guards = Guards(outputs=(), inputs=(cast(Any, WordGuard()),))
    plan = SimpleNamespace(guards=guards, tally=Tally(), id="resp_1")
    gate = Gate(cast(Any, plan), cast(Any, Ear()))
    verdict = asyncio.Event()
    gate._asking = asyncio.create_task(cast(Any, verdict.wait()))
    assert await gate.sift([Opened("message"), Wrote("x" * HELD_CHARS_MAX)]) == []
    more = asyncio.create_task(gate.sift([Wrote("y")]))
    done, _ = await asyncio.wait([more], timeout=0.05)
    assert not done
    verdict.set()
    assert written(await more) == ["x" * HELD_CHARS_MAX + "y"]
    await gate.close()
