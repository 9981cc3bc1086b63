"""How is the API described to machines? An OpenAPI document for HTTP, an AsyncAPI document for the WebSocket.

In: the routes of the APIs that are on and of the server itself, and the schemas of the wire types. Out: JSON, made
once. A route without an entry here is left out, and a test names it. Pages for people are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from segue import __version__
from segue.openapi.schema import OBJECT, STRING, Schema, SchemaValue, event_names, ref, schemas
from segue.wire.codec import encode

JSON = "application/json"
SSE = "text/event-stream"
PLAIN = "text/plain"
BINARY = "application/octet-stream"
FORM = "multipart/form-data"

# What a WebSocket client may send, by event type.
CLIENT_EVENTS = {
    "response.create": "Create",
    "response.steer": "SteerFrame",
    "response.append": "AppendFrame",
}


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The request and the answers of one route: schemas by name, "" where there is none."""

    does: str
    gives: str = ""
    takes: str = ""
    query: tuple[str, ...] = ()
    also: tuple[int, ...] = ()
    # Whether the answer may be a stream of events, or is no JSON at all.
    is_stream: bool = False
    is_text: bool = False
    # Where its shapes are described, if they are another API's; and whether its errors are too.
    reference: str = ""
    has_own_errors: bool = False
    # What is uploaded as a form, or downloaded as bytes.
    takes_form: bool = False
    is_binary: bool = False


OPENAI = "https://platform.openai.com/docs/api-reference/"
ANTHROPIC = "https://platform.claude.com/docs/en/api/messages"
PAGE = ("after", "limit", "order")
# By method and path, in the order of docs/protocol.md.
OPERATIONS: dict[str, RouteDoc] = {
    "POST /v1/responses": RouteDoc(
        "Create a response; with `stream` its events.", "Response", "Create", is_stream=True
    ),
    "POST /v1/responses/compact": RouteDoc(
        "Compact a conversation; the output is the input of a new chain.",
        "CompactionWindow",
        "Create",
    ),
    "POST /v1/responses/input_tokens": RouteDoc(
        "Count the tokens of a prompt; nothing is generated.", "InputTokens", "Create"
    ),
    "GET /v1/responses/{id}": RouteDoc(
        "Retrieve a stored response; with `stream` its events, from any number on.",
        "Response",
        query=("stream", "starting_after"),
        is_stream=True,
    ),
    "POST /v1/responses/{id}/cancel": RouteDoc(
        "Cancel a response that runs in the background.", "Response"
    ),
    "DELETE /v1/responses/{id}": RouteDoc("Delete a stored response.", "Deleted"),
    "GET /v1/responses/{id}/input_items": RouteDoc(
        "List the input items of a stored response.", "ItemList", query=PAGE
    ),
    "GET /v1/responses/{id}/cache": RouteDoc(
        "What of the prompt of a response was reused, and what was not.", "CacheReport"
    ),
    "POST /v1/conversations": RouteDoc(
        "Create a conversation.", "ConversationObject", "NewConversation"
    ),
    "GET /v1/conversations/{id}": RouteDoc("One conversation.", "ConversationObject"),
    "POST /v1/conversations/{id}": RouteDoc(
        "Change the metadata of a conversation.", "ConversationObject", "NewConversation"
    ),
    "DELETE /v1/conversations/{id}": RouteDoc("Delete a conversation.", "ConversationDeleted"),
    "GET /v1/conversations/{id}/items": RouteDoc(
        "List the items of a conversation.", "ItemList", query=PAGE
    ),
    "POST /v1/conversations/{id}/items": RouteDoc(
        "Add items to a conversation.", "ItemList", "AddedItems"
    ),
    "GET /v1/conversations/{id}/items/{item_id}": RouteDoc(
        "One item of a conversation.", "ListedItem"
    ),
    "DELETE /v1/conversations/{id}/items/{item_id}": RouteDoc(
        "Delete an item of a conversation.", "ConversationObject"
    ),
    "POST /v1/messages": RouteDoc(
        "Create a message; with `stream` its events.", reference=ANTHROPIC, has_own_errors=True
    ),
    "POST /v1/messages/count_tokens": RouteDoc(
        "Count the tokens of a message's prompt.", reference=ANTHROPIC, has_own_errors=True
    ),
    "POST /v1/chat/completions": RouteDoc(
        "Create a chat completion; with `stream` its chunks.", reference=f"{OPENAI}chat"
    ),
    "GET /v1/chat/completions": RouteDoc("No completion is stored: always 404."),
    "GET /v1/chat/completions/{id}": RouteDoc("No completion is stored: always 404."),
    "POST /v1/completions": RouteDoc(
        "Passed on to the engine of the model; with `stream` its chunks.",
        reference=f"{OPENAI}completions",
    ),
    "POST /v1/embeddings": RouteDoc(
        "Passed on to the engine of the model.", reference=f"{OPENAI}embeddings"
    ),
    "POST /v1/files": RouteDoc("Upload a file.", takes_form=True),
    "GET /v1/files": RouteDoc("List the files of the caller.", query=PAGE),
    "GET /v1/files/{id}": RouteDoc("One file, without its contents."),
    "GET /v1/files/{id}/content": RouteDoc("The contents of a file.", is_binary=True),
    "DELETE /v1/files/{id}": RouteDoc("Delete a file."),
    "POST /v1/skills": RouteDoc("Keep a skill.", takes_form=True),
    "GET /v1/skills": RouteDoc("List the skills of the caller.", query=PAGE),
    "GET /v1/skills/{id}": RouteDoc("One skill."),
    "POST /v1/skills/{id}": RouteDoc("Choose the default version of a skill."),
    "DELETE /v1/skills/{id}": RouteDoc("Delete a skill with its versions."),
    "GET /v1/skills/{id}/content": RouteDoc("The zip of a default version.", is_binary=True),
    "POST /v1/skills/{id}/versions": RouteDoc("Add a version to a skill.", takes_form=True),
    "GET /v1/skills/{id}/versions": RouteDoc("List the versions of a skill.", query=PAGE),
    "GET /v1/skills/{id}/versions/{version}": RouteDoc("One version of a skill."),
    "DELETE /v1/skills/{id}/versions/{version}": RouteDoc("Delete a version of a skill."),
    "GET /v1/skills/{id}/versions/{version}/content": RouteDoc(
        "The zip of a version.", is_binary=True
    ),
    "GET /v1/models": RouteDoc("List the models.", "ModelList"),
    "GET /v1/models/{id}": RouteDoc("One model.", "ModelCard"),
    "GET /v1/organization/usage/completions": RouteDoc(
        "Tokens by day or month, key, owner and model.", reference=f"{OPENAI}usage/completions"
    ),
    "GET /health": RouteDoc("Whether the process is alive."),
    "GET /api/hello": RouteDoc("The same, where Claude Code looks first."),
    "GET /ready": RouteDoc("Whether engine and store answer.", also=(503,)),
    "GET /metrics": RouteDoc("Counters, in Prometheus' format.", is_text=True),
    "GET /openapi.json": RouteDoc("This document."),
    "GET /asyncapi.json": RouteDoc("WebSocket mode, as an AsyncAPI document."),
}

