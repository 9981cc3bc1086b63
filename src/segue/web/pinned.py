"""How does an HTTP client connect to addresses that were checked, and to nothing else?

In: requests to one origin. Out: the same requests, sent to one of the given addresses, under their original name: the
`Host` header and the certificate's name stay. No name is looked up here, so it does not matter where it leads by now,
and a request to any other host is not sent at all. The library's own check of redirects comes before.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx2

from segue.web.url import DEFAULT_PORTS, Target


class PinnedTransport(httpx2.AsyncBaseTransport):
    """Speaks to one server at its checked addresses."""

    def __init__(self, target: Target, addresses: Sequence[str]) -> None:
        self._target = target
        self._addresses = tuple(addresses)
        self._inner = httpx2.AsyncHTTPTransport(trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it to the first address that takes the connection."""
        if not self._is_allowed(request.url):
            raise httpx2.ConnectError("not the server that was checked", request=request)
        for address in self._addresses[:-1]:
            try:
                return await self._send(request, address)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                # Nothing has been sent.
                continue
        return await self._send(request, self._addresses[-1])

    async def _send(self, request: httpx2.Request, address: str) -> httpx2.Response:
        pinned = httpx2.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": self._target.host},
        )
        return await self._inner.handle_async_request(pinned)

    def _is_allowed(self, url: httpx2.URL) -> bool:
        """The origin itself; or the same host where it has moved from plain HTTP to TLS."""
        target = self._target
        allowed = {(target.scheme, target.port)}
        if ("http", 80) in allowed:
            allowed.add(("https", 443))
        port = url.port or DEFAULT_PORTS.get(url.scheme)
        return url.host == target.host and (url.scheme, port) in allowed

    async def aclose(self) -> None:
        await self._inner.aclose()
