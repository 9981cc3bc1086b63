"""One row for each item type: none is missing, none is half, and the look-ups say what they should."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, fields, replace
from typing import Any, get_args

import pytest
from msgspec import Raw

from segue.wire import items
from segue.wire.codec import decode_item, encode
from segue.wire.drafts import REASONING, Draft, Streamed, TextEvents
from segue.wire.items import (
    Body,
    Compaction,
    FunctionCall,
    HostedOutput,
    ItemValue,
    McpListTools,
    Message,
    Required,
)
from segue.wire.kinds import (
    CALL_WORDS,
    KINDS,
    NAMED,
    ROWS,
    CallPairing,
    ItemKind,
    OutputPairing,
    approved_by,
    call_id_of,
    called,
    hosted_call_of,
    is_hosted_result,
    is_model_written,
    is_output,
    prefix_of,
    required_by,
    shown_as,
    table,
)
from segue.wire.tools import BUILTINS

STRUCTS = get_args(ItemValue)


def value_of(kind: str, **given: object) -> ItemValue:
    return decode_item(encode({"type": kind, **given}), "item").value


def mcp_call(**given: object) -> ItemValue:
    return value_of("mcp_call", server_label="crm", name="find", arguments="{}", **given)


class MadeUp(Body, tag="made_up", frozen=True, kw_only=True):
    """An item type that does not exist."""


def test_every_item_type_has_one_row() -> None:
    assert Counter(kind.struct for kind in ROWS) == Counter(STRUCTS)


@pytest.mark.parametrize("record", [ItemKind, CallPairing, OutputPairing])
def test_no_fact_of_a_row_has_a_default(record: Any) -> None:
    assert all(one.default is one.default_factory is MISSING for one in fields(record))
    assert Streamed.__struct_defaults__ == ()


def test_row_that_lacks_a_fact_cannot_be_made() -> None:
    whole: dict[str, Any] = {one.name: getattr(ROWS[0], one.name) for one in fields(ItemKind)}

    assert ItemKind(**whole) == ROWS[0]
    for name in whole:
        with pytest.raises(TypeError, match=name):
            ItemKind(**{key: fact for key, fact in whole.items() if key != name})


def test_item_type_without_a_row_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match=r"without a row.*MadeUp"):
        table(ROWS, [*STRUCTS, MadeUp])


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"name": "function"}, "names"),
        ({"prefix": "fc"}, "prefixes"),
        ({"pairing": OutputPairing("dance", call_id_of, is_output)}, "outputs without their call"),
        (
            {
                "pairing": CallPairing(
                    call_id_of, lambda _: "client", lambda _: Required(type="o"), called
                )
            },
            "owes an output",
        ),
    ],
)
def test_rows_that_contradict_each_other_are_an_error_at_import(
    facts: dict[str, Any], words: str
) -> None:
    plain: dict[str, Any] = {"struct": MadeUp, "name": "made_up", "prefix": "made"}
    made_up = replace(KINDS[Compaction], **{**plain, **facts})

    with pytest.raises(TypeError, match=words):
        table([*ROWS, made_up], [*STRUCTS, MadeUp])


def test_whatever_a_model_may_open_can_be_built() -> None:
    names = {"message", "reasoning", "function", "custom", *BUILTINS, "mcp_approval"}

    assert {kind.name for kind in ROWS if kind.streamed is not None} == names
    for kind in ROWS:
        if kind.streamed is not None:
            built = kind.streamed.build(Draft(id="i", call_id="c", name="search", text="{}"))
            assert type(built) is kind.struct
            assert kind.prefix


@pytest.mark.parametrize("view", ["text", "summary", "hidden"])
def test_reasoning_has_a_text_unless_it_is_hidden(view: str) -> None:
    assert isinstance(REASONING[view].progress, TextEvents) == (view != "hidden")


def test_prefixes_of_our_ids() -> None:
    assert {kind.type: kind.prefix for kind in ROWS if kind.prefix} == {
        "message": "msg",
        "reasoning": "rs",
        "function_call": "fc",
        "custom_tool_call": "ctc",
        "shell_call": "sh",
        "shell_call_output": "sho",
        "local_shell_call": "lsh",
        "apply_patch_call": "apc",
        "tool_search_call": "tsc",
        "tool_search_output": "tso",
        "mcp_call": "mcp",
        "mcp_approval_request": "mcpr",
        "mcp_list_tools": "mcpl",
        "web_search_call": "ws",
        "code_interpreter_call": "ci",
        "compaction": "cmp",
    }
    assert prefix_of(McpListTools) == "mcpl"
    with pytest.raises(AssertionError):
        prefix_of(HostedOutput)


def test_words_of_the_pairing_errors() -> None:
    assert CALL_WORDS == {
        "function": ("function call", "function call output"),
        "custom": ("custom tool call", "custom tool call output"),
        "computer": ("computer call", "computer call output"),
        "shell": ("shell call", "shell call output"),
        "local_shell": ("local shell call", "local shell call output"),
        "apply_patch": ("apply patch call", "apply patch call output"),
        "tool_search": ("tool search call", "tool search output"),
        "mcp_approval": ("MCP approval request", "MCP approval response"),
    }


ACTION = {"type": "search", "query": "q"}


@pytest.mark.parametrize(
    "value, shown, is_written, hosted, joined, name",
    [
        (Message(role="user", content=""), "user", False, None, "", ""),
        (Message(role="assistant", content=""), "talk", True, None, "", ""),
        (Message(role="developer", content=""), "system", False, None, "", ""),
        (value_of("reasoning"), "think", True, None, "", ""),
        (
            FunctionCall(call_id="c", name="f", arguments="", namespace="n"),
            "call", True, None, "c", "n.f",
        ),
        (mcp_call(id="m"), "call", True, "m", "m", "crm.find"),
        (mcp_call(id="m", approval_request_id="r"), "nothing", False, None, "", "crm.find"),
        (value_of("web_search_call", id="w", action=ACTION), "call", True, "w", "w", "web.search"),
        (value_of("web_search_call", id="w"), "nothing", True, "w", "w", ""),
        (HostedOutput(call_id="m", output=""), "response", False, None, "m", ""),
        (
            value_of("tool_search_call", id="tsc_1", execution="server"),
            "call", True, "search_1", "search_1", "",
        ),
        (
            value_of("tool_search_output", id="tso_1", execution="server", tools=[]),
            "response", False, None, "search_1", "",
        ),
        (
            value_of("mcp_approval_response", approval_request_id="r", approve=True),
            "nothing", False, None, "r", "",
        ),
        (value_of("additional_tools", tools=[]), "tools", False, None, "", ""),
        (value_of("program", code="", call_id="p"), "call", True, None, "p", ""),
        (Compaction(encrypted_content=""), "system", False, None, "", ""),
    ],
)  # fmt: skip
def test_facts_of_an_item(
    value: ItemValue, shown: str, is_written: bool, hosted: str | None, joined: str, name: str
) -> None:
    assert shown_as(value) == shown
    assert is_model_written(value) is is_written
    assert hosted_call_of(value) == hosted
    assert call_id_of(value) == joined
    assert called(value) == name


@pytest.mark.parametrize(
    "value, required",
    [
        (
            FunctionCall(call_id="c", name="f", arguments=""),
            Required(type="function_call_output", call_id="c", name="f"),
        ),
        (FunctionCall(call_id="c", name="f", arguments="", is_async=True), None),
        (FunctionCall(call_id="c", name="f", arguments="", status="incomplete"), None),
        (
            value_of("custom_tool_call", call_id="c", name="f", input=""),
            Required(type="custom_tool_call_output", call_id="c"),
        ),
        (
            value_of("computer_call", call_id="c"),
            Required(type="computer_call_output", call_id="c"),
        ),
        (
            value_of("tool_search_call", call_id="c"),
            Required(type="tool_search_output", call_id="c", execution="client"),
        ),
        (value_of("tool_search_call", id="tsc_1", execution="server"), None),
        (
            value_of("mcp_approval_request", id="r", server_label="", name="", arguments=""),
            Required(type="mcp_approval_response", approval_request_id="r"),
        ),
        (mcp_call(id="m"), None),
    ],
)
def test_outline_of_what_the_client_owes(value: ItemValue, required: Required | None) -> None:
    assert required_by(value) == required


@pytest.mark.parametrize(
    "output, is_result",
    [
        ({"type": "mcp_call", "status": "completed"}, True),
        ({"type": "mcp_call", "status": "failed"}, True),
        ({"type": "mcp_call", "status": "incomplete"}, False),
        ({"type": "web_search_call", "status": "completed"}, True),
        ({"type": "tool_search_output", "execution": "server", "status": "completed"}, True),
        ({"type": "tool_search_output", "execution": "client", "status": "completed"}, False),
        ({"type": "tool_search_call", "execution": "server", "status": "completed"}, False),
        ({"type": "mcp_list_tools"}, False),
        ({"type": "shell_call_output", "status": "completed"}, True),
        ({"type": "code_interpreter_call", "status": "completed"}, True),
        ({"type": "function_call", "status": "completed"}, False),
        ({"type": "message", "status": "completed"}, False),
        ({"type": "of_tomorrow", "status": "completed"}, False),
    ],
)
def test_usage_counts_what_our_own_tools_have_answered(
    output: dict[str, str], is_result: bool
) -> None:
    assert is_hosted_result(Raw(encode(output))) is is_result


def test_approved_call_was_made_in_the_request_for_approval() -> None:
    assert approved_by(mcp_call(id="m", approval_request_id="r")) == "r"
    assert approved_by(mcp_call(id="m")) is None
    response = value_of("mcp_approval_response", approval_request_id="r", approve=True)
    assert approved_by(response) is None


def test_row_is_found_by_struct_and_by_name() -> None:
    assert KINDS[FunctionCall] is NAMED["function"]
    assert NAMED["mcp_approval"].type == "mcp_approval_request"


def test_every_struct_of_an_item_is_in_the_union() -> None:
    named = vars(items).values()
    structs = {one for one in named if isinstance(one, type) and issubclass(one, Body)}

    assert structs - {Body} - set(get_args(ItemValue)) == set()
