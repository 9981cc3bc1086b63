"""Where two prompts part, why, and what that costs. A token is a character here, so that figures can be counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Raw, structs

from segue.reports.compare import continues, is_same, part
from segue.reports.diagnose import HIT, UNAVAILABLE, diagnose
from segue.reports.prompts import KnownPrompt, extends
from segue.reports.report import Earlier, engine_reason, is_lost, summary
from segue.reports.texts import (
    AFTER_CHARS,
    BEFORE_CHARS,
    PIECE,
    SAID_BYTES_MAX,
    around,
    first_difference,
    said,
    same_end,
)
from segue.seams.model import JobStarted
from segue.seams.prompt import NO_TOKENS, Messages, Tokens, id_array
from segue.wire.items import Item
from segue.wire.response import ReasoningEcho
from tests.contracts.turns import SAMPLES, item, response_of
from tests.contracts.turns import said as spoken

RULES = "You are an agent.\nBe brief.\n"
THOUGHT = '{"type":"reasoning","content":[{"type":"reasoning_text","text":"Hm, well."}]}'
QUESTION, ANSWER, MORE = spoken("Where is it?"), spoken("Here.", "assistant"), spoken("And why?")


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def known(
    *items: Item,
    instructions: str = RULES,
    tools: Sequence[dict[str, Any]] = (),
    effort: str | None = None,
    text: str = '{"format":{"type":"text"},"verbosity":"medium"}',
    model: str = "tiny",
    **fields: Any,
) -> KnownPrompt:
    """The prompt of a family that writes tools, then instructions, then items; the effort where there is one."""
    written = json.dumps(list(tools))
    response = structs.replace(
        response_of(
            "resp_1", tools=written.encode(), instructions=json.dumps(instructions).encode()
        ),
        model=model,
        reasoning=ReasoningEcho(effort),
        text=Raw(text.encode()),
    )
    prompt = (written if tools else "") + (effort or "") + instructions
    prompt += "".join(map(said, items))
    ids = NO_TOKENS.plus(id_array([ord(one) for one in prompt]))
    given: dict[str, Any] = {"prompt": ids, "tokens": ids.length, "fingerprint": "f", **fields}
    return KnownPrompt(response, model, "default", items, **given)


def test_prompt_that_goes_on_has_not_parted() -> None:
    old = known(QUESTION)
    assert part(old, known(QUESTION, ANSWER, MORE)) is None
    # The same request once more; and what the model does not see.
    assert part(known(QUESTION, ANSWER, MORE), old) is None
    marked = item(
        '{"id":"msg_1","type":"message","role":"user","content":[{"type":"input_text","text":"Where is it?",'
        '"prompt_cache_breakpoint":{"mode":"explicit"}}]}'
    )
    assert part(old, known(marked, ANSWER)) is None


def test_a_line_that_changes_at_the_beginning_costs_everything_after_it() -> None:
    old = known(QUESTION, instructions="It is 12:04.\n" + RULES)
    parting = part(old, known(QUESTION, ANSWER, MORE, instructions="It is 12:05.\n" + RULES))
    assert parting is not None
    assert (parting.reason, parting.place.part) == ("input_changed", "instructions")
    assert (parting.place.line, parting.place.character) == (1, 10)
    assert (parting.earlier.text[10], parting.now.text[10]) == ("4", "5")
    assert parting.common == 10
    assert parting.missed == parting.lost == old.tokens - 10


def test_place_is_a_line_and_a_character_of_it() -> None:
    old, new = (known(QUESTION, instructions=f"One.\nTwo.\nNow {hour}.") for hour in (12, 13))
    parting = part(old, new)
    assert parting is not None
    assert (parting.place.line, parting.place.character) == (3, 5)


def test_changed_item_costs_what_stands_after_it_in_both() -> None:
    first, second = spoken("It is 12:04."), spoken("It is 12:05.")
    old = known(QUESTION, first, ANSWER, MORE)
    parting = part(old, known(QUESTION, second, ANSWER, MORE, ANSWER))
    assert parting is not None
    assert (parting.reason, parting.place.part, parting.place.item) == ("input_changed", "input", 1)
    assert (parting.place.name, parting.place.character) == ("message", 10)
    rest = [len(one.raw) for one in (first, ANSWER, MORE)]
    # Of the changed item its end is the same: one character of twelve.
    share = (rest[0] / 12 + sum(rest[1:])) / sum(rest)
    assert parting.lost == round(parting.missed * share)


def test_a_long_item_whose_first_line_changes_costs_the_rest_of_it() -> None:
    rules = "Be brief. " * 100
    old, new = (spoken(f"It is 12:0{n}.\n{rules}", "system") for n in (4, 5))
    parting = part(known(old, QUESTION, instructions=""), known(new, QUESTION, instructions=""))
    assert parting is not None
    assert parting.lost > 0.9 * parting.missed > 900


@pytest.mark.parametrize(
    "new",
    [
        # Another conversation with the same beginning; another question in place of the last.
        (QUESTION, spoken("Something else.")),
        (QUESTION, ANSWER, spoken("And how?")),
    ],
)
def test_nothing_is_lost_where_nothing_after_the_place_is_the_same(new: tuple[Item, ...]) -> None:
    parting = part(known(QUESTION, ANSWER, MORE), known(*new))
    assert parting is not None
    assert (parting.reason, parting.lost) == ("input_changed", 0)
    assert parting.missed > 0


WEATHER, TIME = tool("weather"), tool("time")


@pytest.mark.parametrize(
    ("tools", "change", "name"),
    [
        ([TIME, WEATHER], "reordered", "time"),
        ([WEATHER, TIME, tool("news")], "added", "news"),
        ([WEATHER], "removed", "time"),
        ([WEATHER, tool("time", description="now")], "changed", "time"),
    ],
)
def test_tools_say_what_became_of_them(tools: list[dict[str, Any]], change: str, name: str) -> None:
    old = known(QUESTION, ANSWER, tools=[WEATHER, TIME])
    new = known(QUESTION, ANSWER, MORE, tools=tools)
    parting = part(old, new)
    assert parting is not None
    assert (parting.reason, parting.place.change, parting.place.name) == (
        "tools_changed",
        change,
        name,
    )
    assert parting.lost == min(old.tokens, new.tokens) - parting.common
    assert name in summary(parting.reason, parting.lost, parting)


def test_settings_count_where_they_are_in_the_prompt() -> None:
    old = known(QUESTION, effort="low")
    parting = part(old, known(QUESTION, MORE, effort="high"))
    assert parting is not None
    assert (parting.reason, parting.place.part) == ("reasoning_effort_changed", "reasoning.effort")
    assert (parting.earlier.text, parting.now.text) == ("low", "high")
    # A verbosity that no family writes changes no prompt.
    loud = '{"format":{"type":"text"},"verbosity":"high"}'
    assert part(known(QUESTION), known(QUESTION, MORE, text=loud)) is None


def test_beside_messages_every_setting_counts() -> None:
    messages = Messages(None, b'{"role":"user"}', 15, tokens=100)
    fields: dict[str, Any] = {"prompt": messages, "tokens": 100}
    old = known(QUESTION, **fields)
    for text, reason in (
        ('{"format":{"type":"text"},"verbosity":"high"}', "verbosity_changed"),
        ('{"format":{"type":"json_object"},"verbosity":"medium"}', "text_format_changed"),
    ):
        parting = part(old, known(QUESTION, text=text, **fields))
        assert parting is not None
        assert (parting.reason, parting.missed) == (reason, 100)
    assert part(old, known(QUESTION, **fields)) is None


def test_reasoning_that_is_gone_is_named() -> None:
    thought = item(THOUGHT)
    old = known(QUESTION, thought, ANSWER, MORE)
    by_client = part(old, known(QUESTION, ANSWER, MORE, ANSWER))
    # Here the client sends it again, and the template of the model leaves it out.
    bare = known(QUESTION, ANSWER, MORE, ANSWER).prompt
    again = known(QUESTION, thought, ANSWER, MORE, ANSWER)
    by_template = part(old, known(*again.items, prompt=bare))
    for parting in (by_client, by_template):
        assert parting is not None
        assert (parting.reason, parting.place.item) == ("reasoning_dropped", 1)
        assert parting.lost > 0


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary"])
def test_compaction_is_named(kind: str) -> None:
    old = known(QUESTION, ANSWER, MORE)
    parting = part(old, known(QUESTION, item(SAMPLES[kind]), MORE))
    assert parting is not None
    assert parting.reason == "context_compacted"
    assert (part(old, known(MORE, is_compacted=True)) or parting).reason == "context_compacted"


def test_truncation_and_another_model_are_named() -> None:
    old = known(QUESTION, ANSWER, MORE)
    cut = part(old, known(MORE, ANSWER, is_truncated=True))
    other = part(old, known(QUESTION, ANSWER, MORE, model="large"))
    assert cut is not None
    assert other is not None
    assert (cut.reason, other.reason) == ("history_truncated", "model_changed")
    assert (other.common, other.lost) == (0, old.tokens)


def test_what_is_not_in_memory_is_compared_by_its_items() -> None:
    old = known(QUESTION, ANSWER, MORE, prompt=None)
    assert part(old, known(QUESTION, ANSWER, MORE, ANSWER)) is None
    parting = part(old, known(QUESTION, MORE))
    assert parting is not None
    assert 0 < parting.common < old.tokens


def test_a_request_goes_on_from_what_it_has_the_end_of() -> None:
    rules = spoken("Rules.", "system")
    old = known(rules, QUESTION)
    assert continues(old, known(rules, QUESTION, ANSWER, MORE).digests)
    assert continues(old, known(spoken("Other rules.", "system"), QUESTION, ANSWER).digests)
    assert not continues(old, known(rules, MORE).digests)


def test_diagnostics_report_the_first_reason() -> None:
    old = known(QUESTION)
    new = known(QUESTION, MORE)
    assert diagnose(old, new, None)[0] is HIT
    assert diagnose(old, new, old.tokens)[0] is HIT
    keyed = known(QUESTION, MORE)
    object.__setattr__(keyed, "response", structs.replace(keyed.response, prompt_cache_key="k"))
    missed = diagnose(old, keyed, None)[0]
    assert (missed.reason, missed.cache_missed_tokens) == ("prompt_cache_key_changed", 0)
    assert diagnose(old, keyed, 0)[0].cache_missed_tokens == old.tokens
    long = known(spoken("x" * 1_000))
    assert diagnose(long, known(*long.items, MORE), 0)[0] is UNAVAILABLE


@pytest.mark.parametrize(
    ("route", "read", "reason"),
    [
        ("a", JobStarted(500, "a"), "engine_evicted"),
        (None, JobStarted(0), "engine_evicted"),
        ("a", JobStarted(0, "a", recovered_at=9.0), "engine_evicted"),
        ("a", JobStarted(500, "a", recovered_at=11.0), "engine_restarted"),
        ("a", JobStarted(0, "b"), "engine_other_replica"),
        ("a", JobStarted(0, "b", "drained", recovered_at=11.0), "engine_drained"),
        ("a", JobStarted(0, "b", "removed"), "engine_removed"),
        ("a", JobStarted(0, "b", "down"), "engine_down"),
        ("a", JobStarted(0, "b", "busy"), "engine_busy"),
    ],
)
def test_engine_is_told_apart(route: str | None, read: JobStarted, reason: str) -> None:
    assert engine_reason(Earlier("resp_1", route, 10.0), read) == reason


@pytest.mark.parametrize(("cached", "found"), [(None, False), (900, False), (700, True)])
def test_blocks_of_the_engine_are_no_loss(cached: int | None, found: bool) -> None:
    assert is_lost(1_000, cached) is found


def test_prompt_that_was_added_to_is_seen_at_a_glance() -> None:
    first = Tokens(None, id_array([1, 2]), 2)
    second = first.plus(id_array([3])).plus(id_array([4]))
    assert extends(second, first)
    assert extends(first, first)
    assert not extends(first, second)
    assert not extends(second, Tokens(None, id_array([1, 2]), 2))


def test_first_difference_is_where_texts_part() -> None:
    text = "abcdefgh" * 9
    for at in range(len(text)):
        assert first_difference(text, text[:at] + "X" + text[at + 1 :]) == at
        assert first_difference(text, text[:at]) == at
    side = around("x" * 5_000 + "y" * 5_000, 5_000)
    assert (side.at, len(side.text)) == (BEFORE_CHARS, BEFORE_CHARS + AFTER_CHARS)


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE + 5])
def test_long_texts_are_compared_piece_by_piece(at: int) -> None:
    text = "0123456789" * (3 * PIECE // 10)
    changed = text[:at] + "X" + text[at + 1 :]
    assert first_difference(text, changed) == at
    assert first_difference(text, text) == len(text)
    assert same_end(text, changed) == (len(text) - at - 1) / len(text)
    assert same_end(text, text[:at] + text[at + 3 :]) == (len(text) - at - 3) / len(text)


def test_very_long_item_is_shown_as_it_came() -> None:
    words = "é" * (SAID_BYTES_MAX // 2)
    one, other = (spoken(f"{words}{end}") for end in "ab")
    assert said(one) == one.raw.decode()
    parting = part(known(one, ANSWER), known(other, ANSWER))
    assert parting is not None
    assert (parting.reason, parting.place.item) == ("input_changed", 0)
    assert (parting.earlier.text[BEFORE_CHARS], parting.now.text[BEFORE_CHARS]) == ("a", "b")
    # The same words in another form are the same all the same.
    raw = one.raw.replace(b'{"', b'{"id":"msg_1","', 1)
    assert is_same(one, item(raw.decode()))


@pytest.mark.parametrize("unread", ["1e999", "9" * 400, "[" * 900 + "]" * 900])
def test_items_with_unread_fields_of_any_kind_are_compared(unread: str) -> None:
    one, other = (
        item(
            f'{{"role":"user","content":[{{"type":"input_image","file_id":"{name}"}}],"x":{unread}}}'
        )
        for name in ("file_a", "file_b")
    )
    assert is_same(one, one)
    assert not is_same(one, other)
