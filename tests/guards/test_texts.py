"""Which words of items and of a head are there to be looked at: all that the model reads."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any, cast

import msgspec
import pytest
from msgspec import Raw

from segue.dialects.messages import MessagesDialect
from segue.engines.chat import ChatEngine
from segue.engines.upstream import Upstream
from segue.errors import ApiError
from segue.guards.texts import URLS, texts_of, texts_of_head
from segue.mcp.definitions import listed_offers
from segue.seams.model import Job, Sampling, Scene
from segue.seams.prompt import Head, Messages
from segue.wire.codec import decode_item, decode_tools
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.items import Item, McpListTools
from segue.wire.requests import TextConfig, TextFormat
from segue.wire.tools import Tools
from tests.contracts.dialect import flat, item, message
from tests.contracts.test_dialects import MAKERS
from tests.contracts.turns import response_of
from tests.wire.test_items import EXAMPLES

PICTURE = "data:image/png;base64,iVBORw0KGgo="
BIRD = "kestrel"
# What is found only in its own form: JSON writes it in another way.
ODD_BIRD = 'kes"tr\nel'
HIDDEN = (BIRD, f"data:{BIRD}/x;base64,eA==", ODD_BIRD)
# Beside those of the contract, without what other servers have opened.
ITEMS = [
    *EXAMPLES,
    '{"type":"configuration_update","text":{"format":{"type":"json_schema","name":"n",'
    '"description":"d","schema":{"title":"t"}}}}',
    '{"type":"additional_tools","tools":[{"type":"function","name":"f","description":"d",'
    '"parameters":{"type":"object","properties":{"p":{"enum":["e"]}}}},'
    '{"type":"namespace","name":"crm","description":"d","tools":[{"type":"function","name":"g"}]}]}',
    '{"type":"mcp_approval_response","approval_request_id":"a","approve":false,"reason":"r"}',
    # Files that are read, by name.
    '{"role":"user","content":[{"type":"input_file","file_data":"eA==","filename":"a.txt"},'
    '{"type":"input_file","file_id":"file_1","filename":"b.bin"}]}',
    '{"role":"user","content":[{"type":"input_file","file_data":"eA==","filename":"a","segue:text":"t"}]}',
    '{"type":"function_call_output","call_id":"c","output":[{"type":"input_file","file_data":"eA==",'
    '"filename":"a.txt"},{"type":"input_image","image_url":"https://example.com/a.png"}]}',
]  # fmt: skip
TOOLS = (
    {"type": "function", "name": "f", "description": "d", "parameters": {"title": "t", "a": ["b"]}},
    {
        "type": "custom",
        "name": "c",
        "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
    },
    {
        "type": "namespace",
        "name": "crm",
        "description": "d",
        "tools": [{"type": "function", "name": "g"}],
    },
    {"type": "function", "name": "later", "description": "d", "defer_loading": True},
    {"type": "tool_search", "description": "d"},
    {"type": "shell"},
    {
        "type": "mcp",
        "server_label": "far",
        "server_description": "d",
        "server_url": "https://a.example",
    },
)
# What a remote server lists.
LISTED = {
    "server_label": "far",
    "tools": [
        {
            "name": "f",
            "description": "d",
            "input_schema": {"properties": {"p": {"description": "d", "enum": ["e"]}}},
            "annotations": {"title": "t"},
        }
    ],
}  # fmt: skip


def words(item: dict[str, Any]) -> list[str]:
    return texts_of([decode_item(json.dumps(item).encode(), "input[0]")])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":"f\\u006frbidden"}',
        '{"f\\u006frbidden":1}',
        '{"a":[{"b":"\\u0066orbidden"}]}',
        '{"a":' + "[" * 300 + '"f\\u006frbidden"' + "]" * 300 + "}",
        # JSON in JSON.
        '{"a":"{\\"b\\":\\"f\\\\u006frbidden\\"}"}',
        '{"a":"https:\\/\\/forbidden.example"}',
    ],
)
def test_letters_that_need_no_escape_are_found_behind_one(arguments: str) -> None:
    """Templates decode arguments: the model reads the letter."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    assert any("forbidden" in text and "\\" not in text for text in words(call))


