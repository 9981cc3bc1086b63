"""The two documents are valid, describe every route and event, and leave no field unsaid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import validate

from segue.openapi.pages import CLIENT_EVENTS, OPERATIONS, asyncapi, openapi
from segue.openapi.schema import RAW, REF, SENT, TAKEN, WRITTEN, event_names, schemas
from segue.skills.api import skills_api
from segue.wire.codec import decode_create, decode_item, decode_tools
from segue.wire.events import EVENT_TYPES
from tests.clients.outside import NODE_MODULES
from tests.listener.doubles import described_routes
from tests.support import fetch, serving
from tests.wire.test_items import EXAMPLES as ITEMS
from tests.wire.test_tools import EXAMPLES as TOOLS

# Raw fields that the documents do not describe: they are passed on as they came. By `Type.field`, or by `field`.
UNREAD = {
    "Create.client_metadata",
    "Create.moderation",
    "SteerRef.input",
    "InputAudio.input_audio",
    "WebSearchCall.action",
    "FileSearchCall.results",
    "CodeInterpreterCall.outputs",
    "ComputerCall.action",
    "ComputerCall.actions",
    "ComputerCall.pending_safety_checks",
    "ComputerCallOutput.output",
    "ComputerCallOutput.acknowledged_safety_checks",
    "McpListTools.error",
    "McpCall.error",
    "ShellCall.environment",
    "ToolSearchCall.arguments",
    "ProgramOutput.result",
    "CustomTool.format",
    "McpTool.allowed_tools",
    "McpTool.require_approval",
    "filters",
    "FileSearchTool.ranking_options",
    "CodeInterpreterTool.container",
}

ASYNCAPI = NODE_MODULES / "@asyncapi" / "specs" / "schemas" / "3.0.0.json"


@pytest.fixture(scope="module")
def routes() -> tuple[tuple[str, str], ...]:
    return described_routes()


@pytest.fixture(scope="module")
def http_document(routes: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi(routes))
    return found


@pytest.fixture(scope="module")
def socket_document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asyncapi())
    return found


def test_openapi_document_is_valid(http_document: dict[str, Any]) -> None:
    validate(http_document)


def test_asyncapi_document_is_valid(socket_document: dict[str, Any]) -> None:
    jsonschema.Draft7Validator(json.loads(ASYNCAPI.read_text())).validate(socket_document)


def test_every_route_is_described_and_nothing_else_is(
    routes: tuple[tuple[str, str], ...], http_document: dict[str, Any]
) -> None:
    known = {f"{verb} {path}" for verb, path in routes}
    # Served where there are sandboxes.
    late = skills_api(NotImplemented).routes(NotImplemented)
    assert known | {f"{route.verb} {route.name}" for route in late} == set(OPERATIONS)
    told = {
        f"{verb.upper()} {path}" for path, one in http_document["paths"].items() for verb in one
    }
    assert told == known


def test_every_answer_names_its_request_and_may_be_an_error(http_document: dict[str, Any]) -> None:
    for name, path in http_document["paths"].items():
        # Messages has a shape of its own.
        error = "OwnError" if name.startswith("/v1/messages") else "Error"
        for operation in path.values():
            assert operation["responses"]["default"] == {"$ref": f"#/components/responses/{error}"}
            assert "x-request-id" in operation["responses"]["200"]["headers"]
    errors = http_document["components"]["responses"]
    for error in errors.values():
        assert set(error["headers"]) == {"x-request-id", "retry-after"}
    assert errors["Error"]["content"]["application/json"]["schema"] == {"$ref": REF + "ErrorBody"}


def test_every_event_is_a_message_and_nothing_else_is(socket_document: dict[str, Any]) -> None:
    told = {one["name"] for one in socket_document["components"]["messages"].values()}
    tags = {str(kind.__struct_config__.tag) for kind in EVENT_TYPES}
    assert told == tags | set(CLIENT_EVENTS)
    assert set(event_names()) == tags


def pointers(node: object) -> Iterator[str]:
    match node:
        case dict():
            if "$ref" in node:
                yield node["$ref"]
            for one in node.values():
                yield from pointers(one)
        case list():
            for one in node:
                yield from pointers(one)


@pytest.mark.parametrize("name", ["http", "socket"])
def test_every_pointer_leads_somewhere(name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(f"{name}_document")
    for pointer in set(pointers(found)):
        node: Any = found
        for step in pointer.removeprefix("#/").split("/"):
            node = node[step]


def is_open(schema: Any) -> bool:
    if "anyOf" in schema:
        return any(map(is_open, schema["anyOf"]))
    return is_open(schema["items"]) if "items" in schema else not schema.keys() - {"default"}


def test_every_raw_field_is_said() -> None:
    """The structs keep some fields raw; each is in one of two tables, and nothing else is."""
    kinds = (*TAKEN, *SENT, *WRITTEN)
    _, parts = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
    raw = {
        f"{name}.{field}"
        for name, schema in parts.items()
        for field, one in schema["properties"].items()
        if is_open(one)
    }
    said = RAW.keys() | UNREAD
    bare = {one.partition(".")[2] for one in raw}
    assert {one for one in raw if one not in said and one.partition(".")[2] not in said} == set()
    assert {one for one in said if one not in raw | bare} == set()


def check(name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": REF + name, "components": {"schemas": schemas()}}
    return jsonschema.Draft202012Validator(schema)


def test_document_takes_every_item_that_we_take() -> None:
    checks = check("InputItem")
    for raw in ITEMS:
        decode_item(raw.encode(), "input[0]")
        assert checks.is_valid(json.loads(raw)), raw


def test_document_takes_an_action_without_its_type_as_we_do() -> None:
    raw = '{"type":"local_shell_call","call_id":"c","action":{"command":["ls"]}}'
    decode_item(raw.encode(), "input[0]")
    assert check("InputItem").is_valid(json.loads(raw))


def test_document_takes_every_tool_that_we_take() -> None:
    checks = check("Tool")
    for raw in TOOLS:
        decode_tools(f"[{raw}]".encode(), None)
        assert checks.is_valid(json.loads(raw)), raw


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": "hot"},
        {"input": 5},
        {"metadata": {"a": 1}},
        {"stream": "yes"},
        {"reasoning": {"effort": "huge"}},
        {"tool_choice": "sometimes"},
        {"top_logprobs": 21},
    ],
)
def test_document_and_server_refuse_the_same(body: dict[str, Any]) -> None:
    assert not check("Create").is_valid(body)
    with pytest.raises(Exception, match="Invalid value"):
        decode_create(json.dumps(body).encode())


async def test_documents_are_served_and_are_the_same_bytes_each_time() -> None:
    async with serving() as served:
        for path in ("/openapi.json", "/asyncapi.json"):
            first, second = [await fetch(served, "GET", path) for _ in range(2)]
            assert first.status == second.status == 200
            assert first.headers["content-type"] == "application/json"
            assert first.body == second.body
            assert (await fetch(served, "POST", path)).status == 405
