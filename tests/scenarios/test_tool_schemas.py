"""Tools whose schemas are odd, hostile or too large: the model's call is read, or the client hears why not.

The templates are MADE UP: they write calls with the marks of Qwen3-Coder and of Gemma 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segue_embedded.weights import find_weights
from tests.engines.fakes.chat import FakeChat
from tests.engines.fakes.vllm import FakeVllm
from tests.odd_schemas import own_unions, tree
from tests.support import MODEL, fetch, serving, wire

TEMPLATE = """{% for tool in tools or [] %}<|im_start|>system
{{ tool | tojson }}
CALL<|im_end|>
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
XML = "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>"
GEMMA = '<|tool_call>call:NAME{k:<|"|>v<|"|>}<tool_call|>'


def template(folder: Path, call: str) -> str:
    path = folder / "made_up.jinja"
    path.write_text(TEMPLATE.replace("CALL", call))
    return str(path)


def function(schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": schema}


def with_part(part: Any) -> Any:
    return {"type": "object", "properties": {"x": part}, "required": ["x"]}


@pytest.mark.parametrize(
    "schema",
    [
        with_part({"type": "integer", "enum": None}),
        with_part({"type": "string", "anyOf": None, "oneOf": 5}),
        with_part(["string"]),
        {"type": "object", "properties": ["x"], "required": None},
        own_unions(45),
    ],
)
async def test_client_gets_the_call_of_a_tool_with_an_odd_schema(
    tmp_path: Path, schema: Any
) -> None:
    flags = {"dialect": "template", "template": template(tmp_path, XML)}
    body = {"model": MODEL, "input": "Hi.", "store": False, "tools": [function(schema)]}
    async with serving(**flags) as served:
        answer = await fetch(served, "POST", "/v1/responses", body)
    assert (answer.status, answer.json["status"]) == (200, "completed"), answer.body
    assert [one["type"] for one in answer.json["output"]] == ["function_call"]


async def test_client_forces_a_call_whose_grammar_would_be_too_large(tmp_path: Path) -> None:
    """It hears so before the engine is asked: as a status, or as a response that has failed."""
    weights = str(find_weights("smollm2"))
    body = {"model": "m", "input": "Hi.", "store": False, "tool_choice": "required"}
    large, small = (body | {"tools": [function(tree(size))]} for size in (10_000, 100))
    async with FakeVllm(model="m") as fake:
        flags = {"engine": "vllm", "engine_url": (fake.url,), "model": ("m",)}
        flags |= {"dialect": "template", "template": template(tmp_path, GEMMA)}
        async with serving(**flags, tokenizer=weights) as served:
            refused = await fetch(served, "POST", "/v1/responses", large)
            async with wire(served) as socket:
                failed = await socket.turn(**large)
            assert not [one for one in fake.requests if "prompt" in one]
            assert (await fetch(served, "POST", "/v1/responses", small)).status == 200
            (asked,) = (one for one in fake.requests if "prompt" in one)
    error = refused.json["error"]
    assert (refused.status, error["code"], error["param"]) == (400, "unsupported_value", "tools")
    assert "4 MiB" in error["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["message"] == error["message"]
    assert len(asked["structured_outputs"]["structural_tag"]) < 1_000_000


LONG_LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}
ENDLESS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/d0"}},
    "$defs": {
        **{f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(1_000)},
        "d1000": {"type": "integer"},
    },
}


@pytest.mark.parametrize("schema", [with_part(LONG_LIST), ENDLESS], ids=["list", "references"])
@pytest.mark.parametrize("engine", ["vllm", "chat"])
async def test_client_sends_a_schema_that_no_engine_could_follow(engine: str, schema: Any) -> None:
    """As the arguments of a tool that must be called, and as the format of the answer: on every API, before any engine
    is asked."""
    weights = str(find_weights("smollm2"))
    tool = function(schema)
    named = {"name": "f", "schema": schema, "strict": True}
    said = [{"role": "user", "content": "Hi."}]
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("responses", {"input": "Hi.", "tools": [tool], "tool_choice": "required"}, "tools"),
        (
            "responses",
            {"input": "Hi.", "text": {"format": {"type": "json_schema", **named}}},
            "text.format",
        ),
        (
            "chat/completions",
            {"messages": said, "response_format": {"type": "json_schema", "json_schema": named}},
            "response_format",
        ),
        (
            "messages",
            {
                "messages": said,
                "max_tokens": 5,
                "tools": [{"name": "f", "input_schema": schema}],
                "tool_choice": {"type": "any"},
            },
            "tools",
        ),
    ]
    async with FakeVllm(model="m") if engine == "vllm" else FakeChat(names=("m",)) as fake:
        flags: dict[str, Any] = {"engine": engine, "engine_url": (fake.url,), "model": ("m",)}
        if engine == "vllm":
            flags |= {"tokenizer": weights}
        async with serving(**flags) as served:
            for path, body, param in requests:
                answer = await fetch(served, "POST", f"/v1/{path}", {"model": "m", **body})
                error = answer.json["error"]
                assert answer.status == 400, answer.body
                assert "20,000 parts" in error["message"]
                if path != "messages":
                    assert (error["code"], error["param"]) == ("unsupported_value", param)
        asked = [one for one in fake.requests if "prompt" in one or "messages" in one]
    assert not asked
