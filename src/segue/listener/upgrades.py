"""Which WebSocket upgrades are accepted? Knows every WebSocket session of the process."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Sequence
from functools import partial

from msgspec import structs
from websockets.datastructures import Headers
from websockets.http11 import Request

from segue.accounts.account import Account
from segue.errors import ApiError, Refused, Unavailable
from segue.ids import new_id
from segue.listener.access_line import AccessLine
from segue.listener.api import Api, Session, Upgrade
from segue.listener.auth import client_name, offered
from segue.listener.exchange import LOGGED_CHARS_MAX, ReadHeader
from segue.listener.reconnect import LostCaches
from segue.listener.services import Services
from segue.listener.socket import Socket
from segue.listener.table import unknown_url
from segue.seams.history import Owner

# Refused clients are asked to retry over this many seconds, not all at once (docs/inside/hazards.md T15).
RETRY_S = 4.0


class Upgrades:
    """Accepts upgrades: every session of the process begins here."""

    def __init__(self, services: Services, apis: Sequence[Api], off: Sequence[Api] = ()) -> None:
        """`off`: APIs that are switched off."""
        self._services = services
        self._off = off
        # By path, as a client may send it.
        self._paths = {
            path + end: (api, api.upgrade)
            for api in apis
            if api.upgrade is not None
            for path in api.spellings(api.upgrade.path)
            for end in ("", "/")
        }
        self.sessions: set[Session] = set()
        self.lost = LostCaches(services.limits.reconnect_s)

    def accept(
        self, request: Request, socket: Socket
    ) -> Session | ApiError | Awaitable[Session | ApiError]:
        """A session for this upgrade, or the error that refuses it; at once where the key is cached and has a place for
        one more connection."""
        path, headers = request.path.partition("?")[0], request.headers
        header = partial(_header, headers)
        line = None
        if self._services.write_access is not None:
            line = _access_line(path, header, socket.address)
        socket.client = client_name(header(b"user-agent"))
        try:
            api, upgrade = self._find(path, header)
            secret = api.find_secret(header)
            if secret is None:
                secret = offered(headers.get_all("Sec-WebSocket-Protocol"))
            account = self._services.accounts.known(secret)
            if account is None or not account.quota.can_connect:
                return self._look_up(upgrade, secret, line)
            return self._open(upgrade, account, line)
        except ApiError as error:
            return self._refuse(error, path, line)

    def _find(self, path: str, header: ReadHeader) -> tuple[Api, Upgrade]:
        """What this path can become; everything is checked that can be without the key."""
        limits = self._services.limits
        self._services.origin_policy.check(header(b"host"), header(b"origin"))
        if path not in self._paths:
            raise unknown_url("GET", path, self._off)
        if not limits.websocket:
            message = "WebSocket mode is switched off here; use HTTP."
            raise Refused(message, status=426, code="upgrade_required")
        if self._services.runner.is_draining:
            raise Unavailable("The server is shutting down. Please retry.")
        if len(self.sessions) >= limits.connections_max:
            wait_s = 1 + RETRY_S * random.random()
            raise Unavailable("Too many connections. Please retry.", wait_s=wait_s)
        return self._paths[path]

    async def _look_up(
        self, upgrade: Upgrade, secret: str | None, line: AccessLine | None
    ) -> Session | ApiError:
        try:
            account = await self._services.accounts.find(secret)
            account.check_scope(upgrade.scope)
            await account.quota.check_connections()
            return self._open(upgrade, account, line)
        except ApiError as error:
            return self._refuse(error, upgrade.path, line)

    def _open(self, upgrade: Upgrade, account: Account, line: AccessLine | None) -> Session:
        account.check_scope(upgrade.scope)
        account.quota.count_other_request()
        if line is not None:
            line = structs.replace(line, owner=account.owner, key=account.key_name)
        return upgrade.open(self._services, account, self.sessions, self.lost, line)

    def _refuse(self, error: ApiError, path: str, line: AccessLine | None) -> ApiError:
        services, request_id = self._services, new_id("req")
        error.request_id = request_id
        services.note_refusal("websocket", error.code, request_id)
        route = self._paths[path][1].path if path in self._paths else ""
        services.count_request("GET", route, error.status)
        if line is not None and services.write_access is not None:
            more = {"request_id": request_id, "status": error.status, "reason": error.code}
            services.write_access(structs.replace(line, **more))
        return error

    def dismiss(self, account: Account) -> None:
        """The key of this account was revoked: its sessions end."""
        for session in tuple(self.sessions):
            if session.account is account:
                session.dismiss()

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """Make every connection of its owner forget a deleted turn."""
        for session in tuple(self.sessions):
            if session.account.owner == owner:
                await session.erase(turn_id)
        await self.lost.erase(owner, turn_id)

    def forget_owner(self, owner: Owner) -> None:
        """Close the connections of an owner of which everything was erased, with their caches."""
        for session in tuple(self.sessions):
            if session.account.owner == owner:
                session.dismiss(is_erased=True)
        self.lost.drop(owner)

    def close_idle(self) -> None:
        """Close the idle sockets; the others close right after their last turn."""
        for session in tuple(self.sessions):
            session.close_if_idle()

    def close_all(self) -> None:
        """Close all sockets: the process is stopping."""
        for session in tuple(self.sessions):
            session.close()


def _header(headers: Headers, name: bytes) -> str:
    """The value of a header, or ""; a repeated header is both values joined, which no check accepts."""
    return ", ".join(headers.get_all(name.decode()))


def _access_line(path: str, header: ReadHeader, address: str) -> AccessLine:
    """What all lines of a connection in the access log have in common."""
    return AccessLine(
        event="request",
        request_id="",
        method="GET",
        path=path.encode("ascii", "backslashreplace").decode()[:LOGGED_CHARS_MAX],
        status=0,
        took_s=0.0,
        address=address,
        forwarded_for=header(b"x-forwarded-for")[:LOGGED_CHARS_MAX],
    )
