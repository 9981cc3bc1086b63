"""The HTTP application by values: ASGI messages in, status, headers and body out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from segue.accounts.account import LOCAL
from segue.errors import InvalidRequest, TooMany
from segue.listener.exchange import text_header
from segue.listener.http import HttpApp
from segue.listener.table import RouteTable, routes_of
from segue.observe.logs import TextFormatter
from segue.server.apis import APIS
from segue.server.pages import ServerPages
from segue.settings.values import Settings
from tests.contracts.turns import make_turn
from tests.listener.doubles import Begun, Stage, ticks
from tests.support import MODEL, fetch, serving


@dataclass
class Client:
    """One HTTP request to an application, and its answer."""

    app: HttpApp
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_over: bool = False

    def __post_init__(self) -> None:
        self._messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.is_over = not message["more_body"]

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Client:
        path, _, query = path.partition("?")
        names = {"host": "localhost"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
        }
        self._messages.put_nowait({"type": "http.request", "body": body})
        await self.app(scope, self._messages.get, self.send)
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])

    @property
    def events(self) -> list[str]:
        """The names of server-sent events, and how the stream ended."""
        lines = self.body.decode().splitlines()
        names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        return [*names, *("[DONE]" for line in lines if line == "data: [DONE]")]


class Server:
    """An application on a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        services = stage.services
        routes = routes_of(tuple(APIS.values()), services)
        pages = ServerPages(services, stage.is_ready, stage.write_metrics, routes)
        self.app = HttpApp(services, RouteTable([*routes, *pages.routes]))

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Client:
        return await Client(self.app).ask(method, path, body, **headers)

    async def create(self, **fields: object) -> Client:
        request = {"model": "m", "input": "x"} | fields
        return await self.ask("POST", "/v1/responses", json.dumps(request).encode())


@pytest.fixture
async def server() -> Server:
    return Server(Stage())


def complete(begun: Begun) -> None:
    begun.publish("response.in_progress")
    begun.end()


async def test_every_answer_has_a_request_id(server: Server) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        assert (await server.ask("GET", path)).headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "method, path, status, code, allow",
    [
        ("GET", "/nowhere", 404, "unknown_url", None),
        ("POST", "/v1/responses/", 400, "invalid_json", None),
        ("GET", "/v1/responses", 405, "method_not_allowed", "POST"),
        ("PUT", "/v1/responses/resp_1", 405, "method_not_allowed", "DELETE, GET"),
        ("GET", "/v1/responses/compact", 405, "method_not_allowed", "POST"),
        ("GET", "/responses/resp_1", 404, "not_found", None),
        ("GET", "/v1/codex/responses/resp_1", 404, "not_found", None),
        ("GET", "/v1/models/none", 404, "model_not_found", None),
    ],
)
async def test_path_and_method_find_their_route(
    server: Server, method: str, path: str, status: int, code: str, allow: str | None
) -> None:
    answer = await server.ask(method, path)
    assert (answer.status, answer.code, answer.headers.get("allow")) == (status, code, allow)
    assert server.stage.refusals == [("http", code)]


async def test_response_is_one_object_without_a_stream(server: Server) -> None:
    server.stage.runner.play = complete
    answer = await server.create()
    assert (answer.status, answer.json["id"]) == (200, "resp_1")
    assert answer.headers["content-type"] == "application/json"


