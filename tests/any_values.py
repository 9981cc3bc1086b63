"""Any JSON value at any place of a valid request: whatever it is, no API answers that it was the server's fault.

`BODIES` are requests of each API that have everything in them; `mutations` puts each odd value at each of their places,
leaves each place out, and writes what is around a place into it, again and again.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from segue.accounts.account import LOCAL
from segue.server.app import App
from tests.support import MODEL, WEATHER
from tests.wire.test_items import EXAMPLES as ITEMS
from tests.wire.test_tools import EXAMPLES as TOOLS
from tests.wire.test_tools import MCP

Json = Any
Place = tuple[str | int, ...]
WAIT_S = 60
HOLE, WHOLE = "@hole@", "the body as it is"
# The fields for what this server has sealed.
SEALS = ("encrypted_content", "signature")
# How often what is around a place is written into it, and how far around it is.
NESTED, AROUND_MAX = (40, 300, 1_000), 4

DEEP = "[" * 200 + "]" * 200
TOO_DEEP = "[" * 5_000 + "]" * 5_000
# JSON as it is written, because Python would not write some of it.
ODD = (
    "null", "true", "false", "0", "-1", "1", "65", "4096", "9223372036854775807", "9223372036854775808", "1e19",
    f"{10**30}", f"-{10**30}", "0.5", "-0.0", "1e308", "1e999", '""', '" "', '"auto"', '"x"', '"\\u0000"', '"\\ud800"',
    '"\\ud83d\\ude00"', '"{\\"a\\":1}"', '"[[[["', '"data:,"', '"1e999"', f'"{"a" * 70_000}"', "[]", "{}", "[null]",
    "[[]]", '[""]', '{"":null}', '{"type":null}', '{"type":"x"}', '{"type":"text"}', '[{"type":"text","text":null}]',
    '{"$ref":"#"}', DEEP, TOO_DEEP,
)  # fmt: skip
# What this server has sealed for the same owner, and is no thought, no page and no compaction.
SEALED = (
    b"\xff\xfe", b"", b"{}", b"null", b"[" * 5_000, b"\x81\xa1a\x01", b'{"kind":"chain","summary":"x","kept":[1]}',
    b'{"kind":"chain","summary":"\xff"}', b'{"kind":"window","summary":"x","kept":[{"id":"msg_1"}]}',
)  # fmt: skip


def message(text: str = "Go on.") -> Json:
    return {"role": "user", "content": text}


def function(name: str) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def alone() -> list[Json]:
    """Items of every type that need no others beside them."""
    others = (
        "_output",
        "item_reference",
        "compaction",
        "_call",
        "mcp_approval",
        '{"id"',
        '{ "id"',
        "file_id",
    )
    return [json.loads(raw) for raw in ITEMS if not any(word in raw for word in others)]


PAIRS: list[Json] = [
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a":1}', "id": "fc_1"},
    {
        "type": "function_call_output",
        "call_id": "a",
        "output": [{"type": "input_text", "text": "x"}],
    },
    {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "b", "output": "ok"},
    {"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 1}},
    {
        "type": "computer_call_output",
        "call_id": "c",
        "output": {"type": "computer_screenshot", "image_url": "data:,"},
    },
    {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"], "timeout_ms": 1}},
    {
        "type": "shell_call_output",
        "call_id": "d",
        "max_output_length": 1,
        "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {
        "type": "local_shell_call",
        "id": "e",
        "call_id": "e",
        "action": {"type": "exec", "command": ["ls"], "env": {"A": "b"}},
    },
    {"type": "local_shell_call_output", "id": "e", "output": "{}"},
    {
        "type": "apply_patch_call",
        "call_id": "h",
        "operation": {"type": "create_file", "path": "p", "diff": "+a"},
    },
    {"type": "apply_patch_call_output", "call_id": "h", "status": "completed", "output": "x"},
    {"type": "tool_search_call", "call_id": "i", "execution": "client", "arguments": {"a": [1]}},
    {
        "type": "tool_search_output",
        "call_id": "i",
        "execution": "client",
        "tools": [json.loads(MCP)],
    },
    {
        "type": "mcp_approval_request",
        "id": "j",
        "server_label": "s",
        "name": "n",
        "arguments": "{}",
    },
    {"type": "mcp_approval_response", "approval_request_id": "j", "approve": False, "reason": "x"},
    {
        "type": "web_search_call",
        "id": "ws_1",
        "action": {"type": "search", "query": "q", "segue:text": "read"},
    },
    {
        "type": "mcp_call",
        "id": "m",
        "server_label": "s",
        "name": "n",
        "arguments": "{}",
        "output": "x",
    },
    {"type": "additional_tools", "tools": [{"type": "function", "name": "late"}, json.loads(MCP)]},
    message(),
]
ALLOWED: Json = {
    "type": "allowed_tools",
    "mode": "auto",
    "tools": [
        {"type": "function", "name": "get_weather"},
        {"type": "mcp", "server_label": "s", "name": "n"},
    ],
}
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"$ref": "#"}, {"enum": ["x", 1]}]}},
}
FIELDS: Json = {
    "input": "Hello.",
    "instructions": "Be short.",
    "tools": [WEATHER],
    "tool_choice": ALLOWED,
    "parallel_tool_calls": False,
    "max_tool_calls": 3,
    "temperature": 1,
    "top_p": 0.5,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": ["x"],
    "seed": 1,
    "top_logprobs": 1,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    "include": ["message.output_text.logprobs"],
    "truncation": "auto",
    "metadata": {"a": "b"},
    "user": "u",
    "context_management": [{"type": "compaction", "compact_threshold": 2_000}],
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "service_tier": "flex",
    "safety_identifier": "s",
    "client_metadata": {"ws_request_header_traceparent": "x"},
    "moderation": {},
    "stream_options": {},
}
BLOCKS: Json = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
            },
            {
                "type": "document",
                "title": "t",
                "context": "c",
                "source": {"type": "content", "content": [{"type": "text", "text": "x"}]},
            },
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "x"},
            },
            {
                "type": "search_result",
                "source": "s",
                "title": "t",
                "content": [{"type": "text", "text": "x"}],
            },
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {
                "type": "server_tool_use",
                "id": "srvtoolu_1",
                "name": "web_search",
                "input": {"query": "q"},
            },
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": [
                    {
                        "type": "web_search_result",
                        "url": "https://a.example",
                        "title": "t",
                        "encrypted_content": "x",
                    }
                ],
            },
            {
                "type": "server_tool_use",
                "id": "srvtoolu_2",
                "name": "web_fetch",
                "input": {"url": "u", "pattern": "p"},
            },
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "srvtoolu_2",
                "content": {
                    "type": "web_fetch_result",
                    "url": "u",
                    "content": {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "x"},
                    },
                },
            },
            {
                "type": "server_tool_use",
                "id": "srvtoolu_3",
                "name": "tool_search_tool_bm25",
                "input": {"query": "q"},
            },
            {
                "type": "tool_search_tool_result",
                "tool_use_id": "srvtoolu_3",
                "content": {
                    "type": "tool_search_tool_search_result",
                    "tool_references": [{"type": "tool_reference", "tool_name": "later"}],
                },
            },
            {
                "type": "mcp_tool_use",
                "id": "mcptoolu_1",
                "name": "n",
                "server_name": "s",
                "input": {},
            },
            {
                "type": "mcp_tool_result",
                "tool_use_id": "mcptoolu_1",
                "is_error": True,
                "content": [{"type": "text", "text": "x"}],
            },
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1]}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "is_error": True,
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "tool_reference", "tool_name": "later"},
                ],
            },
            {"type": "text", "text": "Go on."},
        ],
    },
]
MESSAGES: Json = {
    "model": MODEL,
    "max_tokens": 16,
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"ttl": "1h"}}],
    "messages": BLOCKS,
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_p": 0.5,
    "thinking": {"type": "enabled", "budget_tokens": 1_024, "display": "omitted"},
    "metadata": {"user_id": '{"session_id":"s"}'},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "speed": "standard",
    "diagnostics": {"previous_message_id": None},
    "tools": [
        {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True},
        {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "bash_20250124", "name": "bash"},
    ],
}
SEARCHING: Json = {
    "model": MODEL,
    "max_tokens": 16,
    "messages": [message("Hello.")],
    "tools": [
        {
            "type": "web_search_20250305",
            "name": "web_search",
            "max_uses": 2,
            "allowed_domains": ["a.example"],
            "user_location": {"type": "approximate", "city": "c"},
        }
    ],
}
CHAT: Json = {
    "model": MODEL,
    "max_completion_tokens": 16,
    "temperature": 1,
    "top_p": 0.5,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "seed": 1,
    "n": 1,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 1,
    "logit_bias": {},
    "parallel_tool_calls": True,
    "messages": [
        {"role": "developer", "content": "Be short.", "name": "n"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Hello."},
                {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {
                    "type": "file",
                    "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,aGk="},
                },
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "refusal": None,
            "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                {"id": "b", "type": "custom", "custom": {"name": "g", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
        {"role": "tool", "tool_call_id": "b", "content": "x"},
        {"role": "user", "content": "Go on."},
    ],
    "tools": [
        function("f"),
        {"type": "custom", "custom": {"name": "g", "format": {"type": "text"}}},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "reasoning_effort": "low",
    "verbosity": "low",
    "modalities": ["text"],
    "user": "u",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "flex",
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": True},
    "thinking": {"type": "enabled"},
    "reasoning": {"enabled": True},
    "structured_outputs": {"json_object": None},
    "metadata": {"a": "b"},
}
OLD_CHAT: Json = {
    "model": MODEL,
    "max_tokens": 16,
    "function_call": "auto",
    "functions": [{"name": "f", "parameters": SCHEMA}],
    "guided_json": {"type": "object"},
    "messages": [
        message(),
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "x"},
    ],
}
UNSTORED = {"model": MODEL, "store": False, "max_output_tokens": 16}
RESPONSES = "/v1/responses"
# Where they are sent, by name.
BODIES: Mapping[str, tuple[str, Json]] = {
    "Responses: items": (RESPONSES, {**UNSTORED, "input": [*alone(), message()]}),
    "Responses: calls": (RESPONSES, {**UNSTORED, "input": PAIRS}),
    "Responses: tools": (
        RESPONSES,
        {
            **UNSTORED,
            "input": "Hello.",
            "tools": [json.loads(one) for one in (*TOOLS, MCP)],
            "tool_choice": "none",
        },
    ),
    "Responses: fields": (RESPONSES, {**UNSTORED, **FIELDS}),
    "Responses: seals": (
        RESPONSES,
        {
            **UNSTORED,
            "input": [
                message(),
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                message(),
            ],
        },
    ),
    "Responses: stored": (RESPONSES, {**UNSTORED, **FIELDS, "store": True, "background": False}),
    "Responses: a count": (
        f"{RESPONSES}/input_tokens",
        {"model": MODEL, "input": PAIRS, "tools": [WEATHER]},
    ),
    "Conversations": ("/v1/conversations", {"items": alone()[:20], "metadata": {"a": "b"}}),
    "Messages": ("/v1/messages", MESSAGES),
    "Messages: a search": ("/v1/messages", SEARCHING),
    "Messages: a count": (
        "/v1/messages/count_tokens",
        {key: MESSAGES[key] for key in ("model", "system", "messages", "tools")},
    ),
    "Messages: a thread": ("/v1/messages", {**MESSAGES, "thread": {"type": "create"}}),
    "Chat": ("/v1/chat/completions", CHAT),
    "Chat: functions": ("/v1/chat/completions", OLD_CHAT),
}


@dataclass(frozen=True)
class Asked:
    """A request, which is made when it is sent, and what is odd about it."""

    path: str
    make: Callable[[], str]
    what: str


def places(value: Json, before: Place = ()) -> Iterator[Place]:
    """Every place in a value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield (*before, key)
        yield from places(one, (*before, key))


