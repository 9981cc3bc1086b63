"""How is something fetched whose address came from outside?

In: a URL that a client, a model or a page has named. Out: its bytes, within limits, or an error in words. Pages,
pictures and files go through here and nowhere else (docs/hazards.md T10), and nothing does until the operator
has switched it on.

How it holds. `target.parse` is the one parser, and the request is built from its parts. A name is looked up once, for
each hop; addresses that are not public are dropped; the connection is offered nothing else, and the last word is had
where the socket is made, with the very address that it will be connected to. So it does not matter what a name leads to
a moment later, nor what the HTTP library makes of a URL. Redirects are followed here, one by one, each checked as if it
were the first; what the caller sends along goes to the first origin only. Every hop has a connection of its own: no
cookies, no kept connections, no proxies, nothing from the environment. Size, inflated size and time are bounded.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import socket
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Literal

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import Struct
from yarl import URL

from segue import __version__
from segue.errors import InvalidRequest
from segue.tools.url import (
    Address,
    Target,
    is_public,
    is_public_name,
    is_within,
    parse,
    parse_next,
    refused,
    shown,
)

Resolve = Callable[[str], Awaitable[Sequence[str]]]
MayReach = Callable[[Address], bool]

AGENT = f"segue/{__version__}"
# As browsers, roughly; longer chains are loops or games.
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Fetches of the whole process at a time, and threads that wait for names: slow sites do not starve the rest.
FETCHES_MAX = 16
LOOKUPS_MAX = 8
# Of each name; more would be asked in vain.
ADDRESSES_MAX = 8
CHUNK_BYTES = 64 * 1024

PAGE_KINDS = (
    "text/",
    "application/xhtml+xml",
    "application/pdf",
    "application/json",
    "application/xml",
)
FILE_KINDS = (*PAGE_KINDS, "application/octet-stream", "application/markdown", "application/x-")
IMAGE_KINDS = ("image/png", "image/jpeg", "image/gif", "image/webp")


class Policy(Struct, frozen=True):
    """What may be fetched. `own`: an address that the operator has written down, which may be anywhere."""

    kind: Literal["off", "public", "own"] = "off"
    # Domains; with any in `allow` there are no others.
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    ports: tuple[int, ...] = (80, 443)
    bytes_max: int = 8 * 1024 * 1024
    s_max: float = 10.0
    redirects_max: int = 5


class Fetched(Struct, frozen=True):
    """What was found, and where in the end."""

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
        self._may_reach = may_reach if policy.kind != "own" else _anywhere
        self._places = asyncio.Semaphore(FETCHES_MAX)
        # Threads start with the first look-up.
        self._threads = ThreadPoolExecutor(LOOKUPS_MAX, thread_name_prefix="look-up")

    @property
    def is_on(self) -> bool:
        """Whether anything can be fetched at all."""
        return self.policy.kind != "off"

    def close(self) -> None:
        """Let the threads go; those that still wait for a name end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(
        self,
        url: str,
        accepts: Sequence[str] = PAGE_KINDS,
        headers: Mapping[str, str] | None = None,
    ) -> Fetched:
        """What is there. `headers` go to the origin of this URL and to no other, wherever it redirects."""
        if not self.is_on:
            raise refused(url, "fetching is switched off on this server.")
        target = parse(url)
        try:
            async with asyncio.timeout(self.policy.s_max), self._places:
                return await self._follow(target, accepts, dict(headers or {}))
        except TimeoutError:
            raise failed(url, f"it took longer than {self.policy.s_max:g} seconds.") from None

    async def check(self, url: str) -> tuple[Target, tuple[str, ...]]:
        """The parts of a URL and the addresses that may be connected to, looked up once: for those who must speak
        another protocol there themselves. They connect to these addresses only."""
        if not self.is_on:
            raise refused(url, "fetching is switched off on this server.")
        target = parse(url)
        async with asyncio.timeout(self.policy.s_max):
            return target, await self._addresses(target)

    async def _follow(
        self, target: Target, accepts: Sequence[str], headers: Mapping[str, str]
    ) -> Fetched:
        first = target.origin
        for _ in range(self.policy.redirects_max + 1):
            # Gone for good once somebody else has had a say in where we are going.
            headers = headers if target.origin == first else {}
            found = await self._hop(target, accepts, headers)
            if isinstance(found, Fetched):
                return found
            target = parse_next(target, found)
        raise failed(target.url, f"it redirects more than {self.policy.redirects_max} times.")

    async def _hop(
        self, target: Target, accepts: Sequence[str], headers: Mapping[str, str]
    ) -> Fetched | str:
        """One request: what was found, or where it is said to be."""
        addresses = await self._addresses(target)
        connector = aiohttp.TCPConnector(
            resolver=_Known(addresses),
            use_dns_cache=False,
            force_close=True,
            limit=1,
            socket_factory=self._make_socket,
        )
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
                    _url_of(target),
                    headers={
                        "user-agent": AGENT,
                        "accept-encoding": "gzip",
                        "accept": ", ".join(_ranges(accepts)),
                        **headers,
                    },
                    allow_redirects=False,
                ) as answer,
            ):
                if answer.status in REDIRECTS and "location" in answer.headers:
                    return answer.headers["location"]
                return await self._read(target, answer, accepts)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # TimeoutError is an OSError, and is said by its own name further out.
            if isinstance(error, TimeoutError):
                raise
            raise failed(target.url, "it cannot be reached, or does not speak HTTP.") from error

    async def _read(
        self, target: Target, answer: aiohttp.ClientResponse, accepts: Sequence[str]
    ) -> Fetched:
        if answer.status != 200:
            raise failed(target.url, f"it answered {answer.status}.")
        kind = answer.content_type.lower()
        if not any(kind == one or (one[-1] in "/-" and kind.startswith(one)) for one in accepts):
            raise failed(target.url, f"it is of the type {kind[:80]}, which is not read here.")
        body = _unpacker(answer.headers.get("content-encoding", ""))
        if body is None:
            raise failed(target.url, "it is compressed in a way that was not asked for.")
        limit = self.policy.bytes_max
        if (answer.content_length or 0) > limit:
            raise _too_long(target, limit)
        data = bytearray()
        try:
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                # One byte more than there may be tells a long one from one that just fits.
                data += body.inflate(chunk, limit + 1 - len(data))
                if len(data) > limit:
                    raise _too_long(target, limit)
        except zlib.error:
            raise failed(target.url, "its compression is broken.") from None
        if not body.is_whole:
            raise failed(target.url, "it was cut off.")
        return Fetched(target.url, kind, answer.charset, bytes(data))

    async def _addresses(self, target: Target) -> tuple[str, ...]:
        """Where this target may be reached. A name that leads nowhere and one that leads inside are told alike, so that
        nobody learns the names of a network from our answers."""
        self._check_place(target)
        literal = target.address
        found = [str(literal)] if literal is not None else await self._resolve(target.host)
        reachable = tuple(one for one in found if self._is_reachable(one))[:ADDRESSES_MAX]
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

    def _make_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """The last door: the address in `info` is the one that is connected to, whoever asked for it."""
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


