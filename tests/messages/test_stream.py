"""Events have one legal order, whatever the turn: random turns go through the real assembler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from segue.errors import ApiError, EngineFailed, InvalidRequest
from segue.ids import item_ids
from segue.listener.subscribers import SseSubscriber
from segue.mcp.tool import mcp
from segue.memory.budget import Memory
from segue.messages.answer import answer_of
from segue.messages.request import AskedTurn
from segue.messages.stream import MessageEvents
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed
from segue.seams.prompt import NO_IDS
from segue.turn.assemble import Assembler
from segue.turn.decide import End
from segue.turn.plan import ReasoningView
from segue.turn.running import Running
from segue.wire.codec import as_item
from segue.wire.events import Event
from segue.wire.items import McpCall
from segue.wire.requests import Create
from segue.wire.response import InputDetails, OutputDetails, Usage
from tests.contracts.turns import response_of
from tests.message_events import events_of, joined, prompt_of, without_ids

USAGE = Usage(10, InputDetails(4, 6), 5, OutputDetails(2), 15)
ASKED = AskedTurn(Create(model="m"))
TURN = "resp_" + "0" * 32
TEXT = st.text(max_size=6)
# Of calls the text is JSON: it comes in pieces, too.
ARGUMENTS = st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps)
ITEM = st.one_of(
    st.tuples(st.sampled_from(["message", "reasoning"]), st.lists(TEXT, max_size=3)),
    st.tuples(
        st.sampled_from(["function", "mcp"]), ARGUMENTS.map(lambda text: [text[:3], text[3:]])
    ),
)
ENDS = st.sampled_from(
    [
        End("completed"),
        End("incomplete", reason="max_output_tokens"),
        End("incomplete", reason="content_filter"),
    ]
)


def seal(body: bytes) -> str:
    return f"sealed {len(body)}"


class Played:
    """A turn that wrote these items, with heartbeats before some of them."""

    def __init__(
        self,
        items: list[tuple[str, list[str]]],
        end: End,
        beats: set[int] | None = None,
        view: ReasoningView = "text",
    ) -> None:
        assembler = Assembler(response_of(TURN, status="in_progress"), item_ids(TURN), view, seal)
        assembler.host({kind.struct: kind for kind in mcp(None).kinds}, {})
        self.running = Running("ada", assembler, is_stored=False)
        self.events: list[Event] = assembler.start()
        for at, (kind, texts) in enumerate(items):
            if at in (beats or ()):
                self.events.append(assembler.heartbeat())
            execution: Any = "server" if kind == "mcp" else None
            namespace = "far" if kind == "mcp" else None
            opened = ItemOpened(kind, "f", namespace=namespace, execution=execution)
            parsed: list[Parsed] = [opened, *map(ItemText, texts), ItemClosed(NO_IDS)]
            self.events += assembler.feed(parsed)
        # Our own tools answer last, and in another order than they were asked.
        for item in reversed(assembler.items):
            if isinstance(item.value, McpCall):
                done = structs.replace(item.value, status="completed", output="fine")
                self.events += assembler.finish(as_item(done))
        assembler.conclude(end, USAGE, 9)
        self.events.append(assembler.end())

    def write(self, asked: AskedTurn = ASKED, size: int = 1) -> bytes:
        """What a client reads, the events delivered so many at a time."""
        writer = MessageEvents(asked, seal, "req_1")
        writer.subscriber = SseSubscriber(writer.write, 1 << 20, Memory().unread)
        writer.subscriber.attached(self.running)
        groups = (self.events[at : at + size] for at in range(0, len(self.events), size))
        return b"".join(chunk for group in groups for chunk in writer.write(group))


@given(
    st.lists(ITEM, max_size=5),
    ENDS,
    st.sets(st.integers(0, 4)),
    st.sampled_from(["text", "summary", "hidden"]),
    st.booleans(),
    st.sampled_from(["", "5m", "1h"]),
    st.integers(1, 9),
)
def test_random_turns_have_events_in_order_that_say_what_the_object_says(
    items: list[tuple[str, list[str]]],
    end: End,
    beats: set[int],
    view: ReasoningView,
    hides: bool,
    ttl: Any,
    size: int,
) -> None:
    """One block open at a time, no gaps, one signature for each thought, and usage that sums: `joined` checks it."""
    played = Played(items, end, beats, view)
    asked = structs.replace(ASKED, hides_thinking=hides, ttl=ttl)
    events = events_of(played.write(asked, size))
    message = joined(events)
    whole = json.loads(answer_of(played.running.response, asked, seal, played.running.tally))
    # Results of our own tools stand where they came, calls where they were made.
    assert by_kind(without_ids(message)) == by_kind(without_ids(whole))
    assert message["id"] == whole["id"] == "msg_" + "0" * 32
    assert prompt_of(message["usage"]) == prompt_of(whole["usage"]) == USAGE.input_tokens
    assert message["usage"]["cache_creation_input_tokens"] == (6 if ttl else 0)
    for block in message["content"]:
        if block["type"] == "thinking":
            assert block["signature"].startswith("sealed ")
            assert not hides or not block["thinking"]


def by_kind(message: dict[str, Any]) -> tuple[dict[str, Any], list[Any], list[Any]]:
    is_result = [block["type"] == "mcp_tool_result" for block in message["content"]]
    pairs = list(zip(is_result, message["content"], strict=True))
    own = [block for is_one, block in pairs if not is_one]
    results = [block for is_one, block in pairs if is_one]
    return {**message, "content": None}, own, results


def test_nothing_is_written_before_the_first_output_or_heartbeat() -> None:
    played = Played([("message", ["Hi"])], End("completed"))
    writer = MessageEvents(ASKED, seal, "req_1")
    writer.subscriber = SseSubscriber(writer.write, 1 << 20, Memory().unread)
    writer.subscriber.attached(played.running)
    assert writer.write(played.events[:2]) == []
    first, *_ = writer.write(played.events[2:3])
    assert first.startswith(b"event: message_start\n")


def test_heartbeat_is_a_ping_after_the_start() -> None:
    events = events_of(Played([("message", ["Hi"])], End("completed"), {0}).write())
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]


@pytest.mark.parametrize(
    "error, kind",
    [
        (EngineFailed("It broke off."), "api_error"),
        (InvalidRequest("No."), "invalid_request_error"),
    ],
)
def test_failure_is_nothing_before_the_start_and_an_error_after_it(
    error: ApiError, kind: str
) -> None:
    assert Played([], End("failed", error=error)).write() == b""
    *_, last = events_of(Played([("message", ["Hi"])], End("failed", error=error)).write())
    assert last == {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": "req_1",
    }


def test_input_that_a_guard_blocks_is_a_refusal() -> None:
    blocked = InvalidRequest("Not this.", code="invalid_prompt")
    message = joined(events_of(Played([], End("failed", error=blocked)).write()))
    assert (message["stop_reason"], message["content"]) == ("refusal", [])
    assert message["stop_details"]["explanation"] == "Not this."


def test_arguments_that_are_no_object_are_named_as_such() -> None:
    played = Played([("function", ["not json"])], End("completed"))
    whole = json.loads(answer_of(played.running.response, ASKED, seal, played.running.tally))
    (call,) = whole["content"]
    assert call["input"] == {"INVALID_JSON": "not json"}
    assert whole["stop_reason"] == "tool_use"