def test_escaped_words_are_found_among_many_values() -> None:
    """So many that they are not taken apart at once; also where a text in it is JSON once more."""
    inner = json.dumps({"b": "proj\n\u00e9ct"})
    text = '{"n":[1' + ",1" * 70_000 + '],"a":' + json.dumps(inner) + ',"c":"no escape"}'
    found = words({"type": "function_call", "call_id": "c", "name": "f", "arguments": text})
    assert found == ["f", "c", text, inner, "proj\n\u00e9ct"]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "user", "content": "Hello."}, ["Hello."]),
        ({"role": "user", "content": "data: of a kind"}, ["data: of a kind"]),
        (
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See"},
                    {"type": "input_image", "image_url": PICTURE},
                    {"type": "input_image", "image_url": "https://a.example"},
                ],
            },
            [
                "See\n[image: image/png sent as data, which this model cannot see]\n"
                "[image: https://a.example, which this model cannot see]",
                "https://a.example",
            ],
        ),
        (
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
            ["call_1", "sun"],
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":"b\\nc"}'},
            ["f", "c", '{"a":"b\\nc"}', "b\nc"],
        ),
    ],
)
def test_words_of_an_item_are_those_that_the_model_reads(
    item: dict[str, Any], expected: list[str]
) -> None:
    assert words(item) == expected


def test_file_is_read_as_the_model_reads_it() -> None:
    data = base64.b64encode(b"Secret plans.").decode()
    part = {"type": "input_file", "filename": "plan.txt", "file_data": data}
    (found,) = words({"role": "user", "content": [part]})
    assert found == "[file: plan.txt]\nSecret plans.\n[end of file]"


def test_media_type_that_is_none_is_not_told() -> None:
    (found,) = words(
        {"role": "user", "content": [{"type": "input_image", "image_url": f"data:{BIRD} x,y"}]}
    )
    assert found == "[image: data sent as data, which this model cannot see]"


# --- hidden anywhere ------------------------------------------------------------------------------


def hiding(value: Any, bird: str) -> Iterator[Any]:
    """This JSON with the bird in place of each string, in place of each key, and in a field that nobody knows."""
    match value:
        case str():
            yield bird
            if value.startswith("{"):
                yield from map(json.dumps, hiding(json.loads(value), bird))
        case list():
            for n, inner in enumerate(value):
                for other in hiding(inner, bird):
                    yield [*value[:n], other, *value[n + 1 :]]
        case dict():
            for key, inner in value.items():
                yield {(bird if one == key else one): value[one] for one in value}
                for other in hiding(inner, bird):
                    yield value | {key: other}
            yield value | {"from_the_future": {bird: [bird]}}
        case _:
            yield bird


@cache
def hidden_items() -> list[tuple[str, Item]]:
    found: list[tuple[str, Item]] = []
    for raw, bird in product(ITEMS, HIDDEN):
        for value in hiding(json.loads(raw), bird):
            # Refused: it cannot be hidden there.
            with suppress(ApiError):
                found.append((bird, decode_item(json.dumps(value).encode(), "input[0]")))
    return found


def hidden_tools(bird: str) -> Iterator[Tools]:
    for value in hiding(list(TOOLS), bird):
        with suppress(ApiError):
            yield decode_tools(json.dumps(value).encode(), None)[0]


def forms(bird: str) -> list[str]:
    """How it may stand in a prompt: as it is, in JSON, in JSON inside of JSON."""
    if bird != ODD_BIRD:
        return [BIRD]
    once = json.dumps(bird)[1:-1]
    return [bird, once, json.dumps(once)[1:-1]]


def meant(bird: str) -> str:
    return bird if bird == ODD_BIRD else BIRD


@cache
def writer(name: str) -> Callable[[Scene], str]:
    """Writes the prompt of this family as text, or what a chat endpoint is sent."""
    if name == "chat":
        return chat_body
    family = MAKERS[name]()

    def write(scene: Scene) -> str:
        ids = flat(family.dialect.render(scene).prompt)
        return b"".join(family.vocabulary.bytes_of(id) for id in ids).decode(errors="replace")

    return write


def chat_body(scene: Scene) -> str:
    dialect = MessagesDialect()
    prompt = dialect.render(scene).prompt
    assert isinstance(prompt, Messages)
    engine = ChatEngine(cast(Upstream, None), "m", dialect)
    settings = engine._settings(Job(prompt, scene, Sampling(), frozenset(), None), frozenset())
    return engine._body(scene, prompt, settings).decode()


def scene_of(given: Sequence[Item], head: Head | None = None) -> Scene:
    return Scene(head or Head(), None, tuple(given), effects=apply_effects(NO_EFFECTS, given))


