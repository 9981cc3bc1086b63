"""What many rooms' tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.pgbouncer import Pooler
    from tests.postgres import PostgresServer

pytest_plugins = ["tests.watch"]

# Where a test does not say how many examples it needs. `make test-properties` has twenty times as many.
settings.register_profile("quick", max_examples=50)
settings.register_profile("long", max_examples=1_000)
settings.load_profile("quick")

# A segue.toml in the working folder is the developer's own: no test reads it.
os.environ["SEGUE_CONFIG"] = "none"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, started when a test first asks for it."""
    from tests.postgres import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def pooler(postgres: PostgresServer) -> Iterator[Pooler]:
    """A real PgBouncer in front of it, which pools transactions."""
    from tests.pgbouncer import running_pgbouncer

    with running_pgbouncer(postgres) as pooler:
        yield pooler
