"""Requests for messages become turns: every field by values, and any body is a turn or a refusal."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from segue.errors import InvalidRequest
from segue.messages.reading import MessageReading
from segue.messages.request import AskedTurn, Surroundings
from segue.resent.memo import Memo
from segue.turn.plan import Given
from segue.turn.resolve import resolve
from segue.wire.codec import decode_item
from segue.wire.requests import CacheOptions, Create, ReasoningConfig, ToolChoiceName

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
BASH = {"name": "bash", "description": "Runs", "input_schema": {"type": "object"}}


def asked(memo: Memo[object] | None = None, **fields: Any) -> AskedTurn:
    body = {"model": "m", "max_tokens": 10, "messages": HELLO, **fields}
    reading = MessageReading(memo or Memo(0), "ada", Surroundings())
    reading.decode(json.dumps(body).encode())
    return reading.asked


def create_of(**fields: Any) -> Create:
    return asked(**fields).create


def items_of(create: Create) -> list[dict[str, Any]]:
    assert isinstance(create.input, list)
    return [json.loads(bytes(raw)) for raw in create.input]


def tools_of(create: Create) -> list[dict[str, Any]]:
    return [] if create.tools is UNSET else json.loads(bytes(create.tools))


def test_turn_is_never_stored_and_asks_for_sealed_thoughts() -> None:
    create = create_of()
    assert (create.store, create.model, create.max_output_tokens) == (False, "m", 10)
    assert "reasoning.encrypted_content" in (create.include or [])


@pytest.mark.parametrize(
    "fields, name, value",
    [
        ({"stream": True}, "stream", True),
        ({"max_tokens": None}, "max_output_tokens", None),
        ({"max_tokens": 0}, "generate", False),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"stop_sequences": ["a", "b"]}, "stop", ["a", "b"]),
        ({"stop_sequences": []}, "stop", None),
        ({"system": "Be brief."}, "instructions", "Be brief."),
        ({"speed": "fast"}, "service_tier", "fast"),
        ({"speed": "standard", "service_tier": "auto"}, "service_tier", None),
        ({"tool_choice": {"type": "any"}, "tools": [BASH]}, "tool_choice", "required"),
        ({"tool_choice": {"type": "auto"}, "tools": [BASH]}, "tool_choice", None),
        ({"tool_choice": {"type": "none"}, "tools": [BASH]}, "tool_choice", "none"),
        (
            {"tool_choice": {"type": "tool", "name": "bash"}, "tools": [BASH]},
            "tool_choice",
            ToolChoiceName(type="function", name="bash"),
        ),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            False,
        ),
        ({"metadata": {"user_id": "u"}}, "prompt_cache_key", "u"),
        ({"metadata": {"user_id": '{"session_id": "s"}'}}, "prompt_cache_key", "s"),
        ({"metadata": {"user_id": '["x"]'}}, "prompt_cache_key", '["x"]'),
        (
            {"diagnostics": {"previous_message_id": "msg_1"}},
            "prompt_cache_options",
            CacheOptions(comparison_response_id="resp_1"),
        ),
        ({"diagnostics": {"previous_message_id": None}}, "prompt_cache_options", None),
    ],
)
def test_field_means(fields: dict[str, Any], name: str, value: object) -> None:
    assert getattr(create_of(**fields), name) == value


@pytest.mark.parametrize(
    "thinking, effort, meant",
    [
        (None, None, None),
        (None, "low", "low"),
        (None, "unheard-of", None),
        ({"type": "disabled"}, "high", "none"),
        ({"type": "adaptive"}, None, None),
        ({"type": "adaptive", "display": "updates"}, "max", "max"),
        ({"type": "between_tools"}, "xhigh", "xhigh"),
        ({"type": "enabled", "budget_tokens": 1_024}, None, "low"),
        ({"type": "enabled", "budget_tokens": 8_192}, None, "medium"),
        ({"type": "enabled", "budget_tokens": 32_000}, None, "high"),
        ({"type": "enabled", "budget_tokens": 32_000}, "low", "low"),
    ],
)
def test_effort_of_thinking(
    thinking: dict[str, Any] | None, effort: str | None, meant: str | None
) -> None:
    create = create_of(thinking=thinking, output_config={"effort": effort})
    config = create.reasoning or ReasoningConfig()
    assert config.effort == meant


def test_thoughts_are_hidden_where_the_client_does_not_want_them() -> None:
    assert asked(thinking={"type": "adaptive", "display": "omitted"}).hides_thinking
    assert not asked(thinking={"type": "adaptive", "display": "summarized"}).hides_thinking
    assert not asked().hides_thinking


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_answer_may_have_to_follow_a_schema(name: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    text = create_of(**{name: {"format": wanted} if name == "output_config" else wanted}).text
    assert text is not None
    assert text.format is not None
    assert (text.format.type, text.format.schema) == ("json_schema", Raw(b'{"type": "object"}'))


def test_mark_is_found_on_top_in_tools_and_in_system() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    assert asked().ttl == ""
    assert asked(**mark).ttl == "5m"
    assert asked(tools=[BASH | mark]).ttl == "5m"
    assert asked(system=[{"type": "text", "text": "x", **mark}]).ttl == "5m"


# --- tools that join ----------------------------------------------------------------------------------


def found(*names: str) -> list[dict[str, Any]]:
    """A history in which a search of the client has found these tools."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    use = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": references}
    return [
        *HELLO,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]


