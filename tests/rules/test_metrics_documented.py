"""Is every metric in the table of docs/observability.md, with its type and its labels, and is every row real?"""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.metrics import MetricWrapperBase

from segue.observe.metrics import SUMMED, WATCHED, Metrics
from segue.observe.turn_counts import COUNTED
from segue.turn.plan import Tally

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
ROW = re.compile(r"^\| `((?:segue|process)_\w+)` \| (\w+) \| (.+?) \| (.+) \|$", re.MULTILINE)

Metric = tuple[str, str, tuple[str, ...]]


def exported() -> set[Metric]:
    """Name, type and labels of everything that a server exports."""
    metrics = Metrics()
    for name in WATCHED.keys() - {"segue_workers"}:
        metrics.watch(name, lambda: 0)
    collectors = set(metrics.registry._collector_to_names)
    (process,) = [one for one in collectors if isinstance(one, ProcessCollector)]
    own = {metrics.replicas, metrics.turns}
    summed = {
        (family.name + _suffix(family.type), family.type, tuple(family._labelnames))
        for each in own
        for family in each.collect()
    }
    others = collectors - {process, *own}
    return (
        summed
        | {described(one) for one in others}
        | {
            # A counter's family has the name without its suffix.
            (family.samples[0].name, family.type, ())
            for family in process.collect()
        }
    )


def described(metric: object) -> Metric:
    assert isinstance(metric, MetricWrapperBase)
    return metric._name + _suffix(metric._type), metric._type, tuple(metric._labelnames)


def _suffix(kind: str) -> str:
    return "_total" if kind == "counter" else ""


def documented(page: str) -> list[Metric]:
    return [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _ in ROW.findall(page)
    ]


def test_page_lists_every_metric_and_no_other() -> None:
    rows = documented(PAGE.read_text("utf-8"))
    assert len(rows) == len(set(rows))
    assert set(rows) == exported()


def test_gauges_that_are_added_up_over_workers_say_so() -> None:
    rows = ROW.findall(PAGE.read_text("utf-8"))
    assert {name for name, _, _, text in rows if text.endswith("*summed*")} == SUMMED


def test_rule_reads_a_row() -> None:
    row = "| `segue_x_total` | counter | `a`, `b` | something |\n| `segue_y` | gauge | none | more |\n"
    assert documented(row) == [("segue_x_total", "counter", ("a", "b")), ("segue_y", "gauge", ())]


def test_every_counter_of_a_tally_is_a_field_of_it() -> None:
    assert {field for field in COUNTED if not hasattr(Tally(), field)} == set()
