"""Chunks have one legal order, whatever the turn: random turns go through the real assembler."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from segue.completions.answer import encode_completion
from segue.completions.request import AnswerForm
from segue.completions.stream import DONE, PING, ChunkWriter
from segue.errors import EngineFailed
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed
from segue.seams.prompt import NO_IDS
from segue.turn.assemble import Assembler
from segue.turn.decide import End
from segue.wire.events import Event
from segue.wire.response import InputDetails, OutputDetails, ReasoningEcho, Response, Usage
from tests.chat import check_order, chunks_of, joined, without_ids

USAGE = Usage(10, InputDetails(4, 0), 5, OutputDetails(2), 15)
TEXT = st.text(max_size=6)
ITEM = st.tuples(
    st.sampled_from(["message", "reasoning", "function", "custom"]), st.lists(TEXT, max_size=3)
)
ENDS = st.sampled_from(
    [
        End("completed"),
        End("incomplete", reason="max_output_tokens"),
        End("incomplete", reason="content_filter"),
    ]
)


def new_response() -> Response:
    null, no_list = Raw(b"null"), Raw(b"[]")
    return Response(
        id="resp_" + "0" * 32,
        created_at=7,
        status="in_progress",
        instructions=null,
        max_output_tokens=None,
        max_tool_calls=None,
        model="m",
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning=ReasoningEcho(),
        safety_identifier=None,
        store=False,
        temperature=1.0,
        text=Raw(b"{}"),
        tool_choice=Raw(b'"auto"'),
        tools=no_list,
        top_logprobs=0,
        top_p=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        truncation="disabled",
        user=None,
        metadata={},
    )


def play(
    items: list[tuple[str, list[str]]], beats: set[int], end: End
) -> tuple[list[Event], Response]:
    """The events of a turn that wrote these items, with heartbeats before some of them, and the response."""
    numbers = count()
    assembler = Assembler(new_response(), lambda prefix: f"{prefix}_{next(numbers)}")
    events = assembler.start()
    for at, (kind, texts) in enumerate(items):
        if at in beats:
            events.append(assembler.heartbeat())
        parsed: list[Parsed] = [ItemOpened(kind, name="f")]
        parsed += [ItemText(text) for text in texts]
        events += assembler.feed([*parsed, ItemClosed(NO_IDS)])
    assembler.conclude(end, USAGE, 9)
    events.append(assembler.end())
    return events, assembler.response


@given(
    st.lists(ITEM, max_size=5), st.sets(st.integers(0, 4)), ENDS, st.booleans(), st.integers(1, 9)
)
def test_random_turns_have_chunks_in_order_that_say_what_the_object_says(
    items: list[tuple[str, list[str]]], beats: set[int], end: End, wants_usage: bool, size: int
) -> None:
    events, response = play(items, beats, end)
    writer = ChunkWriter(AnswerForm(wants_usage=wants_usage))
    body = b"".join(
        chunk
        for at in range(0, len(events), size)
        for chunk in writer.write(events[at : at + size])
    )
    chunks = chunks_of(body)
    check_order(chunks, wants_usage=wants_usage)
    whole: Any = json.loads(encode_completion(response, AnswerForm()))
    assert without_ids(joined(chunks)) == without_ids(whole["choices"][0])
    assert whole["id"] == chunks[0]["id"] == "chatcmpl-" + "0" * 32
    assert whole["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    if wants_usage:
        assert chunks[-1]["usage"] == whole["usage"]


def test_nothing_is_written_before_the_first_output_or_heartbeat() -> None:
    events, _ = play([("message", ["Hi"])], set(), End("completed"))
    writer = ChunkWriter(AnswerForm())
    assert writer.write(events[:2]) == []
    first, *_ = writer.write(events[2:3])
    assert b'"role":"assistant"' in first


def test_heartbeat_is_a_comment_after_the_role() -> None:
    events, _ = play([("message", ["Hi"])], {0}, End("completed"))
    writer = ChunkWriter(AnswerForm())
    role, ping = writer.write(events[:3])
    assert b'"role":"assistant"' in role
    assert ping == PING
    assert writer.write(events[2:3]) == [PING]


def test_failure_is_nothing_before_the_first_chunk_and_an_error_after_it() -> None:
    end = End("failed", error=EngineFailed("The engine broke off."))
    events, _ = play([], set(), end)
    assert ChunkWriter(AnswerForm(wants_usage=True)).write(events) == []
    events, _ = play([("message", ["Hi"])], set(), end)
    *_, last = ChunkWriter(AnswerForm(wants_usage=True)).write(events)
    error = msgspec.json.decode(last.removeprefix(b"data: "))["error"]
    assert error == {
        "message": "The engine broke off.",
        "type": "server_error",
        "param": None,
        "code": "server_error",
    }
    assert last != DONE


def test_old_function_call_is_written_once() -> None:
    items = [("function", ["{", "}"]), ("function", ["{}"])]
    events, response = play(items, set(), End("completed"))
    chunks = chunks_of(b"".join(ChunkWriter(AnswerForm(is_old=True)).write(events)))
    said = joined(chunks)
    assert said["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert said["finish_reason"] == "function_call"
    whole = json.loads(encode_completion(response, AnswerForm(is_old=True)))
    assert whole["choices"][0]["message"]["function_call"] == {"name": "f", "arguments": "{}"}
