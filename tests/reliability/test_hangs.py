"""Who is taken for hung? A worker whose loop stands still; not one whose parent stood still, as a paused machine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.scenarios.test_workers import children, flags, post
from tests.support import served_process

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(100)]
HANG_S = 2


async def test_parent_that_stood_still_kills_no_worker(tmp_path: Path) -> None:
    with served_process(*flags(tmp_path, "--hang-s", str(HANG_S)), cwd=tmp_path) as served:
        workers = children(served)
        for processes in ([served.process.pid], [*workers, served.process.pid]):
            for one in processes:
                os.kill(one, signal.SIGSTOP)
            await asyncio.sleep(2 * HANG_S)
            for one in reversed(processes):
                os.kill(one, signal.SIGCONT)
            await asyncio.sleep(2 * HANG_S)
            assert children(served) == workers
            await post(served, input="x")
        assert served.stop() == 0
    assert "hangs" not in "".join(served.printed)
