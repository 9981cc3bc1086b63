"""The order and the numbers of events: whatever the model says, docs/protocol.md 5.2 holds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from segue.errors import EngineFailed, InvalidRequest
from segue.mcp.definitions import error_of
from segue.mcp.tool import mcp
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, TurnClosed
from segue.seams.prompt import id_array
from segue.turn.assemble import Assembler
from segue.turn.decide import End
from segue.turn.plan import ReasoningView
from segue.wire.codec import as_item
from segue.wire.events import Event
from segue.wire.items import McpCall, McpListTools
from segue.wire.response import InputDetails, OutputDetails, Usage
from tests.contracts.turns import response_of
from tests.events import check_turn

USAGE = Usage(3, InputDetails(), 2, OutputDetails(), 5)
COMPLETED = End("completed")
TAIL = id_array([0])


def assembler(view: ReasoningView = "text") -> Assembler:
    numbers = itertools.count()
    first = response_of("resp_1", status="in_progress")
    writer = Assembler(first, lambda prefix: f"{prefix}_{next(numbers)}", view)
    writer.host({kind.struct: kind for kind in mcp(None).kinds}, {})
    return writer


def item(
    kind: str, *texts: str, ids: Sequence[int] = (1,), is_cut: bool = False, **opened: Any
) -> list[Parsed]:
    """One item as a reader tells it."""
    name = "f" if kind in ("function", "custom") else ""
    if kind == "mcp":
        opened["execution"] = "server"
    begin = ItemOpened(kind, name, **opened)
    return [begin, *(ItemText(text) for text in texts), ItemClosed(id_array(ids), is_cut)]


def answered(writer: Assembler) -> list[Event]:
    """Our own tools answer what is open, the last call first: they take the time that they take."""
    return [
        event
        for one in reversed(writer.items)
        if isinstance(one.value, McpCall) and one.value.status == "in_progress"
        for event in writer.finish(as_item(replace(one.value, status="completed", output="o")))
    ]


def tell(writer: Assembler, parsed: Sequence[Parsed], end: End = COMPLETED) -> list[Event]:
    """The events of a whole turn."""
    events = writer.start() + writer.feed(parsed) + answered(writer)
    writer.conclude(end, USAGE, 1_700_000_001)
    return [*events, writer.end()]


def shown(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events as a client reads them; what they say of themselves must be what they are."""
    found = [json.loads(event.data) for event in events]
    for event, data in zip(events, found, strict=True):
        assert (event.type, event.number) == (data["type"], data["sequence_number"])
    return found


kinds = st.sampled_from(
    [
        "message", "reasoning", "function", "custom", "shell", "local_shell", "apply_patch", "tool_search", "mcp",
        "mcp_approval",
    ]
)  # fmt: skip
# Anything, and pieces that may join to the arguments of a shell.
written = st.sampled_from(['{"commands": [', '"ls', '\\n"', ', "', '"]', ', "timeout_ms": 5}', "}"])
texts = st.lists(st.text(max_size=5) | written, max_size=6)


@st.composite
def turns(draw: st.DrawFn) -> tuple[list[Parsed], End]:
    """Anything a reader may say: whole items, perhaps a last one that is cut, and the end that fits."""
    parsed: list[Parsed] = []
    for _ in range(draw(st.integers(0, 4))):
        parsed += item(
            draw(kinds),
            *draw(texts),
            ids=draw(st.lists(st.integers(0, 9), max_size=3)),
            namespace=draw(st.sampled_from([None, "crm"])),
            is_async=draw(st.booleans()),
        )
    end = draw(
        st.sampled_from(
            [
                COMPLETED,
                End("incomplete", reason="max_output_tokens"),
                End("cancelled"),
                End("failed", error=EngineFailed("Broken.")),
            ]
        )
    )
    if (end.status != "completed") and draw(st.booleans()):
        parsed += item(draw(kinds), *draw(texts), is_cut=True)
    return [*parsed, TurnClosed(TAIL)], end


views = st.sampled_from(["text", "summary", "hidden"])


@settings(max_examples=250, deadline=None, derandomize=True)
@given(turn=turns(), view=views)
def test_events_of_any_turn_keep_the_rules(
    turn: tuple[list[Parsed], End], view: ReasoningView
) -> None:
    parsed, end = turn

    response = check_turn(shown(tell(assembler(view), parsed, end)))

    assert response["status"] == end.status
    assert len(response["output"]) == sum(isinstance(one, ItemOpened) for one in parsed)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(turn=turns(), view=views, data=st.data())
