"""Events: every event of the contract has its type, its number and its fields."""

from __future__ import annotations

import json

import msgspec
import pytest

from segue.errors import InvalidRequest, TooMany
from segue.wire.codec import (
    DeltaTemplate,
    encode_error_body,
    encode_error_event,
    encode_event,
    lane_suffix,
)
from segue.wire.events import EVENT_TYPES, TERMINAL, Event, OutputTextDelta

# docs/protocol.md 5.1: o = output_index, i = item_id, c = content_index, s = summary_index, L = response.
PLACES = {
    "o": "output_index",
    "i": "item_id",
    "c": "content_index",
    "s": "summary_index",
    "L": "response",
}
TABLE = """
response.created                                L
response.queued                                 L
response.in_progress                            L
response.completed                              L
response.failed                                 L
response.incomplete                             L
response.output_item.added                      o item
response.output_item.done                       o item
response.content_part.added                     i o c part
response.content_part.done                      i o c part
response.output_text.delta                      i o c delta logprobs obfuscation?
response.output_text.done                       i o c text logprobs
response.output_text.annotation.added           i o c annotation_index annotation
response.refusal.delta                          i o c delta
response.refusal.done                           i o c refusal
response.function_call_arguments.delta          i o delta
response.function_call_arguments.done           i o arguments
response.custom_tool_call_input.delta           i o delta
response.custom_tool_call_input.done            i o input
response.reasoning_summary_part.added           i o s part
response.reasoning_summary_part.done            i o s part status?
response.reasoning_summary_text.delta           i o s delta
response.reasoning_summary_text.done            i o s text
response.reasoning_text.delta                   i o c delta
response.reasoning_text.done                    i o c text
response.compaction.compacting                  i o
response.shell_call_command.added               o command_index command
response.shell_call_command.delta               o command_index delta
response.shell_call_command.done                o command_index command
response.shell_call_output_content.delta        i o command_index delta
response.shell_call_output_content.done         i o command_index output
response.web_search_call.in_progress            i o
response.web_search_call.searching              i o
response.web_search_call.completed              i o
response.file_search_call.in_progress           i o
response.file_search_call.searching             i o
response.file_search_call.completed             i o
response.code_interpreter_call.in_progress      i o
response.code_interpreter_call.interpreting     i o
response.code_interpreter_call.completed        i o
response.code_interpreter_call_code.delta       i o delta
response.code_interpreter_call_code.done        i o code
response.image_generation_call.in_progress      i o
response.image_generation_call.generating       i o
response.image_generation_call.partial_image    i o partial_image_index partial_image_b64
response.image_generation_call.completed        i o
response.mcp_list_tools.in_progress             i o
response.mcp_list_tools.completed               i o
response.mcp_list_tools.failed                  i o
response.mcp_call.in_progress                   i o
response.mcp_call.completed                     i o
response.mcp_call.failed                        i o
response.mcp_call_arguments.delta               i o delta
response.mcp_call_arguments.done                i o arguments
response.steer.accepted                         steer
response.steer.pending                          steer required_input reason?
response.steer.failed                           steer error
response.done                                   response_id required_input
error                                           status error retry_after?
"""
ROWS = {name: fields for name, *fields in (line.split() for line in TABLE.strip().splitlines())}
KINDS = {str(kind.__struct_config__.tag): kind for kind in EVENT_TYPES}


def test_every_event_of_the_contract_is_known() -> None:
    assert set(KINDS) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_event_has_the_fields_of_the_contract(name: str) -> None:
    fields = {field.encode_name: field.required for field in msgspec.structs.fields(KINDS[name])}

    wanted = {"sequence_number": True}
    for field in ROWS[name]:
        wanted[PLACES.get(field, field.rstrip("?"))] = not field.endswith("?")
    assert fields == wanted


def test_terminal_events_are_three() -> None:
    assert {"response.completed", "response.failed", "response.incomplete"} == TERMINAL
    assert Event("response.failed", 3, b"").is_terminal
    assert not Event("response.output_item.done", 3, b"").is_terminal


@pytest.mark.parametrize("text", ["", "Hel", 'q"\\\n\t\0', "漢😀", "\u2028", "</script>"])
def test_delta_from_a_template_equals_the_typed_event(text: str) -> None:
    template = DeltaTemplate(
        "response.output_text.delta",
        {"item_id": "msg_1", "output_index": 2, "content_index": 0, "logprobs": []},
    )
    typed = OutputTextDelta(
        sequence_number=7, item_id="msg_1", output_index=2, content_index=0, delta=text, logprobs=[]
    )

    event = template.event(7, text)

    assert (event.type, event.number) == ("response.output_text.delta", 7)
    assert json.loads(event.data) == json.loads(encode_event(typed).data)


def test_event_of_a_named_lane_carries_its_name() -> None:
    typed = OutputTextDelta(
        sequence_number=1, item_id="m", output_index=0, content_index=0, delta="x", logprobs=[]
    )
    bare = encode_event(typed).data

    named = bare[:-1] + lane_suffix("a.b-c_1")

    assert json.loads(named) == {**json.loads(bare), "stream_id": "a.b-c_1"}


def test_error_event_is_nested_with_status_code_and_number() -> None:
    """A flat error, or one without a status, hangs some clients for minutes (docs/protocol.md 6.8)."""
    error = InvalidRequest("No.", code="odd", param="input")

    assert json.loads(encode_error_event(error)) == {
        "type": "error",
        "sequence_number": 0,
        "status": 400,
        "error": {
            "message": "No.",
            "type": "invalid_request_error",
            "param": "input",
            "code": "odd",
        },
    }
    assert json.loads(encode_error_event(error, "main"))["stream_id"] == "main"


def test_error_body_has_its_four_keys() -> None:
    assert json.loads(encode_error_body(TooMany("Later."))) == {
        "error": {
            "message": "Later.",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }


def test_error_for_load_says_when_to_come_back() -> None:
    assert json.loads(encode_error_event(TooMany("Later.", wait_s=2.5)))["retry_after"] == 2.5
