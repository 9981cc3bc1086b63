"""How much, how often, how long? Prometheus counters, fed after each turn from its tally (product.md 7).

Nothing is counted while a turn runs: the tally is read once it is over, beside the next turn. Labels never carry ids or
content.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from segue.settings import Settings
from segue.turn.settle import Settled

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

    def note_limits(self, settings: Settings) -> None:
        """The limits that the operator has set, so that a gauge can be read against its own."""
        limits = Gauge("segue_limit", "What may be used", ("setting",), registry=self.registry)
        for name in LIMITS:
            limits.labels(name).set(getattr(settings, name))

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def observe(self, settled: Settled) -> None:
        """Count a turn that is over."""
        tally = settled.tally
        self._turns.labels(settled.transport, settled.entry.status).inc()
        self._bytes.inc(tally.bytes_received)
        self._items.inc(tally.items_validated)
        self._tools.inc(tally.tool_decodes)
        self._tokenized.inc(tally.tokens_tokenized)
        self._reused.inc(tally.tokens_reused)
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