def test_deferred_tool_joins_where_it_is_named_first() -> None:
    tools = [BASH, {**BASH, "name": "late", "defer_loading": True}, {**BASH, "name": "search"}]
    create = create_of(messages=found("late", "bash", "nothing"), tools=tools)
    assert [tool["name"] for tool in tools_of(create)] == ["bash", "search"]
    *_, output, joined = items_of(create)
    assert output["type"] == "function_call_output"
    assert (joined["type"], [tool["name"] for tool in joined["tools"]]) == (
        "additional_tools",
        ["late"],
    )
    twice = [*found("late"), {"role": "assistant", "content": "ok"}, *HELLO]
    note = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}
    twice.append({"role": "system", "content": [note]})
    kinds = [item["type"] for item in items_of(create_of(messages=twice, tools=tools))]
    assert kinds.count("additional_tools") == 1


def test_tool_that_many_searches_have_found_is_written_once() -> None:
    late = {**BASH, "name": "late", "defer_loading": True}
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    content = {"tool_references": [{"type": "tool_reference", "tool_name": "late"}]}
    said: list[dict[str, Any]] = []
    for n in range(3):
        use = {"type": "server_tool_use", "id": f"srvtoolu_{n}", "name": search["name"]}
        result = {"type": "tool_search_tool_result", "tool_use_id": use["id"], "content": content}
        said += [use, result]
    history = [*HELLO, {"role": "assistant", "content": said}, *HELLO]
    items = items_of(create_of(messages=history, tools=[late, search]))
    outputs = [item for item in items if item["type"] == "tool_search_output"]
    names = [[tool["name"] for tool in output["tools"]] for output in outputs]
    assert names == [["late"], [], []]


def test_head_is_the_same_whatever_is_deferred() -> None:
    late = {**BASH, "name": "late", "defer_loading": True}
    assert create_of(tools=[late, BASH]).tools == create_of(tools=[BASH]).tools


def test_removed_tool_may_not_be_called() -> None:
    tools = [BASH, {**BASH, "name": "ls"}]
    gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ls"}}
    history = [*HELLO, {"role": "system", "content": [gone]}]
    choice = create_of(messages=history, tools=tools).tool_choice
    assert isinstance(choice, ToolChoiceName)
    assert (choice.type, choice.mode) == ("allowed_tools", "auto")
    assert [tool.name for tool in choice.tools or []] == ["bash"]
    with pytest.raises(InvalidRequest):
        create_of(messages=history, tools=tools, tool_choice={"type": "tool", "name": "ls"})
    back = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "ls"}}
    again = [*history, {"role": "system", "content": [back]}]
    assert create_of(messages=again, tools=tools).tool_choice is None


@pytest.mark.parametrize(
    "tool, meant",
    [
        (BASH, {"name": "bash", "description": "Runs", "strict": False}),
        ({**BASH, "type": "custom", "strict": True}, {"name": "bash", "strict": True}),
        ({"type": "bash_20250124", "name": "bash"}, {"name": "bash"}),
        (
            {"type": "text_editor_20250124", "name": "str_replace_editor"},
            {"name": "str_replace_editor"},
        ),
        ({"type": "memory_20250818", "name": "memory"}, {"name": "memory"}),
        ({"type": "web_search_20260318", "name": "web_search"}, {"type": "web_search"}),
        (
            {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["a.b"]},
            {"filters": {"allowed_domains": ["a.b"], "blocked_domains": None}},
        ),
    ],
)
def test_tool_means(tool: dict[str, Any], meant: dict[str, Any]) -> None:
    (found_tool,) = tools_of(create_of(tools=[tool]))
    assert {name: found_tool.get(name) for name in meant} == meant


