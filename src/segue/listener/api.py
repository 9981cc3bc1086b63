"""What is an API at the edge? One value: its routes, the shape of its errors, where a client's key is, its WebSocket.

A room such as `responses/` exports one `Api`, and `server/apis.py` has a row for it. The listener knows none by name.
`listener/table.py` refuses one with a missing part when the server starts, not when the first client comes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from segue.accounts.account import Account
from segue.aio import off_loop
from segue.budgets.headers import RateHeaders, openai_headers
from segue.errors import ApiError
from segue.listener.access_line import AccessLine
from segue.listener.exchange import ErrorAnswer, Exchange, ReadHeader
from segue.listener.reconnect import LostCaches
from segue.listener.services import Services
from segue.listener.socket import SocketListener
from segue.seams.history import Owner

Handle = Callable[[Exchange], Awaitable[None]]

# A part of a path in braces: its name, and its pattern if it has one.
PARAMETER = re.compile(r"\{(\w+)(?::([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, the handler, and the scope that a key needs (of `a|b` any); without one no key is needed."""

    verb: str
    # As people write it: "/v1/responses/{id}". A part in braces matches up to the next slash; "{id:.+}" has a pattern.
    path: str
    call: Handle
    scope: str | None
    # Whether its handler counts it as a request for a turn.
    is_turn: bool = False
    # Only for requests that have this header: two APIs may have a path in common, and tell their clients apart by it.
    header: bytes = b""
    # Filled in by the table; the server's own pages belong to none.
    api: Api | None = None

    @property
    def name(self) -> str:
        """The path in metrics and in the OpenAPI document: "/v1/models/{id}"."""
        return PARAMETER.sub(r"{\1}", self.path)

    @property
    def spellings(self) -> list[str]:
        """All paths that lead here."""
        return [self.path] if self.api is None else self.api.spellings(self.path)


def late(load: Callable[[], object]) -> Callable[[str], Handle]:
    """The handlers of what `load` makes, by name. It is made by the first request, and beside the event loop: to
    import a room takes a while, and most servers need few of them."""
    loaded: list[object] = []

    def handler(name: str) -> Handle:
        async def call(exchange: Exchange) -> None:
            if not loaded:
                loaded.append(await off_loop(True, load))
            await getattr(loaded[0], name)(exchange)

        return call

    return handler


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What the dashboard shows of a WebSocket connection."""

    # The first part of the names of its lanes, as turns carry them.
    key: str
    owner: Owner
    opened_at: float
    lanes: int
    running: int
    waiting: int
    turns: int
    state_bytes: int


class Session(SocketListener, Protocol):
    """What an API makes of one WebSocket connection."""

    account: Account

    @property
    def state_bytes(self) -> int:
        """The size of the connection's cache."""

    def status(self) -> SessionStatus:
        """What it is doing now."""

    async def erase(self, turn_id: str) -> None:
        """Forget a deleted turn."""

    def dismiss(self, *, is_erased: bool = False) -> None:
        """The key was revoked, or all of its owner was erased: running turns finish, nothing more is accepted."""

    def close_if_idle(self) -> None:
        """The process drains: close the socket, if nothing runs on it."""

    def close(self) -> None:
        """The process is stopping: close the socket."""


# Makes a session of an upgrade that was accepted. The line is what all its lines in the access log have in common.
OpenSession = Callable[[Services, Account, set[Session], LostCaches, AccessLine | None], Session]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A path that can become a WebSocket, and the scope that a key needs."""

    path: str
    open: OpenSession
    scope: str


@dataclass(frozen=True, slots=True, eq=False)
class Api:
    """One API: what the listener must know to serve it."""

    name: str
    # The beginnings of its paths, each with other spellings that clients use. Errors of all paths that begin so have
    # the API's own shape, also those of paths that do not exist.
    paths: Mapping[str, Sequence[str]]
    routes: Callable[[Services], Sequence[Route]]
    # Called with an error and the id of the request.
    error_answer: Callable[[ApiError, str], ErrorAnswer]
    # Reads the client's key from its headers; None where there is none.
    find_secret: Callable[[ReadHeader], str | None]
    # What its transports are called in metrics and logs: "messages_" makes "messages_sse" of "sse".
    label: str
    upgrade: Upgrade | None = None
    # What of a key's minute is left, as its clients read it.
    rate_headers: RateHeaders = openai_headers

    def spellings(self, path: str) -> list[str]:
        """All spellings of one of its paths."""
        for start, others in self.paths.items():
            if path.startswith(start):
                return [path, *(other + path.removeprefix(start) for other in others)]
        return [path]

    def owns(self, path: str) -> bool:
        """Whether this path, which a client has sent, begins as its paths do."""
        starts = (each for start, others in self.paths.items() for each in (start, *others))
        return any(path == start or path.startswith(start + "/") for start in starts)
