"""Tenants never meet: every route, every verb, every field that carries an id, for everybody who may ask.

A probe is one request that names something of Ada's. It is asked without a key, with a wrong one, with a revoked one,
by Eve and by Ada. Eve asks twice: while the thing is there, and after Ada has deleted it. Both answers must be the same
to the byte, because they name the same id. A route that is in the server and not in this matrix fails the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websockets

from segue.accounts.hashes import issue_key
from tests.scenarios.test_files_api import upload
from tests.support import MODEL, Answer, Served, fetch, serving, wire

ONE = "/v1/responses/{id}"
TALK = "/v1/conversations/{id}"
SAID = TALK + "/items/{item_id}"
KEY = "/dashboard/keys/{id}"
USAGE = "/v1/organization/usage/completions"
FILE = "/v1/files/{id}"
CHAT = "/v1/chat/completions"
WRONG = "sk-segue-" + "y" * 43
LONG = " ".join(str(number) for number in range(2_000))
REQUEST_IDS = ("x-request-id", "request-id")
ABSENT = "resp_" + "0" * 32


@dataclass(frozen=True)
class Probe:
    """A request; `{response}`, `{item}`, `{sealed}`, `{conversation}` and `{said}` stand for things of Ada's."""

    verb: str
    path: str
    body: Mapping[str, Any] | None = None
    # What Ada gets, and what everybody else does who has a key.
    right: int = 200
    foreign: int = 404
    # Whether it does not change what it names.
    is_safe: bool = True

    @property
    def names_something(self) -> bool:
        return re.search(r"\{\w+\}", self.path + json.dumps(self.body)) is not None


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "go on", "store": False, **fields}


SENTENCE = {"type": "message", "role": "user", "content": "my secret plan"}
REFERENCE = {"input": [{"type": "item_reference", "id": "{item}"}]}
UPLOADED = {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "{file}"}]}]}
SEALED = {"input": [{"type": "compaction", "encrypted_content": "{sealed}"}]}
TALKING = {"conversation": "{conversation}", "store": True}
PARENT = {"previous_response_id": "{response}"}

THREAD = {"thread": {"type": "continue", "previous_message_id": "{message}"}}


def speak(**fields: Any) -> dict[str, Any]:
    """A request of the Messages API or of Chat Completions."""
    said = [{"role": "user", "content": "go on"}]
    return {"model": MODEL, "max_tokens": 50, "messages": said, **fields}


