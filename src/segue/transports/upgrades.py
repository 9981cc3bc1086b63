"""Who may come in? Accepts upgrades, and knows every WebSocket session of the process."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable

from websockets.datastructures import Headers
from websockets.http11 import Request

from segue.accounts.account import Account
from segue.errors import ApiError, Refused, Unauthenticated, Unavailable
from segue.transports.auth import bearer, offered
from segue.transports.reconnect import LostCaches
from segue.transports.services import Services
from segue.transports.socket import Refusal
from segue.transports.websocket import Session
from segue.turn.values import Owner
from segue.wire.codec import encode_error_body

# Agents leave the version out, or name their own product.
PATHS = frozenset(
    f"{prefix}/responses{end}" for prefix in ("/v1", "", "/v1/codex") for end in ("", "/")
)
# Over how many seconds those who were turned away come back.
CROWDED_S = 4.0


def _header(headers: Headers, name: str) -> str:
    """A header's value, or nothing; one that is there twice is both, and so none that we know."""
    return ", ".join(headers.get_all(name))


def _secret_in(headers: Headers) -> str | None:
    """The secret that an upgrade presents: in its Authorization header, or, from a browser, among its subprotocols."""
    secret = bearer(_header(headers, "Authorization"))
    return offered(headers.get_all("Sec-WebSocket-Protocol")) if secret is None else secret


class Upgrades:
    """Accepts upgrades: every session of the process begins here."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.sessions: set[Session] = set()
        self.lost = LostCaches(services.limits.reconnect_s)

    def accept(self, request: Request) -> Session | Refusal | Awaitable[Session | Refusal]:
        """A session for this upgrade, or the status that refuses it before the handshake; at once where the key is
        known and has a place for it."""
        try:
            self._check(request)
            secret = _secret_in(request.headers)
            account = self._services.accounts.known(secret)
            if account is None or not account.quota.can_connect:
                return self._look_up(secret)
            return self._open(account)
        except ApiError as error:
            return self._refuse(error)

    def _check(self, request: Request) -> None:
        """All that can be refused without asking who it is."""
        path = request.path.partition("?")[0]
        headers, limits = request.headers, self._services.limits
        self._services.gate.check(_header(headers, "Host"), _header(headers, "Origin"))
        if path not in PATHS:
            raise Refused(f"Unknown request URL: {path[:256]}.", status=404, code="unknown_url")
        if not limits.is_websocket_on:
            raise Refused(
                "WebSocket mode is switched off here; use HTTP.",
                status=426,
                code="upgrade_required",
            )
        if self._services.runner.is_draining:
            raise Unavailable("The server is shutting down. Please retry.")
        if len(self.sessions) >= limits.connections_max:
            # Not all at the same time: those who were turned away come back over a few seconds.
            wait_s = 1 + CROWDED_S * random.random()
            raise Unavailable("Too many connections. Please retry.", wait_s=wait_s)

    async def _look_up(self, secret: str | None) -> Session | Refusal:
        try:
            account = await self._services.accounts.find(secret)
            account.check_scope("responses")
            await account.quota.check_connections()
            return self._open(account)
        except ApiError as error:
            return self._refuse(error)

    def _open(self, account: Account) -> Session:
        account.check_scope("responses")
        return Session(self._services, account, self.sessions, self.lost)

    def _refuse(self, error: ApiError) -> Refusal:
        self._services.note_refusal("websocket", error.code)
        headers: tuple[tuple[str, str], ...] = ()
        if error.wait_s is not None:
            headers += (("retry-after", str(math.ceil(error.wait_s))),)
        if isinstance(error, Unauthenticated):
            headers += (("www-authenticate", error.challenge),)
        return Refusal(error.status, headers, encode_error_body(error))

    def dismiss(self, account: Account) -> None:
        """Whoever came in with this key may not stay."""
        for session in tuple(self.sessions):
            if session.account is account:
                session.dismiss()

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """Make every connection forget a deleted turn."""
        for session in tuple(self.sessions):
            await session.erase(owner, turn_id)
        await self.lost.erase(owner, turn_id)

    def leave_idle(self) -> None:
        """Close the sockets that wait; the others close behind their last turn, in the same breath."""
        for session in tuple(self.sessions):
            session.leave_if_idle()

    def leave(self) -> None:
        """Close all sockets: the process is going away."""
        for session in tuple(self.sessions):
            session.leave()
