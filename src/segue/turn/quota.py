"""How much may one key still use of this process? Requests and tokens a minute, connections, turns at once.

A bucket holds a minute's worth and fills up steadily, so that a burst is fine and a flood is not. What a turn costs in
tokens is known when it is over: then the bucket pays, and may be in debt; whoever is in debt waits. Every refusal says
for how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from segue.errors import TooMany

MINUTE_S = 60.0
# How soon a turn or a connection of the same key may have ended.
CROWDED_S = 1.0


class KeyLimits(Struct, frozen=True):
    """What one key may use of each process; 0: no limit of its own."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    connections_max: int = 0
    lanes_max: int = 0
    state_bytes_max: int = 0


class Bucket:
    """A minute's worth of something; nothing is counted without a limit."""

    __slots__ = ("_clock", "_filled_at", "_level", "_per_min")

    def __init__(self, per_min: int, clock: Callable[[], float]) -> None:
        self._per_min = per_min
        self._clock = clock
        self._level = float(per_min)
        self._filled_at = clock()

    @property
    def is_full(self) -> bool:
        """Whether nothing was taken for a while."""
        self._fill()
        return self._level >= self._per_min

    def wait_s(self, amount: float) -> float:
        """How long until this much is there; 0 if it is there now."""
        if not self._per_min:
            return 0.0
        self._fill()
        return max(0.0, (amount - self._level) * MINUTE_S / self._per_min)

    def take(self, amount: float) -> None:
        """Take it, into debt if need be."""
        if self._per_min:
            self._fill()
            self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled_at) * self._per_min / MINUTE_S
        self._level = min(float(self._per_min), self._level + gained)
        self._filled_at = now


class Quota:
    """What one key uses of this process now, and the end of it."""

    __slots__ = ("_requests", "_tokens", "connections", "in_flight", "limits")

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.connections = 0
        self.in_flight = 0
        self._requests = Bucket(limits.requests_per_min, clock)
        self._tokens = Bucket(limits.tokens_per_min, clock)

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost if it were forgotten."""
        is_busy = self.connections or self.in_flight
        return not is_busy and self._requests.is_full and self._tokens.is_full

    def ask(self) -> None:
        """Count a request for a turn, or refuse it."""
        for bucket, amount, what, most in (
            (self._requests, 1.0, "requests", self.limits.requests_per_min),
            (self._tokens, 0.0, "tokens", self.limits.tokens_per_min),
        ):
            if wait_s := bucket.wait_s(amount):
                raise TooMany(
                    f"This key may use {most} {what} a minute. Please retry in {wait_s:.1f} s.",
                    wait_s=wait_s,
                )
        self._requests.take(1.0)

    def hold(self) -> None:
        """Take a place for a turn, or refuse it; `release` gives the place back."""
        most = self.limits.lanes_max
        if most and self.in_flight >= most:
            raise TooMany(f"This key may run {most} turns at once.", wait_s=CROWDED_S)
        self.in_flight += 1

    def release(self, tokens: int = 0) -> None:
        """A turn is over, and has used this many tokens."""
        self.in_flight -= 1
        self._tokens.take(tokens)

    def check_connections(self) -> None:
        """Refuse one connection more than the key may have."""
        most = self.limits.connections_max
        if most and self.connections >= most:
            raise TooMany(f"This key may have {most} connections.", wait_s=CROWDED_S)


def unlimited() -> Quota:
    """A quota without limits, for requests that are nobody's."""
    return Quota(KeyLimits())