# By route: a probe for each way to name something. A route without ids has probes that name nothing.
MATRIX: dict[tuple[str, str], list[Probe]] = {
    ("POST", "/v1/responses"): [
        Probe("POST", "/v1/responses", ask(**PARENT), foreign=400),
        Probe("POST", "/v1/responses", ask(**PARENT, stream=True), foreign=400),
        Probe("POST", "/v1/responses", ask(**PARENT, generate=False), foreign=400),
        Probe("POST", "/v1/responses", ask(**PARENT, background=True, store=True), foreign=400),
        Probe("POST", "/v1/responses", ask(**REFERENCE)),
        Probe("POST", "/v1/responses", ask(**UPLOADED)),
        Probe("POST", "/v1/responses", ask(**SEALED), foreign=400),
        Probe("POST", "/v1/responses", ask(**TALKING)),
        Probe("POST", "/responses", ask(**PARENT), foreign=400),
        Probe("POST", "/v1/codex/responses", ask(**PARENT), foreign=400),
    ],
    ("POST", "/v1/responses/compact"): [
        Probe("POST", "/v1/responses/compact", ask(**PARENT), foreign=400),
        Probe("POST", "/v1/responses/compact", ask(**REFERENCE)),
        Probe("POST", "/v1/responses/compact", ask(**SEALED), foreign=400),
    ],
    ("POST", "/v1/responses/input_tokens"): [
        Probe("POST", "/v1/responses/input_tokens", ask(**PARENT), foreign=400),
        Probe("POST", "/v1/responses/input_tokens", ask(**REFERENCE)),
        Probe("POST", "/v1/responses/input_tokens", ask(**TALKING)),
        Probe("POST", "/v1/responses/input_tokens", ask(**SEALED), foreign=400),
    ],
    ("GET", ONE): [
        Probe("GET", "/v1/responses/{response}"),
        Probe("HEAD", "/v1/responses/{response}"),
        Probe("GET", "/responses/{response}"),
        Probe("GET", "/v1/codex/responses/{response}"),
        Probe("GET", "/v1/responses/{response}?stream=true&starting_after=-1"),
        Probe("GET", "/v1/responses/{response}?stream=true&starting_after=3"),
    ],
    ("GET", ONE + "/cache"): [
        Probe("GET", "/v1/responses/{response}/cache"),
    ],
    ("GET", ONE + "/input_items"): [
        Probe("GET", "/v1/responses/{response}/input_items"),
        Probe("GET", "/v1/responses/{response}/input_items?limit=1&order=asc"),
        Probe("GET", "/v1/responses/{response}/input_items?after={item}", right=400),
    ],
    # A cancel of what is over changes nothing.
    ("POST", ONE + "/cancel"): [Probe("POST", "/v1/responses/{response}/cancel", {})],
    ("DELETE", ONE): [Probe("DELETE", "/v1/responses/{response}", is_safe=False)],
    ("POST", "/v1/conversations"): [Probe("POST", "/v1/conversations", {}, foreign=200)],
    ("GET", TALK): [Probe("GET", "/v1/conversations/{conversation}")],
    ("POST", TALK): [
        Probe("POST", "/v1/conversations/{conversation}", {"metadata": {"mine": "yes"}}),
    ],
    ("GET", TALK + "/items"): [
        Probe("GET", "/v1/conversations/{conversation}/items"),
        Probe("GET", "/v1/conversations/{conversation}/items?after={said}&order=asc"),
    ],
    ("POST", TALK + "/items"): [
        Probe("POST", "/v1/conversations/{conversation}/items", {"items": [SENTENCE]}),
    ],
    ("GET", SAID): [Probe("GET", "/v1/conversations/{conversation}/items/{said}")],
    ("DELETE", SAID): [
        Probe("DELETE", "/v1/conversations/{conversation}/items/{said}", is_safe=False),
    ],
    ("DELETE", TALK): [Probe("DELETE", "/v1/conversations/{conversation}", is_safe=False)],
    ("GET", "/dashboard/advice"): [Probe("GET", "/dashboard/advice", foreign=403, right=403)],
    ("GET", "/dashboard/fleet"): [Probe("GET", "/dashboard/fleet", foreign=403, right=403)],
    ("GET", "/dashboard/feed"): [Probe("GET", "/dashboard/feed", foreign=403, right=403)],
    ("GET", "/dashboard/stored"): [Probe("GET", "/dashboard/stored", foreign=200)],
    ("GET", USAGE): [Probe("GET", USAGE + "?start_time=0", foreign=403, right=403)],
    ("GET", "/dashboard/keys"): [Probe("GET", "/dashboard/keys", foreign=403, right=403)],
    ("POST", "/dashboard/keys"): [Probe("POST", "/dashboard/keys", {}, foreign=403, right=403)],
    ("POST", KEY): [Probe("POST", "/dashboard/keys/{key}", {}, foreign=403, right=403)],
    ("DELETE", KEY): [Probe("DELETE", "/dashboard/keys/{key}", foreign=403, right=403)],
    ("POST", "/v1/files"): [Probe("POST", "/v1/files", {}, right=400, foreign=400)],
    ("GET", "/v1/files"): [
        Probe("GET", "/v1/files", foreign=200),
        Probe("GET", "/v1/files?after={file}", foreign=400),
    ],
    ("GET", FILE): [Probe("GET", "/v1/files/{file}")],
    ("GET", FILE + "/content"): [Probe("GET", "/v1/files/{file}/content")],
    ("DELETE", FILE): [Probe("DELETE", "/v1/files/{file}", is_safe=False)],
    ("POST", "/v1/messages"): [
        Probe("POST", "/v1/messages", speak(**THREAD)),
        Probe("POST", "/v1/messages", speak(**THREAD, stream=True)),
        Probe("POST", "/messages", speak(**THREAD)),
    ],
    ("POST", "/v1/messages/count_tokens"): [
        Probe("POST", "/v1/messages/count_tokens", speak(**THREAD)),
    ],
    ("POST", CHAT): [Probe("POST", CHAT, speak(), foreign=200)],
    # Its answers are not stored.
    ("GET", CHAT): [Probe("GET", CHAT, right=404)],
    ("GET", CHAT + "/{id}"): [Probe("GET", CHAT + "/{response}", right=404)],
    # The engine has neither.
    ("POST", "/v1/completions"): [
        Probe("POST", "/v1/completions", {"model": MODEL, "prompt": "x"}, right=404),
    ],
    ("POST", "/v1/embeddings"): [
        Probe("POST", "/v1/embeddings", {"model": MODEL, "input": "x"}, right=404),
    ],
    ("GET", "/v1/models"): [Probe("GET", "/v1/models", foreign=200)],
    ("GET", "/v1/models/{id}"): [Probe("GET", f"/v1/models/{MODEL}", foreign=200)],
    ("GET", "/metrics"): [Probe("GET", "/metrics", foreign=403, right=403)],
}
# Routes that anybody may ask: they name nothing and tell nothing of anybody.
OPEN = {
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/health"),
    ("GET", "/api/hello"),
    ("GET", "/ready"),
    ("GET", "/dashboard/{name}"),
    ("GET", "/openapi.json"),
    ("GET", "/asyncapi.json"),
}


