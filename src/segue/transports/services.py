"""What does every transport need to serve a request? The runner, the stores, the accounts and the limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from segue.accounts.account import Account, Accounts
from segue.process.runner import Runner
from segue.transports.auth import OriginPolicy
from segue.turn.seams import Conversations, Turns
from segue.turn.values import Owner, Turn


class NearTurns(Turns, Protocol):
    """The cache of one connection: a `Turns` with a synchronous look-up."""

    @property
    def bytes(self) -> int:
        """Its size in memory."""

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn, if it is in the cache."""

    def forget(self, owner: Owner, turn_id: str) -> None:
        """Remove the turn from the cache."""

    def leave(self) -> None:
        """The connection is over: its bytes no longer count."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a client; each is a setting."""

    # Whole histories with images arrive in one frame (docs/protocol.md 6.11); a gateway's 16 MiB broke clients
    # (docs/hazards.md F11).
    body_bytes_max: int = 64 * 1024 * 1024
    # OpenAI's own: clients rotate shortly before it.
    connection_age_s: float = 3600.0
    # A client that reads nothing for this long is cut.
    write_s_max: float = 30.0
    # What may wait for a slow client before the model is slowed down.
    outbox_bytes_max: int = 1024 * 1024
    is_websocket_on: bool = True
    # How long the cache of a lost connection is kept for a client that reconnects; 0: not at all.
    reconnect_s: float = 0.0
    # A body that takes longer than this to arrive is refused.
    body_s_max: float = 120.0
    # WebSocket connections of this process; one more is answered 503.
    connections_max: int = 10_000


@dataclass(slots=True)
class Services:
    """The one value that `app.py` gives to all transports."""

    runner: Runner
    accounts: Accounts
    origin_policy: OriginPolicy
    # The durable store, as HTTP uses it; a WebSocket connection puts its own cache in front.
    turns: Turns
    conversations: Conversations
    # Erases a turn in the store and in the caches of all connections.
    erase: Callable[[Owner, str], Awaitable[bool]]
    # A fresh cache for a connection, and its `Turns` in front of the durable one.
    open_cache: Callable[[Account], tuple[NearTurns, Turns]]
    is_ready: Callable[[], Awaitable[dict[str, bool]]]
    write_metrics: Callable[[], Awaitable[bytes]]
    limits: Limits = field(default_factory=Limits)
    # Called with the transport and the code of a request that was refused before it became a turn.
    note_refusal: Callable[[str, str], None] = lambda transport, code: None
