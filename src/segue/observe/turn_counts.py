"""What do the turns of this process add up to?

Plain sums: each turn adds to about thirty of them, and a counter of the library takes a lock and four calls for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from segue.process.afterwards import EndedTurn
from segue.turn.plan import Span

# From a tenth of a millisecond to a minute: rendering what is new, and sampling with a slow model.
BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
BOUNDS = [*map(floatToGoString, (*BUCKETS, float("inf")))]

# Fields of a turn's tally; each is added to a counter, such as `segue_bytes_received_total`.
COUNTED = {
    "bytes_received": "Bytes of requests, after decompression",
    "items_validated": "Input items decoded and validated",
    "tool_decodes": "Lists of tools decoded",
    "tokens_tokenized": "Prompt tokens made from text",
    "tokens_reused": "Prompt tokens reused from earlier turns",
    "prompts_differing": "Prompts unlike the model's own template (with check_rendering)",
    "tool_calls": "Calls of server-side tools",
    "tokens_ahead": "Prompt tokens that the engine read before a tool had ended",
    "tokens_ahead_lost": "Those of them that the tool did not go on from",
    "guard_chars_checked": "Input characters checked by guards",
    "guard_chars_watched": "Output characters checked by guards",
    "media_told": "Images and audio described to a text-only model",
}
# Fields of a turn's usage, counted by the configured name of its model, such as `segue_input_tokens_total`.
USED = {
    "input_tokens": "Prompt tokens, cached ones included",
    "cached_tokens": "Prompt tokens that the engine had in its cache",
    "output_tokens": "Tokens written by the model",
}
ENDINGS = "Turns that ended, and refused requests"
PLACES = "Lookups of parent turns, by place"
LOST = "Prompt tokens that could have been reused and were not, by reason"
STAGES = "Duration of each stage of a turn"


class TurnCounts(Collector):
    """The sums, and their counters."""

    def __init__(self) -> None:
        self._turns: Counter[tuple[str, str]] = Counter()
        self._lookups: Counter[tuple[str]] = Counter()
        self._lost: Counter[tuple[str]] = Counter()
        self._counted = dict.fromkeys(COUNTED, 0)
        # By the model.
        self._used: dict[str, list[int]] = {}
        # By the stage: how often it ended within each bucket, and how long it took in all.
        self._buckets: dict[str, list[int]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def observe(self, turn: EndedTurn) -> None:
        """Count a turn that ended."""
        entry, tally, counted = turn.entry, turn.tally, self._counted
        self._turns[turn.receipt.transport, turn.outcome] += 1
        for field in counted:
            # Most of them are 0 in most turns.
            if count := getattr(tally, field):
                counted[field] += count
        used = self._used.setdefault(entry.model, [0, 0, 0])
        for index, field in enumerate(USED):
            used[index] += getattr(entry, field)
        if tally.found_in is not None:
            self._lookups[tally.found_in,] += 1
        if tally.lost is not None:
            self._lost[tally.lost[0],] += tally.lost[1]
        for stage, seconds in _stage_seconds(tally.spans).items():
            buckets = self._buckets.setdefault(stage, [0] * len(BOUNDS))
            buckets[bisect_left(BUCKETS, seconds)] += 1
            self._seconds[stage] += seconds

    def note_refusal(self, transport: str, code: str) -> None:
        """Count a request that was refused before it became a turn."""
        self._turns[transport, "refused"] += 1
        if code == "previous_response_not_found":
            self._lookups["missing",] += 1

    def collect(self) -> Iterator[Metric]:
        yield _counter("turns", ENDINGS, ("transport", "outcome"), self._turns.items())
        yield _counter("state_lookups", PLACES, ("where",), self._lookups.items())
        yield _counter("reuse_lost_tokens", LOST, ("reason",), self._lost.items())
        for field, text in COUNTED.items():
            yield _counter(field, text, (), [((), self._counted[field])])
        for index, (field, text) in enumerate(USED.items()):
            used = [((model,), counts[index]) for model, counts in self._used.items()]
            yield _counter(field, text, ("model",), used)
        stages = HistogramMetricFamily("segue_turn_stage_seconds", STAGES, labels=("stage",))
        for stage, buckets in self._buckets.items():
            within = zip(BOUNDS, accumulate(buckets), strict=True)
            stages.add_metric((stage,), [*within], self._seconds[stage])
        yield stages


def _counter(
    name: str, text: str, labels: Sequence[str], sums: Iterable[tuple[Sequence[str], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"segue_{name}", text, labels=labels)
    for values, total in sums:
        family.add_metric(values, total)
    return family


def _stage_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """How long each stage took, over all rounds; of the first token, the first round's. Sending takes no time."""
    stages: dict[str, float] = {}
    for stage, began, ended in spans:
        if stage != "send" and not (stage == "first_token" and stage in stages):
            stages[stage] = stages.get(stage, 0.0) + ended - began
    return stages