def at(value: Json, place: Place) -> Json:
    for key in place:
        value = value[key]
    return value


def without(value: Json, place: Place) -> Json:
    key, *rest = place
    changed = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        changed[key] = without(value[key], tuple(rest))
    else:
        del changed[key]
    return changed


def replaced(value: Json, place: Place, new: Json) -> Json:
    if not place:
        return new
    key, *rest = place
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = replaced(value[key], tuple(rest), new)
    return changed


def around(body: Json, place: Place) -> tuple[str, str]:
    """What stands before and after a place."""
    before, _, after = json.dumps(replaced(body, place, HOLE)).partition(f'"{HOLE}"')
    return before, after


def nested(body: Json, place: Place, up: int, times: int) -> str:
    """What is so far around a place, written into it so many times."""
    before, after = around(body, place)
    inner_before, inner_after = around(at(body, place[:-up]), place[-up:])
    inner = inner_before * times + json.dumps(at(body, place)) + inner_after * times
    return before + inner + after


def mutations(path: str, body: Json, place: Place) -> Iterator[Asked]:
    """What may be at this place instead."""
    name = ".".join(map(str, place))
    before, after = around(body, place)
    for value in ODD:
        yield Asked(path, partial("".join, (before, value, after)), f"{name} = {value[:40]}")
    yield Asked(path, lambda: json.dumps(without(body, place)), f"{name} left out")
    for up in range(1, min(AROUND_MAX, len(place)) + 1):
        for times in NESTED:
            make = partial(nested, body, place, up, times)
            yield Asked(path, make, f"{name} = {up} around it, {times} times")


