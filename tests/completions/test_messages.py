"""Messages of Chat Completions become items: by values, and whatever else a client may send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.completions.messages import ChatMessage, canonical_arguments, translate
from segue.errors import InvalidRequest
from segue.wire.codec import decode_item

Message = dict[str, Any]


def items_of(message: Message, *, is_newest: bool = True, is_custom: bool = False) -> list[Any]:
    raw = json.dumps(message).encode()
    found = translate(raw, "messages[0]", is_newest=is_newest, is_custom=is_custom)
    return [json.loads(bytes(item)) for item in found.items]


def call(arguments: str, call_id: str = "c") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_text_is_a_string_however_it_is_sent(role: str) -> None:
    expected = [{"type": "message", "role": role, "content": "Hi"}]
    assert items_of({"role": role, "content": "Hi"}) == expected
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    assert items_of({"content": [part], "role": role, "name": "ada"}) == expected


def test_parts_become_parts() -> None:
    content = [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:a", "detail": "low"}},
        {"type": "image_url", "image_url": "data:b"},
        {"type": "input_audio", "input_audio": {"format": "wav", "data": "AA"}},
        {"type": "file", "file": {"file_data": "data:c", "filename": "c.pdf"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ]
    (item,) = items_of({"role": "user", "content": content})
    assert item["content"] == [
        {"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": "data:a", "detail": "low"},
        {"type": "input_image", "image_url": "data:b"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "input_file", "file_data": "data:c", "filename": "c.pdf"},
        {"type": "input_file", "file_id": "file-1"},
    ]


def test_answer_is_its_thought_its_words_and_its_calls() -> None:
    message = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [call('{"a":1}'), {"id": "d", "custom": {"name": "g", "input": "x"}}],
    }
    assert items_of(message) == [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
    ]


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm.", "reasoning_content": None},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}, {"data": "x"}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "Hm."}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"reasoning": {"effort": "low"}, "thinking_blocks": [{"thinking": "Hm."}, 5]},
    ],
)
def test_thought_is_read_under_every_name(thought: Message) -> None:
    first, second = items_of({"role": "assistant", "content": "Yes.", **thought})
    assert first["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert second["content"] == "Yes."


def test_answer_without_words_is_a_message_only_if_there_is_nothing_else() -> None:
    (only,) = items_of({"role": "assistant", "content": None, "tool_calls": [call("{}")]})
    assert only["type"] == "function_call"
    (empty,) = items_of({"role": "assistant", "content": ""})
    assert empty == {"type": "message", "role": "assistant", "content": ""}


def test_refusal_and_audio_are_said_in_words() -> None:
    (item,) = items_of({"role": "assistant", "content": None, "refusal": "No."})
    assert item["content"] == [{"type": "refusal", "refusal": "No."}]
    (item,) = items_of({"role": "assistant", "audio": {"id": "audio_1"}})
    assert "audio" in item["content"]
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    (item,) = items_of({"role": "assistant", "content": parts})
    assert [part["type"] for part in item["content"]] == ["output_text", "refusal"]


def test_results_of_tools_answer_their_calls() -> None:
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "ok"}]}
    (item,) = items_of(message)
    assert item == {"type": "function_call_output", "call_id": "c", "output": "ok"}
    (item,) = items_of(message, is_custom=True)
    assert item == {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    (item,) = items_of({**message, "content": [image]})
    assert item["output"] == [{"type": "input_image", "image_url": "data:a"}]


def test_old_function_call_has_the_same_id_each_time() -> None:
    message = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    assert items_of(message) == items_of(message)
    (item,) = items_of({"role": "function", "name": "f", "content": "ok"})
    assert item == {"type": "function_call_output", "output": "ok", "name": "f"}


def test_unknown_part_is_refused_in_the_newest_message_and_named_in_older_ones() -> None:
    message = {"role": "user", "content": [{"type": "hologram", "hologram": 1}]}
    with pytest.raises(InvalidRequest, match="hologram") as refused:
        items_of(message)
    assert refused.value.param == "messages[0].content[0].type"
    (item,) = items_of(message, is_newest=False)
    assert item["content"] == "[content of type hologram]"
    raw = json.dumps(message).encode()
    assert not translate(raw, "messages[0]", is_newest=False, is_custom=False).is_lasting


@pytest.mark.parametrize(
    "text, canonical",
    [
        ('{"b":1,"a":[1,2]}', '{"b": 1, "a": [1, 2]}'),
        ('{"ä": "ö"}', '{"ä": "ö"}'),
        ('{"big": 123456789012345678901234567890}', '{"big": 123456789012345678901234567890}'),
        ("", "{}"),
        (None, "{}"),
        ("[1]", "[1]"),
        ("{broken", "{broken"),
        ('{"a": 1e999}', '{"a": 1e999}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_have_one_spelling(text: str | None, canonical: str) -> None:
    assert canonical_arguments(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1' + ",1" * 70_000 + "]}",
        '{"a": ' + "[" * 300 + "]" * 300 + "}",
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"a": "' + "x" * 1_100_000 + '"}',
    ],
    ids=["many values", "deep", "too deep to walk", "long"],
)
def test_arguments_that_are_too_much_for_an_item_stay_as_they_are(text: str) -> None:
    """To take them apart and write them again would hold up everybody else."""
    assert canonical_arguments(text) == text
    deep = '{"a":' + "[" * 200 + "]" * 200 + "}"
    assert canonical_arguments(deep) == deep.replace(":", ": ")


def test_half_of_a_surrogate_pair_in_arguments_stays_an_escape() -> None:
    arguments = '{"a":"\\ud800"}'
    (item,) = items_of({"role": "assistant", "content": None, "tool_calls": [call(arguments)]})
    assert item["arguments"] == arguments


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(ChatMessage.__struct_fields__)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_audio", "file", "refusal", "x"])},
    optional={
        "text": st.text(max_size=5),
        "refusal": st.text(max_size=5),
        "image_url": st.fixed_dictionaries({"url": st.text(max_size=5)}),
        "input_audio": st.fixed_dictionaries({"data": st.text(), "format": st.just("wav")}),
        "file": st.fixed_dictionaries({}, optional={"file_data": st.text(max_size=5)}),
    },
)
FUNCTION = st.fixed_dictionaries({"name": st.text(max_size=5), "arguments": st.text(max_size=9)})
CALL = st.fixed_dictionaries({"id": st.text(max_size=5), "function": FUNCTION})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
    optional={
        "content": st.none() | st.text(max_size=9) | st.lists(PART, max_size=3),
        "tool_calls": st.lists(CALL, max_size=2),
        "function_call": FUNCTION,
        "tool_call_id": st.text(max_size=5),
        "refusal": st.none() | st.text(max_size=5),
        "reasoning_content": JSON,
        "reasoning_details": JSON,
        "thinking_blocks": JSON,
    },
)


@given(MESSAGE | st.dictionaries(NAMES, JSON), st.booleans())
def test_any_message_becomes_items_that_the_turn_takes_or_is_refused(
    message: Message, is_newest: bool
) -> None:
    raw = json.dumps(message).encode()
    try:
        found = translate(raw, "messages[3]", is_newest=is_newest, is_custom=False)
        again = translate(raw, "messages[9]", is_newest=False, is_custom=False)
    except InvalidRequest:
        return
    assert [bytes(item) for item in found.items] == [bytes(item) for item in again.items]
    assert found.items
    for item in found.items:
        decode_item(item, "input[0]")
