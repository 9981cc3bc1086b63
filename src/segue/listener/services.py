"""What does every API need to serve a request? The runner, the stores, the accounts and the limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Raw

from segue.accounts.account import Account, Accounts
from segue.listener.access_line import AccessLine
from segue.listener.auth import OriginPolicy
from segue.listener.edge_limits import EdgeLimits
from segue.memory.budget import Memory
from segue.process.runner import Runner
from segue.resent.memo import Memo
from segue.seams.history import Owner, Turn
from segue.seams.store import Conversations, Turns
from segue.wire.cache import CacheReport


class NearTurns(Turns, Protocol):
    """The cache of one connection: a `Turns` with a synchronous look-up."""

    @property
    def bytes(self) -> int:
        """Its size in memory."""

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn, if it is in the cache."""

    def forget(self, owner: Owner, turn_id: str) -> None:
        """Remove the turn from the cache."""

    def close(self) -> None:
        """The connection is over: its bytes no longer count."""


async def _no_report(owner: Owner, turn_id: str) -> None:
    """Where nothing is compared."""


@dataclass(slots=True)
class Services:
    """The one value that `app.py` gives to all APIs."""

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
    # The names of the hosted tools that are set up and that a key with these scopes may use.
    set_up_tools: Callable[[Container[str]], frozenset[str]] = lambda scopes: frozenset()
    # Where unstored turns of an account can be continued by name for an hour; None: that is switched off.
    open_threads: Callable[[Account], Turns] | None = None
    limits: EdgeLimits = field(default_factory=EdgeLimits)
    # What this process holds, and may hold.
    memory: Memory = field(default_factory=Memory)
    # The items that messages became, for clients of other APIs that resend their history.
    memo: Memo[tuple[Raw, ...]] = field(default_factory=lambda: Memo(0))
    # What is known of the reuse of a turn's prompt, in all workers of this parent process.
    find_report: Callable[[Owner, str], Awaitable[CacheReport | None]] = _no_report
    # Called with the transport, the code and the id of a request that was refused before it became a turn.
    note_refusal: Callable[[str, str, str], None] = lambda transport, code, request_id: None
    # Called with the method, the route and the status of every HTTP request.
    count_request: Callable[[str, str, int], None] = lambda method, route, status: None
    # Where there is an access log.
    write_access: Callable[[AccessLine], None] | None = None