@dataclass(frozen=True)
class Tenants:
    """A server with two owners, and what one of them has."""

    served: Served
    ada: str
    eve: str
    revoked: str
    names: dict[str, str]

    async def ask(self, probe: Probe, secret: str | None) -> Answer:
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        body = None if probe.body is None else self.fill(json.dumps(probe.body)).encode()
        return await fetch(self.served, probe.verb, self.fill(probe.path), body, headers)

    def fill(self, text: str) -> str:
        for name, value in self.names.items():
            text = text.replace("{" + name + "}", value)
        return text


@pytest.fixture(params=["memory", "sqlite"])
async def tenants(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tenants]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "Yes."}]}))
    store = "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/s.db"
    async with serving(auth="keys", store=store, script=str(script)) as served:
        app = served.app
        (mine, ada), (_, eve), (dead, revoked) = [
            await issue_key(app.state.store.keys, app.state.hashes, "test", owner)
            for owner in ("ada", "eve", "ada")
        ]
        assert await app.state.store.keys.revoke(dead.id)
        names = {**await make_things(served, ada), "key": mine.id}
        yield Tenants(served, ada, eve, revoked, names)


async def make_things(served: Served, secret: str) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {secret}"}
    asked = {"model": MODEL, "input": "my secret plan", "background": True}
    made = (await fetch(served, "POST", "/v1/responses", asked, headers)).json
    path = f"/v1/responses/{made['id']}?stream=true"
    events = (await fetch(served, "GET", path, headers=headers)).events
    done = events[-1]["response"]
    window = {"model": MODEL, "previous_response_id": made["id"]}
    packed = (await fetch(served, "POST", "/v1/responses/compact", window, headers)).json
    sealed = next(one for one in packed["output"] if one["type"] == "compaction")
    begun = {"items": [SENTENCE, SENTENCE]}
    talk = (await fetch(served, "POST", "/v1/conversations", begun, headers)).json
    path = f"/v1/conversations/{talk['id']}/items"
    items = (await fetch(served, "GET", path, headers=headers)).json["data"]
    file = await upload(served, headers=headers)
    asked = {"thread": {"type": "create"}}
    message = (await fetch(served, "POST", "/v1/messages", speak(**asked), headers)).json
    return {
        "file": file["id"],
        "message": message["id"],
        "conversation": talk["id"],
        "said": items[0]["id"],
        "response": made["id"],
        "item": done["output"][0]["id"],
        "sealed": sealed["encrypted_content"],
    }


