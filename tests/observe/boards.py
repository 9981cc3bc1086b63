"""The Grafana board and the alerts that we ship, and turns that make every metric in them appear."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.support import Served, fetch, serving, wire

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "segue.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
# Ours, Prometheus' own of a process, and the one that Prometheus itself makes.
METRIC = re.compile(r"\b(?:segue|process)_\w+|\bup\b")

ASK: dict[str, Any] = {"model": "gpt", "input": "Hello", "store": False}


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """The panels that show something; rows are only titles."""
    return [one for one in board()["panels"] if one["type"] != "row"]


def shown() -> Iterator[str]:
    """The expressions of the board, as Grafana sends them."""
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".*")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@asynccontextmanager
async def operated() -> AsyncIterator[tuple[Served, FakeChat]]:
    """A server in front of a FAKE endpoint."""
    fake = FakeChat(events=[delta(content="Hello."), end(), usage(50, 7, cached=8)])
    async with fake, serving(engine="chat", engine_url=[fake.url], model=["gpt"]) as served:
        yield served, fake


async def some_turns(served: Served, fake: FakeChat) -> None:
    """Turns that end in each way, over each transport."""
    async with wire(served) as socket:
        first = await socket.turn(**ASK)
        parent = first["response"]["id"]
        await socket.turn(**ASK, previous_response_id=parent, instructions="Another one.")
        await socket.turn(**ASK, previous_response_id="resp_none")
    await fetch(served, "POST", "/v1/responses", ASK)
    fake.refuses = (500, "boom")
    await fetch(served, "POST", "/v1/responses", ASK)
    fake.refuses = None
    await fetch(served, "POST", "/v1/responses", ASK | {"stream": True})
