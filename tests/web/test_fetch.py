"""The fetcher: what it refuses, where it connects, what it sends, and where it stops."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from segue.errors import InvalidRequest
from segue.web.fetch import Fetcher, Policy
from segue.web.url import is_public, parse
from tests.web.urls import NAMES, OTHER, PUBLIC, REFUSED, START, THIRD

ROOT = Path(__file__).parents[2]


async def look_up(host: str) -> list[str]:
    return NAMES.get(host, [START])


def test_there_are_enough_vectors() -> None:
    assert len(REFUSED) >= 300
    assert len(set(REFUSED)) == len(REFUSED)


@pytest.mark.parametrize("url", REFUSED, ids=lambda url: ascii(url)[:60])
async def test_fetcher_refuses_what_is_not_plainly_public(url: str) -> None:
    """Refused, not failed: nothing was connected to."""
    fetcher = Fetcher(Policy("public", deny=("denied.com",)), look_up)
    with pytest.raises(InvalidRequest) as refusal:
        await fetcher.fetch(url)
    assert refusal.value.code == "url_refused"
    assert "secret" not in refusal.value.message
    fetcher.close()


@pytest.mark.parametrize("url", PUBLIC)
def test_plain_urls_are_understood(url: str) -> None:
    target = parse(url)
    assert target.host in ("start.com", START, "mixed.com") or target.host.endswith(
        (".start.com", ":1111")
    )
    assert parse(target.url) == target


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    """What happened in a world where every address answers; it says whether that was a namespace of its own."""
    kind, wall = "aliases", []
    for found in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        probe = f"{' '.join(found)} ip link set lo up"
        if subprocess.run(["sh", "-c", probe], capture_output=True, timeout=20).returncode == 0:
            kind, wall = "walled", found
            break
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ran = subprocess.run(
        [*wall, sys.executable, "-m", "tests.mcp.walled", kind],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "http_proxy": "http://127.0.0.1:9/"},
        capture_output=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-3000:]
    return json.loads(ran.stdout)


def test_run_says_where_it_took_place(
    world: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if not world["is_walled"]:
        with capsys.disabled():
            print(
                "\nfetcher: no network namespace to be had here; run with aliases of loopback instead"
            )
    assert len(world["refused"]) >= 300


def test_no_vector_reaches_anything(world: dict[str, Any]) -> None:
    assert [one for one in world["refused"] if one["hits"] or one["code"] != "url_refused"] == []


def test_no_redirect_leads_inside(world: dict[str, Any]) -> None:
    """The first host is reached, and what it names is refused."""
    assert len(world["redirected"]) >= 300
    for one in world["redirected"]:
        assert len(one["hits"]) == 1, one
        # With a NUL in it the answer is no HTTP any more.
        assert one["code"] in ("url_refused", "url_failed"), one
    assert sum(one["code"] == "url_failed" for one in world["redirected"]) < 10


def test_public_addresses_are_reached(world: dict[str, Any]) -> None:
    if not world["is_walled"]:
        assert world["public"] == []
        return
    for one in world["public"]:
        assert one["code"] == "hello", one
        assert [hit[0] for hit in one["hits"]] in ([START], ["2606:4700:4700::1111"]), one


def test_credentials_stay_with_the_first_origin(world: dict[str, Any]) -> None:
    away, home, inside, just, too_many = world["chains"]
    assert away["code"] == "hello"
    assert [hit[2] for hit in away["hits"]] == [True, False, False, False]
    assert [hit[2] for hit in home["hits"]] == [True, True, True]
    assert inside["code"] == "url_refused"
    assert [hit[2] for hit in inside["hits"]] == [True, False]
    assert just["code"] == "hello"
    assert too_many["code"] == "url_failed"
    assert len(too_many["hits"]) == 6
    for one in world["chains"]:
        for *_, headers in one["hits"]:
            assert "cookie" not in headers.lower()
            assert "referer" not in headers.lower()


def test_name_that_changes_its_mind_is_believed_once(world: dict[str, Any]) -> None:
    public = START if world["is_walled"] else "127.1.0.1"
    for one in world["rebound"][:20]:
        assert one["code"] == "hello"
        assert [hit[0] for hit in one["hits"]] == [public]
        assert list(one["asked"].values()) == [1]
    for one in world["rebound"][20:]:
        assert one["code"] == "url_refused"
        assert [hit[0] for hit in one["hits"]] == [public]


# --- MCP servers by address, in the same world ---------------------------------------------------------


def test_no_vector_reaches_anything_as_an_mcp_server(world: dict[str, Any]) -> None:
    """Though every name among them is on the operator's list: where a name leads is not the list's to say."""
    told = world["mcp"]["refused"]
    assert len(told) >= 300
    assert [one for one in told if one["hits"] or not one["error"]] == []
    # Some were refused for where they lead, and not because nobody has listed them.
    assert sum(bool(one["asked"]) for one in told) >= 5


def test_mcp_server_whose_name_changes_its_mind_is_refused(world: dict[str, Any]) -> None:
    """A session goes to the address that was checked; the next session asks again."""
    public = START if world["is_walled"] else "127.1.0.1"
    for first, second in world["mcp"]["rebound"]:
        assert {hit[0] for hit in first["hits"]} == {public}
        assert all(hit[2] for hit in first["hits"]), "the key is for this server"
        assert list(first["asked"].values()) == [1]
        assert second["hits"] == []
        assert second["error"]


def test_mcp_server_cannot_send_its_key_elsewhere(world: dict[str, Any]) -> None:
    """Neither by a redirect that keeps the body, nor by naming another place for its messages."""
    public = START if world["is_walled"] else "127.1.0.1"
    for one in (*world["mcp"]["moved"], *world["mcp"]["mixed"]):
        assert one["hits"], one
        assert {hit[0] for hit in one["hits"]} == {public}, one
        assert one["error"], one


# --- limits, on loopback ---------------------------------------------------------------------------

Serve = Callable[[bytes], bytes]


@asynccontextmanager
async def site(serve: Serve, **policy: Any) -> AsyncIterator[tuple[str, Fetcher, list[bytes]]]:
    """A site on loopback that takes itself for public."""
    heads: list[bytes] = []
    visits: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            writer.write(serve(head))
            await writer.drain()
            if b"/slow" in head:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def resolve(host: str) -> list[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fetcher = Fetcher(
        Policy("public", ports=(port,), **policy), resolve, lambda address: address.is_loopback
    )
    async with server:
        yield f"http://site.com:{port}", fetcher, heads
        async with asyncio.timeout(10):
            await asyncio.gather(*filter(None, visits))
    fetcher.close()


def page(
    body: bytes, *headers: str, kind: str = "text/html; charset=latin-1", length: bool = True
) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {kind}", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


async def code_of(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as found:
        await fetcher.fetch(url)
    return found.value.code


async def test_fetcher_is_off_until_it_is_switched_on() -> None:
    fetcher = Fetcher(Policy(), look_up)
    assert not fetcher.is_on
    assert await code_of(fetcher, f"http://{START}/") == "url_refused"
    with pytest.raises(InvalidRequest):
        await fetcher.check(f"http://{START}/")
    fetcher.close()


async def test_page_comes_with_its_type_and_charset() -> None:
    async with site(lambda head: page(b"hello")) as (url, fetcher, heads):
        found = await fetcher.fetch(url + "/a?b=c#d")
    assert (found.kind, found.charset, found.data) == ("text/html", "latin-1", b"hello")
    assert found.url == url + "/a?b=c"
    assert heads[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert b"user-agent: segue/" in heads[0].lower()


@pytest.mark.parametrize("length", [True, False])
async def test_page_that_just_fits_is_read_and_a_longer_one_is_not(length: bool) -> None:
    sizes = iter([1_000, 1_001])
    async with site(lambda head: page(b"x" * next(sizes), length=length), bytes_max=1_000) as (
        url,
        fetcher,
        _,
    ):
        assert len((await fetcher.fetch(url)).data) == 1_000
        assert await code_of(fetcher, url) == "url_failed"


@pytest.mark.parametrize("count, is_read", [(2, True), (20_000, False)])
async def test_page_after_many_interim_answers_is_not_waited_for(count: int, is_read: bool) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * count
    async with site(lambda head: interim + page(b"hello")) as (url, fetcher, _):
        if is_read:
            assert (await fetcher.fetch(url)).data == b"hello"
        else:
            assert await code_of(fetcher, url) == "url_failed"


async def test_compressed_page_is_inflated_within_the_limit() -> None:
    bodies = iter([gzip.compress(b"x" * 1_000), gzip.compress(b"x" * 50_000_000)])
    async with site(
        lambda head: page(next(bodies), "Content-Encoding: gzip"), bytes_max=1_000_000
    ) as (url, fetcher, _):
        assert (await fetcher.fetch(url)).data == b"x" * 1_000
        assert await code_of(fetcher, url) == "url_failed"


@pytest.mark.parametrize(
    "answer",
    [
        page(b"x", "Content-Encoding: br"),
        page(b"x", "Content-Encoding: gzip, gzip"),
        page(b"not gzip", "Content-Encoding: gzip"),
        page(gzip.compress(b"x" * 9_999)[:-9], "Content-Encoding: gzip"),
        page(b"x", kind="image/svg+xml"),
        page(b"x", kind="application/zip"),
        page(b"x", kind="textual/plain"),
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\x00\x01nonsense\r\n\r\n",
        b"",
    ],
)
async def test_answer_that_is_not_a_page_is_told_in_words(answer: bytes) -> None:
    async with site(lambda head: answer) as (url, fetcher, _):
        assert await code_of(fetcher, url) == "url_failed"


async def test_slow_site_is_left() -> None:
    async with site(lambda head: b"HTTP/1.1 200 OK\r\n", s_max=0.3) as (url, fetcher, _):
        assert await code_of(fetcher, url + "/slow") == "url_failed"


async def test_slow_resolver_is_left() -> None:
    async def never(host: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    fetcher = Fetcher(Policy("public", s_max=0.2), never)
    assert await code_of(fetcher, "http://slow.com/") == "url_failed"
    fetcher.close()


async def test_loop_of_redirects_ends() -> None:
    answer = b"HTTP/1.1 307 X\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n"
    async with site(lambda head: answer) as (url, fetcher, heads):
        assert await code_of(fetcher, url) == "url_failed"
    assert len(heads) == 6


async def test_nothing_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("default login canary password canary\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with site(lambda head: page(b"hello")) as (url, fetcher, heads):
        await fetcher.fetch(url)
    assert b"authorization" not in heads[0].lower()


async def test_lists_of_domains_are_kept_to() -> None:
    async with site(
        lambda head: page(b"x"), allow=("site.com", "*.wiki.org"), deny=("bad.site.com",)
    ) as (url, fetcher, _):
        for name in ("site.com", "a.site.com", "wiki.org", "en.wiki.org"):
            await fetcher.fetch(url.replace("site.com", name))
        for name in ("bad.site.com", "very.bad.site.com", "notsite.com", "site.com.evil.com"):
            assert await code_of(fetcher, url.replace("site.com", name)) == "url_refused"


async def test_socket_is_the_last_door() -> None:
    """Even a library that would connect elsewhere gets no socket for it."""
    fetcher = Fetcher(Policy("public"), look_up)
    with pytest.raises(OSError, match="not a public address"):
        fetcher._make_socket((2, 1, 6, "", ("127.0.0.1", 80)))
    fetcher.close()


async def test_others_are_given_checked_addresses_only() -> None:
    async def resolve(host: str) -> list[str]:
        return ["10.0.0.1", THIRD, "::1"]

    fetcher = Fetcher(Policy("public"), resolve)
    target, addresses = await fetcher.check("https://mcp.com/sse")
    assert (target.host, target.port, addresses) == ("mcp.com", 443, (THIRD,))
    fetcher.close()


async def test_names_are_looked_up_by_the_system() -> None:
    fetcher = Fetcher(Policy("own"))
    assert set(await fetcher._look_up("localhost")) <= {"127.0.0.1", "::1"}
    assert await fetcher._look_up("nowhere.invalid") == []
    fetcher.close()


def test_public_is_what_nobody_has_reserved() -> None:
    from ipaddress import ip_address

    for text in (START, OTHER, THIRD, "2606:4700::1", "2a00:1450::1", "100.128.0.1", "172.32.0.1"):
        assert is_public(ip_address(text))