def with_seals(path: str, body: Json, app: App) -> Iterator[Asked]:
    """What this server has sealed for the same owner, in all places for what is sealed, and as a compaction."""
    seals = app.runner.resources.seals
    for place in places(body):
        for content in SEALED if place[-1] in SEALS else ():
            text = seals.seal(LOCAL, content)
            compaction = {"type": "compaction", "encrypted_content": text}
            for where, new in ((place, text), (place[:-1], compaction)):
                changed = replaced(body, where, new)
                yield Asked(
                    path, partial(json.dumps, changed), f"{place} = {content[:40]!r}, sealed"
                )


def thrown(
    name: str, app: App, chosen: random.Random | None = None, part: float = 1
) -> list[Asked]:
    """Everything that is tried with one of the bodies, or a part of it; what is sealed in any case."""
    path, body = BODIES[name]
    found = [one for place in places(body) for one in mutations(path, body, place)]
    if chosen is not None:
        found = chosen.sample(found, int(part * len(found)))
    return [Asked(path, partial(json.dumps, body), WHOLE), *with_seals(path, body, app), *found]


class Asker:
    """Sends one request after the other to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, WAIT_S)

    def ask(self, asked: Asked) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", asked.path, asked.make().encode(), headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        self._connection.close()


def faults(port: int, all_asked: Iterable[Asked]) -> list[str]:
    """What was answered as the server's fault; the body itself must be served."""
    found = []
    with closing(Asker(port)) as asker:
        for asked in all_asked:
            status, answer = asker.ask(asked)
            if status >= 500 or (asked.what == WHOLE and status != 200):
                found.append(f"{asked.path}: {asked.what}: {status} {answer[:200]!r}")
    return found
