"""Which key a request carries, which host names are ours, and which pages may use the server."""

from __future__ import annotations

import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import Forbidden
from segue.listener.auth import bearer_key, offered, origin_policy
from tests.support import MODEL, fetch, serving, wire

PAGE = "https://app.example"


@pytest.mark.parametrize(
    "header, secret",
    [
        ("", None),
        ("Bearer abc", "abc"),
        ("bearer   abc ", "abc"),
        ("Bearer", ""),
        ("Bearer a b", ""),
        ("Basic abc", ""),
        ("Bearer abc, Bearer def", ""),
    ],
)
def test_bearer_is_read(header: str, secret: str | None) -> None:
    assert bearer_key(lambda name: header) == secret


def test_offered_key_is_read_among_other_protocols() -> None:
    assert offered(["segue.v1, segue-key.abc"]) == "abc"
    assert offered(["segue.v1", "segue-key.abc"]) == "abc"
    assert offered(["segue.v1"]) is None
    assert offered([]) is None


@given(st.text())
def test_any_header_is_read_without_complaint(text: str) -> None:
    bearer_key(lambda name: text)
    offered([text])


def code_of(
    host: str,
    origin: str = "",
    *,
    listens: str = "127.0.0.1",
    allowed: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
    is_open: bool = True,
) -> str | None:
    try:
        origin_policy(listens, allowed, origins, lambda: is_open).check(host, origin)
    except Forbidden as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80", "localhost."],
)
def test_loopback_names_are_ours(host: str) -> None:
    assert code_of(host) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost@evil", "0.0.0.0", "[::1", "a b",
     "localhost, evil.example", "localhost:99999999", "169.254.169.254"],
)  # fmt: skip
def test_other_names_are_not_while_nobody_needs_a_key(host: str) -> None:
    assert code_of(host) == "host_not_allowed"


def test_listed_names_and_the_address_itself_are_ours() -> None:
    assert code_of("segue.example:8080", allowed=("Segue.Example",)) is None
    assert code_of("127.0.0.9", listens="127.0.0.9") is None
    assert code_of("anything", allowed=("*",)) is None


def test_with_keys_any_name_will_do_unless_some_are_listed() -> None:
    assert code_of("api.example", is_open=False, listens="0.0.0.0") is None
    listed = ("api.example",)
    assert code_of("api.example", is_open=False, allowed=listed) is None
    assert code_of("other.example", is_open=False, allowed=listed) == "host_not_allowed"


@pytest.mark.parametrize(
    "origin, host, code",
    [
        ("http://localhost:8080", "localhost:8080", None),
        ("http://localhost", "localhost:80", None),
        ("https://localhost", "localhost", None),
        ("http://[::1]:8080", "[::1]:8080", None),
        ("http://localhost:3000", "localhost:8080", "origin_not_allowed"),
        ("http://127.0.0.1:8080", "localhost:8080", "origin_not_allowed"),
        ("http://evil.example", "localhost:8080", "origin_not_allowed"),
        ("null", "localhost:8080", "origin_not_allowed"),
        ("http://localhost:8080, http://evil.example", "localhost:8080", "origin_not_allowed"),
        ("http://localhost:bad", "localhost:8080", "origin_not_allowed"),
        ("ftp://localhost:8080", "localhost:8080", "origin_not_allowed"),
        ("HTTPS://APP.example", "localhost:8080", None),
    ],
)
def test_pages_of_our_own_and_listed_origins_may_ask(
    origin: str, host: str, code: str | None
) -> None:
    assert code_of(host, origin, origins=(PAGE + "/",)) == code


async def test_strange_names_and_pages_are_refused_on_every_transport() -> None:
    async with serving() as served:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            answer = await fetch(served, "GET", "/v1/models", headers=headers)
            assert answer.status == 403
            assert "access-control-allow-origin" not in answer.headers
            assert (await fetch(served, "GET", "/health", headers=headers)).status == 200
        for options in (
            {"origin": "http://evil.example"},
            {"additional_headers": {"Host": "evil"}},
        ):
            with pytest.raises(websockets.InvalidStatus) as caught:
                async with wire(served, **options):
                    pass
            assert caught.value.response.status_code == 403
        async with wire(served, origin=served.url) as socket:
            assert (await socket.turn(input="hi", store=False))["type"] == "response.completed"
        preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        assert (await fetch(served, "OPTIONS", "/v1/responses", headers=preflight)).status == 403


async def test_browser_of_a_listed_page_is_told_what_it_may() -> None:
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-lang",
    }
    async with serving(cors_origins=[PAGE], auth="keys") as served:
        answer = await fetch(served, "OPTIONS", "/v1/responses", headers=asked)
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-lang"
        assert "DELETE" in answer.headers["access-control-allow-methods"]
        body = {"model": MODEL, "input": "hi"}
        refused = await fetch(served, "POST", "/v1/responses", body, {"Origin": PAGE})
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == PAGE
        assert refused.headers["vary"] == "Origin"
