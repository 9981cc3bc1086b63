"""The scripted engine: which entry answers, how many tokens, how fast, and what it says without a script."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import uvloop
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from segue.engines.scripted import (
    BURSTS_A_ROUND,
    Script,
    ScriptedCall,
    ScriptedEngine,
    ScriptedTurn,
    load_script,
)
from segue.errors import ApiError
from tests.contracts.engine import Bench, chatml, ids_of, sampled
from tests.pipeline import Stage, Told, staged
from tests.support import WEATHER

CUSTOM = {"type": "custom", "name": "patch"}
CRM = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def text_of(told: Told) -> str:
    return "".join(
        part["text"] for item in told.response["output"] for part in item.get("content", [])
    )


def calls_of(told: Told) -> list[dict[str, Any]]:
    return [item for item in told.response["output"] if item["type"].endswith("_call")]


# --- a script ---------------------------------------------------------------------------------------

STORY = Script(
    (
        ScriptedTurn(text="one"),
        ScriptedTurn(reasoning="Hm.", calls=(ScriptedCall("get_weather"),)),
        ScriptedTurn(text="three"),
        ScriptedTurn(text="last"),
    )
)
SHAPES = [["message"], ["reasoning", "function_call"], ["message"], ["message"], ["message"]]


def shape(told: Told) -> list[str]:
    return [item["type"] for item in told.response["output"]]


def next_input(told: Told) -> list[dict[str, Any]]:
    calls = calls_of(told)
    if not calls:
        return [user("go on")]
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        for call in calls
    ]


async def test_kth_entry_answers_the_kth_turn_of_a_chain(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db", STORY) as stage:
        told = await stage.turn(input="go", tools=[WEATHER])
        shapes, texts = [shape(told)], [text_of(told)]
        for _ in range(4):
            told = await stage.turn(
                input=next_input(told), tools=[WEATHER], previous_response_id=told.response["id"]
            )
            shapes.append(shape(told))
            texts.append(text_of(told))

    assert shapes == SHAPES
    assert texts == ["one", "Hm.", "three", "last", "last"]


async def test_kth_entry_answers_the_kth_turn_of_a_resent_history(tmp_path: Path) -> None:
    """A client that keeps its own history gets the same story as one that chains."""
    async with staged(tmp_path / "s.db", STORY) as stage:
        history: list[dict[str, Any]] = [user("go")]
        shapes = []
        for _ in range(5):
            told = await stage.turn(input=history, tools=[WEATHER], store=False)
            shapes.append(shape(told))
            history = [*history, *told.response["output"], *next_input(told)]

    assert shapes == SHAPES


async def test_forked_chain_plays_on_from_where_it_forked(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db", STORY) as stage:
        first = await stage.turn(input="go")
        for _ in range(2):
            fork = await stage.turn(
                input="on", previous_response_id=first.response["id"], tools=[WEATHER]
            )
            assert shape(fork) == ["reasoning", "function_call"]


async def test_warm_up_takes_no_entry_of_the_script(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db", STORY) as stage:
        warm = await stage.turn(input="go", generate=False)
        told = await stage.turn(input=[], previous_response_id=warm.response["id"])

    assert text_of(told) == "one"


async def test_script_calls_functions_and_custom_tools_as_they_are_offered(tmp_path: Path) -> None:
    calls = (
        ScriptedCall("get_weather", arguments=b'{"city": "Paris"}'),  # type: ignore[arg-type]
        ScriptedCall("crm.find"),
        ScriptedCall("patch", input="*** Begin"),
        ScriptedCall("unknown"),
    )
    async with staged(tmp_path / "s.db", Script((ScriptedTurn(calls=calls),))) as stage:
        told = await stage.turn(input="go", tools=[WEATHER, CRM, CUSTOM])

    assert [
        (call["type"], call["name"], call.get("namespace"), call.get("arguments", call.get("input")))
        for call in calls_of(told)
    ] == [
        ("function_call", "get_weather", None, '{"city": "Paris"}'),
        ("function_call", "find", "crm", "{}"),
        ("custom_tool_call", "patch", None, "*** Begin"),
        ("function_call", "unknown", None, "{}"),
    ]  # fmt: skip


def count(turn: ScriptedTurn) -> int:
    bench = Bench(ScriptedEngine(chatml(), Script((turn,))), chatml())
    return len(ids_of(asyncio.run(sampled(bench.engine, bench.job()))))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    text=st.sampled_from(["", "Hello.", "Hi there", "x = 1;", "日本", "end: 7", "the", "a\nb"]),
    reasoning=st.sampled_from(["", "Hm."]),
    has_call=st.booleans(),
    pad=st.integers(0, 300),
)
def test_padding_adds_exactly_that_many_tokens(
    text: str, reasoning: str, has_call: bool, pad: int
) -> None:
    # Without a text the padding begins a message, and the family puts a line between that and its neighbours.
    assume(text or not (has_call or reasoning))
    calls = (ScriptedCall("f"),) if has_call else ()
    bare = ScriptedTurn(reasoning=reasoning, text=text, calls=calls)
    padded = ScriptedTurn(reasoning=reasoning, text=text, calls=calls, pad_tokens=pad)

    assert count(padded) == count(bare) + pad


# --- speed ------------------------------------------------------------------------------------------


def test_engine_sleeps_between_tokens_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timers of the server's loop count whole milliseconds; a shorter sleep there returns at once."""
    script = Script((ScriptedTurn(text="go", pad_tokens=60),))
    bench = Bench(ScriptedEngine(chatml(), script, 400), chatml())
    sleeps = 0
    sleep = asyncio.sleep

    async def counted(delay: float) -> None:
        nonlocal sleeps
        sleeps += 1
        await sleep(delay)

    monkeypatch.setattr("segue.engines.scripted.asyncio.sleep", counted)
    pieces = uvloop.run(sampled(bench.engine, bench.job()))

    assert sleeps <= 3 * len(ids_of(pieces))


