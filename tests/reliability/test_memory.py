"""When clients go, memory goes back to the system: within 64 MiB of before, 30 s later. And a large limit holds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from segue_bench.crowd import connected
from segue_bench.crowd_process import crowd
from segue_bench.server import ServerProcess, serve
from segue_bench.streams import stream_server
from tests.scenarios.test_memory_limit import FILLS, check_limit

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(300)]

STAYS_BYTES_MAX = 64 * 1024 * 1024
BACK_S = 30.0
WRITE_S_MAX = 5
READERS = 200
MIB = 1024 * 1024


def wait(process: ServerProcess, seconds: float, *, connections: int = -1, above: int = -1) -> None:
    """Wait until this many are connected, or until there is less memory than this, but no longer than this."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if connected(process) == connections or (process.memory_bytes() or 0) < above:
            return
        time.sleep(0.2)


def test_memory_of_two_hundred_readers_that_were_cut_goes_back() -> None:
    options = stream_server(100_000, 0, ("--write-s-max", str(WRITE_S_MAX)))
    with serve(options) as process:
        with crowd(process.port, "streams", 5) as streams:
            streams.command("count 1")
        before = process.memory_bytes() or 0
        with crowd(process.port, "stalled", READERS):
            time.sleep(WRITE_S_MAX)
            wait(process, 60, connections=0)
            assert connected(process) == 0
        wait(process, BACK_S, above=before + STAYS_BYTES_MAX)
        assert (process.memory_bytes() or 0) < before + STAYS_BYTES_MAX


@pytest.mark.parametrize("way", FILLS)
async def test_server_holds_no_more_than_a_large_limit(tmp_path: Path, way: str) -> None:
    await check_limit(tmp_path, way, 512 * MIB, 8_000_000)
