"""Whatever body the types of Chat Completions allow, and whatever else a client may send: an answer or a refusal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat import chunks_of
from tests.support import MODEL, fetch, serving

TEXT = st.text(max_size=8)
IDS = st.sampled_from(["a", "b", ""])
NAMES = st.sampled_from(["f", "g", "no such name", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.sampled_from(["{}", '{"a":1}', "", "null", "{broken", "[1]", '"text"'])
FUNCTION = st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS})
CALLS = st.lists(
    st.fixed_dictionaries({"id": IDS, "type": st.just("function"), "function": FUNCTION})
    | st.fixed_dictionaries(
        {
            "id": IDS,
            "type": st.just("custom"),
            "custom": st.fixed_dictionaries({"name": NAMES, "input": TEXT}),
        }
    ),
    max_size=2,
)
URLS = st.sampled_from(["data:image/png;base64,AA==", "data:,", "https://a.example/b.png", "x", ""])
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
    | st.fixed_dictionaries(
        {"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": URLS})}
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("input_audio"),
            "input_audio": st.fixed_dictionaries({"data": TEXT, "format": st.just("mp3")}),
        }
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("file"),
            "file": st.fixed_dictionaries(
                {}, optional={"file_data": URLS, "file_id": IDS, "filename": TEXT}
            ),
        }
    )
    | st.fixed_dictionaries({"type": st.just("refusal"), "refusal": TEXT}),
    max_size=3,
)
CONTENT = st.none() | TEXT | PARTS
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user"])},
        optional={"content": CONTENT, "name": TEXT},
    )
    | st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": CONTENT,
            "tool_calls": CALLS,
            "function_call": FUNCTION,
            "refusal": TEXT,
            "reasoning_content": TEXT,
            "audio": JSON,
        },
    )
    | st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": IDS, "content": CONTENT})
    | st.fixed_dictionaries({"role": st.just("function"), "name": NAMES, "content": CONTENT}),
    min_size=1,
    max_size=4,
)
SCHEMA = st.sampled_from(
    [{}, {"type": "object"}, {"type": "object", "properties": {"a": {"$ref": "#"}}}, None]
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": NAMES}, optional={"parameters": SCHEMA, "strict": st.booleans()}
            ),
        }
    )
    | st.fixed_dictionaries(
        {"type": st.just("custom"), "custom": st.fixed_dictionaries({"name": NAMES})}
    ),
    max_size=2,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(
        ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
    ),
    "functions": st.just([{"name": "f"}]),
    "function_call": st.sampled_from(["auto", "none", {"name": "f"}]),
    "response_format": st.sampled_from(
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]
    )
    | st.builds(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        SCHEMA,
    ),
    "stop": TEXT | st.lists(TEXT, max_size=5),
    "max_tokens": st.integers(-2, 9),
    "max_completion_tokens": st.integers(-2, 9),
    "temperature": st.floats(0, 2),
    "seed": st.integers(),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 21),
    "stream_options": JSON,
    "reasoning_effort": st.sampled_from(["none", "low", "high", "odd"]),
    "web_search_options": JSON,
    "metadata": JSON,
    "service_tier": TEXT,
    "user": TEXT,
    "prediction": JSON,
    "modalities": JSON,
}
BODY = st.fixed_dictionaries({"messages": MESSAGES}, optional=FIELDS)


@pytest.mark.parametrize("is_odd", [False, True])
def test_every_body_has_an_answer_or_a_refusal(is_odd: bool) -> None:
    async def play() -> None:
        async with serving() as served:
            loop = asyncio.get_running_loop()

            @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
            @given(BODY, st.dictionaries(st.sampled_from([*FIELDS, "messages"]), JSON))
            def try_one(body: dict[str, Any], odd: dict[str, Any]) -> None:
                asked = {"model": MODEL, **body, **(odd if is_odd else {})}
                trying = fetch(served, "POST", "/v1/chat/completions", asked)
                answer = asyncio.run_coroutine_threadsafe(trying, loop).result()
                assert answer.status in (200, 400, 404), (asked, answer.body)
                if answer.status == 200 and asked.get("stream"):
                    assert chunks_of(answer.body), asked
                elif answer.status == 200:
                    assert answer.json["object"] == "chat.completion"
                else:
                    assert set(answer.json["error"]) == {"message", "type", "param", "code"}

            await asyncio.to_thread(try_one)

    asyncio.run(play())
