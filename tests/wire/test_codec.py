"""Requests as bytes: known fields are checked, unknown ones ignored, and what clients really send is taken."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from segue.errors import InvalidRequest
from segue.wire import codec
from segue.wire.codec import (
    SKIM_BYTES_MAX,
    as_item,
    decode_create,
    decode_envelope,
    decode_item,
    decode_lane,
    decode_tools,
    encode,
    encode_kept,
    list_object,
)
from segue.wire.items import CompactionTrigger
from segue.wire.requests import Create

DEEP = "[" * 5_000 + "]" * 5_000
GOLDEN = Path(__file__).parent.parent / "golden" / "requests.json"
# What unmodified clients sent, with their prose and ids shortened.
RECORDED: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
REQUESTS = [
    pytest.param(request, id=f"{record['client'].split(' (')[0]} {record['transport']} {n}")
    for record in RECORDED
    for n, request in enumerate(record["requests"])
]


def create(**fields: object) -> Create:
    return decode_create(json.dumps(fields).encode())


def decode_whole(body: bytes) -> Create:
    decoded = decode_create(body)
    if decoded.stream_id is not UNSET:
        decode_lane(decoded.stream_id)
    if decoded.tools is not UNSET:
        decode_tools(decoded.tools, None)
    return decoded


def refusal(decode: Callable[[bytes], object], body: bytes) -> InvalidRequest | None:
    """How these bytes are refused; None if they are taken."""
    try:
        decode(body)
    except InvalidRequest as told:
        return told
    return None


@pytest.mark.parametrize("request_", REQUESTS)
def test_recorded_request_decodes_and_its_items_stay_verbatim(request_: dict[str, Any]) -> None:
    body = json.dumps(request_, ensure_ascii=False).encode()

    decoded = decode_create(body)

    assert decoded.model == request_["model"]
    assert decoded.store is request_.get("store")
    assert decoded.previous_response_id == request_.get("previous_response_id")
    if isinstance(decoded.input, list):
        items = [decode_item(raw, f"input[{n}]") for n, raw in enumerate(decoded.input)]
        verbatim = b", ".join(item.raw for item in items)
        assert b'"input": [' + verbatim + b"]" in body
    if decoded.tools is not UNSET:
        tools, _ = decode_tools(decoded.tools, None)
        assert len(tools.definitions) == len(request_["tools"])
        assert b'"tools": ' + tools.raw in body


@pytest.mark.parametrize("request_", REQUESTS)
def test_recorded_request_may_grow_fields(request_: dict[str, Any]) -> None:
    more = {**request_, "from_the_future": [{}], "tokens_max": "7"}

    assert create(**more).model == request_["model"]


# Every known field of docs/protocol.md 2, with values that are taken and values that are not.
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["m"], [7, {}, []]),
    "input": (["text", [], [{"role": "user", "content": ""}]], [7, {}, True]),
    "instructions": (["x", ""], [7, []]),
    "previous_response_id": (["resp_1"], [7, {}]),
    "conversation": (["conv_1", {"id": "conv_1"}], [7, {"name": "x"}]),
    "store": ([True, False], ["true", 1]),
    "generate": ([True, False], ["no", 0]),
    "stream": ([True, False], ["yes"]),
    "stream_options": (
        [{}, {"include_obfuscation": False}, {"reasoning_summary_delivery": "sequential_cutoff"}],
        [True, {"include_obfuscation": "no"}],
    ),
    "background": ([False], ["x"]),
    "tool_choice": (
        [
            "none",
            "auto",
            "required",
            {"type": "function", "name": "f"},
            {"type": "mcp", "server_label": "s"},
            {"type": "web_search"},
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
        ],
        ["maybe", 7, {}, {"type": 7}, {"type": "allowed_tools", "mode": "odd"}],
    ),
    "parallel_tool_calls": ([True], ["x"]),
    "max_tool_calls": ([0, 3], [-1, "3", 1.5]),
    "max_output_tokens": ([16, 1], [0, -1, "16", 1.5]),
    "temperature": ([0, 2, 0.5], [-0.1, 2.1, "1"]),
    "top_p": ([0, 1, 0.5], [-1, 1.1, "1"]),
    "presence_penalty": ([-2, 2], [3, "0"]),
    "frequency_penalty": ([-2, 2], [-3, "0"]),
    "top_logprobs": ([0, 20], [21, -1, 0.5]),
    "text": (
        [
            {},
            {"verbosity": "low"},
            {"format": {"type": "json_object"}},
            {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": None}},
        ],
        ["x", {"verbosity": "loud"}, {"format": {}}, {"format": {"type": "xml"}}],
    ),
    "reasoning": (
        [{}, {"effort": "max", "summary": "auto", "context": "all_turns", "mode": "pro"}],
        ["high", {"effort": "huge"}, {"summary": 7}],
    ),
    "include": ([[], ["reasoning.encrypted_content"]], ["x", [7]]),
    "truncation": (["auto", "disabled"], ["later", True]),
    "context_management": ([[{"type": "compaction", "compact_threshold": 1000}]], [{}, [7]]),
    "prompt": ([{"id": "p", "version": "1", "variables": {"a": 1}}], ["p", {}]),
    "prompt_cache_key": (["k"], [7]),
    "prompt_cache_options": (
        [{"mode": "implicit", "ttl": "30m", "prewarm": True, "comparison_response_id": "r"}],
        [True, {"prewarm": "yes"}],
    ),
    "prompt_cache_retention": (["24h"], [24]),
    "service_tier": (["auto", "ultrafast"], [7]),
    "metadata": (
        [{}, {"k": "v"}, {"k" * 64: "v" * 512}, {str(n): "" for n in range(16)}],
        [[], {"k": 1}, {"k" * 65: ""}, {"k": "v" * 513}, {str(n): "" for n in range(17)}],
    ),
    "safety_identifier": (["x" * 128], [7, "x" * 129]),
    "user": (["u"], [7]),
    "idempotency_key": (["k", "k" * 255], [7, "", "k" * 256]),
    "rollout": ([True, False], ["yes"]),
    "seed": ([0, 7, -1], ["7", 1.5, [7]]),
    "stop": (["END", ["a", "b"]], [7, "", [7], [""], ["a", "b", "c", "d", "e"]]),
}


def test_table_has_every_typed_field() -> None:
    raw = {"type", "stream_id", "tools", "moderation", "client_metadata"}

    assert set(FIELDS) | raw == set(Create.__struct_fields__)


@pytest.mark.parametrize(
    "field, value", [(field, value) for field, (good, _) in FIELDS.items() for value in good]
)
def test_field_takes_what_the_contract_allows(field: str, value: object) -> None:
    assert getattr(create(**{field: value}), field) is not None


@pytest.mark.parametrize("field", FIELDS)
def test_null_means_the_same_as_nothing(field: str) -> None:
    assert create(**{field: None}) == Create()


@pytest.mark.parametrize(
    "field, value", [(field, value) for field, (_, bad) in FIELDS.items() for value in bad]
)
def test_field_of_a_wrong_type_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as told:
        create(**{field: value})

    assert told.value.param is not None
    assert told.value.param.startswith(field)
    assert told.value.status == 400
    assert told.value.code == "invalid_value"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"include": ["a", 7]}, "include[1]"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"context_management": [{"type": "compaction"}, {}]}, "context_management[1]"),
    ],
)
def test_param_is_the_path_to_the_fault(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        create(**fields)

    assert told.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"not json",
        b'{"model":"m",}',
        b"{'model':'m'}",
        b'{"model":"m"}}',
        b'{"temperature":NaN}',
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"from_the_future":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"input":' + b"[" * 100_000,
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_bytes_that_are_not_json_are_refused_as_such(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as told:
        decode_create(body)

    assert told.value.code == "invalid_json"
    assert told.value.message.startswith("We could not parse the JSON of your request: ")


@pytest.mark.parametrize("body", [b"[]", b"null", b"7", b'"text"', b"true"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as told:
        decode_create(body)

    assert told.value.code == "invalid_value"


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "1" * 5000, "99999999999999999999", "1e-999999"]
)
def test_huge_number_is_answered_and_not_crashed_on(number: str) -> None:
    for field in ("max_output_tokens", "temperature", "from_the_future"):
        told = refusal(decode_create, f'{{"{field}":{number}}}'.encode())
        assert told is None or told.code in ("invalid_value", "invalid_json")


def test_last_of_duplicate_keys_wins() -> None:
    assert decode_create(b'{"model":"a","model":"b"}').model == "b"


def test_unknown_fields_are_not_even_looked_at() -> None:
    assert (
        decode_create(b'{"client_metadata":{"a":{"b":[1,2,{"c":null}]}},"model":"m"}').model == "m"
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    for decode in (
        decode_create,
        decode_envelope,
        lambda body: decode_item(body, "input[0]"),
        lambda body: decode_tools(body, None),
    ):
        told = refusal(decode, data)
        assert told is None or told.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(name=st.sampled_from([*FIELDS, "tools", "stream_id", "other"]), value=json_values)
def test_any_value_of_any_field_is_taken_or_refused_by_its_name(name: str, value: object) -> None:
    try:
        body = json.dumps({name: value}, allow_nan=False).encode()
    except ValueError:
        return
    told = refusal(decode_whole, body)
    if told is not None and told.code != "invalid_json":
        assert told.param is not None
        assert told.param.startswith(name)


# --- frames that cannot be read as a whole ---------------------------------------------------------


@pytest.mark.parametrize(
    "frame, kind, lane",
    [
        ('{"type":"response.create","stream_id":"a"}', "response.create", "a"),
        ('{"type":"response.create","temperature":"hot","stream_id":"a"}', "response.create", "a"),
        ('{"stream_id":"a"}', None, "a"),
        ('{"type":7,"stream_id":7}', None, None),
        ('{"type":"x","stream_id":""}', "x", None),
        ('{"type":"x","stream_id":"a b"}', "x", None),
        ("{}", None, None),
        ("{", None, None),
        ('{"type":"x","in":$,"stream_id":"a"}', "x", "a"),
        ('{"stream_id":"a","in":$,"stream_id":"b","in":$}', None, "b"),
        ('{"in":[{"stream_id":"a"},$],"type":"x"}', "x", None),
        ('{"s":"\\"stream_id\\":","in":$,"stream_id":["a"]}', None, None),
        ('{"in":$' + " " * SKIM_BYTES_MAX + ',"stream_id":"a"}', None, None),
    ],
)
def test_frame_says_its_type_and_lane_even_where_the_rest_is_wrong(
    frame: str, kind: str | None, lane: str | None
) -> None:
    """A `$` stands for what is nested too deeply to decode."""
    assert decode_envelope(frame.replace("$", DEEP).encode()) == (kind, lane)


@pytest.mark.parametrize("lane", ["a", "A.b-c_9", "x" * 256])
def test_lane_is_named(lane: str) -> None:
    assert decode_lane(Raw(encode(lane))) == lane


@pytest.mark.parametrize("lane", ["", "x" * 257, "a b", "ä", "a/b", "a\n", 7, None, [], {}])
def test_bad_lane_has_its_own_error(lane: object) -> None:
    with pytest.raises(InvalidRequest) as told:
        decode_lane(Raw(encode(lane)))

    assert told.value.code == "invalid_stream_id"
    assert told.value.param == "stream_id"
    assert told.value.message == (
        "The 'stream_id' field must be a non-empty string with at most 256 characters and may only "
        "contain letters, numbers, underscores, hyphens, and periods."
    )


# --- lists ------------------------------------------------------------------------------------------


def test_list_object_names_its_first_and_last() -> None:
    rows = [(name, as_item(CompactionTrigger(id=name))) for name in ("a", "b")]
    listed = json.loads(list_object(rows, has_more=True))

    assert listed == {
        "object": "list",
        "data": [{"type": "compaction_trigger", "id": name} for name in ("a", "b")],
        "first_id": "a",
        "last_id": "b",
        "has_more": True,
    }
    assert json.loads(list_object([], has_more=False))["first_id"] is None


def test_numbers_in_raw_json_survive_to_the_digit() -> None:
    raw = b'{"type":"function_call_output","call_id":"c","output":"","score":0.10,"n":1e3}'

    assert encode([msgspec.Raw(decode_item(raw, "input[0]").raw)]) == b"[" + raw + b"]"


@pytest.mark.parametrize(
    "body", [{"truncation": "x" * 5_000}, {"text": {"format": {"type": "x" * 5_000}}}]
)
def test_wrong_value_is_not_repeated_without_end(body: dict[str, Any]) -> None:
    told = refusal(decode_create, json.dumps(body).encode())
    assert told is not None
    assert f"'{'x' * 128}'" in told.message


@pytest.mark.parametrize("escape", [b'\\"', b"\\\\", b"\\\n"])
def test_open_string_in_a_frame_is_one_token(escape: bytes) -> None:
    """Else every quote in it would be tried as the beginning of a string, and one frame would hold the loop."""
    frame = b'{"a":"' + escape * 20_000
    assert len(list(codec._TOKEN.finditer(frame, 0, codec.SKIM_BYTES_MAX))) <= 8
    assert decode_envelope(b'{"type":"x","a":"' + escape * 10_000 + b'","b":' + b"[" * 5_000)[
        0
    ] in ("x", None)


# --- how many values a large request may have -------------------------------------------------------

json_values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,[]{}é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def structure_of(value: object) -> str:
    """The brackets and commas of a value, as a JSON encoder writes them."""
    match value:
        case dict():
            return "{" + ",".join(map(structure_of, value.values())) + "}"
        case list():
            return "[" + ",".join(map(structure_of, value)) + "]"
        case _:
            return ""


@given(json_values)
def test_structure_is_seen_without_what_is_in_strings(value: object) -> None:
    for data in (
        json.dumps(value).encode(),
        json.dumps(value, indent=1, ensure_ascii=False).encode(),
    ):
        seen = [data[at : at + 1] for _, at in codec.marks_of(data)]
        assert b"".join(seen).decode() == structure_of(value)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"input":[' + b"111," * 100_000 + b"1]}", "items in one list: at most 100000"),
        (b'{"metadata": {' + b'"a":"",' * 99_999 + b'"b":""}}', "items in one list: at most 65536"),
        (
            b'{"input":[{"a":[' + b"111," * 99_999 + b"1]}]}",
            "values in one item or tool: at most 65536",
        ),
        (b'{"tools":[' + b"[[]," * 99_999 + b"1", "values in one item or tool: at most 65536"),
        (b"{" + b'"a":1,' * 99_999 + b'"b":1}', "fields: at most 1000"),
        (b'{"input":[' + b"[1,1,1,1,1]," * 99_999 + b"1]}", "values: at most 500000"),
    ],
    ids=["items", "elements", "an item", "nested", "fields", "values"],
)
def test_body_with_too_many_values_is_refused_before_it_is_decoded(
    body: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "FEW_VALUES", 90_000)
    with pytest.raises(InvalidRequest, match=what):
        codec.decode_create(body)
    with pytest.raises(InvalidRequest, match=what):
        codec.decode_frame(body)


def test_text_with_many_commas_is_no_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "FEW_VALUES", 1_000)
    text = 'one, "two", [three], {four}\\' * 20_000
    assert codec.decode_create(json.dumps({"input": text}).encode()).input == text


def test_what_is_kept_takes_no_more_memory_than_its_bytes() -> None:
    text = "the " * 100_000
    tracemalloc.start()
    try:
        kept = encode_kept([text])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept == encode([text])
    assert held < 1.01 * len(kept)
