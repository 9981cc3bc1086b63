"""Which WebSocket upgrades are accepted? Knows every WebSocket session of the process."""

from __future__ import annotations

import random
from collections.abc import Awaitable

from msgspec import structs
from websockets.datastructures import Headers
from websockets.http11 import Request

from segue.accounts.account import Account
from segue.errors import ApiError, Refused, Unavailable
from segue.ids import new_id
from segue.listener.auth import bearer, client_name, offered
from segue.listener.exchange import LOGGED_CHARS_MAX
from segue.listener.services import Services
from segue.listener.socket import Socket
from segue.process.afterwards import AccessLine
from segue.responses.reconnect import LostCaches
from segue.responses.websocket import SocketSession
from segue.seams.history import Owner

# Agents leave the version out, or use the path of their own product.
PATHS = frozenset(
    f"{prefix}/responses{end}" for prefix in ("/v1", "", "/v1/codex") for end in ("", "/")
)
# Refused clients are told to retry over this many seconds, not all at once (docs/hazards.md T15).
RETRY_S = 4.0


def _header(headers: Headers, name: str) -> str:
    """The value of a header, or ""; a repeated header is both values joined, which no check accepts."""
    return ", ".join(headers.get_all(name))


def _secret_in(headers: Headers) -> str | None:
    """The API key of an upgrade: in its Authorization header or, from a browser, among its subprotocols."""
    secret = bearer(_header(headers, "Authorization"))
    return offered(headers.get_all("Sec-WebSocket-Protocol")) if secret is None else secret


def _origin_of(request: Request, socket: Socket) -> AccessLine:
    path = request.path.partition("?")[0].encode("ascii", "backslashreplace").decode()
    forwarded_for = _header(request.headers, "X-Forwarded-For")
    return AccessLine(
        event="request",
        request_id="",
        method="GET",
        path=path[:LOGGED_CHARS_MAX],
        status=0,
        took_s=0.0,
        address=socket.address,
        forwarded_for=forwarded_for[:LOGGED_CHARS_MAX],
    )


class Upgrades:
    """Accepts upgrades: every session of the process begins here."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.sessions: set[SocketSession] = set()
        self.lost = LostCaches(services.limits.reconnect_s)

    def accept(
        self, request: Request, socket: Socket
    ) -> SocketSession | ApiError | Awaitable[SocketSession | ApiError]:
        """A session for this upgrade, or the error that refuses it; at once where the key is cached and has a place for
        one more connection."""
        origin = None if self._services.write_access is None else _origin_of(request, socket)
        socket.client = client_name(_header(request.headers, "User-Agent"))
        try:
            self._check(request)
            secret = _secret_in(request.headers)
            account = self._services.accounts.known(secret)
            if account is None or not account.quota.can_connect:
                return self._look_up(secret, origin)
            return self._open(account, origin)
        except ApiError as error:
            return self._refuse(error, origin)

    def _check(self, request: Request) -> None:
        """Everything that can be refused without the key."""
        path = request.path.partition("?")[0]
        headers, limits = request.headers, self._services.limits
        self._services.origin_policy.check(_header(headers, "Host"), _header(headers, "Origin"))
        if path not in PATHS:
            raise Refused(f"Unknown request URL: {path[:256]}.", status=404, code="unknown_url")
        if not limits.websocket:
            message = "WebSocket mode is switched off here; use HTTP."
            raise Refused(message, status=426, code="upgrade_required")
        if self._services.runner.is_draining:
            raise Unavailable("The server is shutting down. Please retry.")
        if len(self.sessions) >= limits.connections_max:
            wait_s = 1 + RETRY_S * random.random()
            raise Unavailable("Too many connections. Please retry.", wait_s=wait_s)

    async def _look_up(
        self, secret: str | None, origin: AccessLine | None
    ) -> SocketSession | ApiError:
        try:
            account = await self._services.accounts.find(secret)
            account.check_scope("responses")
            await account.quota.check_connections()
            return self._open(account, origin)
        except ApiError as error:
            return self._refuse(error, origin)

    def _open(self, account: Account, origin: AccessLine | None) -> SocketSession:
        account.check_scope("responses")
        if origin is not None:
            origin = structs.replace(origin, owner=account.owner, key=account.key_name)
        return SocketSession(self._services, account, self.sessions, self.lost, origin)

    def _refuse(self, error: ApiError, origin: AccessLine | None) -> ApiError:
        services, request_id = self._services, new_id("req")
        error.request_id = request_id
        services.note_refusal("websocket", error.code, request_id)
        services.count_request("GET", "/v1/responses", error.status)
        if origin is not None and services.write_access is not None:
            more = {"request_id": request_id, "status": error.status, "reason": error.code}
            services.write_access(structs.replace(origin, **more))
        return error

    def dismiss(self, account: Account) -> None:
        """The key of this account was revoked: its sessions end."""
        for session in tuple(self.sessions):
            if session.account is account:
                session.dismiss()

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """Make every connection of its owner forget a deleted turn."""
        for session in tuple(self.sessions):
            if session.owner == owner:
                await session.erase(owner, turn_id)
        await self.lost.erase(owner, turn_id)

    def leave_idle(self) -> None:
        """Close the idle sockets; the others close right after their last turn."""
        for session in tuple(self.sessions):
            session.leave_if_idle()

    def leave(self) -> None:
        """Close all sockets: the process is stopping."""
        for session in tuple(self.sessions):
            session.leave()
