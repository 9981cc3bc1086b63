"""How fast is a replica, how long does a job take there, and how much has it worked lately?

Learnt from the jobs of this process. Times are in seconds of any clock that does not go back.
"""

from __future__ import annotations

from math import exp2

from segue.replicas.placement import PREFILL_TOKENS_S

# Work counts half after this long.
HALF_LIFE_S = 120.0
# How much a new measurement counts. A prompt that is read slowly had mostly waited for others, so fast ones count more.
WEIGHT, FASTER_WEIGHT, SLOWER_WEIGHT = 0.2, 0.5, 0.05
# Of fewer tokens the time to the first one says nothing of reading.
READ_TOKENS_MIN = 256
# A delay that was measured so long ago counts half.
DELAY_HALF_LIFE_S = 5.0


class Work:
    """Something that is added up and decays."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0

    def at(self, now: float) -> float:
        """What is left of it."""
        return self._level * exp2(-max(0.0, now - self._at) / HALF_LIFE_S)

    def add(self, amount: float, now: float) -> None:
        self._level, self._at = self.at(now) + amount, now


class Pace:
    """What was measured of one replica."""

    def __init__(self) -> None:
        # Tokens that it has computed, or is about to.
        self.work = Work()
        # None until measured.
        self.prefill_tokens_s: float | None = None
        self.service_s: float | None = None
        self._delay_s = 0.0
        self._delay_at = 0.0

    def delay_s(self, now: float) -> float:
        """How long the first token takes beside the reading of the prompt."""
        return self._delay_s * exp2(-max(0.0, now - self._delay_at) / DELAY_HALF_LIFE_S)

    def note_first_token(self, tokens: int, took_s: float, now: float) -> None:
        """It has read so many tokens, and the first token came after so long."""
        if tokens >= READ_TOKENS_MIN and took_s > 0:
            rate, known = tokens / took_s, self.prefill_tokens_s
            weight = FASTER_WEIGHT if known is None or rate > known else SLOWER_WEIGHT
            self.prefill_tokens_s = rate if known is None else known + weight * (rate - known)
        late_s = max(0.0, took_s - tokens / (self.prefill_tokens_s or PREFILL_TOKENS_S))
        self._delay_s = _mean(self.delay_s(now), late_s)
        self._delay_at = now

    def note_end(self, held_s: float) -> None:
        """A job has held a slot for so long."""
        self.service_s = held_s if self.service_s is None else _mean(self.service_s, held_s)


def _mean(known: float, new: float) -> float:
    return known + WEIGHT * (new - known)
