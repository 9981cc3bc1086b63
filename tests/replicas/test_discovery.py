"""Are replicas found by DNS and in Kubernetes, added and removed while turns run, and kept when a lookup fails?"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from segue.engines.client import HttpClient
from segue.errors import Misconfigured
from segue.replicas.kubernetes import LookupFailed
from segue.replicas.lookup import Lookup, look_up
from segue.settings.checks import load_settings
from tests.engines.fakes.chat import FakeChat, delta, end
from tests.listener.test_tls import write_pair
from tests.support import WAIT_S, Served, fetch, serving, until

# In the shape in which the API server of Kubernetes writes them, for a service with two pods.
RECORDED = json.loads((Path(__file__).parent / "endpointslices.json").read_bytes())
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def lookup(**fields: Any) -> Lookup:
    known = {"model": "m", "urls": ("http://engines.test:8000",), "kind": "dns", "account": ""}
    return Lookup(**known | fields)


class Names:
    """What a name server says of `engines.test`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host != "engines.test":
            return self._real(host, port, *rest, **more)
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (one, port)) for one in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.mark.parametrize(
    ("url", "addresses", "found"),
    [
        ("http://engines.test:8000", ["10.0.0.2", "10.0.0.1"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
        ("http://engines.test", ["10.0.0.1", "fd00::1"], ["http://10.0.0.1:80"]),
        ("https://u:p@engines.test/v1", ["fd00::1"], ["https://u:p@[fd00::1]:443/v1"]),
    ],
)  # fmt: skip
def test_every_address_of_a_name_is_a_replica(
    names: Names, url: str, addresses: list[str], found: list[str]
) -> None:
    names.addresses = addresses
    looked_up = look_up(lookup(urls=(url,)))
    assert list(looked_up) == found
    assert set(looked_up.values()) == {urlsplit(url).netloc.rpartition("@")[2]}


def test_name_that_does_not_exist_is_no_error_of_the_settings(names: Names) -> None:
    with pytest.raises(LookupFailed, match=r"engines\.test: Name or service not known"):
        look_up(lookup())
    with pytest.raises(Misconfigured, match="KUBERNETES_SERVICE_HOST is not set"):
        look_up(lookup(kind="kubernetes", urls=("http://vllm.ai",)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine": "scripted"}, "engine 'scripted' has no URL"),
        ({"engine": "chat", "engine_url": ["http://10.0.0.1:8000"]}, "is an address"),
    ],
)
def test_settings_without_a_name_are_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(Misconfigured, match=words):
        load_settings({"engine_discovery": "dns", "store": "memory"} | flags, {})


# --- Kubernetes ---


class ApiServer:
    """Stands in for the API server of a cluster: TLS, a token, and the slices of the service `vllm`."""

    def __init__(self) -> None:
        self.slices = copy.deepcopy(RECORDED)
        self.status = 200
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        if request.headers.get("authorization") != "Bearer token-of-the-pod":
            return web.Response(status=401)
        return web.json_response(self.slices, status=self.status)

    def place(self, *engines: FakeChat, ready: FakeChat) -> None:
        """These pods, of which one is ready."""
        (template,) = RECORDED["items"]
        self.slices["items"] = [
            template
            | {
                "ports": [{"name": "http", "protocol": "TCP", "port": urlsplit(one.url).port}],
                "endpoints": [
                    template["endpoints"][0]
                    | {"addresses": ["127.0.0.1"], "conditions": {"ready": one is ready}}
                ],
            }
            for one in engines
        ]


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    """The stand-in, and a service account in a folder."""
    server, (cert, key) = ApiServer(), write_pair(tmp_path, "kubernetes")
    cert.rename(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("token-of-the-pod\n")
    (tmp_path / "namespace").write_text("inference")
    app = web.Application()
    app.add_routes([web.get(SLICES, server.answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", key)
    await web.TCPSite(runner, "localhost", 0, ssl_context=context).start()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
    yield server
    await runner.cleanup()


async def test_ready_pods_of_a_service_are_replicas(cluster: ApiServer, tmp_path: Path) -> None:
    async def found(url: str) -> list[str]:
        asked = lookup(kind="kubernetes", urls=(url,), account=str(tmp_path))
        return list(await asyncio.to_thread(look_up, asked))

    ready = ["http://10.244.1.7:8000", "http://10.244.2.9:8000"]
    assert await found("http://vllm") == ready, (
        "not the pod that is starting, nor the one that ends"
    )
    assert "/namespaces/inference/" in cluster.asked[-1]
    assert cluster.asked[-1].endswith("?labelSelector=kubernetes.io%2Fservice-name%3Dvllm")
    assert await found("http://vllm.other.svc.cluster.local:8000") == ready
    assert "/namespaces/other/" in cluster.asked[-1]
    cluster.slices["items"][0]["ports"].append({"name": "metrics", "port": 9000})
    assert await found("http://vllm:9000") == [one.replace("8000", "9000") for one in ready]
    with pytest.raises(Misconfigured, match=r"8000 \(http\), 9000 \(metrics\)"):
        await found("http://vllm")
    cluster.slices["items"] = []
    with pytest.raises(LookupFailed, match="nothing is ready"):
        await found("http://vllm")
    cluster.status = 403
    with pytest.raises(Misconfigured, match=r"list the endpointslices of namespace inference"):
        await found("http://vllm")
    (tmp_path / "token").unlink()
    with pytest.raises(Misconfigured, match="token cannot be read"):
        await found("http://vllm")


def speaks(word: str) -> FakeChat:
    return FakeChat(events=[delta(content=f"{word} "), delta(content="goes on"), end()])


async def said(served: Served) -> str:
    answer = await fetch(served, "POST", "/v1/responses", {"model": "m", "input": "x"})
    return str(answer.json["output"][0]["content"][0]["text"])


@asynccontextmanager
async def in_cluster(account: Path) -> AsyncIterator[Served]:
    flags: dict[str, object] = {"engine": "chat", "model": ["m"], "engine_url": ["http://vllm"]}
    discovery = {"engine_discovery": "kubernetes", "kubernetes_account": str(account)}
    async with serving(**flags, **discovery, engine_discovery_s=0.02) as served:
        yield served


async def test_pods_come_and_go_while_turns_run(
    cluster: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that is to end finishes its turn; an API server that fails changes nothing; missing rights are said."""
    caplog.set_level(logging.INFO)
    async with speaks("one") as one, speaks("two") as two:
        cluster.place(one, two, ready=one)
        async with in_cluster(tmp_path) as served:
            assert await said(served) == "one goes on"
            one.hold_at = 1
            running = asyncio.create_task(said(served))
            async with asyncio.timeout(WAIT_S):
                await one.held.wait()
            cluster.place(one, two, ready=two)
            await until(lambda: f"engine {one.url} is removed" in caplog.text)
            assert await said(served) == "two goes on"
            one.gate.set()
            assert await running == "one goes on"
            cluster.status = 500
            await until(lambda: "answered with status 500" in caplog.text)
            assert await said(served) == "two goes on"
            page = (await fetch(served, "GET", "/metrics")).body.decode()
            counted = page.partition('segue_engine_discovery_failures_total{model="m"} ')[2]
            assert float(counted.splitlines()[0]) >= 1
            cluster.status = 200
            await until(lambda: "succeeds again" in caplog.text)
        cluster.status = 403
        with pytest.raises(Misconfigured, match="Apply deploy/kubernetes"):
            async with in_cluster(tmp_path):
                pass


async def test_certificate_is_that_of_the_name(tmp_path: Path) -> None:
    """A replica that was found is reached by its address, and shows the certificate of its name."""
    cert, key = write_pair(tmp_path, "engine")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers["host"])

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    client = HttpClient(f"https://127.0.0.1:{port}", {}, 1.0, host=f"localhost:{port}")
    client._tls = ssl.create_default_context(cafile=cert)
    response = await client.send("GET", "/", b"", 5.0)
    assert await response.read_whole(100) == f"localhost:{port}".encode()
    client.close()
    await runner.cleanup()
