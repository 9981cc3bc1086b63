"""The gate by itself: whatever the pieces and the windows, what passes is the beginning of what was said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from segue.guards.gate import HELD_CHARS_MAX, GuardGate
from segue.guards.texts import forms_of
from segue.seams.guard import PASSED, Verdict
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, TurnClosed
from segue.seams.prompt import id_array
from segue.turn.notices import Abort, Filtered, Notice
from segue.turn.plan import Guards, Tally
from segue.wire.items import Logprob

BAD = "<bad>"


class WordGuard:
    """Blocks one word, and remembers what it was shown."""

    name = "word"

    def __init__(self, word: str = BAD) -> None:
        self._word = word
        self.seen: list[str] = []

    async def check(self, texts: Sequence[str]) -> Verdict:
        return PASSED

    async def watch(self, text: str) -> Verdict:
        self.seen.append(text)
        await asyncio.sleep(0)
        return Verdict("the word") if self._word in text else PASSED


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


def items(texts: list[list[str]], kind: Any = "message") -> list[list[Parsed]]:
    """What a reader would say: items with their text in pieces, then the end."""
    parsed: list[list[Parsed]] = []
    for pieces in texts:
        parsed.append([ItemOpened(kind)])
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


# As long as a quarter of a window of 64; the character before its end needs two escapes.
WORD = "<bad/\n kestrel\U0001f985>"
WAYS: list[Callable[[str], str]] = [
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: "".join(f"\\u{ord(one):04x}" if ord(one) < 0xFFFF else one for one in text),
    lambda text: json.dumps(text)[1:-1],
    # In JSON inside of JSON.
    lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
]


def check_hidden(raw: str, meant: str, piece_chars: int, kind: str) -> None:
    """The word is found, and not even its beginning leaves."""
    assert len(WORD) == 16
    texts = [raw[at : at + piece_chars] for at in range(0, len(raw), piece_chars)]
    gate, _, _ = gate_for(WordGuard(WORD), 64)
    passed, _ = asyncio.run(passed_of(gate, items([texts], kind)))
    told = "".join(written(passed))
    assert gate.is_shut == (WORD in meant)
    assert raw.startswith(told)
    if gate.is_shut:
        assert len(forms_of(told)[-1]) <= meant.index(WORD)
    else:
        assert told == raw


@given(
    st.lists(st.sampled_from([WORD, *WORD, "a", "bc ", "d" * 40]), max_size=12),
    st.lists(st.sampled_from(WAYS), min_size=12, max_size=12),
    st.integers(1, 40),
    st.sampled_from([("function", '{"text": "'), ("message", ' {"a": "'), ("message", '["')]),
)
@settings(max_examples=100, deadline=None)
def test_escapes_in_json_hide_nothing_from_the_guards(
    parts: list[str], ways: list[Callable[[str], str]], piece_chars: int, opened: tuple[str, str]
) -> None:
    kind, begin = opened
    raw = begin + "".join(way(part) for way, part in zip(ways, parts, strict=False)) + '"'
    check_hidden(raw, begin + "".join(parts), piece_chars, kind)


def test_escaped_word_is_found_wherever_a_window_ends() -> None:
    for way, shift in product(WAYS[1:], range(64)):
        before = '{"text": "' + "a" * shift
        check_hidden(before + way(WORD) + "b" * 200, before + WORD, 1, "function")


async def test_text_that_is_no_json_is_watched_as_it_is_only() -> None:
    guard = WordGuard()
    gate, _, _ = gate_for(guard, 64)
    await passed_of(gate, items([["see C:\\new\\table ", "x" * 100]]))
    assert not any("\n" in text or "\t" in text for text in guard.seen)


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
    assert [type(one) for one in ear.visible] == [Abort]


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
