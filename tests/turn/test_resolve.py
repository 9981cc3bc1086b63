"""A request bound to its parent: what is inherited, what is paired, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.errors import ApiError, InvalidRequest
from segue.seams.history import Turn
from segue.turn.plan import Given, Resolved
from segue.turn.resolve import count_model_turns, is_continuable, pair_calls, resolve
from segue.wire.codec import decode_create, decode_item
from segue.wire.items import Call, Item
from segue.wire.tools import NO_TOOLS
from tests.contracts.turns import make_turn

F = {"type": "function", "name": "f"}


def bind(parent: Turn | None = None, **fields: Any) -> Resolved:
    """Resolve a request as it would arrive; the model is named unless it is given as None."""
    create = decode_create(json.dumps({"model": "m", "input": "hi"} | fields).encode())
    given: list[Item] = []
    if isinstance(create.input, list):
        given = [decode_item(raw, f"input[{n}]") for n, raw in enumerate(create.input)]
    elif create.input is not None:
        given = items({"role": "user", "content": create.input})
    return resolve(create, Given(tuple(given)), parent)


def items(*values: dict[str, Any]) -> list[Item]:
    return [decode_item(json.dumps(value).encode(), "input[0]") for value in values]


def call(call_id: str, kind: str = "function", **more: Any) -> dict[str, Any]:
    match kind:
        case "function":
            return {
                "type": "function_call",
                "call_id": call_id,
                "name": "f",
                "arguments": "",
                **more,
            }
        case "custom":
            return {
                "type": "custom_tool_call",
                "call_id": call_id,
                "name": "f",
                "input": "",
                **more,
            }
        case _:
            return {
                "type": f"{kind}_call",
                "call_id": call_id,
                "action": {},
                "operation": {},
                **more,
            }


def output(call_id: str | None, kind: str = "function", **more: Any) -> dict[str, Any]:
    tag = {"function": "function_call", "custom": "custom_tool_call"}.get(kind, f"{kind}_call")
    body = {"type": f"{tag}_output", "output": [] if kind == "shell" else "", **more}
    return body if call_id is None else {**body, "call_id": call_id}


def owing(*calls: Call) -> Turn:
    return replace(make_turn("resp_1"), open_calls={one.call_id: one for one in calls})


# --- what stands on the parent, and what does not ---------------------------------------------------


def test_settings_are_not_inherited_except_the_model() -> None:
    parent = make_turn(
        "resp_1", tools=b'[{"type":"function","name":"f"}]', instructions=b'"Be brief."'
    )

    resolved = bind(parent, model=None)

    assert resolved.model == parent.response.model
    assert resolved.head.instructions is None
    assert resolved.head.tools is NO_TOOLS


def test_head_that_is_kept_does_not_keep_the_body_of_its_request() -> None:
    format = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    asked = {"model": "m", "input": "x" * 1_000, "text": {"format": format}}
    body = json.dumps(asked).encode()
    before = sys.getrefcount(body)
    create = decode_create(body)
    assert sys.getrefcount(body) > before
    resolved = resolve(create, Given(tuple(items({"role": "user", "content": "x"}))), None)
    head = resolved.head
    del create, resolved
    assert head.text.format is not None
    assert sys.getrefcount(body) == before


def test_named_model_wins_over_the_parents() -> None:
    assert bind(make_turn("resp_1"), model="other").model == "other"


def test_first_turn_must_name_a_model() -> None:
    with pytest.raises(InvalidRequest) as told:
        bind(model=None)

    assert told.value.param == "model"


def test_unchanged_tools_are_taken_from_the_parent() -> None:
    first = bind(tools=[F])
    assert first.tool_decodes == 1
    parent = replace(make_turn("resp_1"), tools=first.head.tools)

    second = bind(parent, tools=[F])

    assert second.tool_decodes == 0
    assert second.head.tools is first.head.tools
    assert bind(parent, tools=[F, {**F, "name": "g"}]).tool_decodes == 1


@pytest.mark.parametrize("status", ["failed", "cancelled", "in_progress", "queued"])
def test_turn_that_did_not_end_by_the_model_cannot_be_continued(status: Any) -> None:
    parent = make_turn("resp_1", status=status)

    with pytest.raises(InvalidRequest) as told:
        bind(parent)

    assert not is_continuable(parent)
    assert told.value.code == "previous_response_not_found"
    assert told.value.message == "Previous response with id 'resp_1' not found."


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_turn_that_ended_by_the_model_can_be_continued(status: Any) -> None:
    assert is_continuable(make_turn("resp_1", status=status))


def test_turn_that_lost_an_ancestor_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest) as told:
        bind(replace(make_turn("resp_1"), is_whole=False))

    assert told.value.code == "previous_response_not_found"


@pytest.mark.parametrize("nothing", [[], None])
def test_empty_input_needs_a_parent_or_a_warm_up(nothing: Any) -> None:
    assert bind(make_turn("resp_1"), input=nothing).given == ()
    assert bind(input=nothing, generate=False).given == ()
    with pytest.raises(InvalidRequest) as told:
        bind(input=nothing)

    assert told.value.param == "input"


# --- pairing of calls and outputs: docs/protocol.md 9 row 18, 4.4 ---------------------------------------


@pytest.mark.parametrize(
    "kind, words", [("function", "function call"), ("custom", "custom tool call"), ("shell", "shell call")]
)  # fmt: skip
def test_pending_call_without_its_output_is_refused(kind: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        bind(owing(Call("call_1", kind)))

    assert told.value.message == f"No tool output found for {words} call_1."
    assert told.value.param == "input"
    assert told.value.code


@pytest.mark.parametrize(
    "given, message",
    [
        ([output("call_9")], "No tool call found for function call output with call_id call_9."),
        (
            [output("call_9", "custom")],
            "No tool call found for custom tool call output with call_id call_9.",
        ),
        # The right id, but of another kind of call.
        (
            [output("call_1", "custom")],
            "No tool call found for custom tool call output with call_id call_1.",
        ),
        (
            [output("call_1"), output("call_1")],
            "No tool call found for function call output with call_id call_1.",
        ),
    ],
)
def test_output_without_its_call_is_refused(given: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        bind(owing(Call("call_1", "function")), input=given)

    assert told.value.message == message
    assert told.value.param == "input"


def test_output_before_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        bind(input=[output("call_1"), call("call_1")])


def test_parallel_calls_are_all_to_be_answered() -> None:
    parent = owing(Call("a", "function"), Call("b", "custom"), Call("c", "shell"))
    answers = [output("c", "shell"), output("a"), output("b", "custom")]

    assert bind(parent, input=answers).open_calls == {}
    with pytest.raises(InvalidRequest):
        bind(parent, input=answers[:2])


def test_async_call_may_stay_open_and_be_answered_later() -> None:
    late = Call("late", "function", True)
    parent = owing(late, Call("now", "function"))

    resolved = bind(parent, input=[output("now")])

    assert resolved.open_calls == {"late": late}
    assert bind(replace(parent, open_calls=resolved.open_calls)).open_calls == {"late": late}
    later = replace(parent, open_calls=resolved.open_calls)
    assert bind(later, input=[output("late")]).open_calls == {}


def test_output_that_names_no_call_means_the_only_one() -> None:
    assert bind(owing(Call("a", "function")), input=[output(None)]).open_calls == {}
    with pytest.raises(InvalidRequest):
        bind(
            owing(Call("a", "function"), Call("b", "function")), input=[output(None), output(None)]
        )


def test_whole_history_in_one_request_is_paired_in_itself() -> None:
    history = [
        {"role": "user", "content": "go"},
        call("a"),
        call("b", "custom"),
        output("b", "custom"),
        output("a"),
        call("c", **{"async": True}),
        {"role": "assistant", "content": "meanwhile"},
    ]

    assert list(bind(input=history).open_calls) == ["c"]


calls = st.builds(
    Call, st.sampled_from("abcdef"), st.sampled_from(["function", "custom"]), st.booleans()
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    open_calls=st.lists(calls, max_size=3, unique_by=lambda one: one.call_id),
    steps=st.lists(
        st.tuples(st.sampled_from(["call", "output", "nameless output"]), calls), max_size=8
    ),
)
def test_pairing_agrees_with_a_list_of_debts(
    open_calls: list[Call], steps: list[tuple[str, Call]]
) -> None:
    debts = {one.call_id: one for one in open_calls}
    given = []
    is_fine = True
    for step, one in steps:
        if step == "call":
            given.append(call(one.call_id, one.kind, **{"async": one.is_optional}))
            debts[one.call_id] = one
        elif step == "nameless output":
            given.append(output(None))
            owed = [debt.call_id for debt in debts.values() if debt.kind == "function"]
            is_fine = is_fine and len(owed) == 1
            for name in owed:
                del debts[name]
        else:
            given.append(output(one.call_id, one.kind))
            is_fine = is_fine and debts.get(one.call_id, ("", ""))[1] == one.kind
            debts.pop(one.call_id, None)
    is_fine = is_fine and all(one.is_optional for one in debts.values())
    before = {one.call_id: one for one in open_calls}

    assert outcome(before, items(*given)) == (debts if is_fine else None)
    assert before == {one.call_id: one for one in open_calls}


def outcome(open_calls: dict[str, Call], given: Sequence[Item]) -> dict[str, Call] | None:
    try:
        return pair_calls(open_calls, given)
    except InvalidRequest:
        return None


# --- how often the model has spoken -----------------------------------------------------------------

USER = {"role": "user", "content": ""}
SAID = {"role": "assistant", "content": ""}
THOUGHT = {"type": "reasoning", "summary": []}


@pytest.mark.parametrize(
    "given, turns",
    [
        ([], 0),
        ([USER], 0),
        ([USER, SAID], 1),
        ([USER, SAID, USER, SAID], 2),
        ([USER, THOUGHT, SAID, call("a"), call("b")], 1),
        ([USER, THOUGHT, call("a"), output("a"), SAID], 2),
        ([SAID, SAID], 1),
    ],
)
def test_neighbours_that_the_model_wrote_are_one_turn(
    given: list[dict[str, Any]], turns: int
) -> None:
    assert count_model_turns(items(*given)) == turns


def test_turns_of_the_parent_are_counted_in() -> None:
    parent = replace(make_turn("resp_1"), model_turns=4)

    assert bind(parent, input=[SAID, USER]).model_turns == 5


# --- what is refused in words -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"background": True, "store": False}, "unsupported_value", "store"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        (
            {"context_management": [{"type": "clearing"}]},
            "invalid_value",
            "context_management[0].type",
        ),
        (
            {"context_management": [{"type": "compaction", "compact_threshold": 999}]},
            "invalid_value",
            "context_management[0].compact_threshold",
        ),
        ({"input": [{"type": "compaction_trigger"}, USER]}, "invalid_value", "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "unsupported_value",
            "input[0]",
        ),
        (
            {"input": [call("a"), output("a", output=[{"type": "input_image", "file_id": "f"}])]},
            "unsupported_value",
            "input[1]",
        ),
        (
            {
                "input": [
                    call("a", "custom"),
                    output("a", "custom", output=[{"type": "input_image", "file_id": "f"}]),
                ]
            },
            "unsupported_value",
            "input[1]",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(ApiError) as told:
        bind(**fields)

    assert (told.value.code, told.value.param) == (code, param)


@pytest.mark.parametrize("fields", [{"background": False}, {"context_management": None}])
def test_asking_for_nothing_special_is_fine(fields: dict[str, Any]) -> None:
    bind(**fields)


LATER = {"type": "function", "name": "later", "defer_loading": True}
CRM = {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "inner"}]}


@pytest.mark.parametrize(
    "choice, tools",
    [
        ("auto", []),
        ("none", []),
        ("required", [F]),
        ({"type": "function", "name": "f"}, [F]),
        ({"type": "function", "name": "inner"}, [CRM]),
        ({"type": "custom", "name": "c"}, [{"type": "custom", "name": "c"}]),
        ({"type": "shell"}, [{"type": "shell"}]),
        ({"type": "shell"}, [{"type": "shell", "environment": {"type": "local"}}]),
        ({"type": "apply_patch"}, [{"type": "apply_patch"}]),
        ({"type": "function", "name": "later"}, [LATER, {"type": "tool_search"}]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}, [{"type": "shell"}]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [F]}, [F]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, [F]),
        ({"type": "allowed_tools", "mode": "required", "tools": [F]}, [F]),
    ],
)  # fmt: skip
def test_choice_that_can_be_met_is_taken(choice: Any, tools: list[Any]) -> None:
    bind(tool_choice=choice, tools=tools)


@pytest.mark.parametrize(
    "choice, tools",
    [
        ("required", []),
        ("required", [{"type": "web_search"}]),
        ({"type": "function", "name": "g"}, [F]),
        ({"type": "function"}, [F]),
        ({"type": "custom", "name": "c"}, []),
        ({"type": "web_search"}, [{"type": "web_search"}]),
        ({"type": "shell"}, [F]),
        ({"type": "shell"}, [{"type": "shell", "environment": {"type": "container_auto"}}]),
        ({"type": "apply_patch"}, [{"type": "custom", "name": "apply_patch"}]),
        ({"type": "computer"}, [{"type": "computer"}]),
        ({"type": "mcp", "server_label": "s"}, [F]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
            [F],
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, [F]),
    ],
)  # fmt: skip
def test_choice_that_cannot_be_met_is_refused_rather_than_missed(
    choice: Any, tools: list[Any]
) -> None:
    with pytest.raises(InvalidRequest) as told:
        bind(tool_choice=choice, tools=tools)

    assert told.value.param == "tool_choice"


@pytest.mark.parametrize("tools", [[7], ["f"], [{}], [{"type": "function", "name": 7}]])
def test_allowed_tools_are_checked_before_anything_starts(tools: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as told:
        bind(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": tools}, tools=[F])

    assert told.value.param is not None
    assert told.value.param.startswith("tool_choice.tools[0]")


@pytest.mark.parametrize(
    "fields, generates",
    [
        ({}, True),
        ({"generate": True}, True),
        ({"generate": None}, True),
        ({"generate": False}, False),
        ({"prompt_cache_options": {"prewarm": True}}, False),
        ({"prompt_cache_options": {"prewarm": True}, "generate": True}, False),
        ({"prompt_cache_options": {"prewarm": False}}, True),
    ],
)
def test_warm_up_is_asked_for_in_two_ways(fields: dict[str, object], generates: bool) -> None:
    assert bind(**fields).create.is_warm_up is not generates
