"""How much, how often, how long? Prometheus counters, fed after each turn from its tally.

Nothing is counted while a turn runs: the tally is read once it is over, beside the next turn. Labels never carry ids or
content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from segue.process.afterwards import EndedTurn
from segue.settings import Settings

# From a tenth of a millisecond to a minute: rendering what is new, and sampling with a slow model.
BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)

# Settings that bound what a process uses.
LIMITS = (
    "body_bytes_max",
    "body_s_max",
    "connection_age_s",
    "connection_state_bytes_max",
    "connections_max",
    "connections_state_bytes_max",
    "frames_burst_max",
    "frames_per_s",
    "handshake_s_max",
    "outbox_bytes_max",
    "process_state_bytes_max",
    "render_cache_bytes_max",
    "write_s_max",
)

# Gauges of which each worker has its own part. Of all others one worker's word is everybody's.
SUMMED = frozenset(
    {
        "segue_connections",
        "segue_ledger_backlog",
        "segue_state_bytes",
        "segue_unread_bytes",
        "segue_workers",
    }
)


class Metrics:
    """The counters of this process."""

    def __init__(self) -> None:
        # When a counter was born is nobody's question, and doubles the page.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._turns = counter(
            "segue_turns_total", "Turns that ended, or were refused", ("transport", "outcome")
        )
        self._bytes = counter("segue_bytes_received_total", "Bytes of requests, decompressed")
        self._items = counter("segue_items_validated_total", "Input items decoded and checked")
        self._tools = counter("segue_tool_decodes_total", "Times that tools had to be decoded")
        self._tokenized = counter("segue_tokens_tokenized_total", "Tokens made from text")
        self._reused = counter("segue_tokens_reused_total", "Tokens taken over from earlier turns")
        self._called = counter("segue_tool_calls_total", "Calls answered by our own tools")
        self._guarded = counter("segue_guard_chars_checked_total", "Characters checked by guards")
        self._watched = counter(
            "segue_guard_chars_watched_total", "Characters of answers watched by guards"
        )
        self._told = counter("segue_media_told_total", "Pictures and sounds told in words")
        self._lookups = counter("segue_state_lookups_total", "Where parents were found", ("where",))
        self._stages = Histogram(
            "segue_turn_stage_seconds",
            "Time in each stage of a turn",
            ("stage",),
            registry=registry,
            buckets=BUCKETS,
        )
        self._engine_up = Gauge(
            "segue_engine_up", "Whether an engine answers", ("replica",), registry=registry
        )

        self.watch("segue_workers", "Processes that are counted together", lambda: 1)

    def note_limits(self, settings: Settings) -> None:
        """The limits that the operator has set, so that a gauge can be read against its own."""
        limits = Gauge("segue_limit", "What may be used", ("setting",), registry=self.registry)
        for name in LIMITS:
            limits.labels(name).set(getattr(settings, name))

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def observe(self, settled: EndedTurn) -> None:
        """Count a turn that is over."""
        tally = settled.tally
        self._turns.labels(settled.transport, settled.entry.status).inc()
        self._bytes.inc(tally.bytes_received)
        self._items.inc(tally.items_validated)
        self._tools.inc(tally.tool_decodes)
        self._tokenized.inc(tally.tokens_tokenized)
        self._reused.inc(tally.tokens_reused)
        self._guarded.inc(tally.guard_chars_checked)
        self._watched.inc(tally.guard_chars_watched)
        self._told.inc(tally.media_told)
        self._called.inc(tally.tool_calls)
        if tally.found_in is not None:
            self._lookups.labels(tally.found_in).inc()
        for stage, seconds in tally.stage_s.items():
            self._stages.labels(stage).observe(seconds)

    def note_refusal(self, transport: str, code: str) -> None:
        """Count a request that was refused before it became a turn."""
        self._turns.labels(transport, "refused").inc()
        if code == "previous_response_not_found":
            self._lookups.labels("missing").inc()

    def note_engine(self, replica: str, *, is_up: bool) -> None:
        """Whether an engine answered when it was last asked."""
        self._engine_up.labels(replica).set(is_up)

    def write(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


class _Together(Collector):
    """The pages of several workers as one."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for page in self._pages:
            for family in text_string_to_metric_families(page.decode()):
                families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known = values.setdefault(family.name, {})
                is_summed = family.type != "gauge" or family.name in SUMMED
                for one in family.samples:
                    key = (one.name, tuple(one.labels.items()))
                    if key not in known:
                        known[key] = one.value
                    else:
                        known[key] = (
                            known[key] + one.value if is_summed else max(known[key], one.value)
                        )
        for name, family in families.items():
            for (sample, labels), value in values[name].items():
                family.add_sample(sample, dict(labels), value)
            yield family


def together(pages: Sequence[bytes]) -> bytes:
    """The pages of several workers as one: what is counted is added up, what is the same for all stays."""
    if len(pages) == 1:
        return pages[0]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together(pages))
    return generate_latest(registry)