def test_tool_of_a_type_has_the_name_of_its_type() -> None:
    tools = [{"type": "bash_20250124"}, {"type": "memory_20250818"}]
    names = [tool["name"] for tool in tools_of(create_of(tools=tools))]
    assert names == ["bash", "memory"]
    with pytest.raises(InvalidRequest, match="unique: bash"):
        create_of(tools=[*tools, BASH])


def test_remote_server_is_a_tool_with_its_secrets() -> None:
    server = {"type": "url", "name": "time", "url": "https://a/b", "authorization_token": "t"}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "time"}
    off = {"default_config": {"enabled": False}, "configs": {"now": {"enabled": True}}}
    (plain,) = tools_of(create_of(mcp_servers=[server], tools=[toolset]))
    assert plain == {
        "type": "mcp",
        "server_label": "time",
        "server_url": "https://a/b",
        "require_approval": "never",
        "authorization": "t",
    }
    (some,) = tools_of(create_of(mcp_servers=[server], tools=[toolset | off]))
    assert some["allowed_tools"] == ["now"]
    assert tools_of(create_of(mcp_servers=[server])) == [plain]
    none = {"default_config": {"enabled": False}}
    assert tools_of(create_of(mcp_servers=[server], tools=[toolset | none])) == []


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools.0.input_schema: "),
        ({"tools": [BASH, BASH]}, "tools: Tool names must be unique"),
        ({"tools": {"a": 1}}, "tools: "),
        ({"model": None}, "model: "),
        ({"temperature": 9}, "temperature: "),
        ({"system": 5}, "system: "),
    ],
)
def test_wrong_field_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        create_of(**fields)
    assert refused.value.message.startswith(words)


def test_message_that_came_before_is_the_same_object() -> None:
    """What came before is not translated again, so that what knows it by its object finds it at once."""
    memo: Memo[object] = Memo(1_000_000)
    first = asked(memo, system="Be brief.", tools=[BASH]).create
    again = asked(memo, system="Be brief.", tools=[BASH]).create
    assert isinstance(first.input, list)
    assert isinstance(again.input, list)
    assert again.input[0] is first.input[0]


def test_turn_and_memo_do_not_hold_the_body() -> None:
    """They are weighed by what they keep; a body that they point into would be held without being counted."""
    added = {"type": "tool_addition", "tool": {"type": "custom", "definition": BASH}}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "s", "input_schema": {}}
    body = {
        "model": "m",
        "messages": [{"role": "system", "content": [added]}, *HELLO],
        "tools": [toolset],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    data, memo = json.dumps(body).encode(), Memo[object](1_000_000)
    held = sys.getrefcount(data)
    create = MessageReading(memo, "ada", Surroundings()).decode(data)
    assert create.text is not None
    assert sys.getrefcount(data) == held


# --- anything -----------------------------------------------------------------------------------------

SMALL = st.text(max_size=4)
NAMES = st.sampled_from(["a", "b", "bash", "ls", ""])
MARKS = st.sampled_from([None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
TEXTS = st.fixed_dictionaries(
    {"type": st.just("text"), "text": SMALL},
    optional={"cache_control": MARKS, "citations": st.none()},
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | SMALL,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SMALL, inner, max_size=2),
    max_leaves=4,
)
SOURCES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("base64"), "media_type": st.just("image/png"), "data": SMALL}
    ),
    st.fixed_dictionaries({"type": st.just("url"), "url": SMALL}),
    st.fixed_dictionaries({"type": st.just("file"), "file_id": SMALL}),
    st.fixed_dictionaries({"type": st.just("text"), "media_type": SMALL, "data": SMALL}),
    st.fixed_dictionaries({"type": st.just("content"), "content": st.lists(TEXTS, max_size=2)}),
)


def block(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"type": st.just(kind), **fields}, optional={"cache_control": MARKS}
    )


