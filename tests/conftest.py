"""What many rooms' tests share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from segue.dialects.family import TokenDialect
    from segue.vocabularies.vocabulary import Vocabulary
    from tests.pgbouncer import Pooler
    from tests.postgres import PostgresServer

pytest_plugins = ["tests.watch"]

# Where a test does not say how many examples it needs. `make test-properties` has twenty times as many. No example has
# a time limit: how long one takes says how busy the machine is.
settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("long", max_examples=1_000, deadline=None)
settings.load_profile("quick")

# A segue.toml in the working folder is the developer's own: no test reads it.
os.environ["SEGUE_CONFIG"] = "none"

T = TypeVar("T")


@pytest.fixture(scope="session", autouse=True)
def model_files_are_read_once() -> Iterator[None]:
    """A GGUF is read once in each process of the tests, not with each of a thousand servers: that was most of what
    such a server cost. A file that has changed is read again."""
    from segue.server import models
    from segue.vocabularies import chat_template, load

    with pytest.MonkeyPatch.context() as patch:
        read_head = read_once(models.read_gguf)
        patch.setattr(models, "read_gguf", read_head)
        patch.setattr(chat_template, "read_gguf", read_head)
        patch.setattr(load, "vocabulary_from_gguf", read_once(load.vocabulary_from_gguf))
        patch.setattr(models, "dialect_for", found_once(models.dialect_for))
        yield


def found_once(dialect_for: Callable[..., TokenDialect]) -> Callable[..., TokenDialect]:
    """Which dialect a GGUF wants is tried out once: a dialect has no state, and belongs to its vocabulary."""
    found = cache(dialect_for)

    @wraps(dialect_for)
    def remembered(
        name: str, path: Path, vocabulary: Vocabulary, text: str, values: Mapping[str, object]
    ) -> TokenDialect:
        if path.suffix != ".gguf" or values:
            return dialect_for(name, path, vocabulary, text, values)
        return found(name, path, vocabulary, text)

    return remembered


def read_once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    @cache
    def read_version(path: Path, changed_ns: int, size: int) -> T:
        return read(path)

    @wraps(read)
    def remembered(path: Path) -> T:
        try:
            version = path.stat()
        except OSError:
            return read(path)
        return read_version(path, version.st_mtime_ns, version.st_size)

    return remembered


@pytest.fixture(scope="session", autouse=True)
def uvicorn_stops_soon() -> Iterator[None]:
    """uvicorn looks ten times a second whether it shall stop, and again whether its connections have ended: a quarter
    of a second for each server. Here it looks two hundred times."""
    import uvicorn.server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", ImpatientAsyncio())
        yield


class ImpatientAsyncio:
    """The module asyncio, but for the length of a sleep."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)


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