async def test_hundreds_of_answers_do_not_write_in_one_round_of_the_loop() -> None:
    bench = Bench(ScriptedEngine(chatml(), Script((ScriptedTurn(pad_tokens=200),))), chatml())
    loop = asyncio.get_running_loop()
    bursts, most = 0, 0

    def count_round() -> None:
        nonlocal bursts, most
        bursts, most = 0, max(most, bursts)
        if not done.done():
            loop.call_soon(count_round)

    async def answer() -> int:
        nonlocal bursts
        found = 0
        async with aclosing(bench.engine.sample(bench.job(output_tokens_max=None))) as pieces:
            async for _ in pieces:
                bursts += 1
                found += 1
        return found

    # One is broken off while it waits: nobody waits for it.
    left = asyncio.ensure_future(answer())
    done = asyncio.gather(*(answer() for _ in range(100)))
    loop.call_soon(count_round)
    await asyncio.sleep(0)
    left.cancel()
    counts = await done
    # The last piece of an answer comes with its end.
    assert 0 < most <= 2 * BURSTS_A_ROUND
    assert {*counts} == {max(counts)}


@pytest.mark.parametrize("tokens_per_s", [65, 1_000, 4_000])
async def test_engine_keeps_its_speed(tokens_per_s: int) -> None:
    """The one test here that looks at the clock. A busy machine may delay it, never speed it up: the best of a few."""
    tokens = max(30, tokens_per_s // 3)
    script = Script((ScriptedTurn(pad_tokens=tokens),))
    bench = Bench(ScriptedEngine(chatml(), script, tokens_per_s), chatml())
    loop = asyncio.get_running_loop()
    speeds = []
    for _ in range(5):
        began = loop.time()
        sent = len(ids_of(await sampled(bench.engine, bench.job())))
        speeds.append(sent / (loop.time() - began))
        assert speeds[-1] <= tokens_per_s * 1.1
        if speeds[-1] >= tokens_per_s * 0.9:
            return
    pytest.fail(f"asked for {tokens_per_s} tokens/s, had {speeds}")


# --- without a script -------------------------------------------------------------------------------

FIRST = {"type": "function", "name": "first", "parameters": {"type": "object"}}
SECOND = {"type": "function", "name": "second"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.mark.parametrize(
    "tools, choice, called",
    [
        ([], "auto", None),
        ([FIRST, SECOND], "auto", "first"),
        ([SECOND, FIRST], "auto", "second"),
        ([FIRST, SECOND], "none", None),
        ([FIRST, SECOND], "required", "first"),
        ([FIRST, SECOND], {"type": "function", "name": "second"}, "second"),
        ([FIRST, CUSTOM], {"type": "custom", "name": "patch"}, "patch"),
        ([FIRST, SECOND], allowed("auto", "second"), "second"),
        ([FIRST, SECOND], allowed("required", "second"), "second"),
        ([FIRST, SECOND], allowed("auto", "absent"), None),
        ([FIRST, SECOND], allowed("auto"), None),
        ([CUSTOM, FIRST], "auto", "first"),
        ([CUSTOM], "auto", "patch"),
        ([CRM], "auto", "find"),
        ([FIRST, {"type": "web_search"}], "auto", "first"),
    ],
)
async def test_engine_calls_the_tool_that_the_request_means(
    tmp_path: Path, tools: list[Any], choice: Any, called: str | None
) -> None:
    async with staged(tmp_path / "s.db") as stage:
        told = await stage.turn(input="Hello", tools=tools, tool_choice=choice)

    assert [call["name"] for call in calls_of(told)] == ([called] if called else [])
    if called is None:
        assert "You said: Hello" in text_of(told)


async def answered(stage: Stage, **choice: Any) -> Told:
    first = await stage.turn(input="Weather?", tools=[WEATHER])
    return await stage.turn(
        input=next_input(first),
        previous_response_id=first.response["id"],
        tools=[WEATHER],
        **choice,
    )


async def test_engine_calls_a_tool_once_and_then_answers(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        told = await answered(stage)

    assert calls_of(told) == []
    assert "The tool said: sun" in text_of(told)
    assert "not a model" in text_of(told)


async def test_engine_that_is_forced_calls_again(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        assert calls_of(await answered(stage, tool_choice="required"))
        assert calls_of(await answered(stage, tool_choice=allowed("required", "get_weather")))
        assert not calls_of(await answered(stage, tool_choice=allowed("auto", "get_weather")))


async def test_last_item_may_stand_in_a_warm_up(tmp_path: Path) -> None:
    """`input: []` behind a warm-up means the same as the whole conversation at once."""
    async with staged(tmp_path / "s.db") as stage:
        warm = await stage.turn(input="Weather?", tools=[WEATHER], generate=False)
        told = await stage.turn(input=[], tools=[WEATHER], previous_response_id=warm.response["id"])
        answer = await stage.turn(
            input=next_input(told), generate=False, previous_response_id=told.response["id"]
        )
        last = await stage.turn(
            input=[], tools=[WEATHER], previous_response_id=answer.response["id"]
        )

    assert [call["name"] for call in calls_of(told)] == ["get_weather"]
    assert "The tool said: sun" in text_of(last)


async def test_engine_answers_in_the_format_that_was_asked_for(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer", "minimum": 3}},
        "required": ["city", "n"],
    }
    by_schema = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    async with staged(tmp_path / "s.db") as stage:
        told = await stage.turn(input="Hello", text=by_schema)
        loose = await stage.turn(input="Hello", text={"format": {"type": "json_object"}})

    jsonschema.validate(json.loads(text_of(told)), schema)
    assert isinstance(json.loads(text_of(loose)), dict)


# The schemas themselves have their own test; here they travel through rendering, sampling and reading.
properties = st.dictionaries(
    st.sampled_from(["city", "days", "mode", "tags", "where"]),
    st.sampled_from(
        [
            {"type": "string", "minLength": 3},
            {"type": "integer", "minimum": 5, "maximum": 9},
            {"enum": ["metric", "imperial"]},
            {"type": "array", "items": {"type": "string"}, "minItems": 2},
            {"anyOf": [{"type": "null"}, {"type": "number"}]},
            {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        ]
    ),
    min_size=1,
)


def test_arguments_that_reach_the_client_satisfy_the_tools_schema(tmp_path: Path) -> None:
    numbers = itertools.count()

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(fields=properties)
    def check(fields: dict[str, Any]) -> None:
        schema = {
            "type": "object",
            "properties": fields,
            "required": sorted(fields),
            "additionalProperties": False,
        }
        tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}

        async def story() -> Told:
            async with staged(tmp_path / f"{next(numbers)}.db") as stage:
                return await stage.turn(input="Hello", tools=[tool], store=False)

        (call,) = calls_of(asyncio.run(story()))
        jsonschema.validate(json.loads(call["arguments"]), schema)

    check()


# --- scripts in files -------------------------------------------------------------------------------


def test_script_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(
        '{"turns": [{"reasoning": "r", "text": "t", "pad_tokens": 2, '
        '"calls": [{"name": "f", "arguments": {"a": 1}}]}, {}]}'
    )

    script = load_script(path)

    assert len(script.turns) == 2
    first = script.turns[0]
    assert (first.reasoning, first.text, first.pad_tokens) == ("r", "t", 2)
    assert bytes(first.calls[0].arguments) == b'{"a": 1}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"turns": []}', '{"turns": [7]}', '{"turns": [{"text": 7}]}']
)
def test_bad_script_is_named_before_anything_starts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)

    with pytest.raises(ApiError, match=r"script\.json"):
        load_script(path)


def test_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"absent\.json"):
        load_script(tmp_path / "absent.json")


def test_script_of_the_page_is_played(tmp_path: Path) -> None:
    """The example in docs/engines/scripted.md has every field."""
    page = Path(__file__).parents[2] / "docs" / "engines" / "scripted.md"
    text = page.read_text().partition("```json\n")[2].partition("```")[0]
    path = tmp_path / "script.json"
    path.write_text(text)
    first, second, last = load_script(path).turns
    assert (bool(first.reasoning), [call.name for call in first.calls]) == (True, ["list_files"])
    assert [bytes(call.arguments) for call in second.calls] == [
        b'{"path": "a.txt"}',
        b'{"path": "b.txt"}',
    ]
    assert (last.text, last.pad_tokens) == ("Both notes are about fruit.", 20)
    fields = {field.name for field in msgspec.structs.fields(type(first))}
    listed = set(re.findall(r"^\| `(\w+)` \|", page.read_text(), re.M))
    assert listed == fields