QUERY: dict[str, tuple[Schema, str]] = {
    "after": ({"type": "string"}, "The id of the item before the page."),
    "limit": ({"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "At most so many."),
    "order": ({"enum": ["asc", "desc"], "default": "desc"}, "Oldest or newest first."),
    "starting_after": (
        {"type": "integer", "minimum": 0},
        "With `stream`: the number of the last event that was heard.",
    ),
    "stream": ({"type": "boolean", "default": False}, "As a stream of events."),
}

HEADERS: Schema = {
    "RequestId": {
        "description": "Names this request in our logs.",
        "schema": {"type": "string", "pattern": "^req_"},
    },
    "RetryAfter": {
        "description": "Seconds to wait; with 429 and 503.",
        "schema": {"type": "integer"},
    },
}
REQUEST_ID: Schema = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
RETRY_AFTER: Schema = {"retry-after": {"$ref": "#/components/headers/RetryAfter"}}
ERROR: Schema = {
    "description": "Refused, or failed; `code` says why.",
    "headers": {**REQUEST_ID, **RETRY_AFTER},
    "content": {JSON: {"schema": ref("ErrorBody")}},
}

OWN_ERROR: Schema = {
    "description": "Refused, or failed, in the words of this API.",
    "headers": {**REQUEST_ID, **RETRY_AFTER},
    "content": {JSON: {"schema": OBJECT}},
}


FILE_FORM: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": STRING},
}


@cache
def openapi(routes: tuple[tuple[str, str], ...]) -> bytes:
    """The OpenAPI document of these routes, each a method and a path."""
    paths: dict[str, SchemaValue] = {}
    for verb, path in routes:
        operation = OPERATIONS.get(f"{verb} {path}")
        if operation is not None:
            entry = paths.setdefault(path, {})
            assert isinstance(entry, dict)
            entry[verb.lower()] = _operation(verb, path, operation)
    return encode(
        {
            "openapi": "3.1.0",
            "info": _info(
                "The Responses API over HTTP: JSON and server-sent events; Messages and Chat Completions beside it."
            ),
            "paths": paths,
            "components": {
                "schemas": schemas(),
                "headers": HEADERS,
                "responses": {"Error": ERROR, "OwnError": OWN_ERROR},
            },
        }
    )


@cache
def asyncapi() -> bytes:
    """The AsyncAPI document of WebSocket mode."""
    sent = event_names()
    messages = {
        _key(name): {"name": name, "contentType": JSON, "payload": ref(schema)}
        for name, schema in {**CLIENT_EVENTS, **sent}.items()
    }
    return encode(
        {
            "asyncapi": "3.0.0",
            "info": _info(
                "The Responses API in WebSocket mode: one JSON object in each text frame."
            ),
            "defaultContentType": JSON,
            "channels": {
                "responses": {
                    "address": "/v1/responses",
                    "description": "An upgrade of GET on the path that takes POST; no subprotocol.",
                    "messages": {key: {"$ref": f"#/components/messages/{key}"} for key in messages},
                    "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
                }
            },
            "operations": {
                "take": _direction("receive", CLIENT_EVENTS, "What a client may ask."),
                "tell": _direction("send", sent, "The events of every turn, by lane in order."),
            },
            "components": {
                "messages": messages,
                "schemas": {name: _for_async(schema) for name, schema in schemas().items()},
            },
        }
    )


def _info(words: str) -> Schema:
    return {"title": "Segue", "version": __version__, "description": words}


def _operation(verb: str, path: str, operation: RouteDoc) -> Schema:
    names = re.findall(r"{(\w+)}", path)
    parameters = [_parameter(name, "path", {"type": "string"}, "") for name in names]
    parameters += [_parameter(name, "query", *QUERY[name]) for name in operation.query]
    statuses: Schema = {str(status): _answer(operation) for status in (200, *operation.also)}
    error = "OwnError" if operation.has_own_errors else "Error"
    entry: Schema = {
        "operationId": _key(f"{verb.lower()}{path}"),
        "summary": operation.does,
        "parameters": [*parameters],
        "responses": {**statuses, "default": {"$ref": f"#/components/responses/{error}"}},
    }
    if operation.reference:
        entry["externalDocs"] = {"url": operation.reference}
    if operation.takes_form:
        entry["requestBody"] = {"required": True, "content": {FORM: {"schema": FILE_FORM}}}
    elif operation.takes or operation.reference:
        taken = ref(operation.takes) if operation.takes else OBJECT
        body: Schema = {JSON: {"schema": taken}}
        entry["requestBody"] = {"required": True, "content": body}
    return entry


def _parameter(name: str, place: str, schema: Schema, words: str) -> Schema:
    entry: Schema = {"name": name, "in": place, "required": place == "path", "schema": schema}
    return {**entry, "description": words} if words else entry


def _answer(operation: RouteDoc) -> Schema:
    content: Schema = {JSON: {"schema": ref(operation.gives) if operation.gives else OBJECT}}
    if operation.is_binary:
        content = {BINARY: {"schema": STRING}}
    if operation.is_text:
        content = {PLAIN: {"schema": STRING}}
    if operation.is_stream:
        content[SSE] = {"schema": ref("Event")}
    return {"description": operation.does, "headers": REQUEST_ID, "content": content}


def _key(name: str) -> str:
    """A name without the characters that keys of these documents may not have."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def _direction(action: str, names: Iterable[str], words: str) -> Schema:
    channel = "#/channels/responses"
    messages: list[SchemaValue] = [{"$ref": f"{channel}/messages/{_key(name)}"} for name in names]
    return {"action": action, "channel": {"$ref": channel}, "summary": words, "messages": messages}


def _for_async(node: SchemaValue) -> SchemaValue:
    """A schema as AsyncAPI writes it: there a discriminator is only the name of its field."""
    match node:
        case {"propertyName": str(name), "mapping": _}:
            return name
        case dict():
            return {key: _for_async(value) for key, value in node.items()}
        case list():
            return [_for_async(value) for value in node]
        case _:
            return node