def test_cutting_what_is_said_elsewhere_changes_no_event(
    turn: tuple[list[Parsed], End], view: ReasoningView, data: st.DataObject
) -> None:
    parsed, end = turn
    cuts = sorted(data.draw(st.lists(st.integers(0, len(parsed)), max_size=4)))
    writer = assembler(view)

    events = writer.start()
    for begin, until in itertools.pairwise([0, *cuts, len(parsed)]):
        events += writer.feed(parsed[begin:until])
    events += answered(writer)
    writer.conclude(end, USAGE, 1_700_000_001)
    events.append(writer.end())

    assert events == tell(assembler(view), parsed, end)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(turn=turns(), beats=st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_heartbeats_are_numbered_like_any_event(
    turn: tuple[list[Parsed], End], beats: list[int]
) -> None:
    """They may come anywhere between the first events and the end; nothing else changes."""
    parsed, end = turn
    writer = assembler()
    events = writer.start()
    for place, one in enumerate(parsed):
        if place in beats:
            events.append(writer.heartbeat())
        events += writer.feed([one])
    events.append(writer.heartbeat())
    events += answered(writer)
    writer.conclude(end, USAGE, 1_700_000_001)
    events.append(writer.end())

    check_turn(shown(events))

    quiet = [event.type for event in tell(assembler(), parsed, end)]
    lively = [event.type for event in events if event.type != "response.in_progress"]
    assert lively == [kind for kind in quiet if kind != "response.in_progress"]
    beat = [event for event in shown(events) if event["type"] == "response.in_progress"]
    assert all(one["response"] == beat[0]["response"] for one in beat)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(turn=turns(), view=views)
def test_what_was_sampled_is_kept_by_item_however_it_is_shown(
    turn: tuple[list[Parsed], End], view: ReasoningView
) -> None:
    parsed, end = turn
    writer = assembler(view)

    tell(writer, parsed, end)

    assert writer.ids == [one.ids for one in parsed if isinstance(one, ItemClosed)]
    assert writer.tail == TAIL
    assert len(writer.items) == len(writer.ids)
    assert [bytes(raw) for raw in writer.response.output] == [one.raw for one in writer.items]


# --- the traces of docs/protocol.md 5 --------------------------------------------------------------------


def types_of(events: Sequence[Event]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


@pytest.mark.parametrize(
    "view, parsed, inner",
    [
        (
            "text",
            item("message", "Hel", "lo"),
            [
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
            ],
        ),
        (
            "text",
            item("function", '{"city":', '"Paris"}'),
            [
                "function_call_arguments.delta",
                "function_call_arguments.delta",
                "function_call_arguments.done",
            ],
        ),
        (
            "text",
            item("function"),
            ["function_call_arguments.delta", "function_call_arguments.done"],
        ),
        (
            "text",
            item("custom", "*** Begin"),
            ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
        ),
        (
            "text",
            item("reasoning", "Hm"),
            [
                "content_part.added",
                "reasoning_text.delta",
                "reasoning_text.done",
                "content_part.done",
            ],
        ),
        (
            "summary",
            item("reasoning", "Hm"),
            [
                "reasoning_summary_part.added",
                "reasoning_summary_text.delta",
                "reasoning_summary_text.done",
                "reasoning_summary_part.done",
            ],
        ),
        ("hidden", item("reasoning", "Hm"), []),
    ],
)
def test_item_is_told_as_the_contracts_traces_tell_it(
    view: ReasoningView, parsed: list[Parsed], inner: list[str]
) -> None:
    assert types_of(tell(assembler(view), parsed)) == [
        "created",
        "in_progress",
        "output_item.added",
        *inner,
        "output_item.done",
        "completed",
    ]


def test_text_answer_is_the_contracts_trace() -> None:
    """docs/protocol.md 5.4, to the field: this exact shape was accepted by three official clients."""
    events = shown(tell(assembler(), item("message", "Hel", "lo")))

    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    done = {
        "id": "msg_0",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    place = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
    for event in events:
        del event["type"], event["sequence_number"]
    assert events[2:-1] == [
        {"output_index": 0, "item": done | {"status": "in_progress", "content": []}},
        place | {"part": part | {"text": ""}},
        place | {"delta": "Hel", "logprobs": []},
        place | {"delta": "lo", "logprobs": []},
        place | {"text": "Hello", "logprobs": []},
        place | {"part": part},
        {"output_index": 0, "item": done},
    ]
    assert events[-1]["response"]["output"] == [done]


def test_hidden_reasoning_tells_nothing_of_its_text() -> None:
    events = tell(assembler("hidden"), item("reasoning", "a secret") + item("message", "Hi"))

    assert not any(b"secret" in event.data for event in events)


def test_call_carries_its_namespace_and_that_it_may_stay_open() -> None:
    events = shown(
        tell(assembler(), item("function", "{}", namespace="crm", is_async=True) + item("custom"))
    )

    first, second = events[-1]["response"]["output"]
    assert (first["namespace"], first["async"]) == ("crm", True)
    assert not {"namespace", "async"} & second.keys()
    assert first["call_id"].startswith("call_")
    assert first["call_id"] != second["call_id"]


SHELL = ('{"commands": ["l', 's", "a\\', 'n"], "timeout_ms": 900}')


def test_shell_call_tells_its_commands_as_they_are_written() -> None:
    events = shown(tell(assembler(), [*item("shell", *SHELL), TurnClosed(TAIL)]))

    check_turn(events)
    inner = [
        (event["type"].rpartition(".")[2], event["command_index"], event.get("delta"))
        for event in events
        if "command_index" in event
    ]
    assert inner == [
        ("added", 0, None),
        ("delta", 0, "l"),
        ("delta", 0, "s"),
        ("done", 0, None),
        ("added", 1, None),
        ("delta", 1, "a"),
        ("delta", 1, "\n"),
        ("done", 1, None),
    ]
    (call,) = events[-1]["response"]["output"]
    assert call == {
        "type": "shell_call",
        "id": "sh_1",
        "status": "completed",
        "call_id": "call_0",
        "action": {"commands": ["ls", "a\n"], "timeout_ms": 900, "max_output_length": None},
        "environment": {"type": "local"},
    }


@pytest.mark.parametrize(
    "kind, text, fields",
    [
        ("shell", '{"command": "ls"}', {"action": ["ls"]}),
        ("shell", "ls", {"action": []}),
        ("apply_patch", "oops", {"operation": {"type": "update_file", "path": "", "diff": "oops"}}),
        ("tool_search", "oops", {"arguments": "oops"}),
    ],
)
def test_call_that_cannot_be_read_is_still_an_item(
    kind: str, text: str, fields: dict[str, Any]
) -> None:
    events = shown(tell(assembler(), [*item(kind, text), TurnClosed(TAIL)]))

    (call,) = check_turn(events)["output"]
    if kind == "shell":
        call["action"] = call["action"]["commands"]
    assert {key: call[key] for key in fields} == fields


def test_patch_that_is_cut_off_is_still_in_progress() -> None:
    parsed = item("apply_patch", '{"type": "create_file", "path": "a", "diff": "+x', is_cut=True)
    end = End("incomplete", reason="max_output_tokens")

    events = shown(tell(assembler(), [*parsed, TurnClosed(TAIL)], end))

    (call,) = check_turn(events)["output"]
    assert call["status"] == "in_progress"
    assert call["operation"] == {"type": "create_file", "path": "a", "diff": "+x"}


@pytest.mark.parametrize("execution, prefix", [("server", None), ("client", "call_")])
def test_only_a_search_of_the_client_has_a_call_id(execution: str, prefix: str | None) -> None:
    events = shown(
        tell(assembler(), [*item("tool_search", "{}", execution=execution), TurnClosed(TAIL)])
    )

    (call,) = check_turn(events)["output"]
    assert (call["execution"], call["arguments"]) == (execution, {})
    assert call["call_id"] is None if prefix is None else call["call_id"].startswith(prefix)


def test_cut_item_is_incomplete_and_last() -> None:
    end = End("incomplete", reason="max_output_tokens")
    events = shown(tell(assembler(), item("message", "Hel", is_cut=True), end))

    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"


def test_failed_response_says_why() -> None:
    error = InvalidRequest("Too long.", code="context_length_exceeded", param="input")
    events = shown(tell(assembler(), [], End("failed", error=error)))

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "Too long.",
        "param": "input",
    }


def test_failure_may_leave_an_item_unfinished() -> None:
    """Where even closing failed, the response still ends, and repeats finished items only."""
    writer = assembler()
    events = writer.start() + writer.feed(
        [*item("message", "a"), ItemOpened("message"), ItemText("b")]
    )
    writer.conclude(End("failed", error=EngineFailed("Broken.")), USAGE, 1)
    events.append(writer.end())

    assert [one["id"] for one in shown(events)[-1]["response"]["output"]] == ["msg_0"]


# --- what must never happen -------------------------------------------------------------------------


def new() -> Assembler:
    return assembler()


def opened() -> Assembler:
    writer = assembler()
    writer.start()
    return writer


def ended() -> Assembler:
    writer = opened()
    writer.conclude(COMPLETED, USAGE, 1)
    writer.end()
    return writer


CALLS: dict[str, Callable[[Assembler], object]] = {
    "start": lambda writer: writer.start(),
    "feed": lambda writer: writer.feed([]),
    "heartbeat": lambda writer: writer.heartbeat(),
    "conclude": lambda writer: writer.conclude(COMPLETED, USAGE, 1),
    "end": lambda writer: writer.end(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", [new, opened, ended])
def test_every_call_is_legal_in_one_state_only(state: Callable[[], Assembler], call: str) -> None:
    writer = state()
    is_legal = (state is new) if call == "start" else (state is opened)

    if is_legal:
        CALLS[call](writer)
    else:
        with pytest.raises(AssertionError):
            CALLS[call](writer)


@pytest.mark.parametrize(
    "parsed",
    [
        [ItemText("outside")],
        [ItemClosed(id_array())],
        [ItemOpened("message"), ItemOpened("message")],
        [*item("message"), ItemText("behind")],
        [*item("message"), ItemClosed(id_array())],
        [TurnClosed(TAIL), ItemText("sealed")],
    ],
)
def test_words_outside_of_an_item_are_a_bug_of_ours(parsed: list[Parsed]) -> None:
    with pytest.raises(AssertionError):
        opened().feed(parsed)


@pytest.mark.parametrize("end", [COMPLETED, End("incomplete", reason="max_output_tokens")])
def test_turn_that_did_not_fail_leaves_no_item_open(end: End) -> None:
    writer = opened()
    writer.feed([ItemOpened("message")])

    with pytest.raises(AssertionError):
        writer.conclude(end, USAGE, 1)


def test_call_of_our_own_tool_is_done_when_the_tool_is() -> None:
    writer = assembler()
    writer.start()
    parsed = [*item("mcp", "{}", namespace="own"), *item("message", "Hm.")]
    told = shown(writer.feed(parsed))

    assert [one["type"] for one in told if one["output_index"] == 0] == [
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
    ]
    assert not writer.is_at_boundary, "a steer waits for the tool"
    call = writer.items[0].value
    assert isinstance(call, McpCall)
    error = error_of("http_error", "no", 500)
    failed = shown(writer.finish(as_item(replace(call, status="failed", error=error))))
    assert [one["type"] for one in failed] == [
        "response.mcp_call.failed",
        "response.output_item.done",
    ]
    assert failed[1]["output_index"] == 0
    assert writer.is_at_boundary


def test_what_nobody_waits_for_is_closed() -> None:
    writer = assembler()
    events = writer.start()
    events += writer.begin(as_item(McpListTools(id="mcpl_1", server_label="own", tools=[])))
    events += writer.feed([*item("mcp", "{}", namespace="own"), TurnClosed(TAIL)])
    events += writer.abandon()
    assert writer.abandon() == []
    writer.conclude(End("cancelled"), USAGE, 1_700_000_001)

    response = check_turn(shown([*events, writer.end()]))

    assert "ended before" in response["output"][0]["error"]
    assert response["output"][1]["status"] == "incomplete"
    assert [len(ids) for ids in writer.ids] == [0, 1]


def test_whole_message_cites_and_other_texts_do_not() -> None:
    writer = assembler()
    writer.cite = lambda text: [Raw(b'{"type":"url_citation","title":"%b"}' % text.encode())]

    events = shown(tell(writer, [*item("reasoning", "why"), *item("message", "on", "e")]))

    (added,) = [one for one in events if one["type"].endswith("annotation.added")]
    (reasoning, message) = events[-1]["response"]["output"]
    assert added["annotation"] == {"type": "url_citation", "title": "one"}
    assert message["content"][0]["annotations"] == [added["annotation"]]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
