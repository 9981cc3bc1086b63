"""How is a URL fetched that came from outside?

In: a URL that a client, a model or a page has named. Out: its bytes, within limits, or an error. Pages, pictures and
files go through here and nowhere else (docs/inside/hazards.md T10), and nothing does until the operator switches it on.

Theory of operation. `url.parse` is the one parser, and the request is built from its parts. A name is looked up once,
for each hop; addresses that are not public are dropped; the connection gets no other addresses, and the last check is
made where the socket is made, with the very address that it will be connected to. So it does not matter where a name
leads a moment later, nor how the HTTP library reads a URL. Redirects are followed here, one by one, each checked as if
it were the first; the caller's headers go to the first origin only. Every hop has a connection of its own: no cookies,
no kept connections, no proxies, nothing from the environment. Size, inflated size and time are bounded.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import zlib
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from itertools import chain
from typing import TYPE_CHECKING, Literal, cast

from msgspec import Struct

from segue import __version__
from segue.aio import off_loop
from segue.rests import joined
from segue.web.url import (
    Address,
    Target,
    failed,
    is_public,
    is_public_name,
    is_within,
    parse,
    parse_next,
    refused,
)

# An optional library: nothing is fetched where it is not installed.
if TYPE_CHECKING:
    from aiohttp import AddrInfoType, ClientResponse
    from aiohttp.abc import AbstractResolver, ResolveResult
    from yarl import URL

Resolve = Callable[[str], Awaitable[Sequence[str]]]
MayReach = Callable[[Address], bool]

AGENT = f"segue/{__version__}"
# As browsers, roughly; longer chains are loops or games.
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Fetches of the whole process at a time, and threads that wait for names: slow sites do not starve the rest.
FETCHES_MAX = 16
LOOKUPS_MAX = 8
# Addresses of each name that are tried.
ADDRESSES_MAX = 8
CHUNK_BYTES = 64 * 1024
# Encoded at once: three bytes are four letters.
SLICE_BYTES = 3 * 64 * 1024

PAGE_KINDS = ("text/", *(f"application/{kind}" for kind in ("xhtml+xml", "pdf", "json", "xml")))
FILE_KINDS = (*PAGE_KINDS, "application/octet-stream", "application/markdown", "application/x-")
IMAGE_KINDS = ("image/png", "image/jpeg", "image/gif", "image/webp")


class Policy(Struct, frozen=True):
    """What may be fetched. `own`: a URL of the operator's configuration, which may lead anywhere."""

    kind: Literal["off", "public", "own"] = "off"
    # Domains. Where `allow` has any, no others are allowed.
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    ports: tuple[int, ...] = (80, 443)
    bytes_max: int = 8 * 1024 * 1024
    s_max: float = 10.0
    redirects_max: int = 5


class Fetched(Struct, frozen=True):
    """The content, and its URL after all redirects."""

    url: str
    kind: str
    charset: str | None
    data: bytes


