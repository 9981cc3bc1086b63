"""Tools of the contract's own, and tools and settings that items bring, in every family.

A shell, patches and the search for tools are functions to the model. What the model writes for them comes back as items
of their own types; what a client sends back of these is written as the model wrote it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from segue.dialects.messages import MessagesDialect
from segue.seams.model import Delta, Deltas, Scene
from segue.seams.prompt import Head
from segue.wire.codec import decode_item, decode_tools
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.items import Item
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import Tools
from tests.contracts.dialect import (
    DialectCase,
    call,
    cold,
    flat,
    heard,
    item,
    message,
    read,
    turn_after,
)
from tests.contracts.test_dialects import MAKERS
from tests.turn.test_assemble import assembler as new_assembler

SHELL = '{"commands": ["ls -l", "cat <<\'E\'\\n\\"ü\\"\\nE"], "timeout_ms": 900}'
LOCAL = '{"command": ["ls", "-l"], "env": {"A": "b"}, "working_directory": "/tmp"}'
PATCH = '{"type": "update_file", "path": "a.py", "diff": "@@\\n-x = 1\\n+x = \\"2\\"\\n"}'
REMOVE = '{"type": "delete_file", "path": "a.py", "diff": ""}'
SEARCH = '{"query": "a bill"}'
CALLS = [
    ("shell", SHELL, "shell_call"),
    ("local_shell", LOCAL, "local_shell_call"),
    ("apply_patch", PATCH, "apply_patch_call"),
    ("apply_patch", REMOVE, "apply_patch_call"),
    ("tool_search", SEARCH, "tool_search_call"),
]
PAY = {"type": "function", "name": "pay", "description": "Pays a bill.", "defer_loading": True}
BUILTINS = [
    {"type": "shell"},
    {"type": "local_shell"},
    {"type": "apply_patch"},
    {"type": "tool_search"},
    {"type": "web_search"},
    PAY,
]


@pytest.fixture(scope="module", params=MAKERS)
def family(request: pytest.FixtureRequest) -> DialectCase:
    return MAKERS[request.param]()


def tools(*definitions: dict[str, Any]) -> Tools:
    return decode_tools(json.dumps(definitions).encode(), None)[0]


def scene_of(*given: Item, head: Head | None = None, can_constrain: bool = False) -> Scene:
    return Scene(
        head or Head(),
        None,
        given,
        can_constrain=can_constrain,
        effects=apply_effects(NO_EFFECTS, given),
    )


OFFERING = scene_of(message("user", "Hi"), head=Head(tools=tools(*BUILTINS)))


def assembled(family: DialectCase, scene: Scene, ids: list[int]) -> list[Item]:
    """The items that a client gets for what was sampled."""
    assembler = new_assembler()
    assembler.start()
    assembler.feed(read(family.dialect, scene, [ids]))
    return assembler.items


def told(family: DialectCase, scene: Scene) -> str:
    """The prompt as text."""
    ids = flat(family.dialect.render(scene).prompt)
    return b"".join(family.vocabulary.bytes_of(id) for id in ids).decode()


@pytest.mark.parametrize("name, arguments, kind", CALLS)
def test_call_of_a_builtin_is_an_item_of_its_own_type(
    family: DialectCase, name: str, arguments: str, kind: str
) -> None:
    ids = family.dialect.write([call(name, arguments)]).tolist()

    (found,) = heard(read(family.dialect, OFFERING, [ids]))
    (made,) = assembled(family, OFFERING, ids)

    assert (found.kind, found.name, json.loads(found.text)) == (name, name, json.loads(arguments))
    assert json.loads(made.raw)["type"] == kind
    # A client that sends it back by itself makes the model read what it wrote.
    again = decode_item(made.raw, "input[0]")
    assert family.dialect.write([again]).tolist() == ids


@pytest.mark.parametrize("name, arguments, kind", CALLS)
def test_without_the_tool_the_same_words_call_a_function(
    family: DialectCase, name: str, arguments: str, kind: str
) -> None:
    scene = scene_of(message("user", "Hi"), head=Head(tools=tools(PAY)))
    ids = family.dialect.write([call(name, arguments)]).tolist()

    for one in heard(read(family.dialect, scene, [ids])):
        assert one.kind in ("function", "message")


def test_model_is_told_of_what_the_client_can_run(family: DialectCase) -> None:
    prompt = told(family, OFFERING)

    for name in ("shell", "local_shell", "apply_patch", "tool_search", "commands", "query"):
        assert name in prompt
    assert "- pay: Pays a bill." in prompt.replace("\\n", "\n")
    assert "web_search" not in prompt


@pytest.mark.parametrize("kind", ["shell", "apply_patch"])
def test_builtin_can_be_forced(family: DialectCase, kind: str) -> None:
    head = Head(tools=tools(*BUILTINS), tool_choice=ToolChoiceName(type=kind))
    scene = scene_of(message("user", "Hi"), head=head, can_constrain=True)

    rendered = family.dialect.render(scene)

    assert rendered.schema is not None
    assert isinstance(rendered.schema, bytes)
    schema = json.loads(rendered.schema)
    inner = schema["properties"].get("arguments", schema)
    assert ("commands" if kind == "shell" else "diff") in inner["properties"]


ADDED = item(
    "additional_tools",
    role="developer",
    tools=[
        {"type": "function", "name": "sed", "parameters": {"type": "object"}},
        {"type": "shell"},
        {"type": "namespace", "name": "fs", "tools": [{"type": "custom", "name": "write"}]},
        {"type": "mcp", "server_label": "secret-place"},
    ],
)


def test_tools_that_an_item_brings_are_told_where_it_stands(family: DialectCase) -> None:
    """What stands before them stays, warm or cold, and hosted tools are not told."""
    first = scene_of(message("user", "Hello"))
    past = turn_after(
        family.dialect, first, family.dialect.write([message("assistant", "Hi")])[:-1]
    )
    scene = msgspec.structs.replace(scene_of(ADDED, message("user", "Go")), past=past)

    rendered = family.dialect.render(scene)

    before = flat(family.dialect.render(first).context)
    assert flat(rendered.context)[: len(before)] == before
    assert flat(rendered.prompt) == flat(family.dialect.render(cold(scene)).prompt)
    prompt = told(family, scene)
    assert "sed" in prompt
    assert "commands" in prompt
    assert "secret-place" not in prompt


@pytest.mark.parametrize(
    "written, kind, name, namespace",
    [
        (call("sed", "{}"), "function", "sed", None),
        (call("shell", SHELL), "shell", "shell", None),
        (item("custom_tool_call", call_id="c", name="write", input="x", namespace="fs"), "custom", "write", "fs"),
    ],
)  # fmt: skip
def test_tools_that_an_item_brings_can_be_called(
    family: DialectCase, written: Item, kind: str, name: str, namespace: str | None
) -> None:
    ids = family.dialect.write([written]).tolist()

    (found,) = heard(read(family.dialect, scene_of(ADDED, message("user", "Go")), [ids]))

    assert (found.kind, found.name, found.namespace) == (kind, name, namespace)


@pytest.mark.parametrize(
    "choice", [ToolChoiceName(type="function", name="sed"), ToolChoiceName(type="shell")]
)
def test_tools_that_an_item_brings_can_be_forced(
    family: DialectCase, choice: ToolChoiceName
) -> None:
    scene = scene_of(
        ADDED, message("user", "Go"), head=Head(tool_choice=choice), can_constrain=True
    )

    assert family.dialect.render(scene).schema is not None


SEARCHED = item(
    "tool_search_call", id="tsc_7", call_id="call_7", execution="client", arguments={"query": "x"}
)
FOUND = item(
    "tool_search_output",
    call_id="call_7",
    execution="client",
    tools=[{"type": "function", "name": "pay", "description": "Pays.", "defer_loading": True}],
)


def test_tool_that_a_search_has_found_is_appended_and_can_be_called(family: DialectCase) -> None:
    head = Head(tools=tools(*BUILTINS))
    first = scene_of(message("user", "Pay"), head=head)
    past = turn_after(family.dialect, first, family.dialect.write([SEARCHED])[:-1])
    effects = apply_effects(NO_EFFECTS, [FOUND])
    scene = Scene(head, past, (FOUND,), effects=effects)

    rendered = family.dialect.render(scene)

    before = flat(family.dialect.render(first).context)
    assert flat(rendered.context)[: len(before)] == before
    assert "Pays." in told(family, scene)
    (found,) = heard(
        read(family.dialect, scene, [family.dialect.write([call("pay", "{}")]).tolist()])
    )
    assert (found.kind, found.name) == ("function", "pay")


def test_search_that_found_nothing_says_so(family: DialectCase) -> None:
    nothing = item("tool_search_output", call_id="call_7", execution="client", tools=[])

    assert "No tool was found." in told(family, scene_of(message("user", "Pay"), SEARCHED, nothing))


SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object", "title": "Wanted"}}


def test_settings_that_an_item_brings_hold_until_the_next(family: DialectCase) -> None:
    format_ = item("configuration_update", text={"format": SCHEMA})
    plain = item("configuration_update", text={"format": {"type": "text"}})
    user = message("user", "Hi")

    held = scene_of(format_, user, can_constrain=True)
    over = scene_of(format_, user, plain, can_constrain=True)

    wanted = family.dialect.render(held).schema
    assert isinstance(wanted, bytes)
    assert json.loads(wanted)["title"] == "Wanted"
    assert family.dialect.render(over).schema is None
    assert "Wanted" in told(family, held)


def test_effort_that_an_item_brings_changes_nothing_before_it(family: DialectCase) -> None:
    first = scene_of(message("user", "Hello"))
    past = turn_after(
        family.dialect, first, family.dialect.write([message("assistant", "Hi")])[:-1]
    )
    effort = item("configuration_update", reasoning={"effort": "high"})
    given = (effort, message("user", "Go"))
    scene = Scene(Head(), past, given, effects=apply_effects(NO_EFFECTS, given))

    before = flat(family.dialect.render(first).context)
    assert flat(family.dialect.render(scene).context)[: len(before)] == before
    assert "high" in told(family, scene)


# --- chat endpoints -------------------------------------------------------------------------------


def chat_read(scene: Scene, name: str, arguments: str) -> list[Item]:
    assembler = new_assembler()
    assembler.start()
    reader = MessagesDialect().reader(scene)
    piece = Deltas((Delta(call_index=0, call_name=name, call_arguments=arguments),))
    assembler.feed([*reader.feed(piece), *reader.close(is_cut=False)])
    return assembler.items


def chat_rows(scene: Scene) -> list[dict[str, Any]]:
    chunks = MessagesDialect().render(scene).prompt.chunks()
    data = b",".join(chunk for chunk in chunks if isinstance(chunk, bytes))
    rows: list[dict[str, Any]] = json.loads(b"[" + data + b"]")
    return rows


@pytest.mark.parametrize("name, arguments, kind", CALLS)
def test_chat_endpoint_calls_builtins_too(name: str, arguments: str, kind: str) -> None:
    (made,) = chat_read(OFFERING, name, arguments)

    assert json.loads(made.raw)["type"] == kind
    (row,) = chat_rows(scene_of(decode_item(made.raw, "input[0]")))
    function = row["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == (name, json.loads(arguments))


def test_chat_endpoint_sees_our_own_search_and_what_it_found_as_a_pair() -> None:
    called = item("tool_search_call", id="tsc_7", call_id=None, execution="server", arguments={})
    found = item("tool_search_output", id="tso_7", call_id=None, execution="server", tools=[PAY])

    first, second = chat_rows(scene_of(called, found))

    assert first["tool_calls"][0]["id"] == second["tool_call_id"]
    assert "Pays a bill." in second["content"]


@pytest.mark.parametrize(
    "made, words",
    [
        (
            item(
                "shell_call_output",
                call_id="c",
                output=[
                    {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 3}},
                    {"stdout": "", "stderr": "b", "outcome": {"type": "timeout"}},
                ],
            ),
            '[{"stdout": "a", "stderr": "", "exit_code": 3}, {"stdout": "", "stderr": "b", "timed_out": true}]',
        ),
        (item("local_shell_call_output", id="c", output="out"), "out"),
        (
            item("apply_patch_call_output", call_id="c", status="failed", output="no"),
            '{"status": "failed", "output": "no"}',
        ),
    ],
)
def test_outputs_of_builtins_are_told_with_their_call(made: Item, words: str) -> None:
    (row,) = chat_rows(scene_of(made))

    assert row == {"role": "tool", "tool_call_id": "c", "content": words}
