"""Do the Grafana board and the alerts name what a server exports? `make test-prometheus` asks a real Prometheus."""

from __future__ import annotations

import itertools
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.observe.boards import (
    ALERTS,
    CONFIG,
    METRIC,
    alerts,
    board,
    operated,
    panels,
    shown,
    some_turns,
)
from tests.support import fetch

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"


async def test_every_metric_of_the_board_and_of_the_alerts_is_there_after_some_turns() -> None:
    async with operated() as (served, fake):
        await some_turns(served, fake)
        page = (await fetch(served, "GET", "/metrics")).body.decode()
    families = list(text_string_to_metric_families(page))
    exported = {sample.name for family in families for sample in family.samples}
    # What counts only faults is there without a value.
    exported |= {f"{family.name}_total" for family in families if family.type == "counter"}
    expressions = [*shown(), *(rule["expr"] for rule in alerts())]
    named = {name for one in expressions for name in METRIC.findall(one)}
    assert named - exported == {"up"}
    assert len(named) > 20


def test_board_can_be_imported() -> None:
    """What Grafana needs: ids, places that do not overlap, a data source that is chosen at import, and expressions."""
    ids = [panel["id"] for panel in board()["panels"]]
    assert len(ids) == len(set(ids))
    variables = {one["name"]: one for one in board()["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["type"] in ("timeseries", "stat")
        assert all(target["expr"] for target in panel["targets"])
        places = [target["refId"] for target in panel["targets"]]
        assert len(places) == len(set(places))
    cells = [
        cell
        for panel in board()["panels"]
        for cell in itertools.product(
            range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"]),
            range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"]),
        )
    ]
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(24))


def test_alerts_say_what_is_wrong_and_stand_in_the_documents() -> None:
    page = PAGE.read_text("utf-8")
    for rule in alerts():
        assert f"`{rule['alert']}`" in page, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
    config = yaml.safe_load(CONFIG.read_text())
    assert config["rule_files"] == [ALERTS.name]
    (job,) = config["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("segue", "/metrics")
