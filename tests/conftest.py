"""What many rooms' tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real server, started when a test first asks for it."""
    from tests.postgres import running_postgres

    with running_postgres() as server:
        yield server
