"""Items: every type of the contract is understood, checked, and kept to the byte."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from segue.errors import InvalidRequest
from segue.wire.codec import ITEM_TYPES, as_item, decode_item, listed_item, user_message
from segue.wire.items import (
    Call,
    CallOutput,
    FunctionCall,
    FunctionCallOutput,
    HostedOutput,
    InputFile,
    InputImage,
    InputText,
    ItemReference,
    ItemValue,
    Message,
    OutputText,
    Reasoning,
)
from segue.wire.kinds import CALL_WORDS, answer_of, call_of, is_model_written

# One example or more of every type in docs/protocol.md 3, in the full output form where it has one, with odd spacing
# and fields that we do not know.
EXAMPLES = [
    # 3.1 messages
    '{"role":"user","content":"hi"}',
    '{"content":"hello","role":"user"}',
    '{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}',
    '{"type":"message","role":"assistant","phase":"final_answer","content":"old answer"}',
    '{"id":"msg_1","type":"message","status":"completed","role":"assistant","phase":"commentary",'
    ' "content":[{"type":"output_text","text":"…","annotations":[{"type":"url_citation",'
    '"start_index":0,"end_index":1,"title":"t","url":"u"}],"logprobs":[]}]}',
    '{"role":"assistant","content":[{"type":"output_text","text":"without annotations"}]}',
    '{"role":"assistant","content":[{"type":"refusal","refusal":"No."}]}',
    '{"role":"developer","content":[]}',
    '{"role":"system","content":"","future":{"deep":[1,2.50,1e3]}}',
    '{"role":"user","content":[{"type":"input_image","detail":"original","image_url":"data:,"}]}',
    '{"role":"user","content":[{"type":"input_image","detail":null,"file_id":"file_1"}]}',
    '{"role":"user","content":[{"type":"input_file","file_data":"data:,","filename":"a.pdf"}]}',
    '{"role":"user","content":[{"type":"input_file","file_url":"https://example.com/a"}]}',
    '{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"","format":"mp3"}}]}',
    '{"role":"user","content":[{"type":"input_audio","audio_url":"https://example.com/a"}]}',
    '{"role":"user","content":[{"type":"input_text","text":"x",'
    '"prompt_cache_breakpoint":{"mode":"explicit","ttl":"30m"}}]}',
    # 3.2 function calls
    '{"id":"fc_1","type":"function_call","status":"completed","call_id":"call_1",'
    '"name":"get_weather","arguments":"{\\"city\\":\\"Paris\\"}"}',
    '{"type":"function_call","call_id":"c","name":"f","arguments":"not json","namespace":"crm",'
    '"async":true,"caller":{"type":"direct"}}',
    '{"type":"function_call_output","call_id":"call_1","output":"sunny"}',
    '{"type":"function_call_output","call_id":"call_1","output":[{"type":"input_text","text":"…"},'
    '{"type":"input_image","image_url":"https://example.com/a.png","detail":"auto"}]}',
    '{"type":"function_call_output","output":"","name":"f","namespace":"crm"}',
    # 3.3 custom calls
    '{"id":"ctc_1","type":"custom_tool_call","status":"completed","call_id":"call_2",'
    '"name":"apply_patch","input":"*** Begin Patch…"}',
    '{"type":"custom_tool_call_output","call_id":"call_2","output":"ok"}',
    '{"type":"custom_tool_call_output","call_id":"call_2","output":[]}',
    # 3.4 reasoning
    '{"id":"rs_1","type":"reasoning","summary":[{"type":"summary_text","text":"…"}],'
    '"content":[{"type":"reasoning_text","text":"…"}],"encrypted_content":"x","status":"completed"}',
    '{"type":"reasoning","summary":[],"encrypted_content":null,"content":null}',
    # 3.5 built-in tools
    '{"type":"web_search_call","id":"ws_1","status":"searching","action":{"type":"search",'
    '"query":"q","queries":["q"],"sources":[{"type":"url","url":"u"}]}}',
    '{"type":"web_search_call","id":"ws_1","action":{"type":"find_in_page","pattern":"p","url":"u"}}',
    '{"type":"file_search_call","id":"fs_1","queries":["q"],"status":"completed","results":'
    '[{"file_id":"f","filename":"n","score":0.10,"text":"t","attributes":{}}]}',
    '{"type":"code_interpreter_call","id":"ci_1","code":null,"container_id":"c","outputs":null,'
    '"status":"interpreting"}',
    '{"type":"image_generation_call","id":"ig_1","result":null,"status":"generating","size":"1x1"}',
    '{"type":"computer_call","id":"cu_1","call_id":"c","action":{"type":"click","x":1,"y":2},'
    '"pending_safety_checks":[],"status":"completed"}',
    '{"type":"computer_call_output","call_id":"c","output":{"type":"computer_screenshot",'
    '"image_url":"data:,"},"acknowledged_safety_checks":null}',
    '{"type":"mcp_list_tools","id":"l","server_label":"s","tools":[{"name":"n","input_schema":{}}],'
    '"error":"e"}',
    '{"type":"mcp_call","id":"m","server_label":"s","name":"n","arguments":"{}","output":null,'
    '"error":{"type":"http_error","code":500,"message":"m"},"status":"calling"}',
    '{"type":"mcp_approval_request","id":"a","server_label":"s","name":"n","arguments":"{}"}',
    '{"type":"mcp_approval_response","approval_request_id":"a","approve":false,"reason":null}',
    '{"type":"shell_call","id":"s","call_id":"c","action":{"commands":["ls"],"timeout_ms":1},'
    '"environment":{"type":"local"},"status":"in_progress"}',
    '{"type":"shell_call_output","call_id":"c","max_output_length":null,"output":[{"stdout":"o",'
    '"stderr":"","outcome":{"type":"exit","exit_code":0}}]}',
    '{"type":"local_shell_call","id":"l","call_id":"c","status":"completed","action":'
    '{"type":"exec","command":["ls"],"env":{}}}',
    '{"type":"local_shell_call_output","id":"c","output":"{}"}',
    '{"type":"apply_patch_call","call_id":"c","operation":{"type":"delete_file","path":"p"},'
    '"status":"completed"}',
    '{"type":"apply_patch_call_output","call_id":"c","status":"failed","output":"no"}',
    '{"type":"tool_search_call","id":"t","call_id":null,"execution":"server","arguments":{"a":[]},'
    '"status":"completed"}',
    '{"type":"tool_search_output","call_id":"c","execution":"client","status":"completed",'
    '"tools":[{"type":"function","name":"f"}]}',
    '{"type":"additional_tools","role":"developer","tools":[{"type":"custom","name":"exec"}]}',
    '{"type":"configuration_update","reasoning":{"effort":"low"},"text":{"format":{"type":"text"}}}',
    '{"type":"program","id":"p","call_id":"c","code":"f()","fingerprint":"x"}',
    '{"type":"program_output","call_id":"c","result":{"a":1},"status":"completed"}',
    '{"id":"cmp_001","type":"compaction","encrypted_content":"opaque"}',
    '{"type":"compaction_summary","encrypted_content":"opaque"}',
    '{"type":"compaction_trigger"}',
    '{"type":"item_reference","id":"msg_1"}',
    '{"id":"msg_1"}',
    '{ "id" : "msg_1" , "type" : null }',
]  # fmt: skip


def decode(raw: str) -> ItemValue:
    return decode_item(raw.encode(), "input[0]").value


def test_examples_cover_every_type() -> None:
    named = {type(decode(raw)) for raw in EXAMPLES}

    # What our own tools told the model is written down by us alone; a client that sends it is refused.
    assert named == set(get_args(ItemValue)) - {HostedOutput}
    assert len(ITEM_TYPES) == len(named)


@pytest.mark.parametrize("raw", EXAMPLES)
def test_item_of_each_type_is_kept_to_the_byte(raw: str) -> None:
    item = decode_item(raw.encode(), "input[0]")

    assert item.raw == raw.encode()


@pytest.mark.parametrize("raw", EXAMPLES)
def test_list_shows_an_item_as_it_came_completed_for_clients(raw: str) -> None:
    """All that was sent is there, numbers as they were written, beside what a list must add."""
    item = decode_item(raw.encode(), "input[0]")

    shown = listed_item(item, item.value.id or "item_0")

    sent: dict[str, Any] = json.loads(raw, parse_float=str, parse_int=str)
    back: dict[str, Any] = json.loads(shown, parse_float=str, parse_int=str)
    assert back.pop("type") == type(item.value).__struct_config__.tag
    assert back.pop("id") == (sent.pop("id", None) or "item_0")
    sent.pop("type", None)
    if "status" in item.value.__struct_fields__:
        assert back.pop("status") == (sent.pop("status", None) or "completed")
    if "content" in sent and isinstance(item.value, Message):
        content, parts = sent.pop("content"), back.pop("content")
        if isinstance(content, str):
            kind = "output_text" if item.value.role == "assistant" else "input_text"
            content = [{"type": kind, "text": content}]
        for one, part in zip(content, parts, strict=True):
            assert {key: value for key, value in one.items() if value} == {
                key: part[key] for key, value in one.items() if value
            }
        assert all("annotations" in part for part in parts if part["type"] == "output_text")
        assert all(part["detail"] for part in parts if part["type"] == "input_image")
    assert back == sent


@pytest.mark.parametrize("raw", [raw for raw in EXAMPLES if '"type":null' not in raw])
def test_item_of_each_type_takes_fields_of_the_future(raw: str) -> None:
    future = raw[:-1] + ',"from_the_future":{"a":[null,1]}}'

    assert decode(future) == decode(raw)


@pytest.mark.parametrize("kind", sorted(ITEM_TYPES))
def test_item_of_our_own_making_reads_back_the_same(kind: str) -> None:
    raw = next(raw for raw in EXAMPLES if type(decode(raw)).__struct_config__.tag == kind)
    value = decode(raw)

    item = as_item(value)

    assert decode(item.raw.decode()) == value
    assert json.loads(item.raw)["type"] == kind


@pytest.mark.parametrize(
    "raw, param",
    [
        ("{}", "input[3].type"),
        ('{"type":null}', "input[3].type"),
        ('{"type":"telepathy"}', "input[3].type"),
        ('{"type":7,"role":"user","content":""}', "input[3].type"),
        ('{"type":["message"]}', "input[3].type"),
        ("[]", "input[3]"),
        ('"hi"', "input[3]"),
        ("null", "input[3]"),
        ("7", "input[3]"),
        ('{"role":"user"}', "input[3]"),
        ('{"role":"robot","content":""}', "input[3].role"),
        ('{"role":7,"content":""}', "input[3].role"),
        ('{"role":"user","content":7}', "input[3].content"),
        ('{"role":"user","content":null}', "input[3].content"),
        ('{"role":"user","content":["text"]}', "input[3].content[0]"),
        ('{"role":"user","content":[{"type":"input_text"}]}', "input[3].content[0]"),
        ('{"role":"user","content":[{"type":"input_text","text":7}]}', "input[3].content[0].text"),
        ('{"role":"user","content":[{"text":"no type"}]}', "input[3].content[0]"),
        ('{"role":"user","content":[{"type":"hologram"}]}', "input[3].content[0].type"),
        ('{"role":"user","content":"","status":"odd"}', "input[3].status"),
        ('{"role":"user","content":"","phase":"odd"}', "input[3].phase"),
        ('{"type":"function_call","call_id":"c","name":"f"}', "input[3]"),
        ('{"type":"function_call","call_id":"c","name":"f","arguments":{}}', "input[3].arguments"),
        ('{"type":"function_call","call_id":1,"name":"f","arguments":""}', "input[3].call_id"),
        ('{"type":"function_call_output","call_id":"c"}', "input[3]"),
        ('{"type":"function_call_output","call_id":"c","output":{}}', "input[3].output"),
        ('{"type":"function_call_output","call_id":{},"output":""}', "input[3].call_id"),
        ('{"type":"custom_tool_call","call_id":"c","name":"f","input":[]}', "input[3].input"),
        ('{"type":"reasoning","summary":"text"}', "input[3].summary"),
        ('{"type":"reasoning","summary":[{"type":"input_text","text":""}]}', "input[3].summary[0].type"),
        ('{"type":"reasoning","summary":[],"encrypted_content":7}', "input[3].encrypted_content"),
        ('{"type":"compaction"}', "input[3]"),
        ('{"type":"mcp_approval_response","approval_request_id":"a","approve":"yes"}', "input[3].approve"),
        ('{"type":"shell_call_output","call_id":"c","output":"text"}', "input[3].output"),
        ('{"type":"tool_search_call","execution":"elsewhere"}', "input[3].execution"),
        ('{"type":"item_reference","id":7}', "input[3].id"),
        ('{"id":7}', "input[3].id"),
    ],
)  # fmt: skip
def test_client_is_told_where_an_item_is_wrong(raw: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        decode_item(raw.encode(), "input[3]")

    assert told.value.param == param
    assert told.value.status == 400
    assert param in told.value.message or told.value.code == "invalid_value"


def test_plain_string_is_a_user_message() -> None:
    text = 'a "quoted"\n\0 😀'
    item = user_message(text)

    assert item.value == Message(role="user", content=[InputText(text=text)])
    assert decode(item.raw.decode()) == item.value


def test_untyped_item_is_a_message_by_its_role_and_a_reference_by_its_id() -> None:
    assert isinstance(decode('{"role":"user","content":"","id":"x"}'), Message)
    assert isinstance(decode('{"id":"x"}'), ItemReference)
    assert isinstance(decode('{"type":null,"role":"user","content":""}'), Message)


def test_item_keeps_no_part_of_its_request_alive() -> None:
    """A slice of the body would hold the whole body in memory."""
    body = b'{"input":[{"role":"user","content":"hi"}],"pad":"%s"}' % (b"x" * 1000)
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])["input"]
    one = msgspec.json.decode(raw, type=list[msgspec.Raw])[0]

    item = decode_item(one, "input[0]")

    assert type(item.raw) is bytes
    assert item.raw == b'{"role":"user","content":"hi"}'


DEBTS = [
    ('{"type":"function_call","call_id":"c","name":"f","arguments":""}', Call("c", "function")),
    (
        '{"type":"function_call","call_id":"c","name":"f","arguments":"","async":true}',
        Call("c", "function", True),
    ),
    ('{"type":"custom_tool_call","call_id":"c","name":"f","input":""}', Call("c", "custom")),
    ('{"type":"computer_call","call_id":"c"}', Call("c", "computer")),
    ('{"type":"shell_call","call_id":"c","action":{"commands":[]}}', Call("c", "shell")),
    (
        '{"type":"local_shell_call","call_id":"c","action":{"type":"exec","command":["ls"]}}',
        Call("c", "local_shell"),
    ),
    (
        '{"type":"apply_patch_call","call_id":"c","operation":{"type":"delete_file","path":"p"}}',
        Call("c", "apply_patch"),
    ),
    (
        '{"type":"tool_search_call","call_id":"c","execution":"client"}',
        Call("c", "tool_search"),
    ),
    ('{"type":"tool_search_call","call_id":null,"execution":"server"}', None),
    (
        '{"type":"mcp_approval_request","id":"c","server_label":"s","name":"n","arguments":""}',
        Call("c", "mcp_approval"),
    ),
    ('{"type":"web_search_call","id":"c"}', None),
    ('{"type":"mcp_call","server_label":"s","name":"n","arguments":""}', None),
    ('{"role":"user","content":""}', None),
]


@pytest.mark.parametrize("raw, debt", DEBTS)
def test_call_is_a_debt_only_where_the_client_owes_an_answer(raw: str, debt: Call | None) -> None:
    assert call_of(decode(raw)) == debt
    assert debt is None or debt.kind in CALL_WORDS


PAYMENTS = [
    ('{"type":"function_call_output","call_id":"c","output":""}', CallOutput("c", "function")),
    ('{"type":"function_call_output","output":""}', CallOutput(None, "function")),
    ('{"type":"custom_tool_call_output","call_id":"c","output":""}', CallOutput("c", "custom")),
    ('{"type":"computer_call_output","call_id":"c","output":{}}', CallOutput("c", "computer")),
    ('{"type":"shell_call_output","call_id":"c","output":[]}', CallOutput("c", "shell")),
    ('{"type":"local_shell_call_output","id":"c","output":""}', CallOutput("c", "local_shell")),
    ('{"type":"apply_patch_call_output","call_id":"c"}', CallOutput("c", "apply_patch")),
    ('{"type":"tool_search_output","call_id":"c","tools":[]}', CallOutput("c", "tool_search")),
    ('{"type":"tool_search_output","call_id":null,"execution":"server","tools":[]}', None),
    (
        '{"type":"mcp_approval_response","approval_request_id":"c","approve":true}',
        CallOutput("c", "mcp_approval"),
    ),
    ('{"role":"assistant","content":""}', None),
]


@pytest.mark.parametrize("raw, payment", PAYMENTS)
def test_output_pays_the_debt_of_its_call(raw: str, payment: CallOutput | None) -> None:
    assert answer_of(decode(raw)) == payment


def test_model_wrote_calls_reasoning_and_the_assistants_messages() -> None:
    wrote = {
        kind for raw in EXAMPLES if is_model_written(decode(raw)) for kind in [type(decode(raw))]
    }

    assert {Message, Reasoning, FunctionCall} <= wrote
    assert FunctionCallOutput not in wrote
    assert not is_model_written(decode('{"role":"user","content":""}'))


@pytest.mark.parametrize(
    "part, kind",
    [
        ('{"type":"input_text","text":""}', InputText),
        ('{"type":"output_text","text":""}', OutputText),
        ('{"type":"input_image"}', InputImage),
        ('{"type":"input_file"}', InputFile),
    ],
)
def test_tool_output_may_have_parts(part: str, kind: type) -> None:
    value = decode(f'{{"type":"function_call_output","call_id":"c","output":[{part}]}}')

    assert isinstance(value, FunctionCallOutput)
    assert isinstance(value.output[0], kind)
