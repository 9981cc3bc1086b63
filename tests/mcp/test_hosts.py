"""MCP servers by address: which of them a request may name, and where a connection goes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx2
import pytest
from msgspec import Raw

from segue.errors import InvalidRequest, Misconfigured
from segue.mcp.definitions import with_secrets
from segue.mcp.hosts import McpHosts, places_of, policy_for
from segue.mcp.sessions import McpServers
from segue.seams.tools import HostedCall
from segue.web.fetch import Fetcher, Policy
from segue.web.pinned import PinnedTransport
from segue.web.url import parse
from tests.mcp_server import remote

LISTED = ("mcp.com", "api.mcp.com:8443", "127.0.0.1:9000", "[::1]:9000")


def hosts_of(*listed: str, leads_to: Sequence[str] = ()) -> tuple[McpHosts, Fetcher]:
    """The hosts of a list, whose names all lead there."""

    async def resolve(host: str) -> Sequence[str]:
        return leads_to

    fetcher = Fetcher(policy_for(listed, ("bad.mcp.com",)), resolve)
    return McpHosts(listed, fetcher), fetcher


def test_entry_without_a_port_means_the_usual_ones() -> None:
    assert places_of("mcp.com") == [("mcp.com", 80), ("mcp.com", 443)]
    assert places_of("MCP.com.:8443") == [("mcp.com", 8443)]
    assert places_of("[::1]:9000") == [("::1", 9000)]
    assert policy_for(LISTED, ()).ports == (80, 443, 8443, 9000)


@pytest.mark.parametrize("entry", ["", "a b", "mcp.com:0", "user@mcp.com", "0x7f.1", "*"])
def test_entry_that_is_no_host_is_told_to_the_operator(entry: str) -> None:
    with pytest.raises(Misconfigured, match="mcp_hosts"):
        places_of(entry)


@pytest.mark.parametrize(
    "url",
    [
        "https://mcp.com:8443/mcp",
        "https://api.mcp.com/mcp",
        "https://deep.mcp.com/mcp",
        "http://127.0.0.1/mcp",
        "http://127.0.0.1:9001/mcp",
        "http://2130706433:9000/mcp",
        "http://mcp.com@127.0.0.1:9000/",
        "http://mcp.com\\@127.0.0.1/",
        "file:///etc/passwd",
        "",
    ],
)
def test_what_is_not_listed_is_refused(url: str) -> None:
    hosts, fetcher = hosts_of(*LISTED)
    with pytest.raises(InvalidRequest) as refusal:
        hosts.check(url)
    assert refusal.value.code == "mcp_server_not_allowed"
    fetcher.close()


@pytest.mark.parametrize(
    "leads_to",
    [["127.0.0.1"], ["169.254.169.254"], ["10.0.0.1", "::1"], ["::ffff:127.0.0.1"], []],
)
async def test_name_of_the_list_that_leads_inside_is_refused(leads_to: Sequence[str]) -> None:
    hosts, fetcher = hosts_of(*LISTED, leads_to=leads_to)
    with pytest.raises(InvalidRequest) as refusal:
        await hosts.addresses("https://mcp.com/mcp")
    assert refusal.value.code == "url_refused"
    fetcher.close()


async def test_addresses_are_those_that_are_public_or_the_operators_own_word() -> None:
    hosts, fetcher = hosts_of(*LISTED, "bad.mcp.com", leads_to=["10.0.0.1", "1.1.1.1", "::1"])
    assert await hosts.addresses("https://mcp.com/mcp") == ("1.1.1.1",)
    assert await hosts.addresses("http://127.0.0.1:9000/mcp") == ("127.0.0.1",)
    assert await hosts.addresses("http://[::1]:9000/mcp") == ("::1",)
    with pytest.raises(InvalidRequest):
        await hosts.addresses("https://bad.mcp.com/mcp")
    fetcher.close()


async def test_server_is_called_under_its_name_at_its_checked_address() -> None:
    """A real server; the fetcher of this test takes loopback for the public."""
    async with remote(hosts=("mcp.com:*",)) as far:
        port = int(far.url.split("/")[2].split(":")[1])

        async def resolve(host: str) -> Sequence[str]:
            # The first does not answer: the next one is asked.
            return ["127.0.0.2", "127.0.0.1"]

        fetcher = Fetcher(
            Policy("public", ports=(port,)), resolve, lambda address: address.is_loopback
        )
        servers = McpServers([], McpHosts([f"mcp.com:{port}"], fetcher))
        tool = {"type": "mcp", "server_label": "x", "server_url": f"http://mcp.com:{port}/mcp"}
        definition = with_secrets(Raw(json.dumps(tool).encode()))
        call = HostedCall("ada", "mcp_1", definition, "echo", '{"text":"a"}')
        ran = await servers.call(call)
        await servers.aclose()
        fetcher.close()
    assert (ran.text, far.calls) == ("a", ["a"])
    assert {one["host"] for one in far.headers} == {f"mcp.com:{port}"}


@pytest.mark.parametrize(
    "url", ["http://other.com/", "https://mcp.com:8443/", "http://mcp.com:81/", "https://1.1.1.1/"]
)
async def test_pinned_client_sends_nothing_to_another_place(url: str) -> None:
    transport = PinnedTransport(parse("http://mcp.com/mcp"), ["127.0.0.1"])
    async with httpx2.AsyncClient(transport=transport, trust_env=False) as client:
        with pytest.raises(httpx2.ConnectError, match="not the server that was checked"):
            await client.get(url)
