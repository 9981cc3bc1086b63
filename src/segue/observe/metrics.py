"""How much, how often, how long? Prometheus metrics, fed after each turn from its tally.

Nothing is counted while a turn runs: its tally is read once it has ended, while the next turn runs already. Labels
never carry ids or content. Every metric is declared here and listed in docs/observability.md.
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

# Gauges that are read when the page is. Each worker has its own part of them, so that they are added up over workers;
# of all other gauges the largest value counts.
WATCHED = {
    "segue_workers": "Worker processes counted in this page",
    "segue_connections": "Open WebSocket connections",
    "segue_state_bytes": "Bytes of history and caches in memory",
    "segue_unread_bytes": "Bytes sent to WebSocket clients that they have not read yet",
    "segue_ledger_backlog": "Ended turns whose usage is not written to the store yet",
}


class Metrics:
    """The metrics of this process."""

    def __init__(self) -> None:
        # The creation time of each counter is not needed, and doubles the page.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._turns = counter(
            "segue_turns_total", "Turns that ended, and refused requests", ("transport", "outcome")
        )
        self._bytes = counter(
            "segue_bytes_received_total", "Bytes of request bodies, after decompression"
        )
        self._items = counter("segue_items_validated_total", "Input items decoded and validated")
        self._tools = counter("segue_tool_decodes_total", "Lists of tools decoded")
        self._tokenized = counter("segue_tokens_tokenized_total", "Prompt tokens made from text")
        self._reused = counter(
            "segue_tokens_reused_total", "Prompt tokens reused from earlier turns"
        )
        self._called = counter("segue_tool_calls_total", "Calls of server-side tools")
        self._guarded = counter(
            "segue_guard_chars_checked_total", "Characters of input checked by guards"
        )
        self._watched = counter(
            "segue_guard_chars_watched_total", "Characters of output checked by guards"
        )
        self._told = counter(
            "segue_media_told_total", "Images and audio described in words to a text-only model"
        )
        self._lookups = counter(
            "segue_state_lookups_total",
            "Lookups of parent turns by where they were found",
            ("where",),
        )
        self._stages = Histogram(
            "segue_turn_stage_seconds",
            "Duration of each stage of a turn",
            ("stage",),
            registry=registry,
            buckets=BUCKETS,
        )
        self._engine_up = Gauge(
            "segue_engine_up",
            "1 if the engine replica answers, else 0",
            ("replica",),
            registry=registry,
        )
        self._limits = Gauge(
            "segue_limit", "Configured limits, by setting", ("setting",), registry=registry
        )
        self.watch("segue_workers", lambda: 1)

    def note_limits(self, settings: Settings) -> None:
        """The limits that the operator has set, so that a gauge can be compared with its limit."""
        for name in LIMITS:
            self._limits.labels(name).set(getattr(settings, name))

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """From now on `read` gives the value of this gauge."""
        Gauge(name, WATCHED[name], registry=self.registry).set_function(read)

    def observe(self, turn: EndedTurn) -> None:
        """Count a turn that ended."""
        tally = turn.tally
        self._turns.labels(turn.transport, turn.entry.status).inc()
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
        """Whether an engine replica answered its last health check."""
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
                is_summed = family.type != "gauge" or family.name in WATCHED
                for sample in family.samples:
                    key = (sample.name, tuple(sample.labels.items()))
                    if key not in known:
                        known[key] = sample.value
                    elif is_summed:
                        known[key] += sample.value
                    else:
                        known[key] = max(known[key], sample.value)
        for name, family in families.items():
            for (sample_name, labels), value in values[name].items():
                family.add_sample(sample_name, dict(labels), value)
            yield family


def together(pages: Sequence[bytes]) -> bytes:
    """The pages of several workers as one: counters and watched gauges are summed, other gauges have their maximum."""
    if len(pages) == 1:
        return pages[0]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together(pages))
    return generate_latest(registry)
