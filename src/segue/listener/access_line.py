"""What is said of a request or a connection in the access log?"""

from __future__ import annotations

from msgspec import Struct


class AccessLine(Struct, frozen=True, omit_defaults=True):
    """A line of the access log: a request that was answered, or the life of a WebSocket. Never content."""

    # `request` (HTTP); `open`, `turn` and `close` (WebSocket).
    event: str
    request_id: str
    method: str
    path: str
    # On a WebSocket: what the same answer would have over HTTP; of `close`, the close code, or 1006 for a loss.
    status: int
    took_s: float
    # Sent to the client, without headers and framing.
    sent_bytes: int = 0
    address: str = ""
    # What a proxy says: `X-Forwarded-For`, which clients can write as well.
    forwarded_for: str = ""
    owner: str = ""
    # The name of the API key.
    key: str = ""
    response_id: str = ""
    # Turns of a connection that was closed.
    turns: int = 0
    # Why it was refused or failed, or why the connection was closed.
    reason: str = ""
