"""How much may one client send and leave unread, how long may it take, and how many may there be?

The numbers are those of the settings with the same names, if there are such; the others no operator had to change yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """The limits of one client, over HTTP and WebSocket."""

    body_bytes_max: int = (
        32 * 1024 * 1024
    )  # histories with images; to scan more takes 50 ms at once
    body_s_max: float = 120  # a request that trickles in stays in memory for as long
    outbox_bytes_max: int = 512 * 1024  # seconds of tokens; more hides a reader that has stopped
    write_s_max: float = 30  # a stalled reader holds an engine's slot; longer than a radio gap
    handshake_s_max: float = 10  # for a request head, or for an upgrade to be decided and answered
    connections_max: int = 10_000
    # WebSocket connections, and for how long the cache of a lost one is kept.
    websocket: bool = True
    connection_age_s: float = 3600
    reconnect_s: float = 0
    ping_s: float = 20  # proxies cut silent connections, the strictest known after 60 s
    pong_s_max: float = 60  # a peer that uploads a large frame over a thin line is late, not dead
    close_s_max: float = 1  # a live peer answers a close frame within a round trip
    frames_per_s: float = 0  # small frames cost time too; 0: no limit
    frames_burst_max: int = 10_000  # a large message in fragments of 16 KiB comes at once
