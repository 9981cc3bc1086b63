"""The long version of the search for traces: two thousand turns, none of which was to be stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.canaries import find_traces, leave_traces, read_metrics
from tests.scenarios.test_canaries import make_key
from tests.support import served_process

TURNS = 2_000


@pytest.mark.reliability
@pytest.mark.timeout(900)
async def test_two_thousand_unstored_turns_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    secret = await make_key(store, capsys)
    with served_process("--store", store, "--log-level", "debug", cwd=tmp_path) as served:
        await leave_traces(served, secret, TURNS)
        metrics = await read_metrics(served, secret)
        assert served.stop() == 0
        assert find_traces(tmp_path, served.printed, metrics, secret) == []