async def test_stream_has_every_event_in_order_and_an_end(server: Server) -> None:
    server.stage.runner.play = complete
    answer = await server.create(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.events == [
        "response.created",
        "response.in_progress",
        "response.completed",
        "[DONE]",
    ]
    assert answer.is_over


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_is_a_status_before_anything_is_sent(server: Server, stream: bool) -> None:
    server.stage.runner.fault = TooMany("Not so fast.", wait_s=1.2)
    answer = await server.create(stream=stream)
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "2"
    assert server.stage.refusals == [("http", "rate_limit_exceeded")]


async def test_bug_is_a_server_error_without_its_words(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.stage.runner.fault = RuntimeError("secret")
    caplog.handler.setFormatter(TextFormatter("%(request)s%(message)s"))
    answer = await server.create()
    assert (answer.status, answer.code) == (500, "server_error")
    assert b"secret" not in answer.body
    assert f"[{answer.headers['x-request-id']}] request failed" in caplog.text


async def test_failed_turn_is_the_status_of_its_error(server: Server) -> None:
    def fail(begun: Begun) -> None:
        begun.running.assembler.error = InvalidRequest("Too long.", code="context_length_exceeded")
        begun.end("response.failed")

    server.stage.runner.play = fail
    answer = await server.create()
    assert (answer.status, answer.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("field", ["stream_id", "rollout"])
async def test_fields_of_websocket_mode_are_refused(server: Server, field: str) -> None:
    value: object = "a" if field == "stream_id" else True
    answer = await server.create(**{field: value})
    assert (answer.status, answer.code) == (400, "unsupported_parameter")
    assert answer.json["error"]["param"] == field


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_cancels_its_turn(server: Server, stream: bool) -> None:
    client = Client(server.app)
    request = json.dumps({"model": "m", "input": "x", "stream": stream}).encode()
    asking = asyncio.create_task(client.ask("POST", "/v1/responses", request))
    await ticks(10)
    (begun,) = server.stage.runner.begun
    assert not begun.is_cancelled
    client.leave()
    await asking
    assert begun.is_cancelled
    assert not begun.running.has_subscribers


async def test_idempotency_key_comes_from_its_header(server: Server) -> None:
    server.stage.runner.play = complete
    body = json.dumps({"model": "m", "input": "x"}).encode()
    refused = await server.ask("POST", "/v1/responses", body, idempotency_key="k" * 256)
    assert refused.status == 400
    await server.ask("POST", "/v1/responses", body, idempotency_key="k" * 255)
    assert server.stage.runner.begun[0].create.idempotency_key == "k" * 255


async def test_running_response_is_read_as_it_stands_and_an_unstored_one_not_at_all(
    server: Server,
) -> None:
    server.stage.runner.play = lambda begun: None
    for stored in (True, False):
        client = Client(server.app)
        request = json.dumps({"model": "m", "input": "x", "store": stored}).encode()
        asking = asyncio.create_task(client.ask("POST", "/v1/responses", request))
        await ticks(10)
        begun = server.stage.runner.begun[-1]
        answer = await server.ask("GET", f"/v1/responses/{begun.running.id}")
        assert answer.status == (200 if stored else 404)
        client.leave()
        await asking


async def test_stored_response_is_read_listed_and_deleted(server: Server) -> None:
    server.stage.store.turns["resp_1"] = make_turn("resp_1", owner=LOCAL)
    assert (await server.ask("GET", "/v1/responses/resp_1")).json["id"] == "resp_1"
    page = await server.ask("GET", "/v1/responses/resp_1/input_items?limit=5")
    assert len(page.json["data"]) == 1
    assert (await server.ask("DELETE", "/v1/responses/resp_1")).json["deleted"] is True
    assert (await server.ask("DELETE", "/v1/responses/resp_1")).status == 404


async def test_only_a_background_response_can_be_cancelled(server: Server) -> None:
    server.stage.store.turns["resp_1"] = make_turn("resp_1", owner=LOCAL)
    answer = await server.ask("POST", "/v1/responses/resp_1/cancel")
    assert (answer.status, answer.code) == (400, "unsupported_value")


async def test_body_that_is_too_large_or_no_text_is_refused() -> None:
    server = Server(Stage(limits=Settings(body_bytes_max=100)))
    answer = await server.ask("POST", "/v1/responses", b"x" * 101)
    assert (answer.status, answer.code) == (413, "payload_too_large")
    answer = await server.ask("POST", "/v1/responses", b'{"input": "\xff"}')
    assert (answer.status, answer.code) == (400, "invalid_json")


async def test_foreign_host_and_page_are_refused_but_for_health(server: Server) -> None:
    foreign = await server.ask("GET", "/v1/models", host="example.com")
    assert (foreign.status, foreign.code) == (403, "host_not_allowed")
    page = await server.ask("GET", "/v1/models", origin="https://example.com")
    assert (page.status, page.code) == (403, "origin_not_allowed")
    assert (await server.ask("GET", "/health", host="example.com")).status == 200


async def test_readiness_is_a_status_with_its_checks_for_who_may_see_them(server: Server) -> None:
    ready = await server.ask("GET", "/ready")
    assert (ready.status, ready.json["checks"]) == (200, {"store": True, "accepting": True})
    server.stage.runner.is_draining = True
    assert (await server.ask("GET", "/ready")).status == 503
    server.stage.accounts.is_required = True
    assert "checks" not in (await server.ask("GET", "/ready")).json


async def test_key_is_asked_for_where_keys_are_required(server: Server) -> None:
    server.stage.accounts.is_required = True
    answer = await server.ask("GET", "/v1/models")
    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == 'Bearer realm="segue"'
    wrong = await server.ask("GET", "/v1/models", authorization="Bearer sk-wrong")
    assert wrong.headers["www-authenticate"].endswith('error="invalid_token"')


@pytest.mark.parametrize("text", ["plain", "a\nb", "a\r\nset-cookie: x", "\0é"])
async def test_no_text_of_a_client_becomes_a_header(text: str) -> None:
    """Nor does the name by which an earlier version said what it had changed: it is `metadata` like any other."""
    async with serving() as served:
        metadata = {"segue_repairs": text}
        body = {"model": MODEL, "input": "hi", "metadata": metadata}
        answers = [
            await fetch(served, "POST", "/v1/responses", {**body, "stream": stream})
            for stream in (False, True)
        ]
        plain = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "hi"})
        assert answers[0].headers.keys() == plain.headers.keys()
        assert not any("repairs" in name for one in answers for name in one.headers)
        assert answers[0].json["metadata"] == metadata
        assert answers[1].events[-1]["response"]["metadata"] == metadata
        stored = await fetch(served, "GET", f"/v1/responses/{answers[0].json['id']}")
        assert stored.json["metadata"] == metadata


def test_text_in_a_header_does_not_end_its_line() -> None:
    assert text_header(b"allow", "GET, POST") == (b"allow", b"GET, POST")
    assert text_header(b"x", "a\r\nset-cookie: é\0") == (b"x", b"a%0D%0Aset-cookie: %C3%A9%00")