def said(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """Everything of an answer that may not tell whether a thing is there."""
    shown = {k: v for k, v in answer.headers.items() if k not in ("date", *REQUEST_IDS)}
    return answer.status, shown, re.sub(rb"req_[0-9a-f]{32}", b"", answer.body)


def all_probes() -> list[Probe]:
    found = [probe for probes in MATRIX.values() for probe in probes]
    return sorted(found, key=lambda probe: not probe.is_safe)


async def test_every_route_is_in_the_matrix(tenants: Tenants) -> None:
    routes = tenants.served.app.http.table.routes
    assert {(route.verb, route.name) for route in routes} == set(MATRIX) | OPEN
    guarded = {(route.verb, route.name) for route in routes if route.scope is not None}
    assert guarded == set(MATRIX)


async def test_matrix_over_http(tenants: Tenants) -> None:
    probes = all_probes()
    for probe in probes:
        strangers = [await tenants.ask(probe, one) for one in (None, WRONG, tenants.revoked)]
        assert [answer.status for answer in strangers] == [401, 401, 401], probe
        assert said(strangers[1])[2] == said(strangers[2])[2]
    before = [await tenants.ask(probe, tenants.eve) for probe in probes]
    assert [
        (one.verb, one.path, answer.status) for one, answer in zip(probes, before, strict=True)
    ] == [(one.verb, one.path, one.foreign) for one in probes]
    for probe in probes:
        answer = await tenants.ask(probe, tenants.ada)
        assert answer.status == probe.right, (probe, answer.body)
    after = [await tenants.ask(probe, tenants.eve) for probe in probes]
    for probe, there, gone in zip(probes, before, after, strict=True):
        if probe.names_something:
            assert said(there) == said(gone), probe


async def test_running_response_of_another_owner_is_absent(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": LONG}]}))
    async with serving(auth="keys", script=str(script), tps=100) as served:
        app = served.app
        _, ada = await issue_key(app.state.store.keys, app.state.hashes, "test", "ada")
        _, eve = await issue_key(app.state.store.keys, app.state.hashes, "test", "eve")
        headers = {"Authorization": f"Bearer {ada}"}
        asked = {"model": MODEL, "input": "my plan", "background": True}
        made = (await fetch(served, "POST", "/v1/responses", asked, headers)).json
        tenants = Tenants(served, ada, eve, "", {"response": made["id"]})
        probes = [one for one in all_probes() if "{response}" in one.path + json.dumps(one.body)]
        probes = [one for one in probes if "{item}" not in one.path]
        before = [await tenants.ask(probe, eve) for probe in probes]
        async with wire(served, additional_headers={"Authorization": f"Bearer {eve}"}) as socket:
            steered = await steer(socket, made["id"])
        cancelled = await fetch(served, "POST", f"/v1/responses/{made['id']}/cancel", {}, headers)
        assert cancelled.json["status"] == "cancelled"
        gone = await fetch(served, "DELETE", f"/v1/responses/{made['id']}", headers=headers)
        assert gone.status == 200
        after = [await tenants.ask(probe, eve) for probe in probes]
        for probe, one, other in zip(probes, before, after, strict=True):
            assert said(one) == said(other), probe
        async with wire(served, additional_headers={"Authorization": f"Bearer {eve}"}) as socket:
            assert await steer(socket, made["id"]) == steered


async def steer(socket: Any, response: str) -> bytes:
    given = [{"type": "message", "role": "user", "content": "stop"}]
    await socket.send({"type": "response.steer", "previous_response_id": response, "input": given})
    event = await socket.next()
    assert event["type"] == "response.steer.failed"
    return json.dumps(event).encode()


FRAMES: list[dict[str, Any]] = [
    {"type": "response.create", **ask(**PARENT)},
    {"type": "response.create", **ask(**PARENT, stream_id="a")},
    {"type": "response.create", **ask(**PARENT, generate=False)},
    {"type": "response.create", **ask(**REFERENCE)},
    {"type": "response.create", **ask(**SEALED)},
    {"type": "response.create", **ask(**TALKING)},
    {"type": "response.append", "response_id": "{response}", "input": []},
    {
        "type": "response.steer",
        "previous_response_id": "{response}",
        "input": [{"type": "message", "role": "user", "content": "stop"}],
    },
]
# What even the owner cannot do with a response that is over, or not of this connection.
NEVER = {"response.append", "response.steer"}


async def test_matrix_over_sockets(tenants: Tenants) -> None:
    served = tenants.served
    for secret in (None, WRONG, tenants.revoked):
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        with pytest.raises(websockets.InvalidStatus):
            async with wire(served, additional_headers=headers):
                pass
    before = [await say(tenants, frame, tenants.eve) for frame in FRAMES]
    for frame, answer in zip(FRAMES, before, strict=True):
        assert json.loads(answer)["type"] in ("error", "response.steer.failed"), (frame, answer)
    for frame in FRAMES:
        answer = await say(tenants, frame, tenants.ada)
        if frame["type"] not in NEVER:
            assert json.loads(answer)["type"] == "response.created", (frame, answer)
    for path in ("/v1/responses/{response}", "/v1/conversations/{conversation}"):
        assert (await tenants.ask(Probe("DELETE", path), tenants.ada)).status == 200
    after = [await say(tenants, frame, tenants.eve) for frame in FRAMES]
    assert before == after


async def say(tenants: Tenants, frame: dict[str, Any], secret: str) -> bytes:
    """The first answer to one frame on a fresh connection."""
    headers = {"Authorization": f"Bearer {secret}"}
    async with wire(tenants.served, additional_headers=headers) as socket:
        await socket.send(tenants.fill(json.dumps(frame)))
        answer = await socket.socket.recv()
        return answer.encode() if isinstance(answer, str) else answer


async def test_idempotency_keys_of_two_owners_do_not_meet(tenants: Tenants) -> None:
    ids = []
    for secret in (tenants.ada, tenants.eve, tenants.ada):
        headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": "same"}
        asked = {"model": MODEL, "input": "once"}
        answer = await fetch(tenants.served, "POST", "/v1/responses", asked, headers)
        assert answer.status == 200
        ids.append(answer.json["id"])
    assert ids[0] == ids[2] != ids[1]


async def test_two_keys_of_one_owner_share_everything(tenants: Tenants) -> None:
    app = tenants.served.app
    _, second = await issue_key(app.state.store.keys, app.state.hashes, "second", "ada")
    for probe in all_probes():
        answer = await tenants.ask(probe, second)
        assert answer.status == probe.right, probe
