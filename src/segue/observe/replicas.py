"""What did each replica of an engine do, and how fast? What of the prompts that it was expected to have had it lost?

Fed after each turn, like all metrics. Replicas that are no longer listed are forgotten, so that pods which come and go
leave nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from segue.process.afterwards import EndedTurn

# A turn may run at a replica that is removed before anybody looks: there are not many of those.
REPLICAS_MAX = 4_096

# Of fewer tokens the time to the first one says nothing of reading.
READ_TOKENS_MIN = 256
# How much a new measurement counts. A prompt that is read slowly mostly waited for others, so fast ones count more.
FASTER_WEIGHT, SLOWER_WEIGHT = 0.5, 0.05

# The name of a model and of its replica.
ReplicaKey = tuple[str, str]


class ReplicaTotals(Struct):
    """Sums over all turns that a replica has served."""

    turns: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    # By reason (docs/cache.md): turns, and tokens that were computed again.
    lost: dict[str, tuple[int, int]] = {}
    # Prompt tokens that it computes in a second; None until measured.
    prefill_tokens_s: float | None = None

    def note_first_token(self, tokens: int, took_s: float) -> None:
        """It has computed so many tokens, and the first token came after so long."""
        if tokens >= READ_TOKENS_MIN and took_s > 0:
            rate, known = tokens / took_s, self.prefill_tokens_s or 0.0
            weight = FASTER_WEIGHT if rate > known else SLOWER_WEIGHT
            self.prefill_tokens_s = known + weight * (rate - known) if known else rate


# Fields of the totals; each is a counter, such as `segue_engine_cached_tokens_total`.
COUNTED = {
    "turns": "Turns that ended, by the replica that served them last",
    "input_tokens": "Prompt tokens given to the replica, cached ones included",
    "cached_tokens": "Prompt tokens that the replica had in its prefix cache, as it says",
    "output_tokens": "Tokens written by the replica",
}
SURPRISES = "Turns whose prefix the replica was expected to have and computed again, by reason"
LOST = "Prompt tokens that the replica was expected to have and computed again, by reason"


class ReplicaCounts(Collector):
    """The totals of all replicas, and their counters."""

    def __init__(self) -> None:
        self.totals: dict[ReplicaKey, ReplicaTotals] = {}

    def observe(self, turn: EndedTurn) -> None:
        """Count a turn that ended."""
        entry, tally = turn.entry, turn.tally
        replica = tally.started.route
        if replica is None or len(self.totals) > REPLICAS_MAX:
            return
        totals = self.totals.setdefault((entry.model, replica), ReplicaTotals())
        totals.turns += 1
        totals.input_tokens += entry.input_tokens
        totals.cached_tokens += entry.cached_tokens
        totals.output_tokens += entry.output_tokens
        firsts = [span for span in tally.spans if span.stage == "first_token"]
        if len(firsts) == 1 and tally.started.cached_tokens is not None:
            # Of one request to the engine: what several have computed cannot be separated here.
            (first,) = firsts
            computed = entry.input_tokens - entry.cached_tokens
            totals.note_first_token(computed, first.ended - first.began)
        if tally.lost is not None and tally.lost[0].startswith("engine_"):
            reason, tokens = tally.lost
            turns, sum_tokens = totals.lost.get(reason, (0, 0))
            totals.lost[reason] = (turns + 1, sum_tokens + tokens)

    def keep_only(self, listed: Collection[ReplicaKey]) -> None:
        """Forget all others."""
        for key in self.totals.keys() - set(listed):
            del self.totals[key]

    def collect(self) -> Iterator[CounterMetricFamily]:
        for field, text in COUNTED.items():
            family = CounterMetricFamily(f"segue_engine_{field}", text, labels=("model", "replica"))
            for key, totals in self.totals.items():
                family.add_metric(key, getattr(totals, field))
            yield family
        labels = ("model", "replica", "reason")
        surprises = CounterMetricFamily("segue_engine_surprises", SURPRISES, labels=labels)
        lost = CounterMetricFamily("segue_engine_lost_tokens", LOST, labels=labels)
        for key, totals in self.totals.items():
            for reason, (turns, tokens) in totals.lost.items():
                surprises.add_metric((*key, reason), turns)
                lost.add_metric((*key, reason), tokens)
        yield from (surprises, lost)
