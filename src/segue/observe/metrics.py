"""How much, how often, how long? Prometheus metrics, fed after each turn from its tally.

Nothing is counted while a turn runs: its tally is read once it has ended, while the next turn runs already. Labels
never carry ids or content. Every metric is declared here and listed in docs/observability.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import add

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from segue import __version__
from segue.aio import failures
from segue.observe.replicas import ReplicaCounts
from segue.observe.turn_counts import TurnCounts
from segue.process.afterwards import EndedTurn
from segue.seams.engine_status import EngineStatus

# Below a millisecond no client notices; above a few seconds a worker is replaced.
LAG_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
# How often it is measured how late the event loop is.
LAG_EVERY_S = 0.25

# Methods that have a label of their own; a client may send any.
METHODS = frozenset(("GET", "HEAD", "POST", "DELETE", "OPTIONS"))
# What containers use.
SANDBOXES = {
    "container_seconds": "Seconds that containers have lived",
    "sandbox_cpu_seconds": "CPU seconds used in containers",
    "sandbox_sent_bytes": "Bytes from containers to the network",
    "sandbox_received_bytes": "Bytes from the network to containers",
}
# Gauges that are read when the page is. Each worker has its own part of them, so that they are added up over workers;
# of all other gauges the largest value counts.
WATCHED = {
    "segue_workers": "Worker processes counted in this page",
    "segue_connections": "Open WebSocket connections",
    "segue_tasks": "Tasks of the event loop",
    "segue_state_bytes": "Bytes of history, caches, requests and answers in memory",
    "segue_unread_bytes": "Bytes sent to clients that they have not read yet",
    "segue_ledger_backlog": "Ended turns whose usage is not written to the store yet",
}
ENGINE_WAITING, ENGINE_RUNNING = "segue_engine_waiting", "segue_engine_running"
MEMORY = "segue_memory_bytes"
# Of Prometheus' own metrics of a process.
PROCESS_SUMMED = (
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
)
SUMMED = {*WATCHED, ENGINE_WAITING, ENGINE_RUNNING, MEMORY, *PROCESS_SUMMED}


class Metrics:
    """The metrics of this process."""

    def __init__(self) -> None:
        # The creation time of each counter is not needed, and doubles the page.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = CollectorRegistry()
        # To look a counter up by its labels takes longer than to count: what each request counts is looked up once.
        about = "HTTP requests, and upgrades to WebSocket, by route and status"
        labels = ("method", "route", "status")
        self._requests = cache(self._counter("http_requests", about, labels).labels)
        about = "API keys that have used most of a budget (warning), and turns that were refused for one"
        self._budgets = self._counter("budget_events", about, ("event", "period"))
        name, about = "segue_loop_lag_seconds", "How late the event loop runs what is due"
        self._lag = prometheus.Histogram(name, about, registry=self.registry, buckets=LAG_BUCKETS)
        self._lags_s: deque[float] = deque(maxlen=int(60 / LAG_EVERY_S))
        self._replaced = self._counter("workers_replaced", "Workers replaced because they hung")
        about = "Errors of background loops, which were started again"
        self._failures = self._counter("background_failures", about, ("loop",))
        self._failures_counted: dict[str, int] = {}
        self._engine_up = self._gauge("segue_engine_up", "1 if the replica answers", ("replica",))
        about = "Requests that wait for an engine replica"
        self._engine_waiting = self._gauge(ENGINE_WAITING, about, ("replica",))
        about = "Requests that run at an engine replica"
        self._engine_running = self._gauge(ENGINE_RUNNING, about, ("replica",))
        about = "Jobs sent to an engine replica, by why it was chosen"
        self._choices = self._counter("engine_choices", about, ("replica", "reason"))
        about = "Jobs whose token counts, as the engine replica reports them, cannot be true"
        self._corrected = self._counter("engine_counts_corrected", about, ("replica",))
        about = "Answers of an engine replica that were stopped at the limit of their request"
        self._cut = self._counter("engine_answers_cut", about, ("replica",))
        about = "Jobs for a replica that keeps conversations, by how their prompts came"
        self._kept = self._counter("engine_session_turns", about, ("replica", "how"))
        about = "Conversations that a replica did not know as they were asked for, by reason"
        self._refused = self._counter("engine_session_refusals", about, ("replica", "reason"))
        about = "Lookups of engine replicas that failed (engine_discovery)"
        self._lookups_failed = self._counter("engine_discovery_failures", about, ("model",))
        about = "1 if the operator has taken the replica out of service"
        self._engine_drained = self._gauge("segue_engine_drained", about, ("replica",))
        self.replicas, self.turns = ReplicaCounts(), TurnCounts()
        self.registry.register(self.replicas)
        self.registry.register(self.turns)
        self._gauge("segue_build_info", "1, with the version", ("version",)).labels(
            __version__
        ).set(1)
        # Memory, processor time, open files and start time of this process.
        prometheus.ProcessCollector(registry=self.registry)
        self._memory = self._gauge(MEMORY, "What segue_state_bytes consists of", ("part",))
        self._containers = self._gauge("segue_containers", "Containers", ("isolation", "limits_by"))
        self._sandboxes = [self._counter(name, text) for name, text in SANDBOXES.items()]
        self._limits = self._gauge("segue_limit", "Configured limits", ("setting",))
        self.watch("segue_workers", lambda: 1)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"segue_{name}_total", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def note_limits(self, limits: Mapping[str, float]) -> None:
        """The limits that the operator has set, by setting, so that a gauge can be compared with its limit."""
        for name, limit in limits.items():
            self._limits.labels(name).set(limit)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """From now on `read` gives the value of this gauge."""
        self._gauge(name, WATCHED[name]).set_function(read)

    def note_replaced(self, count: int) -> None:
        """How often the worker in this place has been replaced because it hung."""
        self._replaced.inc(count)

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            lag_s = max(0.0, loop.time() - due_at)
            self._lag.observe(lag_s)
            self._lags_s.append(lag_s)

    @property
    def lag_ms(self) -> float:
        """How late the event loop was at most in the last minute."""
        return 1000 * max(self._lags_s, default=0.0)

    def watch_parts(self, parts: Mapping[str, Callable[[], int]]) -> None:
        """From now on these give what each part of the memory holds."""
        for part, read in parts.items():
            self._memory.labels(part).set_function(read)

    def observe(self, turn: EndedTurn) -> None:
        """Count a turn that ended."""
        self.replicas.observe(turn)
        self.turns.observe(turn)

    def note_refusal(self, transport: str, code: str, request_id: str) -> None:
        """Count a request that was refused before it became a turn."""
        self.turns.note_refusal(transport, code)

    def count_request(self, method: str, route: str, status: int) -> None:
        """Count an HTTP request; `route` is empty for a path that we do not know."""
        method = method if method in METHODS else "other"
        self._requests(method, route or "other", status).inc()

    def note_budget(self, event: str, period: str) -> None:
        """A key has used most of its budget of a period, or was refused for it."""
        self._budgets.labels(event, period).inc()

    def note_engines(self, engines: Sequence[EngineStatus]) -> None:
        """Whether each replica answers, and how many jobs run there and wait for it. Models may share one."""
        gauges = (self._engine_up, self._engine_running, self._engine_waiting, self._engine_drained)
        for gauge in gauges:
            gauge.clear()
        self.replicas.keep_only({(engine.model, engine.name) for engine in engines})
        for engine in engines:
            self._engine_up.labels(engine.name).set(engine.is_up)
            self._engine_drained.labels(engine.name).set(engine.is_drained)
            if engine.running is not None and engine.waiting is not None:
                self._engine_running.labels(engine.name).inc(engine.running)
                self._engine_waiting.labels(engine.name).inc(engine.waiting)

    def note_sandboxes(self, alive: int, kind: tuple[str, str], used: Sequence[float]) -> None:
        """Containers of this machine by isolation and what holds their limits; what they have used since last time."""
        self._containers.labels(*kind).set(alive)
        for counter, amount in zip(self._sandboxes, used, strict=True):
            counter.inc(amount)

    def note_lookup_failure(self, model: str) -> None:
        """Count a lookup of this model's replicas that failed."""
        self._lookups_failed.labels(model).inc()

    def count_jobs(
        self, replica: str, choices: Mapping[str, int], corrected: Mapping[str, int]
    ) -> None:
        """Jobs of a replica since this was last counted: by why it was chosen, and by what was not believed."""
        for reason, count in choices.items():
            self._choices.labels(replica, reason).inc(count)
        for counter, what in ((self._corrected, "counts"), (self._cut, "length")):
            if corrected.get(what):
                counter.labels(replica).inc(corrected[what])

    def count_sessions(
        self, replica: str, turns: Mapping[str, int], refusals: Mapping[str, int]
    ) -> None:
        """Jobs of a replica that keeps conversations, since this was last counted, and what it refused."""
        for counter, counts in ((self._kept, turns), (self._refused, refusals)):
            for label, count in counts.items():
                counter.labels(replica, label).inc(count)

    def write(self) -> bytes:
        """The page that Prometheus reads."""
        for name, count in failures.items():
            self._failures.labels(name).inc(count - self._failures_counted.get(name, 0))
        self._failures_counted = dict(failures)
        return prometheus.generate_latest(self.registry)


class _Together(Collector):
    """The pages of several workers as one."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        pages = (text_string_to_metric_families(page.decode()) for page in self._pages)
        for family in chain.from_iterable(pages):
            name = family.name
            families.setdefault(name, Metric(name, family.documentation, family.type))
            known = values.setdefault(name, {})
            join = add if family.type != "gauge" or name in SUMMED else max
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                known[key] = join(known[key], sample.value) if key in known else sample.value
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
    return prometheus.generate_latest(registry)
