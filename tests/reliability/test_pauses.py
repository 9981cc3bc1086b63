"""Processes that share a PostgreSQL and are killed, paused and cut off: `python -m tests.pauses`, with fewer turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pauses import run
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(400)]


async def test_every_client_hears_one_ending(postgres: PostgresServer, tmp_path: Path) -> None:
    assert await run(400, postgres, tmp_path) == []
