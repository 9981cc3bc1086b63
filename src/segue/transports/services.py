"""What every transport needs to serve a request: who runs turns, where they are kept, what the limits are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from segue.accounts.account import Account, Accounts
from segue.process.runner import Runner
from segue.transports.origin import Gate
from segue.turn.seams import Conversations, Turns
from segue.turn.values import Owner, Turn


class NearTurns(Turns, Protocol):
    """The cache of one connection: a `Turns` that can also be asked at once, and told to forget."""

    @property
    def bytes(self) -> int:
        """What it holds."""

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn, if it is held now."""

    def forget(self, owner: Owner, turn_id: str) -> None:
        """Find it here no more."""

    def leave(self) -> None:
        """The connection is over: what it holds counts no longer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask of one connection; each can be set by the operator."""

    # Whole histories with images arrive in one frame (docs/protocol.md 6.11); a
    # gateway's 16 MiB broke clients (docs/hazards.md F11).
    body_bytes_max: int = 64 * 1024 * 1024
    # OpenAI's own: clients rotate shortly before it.
    connection_age_s: float = 3600.0
    # A reader that takes nothing for this long is cut.
    write_s_max: float = 30.0
    # What may wait for a slow reader before the model is slowed down.
    outbox_bytes_max: int = 1024 * 1024
    is_websocket_on: bool = True
    # How long what a lost connection remembered can be found by the next one; 0: not at all.
    reconnect_s: float = 0.0
    # A body that takes longer than this to arrive is not waited for.
    body_s_max: float = 120.0
    # Sockets of this process; one more is asked to come back later.
    connections_max: int = 10_000


@dataclass(slots=True)
class Services:
    """The one value that `app.py` hands to all transports."""

    runner: Runner
    # Who may come in, and from where.
    accounts: Accounts
    gate: Gate
    # The durable store, as HTTP uses it; a connection puts its own cache in front.
    turns: Turns
    conversations: Conversations
    # Erases a turn everywhere: in the store, and in the caches of all connections.
    erase: Callable[[Owner, str], Awaitable[bool]]
    # A fresh cache for a connection, and its `Turns` in front of the durable one.
    open_cache: Callable[[Account], tuple[NearTurns, Turns]]
    is_ready: Callable[[], Awaitable[dict[str, bool]]]
    write_metrics: Callable[[], Awaitable[bytes]]
    limits: Limits = field(default_factory=Limits)
    # A request that was refused before it became a turn.
    note_refusal: Callable[[str, str], None] = lambda transport, code: None