class Fetcher:
    """Fetches from outside, by one policy. One for the process: its limits are the process's."""

    def __init__(
        self, policy: Policy, resolve: Resolve | None = None, may_reach: MayReach = is_public
    ) -> None:
        self.policy = policy
        self._resolve = resolve or self._look_up
        self._may_reach = may_reach if policy.kind != "own" else lambda address: True
        self._slots = asyncio.Semaphore(FETCHES_MAX)
        # Threads start with the first look-up.
        self._threads = ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="look-up")

    @property
    def is_on(self) -> bool:
        """Whether anything can be fetched at all."""
        return self.policy.kind != "off"

    def close(self) -> None:
        """Stop the threads; those that still wait for a name end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(
        self,
        url: str,
        accepts: Sequence[str] = PAGE_KINDS,
        headers: Mapping[str, str] | None = None,
    ) -> Fetched:
        """What is there. `headers` go to the origin of this URL and to no other, wherever it redirects."""
        target = self._parse(url)
        try:
            async with asyncio.timeout(self.policy.s_max), self._slots:
                return await self._follow(target, accepts, dict(headers or {}))
        except TimeoutError:
            raise failed(url, f"it took longer than {self.policy.s_max:g} seconds.") from None

    async def check(self, url: str) -> tuple[Target, tuple[str, ...]]:
        """The parts of a URL and the addresses that may be connected to, looked up once: for callers that speak another
        protocol there themselves. They connect to these addresses only."""
        target = self._parse(url)
        async with asyncio.timeout(self.policy.s_max):
            return target, await self._addresses(target)

    def _parse(self, url: str) -> Target:
        if not self.is_on:
            raise refused(url, "fetching is switched off on this server.")
        return parse(url)

    async def _follow(
        self, target: Target, accepts: Sequence[str], headers: Mapping[str, str]
    ) -> Fetched:
        first = target.origin
        for _ in range(self.policy.redirects_max + 1):
            # Gone for good once another origin has decided where the next request goes.
            headers = headers if target.origin == first else {}
            result = await self._hop(target, accepts, headers)
            if isinstance(result, Fetched):
                return result
            target = parse_next(target, result)
        raise failed(target.url, f"it redirects more than {self.policy.redirects_max} times.")

    async def _hop(
        self, target: Target, accepts: Sequence[str], headers: Mapping[str, str]
    ) -> Fetched | str:
        """One request: the content, or where it redirects to."""
        import aiohttp

        from segue.border.one_answer import OneAnswerConnector

        addresses = _CheckedAddresses(await self._addresses(target))
        connector = OneAnswerConnector(
            resolver=cast("AbstractResolver", addresses),
            use_dns_cache=False,
            force_close=True,
            limit=1,
            socket_factory=self._make_socket,
        )
        # `text/` is `text/*` in a header; the beginning of a name cannot be written there.
        kinds = [f"{kind}*" if kind[-1] == "/" else kind for kind in accepts if kind[-1] != "-"]
        sent = {"user-agent": AGENT, "accept-encoding": "gzip", "accept": ", ".join(kinds)}
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                    trust_env=False,
                    timeout=aiohttp.ClientTimeout(total=self.policy.s_max),
                ) as session,
                session.get(
                    _url_of(target), headers={**sent, **headers}, allow_redirects=False
                ) as answer,
            ):
                if answer.status in REDIRECTS and "location" in answer.headers:
                    return answer.headers["location"]
                return await self._read(target, answer, accepts)
        except TimeoutError:
            # An OSError too; `fetch` reports it as a timeout.
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise failed(target.url, "it cannot be reached, or does not speak HTTP.") from error

    async def _read(
        self, target: Target, answer: ClientResponse, accepts: Sequence[str]
    ) -> Fetched:
        if answer.status != 200:
            raise failed(target.url, f"it answered {answer.status}.")
        kind = answer.content_type.lower()
        if not any(
            kind == accepted or (accepted[-1] in "/-" and kind.startswith(accepted))
            for accepted in accepts
        ):
            raise failed(target.url, f"its content type {kind[:80]} is not supported.")
        encoding = answer.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise failed(target.url, "its content encoding was not requested.")
        unzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if "gzip" in encoding else None
        limit = self.policy.bytes_max
        too_long = failed(target.url, f"it is longer than {limit} bytes.")
        if (answer.content_length or 0) > limit:
            raise too_long
        data = bytearray()
        try:
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                # One byte more than allowed tells a body that is too long from one that just fits. Never 0, which zlib
                # takes for no limit.
                room = limit + 1 - len(data)
                if unzip is None:
                    data += chunk[:room]
                elif not unzip.eof:
                    data += unzip.decompress(chunk, room)
                if len(data) > limit:
                    raise too_long
        except zlib.error:
            raise failed(target.url, "its compression is broken.") from None
        if unzip is not None and not unzip.eof:
            raise failed(target.url, "it was cut off.")
        return Fetched(target.url, kind, answer.charset, bytes(data))

    async def _addresses(self, target: Target) -> tuple[str, ...]:
        """Where this target may be reached. A name that leads nowhere and a name that leads inside get the same error,
        so that no client can probe the names of a network."""
        self._check_place(target)
        literal = target.address
        addresses = [str(literal)] if literal is not None else await self._resolve(target.host)
        reachable = tuple(filter(self._is_reachable, addresses))[:ADDRESSES_MAX]
        if not reachable:
            raise refused(target.url, "its host has no public address.")
        return reachable

    def _check_place(self, target: Target) -> None:
        policy = self.policy
        if policy.kind == "own":
            return
        if target.address is None and not is_public_name(target.host):
            raise refused(target.url, "its host has no public address.")
        if target.port not in policy.ports:
            raise refused(target.url, f"the port {target.port} is not allowed here.")
        is_listed = not policy.allow or is_within(target.host, policy.allow)
        if not is_listed or is_within(target.host, policy.deny):
            raise refused(target.url, "its host is not allowed here.")

    def _is_reachable(self, text: str) -> bool:
        try:
            return self._may_reach(ip_address(text))
        except ValueError:
            return False

    def _make_socket(self, info: AddrInfoType) -> socket.socket:
        """The last check: the address in `info` is the one that is connected to."""
        family, kind, protocol, _, place = info
        if not self._is_reachable(str(place[0])):
            raise OSError(errno.EACCES, "not a public address")
        return socket.socket(family, kind, protocol)

    async def _look_up(self, host: str) -> Sequence[str]:
        def ask() -> list[str]:
            try:
                rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                return []
            return list(dict.fromkeys(str(row[4][0]) for row in rows))

        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)


class _CheckedAddresses:
    """An aiohttp resolver: of every name, the addresses that were looked up and checked before."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


class DataReader:
    """Reads URLs for files and pictures of an input."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self.bytes_max = fetcher.policy.bytes_max

    async def __call__(self, url: str, kind: Literal["file", "image"]) -> str:
        """The content of a URL, as a data URL."""
        fetched = await self._fetcher.fetch(url, FILE_KINDS if kind == "file" else IMAGE_KINDS)
        return await off_loop(len(fetched.data) > SLICE_BYTES, _data_url, fetched)


def _data_url(fetched: Fetched) -> str:
    """In slices, as it is encoded."""
    data = memoryview(fetched.data)
    slices = (data[at : at + SLICE_BYTES] for at in range(0, len(data), SLICE_BYTES))
    encoded = (b2a_base64(slice, newline=False).decode() for slice in slices)
    return joined(chain((f"data:{fetched.kind};base64,",), encoded))


def _url_of(target: Target) -> URL:
    """The URL for the HTTP library, which must read the same parts in it."""
    from yarl import URL

    url = URL(target.url, encoded=True)
    path = (url.raw_path, url.raw_query_string)
    if (url.scheme, url.host, url.port) != target.origin or path != (target.path, target.query):
        raise refused(target.url, "it is ambiguous.")
    return url
