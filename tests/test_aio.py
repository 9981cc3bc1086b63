"""A background loop that fails is heard of at once, and does not stay away; a vital one ends its process."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest

from segue import aio as background
from segue.aio import PAUSE_S_MAX, RAN_WELL_S, failures, in_background, run_forever, spawn
from segue.observe.metrics import Metrics
from tests.scenarios.test_workers import children, flags
from tests.support import MODEL, WAIT_S, fetch, metric, served_process, until


class Clock:
    """Time that passes only when a loop runs or waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def read(self) -> float:
        return self.now

    async def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def counted_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(failures):
        monkeypatch.delitem(failures, name)


async def test_loop_that_fails_is_named_in_the_log_restarted_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, metrics, runs = Clock(), Metrics(), 0

    async def sweep() -> None:
        nonlocal runs
        runs += 1
        if runs == 9:
            clock.now += RAN_WELL_S + 1
        if runs < 11:
            raise ZeroDivisionError(f"run {runs}")

    assert "segue_background_failures_total{" not in metrics.write().decode()
    await run_forever("sweep", sweep, clock=clock.read, wait=clock.wait)

    assert clock.waits == [1, 2, 4, 8, 16, 32, PAUSE_S_MAX, PAUSE_S_MAX, 1, 2]
    assert failures == {"sweep": 10}
    first, *_ = caplog.records
    assert first.getMessage() == "background loop sweep failed; starting it again in 1 s"
    assert first.levelno == logging.ERROR
    assert "ZeroDivisionError: run 1" in caplog.text
    for _ in range(2):
        assert 'failures_total{loop="sweep"} 10.0' in metrics.write().decode(), "counted once"


async def test_error_is_in_the_log_before_the_loop_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async with in_background("sweep", fail):
        await until(lambda: "background loop sweep failed" in caplog.text)
        assert failures["sweep"] == 1


async def test_loop_ended_by_a_cancel_that_was_not_its_own_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, runs = Clock(), 0

    async def loop() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    await run_forever("drains", loop, clock=clock.read, wait=clock.wait)
    assert (runs, failures["drains"]) == (2, 1)


async def test_loop_that_fails_while_it_is_stopped_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started = asyncio.Event()

    async def loop() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    async with asyncio.timeout(5), in_background("sweep", loop):
        await started.wait()
    assert "background loop sweep failed while it was stopped" in caplog.text


async def test_vital_loop_gives_up_and_is_tried_until_the_process_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, given_up, runs = Clock(), 0, 0

    async def beat() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ZeroDivisionError

    def give_up() -> None:
        nonlocal given_up
        given_up += 1

    await run_forever("lease_heartbeat", beat, give_up, clock=clock.read, wait=clock.wait)
    assert (given_up, runs) == (2, 3)
    assert {record.levelno for record in caplog.records} == {logging.CRITICAL}


async def test_task_that_fails_is_logged_at_once_and_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks: set[asyncio.Task[None]] = set()
    is_over = asyncio.Event()

    async def fail() -> None:
        raise ZeroDivisionError

    spawn(fail(), tasks)
    spawn(asyncio.sleep(3_600), tasks)
    spawn(_set_later(is_over), tasks)
    await is_over.wait()
    await until(lambda: len(tasks) == 1)
    assert re.search(r"background task \S+fail failed", caplog.text)
    await background.cancel_all(tasks)


async def _set_later(event: asyncio.Event) -> None:
    event.set()


# What an operator's own module can do: a guard that lets everything pass, and a mistake in a loop of the server.
FAULTY = """
from contextlib import suppress
from pathlib import Path
from segue.memory.budget import Memory
from segue.seams.guard import Verdict

class OpenGuard:
    name = "open"

    async def check(self, texts):
        return Verdict()

    async def watch(self, text):
        return Verdict()

def guard(settings):
    enforce = Memory.enforce

    def failing(memory):
        enforce(memory)
        with suppress(FileNotFoundError):
            Path("fault").unlink()
            raise ZeroDivisionError("a mistake")

    Memory.enforce = failing
    return OpenGuard()
"""


@pytest.mark.timeout(60)
def test_process_whose_vital_loop_fails_drains_and_exits_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    with served_process("--guard", "faulty:guard", cwd=tmp_path) as served:
        (tmp_path / "fault").touch()
        assert served.process.wait(30) == 1
    printed = "".join(served.printed)
    assert re.search("CRITICAL .*background loop memory_limit failed", printed)
    assert "ZeroDivisionError: a mistake" in printed
    assert printed.rstrip().endswith("stopped")


@pytest.mark.timeout(100)
async def test_worker_whose_vital_loop_fails_is_followed_by_another(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    with served_process(*flags(tmp_path, "--guard", "faulty:guard"), cwd=tmp_path) as served:
        before = set(children(served))
        (tmp_path / "fault").touch()
        await until(lambda: len(set(children(served)) - before) == 1)
        await until(lambda: len(set(children(served)) & before) == 1)
        async with asyncio.timeout(WAIT_S):
            while await metric(served, "segue_workers") != 2:
                pass
        for _ in range(20):
            answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
            assert answer.status == 200
        assert served.stop() == 0
    assert re.search("worker . exited with status 1, restarting", "".join(served.printed))