OBJECTS = st.dictionaries(SMALL, JSON, max_size=2)
INNER = st.one_of(
    TEXTS,
    block("image", source=SOURCES),
    block("document", source=SOURCES, title=st.none() | SMALL, context=st.none() | SMALL),
    block("search_result", source=SMALL, title=SMALL, content=st.lists(TEXTS, max_size=2)),
)
REFERENCES = block("tool_reference", tool_name=NAMES)
TOOLS_CHANGED = st.one_of(
    st.fixed_dictionaries({"type": st.just("tool_reference"), "name": NAMES}),
    st.fixed_dictionaries({"type": st.just("tool_definition"), "definition": st.just(BASH)}),
)
BLOCKS = st.one_of(
    INNER,
    block("thinking", thinking=SMALL, signature=SMALL),
    block("redacted_thinking", data=SMALL),
    block("tool_use", id=NAMES, name=NAMES, input=OBJECTS),
    block(
        "tool_result",
        tool_use_id=NAMES,
        content=st.none() | SMALL | st.lists(INNER | REFERENCES, max_size=2),
        is_error=st.booleans(),
    ),
    block(
        "server_tool_use",
        id=NAMES,
        name=st.sampled_from(
            ["web_search", "web_fetch", "tool_search_tool_bm25", "code_execution"]
        ),
        input=OBJECTS,
    ),
    block("web_search_tool_result", tool_use_id=NAMES, content=JSON),
    block("web_fetch_tool_result", tool_use_id=NAMES, content=JSON),
    block("tool_search_tool_result", tool_use_id=NAMES, content=JSON),
    block("mcp_tool_use", id=NAMES, name=NAMES, server_name=NAMES, input=OBJECTS),
    block("mcp_tool_result", tool_use_id=NAMES, content=SMALL, is_error=st.booleans()),
    block("tool_addition", tool=TOOLS_CHANGED),
    block("tool_removal", tool=TOOLS_CHANGED),
    block("compaction", content=st.none() | SMALL),
    block("container_upload", file_id=SMALL),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": SMALL | st.lists(BLOCKS, max_size=3),
        },
        optional={"output_config": st.just({"effort": "low"})},
    ),
    max_size=4,
)
TOOLS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"name": NAMES, "input_schema": OBJECTS},
            optional={
                "defer_loading": st.booleans(),
                "strict": st.booleans(),
                "description": SMALL,
            },
        ),
        st.sampled_from(
            [
                {"type": "bash_20250124", "name": "bash"},
                {"type": "web_search_20250305", "name": "web_search"},
                {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
                {"type": "mcp_toolset", "mcp_server_name": "x"},
                {"type": "code_execution_20250522", "name": "code_execution"},
            ]
        ),
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": MESSAGES},
    optional={
        "max_tokens": st.integers(0, 9),
        "system": SMALL | st.lists(TEXTS, max_size=2),
        "tools": TOOLS,
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "none", "tool"])}, optional={"name": NAMES}
        ),
        "stop_sequences": st.lists(SMALL, max_size=2),
        "thinking": st.just({"type": "enabled", "budget_tokens": 1_024}),
        "metadata": st.fixed_dictionaries({"user_id": SMALL}),
        "output_config": st.just(
            {"effort": "max", "format": {"type": "json_schema", "schema": {}}}
        ),
        "cache_control": MARKS,
    },
)


@settings(max_examples=300, deadline=None)
@given(BODIES, st.booleans())
def test_any_body_of_the_types_is_a_turn_or_a_refusal(body: dict[str, Any], counts: bool) -> None:
    """Whatever the SDK's types allow becomes items that the turn understands, or is refused with a place."""
    reading = MessageReading(Memo(1_000_000), "ada", Surroundings(counts=counts))
    with suppress(InvalidRequest):
        create = reading.decode(json.dumps(body).encode())
        assert isinstance(create.input, list)
        decoded = tuple(decode_item(raw, f"input[{at}]") for at, raw in enumerate(create.input))
        resolve(create, Given(decoded), None)


@given(
    st.recursive(
        JSON,
        lambda inner: st.dictionaries(
            st.sampled_from(["model", "messages", "role", "content", "type", "tools"]), inner
        ),
    )
)
def test_any_json_is_a_turn_or_a_refusal(body: Any) -> None:
    reading = MessageReading(Memo(0), "ada", Surroundings())
    with suppress(InvalidRequest):
        reading.decode(json.dumps(body).encode())