class _Known(AbstractResolver):
    """Answers with what was looked up and checked before."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The checked addresses, for whatever name."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """There is nothing to close."""


async def read_as_data(fetcher: Fetcher, url: str, kind: Literal["file", "image"]) -> str:
    """What is at an address, as a data URL: for files and pictures that stand in an input."""
    found = await fetcher.fetch(url, FILE_KINDS if kind == "file" else IMAGE_KINDS)
    return f"data:{found.kind};base64,{base64.b64encode(found.data).decode()}"


def failed(url: str, why: str) -> InvalidRequest:
    """An address that we went to, or tried to, in vain."""
    return InvalidRequest(f"The address {shown(url)} could not be read: {why}", code="url_failed")


def _too_long(target: Target, limit: int) -> InvalidRequest:
    return failed(target.url, f"it is longer than {limit} bytes.")


def _anywhere(address: Address) -> bool:
    return True


def _ranges(accepts: Sequence[str]) -> list[str]:
    """The types as a header has them: `text/` is `text/*`; what is only the beginning of a name cannot be said."""
    return [f"{one}*" if one.endswith("/") else one for one in accepts if not one.endswith("-")]


def _url_of(target: Target) -> URL:
    """The same for the HTTP library, which must read the same in it."""
    url = URL(target.url, encoded=True)
    path = (url.raw_path, url.raw_query_string)
    if (url.scheme, url.host, url.port) != target.origin or path != (target.path, target.query):
        raise refused(target.url, "it can be read in two ways.")
    return url


class _Plain:
    """A body that is what it is."""

    is_whole = True

    def inflate(self, chunk: bytes, room: int) -> bytes:
        return chunk[:room]


class _Gunzip:
    """A body that was compressed, as we allow; never more of it than there is room for."""

    def __init__(self) -> None:
        self._unzip = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def is_whole(self) -> bool:
        return self._unzip.eof

    def inflate(self, chunk: bytes, room: int) -> bytes:
        # Room for nothing would be taken as no limit; and what lies behind the end is nobody's.
        return self._unzip.decompress(chunk, room) if room > 0 and not self.is_whole else b""


def _unpacker(encoding: str) -> _Plain | _Gunzip | None:
    """How the body becomes plain; None for an encoding that we did not ask for."""
    match encoding.strip().lower():
        case "" | "identity":
            return _Plain()
        case "gzip" | "x-gzip":
            return _Gunzip()
        case _:
            return None