def in_company(hidden: Item) -> list[Item]:
    """The item in a conversation: families write calls and outputs only where they belong together."""
    call_id = getattr(hidden.value, "call_id", None)
    before, after = [message("user", "Hi")], [message("user", "Go on")]
    if isinstance(call_id, str):
        calls = item("function_call", call_id=call_id, name="f", arguments="{}")
        answers = item("function_call_output", call_id=call_id, output="o")
        is_output = "output" in str(type(hidden.value)).lower()
        before, after = ([*before, calls], after) if is_output else (before, [answers, *after])
    return [*before, hidden, *after]


@pytest.mark.parametrize("family", ["chat", *MAKERS])
def test_guards_see_whatever_the_model_reads_of_an_item(family: str) -> None:
    write = writer(family)
    told = 0
    for bird, hidden in hidden_items():
        try:
            text = write(scene_of(in_company(hidden)))
        except ApiError:
            continue
        if any(form in text for form in forms(bird)):
            told += 1
            assert any(meant(bird) in seen for seen in texts_of([hidden])), hidden.raw
    assert told > 300


@pytest.mark.parametrize("family", ["chat", *MAKERS])
def test_guards_see_whatever_the_model_reads_of_tools_and_format(family: str) -> None:
    write = writer(family)
    told = 0
    for bird in HIDDEN:
        heads = [Head(tools=tools) for tools in hidden_tools(bird)]
        schema = json.dumps({"title": bird, bird: 1}).encode()
        wanted = TextFormat(type="json_schema", name=bird, description=bird, schema=Raw(schema))
        for head in [*heads, Head(text=TextConfig(format=wanted)), Head(instructions=bird)]:
            text = write(scene_of([message("user", "Hi")], head))
            if any(form in text for form in forms(bird)):
                told += 1
                seen = texts_of_head(head, response_of("resp_1"), None)
                assert any(meant(bird) in one for one in seen), head
    assert told > 20


@pytest.mark.parametrize("family", ["chat", *MAKERS])
def test_guards_see_whatever_the_model_reads_of_a_remote_servers_tools(family: str) -> None:
    write = writer(family)
    told = 0
    for bird in HIDDEN:
        for value in hiding(LISTED, bird):
            with suppress(ApiError, msgspec.DecodeError):
                whole = {"type": "mcp_list_tools", "id": "mcpl_1", **value}
                listed = decode_item(json.dumps(whole).encode(), "input[0]")
                assert isinstance(listed.value, McpListTools)
                server = {"type": "mcp", "server_label": listed.value.server_label}
                tools, _ = decode_tools(json.dumps([server]).encode(), None)
                effects = apply_effects(NO_EFFECTS, [listed])
                head = Head(tools=tools.with_hosted(listed_offers(tools, effects, None)))
                text = write(scene_of([message("user", "Hi")], head))
                if any(form in text for form in forms(bird)):
                    told += 1
                    assert any(meant(bird) in seen for seen in texts_of([listed])), value
    assert told > 5


# --- nothing else ---------------------------------------------------------------------------------


def is_read(family: str, hidden: Item, bird: str) -> bool:
    try:
        text = writer(family)(scene_of(in_company(hidden)))
    except ApiError:
        return False
    return any(form in text for form in forms(bird))


# The model knows these from elsewhere (the tools of a remote server, a call that was approved), or they are fetched.
ELSEWHERE = {"mcp_list_tools", "mcp_approval_response", "mcp_approval_request", "additional_tools"}


def test_what_no_model_reads_is_no_reason_to_block() -> None:
    """A word in a place of an item that no family writes is not shown to guards."""
    unread = 0
    for bird, hidden in hidden_items():
        kind = json.loads(bytes(hidden.raw)).get("type")
        seen = any(meant(bird) in text for text in texts_of([hidden]))
        if kind in ELSEWHERE or not seen:
            unread += not seen
            continue
        raw = bytes(hidden.raw).decode()
        is_url = any(f'"{name}": {json.dumps(bird)}' in raw for name in URLS)
        is_told = is_url or any(is_read(family, hidden, bird) for family in ("chat", *MAKERS))
        assert is_told, hidden.raw
    assert unread > 100


@pytest.mark.parametrize("unread", ["1e999", "9" * 400, "[" * 900 + "]" * 900])
def test_tools_of_a_remote_server_are_read_whatever_their_unread_fields_hold(unread: str) -> None:
    raw = (
        '{"type":"mcp_list_tools","id":"mcpl_1","server_label":"s","tools":[{"name":"find",'
        f'"input_schema":{{"title":"kestrel"}},"annotations":{{"x":{unread}}}}}]}}'
    )
    assert any(BIRD in text for text in texts_of([decode_item(raw.encode(), "input")]))
