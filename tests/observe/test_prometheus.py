"""Does a real Prometheus take our alerts, read a real server, and find something for every panel of the board?

`make test-prometheus` puts one under `.cache/prometheus`; `SEGUE_TEST_PROMETHEUS` names another folder with
`prometheus` and `promtool`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.haproxy import free_port
from tests.observe.boards import ALERTS, CONFIG, alerts, operated, shown, some_turns
from tests.support import Served

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("SEGUE_TEST_PROMETHEUS") or ROOT / ".cache" / "prometheus")
READ_S = "200ms"
WAIT_S = 30


def promtool(*words: object) -> str:
    done = subprocess.run(
        [FOLDER / "promtool", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings_for(served: Served, key: Path) -> str:
    """What we ship, with the address of this test."""
    text = CONFIG.read_text().replace("/etc/prometheus/segue.key", str(key))
    text = text.replace("127.0.0.1:8080", f"127.0.0.1:{served.port}").replace("15s", READ_S)
    return text.replace("- alerts.yml", f"- {ALERTS}")


@contextmanager
def prometheus(config: Path, folder: Path) -> Iterator[str]:
    """A Prometheus that reads by this file; the URL of its API."""
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}"]
    command = [FOLDER / "prometheus", *flags, f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.terminate()
        process.wait(WAIT_S)


async def ask(session: aiohttp.ClientSession, url: str, **fields: str) -> Any:
    async with session.get(url, params=fields) as answer:
        body = await answer.json()
    assert body["status"] == "success", body
    return body["data"]


async def found(session: aiohttp.ClientSession, api: str, expression: str) -> bool:
    try:
        return bool((await ask(session, f"{api}/query", query=expression))["result"])
    except aiohttp.ClientError:
        # It is not up yet.
        return False


# The rules that alerts are written with.
RECORDED = 5


def test_alerts_fire_when_they_should() -> None:
    assert f"{len(alerts()) + RECORDED} rules found" in promtool("check", "rules", ALERTS)
    promtool("test", "rules", Path(__file__).with_name("alerts_test.yml"))


async def test_prometheus_reads_a_server_and_finds_something_for_every_panel(
    tmp_path: Path,
) -> None:
    key, config = tmp_path / "key", tmp_path / "prometheus.yml"
    key.write_text("none")
    async with operated() as (served, fake), aiohttp.ClientSession() as session:
        config.write_text(settings_for(served, key))
        promtool("check", "config", config)
        await some_turns(served, fake)
        with prometheus(config, tmp_path) as api:
            # What is waited for is no event.
            while not await found(session, api, 'count_over_time(up{job="segue"}[10s]) > 2'):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await some_turns(served, fake)
            wanted = list(shown())
            while wanted:
                wanted = [one for one in wanted if not await found(session, api, one)]
                await asyncio.sleep(0.1)
            groups = (await ask(session, f"{api}/rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == {
        rule["alert"] for rule in alerts()
    }
