"""HTTP requests made from our own OpenAPI document, right and wrong ones, and what every answer must be.

`ask` makes them, by Schemathesis: from the schemas of an operation alone they would hardly ever name a model that is
served or a response that exists, so `lively` puts such names into most of them. `check` sends one to a real server and
holds the answer against the same document; a stream of events is read to its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from segue.openapi.pages import openapi
from tests.events import check_turn
from tests.listener.doubles import described_routes
from tests.support import MODEL, WEATHER, Answer, served_process

NAMES_OF_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)
# All that docs/errors.md lets a request come to that is not load, keys or a stop of the server.
STATUSES = {200, 400, 404, 405, 409, 413, 415}
ANSWER_S_MAX = 30
# The document does not say, and need not, which fields belong to the socket or cannot be had here.
ELSEWHERE = ("stream_id", "rollout", "prompt", "idempotency_key")

load_all_checks()
CHECK_LIST = [CHECKS.get_one(name) for name in NAMES_OF_CHECKS]
BUT_SCHEMA = [
    CHECKS.get_one(name) for name in NAMES_OF_CHECKS if name != "response_schema_conformance"
]


def document() -> dict[str, Any]:
    """Our own, as it is served."""
    told: dict[str, Any] = json.loads(openapi(described_routes()))
    return told


SCHEMA = schemathesis.openapi.from_dict(document())
EVENT = jsonschema.Draft202012Validator(
    {"$ref": "#/components/schemas/Event", "components": document()["components"]}
)
OPERATIONS = {one.ok().label: one.ok() for one in SCHEMA.get_all_operations()}
# Only where there is a body or a query can a request be wrong: in a path everything is a string.
ASKED = [
    (label, mode)
    for label, one in OPERATIONS.items()
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or list(one.body) or list(one.query)
]


@dataclass(frozen=True)
class Place:
    """A server, and what is there to be named."""

    url: str
    response_id: str
    conversation_id: str
    item_id: str


def furnish(url: str) -> Place:
    """Put a response and a conversation into a server."""
    body = {"model": MODEL, "input": "Weather?", "tools": [WEATHER]}
    response = requests.post(f"{url}/v1/responses", json=body, timeout=ANSWER_S_MAX).json()
    said = {"items": [{"role": "user", "content": "Hello"}]}
    talk = requests.post(f"{url}/v1/conversations", json=said, timeout=ANSWER_S_MAX).json()
    path = f"{url}/v1/conversations/{talk['id']}/items"
    items = requests.get(path, timeout=ANSWER_S_MAX).json()
    return Place(url, response["id"], talk["id"], items["data"][0]["id"])


@contextmanager
def furnished(folder: Path) -> Iterator[Place]:
    """A server of its own with something in it, which must not have complained at the end."""
    with served_process("--store", "memory", cwd=folder) as served:
        yield furnish(served.url)
    loud = [line for line in served.printed if "Traceback" in line or " ERROR " in line]
    assert not loud, "".join(served.printed)[-3000:]


def ask(place: Place, label: str, mode: GenerationMode, how: settings) -> None:
    """Requests of one operation, right or wrong ones, as many as the settings say."""
    strategy = OPERATIONS[label].as_strategy(generation_mode=mode)

    @settings(how, suppress_health_check=list(HealthCheck))
    @given(case=strategy, is_lively=st.sampled_from((True, True, True, False)))
    def check_one(case: Any, is_lively: bool) -> None:
        if is_lively:
            lively(case, place)
        check(case, place, session)

    with requests.Session() as session:
        check_one()


def lively(case: Any, place: Place) -> None:
    """Put names into a case that are known in this place."""
    kind = "conversation" if "/conversations" in case.path else "response"
    if case.method == "DELETE":
        place = furnish(place.url)
    if "id" in (case.path_parameters or {}):
        known = place.conversation_id if kind == "conversation" else place.response_id
        case.path_parameters["id"] = MODEL if "/models" in case.path else known
    if "item_id" in (case.path_parameters or {}):
        case.path_parameters["item_id"] = place.item_id
    if isinstance(case.body, dict) and case.path.startswith("/v1/responses"):
        case.body = _lively_body(case.body, place)


def _lively_body(body: dict[str, Any], place: Place) -> dict[str, Any]:
    named = {name: value for name, value in body.items() if name not in ELSEWHERE}
    named |= {"model": MODEL, "input": named.get("input") or "Hello"}
    if isinstance(named.pop("previous_response_id", None), str):
        named |= {"previous_response_id": place.response_id, "input": "Never mind"}
    elif isinstance(named.pop("conversation", None), str):
        named["conversation"] = place.conversation_id
    return named


def check(case: Any, place: Place, session: requests.Session) -> None:
    """Ask, and hold the answer against the document."""
    # Not by `case.call`, which leaves a stream after some events.
    asked = case.as_transport_kwargs(base_url=place.url)
    response = session.request(**asked, timeout=ANSWER_S_MAX)
    allowed = STATUSES | ({503} if case.path == "/ready" else set())
    told = f"{case.method} {case.path} {case.body!r:.2000}: {response.status_code} {response.content[:500]!r}"
    assert response.status_code in allowed, told
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        # The document's schema is that of an event, not of the lines around it, which Schemathesis would hold to it.
        case.validate_response(response, checks=BUT_SCHEMA)
        check_stream(Answer(200, {}, response.content).events)
    else:
        case.validate_response(response, checks=CHECK_LIST)


def check_stream(events: list[dict[str, Any]]) -> None:
    """Each event is one of the document's, and together they are a turn."""
    for event in events:
        EVENT.validate(event)
    check_turn(events)
